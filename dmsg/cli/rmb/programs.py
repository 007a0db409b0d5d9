"""A program that answers requests: the payload on its standard input, the answer from its standard output."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessDone, ProcessExitedAlready, ProcessTerminated
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from dmsg.errors import DmsgError

#: The last so many bytes of a program's standard error are kept, and so many characters of it are told to the caller.
_ERRORS_BYTES: Final = 4096
_TEXT_LIMIT: Final = 512


class ProgramFailed(DmsgError):
    """There is no answer. ``text`` says why, for the caller; ``status`` is the exit status, or ``None``."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.status = status


class Program:
    """A command line that is run once for each request.

    It may run for ``time_limit_s`` and write ``output_limit_bytes``; above either limit it is killed. Programs that it has
    started itself are not killed: it has to end them when its standard output is closed.
    """

    def __init__(self, reactor: Any, arguments: Sequence[str], *, time_limit_s: float, output_limit_bytes: int) -> None:
        self._reactor = reactor
        self._arguments = list(arguments)
        self._time_limit_s = time_limit_s
        self._output_limit_bytes = output_limit_bytes

    async def run(self, payload: bytes, variables: Mapping[str, str], time_limit_s: float = float("inf")) -> bytes:
        """The answer; ``variables`` are added to its environment. Raises ``ProgramFailed``; cancelling kills it."""
        limit_s = min(self._time_limit_s, time_limit_s)
        run = _Run(payload, self._output_limit_bytes)
        try:
            self._reactor.spawnProcess(
                run, self._arguments[0], self._arguments, env={**os.environ, **variables}, path=None
            )
        except (OSError, ValueError) as error:  # ValueError: the schema that another twin sent has a null character
            problem = getattr(error, "strerror", None) or error
            raise ProgramFailed(f"the program cannot be run: {problem}") from None
        late: IDelayedCall = self._reactor.callLater(limit_s, run.end, f"the program took longer than {limit_s:g} s")
        try:
            return await run.answer
        finally:
            if late.active():
                late.cancel()


class _Run(ProcessProtocol):
    """One process."""

    transport: Any

    def __init__(self, payload: bytes, limit_bytes: int) -> None:
        self._payload = payload
        self._limit_bytes = limit_bytes
        self._output: list[bytes] = []
        self._size = 0
        self._errors = b""
        self._problem = ""
        self.answer: Deferred[bytes] = Deferred(self._cancelled)

    def connectionMade(self) -> None:
        self.transport.write(self._payload)
        self.transport.closeStdin()

    def outReceived(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit_bytes:
            self.end(f"the program wrote more than {self._limit_bytes} bytes")
        else:
            self._output.append(data)

    def errReceived(self, data: bytes) -> None:
        self._errors = (self._errors + data)[-_ERRORS_BYTES:]

    def end(self, problem: str) -> None:
        """Kill it."""
        self._problem = self._problem or problem
        with contextlib.suppress(ProcessExitedAlready):
            self.transport.signalProcess("KILL")
        # programs that it has started may hold the pipes open
        self.transport.loseConnection()

    def _cancelled(self, answer: Deferred[bytes]) -> None:
        self.end("the program was stopped")
        answer.errback(ProgramFailed(self._problem))

    def processEnded(self, reason: Failure) -> None:
        if self.answer.called:
            return
        if self._problem:
            self.answer.errback(ProgramFailed(self._problem))
        elif reason.check(ProcessDone):
            self.answer.callback(b"".join(self._output))
        else:
            assert isinstance(reason.value, ProcessTerminated)
            self.answer.errback(self._failed(reason.value))

    def _failed(self, ended: ProcessTerminated) -> ProgramFailed:
        status, number = ended.exitCode, ended.signal
        text = f"the program was ended by signal {number}" if status is None else f"the program ended with {status}"
        said = " ".join(self._errors.decode("utf-8", "replace").split())
        return ProgramFailed(f"{text}: {said[-_TEXT_LIMIT:]}" if said else text, status)
