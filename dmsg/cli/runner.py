"""Runs one command on the reactor: from its coroutine to an exit code."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TextIO

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import (
    FilteringLogObserver,
    LogLevelFilterPredicate,
    LogPublisher,
    globalLogBeginner,
    textFileLogObserver,
)
from twisted.logger import LogLevel as Level
from twisted.python.failure import Failure

from dmsg.cli.exits import Exit, exit_code
from dmsg.cli.output import Output
from dmsg.errors import ConfigError
from dmsg.glue.reactors import install_default

Main = Callable[[Any], Coroutine[Any, Any, Any]]
_SILENCE: Final = LogPublisher()
#: A command that is asked to end has this many seconds to close its transports.
GOODBYE_S: Final = 10.0
#: This many seconds after the end, a signal ends the process without waiting for threads that hang at a disk or name server.
THREADS_S: Final = 0.5


def run(make: Main, out: Output, *, verbose: bool = False) -> int:
    """Run ``await make(reactor)`` and give the exit code; errors are told through ``out``.

    SIGINT, SIGTERM, SIGQUIT and SIGHUP (the terminal is gone) cancel the coroutine, which then has :data:`GOODBYE_S` to
    clean up; a second signal ends it at once. An ignored signal, such as SIGHUP under nohup, stays ignored. A result that
    cannot be written ends the command like an error.
    """
    try:
        install_default(os.environ)
    except ConfigError as error:
        out.failure(error)
        return exit_code(error)
    from twisted.internet import reactor as installed

    reactor: Any = installed
    begin_logging(sys.stderr, verbose=verbose)
    command = _Command(reactor, make, out, verbose=verbose)
    if not gc.isenabled():  # imported objects are never collected
        gc.freeze()
        gc.enable()
    out.unwritable = command.stop_unwritable
    reactor.callWhenRunning(command.start)
    reactor.run()
    return Exit.INTERRUPTED if command.code is None else command.code


class _Command:
    """One command on the reactor. ``code`` is its exit code, once it has ended."""

    def __init__(self, reactor: Any, make: Main, out: Output, *, verbose: bool) -> None:
        self.code: int | None = None
        self._reactor = reactor
        self._make = make
        self._out = out
        self._verbose = verbose
        self._work: Deferred[Any] | None = None
        self._signals: list[int] = []
        self._unwritable: OSError | None = None
        self._ended_s = 0.0

    def start(self) -> None:
        """Catch signals, and begin."""
        # The reactor's own handlers would stop it before the command could clean up; its SIGCHLD handler stays.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        self._work = Deferred.fromCoroutine(self._make(self._reactor))
        self._work.addBoth(self._finished)

    def stop_unwritable(self, error: OSError) -> None:
        """End, because a result could not be written."""
        if self._unwritable is None:
            self._unwritable = error
            self._reactor.callLater(GOODBYE_S, self._end, exit_code(error))
            self._reactor.callLater(0, self._cancel)  # not now: the coroutine itself may be writing

    def _on_signal(self, number: int, frame: object) -> None:
        if self.code is not None and self._reactor.seconds() - self._ended_s > THREADS_S:
            os._exit(self.code)
        self._signals.append(number)
        self._reactor.callFromThread(self._interrupt)

    def _interrupt(self) -> None:
        if len(self._signals) > 1:
            self._end(Exit.INTERRUPTED)
            return
        self._reactor.callLater(GOODBYE_S, self._end, Exit.INTERRUPTED)
        self._cancel()

    def _cancel(self) -> None:
        if self._work is not None:
            self._work.cancel()

    def _finished(self, result: object) -> None:
        if self._unwritable is not None and not self._signals:
            result = Failure(self._unwritable)
        if not isinstance(result, Failure):
            # A command that ends because of a signal was interrupted, however cleanly it ended.
            self._end(Exit.INTERRUPTED if self._signals else Exit.OK)
        elif self._signals or result.check(CancelledError):
            self._end(Exit.INTERRUPTED)
        else:
            if self._verbose:
                with suppress(OSError):
                    result.printTraceback(sys.stderr)
            error = result.value
            assert error is not None
            self._out.failure(error)
            self._end(exit_code(error))

    def _end(self, code: int) -> None:
        if self.code is None:
            self._ended_s = self._reactor.seconds()
            self.code = code
            self._reactor.stop()


def begin_logging(stream: TextIO, *, verbose: bool) -> None:
    """Send Twisted's log to ``stream`` if ``verbose``, otherwise nowhere: a command reports its errors itself."""
    predicate = LogLevelFilterPredicate(defaultLogLevel=Level.info)
    shown = FilteringLogObserver(textFileLogObserver(stream), [predicate])
    observer = shown if verbose else _SILENCE
    globalLogBeginner.beginLoggingTo([observer], redirectStandardIO=False, discardBuffer=True)
