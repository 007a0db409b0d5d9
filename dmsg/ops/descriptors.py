"""How many descriptors a serving process may have open, and what its ports do when it has none left."""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
from collections.abc import Callable
from typing import Any, Final

from twisted.internet import tcp
from twisted.internet.interfaces import IReactorTime
from twisted.logger import ILogObserver, LogEvent, Logger
from zope.interface import implementer, provider

from dmsg.sansio.rate import TokenBucket

resource: Any
try:
    import resource
except ImportError:  # a system without such limits
    resource = None

#: The most that Linux lets a process have by default. Some systems name a limit that is too large to use.
MOST_DESCRIPTORS: Final = 1_048_576
#: A port that could accept nothing tries again after this many seconds. The system goes on telling that a connection waits, so
#: that without a pause the reactor would turn as fast as it can, for nothing.
PAUSE_S: Final = 0.1
#: One line in ten seconds tells of connections without a descriptor: one address can make a thousand of them a second.
_COMPLAINTS_PER_S: Final = 0.1

_log = Logger()
_do_read: Final[Any] = tcp.Port.doRead


def _warn(line: str) -> None:
    _log.warn("{line}", line=line)


def allow_descriptors() -> None:
    """Raise this process's limit of open descriptors as far as it may do so itself, and take what needs one later.

    Systems start programs with 1,024 descriptors, because of ``select``, but allow more. With 1,024 an address that opens all
    the connections it may have, 1,000 at a relay, leaves none for others: the limits of places come too late.
    """
    codecs.lookup("idna")  # a file of Python's, which is read for the first request or look-up, and fails it otherwise
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a system that allows fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def be_calm_without_descriptors(clock: IReactorTime, tell: Callable[[str], object] = _warn) -> None:
    """Make Twisted's ports in this process bear that there is no descriptor for a connection.

    Twisted keeps one in reserve. With it a port accepts connections only to close them at once, so that none waits for ever.
    But another thread may take it in the meantime. Twisted does not get it back then, and its ports try without a pause.
    ``tell`` is called with a line for people, at most once in ten seconds.
    """
    told = _Told(clock, tell)

    def do_read(port: Any) -> None:
        with contextlib.suppress(OSError):  # before a connection gets the one that has become free
            tcp._reservedFD.reserve()
        _do_read(port)
        if told.tell() and port.connected and not port.disconnecting:
            port.stopReading()
            port.reactor.callLater(PAUSE_S, _resume, port)

    tcp._FileDescriptorReservation._log = Logger(tcp._FileDescriptorReservation._log.namespace, observer=_ignore)
    tcp.Port._logger = Logger(tcp.Port._logger.namespace, observer=told)
    tcp.Port.doRead = do_read  # type: ignore[method-assign]


@provider(ILogObserver)
def _ignore(event: LogEvent) -> None:
    """The reserve could not be taken: the port tells what follows from it."""


def _resume(port: Any) -> None:
    if port.connected and not port.disconnecting:
        port.startReading()


@implementer(ILogObserver)
class _Told:
    """What ports tell in their log, which is only about connections that they could not accept, in fewer lines."""

    def __init__(self, clock: IReactorTime, tell: Callable[[str], object]) -> None:
        self._clock = clock
        self._tell = tell
        self._bucket = TokenBucket(_COMPLAINTS_PER_S, 1, clock.seconds())
        self._closed = 0
        self._error = ""

    def __call__(self, event: LogEvent) -> None:
        """Take one event of Twisted's."""
        self._closed += "address" in event
        error = event.get("acceptError")
        if error != "ECONNABORTED":  # on BSD a client that has left already: no reason to let the others wait
            self._error = error or self._error

    def tell(self) -> bool:
        """Log what was told, if it is time to; gives whether a connection still waits."""
        error, self._error = self._error, ""
        if (error or self._closed) and self._bucket.take(self._clock.seconds()):
            why = _why(error or "EMFILE")
            self._tell(f"connections cannot be accepted: {why} ({self._closed} closed at once)")
            self._closed = 0
        return bool(error)


def _why(error: str) -> str:
    """Why no connection can be accepted, and what helps; ``error`` is a name of :mod:`errno`."""
    if error != "EMFILE" or resource is None:
        return os.strerror(getattr(errno, error))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"all {limit} file descriptors of this process are in use; allow it more (LimitNOFILE= of systemd, or ulimit -n)"
