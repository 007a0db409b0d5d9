"""Two clients of the messaging system and a relay between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from twisted.internet.protocol import Factory

from dmsg.errors import DialError
from dmsg.messaging.client.config import MessagingConfig
from dmsg.messaging.client.service import MessagingClient
from dmsg.messaging.core.limits import FIRST_FRAME_PAUSE_S
from dmsg.messaging.relay.service import MessagingRelay
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork
from dmsg.testing.probes import ConformanceProtocol


class MessagingNet(LocalNetwork):
    """One relay in memory, Alice and Bob. ``options`` are those of both clients' :class:`MessagingConfig`."""

    reactor: MemoryNetwork
    alice: MessagingClient
    bob: MessagingClient
    relay: MessagingRelay

    def __init__(self, *, relay: dict[str, Any] | None = None, events: Any = None, **options: Any) -> None:
        super().__init__(MemoryNetwork(), relays=0, discovery=None, events=events)
        self.config = MessagingConfig(**options)
        self._relay_options = relay or {}
        #: The ends that Bob's listener was given, in order.
        self.built: list[ConformanceProtocol] = []

    async def start(self) -> None:
        await super().start()
        self.relay = await self.add_messaging_relay(**self._relay_options)
        self.bob = await self.messaging_client(config=self.config)
        self.alice = await self.messaging_client(config=self.config)
        self.reactor.advance(2 * FIRST_FRAME_PAUSE_S)

    def serve(self, end: Callable[[], Any] = ConformanceProtocol, **options: Any) -> Any:
        """Let Bob listen; each channel meets a new ``end()``, which is added to ``built``."""

        def build() -> Any:
            self.built.append(end())
            return self.built[-1]

        factory = Factory.forProtocol(build)
        factory.noisy = False
        return self.bob.listen(factory, **options)

    async def pair(self) -> tuple[ConformanceProtocol, ConformanceProtocol]:
        """Both ends of a new channel from Alice to Bob, who listens; hers first."""
        end = ConformanceProtocol()
        transport = await self.wait(self.alice.dial(self.bob.public_key))
        transport.attach(end)
        await self.settle()
        return end, self.built[-1]

    async def refusal(self, client: MessagingClient | None = None, service: str = "", **options: Any) -> DialError:
        """What a dial of Alice's (or ``client``'s) to Bob fails with."""
        with pytest.raises(DialError) as caught:
            await self.wait((client or self.alice).dial(self.bob.public_key, service, **options))
        return caught.value


@pytest.fixture
def net() -> type[MessagingNet]:
    """See :class:`MessagingNet`."""
    return MessagingNet
