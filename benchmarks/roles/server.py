"""A server of ours as in production, except for limits that a bench raises."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from typing import Any

from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.task import deferLater

from benchmarks.processes import raise_open_files
from dmsg.address import HostPort
from dmsg.crypto.keys import SecretKey, read_key_file
from dmsg.messaging.relay.limits import RelayLimits as MessagingLimits
from dmsg.messaging.relay.service import MessagingRelay
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.service import DmsgRelay
from dmsg.ops.gc import settle_memory
from dmsg.serving.service import RelayService

USES_TWISTED = True


class Role:
    """Options: ``limits`` (fields of RelayLimits), ``discovery`` (a URL), ``key_file`` and ``port`` (else new ones),
    ``protocol`` (``messaging``, or ``dmsg`` without it).
    """

    def __init__(self, reactor: Any, options: dict[str, Any]) -> None:
        raise_open_files()
        self._reactor = reactor
        key_file = options.get("key_file")
        self.key = read_key_file(key_file) if key_file else SecretKey.generate()
        with contextlib.closing(socket.create_server(("127.0.0.1", options.get("port", 0)))) as probe:
            self.port = probe.getsockname()[1]
        discovery = None
        if options.get("discovery"):
            from benchmarks.roles.discovery import connect_discovery  # HTTP takes long to import and most need none

            discovery = connect_discovery(options["discovery"], reactor)
        self.protocol = options.get("protocol", "dmsg")
        make: Any = MessagingRelay if self.protocol == "messaging" else DmsgRelay
        limits = MessagingLimits() if self.protocol == "messaging" else RelayLimits()
        self.server: RelayService = make(
            reactor,
            self.key,
            TCP4ServerEndpoint(reactor, self.port, backlog=1024, interface="127.0.0.1"),
            public_address=HostPort("127.0.0.1", self.port),
            discovery=discovery,
            limits=dataclasses.replace(limits, **options.get("limits", {})),
        )

    async def start(self) -> dict[str, Any]:
        """Listen."""
        self.server.startService()
        await self.server.listening()
        settle_memory()  # as the twistd role does
        return {"key": str(self.key.public_key), "port": self.port, "protocol": self.protocol}

    async def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``stats`` (pause_s): the server's gauges, after a pause."""
        assert command == "stats"
        await deferLater(self._reactor, arguments.get("pause_s", 0.0))
        return dict(self.server.stats())
