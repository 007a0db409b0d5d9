"""The relays that discovery lists, asked for in the background and kept until the next answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.discovery.errors import DiscoveryError
from dmsg.errors import InvalidAddress
from dmsg.interfaces import IDiscovery
from dmsg.relays.candidates import Candidate
from dmsg.relays.rankwatch import RankWatch
from dmsg.relays.scores import RelayScores

#: When discovery is asked again, an answer older than ``OLD_S`` seconds is not used for ``WAIT_S`` seconds: the new answer
#: probably comes soon, and does not have relays that have left. If discovery is silent or gone, the old answer is used.
OLD_S: Final = 10.0
WAIT_S: Final = 1.0

_log = Logger()


class ListedRelays:
    """The last answer of ``discovery`` when it was asked for relays that speak ``protocol``.

    The first answer waits until ranks were asked for (``watch``). If a question fails, the earlier answer stays.
    """

    def __init__(
        self,
        clock: IReactorTime,
        discovery: IDiscovery | None,
        watch: RankWatch,
        scores: RelayScores,
        protocol: str,
    ) -> None:
        #: Called whenever discovery has answered.
        self.changed: Callable[[], None] = lambda: None
        self.relays: tuple[Candidate, ...] = ()
        #: Why there are none, for people; empty if there are some, or discovery has not answered yet.
        self.problem = ""
        #: When discovery was last asked, on ``clock``; ``None`` before the first time.
        self.asked_s: float | None = None
        self._clock = clock
        self._discovery = discovery
        self._watch = watch
        self._scores = scores
        self._protocol = protocol
        self._answered_s: float | None = None
        self._asking: Deferred[None] | None = None

    def usable_at(self) -> float:
        """When :attr:`relays` may be used: 0.0 for now, or later because the first or a newer answer is about to come."""
        if self._asking is None or self.asked_s is None:
            return 0.0
        if self._answered_s is not None and self.asked_s - self._answered_s < OLD_S:
            return 0.0
        return self.asked_s + WAIT_S

    @property
    def there(self) -> bool:
        """Whether there is a discovery to ask."""
        return self._discovery is not None

    @property
    def asking(self) -> bool:
        """Whether an answer is still to come."""
        return self._asking is not None

    def ask(self) -> None:
        """Ask discovery, if there is one and it is not being asked."""
        if self._discovery is None or self._asking is not None:
            return
        self.asked_s = self._clock.seconds()
        asking = self._asking = ensureDeferred(self._ask(self._discovery))
        asking.addErrback(self._failed).addCallback(self._answered)

    def stop(self) -> None:
        """Give up a question that is under way."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self, discovery: IDiscovery) -> None:
        try:
            entries = await discovery.available_servers(self._protocol)
        except DiscoveryError as error:
            problem = f"discovery: {error}"
            if problem != self.problem:  # logged once: discovery is asked every few seconds, and may be away for weeks
                _log.warn("Discovery gave no servers: {error}", error=error)
                self.problem = problem
            return
        await self._watch.first_look()
        relays = []
        for entry in entries:
            try:
                if entry.server is not None and entry.protocol == self._protocol:
                    relays.append(Candidate(entry.static, entry.server.host_port))
            except InvalidAddress:
                continue
        self.relays, self._answered_s = tuple(relays), self._clock.seconds()
        self.problem = "" if relays else "discovery knows no server with room"
        self._scores.listed([one.public_key for one in relays], self._clock.seconds())

    def _failed(self, failure: object) -> None:
        error = getattr(failure, "value", None)
        if not isinstance(error, CancelledError):  # an embedder's discovery may fail as it likes
            _log.error("Discovery's servers cannot be used: {error!r}", error=error)

    def _answered(self, _: object) -> None:
        self._asking = None
        self.changed()
