"""Sources share a queue: they take turns, and what does not fit is lost by the one with the most."""

from __future__ import annotations

from dmsg.rmb.core.fair_queue import FairQueue


def drain(queue: FairQueue[str, str]) -> list[str]:
    taken = []
    while (one := queue.take()) is not None:
        taken.append(one)
    return taken


def test_sources_take_turns() -> None:
    queue: FairQueue[str, str] = FairQueue(10, 1000)
    for source, thing in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")):
        assert queue.put(source, thing, 1) == []
    assert drain(queue) == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert (len(queue), queue.size_bytes) == (0, 0)


def test_above_the_number_the_largest_source_loses_its_latest() -> None:
    queue: FairQueue[str, str] = FairQueue(3, 1000)
    for number in range(3):
        queue.put("a", f"a{number}", 1)
    assert queue.put("a", "a3", 1) == ["a3"]
    assert queue.put("b", "b0", 1) == ["a2"]
    assert drain(queue) == ["a0", "b0", "a1"]


def test_above_the_bytes_as_many_leave_as_must() -> None:
    queue: FairQueue[str, str] = FairQueue(100, 100)
    for number in range(5):
        queue.put("a", f"a{number}", 20)
    assert queue.put("b", "b0", 45) == ["a4", "a3", "a2"]
    assert queue.size_bytes == 85
    assert queue.put("c", "c0", 101) == ["c0"]


def test_a_source_may_be_passed_over() -> None:
    queue: FairQueue[str, str] = FairQueue(10, 1000)
    queue.put("a", "a0", 1)
    queue.put("b", "b0", 1)
    assert queue.take(lambda source: source != "a") == "b0"
    assert queue.take(lambda source: source != "a") is None
    assert drain(queue) == ["a0"]
