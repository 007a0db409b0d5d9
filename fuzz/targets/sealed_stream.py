"""A sealed stream over a relay that drops, repeats, reorders, alters and invents frames."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.mux.core.stream import StreamFault
from dmsg.mux.core.wire import ACK, CLOSE, FWD, HEADER, HEADER_BYTES
from fuzz.choices import Choices
from fuzz.sealed import Party


def one_input(data: bytes) -> None:
    """Operations of the two applications and of the relay.

    Whatever the relay does, the data that arrives is a prefix of the data written. The first frame that is not the next one
    as sent raises ``StreamFault``. With an honest relay everything arrives and is acknowledged.
    """
    choices = Choices(data)
    parties = Party(0), Party(1)
    touched = [False, False]  # whether what stands before a party's next frame is not what was sent
    for _ in range(256):
        if not choices.left:
            break
        side = choices.byte() & 1
        party, other = parties[side], parties[1 - side]
        match choices.below(12):
            case 0 | 1:
                party.write(1 + 8 * choices.byte())
            case 2 | 3:
                party.send(40 + 3 * choices.byte())
            case 4:
                party.consume(1 + 8 * choices.byte())
            case 5:
                party.stream.end()
            case 6 if party.sent and len(party.sent[0]) > HEADER_BYTES:
                frame = bytearray(party.sent[0])
                at = HEADER_BYTES + choices.byte() % (len(frame) - HEADER_BYTES)
                mask = choices.byte()
                frame[at] ^= mask
                touched[1 - side] |= bool(mask)
                party.sent[0] = bytes(frame)
            case 7 if party.sent:
                touched[1 - side] = True
                party.sent.popleft() if choices.flag() else party.sent.appendleft(party.sent[0])
            case 8 if len(party.sent) > 1:
                touched[1 - side] = True
                party.sent.rotate(1 + choices.byte() % (len(party.sent) - 1))
            case 9:
                payload = choices.chunk()
                kind = choices.pick((FWD, ACK, CLOSE))
                party.sent.appendleft(HEADER.pack(kind, 5, len(payload)) + payload)
                touched[1 - side] |= kind != CLOSE
            case 10 if party.sent:
                assert other.stream.proves_close(party.sent[0][HEADER_BYTES:]) is False
                return
            case _ if party.sent:
                before = len(other.received)
                try:
                    other.take(party.sent.popleft())
                except StreamFault:
                    assert touched[1 - side], "an honest frame was refused"
                    assert len(other.received) == before
                    return
        for each, peer in (parties, parties[::-1]):
            each.check(peer)
    if not any(touched) and not any(frame[0] == CLOSE for party in parties for frame in party.sent):
        _finish(parties)


def _finish(parties: tuple[Party, Party]) -> None:
    for party in parties:
        party.stream.end()
    for _ in range(20_000):
        moved = False
        for party, other in (parties, parties[::-1]):
            party.consume(1 << 20)
            party.send(1_000)
            while party.sent:
                moved = True
                other.take(party.sent.popleft())
        if not moved:
            break
    for party, other in (parties, parties[::-1]):
        party.check(other)
        assert len(party.received) == other.written and party.stream.end_received
        assert party.stream.drained and party.stream.end_acked


def seeds() -> Iterator[bytes]:
    """Data both ways with acknowledgements, a full window, ends; then each thing that a relay may do."""
    talk = b"\x00\x00\x20\x00\x02\xff\x00\x0b\x01\x02\x00\x01\x0b"
    yield talk * 3
    yield b"\x00\x00\xff" * 3 + b"\x00\x02\xff" * 8 + b"\x00\x0b" * 8 + b"\x01\x04\xff" * 3 + b"\x01\x02\x00\x01\x0b"
    yield talk + b"\x00\x05\x00\x02\x00\x00\x0b\x01\x02\x00\x01\x0b"
    sent = b"\x00\x00\x20" + b"\x00\x02\x08" * 4
    yield talk + sent + b"\x00\x06\x03\x80\x00\x0b"
    yield talk + sent + b"\x00\x07\x00\x00\x0b\x00\x0b"
    yield talk + sent + b"\x00\x07\x01\x00\x0b"
    yield talk + sent + b"\x00\x08\x01\x00\x0b"
    yield talk + b"\x00\x09\x16" + bytes(22) + b"\x00\x00\x0b"
    yield talk + b"\x00\x09\x11" + bytes(17) + b"\x02\x00\x0b" + sent
    yield talk + sent + b"\x00\x0a"
