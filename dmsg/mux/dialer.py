"""From a public key to an open stream: look up, race the servers, and if it fails say everything that was tried."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from dmsg.crypto.keys import PublicKey
from dmsg.errors import (
    Attempt,
    Busy,
    DialError,
    DiscoveryError,
    EntryNotFound,
    NoCommonServer,
    SessionTimeout,
    StageError,
)
from dmsg.interfaces import IDiscovery
from dmsg.mux.pool import ServerPool
from dmsg.mux.session import ServerSession
from dmsg.mux.stream import Stream


@dataclass(frozen=True, slots=True)
class DialConfig:
    """Times of a dial, in seconds."""

    #: For the whole of it (D14).
    timeout_s: float = 10.0
    #: The next server is tried when the one before has not answered for so long.
    stagger_s: float = 0.25
    #: So many of the servers an entry names are tried, those connected already first: an entry is a stranger's word.
    servers: int = 8
    #: How long an entry that was looked up is used again without asking.
    entry_lifetime_s: float = 5.0
    entries: int = 1_024


Dialled = tuple[ServerSession, Stream]


class Dialer:
    """Dials by key through a pool of sessions."""

    def __init__(
        self,
        clock: IReactorTime,
        pool: ServerPool,
        discovery: IDiscovery | None,
        config: DialConfig,
        uniform: Callable[[], float],
    ) -> None:
        self.config = config
        self._clock = clock
        self._pool = pool
        self._discovery = discovery
        self._uniform = uniform
        self._known: dict[PublicKey, tuple[float, tuple[PublicKey, ...]]] = {}

    async def dial(self, target: PublicKey, timeout_s: float | None, attempts: list[Attempt]) -> Dialled:
        """An open stream to ``target``; what was tried is added to ``attempts``. Raises ``DialError``.

        Cancelling closes whatever was under way.
        """
        started = self._clock.seconds()
        limit_s = self.config.timeout_s if timeout_s is None else timeout_s
        race = _Race(self, target, attempts, started)

        def timed_out(result: object, _: float) -> Failure:
            race.note("accept" if race.asked else "connect", "", "timeout", SessionTimeout("the dial", limit_s))
            return Failure(DialError(str(target), attempts))

        running: Deferred[Dialled] = ensureDeferred(self._run(target, race))
        try:
            return await running.addTimeout(limit_s, self._clock, timed_out)
        except DialError:
            self._known.pop(target, None)
            raise

    async def _run(self, target: PublicKey, race: _Race) -> Dialled:
        known = self._known_servers(target)
        servers = await self._look_up(target, race) if known is None else known
        connected = self._pool.sessions
        order = sorted(servers, key=lambda server: (server not in connected, self._uniform()))
        if self._discovery is not None:
            del order[self.config.servers :]
        if not order:
            race.note("discovery", "", "no common server", NoCommonServer("the entry names no server to go through"))
            raise DialError(str(target), race.attempts)
        if len(order) == 1:
            return await self._through(order[0], target, race)
        return await race.run(order)

    def _known_servers(self, target: PublicKey) -> tuple[PublicKey, ...] | None:
        if self._discovery is None:
            return (*self._pool.sessions, *(one for one in self._pool.pinned if one not in self._pool.sessions))
        known = self._known.get(target)
        if known is None or known[0] < self._clock.seconds():
            return None
        return known[1]

    async def _look_up(self, target: PublicKey, race: _Race) -> tuple[PublicKey, ...]:
        assert self._discovery is not None
        try:
            entry = await self._discovery.get_entry(target)
        except DiscoveryError as error:
            race.note("discovery", "", "no entry" if isinstance(error, EntryNotFound) else "unavailable", error)
            # Pinned servers need no discovery: the peer may be on one of them.
            return tuple(self._pool.pinned)
        delegated = entry.client.delegated_servers if entry.client is not None else None
        servers = tuple(delegated or ())
        while len(self._known) >= self.config.entries:
            del self._known[next(iter(self._known))]
        self._known[target] = (self._clock.seconds() + self.config.entry_lifetime_s, servers)
        return servers

    async def _through(self, server: PublicKey, target: PublicKey, race: _Race) -> Dialled:
        try:
            return await self.attempt(server, target, race)
        except StageError as error:
            race.note(error.stage, str(server), error.reason, error.error or error)
            raise DialError(str(target), race.attempts) from None

    async def attempt(self, server: PublicKey, target: PublicKey, race: _Race) -> Dialled:
        """Try one server; raises ``StageError``."""
        session = await self._pool.get(server)
        race.asked = True
        try:
            stream = await session.request(target)
        except Busy as error:
            raise StageError("request", error.name, error) from None
        return session, stream


class _Race:
    """One dial over several servers: they start one after another, the first that gets through wins (RFC 8305)."""

    def __init__(self, dialer: Dialer, target: PublicKey, attempts: list[Attempt], started: float) -> None:
        self.attempts = attempts
        self.asked = False
        self._dialer = dialer
        self._target = target
        self._started = started
        self._running: dict[PublicKey, Deferred[Dialled]] = {}
        self._waiting: list[PublicKey] = []
        self._timer: IDelayedCall | None = None
        self._done: Deferred[Dialled] = Deferred(lambda _: self._stop())

    def note(self, stage: str, server: str, reason: str, error: BaseException | None) -> None:
        """Add to the tree of attempts."""
        elapsed_ms = (self._dialer._clock.seconds() - self._started) * 1000
        self.attempts.append(Attempt(stage, server, elapsed_ms, reason, error))

    def run(self, servers: list[PublicKey]) -> Deferred[Dialled]:
        """Fires with the first to get through; fails with ``DialError`` when none did."""
        self._waiting = servers
        self._next()
        return self._done

    def _next(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None
        if not self._waiting or self._done.called:
            return
        server = self._waiting.pop(0)
        if self._waiting:
            self._timer = self._dialer._clock.callLater(self._dialer.config.stagger_s, self._next)
        attempt = ensureDeferred(self._dialer.attempt(server, self._target, self))
        self._running[server] = attempt
        attempt.addCallbacks(self._won, self._failed, callbackArgs=(server,), errbackArgs=(server,))

    def _won(self, dialled: Dialled, server: PublicKey) -> None:
        self._running.pop(server, None)
        if self._done.called:
            session, stream = dialled
            session.refuse(stream, 0)  # somebody else was faster in the same turn
            return
        self._stop()
        self._done.callback(dialled)

    def _failed(self, failure: Failure, server: PublicKey) -> None:
        self._running.pop(server, None)
        if self._done.called or failure.check(CancelledError):
            return
        error = failure.value
        if isinstance(error, StageError):
            self.note(error.stage, str(server), error.reason, error.error or error)
        else:
            self.note("connect", str(server), type(error).__name__, error)
        if self._waiting:
            self._next()
        elif not self._running:
            self._done.errback(DialError(str(self._target), self.attempts))

    def _stop(self) -> None:
        self._waiting = []
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        for attempt in list(self._running.values()):
            attempt.cancel()


def attempts_json(attempts: list[Attempt]) -> str:
    """The tree of attempts as the event log carries it."""
    return json.dumps([one.as_dict() for one in attempts], separators=(",", ":"))
