"""Files of an event log: zstd frames with and without whole lines."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.eventlog.compress import PIECE_BYTES, RATIO_LIMIT, Compressor, FrameReader
from fuzz.choices import Choices

#: Greatest growth, of 128 KiB blocks of one repeated byte; a frame may need at most this much for each of its bytes.
_GROWTH = 64 * 1024
_compressor = Compressor()


def one_input(data: bytes) -> None:
    """The first byte says whether the rest is a file, or the content of a file that is packed and then altered.

    Nothing is raised; for a whole file the pieces make no difference, and every line is counted.
    """
    choices = Choices(data)
    how = choices.byte()
    text = b""
    if how & 1:
        text = choices.chunk(2_000)
        if how & 0x80:  # of more than one block of a frame, each of which comes out by itself
            text *= 1 + 4 * choices.byte()
        middle = text.rfind(b"\n", 0, len(text) // 2) + 1
        file = b"".join(_compressor.frame(one) for one in (text[:middle], text[middle:]))
        alteration = choices.byte()
        if how & 2 and file:
            altered = bytearray(file)
            altered[choices.below(0x10000) % len(file)] ^= alteration
            file = bytes(altered)
        more = choices.rest()
        file += more
        is_whole = not how & 2 and not more
    else:
        file, is_whole = choices.rest(), False
    whole = _read(file, len(file) or 1)
    single = _read(file, 1 + (how & 0x7F))
    if whole[0]:
        # libzstd notices a wrong length in a frame's header only if it gets the whole frame at once.
        assert single[2] <= len(file)
    elif single[0]:
        # libzstd accepts a block that repeats a byte zero times in a whole frame, and refuses it in pieces.
        assert single[1] <= whole[1] and single[2] < whole[2]
    else:
        assert whole == single
    problem, lines, end, read = whole
    assert end <= len(file)
    _check_growth(file, problem, len(read))
    if is_whole:
        assert problem == ("its last line is cut off" if text and not text.endswith(b"\n") else "")
        assert problem or (lines, end, read) == (text.count(b"\n"), len(file), text)
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
            found += text if len(found) < 3_000_000 else b""
        if reader.problem:
            break
    problem = reader.problem
    assert reader.finish() == reader.problem and (not problem or reader.problem == problem)
    return reader.finish(), reader.lines, reader.end, found if not reader.problem else b""


def _check_growth(file: bytes, problem: str, read_bytes: int) -> None:
    """A reader that knows the size of a file stops exactly if it unpacks to more than any log does."""
    reader, size = FrameReader(len(file)), 0
    for text in reader.feed(file):
        size += len(text)
    assert size <= len(file) * RATIO_LIMIT
    if not problem:
        is_long = read_bytes > len(file) * RATIO_LIMIT
        assert reader.finish() == ("it unpacks to more than a log of its size can" if is_long else "")


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
    many = bytes(range(11, 255)) + b"\nabcd\n"
    for cut in (b"\x81", b"\x89", b"\xfd"):
        yield cut + b"\x01\xf4" + many * 2 + b"\x20\x00"
        yield cut + b"\x01\xf4" + many * 2 + b"\xff\x00"
        yield cut + b"\x01\xf3" + (many * 2)[:-1] + b"\xff\x00"
    yield b"\x00" + b"".join(_compressor.frame(lines) for _ in range(3)) + b"\x28\xb5\x2f"
    yield b"\x00garbage"
