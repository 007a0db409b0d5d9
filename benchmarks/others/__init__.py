"""Relays of others beside ours, in the same run, where they are installed: how to get them is in docs/performance.rst.

Programs are looked for in ``PATH`` and in the directories of ``BENCH_OTHERS``, separated by colons.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.child import end_with_parent
from benchmarks.processes import Cast, wait_for_port

_BUILD_TIMEOUT_S: Final = 300.0
_VERSION_TIMEOUT_S: Final = 30.0
#: "go" is often missing in the path of services.
_MORE_PLACES: Final = ("/usr/local/go/bin",)


class LeftOut(Exception):
    """A program is missing or unsuitable; the message says which, and why."""


def find(program: str) -> str:
    """The path of ``program``. Raises ``LeftOut``."""
    places = [os.environ.get("BENCH_OTHERS", ""), os.environ.get("PATH", ""), *_MORE_PLACES]
    found = shutil.which(program, path=os.pathsep.join(filter(None, places)))
    if found is None:
        raise LeftOut(f"{program} is not installed")
    return found


def version_of(*command: str) -> str:
    """The first text like ``1.2.3`` in the output of ``command``. Raises ``LeftOut``."""
    found = re.search(r"\d+(\.\d+){2,}", run(command, timeout_s=_VERSION_TIMEOUT_S))
    return found.group() if found else "of some version"


def run(command: Sequence[str], *, directory: Path | None = None, timeout_s: float = _BUILD_TIMEOUT_S) -> str:
    """The output of ``command``. Raises ``LeftOut`` if it fails."""
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LeftOut(f"{Path(command[0]).name} does not run: {error}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise LeftOut(f"{Path(command[0]).name} ended with {done.returncode}: {said[-1]}")
    return done.stdout + done.stderr


def serve(cast: Cast, command: Sequence[str], port: int, host: str = "127.0.0.1") -> subprocess.Popen[bytes]:
    """Run ``command`` until the end of ``cast``; gives it once it listens on ``port`` of ``host``. Raises ``LeftOut``."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=end_with_parent,  # noqa: PLW1509 - there are no threads yet
    )

    def end() -> None:
        process.kill()
        process.wait()

    cast.close_at_end(end)
    if not wait_for_port(port, lambda: process.poll() is None, host):
        raise LeftOut(f"{Path(command[0]).name} does not listen")
    return process
