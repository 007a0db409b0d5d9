"""Claims of the documentation that nothing else proves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

import pytest
import pytest_twisted
import tomllib
from treq.client import HTTPClient
from twisted.internet.defer import Deferred, fail
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.protocols.basic import LineReceiver
from twisted.web.client import Agent, HTTPConnectionPool
from twisted.web.iweb import IAgentEndpointFactory
from twisted.web.resource import Resource
from twisted.web.server import Site
from zope.interface import implementer

from dmsg.address import HostPort
from dmsg.crypto.keys import SecretKey
from dmsg.eventlog.schema import TransportClosed
from dmsg.mux.client.endpoint import DmsgClientEndpoint, DmsgServerEndpoint
from dmsg.mux.relay.limits import RelayLimits as ServerLimits
from dmsg.relays.pool import PoolConfig, SessionPool
from dmsg.rmb.relay.limits import RelayLimits
from dmsg.serving.admission import Origin
from dmsg.serving.handshake_rates import HandshakeRates
from dmsg.serving.limits import AdmissionLimits
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork
from tests.memory_log import MemoryEventLog

from .conftest import DOCS

SERVER = SecretKey(b"\x21" * 32).public_key


class Refusing:
    """Endpoints that refuse, and the times at which they were asked."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.times: list[float] = []

    def __call__(self, address: HostPort) -> Refusing:
        return self

    def connect(self, factory: Any) -> Deferred[Any]:
        self.times.append(self.clock.seconds())
        return fail(ConnectionRefusedError())


class Empty:
    """A discovery without servers."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.times: list[float] = []

    async def available_servers(self, protocol: str = "dmsg") -> list[Any]:
        self.times.append(self.clock.seconds())
        return []


def uniform() -> Iterator[float]:
    """The extremes and the middle of what randomness may give, in turn."""
    while True:
        yield from (0.0, 0.5, 0.999)


def make_pool(clock: Clock, endpoints: Refusing, discovery: Any, pinned: Any) -> SessionPool:
    numbers = uniform()
    return SessionPool(
        clock,
        lambda server: object(),  # type: ignore[arg-type,return-value]
        endpoints,  # type: ignore[arg-type]
        discovery=discovery,
        pinned=pinned,
        goal=1,
        config=PoolConfig(),
        uniform=lambda: next(numbers),
        changed=lambda: None,
        went_down=lambda *_: None,
    )


def run(clock: Clock, pool: SessionPool, seconds: float) -> None:
    pool.start()
    end = clock.seconds() + seconds
    while True:
        due = min((call.getTime() for call in clock.getDelayedCalls()), default=end)
        if due >= end:
            break
        clock.advance(max(0.0, due - clock.seconds()))
    Deferred.fromCoroutine(pool.stop())


def test_d33_a_server_that_is_gone_is_tried_ever_less_often() -> None:
    clock = Clock()
    endpoints = Refusing(clock)
    config = PoolConfig()
    run(clock, make_pool(clock, endpoints, None, [(SERVER, HostPort("127.0.0.1", 1))]), 3600)
    pauses = [later - earlier for earlier, later in zip(endpoints.times, endpoints.times[1:], strict=False)]
    slack_s = 1.25 * config.poll_s
    for number, pause in enumerate(pauses):
        longest = min(config.backoff_limit_s, config.backoff_first_s * 2.0**number)
        assert longest / 2 - 0.001 <= pause <= longest + slack_s
    assert len(pauses) > 3600 / (config.backoff_limit_s + slack_s), "it is never given up"
    assert len(set(pauses[10:])) > 1, "and not always after the same pause"
    assert not clock.getDelayedCalls()


def test_d29_an_empty_discovery_is_asked_with_pauses() -> None:
    clock = Clock()
    discovery = Empty(clock)
    run(clock, make_pool(clock, Refusing(clock), discovery, []), 600)
    pauses = [later - earlier for earlier, later in zip(discovery.times, discovery.times[1:], strict=False)]
    poll_s = PoolConfig().poll_s
    assert len(pauses) > 80
    assert all(0.75 * poll_s <= pause <= 1.25 * poll_s for pause in pauses)
    assert len(set(pauses)) > 1
    assert not clock.getDelayedCalls()


class Page(Resource):
    """Says hello."""

    isLeaf = True

    def render_GET(self, request: object) -> bytes:
        return b"hello"


@implementer(IAgentEndpointFactory)
class OneEndpoint:
    """Connects to the same place whatever a URL says."""

    def __init__(self, endpoint: DmsgClientEndpoint) -> None:
        self.endpoint = endpoint

    def endpointForURI(self, uri: object) -> DmsgClientEndpoint:
        return self.endpoint


@pytest_twisted.ensureDeferred
async def test_a_relay_says_refused_of_a_connection_to_a_web_server_that_its_client_kept(reactor: Any) -> None:
    events = MemoryEventLog()
    async with LocalNetwork(reactor, relays=1, events=events) as network:
        bob, alice = await network.client(), await network.client()
        await DmsgServerEndpoint(bob).listen(Site(Page()))
        pool = HTTPConnectionPool(reactor)
        endpoints = OneEndpoint(DmsgClientEndpoint(alice, bob.public_key))
        web = HTTPClient(Agent.usingEndpointFactory(reactor, endpoints, pool))
        assert await (await web.get("http://site/")).text() == "hello"
        await pool.closeCachedConnections()
    reasons = {event.by: event.reason for event in events.of(TransportClosed)}
    assert reasons == {"peer": "normal", "local": "refused", "responder": "refused"}


def raised(page: str, table: str) -> dict[str, Any]:
    """The limits in a how-to for a server that sees one address for all its clients."""
    _, _, block = (DOCS / "howto" / page).read_text().partition(f"   {table}\n   connections_per_address")
    given, _, _ = f"   connections_per_address{block}".partition("\n\n")
    return tomllib.loads(dedent(given))


def test_behind_a_web_server_one_address_may_do_what_all_may_do() -> None:
    """The limits of one address that the how-to gives are all there are, and at least those of all."""
    given = raised("run-an-rmb-relay.rst", "[rmb-relay.limits]")
    del given["handshake_burst"]  # below
    limits = RelayLimits(**given)
    ends = ("_per_address", "_per_network")
    of_one = {name for name in RelayLimits.__dataclass_fields__ if name.endswith(ends)}
    for name in of_one:
        total = getattr(limits, name.removesuffix(ends[0]).removesuffix(ends[1]))
        is_reserved = name.endswith(ends[1]) and not name.startswith("handshake")  # kept free for each beside the total
        assert is_reserved or getattr(limits, name) >= total, name
    assert set(given) <= of_one


@pytest.mark.parametrize(
    ("page", "table", "kind"),
    [
        ("run-a-relay.rst", "[server.limits]", ServerLimits),
        ("run-an-rmb-relay.rst", "[rmb-relay.limits]", RelayLimits),
    ],
)
def test_behind_a_balancer_one_address_may_have_as_many_handshakes_as_all_others_have(
    page: str, table: str, kind: type[AdmissionLimits]
) -> None:
    limits, usual, one = kind(**raised(page, table)), kind(), Origin.of("127.0.0.1")
    for kept in (0.0, 0.5):  # with a cookie, and without one
        rates = HandshakeRates(limits, 0.0)
        at_once = (1.0 - kept) * usual.handshake_burst
        assert sum(not rates.take(one, 0.0, kept=kept) for _ in range(2 * usual.handshake_burst)) == at_once
        passed = sum(not rates.take(one, at / 1000, kept=kept) for at in range(10_000) for _ in range(2))
        assert passed >= 9.99 * usual.handshakes_per_s


def test_an_installed_package_has_what_the_api_page_lists_but_for_what_it_says() -> None:
    page = (DOCS / "reference" / "api.rst").read_text()
    installed, _, checkout = page.partition("Only in the checkout\n")
    for part, package in ((installed, "dmsg"), (checkout, "benchmarks")):
        assert set(re.findall(r"^\.\. auto\w+:: (\w+)\.", part, re.MULTILINE)) == {package}


class OneByOne(LineReceiver):
    """Pauses after each line; the others wait in a buffer of its own."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.is_lost = False

    def lineReceived(self, line: bytes) -> None:
        self.lines.append(line)
        self.pauseProducing()

    def connectionLost(self, reason: Any = None) -> None:
        self.is_lost = True


@pytest.mark.parametrize(
    ("kind", "end", "at_once"),
    [
        ("e2e", "loseConnection", False),
        ("hop", "loseConnection", False),
        ("messaging", "loseConnection", False),
        ("e2e", "abortConnection", True),
    ],
)
@pytest_twisted.ensureDeferred
async def test_a_reader_that_has_paused_is_told_of_the_end_when_it_resumes_or_at_once(
    kind: str, end: str, at_once: bool
) -> None:
    async with LocalNetwork(MemoryNetwork(), relays=1, messaging_relays=1) as network:
        clients: list[Any] = [
            await (network.messaging_client() if kind == "messaging" else network.client(security=kind)) for _ in "ab"
        ]
        reader = OneByOne()
        clients[0].listen(Factory.forProtocol(lambda: reader))
        transport = await network.wait(clients[1].dial(clients[0].public_key))
        transport.attach(Protocol())
        transport.write(b"one\r\ntwo\r\nthree\r\n")
        await network.settle()
        getattr(transport, end)()
        await network.settle()
        assert reader.lines == [b"one"]
        assert reader.is_lost == at_once
        if not at_once:
            for _ in range(3):
                reader.resumeProducing()
                await network.settle()
            assert reader.lines == [b"one", b"two", b"three"] and reader.is_lost
