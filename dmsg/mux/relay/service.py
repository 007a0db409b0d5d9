"""A relay of the dmsg protocol as a service: the part that :mod:`dmsg.serving.service` leaves to a protocol.

:ref:`spec-server-connections`, :ref:`spec-admission`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime, IStreamServerEndpoint

from dmsg.address import HostPort
from dmsg.crypto.keys import Random, SecretKey
from dmsg.errors import RemoteProtocolError
from dmsg.glue.processor import uses_aes
from dmsg.interfaces import IDiscovery, IEventLog
from dmsg.mux.core.events import HandshakeDone
from dmsg.mux.core.handshake import Handshake, Role
from dmsg.mux.core.hello import AnnouncedLimits, hello_payload
from dmsg.mux.core.wire import FRAME_PAYLOAD_LIMIT_BYTES, reason_name
from dmsg.mux.relay.handshake_budget import HandshakeBudget
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.switch import Switch
from dmsg.serving.admission import Origin
from dmsg.serving.service import RelayService
from dmsg.serving.shell import RelayShell


class DmsgRelay(RelayService):
    """A dmsg relay as a Twisted service; with ``extended`` it speaks the secure extension.

    ``aes`` is as in :class:`~dmsg.mux.client.service.ClientConfig`.
    """

    switch: Switch

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
        extended: bool = True,
        aes: bool | None = None,
    ) -> None:
        limits = limits or RelayLimits()
        self._budget = HandshakeBudget(limits, reactor.seconds(), random=random, cookies=extended)
        super().__init__(
            reactor,
            key,
            endpoint,
            Switch(limits, random=random),
            self._budget,
            public_address=public_address,
            discovery=discovery,
            events=events,
            random=random,
            now_ns=now_ns,
        )
        announced = AnnouncedLimits(
            limits.transports_per_connection, int(limits.requests_per_s), FRAME_PAYLOAD_LIMIT_BYTES
        )
        self._hello = hello_payload(announced, limits.window_bytes, aes=uses_aes(aes)) if extended else b""

    def greet(self, origin: Origin, now: float) -> Handshake:
        """A Noise handshake, whose first message has to pass the budget."""
        return Handshake(
            Role.SERVER,
            self.key,
            now=now,
            payload=self._hello,
            timeout_s=self.limits.handshake_timeout_s,
            first_byte_timeout_s=self.limits.first_byte_timeout_s,
            gate=self._budget.gate(origin),
            random=self._random,
        )

    def on_handshake(self, shell: RelayShell, event: HandshakeDone) -> None:
        """Admit the client, or say in an OK frame why not (:ref:`spec-admission`)."""
        refusal = self.refuses(shell, event.remote)
        if refusal is not None:
            shell.say_last(self.switch.reject(event.records, refusal), RemoteProtocolError("admission", refusal))
            return
        extended = bool(self._hello) and event.peer.extended
        member, events = self.switch.add_member(
            event.remote, event.records, self.reactor.seconds(), extended=extended, group=shell.origin.address
        )
        self.join(shell, member, events, extended=extended)
        shell.become(member, event.leftover)

    def name_of(self, code: int) -> str:
        """The name of a CLOSE reason."""
        return reason_name(code)
