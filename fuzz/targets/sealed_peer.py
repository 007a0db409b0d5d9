"""A sealed stream with a hostile peer, which has the keys and seals anything."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress

from dmsg.crypto.aead import TAG_BYTES
from dmsg.mux.core.buffers import Buffers
from dmsg.mux.core.e2e_handshake import SecureKeys
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.sealed_frames import SealedFrames
from dmsg.mux.core.sealed_stream import NOTHING_YET, SealedStream
from dmsg.mux.core.stream import StreamFault, StreamState
from dmsg.mux.core.wire import ACK, FWD, HEADER, HEADER_BYTES, CloseReason, split_frames
from fuzz.choices import Choices
from fuzz.oracles import KEYS
from fuzz.sealed import TEXT

_WINDOW_BYTES, _ACK_LIMIT_BYTES = 1 << 20, 500
_LARGEST_BYTES = 4 << 20
_POWERS = range(20, 26)
_SECRETS = [hashlib.sha256(b"%d" % number).digest() for number in range(4)]


class _Peer:
    """The peer: its keys, the data it sent and got, and the hashes of both."""

    def __init__(self) -> None:
        base = PlainStream(5, KEYS[0].public_key, b"", initiator=True, window_bytes=1, first_sequence=0)
        ours, theirs, our_hash, their_hash = _SECRETS
        self.stream = SealedStream(
            base,
            SecureKeys(ours, theirs, our_hash, their_hash, b"t" * 16),
            window_bytes=_WINDOW_BYTES,
            ack_limit_bytes=_ACK_LIMIT_BYTES,
            largest_window_bytes=_LARGEST_BYTES,
            rekey_after_frames=20,
            buffers=Buffers(64 << 20),
        )
        self.stream.state = StreamState.OPEN
        self.frames = SealedFrames(5, theirs, ours, 1 << 30)
        self.sent = 0  # frames with a sequence
        self.sent_bytes = 0
        self.ended = self.cut = False
        #: Frames it got and has not acknowledged: the sequence, the hash after it, the bytes up to it.
        self.got: list[tuple[int, bytes, int]] = []
        self.hash = our_hash
        self.acked = (NOTHING_YET, our_hash[:4], 0)
        self.got_bytes = 0
        self.written = 0
        self.given = b""
        self.window_bytes = _WINDOW_BYTES

    def read(self, frames: bytes) -> None:
        """Read the stream's frames, which are as any peer expects them."""
        found, used = split_frames(frames)
        assert used == len(frames)
        for kind, _, start, end in found:
            inner = self.frames.open(kind, frames[start:end])
            if not inner:
                assert kind == ACK
                self.frames.follow_marker()
                continue
            if kind == ACK:
                assert len(inner) in (6, 7) or len(inner) > 9
                inner = inner[7:]
            if inner:
                self.hash = hashlib.sha256(self.hash + frames[end - TAG_BYTES : end]).digest()
                self.got_bytes += len(inner) - 2
                self.got.append((int.from_bytes(inner[:2], "big"), self.hash[:4], self.got_bytes))

    def ack(self, choices: Choices) -> tuple[bytes, int | None]:
        """An acknowledgement, and its fault, if any."""
        how = choices.byte()
        among = [self.acked, *self.got]
        at = choices.byte() % len(among)
        sequence, digest, _ = among[at]
        if how & 1:
            digest = bytes((digest[0] ^ 1, *digest[1:]))
            return sequence.to_bytes(2, "big") + digest, CloseReason.INTEGRITY
        if how & 2:
            sequence = choices.below(0x10000)
            known = {one: (place, code) for place, (one, code, _) in enumerate(among)}
            if sequence not in known:
                return sequence.to_bytes(2, "big") + digest, CloseReason.INTEGRITY
            at, digest = known[sequence]
        self.acked = among[at]
        del self.got[:at]
        return sequence.to_bytes(2, "big") + digest, None

    def fwd(self, choices: Choices) -> tuple[bytes, bytes, int | None]:
        """The next frame of data, its payload, and its fault, if any."""
        how = choices.byte()
        size = choices.byte() * (1 if how & 4 else 8)
        data = TEXT[self.sent_bytes : self.sent_bytes + size]
        sequence = self.sent & 0xFFFF
        if self.ended:
            return sequence.to_bytes(2, "big") + data, b"", CloseReason.MALFORMED
        if how & 3 == 3:
            wrong = choices.below(0x10000)
            if wrong != sequence:
                return wrong.to_bytes(2, "big") + data, b"", CloseReason.INTEGRITY
        self.sent += 1
        self.sent_bytes += len(data)
        return sequence.to_bytes(2, "big") + data, data, None


def one_input(data: bytes) -> None:
    """The application writes, reads and ends; the peer sends frames that open and say anything.

    Raises only ``StreamFault``, exactly for frames that no honest peer sends. Only sent data is acknowledged, a window is
    one of the defined ones, and the stream's frames are well formed.
    """
    choices = Choices(data)
    peer = _Peer()
    stream = peer.stream
    for _ in range(150):
        if not choices.left:
            break
        expected: int | None = None
        kind, inner, brings = FWD, b"", b""
        match choices.below(12):
            case 0 | 1:
                text = TEXT[peer.written : peer.written + 4 * choices.byte()]
                if text and not stream.end_wanted and not stream.was_cut:
                    peer.written += len(text)
                    stream.pending.append(text)
                continue
            case 2 | 3:
                if stream.ack_due and choices.flag():
                    peer.read(stream.take_ack())
                elif stream.sendable:
                    peer.read(b"".join(stream.next_fwd(60 + choices.byte() * 4)))
                continue
            case 4:
                stream.consumed(min(choices.byte() * 16, stream.unread_bytes))
                continue
            case 5:
                stream.end()
                continue
            case 6 | 7:
                inner, brings, expected = peer.fwd(choices)
            case 8:
                kind = ACK
                inner, expected = peer.ack(choices)
            case 9:
                kind = ACK
                note = choices.pick((*_POWERS, 1, 0, 2, 19, 26, 255))
                inner, expected = peer.ack(choices)
                inner += bytes((note,))
                if note not in (*_POWERS, 1):
                    expected = CloseReason.MALFORMED
                elif note == 1:
                    peer.cut = True
            case 10:
                kind = ACK
                note = choices.pick((0, 20, 1, 77))
                ack, expected = peer.ack(choices)
                more, brings, behind = peer.fwd(choices)
                inner = ack + bytes((note,)) + more
                peer.cut |= note == 1
                if note == 77 or len(more) <= 2:
                    expected = CloseReason.MALFORMED
                else:
                    expected = behind if expected is None else expected
            case _:
                kind = choices.pick((FWD, ACK))
                inner = choices.chunk(12)
                header, sealed = peer.frames.seal(kind, inner)
                with suppress(StreamFault):
                    _take(stream, kind, header + sealed)
                return  # what it may have meant, the other operations say
        header, sealed = peer.frames.seal(kind, inner)
        try:
            given = _take(stream, kind, header + sealed)
        except StreamFault as fault:
            assert fault.code == expected, (fault.code, expected)
            return
        assert expected is None, "a fault was taken"
        assert given == brings
        peer.ended |= kind == FWD and not brings
        peer.given += given
        _check(peer)


def _take(stream: SealedStream, kind: int, frame: bytes) -> bytes:
    if kind == FWD:
        return stream.receive_fwd(frame, HEADER_BYTES, len(frame))[0]
    assert HEADER.unpack_from(frame)[0] == ACK
    return stream.receive_ack(frame[HEADER_BYTES:])


def _check(peer: _Peer) -> None:
    stream = peer.stream
    assert stream.end_received == peer.ended and stream.was_cut == peer.cut
    assert stream.received_bytes == len(peer.given) and TEXT.startswith(peer.given)
    assert stream.acked_bytes == peer.acked[2] <= stream.sent_bytes == peer.got_bytes
    assert len(stream._outstanding) == len(peer.got)
    assert stream._outstanding_bytes == stream.sent_bytes - stream.acked_bytes
    assert _WINDOW_BYTES <= stream._window.bytes <= _LARGEST_BYTES
    assert not stream.was_cut or not stream.pending
    assert stream.unread_bytes <= _ACK_LIMIT_BYTES or stream.overfull(0) == (
        stream.unread_bytes > stream._window.most_given_bytes + _ACK_LIMIT_BYTES
    )
    assert not stream.overfull(stream.unread_bytes)


def seeds() -> Iterator[bytes]:
    """An honest talk, every note, and then each thing that is wrong."""
    write, send, data, answer = b"\x00\x40", b"\x02\x40", b"\x06\x00\x08", b"\x02\x01"
    ack = b"\x08\x00\x01"
    talk = write + send + data + answer + ack
    yield talk * 3 + b"\x05" + send + ack + b"\x06\x04\x00" + data
    yield talk + (write + send) * 25 + b"\x08\x00\x18" + b"\x04\xff" + answer
    yield talk + b"\x06\x00\xff" * 2 + answer + b"\x04\x20" + answer + b"\x04\xff" + answer
    for note in range(12):
        yield talk + write + send + bytes((9, note, 0, 1)) + talk
    yield talk + write + b"\x02\x00" + bytes((9, 6, 0, 0)) + b"\x04\x01" + answer
    for note in range(4):
        yield talk + write + send + bytes((10, note, 0, 1)) + b"\x00\x08" + talk
        yield talk + bytes((10, note, 0, 0)) + b"\x00\x00" + talk
    yield talk + write + send + b"\x08\x01\x01"
    yield talk + write + send + b"\x08\x01\x00"
    yield talk + write + send + b"\x08\x02\x00\x00\x07"
    yield talk + write + send + b"\x08\x02\x00\x00\x01" + talk
    yield talk + b"\x06\x03\x08\x00\x09"
    yield talk + b"\x0a\x00\x00\x00\x03\x08\x00\x09"
    for kind in (b"\x00", b"\x01"):
        for inner in (b"", b"a", b"ab", b"abcdef", b"abcdefg", b"abcdefghi"):
            yield talk + b"\x0b" + kind + bytes((len(inner),)) + inner
