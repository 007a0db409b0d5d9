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
    running: list[Deferred[Any]] = []
    outcome: list[int] = []
    ended: list[float] = []
    interrupted: list[int] = []
    unwritable: list[OSError] = []

    def end(code: int) -> None:
        if not outcome:
            outcome.append(code)
            ended.append(reactor.seconds())
            reactor.stop()

    def finished(result: object) -> None:
        if unwritable and not interrupted:
            result = Failure(unwritable[0])
        if isinstance(result, Failure):
            if interrupted or result.check(CancelledError):
                end(Exit.INTERRUPTED)
                return
            if verbose:
                with suppress(OSError):
                    result.printTraceback(sys.stderr)
            error = result.value
            assert error is not None
            out.failure(error)
            end(exit_code(error))
        else:
            # A command that ends because of a signal was interrupted, however cleanly it ended.
            end(Exit.INTERRUPTED if interrupted else Exit.OK)

    def cancel_it() -> None:
        if running:
            running[0].cancel()

    def cancel() -> None:
        if len(interrupted) > 1:
            end(Exit.INTERRUPTED)
            return
        reactor.callLater(GOODBYE_S, end, Exit.INTERRUPTED)
        cancel_it()

    def stop_unwritable(error: OSError) -> None:
        if not unwritable:
            unwritable.append(error)
            reactor.callLater(GOODBYE_S, end, exit_code(error))
            reactor.callLater(0, cancel_it)  # not now: the coroutine itself may be writing

    def on_signal(number: int, frame: object) -> None:
        if ended and reactor.seconds() - ended[0] > THREADS_S:
            os._exit(outcome[0])
        interrupted.append(number)
        reactor.callFromThread(cancel)

    def start() -> None:
        # The reactor's own handlers would stop it before the command could clean up; its SIGCHLD handler stays.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, on_signal)
        running.append(Deferred.fromCoroutine(make(reactor)))
        running[0].addBoth(finished)

    if not gc.isenabled():  # imported objects are never collected
        gc.freeze()
        gc.enable()
    out.unwritable = stop_unwritable
    reactor.callWhenRunning(start)
    reactor.run()
    return outcome[0] if outcome else Exit.INTERRUPTED


def begin_logging(stream: TextIO, *, verbose: bool) -> None:
    """Send Twisted's log to ``stream`` if ``verbose``, otherwise nowhere: a command reports its errors itself."""
    predicate = LogLevelFilterPredicate(defaultLogLevel=Level.info)
    shown = FilteringLogObserver(textFileLogObserver(stream), [predicate])
    observer = shown if verbose else _SILENCE
    globalLogBeginner.beginLoggingTo([observer], redirectStandardIO=False, discardBuffer=True)
