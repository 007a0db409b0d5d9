"""Runs an engine in a process of its own and watches it: wall time, processor time and memory of all its processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

_SAMPLE_S: Final = 0.1
_MIB: Final = 1 << 20


class EngineFailed(RuntimeError):
    """An engine's process ended badly; the message is what it said last."""


@dataclass(slots=True)
class Stage:
    """What one stage took."""

    name: str
    wall_s: float
    cpu_s: float
    peak_mib: float
    results: dict[str, Any] = field(default_factory=dict)


class _Tree:
    """Processor time and memory of a process and all its descendants, those that have ended included."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._cpu_s: dict[tuple[int, float], float] = {}
        self.peak_mib = 0.0

    def look(self) -> float:
        """Sample; processor seconds so far."""
        resident = 0
        with contextlib.suppress(psutil.Error):
            for process in (self._root, *self._root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    key = (process.pid, process.create_time())
                    if key in self._cpu_s:  # one that has just been forked shows its parent's memory as its own
                        resident += process.memory_info().rss
                    self._cpu_s[key] = max(self._cpu_s.get(key, 0.0), times.user + times.system)
        self.peak_mib = max(self.peak_mib, resident / _MIB)
        return sum(self._cpu_s.values())


def run(module: str, arguments: list[str], *, cores: int, environment: Mapping[str, str] | None = None) -> list[Stage]:
    """Run ``python -m module arguments`` on ``cores`` cores; its stages. Raises ``EngineFailed``."""
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    os.sched_setaffinity(process.pid, allowed)  # at once: what it starts later inherits it
    tree = _Tree(process.pid)
    over = threading.Event()
    lock = threading.Lock()

    def watch() -> None:
        while not over.wait(_SAMPLE_S):
            with lock:
                tree.look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    said: list[str] = []
    listener = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    listener.start()
    stages: list[Stage] = []
    try:
        _follow(process, tree, lock, stages)
        if process.wait() != 0:
            listener.join(1.0)
            raise EngineFailed(f"{module} ended with {process.returncode}: {''.join(said)[-2000:]}")
    finally:
        over.set()
        if process.poll() is None:
            process.kill()
        watcher.join()
    return stages


def _follow(process: subprocess.Popen[str], tree: _Tree, lock: threading.Lock, stages: list[Stage]) -> None:
    assert process.stdout is not None
    began = 0.0
    for line in process.stdout:
        try:
            said = json.loads(line)
        except ValueError:
            continue  # what a library prints is none of ours
        with lock:
            cpu_s = tree.look()
            if "begin" in said:
                began = 0.0 if said["begin"] == "start" else cpu_s
                tree.peak_mib = 0.0
            elif "end" in said:
                stages.append(Stage(said["end"], said["wall_s"], cpu_s - began, tree.peak_mib, said["results"]))
