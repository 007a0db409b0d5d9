"""A relay of the Reliable Message Bus as a service: sessions over WebSockets, envelopes between them, and HTTP.

:ref:`spec-rmb-relay`. Data read from one session is parsed, routed and written to the receiving sessions in one go:
``WebSocket.receive_data``, ``Switch.route``, ``Session.data_to_send``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final, cast

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.errors import DmsgError, RemoteProtocolError
from dmsg.eventlog import schema as ev
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.refusals import TwinReport
from dmsg.glue.fanout import flush_all
from dmsg.glue.in_turns import in_turns
from dmsg.glue.shell import Shell
from dmsg.glue.tasks import to_the_end
from dmsg.glue.waiters import Waiters
from dmsg.glue.websocket import WebSocketShell
from dmsg.interfaces import IEventLog
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.close_codes import CloseCode
from dmsg.rmb.core.errors import MalformedEnvelope, RelayProblem, TokenRefused
from dmsg.rmb.core.limiter import Limit
from dmsg.rmb.core.limits import MAX_ENVELOPE_BYTES
from dmsg.rmb.interfaces import ITwinRegistry
from dmsg.rmb.relay.delivery import Delivery
from dmsg.rmb.relay.limits import RelayLimits
from dmsg.rmb.relay.login import Logins
from dmsg.rmb.relay.session import Session
from dmsg.rmb.relay.stores.base import QueueStore
from dmsg.rmb.relay.switch import Counts, Parcel, Switch
from dmsg.sansio.websocket import WebSocketConfig
from dmsg.serving.admission import Admission, Origin
from dmsg.serving.errors import RelayDraining

_log = Logger()
#: Seconds between two lines of the event log with the counts of envelopes.
_ROUTED_EVERY_S: Final = 10.0


class RmbRelay(Service):
    """A relay as a Twisted service. ``domains`` are its names in the registry, ``limit`` is the rate limit of a twin.

    An envelope has at most ``max_message_bytes``; that is enforced while its fragments arrive.

    ``startService`` lets sessions in; ``stopService`` closes all sessions, and gives deliveries under way up to
    ``limits.drain_timeout_s`` to end. Envelopes that sessions were not given are in the store then.
    """

    def __init__(
        self,
        reactor: Any,
        registry: ITwinRegistry,
        store: QueueStore,
        *,
        domains: frozenset[str],
        limits: RelayLimits | None = None,
        limit: Limit | None = None,
        max_message_bytes: int = MAX_ENVELOPE_BYTES,
        demand_audience: bool = False,
        events: IEventLog | None = None,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self.reactor: IReactorTime = reactor
        self.max_message_bytes = max_message_bytes
        self.switch = Switch(limits, limit=limit)
        self.limits = limits = self.switch.limits
        self.delivery = Delivery(
            self.switch,
            registry,
            store,
            domains=domains,
            clock=reactor,
            unix_time=unix_time,
            flush=self.flush,
        )
        self.admission: Admission[Session] = Admission(limits)
        self.ready = False
        self._stops = 0  # calls of stopService that are under way
        #: Sessions that the relay closed.
        self.evictions = 0
        self._logins = Logins(registry, limits, domains=domains, demand_audience=demand_audience, now=reactor.seconds())
        self._store = store
        self._events = events
        self._unix_time = unix_time
        self._numbers = count(1)
        #: The limits of a session's WebSocket.
        self.websocket_config = WebSocketConfig(
            max_message_bytes=max_message_bytes, ping_after_s=limits.ping_after_s, dead_after_s=limits.dead_after_s
        )
        self._report = TwinReport(reactor, self._emit)
        self._shells: set[WebSocketShell] = set()
        self._emptied: Waiters[None] = Waiters()
        self._routed = Counts()
        self._telling = LoopingCall(self._tell_routed)
        self._telling.clock = reactor
        store.listen(self.delivery.keeper.stored, self._replaced_elsewhere)

    # --- service ---------------------------------------------------------------------------------------------------

    def startService(self) -> None:
        """Let sessions in; nothing happens if the relay runs already.

        A relay that is still stopping, because the wait for that was cancelled, lets them in once it has stopped.
        """
        if self.running:
            return
        super().startService()  # type: ignore[no-untyped-call]
        if not self._stops:
            self._begin()

    def _begin(self) -> None:
        self.ready = True
        self.delivery.keeper.start()
        self._telling.start(_ROUTED_EVERY_S, now=False)

    def stopService(self, drain_timeout_s: float | None = None) -> Deferred[None]:
        """Close the sessions, and finish deliveries under way, in ``drain_timeout_s`` in place of that of the limits.

        Cancelling the Deferred, or a timeout of it, ends only the wait.
        """
        super().stopService()  # type: ignore[no-untyped-call]
        return to_the_end(self._stop(self.limits.drain_timeout_s if drain_timeout_s is None else drain_timeout_s))

    async def _stop(self, drain_timeout_s: float) -> None:
        self._stops += 1
        try:
            await self._stop_all(drain_timeout_s)
        finally:
            self._stops -= 1
            if self.running and not self._stops:
                self._begin()  # it was started again meanwhile

    async def _stop_all(self, drain_timeout_s: float) -> None:
        self.ready = False
        deadline = self.reactor.seconds() + drain_timeout_s
        await in_turns(self.switch.sessions.values(), self._dismiss, self.reactor)
        await self.delivery.background.tasks.when_idle(deadline - self.reactor.seconds(), self.reactor)
        if self._shells:
            await self._emptied.wait_at_most(self.limits.close_timeout_s, self.reactor)
        await in_turns(self._shells, WebSocketShell.cut, self.reactor)
        if self._shells:
            await self._emptied.wait()
        self.delivery.keeper.stop()
        patience_s = max(self.limits.close_timeout_s, deadline - self.reactor.seconds())
        await self.delivery.background.tasks.when_idle(patience_s, self.reactor)
        if self._telling.running:
            self._telling.stop()
            self._tell_routed()
        self._report.close()

    def _dismiss(self, session: Session) -> None:
        if self.switch.sessions.get(session.address) is session:  # else it has ended meanwhile
            self._close(session, CloseCode.GOING_AWAY, "the relay stops", RelayDraining())

    def stats(self) -> dict[str, float]:
        """Levels for the metrics."""
        return {
            "sessions": len(self.switch.sessions),
            "queued_bytes": self.switch.waiting_bytes + self.switch.returning.used,
            "pending_bytes": self.delivery.pending.used + self.delivery.waiting.used,
            "stalled_sessions": len(self.switch.stalled),
        }

    def public_stats(self) -> dict[str, float]:
        """The counters of the public relay, under its names."""
        counts, switch = self.switch.counts, self.switch
        return {
            "relay_worker_connections": len(switch.sessions),
            "relay_message_rx": counts.local + counts.stored,
            "relay_message_rx_bytes": switch.taken_bytes,
            "relay_message_tx": switch.written,
            "relay_message_tx_bytes": switch.written_bytes,
            "relay_session_evictions_total": self.evictions,
        }

    # --- sessions --------------------------------------------------------------------------------------------------

    async def login(self, query: str | None, host: str) -> SessionAddress:
        """The session that a client at ``host`` may open in this turn of the reactor; raises ``TokenRefused``."""
        began = self.reactor.seconds()
        try:
            if not self.ready:
                raise TokenRefused(503, "the relay stops", Reason.SERVER_DRAINING)
            address = await self._logins.check(query, Origin.of(host), began, self._unix_time())
            self._check_room(address, host)
            return address
        except TokenRefused as error:
            elapsed_ms = (self.reactor.seconds() - began) * 1000
            self._emit(ev.HandshakeFailed(host, "token", Reason.of(error.reason), elapsed_ms))
            raise

    def _check_room(self, address: SessionAddress, host: str) -> None:
        """Raise ``TokenRefused`` when there is no place for ``address`` and no session can be evicted for it."""
        if not self.ready:
            raise TokenRefused(503, "the relay stops", Reason.SERVER_DRAINING)
        origin, sessions = Origin.of(host), self.switch.sessions
        if not self._needs_place(sessions.get(address) or self.switch.surplus(address), origin):
            return
        if self.admission.victim(origin):
            return
        if self.admission.is_full(origin):
            raise TokenRefused(503, "too many sessions from this address", "connections_per_address")
        if len(sessions) >= self.limits.connections:
            raise TokenRefused(503, "too many sessions", "too many connections")

    def _needs_place(self, goes: Session | None, origin: Origin) -> bool:
        """Whether a session from ``origin`` needs a further place, though ``goes`` ends for it.

        If ``goes`` comes from another address, it frees no place at a full address of ``origin``: otherwise sessions could
        exceed that limit by moving there.
        """
        return goes is None or (goes.origin.address != origin.address and self.admission.is_full(origin))

    def _make_room(self, address: SessionAddress, origin: Origin) -> None:
        """Close the sessions whose place ``address`` takes."""
        older, surplus = self.switch.sessions.get(address), self.switch.surplus(address)
        if older is not None:
            self._close(older, CloseCode.REPLACED, "a newer connection has taken this session", "replaced")
        elif surplus is not None:
            self._close(surplus, CloseCode.TOO_MANY_SESSIONS, "the twin has too many sessions", "too many connections")
        if self._needs_place(older or surplus, origin) and (victim := self.admission.victim(origin)) is not None:
            self._close(victim, CloseCode.EVICTED, "the place is needed for others", "evicted")

    def open(self, shell: WebSocketShell, address: SessionAddress, host: str, began: float) -> None:
        """Begin a session of ``address`` on an accepted WebSocket; ``began`` is when its request came."""
        now, origin = self.reactor.seconds(), Origin.of(host)
        self._make_room(address, origin)
        session = Session(
            self.switch, address, self.websocket_config, origin=origin, number=next(self._numbers), now=now
        )
        session.owner = shell
        self._shells.add(shell)
        shell.become(session, b"")
        self.switch.join(session)
        self.admission.joined(session)
        self._store.attach(address)
        handshake_ms = (now - began) * 1000
        name = ev.digest(address.connection)
        self._emit(ev.TwinSessionOpened(session.number, address.twin, name, host, handshake_ms))
        self.delivery.joined(address)
        self.delivery.keeper.fetch(session)

    def _close(self, session: Session, code: CloseCode, text: str, why: DmsgError | str) -> None:
        """End a session: it leaves the switch now, but its connection stays open for the closing handshake."""
        self.evictions += 1
        shell = cast(WebSocketShell, session.owner)
        self._forget(session)
        error = why if isinstance(why, DmsgError) else RemoteProtocolError("session", why)
        shell.close(error, code=code, reason=text)

    def _forget(self, session: Session) -> None:
        self.admission.left(session)
        if self.switch.leave(session):
            self._store.detach(session.address)
        self.delivery.keeper.left(session)

    def _replaced_elsewhere(self, address: SessionAddress) -> None:
        """The session connected to another process that shares the store."""
        session = self.switch.sessions.get(address)
        if session is not None:
            self._close(session, CloseCode.REPLACED, "a newer connection has taken this session", "replaced")

    # --- from the shells -------------------------------------------------------------------------------------------

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        """Route the messages of one read."""
        session = cast(Session, shell.core)
        messages = cast("Sequence[bytes]", events if type(events[-1]) is bytes else events[:-1])  # Closed is the last
        if self.switch.sessions.get(session.address) is not session:
            return
        is_over = len(messages) < len(events)
        try:
            parcels = self.switch.route(session, messages, self.reactor.seconds(), self._unix_time())
        except MalformedEnvelope as error:
            parcels = cast("list[Parcel]", error.events)
            self._close(session, CloseCode.MALFORMED, "malformed envelope", error)
        if not session.proved:
            session.proved = True
            self.admission.carries(session)
            self.admission.rests(session)
        if parcels:
            self.delivery.take(session, parcels)
        if is_over:
            self._forget(session)

    def after_read(self, shell: Shell) -> None:
        """Write the answers and envelopes that one read has caused."""
        shell.flush()
        self.flush()

    def flush(self) -> None:
        """Write to the sessions that got something; while too much is queued, close the largest sessions."""
        switch = self.switch
        switch.now = self.reactor.seconds()
        flush_all(switch.dirty)
        while sessions := switch.overfull():
            for session in sessions:
                self._close(session, CloseCode.SLOW_CONSUMER, "this session takes too much memory", "slow_consumer")
                if session.owner.congested or session.incoming_bytes:
                    session.owner.cut()  # its memory is needed now
        if switch.problems:
            problems, switch.problems = switch.problems, []
            for twin, problem in problems:
                if problem is RelayProblem.RATE_LIMITED:
                    self._report.rate_limited(twin)
                else:
                    self._report.failed(twin, problem.text)

    def flushed(self, shell: Shell) -> None:
        """Read more from the store when the session has written all that was read before."""
        session = shell.core
        if type(session) is Session and session.stored and not session.queue:
            self.delivery.keeper.fetch(session)

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: Failure) -> None:
        """Forget a session that has ended; envelopes that it has not written go to the store."""
        assert isinstance(shell, WebSocketShell)
        self._shells.discard(shell)
        session = shell.core
        if isinstance(session, Session):
            self._forget(session)
            self._emit(
                ev.TwinSessionClosed(
                    session.number,
                    session.address.twin,
                    ev.digest(session.address.connection),
                    _why(error),
                    self.reactor.seconds() - session.opened_at,
                    session.envelopes_in,
                    session.envelopes_out,
                    session.bytes_in,
                    session.bytes_out,
                )
            )
            session.owner = None  # breaks a cycle, so that both are freed now and not by the garbage collector
        if not self._shells:
            self._emptied.fire(None)

    # --- the event log ---------------------------------------------------------------------------------------------

    def _tell_routed(self) -> None:
        self.flush()  # problems of envelopes whose senders have gone
        now = dataclasses.replace(self.switch.counts)
        counts = {name: getattr(now, name) - getattr(self._routed, name) for name in Counts.__slots__}
        self._routed = now
        if any(counts.values()):
            self._emit(ev.EnvelopesRouted(**counts))

    def _emit(self, event: ev.Event) -> None:
        if self._events is not None:
            self._events.emit(event)


def _why(error: DmsgError | None) -> Reason:
    """Why a session ended. Without an error of ours the client closed it."""
    if error is None:
        return Reason.CLOSED_BY_PEER
    if isinstance(error, RelayDraining):
        return Reason.SERVER_DRAINING
    return Reason.of(error.reason if isinstance(error, RemoteProtocolError) else type(error).__name__)
