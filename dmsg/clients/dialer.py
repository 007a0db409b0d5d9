"""From a public key to an open stream: look up, race the relays, and if it fails say everything that was tried.

:ref:`spec-dialling`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar
from typing import Protocol as TypingProtocol

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from dmsg.clients.errors import ClientStopped
from dmsg.clients.sessions import S
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.errors import DiscoveryError, DiscoveryUnavailable, EntryNotFound
from dmsg.discovery.lookups import CallerLimits, Known, Lookups
from dmsg.errors import Attempt, DialError, DmsgError, StageError
from dmsg.eventlog.reasons import Reason
from dmsg.interfaces import IDiscovery
from dmsg.relays.errors import NoCommonRelay, RelayFault, SessionTimeout
from dmsg.relays.pool import SessionPool

_NO_SERVER: Final = "the entry names no server to go through"


@dataclass(frozen=True, slots=True)
class DialConfig:
    """Times of a dial, in seconds."""

    #: For the whole dial.
    timeout_s: float = 10.0
    #: The next server is tried when the one before has not answered for so long.
    stagger_s: float = 0.25
    #: The same for a relay that has ended an earlier path of the transport that looks for one: enough for two round trips
    #: through any other. It is waited also when the one before has failed and another one has not.
    ended_stagger_s: float = 1.0
    #: So many of the servers an entry names are tried, those connected already above all: an entry is a stranger's word.
    servers: int = 8
    #: How long an entry that was looked up is used again without asking.
    entry_lifetime_s: float = 5.0
    #: The same when a transport looks for another path: the peer has probably just moved, but all its transports have.
    resume_entry_lifetime_s: float = 0.2
    #: Where there is something else to go by, the dial begins with that when discovery has not answered for so long.
    look_up_s: float = 1.0
    #: How old an entry may be that such a dial goes by: as old as the entries of clients that discovery hands out.
    earlier_entry_lifetime_s: float = 21_600.0
    #: Entries kept for all this.
    entries: int = 1_024
    callers: CallerLimits = field(default_factory=CallerLimits)


@dataclass(frozen=True, slots=True)
class OpenedStream(Generic[S]):
    """What a dial came to: the session, the open stream, and how long the peer took to answer."""

    session: S
    stream: Any
    accept_ms: float


T = TypeVar("T")
R = TypeVar("R", bound=OpenedStream[Any])
S_contra = TypeVar("S_contra", contravariant=True)


class Dial(TypingProtocol[S_contra, R]):
    """One dial, as its protocol makes it."""

    @property
    def target(self) -> PublicKey:
        """The peer."""

    @property
    def moves(self) -> bool:
        """Whether it looks for another path of a transport that has lost its own."""

    @property
    def heeds_promise(self) -> bool:
        """Whether the peer's entry decides: it is spoken to in the clear unless that promises end-to-end security."""

    @property
    def ended_by(self) -> Sequence[PublicKey]:
        """The relays that have ended earlier paths of that transport, the last one at the end: any other is preferred."""

    def through(self, session: S_contra, *, promised: bool) -> Deferred[R]:
        """Open a stream through ``session``; ``promised`` is whether the peer's entry promises end-to-end security.

        Raises ``StageError``, or fails with it. Cancelling undoes it.
        """


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A dial of a protocol of which nothing more can be said."""

    target: PublicKey
    service: str = ""
    moves: bool = False
    heeds_promise: bool = False
    ended_by: Sequence[PublicKey] = ()

    def through(self, session: Any, *, promised: bool) -> Deferred[Any]:
        """Ask the session: ``request(target, service)``."""
        opened: Deferred[Any] = session.request(self.target, self.service)
        return opened


class Dialer(Generic[S, R]):
    """Dials by key through a pool of sessions."""

    def __init__(
        self,
        clock: IReactorTime,
        pool: SessionPool[S],
        discovery: IDiscovery | None,
        config: DialConfig,
        uniform: Callable[[], float],
    ) -> None:
        self.config = config
        self._clock = clock
        self._pool = pool
        self._lookups = Lookups(clock, discovery, config.entries, config.callers) if discovery is not None else None
        self._uniform = uniform
        self._races: dict[_Race[S, R], None] = {}  # in the order in which they began
        self._is_stopped = False

    def start(self) -> None:
        """Dial again after :meth:`stop`; a new one dials at once."""
        self._is_stopped = False

    def stop(self) -> None:
        """End the dials that are under way, and begin no others."""
        self._is_stopped = True
        for race in list(self._races):
            race.give_up(Reason.STOPPED, ClientStopped())

    async def dial(self, dial: Dial[S, R], timeout_s: float | None, attempts: list[Attempt]) -> R:
        """An open stream as ``dial`` says; what was tried is added to ``attempts``. Raises ``DialError``.

        Cancelling closes whatever was under way.
        """
        limit_s = self.config.timeout_s if timeout_s is None else timeout_s
        race = _Race(self, dial, attempts, self._clock.seconds(), limit_s)
        if self._is_stopped:
            race.note_owing(Reason.STOPPED, ClientStopped())
            raise DialError(str(dial.target), attempts)
        self._races[race] = None
        timer = self._clock.callLater(limit_s, race.give_up, Reason.TIMEOUT, SessionTimeout("the dial", limit_s))
        try:
            return await self._run(race)
        except CancelledError:
            if race.given_up is None:
                raise
            race.note_owing(*race.given_up)
            self._forget(dial)
            raise DialError(str(dial.target), attempts) from None
        except DialError:
            self._forget(dial)
            raise
        finally:
            del self._races[race]
            if timer.active():
                timer.cancel()

    def _forget(self, dial: Dial[S, R]) -> None:
        if self._lookups is not None and not dial.moves:
            self._lookups.doubt(dial.target)

    @contextmanager
    def searching(self, target: PublicKey) -> Iterator[None]:
        """Within, a question to discovery goes on when the dial to ``target`` that asked it fails: the next one needs it."""
        with self._lookups.holding(target) if self._lookups is not None else nullcontext():
            yield

    async def promises(self, peer: PublicKey) -> bool:
        """Whether the signed entry of a peer that asks in the clear promises end-to-end security.

        Without discovery, when it cannot be reached, when it says that there is no entry, or when too much has been
        asked already, it counts as promised: no peer is spoken to in the clear because a look-up failed, or because
        discovery keeps an entry back (:ref:`spec-downgrade-rule`). Base clients always have one.
        """
        if self._lookups is None:
            return True
        return await self._lookups.promised(peer, self.config.entry_lifetime_s)

    async def _run(self, race: _Race[S, R]) -> R:
        remembered = self._remembered(race.dial)
        if remembered is None:
            return await self._try(race, *await self._look_up(race))
        try:
            return await self._try(race, remembered, None)
        except DialError as error:
            if self._lookups is None or race.dial.moves or not error.may_have_moved:
                raise
        again = await self._look_up_again(race)
        if again.promised == remembered.promised and not set(again.servers) - set(remembered.servers):
            raise DialError(str(race.dial.target), race.attempts)
        return await self._try(race, again, None)

    async def _try(self, race: _Race[S, R], known: Known, asking: Deferred[Known] | None) -> R:
        race.known = known
        order = self.order(known.servers, race.dial.ended_by)
        if not order:
            none = _NO_SERVER if self._lookups is not None else "there is no discovery, and no server was given"
            race.note("discovery", "", "no common server", NoCommonRelay(none))
            raise DialError(str(race.dial.target), race.attempts)
        if len(order) == 1 and asking is None:
            return await self._only(order[0], race)
        return await race.run(order, asking)

    def order(self, relays: Sequence[PublicKey], ended_by: Sequence[PublicKey]) -> list[PublicKey]:
        """The relays to race, best first; of those an entry names, so many as may be tried. Those of ``ended_by`` are last."""
        if len(relays) < 2:
            return list(relays)
        connected, scores, now = self._pool.sessions, self._pool.scores, self._clock.seconds()
        if self._lookups is not None and len(relays) > self.config.servers:
            drawn = scores.draw(relays, self._uniform, now)
            relays = sorted(drawn, key=lambda relay: relay not in connected)[: self.config.servers]
        order = scores.best_first(relays, connected, self._uniform, now)
        return sorted(order, key=lambda relay: ended_by.index(relay) if relay in ended_by else -1)

    def _remembered(self, dial: Dial[S, R]) -> Known | None:
        """What is known without asking discovery."""
        if self._lookups is None:
            pinned, sessions = self._pool.pinned, self._pool.sessions
            return Known((*sessions, *(one for one in pinned if one not in sessions)), promised=True)
        lifetime_s = self.config.resume_entry_lifetime_s if dial.moves else self.config.entry_lifetime_s
        return self._lookups.known(dial.target, lifetime_s)

    async def _look_up_again(self, race: _Race[S, R]) -> Known:
        """What discovery says now that no relay of a remembered entry has led to the peer: it may have moved since."""
        assert self._lookups is not None
        target = race.dial.target
        self._lookups.doubt(target)
        with self._lookups.holding(target):
            answer = self._lookups.ask(target)
            answer.addTimeout(self.config.look_up_s, self._clock, lambda *_: self._too_late(target))
            try:
                return await race.awaiting(answer)
            except DiscoveryError as error:
                race.note_look_up(error)
                raise DialError(str(target), race.attempts) from None

    async def _look_up(self, race: _Race[S, R]) -> tuple[Known, Deferred[Known] | None]:
        """What to go by; and the question to discovery, if it goes on because there is something else to begin with."""
        assert self._lookups is not None
        target = race.dial.target
        relays, wait_s = self._other_relays(race)
        with self._lookups.holding(target):
            answer = self._lookups.ask(target)
            if relays:
                answer.addTimeout(wait_s, self._clock, lambda *_: self._too_late(target))
            try:
                return await race.awaiting(answer), None
            except DiscoveryError as error:
                race.note_look_up(error)
                if not relays:
                    raise DialError(str(target), race.attempts) from None
                asking = self._lookups.ask(target) if self._lookups.is_asking(target) else None
                return Known(relays, promised=True), asking

    def _other_relays(self, race: _Race[S, R]) -> tuple[tuple[PublicKey, ...], float]:
        """The relays to try without an answer of discovery's, and how long to wait for one, in seconds.

        Pinned relays need no discovery: the peer may be on one of them. It may also be where it was when discovery last
        knew it. And a peer we have a transport with is probably still where it was, or where we are.
        """
        assert self._lookups is not None
        dial, config, pool = race.dial, self.config, self._pool
        wait_s = config.stagger_s if self._lookups.is_silent else config.look_up_s
        earlier = self._lookups.earlier(dial.target, math.inf if dial.moves else config.earlier_entry_lifetime_s)
        if dial.heeds_promise and not (earlier is not None and earlier.promised):
            # In the clear a peer is spoken to only if its entry says so now, and a base peer takes nothing else.
            earlier, wait_s = None, race.limit_s / 2
        last = earlier.servers if earlier is not None else ()
        relays = (*pool.pinned, *(pool.sessions if dial.moves else ()), *last)
        return tuple(dict.fromkeys(relays)), max(0.0, wait_s - self._lookups.asked_for_s(dial.target))

    def _too_late(self, target: PublicKey) -> Failure:
        assert self._lookups is not None
        return Failure(DiscoveryUnavailable(f"no answer within {self._lookups.asked_for_s(target):.3g} s"))

    async def _only(self, relay: PublicKey, race: _Race[S, R]) -> R:
        try:
            return await self.attempt(relay, race)
        except StageError as error:
            race.owing.pop(relay)
            race.note(error.stage, str(relay), error.reason, error.error or error)
            raise DialError(str(race.dial.target), race.attempts) from None

    async def attempt(self, relay: PublicKey, race: _Race[S, R]) -> R:
        """Try one relay; raises ``StageError``."""
        race.owing[relay] = "connect"
        session = await race.awaiting(self._pool.get(relay))
        race.owing[relay] = "accept"
        scores, clock = self._pool.scores, self._clock
        asked = clock.seconds()
        try:
            opened = await race.awaiting(race.dial.through(session, promised=race.known.promised))
        except CancelledError:
            waited_s = clock.seconds() - asked
            if waited_s >= self.config.stagger_s:  # another one was faster although it began later, or time was up
                scores.answered(relay, waited_s * 1000, clock.seconds())
            raise
        except StageError as error:
            if isinstance(error.error, RelayFault):
                scores.refused(relay, clock.seconds())
            raise
        scores.answered(relay, opened.accept_ms, clock.seconds())
        return opened


class _Race(Generic[S, R]):
    """One dial over several relays: they start one after another, the first that gets through wins (RFC 8305)."""

    def __init__(
        self, dialer: Dialer[S, R], dial: Dial[S, R], attempts: list[Attempt], started: float, limit_s: float
    ) -> None:
        self.dial = dial
        #: The time of the whole dial.
        self.limit_s = limit_s
        self.known = Known((), promised=True)
        self.attempts = attempts
        #: Relays that were begun with and have not failed, and the stage each has got to.
        self.owing: dict[PublicKey, str] = {}
        self._dialer = dialer
        self._started = started
        self._running: dict[PublicKey, Deferred[R]] = {}
        self._waiting: list[PublicKey] = []
        self._timer: IDelayedCall | None = None
        self._begun_at_s = 0.0  # when the last relay was begun with
        self._done: Deferred[R]  # once relays race
        self._is_running = False
        self._awaited: Deferred[Any] | None = None
        #: The question to discovery, while it is under way beside what was begun without its answer.
        self._asking: Deferred[Known] | None = None
        #: Why the whole dial was given up, if it was.
        self.given_up: tuple[Reason, DmsgError] | None = None

    def awaiting(self, step: Deferred[T]) -> Deferred[T]:
        """Gives ``step``, which the dial waits for next. While relays race, it waits for the race and not for their steps."""
        if not self._is_running:
            self._awaited = step
        return step

    def give_up(self, reason: Reason, error: DmsgError) -> None:
        """End the dial for ``reason``: give up what it waits for."""
        self.given_up = reason, error
        for relay, stage in self.owing.items():
            if stage == "connect":
                self.owing[relay] = self._dialer._pool.stage(relay)
        if self._awaited is not None:
            self._awaited.cancel()

    def note_owing(self, reason: Reason, error: DmsgError) -> None:
        """Note ``reason`` for what had not come to anything when the dial was given up."""
        for relay, stage in ({str(relay): stage for relay, stage in self.owing.items()} or {"": "discovery"}).items():
            self.note(stage, relay, reason, error)

    def note(self, stage: str, relay: str, reason: str, error: BaseException | None) -> None:
        """Add to the tree of attempts."""
        elapsed_ms = (self._dialer._clock.seconds() - self._started) * 1000
        self.attempts.append(Attempt(stage, relay, elapsed_ms, reason, error))

    def note_look_up(self, error: DiscoveryError) -> None:
        """Add to the tree that discovery did not say where the peer is."""
        self.note("discovery", "", "no entry" if isinstance(error, EntryNotFound) else "unavailable", error)

    def run(self, relays: list[PublicKey], asking: Deferred[Known] | None) -> Deferred[R]:
        """Fires with the first to get through; fails with ``DialError`` when none did.

        With the answer to ``asking`` the relays that it names take the place of those that were not begun with.
        """
        self._done = self._awaited = Deferred(lambda _: self._stop())
        self._done.addBoth(self._ended)
        self._is_running = True
        self._waiting = relays
        if asking is not None:
            self._asking = asking
            asking.addCallbacks(self._told, self._not_told)
        self._next()
        return self._done

    def _ended(self, result: R | Failure) -> R | Failure:
        self._is_running = False
        return result

    def _told(self, known: Known) -> None:
        if self._asking is None:
            return  # the race is over
        self._asking = None
        if self.dial.heeds_promise and not known.promised:
            for relay, attempt in list(self._running.items()):  # begun as if it was promised
                self.owing.pop(relay)
                attempt.cancel()
        self.known = known
        if not known.servers:
            self.note("discovery", "", "no common server", NoCommonRelay(_NO_SERVER))
        # also those that have failed: the peer may be there now, or be spoken to in another way
        order = self._dialer.order(known.servers, self.dial.ended_by)
        self._waiting = [relay for relay in order if relay not in self._running]
        if self._running:
            self._set_timer()
        else:
            self._next()
        self._look()

    def _not_told(self, failure: Failure) -> None:
        if self._asking is None:
            return
        self._asking = None
        if isinstance(failure.value, DiscoveryError):
            self.note_look_up(failure.value)
        else:
            self.note("discovery", "", type(failure.value).__name__, failure.value)
        self._look()

    def _look(self) -> None:
        """End the race if nothing is left to wait for; a transport waits for discovery in its next search instead."""
        if self._waiting or self._running or self._done.called:
            return
        if self._asking is None or self.dial.moves:
            self._stop()
            self._done.errback(DialError(str(self.dial.target), self.attempts))

    def _next(self) -> None:
        self._stop_timer()
        if not self._waiting or self._done.called:
            return
        relay = self._waiting.pop(0)
        self._begun_at_s = self._dialer._clock.seconds()
        self._set_timer()
        attempt = self._running[relay] = ensureDeferred(self._dialer.attempt(relay, self))
        attempt.addCallbacks(self._won, self._failed, callbackArgs=(relay,), errbackArgs=(relay,))

    def _set_timer(self) -> None:
        """Begin with the next relay when the one begun with last has had its time to answer."""
        self._stop_timer()
        if self._waiting:
            config, clock = self._dialer.config, self._dialer._clock
            stagger_s = config.ended_stagger_s if self._waiting[0] in self.dial.ended_by else config.stagger_s
            wait_s = self._begun_at_s + stagger_s - clock.seconds()
            self._timer = clock.callLater(max(0.0, wait_s), self._next)

    def _won(self, opened: R, relay: PublicKey) -> None:
        self._running.pop(relay, None)
        if self._done.called:
            opened.session.abort_stream(opened.stream)  # another dial was faster in the same turn
            return
        self._stop()
        self._done.callback(opened)

    def _failed(self, failure: Failure, relay: PublicKey) -> None:
        self._running.pop(relay, None)
        if self._done.called or failure.check(CancelledError):
            return
        self.owing.pop(relay, None)
        error = failure.value
        if isinstance(error, StageError):
            self.note(error.stage, str(relay), error.reason, error.error or error)
        else:
            self.note("connect", str(relay), type(error).__name__, error)
        if not self._waiting:
            self._look()
        elif not self._running or self._waiting[0] not in self.dial.ended_by:
            self._next()  # else its time comes, unless another relay answers before

    def _stop(self) -> None:
        self._waiting = []
        self._stop_timer()
        asking, self._asking = self._asking, None
        if asking is not None:
            asking.cancel()
        for attempt in list(self._running.values()):
            attempt.cancel()

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None and timer.active():
            timer.cancel()


def attempts_json(attempts: list[Attempt]) -> str:
    """The tree of attempts as the event log carries it: without a word that another side said."""
    known = [one.as_dict() | {"reason": Reason.of(one.reason), "detail": _detail(one.error)} for one in attempts]
    return json.dumps(known, separators=(",", ":"))


def _detail(error: BaseException | None) -> str:
    return "" if error is None else error.own_text if isinstance(error, DmsgError) else str(error)
