"""A relay, a registry file and twins for commands of the bus, on the test's reactor."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import CancelledError, Deferred

from dmsg.address import RedisAddress
from dmsg.cli.output import Output
from dmsg.cli.rmb.network import Network
from dmsg.rmb.client.exchange import Exchange
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.keys import KeyType
from dmsg.rmb.key_file import make_twin_key, read_twin_key
from dmsg.rmb.peer.gateway import Gateway
from dmsg.rmb.relay.api import make_site
from dmsg.rmb.relay.service import RmbRelay
from dmsg.rmb.relay.stores.open import open_queues
from dmsg.rmb.twins.table import SqliteRegistry, TwinTable

from ..conftest import Lines


class Notes(io.StringIO):
    """A stream in which a text can be waited for."""

    def __init__(self, reactor: Any) -> None:
        super().__init__()
        self._reactor = reactor
        self._wanted: tuple[str, Deferred[None]] | None = None

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._wanted is not None and self._wanted[0] in self.getvalue():
            (_, waiter), self._wanted = self._wanted, None
            self._reactor.callLater(0, waiter.callback, None)  # not in the middle of the command
        return written

    async def saw(self, text: str) -> None:
        """Wait until it has been written."""
        if text not in self.getvalue():
            self._wanted = text, Deferred()
            await self._wanted[1]


class Command:
    """A command that runs in this process."""

    def __init__(self, running: Deferred[Any], out: Lines, errors: Notes) -> None:
        self.ended = running
        self.out = out
        self.errors = errors

    async def stop(self) -> None:
        """Interrupt it."""
        if not self.ended.called:
            self.ended.addErrback(lambda failure: failure.trap(CancelledError))
            self.ended.cancel()
            await self.ended


class Bus:
    """A relay on a loopback port, which goes by the name of localhost."""

    def __init__(self, reactor: Any, directory: Path) -> None:
        self.reactor = reactor
        self.registry_file = str(directory / "twins")
        self._directory = directory
        self._commands: list[Command] = []
        self._closing: list[Callable[[], Any]] = []
        self.registry = self._opened()
        self._store = open_queues("memory:", reactor)
        self.relay = RmbRelay(reactor, self.registry, self._store, domains=frozenset({"localhost"}))
        self.relay.startService()
        self._port = reactor.listenTCP(0, make_site(self.relay, reactor, {}), interface="127.0.0.1")
        self.url = f"ws://127.0.0.1:{self._port.getHost().port}"

    def _opened(self) -> SqliteRegistry:
        registry = SqliteRegistry(self.registry_file, self.reactor)
        self._closing.insert(0, registry.close)
        return registry

    def twin(self, number: int) -> str:
        """The key file of a twin, which is made: number 1 first, then 2."""
        path = self._directory / f"twin{number}"
        key = make_twin_key(path, KeyType.ED25519, os.urandom)
        table = TwinTable(self.registry_file)
        assert table.create(key, ["localhost"], EncryptionKey(key.secret).public_key) == number
        table.close()
        return str(path)

    async def peer(self, key_file: str, redis_url: str) -> Gateway:
        """A peer at a Redis, running."""
        registry, key = self._opened(), read_twin_key(key_file)
        gateway = Gateway(
            self.reactor,
            RedisAddress.parse(redis_url),
            lambda owner: Exchange(self.reactor, key, registry, [self.url], owner),
        )
        self._closing.insert(0, gateway.stop)
        await gateway.start()
        return gateway

    def start(
        self,
        run: Callable[..., Coroutine[Any, Any, None]],
        *arguments: Any,
        key_file: str = "",
        redis: str = "",
        json_lines: bool = True,
        **options: Any,
    ) -> Command:
        """Start ``run(network, reactor, …)``, over the relay as the twin of a key file, or through a Redis."""
        out, errors = Lines(), Notes(self.reactor)
        output = Output(out, errors, json_lines=json_lines)
        if redis:
            network = Network(output, False, redis=RedisAddress.parse(redis))
        else:
            network = Network(output, False, read_twin_key(key_file), self.registry_file, (self.url,))
        running = Deferred.fromCoroutine(
            network.told(lambda reactor: run(network, reactor, *arguments, **options), self.reactor)
        )
        self._commands.append(Command(running, out, errors))
        return self._commands[-1]

    async def run(self, run: Any, *arguments: Any, **options: Any) -> Any:
        """Run to the end and give what was printed."""
        command = self.start(run, *arguments, **options)
        await command.ended
        [line] = command.out.objects()
        return line

    async def close(self) -> None:
        for command in self._commands:
            await command.stop()
        for close in self._closing[:-1]:
            await close()
        await self._port.stopListening()
        await self.relay.stopService()
        await self._store.close()
        await self.registry.close()


@pytest.fixture
def bus(guard: None, reactor: Any, tmp_path: Path) -> Iterator[Bus]:
    """A relay and a registry without twins."""
    bus = Bus(reactor, tmp_path)
    yield bus
    pytest_twisted.blockon(Deferred.fromCoroutine(bus.close()))
