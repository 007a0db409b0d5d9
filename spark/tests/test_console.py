"""Progress: on a terminal, and nowhere else."""

from __future__ import annotations

import os
from typing import Any

import pytest

from dmsg_logs.runtime.console import Console


def _shown(console: Console) -> dict[str, Any]:
    """Two stages, the first with a step; their summary."""
    summary: dict[str, Any] = {}
    with console:
        with console.timed("ingest", summary):
            console.progress("scan", 3, 7)
        with console.timed("tables", summary):
            pass
    return summary


@pytest.mark.parametrize(
    ("terminal", "quiet", "wanted"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_stages_and_steps_are_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, quiet: bool, wanted: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = os.openpty() if terminal else os.pipe()
    with os.fdopen(ours, "rb", buffering=0) as screen, os.fdopen(theirs, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        summary = _shown(Console(quiet=quiet))
        print("end", file=stderr, flush=True)
        said = b""
        while b"end" not in said:
            said += screen.read(65_536)
    assert (b"ingest: scan" in said, b"tables" in said) == (wanted, wanted)
    assert set(summary["stage_seconds"]) == {"ingest", "tables"}
