"""Client cores over the relay's switch: what they agree on, in each dialect and layout, under any schedule."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.messaging.core.channel import ChannelState
from dmsg.messaging.core.dialect import DIALECTS, V0, V2, V3, V5, Dialect
from dmsg.messaging.core.errors import ChannelEndReason
from dmsg.messaging.core.events import ChannelEnded, ChannelOffered, ChannelOpened
from dmsg.messaging.core.wire import GO, SEED, Layout
from dmsg.messaging.relay.switch import Switch
from dmsg.testing.strategies import secret_key
from tests.messaging.core.switchboard import Side

each_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda one: one.name)
LAYOUTS = pytest.mark.parametrize("layouts", [(GO, GO), (SEED, SEED), (SEED, GO), (GO, SEED)], ids=str)


class Net:
    """A switch and clients that accept what is offered. The relay speaks the layout of the last client at first."""

    def __init__(self, dialect: Dialect, layouts: tuple[Layout, ...] = (GO, GO), **options: Any) -> None:
        self.now = 0.0
        self.switch = Switch(layout=layouts[-1], **options)
        self.sides = [Side(secret_key(31 + number), dialect, layout) for number, layout in enumerate(layouts)]
        self.members = [self.switch.add_member(side.connection.identity, self.now)[0] for side in self.sides]

    def send(self, number: int) -> bool:
        """Bring one write of a client to the relay."""
        data = self.sides[number].connection.data_to_send()
        if data:
            self.members[number].receive_data(data, self.now)
        return bool(data)

    def deliver(self, number: int, most: int = 1 << 30) -> bool:
        """Bring what waits for a client to it, in pieces of ``most`` bytes; it accepts what it is offered."""
        member, side = self.members[number], self.sides[number]
        data = b"" if member.congested else member.data_to_send()
        for at in range(0, len(data), most):
            for event in side.hear(data[at : at + most], self.now):
                if isinstance(event, ChannelOffered):
                    side.connection.accept(event.channel)
        return bool(data)

    def pump(self) -> None:
        everyone = range(len(self.sides))
        while any([*map(self.send, everyone), *map(self.deliver, everyone)]):
            pass

    def channel(self, caller: int = 0, callee: int = 1) -> tuple[Any, Any]:
        """The two ends of a new channel."""
        ours = self.sides[caller].connection.open(self.sides[callee].connection.identity)
        self.pump()
        [theirs] = [event.channel for event in self.sides[callee].events if isinstance(event, ChannelOffered)]
        assert any(isinstance(event, ChannelOpened) for event in self.sides[caller].events)
        for side in self.sides:
            side.events.clear()
        return ours, theirs

    def ends(self, number: int) -> list[tuple[ChannelEndReason, bool]]:
        return [(one.reason, one.local) for one in self.sides[number].events if isinstance(one, ChannelEnded)]


@each_dialect
@LAYOUTS
def test_data_goes_both_ways_and_the_channel_is_closed(dialect: Dialect, layouts: tuple[Layout, Layout]) -> None:
    net = Net(dialect, layouts)
    for closer in (0, 1):
        ends = net.channel()
        for number in range(25):
            for side, end in zip(net.sides, ends, strict=True):
                side.connection.send_data(end, b"%d " % number)
            net.pump()
        for side, end in zip(net.sides, ends, strict=True):
            assert side.received[end] == b"".join(b"%d " % number for number in range(25))
        net.sides[closer].connection.close(ends[closer])
        net.pump()
        assert net.ends(closer) == [(ChannelEndReason.NORMAL, True)]
        assert net.ends(1 - closer) == [(ChannelEndReason.CLOSED_BY_PEER, False)]
        assert not net.switch.open_transports and not any(member.legs for member in net.members)


@pytest.mark.parametrize("layouts", [(GO, SEED, GO), (SEED, GO, SEED), (GO, GO, SEED)], ids=str)
@pytest.mark.parametrize("dialect", [V0, V3], ids=lambda one: one.name)
def test_a_client_that_is_asked_before_its_first_frame_has_come_understands_that(
    dialect: Dialect, layouts: tuple[Layout, ...]
) -> None:
    """The relay does not know its layout yet, and speaks the one of the third client."""
    net = Net(dialect, layouts)
    early, caller = net.sides[1].connection, net.sides[0].connection
    given_up, asked = caller.open(early.identity), caller.open(early.identity)
    caller.abort(given_up)
    net.send(0)
    net.deliver(1, 1)
    net.pump()
    [_, offer] = [event.channel for event in net.sides[1].events if isinstance(event, ChannelOffered)]
    assert [event.channel for event in net.sides[0].events if isinstance(event, ChannelOpened)] == [asked]
    caller.send_data(asked, b"hello")
    early.send_data(offer, b"hello yourself")
    net.pump()
    assert (net.sides[1].received[offer], net.sides[0].received[asked]) == (b"hello", b"hello yourself")
    for side in net.sides:
        side.events.clear()
    net.channel()


@each_dialect
@pytest.mark.parametrize("go_quirks", [False, True])
def test_a_peer_whose_link_is_lost_is_gone(dialect: Dialect, go_quirks: bool) -> None:
    net = Net(dialect, go_quirks=go_quirks)
    net.channel()
    net.switch.remove_member(net.members[1], net.now)
    net.pump()
    reason = ChannelEndReason.CLOSED_BY_PEER if go_quirks else ChannelEndReason.PEER_GONE
    assert net.ends(0) == [(reason, False)]
    assert not net.members[0].legs


@each_dialect
def test_a_callee_that_is_not_there_is_a_refusal(dialect: Dialect) -> None:
    net = Net(dialect)
    net.sides[0].connection.open(secret_key(99).public_key)
    net.pump()
    assert net.ends(0) == [(ChannelEndReason.REFUSED, False)]


@pytest.mark.parametrize("dialects", [(V0, V2), (V2, V0)], ids=lambda both: " calls ".join(one.name for one in both))
def test_a_dial_that_is_given_up_while_a_peer_of_another_dialect_answers_leaves_no_channel(
    dialects: tuple[Dialect, Dialect],
) -> None:
    net = Net(V0)
    net.sides = [Side(secret_key(31 + number), dialect, GO) for number, dialect in enumerate(dialects)]
    caller, callee = (side.connection for side in net.sides)
    ours = caller.open(callee.identity)
    net.send(0)
    net.deliver(1)
    net.send(1)
    caller.abort(ours)
    net.pump()
    assert not net.switch.open_transports and not callee.channels
    assert net.ends(1) == [(ChannelEndReason.PEER_GONE, False)] and net.ends(0) == []


@pytest.mark.parametrize("dialect", [V3, V5], ids=lambda one: one.name)
def test_what_waited_for_a_slow_receiver_arrives_whole_and_in_order(dialect: Dialect) -> None:
    net = Net(dialect)
    ours, theirs = net.channel()
    net.members[1].pause()
    data = bytes(range(256)) * 2_000
    net.sides[0].connection.send_data(ours, data)
    net.pump()
    assert net.switch.queued_bytes > len(data) and theirs not in net.sides[1].received
    net.members[1].resume()
    net.pump()
    assert net.sides[1].received[theirs] == data


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(list(DIALECTS.values())),
    st.sampled_from([GO, SEED]),
    st.lists(st.tuples(st.sampled_from("osdcxp"), st.integers(0, 2), st.integers(1, 40)), max_size=80),
)
def test_under_any_schedule_data_arrives_in_order_and_nothing_is_left(
    dialect: Dialect, layout: Layout, steps: list[tuple[str, int, int]]
) -> None:
    net = Net(dialect, (layout,) * 3)
    sent: dict[Any, int] = {}
    for what, number, amount in steps:
        side, member = net.sides[number], net.members[number]
        open_ones = [one for one in side.connection.channels.values() if one.state is ChannelState.OPEN]
        if what == "o":
            side.connection.open(net.sides[(number + 1 + amount % 2) % 3].connection.identity)
        elif what == "s":
            net.send(number)
        elif what == "d":
            net.deliver(number, amount)
        elif what == "p" and member.congested:
            member.resume()
        elif what == "p":
            member.pause()
        elif open_ones and what == "x":
            channel = open_ones[amount % len(open_ones)]
            at = sent.setdefault(channel, amount)
            side.connection.send_data(channel, bytes((at + more) % 251 for more in range(amount)))
            sent[channel] += amount
        elif open_ones:
            side.connection.close(open_ones[amount % len(open_ones)])
    for member in net.members:
        member.resume()
    net.pump()
    assert set(net.switch.members.values()) == set(net.members)
    legs = sum(len(member.legs) for member in net.members)
    assert legs == 2 * net.switch.open_transports == sum(len(side.connection.channels) for side in net.sides)
    for side in net.sides:
        for data in side.received.values():
            assert all(byte == (data[0] + at) % 251 for at, byte in enumerate(data))
        reasons = {event.reason for event in side.events if isinstance(event, ChannelEnded)}
        assert reasons <= {ChannelEndReason.NORMAL, ChannelEndReason.CLOSED_BY_PEER, ChannelEndReason.REFUSED}


@pytest.mark.parametrize("next_id", [255, 0])
def test_ids_that_cross_end_one_request_and_leave_the_rest(next_id: int) -> None:
    """Only when a client has more channels than half of all ids can both sides take the same one at a time."""
    net = Net(V0)
    net.channel()
    net.members[1]._next_id = next_id
    net.sides[1].connection.open(net.sides[0].connection.identity)
    net.sides[0].connection.open(net.sides[1].connection.identity)
    net.pump()
    legs = sum(len(member.legs) for member in net.members)
    assert legs == 2 * net.switch.open_transports == sum(len(side.connection.channels) for side in net.sides)
