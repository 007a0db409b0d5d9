"""Look-ups of peers in discovery: one question for all that wait for its answer, which is cached for some seconds."""

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
from dmsg.sansio.rate import TokenBucket, check_limits

T = TypeVar("T")

#: Seconds without an answer to a question after which discovery counts as silent, and seconds for which it then does unless
#: it answers.
SILENT_AFTER_S: Final = 1.0
SILENCE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """Look-ups of callers: peers that ask for a transport in the clear.

    Each limit applies twice: to callers for whom discovery had an entry before, and to all others. So strangers without an
    entry take nothing from peers that have one.
    """

    #: Cached answers: more than there can be look-ups in the five seconds for which an answer is valid.
    entries: int = 1_024
    #: Look-ups under way at one time; per second; and in a burst. Beyond that, a caller is assumed to promise end-to-end
    #: security, as when discovery does not answer. Both kinds together send a tenth of the questions that a discovery answers
    #: one client.
    at_once: int = 8
    per_s: float = 10.0
    burst: int = 25

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True)
class Known:
    """Discovery's answer about a peer at ``at_s``: its relays, and whether it promises end-to-end security."""

    servers: tuple[PublicKey, ...]
    promised: bool
    at_s: float = 0.0
    #: A dial that used this answer has failed: discovery is asked again before the next dial.
    doubted: bool = False


class _Table(Generic[T]):
    """At most ``limit`` items by peer; the one put in longest ago is evicted first."""

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
        """Change the item of ``peer``, if there is one; it keeps its place."""
        thing = self._things.get(peer)
        if thing is not None:
            self._things[peer] = how(thing)

    def forget(self, is_over: Callable[[T], bool]) -> None:
        """Forget the two items put in longest ago if they are over: two, because one item comes in at a time."""
        for _ in range(2):
            oldest = next(iter(self._things), None)
            if oldest is None or not is_over(self._things[oldest]):
                return
            del self._things[oldest]


class _Callers:
    """One of the two kinds of callers: the answers about them, and the limits of questions about them."""

    def __init__(self, limits: CallerLimits, now: float) -> None:
        self.known: _Table[Known] = _Table(limits.entries)
        self.asking = 0
        self._at_once = limits.at_once
        self._bucket = TokenBucket(limits.per_s, limits.burst, now)

    def take(self, now: float) -> bool:
        """Whether another question may be asked now."""
        return self.asking < self._at_once and self._bucket.take(now)


class _Flight:
    """One question under way since ``began_s``, and the Deferreds that wait for its answer."""

    def __init__(self, abandoned: Callable[[], None], began_s: float) -> None:
        self.began_s = began_s
        self.waiting: Waiters[Known] = Waiters(abandoned)
        #: Whether a dial has asked, and not only the look-up of a caller.
        self.dialled = False
        self.asking: Deferred[Known] | None = None


class Lookups:
    """Discovery's last answers about at most ``limit`` peers that were dialled.

    Answers about callers are kept separately, so that no stranger's request makes a dial ask again.
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
        #: Holders of the question about each peer, see :meth:`holding`.
        self._holders: Counter[PublicKey] = Counter()
        self._silent_until = 0.0

    @property
    def is_silent(self) -> bool:
        """Whether discovery has lately failed to answer a question, and has answered none since."""
        return self._clock.seconds() < self._silent_until

    def is_asking(self, peer: PublicKey) -> bool:
        """Whether a question about ``peer`` is under way."""
        return peer in self._flights

    def asked_for_s(self, peer: PublicKey) -> float:
        """How long the question about ``peer`` has been under way; 0 if none is."""
        flight = self._flights.get(peer)
        return self._clock.seconds() - flight.began_s if flight is not None else 0.0

    def known(self, peer: PublicKey, lifetime_s: float) -> Known | None:
        """The answer about ``peer`` for a dial within the last ``lifetime_s`` seconds, if there was one."""
        return self._fresh(self._known.get(peer), lifetime_s)

    def _fresh(self, known: Known | None, lifetime_s: float) -> Known | None:
        if known is None or known.doubted or known.at_s + lifetime_s < self._clock.seconds():
            return None
        return known

    def earlier(self, peer: PublicKey, lifetime_s: float) -> Known | None:
        """The last answer about ``peer`` within ``lifetime_s`` seconds, for use when discovery has no answer."""
        said = [known for known in (self._known.get(peer), self._found.known.get(peer)) if known is not None]
        known = max(said, key=lambda known: known.at_s, default=None)
        return known if known is not None and known.at_s + lifetime_s >= self._clock.seconds() else None

    def reached(self, peer: PublicKey, relay: PublicKey) -> None:
        """A sealed transport with ``peer`` has just gone on over ``relay``: the peer is there, whatever discovery said before.

        Dials that wait for discovery's answer use this relay.
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
        """Ask discovery again next time."""
        self._known.change(peer, lambda known: replace(known, doubted=True))

    @contextmanager
    def holding(self, peer: PublicKey) -> Iterator[None]:
        """Within this context, a question about ``peer`` goes on even while nothing waits for its answer."""
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
        """Whether the entry of a caller promises end-to-end security. Asks unless there is an answer within ``lifetime_s``.

        Also ``True`` when there is no entry or no answer, which is cached in the same way, and when the limits of questions
        about callers are reached (:class:`CallerLimits`).
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

        A question is given up when nothing waits for its answer and nothing holds it.
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
