"""``twistd dmsg-server``: one relay."""

from __future__ import annotations

import dataclasses
from typing import Any

from dmsg.crypto.errors import KeyFileError
from dmsg.crypto.keys import SecretKey, read_key_file
from dmsg.errors import ConfigError
from dmsg.eventlog.log import short_node
from dmsg.taps._options import RoleOptions
from dmsg.taps._service import RoleService
from dmsg.taps.settings import ServerSettings


class Options(RoleOptions):
    """Options of ``twistd dmsg-server``."""

    synopsis = "--key FILE [options]"
    longdesc = "A server (relay): accepts connections of clients and carries the transports between them."
    role = "server"
    settings_class = ServerSettings


class RelayService(RoleService):
    """A relay with its event log, metrics and registration, as a Twisted service."""

    role = "server"
    settings: ServerSettings

    def __init__(self, reactor: Any, settings: ServerSettings, *, uid: int | None = None) -> None:
        """``uid`` is the user the process will run as when it has started as root, and may own the key file."""
        if settings.discovery and settings.public_address is None:
            raise ConfigError("public_address", "must be given with discovery: it is what clients are told to dial")
        self._key = _read_key(settings, uid)
        super().__init__(reactor, settings, node=short_node(self._key.public_key), listen=settings.listen)
        self._discovery = self._connect_discovery()
        #: The relay itself, from the start on.
        self.server: Any = None

    def _connect_discovery(self) -> Any:
        if not self.settings.discovery:
            return None
        from dmsg.discovery.client import HttpDiscovery

        return HttpDiscovery.connect(self.settings.discovery, self.reactor, prefix=self.settings.discovery_prefix)

    def start_role(self) -> None:
        """Serve, and register in discovery."""
        from dmsg.mux.relay.service import DmsgRelay

        limits = self.settings.limits
        if self.settings.drain_timeout is not None:
            limits = dataclasses.replace(limits, drain_timeout_s=self.settings.drain_timeout)
        self.server = DmsgRelay(
            self.reactor,
            self._key,
            self.endpoint,
            public_address=self.settings.public_address,
            discovery=self._discovery,
            limits=limits,
            events=self.events,
        )
        self.server.startService()

    async def stop_role(self) -> None:
        """Drain (as long as ``drain_timeout``), withdraw the entry, close the connections to discovery."""
        if self.server is not None:
            await self.server.stopService()
        if self._discovery is not None:
            await self._discovery.close()

    def readiness(self) -> str:
        """Not ready before it listens and while it drains."""
        return "" if self.server is not None and self.server.ready else "not serving"

    def gauges(self) -> dict[str, float]:
        """The server's own numbers."""
        return self.server.stats() if self.server is not None else {}


def _read_key(settings: ServerSettings, uid: int | None) -> SecretKey:
    try:
        return read_key_file(settings.key, owners=() if uid is None else (uid,))
    except KeyFileError as error:
        raise ConfigError("key", str(error)) from None


def makeService(options: Options) -> RelayService:
    """The service for parsed options; what cannot work raises ``SystemExit`` with one line."""
    from twisted.internet import reactor

    return options.build(lambda: RelayService(reactor, options.settings, uid=options.uid))
