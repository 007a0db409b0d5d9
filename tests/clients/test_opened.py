"""The open transports of a listener: which are idle, and which go first."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dmsg.clients.limits import ListenerLimits
from dmsg.clients.opened import OpenTransports

LIMITS = ListenerLimits(open_transports=8, crowd=4, crowd_idle_s=10.0)


class Open:
    """A transport of ``remote``; as much as a listener looks at."""

    def __init__(self, remote, received=0, acked=0):
        self.connected = True
        self.stream = SimpleNamespace(remote=remote, received_bytes=received, acked_bytes=acked)


def opened(limits, *transports, at_s=0.0):
    table = OpenTransports(limits)
    for transport in transports:
        table.add(transport, at_s)
    return table


def test_there_is_an_end_to_how_many_may_be_open():
    transports = [Open("a") for _ in range(8)]
    table = opened(LIMITS, *transports[:7])
    assert not table.is_full
    table.add(transports[7], 0.0)
    assert table.is_full and len(table) == 8
    table.remove(transports[0])
    table.remove(transports[0])
    assert not table.is_full


def test_a_quiet_listener_need_not_be_looked_at():
    table = opened(LIMITS, Open("a"), Open("b"))
    assert not table.needs_look
    table.add(Open("c"), 0.0)
    assert table.needs_look, "a crowd may come, and it has to be known by then who was idle"
    assert opened(replace(LIMITS, idle_timeout_s=1.0), Open("a")).needs_look
    assert not opened(replace(LIMITS, idle_timeout_s=1.0)).needs_look


@pytest.mark.parametrize("moves", ["received_bytes", "acked_bytes"])
def test_what_does_not_move_for_the_idle_time_ends(moves):
    still, moving = Open("a", 5), Open("a", 5)
    table = opened(replace(LIMITS, idle_timeout_s=60.0), still, moving)
    for now in range(1, 60):
        setattr(moving.stream, moves, now + 10)
        assert table.idle(float(now)) == []
    assert table.idle(61.0) == [still]


def test_in_a_crowd_the_unused_of_the_largest_key_go_first():
    """Longest idle first; those whose peer has sent something stay."""
    large, small = [Open("large") for _ in range(4)], [Open("small") for _ in range(2)]
    used = Open("large", received=1)
    table = OpenTransports(LIMITS)
    for at_s, transport in enumerate([*small, used, *large]):
        table.add(transport, float(at_s))
    assert table.idle(9.0) == []
    assert table.idle(17.0) == large[:3], "five of one key: three go before it has as few as the other"
    for transport in large[:3]:
        table.remove(transport)
    assert table.idle(18.0) == []


def test_a_greeting_is_no_use_but_a_stream_that_is_read_is():
    greeted, reading = [Open("a", acked=21) for _ in range(4)], Open("b", acked=21)
    table = opened(LIMITS, *greeted, reading)
    for now in range(1, 20):
        reading.stream.acked_bytes += 1
        ended = table.idle(float(now))
        assert ended == ([] if now < 11 else greeted[:1])


def test_the_young_are_left_in_a_crowd_but_not_when_all_is_full():
    young = [Open(number) for number in range(8)]
    table = opened(LIMITS, *young, at_s=100.0)
    assert table.idle(101.0) == []
    assert table.unused(1, 101.0, 0.0) == young[:1]
    assert opened(LIMITS, *[Open("a", received=1)] * 3).unused(1, 1e9, 0.0) == []


def test_what_is_idle_for_too_long_is_not_ended_twice():
    transports = [Open("a") for _ in range(6)]
    table = opened(replace(LIMITS, idle_timeout_s=10.0), *transports)
    ended = table.idle(10.0)
    assert len(ended) == len(set(ended)) == 6
