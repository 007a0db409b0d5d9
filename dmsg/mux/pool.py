"""The sessions of a client: made once however many want them, kept up as a goal, made again with patience.

Protocol notes, section 9 (D32, D33) and weaknesses W20 to W23.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol as TypingProtocol
from typing import cast

from twisted.internet.defer import CancelledError, Deferred, DeferredList, ensureDeferred
from twisted.internet.error import ConnectError, ConnectionRefusedError, DNSLookupError, TimeoutError
from twisted.internet.interfaces import IDelayedCall, IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.address import HostPort
from dmsg.crypto.keys import PublicKey
from dmsg.errors import DiscoveryError, DmsgError, EntryNotFound, InvalidAddress, StageError
from dmsg.interfaces import IDiscovery
from dmsg.mux.rankwatch import RankWatch
from dmsg.mux.scores import RelayScores
from dmsg.mux.session import CLOSED, ServerSession

_log = Logger()


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
    #: How often discovery is asked for servers while too few are connected and none is left to try.
    poll_s: float = 5.0


class SessionFactory(TypingProtocol):
    """Makes the session object for a server."""

    def __call__(self, server: PublicKey) -> ServerSession: ...


class _OneShell(Factory):
    noisy = False

    def __init__(self, session: ServerSession) -> None:
        self._session = session

    def buildProtocol(self, addr: object) -> object:  # type: ignore[override]
        return self._session.shell


class ServerPool:
    """Sessions by server key.

    ``goal`` is how many should be up; ``changed`` is called whenever the set of sessions changes. ``uniform`` gives random
    numbers in [0, 1) for jitter and choice. ``urgent`` tells whether something waits for a session. ``scores`` is told how
    connecting went, and says which servers to try first; ``now_s()`` is Unix time.
    """

    def __init__(
        self,
        clock: IReactorTime,
        make_session: SessionFactory,
        endpoint_for: Callable[[HostPort], IStreamClientEndpoint],
        *,
        discovery: IDiscovery | None,
        pinned: Iterable[tuple[PublicKey, HostPort]],
        goal: int,
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
        self._clock = clock
        self._make_session = make_session
        self._endpoint_for = endpoint_for
        self._discovery = discovery
        self._config = config
        self._uniform = uniform
        self._changed = changed
        self._went_down = went_down
        self._urgent = urgent
        self._flights: dict[PublicKey, list[Deferred[ServerSession]]] = {}
        self._attempts: dict[PublicKey, Deferred[ServerSession]] = {}
        self._failures: dict[PublicKey, tuple[int, float]] = {}
        self._goal_loop: Deferred[None] | None = None
        self._wake: Deferred[None] | None = None
        self._nudged = False
        self._running = False

    # --- one session -----------------------------------------------------------------------------------------------

    def get(self, server: PublicKey) -> Deferred[ServerSession]:
        """The session with ``server``, made if there is none: however many ask, one connection is opened (W22).

        Fails with a ``StageError``. Cancelling gives up waiting, not the connection (W23).
        """
        waiter: Deferred[ServerSession] = Deferred()
        session = self.sessions.get(server)
        if session is not None and not (session.connection.worn and not session.connection.streams):
            waiter.callback(session)
            return waiter
        flight = self._flights.get(server)
        if flight is None:
            flight = self._flights[server] = []
            attempt = ensureDeferred(self._connect(server))
            self._attempts[server] = attempt
            flight.append(waiter)
            attempt.addBoth(self._landed, server)
        else:
            flight.append(waiter)
        return waiter

    def _landed(self, result: ServerSession | Failure, server: PublicKey) -> None:
        waiters = self._flights.pop(server, [])
        self._attempts.pop(server, None)
        if isinstance(result, Failure):
            times, until = self._failures.get(server, (0, 0.0))
            if until <= self._clock.seconds():
                self._failures[server] = (times + 1, self._clock.seconds() + self._pause_s(times))
            else:  # a dial did not mind the pause, and what it found is no reason for a longer one
                times -= 1
            if result.check(StageError) is None:
                stage = "connect"
                reason = "given up" if result.check(CancelledError) else type(result.value).__name__
                result = Failure(StageError(stage, reason, result.value))
            error = cast(StageError, result.value)
            if error.stage != "discovery" and not isinstance(error.error, CancelledError):
                self.scores.failed(server, self._clock.seconds())
            if self._running:
                self._went_down(server, error.reason, times + 1)
        else:
            self._failures.pop(server, None)
        for waiter in waiters:
            if not waiter.called:
                waiter.callback(result)
        self._nudge()

    async def _connect(self, server: PublicKey) -> ServerSession:
        address = self.pinned.get(server)
        if address is None:
            address = await self._look_up(server)
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
            self._changed()
            self._nudge()

    # --- the goal --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to pursue the goal."""
        self._running = True
        self._watch.start()
        self._goal_loop = ensureDeferred(self._pursue())
        self._goal_loop.addErrback(lambda failure: failure.trap(CancelledError))

    async def stop(self) -> None:
        """Give up what is being tried and close every session."""
        self._running = False
        self._watch.stop()
        if self._goal_loop is not None:
            self._goal_loop.cancel()
        for attempt in list(self._attempts.values()):
            attempt.cancel()
        for session in list(self.sessions.values()):
            session.close()

    def _pause_s(self, failures: int) -> float:
        limit = self._config.urgent_backoff_s if self._urgent() else self._config.backoff_limit_s
        pause = min(limit, self._config.backoff_first_s * 2.0 ** min(failures, 16))
        return pause * (0.5 + self._uniform() / 2)

    async def _pursue(self) -> None:
        while self._running:
            self._nudged = False
            missing = max(self.goal, len(self.pinned) if self.goal else 0) - len(self.sessions) - len(self._flights)
            pause_s: float | None = None
            if missing > 0:
                candidates = await self._candidates()
                now = self._clock.seconds()
                rested = [one for one in candidates if self._failures.get(one, (0, 0.0))[1] <= now]
                for server in rested[:missing]:
                    self.get(server).addErrback(lambda failure: failure.trap(StageError))
                if len(rested) < missing:
                    wake_at = [self._failures[one][1] for one in candidates if one not in rested]
                    pause_s = max(0.0, min(wake_at) - now) if wake_at else self._config.poll_s
                    pause_s = min(pause_s, self._config.poll_s) * (0.75 + self._uniform() / 2)
            await self._sleep(pause_s)

    async def _candidates(self) -> list[PublicKey]:
        """Servers to try: pinned ones first, then those discovery names, drawn at random with the better ones likelier."""
        known = list(self.pinned)
        if len(known) < self.goal and self._discovery is not None:
            try:
                entries = await self._discovery.available_servers()
            except DiscoveryError as error:
                _log.warn("Discovery gave no servers: {error}", error=error)
            else:
                await self._watch.first_look()
                listed = [entry.static for entry in entries if entry.server is not None]
                self.scores.listed(listed, self._clock.seconds())
                others = [one for one in listed if one not in self.pinned]
                known += self.scores.draw(others, self._uniform, self._clock.seconds())
        return [one for one in known if one not in self.sessions and one not in self._flights]

    async def _sleep(self, pause_s: float | None) -> None:
        if self._nudged:
            return  # something changed since the goal was looked at
        self._wake = Deferred()
        timer: IDelayedCall | None = None
        if pause_s is not None:
            timer = self._clock.callLater(pause_s, self._nudge)
        try:
            await self._wake
        finally:
            if timer is not None and timer.active():
                timer.cancel()

    def _nudge(self) -> None:
        self._nudged = True
        if self._wake is not None and not self._wake.called:
            self._wake.callback(None)

    async def settled(self) -> None:
        """Wait until no connection is being made."""
        await DeferredList(list(self._attempts.values()), consumeErrors=True)


def _timed_out(result: object, timeout_s: float) -> Failure:
    return Failure(StageError("connect", "timeout"))


def _connect_reason(error: ConnectError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "unreachable"
