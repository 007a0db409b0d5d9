"""A client's connection with sealed streams: every frame in every state (:ref:`spec-sealed-frames`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.crypto.keys import SecretKey
from dmsg.errors import LocalProtocolError, RemoteProtocolError
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.e2e_handshake import UPGRADE_MAGIC, SecureInitiator, SecureResponder
from dmsg.mux.core.e2e_negotiation import Carrier, EndToEnd
from dmsg.mux.core.errors import Busy
from dmsg.mux.core.events import (
    Confirmed,
    DataReceived,
    EndAcked,
    EndReceived,
    Event,
    Ready,
    StreamClosed,
    StreamOffered,
    StreamOpened,
    UpgradeReceived,
)
from dmsg.mux.core.held_acks import HELD_S
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.sealed_stream import HELD_ACK_BYTES, SealedStream
from dmsg.mux.core.stream import Stream, StreamState
from dmsg.mux.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FWD,
    HEADER_BYTES,
    OK,
    REQUEST,
    REQUEST_BYTES,
    CloseReason,
    encode_frame,
    split_frames,
)

ALICE, BOB, SERVER = (SecretKey(bytes((n,)) * 32) for n in (0x11, 0x22, 0x33))
ONE, OTHER = bytes(32), bytes(range(32))
ENDS = BOB.public_key.raw + ALICE.public_key.raw
INCOMING = 0x21
Frame = tuple[int, int, bytes]


class Alice:
    """Alice's connection; the relay at its other end says what the test wants, and Bob is behind it with his keys."""

    def __init__(self, **config: Any) -> None:
        self.records = RecordLayer(OTHER, ONE)
        self.connection = Connection(
            ALICE.public_key,
            RecordLayer(ONE, OTHER),
            now=0.0,
            config=ConnectionConfig(**config),
            random=lambda size: b"\x10" * size,
            extended=True,
            end_to_end=EndToEnd(ALICE, SERVER.public_key),
        )
        self.stream: Stream
        self.far: SealedStream | None = None
        """Bob's end of a sealed stream."""
        assert isinstance(self.say((OK, 0, b""))[0], Ready)

    def say(self, *frames: Frame) -> list[Event]:
        plaintext = b"".join(encode_frame(*frame) for frame in frames)
        return self.connection.receive_data(self.records.seal(plaintext), 0.0)

    def sent(self) -> list[Frame]:
        found: list[Frame] = []
        while self.connection.wants_write:
            plaintext = b"".join(self.records.open(self.connection.data_to_send()))
            frames, used = split_frames(plaintext)
            assert used == len(plaintext)
            found += [(kind, transport_id, plaintext[start:end]) for kind, transport_id, start, end in frames]
        return found

    def bob(self, keys: Any, stream: Stream) -> None:
        base = PlainStream(
            stream.id, ALICE.public_key, b"", initiator=not stream.initiator, window_bytes=1, first_sequence=0
        )
        self.far = SealedStream(base, keys, window_bytes=1 << 20, ack_limit_bytes=1 << 18)
        self.far.state = StreamState.OPEN

    # streams in each state

    def requested(self) -> None:
        self.stream = self.connection.open(BOB.public_key, Carrier.REQUEST)

    def requested_for_upgrade(self) -> None:
        self.stream = self.connection.open(BOB.public_key, Carrier.FORWARD)

    def upgrading(self) -> None:
        self.requested_for_upgrade()
        assert self.say((ACCEPT, self.stream.id, self.stream.request)) == []

    def opened(self) -> None:
        self.requested()
        message = self.stream.request[REQUEST_BYTES:]
        answer, keys = SecureResponder(BOB, ALICE.public_key, SERVER.public_key, message).answer()
        [event] = self.say((ACCEPT, self.stream.id, self.stream.request[:REQUEST_BYTES] + answer))
        assert isinstance(event, StreamOpened) and event.resume is None
        self.stream = event.stream
        self.bob(keys, self.stream)

    def closing(self) -> None:
        self.opened()
        self.connection.send_data(self.stream, b"on its way")
        assert not self.connection.close(self.stream)

    def half_closed(self) -> None:
        self.opened()
        self.connection.end(self.stream)

    def offered(self) -> None:
        self.initiator = SecureInitiator(BOB, ALICE.public_key, SERVER.public_key)
        [event] = self.say((REQUEST, INCOMING, ENDS + self.initiator.message))
        assert isinstance(event, StreamOffered)
        self.stream = event.stream

    def offered_plain(self) -> None:
        [event] = self.say((REQUEST, INCOMING, ENDS))
        assert isinstance(event, StreamOffered)
        self.stream = event.stream

    def awaiting_upgrade(self) -> None:
        self.offered_plain()
        self.connection.accept_for_upgrade(self.stream)

    def confirming(self) -> None:
        self.offered()
        self.connection.read_offer(self.stream)
        self.stream = self.connection.accept(self.stream)
        answer = next(payload for kind, _, payload in self.sent() if kind == ACCEPT)
        keys, _ = self.initiator.finish(answer[REQUEST_BYTES:])
        self.bob(keys, self.stream)

    def base_open(self) -> None:
        self.stream = self.connection.open(BOB.public_key)
        self.say((ACCEPT, self.stream.id, self.stream.request))

    def base_closing(self) -> None:
        self.base_open()
        self.connection.send_data(self.stream, b"on its way")
        self.connection.close(self.stream)

    # what must hold after every frame

    def check(self) -> None:
        connection = self.connection
        assert connection._openings.offered == sum(
            one.state is StreamState.OFFERED for one in connection.streams.values()
        )
        for stream_id, stream in connection.streams.items():
            assert stream.id == stream_id
            assert stream.state is not StreamState.CLOSED
            assert stream.acked_bytes <= stream.sent_bytes
            assert stream.unread_bytes >= 0
        assert all(stream.state is not StreamState.CLOSED or stream.queued for stream in connection._out._sending)


STATES: dict[str, tuple[Callable[[Alice], None], StreamState]] = {
    "requested": (Alice.requested, StreamState.REQUESTED),
    "requested for upgrade": (Alice.requested_for_upgrade, StreamState.REQUESTED),
    "offered": (Alice.offered, StreamState.OFFERED),
    "offered plain": (Alice.offered_plain, StreamState.OFFERED),
    "upgrading, dialled": (Alice.upgrading, StreamState.UPGRADING),
    "upgrading, listened": (Alice.awaiting_upgrade, StreamState.UPGRADING),
    "confirming": (Alice.confirming, StreamState.CONFIRMING),
    "open": (Alice.opened, StreamState.OPEN),
    "half-closed": (Alice.half_closed, StreamState.OPEN),
    "closing": (Alice.closing, StreamState.CLOSING),
    "base open": (Alice.base_open, StreamState.OPEN),
    "base closing": (Alice.base_closing, StreamState.CLOSING),
}


def in_state(name: str) -> Alice:
    alice = Alice()
    make, state = STATES[name]
    make(alice)
    assert alice.stream.state is state
    for kind, _, payload in alice.sent():
        if alice.far is not None and kind == ACK:
            alice.far.receive_ack(payload)
        elif alice.far is not None and kind == FWD:
            alice.far.receive_fwd(payload, 0, len(payload))
    return alice


def plain_payload(alice: Alice, kind: int) -> bytes:
    return {
        REQUEST: ENDS,
        ACCEPT: alice.stream.request[:REQUEST_BYTES],
        CLOSE: b"\0",
        FWD: b"\0\0" + b"data in the clear, longer than a tag",
        ACK: b"\0\0",
    }.get(kind, b"")


def sealed_payload(alice: Alice, kind: int) -> bytes:
    far = alice.far
    if far is None:
        message = SecureInitiator(BOB, ALICE.public_key, SERVER.public_key).message
        return {ACCEPT: alice.stream.request[:REQUEST_BYTES] + message, FWD: b"\0\0" + UPGRADE_MAGIC + message}.get(
            kind, bytes(40)
        )
    if kind == FWD:
        far.ack_due = False  # else the data would go with the ACK
        far.pending.append(b"sealed data")
        return far.next_fwd(1000)[1]
    if kind == ACK:
        return far.take_ack()[HEADER_BYTES:]
    if kind == CLOSE:
        return far.close_frame(0)[HEADER_BYTES:]
    return bytes(40)


PAYLOADS: dict[str, Callable[[Alice, int], bytes]] = {
    "empty": lambda alice, kind: b"",
    "plain": plain_payload,
    "sealed": sealed_payload,
    "sealed for another type": lambda alice, kind: sealed_payload(alice, FWD if kind == ACK else ACK),
    "upgrade": lambda alice, kind: b"\0\0" + UPGRADE_MAGIC + bytes(49),
    "garbage": lambda alice, kind: bytes(range(90)),
    "long": lambda alice, kind: bytes(65_000),
}
KINDS = [OK, REQUEST, ACCEPT, CLOSE, FWD, ACK, 0x7F]


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", STATES)
def test_every_frame_in_every_state(state: str, kind: int, payload: str) -> None:
    alice = in_state(state)
    stream = alice.stream
    try:
        events = alice.say((kind, stream.id, PAYLOADS[payload](alice, kind)))
    except RemoteProtocolError:
        assert kind in (OK, REQUEST)  # the connection's own frames, out of place
        return
    alice.check()
    is_over = stream.state is StreamState.CLOSED
    assert is_over is any(isinstance(event, StreamClosed) for event in events)
    assert (stream.id in alice.connection.streams) is not is_over
    if kind == CLOSE:
        assert is_over
        [event] = events
        assert isinstance(event, StreamClosed)
        assert event.proven is (payload == "sealed" and alice.far is not None)
    for event in events:
        if isinstance(event, DataReceived):
            assert event.data == b"sealed data" or stream.security == "hop", "the application gets verified data only"
    if stream.security == "e2e" and kind in (FWD, ACK) and payload != "sealed":
        assert is_over
        assert events[-1] == StreamClosed(stream, CloseReason.INTEGRITY, local=True)
    alice.sent()
    assert not alice.connection.wants_write


@pytest.mark.parametrize("state", STATES)
def test_what_the_application_asks_for_in_every_state(state: str) -> None:
    for what in ("accept", "accept for upgrade", "send", "close", "end", "abort", "consumed"):
        alice = in_state(state)
        connection, stream = alice.connection, alice.stream
        try:
            if what.startswith("accept"):
                (connection.accept if what == "accept" else connection.accept_for_upgrade)(stream)
            elif what == "send":
                connection.send_data(stream, b"data")
            elif what == "close":
                connection.close(stream)
            elif what == "end":
                connection.end(stream)
            elif what == "abort":
                connection.abort(stream)
                connection.abort(stream)
            else:
                connection.consumed(stream, 0)
        except LocalProtocolError:
            assert what != "abort"
        alice.check()
        alice.sent()
        alice.check()


frames = st.tuples(
    st.sampled_from([ACCEPT, CLOSE, FWD, ACK, 0x7F, *[FWD, ACK] * 3]),
    st.sampled_from(list(PAYLOADS)[1:]),
)
calls = st.tuples(
    st.sampled_from(["send", "close", "end", "abort", "flush", "consume", "end of the peer"]), st.just("")
)


@settings(max_examples=300)
@given(st.sampled_from(list(STATES)), st.lists(st.one_of(frames, frames, calls), max_size=12))
def test_any_frames_and_calls_in_any_order(state: str, steps: list[tuple[Any, str]]) -> None:
    alice = in_state(state)
    connection = alice.connection
    unread = 0
    ended = False
    for what, payload in steps:
        stream = alice.stream
        events: list[Event] = []
        if payload:
            if what == FWD and payload == "sealed" and alice.far is not None and ended:
                continue  # Bob is honest
            events = alice.say((what, stream.id, PAYLOADS[payload](alice, what)))
        elif what == "send":
            if stream.state is StreamState.OPEN and not getattr(stream, "end_wanted", False):
                connection.send_data(stream, b"more")
        elif what == "close":
            connection.close(stream)
        elif what == "end":
            connection.end(stream)
        elif what == "abort":
            connection.abort(stream)
        elif what == "flush":
            alice.sent()
        elif what == "consume":
            connection.consumed(stream, unread)
            unread = 0
        elif alice.far is not None and not ended and stream.state is not StreamState.CLOSED:
            ended = True
            alice.far.end()
            events = alice.say((FWD, stream.id, alice.far.next_fwd(100)[1]))
        for event in events:
            match event:
                case DataReceived():
                    unread += len(event.data)
                case StreamOpened():
                    alice.stream = event.stream
                case UpgradeReceived() if stream.state is not StreamState.CLOSED:
                    connection.abort(stream, CloseReason.INTEGRITY)
                case StreamOpened() | UpgradeReceived() | Confirmed() | StreamClosed() | EndAcked() | EndReceived():
                    pass
                case _:
                    raise AssertionError(event)
        alice.check()
    alice.sent()
    alice.check()


# --- one by one ------------------------------------------------------------------------------------------------------


def test_a_sealed_stream_that_is_over_sends_nothing_more() -> None:
    alice = Alice(flush_bytes=1_000, sealed_data_bytes=500)
    alice.opened()
    alice.sent()
    alice.connection.send_data(alice.stream, bytes(10_000))
    alice.records.open(alice.connection.data_to_send())
    assert alice.connection.wants_write
    [event] = alice.say((CLOSE, alice.stream.id, bytes((CloseReason.PEER_GONE,))))
    assert event == StreamClosed(alice.stream, CloseReason.PEER_GONE, local=False, proven=False)
    assert all(kind == CLOSE for kind, _, _ in alice.sent())
    assert alice.stream.sent_bytes + len(alice.stream.pending) == 10_000  # kept for another path


def test_frames_are_sent_in_the_order_they_were_sealed() -> None:
    alice = in_state("open")
    assert alice.far is not None
    alice.connection.send_data(alice.stream, b"first")
    alice.far.pending.append(b"to be acknowledged")
    alice.say((FWD, alice.stream.id, alice.far.next_fwd(100)[1]))
    alice.connection.send_data(alice.stream, b"second")
    alice.connection.close(alice.stream)
    for kind, _, payload in alice.sent():
        if kind == FWD:
            alice.far.receive_fwd(payload, 0, len(payload))
        else:
            alice.far.receive_ack(payload)
    assert alice.far.received_bytes == len(b"firstsecond")
    assert alice.far.end_received and alice.far.acked_bytes == len(b"to be acknowledged")


def test_one_ack_answers_all_of_one_read() -> None:
    alice = in_state("open")
    assert alice.far is not None
    alice.far.pending.append(bytes(5_000))
    fwds = []
    while alice.far.sendable:
        fwds.append((FWD, alice.stream.id, alice.far.next_fwd(1_016)[1]))
    assert len(alice.say(*fwds)) == 5
    [(kind, _, payload)] = alice.sent()
    assert kind == ACK
    alice.far.receive_ack(payload)
    assert alice.far.acked_bytes == 5_000


def test_nothing_is_told_before_the_proof_and_everything_behind_it() -> None:
    alice = in_state("confirming")
    assert alice.far is not None
    frames: list[Frame] = [(ACK, alice.stream.id, alice.far.take_ack()[HEADER_BYTES:])]
    alice.far.pending.append(b"data")
    alice.far.end()
    frames += [(FWD, alice.stream.id, alice.far.next_fwd(100)[1]) for _ in range(2)]
    assert alice.say(*frames) == [
        Confirmed(alice.stream),
        DataReceived(alice.stream, b"data"),
        EndReceived(alice.stream),
    ]


def test_data_may_be_the_proof() -> None:
    alice = in_state("confirming")
    assert alice.far is not None
    alice.far.pending.append(b"data")
    frame = (FWD, alice.stream.id, alice.far.next_fwd(100)[1])
    assert alice.say(frame) == [Confirmed(alice.stream), DataReceived(alice.stream, b"data")]


@pytest.mark.parametrize("kind", [FWD, ACK])
def test_who_cannot_prove_itself_is_never_told_of(kind: int) -> None:
    alice = in_state("confirming")
    assert alice.say((kind, alice.stream.id, bytes(40))) == [
        StreamClosed(alice.stream, CloseReason.INTEGRITY, local=True)
    ]


def hear(alice: Alice, data: bytes) -> None:
    """Bob says ``data``, and Alice's application takes it."""
    assert alice.far is not None
    alice.far.pending.append(data)
    header, payload = alice.far.next_fwd(100)
    assert alice.say((header[0], alice.stream.id, payload)) == [DataReceived(alice.stream, data)]
    alice.connection.consumed(alice.stream, len(data))


def test_an_answer_and_the_acknowledgement_of_its_question_are_one_frame() -> None:
    alice = in_state("open")
    far = alice.far
    assert far is not None
    for number in range(3):
        hear(alice, b"question %d" % number)
        alice.connection.send_data(alice.stream, b"answer")
        [(kind, _, payload)] = alice.sent()
        assert kind == ACK and far.receive_ack(payload) == b"answer"
        assert far.drained


def test_the_acknowledgement_of_a_small_message_waits_for_an_answer_but_not_for_long() -> None:
    alice = in_state("open")
    far = alice.far
    assert far is not None
    keys_due_s = alice.connection.next_timeout()
    for number in range(3):
        hear(alice, b"news %d" % number)
        assert alice.sent() == []
    due_s = alice.connection.next_timeout()
    assert due_s == HELD_S
    assert alice.connection.handle_timeout(due_s / 2) == [] and alice.sent() == []
    assert alice.connection.handle_timeout(due_s) == []
    [(kind, _, payload)] = alice.sent()
    assert kind == ACK and far.receive_ack(payload) == b"" and far.drained
    assert alice.connection.next_timeout() == keys_due_s

    hear(alice, b"question")
    alice.connection.send_data(alice.stream, b"answer, but not at once")
    [(kind, _, payload)] = alice.sent()
    assert kind == ACK and far.receive_ack(payload) and far.drained
    assert alice.connection.handle_timeout(HELD_S) == [] and alice.sent() == []


def test_data_that_came_with_an_acknowledgement_is_acknowledged_before_it_is_read() -> None:
    alice = in_state("open")
    far = alice.far
    assert far is not None
    far.ack_due = True
    far.pending.append(b"answer")
    assert alice.say((ACK, alice.stream.id, far.next_fwd(100)[1])) == [DataReceived(alice.stream, b"answer")]
    due_s = alice.connection.next_timeout()
    assert due_s == HELD_S
    alice.connection.handle_timeout(due_s)
    [(kind, _, payload)] = alice.sent()
    assert kind == ACK and far.receive_ack(payload) == b"" and far.drained


@pytest.mark.parametrize("case", ["much data", "its last", "closing", "our last", "over"])
def test_an_acknowledgement_that_no_answer_can_take_along_does_not_wait(case: str) -> None:
    alice = in_state("open")
    far = alice.far
    assert far is not None
    if case == "our last":
        alice.connection.end(alice.stream)
    if case == "closing":
        assert not alice.connection.close(alice.stream)
    alice.sent()
    far.pending.append(bytes(HELD_ACK_BYTES + (case == "much data")))
    if case == "its last":
        far.end()
    while far.sendable:
        header, payload = far.next_fwd(2_000)
        alice.say((header[0], alice.stream.id, payload))
    if case == "over":
        assert alice.sent() == []
        alice.connection.abort(alice.stream)
    kinds = [kind for kind, _, _ in alice.sent()]
    assert kinds == ([ACK, CLOSE] if case == "over" else [ACK])
    assert alice.connection.handle_timeout(HELD_S) == [] and alice.sent() == []


def test_nothing_is_timed_once_the_answer_has_taken_the_acknowledgement_along() -> None:
    alice = in_state("open")
    alice.sent()
    keys_due_s = alice.connection.next_timeout()
    hear(alice, b"question")
    alice.connection.send_data(alice.stream, b"answer")
    assert len(alice.sent()) == 1
    assert alice.connection.next_timeout() == keys_due_s


def test_a_clock_that_is_set_back_stops_no_acknowledgement() -> None:
    alice = in_state("open")
    far = alice.far
    assert far is not None
    alice.sent()
    for now in (1_000.0, 10.0):
        far.pending.append(b"news")
        header, payload = far.next_fwd(100)
        record = alice.records.seal(encode_frame(header[0], alice.stream.id, payload))
        alice.connection.receive_data(record, now)
        assert alice.connection.next_timeout() == now + HELD_S
    alice.connection.handle_timeout(10.0 + HELD_S)
    [(_, _, payload)] = alice.sent()
    far.receive_ack(payload)
    assert far.drained


def test_what_is_to_be_acknowledged_outside_a_read_is_told_to_the_shell() -> None:
    """Otherwise no timer is set before the next read."""
    alice = in_state("open")
    far = alice.far
    assert far is not None
    alice.sent()
    far.pending.append(b"read late")
    header, payload = far.next_fwd(100)
    alice.say((header[0], alice.stream.id, payload))
    assert not alice.connection.consumed(alice.stream, 4), "the read has told it"
    alice.connection.handle_timeout(HELD_S)
    [(_, _, payload)] = alice.sent()
    far.receive_ack(payload)
    alice.stream.ack_due = True
    assert alice.connection.consumed(alice.stream, 1) and alice.sent() == []
    assert alice.connection.next_timeout() == HELD_S
    alice.connection.handle_timeout(HELD_S)
    [(_, _, payload)] = alice.sent()
    far.receive_ack(payload)
    alice.stream.drop()
    assert alice.connection.consumed(alice.stream, 1)
    [(kind, _, payload)] = alice.sent()
    assert kind == ACK and far.receive_ack(payload) == b"" and far.was_cut


def test_an_acknowledgement_goes_alone_when_there_is_no_room_for_data() -> None:
    alice = Alice(secure_window_bytes=200)
    alice.opened()
    far = alice.far
    assert far is not None
    [*_, (_, _, proof)] = alice.sent()
    far.receive_ack(proof)
    alice.connection.send_data(alice.stream, bytes(500))
    [(kind, _, payload)] = alice.sent()
    assert kind == FWD and alice.stream.pending.size
    far.receive_fwd(payload, 0, len(payload))
    far.ack_due = False  # it is not acknowledged yet
    hear(alice, b"meanwhile")
    [(kind, _, payload)] = alice.sent()
    assert kind == ACK and far.receive_ack(payload) == b"" and far.drained


def test_data_behind_the_proof_comes_with_an_acknowledgement() -> None:
    alice = in_state("confirming")
    far = alice.far
    assert far is not None
    far.ack_due = True
    far.pending.append(b"data")
    assert alice.say((ACK, alice.stream.id, far.next_fwd(100)[1])) == [
        Confirmed(alice.stream),
        DataReceived(alice.stream, b"data"),
    ]


def test_the_acknowledgement_of_an_end_is_told_once() -> None:
    alice = in_state("open")
    far = alice.far
    assert far is not None
    alice.connection.end(alice.stream)
    [(_, _, end)] = alice.sent()
    far.receive_fwd(end, 0, len(end))
    assert alice.say((ACK, alice.stream.id, far.take_ack()[HEADER_BYTES:])) == [EndAcked(alice.stream)]
    for data in (b"more", b"and more"):
        far.ack_due = True
        far.pending.append(data)
        assert alice.say((ACK, alice.stream.id, far.next_fwd(100)[1])) == [DataReceived(alice.stream, data)]


def test_what_came_before_a_frame_that_ends_the_connection_has_happened() -> None:
    alice = in_state("open")
    far = alice.far
    assert far is not None
    far.pending.append(b"data")
    with pytest.raises(RemoteProtocolError) as caught:
        alice.say((FWD, alice.stream.id, far.next_fwd(100)[1]), (OK, 0, b""))
    assert caught.value.events == [DataReceived(alice.stream, b"data")]

    alice = Alice()
    alice.requested()
    message = alice.stream.request[REQUEST_BYTES:]
    answer, _ = SecureResponder(BOB, ALICE.public_key, SERVER.public_key, message).answer()
    with pytest.raises(RemoteProtocolError) as caught:
        alice.say((ACCEPT, alice.stream.id, alice.stream.request[:REQUEST_BYTES] + answer), (OK, 0, b""))
    assert [type(event) for event in caught.value.events] == [StreamOpened]


def test_what_comes_with_an_acknowledgement_for_a_closed_application_is_not_taken() -> None:
    alice = in_state("closing")
    far = alice.far
    assert far is not None and far.ack_due
    far.pending.append(b"too late")
    assert alice.say((ACK, alice.stream.id, far.next_fwd(100)[1])) == [EndAcked(alice.stream)]
    [(_, _, payload)] = [frame for frame in alice.sent() if frame[0] == ACK]
    far.receive_ack(payload)
    assert far.was_cut


def _not_taken() -> Alice:
    """A client whose writer was to pause, and whose peer's application has then closed without taking the data."""
    alice = Alice(secure_window_bytes=200, pause_bytes=100, resume_bytes=50)
    alice.opened()
    far = alice.far
    assert far is not None
    [*_, (_, _, proof)] = alice.sent()
    far.receive_ack(proof)
    assert alice.connection.send_data(alice.stream, bytes(10_000)), "it is to pause"
    for _, _, payload in alice.sent():
        far.receive_fwd(payload, 0, len(payload))
    assert alice.connection.take_writable() == []
    far.drop()
    alice.say((ACK, alice.stream.id, far.take_ack()[HEADER_BYTES:]))
    return alice


def test_a_writer_whose_data_the_peer_does_not_take_goes_on() -> None:
    """It may have to come to its end before its application reads what the peer still has to send."""
    alice = _not_taken()
    assert alice.connection.take_writable() == [alice.stream]
    assert not alice.stream.blocked and not alice.stream.pending.size


def test_a_writer_that_may_go_on_but_has_written_too_much_again_stays_paused() -> None:
    alice = _not_taken()
    assert alice.connection.send_data(alice.stream, bytes(10_000)), "before it is told that it may go on"
    assert alice.connection.take_writable() == [] and alice.stream.blocked


def test_an_end_while_ours_is_on_its_way() -> None:
    alice = in_state("closing")
    assert alice.far is not None
    alice.far.end()
    assert alice.say((FWD, alice.stream.id, alice.far.next_fwd(100)[1])) == [EndReceived(alice.stream)]
    events = alice.say((ACK, alice.stream.id, alice.far.take_ack()[HEADER_BYTES:]))
    assert events == [EndAcked(alice.stream), StreamClosed(alice.stream, CloseReason.NORMAL, local=True)]


def test_both_ends_are_through() -> None:
    alice = in_state("open")
    far = alice.far
    assert far is not None
    alice.connection.close(alice.stream)
    [(_, _, end)] = alice.sent()
    assert far.receive_fwd(end, 0, len(end)) == (b"", b"")
    assert alice.say((ACK, alice.stream.id, far.take_ack()[HEADER_BYTES:])) == [EndAcked(alice.stream)]
    far.end()
    events = alice.say((FWD, alice.stream.id, far.next_fwd(100)[1]))
    assert events == [StreamClosed(alice.stream, CloseReason.NORMAL, local=True)]
    (ack, _, payload), (close, _, reason) = alice.sent()
    assert (ack, close) == (ACK, CLOSE)
    far.receive_ack(payload)
    assert far.close_reason is CloseReason.NORMAL and far.proves_close(reason)


def test_a_peer_that_ignores_the_window_is_cut_off() -> None:
    alice = Alice(receive_limit_bytes=1_000, ack_limit_bytes=100)
    alice.opened()
    far = alice.far
    assert far is not None
    far.pending.append(bytes(1_001))
    closed = [
        event
        for _ in range(11)
        for event in alice.say((FWD, alice.stream.id, far.next_fwd(116)[1]))
        if isinstance(event, StreamClosed)
    ]
    assert closed == [StreamClosed(alice.stream, CloseReason.SLOW_CONSUMER, local=True)]


def test_what_is_sent_again_although_the_application_had_it_was_not_dropped() -> None:
    """It read everything and closed while there was no path: for its peer that is a clean end."""
    alice = Alice()
    alice.opened()
    stream, far = cast(SealedStream, alice.stream), alice.far
    assert far is not None
    before = Alice()
    before.opened()
    assert before.far is not None
    before.far.pending.append(b"read and not acknowledged")
    before.say((FWD, before.stream.id, before.far.next_fwd(1_000)[1]))
    before.connection.consumed(before.stream, before.stream.unread_bytes)
    stream.go_on_from(before.stream, 0, 0)
    alice.connection.close(stream)
    far.pending.append(b"read and not acknowledged")
    alice.say((FWD, stream.id, far.next_fwd(1_000)[1]))
    for kind, _, payload in alice.sent():
        if kind == ACK:
            far.receive_ack(payload)
    assert far.acked_bytes == far.sent_bytes
    assert not far.was_cut


def test_what_is_sent_again_is_not_held_against_its_writer() -> None:
    """What was on its way does not become more than may be written because the path was lost."""
    before, after = Alice(pending_limit_bytes=2 << 20), Alice(pending_limit_bytes=2 << 20)
    before.opened()
    after.opened()
    before.connection.send_data(before.stream, bytes(2 << 20))
    before.sent()
    before.connection.send_data(before.stream, bytes(1 << 19))
    before.connection.abort(before.stream)
    after.stream.go_on_from(before.stream, 0, 0)
    assert after.stream.pending.size == 5 << 19
    after.connection.send_data(after.stream, bytes(1 << 18))
    with pytest.raises(Busy):
        after.connection.send_data(after.stream, bytes(1 << 20))
