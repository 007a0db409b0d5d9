"""Relays come and go: connecting, tokens, pauses, and what was under way when one dies."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.defer import Deferred, ensureDeferred

from dmsg.errors import InvalidAddress
from dmsg.glue.waiters import Waiters
from dmsg.rmb.client.config import RmbConfig
from dmsg.rmb.client.errors import CallError, CallRefused, CallTimeout, NotConnected
from dmsg.rmb.client.handlers import Request
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import RelayProblem
from dmsg.rmb.core.replies import relay_error
from dmsg.rmb.core.token import read_token
from dmsg.rmb.core.wire import Envelope, encode_envelope

from .conftest import EPOCH_S, serve

CALLER, SERVICE = 1, 2


# --- one relay -----------------------------------------------------------------------------------------------------------


def test_each_connection_has_a_new_token(world: Any) -> None:
    relay = world.relay()
    world.client(CALLER, relay)
    world.settle(3600)
    relay.drop_connections()
    world.settle(5)
    first, second = (read_token(token, now) for token, now in zip(relay.tokens, (EPOCH_S, world.now_s()), strict=True))
    assert first.expires < EPOCH_S + 3600 < second.expires
    assert SessionAddress(CALLER) in relay.sessions


def test_a_token_names_the_relay_by_what_it_is_called_in_the_registry(world: Any) -> None:
    relay = world.relay()
    for twin, names in ((1, ["127.0.0.1:9000", "other.example"]), (2, ["127.0.0.1"]), (3, ["relay.example"])):
        world.registry.add(twin, relays=names)
    world.client(1, relay)
    relay.answer = b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n"  # it knows itself by its port
    world.client(2, relay)
    relay.answer = None
    world.client(3, relay)
    tokens = [read_token(token, world.now_s()) for token in relay.tokens]
    named = {token.twin: token.audience for token in tokens}
    assert named == {1: ("127.0.0.1:9000",), 2: ("127.0.0.1",), 3: None}


def test_a_relay_that_refuses_the_token_is_asked_with_growing_pauses_and_its_text_is_told(world: Any) -> None:
    relay = world.relay()
    relay.answer = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 16\r\n\r\ntwin not found 1"
    world.registry.add(SERVICE)
    caller = world.client(CALLER, relay)
    world.settle(600)
    assert 20 <= len(relay.tokens) <= 50
    with pytest.raises(NotConnected, match="401: twin not found 1"):
        world.result(caller.call(SERVICE, "echo", timeout=2), 3)


def test_a_relay_that_drops_us_at_once_is_not_asked_without_pauses(world: Any) -> None:
    relay = world.relay()
    world.client(CALLER, relay)
    for _ in range(600):
        relay.drop_connections()
        world.settle(1)
    assert len(relay.tokens) <= 60


def test_a_connection_that_lasted_comes_back_soon(world: Any) -> None:
    relay = world.relay()
    world.client(CALLER, relay)
    world.settle(60)
    relay.drop_connections()
    world.settle(0.6)
    assert SessionAddress(CALLER) in relay.sessions


def test_of_two_programs_with_one_session_the_newer_has_it_for_a_while(world: Any) -> None:
    relay = world.relay()
    world.registry.add(SERVICE)
    older, newer = world.client(CALLER, relay), world.client(CALLER, relay)
    call = ensureDeferred(older.call(SERVICE, "echo", timeout=100))
    world.settle(25)
    assert len(relay.tokens) == 2
    assert newer.exchange.relays.is_connected
    assert "code 4001: replaced" in older.exchange.relays.problems()[relay.url]
    assert not call.called
    world.settle(300)
    assert 6 <= len(relay.tokens) <= 12
    with pytest.raises(CallTimeout):
        world.result(call)


def test_a_long_pause_is_cut_short_for_a_call(world: Any) -> None:
    relay = world.relay()
    serve(world.client(SERVICE, relay))
    caller = world.client(CALLER, relay)
    relay.die()
    world.settle(300)
    relay.come_back()
    assert world.result(caller.call(SERVICE, "echo", b"x", timeout=60), 32).data == b"x"
    relay.die()
    world.settle(300)
    call = ensureDeferred(caller.call(77, "echo", timeout=60))
    with pytest.raises(CallError):
        world.result(call)
    call = ensureDeferred(caller.call(SERVICE, "echo", b"y", timeout=60))
    relay.come_back()
    world.settle(1.1)
    assert SessionAddress(CALLER) in relay.sessions
    assert world.result(call, 31).data == b"y"


def test_a_silent_relay_is_given_up_after_40_seconds(world: Any) -> None:
    relay = world.relay()
    caller = world.client(CALLER, relay)
    [pipe] = world.network.pipes_to(relay.port)
    pipe.b.stopReading()
    world.settle(39)
    assert caller.exchange.relays.is_connected
    world.settle(2)
    assert not caller.exchange.relays.connections[0].is_connected or len(relay.tokens) == 2


def test_a_call_made_while_the_relay_is_down_goes_when_it_is_back(world: Any) -> None:
    relay = world.relay()
    serve(world.client(SERVICE, relay))
    caller = world.client(CALLER, relay)
    relay.die()
    world.settle()
    call = ensureDeferred(caller.call(SERVICE, "echo", b"x", timeout=30))
    world.settle(5)
    relay.come_back()
    assert world.result(call, 24).data == b"x"


def test_a_request_that_its_relay_lost_is_sent_again(world: Any) -> None:
    relay = world.relay()
    handled = serve(world.client(SERVICE, relay))
    caller = world.client(CALLER, relay)
    relay.mangle = lambda message, envelope: []
    call = ensureDeferred(caller.call(SERVICE, "echo", b"x", timeout=30))
    world.settle()
    relay.mangle = lambda message, envelope: [message]
    relay.drop_connections()
    assert world.result(call, 5).data == b"x"
    assert handled == [b"x"]


def test_a_request_that_may_arrive_once_only_is_not_sent_again(world: Any) -> None:
    first, second, handled, caller = two(world)
    first.mangle = lambda message, envelope: []
    call = ensureDeferred(caller.call(SERVICE, "echo", b"x", timeout=5, once=True))
    world.settle()
    first.die()
    with pytest.raises(CallTimeout) as late:
        world.result(call, 5)
    assert late.value.relays == (first.url,)
    assert (handled, second.seen) == ([], [])
    assert world.result(caller.call(SERVICE, "echo", b"y", timeout=5, once=True)).data == b"y"


@pytest.mark.parametrize(
    ("problem", "once", "handled_by"),
    [
        (RelayProblem.NOT_STORED, True, []),
        (RelayProblem.OVERLOADED, True, []),
        (RelayProblem.EXPIRED, True, []),
        (RelayProblem.NOT_STORED, False, [b"x"]),
        (RelayProblem.RATE_LIMITED, True, [b"x"]),
    ],
)
def test_a_request_that_may_arrive_once_only_goes_on_if_it_has_certainly_not_arrived(
    world: Any, problem: RelayProblem, once: bool, handled_by: list[bytes]
) -> None:
    first, second, handled, caller = two(world)

    def refuse(message: bytes, envelope: Envelope) -> list[bytes]:
        first.deliver(encode_envelope(relay_error(envelope, problem, int(first.now_s()))), SessionAddress(CALLER))
        return []

    first.mangle = refuse
    call = ensureDeferred(caller.call(SERVICE, "echo", b"x", timeout=5, once=once))
    if handled_by:
        assert world.result(call, 5).data == b"x"
    else:
        with pytest.raises(CallRefused) as refused:
            world.result(call, 5)
        assert refused.value.code == problem.code
    assert handled == handled_by and len(second.seen) == 2 * len(handled_by)


def test_an_answer_that_its_relay_lost_is_sent_again(world: Any) -> None:
    relay = world.relay()
    handled = serve(world.client(SERVICE, relay))
    caller = world.client(CALLER, relay)
    relay.mangle = lambda message, envelope: [] if envelope.HasField("response") else [message]
    call = ensureDeferred(caller.call(SERVICE, "echo", b"x", timeout=30))
    world.settle(0.2)
    assert handled == [b"x"]
    relay.mangle = lambda message, envelope: [message]
    relay.drop_connections()
    assert world.result(call, 5).data == b"x"
    assert handled == [b"x"]


def test_an_answer_that_was_lost_long_ago_is_sent_again_when_its_request_comes_again(world: Any) -> None:
    relay = world.relay()
    handled = serve(world.client(SERVICE, relay))
    caller = world.client(CALLER, relay)
    relay.mangle = lambda message, envelope: [] if envelope.HasField("response") else [message]
    call = ensureDeferred(caller.call(SERVICE, "echo", b"x", timeout=100))
    world.settle(60)
    relay.mangle = lambda message, envelope: [message]
    relay.drop_connections()
    assert world.result(call, 5).data == b"x"
    assert handled == [b"x"]


@pytest.mark.parametrize("is_answered", [True, False])
def test_an_answer_goes_over_the_relay_over_which_its_request_comes_again(world: Any, is_answered: bool) -> None:
    """The caller alone has lost the other relay, which does not know where it is now."""
    first, _, handled, caller = two(world)
    gate: Deferred[None] = Deferred()

    @world.clients[0].service("wait")
    async def wait(request: Request) -> bytes:
        handled.append(request.data)
        if not is_answered:
            await gate
        return b"done"

    first.mangle = lambda message, envelope: [] if envelope.HasField("response") else [message]
    call = ensureDeferred(caller.call(SERVICE, "wait", b"x", timeout=30))
    world.settle()
    assert len(handled) == 1
    first.answer = b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n"
    first.sessions[SessionAddress(CALLER)].cut()
    world.settle(2)
    gate.callback(None)
    assert world.result(call, 2).data == b"done"
    assert len(handled) == 1


def test_a_relay_whose_name_no_certificate_can_have_is_tried_again_and_said_why(world: Any) -> None:
    relay = world.relay()
    relay.url = "wss://xn--a.example"
    world.registry.add(SERVICE)
    caller = world.make(CALLER, relay)
    caller.startService()
    with pytest.raises(NotConnected) as raised:
        world.result(caller.call(SERVICE, "echo", timeout=2), 3)
    assert raised.value.problems == {"wss://xn--a.example": "host not found"}


def test_what_a_relay_that_reads_nothing_could_not_take_says_so(world: Any) -> None:
    relay = world.relay()
    world.registry.add(SERVICE)
    caller = world.client(CALLER, relay)
    relay.sessions[SessionAddress(CALLER)].hold("test", True)
    for _ in range(4):
        ensureDeferred(caller.call(SERVICE, "echo", bytes(700_000), timeout=30)).addErrback(lambda failure: None)
    with pytest.raises(NotConnected, match="takes nothing more") as raised:
        world.result(caller.call(SERVICE, "echo", b"x", timeout=5), 6)
    assert list(raised.value.problems) == [relay.url]


@pytest.mark.parametrize(
    "url",
    ["http://relay", "https://relay:443", "ws://", "ws://user@relay", "ws://relay/?token", "relay:80", "ws://relay#x"],
)
def test_what_is_no_url_of_a_relay_is_refused(world: Any, url: str) -> None:
    relay = world.relay()
    relay.url = url
    with pytest.raises(InvalidAddress):
        world.make(CALLER, relay)


def test_one_to_four_relays_are_taken(world: Any) -> None:
    relays = [world.relay(9000 + one) for one in range(5)]
    with pytest.raises(ValueError, match="1 to 4"):
        world.make(CALLER, *relays)
    with pytest.raises(ValueError, match="1 to 4"):
        world.make(CALLER)


# --- several -------------------------------------------------------------------------------------------------------------


def two(world: Any, **options: Any) -> tuple[Any, Any, list[bytes], Any]:
    relays = world.relay(9000), world.relay(9001)
    handled = serve(world.client(SERVICE, *relays))
    return (*relays, handled, world.client(CALLER, *relays, **options))


def test_a_client_is_connected_to_all_of_its_relays(world: Any) -> None:
    relays = [world.relay(9000 + one) for one in range(4)]
    world.client(CALLER, *relays)
    assert all(SessionAddress(CALLER) in relay.sessions for relay in relays)


def test_a_request_goes_over_a_relay_of_its_destination(world: Any) -> None:
    first, second = world.relay(9000), world.relay(9001)
    serve(world.client(SERVICE, second))
    caller = world.client(CALLER, first, second)
    world.result(caller.call(SERVICE, "echo", timeout=5))
    assert not first.seen


def test_an_answer_goes_over_the_relay_that_brought_the_request(world: Any) -> None:
    first, second = world.relay(9000), world.relay(9001)
    serve(world.client(SERVICE, first, second))
    caller = world.client(CALLER, second)
    world.result(caller.call(SERVICE, "echo", timeout=5))
    assert not first.seen


def test_when_one_of_two_relays_dies_every_call_is_answered_once(world: Any) -> None:
    first, second, handled, caller = two(world)
    calls = []
    for number in range(1000):
        calls.append(ensureDeferred(caller.call(SERVICE, "echo", b"%d" % number, timeout=10)))
        world.network.advance(0.0005)
        if number == 500:
            first.die()
    world.settle(5)
    assert [call.result.data for call in calls] == [b"%d" % number for number in range(1000)]
    assert sorted(handled) == sorted(b"%d" % number for number in range(1000))
    assert len(second.seen) >= 499 * 2


def test_relays_that_die_in_turn_lose_no_call(world: Any) -> None:
    first, second, handled, caller = two(world)
    calls = []
    for number in range(400):
        calls.append(ensureDeferred(caller.call(SERVICE, "echo", b"%d" % number, timeout=60)))
        world.network.advance(0.02)
        if number % 50 == 25:
            (first if number % 100 == 25 else second).drop_connections()
    world.settle(20)
    assert [call.result.data for call in calls] == [b"%d" % number for number in range(400)]
    assert sorted(handled) == sorted(b"%d" % number for number in range(400))


def test_the_error_of_one_relay_is_no_reason_not_to_try_the_other(world: Any) -> None:
    first, second, _, caller = two(world)

    def refuse(message: bytes, envelope: Any) -> list[bytes]:
        first.tell(SessionAddress.of(envelope.source), envelope.uid, "exceeded rate limits, dropping message")
        return []

    first.mangle = refuse
    assert world.result(caller.call(SERVICE, "echo", b"x", timeout=5)).data == b"x"
    assert len(second.seen) == 2


def test_the_error_of_the_last_relay_ends_the_call(world: Any) -> None:
    first, second, _, caller = two(world)
    for relay in (first, second):

        def refuse(message: bytes, envelope: Any, relay: Any = relay) -> list[bytes]:
            relay.tell(SessionAddress.of(envelope.source), envelope.uid, "destination offline")
            return []

        relay.mangle = refuse
    with pytest.raises(CallRefused, match="destination offline") as refused:
        world.result(caller.call(SERVICE, "echo", timeout=5))
    assert refused.value.source == SessionAddress(0)
    assert (len(first.seen), len(second.seen)) == (1, 1)


def test_a_timeout_says_over_which_relays_the_request_went(world: Any) -> None:
    first, second, _, caller = two(world)
    first.mangle = second.mangle = lambda message, envelope: []
    call = ensureDeferred(caller.call(SERVICE, "echo", timeout=5))
    world.settle()
    first.die()
    with pytest.raises(CallTimeout) as late:
        world.result(call, 5)
    assert late.value.relays == (first.url, second.url)


def test_calls_wait_while_the_network_takes_nothing_and_none_is_lost(world: Any) -> None:
    relay = world.relay()
    handled = serve(world.client(SERVICE, relay))
    caller = world.client(CALLER, relay, config=RmbConfig(relay_queue_bytes=10_000))
    pipe = next(
        one for one in world.network.pipes_to(relay.port) if one.b is relay.sessions[SessionAddress(CALLER)].transport
    )
    pipe.b.stopReading()
    calls = [
        ensureDeferred(caller.call(SERVICE, "echo", b"%05d" % one + bytes(2000), timeout=60)) for one in range(300)
    ]
    world.settle(5)
    assert caller.exchange.relays.in_haste
    assert not handled
    pipe.b.startReading()
    world.settle(5)
    assert [call.result.data[:5] for call in calls] == [b"%05d" % one for one in range(300)]
    assert len(handled) == 300


def test_a_handler_that_takes_long_is_called_once_however_often_the_request_comes(world: Any) -> None:
    relay = world.relay()
    service = world.client(SERVICE, relay)
    gate: Deferred[None] = Deferred()
    times: list[int] = []

    @service.service("long")
    async def long(request: Request) -> bytes:
        times.append(1)
        await gate
        return b"done"

    caller = world.client(CALLER, relay)
    call = ensureDeferred(caller.call(SERVICE, "long", timeout=100))
    for _ in range(5):
        world.settle(12)
        relay.drop_connections()
    world.settle(5)
    gate.callback(None)
    assert world.result(call).data == b"done"
    assert times == [1]


def hush(world: Any, relay: Any) -> None:
    """The relay takes nothing and says nothing any more, and no connection is lost."""
    for pipe in world.network.pipes_to(relay.port):
        pipe.b.stopReading()


@pytest.mark.parametrize("busy_s", [0.0, 1.0, 2.9, 3.1, 30.0])
def test_what_a_silent_relay_carries_goes_over_another_one_before_it_is_given_up(world: Any, busy_s: float) -> None:
    first, _, handled, caller = two(world)
    world.result(caller.call(SERVICE, "echo", timeout=10))
    handled.clear()
    world.settle(busy_s)
    hush(world, first)
    calls = [ensureDeferred(caller.call(SERVICE, "echo", b"%d" % one, timeout=10)) for one in range(20)]
    world.settle(7)
    assert [call.result.data for call in calls] == [b"%d" % one for one in range(20)]
    assert len(handled) == 20
    assert world.result(caller.call(SERVICE, "echo", b"soon", timeout=10)).data == b"soon"
    assert caller.exchange.relays.connections[0].is_connected
    world.settle(60)
    assert len(first.tokens) > 2


def test_an_answer_in_a_silent_relay_goes_over_another_one(world: Any) -> None:
    first, second, handled, caller = two(world)
    service = world.clients[0]
    gate: Deferred[None] = Deferred()

    @service.service("wait")
    async def wait(request: Request) -> bytes:
        await gate
        return b"done"

    call = ensureDeferred(caller.call(SERVICE, "wait", timeout=30, once=True))
    world.settle()
    hush(world, first)
    gate.callback(None)
    assert world.result(call, 8).data == b"done"
    assert [one.WhichOneof("message") for one in second.seen] == ["response"]
    assert handled == []


def test_a_relay_that_has_no_answer_for_us_is_not_silent(world: Any) -> None:
    first, second = world.relay(9000), world.relay(9001)
    world.registry.add(SERVICE)
    caller = world.client(CALLER, first, second)
    for _ in range(5):
        call = ensureDeferred(caller.call(SERVICE, "echo", timeout=20))
        with pytest.raises(CallTimeout) as late:
            world.result(call, 21)
        assert late.value.relays == (first.url,)
    assert (len(first.seen), len(second.seen)) == (5, 0)


def test_a_relay_that_is_not_read_from_is_not_silent(world: Any, forge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The senders of what it has brought are being looked up, which takes a registry of nodes that do not answer long."""
    first, second, handled, caller = two(world, config=RmbConfig(lookups=2))
    world.registry.add(3)
    get, known = world.registry.get, Waiters[None]()

    async def get_slowly(twin: int) -> Any:
        if twin == 3:
            await known.wait()
        return await get(twin)

    monkeypatch.setattr(world.registry, "get", get_slowly)
    for uid in "ab":
        first.deliver(forge(3, SessionAddress(CALLER), uid=uid, signer=3), SessionAddress(CALLER))
    world.settle()
    call = ensureDeferred(caller.call(SERVICE, "echo", b"x", timeout=60))
    world.settle(20)
    known.fire(None)
    assert world.result(call, 5).data == b"x"
    assert handled == [b"x"] and second.seen == []


@pytest.mark.parametrize("held_s", [1.0, 20.0])
def test_a_relay_that_went_silent_while_it_was_not_read_from_is_silent(world: Any, held_s: float) -> None:
    first, second, _, caller = two(world)
    caller.exchange.relays.connections[0].hold(True)
    call = ensureDeferred(caller.call(SERVICE, "echo", b"x", timeout=60))
    hush(world, first)
    world.settle(held_s)
    caller.exchange.relays.connections[0].hold(True)
    assert second.seen == []
    caller.exchange.relays.connections[0].hold(False)
    assert world.result(call, 10).data == b"x"


def test_a_silent_relay_that_is_the_only_one_gets_nothing_twice(world: Any) -> None:
    relay = world.relay()
    handled = serve(world.client(SERVICE, relay))
    caller = world.client(CALLER, relay)
    hush(world, relay)
    call = ensureDeferred(caller.call(SERVICE, "echo", b"x", timeout=60))
    world.settle(20)
    for pipe in world.network.pipes_to(relay.port):
        pipe.b.startReading()
    assert world.result(call, 5).data == b"x"
    assert (handled, len(relay.seen)) == ([b"x"], 2)
