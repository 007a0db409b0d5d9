"""A discovery of ours."""

from __future__ import annotations

import os
import time
from typing import Any

from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.web.client import Agent, HTTPConnectionPool

from dmsg.discovery.client import HttpDiscovery
from dmsg.discovery.stores.open import open_store
from dmsg.sansio.jitter import Jitter

USES_TWISTED = True


def connect_discovery(url: str, reactor: Any) -> HttpDiscovery:
    """The discovery at ``url``."""
    return HttpDiscovery(url, Agent(reactor, pool=HTTPConnectionPool(reactor)), reactor)


class Role:
    """Options: ``store`` (a URL; entries in memory without one)."""

    def __init__(self, reactor: Any, options: dict[str, Any]) -> None:
        self._reactor = reactor
        self._store = open_store(options.get("store", "memory:"), reactor)

    async def start(self) -> dict[str, Any]:
        """Serve the HTTP API."""
        from dmsg.discovery.api import DiscoveryApi, make_site  # klein installs the reactor when it is imported

        api = DiscoveryApi(self._store, clock_ns=time.time_ns, random=Jitter(os.urandom))
        site = make_site(api.resource(), reactor=self._reactor)
        port = await TCP4ServerEndpoint(self._reactor, 0, interface="127.0.0.1").listen(site)
        return {"url": f"http://127.0.0.1:{port.getHost().port}"}

    async def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Nothing can be asked."""
        raise ValueError(command)
