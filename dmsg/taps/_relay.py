"""The common part of the roles of relays, whatever protocol they speak."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Any

from dmsg.crypto.errors import KeyFileError
from dmsg.crypto.keys import SecretKey, read_key_file
from dmsg.errors import ConfigError
from dmsg.eventlog.log import short_node
from dmsg.taps._service import RoleService
from dmsg.taps.settings import RelaySettings


class RelayRole(RoleService):
    """A relay with its event log, metrics and registration, as a Twisted service. A subclass makes the relay."""

    role = "server"
    settings: RelaySettings

    def __init__(self, reactor: Any, settings: RelaySettings, *, uid: int | None = None) -> None:
        """``uid`` is the user that a process started as root will run as; that user may own the key file."""
        if settings.discovery and settings.public_address is None:
            told = "must be given with discovery (--discovery, DMSG_DISCOVERY or the file): it is what clients are told to dial"
            raise ConfigError("public_address", told)
        self._key = _read_key(settings, uid)
        super().__init__(reactor, settings, node=short_node(self._key.public_key), listen=settings.listen)
        self._discovery = self._connect_discovery()
        #: The relay itself, set at the start.
        self.server: Any = None

    @abstractmethod
    def make_relay(self, **options: Any) -> Any:
        """The relay, a :class:`dmsg.serving.service.RelayService`, with ``options`` that every relay has."""

    def _connect_discovery(self) -> Any:
        if not self.settings.discovery:
            return None
        from dmsg.discovery.client import HttpDiscovery

        return HttpDiscovery.connect(self.settings.discovery, self.reactor, prefix=self.settings.discovery_prefix)

    def start_role(self) -> None:
        """Serve, and register in discovery."""
        limits = self.settings.limits
        if self.settings.drain_timeout is not None:
            limits = dataclasses.replace(limits, drain_timeout_s=self.settings.drain_timeout)
        self.server = self.make_relay(
            reactor=self.reactor,
            key=self._key,
            endpoint=self.endpoint,
            public_address=self.settings.public_address,
            discovery=self._discovery,
            limits=limits,
            events=self.events,
        )
        self.server.startService()
        self.server.listening().addErrback(self.fail)

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


def _read_key(settings: RelaySettings, uid: int | None) -> SecretKey:
    try:
        return read_key_file(settings.key, owners=() if uid is None else (uid,))
    except KeyFileError as error:
        raise ConfigError("key", str(error)) from None
