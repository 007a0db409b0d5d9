"""Two relay processes behind one name, with one Redis: to a twin they are one relay."""

from __future__ import annotations

import time
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred

from dmsg.glue.waiters import Waiters
from dmsg.glue.websocket import WebSocketUrl, connect_websocket
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.token import make_token
from dmsg.rmb.core.wire import Envelope
from dmsg.rmb.relay.api import make_site
from dmsg.rmb.relay.service import RmbRelay
from dmsg.rmb.relay.stores.open import open_queues
from dmsg.sansio.websocket import WebSocketConfig
from dmsg.sansio.websocket_frames import Closed

from .conftest import HOST, Registry, key_of


class Program:
    """A twin's program."""

    def __init__(self, address: SessionAddress) -> None:
        self.address = address
        self.events: list[Any] = []
        self.shell: Any = None
        self._more: Waiters[None] = Waiters()

    def send(self, to: SessionAddress, uid: str, tags: str = "") -> None:
        envelope = Envelope(uid=uid, timestamp=int(time.time()), expiration=60, tags=tags)
        self.address.write_to(envelope.source)
        to.write_to(envelope.destination)
        envelope.request.SetInParent()
        self.shell.send(envelope.SerializeToString())
        self.shell.flush()

    async def next(self) -> Any:
        """The next uid or error code it gets, or why it was closed."""
        while not self.events:
            await self._more.wait()
        event = self.events.pop(0)
        if isinstance(event, Closed):
            return event.code
        envelope = Envelope.FromString(event)
        return envelope.error.code or envelope.uid

    def handle_events(self, shell: Any, events: Any) -> None:
        self.events += events

    def after_read(self, shell: Any) -> None:
        shell.flush()
        self._more.fire(None)

    def flushed(self, shell: Any) -> None:
        """Nothing waits for that."""

    def connection_lost(self, shell: Any, error: Any, reason: Any) -> None:
        """The tests look at close frames."""


class Relay:
    """One of several processes, as far as they know of each other."""

    def __init__(self, reactor: Any, redis_url: str) -> None:
        self._reactor = reactor
        self.store = open_queues(redis_url, reactor)
        registry = Registry()
        registry.add(1, 2)
        self.relay = RmbRelay(reactor, registry, self.store, domains=frozenset({HOST}))
        self.port = reactor.listenTCP(0, make_site(self.relay, reactor, {}), interface="127.0.0.1")
        self.relay.startService()
        self._shells: list[Any] = []

    async def connect(self, twin: int) -> Program:
        program = Program(SessionAddress(twin))
        token = make_token(key_of(twin), twin, None, int(time.time()))
        url = WebSocketUrl.parse(f"ws://127.0.0.1:{self.port.getHost().port}/?{token}")
        program.shell = await connect_websocket(self._reactor, url, program, WebSocketConfig())
        self._shells.append(program.shell)
        return program

    async def stop(self) -> None:
        for shell in self._shells:
            shell.cut()
        await self.port.stopListening()
        await self.relay.stopService()
        await self.store.close()


@pytest.fixture
def relays(reactor: Any, redis_url: str) -> Any:
    made = [Relay(reactor, redis_url) for _ in range(2)]
    yield made
    for relay in made:
        pytest_twisted.blockon(Deferred.fromCoroutine(relay.stop()))


@pytest_twisted.ensureDeferred
async def test_an_envelope_reaches_a_session_that_is_connected_to_another_process(relays: list[Relay]) -> None:
    alice, bob = await relays[0].connect(1), await relays[1].connect(2)
    while not await relays[0].store.connected(bob.address):
        continue  # it is on its way to Redis
    for uid in ("first", "second"):
        alice.send(bob.address, uid, tags="fail-fast")
        assert await bob.next() == uid
    bob.send(alice.address, "back")
    assert await alice.next() == "back"


@pytest_twisted.ensureDeferred
async def test_a_session_that_connects_to_another_process_is_replaced(relays: list[Relay]) -> None:
    alice, older = await relays[0].connect(1), await relays[0].connect(2)
    while not await relays[1].store.connected(older.address):
        continue  # it is on its way to Redis
    newer = await relays[1].connect(2)
    assert await older.next() == 4001
    alice.send(newer.address, "new")
    assert await newer.next() == "new"


@pytest_twisted.ensureDeferred
async def test_what_waits_is_fetched_by_whichever_process_the_session_comes_to(relays: list[Relay]) -> None:
    alice = await relays[0].connect(1)
    for at in range(3):
        alice.send(SessionAddress(2), str(at))
    alice.send(SessionAddress(2), "now", tags="fail-fast")
    assert await alice.next() == 125
    bob = await relays[1].connect(2)
    assert [await bob.next() for _ in range(3)] == ["0", "1", "2"]
