"""A client's end of a link: channels opened, used and closed, in each dialect; what relays and peers may do wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.errors import LocalProtocolError, RemoteProtocolError
from dmsg.messaging.core import wire
from dmsg.messaging.core.channel import TRANSITIONS, Channel, ChannelState
from dmsg.messaging.core.connection import Connection
from dmsg.messaging.core.dialect import DIALECTS, SEED_DIALECT, V0, V2, V3, V5, Dialect
from dmsg.messaging.core.errors import (
    ChannelEndReason,
    ChannelRefused,
    HandshakeFailed,
    NoFreeChannel,
    OtherDialect,
    SlowConsumer,
    WriteOverflow,
    end_error,
)
from dmsg.messaging.core.events import ChannelEnded, ChannelOffered, DataReceived, Event
from dmsg.messaging.core.limits import ConnectionConfig
from dmsg.messaging.core.wire import (
    CHANNEL_CLOSED,
    CHANNEL_OPENED,
    CIPHERTEXT_LIMIT_BYTES,
    CLOSE_CHANNEL,
    GO,
    LENGTH_BYTES,
    OPEN_CHANNEL,
    PLAINTEXT_LIMIT_BYTES,
    SEED,
    SEND,
    FrameReader,
    Layout,
)
from dmsg.testing.strategies import BAD_POINTS, cuts

from .switchboard import KEYS, Side, Switchboard

each_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda one: one.name)
Frame = tuple[int, int, bytes]


def split(data: bytes) -> list[Frame]:
    buffer, frames = FrameReader(GO).read(data)
    return [(kind, channel_id, buffer[start:end]) for kind, channel_id, start, end in frames]


def said(connection: Connection) -> list[Frame]:
    """Everything a core has to say now, frame by frame."""
    found: list[Frame] = []
    while data := connection.data_to_send():
        found += split(data)
    return found


def ends(events: list[Event]) -> list[tuple[ChannelEndReason, bool]]:
    return [(event.reason, event.local) for event in events if isinstance(event, ChannelEnded)]


# --- both ways --------------------------------------------------------------------------------------------------------


@each_dialect
def test_data_goes_both_ways_and_the_channel_is_closed(dialect: Dialect) -> None:
    board = Switchboard(dialect)
    ours, theirs = board.channel()
    caller, callee = board.sides
    assert (ours.remote, theirs.remote) == (callee.connection.identity, caller.connection.identity)
    assert ours.initiator and not theirs.initiator and ours.security == "e2e"
    for number in range(25):
        caller.connection.send_data(ours, b"ping %d " % number)
        board.pump()
        callee.connection.send_data(theirs, b"pong %d " % number)
        board.pump()
    assert callee.received[theirs] == b"".join(b"ping %d " % number for number in range(25))
    assert caller.received[ours] == b"".join(b"pong %d " % number for number in range(25))
    assert ours.sent_bytes == ours.acked_bytes == theirs.received_bytes == len(callee.received[theirs])
    assert ours.unread_bytes == theirs.unread_bytes == 0 and ours.drained and theirs.drained
    assert not caller.connection.close(ours)
    assert ours.state is ChannelState.HALF_CLOSED
    board.pump()
    assert ends(caller.events) == [(ChannelEndReason.NORMAL, True)]
    assert ends(callee.events) == [(ChannelEndReason.CLOSED_BY_PEER, False)]
    assert not caller.connection.channels and not callee.connection.channels
    assert [side.connection.next_timeout() for side in board.sides] == [None, None]


def test_a_client_of_the_second_layout_says_so_at_once() -> None:
    assert said_in(SEED) == [(CHANNEL_CLOSED, 0, b"")] and said_in(GO) == []


def said_in(layout: Layout) -> list[Frame]:
    buffer, frames = FrameReader(None).read(Connection(KEYS[0], now=0.0, layout=layout).data_to_send())
    return [(kind, channel_id, buffer[start:end]) for kind, channel_id, start, end in frames]


@pytest.mark.parametrize("layouts", [(SEED, SEED), (GO, SEED), (SEED, GO)], ids=repr)
def test_layouts_are_an_affair_of_each_link(layouts: tuple[Any, Any]) -> None:
    board = Switchboard(V0, layouts)
    ours, theirs = board.channel()
    data = bytes(range(256)) * 1000
    board.sides[0].connection.send_data(ours, data)
    board.pump()
    assert board.sides[1].received[theirs] == data


@each_dialect
def test_long_writes_are_cut_into_sends_that_go_reads(dialect: Dialect) -> None:
    board = Switchboard(dialect)
    ours, theirs = board.channel()
    sizes = []
    board.alter = lambda kind, payload: (sizes.append(len(payload)), payload)[1] if kind == SEND else payload
    data = bytes(range(251)) * 1100
    board.sides[0].connection.send_data(ours, data)
    board.pump()
    assert board.sides[1].received[theirs] == data
    assert max(sizes) == wire.CIPHERTEXT_LIMIT_BYTES + 2 == GO.body_limit_bytes - 1
    assert ours.payload_limit_bytes <= PLAINTEXT_LIMIT_BYTES


@each_dialect
def test_many_channels_do_not_mix(dialect: Dialect) -> None:
    board = Switchboard(dialect)
    pairs = [board.channel() for _ in range(5)]
    for number, (ours, _) in enumerate(pairs):
        board.sides[0].connection.send_data(ours, bytes((number,)) * 70_000)
    board.pump()
    for number, (_, theirs) in enumerate(pairs):
        assert board.sides[1].received[theirs] == bytes((number,)) * 70_000


# --- opening -----------------------------------------------------------------------------------------------------------


def dial() -> tuple[Connection, Channel]:
    connection = Connection(KEYS[0], now=0.0)
    channel = connection.open(KEYS[1].public_key)
    return connection, channel


def test_an_open_channel_frame_names_the_callee() -> None:
    connection, channel = dial()
    [(kind, channel_id, payload)] = said(connection)
    assert (kind, channel_id, payload[:33], len(payload)) == (OPEN_CHANNEL, 0, KEYS[1].public_key.raw, 82)
    assert channel.state is ChannelState.OPENING


@pytest.mark.parametrize("kind", [CHANNEL_CLOSED, CLOSE_CHANNEL])
def test_a_refused_dial_frees_its_id(kind: int) -> None:
    connection, channel = dial()
    events = connection.receive_data(GO.encode(kind, 0), 0.0)
    assert ends(events) == [(ChannelEndReason.REFUSED, False)] and channel.state is ChannelState.CLOSED
    assert isinstance(end_error(ChannelEndReason.REFUSED), ChannelRefused)
    assert connection.open(KEYS[1].public_key).id == 0


def test_ids_are_the_lowest_free_ones_until_none_is_left() -> None:
    connection = Connection(KEYS[0], now=0.0)
    opened = [connection.open(KEYS[1].public_key) for _ in range(255)]
    assert [channel.id for channel in opened] == list(range(255))
    with pytest.raises(NoFreeChannel):
        connection.open(KEYS[1].public_key)
    connection.receive_data(GO.encode(CHANNEL_CLOSED, 7), 0.0)
    assert connection.open(KEYS[1].public_key).id == 7


@each_dialect
def test_an_offer_may_be_refused(dialect: Dialect) -> None:
    board = Switchboard(dialect)
    caller, callee = board.sides
    ours = caller.connection.open(callee.connection.identity)
    board.pump()
    [offer] = callee.events
    assert isinstance(offer, ChannelOffered) and offer.channel.state is ChannelState.OFFERED
    callee.connection.refuse(offer.channel)
    assert not callee.connection.channels
    with pytest.raises(LocalProtocolError):
        callee.connection.refuse(offer.channel)
    if dialect.own_ids:  # only the relay knows the caller's id: its part of the work
        assert said(callee.connection) == [(CHANNEL_CLOSED, 255, b"")]
        caller.hear(GO.encode(CHANNEL_CLOSED, ours.id))
    board.pump()
    assert ends(caller.events) == [(ChannelEndReason.REFUSED, False)]


def test_only_an_offer_is_accepted() -> None:
    board = Switchboard()
    ours, theirs = board.channel()
    for side, channel in zip(board.sides, (ours, theirs), strict=True):
        with pytest.raises(LocalProtocolError):
            side.connection.accept(channel)
        with pytest.raises(LocalProtocolError):
            side.connection.refuse(channel)


@pytest.mark.parametrize("kind", [CHANNEL_CLOSED, CLOSE_CHANNEL])
def test_an_offer_may_be_withdrawn(kind: int) -> None:
    board = Switchboard()
    caller, callee = board.sides
    caller.connection.open(callee.connection.identity)
    board.pump()
    events = callee.hear(GO.encode(kind, 255))
    assert len(ends(events)) == 1 and not callee.connection.channels
    [offer] = [event for event in callee.events if isinstance(event, ChannelOffered)]
    with pytest.raises(LocalProtocolError):
        callee.connection.accept(offer.channel)


# --- what kills Go's clients, and other offers and answers that are refused -----------------------------------------------


def offer_of(board: Switchboard) -> bytes:
    """The payload of an OpenChannel that the callee would take."""
    caller, callee = board.sides
    caller.connection.open(callee.connection.identity)
    return caller.connection.identity.raw + said(caller.connection)[-1][2][33:]


def bad_offer(side: Side, payload: bytes) -> Channel:
    """The channel of an offer that is refused once its handshake message is read."""
    [offer] = side.hear(GO.encode(OPEN_CHANNEL, 200, payload))
    assert isinstance(offer, ChannelOffered) and said(side.connection) == []
    with pytest.raises(HandshakeFailed):
        side.connection.accept(offer.channel)
    assert said(side.connection) == [(CHANNEL_CLOSED, 200, b"")] and not side.connection.channels
    with pytest.raises(LocalProtocolError):
        side.connection.accept(offer.channel)
    return offer.channel


@pytest.mark.parametrize("name", BAD_POINTS)
def test_an_offer_with_an_ephemeral_key_that_is_no_point_is_refused(name: str) -> None:
    board = Switchboard()
    payload = offer_of(board)
    callee = board.sides[1]
    bad_offer(callee, payload[:33] + BAD_POINTS[name] + payload[66:])
    [offer] = callee.hear(GO.encode(OPEN_CHANNEL, 200, payload))
    assert isinstance(offer, ChannelOffered)  # the id is not lost
    callee.connection.accept(offer.channel)


def test_an_offer_is_proved_once_and_may_be_refused_after_that() -> None:
    board = Switchboard()
    caller, callee = board.sides
    caller.connection.open(callee.connection.identity)
    board.pump()
    [offer] = callee.events
    assert isinstance(offer, ChannelOffered)
    assert callee.connection.prove(offer.channel) is callee.connection.prove(offer.channel)
    callee.connection.refuse(offer.channel)
    with pytest.raises(LocalProtocolError):
        callee.connection.prove(offer.channel)
    board.pump()
    assert ends(caller.events) == [(ChannelEndReason.REFUSED, False)]


@pytest.mark.parametrize("name", BAD_POINTS)
def test_an_offer_of_a_key_that_is_no_point_is_refused(name: str) -> None:
    board = Switchboard()
    payload = offer_of(board)
    callee = board.sides[1]
    assert callee.hear(GO.encode(OPEN_CHANNEL, 9, BAD_POINTS[name] + payload[33:])) == []
    assert said(callee.connection) == [(CHANNEL_CLOSED, 9, b"")]


@pytest.mark.parametrize("size", [0, 1, 33, 34, 81, 83, 200])
def test_an_offer_of_another_length_is_refused(size: int) -> None:
    """Fewer than 33 bytes end Go's process."""
    board = Switchboard()
    payload = offer_of(board) + bytes(200)
    callee = board.sides[1]
    assert callee.hear(GO.encode(OPEN_CHANNEL, 9, payload[:size])) == []
    assert said(callee.connection) == [(CHANNEL_CLOSED, 9, b"")]


def test_an_offer_with_a_bad_tag_is_refused() -> None:
    board = Switchboard()
    payload = offer_of(board)
    bad_offer(board.sides[1], payload[:-1] + bytes((payload[-1] ^ 1,)))


def test_an_offer_for_another_key_is_refused() -> None:
    """The relay cannot pass an offer to another key, nor say that it comes from another key."""
    board = Switchboard()
    payload = offer_of(board)
    caller, callee = board.sides
    caller.connection.receive_data(GO.encode(CHANNEL_CLOSED, 0), 0.0)
    bad_offer(caller, payload)
    bad_offer(callee, KEYS[1].public_key.raw + payload[33:])


def test_an_offer_for_an_id_in_use_is_refused_and_harms_nothing() -> None:
    board = Switchboard()
    _ours, theirs = board.channel()
    assert board.sides[1].hear(GO.encode(OPEN_CHANNEL, 255, offer_of(board))) == []
    assert said(board.sides[1].connection) == [(CHANNEL_CLOSED, 255, b"")]
    assert theirs.state is ChannelState.OPEN


def test_offers_wait_for_a_decision_up_to_a_limit() -> None:
    board = Switchboard(config=ConnectionConfig(offered_limit=2, incoming_limit=3))
    callee = board.sides[1]
    payloads = [offer_of(board) for _ in range(5)]
    for number, payload in enumerate(payloads[:3]):
        callee.hear(GO.encode(OPEN_CHANNEL, 255 - number, payload))
    assert said(callee.connection) == [(CHANNEL_CLOSED, 253, b"")]
    for event in callee.events:
        assert isinstance(event, ChannelOffered)
        callee.connection.accept(event.channel)
    said(callee.connection)
    for number in (3, 4):
        callee.hear(GO.encode(OPEN_CHANNEL, 255 - number, payloads[number]))
    assert said(callee.connection) == [(CHANNEL_CLOSED, 251, b"")]


def test_with_ids_of_ones_own_the_oldest_offer_makes_room() -> None:
    """This client is not told that the offer is over; the relay passes fewer on at once than may wait here."""
    board = Switchboard(V5, config=ConnectionConfig(offered_limit=2, incoming_limit=3))
    callee = board.sides[1]
    payloads = [offer_of(board) for _ in range(5)]
    for number, payload in enumerate(payloads[:3]):
        callee.hear(GO.encode(OPEN_CHANNEL, 255 - number, payload))
    assert said(callee.connection) == [(CHANNEL_CLOSED, 255, b"")]
    assert ends(callee.events) == [(ChannelEndReason.REFUSED, True)]
    offers = [event.channel for event in callee.events if isinstance(event, ChannelOffered)]
    with pytest.raises(LocalProtocolError):
        callee.connection.accept(offers[0])
    for channel in offers[1:]:
        callee.connection.accept(channel)
    said(callee.connection)
    for number in (3, 4):
        callee.hear(GO.encode(OPEN_CHANNEL, 255 - number, payloads[number]))
    assert said(callee.connection) == [(CHANNEL_CLOSED, 251, b"")], "open channels make no room"


@pytest.mark.parametrize("name", [*BAD_POINTS, "tag"])
@pytest.mark.parametrize("dialect", [V0, V2], ids=lambda one: one.name)
def test_an_answer_that_does_not_open_ends_the_dial(dialect: Dialect, name: str) -> None:
    """A bad key ends Go's process; a bad tag ends it at the first write."""
    board = Switchboard(dialect)
    caller, callee = board.sides

    def alter(kind: int, payload: bytes) -> bytes:
        if kind != CHANNEL_OPENED:
            return payload
        at = len(payload) - 49
        if name == "tag":
            return payload[:-1] + bytes((payload[-1] ^ 1,))
        return payload[:at] + BAD_POINTS[name] + payload[at + 33 :]

    board.alter = alter
    ours = caller.connection.open(callee.connection.identity)
    board.pump()
    [offer] = callee.events
    assert isinstance(offer, ChannelOffered)
    callee.connection.accept(offer.channel)
    board.pump()
    assert ends(caller.events) == [(ChannelEndReason.HANDSHAKE, True)]
    assert ends(callee.events) == [(ChannelEndReason.PEER_GONE, False)]
    assert ours.state is ChannelState.CLOSED
    with pytest.raises(LocalProtocolError):
        caller.connection.send_data(ours, b"x")


@pytest.mark.parametrize("dialect", [V0, V2], ids=lambda one: one.name)
@pytest.mark.parametrize("size", [0, 1, 33, 48, 51, 90])
def test_an_answer_of_another_length_ends_the_dial(dialect: Dialect, size: int) -> None:
    connection = Connection(KEYS[0], now=0.0, dialect=dialect)
    connection.open(KEYS[1].public_key)
    said(connection)
    events = connection.receive_data(GO.encode(CHANNEL_OPENED, 0, bytes(size)), 0.0)
    assert ends(events) == [(ChannelEndReason.MALFORMED, True)]
    assert said(connection) == ([] if dialect.own_ids else [(CHANNEL_CLOSED, 0, b"")])


def test_the_answer_of_another_dialect_ends_the_dial_and_closes_the_channel() -> None:
    for ours, answer, theirs in ((V0, b"\x07" + bytes(49), 7), (V2, bytes(49), 0)):
        connection = Connection(KEYS[0], now=0.0, dialect=ours)
        connection.open(KEYS[1].public_key)
        said(connection)
        events = connection.receive_data(GO.encode(CHANNEL_OPENED, 0, answer), 0.0)
        assert ends(events) == [(ChannelEndReason.DIALECT, True)]
        assert isinstance(end_error(ChannelEndReason.DIALECT), OtherDialect)
        assert said(connection) == [(CHANNEL_CLOSED, theirs, b"")]


@pytest.mark.parametrize("data", ["0000", "000104", "ffff04"])
def test_frames_that_cannot_be_end_the_link(data: str) -> None:
    """Size 0 ends Go's process."""
    board = Switchboard()
    board.channel()
    with pytest.raises(RemoteProtocolError):
        board.sides[0].hear(bytes.fromhex(data) + bytes(3))


def test_frames_of_unknown_types_and_for_unknown_channels_mean_nothing() -> None:
    board = Switchboard()
    ours, theirs = board.channel()
    frames = [GO.encode(9, 0, b"x"), *(GO.encode(kind, 77, bytes(49)) for kind in (1, 2, 3, 4, 5, 255))]
    assert board.sides[0].hear(b"".join(frames)) == []
    assert said(board.sides[0].connection) == [] and ours.state is theirs.state is ChannelState.OPEN


def test_255_open_channels_are_no_more_than_a_refusal() -> None:
    """In v2 and later Go's process ends with its table of ids full."""
    config = ConnectionConfig(offered_limit=300, incoming_limit=300)
    board = Switchboard(V2, config=config)
    callee = board.sides[1]
    payload = offer_of(board)
    callee.hear(b"".join(GO.encode(OPEN_CHANNEL, number, payload) for number in range(256)))
    assert len(callee.connection.channels) == 255 == len(callee.events)
    assert said(callee.connection) == [(CHANNEL_CLOSED, 255, b"")]


@pytest.mark.parametrize("plaintext", [b"\x01\x00\x02", b"\x00", b"\x07\x07"], ids=repr)
def test_a_malformed_plaintext_ends_its_channel_and_no_other(plaintext: bytes) -> None:
    """A truncated acknowledgement ends Go's process."""
    board = Switchboard()
    ours, theirs = board.channel()
    other, others = board.channel()
    sealed = ours.sealer.seal(plaintext)
    events = board.sides[1].hear(GO.send_header(theirs.id, len(sealed)) + sealed)
    assert ends(events) == [(ChannelEndReason.MALFORMED, True)]
    board.sides[0].connection.send_data(other, b"still here")
    board.pump()
    assert board.sides[1].received[others] == b"still here"


# --- integrity -----------------------------------------------------------------------------------------------------------


@each_dialect
@pytest.mark.parametrize("how", ["altered", "repeated", "dropped", "swapped", "truncated"])
def test_whatever_a_relay_does_to_sends_ends_the_channel(dialect: Dialect, how: str) -> None:
    board = Switchboard(dialect)
    ours, theirs = board.channel()
    sends = []
    for number in range(4):
        sealed = ours.sealer.seal(b"\x00\x00data %d" % number if dialect.acks else b"data %d" % number)
        sends.append(GO.send_header(theirs.id, len(sealed)) + sealed)
    bad = bytearray(sends[1])
    bad[-1] ^= 1
    stream = {
        "altered": [sends[0], bytes(bad), sends[2], sends[3]],
        "repeated": [sends[0], sends[0], sends[1]],
        "dropped": [sends[0], sends[2], sends[3]],
        "swapped": [sends[0], sends[2], sends[1]],
        "truncated": [sends[0], GO.send_header(theirs.id, 7) + sends[1][6:13], sends[2]],
    }[how]
    callee = board.sides[1]
    events = callee.hear(b"".join(stream))
    assert callee.received[theirs] == b"data 0"
    assert ends(events) == [(ChannelEndReason.INTEGRITY, True)]
    board.pump()
    assert ends(board.sides[0].events) == [(ChannelEndReason.PEER_GONE, False)], "no orderly end"
    assert not callee.connection.channels and callee.events == events


def test_an_acknowledgement_of_something_else_ends_the_channel() -> None:
    board = Switchboard(V0)
    ours, theirs = board.channel()
    caller, _callee = board.sides
    caller.connection.send_data(ours, b"abc")
    said(caller.connection)
    sealed = theirs.sealer.seal(b"\x01\x00" + bytes(32))
    assert ends(caller.hear(GO.send_header(ours.id, len(sealed)) + sealed)) == [(ChannelEndReason.INTEGRITY, True)]
    assert ours.cut_bytes == 3


def test_a_piece_of_a_ciphertext_may_look_like_a_whole_one() -> None:
    board = Switchboard(V5)
    ours, theirs = board.channel()
    caller, callee = board.sides
    data = bytes(50_000)
    caller.connection.send_data(ours, data)
    [(_, _, payload)] = said(caller.connection)
    begin, end = next(
        (at, at + 2 + size)
        for at in range(3, len(payload))
        if 100 < (size := int.from_bytes(payload[at : at + 2], "big")) < len(payload) - at - 10
    )
    for piece in (payload[:begin], payload[begin:end], payload[end:]):
        assert ends(callee.hear(GO.encode(SEND, theirs.id, piece))) == []
    assert callee.received[theirs] == data


def test_a_full_payload_leaves_room_for_the_acknowledgement_before_it() -> None:
    board = Switchboard(V0)
    ours, theirs = board.channel()
    caller, callee = board.sides
    caller.connection.send_data(ours, b"abc")
    board.relay(caller)
    data = bytes(range(256)) * 1_000
    callee.connection.send_data(theirs, data)
    board.deliver(callee)
    writes = said(callee.connection)
    assert max(len(payload) for kind, _, payload in writes if kind == SEND) <= LENGTH_BYTES + CIPHERTEXT_LIMIT_BYTES
    for kind, _, payload in writes:
        caller.hear(GO.encode(kind, ours.id, payload))
    board.pump()
    assert caller.received[ours] == data and ours.acked_bytes == 3


# --- Sends ---------------------------------------------------------------------------------------------------------------


def sends_of(dialect: Dialect, channel: Channel, count: int) -> bytes:
    """The payloads of ``count`` Sends, without their frames: lengths and ciphertexts."""
    stream = b""
    for number in range(count):
        sealed = channel.sealer.seal((b"\x00\x00" if dialect.acks else b"") + b"<%d>" % number)
        stream += len(sealed).to_bytes(2, "big") + sealed
    return stream


@each_dialect
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_ciphertexts_are_a_stream_over_all_sends(dialect: Dialect, data: st.DataObject) -> None:
    """One in several Sends, several in one."""
    board = Switchboard(dialect)
    ours, theirs = board.channel()
    stream = sends_of(dialect, ours, 12)
    frames = b"".join(GO.encode(SEND, theirs.id, piece) for piece in data.draw(cuts(stream)))
    for piece in data.draw(cuts(frames)):
        board.sides[1].hear(piece)
    assert board.sides[1].received[theirs] == b"".join(b"<%d>" % number for number in range(12))


def test_a_long_ciphertext_in_single_bytes_is_no_burden() -> None:
    board = Switchboard(V3)
    ours, theirs = board.channel()
    sealed = ours.sealer.seal(bytes(60_000))
    stream = len(sealed).to_bytes(2, "big") + sealed
    frames = b"".join(GO.encode(SEND, theirs.id, stream[at : at + 1]) for at in range(len(stream)))
    board.sides[1].hear(frames)
    assert board.sides[1].received[theirs] == bytes(60_000)


@each_dialect
def test_one_write_has_one_send_of_each_channel(dialect: Dialect) -> None:
    board = Switchboard(dialect)
    pairs = [board.channel() for _ in range(3)]
    connection = board.sides[0].connection
    for ours, _ in pairs:
        connection.send_data(ours, bytes(150_000))
    writes = []
    while data := connection.data_to_send():
        ids = [channel_id for kind, channel_id, _ in split(data) if kind == SEND]
        assert len(set(ids)) == len(ids) >= 1
        writes.append(ids)
    # Without acknowledgements everything goes out, 65 KB at a time; with them one payload of each channel waits.
    assert sum(map(len, writes)) == (3 if dialect.acks else 9)


def test_sends_of_one_channel_may_share_a_write_if_so_configured() -> None:
    board = Switchboard(V3, config=ConnectionConfig(one_send_per_write=False))
    ours, theirs = board.channel()
    board.sides[0].connection.send_data(ours, bytes(150_000))
    first = split(board.sides[0].connection.data_to_send())
    assert [kind for kind, _, _ in first] == [SEND, SEND, SEND]
    rest = said(board.sides[0].connection)
    for frame in [*first, *rest]:
        board.sides[1].hear(GO.encode(frame[0], theirs.id, frame[2]))
    assert board.sides[1].received[theirs] == bytes(150_000)


def test_a_write_has_little_more_than_one_flush() -> None:
    config = ConnectionConfig(one_send_per_write=False, flush_bytes=100_000)
    board = Switchboard(V3, config=config)
    ours, _ = board.channel()
    connection = board.sides[0].connection
    connection.send_data(ours, bytes(1_000_000))
    writes = []
    while data := connection.data_to_send():
        writes.append(len(data))
    assert max(writes) < 100_000 + 66_000 and len(writes) > 6


def test_a_long_write_of_one_channel_has_one_send_in_each_write() -> None:
    """Go's programs of 2019 lose all but one of them."""
    board = Switchboard(V3)
    ours, _ = board.channel()
    connection = board.sides[0].connection
    connection.send_data(ours, bytes(150_000))
    writes = []
    while data := connection.data_to_send():
        writes.append([kind for kind, _, _ in split(data)])
    assert writes == [[SEND]] * 3


def test_with_acknowledgements_one_payload_is_under_way() -> None:
    board = Switchboard(V0)
    ours, theirs = board.channel()
    caller, callee = board.sides
    callee.reads = False
    caller.connection.send_data(ours, b"one")
    board.pump()
    caller.connection.send_data(ours, b"two")
    board.pump()
    assert callee.received[theirs] == b"one" and not ours.drained and ours.acked_bytes == 0
    assert callee.connection.consumed(theirs, 3)
    board.pump()
    assert callee.received[theirs] == b"onetwo" and ours.acked_bytes == 3
    assert callee.connection.consumed(theirs, 3)
    board.pump()
    assert ours.drained and ours.acked_bytes == 6


def test_a_write_takes_the_acknowledgement_along() -> None:
    board = Switchboard(V0)
    ours, theirs = board.channel()
    caller, callee = board.sides
    callee.reads = False
    caller.connection.send_data(ours, b"question")
    board.pump()
    callee.connection.send_data(theirs, b"answer")
    callee.connection.consumed(theirs, 8)
    assert [kind for kind, _, _ in said(callee.connection)] == [SEND]


# --- pace ------------------------------------------------------------------------------------------------------------


def test_a_writer_is_paused_and_goes_on() -> None:
    board = Switchboard(V0)
    ours, _ = board.channel()
    caller, callee = board.sides
    callee.reads = False
    config = caller.connection.config
    assert not caller.connection.send_data(ours, bytes(config.pause_bytes))
    assert caller.connection.send_data(ours, b"x") and ours.blocked
    board.pump()
    assert caller.connection.take_writable() == [ours] and not ours.blocked
    assert caller.connection.take_writable() == []


def test_a_writer_that_does_not_pause_is_cut_off() -> None:
    board = Switchboard(V0, config=ConnectionConfig(pending_limit_bytes=100_000))
    ours, _ = board.channel()
    assert board.sides[0].connection.send_data(ours, bytes(100_000))
    with pytest.raises(WriteOverflow):
        board.sides[0].connection.send_data(ours, b"x")


def test_a_reader_that_does_not_read_holds_a_bounded_amount() -> None:
    board = Switchboard(V3, config=ConnectionConfig(receive_limit_bytes=100_000))
    ours, theirs = board.channel()
    board.sides[1].reads = False
    board.sides[0].connection.send_data(ours, bytes(250_000))
    board.pump()
    assert ends(board.sides[1].events) == [(ChannelEndReason.SLOW_CONSUMER, True)]
    assert isinstance(end_error(ChannelEndReason.SLOW_CONSUMER), SlowConsumer)
    assert len(board.sides[1].received[theirs]) <= 100_000


def test_answers_that_are_not_read_stop_the_reading() -> None:
    connection = Connection(KEYS[0], now=0.0)
    junk = GO.encode(OPEN_CHANNEL, 9)
    connection.receive_data(junk * 10_000, 0.0)
    assert not connection.overloaded
    connection.receive_data(junk * 10_000, 0.0)
    assert connection.overloaded
    said(connection)
    assert not connection.overloaded and not connection.wants_write


# --- closing -----------------------------------------------------------------------------------------------------------


@each_dialect
def test_what_was_written_before_the_close_arrives_first(dialect: Dialect) -> None:
    board = Switchboard(dialect)
    ours, theirs = board.channel()
    caller, callee = board.sides
    data = bytes(range(256)) * 700
    caller.connection.send_data(ours, data)
    assert not caller.connection.close(ours)
    assert ours.state is ChannelState.CLOSING
    with pytest.raises(LocalProtocolError):
        caller.connection.send_data(ours, b"x")
    board.pump()
    assert callee.received[theirs] == data
    assert ends(callee.events) == [(ChannelEndReason.CLOSED_BY_PEER, False)]
    assert ends(caller.events) == [(ChannelEndReason.NORMAL, True)]


@each_dialect
def test_a_close_comes_in_a_later_write_than_the_last_send(dialect: Dialect) -> None:
    """Go hands each Send over in a thread of its own, so a close in the same write would overtake it."""
    board = Switchboard(dialect)
    ours, _ = board.channel()
    connection = board.sides[0].connection
    connection.send_data(ours, b"last words")
    connection.close(ours)
    assert [kind for kind, _, _ in split(connection.data_to_send())] == [SEND]


def test_a_half_closed_channel_still_receives() -> None:
    board = Switchboard(V3)
    ours, theirs = board.channel()
    caller, callee = board.sides
    caller.connection.close(ours)
    callee.connection.send_data(theirs, b"late news")
    board.relay(callee)
    board.deliver(caller)
    assert caller.received[ours] == b"late news" and ours.state is ChannelState.HALF_CLOSED
    board.pump()
    assert ends(caller.events) == [(ChannelEndReason.NORMAL, True)]


def test_data_that_the_application_dropped_is_acknowledged_and_remembered() -> None:
    board = Switchboard(V0)
    ours, theirs = board.channel()
    caller, callee = board.sides
    caller.reads = False
    callee.connection.send_data(theirs, b"data")
    board.pump()
    ours.drop()
    assert ours.dropped and caller.connection.consumed(ours, 4)
    caller.connection.close(ours)
    board.pump()
    assert theirs.acked_bytes == 4 and ends(callee.events) == [(ChannelEndReason.CLOSED_BY_PEER, False)]


def test_due_acknowledgements_go_out_before_the_close() -> None:
    board = Switchboard(V0)
    ours, theirs = board.channel()
    caller, callee = board.sides
    callee.connection.send_data(theirs, b"data")
    board.relay(callee)
    board.deliver(caller)
    caller.connection.close(ours)
    assert [kind for kind, _, _ in said(caller.connection)] == [SEND, CLOSE_CHANNEL]


def test_what_an_application_closes_on_is_acknowledged_before_the_close() -> None:
    """A protocol that closes in ``dataReceived`` has taken the data."""
    board = Switchboard(V0)
    ours, theirs = board.channel()
    caller, callee = board.sides
    callee.reads = False
    caller.connection.send_data(ours, b"/bye")
    board.relay(caller)
    board.deliver(callee)
    assert not callee.connection.close(theirs)
    assert said(callee.connection) == []
    assert callee.connection.consumed(theirs, 4)
    board.pump()
    assert ends(caller.events) == [(ChannelEndReason.CLOSED_BY_PEER, False)] and ours.cut_bytes == 0
    assert not caller.connection.channels and not callee.connection.channels


@pytest.mark.parametrize("closes", ["before", "after"])
def test_a_close_behind_data_for_which_there_is_no_number_is_no_orderly_end(closes: str) -> None:
    board = Switchboard(V5)
    caller, callee = board.sides
    ours, theirs = board.channel()
    ours.sealer._state.nonce = 2**32
    caller.connection.send_data(ours, b"not sent")
    if closes == "before":
        assert not caller.connection.close(ours)
    board.pump()
    if closes == "after":
        assert not caller.connection.close(ours)
    callee.connection.send_data(theirs, b"an application that takes this might go on with its close")
    board.pump()
    due = caller.connection.next_timeout()
    assert due is not None and due <= 0.0
    caller.events += caller.connection.handle_timeout(0.0)
    board.pump()
    assert ends(caller.events) == [(ChannelEndReason.EXHAUSTED, True)]
    assert ends(callee.events) == [(ChannelEndReason.PEER_GONE, False)]
    assert caller.connection.next_timeout() is None and not caller.connection.channels


def test_an_unanswered_close_ends_after_a_second() -> None:
    board = Switchboard()
    ours, _ = board.channel()
    connection = board.sides[0].connection
    connection.receive_data(b"", 10.0)
    connection.close(ours)
    assert said(connection) == [(CLOSE_CHANNEL, 0, b"")]
    assert connection.next_timeout() == 10.0  # at once: the core does not know what time it is
    assert connection.handle_timeout(50.0) == []
    assert connection.next_timeout() == 51.0
    assert connection.handle_timeout(50.9) == []
    events = connection.handle_timeout(51.0)
    assert ends(events) == [(ChannelEndReason.NORMAL, True)]
    assert said(connection) == [(CHANNEL_CLOSED, 0, b"")]
    assert connection.next_timeout() is None and not connection.channels


def test_an_id_whose_last_word_may_be_late_is_used_last() -> None:
    board = Switchboard()
    ours, _ = board.channel()
    connection = board.sides[0].connection
    connection.close(ours)
    connection.handle_timeout(1.0)
    connection.handle_timeout(2.0)
    opened = [connection.open(KEYS[1].public_key).id for _ in range(255)]
    assert opened == [*range(1, 255), 0]


def test_of_ids_whose_last_word_may_be_late_the_oldest_is_used_first() -> None:
    connection = Connection(KEYS[0], now=0.0, dialect=V2)
    channels = [connection.open(KEYS[1].public_key) for _ in range(255)]
    for channel in (channels[9], channels[3], channels[7]):
        assert ends(connection.receive_data(GO.encode(CHANNEL_OPENED, channel.id), 0.0))
    assert [connection.open(KEYS[1].public_key).id for _ in range(3)] == [9, 3, 7]


def test_both_sides_close_at_once() -> None:
    board = Switchboard()
    ours, theirs = board.channel()
    for side, channel in zip(board.sides, (ours, theirs), strict=True):
        side.connection.close(channel)
    board.pump()
    assert [ends(side.events) for side in board.sides] == [[(ChannelEndReason.NORMAL, True)]] * 2
    assert not any(side.connection.channels for side in board.sides)


def test_an_id_whose_channel_both_sides_closed_at_once_is_used_last() -> None:
    """The other side still answers the CloseChannel that went to it."""
    board = Switchboard(V2)
    ours, _ = board.channel()
    connection = board.sides[0].connection
    connection.close(ours)
    said(connection)
    assert ends(connection.receive_data(GO.encode(CLOSE_CHANNEL, ours.id), 0.0)) == [(ChannelEndReason.NORMAL, True)]
    following = connection.open(KEYS[1].public_key)
    assert following.id != ours.id
    assert connection.receive_data(GO.encode(CHANNEL_CLOSED, ours.id), 0.0) == [], "late"


def test_an_id_whose_channel_the_peer_closed_is_used_last() -> None:
    """The peer may give up waiting for the answer, and then says so."""
    board = Switchboard(V2)
    ours, _ = board.channel()
    connection = board.sides[0].connection
    assert ends(connection.receive_data(GO.encode(CLOSE_CHANNEL, ours.id), 0.0))
    assert connection.open(KEYS[1].public_key).id != ours.id
    assert connection.receive_data(GO.encode(CHANNEL_CLOSED, ours.id), 0.0) == [], "late"


def offer(connection: Connection, channel_id: int) -> list[Event]:
    key = KEYS[1].public_key.raw
    return connection.receive_data(GO.encode(OPEN_CHANNEL, channel_id, key + key + bytes(16)), 0.0)


def test_channels_of_our_own_that_ended_make_no_room_for_more_of_others() -> None:
    connection = Connection(KEYS[0], now=0.0, config=ConnectionConfig(incoming_limit=2))
    for _ in range(5):
        channel = connection.open(KEYS[1].public_key)
        assert ends(connection.receive_data(GO.encode(CHANNEL_CLOSED, channel.id), 0.0))
    said(connection)
    assert [len(offer(connection, 200 + number)) for number in range(3)] == [1, 1, 0]
    assert said(connection) == [(CHANNEL_CLOSED, 202, b"")]


def test_the_oldest_offer_makes_room_where_offers_take_all_the_room_for_channels_of_others() -> None:
    config = ConnectionConfig(incoming_limit=2, offered_limit=2)
    connection = Connection(KEYS[0], now=0.0, dialect=V2, config=config)
    for number in range(2):
        [event] = offer(connection, number)
        assert isinstance(event, ChannelOffered)
    ended, offered = offer(connection, 2)
    assert ends([ended]) == [(ChannelEndReason.REFUSED, True)] and isinstance(offered, ChannelOffered)
    assert len(connection.channels) == 2


def test_of_ids_that_may_still_get_a_late_frame_the_one_that_ended_first_is_used_first() -> None:
    board = Switchboard(V0)
    one, other = (board.channel()[0].id for _ in range(2))
    connection = board.sides[0].connection
    with pytest.raises(NoFreeChannel):
        while True:
            connection.open(KEYS[1].public_key)
    connection.receive_data(GO.encode(CLOSE_CHANNEL, one) + GO.encode(CLOSE_CHANNEL, other), 0.0)
    channel = connection.open(KEYS[1].public_key)
    connection.abort(channel)
    connection.handle_timeout(0.0)
    connection.handle_timeout(1e6)
    assert channel.id == one and one not in connection.channels
    assert [connection.open(KEYS[1].public_key).id for _ in range(2)] == [other, one]


def test_a_late_answer_of_a_client_with_ids_of_its_own_is_closed_by_the_id_in_it() -> None:
    """The relay knows the channel by that id only, so our CloseChannel will not be answered."""
    connection = Connection(KEYS[0], now=0.0)
    channel = connection.open(KEYS[1].public_key)
    connection.abort(channel)
    said(connection)
    assert connection.receive_data(GO.encode(CHANNEL_OPENED, channel.id, b"\x07" + bytes(49)), 0.0) == []
    assert said(connection) == [(CHANNEL_CLOSED, 7, b"")] and not connection.channels


def test_a_channel_that_the_peer_dropped_is_over() -> None:
    board = Switchboard()
    ours, _ = board.channel()
    caller = board.sides[0]
    caller.connection.send_data(ours, b"unsent")
    assert ends(caller.hear(GO.encode(CHANNEL_CLOSED, 0))) == [(ChannelEndReason.PEER_GONE, False)]
    assert ours.cut_bytes == 6 and said(caller.connection) == []
    assert caller.connection.close(ours)


def test_what_an_abort_cuts_off_is_counted_once() -> None:
    board = Switchboard(V0)
    ours, _ = board.channel()
    connection = board.sides[0].connection
    connection.send_data(ours, b"abc")
    said(connection)
    connection.send_data(ours, b"unsent")
    for _ in range(2):
        connection.abort(ours)
        assert ours.cut_bytes == 9, "sent without an acknowledgement, and not sent"


@each_dialect
def test_an_abort_drops_what_waits_and_tells_the_peer(dialect: Dialect) -> None:
    board = Switchboard(dialect)
    ours, theirs = board.channel()
    caller, callee = board.sides
    caller.connection.send_data(ours, b"unsent")
    caller.connection.abort(ours)
    callee.connection.send_data(theirs, b"too late")
    board.pump()
    assert caller.events == [] and ours.cut_bytes == 6 and ours not in caller.received
    assert ends(callee.events) == [(ChannelEndReason.PEER_GONE, False)], "no orderly end"
    assert not caller.connection.channels and not callee.connection.channels


@pytest.mark.parametrize("dialect", [V0, SEED_DIALECT], ids=lambda one: one.name)
def test_a_dial_that_is_given_up_takes_its_offer_back(dialect: Dialect) -> None:
    board = Switchboard(dialect)
    caller, callee = board.sides
    ours = caller.connection.open(callee.connection.identity)
    board.relay(caller)
    board.deliver(callee)
    caller.connection.abort(ours)
    board.relay(caller)
    board.deliver(callee)
    [offer, ended] = callee.events
    assert isinstance(offer, ChannelOffered) and isinstance(ended, ChannelEnded)
    with pytest.raises(LocalProtocolError):
        callee.connection.accept(offer.channel)
    board.pump()
    assert caller.events == [] and not caller.connection.channels
    assert caller.connection.open(callee.connection.identity).id == 0


@each_dialect
def test_a_dial_that_was_given_up_keeps_its_id_until_the_answer_came(dialect: Dialect) -> None:
    board = Switchboard(dialect)
    caller, callee = board.sides
    ours = caller.connection.open(callee.connection.identity)
    board.relay(caller)
    caller.connection.abort(ours)
    assert caller.connection.open(callee.connection.identity).id == 1
    board.deliver(callee)
    [offer] = callee.events
    assert isinstance(offer, ChannelOffered)
    callee.connection.accept(offer.channel)
    board.pump()
    reason = ChannelEndReason.PEER_GONE if dialect.own_ids else ChannelEndReason.CLOSED_BY_PEER
    assert ends(callee.events) == [(reason, False)]
    assert caller.events == [] and list(caller.connection.channels) == [1]
    # with ids of its own nothing comes after the answer, but the relay may have closed the channel as well
    assert caller.connection.open(callee.connection.identity).id == (2 if dialect.own_ids else 0)


def test_a_dial_that_was_given_up_and_never_answered_is_forgotten() -> None:
    connection, channel = dial()
    connection.abort(channel)
    connection.handle_timeout(0.0)
    assert connection.next_timeout() == connection.config.abandoned_id_s
    assert connection.handle_timeout(connection.config.abandoned_id_s) == []
    assert not connection.channels and [kind for kind, _, _ in said(connection)] == [OPEN_CHANNEL, CLOSE_CHANNEL]


@each_dialect
def test_a_dial_that_was_given_up_and_is_answered_after_it_was_forgotten_leaves_the_peer_no_channel(
    dialect: Dialect,
) -> None:
    """The network was stuck for so long, and then brings the OpenChannel after all."""
    board = Switchboard(dialect)
    caller, callee = board.sides
    ours = caller.connection.open(callee.connection.identity)
    caller.connection.abort(ours)
    caller.connection.handle_timeout(0.0)
    caller.connection.handle_timeout(caller.connection.config.abandoned_id_s)
    assert not caller.connection.channels
    board.relay(caller)
    board.deliver(callee, 1)
    [offer] = callee.events
    assert isinstance(offer, ChannelOffered)
    callee.connection.accept(offer.channel)
    board.pump()
    reason = ChannelEndReason.PEER_GONE if dialect.own_ids else ChannelEndReason.CLOSED_BY_PEER
    assert ends(callee.events) == [(reason, False)]
    assert caller.events == [] and not caller.connection.channels and not callee.connection.channels


# --- every state and every frame ---------------------------------------------------------------------------------------


def in_state(state: ChannelState) -> tuple[Side, Channel]:
    """A client with one channel in ``state``, with the id 0 in both directions."""
    board = Switchboard(SEED_DIALECT)
    caller = board.sides[0]
    if state is ChannelState.OFFERED:
        [offer] = caller.hear(GO.encode(OPEN_CHANNEL, 0, offer_of(Switchboard(SEED_DIALECT, keys=KEYS[::-1]))))
        assert isinstance(offer, ChannelOffered)
        return caller, offer.channel
    if state in (ChannelState.OPENING, ChannelState.ABANDONED):
        channel = caller.connection.open(KEYS[1].public_key)
        if state is ChannelState.ABANDONED:
            caller.connection.abort(channel)
        return caller, channel
    channel, _ = board.channel()
    if state is ChannelState.CLOSING:
        caller.connection.send_data(channel, b"x")
    if state in (ChannelState.CLOSING, ChannelState.HALF_CLOSED):
        caller.connection.close(channel)
    if state is ChannelState.CLOSED:
        caller.hear(GO.encode(CHANNEL_CLOSED, 0))
    assert channel.state is state
    return caller, channel


PAYLOADS = {OPEN_CHANNEL: bytes(82), CHANNEL_OPENED: bytes(49), CLOSE_CHANNEL: b"", CHANNEL_CLOSED: b"", SEND: b"\0\1x"}
D, A, F, P, C, H, X = (  # the states, for the table below
    ChannelState.OPENING,
    ChannelState.ABANDONED,
    ChannelState.OFFERED,
    ChannelState.OPEN,
    ChannelState.CLOSING,
    ChannelState.HALF_CLOSED,
    ChannelState.CLOSED,
)
#: Frame -> from each state the one it leads to. The Noise message and the ciphertext are none.
AFTER = {
    OPEN_CHANNEL: {D: D, A: A, F: F, P: P, C: C, H: H, X: X},
    CHANNEL_OPENED: {D: X, A: A, F: F, P: P, C: C, H: H, X: X},
    CLOSE_CHANNEL: {D: X, A: X, F: X, P: X, C: X, H: X, X: X},
    CHANNEL_CLOSED: {D: X, A: X, F: X, P: X, C: X, H: X, X: X},
    SEND: {D: D, A: A, F: F, P: X, C: X, H: H, X: X},
}


@pytest.mark.parametrize("state", ChannelState, ids=lambda one: one.name)
@pytest.mark.parametrize("kind", PAYLOADS)
def test_each_frame_in_each_state(kind: int, state: ChannelState) -> None:
    side, channel = in_state(state)
    silent = channel.discarding
    events = side.hear(GO.encode(kind, 0, PAYLOADS[kind]))
    assert channel.state is AFTER[kind][state]
    assert len(ends(events)) == (not silent and channel.discarding)
    assert (0 in side.connection.channels) is (channel.state is not ChannelState.CLOSED)


CALLS: dict[str, Callable[[Connection, Channel], object]] = {
    "accept": lambda connection, channel: connection.accept(channel),
    "refuse": lambda connection, channel: connection.refuse(channel),
    "send": lambda connection, channel: connection.send_data(channel, b"x"),
    "consumed": lambda connection, channel: connection.consumed(channel, 0),
    "close": lambda connection, channel: connection.close(channel),
    "abort": lambda connection, channel: connection.abort(channel),
}
ALLOWED = {"accept": {F}, "refuse": {F}, "send": {P}}


@pytest.mark.parametrize("state", ChannelState, ids=lambda one: one.name)
@pytest.mark.parametrize("call", CALLS)
def test_each_call_in_each_state(call: str, state: ChannelState) -> None:
    side, channel = in_state(state)
    if state in ALLOWED.get(call, set(ChannelState)):
        CALLS[call](side.connection, channel)
    else:
        with pytest.raises(LocalProtocolError):
            CALLS[call](side.connection, channel)
        assert channel.state is state
    for _ in range(3):
        side.connection.data_to_send()
        side.connection.handle_timeout(0.0)
        side.connection.handle_timeout(100.0)


def test_every_transition_is_of_the_table() -> None:
    assert set(TRANSITIONS) == set(ChannelState)
    channel = in_state(ChannelState.CLOSED)[1]
    with pytest.raises(AssertionError):
        channel.move(ChannelState.OPEN)


# --- any bytes, any schedule -----------------------------------------------------------------------------------------------


def outcome(board: Switchboard, pieces: list[bytes]) -> tuple[list[Any], str]:
    side, reason = board.sides[0], ""
    try:
        for piece in pieces:
            side.hear(piece)
    except RemoteProtocolError as error:
        reason = error.reason
    told = [(type(event).__name__, event.channel.id) for event in side.events if not isinstance(event, DataReceived)]
    return [told, sorted(side.connection.channels), list(side.received.values()), said(side.connection)], reason


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(list(DIALECTS.values())),
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 2), st.sampled_from([0, 1, 3, 49, 50, 82]), st.binary(max_size=8)),
        max_size=12,
    ),
    st.data(),
)
def test_any_frames_in_pieces_as_in_one(
    dialect: Dialect, frames: list[tuple[int, int, int, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(GO.encode(kind, one, (bytes(size) + tail)[-size or None :]) for kind, one, size, tail in frames)
    results = []
    for pieces in ([stream], data.draw(cuts(stream)), [stream[at : at + 1] for at in range(len(stream))]):
        board = Switchboard(dialect, random=lambda size: b"\x07" * size)
        board.channel()
        board.sides[0].connection.open(KEYS[1].public_key)
        results.append(outcome(board, pieces))
    assert results[0] == results[1] == results[2]
    assert not results[0][1]


@settings(deadline=None, max_examples=100)
@given(st.sampled_from([None, V0, V3, V5]), st.binary(max_size=200))
def test_any_bytes_are_frames_or_a_remote_error(dialect: Dialect | None, data: bytes) -> None:
    board = Switchboard(dialect or V0)
    if dialect is not None:
        board.channel()
    outcome(board, [data])


steps = st.lists(
    st.tuples(
        st.sampled_from(["write", "relay", "deliver", "read", "deliver", "relay"]),
        st.integers(0, 1),
        st.integers(0, 2),
        st.integers(1, 90_000),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(list(DIALECTS.values())), steps, st.booleans())
def test_two_clients_over_any_schedule(
    dialect: Dialect, schedule: list[tuple[str, int, int, int]], one_send: bool
) -> None:
    """Whatever comes when: each stream arrives whole and in order, and both ends learn of its end."""
    board = Switchboard(dialect, config=ConnectionConfig(one_send_per_write=one_send))
    pairs = [board.channel() for _ in range(3)]
    written = {channel: b"" for pair in pairs for channel in pair}
    unread = dict.fromkeys(written, 0)
    for side in board.sides:
        side.reads = False
    for what, which, number, size in schedule:
        side, channel = board.sides[which], pairs[number][which]
        if what == "write":
            data = bytes((len(written[channel]) + at) % 251 for at in range(min(size, 300))) * (1 + size // 300)
            side.connection.send_data(channel, data)
            written[channel] += data
        elif what == "relay":
            board.relay(side)
        elif what == "deliver":
            for event in board.deliver(side, frames=1 + size % 4):
                if isinstance(event, DataReceived):
                    unread[event.channel] += len(event.data)
        else:
            taken = min(size, unread[channel])
            unread[channel] -= taken
            side.connection.consumed(channel, taken)
    for side in board.sides:
        side.reads = True
        for channel in side.connection.channels.values():
            side.connection.consumed(channel, unread[channel])
    board.pump()
    for pair in pairs:
        for here, ours, theirs in ((1, pair[0], pair[1]), (0, pair[1], pair[0])):
            assert board.sides[here].received.get(theirs, b"") == written[ours]
            assert ours.acked_bytes == theirs.received_bytes == len(written[ours])
        board.sides[0].connection.close(pair[0])
    board.pump()
    assert [len(ends(side.events)) for side in board.sides] == [3, 3]
    assert not any(side.connection.channels for side in board.sides)
