"""Runs targets under the fuzzer in slices, and records the results; :mod:`fuzz.__main__` has the command line.

The working directory keeps the growing corpus of each target, inputs that failed, and the log of the last slice from one
run to the next. The figures are in a file of their own (:mod:`fuzz.figures`) and are updated after each slice, so that a
stopped run can continue.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from fuzz import corpus, targets
from fuzz.figures import FILE, Figures, describe, load, save

#: Command that runs one target under the fuzzer; the target's name and libFuzzer's options follow.
PROGRAM: Final = (sys.executable, "-m", "fuzz.drive")
#: Seconds of one slice, by wall clock: the most that is lost when the machine stops.
SLICE_S: Final = 120
#: Failures after which a target is skipped until somebody has looked at them.
CRASHES_LIMIT: Final = 8
#: Wall clock seconds after which an input hangs. :mod:`fuzz.drive` has the limit in CPU seconds.
HANG_S: Final = 300
#: Memory limit of a target. Coverage makes everything some five times slower and larger.
MEMORY_LIMIT_MB: Final = 1_024
#: Seconds by which a slice exceeds the remaining CPU seconds, which would otherwise end in many short slices.
_MORE_S: Final = 5
#: Seconds that a process may live longer than its slice: it starts slowly on a busy machine.
_GRACE_S: Final = 1_800
#: Seconds after which a process that was asked to end is killed.
_STOP_S: Final = 10
_START: Final = re.compile(r"^fuzz\.drive: ([\d.]+) CPU seconds before the search", re.MULTILINE)
_PROGRESS: Final = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)/(\d+)([KMG]?)b")
_BEGAN: Final = re.compile(r"INITED cov: \d+ ft: (\d+) ")
_EXECUTIONS: Final = re.compile(r"^stat::number_of_executed_units:\s*(\d+)", re.MULTILINE)
_COUNT: Final = re.compile(r"^#(\d+)\s", re.MULTILINE)
_MERGED: Final = re.compile(r"MERGE-OUTER: (\d+) new files with (\d+) new features added; (\d+) new coverage edges")


@dataclass(frozen=True)
class _Ended:
    """The end of a process: its exit status (negative for a signal), CPU seconds and output."""

    status: int
    cpu_s: float
    output: str


class Campaign:
    """Runs targets, at most ``jobs`` at the same time, until their figures have reached their CPU seconds.

    ``folder`` is the working directory, ``record`` the file with the figures, ``noted`` is called with all of them
    after each change.
    """

    def __init__(
        self,
        folder: Path,
        *,
        jobs: int = 1,
        record: Path = FILE,
        program: Sequence[str] = PROGRAM,
        noted: Callable[[Mapping[str, Figures]], None] = lambda _: None,
    ) -> None:
        self._folder = folder
        self._program = program
        self._jobs = jobs
        self._record = record
        self._noted = noted
        # Signals interrupt the main thread anywhere, also where it holds the lock.
        self._lock = threading.RLock()
        self._goals: dict[str, float] = {}
        self._running: dict[str, int] = {}
        self._stopped = False
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def figures(self) -> dict[str, Figures]:
        """Figures of each existing target. A failure counts as long as its file is in the working directory."""
        known = load(self._record)
        return {
            name: replace(known.get(name, Figures()), crashes=self._count_crashes(name)) for name in targets.names()
        }

    def _count_crashes(self, name: str) -> int:
        return len(list((self._folder / "crashes" / name).glob("*")))

    def run(self, goals: Mapping[str, float]) -> None:
        """Run targets until each has its CPU seconds, those of earlier runs included, or :meth:`stop` is called.

        The next slice is always of the target with the fewest seconds, so that a short time is shared evenly.
        """
        self._goals = dict(goals)
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(self._jobs)]
        for one in workers:
            one.start()
        for one in workers:
            one.join()

    def stop(self) -> None:
        """End all running targets soon; their figures count. May be called by a signal handler."""
        with self._lock:
            self._stopped = True
            for name in self._running:
                self._end(name, signal.SIGTERM)

    def _work(self) -> None:
        while (name := self._next()) is not None:
            left = self._goals[name] - self.figures[name].seconds
            try:
                self._slice(name, min(SLICE_S, math.ceil(left) + _MORE_S))
            except Exception as error:  # the other targets go on
                with self._lock:
                    del self._goals[name], self._running[name]
                    if not self._stopped:
                        print(f"{name}: could not be run: {error}", file=sys.stderr, flush=True)
            else:
                with self._lock:
                    del self._running[name]

    def _next(self) -> str | None:
        """Choose a target that neither runs nor has had its time; ``None`` if there is none."""
        with self._lock:
            known = self.figures
            waiting = [
                name
                for name, goal in self._goals.items()
                if name not in self._running and known[name].seconds < goal and known[name].crashes < CRASHES_LIMIT
            ]
            if self._stopped or not waiting:
                return None
            chosen = min(waiting, key=lambda name: (known[name].seconds, name))
            self._running[chosen] = 0
            return chosen

    def _slice(self, name: str, seconds: int) -> None:
        found, crashes = self._folder / "corpus" / name, self._folder / "crashes" / name
        for folder in (found, crashes):
            folder.mkdir(parents=True, exist_ok=True)
        for _, data in corpus.inputs(name):
            (found / hashlib.sha1(data).hexdigest()).write_bytes(data)
        before = set(crashes.iterdir())
        options = [
            f"-max_total_time={seconds}",
            f"-max_len={corpus.INPUT_BYTES}",
            f"-timeout={HANG_S}",
            f"-rss_limit_mb={MEMORY_LIMIT_MB}",
            f"-artifact_prefix={crashes}/",
            "-print_final_stats=1",
            *self._dictionary(name),
        ]
        ended = self._execute(name, [*options, str(found)], seconds + HANG_S + _GRACE_S)
        self._note_search(name, ended)
        if ended.status and not self._stopped and before == set(crashes.iterdir()):
            raise RuntimeError(f"it failed as before, or was killed ({ended.status}); see {crashes} and {name}.log")

    def _execute(self, name: str, arguments: Sequence[str], limit_s: float) -> _Ended:
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            with self._lock:
                if self._stopped:
                    raise RuntimeError("stopped")
                child = subprocess.Popen(
                    [*self._program, name, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=corpus.FOLDER.parent,
                    # The terminal's signals are for us; we pass them on.
                    start_new_session=True,
                )
                self._running[name] = child.pid
            timer = threading.Timer(limit_s, self._end, (name, signal.SIGKILL))
            timer.daemon = True
            timer.start()
            try:
                # The process id stays reserved until we have marked it as ended, so no signal can hit another process.
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            finally:
                timer.cancel()
                with self._lock:
                    self._running[name] = 0
                    _, status, used = os.wait4(child.pid, 0)
                    child.returncode = os.waitstatus_to_exitcode(status)
        return _Ended(child.returncode, used.ru_utime + used.ru_stime, log.read_text("utf-8", "replace"))

    def _end(self, name: str, how: signal.Signals) -> None:
        with self._lock:
            if pid := self._running.get(name):
                os.kill(pid, how)
                if how != signal.SIGKILL:
                    timer = threading.Timer(_STOP_S, self._end, (name, signal.SIGKILL))
                    timer.daemon = True
                    timer.start()

    def _dictionary(self, name: str) -> list[str]:
        words = getattr(targets.load(name), "DICTIONARY", ())
        if not words:
            return []
        path = self._folder / f"{name}.dict"
        lines = ("".join(f"\\x{byte:02x}" for byte in word) for word in words)
        path.write_text("".join(f'"{line}"\n' for line in lines), "ascii")
        return [f"-dict={path}"]

    def _note_search(self, name: str, ended: _Ended) -> None:
        counted = _EXECUTIONS.findall(ended.output) or _COUNT.findall(ended.output)
        if not counted:
            raise RuntimeError(ended.output[-2_000:])
        # No progress means that the first input has failed.
        edges, features, inputs = (int(number) for number in (_PROGRESS.findall(ended.output) or ["000"])[-1][:3])
        began = _BEGAN.search(ended.output)
        with self._lock:
            old = self.figures[name]
            seconds = round(old.seconds + ended.cpu_s - sum(map(float, _START.findall(ended.output))), 1)
            self._note(
                name,
                replace(
                    old,
                    seconds=seconds,
                    last_new=seconds if began and features > int(began[1]) else old.last_new,
                    executions=old.executions + int(counted[-1]),
                    edges=max(old.edges, edges),
                    features=max(old.features, features),
                    inputs=inputs,
                ),
            )

    def _note(self, name: str, new: Figures) -> None:
        known = load(self._record)
        kept = {one: each for one, each in self.figures.items() if one in known} | {name: new}
        save(self._record, kept)
        self._noted(kept)
        print(f"{name}: {describe(new)}", flush=True)

    def minimise(self, name: str) -> int:
        """Rebuild the kept corpus of a target from the working directory; gives its length in bytes.

        The figures note what the whole corpus reaches. There is no search, so no seconds are added.
        """
        found, smallest = self._folder / "corpus" / name, self._folder / "minimised" / name
        smallest.mkdir(parents=True, exist_ok=True)
        for path in smallest.iterdir():
            path.unlink()
        command = [*self._program, name, "-merge=1", str(smallest), str(found)]
        ended = subprocess.run(command, capture_output=True, cwd=corpus.FOLDER.parent, check=False)
        known = {data for what, data in corpus.inputs(name) if not what.startswith("line ")}
        merged = [path.read_bytes() for path in smallest.iterdir()]
        reached = _MERGED.search(ended.stderr.decode("utf-8", "replace"))
        if not merged or not reached:
            raise RuntimeError(f"{name}: nothing was merged; run it first")
        kept = corpus.keep(name, (data for data in merged if data not in known))
        inputs, features, edges = (int(number) for number in reached.groups())
        old = self.figures[name]
        new = replace(old, edges=max(old.edges, edges), features=max(old.features, features), inputs=inputs)
        self._note(name, new)
        return sum(map(len, kept))
