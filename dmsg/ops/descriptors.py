"""How many descriptors a process that serves may have open, and what it says when it has none left."""

from __future__ import annotations

import contextlib
from typing import Final

from twisted.internet.interfaces import IReactorTime
from twisted.internet.tcp import Port
from twisted.logger import ILogObserver, LogEvent, Logger, globalLogPublisher
from zope.interface import provider

from dmsg.sansio.rate import TokenBucket

#: As many as Linux lets a process have where nothing else was set. Some systems name a limit that is no number one could use.
MOST_DESCRIPTORS: Final = 1_048_576
#: Lines of the program's log about connections for which there is no descriptor: so many at once, and one in ten seconds. There
#: are three for each connection, and one address makes a thousand connections a second: 36 GB a day.
_COMPLAINTS: Final = 6
_COMPLAINTS_PER_S: Final = 0.1


def allow_descriptors() -> None:
    """Raise this process's limit of open descriptors as far as it may raise it itself.

    Systems start programs with 1,024, for the sake of ``select``, and let them have more. With 1,024 an address that opens
    all the connections it may have, 1,000 at a relay, leaves none for others: the limits of places come too late.
    """
    try:
        import resource
    except ImportError:
        return  # a system without such limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a system that lets it have fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def complain_seldom(clock: IReactorTime) -> None:
    """Leave out most of what Twisted's ports log, in this process: all of it is about connections they cannot accept."""
    bucket = TokenBucket(_COMPLAINTS_PER_S, _COMPLAINTS, clock.seconds())

    @provider(ILogObserver)
    def observe(event: LogEvent) -> None:
        if bucket.take(clock.seconds()):
            globalLogPublisher(event)

    Port._logger = Logger(Port._logger.namespace, observer=observe)
