"""A discovery that stops answers what it was asked, and closes its store when no request can come any more."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet import defer
from twisted.internet.defer import ensureDeferred
from twisted.internet.task import Clock

from .front import GET, Front


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def front(clock: Clock) -> Front:
    return Front(clock)


def drained(front: Front, clock: Clock) -> Any:
    return ensureDeferred(front.site.drain(5, clock))


def test_without_connections_it_is_done_at_once(front: Front, clock: Clock) -> None:
    assert drained(front, clock).called


def test_connections_that_ask_nothing_are_closed_at_once(front: Front, clock: Clock) -> None:
    idle, new = front.connect("192.0.2.1", GET), front.connect("192.0.2.2")
    done = drained(front, clock)
    for wire in (idle, new):
        assert wire is not None and wire.disconnecting and not wire.aborting
        assert not done.called
        wire.hang_up()
    assert done.called


def test_a_request_under_way_is_answered_and_its_connection_closed(front: Front, clock: Clock, make_entry: Any) -> None:
    entry = make_entry()
    front.ask("/discovery/entries", body=entry.to_json())
    front.store.gate = defer.Deferred()
    wire = front.begin(f"/discovery/entries/{entry.static}")
    done = drained(front, clock)
    assert not wire.value() and not wire.disconnecting and not done.called
    front.store.gate.callback(None)
    assert wire.value().startswith(b"HTTP/1.1 200") and b"connection: close" in wire.value().lower()
    assert str(entry.static).encode() in wire.value()
    assert wire.disconnecting and not wire.aborting
    wire.hang_up()
    assert done.called


def test_a_request_that_is_half_there_may_be_completed(front: Front, clock: Clock) -> None:
    wire = front.connect("192.0.2.1", GET[:30])
    assert wire is not None
    done = drained(front, clock)
    assert not wire.disconnecting
    wire.channel.dataReceived(GET[30:])
    assert b"404" in wire.value() and b"connection: close" in wire.value().lower() and wire.disconnecting
    wire.hang_up()
    assert done.called


def test_no_request_behind_the_last_answer_is_taken(front: Front, clock: Clock, make_entry: Any) -> None:
    entry = make_entry()
    front.ask("/discovery/entries", body=entry.to_json())
    front.store.gate = defer.Deferred()
    wire = front.begin(f"/discovery/entries/{entry.static}")
    drained(front, clock)
    wire.channel.dataReceived(GET)
    front.store.gate.callback(None)
    clock.advance(0)
    assert wire.value().count(b"HTTP/1.1") == 1


def test_what_takes_longer_is_cut_off(front: Front, clock: Clock, make_entry: Any) -> None:
    entry = make_entry()
    front.ask("/discovery/entries", body=entry.to_json())
    front.store.gate = defer.Deferred()
    wire = front.begin(f"/discovery/entries/{entry.static}")
    done = drained(front, clock)
    clock.advance(4.9)
    assert not wire.aborting
    clock.advance(0.2)
    assert wire.aborting and done.called
    wire.hang_up()
