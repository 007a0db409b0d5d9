"""What a relay, or the network in front of it, can do to channels of others: what comes of it, and what it can do unnoticed."""

from __future__ import annotations

import pytest

from dmsg.messaging.core.channel import Channel, ChannelState
from dmsg.messaging.core.dialect import DIALECTS, Dialect
from dmsg.messaging.core.errors import ChannelEndReason, end_error
from dmsg.messaging.core.events import ChannelEnded, ChannelOffered, Event
from dmsg.messaging.core.wire import CHANNEL_CLOSED, CLOSE_CHANNEL, GO, OPEN_CHANNEL, SEND

from .switchboard import Side, Switchboard

each_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


def ends(events: list[Event]) -> list[ChannelEndReason]:
    return [event.reason for event in events if isinstance(event, ChannelEnded)]


def recorded(board: Switchboard, side: Side, channel: Channel, data: bytes) -> list[bytes]:
    """The payloads of the Sends with which ``side`` says ``data``; nothing is passed on."""
    sends: list[bytes] = []

    def keep(kind: int, payload: bytes) -> bytes | None:
        if kind != SEND:
            return payload
        sends.append(payload)
        return None

    board.alter = keep
    side.connection.send_data(channel, data)
    board.relay(side)
    board.alter = lambda kind, payload: payload
    return sends


@each_dialect
@pytest.mark.parametrize("into", ["another channel", "the other direction"])
def test_sends_under_the_id_of_another_stream_end_its_channel(dialect: Dialect, into: str) -> None:
    board = Switchboard(dialect)
    caller, callee = board.sides
    ours, _ = board.channel()
    _, others = board.channel()
    [payload] = recorded(board, caller, ours, b"order")
    victim, channel = (callee, others) if into == "another channel" else (caller, ours)
    events = victim.hear(GO.encode(SEND, channel.id, payload))
    assert ends(events) == [ChannelEndReason.INTEGRITY] and not victim.received
    assert channel.state is ChannelState.CLOSED


@each_dialect
def test_a_close_that_the_relay_made_up_looks_like_the_peers(dialect: Dialect) -> None:
    """The protocol has no sealed end: what is cut off before a CloseChannel looks complete."""
    board = Switchboard(dialect)
    caller, callee = board.sides
    ours, theirs = board.channel()
    caller.connection.send_data(ours, b"the first half")
    board.pump()
    events = callee.hear(GO.encode(CLOSE_CHANNEL, theirs.id))
    assert ends(events) == [ChannelEndReason.CLOSED_BY_PEER]
    assert end_error(ChannelEndReason.CLOSED_BY_PEER) is None
    assert callee.received[theirs] == b"the first half"


@each_dialect
def test_a_channel_that_the_relay_drops_is_lost(dialect: Dialect) -> None:
    board = Switchboard(dialect)
    _, theirs = board.channel()
    assert ends(board.sides[1].hear(GO.encode(CHANNEL_CLOSED, theirs.id))) == [ChannelEndReason.PEER_GONE]


@each_dialect
def test_an_offer_that_is_sent_again_opens_a_channel_on_which_nothing_can_be_said(dialect: Dialect) -> None:
    """Message 1 proves that its key made it once, not that its owner is there now."""
    board = Switchboard(dialect)
    caller, callee = board.sides
    offers: list[bytes] = []
    board.alter = lambda kind, payload: (kind == OPEN_CHANNEL and offers.append(payload)) or payload
    ours, theirs = board.channel()
    sends = recorded(board, caller, ours, b"order")
    callee.hear(GO.encode(CHANNEL_CLOSED, theirs.id))

    [offer] = callee.hear(GO.encode(OPEN_CHANNEL, 128, caller.connection.identity.raw + offers[0][33:]))
    assert isinstance(offer, ChannelOffered) and offer.channel.remote == caller.connection.identity
    callee.connection.accept(offer.channel)
    assert offer.channel.state is ChannelState.OPEN
    events = callee.hear(GO.encode(SEND, offer.channel.id, sends[0]))
    assert ends(events) == [ChannelEndReason.INTEGRITY] and not callee.received
