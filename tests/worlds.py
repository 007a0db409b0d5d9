"""Networks that several test files stand on."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory

from dmsg.crypto.keys import SecretKey
from dmsg.errors import DialError
from dmsg.mux.client.service import DmsgClient
from dmsg.mux.relay.service import DmsgRelay
from dmsg.testing.hostile import HostileNetwork, HostileRelay
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork
from dmsg.testing.probes import ConformanceProtocol


class AliceAndBob(HostileNetwork):
    """One relay, and two clients on it; ``extended`` says whether the relay knows the extension.

    All of it is in memory unless ``reactor`` is given. ``client`` are options for both clients, all other options those
    of :class:`HostileNetwork`.
    """

    relay: HostileRelay
    alice: DmsgClient
    bob: DmsgClient

    def __init__(
        self, reactor: Any = None, *, extended: bool = True, client: dict[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(reactor or MemoryNetwork(), relays=0, **options)
        self._extended = extended
        self._client_options = client or {}
        #: The ends Bob's listeners were given, in order.
        self.built: list[Any] = []

    async def start(self) -> None:
        await super().start()
        self.relay = await self.add_relay(extended=self._extended)
        self.bob = await self.client(**self._client_options)
        self.alice = await self.client(**self._client_options)

    def serve(self, name: str = "", end: Callable[[], Any] = ConformanceProtocol, **options: Any) -> Any:
        """Let Bob listen as ``name``; each transport meets a new ``end()``, which is added to ``built``."""

        def build() -> Any:
            self.built.append(end())
            return self.built[-1]

        return self.bob.listen(Factory.forProtocol(build), name, **options)

    async def connect(self, a: Any, b: Any, **options: Any) -> Any:
        """Let Alice dial Bob, where ``b`` answers; gives her transport once ``a`` and ``b`` are connected."""
        self.serve(end=lambda: b)
        transport = await self.wait(self.alice.dial(self.bob.public_key, **options))
        transport.attach(a)
        await self.wait(b.when(lambda: b.made > 0))
        return transport

    async def refusal(self, service: str = "", client: Any = None, **options: Any) -> DialError:
        """What a dial of Alice's (or ``client``'s) to Bob fails with."""
        with pytest.raises(DialError) as caught:
            await self.wait((client or self.alice).dial(self.bob.public_key, service, **options))
        return caught.value

    async def over(self, *ends: Any) -> None:
        """Wait until each of ``ends`` was told that its transport is over."""
        for end in ends:
            await self.wait(end.when_lost())


def ended_cleanly(*ends: Any) -> bool:
    """Whether each of ``ends`` was told that its transport ended as both sides wanted."""
    return all(end.lost[0].check(ConnectionDone) for end in ends)


class ScatteredRelays:
    """Relays at hosts of their own in a memory network, and clients that ask ``listing`` for them."""

    def __init__(self, listing: Any, *, delay_s: float = 0.01, seed: int = 1) -> None:
        self.memory = MemoryNetwork(delay_s=delay_s, random=Random(seed))
        self.random = Random(seed + 1)
        self.network = LocalNetwork(self.memory, relays=0, discovery=None, random=self.random.randbytes)
        self.listing = listing

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.network.stop()

    def start_relay(self, key: SecretKey, host: str) -> DmsgRelay:
        """A relay at port 80 of ``host``; listing it is the test's business."""
        endpoint = TCP4ServerEndpoint(self.memory, 80, interface=host)
        relay = DmsgRelay(self.memory, key, endpoint, random=self.random.randbytes, now_ns=self.network.now_ns)
        relay.startService()
        self.network.relays.append(relay)
        return relay

    def start_client(self, **options: Any) -> DmsgClient:
        """A client that has just been started and knows only what ``listing`` tells it."""
        client = self.network.new_client(discovery=self.listing, publish=False, **options)
        client.startService()
        return client
