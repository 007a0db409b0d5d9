"""Progress for people: one line for each stage, on a terminal only."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Console:
    """Draws on standard error if that is a terminal and ``quiet`` is false; times stages in any case."""

    def __init__(self, *, quiet: bool = False) -> None:
        terminal = RichConsole(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=terminal, disable=quiet or not terminal.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._stage = ""

    def __enter__(self) -> Console:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextlib.contextmanager
    def timed(self, stage: str, summary: dict[str, Any]) -> Iterator[None]:
        """Show ``stage`` while the block runs, and add its seconds to those in ``summary`` under ``stage_seconds``."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=None)
        task, self._stage = self._tasks[stage], stage
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = summary.setdefault("stage_seconds", {})
            seconds[stage] = round(seconds.get(stage, 0.0) + time.monotonic() - began, 3)
            self._progress.update(task, total=1, completed=1)

    def progress(self, step: str, done: int, total: int) -> None:
        """A step of the stage that is running: ``done`` of ``total`` (0 for not known)."""
        task = self._tasks.get(self._stage)
        if task is not None:
            self._progress.update(task, description=f"{self._stage}: {step}", completed=done, total=total or None)
