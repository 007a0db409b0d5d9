"""The record layer, with a network that may alter sealed records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from dmsg.crypto.aead import Cipher
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.record import LENGTH_BYTES, RecordLayer
from fuzz.choices import Choices

#: Records of an AES key: few enough that the key changes within an input.
_AES_RECORDS = 3
#: A stream is cut into at most one piece more than this: single bytes of large records take long.
_PIECES = 2_048
#: A reader holds one incomplete packet at most.
_PACKET_LIMIT_BYTES = LENGTH_BYTES + 0xFFFF


def one_input(data: bytes) -> None:
    """The first byte chooses the cut and the cipher; the others seal records, alter the stream and append to it.

    Only sealed records are ever opened, in order and from the first on. The pieces, which are views of one reused buffer,
    make no difference. The keys depend on the input: with fixed ones the search learns sealed records from the comparison below,
    and appends records that were not sealed.
    """
    keys = hashlib.sha256(data).digest(), hashlib.sha256(data[::-1]).digest()
    choices = Choices(data)
    how = choices.byte()
    cut, cipher = how & 127, Cipher.AES if how & 128 else Cipher.CHACHA
    sender = _layer(keys, cipher)
    sent: list[bytes] = []
    stream = bytearray()
    while choices.left and len(sent) < 64 and len(stream) < 80_000:
        match choices.below(6):
            case 0:
                sent.append(choices.chunk())
                stream += sender.seal(sent[-1])
            case 1 if stream:
                stream[choices.below(0x10000) % len(stream)] ^= choices.byte()
            case 2 if stream:
                stream += stream[choices.below(0x10000) % len(stream) :]
            case 3:
                del stream[choices.below(0x10000) :]
            case 4:
                sent.append(bytes(300 * choices.byte()))
                stream += sender.seal(sent[-1])
            case _:
                stream += choices.chunk()
    whole, whole_failed = _open([bytes(stream)], keys, cipher)
    size = max(1 + cut, len(stream) // _PIECES)
    pieces, failed = _open([bytes(stream[at : at + size]) for at in range(0, len(stream), size)], keys, cipher)
    assert failed == whole_failed
    assert b"".join(sent).startswith(b"".join(pieces))
    assert whole == (pieces if not failed else [])
    if bytes(stream) == _sealed(sent, keys, cipher):
        assert not failed and b"".join(pieces) == b"".join(sent)


def _layer(keys: tuple[bytes, bytes], cipher: Cipher) -> RecordLayer:
    return RecordLayer(keys[0], keys[1], cipher, aes_records=_AES_RECORDS)


def _open(pieces: list[bytes], keys: tuple[bytes, bytes], cipher: Cipher) -> tuple[list[bytes], bool]:
    reader = _layer(keys[::-1], cipher)
    found: list[bytes] = []
    buffer = bytearray(max(map(len, pieces), default=0))
    for piece in pieces:
        buffer[: len(piece)] = piece
        try:
            found += reader.open(memoryview(buffer)[: len(piece)])
        except RemoteProtocolError:
            return found, True
        assert len(reader._buffer) < _PACKET_LIMIT_BYTES
    return found, False


def _sealed(plaintexts: list[bytes], keys: tuple[bytes, bytes], cipher: Cipher) -> bytes:
    sender = _layer(keys, cipher)
    return b"".join(map(sender.seal, plaintexts))


def seeds() -> Iterator[bytes]:
    """Records in order, altered, repeated, cut, large, and garbage."""
    two = b"\x00\x05hello\x00\x00"
    for cut in (b"\x00", b"\x01", b"\x07", b"\xff"):
        yield cut + two
        yield cut + two + b"\x01\x00\x09\x80"
        yield cut + two + b"\x02\x00\x00"
        yield cut + two + b"\x03\x00\x12"
        yield cut + b"\x04\xff\x04\xf0" + two
        yield cut + two + b"\x05\x08\x00\x14\x00\x00\x00\x03ab"
