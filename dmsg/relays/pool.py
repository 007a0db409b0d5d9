"""The sessions of a client: one for each relay, shared by all dials, kept up as a goal, made again after growing pauses.

The pauses are those of :ref:`spec-reconnecting`. :mod:`dmsg.relays.goal` pursues the goal, and
:mod:`dmsg.relays.whereabouts` finds the addresses of relays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Generic, cast

from twisted.internet.defer import CancelledError, Deferred, DeferredList, ensureDeferred, fail, succeed
from twisted.internet.error import ConnectError, DNSLookupError
from twisted.internet.interfaces import IProtocol, IReactorTime, IStreamClientEndpoint
from twisted.python.failure import Failure

from dmsg.address import HostPort, network_group
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import DMSG
from dmsg.errors import DmsgError, StageError
from dmsg.glue.connecting import NO_DESCRIPTOR, connect_reason, quiet_factory
from dmsg.glue.waiters import Waiters
from dmsg.interfaces import IDiscovery
from dmsg.relays.candidates import Candidate
from dmsg.relays.choice import RelayChoice
from dmsg.relays.goal import SessionGoal
from dmsg.relays.listed import ListedRelays
from dmsg.relays.race import RaceConfig
from dmsg.relays.rankwatch import RankWatch
from dmsg.relays.scores import RelayScores
from dmsg.relays.session import CLOSED, S
from dmsg.relays.state import RelayFile
from dmsg.relays.whereabouts import ANOTHER_PROTOCOL, Whereabouts
from dmsg.sansio.backoff import Backoff
from dmsg.sansio.rate import check_more_than_zero

#: Idle sessions made only for dials that are kept: enough for the next dials to the same peers, and no more, because a peer's
#: entry chooses these relays.
IDLE_LIMIT: Final = 16
#: Relays that are published: half of what an entry may name, since clients of two protocols may share one. Relays of sessions
#: made only for dials are added up to the second number, which is what a dial tries, so that a peer cannot fill the entry.
PUBLISHED_LIMIT: Final = 32
PUBLISHED_WITH_LED_TO: Final = 8
#: So many relays, the last to fail, have their pause after a failure remembered: a discovery lists 64, and may invent them.
RESTING_LIMIT: Final = 1_024


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """How hard the goal is pursued; times in seconds."""

    #: To connect one relay, name resolution included.
    connect_timeout_s: float = 10.0
    #: The first pause after a failure; it doubles each time, up to the second value. Each has up to half as much jitter.
    backoff_first_s: float = 3.0
    backoff_limit_s: float = 60.0
    #: No pause is longer while transports wait for another path: their time is limited, and so is this haste.
    urgent_backoff_s: float = 1.0
    #: How often discovery is asked for relays while too few are connected.
    poll_s: float = 5.0
    #: With one session up and only a second group missing, the pause doubles up to this: there may be no other group.
    poll_limit_s: float = 300.0
    race: RaceConfig = field(default_factory=RaceConfig)

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for no time to connect, and for no pause: the client would do nothing but try again."""
        check_more_than_zero(self, "connect_timeout_s", "backoff_first_s", "backoff_limit_s", "urgent_backoff_s")
        check_more_than_zero(self, "poll_s", "poll_limit_s")


@dataclass(slots=True)
class _Flight(Generic[S]):
    """An attempt to connect, and the Deferreds that wait for it."""

    attempt: Deferred[S] = field(default_factory=Deferred)
    waiters: Waiters[S] = field(default_factory=Waiters)
    #: Asked for more than once: another dial wants it, whatever the relay's address is.
    shared: bool = False
    #: Given up, but not because of the relay: another one was faster.
    spared: bool = False
    #: Whether the goal wants it, and not only a dial.
    chosen: bool = False
    #: Whether it is connected and the handshake has begun.
    connected: bool = False


class SessionPool(Generic[S]):
    """Sessions by relay key.

    ``goal`` is how many should be up (:class:`~dmsg.relays.goal.SessionGoal`). ``changed`` is called whenever the set of
    sessions changes. ``uniform`` gives random numbers in [0, 1) for jitter and choice. ``urgent`` tells whether something
    waits for a session. ``scores`` is told how connecting went, and says which relays to try first; ``memory`` keeps the
    relays that worked for the next run, ``operator`` lists relays to use exclusively, or first. ``now_s()`` is Unix time.

    The sessions speak ``protocol``: a relay whose entry names another protocol is not connected to.
    """

    def __init__(
        self,
        clock: IReactorTime,
        make_session: Callable[[PublicKey], S],
        endpoint_for: Callable[[HostPort], IStreamClientEndpoint],
        *,
        discovery: IDiscovery | None,
        pinned: Iterable[tuple[PublicKey, HostPort]],
        goal: int | None,
        config: PoolConfig,
        uniform: Callable[[], float],
        changed: Callable[[], None],
        went_down: Callable[[PublicKey, str, int], None],
        urgent: Callable[[], bool] = lambda: False,
        scores: RelayScores | None = None,
        memory: RelayFile | None = None,
        operator: RelayChoice | None = None,
        now_s: Callable[[], float] = time.time,
        protocol: str = DMSG,
    ) -> None:
        self.sessions: dict[PublicKey, S] = {}
        self.pinned = dict(pinned)
        self.scores = scores if scores is not None else RelayScores()
        self._watch = RankWatch(clock, discovery, self.scores, now_s)
        self._clock = clock
        self._make_session = make_session
        self._endpoint_for = endpoint_for
        self._memory = memory
        self._operator = operator
        self._config = config
        self._backoff = Backoff(config.backoff_first_s, config.backoff_limit_s)
        self._urgent_backoff = Backoff(config.backoff_first_s, config.urgent_backoff_s)
        self._uniform = uniform
        self._changed = changed
        self._went_down = went_down
        self._urgent = urgent
        #: The address of each relay with a session or an attempt, once it is known.
        self._addresses: dict[PublicKey, HostPort] = {}
        self._flights: dict[PublicKey, _Flight[S]] = {}
        self._failures: dict[PublicKey, tuple[int, float]] = {}
        #: Relays whose session was made only for dials, the one that was asked for last at the end.
        self._led_to: dict[PublicKey, None] = {}
        self._last_failure = ""
        self._running = False
        self._whereabouts = Whereabouts(clock, discovery, self.pinned, memory, protocol)
        self._listed = ListedRelays(clock, discovery, self._watch, self.scores, protocol)
        self._goal = SessionGoal(
            clock,
            self,
            goal,
            listed=self._listed,
            memory=memory,
            operator=operator,
            scores=self.scores,
            uniform=uniform,
            race=config.race,
            poll_s=config.poll_s,
            poll_limit_s=config.poll_limit_s,
        )

    @property
    def problem(self) -> str:
        """Why a client has no relays, for people: what is wrong with the operator's list, what discovery said, and how the last
        attempt ended."""
        missing = self._missing_list()
        unlisted = f"the list of relays is not used: {missing}" if missing is not None else ""
        return "; ".join(filter(None, (unlisted, self._listed.problem, self._last_failure)))

    # --- one session -----------------------------------------------------------------------------------------------

    def get(
        self,
        relay: PublicKey,
        candidate: Candidate | None = None,
        *,
        wanted_at: Callable[[HostPort], bool] | None = None,
    ) -> Deferred[S]:
        """The session with ``relay``, made if there is none; all callers share one connection.

        ``candidate`` has what is known of its address; once the address is known, ``wanted_at`` says whether the relay is
        wanted there. Fails with a ``StageError``. Cancelling ends the wait, but not the connection.
        """
        session = self.sessions.get(relay)
        if session is not None and not session.spent:
            if relay in self._led_to:
                self._led_to[relay] = self._led_to.pop(relay)
            return succeed(session)
        if not self._is_allowed(relay):
            return fail(StageError("connect", "not on the relay list", self._missing_list()))
        if self._whereabouts.left_alone_until(relay) > self._clock.seconds():
            return fail(StageError("connect", ANOTHER_PROTOCOL))
        chosen = wanted_at is not None or relay in self.pinned
        flight = self._flights.get(relay)
        if flight is not None:
            flight.shared = True
            flight.chosen |= chosen
            return flight.waiters.wait()
        flight = self._flights[relay] = _Flight(chosen=chosen)
        waiter = flight.waiters.wait()
        flight.attempt = ensureDeferred(self._connect(flight, candidate or self._remembered(relay), wanted_at))
        flight.attempt.addBoth(self._landed, relay, flight)
        return waiter

    def _landed(self, result: S | Failure, relay: PublicKey, flight: _Flight[S]) -> None:
        del self._flights[relay]
        if isinstance(result, Failure):
            result = self._failed(result, relay, flight)
        else:
            self._failures.pop(relay, None)
            self._last_failure = ""
        flight.waiters.fire(result)
        if relay not in self.sessions:
            self._addresses.pop(relay, None)
        self._goal.look()

    def _failed(self, failure: Failure, relay: PublicKey, flight: _Flight[S]) -> Failure:
        cancelled = failure.check(CancelledError) is not None
        if not isinstance(failure.value, StageError):
            reason = "given up" if cancelled else type(failure.value).__name__
            failure = Failure(StageError("connect", reason, failure.value))
        error = cast(StageError, failure.value)
        if flight.spared or error.reason == ANOTHER_PROTOCOL:
            return failure
        self._last_failure = f"{error.stage} via {str(relay)[:12]}…: {error.reason}"
        times, until = self._failures.get(relay, (0, 0.0))
        if until <= self._clock.seconds():  # dials ignore the pause, so their failures during it make it no longer
            times += 1
            self._rest(relay, times)
        if self._running:
            if error.stage != "discovery" and error.reason != NO_DESCRIPTOR:  # these are not the relay's faults
                self.scores.failed(relay, self._clock.seconds())
            self._went_down(relay, error.reason, times)
        return failure

    def _is_allowed(self, relay: PublicKey) -> bool:
        """Whether ``relay`` may be connected to at all: an operator's list may exclude all other relays."""
        operator = self._operator
        if operator is None or not operator.only or relay in self.pinned:
            return True
        return any(one.public_key == relay for one in operator.relays())

    def _missing_list(self) -> Exception | None:
        """Why there is no list, where only its relays may be used."""
        operator = self._operator
        return operator.error if operator is not None and operator.only and not operator.relays() else None

    def _remembered(self, relay: PublicKey) -> Candidate:
        """``relay`` with the address that discovery listed last, or that worked in an earlier run, if there is one."""
        known = (*self._listed.relays, *(self._memory.relays if self._memory is not None else ()))
        return next((replace(one, remembered=True) for one in known if one.public_key == relay), Candidate(relay))

    async def _connect(
        self, flight: _Flight[S], candidate: Candidate, wanted_at: Callable[[HostPort], bool] | None
    ) -> S:
        relay = candidate.public_key
        address = self._addresses[relay] = await self._whereabouts.find(candidate)
        if wanted_at is not None and not wanted_at(address):
            if not flight.shared:
                flight.spared = True
                raise StageError("connect", "network in use already")
            flight.chosen = False
        began, made = self._clock.seconds(), list[S]()

        def build() -> IProtocol:
            # Not before there is a connection: the handshake has its own time, and costs nothing if there is none.
            session = self._make_session(relay)
            session.started_at = began
            made.append(session)
            return session.shell

        try:
            await (
                self._endpoint_for(address)
                .connect(quiet_factory(build))
                .addTimeout(self._config.connect_timeout_s, self._clock, _timed_out)
            )
        except StageError:
            raise
        except (ConnectError, DNSLookupError) as error:
            raise StageError("connect", connect_reason(error), error) from None
        flight.connected = True
        session = made[-1]
        await session.ready
        self._admitted(session, flight)
        return session

    def _admitted(self, session: S, flight: _Flight[S]) -> None:
        elapsed_ms = (session.ready_at - session.started_at) * 1000
        self.scores.connected(session.server, elapsed_ms, self._clock.seconds())
        older = self.sessions.get(session.server)
        self.sessions[session.server] = session
        if older is not None:
            older.close()  # it was spent
        self._led_to.pop(session.server, None)
        if not flight.chosen:
            self._led_to[session.server] = None
        if not self.leave_idle():  # which calls it as well
            self._changed()

    def lost(self, session: S, error: DmsgError) -> None:
        """A session is over."""
        if self.sessions.get(session.server) is session:
            self._forget(session.server)
            if self._running and getattr(error, "reason", "") != CLOSED:
                self.scores.failed(session.server, self._clock.seconds())
            # All its clients have lost it at the same moment, and must not come back at the same moment.
            self._rest(session.server, 1)
            self._changed()
            self._goal.lost(session.server)

    def _forget(self, relay: PublicKey) -> S:
        """Take the session with ``relay`` out of the pool. Its address stays known while a new connection is being made."""
        self._led_to.pop(relay, None)
        if relay not in self._flights:
            self._addresses.pop(relay, None)
        return self.sessions.pop(relay)

    def _rest(self, relay: PublicKey, failures: int) -> None:
        """Keep the goal from trying ``relay`` for a while, after so many ``failures`` in a row."""
        backoff = self._urgent_backoff if self._urgent() else self._backoff
        self._failures.pop(relay, None)
        if len(self._failures) >= RESTING_LIMIT:
            del self._failures[next(iter(self._failures))]
        self._failures[relay] = (failures, self._clock.seconds() + backoff.pause_s(failures, self._uniform))

    def give_up(self, relay: PublicKey, *, blame: bool) -> None:
        """End the attempt at ``relay`` unless something waits for it. With ``blame`` it counts as a failure."""
        flight = self._flights.get(relay)
        if flight is not None and not flight.waiters:
            flight.spared = not blame
            flight.attempt.cancel()

    def leave_idle(self) -> bool:
        """End idle sessions made only for dials, except :data:`IDLE_LIMIT` of them; gives whether any ended.

        Published ones stay first: otherwise each dial to a peer on other relays would change the entry. Of the rest, those
        that were asked for last stay.
        """
        if len(self._led_to) <= IDLE_LIMIT:
            return False
        published = frozenset(self.published())
        idle = sorted(
            (relay for relay in self._led_to if self.sessions[relay].idle), key=lambda relay: relay in published
        )
        surplus = idle[: max(0, len(idle) - IDLE_LIMIT)]
        for relay in surplus:
            self._forget(relay).close()  # forgotten now, so that the next dial gets a new session
        if surplus:
            self._changed()
            self._goal.look()
        return bool(surplus)

    @property
    def chosen(self) -> list[PublicKey]:
        """The relays with a session that the goal or the program wants, not only a dial."""
        return [relay for relay in self.sessions if relay not in self._led_to]

    def choose(self, relay: PublicKey) -> None:
        """Let the goal keep the session with ``relay``, which a dial has made."""
        if relay in self._led_to:
            del self._led_to[relay]
            self._changed()

    def published(self) -> list[PublicKey]:
        """The relays to publish: those with a session; first come those that the goal or the program chose."""
        chosen = self.chosen[:PUBLISHED_LIMIT]
        led_to = [relay for relay in self.sessions if relay in self._led_to]
        return chosen + led_to[: max(0, PUBLISHED_WITH_LED_TO - len(chosen))]

    def leave_unlisted(self) -> None:
        """End sessions and attempts with relays that an operator's list does not name any more, if only its relays may be used.

        A list that has expired names none, and ends nothing.
        """
        if self._operator is None or not self._operator.relays():
            return
        for relay, flight in list(self._flights.items()):
            if not self._is_allowed(relay):
                flight.spared = True
                flight.attempt.cancel()
        for relay, session in list(self.sessions.items()):
            if not self._is_allowed(relay):
                session.close()

    def connecting(self, relay: PublicKey) -> bool:
        """Whether a connection to ``relay`` is being made."""
        return relay in self._flights

    def stage(self, relay: PublicKey) -> str:
        """The step that a connection to ``relay`` has reached while it is being made: ``connect`` or ``handshake``."""
        flight = self._flights.get(relay)
        return "handshake" if flight is not None and flight.connected else "connect"

    def rested_at(self, relay: PublicKey) -> float:
        """When the goal may try ``relay`` again after it has failed, in seconds on the clock."""
        return max(self._failures.get(relay, (0, 0.0))[1], self._whereabouts.left_alone_until(relay))

    def address_of(self, relay: PublicKey) -> HostPort:
        """The address of a relay with a session."""
        return self._addresses[relay]

    def group_of(self, relay: PublicKey) -> str:
        """The network group of a relay with a session; "" for another one."""
        address = self._addresses.get(relay)
        return network_group(address.host) if address is not None else ""

    # --- as a whole ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to pursue the goal."""
        self._running = True
        self._watch.start()
        self._goal.start()

    async def stop(self) -> None:
        """Give up all attempts and close every session."""
        self._running = False
        self._watch.stop()
        self._goal.stop()
        for flight in list(self._flights.values()):
            flight.attempt.cancel()
        closing, self._led_to = list(self.sessions.values()), {}
        self.sessions.clear()  # now: connections may close slowly, and a client that starts again needs new ones
        self._addresses.clear()
        for session in closing:
            session.close()
        if closing:
            self._changed()

    async def settled(self) -> None:
        """Wait until no connection is being made."""
        await DeferredList([flight.attempt for flight in self._flights.values()], consumeErrors=True)


def _timed_out(result: object, timeout_s: float) -> Failure:
    return Failure(StageError("connect", "timeout"))
