"""Background tasks of a relay, and rate-limited log lines about failures."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.glue.tasks import Tasks
from dmsg.sansio.rate import TokenBucket

_log = Logger()
#: Rate limit of log lines about registry and store: this many at once, and one in ten seconds.
_COMPLAINTS: Final = 5
_COMPLAINTS_PER_S: Final = 0.1


class Background:
    """Runs coroutines concurrently, and logs failures with a rate limit."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        #: The running tasks.
        self.tasks = Tasks()
        self._complaints = TokenBucket(_COMPLAINTS_PER_S, _COMPLAINTS, clock.seconds())

    def run(self, work: Coroutine[Deferred[Any], Any, None]) -> None:
        """Begin ``work``. Only a bug makes it fail, and that is logged."""
        self.tasks.begin(work).addErrback(lambda failure: _log.failure("a delivery failed", failure))

    def complain(self, what: str, error: Exception) -> None:
        """Log what fails, a few times a minute at most; the event log counts all failures."""
        if self._complaints.take(self._clock.seconds()):
            _log.warn("{what}: {error}", what=what, error=error)
