"""A transport that moves from path to path: no byte is lost, none arrives twice, no false claim is accepted."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.mux.core.stream import StreamFault
from fuzz.choices import Choices
from fuzz.sealed import ACK_LIMIT_BYTES, WINDOW_BYTES, Party, make_end


def one_input(data: bytes) -> None:
    """Operations of the two applications, of an honest network that loses paths at any moment, and false claims.

    Each end tells its count of received bytes when a path is made, and may get more on the old path before it moves. The
    data that arrives is a prefix of the data written, and in the end all of it. A claim of bytes that were never sent, or
    of less than was acknowledged, is a ``StreamFault``.
    """
    choices = Choices(data)
    parties = Party(0), Party(1)
    path = 0
    for _ in range(200):
        if not choices.left:
            break
        side = choices.byte() & 1
        party, other = parties[side], parties[1 - side]
        match choices.below(9):
            case 0 | 1:
                party.write(1 + 8 * choices.byte())
            case 2:
                party.send(40 + 3 * choices.byte())
            case 3:
                party.consume(1 + 8 * choices.byte())
            case 4:
                party.stream.end()
            case 5:
                path += 1
                _move(choices, parties, path)
            case 6:
                claimed = choices.below(0x10000)
                _claim(parties[side], other, claimed, path + 1)
                return
            case _ if party.sent:
                other.take(party.sent.popleft())
        for each, peer in (parties, parties[::-1]):
            _check(each, peer)
    path += 1
    _move(Choices(b""), parties, path)
    _finish(parties)


def _move(choices: Choices, parties: tuple[Party, Party], path: int) -> None:
    """Both ends go on over a new path; frames of the old one may still come between telling and moving."""
    told = []
    for party in parties:
        told.append(party.stream.resume_bytes)
        for _ in range(choices.byte() % 4):
            peer = parties[1 - party.side]
            if peer.sent:
                party.take(peer.sent.popleft())
    for party in parties:
        new = make_end(party.side, path)
        new.go_on_from(party.stream, told[1 - party.side], told[party.side])
        party.stream = new
        party.sent.clear()
        # As a connection does on a confirmed path: its first ACK proves the initiator.
        if party.side == 0:
            party.sent.append(new.take_ack())


def _claim(party: Party, other: Party, claimed: int, path: int) -> None:
    """The peer claims to have ``claimed`` bytes."""
    old = party.stream
    least, most = old.acked_bytes, max(old._sent_before_bytes, old.sent_bytes)
    new = make_end(party.side, path)
    try:
        new.go_on_from(old, claimed, old.resume_bytes)
    except StreamFault:
        assert not least <= claimed <= most
        return
    assert least <= claimed <= most
    assert new.acked_bytes == new.sent_bytes == claimed
    assert new.pending.size == party.written - claimed


def _check(party: Party, other: Party) -> None:
    stream = party.stream
    from fuzz.sealed import TEXT

    assert TEXT.startswith(party.received) and len(party.received) <= other.written
    assert stream.acked_bytes <= stream.sent_bytes
    assert stream.unread_bytes == len(party.received) - party.read <= WINDOW_BYTES + ACK_LIMIT_BYTES
    assert stream._outstanding_bytes == sum(len(data) for _, data, _, _ in stream._outstanding) <= WINDOW_BYTES
    assert stream.pending.size + stream.sent_bytes == party.written


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
        assert len(party.received) == other.written
        assert party.stream.end_received and party.stream.drained and party.stream.complete


def seeds() -> Iterator[bytes]:
    """Data on the way, acknowledged or unread when the path is lost, once and again; ends; claims of all kinds."""
    write, send, take, read, lose = b"\x00\x00\x40", b"\x00\x02\x20", b"\x00\x08", b"\x01\x03\xff", b"\x00\x05\x00\x00"
    ack = b"\x01\x02\x00\x01\x08"
    yield write + send * 3 + take * 2 + lose + send * 3 + take * 4 + ack + lose
    yield write * 2 + send * 6 + take * 3 + b"\x00\x05\x02\x03" + send * 2 + lose * 3
    yield write * 4 + send * 12 + take * 12 + ack + lose + read * 3 + ack + send * 4
    yield write + b"\x00\x04" + send * 6 + take * 4 + lose + ack + lose
    for claimed in (0, 100, 300, 600, 0xFFFF):
        yield write + send * 3 + take * 2 + ack + b"\x00\x06" + claimed.to_bytes(2, "big")
        yield write + send * 3 + take * 2 + lose + b"\x00\x06" + claimed.to_bytes(2, "big")
