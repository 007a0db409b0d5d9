"""Files of an event log: zstd frames that hold whole lines, or do not."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.eventlog.compress import PIECE_BYTES, Compressor, FrameReader
from fuzz.choices import Choices

#: What 128 KiB blocks of one repeated byte take at the least; a frame may ask for no more than this for each byte of it.
_GROWTH = 64 * 1024
_compressor = Compressor()


def one_input(data: bytes) -> None:
    """The first byte says whether the rest is a file, or what is packed into one and then altered.

    Nothing is raised; of a file that is whole the pieces change nothing, and every line is counted.
    """
    choices = Choices(data)
    how = choices.byte()
    text = b""
    if how & 1:
        text = choices.chunk(2_000)
        file = b"".join(_compressor.frame(one) for one in (text[: len(text) // 2], text[len(text) // 2 :]))
        alteration = choices.byte()
        if how & 2 and file:
            file = bytearray(file)
            file[choices.below(0x10000) % len(file)] ^= alteration
            file = bytes(file)
        file += choices.rest()
    else:
        file = choices.rest()
    whole = _read(file, len(file) or 1)
    single = _read(file, 1 + how)
    if whole[0]:
        # Of a frame that has another length than it says libzstd knows only when it is handed the whole frame at once.
        assert single[2] <= len(file)
    elif single[0]:
        # A block that repeats a byte no times libzstd takes in a whole frame, and refuses in pieces.
        assert single[1] <= whole[1] and single[2] < whole[2]
    else:
        assert whole == single
    problem, lines, end, read = whole
    assert end <= len(file)
    if not problem:
        assert lines == read.count(b"\n") and (not read or read.endswith(b"\n"))
        if how & 1 and not how & 2:
            assert read.startswith(text)


def _read(file: bytes, cut: int) -> tuple[str, int, int, bytes]:
    reader = FrameReader()
    found = b""
    for at in range(0, len(file), cut):
        for text in reader.feed(file[at : at + cut]):
            assert len(text) <= PIECE_BYTES * _GROWTH
            found += text if len(found) < 1_000_000 else b""
        if reader.problem:
            break
    return reader.finish(), reader.lines, reader.end, found if not reader.problem else b""


def seeds() -> Iterator[bytes]:
    """Whole files, cut ones, frames without a line, a bomb, garbage."""
    lines = b'{"event":"x"}\n' * 20
    yield b"\x00" + _compressor.frame(lines)
    yield b"\x00" + _compressor.frame(lines)[:-3]
    yield b"\x00" + _compressor.frame(b"no line")
    yield b"\x00" + _compressor.frame(bytes(1_000_000))
    yield b"\x00" + _compressor.frame(b"") + b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip"
    yield b"\x01\x01\x00" + lines[:256]
    yield b"\x03\x01\x00" + lines[:256] + b"\x80\x00\x30"
    yield b"\x00garbage"
