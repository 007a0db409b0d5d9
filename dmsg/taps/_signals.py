"""How a role handles signals: it ends as on SIGTERM, or logs the signal and goes on."""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from twisted.internet.error import ReactorNotRunning
from twisted.logger import Logger

_log = Logger()


def _present(*names: str) -> tuple[int, ...]:
    return tuple(int(getattr(signal, name)) for name in names if hasattr(signal, name))


#: Signals that ask the program to end, or announce its end (processor time used up, power failing).
ENDING: Final = _present("SIGTERM", "SIGINT", "SIGQUIT", "SIGXCPU", "SIGPWR")
#: Signals that end a program without a handler for them. Not among them: SIGKILL and SIGSTOP, which no program can handle;
#: SIGSEGV, SIGBUS, SIGFPE and SIGILL, after which the processor cannot go on; SIGPIPE and SIGXFSZ, which Python ignores.
NOTED: Final = (
    *_present(
        "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGIO", "SIGSTKFLT", "SIGABRT", "SIGTRAP",
        "SIGSYS",
    ),
    *(range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if hasattr(signal, "SIGRTMIN") else ()),
)  # fmt: skip


def note_signals(reactor: Any) -> None:
    """Log a signal that would end the program, and go on.

    A signal that has a handler keeps it (twistd's SIGUSR1 begins a new log file), and an ignored signal stays ignored.
    Outside the main thread, where no handler can be set, nothing happens.
    """
    for number in NOTED:
        if signal.getsignal(number) is signal.SIG_DFL:
            _handle(number, lambda received: reactor.callFromThread(_note, received))


def _note(number: int) -> None:
    text = "{signal} changes nothing: settings are read when the program starts, and SIGTERM ends it"
    _log.info(text, signal=_name(number))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # the real-time signals between the first and the last
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def end_well_on_signals(reactor: Any) -> None:
    """Make SIGTERM, and signals that ask for the same, an ordinary way to end: drain, then exit with status 0.

    Twisted drains, too, and then kills itself with the same signal, which looks like a crash to the program that
    started this one. A second signal changes nothing. Call this before ``reactor`` runs, for early signals, and again when it
    runs, because its start sets handlers.
    """
    end = _End(reactor)
    for name in ("sigInt", "sigBreak", "sigTerm"):
        if hasattr(reactor, name):
            setattr(reactor, name, end)  # the reactor sets these as handlers when it starts
    for number in ENDING:
        handler = signal.getsignal(number)
        ours = handler in (signal.SIG_DFL, signal.default_int_handler) or getattr(handler, "__self__", None) is reactor
        if ours or isinstance(handler, _End):
            _handle(number, end)
            # At its own end the interpreter restores the default action of each signal that has a handler.
            atexit.register(_ignore, number)


class _End:
    """Stops ``reactor`` on a signal, once. Handlers interrupt each other: the next ones must take no time."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self._is_asked = False

    def __call__(self, number: int, frame: FrameType | None = None) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._reactor.callFromThread(self._stop)

    def _stop(self) -> None:
        try:
            self._reactor.stop()
        except ReactorNotRunning:
            _log.info("already stopping")


def _ignore(number: int) -> None:
    if callable(signal.getsignal(number)):
        signal.signal(number, signal.SIG_IGN)


def _handle(number: int, action: Callable[[int], None]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return

    def on_signal(received: int, frame: FrameType | None) -> None:
        action(received)

    signal.signal(number, on_signal)
    # A signal may interrupt the system call of any thread: it is restarted.
    signal.siginterrupt(number, False)
