"""Files of zstd frames: read back as written, cut where they are torn, and never trusted."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dmsg.eventlog import compress
from dmsg.eventlog.compress import Compressor, FrameReader, look_through, read_lines

LINES = st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b" ")), min_size=1, max_size=6)
FRAMES = st.lists(LINES, max_size=5)


def pack(frames: list[list[bytes]]) -> list[bytes]:
    packer = Compressor()
    return [packer.frame(b"".join(line + b"\n" for line in lines)) for lines in frames]


def look(path: Path) -> FrameReader:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return look_through(descriptor)
    finally:
        os.close(descriptor)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frames") / "file"


@given(FRAMES)
def test_lines_are_read_back(file: Path, frames: list[list[bytes]]) -> None:
    file.write_bytes(b"".join(pack(frames)))
    assert list(read_lines(file)) == [line for lines in frames for line in lines]
    found = look(file)
    assert (found.problem, found.end, found.lines) == ("", file.stat().st_size, sum(map(len, frames)))


@given(FRAMES, st.integers(0, 1000), st.binary(max_size=20))
def test_what_follows_the_last_whole_frame_is_known_for_what_it_is(
    file: Path, frames: list[list[bytes]], cut: int, tail: bytes
) -> None:
    packed = pack(frames)
    whole = b"".join(packed)
    cut = min(cut, len(whole))
    file.write_bytes(whole[:cut] + (tail if cut == len(whole) else b""))
    kept, end = 0, 0
    for lines, frame in zip(frames, packed, strict=True):
        if end + len(frame) > cut:
            break
        kept, end = kept + len(lines), end + len(frame)
    found = look(file)
    assert (found.lines, found.end) == (kept, end)
    assert bool(found.problem) == (file.stat().st_size > end)
    if found.problem:
        with pytest.raises(ValueError, match=r"its last|not made of"):
            list(read_lines(file))


@given(FRAMES, st.integers(1, 50))
def test_pieces_of_any_size_make_no_difference(frames: list[list[bytes]], size: int) -> None:
    data = b"".join(pack(frames))
    reader, text = FrameReader(), b""
    for start in range(0, len(data), size):
        text += b"".join(reader.feed(data[start : start + size]))
    assert reader.finish() == "" and reader.end == len(data)
    assert text == b"".join(line + b"\n" for lines in frames for line in lines)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    first, second = pack([[b"a" * 1000], [bytes(range(32, 127)) * 3]])
    broken = bytearray(first + second)
    broken[len(first) + len(second) // 2] ^= 1
    (tmp_path / "file").write_bytes(broken)
    found = look(tmp_path / "file")
    assert found.problem and (found.end, found.lines) == (len(first), 1)


def test_a_frame_that_ends_within_a_line_is_not_whole(tmp_path: Path) -> None:
    [first] = pack([[b"one", b"two"]])
    (tmp_path / "file").write_bytes(first + zstandard.compress(b"three\nfo") + zstandard.compress(b"ur\n"))
    found = look(tmp_path / "file")
    assert (found.end, found.lines, found.problem) == (len(first), 2, "its last line is cut off")


def test_a_bomb_costs_little_memory_and_is_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compress, "PIECE_BYTES", 64)
    (tmp_path / "file").write_bytes(zstandard.compress(bytes(256 * 1024 * 1024)))
    tracemalloc.start()
    try:
        found = look(tmp_path / "file")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found.problem, found.end) == ("it unpacks to more than a log of its size can", 0)
    assert peak < 16 * 1024 * 1024


def test_a_line_without_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compress, "PIECE_BYTES", 64)
    reader = FrameReader()
    assert sum(map(len, reader.feed(zstandard.compress(bytes(256 * 1024 * 1024))))) < 32 * 1024 * 1024
    assert reader.problem == "it has a line without end"


def test_a_small_file_of_lines_that_unpacks_to_100_mib_is_not_read_on(tmp_path: Path) -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(b"{}\n" * (100 * 1024 * 1024 // 3))
    assert len(bomb) < 16 * 1024
    (tmp_path / "file").write_bytes(bomb)
    found = look(tmp_path / "file")
    assert (found.problem, found.lines, found.end) == ("it unpacks to more than a log of its size can", 0, 0)
    with pytest.raises(ValueError, match="unpacks to more"):
        assert sum(1 for _ in read_lines(tmp_path / "file")) < compress.RATIO_LIMIT * len(bomb) / 3


def test_the_densest_log_is_read(tmp_path: Path) -> None:
    """Refusals that differ in nothing but time and number, in one frame."""
    lines = [
        b'{"event":"refused","v":1,"ts":%.6f,"role":"server","node":"%s","boot":"%s","seq":%d,"conn":0,"remote":"",'
        b'"what":"request","reason":"rate","count":1}' % (1772323200 + seq / 100, b"n" * 16, b"b" * 16, seq)
        for seq in range(50_000)
    ]
    (packed,) = pack([lines])
    assert len(b"\n".join(lines)) > 50 * len(packed)
    (tmp_path / "file").write_bytes(packed)
    assert look(tmp_path / "file").lines == 50_000
