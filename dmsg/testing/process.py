"""Programs in processes of their own, for system tests, which watch their output and always end them. ::

async with Process(reactor, [sys.executable, "-m", "twisted", "dmsg-server", …]) as server:
    port = (await server.line(r"listening on port (\\d+)")).group(1)
    server.signal(signal.SIGTERM)
    assert await server.ended() == 0
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import signal as signals
import socket
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from dmsg.glue.reactors import REACTOR_VARIABLE
from dmsg.ops.settings import PREFIX

#: Default timeout for a line or an end, in seconds: starting takes long on a busy machine.
PATIENCE_S: Final = 30.0
#: Bytes of output that are kept, the latest ones: endless output must not fill the memory of its test.
OUTPUT_LIMIT_BYTES: Final = 4 * 1024 * 1024
#: Seconds for which output is still read after a program has exited, from programs that it has started and that live longer.
HEIRS_S: Final = 1.0
#: A longer line is cut after this many bytes.
LINE_LIMIT_BYTES: Final = 65_536
#: Systems give connections and port 0 higher numbers (Linux from 32,768, others from 49,152): a port found free stays so.
_FREE_PORTS: Final = range(10_000, 32_000)
#: Processes that run side by side have neighbouring numbers; each begins so many ports after the one before.
#: By the golden ratio, of fewer than 144 neighbours no two begin within 60 ports of each other, and close ones are far apart.
_PORTS_A_PROCESS: Final = 13_597

_offers = itertools.count()


class ProcessFailed(AssertionError):
    """A program ended, or did not do the awaited in time; the message has its output."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that has no listener now, another one each time. Only for programs that cannot be given port 0.

    It lies below the ports that systems give out by themselves. Raises :exc:`OSError` if ``host`` is not of this machine,
    or if no port is free.
    """
    for offer in itertools.islice(_offers, len(_FREE_PORTS)):
        port = _FREE_PORTS[(os.getpid() * _PORTS_A_PROCESS + offer) % len(_FREE_PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise OSError(errno.EADDRINUSE, f"no port of {host} is free")


def environ_without_settings() -> dict[str, str]:
    """The environment for a program, without the settings of dmsg, except the one that chooses its reactor."""
    return {name: text for name, text in os.environ.items() if not name.startswith(PREFIX) or name == REACTOR_VARIABLE}


class _Watcher(ProcessProtocol):
    """Passes everything to its :class:`Process`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        self._process._said(childFD, data)

    def processExited(self, reason: Failure) -> None:
        self._process._exited()

    def processEnded(self, reason: Failure) -> None:
        self._process._ended(reason)


class Process:
    """One program. An ``async with`` starts it, and kills it on leaving, if it has not ended by then.

    ``status`` is ``None`` while it runs, then its exit status, or minus the number of the signal that ended it.
    """

    def __init__(
        self,
        reactor: Any,
        arguments: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        directory: str | os.PathLike[str] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """``arguments`` begin with the program's path; ``environ`` replaces the environment (ours by default).

        ``patience_s`` is how long :meth:`line` and :meth:`ended` wait.
        """
        self.arguments = list(arguments)
        self.status: int | None = None
        self._reactor = reactor
        self._environ = dict(os.environ if environ is None else environ)
        self._directory = None if directory is None else os.fspath(directory)
        self._patience_s = patience_s
        self._output = bytearray()
        self._unfinished: dict[int, bytearray] = {}
        self._read = 0
        self._waiting: list[tuple[Callable[[], bool], Deferred[None]]] = []
        self._transport: Any = None
        self._closing: IDelayedCall | None = None

    async def __aenter__(self) -> Process:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.stop()
        if isinstance(problem, Exception) and not isinstance(problem, ProcessFailed):
            print(self._report("Meanwhile"))

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, once."""
        if self._transport is not None:
            raise RuntimeError("a Process is started once")
        self._transport = self._reactor.spawnProcess(
            _Watcher(self), self.arguments[0], self.arguments, env=self._environ, path=self._directory
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self._transport.pid)

    def signal(self, number: int) -> None:
        """Send it a signal; does nothing when it has ended."""
        with contextlib.suppress(ProcessExitedAlready):
            self._transport.signalProcess(int(number))

    async def stop(self) -> int:
        """Kill it, if it still runs, and wait until it is gone; returns its status."""
        if self.status is None:
            self.signal(signals.SIGKILL)
        return await self.ended()

    async def ended(self) -> int:
        """Wait until it has ended; returns its status. Raises ``ProcessFailed`` when it does not end in time."""
        await self._until(lambda: self.status is not None, "did not end")
        assert self.status is not None
        return self.status

    # --- talk ---------------------------------------------------------------------------------------------------------

    @property
    def output(self) -> str:
        """What it has printed so far, on standard output and error, in whole lines."""
        return self._output.decode("utf-8", "replace")

    async def line(self, pattern: str) -> re.Match[str]:
        """Wait for a whole line in which ``pattern`` is found, after the line found last; returns the match.

        Raises ``ProcessFailed`` with all the output when the line does not come in time, or the program has ended.
        """
        compiled = re.compile(pattern)
        found: list[re.Match[str]] = []

        def look() -> bool:
            while not found and (end := self._output.find(b"\n", self._read)) >= 0:
                text = self._output[self._read : end].decode("utf-8", "replace")
                self._read = end + 1
                match = compiled.search(text)
                if match is not None:
                    found.append(match)
            return bool(found) or self.status is not None

        await self._until(look, f"did not print {pattern!r}")
        if not found:
            raise ProcessFailed(self._report(f"ended without printing {pattern!r}"))
        return found[0]

    def write(self, data: bytes) -> None:
        """Give it ``data`` on its standard input."""
        self._transport.write(data)

    def close_input(self) -> None:
        """End its standard input."""
        self._transport.closeStdin()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _said(self, stream: int, data: bytes) -> None:
        # Standard output and error come through two pipes, so only whole lines may be merged.
        unfinished = self._unfinished.setdefault(stream, bytearray())
        unfinished += data
        end = unfinished.rfind(b"\n") + 1
        if end or len(unfinished) > LINE_LIMIT_BYTES:
            self._append(bytes(unfinished[: end or None]), ended=bool(end))
            del unfinished[: end or None]
        self._check()

    def _append(self, lines: bytes, *, ended: bool) -> None:
        self._output += lines if ended else lines + b"\n"
        excess = len(self._output) - OUTPUT_LIMIT_BYTES
        if excess > 0:
            del self._output[:excess]
            self._read = max(0, self._read - excess)

    def _exited(self) -> None:
        # Programs that it has started may hold its output open for ever.
        self._closing = self._reactor.callLater(HEIRS_S, self._transport.loseConnection)

    def _ended(self, reason: Failure) -> None:
        if self._closing is not None and self._closing.active():
            self._closing.cancel()
        value: Any = reason.value
        self.status = value.exitCode if value.signal is None else -int(value.signal)
        for unfinished in self._unfinished.values():
            if unfinished:
                self._append(bytes(unfinished), ended=False)
        self._check()

    def _check(self) -> None:
        for one in list(self._waiting):
            if one in self._waiting and one[0]():
                self._waiting.remove(one)
                one[1].callback(None)

    async def _until(self, condition: Callable[[], bool], problem: str) -> None:
        if condition():
            return
        waiter: Deferred[None] = Deferred()
        entry = (condition, waiter)
        self._waiting.append(entry)
        try:
            await waiter.addTimeout(self._patience_s, self._reactor)
        except TimeoutError:
            raise ProcessFailed(self._report(f"{problem} within {self._patience_s:g} s")) from None
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def _report(self, problem: str) -> str:
        state = "still runs" if self.status is None else f"ended with status {self.status}"
        return f"{problem}: {' '.join(self.arguments)} ({state}) has printed:\n{self.output or '(nothing)'}"
