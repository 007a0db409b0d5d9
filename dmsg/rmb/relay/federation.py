"""Brings envelopes to the relays of their destinations: which relay, when, how often, and what the sender is told.

:ref:`spec-rmb-federation`. An envelope is offered to one relay after the other, starting with those that failed least in the
last hour. It makes up to three such passes with short pauses, then more after longer pauses, until it expires. A relay that
refuses the envelope for good is not asked again, but the others are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.errors import DmsgError
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import Event, FederationAttempted, RelayRankChanged
from dmsg.glue.in_turns import in_turns
from dmsg.glue.waiters import Waiters
from dmsg.rmb.core.errors import RelayProblem
from dmsg.rmb.core.ranker import Ranker
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope
from dmsg.rmb.relay.errors import NotPosted
from dmsg.rmb.relay.lanes import Lane, Outgoing, all_closed
from dmsg.rmb.relay.peering import BATCH_BYTES
from dmsg.rmb.relay.resting import AT_ONCE, Resting
from dmsg.rmb.relay.shares import Shares
from dmsg.rmb.relay.turns import Turns
from dmsg.sansio.backoff import Backoff
from dmsg.sansio.jitter import RandomNumbers

ACCEPTED: Final = 202
#: A relay's answer to an envelope only for a connected session, if it does not have that session.
_NOT_HERE: Final = 404
_TOO_LONG: Final = 413
#: Answers of 400 to 499 that are temporary: timeout, too early, too many requests.
_PASSING: Final = frozenset((408, 425, 429))
#: Reasons of failed posts whose envelopes have certainly not been taken.
_NOT_SENT: Final = frozenset(
    (Reason.HOST_NOT_FOUND, Reason.CONNECTION_REFUSED, Reason.TLS_FAILED, Reason.NO_DESCRIPTOR)
)
_SWEPT_EVERY_S: Final = 1.0
#: Seconds between two events about the failure rate of a relay.
RANK_TOLD_EVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class FederationLimits:
    """How much may be under way, and when to retry."""

    #: Outstanding bytes. One sender, and one relay, may have half of them. When all are used, or a relay has its half, the
    #: latest envelopes of the sender with the most bytes there fail to make room for a sender with less; when a sender has its
    #: half, those for the relay with the most of it make room for another relay.
    outstanding_bytes: int = 64 << 20
    #: Posts under way, each over a connection, to one relay and to all relays. Above that, relays take turns.
    posts_per_relay: int = 4
    posts: int = 512
    #: Of all, those to relays that have not answered yet, or not always within a second the last 16 times.
    other_posts: int = 384
    #: Envelopes and bytes in a post to a relay that accepts several.
    batch_envelopes: int = 256
    batch_bytes: int = BATCH_BYTES
    #: Passes over a twin's relays before a longer pause, and the pause after the first pass. The pause grows by as much with
    #: each pass, and up to half of it is added at random.
    passes: int = 3
    pause_s: float = 0.1
    #: Failures in a row after which a relay is not tried for a while. The backoff is for that, and for envelopes that have
    #: made all their passes.
    failures_to_close: int = 3
    backoff: Backoff = field(default_factory=lambda: Backoff(3.0, 30.0, 1.0, 0.5))


class Poster(Protocol):
    """How envelopes get to another relay: :class:`dmsg.rmb.relay.posting.RelayPoster`."""

    def knows(self, relay: str) -> bool:
        """Whether ``relay`` and this one trust each other, so that it accepts several envelopes and ``connected_only``."""

    def post(self, relay: str, envelopes: Sequence[bytes], connected_only: bool) -> Deferred[list[int]]:
        """Fires with the HTTP status of each envelope, or fails with :class:`~dmsg.rmb.relay.errors.NotPosted`."""


class Federation:
    """Envelopes under way to other relays.

    ``registry`` is an :class:`~dmsg.rmb.interfaces.ITwinRegistry`; ``unix_time()`` is Unix time; ``domains`` are this
    relay's own names. ``failed(envelope, problem)`` is called for each envelope that was not delivered, and tells its sender.
    ``emit`` takes events.
    """

    def __init__(
        self,
        poster: Poster,
        registry: Any,
        ranker: Ranker,
        clock: IReactorTime,
        random: RandomNumbers,
        *,
        unix_time: Callable[[], float],
        domains: Collection[str],
        failed: Callable[[Envelope, RelayProblem], None],
        emit: Callable[[Event], None],
        limits: FederationLimits | None = None,
    ) -> None:
        self.limits = limits or FederationLimits()
        self._poster = poster
        self._registry = registry
        self._ranker = ranker
        self._clock = clock
        self._random = random
        self._unix_time = unix_time
        self._domains = frozenset(domain.lower() for domain in domains)
        self._failed = failed
        self._emit = emit
        self._outstanding: dict[Outgoing, IDelayedCall | None] = {}
        self._shares = Shares(self.limits.outstanding_bytes)
        self._lanes: dict[str, Lane] = {}
        self._resting = Resting(clock, self._next_pass)
        #: The posts under way, and the lanes that wait for a turn; and whether these are being given their turns.
        self._turns = Turns(self.limits.posts, self.limits.other_posts)
        self._calling = False
        self._sweeping: IDelayedCall | None = None
        self._idle: Waiters[None] = Waiters()
        self._stopped = False
        #: Envelopes that other relays took.
        self.accepted = 0

    def __len__(self) -> int:
        return len(self._outstanding)

    def submit(
        self, envelope: Envelope, data: bytes, twin: Twin, expires_at: float, moved_here: Callable[[bool], None]
    ) -> RelayProblem | None:
        """Bring ``data`` to one of the relays of ``twin``, its destination, before ``expires_at`` (Unix seconds).

        Returns the reason if it is not even tried, or ``None``. After ``None``, ``failed`` is called if the delivery fails, or
        ``moved_here`` if the twin is found to use this relay now, with whether another relay may have taken ``data`` without
        confirming it.

        If there are several relays, those that know this one are asked for the connected session first: any relay would store
        ``data``, though the destination may be connected to another one.
        """
        relays = self._relays(twin)
        known = self._to_ask(relays)
        outgoing = Outgoing(envelope, data, twin, expires_at, moved_here=moved_here, connected_only=bool(known))
        return self._start(outgoing, known or relays)

    def elsewhere(
        self, envelope: Envelope, data: bytes, twin: Twin, expires_at: float, otherwise: Callable[[bool], None]
    ) -> bool:
        """Bring ``data`` to a relay that the destination is connected to now, or call ``otherwise``.

        For an envelope whose destination names this relay too, but is not connected here. Only relays that know this one can
        be asked. ``False`` means that there is none to ask, and ``otherwise`` is not called. ``otherwise`` is told whether a
        relay may have taken ``data`` without confirming it.
        """
        known = [relay for relay in self._relays(twin) if self._poster.knows(relay)]
        outgoing = Outgoing(envelope, data, twin, expires_at, otherwise, connected_only=True)
        return bool(known) and self._start(outgoing, known) is None

    async def stop(self, limit_s: float) -> None:
        """Accept nothing more, and return when nothing is under way. Envelopes under way after ``limit_s`` seconds fail.

        Envelopes in a longer pause after their passes fail at once.
        """
        self._stopped = True
        await in_turns(self._outstanding, self._give_up_resting, self._clock)
        if self._outstanding:
            await self._idle.wait_at_most(limit_s, self._clock)
        await in_turns(self._outstanding, self._give_up_last, self._clock)
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None

    # --- which relay -----------------------------------------------------------------------------------------------

    def _relays(self, twin: Twin) -> list[str]:
        """The relays to which an envelope for ``twin`` may go, without this one. Names are compared without regard to case."""
        names = dict.fromkeys(relay.lower() for relay in twin.relays)
        return [relay for relay in names if relay not in self._domains]

    def _to_ask(self, relays: list[str]) -> list[str]:
        """The relays of a twin that are asked for its connected session before any relay stores the envelope."""
        return [relay for relay in relays if self._poster.knows(relay)] if len(relays) > 1 else []

    def _start(self, outgoing: Outgoing, relays: list[str]) -> RelayProblem | None:
        if not relays:
            return RelayProblem.NO_RELAYS
        order = self._ranker.order(relays, self._clock.seconds())
        size = outgoing.size
        if self._stopped or not self._make_room(outgoing.source, order[0], size):
            return RelayProblem.OVERLOADED
        self._shares.add(outgoing, order[0])
        self._outstanding[outgoing] = None
        if self._sweeping is None:
            self._sweeping = self._clock.callLater(_SWEPT_EVERY_S, self._sweep)
        outgoing.candidates = order[::-1]
        self._advance(outgoing)
        return None

    def _make_room(self, source: int, relay: str, size: int) -> bool:
        """Whether there is room, if need be after envelopes have been given up for it."""
        for surplus in self._shares.room_for(source, relay, size):
            if surplus is None:
                return False
            self._give_up(surplus, RelayProblem.OVERLOADED)
        return True

    def _advance(self, outgoing: Outgoing) -> None:
        """Queue the envelope for the next relay of this pass, or let it wait for the next pass."""
        now = self._clock.seconds()
        while outgoing.candidates:
            relay = outgoing.candidates.pop()
            lane = self._lanes.get(relay)
            if lane is None:
                lane = self._lanes[relay] = Lane(self.limits.failures_to_close, self.limits.backoff)
            if not lane.closed(now):
                # It no longer counts for the relay that refused it, so that it takes no room from that relay's envelopes.
                self._shares.charge(outgoing, relay)
                lane.put(outgoing)
                self._pump(relay, lane)
                return
        if outgoing.otherwise is not None:
            self._finish(outgoing)
            outgoing.otherwise(outgoing.in_doubt)
            return
        if outgoing.connected_only:  # no relay that was asked has the session: now any may store the envelope
            outgoing.connected_only = False
            self._pass(outgoing)
            return
        left = self._left(outgoing)
        if left:
            self._rest(outgoing, left, now)
            return
        # Relays also refuse an envelope that has expired on its way.
        problem = RelayProblem.REJECTED
        if self._unix_time() >= outgoing.expires_at:
            problem = RelayProblem.EXPIRED
        elif set(outgoing.rejected.values()) == {_TOO_LONG}:
            problem = RelayProblem.TOO_LARGE
        self._give_up(outgoing, problem)

    def _rest(self, outgoing: Outgoing, left: Collection[str], now: float) -> None:
        """Wait for the next pass. While none of the relays that are ``left`` may be tried, no pass counts."""
        closed = all_closed(map(self._lanes.get, left), now)
        rounds = number = 0
        if not closed:
            outgoing.passes += 1
            rounds, number = divmod(outgoing.passes, self.limits.passes)
        outgoing.resting = not number
        if outgoing.resting and self._stopped:
            self._give_up(outgoing, RelayProblem.OVERLOADED)
            return
        if closed:
            self._outstanding[outgoing] = None
            self._resting.add(outgoing, closed)
            return
        if number:
            pause_s = self.limits.pause_s * number * (1 + self._random.random() / 2)
        else:
            pause_s = self.limits.backoff.pause_s(rounds, self._random.random)
        pause_s = min(pause_s, max(0.0, outgoing.expires_at - self._unix_time()))
        self._outstanding[outgoing] = self._clock.callLater(pause_s, self._next_pass, outgoing)

    def _left(self, outgoing: Outgoing) -> list[str]:
        return [relay for relay in self._relays(outgoing.twin) if relay not in outgoing.rejected]

    def _next_pass(self, outgoing: Outgoing) -> None:
        self._outstanding[outgoing] = None
        has_rested, outgoing.resting = outgoing.resting, False
        if self._unix_time() >= outgoing.expires_at:
            self._give_up(outgoing, RelayProblem.EXPIRED)
        elif has_rested:
            Deferred.fromCoroutine(self._look_up(outgoing))
        else:
            self._pass(outgoing)

    async def _look_up(self, outgoing: Outgoing) -> None:
        """Look the twin up again, because it may have moved during the long pause."""
        try:
            twin = await self._registry.get(outgoing.twin.id)
        except DmsgError:  # the registry does not answer now
            twin = outgoing.twin
        if outgoing.done:
            return
        if twin is None:
            self._give_up(outgoing, RelayProblem.UNKNOWN_TWIN_LATER)
            return
        outgoing.twin = twin
        if outgoing.moved_here is not None and not self._domains.isdisjoint(map(str.lower, twin.relays)):
            self._finish(outgoing)
            outgoing.moved_here(outgoing.in_doubt)
        elif self._relays(twin):
            self._ask(outgoing)
        else:
            self._give_up(outgoing, RelayProblem.NO_RELAYS_LATER)

    def _ask(self, outgoing: Outgoing) -> None:
        """Start over by asking for the session: the twin may have connected to another of its relays, or have new ones."""
        known = self._to_ask(self._left(outgoing))
        if not known:
            self._pass(outgoing)
            return
        outgoing.connected_only = True
        outgoing.candidates = self._ranker.order(known, self._clock.seconds())[::-1]
        self._advance(outgoing)

    def _pass(self, outgoing: Outgoing) -> None:
        now, ranker, poster = self._clock.seconds(), self._ranker, self._poster
        order = ranker.order(self._left(outgoing), now)
        # Relays that know this one come later among equals: they have said that they do not have the session.
        outgoing.candidates = sorted(order, key=lambda relay: (ranker.rate(relay, now), poster.knows(relay)))[::-1]
        self._advance(outgoing)

    # --- posting ---------------------------------------------------------------------------------------------------

    def _pump(self, relay: str, lane: Lane) -> None:
        limits = self.limits
        if lane.pumping or lane.clearing:
            return  # a post failed at once: the loop below goes on
        lane.pumping = True
        unasked = 0
        while lane and lane.posting < limits.posts_per_relay:
            if not self._turns.has_room(relay):
                self._turns.wait(relay, lane)
                break
            knows = self._poster.knows(relay)
            batch = lane.take(limits.batch_envelopes if knows else 1, limits.batch_bytes)
            if batch[0].connected_only and not knows:  # no longer known since it was queued; the relay would store it
                self._advance(batch[0])
                unasked += 1
                if unasked == AT_ONCE:
                    lane.clearing = True
                    self._clock.callLater(0, self._clear, relay, lane)
                    break
                continue
            lane.posting += 1
            was_prompt = self._turns.begin(relay)
            posted = self._poster.post(relay, [outgoing.data for outgoing in batch], batch[0].connected_only)
            posted.addBoth(self._posted, relay, lane, batch, self._clock.seconds(), was_prompt)
        lane.pumping = False

    def _posted(
        self, outcome: Any, relay: str, lane: Lane, batch: list[Outgoing], began: float, was_prompt: bool
    ) -> None:
        lane.posting -= 1
        took_s = self._clock.seconds() - began if isinstance(outcome, list) else None
        try:
            self._heard(outcome, relay, lane, batch, began)
        finally:  # only now, so that envelopes which go to another relay do not take the place before lanes that wait for it
            self._turns.end(relay, was_prompt, took_s)
        if self._turns:
            self._turns.wait(relay, lane)
            self._call_next()
        else:
            self._pump(relay, lane)

    def _heard(self, outcome: Any, relay: str, lane: Lane, batch: list[Outgoing], began: float) -> None:
        now, failed = self._clock.seconds(), len(batch)
        if isinstance(outcome, list):
            asked = batch[0].connected_only
            told = [status for status in outcome if not (asked and status == _NOT_HERE)]
            reason, failed = _reason(told), len(told)
            lane.answered()
            self._resting.wake(lane)
        else:
            outcome.trap(NotPosted)
            reason = outcome.value.reason
            lane.failed(now, self._random.random)
            outcome = [0] * len(batch)
        failures = any(not 400 <= status < 500 and status != ACCEPTED for status in outcome)
        if failures and reason is not Reason.NO_DESCRIPTOR:  # which is our own fault
            self._ranker.failed(relay, now)
        ok = outcome.count(ACCEPTED)
        elapsed_ms = (now - began) * 1000
        if ok:
            self._emit(FederationAttempted(relay, True, Reason.NONE, elapsed_ms, ok))
        if failed > ok:
            self._emit(FederationAttempted(relay, False, reason, elapsed_ms, failed - ok))
        self._tell_rank(relay, lane, now)
        for outgoing, status in zip(batch, outcome, strict=True):
            if outgoing.done:
                continue
            if status == ACCEPTED:
                self.accepted += 1
                self._finish(outgoing)
                continue
            if not 400 <= status < 500:
                outgoing.in_doubt |= reason not in _NOT_SENT
            elif status not in _PASSING and not outgoing.connected_only:
                outgoing.rejected[relay] = status
            self._advance(outgoing)
        if lane.closed(now) and not lane.clearing:
            self._clear(relay, lane)

    def _clear(self, relay: str, lane: Lane) -> None:
        """Reroute envelopes queued for a relay that does not answer, some in each turn, until the relay answers again."""
        lane.clearing = lane.closed(self._clock.seconds())
        if not lane.clearing:
            self._pump(relay, lane)
            return
        for outgoing in lane.clear(AT_ONCE):
            self._advance(outgoing)
        lane.clearing = bool(lane)
        if lane.clearing:
            self._clock.callLater(0, self._clear, relay, lane)

    def _call_next(self) -> None:
        """Give waiting lanes their turns. A post that fails at once calls this again, which must not recurse."""
        if self._calling:
            return
        self._calling = True
        while (turn := self._turns.next()) is not None:
            self._pump(*turn)
        self._calling = False

    # --- ends ------------------------------------------------------------------------------------------------------

    def _finish(self, outgoing: Outgoing) -> None:
        outgoing.done = True
        call = self._outstanding.pop(outgoing)
        if call is not None and call.active():
            call.cancel()
        if outgoing.lane is not None:
            outgoing.lane.discard(outgoing)
        self._resting.discard(outgoing)
        self._shares.remove(outgoing)
        if not self._outstanding:
            self._idle.fire(None)

    def _give_up(self, outgoing: Outgoing, problem: RelayProblem) -> None:
        is_posted = outgoing.lane is None
        self._finish(outgoing)
        if outgoing.otherwise is not None:
            outgoing.otherwise(is_posted or outgoing.in_doubt)
            return
        if outgoing.in_doubt and problem.is_certain(problem.text):
            problem = RelayProblem.NOT_STORED  # after another problem a client may send it again over another relay
        self._failed(outgoing.envelope, problem)

    def _give_up_resting(self, outgoing: Outgoing) -> None:
        if outgoing.resting and not outgoing.done:  # it may have expired since the stop began
            self._give_up(outgoing, RelayProblem.OVERLOADED)

    def _give_up_last(self, outgoing: Outgoing) -> None:
        if not outgoing.done:
            self._give_up(outgoing, RelayProblem.OVERLOADED)

    def _tell_rank(self, relay: str, lane: Lane, now: float) -> None:
        rate = self._ranker.rate(relay, now)
        if rate != lane.told_rate and (now - lane.told_at >= RANK_TOLD_EVERY_S or not lane.told_rate):
            lane.told_rate, lane.told_at = rate, now
            self._emit(RelayRankChanged(relay, rate))

    def _sweep(self) -> None:
        """Give up envelopes that have expired while waiting, and forget idle lanes without recent failures.

        It is called once more after the last envelope. There may be thousands of lanes, so they are not all looked at each time
        when nothing is under way, which may be after each envelope.
        """
        self._sweeping = None
        unix_s = self._unix_time()
        expired = list(islice((one for one in self._outstanding if one.expires_at <= unix_s), AT_ONCE))
        for outgoing in expired:
            self._give_up(outgoing, RelayProblem.EXPIRED)
        self._forget_lanes()
        if self._outstanding:
            pause_s = 0.0 if len(expired) == AT_ONCE else _SWEPT_EVERY_S
            self._sweeping = self._clock.callLater(pause_s, self._sweep)

    def _forget_lanes(self) -> None:
        now = self._clock.seconds()
        for relay, lane in list(self._lanes.items()):
            self._tell_rank(relay, lane, now)
            if not (lane.told_rate or lane.busy or lane.closed(now) or lane in self._resting):
                del self._lanes[relay]


def _reason(statuses: list[int]) -> Reason:
    """The reason why the first refused envelope of a post was not accepted."""
    status = next((one for one in statuses if one != ACCEPTED), ACCEPTED)
    if status == ACCEPTED:
        return Reason.NONE
    return {4: Reason.ANSWERED_4XX, 5: Reason.ANSWERED_5XX}.get(status // 100, Reason.ANSWERED_OTHERWISE)
