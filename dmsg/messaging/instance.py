"""The instances of the messaging system, as its description calls them: a client or a server made from a :class:`Config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twisted.internet.interfaces import IStreamServerEndpoint

from dmsg.address import HostPort
from dmsg.clients.parts import http_discovery
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.several import DiscoveryList
from dmsg.messaging.client.service import MessagingClient
from dmsg.messaging.relay.service import MessagingRelay


@dataclass(frozen=True, slots=True)
class Config:
    """Configures an instance."""

    #: Whether the instance advertises itself: a client the relays it is reached through, a server its address.
    public: bool = True
    #: URLs of the discoveries to use, the preferred one first. An instance without one is not advertised, and a client then
    #: needs ``servers``.
    discovery_addresses: tuple[str, ...] = ()

    def open_discovery(self, reactor: Any) -> DiscoveryList | None:
        """The discoveries, to be closed after use; ``None`` without addresses. Raises ``ConfigError`` for a bad URL."""
        if not self.discovery_addresses:
            return None
        return DiscoveryList([http_discovery(url, reactor, ()) for url in self.discovery_addresses], reactor)


class ClientInstance(MessagingClient):
    """A client that ``instance`` configures; ``options`` are further arguments of its base class.

    Closes its discoveries once it has stopped.
    """

    def __init__(self, reactor: Any, key: SecretKey, instance: Config, **options: Any) -> None:
        self.discoveries = instance.open_discovery(reactor)
        super().__init__(reactor, key, discovery=self.discoveries, publish=instance.public, **options)

    async def _stop(self) -> None:
        await super()._stop()
        if self.discoveries is not None:
            await self.discoveries.close()


class ServerInstance(MessagingRelay):
    """A relay that ``instance`` configures, on ``endpoint``; the rest is as for :class:`ClientInstance`.

    A public relay publishes ``public_address`` in discovery.
    """

    def __init__(
        self,
        reactor: Any,
        key: SecretKey,
        endpoint: IStreamServerEndpoint,
        instance: Config,
        *,
        public_address: HostPort | None = None,
        **options: Any,
    ) -> None:
        self.discoveries = instance.open_discovery(reactor) if instance.public else None
        super().__init__(reactor, key, endpoint, public_address=public_address, discovery=self.discoveries, **options)

    async def _stop(self) -> None:
        await super()._stop()
        if self.discoveries is not None:
            await self.discoveries.close()
