"""A client's connection: every frame in every state, limits, and the order things are sent in.

:ref:`spec-admission`, :ref:`spec-establishing`, :ref:`spec-data`, :ref:`spec-closing`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.crypto.errors import NonceExhausted
from dmsg.crypto.keys import SecretKey
from dmsg.errors import LocalProtocolError, RemoteProtocolError
from dmsg.mux.core.connection import Connection, ConnectionState
from dmsg.mux.core.errors import Busy
from dmsg.mux.core.events import DataReceived, Event, Ready, Rejected, StreamClosed, StreamOffered, StreamOpened
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.record import COUNTER_LIMIT, COUNTER_SOFT_LIMIT, RecordLayer
from dmsg.mux.core.stream import Stream, StreamState
from dmsg.mux.core.tlv import Tlv, encode_tlvs
from dmsg.mux.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FWD,
    OK,
    RECORD_PLAINTEXT_LIMIT_BYTES,
    REQUEST,
    CloseReason,
    encode_frame,
    split_frames,
)
from dmsg.sansio.rate import RecentIds
from dmsg.testing.strategies import cuts

ALICE, BOB, CAROL = (SecretKey(hashlib.sha256(name).digest()).public_key for name in (b"alice", b"bob", b"carol"))
ONE, OTHER = bytes(32), bytes(range(32))
Frame = tuple[int, int, bytes]


class Peer:
    """Alice's connection and the server at its other end, which sends what the test tells it to."""

    def __init__(
        self, *, ready: bool = True, first_id: int = 0x10, random: Callable[[int], bytes] | None = None, **config: Any
    ) -> None:
        self.records = RecordLayer(OTHER, ONE)
        self.connection = Connection(
            ALICE,
            RecordLayer(ONE, OTHER),
            now=100.0,
            config=ConnectionConfig(**config),
            random=random or (lambda size: first_id.to_bytes(size, "big")),
        )
        if ready:
            assert isinstance(self.say(OK)[0], Ready)

    def say(self, kind: int, transport_id: int = 0, payload: bytes = b"") -> list[Event]:
        return self.connection.receive_data(self.records.seal(encode_frame(kind, transport_id, payload)), 100.0)

    def records_sent(self) -> list[bytes]:
        return self.records.open(self.connection.data_to_send())

    def sent(self) -> list[Frame]:
        """The frames of one ``data_to_send``."""
        plaintext = b"".join(self.records_sent())
        frames, used = split_frames(plaintext)
        assert used == len(plaintext)
        return [(kind, transport_id, plaintext[start:end]) for kind, transport_id, start, end in frames]

    def all_sent(self) -> list[Frame]:
        found = []
        while self.connection.wants_write:
            found += self.sent()
        return found

    # streams in each state

    def requested(self) -> Stream:
        return self.connection.open(BOB)

    def offered(self, transport_id: int = 0x21) -> Stream:
        [event] = self.say(REQUEST, transport_id, BOB.raw + ALICE.raw)
        assert isinstance(event, StreamOffered)
        return event.stream

    def opened(self) -> Stream:
        stream = self.requested()
        assert self.say(ACCEPT, stream.id, stream.request) == [StreamOpened(stream)]
        return stream

    def closing(self) -> Stream:
        stream = self.opened()
        self.connection.send_data(stream, b"on its way")
        assert not self.connection.close(stream)
        return stream

    def closed(self) -> Stream:
        stream = self.opened()
        self.connection.abort(stream)
        return stream

    def upgrading(self) -> Stream:
        stream = self.offered()
        self.connection.accept_for_upgrade(stream)
        return stream

    def in_state(self, state: StreamState) -> Stream:
        make = {
            StreamState.REQUESTED: self.requested,
            StreamState.OFFERED: self.offered,
            StreamState.UPGRADING: self.upgrading,
            StreamState.OPEN: self.opened,
            StreamState.CLOSING: self.closing,
            StreamState.CLOSED: self.closed,
        }[state]
        stream = make()
        assert stream.state is state
        self.all_sent()
        return stream


def ack(sequence: int) -> bytes:
    return sequence.to_bytes(2, "big")


# --- admission -------------------------------------------------------------------------------------------------------


def test_ok_makes_it_ready() -> None:
    peer = Peer(ready=False)
    assert peer.connection.state is ConnectionState.WAITING
    with pytest.raises(LocalProtocolError):
        peer.connection.open(BOB)
    assert peer.say(OK) == [Ready()]
    assert peer.connection.state is ConnectionState.READY
    assert peer.connection.next_timeout() is None
    assert peer.connection.handle_timeout(1_000.0) == []


@pytest.mark.parametrize("payload", [b"ab", b"\x05", b"\x05\0\x09cut", b"\x05\0\0\x05\0\0", bytes(2_000)])
def test_ok_with_a_payload_that_is_no_list_is_an_ok(payload: bytes) -> None:
    assert Peer(ready=False).say(OK, 5, payload) == [Ready()]


def test_ok_with_a_reason_is_a_refusal() -> None:
    peer = Peer(ready=False)
    assert peer.say(OK, 0, encode_tlvs({Tlv.REASON: b"server_draining"})) == [Rejected("server_draining")]
    assert peer.connection.state is ConnectionState.WAITING
    assert peer.connection.next_timeout() is None


def test_the_reason_of_a_refusal_is_text_of_bounded_length() -> None:
    peer = Peer(ready=False)
    [event] = peer.say(OK, 0, encode_tlvs({Tlv.REASON: b"\xff" * 900}))
    assert isinstance(event, Rejected)
    assert event.reason == "\ufffd" * 200


def test_no_ok_in_time() -> None:
    peer = Peer(ready=False, ok_timeout_s=10.0)
    assert peer.connection.next_timeout() == 110.0
    assert peer.connection.handle_timeout(109.9) == []
    with pytest.raises(RemoteProtocolError, match="no OK in time"):
        peer.connection.handle_timeout(110.0)
    assert peer.connection.handle_timeout(111.0) == []


def test_a_second_ok() -> None:
    with pytest.raises(RemoteProtocolError, match="second OK"):
        Peer().say(OK)


@pytest.mark.parametrize("kind", [ACCEPT, CLOSE, FWD, ACK, 4, 0xFF])
def test_a_frame_before_ok(kind: int) -> None:
    with pytest.raises(RemoteProtocolError, match="frame before OK"):
        Peer(ready=False).say(kind, 0x21, bytes(66))


def test_a_request_before_ok_is_taken_and_may_be_used_at_once() -> None:
    """A base server makes a client reachable before it says OK (:ref:`spec-admission`)."""
    peer = Peer(ready=False)
    stream = peer.offered()
    peer.connection.accept(stream)
    assert peer.sent() == [(ACCEPT, 0x21, BOB.raw + ALICE.raw)]
    assert peer.say(FWD, 0x21, b"\0\x01hi") == [DataReceived(stream, b"hi")]
    assert peer.sent() == [(ACK, 0x21, ack(1))]
    assert peer.say(OK) == [Ready()]


def test_a_request_before_ok_may_be_withdrawn_before_ok() -> None:
    peer = Peer(ready=False)
    stream = peer.offered()
    assert peer.say(CLOSE, stream.id, b"\0") == [StreamClosed(stream, 0, local=False)]
    refused = peer.offered(0x23)
    peer.connection.abort(refused, CloseReason.REFUSED)
    assert peer.say(CLOSE, refused.id, b"\0") == [], "it crossed our refusal"
    assert peer.say(OK) == [Ready()]


# --- every frame in every state --------------------------------------------------------------------------------------

TO_CLOSE = "close"  # answered with CLOSE malformed, and the stream is over
DOWNGRADED = "downgraded"  # the same with CLOSE downgrade


def expectation(state: StreamState, kind: int, well_formed: bool) -> str | None:
    """What a frame on a stream of ours leads to: an event class, ``TO_CLOSE``, ``RAISES``, or nothing."""
    if kind == OK or (kind == REQUEST and state is not StreamState.CLOSED):
        return "raises"
    if kind == REQUEST:
        return "StreamOffered"
    if state is StreamState.CLOSED:
        return None  # what was under way when we closed
    if kind == CLOSE:
        return "StreamClosed"
    if kind == ACCEPT:
        return "StreamOpened" if state is StreamState.REQUESTED and well_formed else TO_CLOSE
    if kind in (FWD, ACK):
        if state is StreamState.UPGRADING:
            return DOWNGRADED
        if state not in (StreamState.OPEN, StreamState.CLOSING) or not well_formed:
            return TO_CLOSE
        return "DataReceived" if kind == FWD and state is StreamState.OPEN else None
    return None  # an unknown type, on a live stream


@pytest.mark.parametrize("state", [state for state in StreamState if state is not StreamState.CONFIRMING])
@pytest.mark.parametrize("kind", [OK, REQUEST, ACCEPT, CLOSE, FWD, ACK, 4, 9, 0x0C, 0xFF])
@pytest.mark.parametrize("well_formed", [True, False])
def test_every_frame_in_every_state(state: StreamState, kind: int, well_formed: bool) -> None:
    peer = Peer()
    stream = peer.in_state(state)
    request = stream.request if stream.request[:33] != ALICE.raw or kind != REQUEST else BOB.raw + ALICE.raw
    good = {REQUEST: request, ACCEPT: stream.request, CLOSE: b"\x07", FWD: b"\0\x01data", ACK: b"\x30\x39"}
    bad = {ACCEPT: stream.request[::-1], CLOSE: b"", FWD: b"\0", ACK: bytes(3)}
    payload = (good if well_formed else bad).get(kind, b"")
    wanted = expectation(state, kind, well_formed)
    if wanted == "raises":
        with pytest.raises(RemoteProtocolError):
            peer.say(kind, stream.id, payload)
        return
    if wanted == "StreamOffered" and stream.id % 2 == 0:  # even ids are ours to ask for
        assert peer.say(kind, stream.id, payload) == []
        assert peer.sent() == [(CLOSE, stream.id, bytes((CloseReason.BAD_ID,)))]
        return
    events = peer.say(kind, stream.id, payload)
    sent = peer.sent()
    if wanted is None:
        assert events == []
        assert all(frame[0] == ACK for frame in sent)
        assert stream.state is state
    elif wanted in (TO_CLOSE, DOWNGRADED):
        reason = CloseReason.MALFORMED if wanted == TO_CLOSE else CloseReason.DOWNGRADE
        assert events == [StreamClosed(stream, reason, local=True)]
        assert sent == [(CLOSE, stream.id, bytes((reason,)))]
        assert stream.state is StreamState.CLOSED
    else:
        assert [type(event).__name__ for event in events] == [wanted]
        if kind == CLOSE:
            assert events == [StreamClosed(stream, 7 if well_formed else 0, local=False)]
            assert sent == [], "a CLOSE is never answered with a CLOSE"
    assert (stream.id in peer.connection.streams) == (stream.state is not StreamState.CLOSED)


frames = st.tuples(
    st.sampled_from([OK, REQUEST, ACCEPT, CLOSE, FWD, ACK, 4, 0xFF]),
    st.sampled_from([0x10, 0x12, 0x14, 0x21, 0x23, 0]),
    st.sampled_from(
        [
            b"",
            b"\0",
            b"\0\x10",
            b"\0\x10data",
            BOB.raw + ALICE.raw,
            ALICE.raw + BOB.raw,
            ALICE.raw * 2,
            b"\x02" + b"\xff" * 32 + ALICE.raw,
        ]
    ),
)


class Application:
    """Does something to each stream it hears of, and checks that what it hears makes sense."""

    def __init__(self, connection: Connection, draw: Callable[[int], int]) -> None:
        self.connection = connection
        self.draw = draw
        self.over: set[int] = set()
        self.known: dict[int, Stream] = {}

    def act(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, StreamOffered):
                assert event.stream.state is StreamState.OFFERED
                assert self.connection.streams[event.stream.id] is event.stream
                self.known[id(event.stream)] = event.stream
                if event.stream.state is StreamState.OFFERED and (what := self.draw(3)):
                    self.connection.accept(event.stream) if what == 1 else self.connection.abort(event.stream, 1)
            elif isinstance(event, DataReceived):
                assert event.data
                assert id(event.stream) not in self.over, "no data behind the end"
                if self.draw(2):
                    self.connection.consumed(event.stream, len(event.data))
            elif isinstance(event, StreamClosed):
                assert event.stream.state is StreamState.CLOSED
                assert id(event.stream) not in self.over, "over once"
                self.over.add(id(event.stream))
                self.known[id(event.stream)] = event.stream


@given(st.lists(frames, max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_any_frames_in_any_order_raise_nothing_but_a_protocol_error(wanted: list[Frame], random: Any) -> None:
    peer = Peer()
    connection = peer.connection
    application = Application(connection, random.randrange)
    for frame in wanted:
        if random.randrange(3) == 0:
            stream = connection.open(BOB)
            application.known[id(stream)] = stream
        for stream in list(connection.streams.values()):
            choice = random.randrange(6)
            if choice == 0 and stream.state is StreamState.OPEN:
                connection.send_data(stream, bytes(random.randrange(1, 40)))
            elif choice == 1 and stream.state in (StreamState.OPEN, StreamState.CLOSING) and connection.close(stream):
                application.over.add(id(stream))
                application.known[id(stream)] = stream
        try:
            application.act(peer.say(*frame))
        except RemoteProtocolError:
            return
        peer.all_sent()
        for stream_id, stream in connection.streams.items():
            assert stream.id == stream_id
            assert stream.state is not StreamState.CLOSED
        offered = sum(stream.state is StreamState.OFFERED for stream in connection.streams.values())
        assert connection._openings.offered == offered


@given(st.binary(max_size=300))
def test_any_plaintext_raises_nothing_but_a_protocol_error(data: bytes) -> None:
    peer = Peer()
    try:
        peer.connection.receive_data(peer.records.seal(data), 0.0)
    except RemoteProtocolError as error:
        assert error.stage == "frame"


@given(st.lists(st.integers(1, 60), max_size=12), st.data())
def test_frames_over_any_records_in_any_chunks(sizes: list[int], data: st.DataObject) -> None:
    peer = Peer()
    stream = peer.opened()
    frames = b"".join(encode_frame(FWD, stream.id, ack(n) + bytes((n,)) * size) for n, size in enumerate(sizes))
    sealed = b"".join(map(peer.records.seal, data.draw(cuts(frames))))
    events: list[Event] = []
    for piece in data.draw(cuts(sealed)):
        events += peer.connection.receive_data(piece, 0.0)
    assert [e.data for e in events if isinstance(e, DataReceived)] == [bytes((n,)) * s for n, s in enumerate(sizes)]
    peer.connection.data_to_send()


# --- ids -------------------------------------------------------------------------------------------------------------


def test_ids_are_even_begin_at_random_go_up_by_two_and_wrap() -> None:
    peer = Peer(first_id=0xFFFB)
    assert [peer.requested().id for _ in range(4)] == [0xFFFA, 0xFFFC, 0xFFFE, 0]


def test_ids_in_use_are_stepped_over() -> None:
    peer = Peer(first_id=2)
    first, second, third = (peer.requested() for _ in range(3))
    peer.connection.abort(second)
    peer.connection._ids.next_id = first.id
    assert peer.requested().id == second.id
    assert peer.requested().id == third.id + 2


def test_all_ids_taken_is_an_error_at_once() -> None:
    peer = Peer()
    streams = [peer.requested() for _ in range(1 << 15)]
    assert len({stream.id for stream in streams}) == 1 << 15
    with pytest.raises(Busy) as caught:
        peer.requested()
    assert caught.value.by == "local"
    peer.connection.abort(streams[1234])
    assert peer.requested().id == streams[1234].id


def test_sequences_begin_at_random() -> None:
    values = iter([0x0000, 0xABCD])
    peer = Peer(random=lambda size: next(values).to_bytes(size, "big"))
    stream = peer.opened()
    peer.all_sent()
    peer.connection.send_data(stream, b"x")
    assert peer.sent() == [(FWD, stream.id, b"\xab\xcdx")]


# --- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport_id", "payload", "reason"),
    [
        (0x20, BOB.raw + ALICE.raw, CloseReason.BAD_ID),
        (0x21, BOB.raw + CAROL.raw, CloseReason.MALFORMED),
        (0x21, (BOB.raw + ALICE.raw)[:65], CloseReason.MALFORMED),
        (0x21, BOB.raw + ALICE.raw + b"\0", CloseReason.MALFORMED),
        (0x21, b"", CloseReason.MALFORMED),
        (0x21, b"\x02" + b"\xff" * 32 + ALICE.raw, CloseReason.MALFORMED),
        (0x21, b"\x04" + BOB.raw[1:] + ALICE.raw, CloseReason.MALFORMED),
    ],
)
def test_requests_that_are_refused_by_themselves(transport_id: int, payload: bytes, reason: int) -> None:
    peer = Peer()
    assert peer.say(REQUEST, transport_id, payload) == []
    assert peer.sent() == [(CLOSE, transport_id, bytes((reason,)))]
    assert not peer.connection.streams


def test_a_request_of_ones_own_key() -> None:
    peer = Peer()
    [event] = peer.say(REQUEST, 0x21, ALICE.raw + ALICE.raw)
    assert isinstance(event, StreamOffered)
    assert event.stream.remote == ALICE


def test_offers_wait_for_a_decision_up_to_a_limit() -> None:
    peer = Peer(offered_limit=2)
    first, second = peer.offered(1), peer.offered(3)
    assert peer.say(REQUEST, 5, BOB.raw + ALICE.raw) == []
    assert peer.sent() == [(CLOSE, 5, bytes((CloseReason.BUSY,)))]
    peer.connection.accept(first)
    peer.offered(5)
    peer.connection.abort(second, CloseReason.REFUSED)
    peer.offered(7)
    peer.say(CLOSE, 7, b"\0")
    peer.offered(9)
    assert peer.say(REQUEST, 11, BOB.raw + ALICE.raw) == []


def test_an_id_can_be_asked_for_again_once_it_is_over() -> None:
    peer = Peer()
    peer.connection.abort(peer.offered(0x21))
    again = peer.offered(0x21)
    assert peer.say(FWD, 0x21, b"\0\x01x") == [StreamClosed(again, CloseReason.MALFORMED, local=True)]


def test_calls_that_the_state_does_not_allow() -> None:
    peer = Peer()
    requested, opened = peer.requested(), peer.opened()
    with pytest.raises(LocalProtocolError):
        peer.connection.accept(requested)
    with pytest.raises(LocalProtocolError):
        peer.connection.accept(opened)
    with pytest.raises(LocalProtocolError):
        peer.connection.send_data(requested, b"too soon")
    peer.connection.close(opened)
    with pytest.raises(LocalProtocolError):
        peer.connection.send_data(opened, b"too late")
    assert not peer.connection.close(requested), "a request is aborted, not closed"
    assert requested.state is StreamState.REQUESTED


# --- frames of no stream ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ACCEPT, FWD, ACK, 4])
@pytest.mark.parametrize("transport_id", [0x50, 0x51])
def test_a_frame_of_no_stream_is_answered_with_close(kind: int, transport_id: int) -> None:
    peer = Peer()
    assert peer.say(kind, transport_id, bytes(2)) == []
    assert peer.sent() == [(CLOSE, transport_id, b"\0")]


def test_a_close_of_no_stream_is_not_answered() -> None:
    peer = Peer()
    assert peer.say(CLOSE, 0x50, b"\0") == []
    assert not peer.connection.wants_write


@pytest.mark.parametrize("kind", [ACCEPT, CLOSE, FWD, ACK])
def test_what_was_under_way_when_we_closed_is_not_answered(kind: int) -> None:
    peer = Peer()
    stream = peer.in_state(StreamState.CLOSED)
    assert peer.say(kind, stream.id, b"\0\x01") == []
    assert not peer.connection.wants_write


# --- sending ---------------------------------------------------------------------------------------------------------


def test_window_bounds_what_is_under_way() -> None:
    peer = Peer(send_window_bytes=100, frame_data_bytes=60, first_id=0)
    stream = peer.opened()
    peer.all_sent()
    peer.connection.send_data(stream, bytes(250))
    assert [(kind, len(payload) - 2) for kind, _, payload in peer.all_sent()] == [(FWD, 60), (FWD, 40)]
    assert not peer.connection.wants_write
    assert peer.say(ACK, stream.id, ack(0)) == []
    assert [len(payload) - 2 for _, _, payload in peer.all_sent()] == [60]
    peer.say(ACK, stream.id, ack(1))
    peer.say(ACK, stream.id, ack(2))
    assert [len(payload) - 2 for _, _, payload in peer.all_sent()] == [60, 30]
    assert stream.sent_bytes == 250


def test_streams_take_turns() -> None:
    peer = Peer(frame_data_bytes=10, send_window_bytes=1000)
    streams = [peer.opened() for _ in range(3)]
    peer.all_sent()
    for stream in streams:
        peer.connection.send_data(stream, bytes(20))
    assert [transport_id for _, transport_id, _ in peer.sent()] == [stream.id for stream in streams] * 2


def test_answers_go_before_data_and_all_of_it_in_one_record() -> None:
    peer = Peer()
    stream = peer.opened()
    peer.all_sent()
    peer.connection.send_data(stream, b"data")
    peer.connection.send_data(stream, b" more")
    other = peer.requested()
    peer.say(FWD, stream.id, b"\0\x07hello")
    [record] = peer.records_sent()
    kinds = [kind for kind, *_ in split_frames(record)[0]]
    assert kinds == [REQUEST, ACK, FWD]
    assert other.request in record and b"data more" in record


def test_a_flush_is_bounded_and_frames_fit_records() -> None:
    peer = Peer(flush_bytes=100_000, send_window_bytes=1 << 20, pause_bytes=1 << 20)
    stream = peer.opened()
    peer.all_sent()
    peer.connection.send_data(stream, bytes(500_000))
    flushes = []
    while peer.connection.wants_write:
        records = peer.records_sent()
        assert all(len(record) <= RECORD_PLAINTEXT_LIMIT_BYTES for record in records)
        flushes.append(sum(map(len, records)))
    assert max(flushes) < 100_000 + 33_000
    assert sum(flushes) > 500_000


def test_writers_are_paused_and_let_go_on() -> None:
    peer = Peer(pause_bytes=100, resume_bytes=50, frame_data_bytes=30, flush_bytes=30, send_window_bytes=1000)
    stream = peer.opened()
    peer.all_sent()
    connection = peer.connection
    assert connection.send_data(stream, bytes(100)) is False
    assert connection.send_data(stream, bytes(1)) is True
    assert stream.blocked
    connection.data_to_send()
    assert connection.writable == [], "71 bytes are too many"
    connection.data_to_send()
    assert connection.writable == [stream]
    assert not stream.blocked
    connection.data_to_send()
    assert connection.writable == [stream], "told once"


def test_a_writer_that_does_not_heed_the_pause_is_an_error() -> None:
    peer = Peer(pause_bytes=10, pending_limit_bytes=100)
    stream = peer.opened()
    assert peer.connection.send_data(stream, bytes(100)) is True
    with pytest.raises(Busy) as caught:
        peer.connection.send_data(stream, b"x")
    assert caught.value.by == "local"


def test_reading_stops_while_answers_pile_up() -> None:
    peer = Peer(control_limit_bytes=20)
    stream = peer.opened()
    peer.all_sent()
    assert not peer.connection.overloaded
    for n in range(3):
        peer.say(FWD, stream.id, ack(n) + b"x")
    assert peer.connection.overloaded
    peer.connection.data_to_send()
    assert not peer.connection.overloaded


def test_nothing_to_send_is_nothing() -> None:
    peer = Peer()
    assert not peer.connection.wants_write
    assert peer.connection.data_to_send() == b""
    stream = peer.opened()
    peer.all_sent()
    peer.connection.send_data(stream, b"never sent")
    peer.say(CLOSE, stream.id, b"\0")
    assert peer.connection.data_to_send() == b""
    assert not peer.connection.wants_write


def test_a_used_up_record_counter_is_an_error_of_ours() -> None:
    peer = Peer()
    peer.connection._records._sent = COUNTER_SOFT_LIMIT - 1
    assert not peer.connection.near_exhaustion
    peer.requested()
    peer.connection.data_to_send()
    assert peer.connection.near_exhaustion
    peer.connection._records._sent = COUNTER_LIMIT
    peer.requested()
    with pytest.raises(NonceExhausted):
        peer.connection.data_to_send()


# --- receiving -------------------------------------------------------------------------------------------------------


def test_acknowledgements_follow_the_rule_of_the_base_protocol() -> None:
    peer = Peer()
    stream = peer.opened()
    peer.all_sent()
    peer.say(FWD, stream.id, ack(1) + bytes(65_000))
    peer.say(FWD, stream.id, ack(2) + bytes(535))
    assert peer.sent() == [(ACK, stream.id, ack(1)), (ACK, stream.id, ack(2))]
    peer.say(FWD, stream.id, ack(3) + bytes(1))
    peer.say(FWD, stream.id, ack(9) + bytes(1))
    assert not peer.connection.wants_write
    peer.connection.consumed(stream, 2)
    assert not peer.connection.wants_write
    peer.connection.consumed(stream, 1)
    assert peer.sent() == [(ACK, stream.id, ack(3)), (ACK, stream.id, ack(9))]
    assert stream.received_bytes == 65_537


def test_fwd_without_data_is_acknowledged_and_no_event() -> None:
    peer = Peer()
    stream = peer.opened()
    peer.all_sent()
    assert peer.say(FWD, stream.id, ack(5)) == []
    assert peer.sent() == [(ACK, stream.id, ack(5))]


def test_a_peer_that_ignores_acknowledgements_is_closed_at_the_limit() -> None:
    peer = Peer(receive_limit_bytes=100_000)
    stream = peer.opened()
    peer.all_sent()
    assert len(peer.say(FWD, stream.id, ack(1) + bytes(60_000))) == 1
    assert len(peer.say(FWD, stream.id, ack(2) + bytes(40_000))) == 1
    assert peer.say(FWD, stream.id, ack(3) + b"x") == [StreamClosed(stream, CloseReason.SLOW_CONSUMER, local=True)]
    assert peer.sent()[-1] == (CLOSE, stream.id, bytes((CloseReason.SLOW_CONSUMER,)))
    peer.connection.consumed(stream, 100_000)
    assert not peer.connection.wants_write, "nothing is acknowledged any more"


# --- ends ------------------------------------------------------------------------------------------------------------


def test_close_with_nothing_under_way_is_immediate() -> None:
    peer = Peer()
    stream = peer.in_state(StreamState.OPEN)
    assert peer.connection.close(stream)
    assert peer.sent() == [(CLOSE, stream.id, b"\0")]
    assert peer.connection.close(stream), "and silent the second time"
    assert not peer.connection.wants_write


def test_close_waits_for_everything_written_to_be_acknowledged() -> None:
    peer = Peer(send_window_bytes=10, first_id=0)
    stream = peer.in_state(StreamState.OPEN)
    peer.connection.send_data(stream, bytes(15))
    assert not peer.connection.close(stream)
    assert [kind for kind, *_ in peer.all_sent()] == [FWD]
    assert not peer.connection.close(stream)
    assert peer.say(ACK, stream.id, ack(0)) == []
    assert [kind for kind, *_ in peer.all_sent()] == [FWD]
    assert peer.say(ACK, stream.id, ack(0x77)) == [], "an ACK of nothing"
    assert peer.say(ACK, stream.id, ack(1)) == [StreamClosed(stream, CloseReason.NORMAL, local=True)]
    assert peer.all_sent() == [(CLOSE, stream.id, b"\0")]


def test_what_arrives_while_closing_is_acknowledged_and_dropped() -> None:
    peer = Peer(receive_limit_bytes=1_000)
    stream = peer.in_state(StreamState.CLOSING)
    for n in range(5):
        assert peer.say(FWD, stream.id, ack(n) + bytes(900)) == []
    assert peer.all_sent() == [(ACK, stream.id, ack(n)) for n in range(5)]
    assert stream.gate.unread_bytes == 0


def test_the_peer_closes_while_we_are_closing() -> None:
    peer = Peer()
    stream = peer.in_state(StreamState.CLOSING)
    assert peer.say(CLOSE, stream.id, b"\x0d") == [StreamClosed(stream, 13, local=False)]
    assert not peer.connection.wants_write


def test_abort_drops_what_is_not_sent() -> None:
    peer = Peer()
    stream = peer.in_state(StreamState.OPEN)
    peer.connection.send_data(stream, b"dropped")
    peer.connection.abort(stream, CloseReason.DEADLINE)
    peer.connection.abort(stream, CloseReason.DEADLINE)
    assert peer.all_sent() == [(CLOSE, stream.id, bytes((CloseReason.DEADLINE,)))]


def test_a_cancelled_request_sends_close() -> None:
    peer = Peer()
    stream = peer.in_state(StreamState.REQUESTED)
    peer.connection.abort(stream)
    assert peer.all_sent() == [(CLOSE, stream.id, b"\0")]
    assert peer.say(ACCEPT, stream.id, stream.request) == [], "the answer crossed our CLOSE"
    assert not peer.connection.wants_write


def test_only_the_latest_ends_are_remembered() -> None:
    peer = Peer()
    first = peer.requested()
    peer.connection.abort(first)
    for _ in range(2 * RecentIds.CAPACITY):
        peer.connection.abort(peer.requested())
    peer.all_sent()
    peer.say(FWD, first.id, ack(1))
    assert peer.all_sent() == [(CLOSE, first.id, b"\0")]


def test_default_randomness_is_the_system_s() -> None:
    one = Connection(ALICE, RecordLayer(ONE, OTHER), now=0.0)
    assert one._random is os.urandom
    assert one._ids.next_id % 2 == 0
