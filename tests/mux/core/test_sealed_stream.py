"""A sealed stream, held against a model that is just two byte strings.

:ref:`spec-sealed-frames`, :ref:`spec-sealed-acks`, :ref:`spec-sealed-close`, :ref:`spec-resume-offsets`.
"""

from __future__ import annotations

import gc
import hashlib
import tracemalloc
import weakref
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.crypto.aead import NONCE_LIMIT, TAG_BYTES
from dmsg.crypto.cipher import CipherState
from dmsg.crypto.errors import NonceExhausted
from dmsg.crypto.keys import SecretKey
from dmsg.mux.core.buffers import Buffers
from dmsg.mux.core.e2e_handshake import SecureKeys
from dmsg.mux.core.path_window import INITIAL_BYTES, PathWindow
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.resumption import ResumeAttempts
from dmsg.mux.core.sealed_stream import NOTHING_YET, OUTSTANDING_LIMIT, SealedStream
from dmsg.mux.core.stream import StreamFault, StreamState
from dmsg.mux.core.wire import (
    ACK,
    CLOSE,
    FRAME_PAYLOAD_LIMIT_BYTES,
    FWD,
    HEADER,
    HEADER_BYTES,
    RECORD_PLAINTEXT_LIMIT_BYTES,
    SEQUENCE_BYTES,
    CloseReason,
)
from dmsg.mux.relay.limits import RelayLimits
from dmsg.sansio.rate import TokenBucket

FWD_DATA_LIMIT_BYTES = FRAME_PAYLOAD_LIMIT_BYTES - SEQUENCE_BYTES

REMOTE = SecretKey(b"\x07" * 32).public_key
RELAY = SecretKey(b"\x08" * 32).public_key
KEYS = (b"a" * 32, b"b" * 32)
HASHES = (b"c" * 32, b"d" * 32)
TOKEN = b"t" * 16


def end(
    side: int,
    *,
    window: int = 1 << 20,
    ack_limit: int = 1 << 18,
    path: int = 0,
    shared: PathWindow | None = None,
    largest: int = 0,
    buffers: Buffers | None = None,
) -> SealedStream:
    keys, hashes = (tuple(hashlib.sha256(one + bytes((path,))).digest() for one in pair) for pair in (KEYS, HASHES))
    ours, theirs = side, 1 - side
    base = PlainStream(5, REMOTE, b"", initiator=side == 0, window_bytes=1, first_sequence=0)
    secure = SecureKeys(keys[ours], keys[theirs], hashes[ours], hashes[theirs], TOKEN)
    stream = SealedStream(
        base,
        secure,
        window_bytes=window,
        ack_limit_bytes=ack_limit,
        largest_window_bytes=largest,
        path=shared,
        buffers=buffers,
    )
    stream.state = StreamState.OPEN
    return stream


def pair(*, window: int = 1 << 20, ack_limit: int = 1 << 18, path: int = 0) -> tuple[SealedStream, SealedStream]:
    one, other = (end(side, window=window, ack_limit=ack_limit, path=path) for side in (0, 1))
    return one, other


def carry(sender: SealedStream, receiver: SealedStream, limit: int = 100) -> bytes:
    header, sealed = sender.next_fwd(limit)
    assert HEADER.unpack(header) == (FWD, 5, len(sealed))
    data, answer = receiver.receive_fwd(b"xx" + sealed + b"yy", 2, 2 + len(sealed))
    assert answer == b""
    return data


def acknowledge(receiver: SealedStream, sender: SealedStream) -> None:
    frame = receiver.take_ack()
    assert HEADER.unpack(frame[:HEADER_BYTES])[0] == ACK
    sender.receive_ack(frame[HEADER_BYTES:])


def forge_ack(sender: SealedStream, receiver: SealedStream, sequence: int, rolling: bytes) -> bytes:
    """An ACK sealed with the right key: what only a broken or malicious peer could send."""
    return receiver.frames.seal(ACK, sequence.to_bytes(2, "big") + rolling)[1]


def code_of(call: object, *arguments: object) -> int:
    with pytest.raises(StreamFault) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value.code


# --- the model -------------------------------------------------------------------------------------------------------

steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 300)),
        st.tuples(st.just("send"), st.integers(40, 150)),
        st.tuples(st.just("ack"), st.just(0)),
        st.tuples(st.just("read"), st.integers(1, 300)),
        st.tuples(st.just("end"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(steps, st.integers(50, 400), st.integers(0, 200))
def test_what_arrives_is_a_prefix_and_the_window_holds(
    wanted: list[tuple[str, int]], window: int, ack_limit: int
) -> None:
    sender, receiver = pair(window=window, ack_limit=ack_limit)
    written = received = b""
    read = 0
    for what, size in wanted:
        if what == "write" and not sender.end_wanted:
            data = bytes((len(written) + n) % 251 for n in range(size))
            sender.pending.append(data)
            written += data
        elif what == "send" and sender.sendable:
            received += carry(sender, receiver, size)
        elif what == "ack" and receiver.ack_due:
            acknowledge(receiver, sender)
            if receiver.unread_bytes <= ack_limit or receiver.end_received:
                assert sender.acked_bytes == len(received)
            else:
                assert sender.acked_bytes <= read + ack_limit
        elif what == "read":
            taken = min(size, len(received) - read)
            read += taken
            receiver.consumed(taken)
        elif what == "end":
            sender.end()
        assert written.startswith(received)
        assert len(received) == receiver.received_bytes == sender.sent_bytes
        assert receiver.unread_bytes == len(received) - read
        assert sender.sent_bytes - sender.acked_bytes <= window
        assert receiver.unread_bytes <= window + ack_limit
        assert len(written) == sender.sent_bytes + len(sender.pending)
        assert not receiver.end_received or received == written
        # what was read is acknowledged, but for a part of a frame
        assert receiver.ack_due or sender.acked_bytes == len(received) or sender.acked_bytes > read - 150
    sender.end()
    for _ in range(200):
        receiver.consumed(len(received) - read)
        read = len(received)
        while sender.sendable:
            received += carry(sender, receiver, 90)
        if receiver.ack_due:
            acknowledge(receiver, sender)
    assert received == written
    assert receiver.end_received and sender.end_acked and sender.drained


@given(st.lists(st.binary(min_size=1, max_size=60), max_size=8), st.integers(17, 80))
def test_any_chunking_of_writes_is_one_stream(writes: list[bytes], limit: int) -> None:
    sender, receiver = pair()
    received = b""
    for data in writes:
        sender.pending.append(data)
    while sender.sendable:
        received += carry(sender, receiver, limit)
    assert received == b"".join(writes)


# --- sequences -------------------------------------------------------------------------------------------------------


def test_sequences_wrap_at_2_to_the_16() -> None:
    sender, receiver = pair()
    for number in range((1 << 16) + 40):
        sender.pending.append(b"x")
        assert carry(sender, receiver) == b"x"
        receiver.consumed(1)
        if number % 1000 == 0:
            acknowledge(receiver, sender)
    assert sender._next_sequence == 40
    acknowledge(receiver, sender)
    assert sender.drained
    assert sender.acked_bytes == receiver.received_bytes == (1 << 16) + 40


def test_at_most_32767_frames_are_unacknowledged() -> None:
    sender, receiver = pair()
    sender.pending.append(bytes(OUTSTANDING_LIMIT + 5))
    for _ in range(OUTSTANDING_LIMIT):
        assert sender.sendable
        carry(sender, receiver, 17)  # one byte in each
    assert not sender.sendable
    sender.end()
    assert not sender.sendable
    receiver.consumed(OUTSTANDING_LIMIT)
    acknowledge(receiver, sender)
    assert sender.sendable
    assert carry(sender, receiver) == bytes(5)


def test_a_sequence_out_of_order_is_an_integrity_error() -> None:
    sender, receiver = pair()
    sealed = sender.frames.seal(FWD, b"\0\x01" + b"data")[1]
    assert code_of(receiver.receive_fwd, sealed, 0, len(sealed)) == CloseReason.INTEGRITY
    assert receiver.received_bytes == 0


@pytest.mark.parametrize("what", ["drop", "repeat", "swap", "alter", "reflect"])
def test_what_a_relay_can_do_to_frames(what: str) -> None:
    sender, receiver = pair()
    frames = []
    for data in (b"one", b"two", b"three"):
        sender.pending.append(data)
        frames.append(sender.next_fwd(100)[1])
    if what == "drop":
        del frames[1]
    elif what == "repeat":
        frames.insert(1, frames[0])
    elif what == "swap":
        frames[1], frames[2] = frames[2], frames[1]
    elif what == "alter":
        frames[1] = bytes((frames[1][0] ^ 1,)) + frames[1][1:]
    else:
        receiver.pending.append(b"mine")
        frames[1] = receiver.next_fwd(100)[1]
    got = b""

    def take_all() -> None:
        nonlocal got
        for sealed in frames:
            got += receiver.receive_fwd(sealed, 0, len(sealed))[0]

    assert code_of(take_all) == CloseReason.INTEGRITY
    assert got == b"one"


def test_the_type_is_part_of_what_is_sealed() -> None:
    sender, receiver = pair()
    sender.pending.append(b"data")
    sealed = sender.next_fwd(100)[1]
    assert code_of(receiver.receive_ack, sealed) == CloseReason.INTEGRITY
    sender, receiver = pair()
    ack = sender.take_ack()[HEADER_BYTES:]
    assert code_of(receiver.receive_fwd, ack, 0, len(ack)) == CloseReason.INTEGRITY


def test_the_longest_frame_fits_one_record() -> None:
    sender, receiver = pair()
    sender.pending.append(bytes(100_000))
    header, sealed = sender.next_fwd(FWD_DATA_LIMIT_BYTES)
    assert len(header) + len(sealed) == 65_515
    assert len(receiver.receive_fwd(sealed, 0, len(sealed))[0]) == 65_510 - 2 - 16


@given(st.binary(max_size=60))
def test_any_bytes_are_refused(payload: bytes) -> None:
    assert code_of(end(0).receive_fwd, payload, 0, len(payload)) == CloseReason.INTEGRITY
    assert code_of(end(0).receive_ack, payload) == CloseReason.INTEGRITY
    assert not end(0).proves_close(payload)


@pytest.mark.parametrize("inner", [b"", b"\0"])
def test_a_sealed_fwd_without_a_sequence(inner: bytes) -> None:
    sender, receiver = pair()
    sealed = sender.frames.seal(FWD, inner)[1]
    assert code_of(receiver.receive_fwd, sealed, 0, len(sealed)) == CloseReason.MALFORMED


# --- acknowledgements ------------------------------------------------------------------------------------------------


def three_sent() -> tuple[SealedStream, SealedStream]:
    sender, receiver = pair()
    for data in (b"one", b"two", b"three"):
        sender.pending.append(data)
        carry(sender, receiver)
    return sender, receiver


def rolling(*pieces: bytes) -> bytes:
    """The hash behind ``pieces``, each sealed in a FWD of its own."""
    sender = end(0)
    value = sender._send_hash
    for piece in pieces:
        sender.pending.append(piece)
        value = hashlib.sha256(value + sender.next_fwd(1 << 16)[1][-16:]).digest()
    return value[:4]


def test_an_ack_is_for_everything_before_it() -> None:
    sender, receiver = three_sent()
    sender.receive_ack(forge_ack(sender, receiver, 1, rolling(b"one", b"two")))
    assert (sender.acked_bytes, sender.drained) == (6, False)
    acknowledge(receiver, sender)
    assert (sender.acked_bytes, sender.drained) == (11, True)


def test_nothing_yet_and_repeated_acks() -> None:
    sender, receiver = pair()
    acknowledge(receiver, sender)
    acknowledge(receiver, sender)
    assert sender.acked_bytes == 0
    sender.pending.append(b"one")
    carry(sender, receiver)
    acknowledge(receiver, sender)
    acknowledge(receiver, sender)
    assert sender.acked_bytes == 3
    frame = forge_ack(sender, receiver, NOTHING_YET, end(0)._send_hash[:4])
    assert code_of(sender.receive_ack, frame) == CloseReason.INTEGRITY  # nothing goes back


@pytest.mark.parametrize("sequence", [3, 4, 32_769, 65_534])
def test_an_ack_for_what_was_never_sent(sequence: int) -> None:
    sender, receiver = three_sent()
    frame = forge_ack(sender, receiver, sequence, rolling(b"one", b"two", b"three"))
    assert code_of(sender.receive_ack, frame) == CloseReason.INTEGRITY


def test_an_ack_older_than_the_last_one() -> None:
    sender, receiver = three_sent()
    acknowledge(receiver, sender)
    frame = forge_ack(sender, receiver, 1, rolling(b"one", b"two"))
    assert code_of(sender.receive_ack, frame) == CloseReason.INTEGRITY


@pytest.mark.parametrize("sequence", [0, 2, NOTHING_YET])
def test_a_rolling_hash_of_something_else(sequence: int) -> None:
    sender, receiver = three_sent()
    frame = forge_ack(sender, receiver, sequence, rolling(b"one", b"tow"))
    assert code_of(sender.receive_ack, frame) == CloseReason.INTEGRITY


def test_a_repeated_ack_with_another_hash() -> None:
    sender, receiver = three_sent()
    acknowledge(receiver, sender)
    assert code_of(sender.receive_ack, forge_ack(sender, receiver, 2, b"nope")) == CloseReason.INTEGRITY


@pytest.mark.parametrize("inner", [b"\0", b"\0\0", b"\0\0abc", b"\0\0abcde", b"\0\0abcd\2", b"\0\0abcd\1\1"])
def test_an_ack_of_another_length(inner: bytes) -> None:
    sender, receiver = three_sent()
    frame = receiver.frames.seal(ACK, inner)[1]
    assert code_of(sender.receive_ack, frame) == CloseReason.MALFORMED


@pytest.mark.parametrize("size", [1, 64, 1_000, FWD_DATA_LIMIT_BYTES])
def test_no_more_than_a_window_waits_at_the_relay_however_small_the_writes_are(size: int) -> None:
    """Frames and all: above its limit a relay ends the transport at once, since its sender ignores the window."""
    sender, _ = pair()
    sender.pending.append(bytes(2 << 20))
    waiting = 0
    while sender.sendable:
        header, sealed = sender.next_fwd(size + TAG_BYTES)
        waiting += len(header) + len(sealed)
    assert waiting < (1 << 20) + size
    assert waiting < RelayLimits().queue_hard_bytes


def test_acks_are_withheld_while_too_much_is_unread() -> None:
    sender, receiver = pair(window=100 + 5 * 23, ack_limit=10)  # each frame takes 23 bytes more than its data
    sender.pending.append(bytes(200))
    carry(sender, receiver, 26)  # ten bytes
    assert receiver.ack_due
    acknowledge(receiver, sender)
    while sender.sendable:
        carry(sender, receiver, 36)
    assert not receiver.ack_due
    assert receiver.unread_bytes == 110
    assert not receiver.overfull(110) and receiver.overfull(109)
    for taken in range(
        1, 100
    ):  # frames of 20 bytes are acknowledged when all but ten have been taken of what came with them
        receiver.consumed(1)
        assert receiver.ack_due == (taken % 20 == 0 and taken > 0), taken
        if receiver.ack_due:
            acknowledge(receiver, sender)
            assert sender.acked_bytes == taken + 10
    receiver.consumed(1)
    assert receiver.ack_due
    acknowledge(receiver, sender)
    assert sender.acked_bytes == 110
    assert sender.sendable


def test_a_slow_reader_acknowledges_in_steps_of_half_its_limit() -> None:
    sender, receiver = pair(window=1 << 16, ack_limit=1000)
    sender.pending.append(bytes(20_000))
    while sender.sendable:
        carry(sender, receiver)
        if receiver.ack_due and receiver.unread_bytes < 500:
            acknowledge(receiver, sender)
    acknowledged = [sender.acked_bytes]
    while receiver.unread_bytes:
        receiver.consumed(min(100, receiver.unread_bytes))
        if receiver.ack_due:
            acknowledge(receiver, sender)
            acknowledged.append(sender.acked_bytes)
            assert (
                0 <= receiver.received_bytes - receiver.unread_bytes + 1000 - sender.acked_bytes < 100 or sender.drained
            )
    assert sender.drained
    steps = [after - before for before, after in pairwise(acknowledged)]
    assert len(steps) > 30 and all(500 <= step < 600 for step in steps[1:-1])


@pytest.mark.parametrize("read", [0, 300])
def test_what_a_closed_application_did_not_take_is_acknowledged_at_once(read: int) -> None:
    sender, receiver = pair(ack_limit=100)
    sender.pending.append(bytes(1_000))
    while sender.sendable:
        carry(sender, receiver, 36)
    assert not receiver.ack_due
    receiver.consumed(read)
    assert receiver.ack_due is (read > 0), "for a part"
    receiver.drop()
    acknowledge(receiver, sender)
    assert sender.acked_bytes == 1_000 and sender.was_cut


def test_what_comes_again_is_acknowledged_in_steps_too() -> None:
    """The application has had nothing of it yet, so the bytes received say nothing of how far the peer has come again."""
    sender, receiver = pair(ack_limit=1_000)
    sender.pending.append(bytes(2_000))
    while sender.sendable:
        carry(sender, receiver)
    assert receiver.resume_bytes == 0
    (sender_2, receiver_2), before = pair(ack_limit=1_000, path=1), receiver
    sender_2.go_on_from(sender, before.resume_bytes, 0)
    receiver_2.go_on_from(before, 0, before.resume_bytes)
    while sender_2.sendable:
        assert carry(sender_2, receiver_2, 100 + TAG_BYTES) == b""
    assert receiver_2.ack_due
    acknowledge(receiver_2, sender_2)
    assert sender_2.acked_bytes == 1_000
    receiver_2.consumed(500)
    assert receiver_2.ack_due
    acknowledge(receiver_2, sender_2)
    assert sender_2.acked_bytes == 1_500


def test_the_end_is_acknowledged_however_much_is_unread() -> None:
    sender, receiver = pair(ack_limit=0)
    sender.pending.append(b"data")
    sender.end()
    carry(sender, receiver)
    assert not receiver.ack_due
    carry(sender, receiver)
    assert receiver.ack_due
    acknowledge(receiver, sender)
    assert sender.end_acked


def received_one(**options: int) -> tuple[SealedStream, SealedStream]:
    """A peer and an end that has one FWD to acknowledge."""
    peer, one = pair(**options)
    peer.pending.append(b"question")
    assert carry(peer, one) == b"question"
    return peer, one


def test_an_ack_that_is_due_takes_the_next_data_along() -> None:
    peer, one = received_one()
    one.consumed(8)
    one.pending.append(b"answer")
    header, payload = one.next_fwd(100)
    assert HEADER.unpack(header) == (ACK, 5, len(payload))
    assert len(payload) == 2 + 4 + 1 + 2 + len(b"answer") + 16
    assert not one.ack_due and not peer.drained
    assert peer.receive_ack(payload) == b"answer"
    assert peer.drained and peer.acked_bytes == 8 and peer.received_bytes == 6
    assert peer.ack_due, "data that came with an ACK is acknowledged, too"
    acknowledge(peer, one)
    assert one.drained
    one.pending.append(b"more")
    assert carry(one, peer) == b"more", "nothing is due: a FWD"


def test_data_goes_along_with_what_an_ack_says_besides() -> None:
    peer, one = received_one()
    one.drop()
    one.pending.append(b"last words")
    assert peer.receive_ack(one.next_fwd(100)[1]) == b"last words"
    assert peer.was_cut
    peer, one = pair(window=1 << 20)
    one._window._most_bytes = 1 << 25
    one._window._buffers.total_bytes = 1 << 30
    peer.pending.append(bytes(1 << 20))
    one.consumed(len(carry(peer, one, 60_000)))
    one.pending.append(b"more")
    one._told_bytes = -(1 << 22)  # as if that much had been taken
    payload = one.next_fwd(100)[1]
    assert peer.receive_ack(payload) == b"more"
    assert peer._window._told_bytes == peer._window._most_bytes


def test_the_longest_data_with_an_ack_fits_one_record() -> None:
    peer, one = received_one()
    one.pending.append(bytes(70_000))
    header, payload = one.next_fwd(FWD_DATA_LIMIT_BYTES)
    assert len(header + payload) == RECORD_PLAINTEXT_LIMIT_BYTES
    assert len(peer.receive_ack(payload)) == 65_485


def test_the_end_of_a_stream_has_a_frame_of_its_own() -> None:
    peer, one = received_one()
    one.end()
    header, payload = one.next_fwd(100)
    assert HEADER.unpack(header)[0] == FWD and one.ack_due
    assert peer.receive_fwd(payload, 0, len(payload)) == (b"", b"") and peer.end_received


@pytest.mark.parametrize(
    ("behind", "code"),
    [
        (b"\0", CloseReason.MALFORMED),
        (b"\0\0", CloseReason.MALFORMED),
        (b"\0\1x", CloseReason.INTEGRITY),
        (b"\xff\xffx", CloseReason.INTEGRITY),
    ],
)
def test_what_no_peer_sends_with_an_ack(behind: bytes, code: CloseReason) -> None:
    peer, one = received_one()
    ack = b"\0\0" + one._receive_hash[:4] + b"\0"
    assert code_of(peer.receive_ack, one.frames.seal(ACK, ack + behind)[1]) == code


def test_nothing_comes_with_an_ack_after_the_end() -> None:
    peer, one = received_one()
    one.end()
    carry(one, peer)
    ack = b"\0\0" + one._receive_hash[:4] + b"\0"
    assert code_of(peer.receive_ack, one.frames.seal(ACK, ack + b"\0\1more")[1]) == CloseReason.MALFORMED


def test_the_rolling_hash_goes_over_the_tags_of_both_kinds() -> None:
    peer, one = received_one()
    expected = one._send_hash
    one.pending.append(b"along")
    first = one.next_fwd(100)[1]
    peer.receive_ack(first)
    one.pending.append(b"alone")
    second = one.next_fwd(100)[1]
    peer.receive_fwd(second, 0, len(second))
    for payload in (first, second):
        expected = hashlib.sha256(expected + payload[-16:]).digest()
    assert peer._receive_hash == expected
    acknowledge(peer, one)
    assert one.drained


# --- the end ---------------------------------------------------------------------------------------------------------


def test_the_end_is_sent_once_and_behind_everything() -> None:
    sender, receiver = pair()
    sender.pending.append(b"data")
    sender.end()
    sender.end()
    assert carry(sender, receiver) == b"data"
    assert not receiver.end_received
    assert sender.sendable and not sender.drained
    assert carry(sender, receiver) == b""
    assert receiver.end_received
    assert not sender.sendable and not sender.drained and sender.close_reason is None
    acknowledge(receiver, sender)
    assert sender.end_acked and sender.drained and sender.close_reason is None
    receiver.end()
    carry(receiver, sender)
    assert sender.close_reason == CloseReason.NORMAL and receiver.close_reason is None
    acknowledge(sender, receiver)
    assert receiver.close_reason == CloseReason.NORMAL


@pytest.mark.parametrize("data", [b"", b"more"])
def test_nothing_comes_after_the_end(data: bytes) -> None:
    sender, receiver = pair()
    sender.end()
    carry(sender, receiver)
    sealed = sender.frames.seal(FWD, b"\0\x01" + data)[1]
    assert code_of(receiver.receive_fwd, sealed, 0, len(sealed)) == CloseReason.MALFORMED


# --- CLOSE -----------------------------------------------------------------------------------------------------------


def test_a_close_is_proven_by_its_seal() -> None:
    sender, receiver = three_sent()
    frame = sender.close_frame(CloseReason.BUSY)
    assert HEADER.unpack(frame[:HEADER_BYTES]) == (CLOSE, 5, 18)
    assert frame[HEADER_BYTES] == CloseReason.BUSY
    assert receiver.proves_close(frame[HEADER_BYTES:])


@pytest.mark.parametrize("change", ["cut", "code", "seal", "plain", "empty", "longer", "replayed", "ack"])
def test_a_close_that_is_not_the_peers(change: str) -> None:
    sender, receiver = three_sent()
    payload = sender.close_frame(CloseReason.BUSY)[HEADER_BYTES:]
    if change == "replayed":
        assert receiver.proves_close(payload)
    payload = {
        "cut": payload[:-1],
        "code": b"\0" + payload[1:],
        "seal": payload[:-1] + bytes((payload[-1] ^ 1,)),
        "plain": payload[:1],
        "empty": b"",
        "longer": payload + b"\0",
        "replayed": payload,
        "ack": b"\x03" + sender.take_ack()[HEADER_BYTES:],
    }[change]
    assert not receiver.proves_close(payload)


# --- nonces ----------------------------------------------------------------------------------------------------------


def test_the_counters_end_before_they_wrap() -> None:
    sender, receiver = pair()
    sender.frames._sender = CipherState(KEYS[0], NONCE_LIMIT)
    sender.pending.append(b"data")
    with pytest.raises(NonceExhausted):
        sender.next_fwd(100)
    receiver.frames._receiver = CipherState(KEYS[0], NONCE_LIMIT)
    assert code_of(receiver.receive_fwd, bytes(30), 0, 30) == CloseReason.INTEGRITY
    assert code_of(receiver.receive_ack, bytes(30)) == CloseReason.INTEGRITY
    assert not receiver.proves_close(bytes(18))


# --- confirmation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ACK, FWD, CLOSE])
def test_only_a_frame_that_opens_confirms(kind: int) -> None:
    sender, receiver = pair()
    receiver.state = StreamState.CONFIRMING
    with pytest.raises(StreamFault):
        receiver.receive_ack(bytes(22))
    assert receiver.state is StreamState.CONFIRMING
    sender.pending.append(b"data")
    if kind == ACK:
        receiver.receive_ack(sender.take_ack()[HEADER_BYTES:])
    elif kind == FWD:
        carry(sender, receiver)
    else:
        receiver.proves_close(sender.close_frame(0)[HEADER_BYTES:])
    assert receiver.state is (StreamState.CONFIRMING if kind == CLOSE else StreamState.OPEN)


# --- another path ----------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.data())
def test_any_cut_and_any_number_of_paths(data: st.DataObject) -> None:
    """Two ends go on over path after path; what was under way is lost each time."""
    window, ack_limit = 120, 50
    sender, receiver = pair(window=window, ack_limit=ack_limit)
    written = received = b""
    read = 0
    attempts = ResumeAttempts(receiver, TokenBucket(0, 9, 0.0))
    for path in range(1, data.draw(st.integers(2, 5))):
        for what in data.draw(st.lists(st.sampled_from(["write", "send", "ack", "read", "lose", "end"]), max_size=12)):
            if what == "write" and not sender.end_wanted:
                piece = bytes((len(written) + n) % 251 for n in range(33))
                sender.pending.append(piece)
                written += piece
            elif what == "send" and sender.sendable:
                received += carry(sender, receiver, 36)
            elif what == "ack" and receiver.ack_due:
                acknowledge(receiver, sender)
            elif what == "read":
                receiver.consumed(len(received) - read)
                read = len(received)
            elif what == "end":
                sender.end()
            elif what == "lose":
                break
        while data.draw(st.booleans()) and sender.sendable:
            sender.next_fwd(36)  # on its way, and never to arrive
        if receiver.ack_due and data.draw(st.booleans()):
            receiver.take_ack()  # so is this
        told = receiver.resume_bytes
        assert sender.acked_bytes <= told <= receiver.received_bytes
        new_sender, new_receiver = pair(window=window, ack_limit=ack_limit, path=path)
        new_receiver.state = StreamState.CONFIRMING
        new_receiver.await_turn(attempts, RELAY, told)
        new_sender.go_on_from(sender, told, 0)
        if data.draw(st.booleans()) and new_sender.sendable:
            received += carry(new_sender, new_receiver, 36)  # proof and data in one read
        else:
            acknowledge(new_sender, new_receiver)
        new_receiver.go_on_from(receiver, 0, told)
        sender, receiver = new_sender, new_receiver
        assert written.startswith(received)
        assert receiver.received_bytes == len(received)
        assert receiver.unread_bytes == len(received) - read <= window + ack_limit
        assert sender.sent_bytes + len(sender.pending) == len(written)
    sender.end()
    for _ in range(60):
        receiver.consumed(len(received) - read)
        read = len(received)
        while sender.sendable:
            received += carry(sender, receiver, 36)
        if receiver.ack_due:
            acknowledge(receiver, sender)
    assert received == written
    assert receiver.end_received and sender.end_acked and sender.drained


def half_acknowledged() -> tuple[SealedStream, SealedStream]:
    """Six bytes acknowledged, eleven sent, fifteen written."""
    sender, receiver = three_sent()
    sender.receive_ack(forge_ack(sender, receiver, 1, rolling(b"one", b"two")))
    sender.pending.append(b"four")
    return sender, receiver


@pytest.mark.parametrize(("claimed", "left"), [(6, b"threefour"), (8, b"reefour"), (11, b"four")])
def test_what_is_sent_again(claimed: int, left: bytes) -> None:
    sender, _ = half_acknowledged()
    new = end(0, path=1)
    new.go_on_from(sender, claimed, 0)
    assert new.pending.take(100) == left
    assert new.sent_bytes == new.acked_bytes == claimed


@pytest.mark.parametrize("claimed", [0, 5, 12, 15, 2**64 - 1])
def test_counts_that_cannot_be(claimed: int) -> None:
    sender, _ = half_acknowledged()
    assert code_of(end(0, path=1).go_on_from, sender, claimed, 0) == CloseReason.INTEGRITY
    assert len(sender.pending) == 4  # nothing was taken from it


def test_the_end_is_sent_again_and_taken_again() -> None:
    sender, receiver = pair()
    sender.pending.append(b"data")
    sender.end()
    carry(sender, receiver)
    carry(sender, receiver)
    acknowledge(receiver, sender)
    new_sender, new_receiver = pair(path=1)
    new_sender.go_on_from(sender, 4, 0)
    new_receiver.go_on_from(receiver, 0, 4)
    assert new_sender.sendable and not new_sender.drained and not new_receiver.end_received
    assert carry(new_sender, new_receiver) == b""
    assert new_receiver.end_received
    acknowledge(new_receiver, new_sender)
    assert new_sender.end_acked


@pytest.mark.parametrize("paths", [1, 2])
def test_nothing_new_comes_behind_an_end_on_an_earlier_path(paths: int) -> None:
    sender, receiver = pair()
    sender.pending.append(b"data")
    told = receiver.resume_bytes  # before the data came: it is sent again
    carry(sender, receiver)
    sender.end()
    carry(sender, receiver)
    for path in range(1, 1 + paths):
        sender, _ = pair(path=path)
        _, following = pair(path=path)
        following.go_on_from(receiver, 0, told)
        receiver = following
    sender.pending.append(b"datamore")
    assert carry(sender, receiver, 16 + 4) == b""
    assert code_of(carry, sender, receiver) == CloseReason.MALFORMED


def test_what_came_on_the_old_path_meanwhile_is_not_taken_twice() -> None:
    sender, receiver = pair()
    sender.pending.append(b"abcdefgh")
    assert carry(sender, receiver, 16 + 3) == b"abc"
    told = receiver.resume_bytes
    assert carry(sender, receiver, 16 + 3) == b"def"  # the old path was still good for something
    new_sender, new_receiver = pair(path=1)
    new_sender.go_on_from(sender, told, 0)
    new_receiver.go_on_from(receiver, 0, told)
    assert [carry(new_sender, new_receiver, 16 + 2) for _ in range(3)] == [b"", b"g", b"h"]
    acknowledge(new_receiver, new_sender)
    assert new_sender.drained and new_sender.acked_bytes == 8


def test_what_came_on_a_path_before_the_last_one_need_not_be_sent_again() -> None:
    sender, receiver = pair()
    sender.pending.append(b"abcdefgh")
    told = receiver.resume_bytes
    assert carry(sender, receiver, 16 + 3) == b"abc"  # after it was told
    second, second_receiver = pair(path=1)
    second.go_on_from(sender, told, 0)
    second_receiver.go_on_from(receiver, 0, told)
    assert (second.sent_bytes, second_receiver.resume_bytes) == (0, 3)
    third, third_receiver = pair(path=2)
    third.go_on_from(second, 3, 0)
    third_receiver.go_on_from(second_receiver, 0, 3)
    assert carry(third, third_receiver) == b"defgh"
    assert code_of(end(0, path=3).go_on_from, third, 9, 0) == CloseReason.INTEGRITY


def test_a_stopped_reader_is_not_filled_up_by_one_path_after_the_other() -> None:
    sender, receiver = pair(window=100, ack_limit=10)
    sender.pending.append(bytes(10_000))
    for path in range(1, 6):
        while sender.sendable:
            carry(sender, receiver, 36)
            if receiver.ack_due:
                acknowledge(receiver, sender)
        assert receiver.unread_bytes <= 110 + 20
        told = receiver.resume_bytes
        new_sender, new_receiver = pair(window=100, ack_limit=10, path=path)
        new_sender.go_on_from(sender, told, 0)
        new_receiver.go_on_from(receiver, 0, told)
        sender, receiver = new_sender, new_receiver


def test_the_peer_is_told_on_the_next_path_that_data_was_dropped() -> None:
    sender, receiver = pair()
    sender.pending.append(b"abc")
    sender.end()
    carry(sender, receiver)
    receiver.drop()  # the ACK that says so is lost with the path
    (new_sender, new_receiver), told = pair(path=1), receiver.resume_bytes
    new_sender.go_on_from(sender, told, 0)
    new_receiver.go_on_from(receiver, 0, told)
    acknowledge(new_receiver, new_sender)
    assert new_sender.was_cut


@pytest.mark.parametrize("cut", [True, False])
def test_a_transport_whose_data_was_dropped_is_not_complete(cut: bool) -> None:
    sender, receiver = pair()
    sender.pending.append(b"abc")
    sender.end()
    receiver.end()
    carry(sender, receiver)
    carry(sender, receiver)
    if cut:
        receiver.drop()
    acknowledge(receiver, sender)
    assert not sender.complete, "the peer may have more to send"
    carry(receiver, sender)
    assert sender.complete is not cut


@pytest.mark.parametrize("blocked", [True, False])
def test_a_writer_that_had_to_pause_is_told_on_the_next_path(blocked: bool) -> None:
    sender, new = end(0), end(0, path=1)
    sender.blocked = blocked
    new.go_on_from(sender, 0, 0)
    assert new.blocked is blocked


def test_a_path_that_was_left_keeps_neither_data_nor_keys() -> None:
    sender, receiver = half_acknowledged()
    new = end(0, path=1)
    new.go_on_from(sender, 6, 0)
    assert not sender.pending and not sender._outstanding
    assert (sender.sent_bytes, sender.acked_bytes) == (11, 6), "the counts stay"
    with pytest.raises(NonceExhausted):
        sender.take_ack()
    assert code_of(sender.receive_ack, receiver.take_ack()[HEADER_BYTES:]) == CloseReason.INTEGRITY


def test_a_path_that_is_over_keeps_no_keys_but_what_is_not_acknowledged() -> None:
    sender, _ = half_acknowledged()
    sender.discard()
    with pytest.raises(NonceExhausted):
        sender.take_ack()
    new = end(0, path=1)
    new.go_on_from(sender, 6, 0)
    assert new.pending.take(100) == b"threefour"


@pytest.mark.parametrize("claims_all", [True, False], ids=["claims to have it all", "claims to have nothing"])
def test_600_paths_without_an_acknowledgement_hold_one_window(claims_all: bool) -> None:
    """551 MB are sealed, sent and read; by reference counts alone no more than a window of them is kept."""
    window_bytes = 1 << 20
    sender = end(1)
    chunk = bytes(65_536)
    read_bytes = 0
    tracemalloc.start()
    gc.disable()
    try:
        for path in range(600):
            while len(sender.pending) < window_bytes:
                sender.pending.append(chunk)
            while sender.sendable:
                read_bytes += len(sender.next_fwd(65_000)[1]) - TAG_BYTES - SEQUENCE_BYTES
            sender.discard()
            new, old = end(1, path=1 + path % 200), weakref.ref(sender)
            new.go_on_from(sender, sender.sent_bytes if claims_all else 0, 0)
            sender = new
            assert old() is None
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        gc.enable()
        tracemalloc.stop()
    assert read_bytes > 551_000_000
    assert size_bytes < 3 * window_bytes


def test_proofs_of_two_paths_and_data_of_both_in_one_read() -> None:
    """A relay that held the first back: what came on it is not taken a second time from the other."""
    sender, receiver = pair()
    attempts = ResumeAttempts(receiver, TokenBucket(0, 9, 0.0))
    sender.pending.append(b"abcdef")
    paths = []
    for path in (1, 2):
        new_sender, new_receiver = pair(path=path)
        new_receiver.state = StreamState.CONFIRMING
        new_receiver.await_turn(attempts, (REMOTE, RELAY)[path - 1], receiver.resume_bytes)
        new_sender.go_on_from(sender, 0, 0)
        sender = new_sender
        paths.append((new_sender, new_receiver, new_sender.next_fwd(TAG_BYTES + 3 * path)[1]))
    got = b""
    for _, new_receiver, sealed in paths:
        got += new_receiver.receive_fwd(sealed, 0, len(sealed))[0]
    assert got == b"abcdef"
    for _, new_receiver, _ in paths:
        assert not new_receiver.is_late
        new_receiver.go_on_from(receiver, 0, 0)
        receiver = new_receiver
    assert (receiver.received_bytes, receiver.unread_bytes) == (6, 6)


def test_data_that_comes_with_the_proof_is_not_acknowledged_while_too_much_is_unread() -> None:
    sender, receiver = pair(ack_limit=10)
    sender.pending.append(bytes(100))
    while sender.pending:
        carry(sender, receiver, TAG_BYTES + 20)
    new_sender, new_receiver = pair(ack_limit=10, path=1)
    new_receiver.state = StreamState.CONFIRMING
    new_receiver.await_turn(ResumeAttempts(receiver, TokenBucket(0, 9, 0.0)), RELAY, 0)
    new_sender.go_on_from(sender, 0, 0)
    carry(new_sender, new_receiver, TAG_BYTES + 50)
    new_receiver.go_on_from(receiver, 0, 0)
    assert not new_receiver.ack_due
    new_receiver.consumed(95)
    assert new_receiver.ack_due


def test_a_proof_that_comes_behind_that_of_a_later_attempt() -> None:
    receiver = end(1)
    attempts = ResumeAttempts(receiver, TokenBucket(0, 9, 0.0))
    ends = []
    for path in (1, 2):
        new_sender, new_receiver = pair(path=path)
        new_receiver.state = StreamState.CONFIRMING
        new_receiver.await_turn(attempts, (REMOTE, RELAY)[path - 1], 0)
        ends.append((new_sender, new_receiver))
    for new_sender, new_receiver in ends[::-1]:
        acknowledge(new_sender, new_receiver)
    assert [receiver.is_late for _, receiver in ends] == [True, False]


def test_what_came_on_the_old_path_behind_the_proof_does_not_count_as_unread() -> None:
    sender, receiver = pair()
    attempts = ResumeAttempts(receiver, TokenBucket(0, 9, 0.0))
    sender.pending.append(b"abcdef")
    old = [sender.next_fwd(TAG_BYTES + 3)[1] for _ in range(2)]
    assert receiver.receive_fwd(old[0], 0, len(old[0]))[0] == b"abc"
    new_sender, new_receiver = pair(path=1)
    new_receiver.state = StreamState.CONFIRMING
    new_receiver.await_turn(attempts, RELAY, 3)
    new_sender.go_on_from(sender, 3, 0)
    acknowledge(new_sender, new_receiver)
    receiver.receive_fwd(old[1], 0, len(old[1]))  # dropped by the transport: it has moved
    new_receiver.go_on_from(receiver, 0, 3)
    assert new_receiver.unread_bytes == 3
    assert carry(new_sender, new_receiver) == b"def"
    assert new_receiver.unread_bytes == 6


def test_a_proof_in_a_malformed_frame_leaves_the_path_in_use_the_current_one() -> None:
    """Only a peer that breaks the rules sends one. What comes on the old path until its next attempt counts, and only once."""
    sender, receiver = pair()
    attempts = ResumeAttempts(receiver, TokenBucket(0, 9, 0.0))
    cheat, cheated = pair(path=1)
    cheated.state = StreamState.CONFIRMING
    cheated.await_turn(attempts, RELAY, 0)
    sealed = cheat.frames.seal(FWD, b"")[1]
    assert code_of(cheated.receive_fwd, sealed, 0, len(sealed)) == CloseReason.MALFORMED
    attempts.failed(cheated)
    sender.pending.append(b"abcdef")
    assert carry(sender, receiver) == b"abcdef"
    receiver.consumed(6)
    told = attempts.tell_bytes()
    assert told == 6
    new_sender, new_receiver = pair(path=2)
    new_receiver.state = StreamState.CONFIRMING
    new_receiver.await_turn(attempts, RELAY, told)
    new_sender.go_on_from(sender, told, 0)
    acknowledge(new_sender, new_receiver)
    assert not new_receiver.is_late
    new_receiver.go_on_from(receiver, 0, told)
    assert (new_receiver.received_bytes, new_receiver.unread_bytes) == (6, 0)


def test_a_later_attempt_is_never_told_less_than_an_earlier_one() -> None:
    """The answer to the first was taken and its proof lost, and the reader has stopped since: an honest count again."""
    sender, receiver = pair(window=200, ack_limit=10)
    attempts = ResumeAttempts(receiver, TokenBucket(0, 9, 0.0))
    sender.pending.append(bytes(100))
    carry(sender, receiver, TAG_BYTES + 10)
    told = attempts.tell_bytes()
    assert told == 10
    waiting(1).await_turn(attempts, RELAY, told)
    carry(sender, receiver, TAG_BYTES + 50)  # the old path delivers on
    assert receiver.resume_bytes == 0, "acknowledgements are withheld"
    second = end(0, path=1)
    second.go_on_from(sender, told, 0)
    third = end(0, path=2)
    third.go_on_from(second, attempts.tell_bytes(), 0)
    assert third.acked_bytes == told


# --- how often (label resume-attempts) -------------------------------------------------------------------------------


def waiting(path: int) -> SealedStream:
    stream = end(1, path=path)
    stream.state = StreamState.CONFIRMING
    return stream


def test_attempts_that_were_proved_use_up_the_rate() -> None:
    attempts = ResumeAttempts(end(1), TokenBucket(2, 3, 0.0))
    for path in range(3):
        assert attempts.may_begin(RELAY, 0.0)
        stream = waiting(path)
        stream.await_turn(attempts, RELAY, 0)
        assert attempts.proved(stream, path + 1) is not None
        attempts.moved(0.0)
    assert not attempts.may_begin(RELAY, 0.0)
    assert not attempts.may_begin(RELAY, 0.4)
    assert attempts.may_begin(RELAY, 0.5)


def test_an_attempt_may_take_the_place_of_one_over_the_same_relay_without_another_token() -> None:
    attempts = ResumeAttempts(end(1), TokenBucket(0, 1, 0.0))
    attempts.begin(RELAY, waiting(1))
    assert attempts.may_begin(RELAY, 0.0)
    assert not attempts.may_begin(REMOTE, 0.0)


def test_attempts_that_are_never_proved_use_up_nothing() -> None:
    """A relay can play a REQUEST again as often as it likes: only the last one waits."""
    attempts = ResumeAttempts(end(1), TokenBucket(0, 2, 0.0))
    last = None
    for path in range(100):
        assert attempts.may_begin(RELAY, 0.0)
        stream = waiting(path)
        assert stream.await_turn(attempts, RELAY, 0) is last
        last = stream
    assert attempts.may_begin(REMOTE, 0.0), "another relay has its place"
    waiting(100).await_turn(attempts, REMOTE, 0)
    assert not attempts.may_begin(SecretKey(b"\x09" * 32).public_key, 0.0), "a token for each of those that wait"
    assert last is not None
    attempts.failed(last)
    attempts.failed(last)
    assert attempts.may_begin(SecretKey(b"\x09" * 32).public_key, 0.0)


# --- a path that several share ---------------------------------------------------------------------------------------


FRAME_BYTES = 32_750


class SharedPath:
    """Two streams on one path. The first one's peer acknowledges what it is told to."""

    def __init__(self, count: int = 2) -> None:
        self.now = 1.0
        self.window = PathWindow(lambda: self.now)
        self.streams = [end(0, path=number, shared=self.window) for number in range(count)]
        self.peers = [end(1, path=number, ack_limit=1 << 21) for number in range(count)]

    def send_all(self, number: int) -> int:
        """Send while there is room, and the far end takes it; gives the bytes."""
        sent = 0
        while self.streams[number].sendable:
            sent += len(carry(self.streams[number], self.peers[number], FRAME_BYTES))
        self.streams[number].wait()
        return sent

    def acknowledge(self, number: int) -> list[object]:
        acknowledge(self.peers[number], self.streams[number])
        return list(self.streams[number].take_waiting())


def test_a_stream_that_waits_for_the_path_goes_on_with_an_acknowledgement_of_another():
    shared = SharedPath()
    one, other = shared.streams
    one.pending.append(bytes(1 << 20))
    assert INITIAL_BYTES - FRAME_BYTES < shared.send_all(0) <= INITIAL_BYTES
    other.pending.append(bytes(INITIAL_BYTES))
    assert INITIAL_BYTES // 2 - FRAME_BYTES < shared.send_all(1) <= INITIAL_BYTES // 2
    assert not other.sendable
    shared.now += 0.1
    assert other in shared.acknowledge(0)
    assert other.sendable


def test_what_a_peer_does_not_read_leaves_others_their_share_and_the_window_grows_around_it():
    shared = SharedPath()
    stuck, other = shared.streams
    stuck.pending.append(bytes(INITIAL_BYTES))
    shared.send_all(0)
    other.pending.append(bytes(2 << 20))
    before = shared.send_all(1)
    assert INITIAL_BYTES // 2 - FRAME_BYTES < before <= INITIAL_BYTES // 2
    sent = []
    for _ in range(3):
        shared.now += 0.1
        shared.acknowledge(1)
        sent.append(shared.send_all(1))
    assert max(sent) >= 2 * before
    shared.acknowledge(0)
    assert shared.window.under_way_bytes == other.sent_bytes - other.acked_bytes


def test_a_stream_with_nothing_under_way_takes_no_share_of_the_path():
    shared = SharedPath(3)
    _, busy, other = shared.streams
    for number in (0, 1):
        shared.streams[number].pending.append(bytes(1_000))
        shared.send_all(number)
    shared.now += 0.1
    shared.acknowledge(0)
    busy.pending.append(bytes(1 << 22))
    shared.send_all(1)
    half = shared.window.window_bytes // 2
    other.pending.append(bytes(2 * half))
    assert half - FRAME_BYTES < shared.send_all(2) <= half


def test_a_stream_that_is_over_leaves_nothing_on_the_path():
    shared = SharedPath()
    one, other = shared.streams
    one.pending.append(bytes(1 << 20))
    shared.send_all(0)
    one.discard()
    one.let_go()
    assert shared.window.under_way_bytes == 0
    other.pending.append(bytes(1 << 20))
    assert INITIAL_BYTES - FRAME_BYTES < shared.send_all(1) <= INITIAL_BYTES


def test_frames_and_records_of_a_slow_path_are_short():
    shared = SharedPath()
    stream, _ = shared.streams
    shared.window.frame_bytes = 1 << 20
    assert stream.record_bytes >= RECORD_PLAINTEXT_LIMIT_BYTES
    shared.window.frame_bytes = 8 * 1024
    stream.pending.append(bytes(1 << 20))
    _, sealed = stream.next_fwd(FRAME_BYTES)
    assert len(sealed) <= stream.record_bytes + SEQUENCE_BYTES + TAG_BYTES
    assert stream.record_bytes == 8 * 1024


# --- windows that grow -----------------------------------------------------------------------------------------------

MIB = 1 << 20


class Far:
    """A sender that always has data, and a receiver whose application takes what it is told to."""

    def __init__(
        self, *, largest: int = 32 * MIB, ours: int = 192 * MIB, theirs: int = 192 * MIB, all_of: Buffers | None = None
    ) -> None:
        self.ours, self.theirs = Buffers(ours), all_of or Buffers(theirs)
        self.sender = end(0, largest=largest, buffers=self.ours)
        self.receiver = end(1, largest=32 * MIB, buffers=self.theirs)

    def window(self) -> int:
        """Send as much as goes, and give how much of it is under way."""
        while True:
            self.sender.pending.append(bytes(64 * 1024 - self.sender.pending.size))
            if not self.sender.sendable:
                break
            carry(self.sender, self.receiver, 65_000)
        return self.sender.sent_bytes - self.sender.acked_bytes

    def read(self) -> None:
        """The application takes everything, and what came is acknowledged."""
        self.receiver.consumed(self.receiver.unread_bytes)
        acknowledge(self.receiver, self.sender)

    def rounds(self, count: int) -> list[int]:
        windows = []
        for _ in range(count):
            windows.append(round(self.window() / MIB))
            self.read()
        return windows


def test_a_window_grows_by_what_the_application_takes():
    assert Far().rounds(5) == [1, 8, 32, 32, 32]


def test_a_window_grows_no_further_than_the_relay_bears():
    assert Far(largest=3 * MIB).rounds(4) == [1, 3, 3, 3]
    assert Far(largest=0).rounds(4) == [1, 1, 1, 1]


def test_an_application_that_reads_nothing_gets_one_window_and_no_more():
    far = Far()
    assert round(far.window() / MIB) == 1
    assert not far.receiver.ack_due
    far.sender.pending.append(bytes(MIB))
    assert not far.sender.sendable
    assert far.receiver.unread_bytes <= MIB


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_a_window_is_a_quarter_of_what_is_left_for_all(side):
    assert Far(**{side: 40 * MIB}).rounds(4) == [1, 8, 8, 8]
    far = Far(**{side: 64 * MIB})
    far.rounds(3)
    getattr(far, side).used_bytes += 63 * MIB
    far.window()
    far.read()
    far.window()
    far.read()
    assert far.rounds(2) == [1, 1]


def test_strangers_whose_data_is_not_read_any_more_fill_the_buffers_and_no_more():
    """Each was given a large window while its data was read, and sends all that it may as soon as nothing is read."""
    limit, all_of = MIB, Buffers(24 * MIB)
    strangers = [Far(all_of=all_of) for _ in range(12)]
    for stranger in strangers:
        stranger.rounds(3)
    held = ended = 0
    for stranger in strangers:
        sender, receiver = stranger.sender, stranger.receiver
        sender.pending.append(bytes(40 * MIB))
        while sender.sendable and not receiver.overfull(limit):
            carry(sender, receiver, 65_016)
        if receiver.overfull(limit):
            receiver.let_go()  # closed as a slow consumer
            ended += 1
        else:
            held += receiver.unread_bytes
    assert ended > 0
    assert held <= all_of.total_bytes + len(strangers) * limit


def test_strangers_who_acknowledge_nothing_any_more_are_sent_the_buffers_and_no_more():
    """Each acknowledged all that it was sent, so that its window is large, and then nothing of what it asks for at once."""
    ours = Buffers(24 * MIB)
    strangers = [Far() for _ in range(12)]
    for stranger in strangers:
        stranger.sender = end(0, largest=32 * MIB, buffers=ours)
        stranger.rounds(3)
        stranger.sender.pending.append(bytes(40 * MIB))
    assert ours.used_bytes == 0
    sent = 0
    for stranger in strangers:
        while stranger.sender.sendable:
            sent += len(stranger.sender.next_fwd(65_016)[1])
    assert sent <= ours.total_bytes + len(strangers) * MIB
    assert not ours.full


def test_what_each_has_in_any_case_does_not_end_one_that_was_given_more():
    """250 strangers have 1 MiB under way, and acknowledge nothing more; another peer's data is read a little late."""
    ours = Buffers(192 * MIB)
    friend = Far(all_of=ours)
    friend.rounds(3)
    friend.window()
    for _ in range(250):
        sender, receiver = end(0, largest=32 * MIB, buffers=ours), end(1)
        sender.pending.append(bytes(2 * MIB))
        carry(sender, receiver, 65_016)
        acknowledge(receiver, sender)
        while sender.sendable:
            sender.next_fwd(65_016)
        acknowledge(receiver, sender)
    assert friend.receiver.unread_bytes > 24 * MIB
    assert not friend.receiver.overfull(4 * MIB)


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_what_goes_over_to_another_path_is_still_counted(side):
    """Else a peer could resume each transport once it has filled its window, and fill the next one."""
    far = Far()
    far.rounds(3)
    under_way = far.window()
    for path in range(1, 4):
        sender = end(0, path=path, largest=32 * MIB, buffers=far.ours)
        receiver = end(1, path=path, largest=32 * MIB, buffers=far.theirs)
        told = far.receiver.resume_bytes
        for old, new, had in ((far.sender, sender, told), (far.receiver, receiver, 0)):
            old.discard()
            new.go_on_from(old, had, told)
        far.sender, far.receiver = sender, receiver
        assert getattr(far, side).used_bytes >= under_way - MIB - (1 << 18)
        while sender.sendable:
            carry(sender, receiver, 65_016)
    assert getattr(far, side).used_bytes >= under_way - MIB - (1 << 18)
    far.sender.let_go()
    far.receiver.let_go()
    assert far.ours.used_bytes == far.theirs.used_bytes == 0


def test_what_need_not_be_sent_again_is_not_counted():
    far = Far()
    far.rounds(3)
    far.window()
    told = far.sender.acked_bytes
    sender, receiver = (
        end(side, path=1, largest=32 * MIB, buffers=buffers) for side, buffers in ((0, far.ours), (1, far.theirs))
    )
    sender.go_on_from(far.sender, told, 0)
    receiver.go_on_from(far.receiver, 0, told)
    assert not receiver.overfull(4 * MIB), "the peer was told that it may send as much"
    assert far.ours.used_bytes > 8 * MIB
    receiver.drop()
    acknowledge(receiver, sender)
    assert far.ours.used_bytes == 0


def test_a_window_on_another_path_grows_by_what_that_path_has_carried():
    """The relay there knows nothing of what was carried before, and bears no more than that allows."""
    far = Far()
    far.rounds(4)
    far.window()
    told = far.receiver.resume_bytes
    sender, receiver = (end(side, path=1, largest=32 * MIB, buffers=Buffers(192 * MIB)) for side in (0, 1))
    sender.go_on_from(far.sender, told, 0)
    receiver.go_on_from(far.receiver, 0, told)
    limits = RelayLimits()
    acknowledge(receiver, sender)  # the proof
    for _ in range(4):
        carried = sender.acked_bytes - told
        sender.pending.append(bytes(32 * MIB))
        while sender.sendable:
            carry(sender, receiver, 65_016)
        under_way = sender.sent_bytes - sender.acked_bytes
        assert under_way <= limits.queue_hard_bytes + 8 * carried
        receiver.consumed(receiver.unread_bytes)
        acknowledge(receiver, sender)
    assert under_way > 31 * MIB


def test_what_is_held_is_counted_until_the_stream_lets_go_of_it():
    far = Far()
    far.rounds(3)
    under_way = far.window()
    acknowledge(far.receiver, far.sender)
    assert far.receiver.unread_bytes == under_way
    assert far.theirs.used_bytes == under_way - MIB
    assert far.ours.used_bytes == 0
    far.window()
    far.sender.discard()
    far.receiver.discard()
    assert far.theirs.used_bytes >= under_way - MIB, "it waits for another path, and is still held"
    far.sender.let_go()
    far.receiver.let_go()
    assert far.ours.used_bytes == far.theirs.used_bytes == 0


def test_a_peer_that_was_given_a_window_may_use_it_and_one_that_was_not_may_not():
    far = Far()
    far.receiver._unread = 4 * MIB + 1
    assert far.receiver.overfull(4 * MIB)
    far.receiver._unread = 0
    far.rounds(3)
    far.receiver._unread = 32 * MIB + (1 << 18)
    assert not far.receiver.overfull(4 * MIB)
    far.receiver._unread = 32 * MIB + (1 << 18) + 1
    assert far.receiver.overfull(4 * MIB)
    far.receiver._unread = 4 * MIB + 1
    assert not far.receiver.overfull(4 * MIB)
    far.theirs.used_bytes = far.theirs.total_bytes + 1
    assert far.receiver.overfull(4 * MIB)
    far.receiver._unread = 4 * MIB
    assert not far.receiver.overfull(4 * MIB)


@pytest.mark.parametrize("note", [b"\x00", b"\x02", b"\x13", b"\x1a", b"\xff", b"\x14\x14", b"\x01\x14"])
def test_a_note_in_an_acknowledgement_that_means_nothing_is_malformed(note):
    sender, receiver = pair()
    sender.pending.append(b"x")
    carry(sender, receiver)
    receiver.take_ack()
    sender.frames._receiver.nonce += 1
    ack = forge_ack(sender, receiver, 0, receiver._receive_hash[:4] + note)
    assert code_of(sender.receive_ack, ack) == CloseReason.MALFORMED
