"""Processes that a bench starts, talks to and measures from outside.

A child reads one JSON command a line and answers each with one JSON line; it ends when its standard input does, so
that none outlives the bench.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
_START_TIMEOUT_S: Final = 30.0
_END_TIMEOUT_S: Final = 5.0


class ChildFailed(Exception):
    """A child process died, answered with an error, or did not answer in time."""


class Child:
    """One process running ``benchmarks.roles.<role>``, on certain ``cores`` if any are given.

    ``facts`` is what it said once it was ready. With ``wait`` false it may still be starting: see :meth:`ready`.
    ``command`` is run in place of this Python and the module of roles; it gets the options and talks as a role does.
    """

    def __init__(
        self,
        role: str,
        cores: Collection[int] = (),
        *,
        wait: bool = True,
        command: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.role = role
        self._process = subprocess.Popen(
            [*(command or (sys.executable, "-m", "benchmarks.child", role)), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self.pid = self._process.pid
        if cores:
            os.sched_setaffinity(self.pid, cores)
        self.facts: dict[str, Any] = {}
        if wait:
            self.ready()

    def ready(self) -> dict[str, Any]:
        """Wait until it is ready, once; gives its facts. Raises ``ChildFailed``."""
        try:
            self.facts = self._answer(_START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        return self.facts

    def send(self, command: str, **arguments: Any) -> None:
        """Give a command without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """The answer to the oldest command that has not been answered. Raises ``ChildFailed``."""
        return self._answer(timeout_s)

    def ask(self, command: str, *, timeout_s: float = 60.0, **arguments: Any) -> dict[str, Any]:
        """Give a command and wait for its answer."""
        self.send(command, **arguments)
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        # a child answers one command at a time, so nothing is left in the reader's buffer between two answers
        if not select.select([stdout], [], [], timeout_s)[0]:
            raise ChildFailed(f"{self.role} did not answer in {timeout_s:g} s")
        line = stdout.readline()
        if not line:
            raise ChildFailed(f"{self.role} ended with {self._process.wait(_END_TIMEOUT_S)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildFailed(f"{self.role}: {answer['error']}")
        return answer

    def cpu_s(self) -> float:
        """CPU seconds, user and system, the process has used so far; to the nanosecond where the kernel tells."""
        return process_cpu_s(self.pid)

    def rss_kib(self) -> int:
        """Memory of the process that is in RAM, in KiB."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
        raise ChildFailed(f"{self.role} is gone")

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after ``seconds``: a machine that hangs for a while."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL: the process cannot tell its peers."""
        self._process.kill()
        self._process.wait()

    def begin_to_close(self) -> None:
        """Tell the process to end, and do not wait for it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def close(self) -> None:
        """End the process, by force if necessary; never leaves it behind."""
        self.begin_to_close()
        process = self._process
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Cast:
    """The children of one bench: started by name, all ended at the end of the ``with`` block."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._children: list[Child] = []

    def __enter__(self) -> Cast:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:  # all at once: one after another takes seconds each on a busy machine
            child.begin_to_close()
        self._stack.close()

    def start(self, role: str, cores: Collection[int] = (), *, wait: bool = True, **options: Any) -> Child:
        """Start a child; see :class:`Child`."""
        child = Child(role, cores, wait=wait, **options)
        self._children.append(child)
        self.close_at_end(child.close)
        return child

    def close_at_end(self, close: Callable[[], object]) -> None:
        """Call ``close`` when the block is left."""
        self._stack.callback(close)


def process_cpu_s(pid: int) -> float:
    """CPU seconds of the process ``pid`` since it started."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3) for another process
    except OSError:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for_port(port: int, running: Callable[[], bool], host: str = "127.0.0.1") -> bool:
    """Wait until something listens on ``port`` of ``host``, while it is ``running``; gives whether it does."""
    until = time.monotonic() + _START_TIMEOUT_S
    while running() and time.monotonic() < until:
        with suppress(OSError), socket.create_connection((host, port), 1):
            return True
        time.sleep(0.05)
    return False


def raise_open_files() -> int:
    """Raise the limit of open files for this process (and those it starts); gives the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def split_cores() -> tuple[list[int], list[int]]:
    """A core for one process alone and the cores for all others; two empty lists if there is only one core."""
    cores = sorted(os.sched_getaffinity(0))
    return (cores[:1], cores[1:]) if len(cores) > 1 else ([], [])
