"""How many answers are kept, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.defer import Deferred, ensureDeferred

from dmsg.rmb.client.config import RmbConfig
from dmsg.rmb.client.errors import CallRefused
from dmsg.rmb.client.handlers import Request
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import PeerCode

CALLER, SERVICE = 1, 2


class Scene:
    """A service whose requests can be sent again."""

    def __init__(self, world: Any, **limits: int) -> None:
        self.world = world
        self.relay = world.relay()
        self.service = world.client(SERVICE, self.relay, config=RmbConfig(**limits))
        self.handled = 0

        @self.service.service("echo")
        async def echo(request: Request) -> bytes:
            self.handled += 1
            return request.data

        self.caller = world.client(CALLER, self.relay)

    def call(self, size: int = 10, timeout: float = 30) -> bytes:
        """Have a call answered; gives its request."""
        self.world.result(self.caller.call(SERVICE, "echo", bytes(size), timeout=timeout))
        return self.relay.seen[-2].SerializeToString()

    def again(self, request: bytes) -> int:
        """Deliver ``request`` again; gives how many answers come."""
        before = len(self.relay.seen)
        self.relay.deliver(request, SessionAddress(SERVICE))
        self.world.settle(0.2)
        return len(self.relay.seen) - before

    @property
    def kept(self) -> int:
        return len(self.service.exchange._answers)


@pytest.mark.parametrize("limits", [{"answers": 3}, {"answers_bytes": 3_000}])
def test_above_a_limit_the_oldest_answers_are_forgotten(world: Any, limits: dict[str, int]) -> None:
    scene = Scene(world, **limits)
    requests = [scene.call(800) for _ in range(6)]
    assert [scene.again(request) for request in requests] == [0, 0, 0, 1, 1, 1]
    assert scene.handled == 6


@pytest.mark.parametrize("limits", [{"answers": 5}, {"answers_bytes": 5_000}])
def test_a_twin_that_asks_without_end_does_not_lose_another_its_answers(world: Any, limits: dict[str, int]) -> None:
    scene = Scene(world, **limits)
    request = scene.call(800)
    flooding = world.client(3, scene.relay)
    for _ in range(20):
        world.result(flooding.call(SERVICE, "echo", bytes(800)))
    assert scene.again(request) == 1
    assert scene.handled == 21 and scene.kept <= 5


def test_an_answer_is_forgotten_when_it_expires(world: Any) -> None:
    scene = Scene(world)
    scene.call(timeout=5)
    request = scene.call(timeout=100)
    assert scene.kept == 2
    world.settle(30)
    assert scene.kept == 1
    assert scene.again(request) == 1
    world.settle(100)
    assert scene.kept == 0


def test_an_answer_too_large_to_be_kept_is_sent_nevertheless(world: Any) -> None:
    scene = Scene(world, answers_bytes=100)
    request = scene.call(1000)
    assert scene.again(request) == 0
    assert scene.kept == 0


def test_answers_that_are_made_faster_than_a_relay_takes_them_are_not_lost(world: Any) -> None:
    scene = Scene(world, answers_bytes=20_000, relay_queue_bytes=1)
    calls = [ensureDeferred(scene.caller.call(SERVICE, "echo", bytes(5_000), timeout=30)) for _ in range(60)]
    world.settle(10)
    assert [len(call.result.data) for call in calls] == 60 * [5_000]  # type: ignore[attr-defined]
    assert scene.handled == 60 and scene.kept <= 4


def test_nothing_more_is_begun_while_no_relay_takes_the_answers_and_what_has_no_room_is_refused(world: Any) -> None:
    scene = Scene(world, answers_bytes=20_000, relay_queue_bytes=1, handlers=60, waiting_requests=100)
    gate: Deferred[None] = Deferred()
    begun = []

    @scene.service.service("slow")
    async def slow(request: Request) -> bytes:
        begun.append(request.uid)
        waits: Deferred[None] = Deferred()
        gate.addCallback(waits.callback)
        await waits
        return bytes(5_000)

    calls = [ensureDeferred(scene.caller.call(SERVICE, "slow", timeout=60)) for _ in range(90)]
    for call in calls:
        call.addErrback(lambda failure: failure.value)
    world.settle()
    assert len(begun) == 30
    pipe = world.network.pipes_to(scene.relay.port)[0]
    pipe.freeze()
    gate.callback(None)
    world.settle(5)
    assert len(begun) < 60  # 64 KiB are under way
    assert scene.service.exchange._answers.held_bytes <= 100_000
    pipe.thaw()
    world.settle(10)
    outcomes = [call.result for call in calls]  # type: ignore[attr-defined]
    refused = [one for one in outcomes if isinstance(one, CallRefused)]
    assert {one.code for one in refused} <= {PeerCode.BUSY} and len(refused) < 30
    assert len(begun) == 90 and all(len(one.data) == 5_000 for one in outcomes if one not in refused)


def test_short_answers_that_no_relay_takes_are_not_lost_either(world: Any) -> None:
    """There are more of them than are kept when they have been sent, and they have few bytes."""
    scene = Scene(world, answers=20, relay_queue_bytes=1, handlers=20, waiting_requests=400)
    gate: Deferred[None] = Deferred()

    @scene.service.service("slow")
    async def slow(request: Request) -> bytes:
        waits: Deferred[None] = Deferred()
        gate.addCallback(waits.callback)
        await waits
        return bytes(1_000)

    calls = [ensureDeferred(scene.caller.call(SERVICE, "slow", timeout=60)) for _ in range(150)]
    for call in calls:
        call.addErrback(lambda failure: failure.value)
    world.settle()
    pipe = world.network.pipes_to(scene.relay.port)[0]
    pipe.freeze()
    gate.callback(None)
    world.settle(5)
    assert scene.service.exchange._answers.held_bytes < 80_000
    pipe.thaw()
    world.settle(10)
    assert [len(call.result.data) if call.called else 0 for call in calls] == 150 * [1_000]  # type: ignore[attr-defined]
