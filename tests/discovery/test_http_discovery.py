"""The HTTP client: the seed's seven cases over loopback against every store, and discoveries that mean harm."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import time
from typing import Any, cast

import pytest
import pytest_twisted
from twisted.internet import defer, task
from twisted.internet.error import ConnectionRefusedError as TwistedConnectionRefused
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site
from zope.interface.verify import verifyObject

from dmsg.discovery.api import DiscoveryApi, DiscoveryLimits, make_site
from dmsg.discovery.client import LIST_LIMIT, LIST_LIMIT_BYTES, HttpDiscovery
from dmsg.discovery.errors import (
    DISCOVERY_ERRORS,
    BadInput,
    DiscoveryError,
    DiscoveryUnavailable,
    EntryNotFound,
    EntryRolledBack,
    NonZeroSequence,
    RateLimitedByDiscovery,
    Unauthorized,
    WrongSequence,
    WrongTime,
)
from dmsg.errors import ConfigError
from dmsg.interfaces import IDiscovery

PREFIXES = ["messaging-discovery", "discovery", "dmsg-discovery"]


async def refused(kind: type[BaseException], awaitable: Any) -> Any:
    with pytest.raises(kind) as caught:
        await awaitable
    assert caught.type is kind
    return caught.value


@pytest.fixture(params=PREFIXES)
def discovery(request: pytest.FixtureRequest, store: Any, served: Any, agent: Any, reactor: Any, now_ns: int) -> Any:
    """A client of a discovery on loopback, over every store and every family of paths."""
    api = DiscoveryApi(store, clock_ns=lambda: now_ns, random=random.Random(1))
    port = served(make_site(api.resource(), reactor=reactor))
    return HttpDiscovery(f"http://127.0.0.1:{port}", agent, reactor, prefix=request.param)


# --- the seed's seven cases --------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_get_an_entry(discovery: Any, store: Any, make_entry: Any, now_ns: int) -> None:
    verifyObject(IDiscovery, discovery)
    alice = make_entry("alice", servers=("relay",))
    await store.put(alice, now_ns)
    assert await discovery.get_entry(alice.static) == alice


@pytest_twisted.ensureDeferred
async def test_get_an_entry_that_is_not_there(discovery: Any, key_of: Any) -> None:
    error = await refused(EntryNotFound, discovery.get_entry(key_of("alice").public_key))
    assert error.next_sequence is None


@pytest_twisted.ensureDeferred
async def test_a_tampered_entry_is_refused(discovery: Any, store: Any, make_entry: Any, now_ns: int) -> None:
    import dataclasses

    alice = make_entry("alice")
    await store.put(dataclasses.replace(alice, timestamp=alice.timestamp + 1), now_ns)  # a store does not verify
    await refused(Unauthorized, discovery.get_entry(alice.static))


@pytest_twisted.ensureDeferred
async def test_post_a_first_entry(discovery: Any, make_entry: Any) -> None:
    alice = make_entry("alice")
    await discovery.post_entry(alice)
    assert await discovery.get_entry(alice.static) == alice


@pytest_twisted.ensureDeferred
async def test_post_an_iteration(discovery: Any, make_entry: Any) -> None:
    for sequence in range(3):
        entry = make_entry("alice", sequence)
        await discovery.post_entry(entry)
        assert await discovery.get_entry(entry.static) == entry


@pytest_twisted.ensureDeferred
async def test_post_what_breaks_the_rules(discovery: Any, make_entry: Any) -> None:
    await refused(NonZeroSequence, discovery.post_entry(make_entry("alice", 1)))
    await discovery.post_entry(make_entry("alice"))
    await refused(WrongSequence, discovery.post_entry(make_entry("alice", 0)))
    await refused(WrongSequence, discovery.post_entry(make_entry("alice", 2)))
    await refused(WrongTime, discovery.post_entry(make_entry("alice", 1, timestamp=5)))
    import dataclasses

    forged = dataclasses.replace(make_entry("alice", 1), signature="00" * 65)
    await refused(Unauthorized, discovery.post_entry(forged))
    await refused(BadInput, discovery.post_entry(make_entry("relay", address="no port")))


@pytest_twisted.ensureDeferred
async def test_available_servers(discovery: Any, make_entry: Any) -> None:
    assert await discovery.available_servers() == []
    relays = {make_entry(f"relay {n}", address=f"10.0.0.{n}:80") for n in range(3)}
    for relay in relays:
        await discovery.post_entry(relay)
    await discovery.post_entry(make_entry("full", address="10.0.0.9:80", available=0))
    await discovery.post_entry(make_entry("client"))
    assert set(await discovery.available_servers()) == relays


# --- more over the real API --------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_hints_of_an_expired_entry_arrive(
    opened: Any, served: Any, agent: Any, reactor: Any, make_entry: Any, now_ns: int
) -> None:
    times = [now_ns]
    api = DiscoveryApi(opened("memory:"), clock_ns=lambda: times[-1], random=random.Random(1))
    port = served(make_site(api.resource(), reactor=reactor))
    client = HttpDiscovery(f"http://127.0.0.1:{port}/", agent, reactor)
    relay = make_entry("relay", address="10.0.0.1:80", timestamp=-7)
    await client.post_entry(relay)
    times.append(now_ns + 301 * 10**9)
    error = await refused(EntryNotFound, client.get_entry(relay.static))
    assert (error.next_sequence, error.after_timestamp) == (1, -7)


@pytest_twisted.ensureDeferred
async def test_being_rate_limited_is_told(opened: Any, served: Any, agent: Any, reactor: Any, key_of: Any) -> None:
    limits = DiscoveryLimits(get_burst=1, get_rate_per_s=0.001, servers_burst=1, servers_rate_per_s=0.001)
    api = DiscoveryApi(opened("memory:"), clock_ns=lambda: 0, random=random.Random(1), limits=limits)
    port = served(make_site(api.resource(), reactor=reactor))
    client = HttpDiscovery(f"http://127.0.0.1:{port}", agent, reactor)
    await refused(EntryNotFound, client.get_entry(key_of("a").public_key))
    await refused(RateLimitedByDiscovery, client.get_entry(key_of("a").public_key))
    assert await client.available_servers() == []
    await refused(RateLimitedByDiscovery, client.available_servers())


@pytest_twisted.ensureDeferred
async def test_a_pool_of_its_own_is_closed(opened: Any, served: Any, reactor: Any, make_entry: Any) -> None:
    api = DiscoveryApi(opened("memory:"), clock_ns=lambda: 0, random=random.Random(1))
    port = served(make_site(api.resource(), reactor=reactor))
    client = HttpDiscovery.connect(f"http://127.0.0.1:{port}", reactor)
    await client.post_entry(make_entry("alice"))
    assert await client.get_entry(make_entry("alice").static) == make_entry("alice")
    await client.close()


# --- a discovery that means harm ---------------------------------------------------------------------------------------


class Script(Resource):
    """Answers every request with what ``answer`` is set to: a body, or a function of the request."""

    isLeaf = True
    answer: Any = b""
    status = 200

    def __init__(self) -> None:
        super().__init__()
        self.headers: dict[bytes, bytes] = {}
        self.requests: list[Any] = []

    def render(self, request: Any) -> Any:
        self.requests.append((request.method, request.path, dict(request.requestHeaders.getAllRawHeaders())))
        request.setResponseCode(self.status)
        for name, value in self.headers.items():
            request.setHeader(name, value)
        return self.answer(request) if callable(self.answer) else self.answer


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def client(script: Script, served: Any, agent: Any, reactor: Any) -> HttpDiscovery:
    port = served(Site(script, reactor=reactor))
    return HttpDiscovery(f"http://127.0.0.1:{port}", agent, reactor, timeout_s=10)


@pytest_twisted.ensureDeferred
async def test_what_is_sent(client: HttpDiscovery, script: Script, make_entry: Any) -> None:
    alice = make_entry("alice")
    script.answer = alice.to_json()
    script.headers[b"Set-Cookie"] = b"a=b"
    await client.get_entry(alice.static)
    await client.post_entry(alice)
    assert [(method, path) for method, path, _ in script.requests] == [
        (b"GET", f"/messaging-discovery/entry/{alice.static}".encode()),
        (b"POST", b"/messaging-discovery/entry/"),
    ]
    assert script.requests[1][2][b"Content-Type"] == [b"application/json"]
    for _, _, headers in script.requests:
        assert b"Accept-Encoding" not in headers
        assert b"Cookie" not in headers


@pytest_twisted.ensureDeferred
async def test_the_entry_of_another_key_is_refused(client: HttpDiscovery, script: Script, make_entry: Any) -> None:
    script.answer = make_entry("bob").to_json()
    await refused(Unauthorized, client.get_entry(make_entry("alice").static))


@pytest_twisted.ensureDeferred
async def test_an_entry_older_than_one_seen_is_refused(client: HttpDiscovery, script: Script, make_entry: Any) -> None:
    versions = [make_entry("alice", n, timestamp=100 + n) for n in range(4)]
    for entry in (versions[0], versions[2], versions[2], versions[3]):
        script.answer = entry.to_json()
        assert await client.get_entry(entry.static) == entry
    for entry in versions[:3]:
        script.answer = entry.to_json()
        error = await refused(EntryRolledBack, client.get_entry(entry.static))
        assert error.entry == entry
    script.answer = versions[3].to_json()
    assert await client.get_entry(versions[3].static) == versions[3]
    # A discovery that lost everything begins anew; its owner signed that later.
    restarted = make_entry("alice", 0, timestamp=200)
    script.answer = restarted.to_json()
    assert await client.get_entry(restarted.static) == restarted


@pytest_twisted.ensureDeferred
async def test_servers_that_are_none_or_rolled_back_are_left_out(
    client: HttpDiscovery, script: Script, make_entry: Any
) -> None:
    good = make_entry("good", address="10.0.0.1:80")
    new, old = (make_entry("moved", n, address=f"10.0.0.{n}:80", timestamp=n) for n in (5, 4))
    bad = json.loads(make_entry("bad", address="10.0.0.1:80").to_json())
    bad["server"]["address"] = "10.6.6.6:80"
    everything = [json.loads(one.to_json()) for one in (good, new, old, make_entry("client"))]
    script.answer = json.dumps([*everything, bad, None, 1, {}, [], "x"]).encode()
    assert await client.available_servers() == [good, new]


@pytest_twisted.ensureDeferred
async def test_of_a_very_long_list_the_beginning_is_read(
    client: HttpDiscovery, script: Script, make_entry: Any
) -> None:
    one = make_entry("relay", address="10.0.0.1:80").to_json()
    script.answer = b"[" + b",".join([one] * 2000) + b"]"
    assert len(await client.available_servers()) == LIST_LIMIT == DiscoveryLimits().available_servers


def hostile_lists(make_entry: Any) -> dict[str, bytes]:
    """Answers of a discovery that wants to keep a client busy, each as long as is read."""
    relay = make_entry("relay", address="10.0.0.1:80", servers=tuple(f"r{n}" for n in range(64)), client=True).to_json()
    small = b"[" + b",".join([b'{"a":1}'] * 1900) + b"]"
    wide = (
        b'{"static":"'
        + b"02" * 33
        + b'","client":{"delegated_servers":['
        + b",".join([b'"02%064x"' % 1] * 220)
        + b"]}}"
    )
    bodies = {"many keys": relay, "nested": small, "too many keys": wide, "one element": b'{"a":1},' * 130_000 + b"1"}
    whole = {}
    for name, body in bodies.items():
        several = body if len(body) > 500_000 else b",".join([body] * ((LIST_LIMIT_BYTES - 2) // (len(body) + 1)))
        whole[name] = b"[" + several + b"]"
    whole["one string"] = b'["' + b'\\"[' * 300_000 + b'"]'
    whole["white space"] = b"[" + b" " * (LIST_LIMIT_BYTES - 2) + b"]"
    return whole


@pytest.mark.parametrize("name", ["many keys", "nested", "too many keys", "one element", "one string", "white space"])
@pytest_twisted.ensureDeferred
async def test_a_hostile_list_does_not_block_the_client(
    client: HttpDiscovery, script: Script, make_entry: Any, name: str
) -> None:
    script.answer = hostile_lists(make_entry)[name]
    assert len(script.answer) <= LIST_LIMIT_BYTES
    turns = [time.thread_time()]  # the processor's time, so that other programs on the machine do not count
    beating = task.LoopingCall(lambda: turns.append(time.thread_time()))
    beats = beating.start(0.0)
    try:
        await client.available_servers()
    except DiscoveryUnavailable:
        pass
    finally:
        turns.append(time.thread_time())
        beating.stop()
        await beats
    assert max(after - before for before, after in itertools.pairwise(turns)) < 0.05


@pytest_twisted.ensureDeferred
async def test_null_is_an_empty_list(client: HttpDiscovery, script: Script) -> None:
    script.answer = b"null"
    assert await client.available_servers() == []


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 15_000, b"{}", b"null", b"[]", b"\xff", b'{"message":"x"}'])
@pytest_twisted.ensureDeferred
async def test_answers_that_are_no_entry(client: HttpDiscovery, script: Script, key_of: Any, body: bytes) -> None:
    script.answer = body
    await refused(DiscoveryUnavailable, client.get_entry(key_of("alice").public_key))


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 60_000, b"{}", b'"x"', b"[1,]"])
@pytest_twisted.ensureDeferred
async def test_answers_that_are_no_list(client: HttpDiscovery, script: Script, body: bytes) -> None:
    script.answer = body
    await refused(DiscoveryUnavailable, client.available_servers())


@pytest.mark.parametrize("status", [201, 301, 302, 400, 404, 500, 503])
@pytest_twisted.ensureDeferred
async def test_the_text_decides_and_not_the_status(
    client: HttpDiscovery, script: Script, make_entry: Any, status: int
) -> None:
    script.status = status
    script.headers[b"Location"] = b"http://127.0.0.1:1/"
    for text, kind in DISCOVERY_ERRORS.items():
        script.answer = json.dumps({"message": text, "code": 0}).encode()
        await refused(kind, client.get_entry(make_entry("alice").static))
        await refused(kind, client.post_entry(make_entry("alice")))
    for body in (
        b"", b"<html>", b"[]", b"{}", b'{"message":1}', b'{"message":null}', b'{"message":["x"]}', b'{"message":"new"}',
        json.dumps({"message": DiscoveryError.text}).encode(),
    ):  # fmt: skip
        script.answer = body
        await refused(DiscoveryUnavailable, client.get_entry(make_entry("alice").static))
        await refused(DiscoveryUnavailable, client.post_entry(make_entry("alice")))
        await refused(DiscoveryUnavailable, client.available_servers())


@pytest.mark.parametrize("hint", [b"", b"x", b"1" * 30, b"--1", b"1.5", b"\xd9\xa3", b" "])
@pytest_twisted.ensureDeferred
async def test_hints_that_are_none(client: HttpDiscovery, script: Script, key_of: Any, hint: bytes) -> None:
    script.status, script.answer = 404, b'{"message":"entry of public key is not found"}'
    script.headers = {b"Dmsg-Next-Sequence": hint, b"Dmsg-After-Timestamp": hint}
    error = await refused(EntryNotFound, client.get_entry(key_of("alice").public_key))
    assert (error.next_sequence, error.after_timestamp) == (None, None)


class Flood:
    """Writes until the reader goes; tells how much it was and that the reader has gone."""

    def __init__(self, piece: bytes) -> None:
        self.piece = piece
        self.written = 0
        self.stopped: defer.Deferred[None] = defer.Deferred()

    def __call__(self, request: Any) -> Any:
        self.request = request
        request.notifyFinish().addErrback(lambda _: self.stopped.callback(None))
        request.registerProducer(self, False)
        return NOT_DONE_YET

    def resumeProducing(self) -> None:
        self.written += len(self.piece)
        self.request.write(self.piece)

    def stopProducing(self) -> None:
        pass


@pytest_twisted.ensureDeferred
async def test_endless_answers_are_cut_off(client: HttpDiscovery, script: Script, key_of: Any) -> None:
    for status in (200, 500):
        flood = script.answer = Flood(b" " * 30_000)
        script.status = status
        await refused(DiscoveryUnavailable, client.get_entry(key_of("alice").public_key))
        await flood.stopped
    flood = script.answer = Flood(b" " * 300_000)
    script.status = 200
    await refused(DiscoveryUnavailable, client.available_servers())
    await flood.stopped
    assert flood.written > LIST_LIMIT_BYTES


@pytest_twisted.ensureDeferred
async def test_compressed_answers_are_refused(client: HttpDiscovery, script: Script, make_entry: Any) -> None:
    script.answer = gzip.compress(make_entry("alice").to_json())
    script.headers[b"Content-Encoding"] = b"gzip"
    await refused(DiscoveryUnavailable, client.get_entry(make_entry("alice").static))


@pytest_twisted.ensureDeferred
async def test_an_answer_cut_short_is_no_answer(client: HttpDiscovery, script: Script, make_entry: Any) -> None:
    def half(request: Any) -> Any:
        request.setHeader(b"content-length", b"10000")
        request.write(make_entry("alice").to_json())
        request.transport.loseConnection()
        return NOT_DONE_YET

    script.answer = half
    await refused(DiscoveryUnavailable, client.get_entry(make_entry("alice").static))


@pytest.mark.parametrize("begins", [False, True])
@pytest_twisted.ensureDeferred
async def test_a_silent_discovery_has_a_time_limit(
    script: Script, served: Any, agent: Any, reactor: Any, key_of: Any, begins: bool
) -> None:
    clock = task.Clock()
    port = served(Site(script, reactor=reactor))
    client = HttpDiscovery(f"http://127.0.0.1:{port}", agent, clock, timeout_s=7)
    asked: defer.Deferred[None] = defer.Deferred()
    gone: defer.Deferred[None] = defer.Deferred()

    def silent(request: Any) -> Any:
        request.notifyFinish().addErrback(lambda _: gone.callback(None))
        if begins:
            request.write(b"{")
        asked.callback(None)
        return NOT_DONE_YET

    script.answer = silent
    call = defer.Deferred.fromCoroutine(client.get_entry(key_of("alice").public_key))
    await asked
    clock.advance(6.9)
    assert not call.called
    clock.advance(0.2)
    error = await refused(DiscoveryUnavailable, call)
    assert str(error) == f"http://127.0.0.1:{port}: no answer within 7 s"
    await gone


@pytest_twisted.ensureDeferred
async def test_a_call_can_be_cancelled(client: HttpDiscovery, script: Script, key_of: Any) -> None:
    asked: defer.Deferred[Any] = defer.Deferred()

    def silent(request: Any) -> Any:
        asked.callback(request.notifyFinish())
        return NOT_DONE_YET

    script.answer = silent
    call = defer.Deferred.fromCoroutine(client.get_entry(key_of("alice").public_key))
    finished = await asked_outcome(asked)
    call.cancel()
    await refused(defer.CancelledError, call)
    with pytest.raises(Exception, match="Connection"):
        await finished[0]


async def asked_outcome(asked: defer.Deferred[Any]) -> list[Any]:
    box: list[Any] = []
    asked.addCallback(box.append)
    await asked
    return box


class RefusingAgent:
    def request(self, *args: Any) -> Any:
        return defer.fail(TwistedConnectionRefused())


@pytest_twisted.ensureDeferred
async def test_a_key_that_is_text_is_said_to_be_none(make_entry: Any) -> None:
    client = HttpDiscovery("http://127.0.0.1:1", RefusingAgent(), task.Clock())
    with pytest.raises(TypeError, match="a key is a PublicKey, as"):
        await client.get_entry(cast(Any, str(make_entry("alice").static)))


@pytest_twisted.ensureDeferred
async def test_an_unreachable_discovery_is_unavailable(make_entry: Any) -> None:
    client = HttpDiscovery("https://discovery.example:1234/base/", RefusingAgent(), task.Clock())
    for call in (
        client.get_entry(make_entry("alice").static),
        client.post_entry(make_entry("alice")),
        client.available_servers(),
    ):
        await refused(DiscoveryUnavailable, call)
    await client.close()


@pytest_twisted.ensureDeferred
async def test_pins_are_bounded(script: Script, served: Any, agent: Any, reactor: Any, make_entry: Any) -> None:
    port = served(Site(script, reactor=reactor))
    client = HttpDiscovery(f"http://127.0.0.1:{port}", agent, reactor, pinned_keys=2)
    for name, timestamp in (("a", 9), ("b", 9), ("c", 9), ("a", 1)):
        script.answer = make_entry(name, timestamp=timestamp).to_json()
        await client.get_entry(make_entry(name).static)
    script.answer = make_entry("c", timestamp=1).to_json()
    await refused(EntryRolledBack, client.get_entry(make_entry("c").static))


@pytest.mark.parametrize("is_list", [False, True])
@pytest_twisted.ensureDeferred
async def test_an_answer_that_was_overtaken_by_a_newer_one_was_not_rolled_back(
    script: Script, served: Any, agent: Any, reactor: Any, make_entry: Any, is_list: bool
) -> None:
    port = served(Site(script, reactor=reactor))
    client = HttpDiscovery(f"http://127.0.0.1:{port}", agent, reactor)
    older, newer = (make_entry("relay", n, address="10.0.0.1:80", timestamp=9 + n) for n in range(2))
    waiting: list[Any] = []

    def keep(request: Any) -> int:
        waiting.append(request)
        return NOT_DONE_YET

    script.answer = keep
    overtaken = defer.ensureDeferred(client.get_entry(older.static))
    while not waiting:
        await task.deferLater(reactor, 0.001)
    if is_list:
        script.answer = b"[%s]" % newer.to_json()
        assert await client.available_servers() == [newer]
    else:
        script.answer = newer.to_json()
        assert await client.get_entry(newer.static) == newer
    waiting[0].write(older.to_json())
    waiting[0].finish()
    assert await overtaken == older
    script.answer = older.to_json()
    await refused(EntryRolledBack, client.get_entry(older.static))
    script.answer = b"[%s]" % older.to_json()
    assert await client.available_servers() == []


@pytest_twisted.ensureDeferred
async def test_lists_of_ever_new_relays_do_not_make_it_forget_the_entries_of_peers(
    script: Script, served: Any, agent: Any, reactor: Any, make_entry: Any
) -> None:
    """Else a discovery could list relays of its own until it can hand out a peer's entry of before."""
    port = served(Site(script, reactor=reactor))
    client = HttpDiscovery(f"http://127.0.0.1:{port}", agent, reactor, pinned_keys=4)
    script.answer = make_entry("peer", timestamp=9).to_json()
    await client.get_entry(make_entry("peer").static)
    relays = [make_entry(f"relay {n}", address="10.0.0.1:80", timestamp=9) for n in range(8)]
    script.answer = b"[%s]" % b",".join(one.to_json() for one in relays)
    assert len(await client.available_servers()) == 8
    script.answer = make_entry("peer", timestamp=8).to_json()
    await refused(EntryRolledBack, client.get_entry(make_entry("peer").static))
    script.answer = make_entry("relay 0", address="10.0.0.2:80", timestamp=8).to_json()
    await refused(EntryRolledBack, client.get_entry(relays[0].static))
    newer = make_entry("relay 0", 1, address="10.0.0.2:80", timestamp=10)
    script.answer = newer.to_json()
    assert await client.get_entry(newer.static) == newer
    script.answer = b"[%s]" % b",".join(one.to_json() for one in relays)
    assert newer.static not in [one.static for one in await client.available_servers()]


@pytest.mark.parametrize(
    "url", ["", "host:80", "ftp://h", "http://", "http://h:0", "http://h:x", "http://u@h", "http://h?q", "http://é"]
)
def test_urls_that_are_no_discovery(url: str) -> None:
    with pytest.raises(ConfigError):
        HttpDiscovery(url, RefusingAgent(), task.Clock())


@pytest.mark.parametrize("prefix", ["", "a/b", "é", "a b", "-", "../x"])
def test_prefixes_that_are_none(prefix: str) -> None:
    with pytest.raises(ConfigError):
        HttpDiscovery("http://h", RefusingAgent(), task.Clock(), prefix=prefix)
