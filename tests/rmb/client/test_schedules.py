"""Whatever happens to the relays, and in whatever order: a call ends in its time, and nothing is done twice."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from dmsg.rmb.client.errors import CallError
from dmsg.rmb.client.handlers import Request

from .conftest import FakeRelay, World

CALLER, SERVICE = 1, 2
#: What may happen to one of two relays.
TROUBLE = st.tuples(st.sampled_from(["die", "come back", "drop", "swallow", "double", "honest"]), st.integers(0, 1))
CALL = st.tuples(st.just("call"), st.floats(0.05, 20.0))
PAUSE = st.tuples(st.just("pause"), st.floats(0.0, 8.0))


def trouble(relay: FakeRelay, what: str) -> None:
    if what == "die" and relay.is_listening:
        relay.die()
    elif what == "come back" and not relay.is_listening:
        relay.come_back()
    elif what == "drop":
        relay.drop_connections()
    elif what == "swallow":
        relay.mangle = lambda message, envelope: []
    elif what == "double":
        relay.mangle = lambda message, envelope: [message, message]
    elif what == "honest":
        relay.mangle = lambda message, envelope: [message]


@given(st.lists(st.one_of(TROUBLE, CALL, PAUSE), max_size=40))
@settings(max_examples=100)
def test_every_call_ends_in_its_time_and_every_request_is_handled_once_at_most(schedule: list[tuple[Any, Any]]) -> None:
    world = World()
    relays = world.relay(9000), world.relay(9001)
    service, caller = world.client(SERVICE, *relays), world.client(CALLER, *relays)
    handled: list[bytes] = []
    outcomes: dict[int, Any] = {}

    @service.service("echo")
    async def echo(request: Request) -> bytes:
        handled.append(request.data)
        if len(handled) % 3 == 0:
            await deferLater(world.network, 0.5)  # type: ignore[arg-type]
        return request.data

    def call(number: int, timeout_s: float) -> None:
        due = world.network.seconds() + timeout_s

        def ended(result: Any) -> None:
            assert number not in outcomes
            assert world.network.seconds() <= due + 1e-6
            outcomes[number] = result

        made: Deferred[Any] = ensureDeferred(caller.call(SERVICE, "echo", b"%d" % number, timeout=timeout_s))
        made.addBoth(ended)

    calls = 0
    for what, argument in schedule:
        if what == "call":
            calls += 1
            call(calls, argument)
        elif what == "pause":
            world.settle(argument)
        else:
            trouble(relays[argument], what)
    world.settle(21)
    assert sorted(outcomes) == list(range(1, calls + 1))
    for number, outcome in outcomes.items():
        if isinstance(outcome, Failure):
            assert outcome.check(CallError), outcome
        else:
            assert outcome.data == b"%d" % number
    assert len(handled) == len(set(handled))
    # With one good relay, all is well again.
    trouble(relays[0], "honest")
    trouble(relays[0], "come back")
    world.settle(61)
    assert world.result(ensureDeferred(caller.call(SERVICE, "echo", b"last", timeout=70)), 70).data == b"last"
    assert not caller.exchange.relays.in_haste
    world.stop()
    assert not [one for one in world.network.getDelayedCalls() if one.active()]
