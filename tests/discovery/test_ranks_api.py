"""Ranks over HTTP: handed out as they were signed, verified by clients that trust the key, a hint to others."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
import pytest_twisted
from treq.client import HTTPClient
from twisted.internet import defer, endpoints, protocol, task
from twisted.web.resource import Resource
from twisted.web.server import Site
from zope.interface.verify import verifyObject

from dmsg.discovery import client as client_module
from dmsg.discovery.api import DiscoveryApi, DiscoveryLimits, make_site
from dmsg.discovery.client import HttpDiscovery
from dmsg.discovery.ranks import Ranks
from dmsg.discovery.stores.memory import MemoryStore
from dmsg.interfaces import IRankedDiscovery
from tests.memory_log import MemoryEventLog

from .test_ranks import NOW_S, RELAYS, STRANGER, TRUSTED, relay, signed

PREFIXES = ["messaging-discovery", "discovery", "dmsg-discovery"]


class Harness:
    """A discovery on loopback whose document can be changed."""

    def __init__(self, reactor: Any, agent: Any, serve: Any) -> None:
        self.reactor, self.agent = reactor, agent
        self.ranks: Ranks | None = None
        self.log = MemoryEventLog()
        self.store = MemoryStore(random=random.Random(1))
        self.serve = serve

    def start(self, **limits: Any) -> None:
        chosen = DiscoveryLimits(**limits)
        api = DiscoveryApi(
            self.store,
            clock_ns=lambda: NOW_S * 10**9,
            random=random.Random(2),
            limits=chosen,
            events=self.log,
            ranks=lambda: self.ranks,
        )
        self.port = self.serve(make_site(api.resource(), reactor=self.reactor, limits=chosen))

    def say(self, data: bytes) -> None:
        self.ranks = Ranks.parse(data, [*TRUSTED, STRANGER.public_key], NOW_S)

    async def ask(self, prefix: str = "discovery", method: str = "GET", **headers: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/{prefix}/relay_ranks"
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await HTTPClient(self.agent).request(method, url, headers=sent, reactor=self.reactor)
        answer.body = await answer.content()
        return answer

    def client(self, **options: Any) -> HttpDiscovery:
        options = {"ranks_keys": TRUSTED, "now_s": lambda: NOW_S, **options}
        return HttpDiscovery(f"http://127.0.0.1:{self.port}", self.agent, self.reactor, **options)


@pytest.fixture
def harness(reactor: Any, agent: Any, served: Any) -> Harness:
    return Harness(reactor, agent, served)


# --- handing out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest_twisted.ensureDeferred
async def test_the_document_is_handed_out_as_it_was_signed(harness: Harness, prefix: str) -> None:
    harness.start()
    answer = await harness.ask(prefix)
    assert answer.code == 404
    assert json.loads(answer.body)["message"] == "entry of public key is not found"
    harness.say(signed(900, 100))
    answer = await harness.ask(prefix)
    assert (answer.code, answer.body) == (200, signed(900, 100))
    assert answer.headers.getRawHeaders("content-type") == ["application/json"]
    told = [(event.path, event.status) for event in harness.log.events]
    assert told == [(f"{prefix}/relay_ranks", 404), (f"{prefix}/relay_ranks", 200)]


@pytest_twisted.ensureDeferred
async def test_a_document_that_is_known_is_not_sent_again(harness: Harness) -> None:
    harness.start(ranks_burst=2)
    harness.say(signed(900))
    [tag] = (await harness.ask()).headers.getRawHeaders("etag")
    for _ in range(5):  # that costs nothing, so it is not counted
        again = await harness.ask(If_None_Match=tag)
        assert (again.code, again.body) == (304, b"")
    harness.say(signed(901))
    assert (await harness.ask(If_None_Match=tag)).body == signed(901)
    assert [event.status for event in harness.log.events] == [200, *[304] * 5, 200]


@pytest_twisted.ensureDeferred
async def test_how_often_it_is_sent_is_limited(harness: Harness) -> None:
    harness.start(ranks_burst=2)
    harness.say(signed(900))
    assert [(await harness.ask()).code for _ in range(3)] == [200, 200, 429]


@pytest_twisted.ensureDeferred
async def test_head_is_answered_without_the_document(harness: Harness) -> None:
    harness.start()
    harness.say(signed(900))
    answer = await harness.ask(method="HEAD")
    assert (answer.code, answer.body) == (200, b"")


class Reader(protocol.Protocol):
    def __init__(self) -> None:
        self.received = bytearray()
        self.lost: defer.Deferred[None] = defer.Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.received += data

    def connectionLost(self, reason: Any = None) -> None:
        self.lost.callback(None)


@pytest_twisted.ensureDeferred
async def test_who_reads_slowly_costs_little_memory_and_gets_all_of_it(harness: Harness) -> None:
    harness.start()
    # one that fits no socket's buffers
    harness.say(signed(relays={f"02{number:064x}": relay() for number in range(20_000)}))
    assert harness.ranks is not None
    endpoint = endpoints.TCP4ClientEndpoint(harness.reactor, "127.0.0.1", harness.port)
    reader: Any = await endpoint.connect(protocol.Factory.forProtocol(Reader))
    reader.transport.pauseProducing()
    reader.transport.write(b"GET /discovery/relay_ranks HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    for _ in range(50):  # others are answered meanwhile
        assert (await harness.ask(If_None_Match=harness.ranks.tag.decode())).code == 304
    reader.transport.resumeProducing()
    await reader.lost
    assert bytes(reader.received).endswith(harness.ranks.document)
    # and one that goes away in the middle
    reader = await endpoint.connect(protocol.Factory.forProtocol(Reader))
    reader.transport.pauseProducing()
    reader.transport.write(b"GET /discovery/relay_ranks HTTP/1.1\r\nHost: x\r\n\r\n")
    await harness.ask(If_None_Match=harness.ranks.tag.decode())
    reader.transport.abortConnection()
    await reader.lost
    assert (await harness.ask(If_None_Match=harness.ranks.tag.decode())).code == 304


@pytest_twisted.ensureDeferred
async def test_servers_come_in_the_order_of_a_draw(harness: Harness, make_entry: Any, key_of: Any) -> None:
    harness.start()
    entries = [make_entry(f"relay {at}", address="10.0.0.1:80") for at in range(4)]
    for entry in entries:
        await harness.store.put(entry, NOW_S * 10**9)
    best = entries[3].static
    harness.say(signed(relays={str(best): relay(1000), **{str(one.static): relay(0) for one in entries[:3]}}))
    client = harness.client()
    listed = [await client.available_servers() for _ in range(60)]
    assert all(len(one) == 4 for one in listed)
    firsts = Counter(one[0].static for one in listed)
    assert firsts[best] >= 50  # of 60; 57 are to be expected


# --- a client's side -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest_twisted.ensureDeferred
async def test_a_client_that_trusts_the_key_has_the_ranks(harness: Harness, prefix: str) -> None:
    harness.start()
    harness.say(signed(900))
    client = harness.client(prefix=prefix)
    verifyObject(IRankedDiscovery, client)
    ranks = await client.relay_ranks()
    assert ranks is not None and ranks.effective(RELAYS[0].raw, NOW_S) == 900


@pytest_twisted.ensureDeferred
async def test_a_client_without_trusted_keys_asks_for_no_ranks(harness: Harness) -> None:
    harness.start()
    harness.say(signed(900))
    assert await harness.client(ranks_keys=()).relay_ranks() is None
    assert not harness.log.events


@pytest_twisted.ensureDeferred
async def test_a_client_does_not_believe_what_another_key_signed(harness: Harness) -> None:
    harness.start()
    harness.say(signed(900, key=STRANGER))
    assert await harness.client().relay_ranks() is None


class Lying(Resource):
    """Gives every request the same answer."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.body, self.status, self.asked, self.tag = b"", 200, 0, b""

    def render_GET(self, request: Any) -> bytes:
        self.asked += 1
        request.setResponseCode(self.status)
        if self.tag:
            request.setHeader(b"etag", self.tag)
        return self.body


@pytest_twisted.ensureDeferred
async def test_no_answer_of_a_discovery_ends_the_client(
    reactor: Any, agent: Any, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "RANKS_REFRESH_S", 0.0)
    monkeypatch.setattr(client_module, "RANKS_RETRY_S", 0.0)
    page = Lying()
    port = served(Site(page, reactor=reactor))
    client = HttpDiscovery(
        f"http://127.0.0.1:{port}", agent, reactor, ranks_keys=TRUSTED, now_s=lambda: NOW_S, timeout_s=5
    )
    bad = [
        (200, b""),
        (200, b"null"),
        (200, b"[" * 10**6),
        (200, signed(1, key=STRANGER)),
        (200, signed(1).replace(b":1,", b":2,")),
        (200, signed(5, issued=NOW_S + 10**6)),
        (200, signed(5, issued=NOW_S - 10**6)),
        (200, signed(10**6)),
        (200, b" " * (client_module.DOCUMENT_LIMIT_BYTES + 1)),
        (304, b""),
        (404, b""),
        (500, b"<html>"),
    ]
    page.tag = b'"' + b"x" * 5000 + b'"'
    page.status, page.body = 304, b""
    assert await client.relay_ranks() is None
    page.status, page.body = 200, signed(900)
    first = await client.relay_ranks()
    assert first is not None
    for page.status, page.body in bad:
        assert await client.relay_ranks() is first
    page.status, page.body = 200, signed(800, issued=NOW_S + 1)
    newer = await client.relay_ranks()
    assert newer is not None and newer.effective(RELAYS[0].raw, NOW_S) == 800


@pytest_twisted.ensureDeferred
async def test_a_client_asks_now_and_then_only() -> None:
    clock = task.Clock()
    asked: list[bytes] = []

    class Agent:
        def request(self, method: bytes, uri: bytes, headers: Any = None, bodyProducer: Any = None) -> Any:
            asked.append(uri)
            return defer.fail(ConnectionError())

    agent: Any = Agent()
    client = HttpDiscovery("http://127.0.0.1:1", agent, clock, ranks_keys=TRUSTED, now_s=lambda: NOW_S)
    for _ in range(5):
        assert await client.relay_ranks() is None
    assert len(asked) == 1
    clock.advance(client_module.RANKS_RETRY_S)
    assert await client.relay_ranks() is None
    assert len(asked) == 2
