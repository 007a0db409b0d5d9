"""A relay of any protocol as a service: accepts connections, and admits them to its switch.

:ref:`spec-server-connections`, :ref:`spec-publishing`, :ref:`spec-draining`. A protocol adds the handshake of a stranger,
and the admission after it.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred, fail, succeed
from twisted.internet.interfaces import IAddress, IDelayedCall, IListeningPort, IReactorTime, IStreamServerEndpoint
from twisted.internet.task import LoopingCall, deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.address import HostPort
from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.discovery.entry import DMSG
from dmsg.discovery.registrar import EntryRegistrar
from dmsg.errors import DmsgError, RemoteProtocolError
from dmsg.glue.fanout import flush_all
from dmsg.glue.in_turns import AT_ONCE, in_turns
from dmsg.glue.listening import address_text, stop_listening
from dmsg.glue.pacer import Pacer
from dmsg.glue.shell import Shell
from dmsg.glue.tasks import to_the_end
from dmsg.glue.throttle import ReadThrottle
from dmsg.glue.waiters import Waiters
from dmsg.interfaces import IDiscovery, IEventLog
from dmsg.sansio.jitter import Jitter
from dmsg.serving.admission import Admission, Origin
from dmsg.serving.errors import RelayDraining
from dmsg.serving.events import Ending, MemberDropped, RequestRefused, SwitchEvent, TransportEnded, TransportStarted
from dmsg.serving.handshake_rates import HandshakeRates
from dmsg.serving.limits import ServingLimits
from dmsg.serving.member import Member
from dmsg.serving.record import RelayRecord
from dmsg.serving.shell import RelayFactory, RelayShell, StrangerCore, shell_of
from dmsg.serving.switch import Switch

_log = Logger()
#: Seconds between two updates of the number of available connections in discovery.
_PUBLISH_INTERVAL_S: Final = 5.0
#: Data that is written when the relay stops has this long to be sent, in seconds.
_CLOSE_TIMEOUT_S: Final = 2.0
#: Seconds between two searches for bytes that have not moved. Even a slow network takes or brings 64 KiB in that time.
_LOOK_S: Final = 10.0
#: Clients found to be idle no more before a newcomer is turned away, in some 10 ms. The search goes on for the next newcomer.
_PASSED_OVER: Final = 1_024
#: Precision of the timeouts of the switch.
_TICK_S: Final = 0.25


class RelayService(Service, ABC):
    """A relay as a Twisted service.

    ``startService`` listens and registers; ``stopService`` drains: no new connections or transports, open ones may go on for
    ``limits.drain_timeout_s``, then everything is closed with a reason. ``ready`` tells whether it is serving.
    """

    switch: Switch[Any, Any]
    #: The protocol that its entry in discovery names (:ref:`spec-entry-protocol`).
    protocol = DMSG

    def __init__(
        self,
        reactor: IReactorTime,
        key: SecretKey,
        endpoint: IStreamServerEndpoint,
        switch: Switch[Any, Any],
        rates: HandshakeRates | None = None,
        *,
        public_address: HostPort | None = None,
        discovery: IDiscovery | None = None,
        events: IEventLog | None = None,
        random: Random = os.urandom,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.reactor = reactor
        self.key = key
        self.switch = switch
        self.pacer = Pacer(reactor)
        self.ready = False
        self.port: IListeningPort | None = None
        self.registrar: EntryRegistrar | None = None
        self._endpoint = endpoint
        self._public_address = public_address
        self._random = random
        self._numbers = count(1)
        self.admission: Admission[RelayShell] = Admission(switch.limits, random=random)
        self._rates = rates or HandshakeRates(switch.limits, reactor.seconds())
        self._shells: dict[RelayShell, None] = {}  # in the order in which they came
        self._idle: Waiters[None] = Waiters()  # for the end of the last transport while it drains
        self._emptied: Waiters[None] = Waiters()  # for the end of the last connection while it stops
        self._stopping = False
        self._starts_again = False  # whether it was started since it began to stop
        self._stopped: Waiters[None] = Waiters()  # for the end of stopService
        self._record = RelayRecord(reactor, events, key.public_key, self.protocol, self.name_of)
        self._timer: IDelayedCall | None = None
        self._looked_at = reactor.seconds()
        self._listening: Waiters[IListeningPort] = Waiters()
        self._start_error: BaseException | None = None
        self._starting: Deferred[None] = succeed(None)
        self._publishing = LoopingCall(self._publish)
        self._publishing.clock = reactor
        self._factory = RelayFactory(self.build_shell)
        if discovery is not None and public_address is not None:
            self.registrar = EntryRegistrar(
                discovery, key, clock=reactor, random=Jitter(random), events=events, now_ns=now_ns
            )

    # --- what a protocol says --------------------------------------------------------------------------------------

    @property
    def limits(self) -> ServingLimits:
        """The limits of its clients."""
        return self.switch.limits

    @abstractmethod
    def greet(self, origin: Origin, now: float) -> StrangerCore:
        """The core of a stranger's handshake."""

    @abstractmethod
    def on_handshake(self, shell: RelayShell, event: Any) -> None:
        """Act on an event of a handshake: ask :meth:`refuses`, then :meth:`join` the client, or tell it why not."""

    def name_of(self, code: int) -> str:
        """What the event log calls the end of a transport."""
        return Ending(code).name.lower()

    # --- service ---------------------------------------------------------------------------------------------------

    def startService(self) -> None:
        """Listen, then register in discovery and keep the entry fresh. Nothing happens if the relay runs already.

        A relay that is still stopping, for example because the wait for that was cancelled, begins once it has stopped.
        """
        if self._stopping:
            self._starts_again = True
            return
        if self.running and self._start_error is None:
            return
        super().startService()  # type: ignore[no-untyped-call]
        self._record.starts()
        self.port = self._start_error = None
        self.switch.draining = False
        if self.registrar is not None:
            self.registrar.reopen()
        self._starting = ensureDeferred(self._start())
        self._starting.addErrback(self._start_failed)

    async def _start(self) -> None:
        self.port = await self._endpoint.listen(self._factory)
        self.ready = True
        self._record.listens(str(self._public_address or address_text(self.port)))
        if self.registrar is not None:
            self._publishing.start(_PUBLISH_INTERVAL_S).addErrback(lambda f: _log.failure("Publishing stopped", f))
        self._listening.fire(self.port)

    def _start_failed(self, failure: Failure) -> None:
        self._start_error = failure.value
        self._listening.fire(failure)
        if failure.check(CancelledError) is None:
            _log.failure("The relay cannot listen", failure=failure)

    def listening(self) -> Deferred[IListeningPort]:
        """Fires with the port once the relay listens, or fails with the error of listening.

        A relay that stops, or has stopped, listens when it is started again.
        """
        if self._starts_again:
            return self._listening.wait()
        if self._start_error is not None:
            return fail(self._start_error)
        return self._listening.wait() if self.port is None else succeed(self.port)

    def stopService(self) -> Deferred[None]:
        """Drain, then close everything; fires when the last connection is gone.

        Does nothing if the service is not started; a second call fires when the first one does. Cancelling the Deferred, or a
        timeout of it, ends only the wait.
        """
        if not self.running:
            return succeed(None)
        if self._stopping:
            if self._starts_again:
                self._starts_again = False
                self._listening.fail(CancelledError())
            return self._stopped.wait()
        self._stopping = True
        return to_the_end(self._stop())

    async def _stop(self) -> None:
        try:
            await self._stop_all()
        finally:  # waiting callers are told, and a later call begins anew if this one has failed
            self._stopping = False
            again, self._starts_again = self._starts_again, False
            if again:
                self.startService()
            self._stopped.fire(None)

    async def _stop_all(self) -> None:
        began = self.reactor.seconds()
        self.ready = False
        self.switch.draining = True
        self._starting.cancel()
        if self._publishing.running:
            self._publishing.stop()
        port, self.port = self.port, None  # listening() waits for the next one
        if port is not None:
            await stop_listening(port)
        if self.registrar is not None:
            await self.registrar.close(withdraw=True)
        await self._wait_until_idle(began + self.limits.drain_timeout_s)
        left = self.switch.open_transports
        await self._drop_transports()
        self.pacer.stop()
        await in_turns(self._shells, lambda shell: shell.close(RelayDraining()), self.reactor)
        if self._shells:
            await self._emptied.wait_at_most(_CLOSE_TIMEOUT_S, self.reactor)
        await in_turns(self._shells, RelayShell.cut, self.reactor)
        if self._shells:
            await self._emptied.wait()
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._record.stopped(began, left)
        super().stopService()  # type: ignore[no-untyped-call]

    async def _drop_transports(self) -> None:
        """End all transports, some in each turn of the reactor. No new ones come, because the switch drains."""
        events: list[SwitchEvent] = []
        for member in list(self.switch.members.values()):
            events += self.switch.drop_transports(Ending.SERVER_DRAINING, member)
            if len(events) >= AT_ONCE:
                self._act(events)
                events = []
                await deferLater(self.reactor, 0)
        self._act(events)

    async def _wait_until_idle(self, deadline: float) -> None:
        """Wait until no transport is open, and no queue holds data that came before the end of one.

        A transport that was requested before may still open meanwhile.
        """
        switch = self.switch
        while (switch.open_transports or switch.queued_bytes) and (left_s := deadline - self.reactor.seconds()) > 0:
            if not switch.open_transports:  # no event tells that a queue is empty
                left_s = min(left_s, _TICK_S)
            await self._idle.wait_at_most(left_s, self.reactor)

    def _tell_waiters(self) -> None:
        """Wake a relay that waits for its own end. Call this last: the service may be over afterwards."""
        if self.switch.draining:
            if not self.switch.open_transports:
                self._idle.fire(None)
            if not self._shells:
                self._emptied.fire(None)

    @property
    def available_connections(self) -> int:
        """How many more clients would be admitted now.

        A relay that one network has filled with idle clients is not full for others, and discovery still lists it.
        """
        if self.switch.draining:
            return 0
        return max(self.limits.connections - len(self.switch.members), self.admission.spare)

    def stats(self) -> dict[str, float]:
        """Gauges for the metrics: open connections and transports, half-open connections, queued bytes."""
        return {
            "connections": len(self.switch.members),
            "transports": self.switch.open_transports,
            "half_open": len(self.admission.strangers),
            "queued_bytes": self.switch.queued_bytes,
        }

    # --- strangers -------------------------------------------------------------------------------------------------

    def build_shell(self, address: IAddress | None) -> RelayShell | None:
        """A shell for a new TCP connection, or ``None`` to close it when too many come from its address."""
        now = self.reactor.seconds()
        host = str(getattr(address, "host", address))
        origin = Origin.of(host)
        refusal = self._rates.connects(origin, now)
        if refusal:
            self._record.turned_away(origin.address, refusal)
            return None
        return RelayShell(self.greet(origin, now), self, self.reactor, number=next(self._numbers), address=host)

    def take_stranger(self, shell: RelayShell) -> None:
        """Let a connection begin its handshake. If there are too many, another one ends (:ref:`spec-server-connections`)."""
        self._shells[shell] = None
        if self.limits.bytes_per_s:
            shell.throttle = ReadThrottle(shell, self.reactor, self.limits.bytes_per_s)
        victim = self.admission.arrived(shell)
        if victim is not None:
            victim[0].fail(RemoteProtocolError("accept", victim[1]))

    # --- from the shells -------------------------------------------------------------------------------------------

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        """Act on the events of a handshake or of the switch."""
        assert isinstance(shell, RelayShell)
        for event in events:
            if isinstance(event, SwitchEvent):
                self._on_switch_event(event)
            else:
                self.on_handshake(shell, event)

    def after_read(self, shell: Shell) -> None:
        """Flush all connections that have something to send because of this read."""
        assert isinstance(shell, RelayShell)
        if shell.congested or shell.core is not shell.member:
            shell.flush()  # writes the answer of a handshake, or stops reading from a client that takes no answers
        flush_all(self.switch.dirty)  # a member that has something to send is among them
        if not 0 <= self.switch.now - self._looked_at < _LOOK_S:
            self._drop_stale()
        self._arm()
        self._tell_waiters()

    def flushed(self, shell: Shell) -> None:
        """See :class:`dmsg.glue.shell.Owner`."""

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: Failure) -> None:
        """Forget a connection and tell its peers."""
        assert isinstance(shell, RelayShell)
        self.admission.left(shell)
        self._shells.pop(shell, None)
        if shell.throttle is not None:
            shell.throttle.stop()
        if shell.member is not None:
            self._member_lost(shell, shell.member, error)
        else:
            self._record.stranger_lost(shell, error)
        self._tell_waiters()

    def _member_lost(self, shell: RelayShell, member: Member[Any], error: DmsgError | None) -> None:
        still_open = len(member.legs)
        self._act(self.switch.remove_member(member, self.reactor.seconds()))
        self._record.member_lost(shell, member, error, still_open)
        member.owner = None  # without the cycle both are freed now, before the garbage collector runs

    # --- inside ----------------------------------------------------------------------------------------------------

    def refuses(self, shell: RelayShell, remote: PublicKey) -> str | None:
        """Why the stranger, which has shown the key ``remote``, is not admitted, or ``None``. Another client may have to go."""
        earlier = self.switch.members.get(remote.raw)
        # It takes the place of its earlier connection, but not at another address: keys that move would overfill an address.
        is_new_there = earlier is None or shell_of(earlier).origin.address != shell.origin.address
        if earlier is None or (is_new_there and self.admission.is_full(shell.origin)):
            self._make_room(shell)
        refusal = self.switch.refusal(remote)
        if refusal is None and is_new_there and self.admission.is_full(shell.origin):
            refusal = "connections_per_address"
        if refusal is not None:
            self.admission.left(shell)
            self._record.client_refused(shell, remote, refusal)
        return refusal

    def join(
        self, shell: RelayShell, member: Member[Any], events: Sequence[SwitchEvent], *, extended: bool = False
    ) -> None:
        """Note that the client of ``shell`` was admitted to the switch as ``member``, with ``events``."""
        shell.member = member
        member.owner = shell
        self.admission.joined(shell)
        self._record.admitted(shell, member, extended=extended)
        for event in events:
            self._on_switch_event(event)

    def _make_room(self, shell: RelayShell) -> None:
        """End an idle connection if ``shell`` needs a place."""
        for _ in range(_PASSED_OVER):
            victim = self.admission.victim(shell.origin)
            if victim is None:
                return
            member = victim.member
            assert member is not None
            if not member.legs:
                self._evict(member)
                return
            self.admission.is_busy(victim)

    def _drop_stale(self) -> None:
        """End the connections that make the relay hold too much for too long."""
        self._looked_at = self.switch.now
        for member in self.switch.stale_members():
            self._evict(member)

    def _evict(self, member: Member[Any]) -> None:
        self._record.client_refused(shell_of(member), member.remote, "evicted")
        self._act([*self.switch.remove_member(member, self.reactor.seconds()), MemberDropped(member, "evicted")])

    def _act(self, events: Sequence[SwitchEvent]) -> None:
        for event in events:
            self._on_switch_event(event)
        flush_all(self.switch.dirty)
        self._arm()

    def _on_switch_event(self, event: SwitchEvent) -> None:
        match event:
            case TransportStarted(asking=leg):
                self.admission.carries(shell_of(leg.member))
                self.admission.carries(shell_of(leg.other.member))
                self._record.opened(leg)
            case TransportEnded(asking=leg):
                for member in (leg.member, leg.other.member):
                    if not member.legs:
                        self.admission.rests(shell_of(member))
                self._record.ended(event)
            case RequestRefused(member=member, reason=reason):
                self._record.request_refused(member, reason)
            case MemberDropped(member=member, reason=reason):
                self.admission.left(shell_of(member))
                shell_of(member).fail(RemoteProtocolError("connection", reason))

    def _arm(self) -> None:
        due = self.switch.next_timeout()
        if due is None:
            return
        if self._timer is None or not self._timer.active():
            self._timer = self.reactor.callLater(max(_TICK_S, due - self.reactor.seconds()), self._tick)
        elif due < self._timer.getTime() - _TICK_S:  # a later request may be due earlier
            self._timer.reset(max(_TICK_S, due - self.reactor.seconds()))

    def _tick(self) -> None:
        self._act(self.switch.handle_timeout(self.reactor.seconds()))
        self._tell_waiters()

    def _publish(self) -> None:
        if self.registrar is not None and self._public_address is not None:
            self.registrar.set_server(self._public_address, self.available_connections, protocol=self.protocol)
