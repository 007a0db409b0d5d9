"""Programs on both sides of a tunnel: an echo over TCP, and short connections to a port at an even pace."""

from __future__ import annotations

from typing import Any

from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint, connectProtocol
from twisted.internet.protocol import Factory

from benchmarks.roles.client import Echo
from benchmarks.roles.exchanges import Exchange, Exchanges

USES_TWISTED = True


class Role:
    """No options."""

    def __init__(self, reactor: Any, options: dict[str, Any]) -> None:
        self._reactor = reactor
        self._exchanges: Exchanges | None = None

    async def start(self) -> dict[str, Any]:
        """Echo."""
        factory = Factory.forProtocol(Echo)
        factory.noisy = False
        port = await TCP4ServerEndpoint(self._reactor, 0, interface="127.0.0.1").listen(factory)
        return {"port": port.getHost().port}

    async def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``begin`` (port, per_s), ``pace`` (per_s): another rate; ``calm``: stop, and give all results."""
        if command == "begin":
            endpoint = TCP4ClientEndpoint(self._reactor, "127.0.0.1", arguments["port"])

            async def connect(exchange: Exchange) -> None:
                await connectProtocol(endpoint, exchange)

            self._exchanges = Exchanges(self._reactor, arguments["per_s"], connect)
            self._exchanges.start()
            return {}
        assert self._exchanges is not None
        if command == "pace":
            self._exchanges.per_s = arguments["per_s"]
            return {}
        assert command == "calm"
        self._exchanges.stop()
        return {"results": self._exchanges.results, "reasons": self._exchanges.reasons}
