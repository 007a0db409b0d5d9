"""How many descriptors a serving process may have open, and how much it logs when it has none left."""

from __future__ import annotations

import contextlib
from typing import Final

from twisted.internet.interfaces import IReactorTime
from twisted.internet.tcp import Port
from twisted.logger import ILogObserver, LogEvent, Logger, globalLogPublisher
from zope.interface import provider

from dmsg.sansio.rate import TokenBucket

#: The most that Linux lets a process have by default. Some systems name a limit that is too large to use.
MOST_DESCRIPTORS: Final = 1_048_576
#: Rate limit for log lines about connections without a descriptor: this many at once, and one in ten seconds. Each connection
#: causes three lines, and one address can make a thousand connections a second: 36 GB of log a day.
_COMPLAINTS: Final = 6
_COMPLAINTS_PER_S: Final = 0.1


def allow_descriptors() -> None:
    """Raise this process's limit of open descriptors as far as it may do so itself.

    Systems start programs with 1,024 descriptors, because of ``select``, but allow more. With 1,024 an address that opens all
    the connections it may have, 1,000 at a relay, leaves none for others: the limits of places come too late.
    """
    try:
        import resource
    except ImportError:
        return  # a system without such limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a system that allows fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def complain_seldom(clock: IReactorTime) -> None:
    """Limit the rate at which Twisted's ports log in this process: they only log connections that they cannot accept."""
    bucket = TokenBucket(_COMPLAINTS_PER_S, _COMPLAINTS, clock.seconds())

    @provider(ILogObserver)
    def observe(event: LogEvent) -> None:
        if bucket.take(clock.seconds()):
            globalLogPublisher(event)

    Port._logger = Logger(Port._logger.namespace, observer=observe)
