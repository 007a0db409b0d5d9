"""Keeps a client's scores up to date with the ranks its discovery hands out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from dmsg.discovery.errors import DiscoveryError
from dmsg.glue.waiters import Waiters
from dmsg.interfaces import IDiscovery, IRankedDiscovery
from dmsg.relays.scores import NEUTRAL, RelayScores

#: How often ranks are asked for, in seconds; discovery's client asks the network less often.
LOOK_S: Final = 60.0
#: The first choice of relays waits no longer than this for the first ranks.
FIRST_WAIT_S: Final = 1.0

_log = Logger()


class RankWatch:
    """Puts the ranks of ``discovery`` into ``scores``. ``now_s()`` is Unix time; documents fade by it.

    A discovery that is no :class:`~dmsg.interfaces.IRankedDiscovery` has no ranks. Errors are logged and change nothing.
    """

    def __init__(
        self,
        clock: IReactorTime,
        discovery: IDiscovery | None,
        scores: RelayScores,
        now_s: Callable[[], float],
    ) -> None:
        ranked = discovery is not None and IRankedDiscovery.providedBy(discovery)
        self._discovery: IRankedDiscovery | None = discovery if ranked else None  # type: ignore[assignment]
        self._clock = clock
        self._scores = scores
        self._now_s = now_s
        self._looking: Deferred[None] | None = None
        self._timer: IDelayedCall | None = None
        self._waiting: Waiters[None] = Waiters()
        self._looked = False
        self._stopped = False

    def start(self) -> None:
        """Look now, and from now on."""
        self._timer, self._stopped = None, False
        if self._discovery is None:
            return
        self._looking = ensureDeferred(self._look(self._discovery))
        self._looking.addErrback(self._failed).addCallback(self._done)

    def stop(self) -> None:
        """Look no more."""
        self._stopped = True
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        if self._looking is not None:
            self._looking.cancel()

    async def first_look(self) -> None:
        """Wait until ranks were asked for once, at most :data:`FIRST_WAIT_S`."""
        if self._discovery is None or self._looked or self._stopped:
            return
        await self._waiting.wait_at_most(FIRST_WAIT_S, self._clock)

    async def _look(self, discovery: IRankedDiscovery) -> None:
        ranks = await discovery.relay_ranks()
        if ranks is not None:
            self._scores.ranks = lambda relay: ranks.scores.get(relay.raw, NEUTRAL)
            self._scores.freshness = lambda: ranks.freshness(self._now_s())

    def _failed(self, failure: object) -> None:
        error = getattr(failure, "value", None)
        if not isinstance(error, CancelledError | DiscoveryError):  # an embedder's discovery may fail as it likes
            _log.error("Discovery's ranks cannot be used: {error!r}", error=error)

    def _done(self, _: object) -> None:
        self._looked, self._looking = True, None
        self._waiting.fire(None)
        if not self._stopped:
            self._timer = self._clock.callLater(LOOK_S, self.start)
