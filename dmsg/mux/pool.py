"""The sessions of a client: made once however many want them, kept up as a goal, made again with patience.

Protocol notes, section 9 (D32, D33) and weaknesses W20 to W23. Which relays the goal tries is in :mod:`dmsg.mux.candidates`,
how many at a time in :mod:`dmsg.mux.race`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, cast
from typing import Protocol as TypingProtocol

from twisted.internet.defer import CancelledError, Deferred, DeferredList, ensureDeferred
from twisted.internet.error import ConnectError, ConnectionRefusedError, DNSLookupError, TimeoutError
from twisted.internet.interfaces import IDelayedCall, IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure

from dmsg.address import HostPort, network_group
from dmsg.crypto.keys import PublicKey
from dmsg.errors import DiscoveryError, DmsgError, EntryNotFound, InvalidAddress, StageError
from dmsg.interfaces import IDiscovery
from dmsg.mux.candidates import Candidate, spread
from dmsg.mux.listed import ListedRelays
from dmsg.mux.race import Race, RaceConfig
from dmsg.mux.rankwatch import RankWatch
from dmsg.mux.scores import RelayScores
from dmsg.mux.session import CLOSED, ServerSession

#: How many sessions a client keeps up if nothing else is said, each with a relay of another network group: whoever owns
#: one network cannot cut it off.
DEFAULT_GROUPS: Final = 2
#: The goal is looked at again no sooner than this: times are added up, and a sum may fall short of what is due.
_SHORTEST_PAUSE_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """How hard the goal is pursued; times in seconds."""

    #: To connect one server, name resolution included.
    connect_timeout_s: float = 10.0
    #: The first pause after a failure, then twice as long each time, up to the second; each with up to half of jitter.
    backoff_first_s: float = 3.0
    backoff_limit_s: float = 60.0
    #: No pause is longer while transports wait for another path: their time is limited, and so is this haste.
    urgent_backoff_s: float = 1.0
    #: How often discovery is asked for servers while too few are connected.
    poll_s: float = 5.0
    #: With one session up and only another group missing, the pause doubles up to this: there may be no other group.
    poll_limit_s: float = 300.0
    race: RaceConfig = field(default_factory=RaceConfig)


class SessionFactory(TypingProtocol):
    """Makes the session object for a server."""

    def __call__(self, server: PublicKey) -> ServerSession: ...


class _OneShell(Factory):
    noisy = False

    def __init__(self, session: ServerSession) -> None:
        self._session = session

    def buildProtocol(self, addr: object) -> object:  # type: ignore[override]
        return self._session.shell


@dataclass(slots=True)
class _Flight:
    """An attempt to connect, and those who wait for it."""

    attempt: Deferred[ServerSession] = field(default_factory=Deferred)
    waiters: list[Deferred[ServerSession]] = field(default_factory=list)
    #: Given up for no fault of the relay's: another one was faster.
    spared: bool = False


class ServerPool:
    """Sessions by server key.

    ``goal`` is how many should be up, each with a relay of another network group as far as there are groups; ``None`` means
    :data:`DEFAULT_GROUPS`, and none beyond the first where there is only one group, or pinned servers. ``changed`` is
    called whenever the set of sessions changes. ``uniform`` gives random numbers in [0, 1) for jitter and choice. ``urgent``
    tells whether something waits for a session. ``scores`` is told how connecting went, and says which servers to try first;
    ``now_s()`` is Unix time.
    """

    def __init__(
        self,
        clock: IReactorTime,
        make_session: SessionFactory,
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
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.sessions: dict[PublicKey, ServerSession] = {}
        self.pinned = dict(pinned)
        self.goal = goal
        self.scores = scores if scores is not None else RelayScores()
        self._watch = RankWatch(clock, discovery, self.scores, now_s)
        self._listed = ListedRelays(clock, discovery, self._watch, self.scores, self._nudge)
        self._clock = clock
        self._make_session = make_session
        self._endpoint_for = endpoint_for
        self._discovery = discovery
        self._config = config
        self._uniform = uniform
        self._changed = changed
        self._went_down = went_down
        self._urgent = urgent
        self._race = Race(config.race)
        self._race_waiters: dict[PublicKey, Deferred[ServerSession]] = {}
        #: The network group of each relay with a session or an attempt, once its address is known.
        self._groups: dict[PublicKey, str] = {}
        self._flights: dict[PublicKey, _Flight] = {}
        self._failures: dict[PublicKey, tuple[int, float]] = {}
        #: How often in a row discovery was asked with a session up and another group missing.
        self._idle_looks = 0
        self._look_jitter = 1.0
        self._timer: IDelayedCall | None = None
        self._stepping = self._nudged = False
        self._running = False

    # --- one session -----------------------------------------------------------------------------------------------

    def get(self, server: PublicKey, candidate: Candidate | None = None) -> Deferred[ServerSession]:
        """The session with ``server``, made if there is none: however many ask, one connection is opened (W22).

        ``candidate`` is what is known of where it is. Fails with a ``StageError``. Cancelling gives up waiting, not the
        connection (W23).
        """
        waiter: Deferred[ServerSession] = Deferred()
        session = self.sessions.get(server)
        if session is not None and not (session.connection.worn and not session.connection.streams):
            waiter.callback(session)
            return waiter
        flight = self._flights.get(server)
        if flight is None:
            flight = self._flights[server] = _Flight()
            flight.attempt = ensureDeferred(self._connect(server, candidate or Candidate(server)))
            flight.waiters.append(waiter)
            flight.attempt.addBoth(self._landed, server, flight)
        else:
            flight.waiters.append(waiter)
        return waiter

    def _landed(self, result: ServerSession | Failure, server: PublicKey, flight: _Flight) -> None:
        del self._flights[server]
        if isinstance(result, Failure):
            result = self._failed(result, server, flight)
        else:
            self._failures.pop(server, None)
        for waiter in flight.waiters:
            if not waiter.called:
                waiter.callback(result)
        if server not in self.sessions:
            self._groups.pop(server, None)
        self._nudge()

    def _failed(self, failure: Failure, server: PublicKey, flight: _Flight) -> Failure:
        cancelled = failure.check(CancelledError) is not None
        if not isinstance(failure.value, StageError):
            reason = "given up" if cancelled else type(failure.value).__name__
            failure = Failure(StageError("connect", reason, failure.value))
        if flight.spared:
            return failure
        error = cast(StageError, failure.value)
        times, until = self._failures.get(server, (0, 0.0))
        if until <= self._clock.seconds():
            self._failures[server] = (times + 1, self._clock.seconds() + self._pause_s(times))
        else:  # a dial did not mind the pause, and what it found is no reason for a longer one
            times -= 1
        if error.stage != "discovery" and self._running:
            self.scores.failed(server, self._clock.seconds())
        if self._running:
            self._went_down(server, error.reason, times + 1)
        return failure

    async def _connect(self, server: PublicKey, candidate: Candidate) -> ServerSession:
        address = self.pinned.get(server) or candidate.address
        if address is None:
            address = await self._look_up(server)
        self._groups[server] = network_group(address.host)
        session = self._make_session(server)
        try:
            # a client's protocol object is its own; one connection, one shell
            await (
                self._endpoint_for(address)
                .connect(_OneShell(session))
                .addTimeout(self._config.connect_timeout_s, self._clock, _timed_out)
            )
        except StageError:
            raise
        except ConnectError as error:
            raise StageError("connect", _connect_reason(error), error) from None
        except DNSLookupError as error:
            raise StageError("connect", "host not found", error) from None
        await session.ready
        self._admitted(session)
        return session

    async def _look_up(self, server: PublicKey) -> HostPort:
        if self._discovery is None:
            raise StageError("discovery", "server is not pinned and there is no discovery")
        try:
            entry = await self._discovery.get_entry(server)
        except EntryNotFound as error:
            raise StageError("discovery", "server has no entry", error) from None
        except DiscoveryError as error:
            raise StageError("discovery", "unavailable", error) from None
        if entry.server is None:
            raise StageError("discovery", "entry is not a server's")
        try:
            return entry.server.host_port
        except InvalidAddress as error:
            raise StageError("discovery", "entry has no usable address", error) from None

    def _admitted(self, session: ServerSession) -> None:
        elapsed_ms = (session.ready_at - session.started_at) * 1000
        self.scores.connected(session.server, elapsed_ms, self._clock.seconds())
        older = self.sessions.get(session.server)
        self.sessions[session.server] = session
        if older is not None:
            older.close()  # its counters were worn and nothing is open on it
        self._changed()

    def lost(self, session: ServerSession, error: DmsgError) -> None:
        """A session is over."""
        if self.sessions.get(session.server) is session:
            del self.sessions[session.server]
            if self._running and getattr(error, "reason", "") != CLOSED:
                self.scores.failed(session.server, self._clock.seconds())
            # a server that has just gone is not asked again at once, by everybody at the same moment
            self._failures[session.server] = (1, self._clock.seconds() + self._pause_s(0))
            if session.server not in self._flights:
                self._groups.pop(session.server, None)
            self._idle_looks = 0
            self._changed()
            self._nudge()

    # --- the goal --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to pursue the goal."""
        self._running = True
        self._watch.start()
        self._nudge()

    async def stop(self) -> None:
        """Give up what is being tried and close every session."""
        self._running = False
        self._watch.stop()
        self._listed.stop()
        self._wake_in(None)
        for flight in list(self._flights.values()):
            flight.attempt.cancel()
        for session in list(self.sessions.values()):
            session.close()

    def _pause_s(self, failures: int) -> float:
        limit = self._config.urgent_backoff_s if self._urgent() else self._config.backoff_limit_s
        pause = min(limit, self._config.backoff_first_s * 2.0 ** min(failures, 16))
        return pause * (0.5 + self._uniform() / 2)

    def _nudge(self) -> None:
        """Look at the goal: something has changed, or it is time to."""
        self._nudged = True
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._nudged and self._running:
                self._nudged = False
                self._wake_in(self._step())
        finally:
            self._stepping = False

    def _wake_in(self, pause_s: float | None) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None if pause_s is None else self._clock.callLater(max(_SHORTEST_PAUSE_S, pause_s), self._nudge)

    def _step(self) -> float | None:
        """Start what there is room for and give up what is not wanted any more; how long until the next look."""
        if self.goal == 0:
            return None
        wake_at = self._pursue_pinned()
        missing = self._missing()
        if missing <= 0:
            self._give_up(self._race.all())
        else:
            self._give_up(self._race.unwanted(self._held_groups()))
            wake_at += self._pursue_others(missing)
        return min(wake_at, default=self._clock.seconds()) - self._clock.seconds() if wake_at else None

    def _pursue_pinned(self) -> list[float]:
        """Connect every pinned server; when to look again."""
        now, wake_at = self._clock.seconds(), []
        for server in self.pinned:
            if server in self.sessions or server in self._flights:
                continue
            rested_at = self._failures.get(server, (0, 0.0))[1]
            if rested_at <= now:
                self.get(server).addErrback(lambda failure: failure.trap(StageError))
            else:
                wake_at.append(min(rested_at, now + self._config.poll_s * (0.75 + self._uniform() / 2)))
        return wake_at

    def _missing(self) -> int:
        """How many sessions with relays that are not pinned are wanted beside those that are up."""
        if self.goal is None:
            return 0 if self.pinned else DEFAULT_GROUPS - len(self._held_groups())
        pinned_under_way = sum(1 for server in self._flights if server in self.pinned)
        return self.goal - len(self.sessions) - pinned_under_way if len(self.pinned) < self.goal else 0

    def _held_groups(self) -> set[str]:
        """The groups that are of no use to the goal any more: one relay of each is enough unless a number was asked for."""
        return {self._groups[server] for server in self.sessions} if self.goal is None else set()

    def _pursue_others(self, missing: int) -> list[float]:
        """Race for ``missing`` sessions; when to look again."""
        now, race = self._clock.seconds(), self._race
        wake_at = [self._look_at(now)]
        if wake_at[0] is not None and wake_at[0] <= now:
            self._idle_looks = self._idle_looks + 1 if self.sessions else 0
            self._look_jitter = 0.75 + self._uniform() / 2
            self._listed.ask()
            wake_at = [self._look_at(now)]
        if self._listed.usable_at() > now:
            return [self._listed.usable_at()]
        of_a_group = 1 if self.goal is None else missing
        waits = False
        for one in self._candidates():
            rested_at = self._failures.get(one.public_key, (0, 0.0))[1]
            if rested_at > now:
                wake_at.append(rested_at)
            elif race.room(one.group, now, of_a_group=of_a_group, hurried=not self.sessions):
                self._enter(one)
            else:
                waits = True
        if waits:
            wake_at.append(race.next_s(now))
        return [at_s for at_s in wake_at if at_s is not None]

    def _enter(self, candidate: Candidate) -> None:
        """Let ``candidate`` run in the race; the oldest of too many makes room."""
        server, oldest = candidate.public_key, self._race.surplus()
        if oldest is not None:
            self._give_up([oldest])
        self._race.start(server, candidate.group, self._clock.seconds())
        waiter = self._race_waiters[server] = self.get(server, candidate)
        waiter.addBoth(self._ran, server)

    def _ran(self, _: object, server: PublicKey) -> None:
        self._race.end(server)
        self._race_waiters.pop(server, None)

    def _give_up(self, servers: Iterable[PublicKey]) -> None:
        """Take attempts out of the race, and end each that nothing else waits for."""
        now = self._clock.seconds()
        for server in servers:
            overtaken = self._race.overtaken(server, now)
            self._race.end(server)
            waiter, flight = self._race_waiters.pop(server, None), self._flights.get(server)
            if waiter is not None:
                waiter.cancel()
            if flight is not None and all(one.called for one in flight.waiters):
                flight.spared = not overtaken
                flight.attempt.cancel()

    def _look_at(self, now: float) -> float | None:
        """When discovery is to be asked for relays; ``None`` while it is being asked, or if there is none."""
        if self._discovery is None or self._listed.asking:
            return None
        if self._listed.asked_s is None:
            return now
        pause_s = self._config.poll_s
        if self.goal is None and self.sessions:
            pause_s = min(self._config.poll_limit_s, pause_s * 2.0 ** min(self._idle_looks, 16))
        return self._listed.asked_s + pause_s * self._look_jitter

    def _candidates(self) -> list[Candidate]:
        """Relays that may be tried, the likelier ones first."""
        held = self._held_groups()
        known = [
            one
            for one in self._listed.relays
            if one.public_key not in self.sessions
            and one.public_key not in self._race
            and one.public_key not in self.pinned
            and one.group not in held
        ]
        now = self._clock.seconds()
        drawn = spread(known, lambda keys: self.scores.draw(keys, self._uniform, now))
        taken = {self._groups.get(server, "") for server in self.sessions}
        return sorted(drawn, key=lambda one: one.group in taken)

    async def settled(self) -> None:
        """Wait until no connection is being made."""
        await DeferredList([flight.attempt for flight in self._flights.values()], consumeErrors=True)


def _timed_out(result: object, timeout_s: float) -> Failure:
    return Failure(StageError("connect", "timeout"))


def _connect_reason(error: ConnectError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "unreachable"
