"""twistd as an operator starts it, in a process of its own."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmsg.testing.process import environ_without_settings

ROOT = Path(__file__).parents[2]
#: A program has this long to start or to end on a busy machine.
PATIENCE_S = 30.0
#: Begins the program of its second argument on, with the descriptor of its first argument as a socket of systemd.
AS_SYSTEMD = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_FDNAMES="a.socket", LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"""


class Program:
    """A running program and its output so far (standard output and error in one)."""

    def __init__(
        self, arguments: list[str], directory: Path, environ: dict[str, str], given: tuple[int, ...] = ()
    ) -> None:
        self.output = b""
        self._process = subprocess.Popen(
            arguments,
            cwd=directory,
            env=environ,
            pass_fds=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def wait_for(self, text: str) -> str:
        """Wait until ``text`` has been printed; the rest of its line. Fails with the output if it never is."""
        while text.encode() not in self.output or b"\n" not in self.output.partition(text.encode())[2]:
            if not self._read():
                pytest.fail(f"{text!r} was never printed:\n{self.text}", pytrace=False)
        return self.text.partition(text)[2].partition("\n")[0]

    def wait_for_many(self, text: str, count: int) -> None:
        """Wait until ``text`` has been printed ``count`` times."""
        while self.output.count(text.encode()) < count:
            if not self._read():
                pytest.fail(f"{text!r} was printed too rarely:\n{self.text}", pytrace=False)

    @property
    def text(self) -> str:
        """All output so far."""
        return self.output.decode("utf-8", "replace")

    def terminate(self) -> int:
        """Send SIGTERM; the exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def send(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def wait(self) -> int:
        """The exit status, when it has ended."""
        while self._read():
            pass
        return self._process.wait(PATIENCE_S)

    def stop(self) -> None:
        """End it in any state."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> bool:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            give_up = time.monotonic() + PATIENCE_S
            if not selector.select(give_up - time.monotonic()):
                pytest.fail(f"nothing happened for {PATIENCE_S:g} s:\n{self.text}", pytrace=False)
        piece = os.read(self._process.stdout.fileno(), 65536)
        self.output += piece
        return bool(piece)


@pytest.fixture
def start(plugin_path: Path, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """``start("twistd", "-n", …, environ={}, descriptors=(soft, hard), listens=socket) -> Program`` in the test's directory.

    ``listens`` is given to the program as systemd gives it a socket. All end with the test.
    """
    programs: list[Program] = []

    def run(
        command: str,
        *arguments: str,
        environ: dict[str, str] | None = None,
        descriptors: tuple[int, int] | None = None,
        listens: socket.socket | None = None,
    ) -> Program:
        clean = environ_without_settings() | {
            "PYTHONPATH": str(plugin_path),
            "PYTHONUNBUFFERED": "1",
            **(environ or {}),
        }
        words = [str(Path(sys.executable).with_name(command)), *arguments]
        if descriptors is not None:
            soft, hard = descriptors
            words = ["/bin/sh", "-c", f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$0" "$@"', *words]
        given = () if listens is None else (listens.fileno(),)
        if given:
            words = [sys.executable, "-c", AS_SYSTEMD, str(*given), *words]
        programs.append(Program(words, tmp_path, clean, given))
        return programs[-1]

    yield run
    for program in programs:
        program.stop()
