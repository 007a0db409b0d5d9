"""Makes, checks and reads files of whole zstd frames, each of which holds whole lines. Owner of zstandard.

Frames are independent: after its writer died, a file is readable up to the end of its last whole frame. Every frame carries
a checksum of its content.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import zstandard

#: Level at which the event log is packed: 1 µs a line; the next levels cost twice as much and gain a few per cent.
LEVEL: Final = 3
#: Bytes decoded in one go: 4 KiB can become 128 MiB at most, and only in a file made for that.
PIECE_BYTES: Final = 4096
#: Longest line in bytes: a longer one is not from an event log.
LINE_LIMIT_BYTES: Final = 16 * 1024 * 1024
#: Most bytes of text for each byte of a file. The densest logs, floods of refusals that differ only in number and time,
#: have 100.
RATIO_LIMIT: Final = 250
#: Most bytes of text in a file. No log has more before its file has 64 MiB and a new one begins.
TEXT_LIMIT_BYTES: Final = 8 * 1024**3
_READ_BYTES: Final = 64 * 1024


class Compressor:
    """Makes frames; for one thread only."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True)

    def frame(self, data: bytes) -> bytes:
        """``data`` packed as one whole frame."""
        return self._compressor.compress(data)


class FrameReader:
    """Decodes a file piece by piece and knows how much of it is whole. A hostile file costs at most 128 MiB of memory, and
    is read until it unpacks to more than :data:`TEXT_LIMIT_BYTES`, or :data:`RATIO_LIMIT` for ``size_bytes``, allow.

    Raises nothing: once ``problem`` (a short text for people) is set, further bytes are ignored.
    """

    def __init__(self, size_bytes: int | None = None) -> None:
        """``size_bytes`` is the size of the whole file, if that is known."""
        self._text_left = TEXT_LIMIT_BYTES if size_bytes is None else min(size_bytes * RATIO_LIMIT, TEXT_LIMIT_BYTES)
        #: Lines in whole frames so far.
        self.lines = 0
        #: Offset in the file behind the last whole frame that ends with a line.
        self.end = 0
        #: What is wrong with the file; "" as long as nothing is.
        self.problem = ""
        self._decoder = zstandard.ZstdDecompressor()
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._frame_lines = 0
        self._line_bytes = 0
        self._offset = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take the next bytes of the file and yield their text in pieces. Runs only as far as it is consumed."""
        for start in range(0, len(data), PIECE_BYTES):
            yield from self._feed(data[start : start + PIECE_BYTES])

    def finish(self) -> str:
        """What is wrong with the file if it ends here; "" if nothing is."""
        if not self.problem and self._frame is not None:
            self.problem = "its last zstd frame is cut off"
        return self.problem

    def _feed(self, piece: bytes) -> Iterator[bytes]:
        while piece and not self.problem:
            if self._frame is None:
                self._frame, self._frame_lines = self._decoder.decompressobj(), 0
            try:
                text = self._frame.decompress(piece)
            except (zstandard.ZstdError, MemoryError):
                self.problem = "it is not made of zstd frames"
                return
            rest = self._frame.unused_data if self._frame.eof else b""
            self._offset += len(piece) - len(rest)
            piece = rest
            self._count(text)
            if self._text_left < 0:
                self.problem = self.problem or "it unpacks to more than a log of its size can"
                return
            if text:
                yield text
            if self._frame.eof:
                self._end_frame()

    def _count(self, text: bytes) -> None:
        self._text_left -= len(text)
        self._frame_lines += text.count(b"\n")
        last = text.rfind(b"\n")
        self._line_bytes = len(text) - last - 1 + (self._line_bytes if last < 0 else 0)
        if self._line_bytes > LINE_LIMIT_BYTES:
            self.problem = "it has a line without end"

    def _end_frame(self) -> None:
        self._frame = None
        if self._line_bytes:
            self.problem = self.problem or "its last line is cut off"
        elif not self.problem:
            self.lines += self._frame_lines
            self.end = self._offset


def look_through(descriptor: int) -> FrameReader:
    """Read an open file from its beginning to its end, or to its first problem. Raises ``OSError``."""
    reader, offset = FrameReader(os.fstat(descriptor).st_size), 0
    while not reader.problem and (data := os.pread(descriptor, _READ_BYTES, offset)):
        offset += len(data)
        for _ in reader.feed(data):
            pass
    reader.finish()
    return reader


def read_lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Every line of a finished file, without its end. Raises ``OSError``, and ``ValueError`` where it is not whole."""
    begun = b""
    with open(path, "rb") as file:
        reader = FrameReader(os.fstat(file.fileno()).st_size)
        while not reader.problem and (data := file.read(_READ_BYTES)):
            for text in reader.feed(data):
                *lines, begun = (begun + text).split(b"\n")
                yield from lines
    if reader.finish():
        raise ValueError(f"{os.fspath(path)}: {reader.problem}")
