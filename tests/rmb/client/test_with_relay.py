"""Clients at the project's own relay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from cryptography import x509
from twisted.internet.defer import CancelledError, ensureDeferred
from twisted.internet.ssl import Certificate, DefaultOpenSSLContextFactory

from dmsg.glue.websocket import connect_websocket
from dmsg.rmb.client.errors import CallRefused, EnvelopeTooLarge, NotConnected
from dmsg.rmb.client.service import RmbClient
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import RelayProblem
from dmsg.rmb.core.limiter import Limit
from dmsg.rmb.core.limits import MAX_ENVELOPE_BYTES
from dmsg.rmb.relay.api import make_site
from dmsg.rmb.relay.limits import RelayLimits
from dmsg.rmb.relay.service import RmbRelay
from dmsg.rmb.relay.stores.open import open_queues

from .conftest import key_of, serve

CALLER, SERVICE = 1, 2


class RealRelay:
    """A relay at ``relay-PORT:PORT`` of the network in memory."""

    def __init__(self, world: Any, port: int, limit: Limit | None, max_message_bytes: int) -> None:
        self.url = f"ws://127.0.0.1:{port}"
        self.port = port
        self._world = world
        self._store = open_queues("memory:", world.network)
        self._relay = RmbRelay(
            world.network,
            world.registry,
            self._store,
            domains=frozenset({f"127.0.0.1:{port}"}),
            limits=RelayLimits(),
            limit=limit,
            max_message_bytes=max_message_bytes,
            unix_time=world.now_s,
        )
        self._relay.startService()
        self._listener = world.network.listenTCP(port, make_site(self._relay, world.network, {}))

    def die(self) -> None:
        """As a process that is killed."""
        self._listener.stopListening()
        for pipe in self._world.network.pipes_to(self.port):
            pipe.b.abortConnection()

    def stop(self) -> None:
        self._listener.stopListening()
        self._world.result(self._relay.stopService(), 100)
        self._world.result(self._store.close())


@pytest.fixture
def real(world: Any) -> Iterator[Callable[..., RealRelay]]:
    """``real(port=9000, …)``: a relay, until the test ends."""
    relays: list[RealRelay] = []

    def make(port: int = 9000, limit: Limit | None = None, max_message_bytes: int = MAX_ENVELOPE_BYTES) -> RealRelay:
        relays.append(RealRelay(world, port, limit, max_message_bytes))
        return relays[-1]

    yield make
    world.stop()
    for relay in relays:
        relay.stop()


def test_calls_are_answered_whatever_their_size(world: Any, real: Any) -> None:
    relay = real()
    serve(world.client(SERVICE, relay))
    caller = world.client(CALLER, relay, session="s")
    for size in (0, 1, 100, 70_000, MAX_ENVELOPE_BYTES - 300):
        assert world.result(caller.call(SERVICE, "echo", bytes(size), timeout=5)).data == bytes(size)


def test_what_is_too_long_for_a_relay_fails_and_holds_up_nothing_else(world: Any, real: Any) -> None:
    """The relay closes the connection, and would do so again and again if it were sent the same message again."""
    relay = real(max_message_bytes=10_000)
    service, caller = world.client(SERVICE, relay), world.client(CALLER, relay, session="s")
    serve(service)

    @service.service("much")
    async def much(request: Any) -> bytes:
        return bytes(20_000)

    too_long = [ensureDeferred(caller.call(SERVICE, "echo", bytes(size), timeout=60)) for size in (11_000, 12_000)]
    too_long.append(ensureDeferred(caller.call(SERVICE, "echo", bytes(13_000), timeout=60, once=True)))
    answer = ensureDeferred(caller.call(SERVICE, "much", timeout=60))
    others = [ensureDeferred(caller.call(SERVICE, "echo", b"%d" % one, timeout=60)) for one in range(10)]
    world.settle(20)
    assert [world.result(call, 0).data for call in others] == [b"%d" % one for one in range(10)]
    for call in too_long:
        with pytest.raises(EnvelopeTooLarge):
            world.result(call, 0)
    with pytest.raises(CallRefused, match="the answer is too large"):
        world.result(answer, 0)
    assert world.result(caller.call(SERVICE, "echo", b"x", timeout=1)).data == b"x"


def test_a_call_that_is_cancelled_because_another_one_was_too_long_is_not_sent_again(world: Any, real: Any) -> None:
    relay = real(max_message_bytes=10_000)
    handled = serve(world.client(SERVICE, relay))
    caller = world.client(CALLER, relay, session="s")
    too_long = ensureDeferred(caller.call(SERVICE, "echo", bytes(11_000), timeout=60))
    other = ensureDeferred(caller.call(SERVICE, "echo", b"x", timeout=60))
    too_long.addErrback(lambda failure: other.cancel())
    other.addErrback(lambda failure: failure.trap(CancelledError))
    world.settle(20)
    assert too_long.called and other.called
    assert handled == []


def test_what_is_short_waits_for_one_connection_however_much_is_too_long(world: Any, real: Any) -> None:
    """Of different lengths, only the longest is known to be too long when the relay closes."""
    relay = real(max_message_bytes=10_000)
    serve(world.client(SERVICE, relay))
    caller = world.client(CALLER, relay, session="s")
    lengths = range(11_000, 15_000, 100)
    too_long = [ensureDeferred(caller.call(SERVICE, "echo", bytes(length), timeout=60)) for length in lengths]
    call = ensureDeferred(caller.call(SERVICE, "echo", b"x", timeout=60))
    world.settle(5)
    assert world.result(call, 0).data == b"x"
    world.settle(50)
    for one in too_long:
        with pytest.raises(EnvelopeTooLarge):
            world.result(one, 0)


def test_what_is_too_long_for_one_relay_goes_over_another_one(world: Any, real: Any) -> None:
    strict, lax = real(9000, max_message_bytes=10_000), real(9001)
    serve(world.client(SERVICE, strict, lax))
    caller = world.client(CALLER, strict, lax, session="s")
    assert world.result(caller.call(SERVICE, "echo", bytes(20_000), timeout=20), 20).data == bytes(20_000)


def test_a_relay_that_was_killed_may_take_longer_messages_when_it_comes_back(world: Any, real: Any) -> None:
    strict = real(max_message_bytes=10_000)
    serve(world.client(SERVICE, strict))
    caller = world.client(CALLER, strict, session="s")
    with pytest.raises(EnvelopeTooLarge):
        world.result(caller.call(SERVICE, "echo", bytes(11_000), timeout=60), 20)
    strict.die()
    real(max_message_bytes=100_000)
    world.settle(10)
    assert world.result(caller.call(SERVICE, "echo", bytes(20_000), timeout=60), 60).data == bytes(20_000)


@pytest.mark.parametrize(("off_s", "says"), [(-400, "jwt has expired"), (400, "jwt is not valid yet")])
def test_a_client_whose_clock_is_wrong_is_told_so(world: Any, real: Any, off_s: int, says: str) -> None:
    relay = real()
    world.registry.add(SERVICE)
    caller = world.client(CALLER, relay, now_s=lambda: world.now_s() + off_s)
    with pytest.raises(NotConnected, match=rf"{says} .*is the clock of this machine right\?"):
        world.result(caller.call(SERVICE, "echo", timeout=5), 10)


def test_when_one_of_two_relays_dies_every_call_is_answered_once(world: Any, real: Any) -> None:
    first, second = real(9000), real(9001)
    handled = serve(world.client(SERVICE, first, second))
    caller = world.client(CALLER, first, second)
    calls = []
    for number in range(1000):
        calls.append(ensureDeferred(caller.call(SERVICE, "echo", b"%d" % number, timeout=10)))
        world.network.advance(0.0005)
        if number == 500:
            first.die()
    world.settle(5)
    assert [call.result.data for call in calls] == [b"%d" % number for number in range(1000)]
    assert sorted(handled) == sorted(b"%d" % number for number in range(1000))


def test_a_request_waits_for_a_twin_that_is_offline(world: Any, real: Any) -> None:
    relay = real()
    caller, service = world.client(CALLER, relay), world.make(SERVICE, relay)
    handled = serve(service)
    call = ensureDeferred(caller.call(SERVICE, "echo", b"late", timeout=30))
    world.settle(10)
    service.startService()
    assert world.result(call).data == b"late"
    assert handled == [b"late"]


def test_with_fail_fast_a_call_of_a_twin_that_is_offline_ends_at_once(world: Any, real: Any) -> None:
    relay = real()
    world.registry.add(SERVICE, relays=["127.0.0.1:9000"])
    caller = world.client(CALLER, relay)
    with pytest.raises(CallRefused) as refused:
        world.result(caller.call(SERVICE, "echo", timeout=30, tags="fail-fast"))
    assert (refused.value.code, refused.value.text) == (RelayProblem.OFFLINE.code, RelayProblem.OFFLINE.text)
    assert refused.value.source == SessionAddress(0)


def test_a_twin_without_relays_ends_the_call_with_the_relays_words(world: Any, real: Any) -> None:
    relay = real()
    world.registry.add(SERVICE)
    caller = world.client(CALLER, relay)
    with pytest.raises(CallRefused, match=RelayProblem.NO_RELAYS.text):
        world.result(caller.call(SERVICE, "echo", timeout=30))


def test_a_call_over_the_rate_limit_goes_over_the_other_relay_and_else_ends_at_once(world: Any, real: Any) -> None:
    first, second = real(9000, Limit(3, 100_000)), real(9001, Limit(2, 100_000))
    serve(world.client(SERVICE, first, second))
    caller = world.client(CALLER, first, second)
    for _ in range(3):
        world.result(caller.call(SERVICE, "echo", timeout=5))
    # The service has used up what the first lets it send; its answers go over the other one only as errors do not tell it.
    with pytest.raises(CallRefused, match="exceeded rate limits"):
        for _ in range(3):
            world.result(caller.call(SERVICE, "echo", timeout=5), 6)


def test_the_newer_of_two_programs_with_one_session_is_called(world: Any, real: Any) -> None:
    relay = real()
    older, newer = world.client(SERVICE, relay), world.client(SERVICE, relay)
    handled = serve(older), serve(newer)
    caller = world.client(CALLER, relay)
    world.result(caller.call(SERVICE, "echo", b"x", timeout=5))
    assert handled == ([], [b"x"])


def test_a_connection_that_is_idle_for_an_hour_is_still_there(world: Any, real: Any) -> None:
    relay = real()
    handled = serve(world.client(SERVICE, relay))
    caller = world.client(CALLER, relay)
    before = list(world.network.pipes)
    world.settle(3600)
    assert world.network.pipes == before
    world.result(caller.call(SERVICE, "echo", b"x", timeout=5))
    assert handled == [b"x"]


@pytest_twisted.ensureDeferred
async def test_a_relay_behind_tls_is_reached_with_a_certificate_that_is_trusted_and_no_other(
    reactor: Any, world: Any, self_signed: Any, tmp_path: Path
) -> None:
    pem = self_signed(x509.DNSName("localhost"))
    path = tmp_path / "both.pem"
    path.write_bytes(pem)
    store = open_queues("memory:", reactor)
    relay = RmbRelay(reactor, world.registry, store, domains=frozenset({"localhost"}), limits=RelayLimits())
    relay.startService()
    context = DefaultOpenSSLContextFactory(str(path), str(path))
    port = reactor.listenSSL(0, make_site(relay, reactor, {}), context, interface="127.0.0.1")
    url = f"wss://localhost:{port.getHost().port}"

    def client(twin: int, **options: Any) -> RmbClient:
        world.registry.add(twin, relays=["localhost"])
        made = RmbClient(reactor, key_of(twin), world.registry, [url], **options)
        made.startService()
        return made

    connect = partial(connect_websocket, reactor, trust=Certificate.loadPEM(pem))
    service, caller, stranger = client(SERVICE, connect=connect), client(CALLER, connect=connect), client(3)
    handled = serve(service)
    assert (await caller.call(SERVICE, "echo", b"x", timeout=20)).data == b"x"
    assert handled == [b"x"]
    with pytest.raises(NotConnected) as caught:
        await stranger.call(SERVICE, "echo", b"y", timeout=2)
    assert caught.value.problems == {url: "TLS failed: certificate verify failed"}
    for one in (service, caller, stranger):
        await one.stopService()
    await port.stopListening()
    await relay.stopService()
    await store.close()
