"""Files of the landing zone, written by several processes: each makes the text of one file at a time."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import zstandard

from dmsg_logs.synthetic.flaws import INSERTED, REPLACED, Plan, PlannedFile
from dmsg_logs.synthetic.lines import Scribe
from dmsg_logs.synthetic.timeline import Timeline, World

_LEVEL: Final = 3
_FRAME_LINES: Final = 1_500
#: Bytes left of a frame that is cut: its header, but no data.
_STUMP_BYTES: Final = 11
#: Fewer lines are not worth another process.
_LINES_PER_PROCESS: Final = 200_000
_NUMBER: Final = r"-?[0-9.e+-]+"
_VALUE: Final = {name: re.compile(f'"{name}":{_NUMBER}') for name in ("ts", "seq", "v", "conn")}
_NODE: Final = re.compile('"node":"[^"]*"')
_SEQ: Final = re.compile(r',"seq":\d+')
#: Bytes as a broken disk leaves them, but none that ends a line.
_GARBAGE: Final = bytes([*range(0, 9), *range(14, 32), *range(127, 256)])


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file as it lies in the landing zone: ``lines`` are in it, ``recorded`` stand in its name."""

    name: str
    role: str
    node: str
    boot: str
    recorded: int
    lines: int
    good: int
    corrupt: int
    copy: bool
    late: bool
    landed_at: float
    bytes: int
    plain_bytes: int
    forms: dict[str, int] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """Lines that were written but are not in the file."""
        return self.recorded - self.lines


class FileMaker:
    """Writes planned files below ``out``."""

    def __init__(self, out: Path, world: World, timeline: Timeline, plan: Plan, scribe: Scribe, seed: int) -> None:
        self.out = out
        self._world = world
        self._timeline = timeline
        self._plan = plan
        self._scribe = scribe
        self._seed = seed

    def write(self, number: int) -> WrittenFile:
        """Write the file of that number."""
        planned = self._plan.files[number]
        rng = np.random.default_rng([self._seed, 9, number])
        forms: dict[str, int] = {}
        lines, kept = self._lines(planned, rng, forms)
        packed, plain_bytes = _pack(lines, kept, copy=planned.copy)
        name = self._name(planned, len(lines), packed)
        if kept < len(lines):
            packed = _cut(lines, kept)
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packed)
        landed_at = round(float(self._timeline.ts[planned.last - 1]) + planned.delay_s, 3)
        os.utime(path, (landed_at, landed_at))
        run = self._world.fleet.runs[planned.run]
        node = self._world.fleet.nodes[run.node]
        corrupt = sum(forms.values())
        facts = (
            len(lines),
            kept,
            kept - corrupt,
            corrupt,
            planned.copy,
            planned.late,
            landed_at,
            len(packed),
            plain_bytes,
        )
        return WrittenFile(name, node.role, node.name, run.boot, *facts, forms)

    def _lines(self, planned: PlannedFile, rng: np.random.Generator, forms: dict[str, int]) -> tuple[list[str], int]:
        """The lines of a file as they are written, and how many of them will be left."""
        lines = self._scribe.write(planned.first, planned.last)
        for at in np.flatnonzero(self._plan.newer[planned.first : planned.last]).tolist():
            lines[at] = _newer(lines[at], planned.first + at)
        replaced = self._plan.replaced[planned.first : planned.last]
        spoiled = np.flatnonzero(replaced >= 0).tolist()
        if planned.copy:
            out = {at for at in spoiled if planned.first + at not in planned.healed}
            return [line for at, line in enumerate(lines) if at not in out], len(lines) - len(out)
        for at in spoiled:
            form = REPLACED[int(replaced[at])]
            lines[at] = _spoil(form, lines[at], rng)
            forms[form] = forms.get(form, 0) + 1
        for at, number in sorted(planned.inserted, reverse=True):
            form = INSERTED[number]
            lines.insert(at, _nonsense(form, rng))
            forms[form] = forms.get(form, 0) + 1
        return lines, len(lines) if planned.kept < 0 else planned.kept

    def _name(self, planned: PlannedFile, lines: int, packed: bytes) -> str:
        run = self._world.fleet.runs[planned.run]
        node = self._world.fleet.nodes[run.node]
        at = datetime.fromtimestamp(float(self._timeline.ts[planned.first]), timezone.utc)
        digest = hashlib.sha256(packed).hexdigest()[:16]
        return (
            f"role={node.role}/date={at:%Y-%m-%d}/hour={at:%H}/"
            f"{node.name}-{run.boot}-{planned.number:06d}-{lines}-{digest}.jsonl.zst"
        )


def _pack(lines: list[str], kept: int, *, copy: bool = False) -> tuple[bytes, int]:
    """Frames of whole lines, with a new frame where the file will be cut. A copy is packed so that its digest differs."""
    packer = zstandard.ZstdCompressor(level=1 if copy else _LEVEL, write_checksum=copy)
    edges = sorted({*range(0, len(lines), _FRAME_LINES), kept, len(lines)})
    parts = ["\n".join(lines[a:b]) + "\n" for a, b in pairwise(edges)]
    encoded = [part.encode("utf-8", "surrogateescape") for part in parts]
    return b"".join(packer.compress(part) for part in encoded), sum(map(len, encoded))


def _cut(lines: list[str], kept: int) -> bytes:
    """The same file, cut within the first frame of the lines that are lost."""
    head, tail = _pack(lines[:kept], kept)[0] if kept else b"", _pack(lines[kept:], 0)[0]
    return head + tail[:_STUMP_BYTES]


def _newer(line: str, row: int) -> str:
    """The line as a later version of the program may write it."""
    version = re.sub(r'"v":(\d+)', lambda found: f'"v":{int(found[1]) + 1}', line, count=1)
    return f'{version[:-1]},"region":"eu-{row % 7}","shard":{row % 97}}}'


def _spoil(form: str, line: str, rng: np.random.Generator) -> str:
    if form == "torn":
        return line[: int(rng.integers(10, len(line)))]
    if form == "garbage":
        return line[: int(rng.integers(1, len(line) - 1))] + _garbage(rng)
    if form == "wrong_type":
        name = ("ts", "seq", "v", "conn")[int(rng.integers(0, 4))]
        spoiled, times = _VALUE[name].subn(f'"{name}":"many"', line, count=1)
        return spoiled if times else _VALUE["ts"].sub('"ts":"yesterday"', line, count=1)
    if form == "no_key":
        return _SEQ.sub("", line, count=1) if rng.random() < 0.5 else _NODE.sub('"node":null', line, count=1)
    return _VALUE["ts"].sub('"ts":9.9e+17', line, count=1)


def _nonsense(form: str, rng: np.random.Generator) -> str:
    if form == "garbage":
        return "\x01" + _garbage(rng)
    choices = {
        "blank": ("", "", "   ", "\t"),
        "not_an_object": ("[]", "null", "42", '"text"', "[1,2]"),
        "no_key": ("{}",),
    }
    some = choices[form]
    return some[int(rng.integers(0, len(some)))]


def _garbage(rng: np.random.Generator) -> str:
    picked = rng.integers(0, len(_GARBAGE), int(rng.integers(16, 80)))
    return bytes(_GARBAGE[one] for one in picked.tolist()).decode("utf-8", "surrogateescape")


_maker: FileMaker | None = None


def _write_one(number: int) -> tuple[int, WrittenFile]:
    assert _maker is not None
    return number, _maker.write(number)


def write_files(
    maker: FileMaker, plan: Plan, workers: int | None, progress: Callable[[int, int], None] | None
) -> list[WrittenFile]:
    """Write all files; ``workers`` processes, by default one for each core if there is enough to do."""
    global _maker  # noqa: PLW0603  what the processes share is handed down by fork
    lines = sum(len(file) for file in plan.files)
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)), 1 + lines // _LINES_PER_PROCESS)
    done: list[WrittenFile | None] = [None] * len(plan.files)
    # the longest first, so that no process ends long before the others
    order = sorted(range(len(plan.files)), key=lambda at: -len(plan.files[at]))
    _maker = maker
    try:
        if workers <= 1 or "fork" not in multiprocessing.get_all_start_methods():
            _collect(map(_write_one, order), done, progress)
        else:
            # not multiprocessing.Pool: it can hang at its end, and hangs when one of its processes is killed
            with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
                _collect(pool.map(_write_one, order, chunksize=8), done, progress)
    finally:
        _maker = None
    return [one for one in done if one is not None]


def _collect(
    results: Iterable[tuple[int, WrittenFile]],
    done: list[WrittenFile | None],
    progress: Callable[[int, int], None] | None,
) -> None:
    for count, (number, written) in enumerate(results, 1):
        done[number] = written
        if progress is not None:
            progress(count, len(done))
