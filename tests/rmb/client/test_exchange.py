"""The lower half, as a gateway uses it: answers made elsewhere, answers awaited from before, and what is logged."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.defer import ensureDeferred

from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import CallFinished, Event, TwinSessionClosed, TwinSessionOpened, digest
from dmsg.rmb.client.errors import CallTimeout, EncryptionFailed, NotConnected, Stopped, TwinUnknown
from dmsg.rmb.client.exchange import Accepted, Exchange
from dmsg.rmb.client.handlers import Request
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope

from .conftest import EPOCH_S, key_of

CALLER, GATEWAY = 1, 2


class Gateway:
    """An owner that keeps what it is told of, and awaits the answers in ``awaited``."""

    def __init__(self, world: Any, *relays: Any) -> None:
        self.requests: list[Accepted] = []
        self.answers: list[Accepted] = []
        self.awaited: set[str] = set()
        world.registry.add(GATEWAY)
        urls = [relay.url for relay in relays]
        self.exchange = Exchange(world.network, key_of(GATEWAY), world.registry, urls, self, now_s=world.now_s)

    def request_received(self, request: Accepted) -> None:
        self.requests.append(request)

    def is_awaited(self, uid: str, twin: int) -> bool:
        return uid in self.awaited

    def answer_received(self, answer: Accepted) -> None:
        self.answers.append(answer)

    def answers_have_room(self) -> None:
        """It does not wait for that."""


@pytest.fixture
def scene(world: Any) -> Any:
    """``(world, relay, gateway)``, the gateway connected."""
    relay = world.relay()
    gateway = Gateway(world, relay)
    world.result(gateway.exchange.start())
    world.settle()
    yield world, relay, gateway
    world.result(gateway.exchange.stop(), 10)


def envelope_to(twin: int, uid: str, kind: str, plain: bytes = b"", **fields: Any) -> Envelope:
    envelope = Envelope(uid=uid, plain=plain, **fields)
    SessionAddress(twin).write_to(envelope.destination)
    getattr(envelope, kind).SetInParent()
    return envelope


# --- answers ---------------------------------------------------------------------------------------------------------------


def test_an_answer_made_elsewhere_answers_a_request(scene: Any) -> None:
    world, relay, gateway = scene
    caller = world.client(CALLER, relay, session="s")
    call = ensureDeferred(caller.call(GATEWAY, "any.command", b"question", timeout=10))
    world.settle()
    [request] = gateway.requests
    assert (request.payload, request.source, request.sealed) == (b"question", SessionAddress(CALLER, "s"), True)
    assert (request.twin.id, request.relay) == (CALLER, relay.url)
    answer = Envelope(uid=request.envelope.uid, plain=b"answer", expiration=60)
    answer.response.SetInParent()
    request.source.write_to(answer.destination)
    world.result(gateway.exchange.send(answer))
    assert world.result(call).data == b"answer"


def test_an_answer_made_elsewhere_goes_over_the_relay_that_brought_the_request(world: Any) -> None:
    """Of the relays of its twin the caller may have lost the others."""
    first, second = world.relay(9000), world.relay(9001)
    gateway = Gateway(world, first, second)
    world.result(gateway.exchange.start())
    caller = world.client(CALLER, second)
    world.registry.add(CALLER, relays=[first.url[5:], second.url[5:]])
    call = ensureDeferred(caller.call(GATEWAY, "any.command", b"question", timeout=10))
    world.settle()
    answer = Envelope(uid=gateway.requests[0].envelope.uid, plain=b"answer", expiration=60)
    answer.response.SetInParent()
    gateway.requests[0].source.write_to(answer.destination)
    world.result(gateway.exchange.send(answer))
    assert world.result(call).data == b"answer" and first.seen == []
    world.result(gateway.exchange.stop(), 10)


def test_who_gives_an_answer_is_told_when_a_relay_has_taken_it_or_none_has_to_any_more(world: Any) -> None:
    relay = world.relay()
    relay.die()
    world.registry.add(CALLER)
    gateway = Gateway(world, relay)
    world.result(gateway.exchange.start())
    told: list[str] = []

    def send(uid: str, expiration: int = 600) -> None:
        envelope = envelope_to(CALLER, uid, "response", b"x", expiration=expiration)
        world.result(gateway.exchange.send(envelope, lambda: told.append(uid)))

    send("short", 5)
    send("long")
    assert told == []
    send("long")  # it replaces the first one
    assert told == ["long"]
    world.settle(30)
    assert told == ["long", "short"]
    relay.come_back()
    world.settle(10)
    send("at once")
    world.settle()
    assert told == ["long", "short", "long", "at once"] and len(relay.seen) == 2
    relay.die()
    world.settle()
    send("left")
    world.result(gateway.exchange.stop(), 10)
    assert told == ["long", "short", "long", "at once"]


def test_an_answer_awaited_from_before_is_told(scene: Any) -> None:
    world, relay, gateway = scene
    other = Gateway(world, relay)
    world.registry.add(CALLER)
    other.exchange = Exchange(world.network, key_of(CALLER), world.registry, [relay.url], other, now_s=world.now_s)
    world.result(other.exchange.start())
    world.settle()
    gateway.awaited.add("known")
    for uid in ("known", "unknown"):
        world.result(other.exchange.send(envelope_to(GATEWAY, uid, "response", b"late")))
    world.settle()
    assert [(one.envelope.uid, one.payload) for one in gateway.answers] == [("known", b"late")]
    world.result(other.exchange.stop(), 10)


def test_an_error_of_a_relay_awaited_from_before_is_told(scene: Any) -> None:
    world, relay, gateway = scene
    gateway.awaited.add("known")
    for uid in ("known", "unknown"):
        relay.tell(SessionAddress(GATEWAY), uid, "destination offline")
    world.settle()
    [error] = gateway.answers
    assert (error.twin, error.envelope.error.message) == (None, "destination offline")


def test_an_answer_that_cannot_be_sent_says_why(scene: Any) -> None:
    world, _, gateway = scene
    with pytest.raises(TwinUnknown):
        world.result(gateway.exchange.send(envelope_to(77, "u", "response")))
    world.registry.twins[5] = Twin(5, key_of(5).account, (), b"\x05" * 33)
    with pytest.raises(EncryptionFailed):
        world.result(gateway.exchange.send(envelope_to(5, "u", "response")))
    world.registry.add(CALLER)
    over = envelope_to(CALLER, "u", "response", timestamp=EPOCH_S - 100, expiration=10)
    with pytest.raises(CallTimeout, match="expired before it was sent"):
        world.result(gateway.exchange.send(over))


def test_nothing_is_sent_before_the_start_and_after_the_end(world: Any) -> None:
    gateway = Gateway(world, world.relay())
    for _ in range(2):
        with pytest.raises(Stopped):
            world.result(gateway.exchange.send(envelope_to(GATEWAY, "u", "response")))
        with pytest.raises(Stopped):
            world.result(gateway.exchange.request(envelope_to(GATEWAY, "u", "request"), 5))
        world.result(gateway.exchange.start())
        world.result(gateway.exchange.stop(), 10)


# --- requests --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("looked_up_s", "left_s"), [(12, 18), (40, None)])
def test_the_time_it_takes_to_look_a_sender_up_is_part_of_a_request_s_life(
    scene: Any, looked_up_s: int, left_s: int | None
) -> None:
    world, relay, gateway = scene
    caller = world.client(CALLER, relay, session="s")

    def deliver_slowly(message: bytes, envelope: Envelope) -> list[bytes]:
        world.registry.silent = envelope.HasField("request")
        return [message]

    relay.mangle = deliver_slowly
    call = ensureDeferred(caller.call(GATEWAY, "any.command", timeout=30))
    call.addErrback(lambda failure: failure.trap(CallTimeout, Stopped))
    world.settle(looked_up_s)
    world.registry.release()
    assert [request.remaining_s for request in gateway.requests] == ([] if left_s is None else [left_s])


def test_a_request_keeps_the_life_it_came_with(scene: Any) -> None:
    world, relay, gateway = scene
    world.registry.add(CALLER)
    envelope = envelope_to(CALLER, "mine", "request", timestamp=EPOCH_S - 10, expiration=60)
    asked = ensureDeferred(gateway.exchange.request(envelope, 5))
    with pytest.raises(CallTimeout):
        world.result(asked, 6)
    [sent] = relay.seen
    assert sent.timestamp + sent.expiration == EPOCH_S + 50
    assert sent.timestamp >= EPOCH_S


def test_a_uid_is_used_for_one_request_at_a_time(scene: Any) -> None:
    world, _, gateway = scene
    world.registry.add(CALLER)
    first = ensureDeferred(gateway.exchange.request(envelope_to(CALLER, "mine", "request"), 5))
    with pytest.raises(ValueError, match="under way"):
        world.result(gateway.exchange.request(envelope_to(CALLER, "mine", "request"), 5))
    with pytest.raises(CallTimeout):
        world.result(first, 6)


# --- events ----------------------------------------------------------------------------------------------------------------


class Log:
    """An event log in memory."""

    dropped = 0

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[Event]) -> list[Any]:
        return [one for one in self.events if isinstance(one, kind)]


def test_sessions_are_logged_from_their_beginning_to_their_end(world: Any) -> None:
    relay, log = world.relay(), Log()
    service = world.client(GATEWAY, relay)

    @service.service("echo")
    async def echo(request: Request) -> bytes:
        return request.data

    client = world.client(CALLER, relay, session="private name", events=log)
    world.result(client.call(GATEWAY, "echo", b"x", timeout=5))
    world.settle(60)
    relay.drop_connections()
    world.settle(10)
    first, second = log.of(TwinSessionOpened)
    assert (first.conn, second.conn, first.twin, first.address) == (1, 2, CALLER, "127.0.0.1")
    assert first.connection == digest("private name")
    assert first.handshake_ms > 0
    [closed] = log.of(TwinSessionClosed)
    assert (closed.conn, closed.envelopes_in, closed.envelopes_out) == (1, 1, 1)
    assert closed.bytes_in > 100
    assert closed.duration_s >= 60
    assert "private name" not in repr(log.events)


def test_attempts_that_fail_are_logged_with_their_reason(world: Any) -> None:
    relay, log = world.relay(), Log()
    relay.die()
    world.client(CALLER, relay, events=log)
    closed = log.of(TwinSessionClosed)
    assert closed
    assert {(one.reason, one.duration_s) for one in closed} == {(Reason.CONNECTION_REFUSED, 0.0)}


def test_calls_are_logged_without_a_word_of_theirs(world: Any) -> None:
    relay, log = world.relay(), Log()
    service = world.client(GATEWAY, relay)

    @service.service("secret.command")
    async def serve(request: Request) -> bytes:
        return b""

    client = world.client(CALLER, relay, events=log)
    world.result(client.call(GATEWAY, "secret.command", timeout=5))
    with pytest.raises(TwinUnknown):
        world.result(client.call(77, "secret.command", timeout=5))
    cancelled = ensureDeferred(client.call(GATEWAY, "other", timeout=5))
    cancelled.addErrback(lambda failure: None)
    cancelled.cancel()
    relay.die()
    world.settle()
    with pytest.raises(NotConnected):
        world.result(client.call(GATEWAY, "secret.command", timeout=1), 2)
    calls = log.of(CallFinished)
    assert [(one.twin, one.ok, one.reason) for one in calls] == [
        (GATEWAY, True, Reason.NONE),
        (77, False, Reason.UNKNOWN_TWIN),
        (GATEWAY, False, Reason.CANCELLED),
        (GATEWAY, False, Reason.NOT_CONNECTED),
    ]
    assert calls[0].elapsed_ms > 0
    assert "secret" not in repr(log.events)
