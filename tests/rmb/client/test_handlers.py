"""Handlers at work and requests that wait for them."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock

from dmsg.rmb.client.config import RmbConfig
from dmsg.rmb.client.errors import Refusal
from dmsg.rmb.client.handlers import Handlers, Reply, Request
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import PeerCode


class Scene:
    """Handlers of which each waits until it is told what to answer."""

    def __init__(self, clock: Clock, **limits: int) -> None:
        self.handlers = Handlers(clock, RmbConfig(**limits))
        self.working: dict[str, Deferred[bytes]] = {}
        self.answers: dict[str, bytes | int] = {}
        self.handlers.add("wait", self.wait)

    async def wait(self, request: Request) -> bytes:
        gate = self.working[request.uid] = Deferred()
        try:
            return await gate
        finally:
            del self.working[request.uid]

    def ask(self, uid: str, twin: int = 1, remaining_s: int = 10, size: int = 0) -> None:
        def respond(answer: Reply | Refusal) -> None:
            assert uid not in self.answers
            self.answers[uid] = answer.data if isinstance(answer, Reply) else answer.code

        source = SessionAddress(twin)
        self.handlers.take(Request("wait", bytes(size), source, uid, None, "", True, remaining_s), respond)


def test_no_more_are_at_work_than_may_be_and_twins_take_turns(clock: Clock) -> None:
    scene = Scene(clock, handlers=2)
    for uid in ("a1", "a2", "a3", "b1", "b2", "c1"):
        scene.ask(uid, ord(uid[0]))
    order = []
    while scene.working:
        assert len(scene.working) <= 2
        uid = next(iter(scene.working))
        order.append(uid)
        scene.working[uid].callback(b"")
    assert order == ["a1", "b1", "a2", "b2", "c1", "a3"]
    assert len(scene.answers) == 6


def test_what_is_over_before_its_turn_is_not_begun(clock: Clock) -> None:
    scene = Scene(clock, handlers=1)
    scene.ask("first", remaining_s=20)
    scene.ask("short", remaining_s=5)
    scene.ask("long", remaining_s=20)
    clock.advance(6)
    scene.working["first"].callback(b"1")
    assert list(scene.working) == ["long"]
    scene.working["long"].callback(b"2")
    assert scene.answers == {"first": b"1", "long": b"2"}


def test_a_handler_at_work_is_cancelled_in_its_time_and_the_next_begins(clock: Clock) -> None:
    scene = Scene(clock, handlers=1)
    scene.ask("first", remaining_s=5)
    scene.ask("second", remaining_s=20)
    clock.advance(5)
    assert list(scene.working) == ["second"]
    assert scene.answers == {}
    scene.working["second"].callback(b"")


@pytest.mark.parametrize("says", [Refusal(PeerCode.HANDLER_FAILED, "I was cancelled"), ValueError(), CancelledError()])
def test_what_a_handler_says_of_a_request_that_has_expired_is_not_sent(
    clock: Clock, logged_errors: Any, says: Exception
) -> None:
    class Says(Scene):
        async def wait(self, request: Request) -> bytes:
            try:
                return await super().wait(request)
            except CancelledError:
                raise says from None

    scene = Says(clock)
    scene.ask("short", remaining_s=5)
    scene.ask("long", remaining_s=20)
    clock.advance(5)
    assert list(scene.working) == ["long"] and scene.answers == {}
    Deferred.fromCoroutine(scene.handlers.stop(1.0))
    clock.advance(1.0)
    assert scene.answers == {"long": PeerCode.HANDLER_FAILED}
    logged_errors.flush(ValueError)


def test_a_handler_that_holds_everything_up_until_its_time_is_over_keeps_no_place(clock: Clock) -> None:
    class Slow(Scene):
        async def wait(self, request: Request) -> bytes:
            if request.uid == "first":
                clock.advance(request.remaining_s + 1)
            return await super().wait(request)

    scene = Slow(clock, handlers=1)
    scene.ask("first")
    clock.advance(0)
    assert scene.working == {} and scene.answers == {}
    scene.ask("second")
    scene.working["second"].callback(b"2")
    assert scene.answers == {"second": b"2"}


def test_bytes_that_wait_are_bounded(clock: Clock) -> None:
    scene = Scene(clock, handlers=1, waiting_bytes=100_000)
    scene.ask("first")
    for number in range(10):
        scene.ask(f"large{number}", twin=2, size=20_000)
    scene.ask("small", twin=3)
    assert sum(code == PeerCode.BUSY for code in scene.answers.values()) == 6
    assert "small" not in scene.answers
    for _ in range(6):
        next(iter(scene.working.values())).callback(b"")
    assert scene.answers["small"] == b""


def test_short_requests_of_many_twins_do_not_displace_a_long_one_of_another(clock: Clock) -> None:
    scene = Scene(clock, handlers=1, waiting_requests=100)
    scene.ask("first")
    for number in range(200):
        scene.ask(f"before{number}", twin=10 + number % 10)
    scene.ask("long", twin=2, size=900_000)
    for number in range(200):
        scene.ask(f"behind{number}", twin=10 + number % 10)
    assert "long" not in scene.answers
    for _ in range(12):
        next(iter(scene.working.values())).callback(b"")
    assert scene.answers["long"] == b""


def test_what_waits_and_has_expired_is_not_refused_any_more(clock: Clock) -> None:
    scene = Scene(clock, handlers=1, waiting_requests=2)
    scene.ask("first", twin=1, remaining_s=50)
    scene.ask("displaced", twin=2, remaining_s=5)
    scene.ask("waiting", twin=2, remaining_s=5)
    clock.advance(6)
    scene.ask("next", twin=3, remaining_s=50)
    scene.ask("last", twin=3, remaining_s=50)
    Deferred.fromCoroutine(scene.handlers.stop(0.0))
    clock.advance(1)
    assert scene.answers == {
        "first": PeerCode.HANDLER_FAILED,
        "next": PeerCode.BUSY,
        "last": PeerCode.BUSY,
    }


def test_at_the_end_what_waits_is_refused_and_what_works_gets_a_moment(clock: Clock) -> None:
    scene = Scene(clock, handlers=2)
    scene.ask("quick", twin=1)
    scene.ask("slow", twin=2)
    scene.ask("waiting", twin=1)
    ended: Any = Deferred.fromCoroutine(scene.handlers.stop(2.0))
    scene.ask("late", twin=3)
    assert scene.answers == {"waiting": PeerCode.BUSY, "late": PeerCode.BUSY}
    scene.working["quick"].callback(b"done")
    clock.advance(1.9)
    assert not ended.called
    clock.advance(0.2)
    assert ended.called
    assert scene.answers == {
        "waiting": PeerCode.BUSY,
        "late": PeerCode.BUSY,
        "quick": b"done",
        "slow": PeerCode.HANDLER_FAILED,
    }


@pytest.mark.parametrize("answer", [b"x", bytearray(b"x"), memoryview(b"x")])
def test_a_handler_gives_bytes_of_any_kind(clock: Clock, answer: Any) -> None:
    scene = Scene(clock)
    scene.ask("one")
    scene.working["one"].callback(answer)
    assert scene.answers == {"one": b"x"}


@pytest.mark.parametrize("answer", [None, "text", 5, [1]])
def test_anything_else_is_a_fault_of_the_handler(clock: Clock, logged_errors: Any, answer: Any) -> None:
    scene = Scene(clock)
    scene.ask("one")
    scene.working["one"].callback(answer)
    assert scene.answers == {"one": PeerCode.HANDLER_FAILED}
    assert len(logged_errors.flush(TypeError)) == 1
