"""Calls and commands: what a program sees of them."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.defer import CancelledError, Deferred, TimeoutError, ensureDeferred
from twisted.logger import globalLogPublisher

from dmsg.clients.errors import ClientStopped
from dmsg.rmb.client.config import RmbConfig
from dmsg.rmb.client.errors import (
    CallRefused,
    CallTimeout,
    EnvelopeTooLarge,
    NoEncryptionKey,
    NotConnected,
    NoTwin,
    Refusal,
    RegistryFailed,
    Stopped,
    TooMuchUnderWay,
    TwinUnknown,
)
from dmsg.rmb.client.handlers import Reply, Request
from dmsg.rmb.client.service import RmbClient
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.errors import InvalidTwin, OverlongText, PeerCode
from dmsg.rmb.core.limits import MAX_SCHEMA_BYTES
from dmsg.rmb.twins.errors import RegistryError

from .conftest import key_of

CALLER, SERVICE = 1, 2


async def echo(request: Request) -> bytes:
    return request.data


async def sleep(request: Request) -> bytes:
    await Deferred()
    return b""


def pair(world: Any, **options: Any) -> tuple[Any, Any, Any]:
    """A relay, a client that serves ``echo``, and one that calls it."""
    relay = world.relay()
    service = world.client(SERVICE, relay, **options)
    service.service("echo")(echo)
    return relay, service, world.client(CALLER, relay, **options)


def test_a_call_is_answered(world: Any) -> None:
    _, _, caller = pair(world)
    answer = world.result(caller.call(SERVICE, "echo", b"hello", timeout=5))
    assert (answer.data, answer.source) == (b"hello", SessionAddress(SERVICE))


def test_a_handler_sees_who_asks_and_what(world: Any) -> None:
    relay, service, _ = pair(world)
    caller = world.client(CALLER + 10, relay, session="mine")
    seen: list[Request] = []

    @service.service("look")
    async def look(request: Request) -> Reply:
        seen.append(request)
        return Reply(b"{}", "application/json")

    answer = world.result(caller.call(SERVICE, "look", b"1", timeout=7, schema="text/plain", tags="a,b"))
    assert answer.schema == "application/json"
    [request] = seen
    assert request.source == SessionAddress(CALLER + 10, "mine")
    assert (request.command, request.data, request.schema, request.tags) == ("look", b"1", "text/plain", "a,b")
    assert request.sealed
    assert request.remaining_s in (7, 8)


def test_calls_at_the_same_time_get_their_own_answers(world: Any) -> None:
    _, _, caller = pair(world)
    calls = [ensureDeferred(caller.call(SERVICE, "echo", b"%d" % one, timeout=5)) for one in range(200)]
    world.settle()
    assert [call.result.data for call in calls] == [b"%d" % one for one in range(200)]


def test_one_session_of_a_twin_can_be_called(world: Any) -> None:
    relay, _, caller = pair(world)
    other = world.client(SERVICE, relay, session="other")

    @other.service("echo")
    async def name(request: Request) -> bytes:
        return b"other"

    assert world.result(caller.call(SERVICE, "echo", b"x", timeout=5, session="other")).data == b"other"
    assert world.result(caller.call(SERVICE, "echo", b"x", timeout=5)).data == b"x"


def test_a_request_waits_at_the_relay_for_a_twin_that_is_offline(world: Any) -> None:
    relay = world.relay()
    caller = world.client(CALLER, relay)
    service = world.make(SERVICE, relay)
    service.service("echo")(echo)
    call = ensureDeferred(caller.call(SERVICE, "echo", b"late", timeout=30))
    world.settle(10)
    assert not call.called
    service.startService()
    assert world.result(call).data == b"late"


# --- answers that are errors ---------------------------------------------------------------------------------------------


def test_a_command_that_nobody_serves_is_refused(world: Any) -> None:
    _, _, caller = pair(world)
    with pytest.raises(CallRefused) as refused:
        world.result(caller.call(SERVICE, "other", timeout=5))
    assert (refused.value.code, refused.value.source) == (PeerCode.UNKNOWN_COMMAND, SessionAddress(SERVICE))
    assert "unknown command" not in refused.value.own_text


def test_a_handler_can_refuse(world: Any) -> None:
    _, service, caller = pair(world)

    @service.service("never")
    async def never(request: Request) -> bytes:
        raise Refusal(4711, "not today")

    with pytest.raises(CallRefused, match="not today") as refused:
        world.result(caller.call(SERVICE, "never", timeout=5))
    assert refused.value.code == 4711


@pytest.mark.parametrize("code", [-1, 2**32, "404"])
def test_a_handler_that_refuses_with_what_is_no_code_fails(world: Any, logged_errors: Any, code: Any) -> None:
    _, service, caller = pair(world)

    @service.service("never")
    async def never(request: Request) -> bytes:
        raise Refusal(code, "not today")

    with pytest.raises(CallRefused) as refused:
        world.result(caller.call(SERVICE, "never", timeout=5))
    assert refused.value.code == PeerCode.HANDLER_FAILED
    assert len(logged_errors.flush(ValueError, TypeError)) == 1


@pytest.mark.parametrize("kind", [KeyError, SystemExit])
def test_what_a_handler_raises_is_logged_and_not_told(
    world: Any, logged_errors: Any, kind: type[BaseException]
) -> None:
    _, service, caller = pair(world)

    @service.service("broken")
    async def broken(request: Request) -> bytes:
        raise kind("secret")

    with pytest.raises(CallRefused) as refused:
        world.result(caller.call(SERVICE, "broken", timeout=5))
    assert refused.value.code == PeerCode.HANDLER_FAILED
    assert "secret" not in str(refused.value)
    assert len(logged_errors.flush(kind)) == 1


def test_a_handler_that_gives_no_bytes_has_failed(world: Any, logged_errors: Any) -> None:
    _, service, caller = pair(world)

    @service.service("nothing")
    async def nothing(request: Request) -> bytes:
        return None  # type: ignore[return-value]

    with pytest.raises(CallRefused):
        world.result(caller.call(SERVICE, "nothing", timeout=5))
    assert len(logged_errors.flush(TypeError)) == 1


def test_an_answer_that_is_too_large_is_an_error(world: Any) -> None:
    _, service, caller = pair(world)

    @service.service("large")
    async def large(request: Request) -> bytes:
        return bytes(1024 * 1024)

    with pytest.raises(CallRefused, match="too large"):
        world.result(caller.call(SERVICE, "large", timeout=5))


def test_an_answer_that_no_receiver_accepts_is_a_failure(world: Any, logged_errors: Any) -> None:
    _, service, caller = pair(world)

    @service.service("wordy")
    async def wordy(request: Request) -> Reply:
        return Reply(b"", "x" * (MAX_SCHEMA_BYTES + int(request.data)))

    assert len(world.result(caller.call(SERVICE, "wordy", b"0", timeout=5)).schema) == MAX_SCHEMA_BYTES
    with pytest.raises(CallRefused, match="failed"):
        world.result(caller.call(SERVICE, "wordy", b"1", timeout=5))
    assert len(logged_errors.flush(OverlongText)) == 1


def test_a_handler_needs_a_command(world: Any) -> None:
    """``@client.service`` without a command would serve nothing."""
    _, service, _ = pair(world)
    with pytest.raises(TypeError, match="a command is text"):
        service.service(echo)
    with pytest.raises(TypeError, match="a handler is a function, not b'hello'"):
        service.service("greet")(b"hello")


def test_a_relay_in_place_of_a_list_of_relays_is_not_read_letter_by_letter(world: Any) -> None:
    with pytest.raises(TypeError, match=r"relays is a list of URLs, as .*, not 'wss://relay.example'"):
        RmbClient(world.network, key_of(CALLER), world.registry, "wss://relay.example")


def test_a_client_that_is_started_twice_is_one(world: Any) -> None:
    """As one that a program starts, and then gives to a parent that runs."""
    relay, service, caller = pair(world)
    service.startService()
    world.settle()
    assert len(relay.tokens) == 2
    assert world.result(caller.call(SERVICE, "echo", b"hello", timeout=5)).data == b"hello"
    world.result(service.stopService())
    world.settle(100)
    assert len(relay.tokens) == 2


def test_a_command_is_served_once(world: Any) -> None:
    _, service, _ = pair(world)
    with pytest.raises(ValueError, match="served already"):
        service.service("echo")(echo)


# --- calls that come to nothing ------------------------------------------------------------------------------------------


def test_a_twin_that_is_not_in_the_registry(world: Any) -> None:
    _, _, caller = pair(world)
    with pytest.raises(TwinUnknown) as unknown:
        world.result(caller.call(77, "echo", timeout=5))
    assert unknown.value.target == SessionAddress(77)
    assert unknown.value.code == PeerCode.UNKNOWN_TWIN


def test_a_registry_that_fails(world: Any) -> None:
    _, _, caller = pair(world)
    world.registry.away = True
    with pytest.raises(RegistryFailed, match="unavailable"):
        world.result(caller.call(SERVICE, "echo", timeout=5))


def test_a_registry_that_does_not_answer_costs_the_timeout_and_no_more(world: Any) -> None:
    _, _, caller = pair(world)
    world.registry.silent = True
    call = ensureDeferred(caller.call(SERVICE, "echo", timeout=5))
    world.settle(4.9)
    assert not call.called
    with pytest.raises(RegistryFailed, match="within 5 s"):
        world.result(call, 0.2)


def test_no_relay_takes_the_request_in_time(world: Any) -> None:
    relay, _, caller = pair(world)
    relay.die()
    world.settle()
    call = ensureDeferred(caller.call(SERVICE, "echo", timeout=5))
    world.settle(4.9)
    assert not call.called
    with pytest.raises(NotConnected, match="connection refused") as failed:
        world.result(call, 0.2)
    assert list(failed.value.problems) == [relay.url]


def test_no_answer_in_time(world: Any) -> None:
    relay, service, caller = pair(world)
    service.service("sleep")(sleep)

    call = ensureDeferred(caller.call(SERVICE, "sleep", timeout=2.5))
    world.settle(2.4)
    assert not call.called
    with pytest.raises(CallTimeout) as late:
        world.result(call, 0.2)
    assert late.value.relays == (relay.url,)


def test_a_call_ends_before_its_request_expires(world: Any) -> None:
    relay, _, caller = pair(world)
    world.settle(0.7)
    for timeout in (0.1, 1, 2.5):
        began = world.now_s()
        world.result(caller.call(SERVICE, "echo", timeout=timeout))
        sent = [one for one in relay.seen if one.HasField("request")][-1]
        assert began + timeout <= sent.timestamp + sent.expiration <= began + timeout + 1


def test_a_call_waits_until_our_key_is_published(world: Any) -> None:
    published: Deferred[None] = Deferred()

    async def update(*_: Any) -> None:
        await published

    world.registry.update = update
    _, _, caller = pair(world)
    call = ensureDeferred(caller.call(SERVICE, "echo", b"early", timeout=5))
    world.settle(1.0)
    published.callback(None)
    assert world.result(call).data == b"early"


@pytest.mark.parametrize("timeout", [0, -1, 1800, float("nan")])
def test_a_timeout_no_envelope_can_have_is_refused(world: Any, timeout: float) -> None:
    _, _, caller = pair(world)
    with pytest.raises(ValueError, match="less than 1800 s"):
        world.result(caller.call(SERVICE, "echo", timeout=timeout))


@pytest.mark.parametrize("field", ["command", "session", "schema", "tags"])
def test_a_text_that_no_receiver_takes_is_refused(world: Any, field: str) -> None:
    _, _, caller = pair(world)
    texts = {"command": "echo", field: "ä" * 2000}
    with pytest.raises(ValueError, match="too long"):
        world.result(caller.call(SERVICE, timeout=5, **texts))


def test_more_than_an_envelope_holds(world: Any) -> None:
    _, _, caller = pair(world)
    with pytest.raises(EnvelopeTooLarge) as large:
        world.result(caller.call(SERVICE, "echo", bytes(1024 * 1024), timeout=5))
    assert large.value.size_bytes > 1024 * 1024


def test_calls_under_way_are_bounded_in_number_and_bytes(world: Any) -> None:
    relay = world.relay()
    world.registry.add(SERVICE)
    caller = world.client(CALLER, relay, config=RmbConfig(calls=2, calls_bytes=100))
    first = ensureDeferred(caller.call(SERVICE, "echo", bytes(60), timeout=2))
    with pytest.raises(TooMuchUnderWay):
        world.result(caller.call(SERVICE, "echo", bytes(41), timeout=2))
    second = ensureDeferred(caller.call(SERVICE, "echo", bytes(40), timeout=2))
    with pytest.raises(TooMuchUnderWay):
        world.result(caller.call(SERVICE, "echo", timeout=2))
    for call in (first, second):
        with pytest.raises(CallTimeout):
            world.result(call, 3)
    third = ensureDeferred(caller.call(SERVICE, "echo", bytes(100), timeout=2))
    with pytest.raises(CallTimeout):
        world.result(third, 3)


def test_cancelling_takes_back_a_request_that_no_relay_has(world: Any) -> None:
    relay = world.relay()
    relay.die()
    world.registry.add(SERVICE)
    caller = world.client(CALLER, relay)
    call = ensureDeferred(caller.call(SERVICE, "echo", timeout=60))
    world.settle()
    call.cancel()
    with pytest.raises(CancelledError):
        world.result(call)
    relay.come_back()
    world.settle(5)
    assert relay.sessions
    assert not relay.seen


def test_cancelling_drops_an_answer_that_comes_later(world: Any) -> None:
    relay, service, caller = pair(world)
    gate: Deferred[None] = Deferred()

    @service.service("wait")
    async def wait(request: Request) -> bytes:
        await gate
        return b"late"

    call = ensureDeferred(caller.call(SERVICE, "wait", timeout=60))
    world.settle()
    call.cancel()
    gate.callback(None)
    world.settle()
    with pytest.raises(CancelledError):
        world.result(call)
    assert [one.WhichOneof("message") for one in relay.seen] == ["request", "response"]


# --- encryption ----------------------------------------------------------------------------------------------------------


def test_no_relay_can_read_what_is_sent(world: Any) -> None:
    relay, _, caller = pair(world)
    world.result(caller.call(SERVICE, "echo", b"a secret", timeout=5))
    assert [one.WhichOneof("payload") for one in relay.seen] == ["cipher", "cipher"]
    assert not any(b"secret" in one.SerializeToString() for one in relay.seen)


def test_a_twin_without_a_key_is_called_in_plain_text_only_if_that_is_allowed(world: Any) -> None:
    relay = world.relay()
    world.registry.add(SERVICE, with_key=False)
    service = world.client(SERVICE, relay, publish=False, allow_plain=True)
    service.service("echo")(echo)
    strict, lax = world.client(CALLER, relay), world.client(CALLER + 10, relay, allow_plain=True)
    with pytest.raises(NoEncryptionKey, match="the twin"):
        world.result(strict.call(SERVICE, "echo", b"x", timeout=5))
    assert not relay.seen
    assert world.result(lax.call(SERVICE, "echo", b"x", timeout=5)).data == b"x"
    assert relay.seen[0].plain == b"x"


def test_a_request_that_could_be_answered_in_plain_text_only_is_refused_before_it_is_begun(world: Any) -> None:
    relay = world.relay()
    service = world.client(SERVICE, relay)
    handled = []

    @service.service("echo")
    async def note(request: Request) -> bytes:
        handled.append(request)
        return request.data

    world.registry.add(CALLER, with_key=False)
    caller = world.client(CALLER, relay, publish=False, allow_plain=True)
    with pytest.raises(CallRefused) as refused:
        world.result(caller.call(SERVICE, "echo", b"x", timeout=5))
    assert refused.value.code == PeerCode.NO_SENDER_KEY
    assert handled == []


def test_a_service_whose_own_key_is_not_published_does_not_say_that_the_caller_has_none(world: Any) -> None:
    relay = world.relay()
    world.registry.add(SERVICE, with_key=False)
    world.client(SERVICE, relay, publish=False).service("echo")(echo)
    caller = world.client(CALLER, relay, allow_plain=True)
    with pytest.raises(CallRefused, match="receiver twin has no public key") as refused:
        world.result(caller.call(SERVICE, "echo", b"x", timeout=5))
    assert refused.value.code == PeerCode.ENCRYPTION


def test_a_client_whose_own_key_is_not_published_says_so(world: Any) -> None:
    relay = world.relay()
    world.registry.add(SERVICE)
    world.registry.add(CALLER, with_key=False)
    caller = world.client(CALLER, relay, publish=False)
    with pytest.raises(NoEncryptionKey, match="our twin") as failed:
        world.result(caller.call(SERVICE, "echo", b"x", timeout=5))
    assert failed.value.ours


# --- our own twin --------------------------------------------------------------------------------------------------------


def test_key_and_relays_are_published(world: Any) -> None:
    relay = world.relay()
    world.registry.add(CALLER, with_key=False)
    world.client(CALLER, relay)
    twin = world.registry.twins[CALLER]
    assert twin.pk == EncryptionKey(key_of(CALLER).secret).public_key
    assert twin.relays == ("127.0.0.1:9000",)


def test_relays_in_the_registry_stay_unless_others_are_named(world: Any) -> None:
    relay = world.relay()
    world.registry.add(CALLER, relays=["relay.example"], with_key=False)
    world.result(world.client(CALLER, relay).stopService())
    assert world.registry.twins[CALLER].relays == ("relay.example",)
    world.client(CALLER, relay, publish=["b.example", "a.example"])
    assert world.registry.twins[CALLER].relays == ("a.example", "b.example")


def test_a_host_in_place_of_a_list_of_hosts_is_not_published_letter_by_letter(world: Any) -> None:
    with pytest.raises(TypeError, match="publish is a list of hosts"):
        world.client(CALLER, world.relay(), publish="relay.example")


def test_a_relay_that_no_registry_can_hold_is_not_published(world: Any) -> None:
    relay = world.relay()
    relay.url = "ws://[::1]:9000"
    world.registry.add(CALLER, with_key=False)
    world.client(CALLER, relay)
    twin = world.registry.twins[CALLER]
    assert twin.relays == ()
    assert twin.pk is not None


def test_relays_that_cannot_be_published_do_not_stop_who_is_known(world: Any) -> None:
    relay = world.relay()

    async def refuse(*_: object) -> None:
        raise RegistryError("unavailable", "Inability to pay some fees")

    world.registry.update = refuse
    world.registry.add(CALLER, relays=["old.example"])
    world.result(world.client(CALLER, relay, publish=["new.example"]).when_ready())
    world.registry.add(SERVICE, with_key=False)
    unknown = ensureDeferred(world.client(SERVICE, relay).when_ready())
    world.settle(10)
    assert not unknown.called
    del world.registry.update
    world.result(unknown, 31)


def test_an_update_that_never_ends_does_not_keep_a_known_twin_from_work(world: Any) -> None:
    relay = world.relay()
    world.registry.add(CALLER, relays=["old.example"])
    world.registry.slow_update = True
    client = world.client(CALLER, relay, publish=["new.example"])
    world.result(client.when_ready())
    world.result(client.stopService())


def test_relays_no_registry_can_hold_are_told_at_the_start(world: Any, logged_errors: Any) -> None:
    client = world.client(CALLER, world.relay(), publish=["under_score"])
    with pytest.raises(InvalidTwin):
        world.result(client.when_ready())
    logged_errors.flush()


def test_a_call_is_told_at_once_that_the_registry_cannot_hold_our_relays(world: Any, logged_errors: Any) -> None:
    async def update(*_: object) -> None:
        raise InvalidTwin("too many relays")

    world.registry.update = update
    world.registry.add(CALLER, with_key=False)
    client = world.make(CALLER, world.relay())
    world.registry.silent = True
    client.startService()
    early = ensureDeferred(client.call(SERVICE, "echo", timeout=5))
    world.registry.release()
    with pytest.raises(InvalidTwin):
        world.result(early, 0)
    logged_errors.flush()


def test_nothing_is_published_when_told_not_to(world: Any) -> None:
    world.registry.add(CALLER, with_key=False)
    world.client(CALLER, world.relay(), publish=False)
    assert world.registry.twins[CALLER].pk is None


def test_no_twin_has_our_key(world: Any, logged_errors: Any) -> None:
    client = world.make(CALLER, world.relay(), known=False)
    ready = ensureDeferred(client.when_ready())
    world.registry.silent = True
    client.startService()
    early = ensureDeferred(client.call(SERVICE, "echo", timeout=5))
    assert not early.called
    world.registry.release()
    for waiting in (ready, early):
        with pytest.raises(NoTwin):
            world.result(waiting, 0)
    with pytest.raises(NoTwin):
        world.result(client.when_ready())
    with pytest.raises(NoTwin):
        world.result(client.call(SERVICE, "echo", timeout=5))
    assert logged_errors.events()
    logged_errors.flush()


def test_the_answer_to_a_call_is_taken_while_the_registry_is_away(world: Any) -> None:
    relay = world.relay()
    service, caller = world.client(SERVICE, relay), world.client(CALLER, relay)
    gate: Deferred[None] = Deferred()

    @service.service("slow")
    async def slow(request: Request) -> bytes:
        await gate
        return b"done"

    call = ensureDeferred(caller.call(SERVICE, "slow", timeout=30))
    world.settle()
    world.registry.away = True
    gate.callback(None)
    assert world.result(call).data == b"done"


def test_a_registry_that_is_away_at_first_is_asked_until_it_answers(world: Any) -> None:
    relay = world.relay()
    world.registry.away = True
    client = world.client(CALLER, relay)
    ready = ensureDeferred(client.when_ready())
    call = ensureDeferred(client.call(77, "echo", timeout=60))
    world.settle(10)
    assert not ready.called
    assert not call.called
    world.registry.away = False
    world.result(ready, 31)
    with pytest.raises(TwinUnknown):
        world.result(call)


def test_a_registry_that_is_away_for_long_is_told_of_once(world: Any) -> None:
    said: list[Any] = []
    globalLogPublisher.addObserver(said.append)
    try:
        relay = world.relay()
        world.registry.away = True
        client = world.client(CALLER, relay)
        world.settle(86_400)
    finally:
        globalLogPublisher.removeObserver(said.append)
    assert [str(one["error"]) for one in said if one.get("log_format") == "our twin is not known yet: {error}"] == [
        "the registry of twins: unavailable"
    ]
    world.registry.away = False
    world.result(client.when_ready(), 31)


def test_when_ready_waits_for_a_relay(world: Any) -> None:
    relay = world.relay()
    relay.die()
    client = world.client(CALLER, relay)
    ready = ensureDeferred(client.when_ready())
    world.settle(10)
    assert not ready.called
    relay.come_back()
    world.result(ready, 31)
    assert client.twin == CALLER


@pytest.mark.parametrize("waits_for", ["the registry", "a relay"])
def test_who_waits_until_it_is_ready_is_told_that_it_stops(world: Any, waits_for: str) -> None:
    relay = world.relay()
    relay.die()
    world.registry.away = waits_for == "the registry"
    client = world.client(CALLER, relay)
    ready = client.when_ready()
    world.settle(10)
    assert not ready.called
    world.result(client.stopService())
    for waiting in (ready, client.when_ready()):  # one asks when it has stopped
        with pytest.raises(ClientStopped):
            world.result(waiting, 0)


def test_a_client_that_has_stopped_is_not_waited_for_until_it_is_started_again(world: Any) -> None:
    client = world.client(CALLER, world.relay())
    world.result(client.when_ready())
    for _ in range(2):
        world.result(client.stopService())
        with pytest.raises(ClientStopped):
            world.result(client.when_ready(), 0)
        client.startService()
        world.result(client.when_ready())


# --- the end -------------------------------------------------------------------------------------------------------------


def test_stopping_fails_calls_and_says_why(world: Any) -> None:
    relay, service, caller = pair(world)
    service.service("sleep")(sleep)

    call = ensureDeferred(caller.call(SERVICE, "sleep", timeout=60))
    world.settle()
    stopped = caller.stopService()
    with pytest.raises(Stopped):
        world.result(call)
    world.result(stopped)
    assert SessionAddress(CALLER) not in relay.sessions
    with pytest.raises(Stopped):
        world.result(caller.call(SERVICE, "echo", timeout=60))


@pytest.mark.parametrize("known", [True, False])
def test_stopping_fails_calls_at_once_while_the_registry_does_not_answer(world: Any, known: bool) -> None:
    """``known`` says whether our own twin was found before."""
    relay = world.relay()
    world.registry.silent = not known
    client = world.client(CALLER, relay)
    world.registry.silent = True
    call = ensureDeferred(client.call(SERVICE, "echo", timeout=60))
    stopped = client.stopService()
    with pytest.raises(Stopped) as raised:
        world.result(call, 0.0)
    assert not raised.value.sent
    world.result(stopped)


def test_a_call_that_is_cancelled_while_another_is_stopped_stays_cancelled(world: Any) -> None:
    client = world.client(CALLER, world.relay())
    world.registry.silent = True
    first = ensureDeferred(client.call(SERVICE, "echo", timeout=60))
    second = ensureDeferred(client.call(SERVICE, "echo", timeout=60))
    first.addBoth(lambda _: second.cancel())
    stopped = client.stopService()
    with pytest.raises(CancelledError):
        world.result(second, 0.0)
    world.result(stopped)


def test_handlers_at_work_may_end_when_the_client_stops(world: Any) -> None:
    _, service, caller = pair(world)
    gate: Deferred[None] = Deferred()

    @service.service("wait")
    async def wait(request: Request) -> bytes:
        await gate
        return b"done"

    call = ensureDeferred(caller.call(SERVICE, "wait", timeout=60))
    world.settle()
    stopped = service.stopService()
    world.settle(0.5)
    gate.callback(None)
    assert world.result(call).data == b"done"
    world.result(stopped)


def test_the_caller_hears_that_what_a_handler_waited_for_was_cancelled(world: Any) -> None:
    _, service, caller = pair(world)
    waiting: Deferred[bytes] = Deferred()

    @service.service("wait")
    async def wait(request: Request) -> bytes:
        return await waiting

    call = ensureDeferred(caller.call(SERVICE, "wait", timeout=60))
    world.settle()
    waiting.cancel()
    with pytest.raises(CallRefused, match="the command failed"):
        world.result(call)


def test_handlers_that_do_not_end_are_cancelled_when_the_client_stops(world: Any) -> None:
    _, service, caller = pair(world)
    service.service("sleep")(sleep)

    call = ensureDeferred(caller.call(SERVICE, "sleep", timeout=60))
    world.settle()
    stopped = service.stopService()
    with pytest.raises(CallRefused):
        world.result(call, 3)
    world.result(stopped)


@pytest.mark.parametrize("begins", ["at once", "later"])
def test_a_handler_that_waits_for_the_end_of_its_client_does_not_prevent_it(world: Any, begins: str) -> None:
    _, service, caller = pair(world)
    gate: Deferred[None] = Deferred()
    stopped: list[bool] = []

    @service.service("quit")
    async def quit(request: Request) -> bytes:
        if begins == "later":
            await gate
        await service.stopService()
        stopped.append(service.exchange.relays.is_connected)
        return b""

    call = ensureDeferred(caller.call(SERVICE, "quit", timeout=10))
    world.settle()
    gate.callback(None)
    world.settle(3)
    assert stopped == [False]
    world.result(caller.stopService())
    with pytest.raises(Stopped):
        world.result(call)
    assert not [one for one in world.network.getDelayedCalls() if one.active()]  # of an answer that is never sent


def test_a_client_stopped_in_a_turn_after_its_handler_has_answered_sends_the_answer(world: Any) -> None:
    _, service, caller = pair(world)

    @service.service("quit")
    async def quit(request: Request) -> bytes:
        service.reactor.callLater(0, service.stopService)
        return b"bye"

    assert world.result(caller.call(SERVICE, "quit", timeout=10)).data == b"bye"
    world.settle()
    assert not service.exchange.relays.is_connected


def test_a_client_that_was_stopped_can_be_started_again(world: Any) -> None:
    _, service, caller = pair(world)
    for _ in range(3):
        for client in (service, caller):
            world.result(client.stopService(), 10)
            client.startService()
        world.result(caller.when_ready())
        assert world.result(caller.call(SERVICE, "echo", b"x", timeout=5)).data == b"x"


@pytest.mark.parametrize("busy", [True, False])
def test_a_client_whose_end_is_not_waited_for_stops_nevertheless(world: Any, busy: bool) -> None:
    relay, service, caller = pair(world)
    service.service("sleep")(sleep)
    call = ensureDeferred(caller.call(SERVICE, "sleep" if busy else "echo", timeout=100))
    world.settle()
    service.stopService().addTimeout(0.001, world.network).addErrback(lambda failure: failure.trap(TimeoutError))
    world.settle(60.0)
    assert not service.exchange.relays.is_connected
    assert len(relay.tokens) == 2  # it has not come back
    if busy:
        with pytest.raises(CallRefused):
            world.result(call)
    service.startService()
    world.result(service.when_ready())
    assert world.result(caller.call(SERVICE, "echo", b"x", timeout=5)).data == b"x"
    world.settle(120.0)
    assert len(relay.tokens) == 3  # and its connections do not push each other out


@pytest.mark.parametrize("waits", [True, False])
def test_a_client_that_is_started_before_it_has_stopped_begins_then(world: Any, waits: bool) -> None:
    relay, service, caller = pair(world)
    service.service("sleep")(sleep)
    call = ensureDeferred(caller.call(SERVICE, "sleep", timeout=100))
    world.settle()
    stopping = service.stopService()
    if waits:
        stopping.addTimeout(0.001, world.network).addErrback(lambda failure: failure.trap(TimeoutError))
        world.network.advance(0.001)
    service.startService()
    ready = service.when_ready()
    assert not ready.called, "the connection is the one that is about to be closed"
    with pytest.raises(CallRefused):
        world.result(call, 10)
    world.result(ready, 10)
    world.settle(60.0)
    assert service.running and service.exchange.relays.is_connected
    assert world.result(caller.call(SERVICE, "echo", b"x", timeout=5)).data == b"x"
    assert len(relay.tokens) == 3


def test_who_waits_for_a_relay_goes_on_to_wait_when_the_client_is_started_before_it_has_stopped(world: Any) -> None:
    relay, service, caller = pair(world)
    service.service("sleep")(sleep)
    call = ensureDeferred(caller.call(SERVICE, "sleep", timeout=100))
    world.settle()
    relay.die()
    world.settle()
    ready = service.when_ready()
    stopping = service.stopService()
    service.startService()
    world.settle(10.0)
    assert stopping.called and not ready.called
    relay.come_back()
    world.result(ready, 31)
    assert service.exchange.relays.is_connected
    call.addErrback(lambda failure: failure.trap(CallRefused, CancelledError)).cancel()


def test_a_client_that_is_stopped_again_before_it_has_begun_stays_stopped(world: Any) -> None:
    relay, service, caller = pair(world)
    service.service("sleep")(sleep)
    call = ensureDeferred(caller.call(SERVICE, "sleep", timeout=100))
    world.settle()
    first = service.stopService()
    service.startService()
    ready, second = service.when_ready(), service.stopService()
    world.result(first, 10)
    world.result(second, 10)
    for failing, error in ((ready, ClientStopped), (call, CallRefused), (service.when_ready(), ClientStopped)):
        with pytest.raises(error):
            world.result(failing)
    world.settle(60.0)
    assert not service.exchange.relays.is_connected and len(relay.tokens) == 2


def test_a_client_can_be_stopped_before_anything_is_known(world: Any) -> None:
    world.registry.silent = True
    client = world.client(CALLER, world.relay())
    world.result(client.stopService())
