"""The ``dmsg`` command in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.processes import ROOT, Cast, ChildFailed

_START_TIMEOUT_S: Final = 40.0
_END_TIMEOUT_S: Final = 5.0
_SEND_TIMEOUT_S: Final = 300.0


def command_line(*arguments: str) -> list[str]:
    """The command line of ``dmsg`` with these arguments: it keeps no state, writes JSON, and ends with this process."""
    code = "from benchmarks.child import run_dmsg; run_dmsg()"
    return [sys.executable, "-c", code, *arguments, "--state-dir", "none", "--json"]


def environment() -> dict[str, str]:
    """The environment without settings for ``dmsg``. Bytecode may be cached, as in an installed ``dmsg``."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("DMSG_") and key != "PYTHONDONTWRITEBYTECODE"
    }


def send(files: Sequence[str], target: Sequence[str]) -> list[dict[str, Any]]:
    """The results of ``dmsg send`` for each of ``files``; ``target`` is the peer's key and options. Raises ``ChildFailed``."""
    peer, *options = target
    process = subprocess.run(
        command_line("send", peer, *files, *options),
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SEND_TIMEOUT_S,
        check=False,
    )
    results = [json.loads(line) for line in process.stdout.splitlines()]
    if process.returncode or len(results) < len(files):
        raise ChildFailed(
            f"send ended with {process.returncode}, {len(results)} of {len(files)} sent: {process.stderr}"
        )
    return results


class Command:
    """A ``dmsg`` command that runs until it is ended; ``result`` is the first line it printed."""

    def __init__(self, cast: Cast, home: Path, name: str, *arguments: str) -> None:
        self._name = name
        self._said = home / f"{name.replace(' ', '-')}.out"
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                command_line(*arguments),
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.DEVNULL,
            )
        self.pid = self._process.pid
        cast.close_at_end(self.close)
        self.result = self._first_line()

    def _first_line(self) -> dict[str, Any]:
        give_up = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < give_up:
            line, end, _ = self._said.read_text().partition("\n")
            if end:
                result: dict[str, Any] = json.loads(line)
                return result
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise ChildFailed(f"{self._name} did not start")

    def wait(self, limit_s: float) -> None:
        """Wait until it has ended by itself. Raises ``ChildFailed`` if it does not, or not with 0."""
        try:
            status = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{self._name} did not end in {limit_s:g} s") from None
        if status:
            raise ChildFailed(f"{self._name} ended with {status}")

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
