"""New keys inside a long path (:ref:`spec-rekeying`): after so many frames, or so much time."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.crypto.aead import Cipher
from dmsg.crypto.keys import SecretKey
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.e2e_handshake import SecureKeys
from dmsg.mux.core.e2e_negotiation import Carrier, EndToEnd
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.sealed_frames import SealedFrames
from dmsg.mux.core.sealed_stream import SealedStream
from dmsg.mux.core.stream import StreamFault, StreamState
from dmsg.mux.core.wire import (
    ACCEPT,
    ACK,
    FWD,
    HEADER,
    HEADER_BYTES,
    OK,
    REQUEST,
    CloseReason,
    encode_frame,
    split_frames,
)

ALICE, BOB, SERVER = (SecretKey(bytes((n,)) * 32) for n in (0x11, 0x22, 0x33))


def end(side: int, after: int) -> SealedStream:
    keys, hashes = ([hashlib.sha256(bytes((kind, n))).digest() for n in (side, 1 - side)] for kind in (0, 1))
    base = PlainStream(5, BOB.public_key, b"", initiator=side == 0, window_bytes=1, first_sequence=0)
    secure = SecureKeys(keys[0], keys[1], hashes[0], hashes[1], b"t" * 16)
    stream = SealedStream(base, secure, window_bytes=400, ack_limit_bytes=100, rekey_after_frames=after)
    stream.state = StreamState.OPEN
    return stream


class Wire:
    """Takes frames as a stream sends them; counts markers and what each key sealed."""

    def __init__(self, receiver: SealedStream) -> None:
        self.receiver = receiver
        self.frames: list[tuple[int, bytes]] = []
        self.received = b""
        self.markers = 0

    def put(self, raw: bytes) -> None:
        frames, used = split_frames(raw)
        assert used == len(raw)
        self.frames += [(kind, raw[start:stop]) for kind, _, start, stop in frames]

    def deliver(self) -> None:
        while self.frames:
            kind, payload = self.frames.pop(0)
            if kind == FWD:
                self.received += self.receiver.receive_fwd(payload, 0, len(payload))[0]
            else:
                self.markers += len(payload) == 16
                self.received += self.receiver.receive_ack(payload)


steps = st.lists(
    st.tuples(st.sampled_from(["write", "send", "ack", "read", "rekey", "deliver"]), st.integers(0, 1)), max_size=60
)


@settings(max_examples=300)
@given(steps, st.integers(1, 5), st.integers(1, 5))
def test_both_directions_rekey_at_any_frame_and_nothing_is_lost(
    wanted: list[tuple[str, int]], first: int, second: int
) -> None:
    """Each sender by its own count, and at any time besides; the receiver follows the marker alone."""
    ends = [end(0, first), end(1, second)]
    wires = [Wire(ends[1]), Wire(ends[0])]  # wires[n] carries what ends[n] sends
    written = [b"", b""]
    read = [0, 0]

    def send(who: int) -> None:
        if ends[who].sendable:
            wires[who].put(b"".join(ends[who].next_fwd(60)))

    def ack(who: int) -> None:
        if ends[who].ack_due:
            wires[who].put(ends[who].take_ack())

    for what, who in wanted:
        one = ends[who]
        if what == "write":
            data = bytes((len(written[who]) + n) % 251 for n in range(50))
            one.pending.append(data)
            written[who] += data
        elif what == "send":
            send(who)
        elif what == "ack":
            ack(who)
        elif what == "rekey":
            wires[who].put(one.frames.rekey())
        elif what == "deliver":
            wires[who].deliver()
        else:
            got = len(wires[1 - who].received)
            one.consumed(got - read[who])
            read[who] = got
        for number, limit in enumerate((first, second)):
            sender = ends[number]
            assert sender.frames._sender.nonce - sender.frames._rekeyed_nonce <= limit, (
                "no key seals more than its frames"
            )
            assert written[number].startswith(wires[number].received)
    for _ in range(200):
        for who in (0, 1):
            send(who)
            wires[who].deliver()
            got = len(wires[1 - who].received)
            ends[who].consumed(got - read[who])
            read[who] = got
            ack(who)
            wires[who].deliver()
    assert [wire.received for wire in wires] == written
    assert all(one.drained for one in ends)


@pytest.mark.parametrize(("cipher", "seals"), [(Cipher.AES, 2**22), (Cipher.CHACHA, 2**30)])
def test_no_setting_has_an_aes_key_seal_more(cipher: Cipher, seals: int) -> None:
    """Nor is one of ChaCha20-Poly1305 held to the same. What was sealed before is made up: it takes too long."""
    frames = SealedFrames(5, bytes(32), bytes(32), 2**30, cipher)
    frames._sender.nonce = seals - 1
    assert frames.seal(FWD, b"the last one")[0] == HEADER.pack(FWD, 5, 28)
    marker = frames.seal(FWD, b"the next")[0][:-HEADER_BYTES]
    assert marker[:HEADER_BYTES] == HEADER.pack(ACK, 5, 16)


def test_a_marker_comes_behind_as_many_frames() -> None:
    sender, receiver = end(0, 3), end(1, 1 << 30)
    wire = Wire(receiver)
    for _ in range(10):
        sender.pending.append(b"x")
        wire.put(b"".join(sender.next_fwd(60)))
    kinds = [(kind, len(payload)) for kind, payload in wire.frames]
    data, marker = (FWD, 19), (ACK, 16)
    assert kinds == [data, data, data, marker] * 3 + [data]
    wire.deliver()
    assert (wire.markers, wire.received) == (3, b"x" * 10)


@pytest.mark.parametrize("what", ["drop", "repeat", "move", "alter", "make up"])
def test_what_a_relay_can_do_to_a_marker(what: str) -> None:
    sender, receiver = end(0, 1 << 30), end(1, 1 << 30)
    wire = Wire(receiver)
    for number in range(3):
        sender.pending.append(b"%d" % number)
        wire.put(b"".join(sender.next_fwd(60)))
        if number == 0:
            wire.put(sender.frames.rekey())
    frames = wire.frames
    if what == "drop":
        del frames[1]
    elif what == "repeat":
        frames.insert(1, frames[1])
    elif what == "move":
        frames[1], frames[2] = frames[2], frames[1]
    elif what == "alter":
        frames[1] = (ACK, bytes((frames[1][1][0] ^ 1,)) + frames[1][1][1:])
    else:
        frames.insert(0, (ACK, bytes(16)))
    with pytest.raises(StreamFault) as caught:
        wire.deliver()
    assert caught.value.code == CloseReason.INTEGRITY
    assert wire.received in (b"", b"0")


def test_the_key_before_is_gone_at_both_ends() -> None:
    sender, receiver = end(0, 1 << 30), end(1, 1 << 30)
    sender.pending.append(b"recorded")
    _, recorded = sender.next_fwd(60)
    receiver.receive_fwd(recorded, 0, len(recorded))
    receiver.receive_ack(sender.frames.rekey()[5:])
    for state in (sender.frames._sender, receiver.frames._receiver):
        state.nonce = 0  # a thief of this memory tries what was recorded
        with pytest.raises(Exception, match="does not open"):
            state.open(bytes((FWD,)), recorded)


def test_a_path_that_resumes_begins_with_keys_of_its_own() -> None:
    sender = end(0, 2)
    for _ in range(5):
        sender.pending.append(b"x")
        sender.next_fwd(60)
    sender.discard()
    new, receiver = end(0, 2), end(1, 2)
    new.go_on_from(sender, 0, 0)
    wire = Wire(receiver)
    while new.sendable:
        wire.put(b"".join(new.next_fwd(60)))
    wire.deliver()
    assert wire.received == b"x" * 5


# --- a connection and the time ----------------------------------------------------------------------------------------


class Side:
    """A client's connection, and the relay at its other end."""

    def __init__(self, key: SecretKey, **config: Any) -> None:
        keys = (bytes(32), bytes(range(32)))
        self.records = RecordLayer(*keys[::-1])
        self.connection = Connection(
            key.public_key,
            RecordLayer(*keys),
            now=0.0,
            config=ConnectionConfig(**config),
            extended=True,
            end_to_end=EndToEnd(key, SERVER.public_key),
        )
        self.received = b""
        self.seen: list[tuple[int, int]] = []
        self.say(0.0, (OK, 0, b""))

    def say(self, now: float, *frames: tuple[int, int, bytes]) -> list[Any]:
        raw = self.records.seal(b"".join(encode_frame(*frame) for frame in frames))
        return self.connection.receive_data(raw, now)

    def sent(self) -> list[tuple[int, int, bytes]]:
        raw = b""
        while self.connection.wants_write:
            raw += b"".join(self.records.open(self.connection.data_to_send()))
        frames = [(kind, number, raw[start:stop]) for kind, number, start, stop in split_frames(raw)[0]]
        self.seen += [(kind, len(payload)) for kind, _, payload in frames]
        return frames


class Pair:
    """Alice and Bob with a sealed stream; the relay passes on what they send."""

    def __init__(self, **config: Any) -> None:
        self.sides = [Side(key, **config) for key in (ALICE, BOB)]
        self.now = 0.0
        self.streams: list[list[Any]] = [[], []]
        self.open()

    def open(self) -> None:
        """One stream more."""
        alice, bob = self.sides
        alice.connection.open(BOB.public_key, Carrier.REQUEST)
        [(kind, number, payload)] = alice.sent()
        assert kind == REQUEST
        [event] = bob.say(self.now, (REQUEST, number + 1, payload))
        bob.connection.read_offer(event.stream)
        self.streams[1].append(bob.connection.accept(event.stream))
        [(kind, _, payload)] = bob.sent()
        assert kind == ACCEPT
        [event] = alice.say(self.now, (ACCEPT, number, payload))
        self.streams[0].append(event.stream)
        self.carry()

    def carry(self) -> None:
        for _ in range(20):
            for who, step in ((0, 1), (1, -1)):
                frames = [(kind, number + step, payload) for kind, number, payload in self.sides[who].sent()]
                if frames:
                    other = self.sides[1 - who]
                    for event in other.say(self.now, *frames):
                        data = getattr(event, "data", b"")
                        other.received += data
                        if data:
                            other.connection.consumed(event.stream, len(data))
                        assert "Closed" not in type(event).__name__, event

    def write(self, who: int, data: bytes, stream: int = 0) -> None:
        self.sides[who].connection.send_data(self.streams[who][stream], data)
        self.carry()

    def pass_time(self, until: float) -> None:
        """As the shell does: at each time a connection names."""
        while True:
            due = [side for side in self.sides if (side.connection.next_timeout() or until + 1) <= until]
            if not due:
                break
            side = min(due, key=lambda one: one.connection.next_timeout() or 0)
            self.now = max(self.now, side.connection.next_timeout() or 0)
            assert side.connection.handle_timeout(self.now) == []
            assert (side.connection.next_timeout() or self.now + 1) > self.now, "time goes on"
            self.carry()
        self.now = until

    def markers(self, who: int) -> int:
        return self.sides[who].seen.count((ACK, 16))


def test_keys_change_each_hour_in_each_direction_that_sends() -> None:
    pair = Pair()
    for hour in range(1, 6):
        pair.write(0, b"data")  # Bob acknowledges: he sends as well
        pair.pass_time(hour * 3600.0 + 60)
        assert (pair.markers(0), pair.markers(1)) == (hour, hour)
    assert pair.sides[1].received == b"data" * 5


def test_an_idle_path_sends_no_markers() -> None:
    pair = Pair()
    pair.pass_time(3600.0)
    before = pair.markers(0), pair.markers(1)
    pair.pass_time(100 * 3600.0)
    assert (pair.markers(0), pair.markers(1)) == before
    assert pair.sides[0].connection.next_timeout() is not None


def test_data_flows_through_a_change_of_keys() -> None:
    pair = Pair(rekey_after_s=10.0, rekey_after_frames=7)
    for second in range(100):
        pair.write(0, bytes(range(256)) * 40)
        pair.write(1, b"back")
        pair.pass_time(second + 1.0)
    assert pair.sides[1].received == bytes(range(256)) * 4_000
    assert pair.sides[0].received == b"back" * 100
    assert pair.markers(0) > 10 < pair.markers(1)


def test_many_streams_get_their_keys_together() -> None:
    """One time to look for all that are due within a minute, whenever they were opened in it."""
    pair = Pair()
    for second in range(1, 40):
        pair.now = float(second)
        pair.open()
    times = set()
    for side in pair.sides:
        while (due := side.connection.next_timeout()) is not None and due < 3700:
            times.add(due)
            side.connection.handle_timeout(due)
            pair.carry()
    assert times == {3600.0}
    assert pair.markers(0) == 40


def test_a_connection_without_sealed_streams_has_no_timer() -> None:
    side = Side(ALICE)
    assert side.connection.next_timeout() is None
    pair = Pair()
    for who in (0, 1):
        pair.sides[who].connection.abort(pair.streams[who][0])
    pair.pass_time(3600.0)
    assert [one.connection.next_timeout() for one in pair.sides] == [None, None]


def test_the_deadline_of_ok_comes_first() -> None:
    connection = Connection(ALICE.public_key, RecordLayer(bytes(32), bytes(32)), now=0.0)
    assert connection.next_timeout() == 10.0
    with pytest.raises(RemoteProtocolError):
        connection.handle_timeout(10.0)
