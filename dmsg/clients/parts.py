"""The resources of a client besides its reactor, opened from its settings and closed after it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from typing import Any, Generic, TypeVar

from twisted.internet.threads import deferToThreadPool

from dmsg.clients.settings import RelayClientSettings
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.eventlog.log import EventLog, check_directory, new_boot_id, short_node
from dmsg.interfaces import IDiscovery, IEventLog
from dmsg.relays.choice import RelaysFrom, RelaysMode

T = TypeVar("T", bound=RelayClientSettings)
#: ``(url, reactor, ranks_keys)`` to an ``IDiscovery`` with a ``close``.
MakeDiscovery = Callable[[str, Any, Collection[PublicKey]], Any]


def http_discovery(url: str, reactor: Any, ranks_keys: Collection[PublicKey]) -> Any:
    """The discovery at ``url``."""
    from dmsg.discovery.client import HttpDiscovery  # treq, which a program with pinned servers does without

    return HttpDiscovery.connect(url, reactor, ranks_keys=ranks_keys)


class ClientParts(Generic[T]):
    """The key, discovery, list of relays and event log that ``settings`` ask for.

    Without a ``key`` there is a new one. The list of relays (``relays``) is not started. Raises ``ConfigError``.
    """

    def __init__(
        self, reactor: Any, settings: T, key: SecretKey | None, make_discovery: MakeDiscovery = http_discovery
    ) -> None:
        self.reactor = reactor
        self.settings = settings
        self.key = key or SecretKey.generate()
        self.discovery: IDiscovery | None = None
        self.relays: Any = None
        self.events: IEventLog | None = None
        self._log: EventLog | None = None
        listed = settings.relay_list()
        if settings.events is not None:
            check_directory(settings.events)
            node, boot = short_node(self.key.public_key), new_boot_id(os.urandom)
            self.events = self._log = EventLog.to_directory(settings.events, role="client", node=node, boot=boot)
        if settings.discovery is not None:
            self.discovery = make_discovery(settings.discovery, reactor, settings.ranks_keys)
        if listed is not None:
            self.relays = _relay_list(listed, reactor)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for a :class:`~dmsg.clients.service.RelayClient`."""
        return {
            "discovery": self.discovery,
            "servers": self.settings.servers,
            "events": self.events,
            "relay_file": self.settings.relay_file(self.key),
            "relays": self.relays,
        }

    async def close(self) -> None:
        """Close everything that was opened."""
        if self.relays is not None:
            await self.relays.stop()
        if self.discovery is not None:
            await self.discovery.close()  # type: ignore[attr-defined]  # what make_discovery gives has one
        if self._log is not None:
            await deferToThreadPool(self.reactor, self.reactor.getThreadPool(), self._log.close)


def _relay_list(listed: RelaysFrom, reactor: Any) -> Any:
    from dmsg.relays.operator_list_source import RelayListSource  # only where there is a list

    only = listed.mode is RelaysMode.ONLY
    return RelayListSource(listed.location, listed.keys, reactor, only=only, now_s=time.time)
