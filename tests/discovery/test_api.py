"""The HTTP API over loopback: paths, statuses and texts; limits at the first byte; clients that go away."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import pytest_twisted
from treq.client import HTTPClient
from twisted.internet import defer, endpoints, protocol
from twisted.logger import capturedLogs, formatEvent
from twisted.web.http_headers import Headers
from twisted.web.server import Site
from zope.interface import implementer

from dmsg.address import address_group
from dmsg.discovery.api import DiscoveryApi, DiscoveryLimits, make_site
from dmsg.discovery.errors import DiscoveryUnavailable, ProofFailed
from dmsg.discovery.proofs.prover import RelayProofs
from dmsg.discovery.relay_addresses import RelayAddresses
from dmsg.discovery.stores.memory import MemoryStore
from dmsg.discovery.stores.rules import StoreLimits
from dmsg.interfaces import IEventLog, IRelayProver

SEED, OLD, NEW = "/discovery/entries", "/messaging-discovery/entry", "/dmsg-discovery/entry"
#: (path of entries, path of servers, whether the statuses are the seed's)
FAMILIES = [
    (SEED, "/discovery/available_servers", True),
    (OLD, "/messaging-discovery/available_servers", False),
    (NEW, "/dmsg-discovery/available_servers", False),
]


@implementer(IEventLog)
class Events:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def emit(self, event: Any) -> None:
        self.seen.append(event)


class Time:
    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


class SlowStore(MemoryStore):
    """Its writes wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[defer.Deferred[None]] = []
        self.asked: defer.Deferred[None] = defer.Deferred()

    def put(self, entry: Any, now_ns: int, poster: str = "") -> Any:
        gate: defer.Deferred[None] = defer.Deferred()
        self.waiting.append(gate)
        self.asked.callback(None)
        return gate.addCallback(lambda _: super(SlowStore, self).put(entry, now_ns, poster))


class BrokenStore(MemoryStore):
    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    def get_json(self, public_key: Any, now_ns: int) -> Any:
        return super().get_json(public_key, now_ns) if self.error is None else defer.fail(self.error)


class Harness:
    def __init__(self, reactor: Any, agent: Any, serve: Any, now_ns: int) -> None:
        self.reactor, self.agent, self.serve = reactor, agent, serve
        self.time = Time(now_ns)
        self.events = Events()
        self.connections: list[Any] = []

    def start(
        self,
        store: Any = None,
        *,
        proofs: Any = None,
        addresses: Any = None,
        list_protocol: str = "dmsg",
        may_list: Any = lambda host: True,
        **limits: Any,
    ) -> None:
        self.store = store if store is not None else MemoryStore(random=random.Random(11))
        chosen = DiscoveryLimits(**limits)
        api = DiscoveryApi(
            self.store,
            clock_ns=self.time,
            random=random.Random(3),
            limits=chosen,
            events=self.events,
            proofs=proofs,
            addresses=addresses,
            list_protocol=list_protocol,
            may_list=may_list,
        )
        self.site: Any = make_site(api.resource(), reactor=self.reactor, limits=chosen)
        self.port = self.serve(self.site)

    async def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any, Headers]:
        url = f"http://127.0.0.1:{self.port}{path}"
        response = await HTTPClient(self.agent).request(
            method, url, data=body or None, allow_redirects=False, reactor=self.reactor
        )
        content = await response.content()
        assert response.headers.getRawHeaders("content-type") == ["application/json"]
        return response.code, json.loads(content) if content else None, response.headers

    async def raw(self, *pieces: bytes) -> bytes:
        """Everything answered to ``pieces`` on a connection of its own, until the server closes it."""
        connection = await self.connect()
        for piece in pieces:
            connection.transport.write(piece)
        await connection.lost
        return b"".join(connection.received)

    async def connect(self) -> Any:
        endpoint = endpoints.TCP4ClientEndpoint(self.reactor, "127.0.0.1", self.port)
        connection = await endpoint.connect(protocol.Factory.forProtocol(Raw))
        self.connections.append(connection)
        return connection


class Raw(protocol.Protocol):
    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.lost: defer.Deferred[None] = defer.Deferred()
        self._waiting: list[tuple[bytes, defer.Deferred[None]]] = []

    def dataReceived(self, data: bytes) -> None:
        self.received.append(data)
        everything = b"".join(self.received)
        for wanted, done in list(self._waiting):
            if wanted in everything:
                self._waiting.remove((wanted, done))
                done.callback(None)

    def until(self, wanted: bytes) -> defer.Deferred[None]:
        done: defer.Deferred[None] = defer.Deferred()
        self._waiting.append((wanted, done))
        self.dataReceived(b"")
        return done

    def connectionLost(self, reason: Any = None) -> None:
        self.lost.callback(None)


@pytest.fixture
def api(reactor: Any, agent: Any, served: Any, now_ns: int) -> Iterator[Harness]:
    harness = Harness(reactor, agent, served, now_ns)
    yield harness
    for connection in harness.connections:
        if connection.transport.connected:
            connection.transport.abortConnection()
        pytest_twisted.blockon(connection.lost)


# --- paths, statuses, texts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("entries", "servers", "seed"), FAMILIES)
@pytest_twisted.ensureDeferred
async def test_a_family_of_paths(
    api: Harness, store: Any, make_entry: Any, entries: str, servers: str, seed: bool, vectors: Any
) -> None:
    api.start(store)
    alice = make_entry("alice", servers=("relay",))
    path = f"{entries}/{alice.static}"
    invalid = 500 if seed else 422

    assert (await api.ask("GET", path))[:2] == (404, {"message": "entry of public key is not found", "code": 404})
    status, body, _ = await api.ask("POST", entries, alice.to_json())
    assert (status, body) == (200, json.loads(vectors["discovery_messages"]["entry_set"]))
    status, body, _ = await api.ask("GET", path)
    assert (status, body) == (200, json.loads(alice.to_json()))

    wrong = "entry validation error: sequence field of new entry is not sequence of old entry + 1"
    status, body, _ = await api.ask("POST", entries, make_entry("alice", 5).to_json())
    assert (status, body) == (invalid, {"message": wrong, "code": invalid})
    old = "entry validation error: previous entry timestamp is not set before current entry timestamp"
    status, body, _ = await api.ask("POST", entries + "/", make_entry("alice", 1, timestamp=3).to_json())
    assert (status, body["message"]) == (invalid, old)
    status, body, _ = await api.ask("POST", entries + "/", make_entry("alice", 1).to_json())
    assert (status, body) == (200, json.loads(vectors["discovery_messages"]["entry_updated"]))
    status, body, _ = await api.ask("POST", entries, make_entry("bob", 1).to_json())
    assert (status, body["message"]) == (invalid, "entry validation error: new entry has non-zero sequence")

    forged = make_entry("alice", 2).to_json().replace(b'"timestamp":1', b'"timestamp":2')
    assert (await api.ask("POST", entries, forged))[:2] == (401, {"message": "invalid signature", "code": 401})
    for bad in (b"", b"{", b"[]", b"\xff", b"[" * 15_000, b'{"sequence":1e9}'):
        assert (await api.ask("POST", entries, bad))[:2] == (400, {"message": "error bad input", "code": 400})
    for bad_key in ("zz", "02" * 33 + "00", "0" * 66, "02" + "f" * 64, "%00" * 66, "%C3%A9" * 33):
        assert (await api.ask("GET", f"{entries}/{bad_key}"))[0] == 400
    status, body, _ = await api.ask("POST", entries, b"{}")
    assert (status, body["message"]) == (invalid, "entry validation error: entry has no version")
    bad_address = make_entry("relay", address="no port").to_json()
    assert (await api.ask("POST", entries, bad_address))[0] == 400

    none = (404, {"message": "entry of public key is not found", "code": 404})
    assert (await api.ask("GET", servers))[:2] == ((200, []) if entries == OLD else none)
    relays = [make_entry(f"relay {n}", address=f"10.0.0.{n}:80") for n in range(3)]
    for relay in relays:
        assert (await api.ask("POST", entries, relay.to_json()))[0] == 200
    status, body, _ = await api.ask("GET", servers)
    assert status == 200
    assert sorted(one["static"] for one in body) == sorted(str(relay.static) for relay in relays)


@pytest_twisted.ensureDeferred
async def test_all_families_share_one_store(api: Harness, make_entry: Any) -> None:
    api.start()
    for sequence, (posted, _, _) in enumerate(FAMILIES):
        alice = make_entry("alice", sequence)
        assert (await api.ask("POST", posted, alice.to_json()))[0] == 200
        for got, _, _ in FAMILIES:
            assert (await api.ask("GET", f"{got}/{alice.static}"))[1]["sequence"] == sequence


@pytest_twisted.ensureDeferred
async def test_what_is_nowhere_is_404_and_wrong_methods_are_405(api: Harness) -> None:
    api.start()
    for path in (
        "/",
        "/discovery",
        "/discovery/entries/a/b",
        "//discovery//entries",
        "/x" * 100,
        "/discovery/entries/",
    ):
        assert (await api.ask("GET", path))[0] in (404, 405)
    assert (await api.ask("DELETE", "/discovery/entries"))[0] == 405
    assert (await api.ask("POST", "/discovery/available_servers", b"{}"))[0] == 405
    status, body, _ = await api.ask("HEAD", "/discovery/available_servers")
    assert (status, body) == (404, None)


@pytest_twisted.ensureDeferred
async def test_requests_that_routing_cannot_take(api: Harness) -> None:
    api.start()
    for line, host in (
        (b"GET /%FF/\xff HTTP/1.1", b"h"),
        (b"GET /discovery/entries/%FF HTTP/1.1", b"h"),
        (b"G\xffT / HTTP/1.1", b"h"),
        (b"GET / HTTP/1.1", b"\xff"),
        (b"GET / HTTP/1.1", b"a" * 70 + b"." + b"b" * 70),
        (b"GET / HTTP/1.1", "ü".encode() + b"." * 9),
        (b"OPTIONS * HTTP/1.1", b"h"),
    ):
        answer = await api.raw(line + b"\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
        assert answer.split(b" ")[1][:1] in b"24", (line, answer)


@pytest_twisted.ensureDeferred
async def test_an_expired_key_comes_with_hints(api: Harness, make_entry: Any) -> None:
    api.start()
    relay = make_entry("relay", address="10.0.0.1:80")
    await api.ask("POST", SEED, relay.to_json())
    api.time.now_ns += 301 * 10**9
    status, _, headers = await api.ask("GET", f"{SEED}/{relay.static}")
    assert status == 404
    assert headers.getRawHeaders("dmsg-next-sequence") == ["1"]
    assert headers.getRawHeaders("dmsg-after-timestamp") == [str(relay.timestamp)]


@pytest_twisted.ensureDeferred
async def test_at_most_n_servers_and_not_always_the_same(api: Harness, make_entry: Any) -> None:
    api.start(available_servers=3)
    for n in range(9):
        await api.ask("POST", SEED, make_entry(f"relay {n}", address=f"10.0.0.{n}:80").to_json())
    seen = set()
    for _ in range(20):
        _, body, _ = await api.ask("GET", "/discovery/available_servers")
        assert len(body) == 3
        seen.update(one["static"] for one in body)
    assert len(seen) == 9


@pytest_twisted.ensureDeferred
async def test_the_list_of_servers_is_bounded_in_bytes(api: Harness, make_entry: Any) -> None:
    size = len(make_entry("relay 0", address="10.0.0.0:80").to_json())
    api.start(available_servers_bytes=2 * size + 3)
    for n in range(4):
        await api.ask("POST", SEED, make_entry(f"relay {n}", address=f"10.0.0.{n}:80").to_json())
    _, body, _ = await api.ask("GET", "/discovery/available_servers")
    assert len(body) == 2
    assert len(json.dumps(body, separators=(",", ":"))) == 2 * size + 3


# --- events ------------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_one_event_for_each_request(api: Harness, make_entry: Any) -> None:
    api.start()
    alice = make_entry("alice")
    await api.ask("GET", f"{SEED}/{alice.static}")
    await api.ask("POST", OLD + "/", alice.to_json())
    await api.ask("POST", OLD, alice.to_json())
    await api.ask("GET", f"{NEW}/nonsense")
    await api.ask("GET", "/dmsg-discovery/available_servers")
    wrong = "entry validation error: sequence field of new entry is not sequence of old entry + 1"
    assert [(e.method, e.path, e.status, e.reason, e.key) for e in api.events.seen] == [
        ("GET", "discovery/entries", 404, "entry of public key is not found", str(alice.static)),
        ("POST", "messaging-discovery/entry", 200, "", str(alice.static)),
        ("POST", "messaging-discovery/entry", 422, wrong, str(alice.static)),
        ("GET", "dmsg-discovery/entry", 400, "error bad input", ""),
        ("GET", "dmsg-discovery/available_servers", 404, "entry of public key is not found", ""),
    ]
    assert all(e.elapsed_ms >= 0 for e in api.events.seen)


@pytest_twisted.ensureDeferred
async def test_a_request_for_nothing_is_an_event_too(api: Harness) -> None:
    """Clients that were told a wrong prefix are seen in the metrics."""
    api.start(get_rate_per_s=1e-9, get_burst=4)
    for method, path in (("GET", "/"), ("GET", "/nothing/entry/here"), ("POST", "/discovery/relay_ranks")):
        await api.ask(method, path)
    assert (await api.ask("GET", "/discovery/entries/%FF"))[0] == 400
    for path in ("/nothing", "/nothing"):
        await api.ask("GET", path)
    assert [(e.method, e.path, e.status, e.reason, e.key) for e in api.events.seen] == [
        ("GET", "unknown", 404, "other", ""),
        ("GET", "unknown", 404, "other", ""),
        ("POST", "discovery/relay_ranks", 405, "other", ""),
        ("GET", "discovery/entries", 400, "error bad input", ""),
        ("GET", "unknown", 404, "other", ""),
        ("GET", "unknown", 429, "too many requests", ""),
    ]


@pytest_twisted.ensureDeferred
async def test_a_head_of_a_path_that_cannot_be_routed_writes_no_line_to_the_log(api: Harness) -> None:
    api.start()
    with capturedLogs() as lines:
        for path in ("/discovery/entries/%FF", "/%FF"):
            assert (await api.ask("HEAD", path))[:2] == (400, None)
    assert not [text for text in map(formatEvent, lines) if "HEAD" in text]
    assert [(e.path, e.status) for e in api.events.seen] == [("discovery/entries", 400), ("unknown", 400)]


@pytest_twisted.ensureDeferred
async def test_addresses_that_relays_are_not_listed_for_get_a_403(api: Harness, make_entry: Any) -> None:
    asked: list[str] = []

    def may_list(host: str) -> bool:
        asked.append(host)
        return False

    api.start(may_list=may_list)
    alice = make_entry("alice")
    for family in ("discovery", "messaging-discovery", "dmsg-discovery"):
        status, answer, _ = await api.ask("GET", f"/{family}/available_servers")
        assert (status, answer) == (403, {"message": "access is forbidden", "code": 403})
    assert asked == ["127.0.0.1"] * 3
    assert (await api.ask("POST", SEED, alice.to_json()))[0] == 200
    assert (await api.ask("GET", f"{SEED}/{alice.static}"))[0] == 200


# --- rates -------------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_too_many_requests_from_one_address(api: Harness, make_entry: Any) -> None:
    api.start(get_rate_per_s=2.0, get_burst=3, post_rate_per_s=1.0, post_burst=1)
    path = f"{SEED}/{make_entry('alice').static}"
    statuses = [(await api.ask("GET", path))[0] for _ in range(5)]
    assert statuses == [404, 404, 404, 429, 429]
    assert (await api.ask("GET", path))[1] == {"message": "too many requests", "code": 429}
    assert (await api.ask("POST", SEED, make_entry("alice").to_json()))[0] == 200
    assert (await api.ask("POST", SEED, make_entry("bob").to_json()))[0] == 429
    api.time.now_ns += 10**9
    assert [(await api.ask("GET", path))[0] for _ in range(3)] == [200, 200, 429]
    assert (await api.ask("POST", SEED, make_entry("bob").to_json()))[0] == 200


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1:2:3", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("not:an:address", "not:an:address", True),
        ("", "", True),
    ],
)
def test_what_counts_as_one_address(one: str, other: str, same: bool) -> None:
    assert (address_group(one) == address_group(other)) is same


# --- failures ----------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_failing_store_is_logged_once(api: Harness, make_entry: Any, logged_errors: Any) -> None:
    api.start(BrokenStore(DiscoveryUnavailable("the disk is gone")))
    for _ in range(3):
        status, body, _ = await api.ask("GET", f"{SEED}/{make_entry('alice').static}")
        assert (status, body) == (500, {"message": "something unexpected happened", "code": 500})
    assert len(logged_errors.texts()) == 1
    logged_errors.flush()


@pytest_twisted.ensureDeferred
async def test_a_store_that_fails_again_is_logged_again(api: Harness, make_entry: Any, logged_errors: Any) -> None:
    store = BrokenStore(DiscoveryUnavailable("the disk is gone"))
    api.start(store)

    async def get(expected: int) -> None:
        assert (await api.ask("GET", f"{SEED}/{make_entry('alice').static}"))[0] == expected

    await get(500)
    store.error = None
    await api.ask("POST", SEED, make_entry("alice").to_json())
    await get(200)  # nothing but good answers
    store.error = DiscoveryUnavailable("the disk is full")
    for after_s, told in ((58, 1), (1, 1), (3, 2), (100, 2)):  # once a minute at most, and then as soon as it may be
        api.time.now_ns += after_s * 10**9
        await get(500)
        assert len(logged_errors.texts()) == told
    logged_errors.flush()


@pytest_twisted.ensureDeferred
async def test_a_bug_is_logged_and_not_shown(api: Harness, make_entry: Any, logged_errors: Any) -> None:
    api.start(BrokenStore(ZeroDivisionError("secret detail")))
    status, body, _ = await api.ask("GET", f"{OLD}/{make_entry('alice').static}")
    assert (status, body) == (500, {"message": "something unexpected happened", "code": 500})
    assert len(logged_errors.flush(ZeroDivisionError)) == 1


@pytest_twisted.ensureDeferred
async def test_a_write_goes_on_when_its_client_hangs_up(api: Harness, make_entry: Any) -> None:
    store = SlowStore()
    api.start(store)
    body = make_entry("alice").to_json()
    connection = await api.connect()
    connection.transport.write(b"POST /discovery/entries HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body))
    connection.transport.write(body)
    await store.asked
    gone: defer.Deferred[None] = defer.Deferred()
    emit = api.events.emit
    api.events.emit = lambda event: (emit(event), gone.callback(None))  # type: ignore[method-assign]
    connection.transport.abortConnection()
    await gone
    assert (api.events.seen[0].status, api.events.seen[0].reason) == (499, "client gone")
    assert api.site.bodies == 0
    store.waiting[0].callback(None)
    assert await store.get(make_entry("alice").static, api.time()) == make_entry("alice")


@pytest_twisted.ensureDeferred
async def test_writes_that_outlive_their_requests_are_bounded(
    api: Harness, make_entry: Any, logged_errors: Any
) -> None:
    store = SlowStore()
    api.start(store, pending_writes=1)
    first = defer.Deferred.fromCoroutine(api.ask("POST", SEED, make_entry("alice").to_json()))
    await store.asked
    assert (await api.ask("POST", SEED, make_entry("bob").to_json()))[0] == 500
    logged_errors.flush()
    store.waiting[0].callback(None)
    assert (await first)[0] == 200


@pytest_twisted.ensureDeferred
async def test_a_store_that_raises_at_once_has_no_write_under_way(
    api: Harness, make_entry: Any, logged_errors: Any
) -> None:
    class Hasty(MemoryStore):
        fails = True

        def put(self, *args: Any) -> Any:
            if self.fails:
                raise ZeroDivisionError
            return super().put(*args)

    store = Hasty()
    api.start(store, pending_writes=1)
    body = make_entry("alice").to_json()
    assert (await api.ask("POST", SEED, body))[0] == 500
    assert len(logged_errors.flush(ZeroDivisionError)) == 1
    store.fails = False
    assert (await api.ask("POST", SEED, body))[0] == 200


# --- limits of HTTP ----------------------------------------------------------------------------------------------------


def head(*headers: bytes) -> bytes:
    return b"\r\n".join([b"POST /discovery/entries HTTP/1.1", b"Host: h", *headers]) + b"\r\n\r\n"


@pytest.mark.parametrize(
    "kind", [b"text/plain", b"multipart/form-data", b"application/x-www-form-urlencoded", b"\xff;"]
)
@pytest_twisted.ensureDeferred
async def test_a_body_is_json_whatever_its_type_says(api: Harness, make_entry: Any, kind: bytes) -> None:
    """``curl --data`` calls everything a form; a form without a boundary ends no connection."""
    api.start()
    for body, status in ((make_entry("alice").to_json(), b"200"), (b"a=b&c=d", b"400")):
        fields = (b"Content-Type: " + kind, b"Content-Length: %d" % len(body), b"Connection: close")
        answer = await api.raw(head(*fields) + body)
        assert answer.startswith(b"HTTP/1.1 " + status) and b'"code":' + status in answer


@pytest_twisted.ensureDeferred
async def test_a_body_too_long_is_refused_before_its_first_byte(api: Harness) -> None:
    api.start()
    answer = await api.raw(head(b"Content-Length: 65537", b"Expect: 100-continue"))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'{"message":"error bad input","code":413}' in answer
    assert (await api.raw(head(b"Content-Length: " + b"9" * 100))).startswith(b"HTTP/1.1 413 ")
    assert api.events.seen == []
    assert api.site.requests_refused == 2


@pytest_twisted.ensureDeferred
async def test_a_chunked_body_is_refused_at_the_first_byte_over(api: Harness) -> None:
    api.start()
    connection = await api.connect()
    connection.transport.write(head(b"Transfer-Encoding: chunked"))
    for _ in range(4):
        connection.transport.write(b"1000\r\n" + b" " * 0x1000 + b"\r\n")
    # 16,384 bytes are there: not yet too many. (The request is alive: the server counts it.)
    connection.transport.write(b"1\r\n")
    probe = await api.connect()
    probe.transport.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await probe.until(b"404")
    assert connection.received == []
    assert api.site.bodies == 1
    connection.transport.write(b" ")
    await connection.lost
    assert b"".join(connection.received).startswith(b"HTTP/1.1 413 ")
    assert api.site.bodies == 0


@pytest_twisted.ensureDeferred
async def test_the_resource_alone_takes_no_long_body_either(api: Harness) -> None:
    api.start()
    api.port = api.serve(Site(api.site.resource, reactor=api.reactor))
    assert (await api.ask("POST", SEED, b" " * 16385))[:2] == (400, {"message": "error bad input", "code": 400})


@pytest_twisted.ensureDeferred
async def test_a_chunked_entry_is_taken(api: Harness, make_entry: Any) -> None:
    api.start()
    body = make_entry("alice").to_json()
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    answer = await api.raw(head(b"Transfer-Encoding: chunked", b"Connection: close"), pieces, b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest_twisted.ensureDeferred
async def test_bodies_at_one_time_are_bounded(api: Harness, make_entry: Any) -> None:
    store = SlowStore()
    api.start(store, concurrent_bodies=1)
    first, second = await api.connect(), await api.connect()
    for one in (first, second):
        one.transport.write(head(b"Content-Length: 10", b"Expect: 100-continue"))
        await one.until(b"100 Continue")
    await first.lost
    assert api.site.bodies == 1
    answer = defer.Deferred.fromCoroutine(api.ask("POST", SEED, make_entry("alice").to_json()))
    await second.lost
    await store.asked
    assert (await api.raw(head(b"Content-Length: 10"))).startswith(b"HTTP/1.1 503 ")
    store.waiting[0].callback(None)
    assert (await answer)[0] == 200
    assert api.site.bodies == 0


@pytest_twisted.ensureDeferred
async def test_a_body_that_drips_is_cut_off(api: Harness, reactor: Any) -> None:
    api.start(request_timeout_s=0.1)
    connection = await api.connect()
    connection.transport.write(head(b"Content-Length: 10000"))

    def drip() -> None:
        if connection.transport.connected:
            connection.transport.write(b" ")
            dripping.append(reactor.callLater(0.01, drip))

    dripping: list[Any] = []
    drip()
    await connection.lost
    if dripping[-1].active():
        dripping[-1].cancel()
    assert connection.received == []


@pytest_twisted.ensureDeferred
async def test_headers_that_drip_are_cut_off(api: Harness) -> None:
    api.start(request_timeout_s=0.05)
    assert await api.raw(b"GET / HT") == b""


@pytest_twisted.ensureDeferred
async def test_an_idle_connection_is_closed(api: Harness) -> None:
    api.start(first_byte_timeout_s=0.05)
    assert await api.raw() == b""
    api.start(idle_timeout_s=0.05)
    assert b" 404 " in await api.raw(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")


@pytest_twisted.ensureDeferred
async def test_headers_are_bounded_in_size_and_number(api: Harness) -> None:
    api.start(headers_bytes=1000, headers=10)
    many = b"".join(b"X-%d: 1\r\n" % n for n in range(11))
    for request in (
        b"GET / HTTP/1.1\r\n" + many + b"\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 990 + b"\r\n\r\n",
        b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 2000,
    ):
        assert b" 200 " not in await api.raw(request)


@pytest_twisted.ensureDeferred
async def test_above_either_number_of_connections_the_oldest_idle_one_makes_room(api: Harness) -> None:
    for limits in ({"connections": 2}, {"connections_per_address": 2}):
        api.start(**limits)
        kept = [await api.connect() for _ in range(2)]
        for one in kept:
            one.transport.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            await one.until(b"404")
        again = await api.connect()
        again.transport.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        await again.until(b"404")
        await kept[0].lost
        assert (api.site.connections, api.site.evicted, api.site.refused) == (2, 1, 0)
        assert kept[1].transport.connected


@pytest_twisted.ensureDeferred
async def test_pipelined_requests_are_answered_in_order(api: Harness, make_entry: Any) -> None:
    api.start()
    body = make_entry("alice").to_json()
    post = head(b"Content-Length: %d" % len(body)) + body
    get = b"GET /discovery/entries/%s HTTP/1.1\r\nHost: h\r\n" % str(make_entry("alice").static).encode()
    answer = await api.raw(post + get + b"\r\n" + get + b"Connection: close\r\n\r\n")
    assert [part.split(b" ")[0] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200"] * 3
    assert answer.count(body) == 2


@pytest_twisted.ensureDeferred
async def test_new_keys_from_one_address_have_a_rate_of_their_own(api: Harness, make_entry: Any) -> None:
    api.start(MemoryStore(limits=StoreLimits(new_keys_per_s=0.001, new_keys_burst=3)))
    answers = [(await api.ask("POST", SEED, make_entry(f"key {n}").to_json()))[0] for n in range(5)]
    assert answers == [200, 200, 200, 429, 429]
    assert (await api.ask("POST", SEED, make_entry("key 0", 1).to_json()))[0] == 200


# --- entries of 2023 ---------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_entries_of_2023_are_taken_and_given_out_as_they_were_signed(
    api: Harness, store: Any, make_entry: Any, later_entry: Any, key_of: Any
) -> None:
    api.start(store)
    relay = '"server":{"address":"203.0.113.7:8080","availableSessions":2048,"serverType":"official"}'
    client = f'"client":{{"delegated_servers":["{key_of("relay").public_key}"]}},"client_type":"visor",' + relay
    path = f"/dmsg-discovery/entry/{key_of('later').public_key}"
    for sequence, halves in enumerate((relay, client, relay)):
        body = later_entry(halves, sequence)
        status, answer, _ = await api.ask("POST", "/dmsg-discovery/entry/", body)
        assert (status, answer["code"]) == (200, 200)
        for known in (path, path.replace("dmsg", "messaging")):
            assert (await api.ask("GET", known))[:2] == (200, json.loads(body))
    # A relay of that generation speaks another protocol, so it is not listed.
    for family in ("/dmsg-discovery", "/messaging-discovery", "/discovery"):
        _, body, _ = await api.ask("GET", f"{family}/available_servers")
        assert body in ([], {"message": "entry of public key is not found", "code": 404})
    forged = later_entry(relay, 3).replace(b"2048", b"2049")
    assert (await api.ask("POST", "/dmsg-discovery/entry/", forged))[0] == 401


# --- which servers are listed ------------------------------------------------------------------------------------------


@implementer(IRelayProver)
class Prover:
    """Lets relays on port 80 pass."""

    def resolve(self, host: str) -> defer.Deferred[list[str]]:
        return defer.succeed([])

    def prove(self, public_key: Any, address: Any) -> defer.Deferred[None]:
        return defer.succeed(None) if address.port == 80 else defer.fail(ProofFailed("refused"))


@pytest.mark.parametrize("servers", [servers for _, servers, _ in FAMILIES])
@pytest_twisted.ensureDeferred
async def test_a_list_is_for_one_protocol(api: Harness, store: Any, make_entry: Any, servers: str) -> None:
    """Of relays of both, and of one that speaks something else: those that are asked for, or those of dmsg."""
    api.start(store)
    for n, version in enumerate(("0.0.1", "0.0.1+messaging", "0.1.0+messaging", "0.0.1+other")):
        relay = make_entry(f"relay {n}", address=f"10.0.{n}.1:80", version=version)
        assert (await api.ask("POST", SEED, relay.to_json()))[0] == 200

    async def listed(query: str) -> list[str]:
        status, body, _ = await api.ask("GET", servers + query)
        return sorted(one["server"]["address"] for one in body) if status == 200 else []

    for query in ("", "?protocol=dmsg"):
        assert await listed(query) == ["10.0.0.1:80"]
    assert await listed("?protocol=messaging") == ["10.0.1.1:80", "10.0.2.1:80"]
    for query in ("?protocol=other", "?protocol=", "?protocol=%FF", "?protocol=messaging&protocol=x"):
        assert await listed(query) == []


@pytest_twisted.ensureDeferred
async def test_a_discovery_for_clients_that_speak_messaging_and_do_not_say_so(api: Harness, make_entry: Any) -> None:
    api.start(list_protocol="messaging")
    for name, version in (("one", "0.0.1"), ("two", "0.0.1+messaging")):
        await api.ask("POST", OLD, make_entry(name, address="10.0.0.1:80", version=version).to_json())
    for query, version in (("", "0.0.1+messaging"), ("?protocol=dmsg", "0.0.1")):
        _, body, _ = await api.ask("GET", f"/messaging-discovery/available_servers{query}")
        assert [one["version"] for one in body] == [version]


@pytest_twisted.ensureDeferred
async def test_only_proved_servers_at_global_addresses_are_listed(api: Harness, make_entry: Any) -> None:
    store, addresses = MemoryStore(random=random.Random(1)), RelayAddresses()
    proofs = RelayProofs(
        store, {"dmsg": Prover()}, api.reactor, now_ns=api.time, random=random.Random(2), addresses=addresses
    )
    api.start(store, proofs=proofs, addresses=addresses)
    proofs.start()
    try:
        for entries, servers, _ in FAMILIES:
            private = make_entry(f"private {entries}", address="192.168.0.1:80")
            wanted = (422, {"message": "server address is not global", "code": 422})
            assert (await api.ask("POST", entries, private.to_json()))[:2] == wanted
            assert (await api.ask("GET", f"{entries}/{private.static}"))[0] == 404
            for name, port in (("good", 80), ("dead", 81)):
                entry = make_entry(f"{name} {entries}", address=f"20.0.0.1:{port}")
                assert (await api.ask("POST", entries, entry.to_json()))[0] == 200
                assert (await api.ask("GET", f"{entries}/{entry.static}"))[0] == 200, "it is looked up all the same"
            _, body, _ = await api.ask("GET", servers)
            assert {one["server"]["address"] for one in body} == {"20.0.0.1:80"}
        [record] = {record.source_host for record in proofs._schedule._records.values()}
        assert record == "127.0.0.1", "who registered it is known"
    finally:
        await proofs.stop()
