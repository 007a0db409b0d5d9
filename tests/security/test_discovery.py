"""A discovery that lies: entries are signed, so all it can do is hide them or hand out old ones, and neither leads into the
clear (:ref:`spec-downgrade-rule`).

Over HTTP on loopback: the client of the real discovery is what finds the lies out.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import Factory

from dmsg.clients.dial import DialConfig
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.api import DiscoveryApi, make_site
from dmsg.discovery.client import HttpDiscovery
from dmsg.discovery.entry import BASE_VERSION, ClientPart, Entry
from dmsg.discovery.errors import DiscoveryError, DiscoveryUnavailable, EntryNotFound, EntryRolledBack, Unauthorized
from dmsg.discovery.limits import DiscoveryLimits
from dmsg.discovery.stores.memory import MemoryStore
from dmsg.errors import DialError
from dmsg.mux.client.service import ClientConfig
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.wire import ACCEPT, CLOSE, FWD, REQUEST, REQUEST_BYTES, CloseReason
from dmsg.testing.conformance import ConformanceProtocol
from dmsg.testing.hostile import HostileNetwork, HostileRelay
from dmsg.testing.raw import connect_raw

pytestmark = pytest.mark.system
sync = pytest_twisted.ensureDeferred
#: Nothing is remembered, so that every dial asks.
CONFIG = ClientConfig(dial=DialConfig(entry_lifetime_s=0.0))


class LyingStore(MemoryStore):
    """A store that hands out what a test wants instead of what it was given."""

    def __init__(self) -> None:
        super().__init__(random=Random(0))
        self.lies: dict[Any, Entry | DiscoveryError] = {}

    def get_json(self, public_key: Any, now_ns: int) -> Deferred[bytes]:
        lie = self.lies.get(public_key)
        if lie is None:
            return super().get_json(public_key, now_ns)
        return fail(lie) if isinstance(lie, DiscoveryError) else succeed(lie.to_json())


class Place(HostileNetwork):
    """A relay, a lying discovery, and Bob."""

    relay: HostileRelay

    async def start(self) -> None:
        self.store = LyingStore()
        limits = replace(DiscoveryLimits.unlimited_rates(), cached_entry_lifetime_s=0.0)
        api = DiscoveryApi(self.store, clock_ns=self.now_ns, random=Random(0), limits=limits)
        site = make_site(api.resource(), reactor=self.reactor, limits=limits)
        self._http_port = self.reactor.listenTCP(0, site, interface="127.0.0.1")
        self.url = f"http://127.0.0.1:{self._http_port.getHost().port}"
        self.discovery = HttpDiscovery.connect(self.url, self.reactor)
        self.relay = await self.add_relay()
        self.built: list[ConformanceProtocol] = []
        self.bob = await self.client(config=CONFIG)
        factory = Factory.forProtocol(self.build)
        self.bob.listen(factory)

    def build(self) -> ConformanceProtocol:
        self.built.append(ConformanceProtocol())
        return self.built[-1]

    async def dial(self, client: Any, **options: Any) -> Any:
        return await client.dial(self.bob.public_key, **options)

    @property
    def asked(self) -> list[int]:
        """How long the REQUESTs that reached Bob were."""
        return [len(frame.payload) for frame in self.relay.frames(REQUEST, self.bob.public_key)]


@pytest.fixture
def place(reactor: Any) -> Any:
    return lambda: Place(reactor, relays=0, discovery=None)


def downgraded(entry: Entry) -> Entry:
    """The entry with another version: its signature is not valid any more."""
    return replace(entry, version=BASE_VERSION)


@sync
async def test_an_entry_with_an_altered_version(place: Any) -> None:
    """The signature covers the version: the dial fails, nothing was sent to Bob."""
    async with place() as p:
        alice = await p.client(config=CONFIG)
        entry = await p.discovery.get_entry(p.bob.public_key)
        p.store.lies[p.bob.public_key] = downgraded(entry)
        with pytest.raises(Unauthorized):
            await p.discovery.get_entry(p.bob.public_key)
        with pytest.raises(DialError) as caught:
            await p.dial(alice)
        assert isinstance(caught.value.attempts[0].error, Unauthorized)
        assert p.asked == []
        p.store.lies.clear()
        (await p.dial(alice)).abortConnection()


@pytest.mark.parametrize("lie", [EntryNotFound(), DiscoveryUnavailable("no")], ids=["hidden", "unavailable"])
@sync
async def test_a_hidden_entry(place: Any, lie: DiscoveryError, logged_errors: Any) -> None:
    """With a pinned relay Alice tries without the entry, end to end or not at all."""
    async with place() as p:
        pinned = await p.client(config=CONFIG, servers=p.pinned)
        alice = await p.client(config=CONFIG)
        p.store.lies[p.bob.public_key] = lie
        transport = await p.dial(pinned)
        assert transport.security == "e2e"
        assert all(size > REQUEST_BYTES for size in p.asked)
        transport.abortConnection()
        with pytest.raises(DialError) as caught:
            await p.dial(alice)
        assert isinstance(caught.value.attempts[0].error, type(lie))
        logged_errors.flush()  # the service logs what its store fails with


@sync
async def test_an_old_entry_is_handed_out_again(place: Any) -> None:
    """Bob's entry from the days when he spoke only the base protocol, truly signed: who has seen a newer one refuses it."""
    async with place() as p:
        alice = await p.client(config=CONFIG)
        current = await p.discovery.get_entry(p.bob.public_key)
        old = replace(current, version=BASE_VERSION, timestamp=current.timestamp - 10**9, signature="").sign(p.bob.key)
        p.store.lies[p.bob.public_key] = old
        with pytest.raises(EntryRolledBack):
            await p.discovery.get_entry(p.bob.public_key)
        with pytest.raises(DialError) as caught:
            await p.dial(alice)
        assert isinstance(caught.value.attempts[0].error, EntryRolledBack)
        assert p.asked == []


@pytest.mark.parametrize("lie", ["altered", "old", "hidden", "unavailable"])
@sync
async def test_lies_about_an_initiator(place: Any, lie: str, logged_errors: Any) -> None:
    """A plain REQUEST in Alice's name, whose entry promises 0.1, while discovery lies about her."""
    async with place() as p:
        key = SecretKey.generate()
        servers = ClientPart((p.relay.key.public_key,))
        entry = Entry("0.1.0", 0, p.now_ns(), key.public_key, servers).sign(key)
        await p.discovery.post_entry(entry)
        assert await p.bob.promises(key.public_key)
        old = replace(entry, version=BASE_VERSION, timestamp=entry.timestamp - 1, signature="").sign(key)
        lies: dict[str, Any] = {
            "altered": downgraded(entry),
            "old": old,
            "hidden": EntryNotFound(),
            "unavailable": DiscoveryUnavailable("no"),
        }
        p.store.lies[key.public_key] = lies[lie]
        address = p.pinned[0].address
        raw = await connect_raw(TCP4ClientEndpoint(p.reactor, address.host, address.port), p.relay.key.public_key, key)
        try:
            await raw.next_frame()
            answer = await raw.request(p.bob.public_key, 2)
            assert answer.kind == ACCEPT
            raw.send_frame(FWD, 2, b"\0\0in the clear")
            answer = await raw.next_frame(CLOSE)
            assert answer.payload == bytes([CloseReason.DOWNGRADE])
            assert not p.built
        finally:
            raw.abort()
            await raw.lost()
            logged_errors.flush()


@sync
async def test_e2e_asks_for_the_promise_itself(place: Any) -> None:
    """``security=e2e`` does not dial a key whose entry promises nothing, however truly it is signed."""
    async with place() as p:
        base = await p.client(config=CONFIG, security=Security.HOP)
        alice = await p.client(config=CONFIG)
        with pytest.raises(DialError) as caught:
            await alice.dial(base.public_key, security=Security.E2E)
        assert caught.value.reason == "downgrade"
