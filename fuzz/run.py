"""One target after the other under the fuzzer, and what came of it: :mod:`fuzz.__main__` has the command line.

What is found lies in a working directory from one run to the next: the growing corpus of each target, inputs that
failed, and ``figures.json``. A target is run in slices, and its figures are written after each, so that a run that was
stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from fuzz import corpus, targets

#: What runs one target under the fuzzer; its name and libFuzzer's options follow.
PROGRAM: Final = (sys.executable, "-m", "fuzz.drive")
#: Seconds of one slice: what is lost at most when a run is stopped.
SLICE_S: Final = 300
#: A target with so many failures is left alone until somebody has looked at them.
CRASHES_LIMIT: Final = 8
#: One input may take so long, in seconds, and a target so much memory. Coverage makes everything some five times slower.
INPUT_TIMEOUT_S: Final = 5
MEMORY_LIMIT_MB: Final = 1_024
#: How many seconds a slice may take longer than it should before it is stopped.
_GRACE_S: Final = 120
_PROGRESS: Final = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)/(\d+)([KMG]?)b")
_EXECUTIONS: Final = re.compile(r"^stat::number_of_executed_units:\s*(\d+)", re.MULTILINE)
_COUNT: Final = re.compile(r"^#(\d+)\s", re.MULTILINE)


@dataclass(frozen=True)
class Figures:
    """What is known of a target: seconds it was run, inputs tried, branches and features reached, inputs, failures."""

    seconds: int = 0
    executions: int = 0
    edges: int = 0
    features: int = 0
    inputs: int = 0
    crashes: int = 0


class Campaign:
    """Runs targets for ``seconds`` each, counting what they ran before, and at most ``jobs`` at the same time."""

    def __init__(self, folder: Path, *, seconds: int, jobs: int, program: Sequence[str] = PROGRAM) -> None:
        self._folder = folder
        self._program = program
        self._seconds = seconds
        self._jobs = jobs
        self._lock = threading.Lock()
        self._file = folder / "figures.json"
        folder.mkdir(parents=True, exist_ok=True)
        known = json.loads(self._file.read_text("utf-8")) if self._file.exists() else {}
        #: By name. A failure counts for as long as its file lies there: it is removed by whoever has mended it.
        self.figures = {
            name: replace(Figures(**known.get(name, {})), crashes=self._count_crashes(name)) for name in targets.names()
        }
        self._waiting: deque[str] = deque()

    def _count_crashes(self, name: str) -> int:
        return len(list((self._folder / "crashes" / name).glob("*")))

    def run(self, names: list[str]) -> None:
        """Run ``names`` until each has had its time. Each gets a slice in turn, so that all get some of a short time."""
        self._waiting.extend(names)
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(self._jobs)]
        for one in workers:
            one.start()
        for one in workers:
            one.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                name = self._waiting.popleft()
            figures = self.figures[name]
            left = self._seconds - figures.seconds
            if left <= 0 or figures.crashes >= CRASHES_LIMIT:
                continue
            try:
                self._slice(name, min(left, SLICE_S))
            except Exception as error:  # the other targets go on
                print(f"{name}: could not be run: {error}", file=sys.stderr, flush=True)
                continue
            with self._lock:
                self._waiting.append(name)

    def _slice(self, name: str, seconds: int) -> None:
        found, crashes = self._folder / "corpus" / name, self._folder / "crashes" / name
        for folder in (found, crashes):
            folder.mkdir(parents=True, exist_ok=True)
        for _, data in corpus.inputs(name):
            (found / hashlib.sha1(data).hexdigest()).write_bytes(data)
        before = set(crashes.iterdir())
        began = time.monotonic()
        options = [
            f"-max_total_time={seconds}",
            f"-max_len={corpus.INPUT_BYTES}",
            f"-timeout={INPUT_TIMEOUT_S}",
            f"-rss_limit_mb={MEMORY_LIMIT_MB}",
            f"-artifact_prefix={crashes}/",
            "-print_final_stats=1",
            *self._dictionary(name),
        ]
        command = [*self._program, name, *options, str(found)]
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds + _GRACE_S,
            cwd=corpus.FOLDER.parent,
            check=False,
        )
        output = (ended.stderr + ended.stdout).decode("utf-8", "replace")
        (self._folder / f"{name}.log").write_text(output, "utf-8")
        lasted = min(seconds, round(time.monotonic() - began)) if ended.returncode else seconds
        self._note(name, lasted, output)
        if ended.returncode and before == set(crashes.iterdir()):
            raise RuntimeError(f"it failed as before; see {crashes}")

    def _dictionary(self, name: str) -> list[str]:
        words = getattr(targets.load(name), "DICTIONARY", ())
        if not words:
            return []
        path = self._folder / f"{name}.dict"
        lines = ("".join(f"\\x{byte:02x}" for byte in word) for word in words)
        path.write_text("".join(f'"{line}"\n' for line in lines), "ascii")
        return [f"-dict={path}"]

    def _note(self, name: str, seconds: int, output: str) -> None:
        counted = _EXECUTIONS.findall(output) or _COUNT.findall(output)
        progress = _PROGRESS.findall(output)
        if not counted:
            raise RuntimeError(output[-2_000:])
        # Without any progress the first input has failed.
        edges, features, inputs = (int(number) for number in (progress or ["000"])[-1][:3])
        with self._lock:
            old = self.figures[name]
            self.figures[name] = new = replace(
                old,
                seconds=old.seconds + seconds,
                executions=old.executions + int(counted[-1]),
                edges=max(old.edges, edges),
                features=max(old.features, features),
                inputs=inputs,
                crashes=self._count_crashes(name),
            )
            written = self._file.with_suffix(".new")
            written.write_text(json.dumps({one: asdict(each) for one, each in self.figures.items()}, indent=1), "utf-8")
            written.replace(self._file)
            print(f"{name}: {describe(new)}", flush=True)

    def minimise(self, name: str) -> int:
        """Make the kept corpus of a target anew from what is in the working directory; gives its length in bytes."""
        found, smallest = self._folder / "corpus" / name, self._folder / "minimised" / name
        smallest.mkdir(parents=True, exist_ok=True)
        for path in smallest.iterdir():
            path.unlink()
        command = [*self._program, name, "-merge=1", str(smallest), str(found)]
        subprocess.run(command, capture_output=True, cwd=corpus.FOLDER.parent, check=False)
        known = {data for what, data in corpus.inputs(name) if not what.startswith("line ")}
        merged = [path.read_bytes() for path in smallest.iterdir()]
        if not merged:
            raise RuntimeError(f"{name}: nothing was merged; run it first")
        return sum(map(len, corpus.keep(name, (data for data in merged if data not in known))))


def describe(figures: Figures) -> str:
    """One line for people."""
    return (
        f"{figures.seconds} s, {figures.executions:,} executions, {figures.edges} edges, {figures.features} features, "
        f"{figures.inputs} inputs, {figures.crashes} failures"
    )


def as_table(figures: dict[str, Figures], machine: str) -> str:
    """The table of the documentation."""
    rows = [("target", "seconds", "executions", "edges", "features", "inputs", "failures")]
    rows += [
        (
            name,
            *(
                f"{number:,}"
                for number in (one.seconds, one.executions, one.edges, one.features, one.inputs, one.crashes)
            ),
        )
        for name, one in figures.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0].rstrip(), "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:], "", machine, ""])
