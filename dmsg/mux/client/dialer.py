"""From a public key to an open stream: look up, race the servers, and if it fails say everything that was tried.

:ref:`spec-dialling`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.errors import DiscoveryError, DiscoveryUnavailable, EntryNotFound
from dmsg.discovery.lookups import CallerLimits, Known, Lookups
from dmsg.errors import Attempt, DialError, StageError
from dmsg.eventlog.reasons import Reason
from dmsg.interfaces import IDiscovery
from dmsg.mux.client.pending import OpenedStream
from dmsg.mux.client.session import ServerSession
from dmsg.mux.core.e2e_handshake import Resume
from dmsg.mux.core.e2e_negotiation import Carrier, Security
from dmsg.mux.core.errors import (
    Busy,
    ConnectionRefusedByServer,
    DowngradeRefused,
    HandshakeTimeout,
    IntegrityError,
    RateLimited,
    ServerDraining,
    Unsupported,
)
from dmsg.relays.errors import NoCommonServer, SessionTimeout
from dmsg.relays.pool import SessionPool

#: What a request may fail with because of the relay; what else there is says something about the peer.
_RELAY_FAULTS: Final = (Busy, RateLimited, ServerDraining, HandshakeTimeout, IntegrityError)


@dataclass(frozen=True, slots=True)
class DialConfig:
    """Times of a dial, in seconds."""

    #: For the whole dial.
    timeout_s: float = 10.0
    #: The next server is tried when the one before has not answered for so long.
    stagger_s: float = 0.25
    #: So many of the servers an entry names are tried, those connected already above all: an entry is a stranger's word.
    servers: int = 8
    #: How long an entry that was looked up is used again without asking.
    entry_lifetime_s: float = 5.0
    #: The same when a transport looks for another path: the peer has probably just moved, but all its transports have.
    resume_entry_lifetime_s: float = 0.2
    #: Discovery is not waited for longer by a transport that looks for another path.
    resume_look_up_s: float = 1.0
    #: Entries kept for that.
    entries: int = 1_024
    callers: CallerLimits = field(default_factory=CallerLimits)


@dataclass(frozen=True, slots=True)
class DialRequest:
    """What a dial is for."""

    target: PublicKey
    service: str = ""
    security: Security = Security.PREFER
    resume: Resume | None = None


class Dialer:
    """Dials by key through a pool of sessions."""

    def __init__(
        self,
        clock: IReactorTime,
        pool: SessionPool[ServerSession],
        discovery: IDiscovery | None,
        config: DialConfig,
        uniform: Callable[[], float],
    ) -> None:
        self.config = config
        self._clock = clock
        self._pool = pool
        self._lookups = Lookups(clock, discovery, config.entries, config.callers) if discovery is not None else None
        self._uniform = uniform

    async def dial(
        self, request: DialRequest, timeout_s: float | None, attempts: list[Attempt]
    ) -> OpenedStream[ServerSession]:
        """An open stream as ``request`` says; what was tried is added to ``attempts``. Raises ``DialError``.

        Cancelling closes whatever was under way.
        """
        limit_s = self.config.timeout_s if timeout_s is None else timeout_s
        race = _Race(self, request, attempts, self._clock.seconds())

        def timed_out(result: object, _: float) -> Failure:
            owing = {str(server): stage for server, stage in race.owing.items()} or {"": "discovery"}
            for server, stage in owing.items():
                race.note(stage, server, "timeout", SessionTimeout("the dial", limit_s))
            return Failure(DialError(str(request.target), attempts))

        running: Deferred[OpenedStream[ServerSession]] = ensureDeferred(self._run(race))
        try:
            return await running.addTimeout(limit_s, self._clock, timed_out)
        except DialError:
            if self._lookups is not None and request.resume is None:
                self._lookups.forget(request.target)
            raise

    async def promises(self, peer: PublicKey) -> bool:
        """Whether the signed entry of a peer that asks in the clear promises end-to-end security.

        Without discovery, when it cannot be reached, when it says that there is no entry, or when too much has been
        asked already, it counts as promised: no peer is spoken to in the clear because a look-up failed, or because
        discovery keeps an entry back (:ref:`spec-downgrade-rule`). Base clients always have one.
        """
        if self._lookups is None:
            return True
        return await self._lookups.promised(peer, self.config.entry_lifetime_s)

    async def _run(self, race: _Race) -> OpenedStream[ServerSession]:
        race.known = await self._look_up(race)
        order = self._order(race.known.servers)
        if not order:
            race.note("discovery", "", "no common server", NoCommonServer("the entry names no server to go through"))
            raise DialError(str(race.request.target), race.attempts)
        if len(order) == 1:
            return await self._through(order[0], race)
        return await race.run(order)

    def _order(self, servers: Sequence[PublicKey]) -> list[PublicKey]:
        """The servers to race, best first; of those an entry names, so many as may be tried."""
        connected, scores, now = self._pool.sessions, self._pool.scores, self._clock.seconds()
        if self._lookups is not None and len(servers) > self.config.servers:
            drawn = scores.draw(servers, self._uniform, now)
            servers = sorted(drawn, key=lambda server: server not in connected)[: self.config.servers]
        return scores.best_first(servers, connected, self._uniform, now)

    async def _look_up(self, race: _Race) -> Known:
        target, resume = race.request.target, race.request.resume
        pinned, sessions = self._pool.pinned, self._pool.sessions
        if self._lookups is None:
            return Known((*sessions, *(one for one in pinned if one not in sessions)), promised=True)
        config = self.config
        known = self._lookups.known(
            target, config.entry_lifetime_s if resume is None else config.resume_entry_lifetime_s
        )
        if known is not None:
            return known
        asking = self._lookups.ask(target)
        if resume is not None:
            asking.addTimeout(config.resume_look_up_s, self._clock, _too_late)
        try:
            return await asking
        except DiscoveryError as error:
            race.note("discovery", "", "no entry" if isinstance(error, EntryNotFound) else "unavailable", error)
            # Pinned servers need no discovery: the peer may be on one of them. And a peer we have a transport with is
            # probably still where it was, or where we are.
            earlier = self._lookups.known(target, math.inf) if resume is not None else None
            servers = (
                *pinned,
                *(sessions if resume is not None else ()),
                *(earlier.servers if earlier is not None else ()),
            )
            return Known(tuple(dict.fromkeys(servers)), promised=True)

    async def _through(self, server: PublicKey, race: _Race) -> OpenedStream[ServerSession]:
        try:
            return await self.attempt(server, race)
        except StageError as error:
            race.note(error.stage, str(server), error.reason, error.error or error)
            raise DialError(str(race.request.target), race.attempts) from None

    async def attempt(self, server: PublicKey, race: _Race) -> OpenedStream[ServerSession]:
        """Try one server; raises ``StageError``."""
        race.owing[server] = "connect"
        session = await self._pool.get(server)
        race.owing[server] = "accept"
        carrier = self._carrier(session, race)
        scores, clock = self._pool.scores, self._clock
        asked = clock.seconds()
        try:
            opened = await self._request(session, carrier, race.request)
        except CancelledError:
            waited_s = clock.seconds() - asked
            if waited_s >= self.config.stagger_s:  # another one was faster although it began later, or time was up
                scores.answered(server, waited_s * 1000, clock.seconds())
            raise
        except StageError as error:
            if isinstance(error.error, _RELAY_FAULTS):
                scores.refused(server, clock.seconds())
            raise
        scores.answered(server, opened.accept_ms, clock.seconds())
        return opened

    async def _request(
        self, session: ServerSession, carrier: Carrier, request: DialRequest
    ) -> OpenedStream[ServerSession]:
        try:
            try:
                return await session.request(request.target, carrier, service=request.service, resume=request.resume)
            except StageError as error:
                if carrier is not Carrier.REQUEST or not isinstance(error.error, Unsupported):
                    raise
            # the peer's own connection to this server is a base one, or is said to be one: never less than carrier B
            return await session.request(
                request.target, Carrier.FORWARD, service=request.service, resume=request.resume
            )
        except Busy as error:
            raise StageError("request", error.name, error) from None

    def _carrier(self, session: ServerSession, race: _Race) -> Carrier:
        request = race.request
        if request.security is Security.HOP or (request.security is Security.PREFER and not race.known.promised):
            if request.service:
                raise StageError("request", Unsupported.name, Unsupported("base peers know no services", by="local"))
            return Carrier.NONE
        if not race.known.promised:
            error = DowngradeRefused("the peer's entry promises no end-to-end security", by="local")
            raise StageError("request", error.name, error)
        return Carrier.REQUEST if session.connection.extended else Carrier.FORWARD


class _Race:
    """One dial over several servers: they start one after another, the first that gets through wins (RFC 8305)."""

    def __init__(self, dialer: Dialer, request: DialRequest, attempts: list[Attempt], started: float) -> None:
        self.request = request
        self.known = Known((), promised=True)
        self.attempts = attempts
        #: Servers that were begun with and have not failed, and the stage each has got to.
        self.owing: dict[PublicKey, str] = {}
        self._dialer = dialer
        self._started = started
        self._running: dict[PublicKey, Deferred[OpenedStream[ServerSession]]] = {}
        self._waiting: list[PublicKey] = []
        self._timer: IDelayedCall | None = None
        self._done: Deferred[OpenedStream[ServerSession]] = Deferred(lambda _: self._stop())

    def note(self, stage: str, server: str, reason: str, error: BaseException | None) -> None:
        """Add to the tree of attempts."""
        elapsed_ms = (self._dialer._clock.seconds() - self._started) * 1000
        self.attempts.append(Attempt(stage, server, elapsed_ms, reason, error))

    def run(self, servers: list[PublicKey]) -> Deferred[OpenedStream[ServerSession]]:
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
        attempt = ensureDeferred(self._dialer.attempt(server, self))
        self._running[server] = attempt
        attempt.addCallbacks(self._won, self._failed, callbackArgs=(server,), errbackArgs=(server,))

    def _won(self, dialled: OpenedStream[ServerSession], server: PublicKey) -> None:
        self._running.pop(server, None)
        if self._done.called:
            dialled.session.abort_stream(dialled.stream)  # another dial was faster in the same turn
            return
        self._stop()
        self._done.callback(dialled)

    def _failed(self, failure: Failure, server: PublicKey) -> None:
        self._running.pop(server, None)
        if self._done.called or failure.check(CancelledError):
            return
        self.owing.pop(server, None)
        error = failure.value
        if isinstance(error, StageError):
            self.note(error.stage, str(server), error.reason, error.error or error)
        else:
            self.note("connect", str(server), type(error).__name__, error)
        if self._waiting:
            self._next()
        elif not self._running:
            self._done.errback(DialError(str(self.request.target), self.attempts))

    def _stop(self) -> None:
        self._waiting = []
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        for attempt in list(self._running.values()):
            attempt.cancel()


def _too_late(result: object, timeout_s: float) -> Failure:
    return Failure(DiscoveryUnavailable(f"no answer within {timeout_s:g} s"))


def attempts_json(attempts: list[Attempt]) -> str:
    """The tree of attempts as the event log carries it: without a word that another side said."""
    known = [one.as_dict() | {"reason": Reason.of(one.reason), "detail": _detail(one.error)} for one in attempts]
    return json.dumps(known, separators=(",", ":"))


def _detail(error: BaseException | None) -> str:
    if error is None:
        return ""
    if isinstance(error, DiscoveryError):
        return error.text
    if isinstance(error, ConnectionRefusedByServer):
        return error.reason
    return str(error)
