"""From a public key to an open stream: look up the peer, race its relays, and on failure report all attempts.

:ref:`spec-dialling`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Generic

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.clients.dial import Dial, DialConfig, R
from dmsg.clients.errors import ClientStopped
from dmsg.clients.race import NO_SERVER, Race
from dmsg.clients.sessions import S
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.errors import DiscoveryError, DiscoveryUnavailable
from dmsg.discovery.lookups import Known, Lookups
from dmsg.errors import Attempt, DialError, DmsgError, StageError
from dmsg.eventlog.reasons import Reason
from dmsg.interfaces import IDiscovery
from dmsg.relays.errors import NoCommonRelay, RelayFault, SessionTimeout
from dmsg.relays.pool import SessionPool


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
        self.clock = clock
        self._pool = pool
        self._lookups = Lookups(clock, discovery, config.entries, config.callers) if discovery is not None else None
        self._uniform = uniform
        self._races: dict[Race[S, R], None] = {}  # in the order in which they began
        self._is_stopped = False

    def start(self) -> None:
        """Allow dials again after :meth:`stop`. A new dialer allows them from the start."""
        self._is_stopped = False

    def stop(self) -> None:
        """End the dials under way, and refuse new ones."""
        self._is_stopped = True
        for race in list(self._races):
            race.give_up(Reason.STOPPED, ClientStopped())

    async def dial(self, dial: Dial[S, R], timeout_s: float | None, attempts: list[Attempt]) -> R:
        """The open stream that ``dial`` asks for; all attempts are added to ``attempts``. Raises ``DialError``.

        Cancelling closes everything under way.
        """
        limit_s = self.config.timeout_s if timeout_s is None else timeout_s
        race = Race(self, dial, attempts, self.clock.seconds(), limit_s)
        if self._is_stopped:
            race.note_owing(Reason.STOPPED, ClientStopped())
            raise DialError(str(dial.target), attempts)
        self._races[race] = None
        timer = self.clock.callLater(limit_s, race.give_up, Reason.TIMEOUT, SessionTimeout("the dial", limit_s))
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
        """Within, a look-up in discovery goes on after the dial to ``target`` that began it fails: the next dial needs it."""
        with self._lookups.holding(target) if self._lookups is not None else nullcontext():
            yield

    async def promises(self, peer: PublicKey) -> bool:
        """Whether the signed entry of a peer that asks in the clear promises end-to-end security.

        It counts as promised without discovery, when discovery cannot be reached or has no entry, or when too many look-ups
        are under way: no transport is in the clear because a look-up failed, or because discovery withholds an entry
        (:ref:`spec-downgrade-rule`). Base clients always have an entry.
        """
        if self._lookups is None:
            return True
        return await self._lookups.promised(peer, self.config.entry_lifetime_s)

    async def _run(self, race: Race[S, R]) -> R:
        remembered = self._remembered(race.dial)
        if remembered is None:
            return await self._try(race, *await self._look_up(race))
        try:
            return await self._try(race, remembered, None)
        except DialError as error:
            if self._lookups is None or race.dial.moves or not error.may_have_moved:
                raise
        again, asking = await self._look_up_again(race)
        is_news = again.promised != remembered.promised or set(again.servers) - set(remembered.servers)
        if not is_news and asking is None:  # with it, a transport has found the peer since this dial has not
            raise DialError(str(race.dial.target), race.attempts)
        return await self._try(race, again, asking)

    async def _try(self, race: Race[S, R], known: Known, asking: Deferred[Known] | None) -> R:
        race.known = known
        order = self.order(known.servers, race.dial.ended_by)
        if not order:
            none = NO_SERVER if self._lookups is not None else "there is no discovery, and no server was given"
            race.note("discovery", "", "no common server", NoCommonRelay(none))
            raise DialError(str(race.dial.target), race.attempts)
        if len(order) == 1 and asking is None:
            return await self._only(order[0], race)
        return await race.run(order, asking)

    def stage(self, relay: PublicKey) -> str:
        """The stage that the connection to ``relay`` has reached."""
        return self._pool.stage(relay)

    def order(self, relays: Sequence[PublicKey], ended_by: Sequence[PublicKey]) -> list[PublicKey]:
        """The relays to race, best first, and those of ``ended_by`` last; at most the allowed number of an entry's relays."""
        if len(relays) < 2:
            return list(relays)
        connected, scores, now = self._pool.sessions, self._pool.scores, self.clock.seconds()
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

    def asking(self, target: PublicKey) -> Deferred[Known] | None:
        """The question to discovery about ``target``, if it is under way: also behind what a transport has found."""
        lookups = self._lookups
        return lookups.ask(target) if lookups is not None and lookups.is_asking(target) else None

    async def _look_up_again(self, race: Race[S, R]) -> tuple[Known, Deferred[Known] | None]:
        """Look the peer up again after no relay of a cached entry has led to it, because it may have moved since.

        Returns the same as :meth:`_look_up`.
        """
        assert self._lookups is not None
        target = race.dial.target
        self._lookups.doubt(target)
        with self._lookups.holding(target):
            answer = self._lookups.ask(target)
            answer.addTimeout(self.config.look_up_s, self.clock, lambda *_: self._too_late(target))
            try:
                known = await race.awaiting(answer)
            except DiscoveryError as error:
                race.note_look_up(error)
                raise DialError(str(target), race.attempts) from None
            return known, self.asking(target)

    async def _look_up(self, race: Race[S, R]) -> tuple[Known, Deferred[Known] | None]:
        """The relays to begin with; and the look-up in discovery, if it goes on because other relays are known."""
        assert self._lookups is not None
        target = race.dial.target
        relays, wait_s = self._other_relays(race)
        with self._lookups.holding(target):
            answer = self._lookups.ask(target)
            if relays:
                answer.addTimeout(wait_s, self.clock, lambda *_: self._too_late(target))
            try:
                known = await race.awaiting(answer)
            except DiscoveryError as error:
                race.note_look_up(error)
                if not relays:
                    raise DialError(str(target), race.attempts) from None
                known = Known(relays, promised=True)
            return known, self.asking(target)

    def _other_relays(self, race: Race[S, R]) -> tuple[tuple[PublicKey, ...], float]:
        """The relays to try without an answer of discovery, and how many seconds to wait for an answer.

        The peer may be on one of the pinned relays, which need no discovery, or on those of its last known entry. A peer with
        which we have a transport is probably still on its old relays, or on ours.
        """
        assert self._lookups is not None
        dial, config, pool = race.dial, self.config, self._pool
        wait_s = config.stagger_s if self._lookups.is_silent else config.look_up_s
        earlier = self._lookups.earlier(dial.target, math.inf if dial.moves else config.earlier_entry_lifetime_s)
        if dial.heeds_promise and not (earlier is not None and earlier.promised):
            # A dial in the clear needs a current entry that allows it, and a base peer accepts no other dial.
            earlier, wait_s = None, race.limit_s / 2
        last = earlier.servers if earlier is not None else ()
        relays = (*pool.pinned, *(pool.sessions if dial.moves else ()), *last)
        return tuple(dict.fromkeys(relays)), max(0.0, wait_s - self._lookups.asked_for_s(dial.target))

    def _too_late(self, target: PublicKey) -> Failure:
        assert self._lookups is not None
        return Failure(DiscoveryUnavailable(f"no answer within {self._lookups.asked_for_s(target):.3g} s"))

    async def _only(self, relay: PublicKey, race: Race[S, R]) -> R:
        try:
            return await self.attempt(relay, race)
        except StageError as error:
            race.owing.pop(relay)
            race.note(error.stage, str(relay), error.reason, error.error or error)
            raise DialError(str(race.dial.target), race.attempts) from None

    async def attempt(self, relay: PublicKey, race: Race[S, R]) -> R:
        """Try one relay; raises ``StageError``."""
        race.owing[relay] = "connect"
        session = await race.awaiting(self._pool.get(relay))
        race.owing[relay] = "accept"
        scores, clock = self._pool.scores, self.clock
        asked = clock.seconds()
        try:
            opened = await race.awaiting(race.dial.through(session, promised=race.known.promised))
        except CancelledError:
            waited_s = clock.seconds() - asked
            if waited_s >= self.config.stagger_s:  # a relay that began later was faster, or the time was up
                scores.answered(relay, waited_s * 1000, clock.seconds())
            raise
        except StageError as error:
            if isinstance(error.error, RelayFault):
                scores.refused(relay, clock.seconds())
            raise
        scores.answered(relay, opened.accept_ms, clock.seconds())
        if self._lookups is not None and race.dial.moves:  # in this kind of dial the peer has proved its key
            self._lookups.reached(race.dial.target, relay)
        return opened


def attempts_json(attempts: list[Attempt]) -> str:
    """The attempts as JSON for the event log, without texts from the other side."""
    known = [one.as_dict() | {"reason": Reason.of(one.reason), "detail": _detail(one.error)} for one in attempts]
    return json.dumps(known, separators=(",", ":"))


def _detail(error: BaseException | None) -> str:
    return "" if error is None else error.own_text if isinstance(error, DmsgError) else str(error)
