"""A relay of the messaging system as a service: the part that :mod:`dmsg.serving.service` leaves to a protocol.

:ref:`spec-messaging-handshake`, :ref:`spec-messaging-relay`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime, IStreamServerEndpoint
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.address import HostPort
from dmsg.crypto.keys import Random, SecretKey
from dmsg.discovery.entry import MESSAGING
from dmsg.errors import DmsgError, RemoteProtocolError
from dmsg.glue.shell import Shell
from dmsg.interfaces import IDiscovery, IEventLog
from dmsg.messaging.core.events import LinkDone, LinkRequested
from dmsg.messaging.core.wire import GO, Layout
from dmsg.messaging.relay.backpressure import Backpressure
from dmsg.messaging.relay.handshake import StrangerHandshake
from dmsg.messaging.relay.limits import RelayLimits
from dmsg.messaging.relay.member import Member
from dmsg.messaging.relay.switch import Switch
from dmsg.serving.admission import Origin
from dmsg.serving.service import RelayService
from dmsg.serving.shell import RelayShell

_log = Logger()


class MessagingRelay(RelayService):
    """A messaging relay as a Twisted service. For ``layout`` and ``go_quirks`` see :class:`Switch`."""

    switch: Switch
    protocol = MESSAGING

    def __init__(
        self,
        reactor: IReactorTime,
        key: SecretKey,
        endpoint: IStreamServerEndpoint,
        *,
        public_address: HostPort | None = None,
        discovery: IDiscovery | None = None,
        limits: RelayLimits | None = None,
        events: IEventLog | None = None,
        random: Random = os.urandom,
        now_ns: Callable[[], int] = time.time_ns,
        layout: Layout = GO,
        go_quirks: bool = False,
    ) -> None:
        switch = Switch(limits, layout=layout, go_quirks=go_quirks)
        super().__init__(
            reactor,
            key,
            endpoint,
            switch,
            public_address=public_address,
            discovery=discovery,
            events=events,
            random=random,
            now_ns=now_ns,
        )

        limits = switch.limits
        self._backpressure = Backpressure(reactor, limits.queue_soft_bytes, limits.slow_consumer_timeout_s)

    def startService(self) -> None:
        """Listen and register, and say in the program's log what the protocol leaves in the clear."""
        _log.warn(
            "links of the messaging system are neither encrypted nor authenticated after their handshake: "
            "the network sees who opens channels to whom, and can end them; what channels carry is encrypted"
        )
        super().startService()

    def after_read(self, shell: Shell) -> None:
        """Flush after a read, and stop reading from a client with too much data waiting."""
        super().after_read(shell)
        assert isinstance(shell, RelayShell)
        self._backpressure.look_at(shell)

    def flushed(self, shell: Shell) -> None:
        """Read again from clients whose data was taken."""
        assert isinstance(shell, RelayShell)
        self._backpressure.look_again(shell)

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: Failure) -> None:
        """Forget a connection, tell its peers, and read again from clients whose data waited for it."""
        assert isinstance(shell, RelayShell)
        self._backpressure.let_go(shell)
        super().connection_lost(shell, error, reason)
        self._backpressure.look_again(shell)

    def greet(self, origin: Origin, now: float) -> StrangerHandshake:
        """A link handshake, which takes a token of ``origin``."""
        limits, random = self.switch.limits, self._random
        return StrangerHandshake(self.key, limits, lambda at: self._rates.take(origin, at), now=now, random=random)

    def on_handshake(self, shell: RelayShell, event: LinkRequested | LinkDone) -> None:
        """Admit the client that has shown its key, or refuse it; go on with its frames when they may begin.

        Between the two steps other clients can reach it already: their frames wait until
        :ref:`the pause <spec-messaging-boundary>` is over.
        """
        if isinstance(event, LinkDone):
            member = shell.member
            assert isinstance(member, Member)
            member.resume()
            member.dirty = False
            member.mark_dirty()
            shell.become(member, event.leftover)
            return
        handshake, now = shell.stranger, self.reactor.seconds()
        assert isinstance(handshake, StrangerHandshake)
        refusal = self.refuses(shell, event.remote)
        if refusal is not None:
            handshake.refuse()
            shell.say_last(handshake.data_to_send(), RemoteProtocolError("admission", refusal))
            return
        member, events = self.switch.add_member(event.remote, now, group=shell.origin.address)
        member.pause()
        self.join(shell, member, events)
        handshake.accept(now)
