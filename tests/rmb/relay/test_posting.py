"""Posts between two relays over HTTP on loopback: what arrives, what is refused, and what the sender makes of the answer."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import pytest_twisted
from cryptography import x509
from twisted.internet._resolver import GAIResolver
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred, fail, succeed
from twisted.internet.error import ConnectBindError
from twisted.internet.protocol import ClientFactory, Factory, Protocol
from twisted.internet.ssl import DefaultOpenSSLContextFactory
from twisted.internet.task import Clock, deferLater
from twisted.internet.threads import deferToThreadPool
from twisted.web.iweb import IAgent
from twisted.web.resource import Resource
from zope.interface import implementer

from dmsg.crypto import ed25519
from dmsg.eventlog.reasons import Reason
from dmsg.http import client
from dmsg.http.client import HttpCaller
from dmsg.http.limits import HttpLimits
from dmsg.http.server import LimitedSite
from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.core.signing import sign_envelope
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope
from dmsg.rmb.relay.errors import NotPosted
from dmsg.rmb.relay.ingest import Ingest, body_limit
from dmsg.rmb.relay.peering import BATCH_BYTES, HEADER, Body, Signer, Verifier
from dmsg.rmb.relay.posting import SINGLE_S, RelayPoster, is_loopback
from dmsg.rmb.twins.cache import TwinCache
from dmsg.rmb.twins.errors import RegistryError

OURS, THEIRS = ed25519.SigningKey(b"o" * 32), ed25519.SigningKey(b"t" * 32)
ALICE = TwinKey(b"a" * 32, KeyType.ED25519)
MESSAGE_BYTES = 100_000


def envelope(uid: str = "x", *, source: int = 1, twin: int = 7, lifetime_s: int = 60, size: int = 0) -> bytes:
    made = Envelope(uid=uid, timestamp=int(time.time()), expiration=lifetime_s, plain=bytes(size))
    made.source.twin, made.destination.twin = source, twin
    made.request.command = "c"
    sign_envelope(made, ALICE)
    return made.SerializeToString()


class Registry:
    def __init__(self, relay: str) -> None:
        self.twins: dict[int, Any] = {
            1: Twin(1, ALICE.account, ("elsewhere.example",)),
            7: Twin(7, bytes(32), ("elsewhere.example", relay.upper())),
            8: Twin(8, bytes(32), ("elsewhere.example",)),
        }

    async def get(self, twin: int) -> Twin | None:
        found = self.twins.get(twin)
        if isinstance(found, Exception):
            raise found
        return found


class Timer(Clock):
    """A clock whose ``armed`` fires at the first call that is put off."""

    def __init__(self) -> None:
        super().__init__()
        self.armed: Deferred[None] = Deferred()

    def callLater(self, *arguments: Any, **options: Any) -> Any:
        call = super().callLater(*arguments, **options)
        if not self.armed.called:
            self.armed.callback(None)
        return call


class Relay:
    """A relay's ``POST /`` on loopback; ``taken`` is what it took, ``status`` what it says to it."""

    def __init__(
        self, reactor: Any, remembered: int = 1_000, unix_time: Callable[[], float] = time.time, **options: Any
    ) -> None:
        self.taken: list[tuple[str, bool]] = []
        self.refused: list[Reason] = []
        self.clock = Timer()
        #: How many had been taken at each flush.
        self.flushes: list[int] = []
        self.status: Callable[[str], Any] = lambda uid: 202
        limits = HttpLimits(body_bytes=body_limit(MESSAGE_BYTES))
        site = LimitedSite(Resource(), reactor=reactor, limits=limits)
        self.port = reactor.listenTCP(0, site, interface="127.0.0.1")
        self.name = f"localhost:{self.port.getHost().port}"
        self.registry = Registry(self.name)
        self.ingest = Ingest(
            self._accept,
            self.registry,
            Verifier([self.name], {"sender.example": OURS.public_key}, remembered),
            unix_time,
            domains=[self.name],
            clock=self.clock,
            flush=self._flush,
            refused=lambda host, why: self.refused.append(why),
            message_bytes=MESSAGE_BYTES,
            **options,
        )
        site.resource = self.ingest

    def _flush(self) -> None:
        self.flushes.append(len(self.taken))

    def _accept(self, made: Envelope, data: bytes, connected_only: bool) -> Any:
        assert made.SerializeToString() == data
        status = self.status(made.uid)
        if status == 202:
            self.taken.append((made.uid, connected_only))
        return status


@pytest.fixture
def relay(reactor: Any) -> Any:
    """``relay(**options)``: a listening :class:`Relay`."""
    relays = []

    def listen(**options: Any) -> Relay:
        relays.append(Relay(reactor, **options))
        return relays[-1]

    yield listen
    for one in relays:
        pytest_twisted.blockon(one.port.stopListening())


@pytest.fixture
def poster(reactor: Any) -> Any:
    """``poster(known=…, key=…)``: a :class:`RelayPoster` that calls itself sender.example."""
    made = []

    def make(
        known: Any = (),
        key: ed25519.SigningKey = OURS,
        unix_time: Callable[[], float] = time.time,
        **options: Any,
    ) -> RelayPoster:
        signer = Signer("sender.example", key, random_bytes)
        made.append(
            RelayPoster(
                RelayPoster.connect(reactor), unix_time, domains=["localhost"], signer=signer, known=known, **options
            )
        )
        return made[-1]

    yield make
    for one in made:
        pytest_twisted.blockon(Deferred.fromCoroutine(one.close()))


def random_bytes(size: int) -> bytes:
    import os

    return os.urandom(size)


# --- relays that know each other -----------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_known_relay_posts_one_or_several(relay: Any, poster: Any) -> None:
    there = relay()
    sender = poster({there.name})
    assert sender.knows(there.name.upper())
    assert await sender.post(there.name, [envelope("one")], False) == [202]
    assert await sender.post(there.name, [envelope("two"), envelope("three")], False) == [202, 202]
    assert await sender.post(there.name, [envelope("four")], True) == [202]
    assert there.taken == [("one", False), ("two", False), ("three", False), ("four", True)]


@pytest_twisted.ensureDeferred
async def test_each_of_several_has_a_status_of_its_own(relay: Any, poster: Any) -> None:
    there = relay()
    there.status = {"a": 202, "b": 404, "c": succeed(503), "d": 202}.__getitem__
    sender = poster({there.name})
    posted = [envelope("a"), envelope("b"), envelope("c"), b"\xff", envelope("x", twin=8), envelope("d")]
    assert await sender.post(there.name, posted, False) == [202, 404, 503, 400, 404, 202]
    assert await sender.post(there.name, [envelope("b")], True) == [404]


@pytest_twisted.ensureDeferred
async def test_a_relay_that_does_not_know_the_sender_refuses_it(relay: Any, poster: Any) -> None:
    there = relay()
    assert await poster().post(there.name, [envelope()], False) == [401]
    assert await poster({there.name}, key=THEIRS).post(there.name, [envelope()], False) == [401]
    assert there.taken == []
    assert there.refused == [Reason.NOT_SIGNED] * 2


@pytest_twisted.ensureDeferred
async def test_a_relay_that_does_not_understand_several_is_posted_to_one_by_one(relay: Any, poster: Any) -> None:
    there = relay(open_to_all=True)
    sender = poster({there.name}, key=THEIRS)
    assert await sender.post(there.name, [envelope("a"), envelope("b")], False) == [425, 425]
    assert not sender.knows(there.name)
    assert await sender.post(there.name, [envelope("a")], False) == [202]


@pytest_twisted.ensureDeferred
async def test_a_relay_whose_clock_was_wrong_is_believed_once_it_is_set(relay: Any, poster: Any) -> None:
    """Its clock was an hour ahead, as after a boot with a wrong one. It need not wait for that hour to come again."""
    ahead_s = 3600.0
    there = relay()
    sender = poster({there.name}, unix_time=lambda: time.time() + ahead_s)
    assert await sender.post(there.name, [envelope("a"), envelope("b")], False) == [425, 425]
    assert there.refused == [Reason.TIME_IS_OFF] and not sender.knows(there.name)
    ahead_s = SINGLE_S / 2 + 3600.0
    assert not sender.knows(there.name)
    ahead_s = 0.0
    assert sender.knows(there.name)
    assert await sender.post(there.name, [envelope("a"), envelope("b")], False) == [202, 202]
    assert there.taken == [("a", False), ("b", False)]


@pytest_twisted.ensureDeferred
async def test_a_known_relay_that_refused_several_takes_one_when_its_clock_is_right_again(
    relay: Any, poster: Any
) -> None:
    ahead_s = 100.0
    there = relay(unix_time=lambda: time.time() + ahead_s)
    sender = poster({there.name})
    assert await sender.post(there.name, [envelope("a"), envelope("b")], False) == [425, 425]
    assert not sender.knows(there.name)
    ahead_s = 0.0
    assert await sender.post(there.name, [envelope("a")], False) == [202]


@pytest_twisted.ensureDeferred
async def test_what_is_for_a_connected_session_only_is_not_posted_to_a_relay_that_does_not_understand_that(
    relay: Any, poster: Any
) -> None:
    """It would keep the envelope, and the session may never come there. Others waited for it when that was found out."""
    there = relay(open_to_all=True)
    sender = poster({there.name}, key=THEIRS)
    assert await sender.post(there.name, [envelope("a"), envelope("b")], True) == [425, 425]
    assert await sender.post(there.name, [envelope("c")], True) == [425]
    assert there.taken == []


@pytest_twisted.ensureDeferred
async def test_what_expires_while_its_twin_is_looked_up_is_refused(relay: Any, poster: Any) -> None:
    late_s = 0.0
    there = relay(unix_time=lambda: time.time() + late_s)
    get = there.registry.get

    async def slow(twin: int) -> Any:
        nonlocal late_s
        late_s = 61.0
        return await get(twin)

    there.registry.get = slow
    assert await poster({there.name}).post(there.name, [envelope("x", lifetime_s=60)], False) == [400]
    assert there.taken == [] and there.refused == [Reason.MESSAGE_EXPIRED]


@pytest_twisted.ensureDeferred
async def test_a_post_that_is_sent_again_is_refused(reactor: Any, relay: Any) -> None:
    for options in ({}, {"open_to_all": True}):
        there = relay(**options)
        caller = HttpCaller.connect(reactor)
        data = envelope()
        header = Signer("sender.example", OURS, random_bytes).header(there.name, Body.ONE, data, time.time())
        statuses = []
        for _ in range(2):
            answer = await caller.call(
                "POST", f"http://{there.name}/", limit_bytes=1000, body=data, headers={HEADER: header}
            )
            statuses.append(answer[0])
        await caller.close()
        assert statuses == [202, 401]
        assert len(there.taken) == 1


@pytest.mark.parametrize("open_to_all", [False, True])
@pytest_twisted.ensureDeferred
async def test_more_posts_than_are_remembered_are_not_refused_for_good(
    relay: Any, poster: Any, open_to_all: bool
) -> None:
    there = relay(remembered=2, open_to_all=open_to_all)
    sender = poster({there.name})
    for _ in range(2):
        assert await sender.post(there.name, [envelope("a"), envelope("b")], False) == [202, 202]
    assert await sender.post(there.name, [envelope("c"), envelope("d")], False) == [429, 429]
    assert sender.knows(there.name) and there.refused == [Reason.LIMITS_EXCEEDED]


@pytest_twisted.ensureDeferred
async def test_several_envelopes_are_written_together(relay: Any, poster: Any) -> None:
    there = relay()
    assert await poster({there.name}).post(there.name, [envelope()] * 50, False) == [202] * 50
    assert there.flushes == [50]


@pytest_twisted.ensureDeferred
async def test_an_envelope_whose_twin_was_looked_up_is_written_at_once(
    relay: Any, poster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = relay()
    waiting: Deferred[None] = Deferred()
    get = there.registry.get

    async def get_later(twin: int) -> Any:
        if twin == 7:
            await waiting
        return await get(twin)

    monkeypatch.setattr(there.registry, "get", get_later)
    posting = poster({there.name}).post(there.name, [envelope("a"), envelope("x", twin=8)], False)
    await there.clock.armed
    waiting.callback(None)
    assert await posting == [202, 404]
    assert there.flushes == [0, 1]


@pytest_twisted.ensureDeferred
async def test_an_envelope_that_waits_does_not_hold_up_the_others_and_is_refused_in_time(
    relay: Any, poster: Any
) -> None:
    there = relay()
    waiting: Deferred[int] = Deferred()
    there.status = {"a": waiting, "b": 202}.__getitem__
    posted = poster({there.name}).post(there.name, [envelope("a"), envelope("b")], False)
    await there.clock.armed
    assert there.taken == [("b", False)]
    there.clock.advance(2)
    assert await posted == [503, 202]


@pytest.mark.parametrize("known", [True, False])
@pytest_twisted.ensureDeferred
async def test_posts_for_twins_that_do_not_exist_do_not_keep_others_from_being_looked_up(
    reactor: Any, relay: Any, poster: Any, known: bool
) -> None:
    there = relay(open_to_all=True)
    asked: list[int] = []

    async def ask_the_chain(number: int) -> Twin | None:
        asked.append(number)
        await deferLater(there.clock, 0.05)  # type: ignore[arg-type]
        return there.registry.twins.get(number)

    cache = TwinCache(there.clock, ask_the_chain)
    there.registry.get = cache.get
    sender = poster({there.name} if known else ())
    if known:
        posts = [sender.post(there.name, [envelope(twin=100 + at) for at in range(1_024)], False)]
    else:
        posts = [sender.post(there.name, [envelope(twin=100 + at)], False) for at in range(20)]
    places = 32 if known else 16
    while len(asked) < places or there.port.factory.connections < len(posts):
        await deferLater(reactor, 0)
    for _ in range(20):  # those that have connected last have their requests read
        await deferLater(reactor, 0)
    other = ensureDeferred(cache.get(7))
    assert len(asked) == places + 1
    there.clock.advance(0.05)
    assert await other == there.registry.twins[7]
    for _ in range(100):
        there.clock.advance(0.05)
        await deferLater(reactor, 0)
    found = [status for post in posts for status in await post]
    assert set(found) <= {404, 503} and found.count(404) > len(found) // 2


@pytest_twisted.ensureDeferred
async def test_a_post_that_is_given_up_asks_for_no_other_twin_and_leaves_room_for_those_who_ask_next(
    reactor: Any, relay: Any, poster: Any
) -> None:
    there = relay()
    asked: list[int] = []

    async def ask_the_chain(number: int) -> Twin | None:
        asked.append(number)
        await deferLater(there.clock, 10)  # type: ignore[arg-type]
        return there.registry.twins.get(number)

    cache = TwinCache(there.clock, ask_the_chain)
    there.registry.get = cache.get
    posted = poster({there.name}).post(there.name, [envelope(twin=100 + at) for at in range(1_024)], False)
    while len(asked) < 32:
        await deferLater(reactor, 0)
    there.clock.advance(2)
    assert set(await posted) == {503} and len(asked) == 32
    other = ensureDeferred(cache.get(7))
    assert not other.called
    there.clock.advance(10)
    assert await other == there.registry.twins[7]


@pytest_twisted.ensureDeferred
async def test_a_fault_of_the_relay_is_a_status_and_a_line_in_the_log(
    relay: Any, poster: Any, logged_errors: Any
) -> None:
    there = relay()
    there.status = {"b": 202}.__getitem__
    assert await poster({there.name}).post(there.name, [envelope("a"), envelope("b")], False) == [503, 202]
    assert len(logged_errors.flush(KeyError)) == 1


@pytest_twisted.ensureDeferred
async def test_a_relay_takes_as_many_bytes_in_a_post_as_another_one_sends(relay: Any, poster: Any) -> None:
    there = relay()
    size = BATCH_BYTES // 8
    several = [envelope(size=size - len(envelope(size=size)) + size) for _ in range(8)]
    assert sum(map(len, several)) == BATCH_BYTES
    assert await poster({there.name}).post(there.name, several, False) == [202] * 8


@pytest.mark.parametrize("body", [b"", b"\0\0\0\1", b"\0\0\0\0" * 1025])
@pytest_twisted.ensureDeferred
async def test_a_body_that_is_not_several_envelopes_is_refused(reactor: Any, relay: Any, body: bytes) -> None:
    there = relay()
    header = Signer("sender.example", OURS, random_bytes).header(there.name, Body.SEVERAL, body, time.time())
    caller = HttpCaller.connect(reactor)
    answer = await caller.call("POST", f"http://{there.name}/", limit_bytes=1000, body=body, headers={HEADER: header})
    await caller.close()
    assert (answer[0], answer[2]) == (400, b"bad request: malformed")
    assert there.refused == [Reason.ENVELOPE_MALFORMED]


@pytest_twisted.ensureDeferred
async def test_a_relay_that_hangs_up_has_posted_all_the_same(reactor: Any, relay: Any) -> None:
    there = relay(open_to_all=True)
    deciding: Deferred[int] = Deferred()
    there.status = lambda uid: deciding
    caller = HttpCaller.connect(reactor)
    posting = ensureDeferred(caller.call("POST", f"http://{there.name}/", limit_bytes=1000, body=envelope()))
    await there.clock.armed
    posting.cancel()
    with pytest.raises(CancelledError):
        await posting
    await caller.close()
    while there.port.factory.connections:
        await deferLater(reactor, 0)
    deciding.callback(202)
    assert there.clock.getDelayedCalls() == []


@pytest_twisted.ensureDeferred
async def test_connections_kept_open_to_relays_are_bounded_however_many_relays_twins_name(
    reactor: Any, relay: Any, poster: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(client, "POOL_CONNECTIONS_IN_ALL", 5)
    sender, there = poster(), [relay(open_to_all=True) for _ in range(12)]
    for one in (*there, there[0], there[-1]):
        assert await sender.post(one.name, [envelope()], False) == [202]
    for _ in range(1_000):  # the other ends hear of it in a few turns
        if sum(one.port.factory.connections for one in there) > 5:
            await deferLater(reactor, 0)
    assert sum(one.port.factory.connections for one in there) == 5
    assert there[0].port.factory.connections == there[-1].port.factory.connections == 1


# --- open to all ---------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_an_open_relay_takes_what_its_source_has_signed(relay: Any, poster: Any) -> None:
    there = relay(open_to_all=True)
    assert await poster().post(there.name, [envelope()], False) == [202]
    forged = Envelope.FromString(envelope())
    forged.request.command = "other"
    unsigned = Envelope.FromString(envelope())
    unsigned.ClearField("signature")
    unknown = envelope(source=99)
    for data in (forged.SerializeToString(), unsigned.SerializeToString(), unknown):
        assert await poster().post(there.name, [data], False) == [400]
    assert len(there.taken) == 1


@pytest_twisted.ensureDeferred
async def test_an_open_relay_takes_as_much_as_it_admits(relay: Any, poster: Any) -> None:
    asked: list[str] = []

    def admit(host: str) -> bool:
        asked.append(host)
        return len(asked) <= 2

    there = relay(open_to_all=True, admit=admit)
    sender = poster()
    assert [await sender.post(there.name, [envelope()], False) for _ in range(3)] == [[202], [202], [429]]
    assert asked == ["127.0.0.1"] * 3
    assert await poster({there.name}).post(there.name, [envelope()], False) == [202]  # a relay it knows


@pytest_twisted.ensureDeferred
async def test_posts_over_the_rate_of_an_address_end_its_connection_also_where_only_known_relays_may_post(
    reactor: Any, relay: Any, poster: Any
) -> None:
    there = relay(admit=lambda host: len(there.refused) < 2)
    assert [await poster().post(there.name, [envelope()], False) for _ in range(3)] == [[401], [401], [429]]
    assert await poster({there.name}).post(there.name, [envelope()], False) == [202]  # a relay it knows
    answer: Deferred[bytes] = Deferred()

    class Twice(Protocol):
        received = b""

        def connectionMade(self) -> None:
            self.transport.write(2 * b"POST / HTTP/1.1\r\nHost: relay\r\nContent-Length: 1\r\n\r\nx")

        def dataReceived(self, data: bytes) -> None:
            self.received += data

        def connectionLost(self, reason: object = None) -> None:
            answer.callback(self.received)

    reactor.connectTCP("127.0.0.1", there.port.getHost().port, ClientFactory.forProtocol(Twice))
    assert (await answer.addTimeout(5, reactor)).count(b"HTTP/1.1 429 ") == 1


@pytest.mark.parametrize("known", [True, False])
@pytest_twisted.ensureDeferred
async def test_what_is_not_for_this_relay_is_refused(relay: Any, poster: Any, known: bool) -> None:
    there = relay(open_to_all=True)
    sender = poster({there.name} if known else ())
    expected = {
        envelope(source=0): 400,  # an order without a sender
        envelope(twin=0): 400,
        envelope(twin=8): 404,
        envelope(twin=9): 404,
        envelope(lifetime_s=0): 400,
        envelope(size=MESSAGE_BYTES): 413,
        b"": 400,
        b"no envelope": 400,
    }
    for data, status in expected.items():
        assert await sender.post(there.name, [data], False) == [status]
    assert there.taken == []
    assert len(there.refused) == len(expected)


@pytest_twisted.ensureDeferred
async def test_a_registry_that_does_not_answer_is_no_refusal_for_good(relay: Any, poster: Any) -> None:
    there = relay()
    there.registry.twins[7] = RegistryError("unavailable")
    assert await poster({there.name}).post(there.name, [envelope()], False) == [503]


@pytest_twisted.ensureDeferred
async def test_a_body_over_the_limit_is_refused_while_it_comes(relay: Any, poster: Any) -> None:
    there = relay()
    data = envelope(size=body_limit(MESSAGE_BYTES))
    assert await poster({there.name}).post(there.name, [data], False) == [413]


# --- what the sender makes of it -----------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_nobody_listening_is_not_posted(reactor: Any, poster: Any) -> None:
    port = reactor.listenTCP(0, Factory(), interface="127.0.0.1")
    name = f"localhost:{port.getHost().port}"
    await port.stopListening()
    with pytest.raises(NotPosted) as caught:
        await poster().post(name, [envelope()], False)
    assert caught.value.reason is Reason.CONNECTION_REFUSED


@pytest_twisted.ensureDeferred
async def test_a_relay_whose_certificate_is_not_trusted_is_not_posted(
    reactor: Any, self_signed: Any, tmp_path: Path
) -> None:
    path = tmp_path / "both.pem"
    path.write_bytes(self_signed(x509.DNSName("localhost")))
    tls = DefaultOpenSSLContextFactory(str(path), str(path))
    port = reactor.listenSSL(0, Factory.forProtocol(Protocol), tls, interface="127.0.0.1")
    sender = RelayPoster(HttpCaller.connect(reactor), time.time, domains=["relay.example"])
    with pytest.raises(NotPosted) as caught:
        await sender.post(f"localhost:{port.getHost().port}", [envelope()], False)
    assert caught.value.reason is Reason.TLS_FAILED
    await sender.close()
    await port.stopListening()


@pytest_twisted.ensureDeferred
async def test_a_relay_that_says_nothing_is_given_up_in_time(reactor: Any) -> None:
    port = reactor.listenTCP(0, Factory.forProtocol(Protocol), interface="127.0.0.1")
    caller = HttpCaller.connect(reactor, timeout_s=0.1)
    sender = RelayPoster(caller, time.time, domains=["localhost"])
    with pytest.raises(NotPosted) as caught:
        await sender.post(f"localhost:{port.getHost().port}", [envelope()], False)
    assert caught.value.reason is Reason.TIMEOUT
    await sender.close()
    await port.stopListening()


@pytest_twisted.ensureDeferred
async def test_names_that_cannot_be_looked_up_take_no_thread_of_the_reactor(
    reactor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queues in a file are written in those threads, and all other names are looked up there."""
    over = Event()

    def hang(host: str, *arguments: Any, **options: Any) -> Any:
        over.wait()
        raise socket.gaierror(1, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    before = reactor.nameResolver
    reactor.installNameResolver(GAIResolver(reactor, reactor.getThreadPool, hang))
    sender = RelayPoster(RelayPoster.connect(reactor), time.time, domains=["localhost"])
    posts = [sender.post(f"r{number}.example", [envelope()], False) for number in range(64)]
    try:
        assert await deferToThreadPool(reactor, reactor.getThreadPool(), lambda: True).addTimeout(10.0, reactor)
    finally:
        over.set()
        reactor.installNameResolver(before)
        for post in posts:
            with pytest.raises(NotPosted):
                await post
        await sender.close()


@implementer(IAgent)
class WithoutDescriptors:
    """Fails as Twisted does in a process that may open nothing more."""

    def request(self, *_: object) -> Any:
        return fail(ConnectBindError(errno.EMFILE, "Too many open files"))


@pytest_twisted.ensureDeferred
async def test_a_post_without_a_descriptor_says_so() -> None:
    clock = Clock()
    poster = RelayPoster(HttpCaller(WithoutDescriptors(), clock), clock.seconds, domains=[])
    with pytest.raises(NotPosted) as caught:
        await poster.post("one.example", [envelope()], False)
    assert caught.value.reason is Reason.NO_DESCRIPTOR


class Answer(Protocol):
    """Answers whatever comes with the bytes the factory has."""

    factory: Any

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(self.factory.answer)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", Reason.ANSWERED_OTHERWISE),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n\x00\xca\x01\x94", [202, 404]),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", [302, 302]),
        (b"HTTP/1.1 202 Accepted\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 200_000, Reason.OTHER),
        (b"SSH-2.0-OpenSSH\r\n\r\n", Reason.OTHER),
    ],
)
@pytest_twisted.ensureDeferred
async def test_what_a_strange_relay_answers_is_a_status_or_a_reason(
    reactor: Any, poster: Any, answer: bytes, expected: Any
) -> None:
    factory = Factory.forProtocol(Answer)
    factory.answer = answer  # type: ignore[attr-defined]
    port = reactor.listenTCP(0, factory, interface="127.0.0.1")
    name = f"localhost:{port.getHost().port}"
    posting = poster({name}).post(name, [envelope("a"), envelope("b")], False)
    if isinstance(expected, list):
        assert await posting == expected
    else:
        with pytest.raises(NotPosted) as caught:
            await posting
        assert caught.value.reason is expected
    await port.stopListening()


# --- where it posts to ---------------------------------------------------------------------------------------------------


class Recorder:
    """Stands for a caller and notes the URLs it was asked for."""

    def __init__(self) -> None:
        self.urls: list[str] = []

    async def call(self, method: str, url: str, **_: Any) -> Any:
        self.urls.append(url)
        return 202, None, b""


@pytest.mark.parametrize(
    ("domain", "scheme", "relay_name", "url"),
    [
        ("relay.example", "auto", "other.example", "https://other.example/"),
        ("relay.example", "auto", "other.example:8443", "https://other.example:8443/"),
        # A stranger has written this into the registry: it must not reach what listens on this machine only.
        ("relay.example", "auto", "localhost:6379", "https://localhost:6379/"),
        ("relay.example", "auto", "127.0.0.1:6379", "https://127.0.0.1:6379/"),
        ("localhost", "auto", "localhost:8080", "http://localhost:8080/"),
        ("127.0.0.1:7000", "auto", "127.0.0.1:8080", "http://127.0.0.1:8080/"),
        ("localhost", "auto", "other.example", "https://other.example/"),
        ("localhost", "https", "localhost:8080", "https://localhost:8080/"),
        ("relay.example", "http", "other.example", "http://other.example/"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_the_scheme_depends_on_both_relays(domain: str, scheme: str, relay_name: str, url: str) -> None:
    recorder: Any = Recorder()
    await RelayPoster(recorder, time.time, domains=[domain], scheme=scheme).post(relay_name, [b"x"], False)
    assert recorder.urls == [url]


@pytest.mark.parametrize(
    ("name", "loopback"),
    [
        ("localhost", True),
        ("LocalHost:1", True),
        ("127.9.9.9:80", True),
        ("128.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_which_hosts_are_this_machine(name: str, loopback: bool) -> None:
    assert is_loopback(name) is loopback
