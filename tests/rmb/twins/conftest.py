"""A network in memory with a chain and two nodes of it."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.defer import Deferred

from dmsg.glue.websocket import WebSocketUrl
from dmsg.rmb.twins.blocks import BlockConfig
from dmsg.rmb.twins.chain import ChainRegistry
from dmsg.rmb.twins.substrate import Substrate
from dmsg.testing.memory import MemoryNetwork
from tests.rmb.twins.fake_node import Chain, FakeNode


class World:
    """Nodes at ``a:9944`` and ``b:9945``, of which nothing is known at ``nowhere``."""

    def __init__(self, **metadata: Any) -> None:
        hosts = {"a": "192.0.2.1", "b": "192.0.2.2", "nowhere": "192.0.2.3"}
        self.network = MemoryNetwork(hosts=hosts)
        self.chain = Chain(**metadata)
        self.a, self.b = (FakeNode(self.network, self.chain, port) for port in (9944, 9945))
        self.registries: list[ChainRegistry] = []

    def registry(self, *urls: str, **options: Any) -> ChainRegistry:
        found = [WebSocketUrl.parse(url) for url in urls or ("ws://a:9944", "ws://b:9945")]
        substrate = Substrate(self.network, found)
        registry = ChainRegistry(self.network, substrate, lambda: 0.5, **options)
        self.registries.append(registry)
        return registry

    def listening(self, *urls: str, **options: Any) -> ChainRegistry:
        registry = self.registry(*urls, blocks=BlockConfig(**options))
        registry.start()
        self.network.advance(0)
        return registry

    def start(self, asked: Any) -> Outcome:
        """Begin something asynchronous."""
        outcome = Outcome(Deferred.fromCoroutine(asked))
        self.network.advance(0)
        return outcome

    def ask(self, asked: Any) -> Any:
        """The result of something that needs no time."""
        return self.start(asked).result

    def close(self) -> None:
        for registry in self.registries:
            self.ask(registry.close())
        for node in (self.a, self.b):
            node.close()
        self.network.advance(0)
        assert not self.network.pipes
        assert not self.network.getDelayedCalls()


class Outcome:
    """What comes of something asynchronous."""

    def __init__(self, deferred: Deferred[Any]) -> None:
        self.deferred = deferred
        self.done = False
        self._value: Any = None
        self.error: Any = None
        deferred.addCallbacks(self._succeeded, self._failed)

    def _succeeded(self, value: Any) -> None:
        self.done, self._value = True, value

    def _failed(self, why: Any) -> None:
        self.done, self.error = True, why.value

    @property
    def result(self) -> Any:
        assert self.done, "it is not over"
        if self.error is not None:
            raise self.error
        return self._value


@pytest.fixture
def world() -> Any:
    world = World()
    yield world
    world.close()
