"""What discovery says of peers: asked for once for all that wait for it, and kept for some seconds."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import DELEGATED_SERVERS_LIMIT, promises_security
from dmsg.discovery.errors import DiscoveryError, DiscoveryUnavailable
from dmsg.glue.waiters import Waiters
from dmsg.interfaces import IDiscovery
from dmsg.sansio.rate import TokenBucket

T = TypeVar("T")

#: A question that has had no answer for so long, in seconds, makes discovery count as silent, and for how long it does
#: unless it answers.
SILENT_AFTER_S: Final = 1.0
SILENCE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """Look-ups of callers: peers that ask for a transport in the clear.

    They hold twice: for callers of whom discovery had an entry before, and for all others. So strangers without an entry
    take nothing from peers that have one.
    """

    #: Answers kept: more than look-ups are possible in the five seconds for which an answer counts.
    entries: int = 1_024
    #: Look-ups under way at one time; a second; and in a burst. Beyond that a caller is taken to promise end-to-end
    #: security, as when discovery does not answer. Both kinds together ask a tenth of what a discovery answers one client.
    at_once: int = 8
    per_s: float = 10.0
    burst: int = 25


@dataclass(frozen=True, slots=True)
class Known:
    """What discovery said of a peer at ``at_s``: its relays, and whether it promises end-to-end security."""

    servers: tuple[PublicKey, ...]
    promised: bool
    at_s: float = 0.0
    #: A dial that went by it failed: discovery is asked anew before the next one.
    doubted: bool = False


class _Table(Generic[T]):
    """At most ``limit`` things by peer; the one put in longest ago goes first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._things: OrderedDict[PublicKey, T] = OrderedDict()

    def __contains__(self, peer: PublicKey) -> bool:
        return peer in self._things

    def get(self, peer: PublicKey) -> T | None:
        return self._things.get(peer)

    def put(self, peer: PublicKey, thing: T) -> None:
        self._things[peer] = thing
        self._things.move_to_end(peer)
        if len(self._things) > self._limit:
            self._things.popitem(last=False)

    def change(self, peer: PublicKey, how: Callable[[T], T]) -> None:
        """Change what is there of ``peer``, if anything is; it keeps its place."""
        thing = self._things.get(peer)
        if thing is not None:
            self._things[peer] = how(thing)

    def forget(self, is_over: Callable[[T], bool]) -> None:
        """Forget the two put in longest ago if they are over: more than come in at a time."""
        for _ in range(2):
            oldest = next(iter(self._things), None)
            if oldest is None or not is_over(self._things[oldest]):
                return
            del self._things[oldest]


class _Callers:
    """One of the two kinds of callers: what is known of them, and how much may be asked about them."""

    def __init__(self, limits: CallerLimits, now: float) -> None:
        self.known: _Table[Known] = _Table(limits.entries)
        self.asking = 0
        self._at_once = limits.at_once
        self._bucket = TokenBucket(limits.per_s, limits.burst, now)

    def take(self, now: float) -> bool:
        """Whether one more question may be asked now."""
        return self.asking < self._at_once and self._bucket.take(now)


class _Flight:
    """One question under way since ``began_s``, and the Deferreds that wait for its answer."""

    def __init__(self, abandoned: Callable[[], None], began_s: float) -> None:
        self.began_s = began_s
        self.waiting: Waiters[Known] = Waiters(abandoned)
        #: Whether a dial has asked, and not only a caller is looked up.
        self.dialled = False
        self.asking: Deferred[Known] | None = None


class Lookups:
    """The entries of at most ``limit`` peers that were dialled, each as it was when it was last asked for.

    What callers are looked up for is kept apart, so that no stranger's request makes a dial ask again.
    """

    def __init__(
        self, clock: IReactorTime, discovery: IDiscovery, limit: int, callers: CallerLimits = CallerLimits()
    ) -> None:
        self._clock = clock
        self._discovery = discovery
        self._known: _Table[Known] = _Table(limit)
        self._found = _Callers(callers, clock.seconds())
        self._others = _Callers(callers, clock.seconds())
        self._flights: dict[PublicKey, _Flight] = {}
        #: How many hold the question about each peer.
        self._holders: Counter[PublicKey] = Counter()
        self._silent_until = 0.0

    @property
    def is_silent(self) -> bool:
        """Whether discovery has lately left a question without an answer, and has answered none since."""
        return self._clock.seconds() < self._silent_until

    def is_asking(self, peer: PublicKey) -> bool:
        """Whether a question about ``peer`` is under way."""
        return peer in self._flights

    def asked_for_s(self, peer: PublicKey) -> float:
        """How long the question about ``peer`` has been under way; 0 if none is."""
        flight = self._flights.get(peer)
        return self._clock.seconds() - flight.began_s if flight is not None else 0.0

    def known(self, peer: PublicKey, lifetime_s: float) -> Known | None:
        """What was said of ``peer`` within the last ``lifetime_s`` seconds, if it was dialled then."""
        return self._fresh(self._known.get(peer), lifetime_s)

    def _fresh(self, known: Known | None, lifetime_s: float) -> Known | None:
        if known is None or known.doubted or known.at_s + lifetime_s < self._clock.seconds():
            return None
        return known

    def earlier(self, peer: PublicKey, lifetime_s: float) -> Known | None:
        """What was last said of ``peer``, within ``lifetime_s`` seconds: to go by when discovery has no answer."""
        said = [known for known in (self._known.get(peer), self._found.known.get(peer)) if known is not None]
        known = max(said, key=lambda known: known.at_s, default=None)
        return known if known is not None and known.at_s + lifetime_s >= self._clock.seconds() else None

    def reached(self, peer: PublicKey, relay: PublicKey) -> None:
        """A transport with ``peer``, sealed, has just gone on over ``relay``: the peer is there, whatever discovery said before.

        Dials that wait for what discovery says now go by that.
        """

        def add(known: Known) -> Known:
            others = tuple(one for one in known.servers if one != relay)
            return replace(known, servers=(relay, *others)[:DELEGATED_SERVERS_LIMIT])

        for table in (self._known, self._found.known):
            table.change(peer, add)
        flight, known = self._flights.get(peer), self._known.get(peer)
        if flight is not None and flight.dialled:
            servers = known.servers if known is not None else (relay,)
            flight.waiting.fire(Known(servers, promised=True, at_s=self._clock.seconds()))

    def doubt(self, peer: PublicKey) -> None:
        """Ask anew next time."""
        self._known.change(peer, lambda known: replace(known, doubted=True))

    @contextmanager
    def holding(self, peer: PublicKey) -> Iterator[None]:
        """Within, a question about ``peer`` goes on also while nothing waits for its answer."""
        self._holders[peer] += 1
        try:
            yield
        finally:
            self._holders[peer] -= 1
            if not self._holders[peer]:
                del self._holders[peer]
                flight = self._flights.get(peer)
                if flight is not None and not flight.waiting:
                    self._give_up(peer)

    async def promised(self, peer: PublicKey, lifetime_s: float) -> bool:
        """Whether the entry of a caller promises end-to-end security, asked for unless known within ``lifetime_s``.

        ``True`` also when there is no entry or no answer, which is remembered in the same way, and when too much has been
        asked about callers (:class:`CallerLimits`).
        """
        for table in (self._known, self._found.known, self._others.known):
            known = self._fresh(table.get(peer), lifetime_s)
            if known is not None:
                return known.promised
        kind = self._found if peer in self._found.known or peer in self._known else self._others
        begins = peer not in self._flights
        if begins and not kind.take(self._clock.seconds()):
            return True
        kind.asking += begins
        try:
            known = await self._fly(peer)
            self._found.known.put(peer, known)
        except DiscoveryError:
            known = Known((), True, self._clock.seconds())
            self._others.known.forget(lambda old: self._fresh(old, lifetime_s) is None)
            self._others.known.put(peer, known)
        finally:
            kind.asking -= begins
        return known.promised

    def ask(self, peer: PublicKey) -> Deferred[Known]:
        """Ask discovery for a dial; fails with a ``DiscoveryError``.

        A question is given up when nothing waits for its answer any more, and nothing holds it.
        """
        return self._fly(peer, dialled=True)

    def _fly(self, peer: PublicKey, *, dialled: bool = False) -> Deferred[Known]:
        flight = self._flights.get(peer)
        if flight is not None:
            flight.dialled |= dialled
            return flight.waiting.wait()
        flight = self._flights[peer] = _Flight(lambda: self._abandoned(peer), self._clock.seconds())
        flight.dialled = dialled
        waiter = flight.waiting.wait()
        flight.asking = ensureDeferred(self._ask(peer))
        flight.asking.addBoth(self._answered, peer, flight)
        return waiter

    def _abandoned(self, peer: PublicKey) -> None:
        if peer not in self._holders:
            self._give_up(peer)

    def _give_up(self, peer: PublicKey) -> None:
        flight = self._flights.pop(peer)
        self._note_silence(flight)
        if flight.asking is not None:
            flight.asking.cancel()

    def _answered(self, answer: Known | Failure, peer: PublicKey, flight: _Flight) -> None:
        if self._flights.get(peer) is flight:
            del self._flights[peer]
            if isinstance(answer, Failure) and answer.check(DiscoveryUnavailable):
                self._note_silence(flight)
            else:
                self._silent_until = 0.0
            if flight.dialled and isinstance(answer, Known):
                self._known.put(peer, answer)
        flight.waiting.fire(answer)

    def _note_silence(self, flight: _Flight) -> None:
        now = self._clock.seconds()
        if now - flight.began_s >= SILENT_AFTER_S:
            self._silent_until = now + SILENCE_S

    async def _ask(self, peer: PublicKey) -> Known:
        entry = await self._discovery.get_entry(peer)
        delegated = entry.client.delegated_servers if entry.client is not None else None
        return Known(tuple(delegated or ()), promises_security(entry.version), self._clock.seconds())
