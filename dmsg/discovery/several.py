"""Several discoveries as one, in order of preference."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from zope.interface import implementer

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import DMSG, Entry
from dmsg.discovery.errors import DiscoveryError, DiscoveryUnavailable, EntryNotFound
from dmsg.discovery.ranks import Ranks
from dmsg.errors import ConfigError
from dmsg.interfaces import IDiscovery, IRankedDiscovery

T = TypeVar("T")

#: How long a discovery that could not be reached is asked after the others, in seconds: otherwise every dial would wait for
#: its time limit first.
REST_S: Final = 30.0


@implementer(IRankedDiscovery)
class DiscoveryList:
    """``discoveries``, the preferred one first; at least one, else ``ConfigError``. ``clock`` measures :data:`REST_S`.

    Reads go to the first that has an answer: a discovery that cannot be reached, gives something wrong, does not know
    the key or lists no servers is passed over. Each discovery is trusted as much as a single one would be: it may know an
    older entry of a key than the others, which is not noticed between them.

    An :class:`~dmsg.discovery.registrar.EntryRegistrar` keeps the entry in every one of them, with a sequence of its own
    in each, so one that was away for a while catches up.
    """

    _log = Logger()

    def __init__(self, discoveries: Sequence[IDiscovery], clock: IReactorTime) -> None:
        if not discoveries:
            raise ConfigError("discovery", "the list is empty")
        self.discoveries = tuple(discoveries)
        self._clock = clock
        self._rests_until = [0.0] * len(discoveries)

    async def close(self) -> None:
        """Close those that can be closed."""
        for one in self.discoveries:
            close: Any = getattr(one, "close", None)
            if close is not None:
                await close()

    # --- IRankedDiscovery ----------------------------------------------------------------------------------------

    async def get_entry(self, public_key: PublicKey) -> Entry:
        """The entry the first one has. Raises ``EntryNotFound`` if one says so and none has it."""
        return await self._first(lambda one: one.get_entry(public_key))

    async def available_servers(self, protocol: str = DMSG) -> list[Entry]:
        """The list of the first one that has any servers; empty if none has."""

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
        """The ranks of the first one that has some."""
        for one in self.discoveries:
            if IRankedDiscovery.providedBy(one):
                ranked: Any = one
                ranks: Ranks | None = await ranked.relay_ranks()
                if ranks is not None:
                    return ranks
        return None

    async def post_entry(self, entry: Entry) -> None:
        """Post ``entry`` to every one; returns when all have answered and one has taken it.

        What the others refuse it with is logged. Raises the error of the preferred one if none has taken it.
        """
        posting = [Deferred.fromCoroutine(one.post_entry(entry)) for one in self.discoveries]
        failures: list[Any] = [
            outcome for taken, outcome in await DeferredList(posting, consumeErrors=True) if not taken
        ]
        if len(failures) == len(posting):
            failures[0].raiseException()
        for failure in failures:
            self._log.warn("a discovery did not take an entry: {error}", error=failure.value)

    async def _first(self, ask: Callable[[IDiscovery], Awaitable[T]]) -> T:
        errors: list[DiscoveryError] = []
        now = self._clock.seconds()
        for at in sorted(range(len(self.discoveries)), key=lambda at: self._rests_until[at] > now):
            try:
                return await ask(self.discoveries[at])
            except DiscoveryError as error:
                errors.append(error)
                if isinstance(error, DiscoveryUnavailable):
                    self._rests_until[at] = self._clock.seconds() + REST_S
        raise next((error for error in errors if isinstance(error, EntryNotFound)), errors[0])
