"""How many answers are kept, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from dmsg.rmb.client.config import RmbConfig
from dmsg.rmb.client.handlers import Request
from dmsg.rmb.core.address import SessionAddress

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
