"""What a relay does beside reading from its sessions, and what the program's log has of failures."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.glue.tasks import Tasks
from dmsg.sansio.rate import TokenBucket

_log = Logger()
#: Lines of the program's log about registry and store: so many at once, and one in ten seconds.
_COMPLAINTS: Final = 5
_COMPLAINTS_PER_S: Final = 0.1


class Background:
    """Runs coroutines beside each other, and complains with restraint."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        #: What runs.
        self.tasks = Tasks()
        self._complaints = TokenBucket(_COMPLAINTS_PER_S, _COMPLAINTS, clock.seconds())

    def run(self, work: Coroutine[Deferred[Any], Any, None]) -> None:
        """Begin ``work``. It fails only because of a bug, which is logged."""
        self.tasks.begin(work).addErrback(lambda failure: _log.failure("a delivery failed", failure))

    def complain(self, what: str, error: Exception) -> None:
        """Say in the program's log what fails, a few times a minute; the event log counts all of it."""
        if self._complaints.take(self._clock.seconds()):
            _log.warn("{what}: {error}", what=what, error=error)
