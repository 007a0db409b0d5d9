"""Several discoveries as one, in order of preference."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import DMSG, Entry
from dmsg.discovery.errors import DiscoveryError, DiscoveryUnavailable, EntryNotFound
from dmsg.discovery.ranks import Ranks
from dmsg.errors import ConfigError
from dmsg.interfaces import IDiscovery, IRankedDiscovery

T = TypeVar("T")

#: Seconds for which a discovery that could not be reached, or was slow to answer, is asked after the others: otherwise every
#: dial would first wait for its timeout.
REST_S: Final = 30.0
#: Seconds without an answer after which the next discovery is asked, too: a dial has no more time than one discovery.
PATIENCE_S: Final = 1.0


@implementer(IRankedDiscovery)
class DiscoveryList:
    """``discoveries``, the preferred one first; at least one, else ``ConfigError``. ``clock`` measures :data:`REST_S`,
    ``now_s()`` is Unix time, by which ranks fade.

    Reads go to the first discovery that has an answer. A discovery that cannot be reached, gives an invalid answer, does not
    know the key or lists no servers is skipped. When one has not answered within :data:`PATIENCE_S`, the next is asked as
    well. Each discovery is trusted as much as a single one would be: it may have an older entry of a key than the others, and
    this is not noticed.

    An :class:`~dmsg.discovery.registrar.EntryRegistrar` keeps the entry in every one of them, with a sequence of its own
    in each, so a discovery that was away for a while catches up.
    """

    _log = Logger()

    def __init__(
        self, discoveries: Sequence[IDiscovery], clock: IReactorTime, now_s: Callable[[], float] = time.time
    ) -> None:
        if not discoveries:
            raise ConfigError("discovery", "the list is empty")
        self.discoveries = tuple(discoveries)
        self._clock = clock
        self._now_s = now_s
        self._rests_until = [0.0] * len(discoveries)

    async def close(self) -> None:
        """Close all discoveries that can be closed."""
        for one in self.discoveries:
            close: Any = getattr(one, "close", None)
            if close is not None:
                await close()

    # --- IRankedDiscovery ----------------------------------------------------------------------------------------

    async def get_entry(self, public_key: PublicKey) -> Entry:
        """The entry of the first discovery that has it. Raises ``EntryNotFound`` if one says so and none has the entry."""
        return await self._first(lambda one: one.get_entry(public_key))

    async def available_servers(self, protocol: str = DMSG) -> list[Entry]:
        """The list of the first discovery that lists any servers; empty if none does."""

        async def listed(discovery: IDiscovery) -> list[Entry]:
            servers: list[Entry] = await discovery.available_servers(protocol)
            if not servers:
                raise EntryNotFound
            return servers

        try:
            return await self._first(listed)
        except EntryNotFound:
            return []

    async def relay_ranks(self) -> Ranks | None:
        """The ranks of the first discovery whose ranks count in full; if there is none, the ranks that count most.

        A discovery that is away, or gets no new ranks, keeps its last ones.
        """
        found: Ranks | None = None
        freshness = -1.0
        for one in self.discoveries:
            if freshness < 1.0 and IRankedDiscovery.providedBy(one):
                ranked: Any = one
                ranks: Ranks | None = await ranked.relay_ranks()
                if ranks is not None and ranks.freshness(self._now_s()) > freshness:
                    found, freshness = ranks, ranks.freshness(self._now_s())
        return found

    async def post_entry(self, entry: Entry) -> None:
        """Post ``entry`` to all discoveries; returns when all have answered and at least one has accepted it.

        The refusals of the others are logged. Raises the error of the preferred discovery if none has accepted it.
        """
        posting = [Deferred.fromCoroutine(one.post_entry(entry)) for one in self.discoveries]
        failures: list[Any] = [
            outcome for taken, outcome in await DeferredList(posting, consumeErrors=True) if not taken
        ]
        if len(failures) == len(posting):
            failures[0].raiseException()
        for failure in failures:
            self._log.warn("a discovery did not take an entry: {error}", error=failure.value)

    def _first(self, ask: Callable[[IDiscovery], Awaitable[T]]) -> Deferred[T]:
        now = self._clock.seconds()
        order = sorted(range(len(self.discoveries)), key=lambda at: self._rests_until[at] > now)
        return _Question(self, self._clock, order, ask).done

    def rest(self, at: int) -> None:
        """Ask the discovery number ``at`` after the others for :data:`REST_S`."""
        self._rests_until[at] = self._clock.seconds() + REST_S


class _Question(Generic[T]):
    """A question to several discoveries in ``order``: to the next when one has no answer, or has not answered for a while.

    ``done`` fires with the first answer, or fails when no discovery has one; cancelling it gives up.
    """

    def __init__(
        self, of: DiscoveryList, clock: IReactorTime, order: list[int], ask: Callable[[IDiscovery], Awaitable[T]]
    ) -> None:
        self.done: Deferred[T] = Deferred(self._give_up)
        self._of = of
        self._clock = clock
        self._ask = ask
        self._left = order
        self._errors: list[DiscoveryError] = []
        #: The discoveries that are being asked, and since when.
        self._asked: dict[int, tuple[Deferred[Any], float]] = {}
        self._timer: IDelayedCall | None = None
        self._next()

    def _next(self) -> None:
        self._stop_timer()
        at, now = self._left.pop(0), self._clock.seconds()
        if self._left:
            self._timer = self._clock.callLater(PATIENCE_S, self._out_of_patience)
        asking = Deferred.fromCoroutine(self._answer_of(at))
        self._asked[at] = (asking, now)
        asking.addCallbacks(self._answered, self._failed, callbackArgs=(at,), errbackArgs=(at,))

    async def _answer_of(self, at: int) -> T:
        return await self._ask(self._of.discoveries[at])

    def _out_of_patience(self) -> None:
        self._timer = None
        for at in self._asked:  # including the last one, although it did not have all of this time
            self._of.rest(at)
        self._next()

    def _rest_slow(self) -> None:
        now = self._clock.seconds()
        for at, (_, since) in self._asked.items():
            if now - since >= PATIENCE_S:
                self._of.rest(at)

    def _answered(self, answer: T, at: int) -> None:
        if self._asked.pop(at, None) is None:
            return  # given up
        self._end()
        self.done.callback(answer)

    def _failed(self, failure: Failure, at: int) -> None:
        if self._asked.pop(at, None) is None:
            return  # given up
        error = failure.value
        if not isinstance(error, DiscoveryError):
            self._end()
            self.done.errback(failure)
            return
        self._errors.append(error)
        if isinstance(error, DiscoveryUnavailable):
            self._of.rest(at)
        if self._left:
            self._next()
        elif not self._asked:
            found = next((one for one in self._errors if isinstance(one, EntryNotFound)), self._errors[0])
            self.done.errback(found)

    def _give_up(self, _: object) -> None:
        self._rest_slow()
        self._end()

    def _end(self) -> None:
        self._left = []
        self._stop_timer()
        asked, self._asked = self._asked, {}
        for asking, _ in asked.values():
            asking.cancel()

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None and timer.active():
            timer.cancel()
