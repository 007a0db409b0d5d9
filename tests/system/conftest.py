"""Programs as processes of their own, watched without blocking the reactor the test itself runs on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from dmsg.testing.process import environ_without_settings

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
#: A program has this long to do what is waited for on a busy machine.
PATIENCE_S = 30.0


class Program(ProcessProtocol):
    """A running program. ``output`` is standard output and error in one, so far; ``status`` how it ended.

    ``status`` is an exit code, or minus a signal's number; ``None`` while it runs.
    """

    def __init__(self, reactor: Any) -> None:
        self.output = ""
        self.status: int | None = None
        self._reactor = reactor
        self._raw = b""
        self._waiting: list[tuple[Callable[[], bool], Deferred[None]]] = []

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        self._raw += data
        self.output = self._raw.decode("utf-8", "replace")
        self._check()

    def processEnded(self, reason: Failure) -> None:
        ended: Any = reason.value
        self.status = ended.exitCode if ended.signal is None else -ended.signal
        self._check()

    def _check(self) -> None:
        for condition, waiter in list(self._waiting):
            if condition() and not waiter.called:
                waiter.callback(None)

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        waiter: Deferred[None] = Deferred()
        self._waiting.append((condition, waiter))
        self._check()
        try:
            await waiter.addTimeout(PATIENCE_S, self._reactor)
        except Exception:
            raise AssertionError(f"{what}; it said:\n{self.output}") from None
        finally:
            self._waiting = [one for one in self._waiting if one[1] is not waiter]

    async def saw(self, text: str) -> str:
        """Wait until a whole line with ``text`` has come; what follows ``text`` on that line."""

        def there() -> bool:
            return "\n" in self.output.partition(text)[2]

        await self._until(lambda: there() or self.status is not None, f"{text!r} never came")
        assert there(), f"ended ({self.status}) without {text!r}; it said:\n{self.output}"
        return self.output.partition(text)[2].partition("\n")[0]

    async def ended(self) -> int:
        """Wait until it has ended; its status."""
        await self._until(lambda: self.status is not None, "it never ended")
        assert self.status is not None
        return self.status

    def say(self, line: str) -> None:
        """Give it a line on its standard input."""
        self.transport.write(line.encode() + b"\n")  # type: ignore[union-attr]

    def kill(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.transport.signalProcess(int(number))  # type: ignore[union-attr]


Start = Callable[..., Program]


@pytest.fixture
def start(reactor: Any, plugin_path: Path, tmp_path: Path) -> Iterator[Start]:
    """``start("twist", "web", …)`` or ``start("chat_server.py", …)``: a program of the environment, or an example.

    It runs in the test's own directory; ``environ`` is added to its environment. All end with the test.
    """
    programs: list[Program] = []

    def run(command: str, *arguments: str, environ: dict[str, str] | None = None) -> Program:
        clean = environ_without_settings() | {
            "PYTHONPATH": str(plugin_path),
            "PYTHONUNBUFFERED": "1",
            **(environ or {}),
        }
        line = [sys.executable, str(EXAMPLES / command)]
        if not command.endswith(".py"):
            line = [str(Path(sys.executable).with_name(command))]
        program = Program(reactor)
        reactor.spawnProcess(program, line[0], [*line, *arguments], env=clean, path=str(tmp_path))
        programs.append(program)
        return program

    yield run

    async def stop() -> None:
        for program in programs:
            if program.status is None:
                try:
                    program.kill(signal.SIGKILL)
                except ProcessExitedAlready:
                    continue
            await program.ended()

    pytest_twisted.blockon(Deferred.fromCoroutine(stop()))


@pytest.fixture
def secret_of(key_file: Any) -> Callable[..., Any]:
    """``secret_of("name") -> (key file, public key)``: a new identity."""
    from dmsg.crypto.keys import SecretKey

    def make(name: str = "key") -> tuple[Path, Any]:
        key = SecretKey.generate()
        return key_file(key, name), key.public_key

    return make
