"""What discovery says of peers: asked for once however many want to know, and kept for a while."""

from __future__ import annotations

from dataclasses import dataclass

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.crypto.keys import PublicKey
from dmsg.interfaces import IDiscovery
from dmsg.mux.secure import promises_security


@dataclass(frozen=True, slots=True)
class Known:
    """What discovery said of a peer at ``at_s``: its relays, and whether it promises end-to-end security."""

    servers: tuple[PublicKey, ...]
    promised: bool
    at_s: float = 0.0


class _Flight:
    """One question under way, and those who wait for its answer."""

    def __init__(self) -> None:
        self.waiting: list[Deferred[Known]] = []
        self.asking: Deferred[Known] | None = None


class Lookups:
    """The entries of at most ``limit`` peers, each as it was when it was last asked for."""

    def __init__(self, clock: IReactorTime, discovery: IDiscovery, limit: int) -> None:
        self._clock = clock
        self._discovery = discovery
        self._limit = limit
        self._known: dict[PublicKey, Known] = {}
        self._flights: dict[PublicKey, _Flight] = {}

    def known(self, peer: PublicKey, lifetime_s: float) -> Known | None:
        """What was said of ``peer`` within the last ``lifetime_s`` seconds, if anything was."""
        known = self._known.get(peer)
        return known if known is not None and known.at_s + lifetime_s >= self._clock.seconds() else None

    def forget(self, peer: PublicKey) -> None:
        """Ask anew next time."""
        self._known.pop(peer, None)

    def ask(self, peer: PublicKey) -> Deferred[Known]:
        """Ask discovery; fails with a ``DiscoveryError``. A question is given up when nobody waits for it any more."""
        flight = self._flights.get(peer)
        waiter: Deferred[Known] = Deferred(lambda waiter: self._leave(peer, waiter))
        if flight is not None:
            flight.waiting.append(waiter)
            return waiter
        flight = self._flights[peer] = _Flight()
        flight.waiting.append(waiter)
        flight.asking = ensureDeferred(self._ask(peer))
        flight.asking.addBoth(self._answered, peer, flight)
        return waiter

    def _leave(self, peer: PublicKey, waiter: Deferred[Known]) -> None:
        flight = self._flights.get(peer)
        if flight is None or waiter not in flight.waiting:
            return
        flight.waiting.remove(waiter)
        if not flight.waiting:
            del self._flights[peer]
            if flight.asking is not None:
                flight.asking.cancel()

    def _answered(self, answer: Known | Failure, peer: PublicKey, flight: _Flight) -> None:
        if self._flights.get(peer) is flight:
            del self._flights[peer]
        waiting, flight.waiting = flight.waiting, []
        for waiter in waiting:
            if not waiter.called:  # one may have made another give up
                waiter.callback(answer)

    async def _ask(self, peer: PublicKey) -> Known:
        entry = await self._discovery.get_entry(peer)
        delegated = entry.client.delegated_servers if entry.client is not None else None
        known = Known(tuple(delegated or ()), promises_security(entry.version), self._clock.seconds())
        self._known.pop(peer, None)
        while len(self._known) >= self._limit:
            del self._known[next(iter(self._known))]
        self._known[peer] = known
        return known
