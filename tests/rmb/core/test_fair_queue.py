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


def test_a_large_item_of_one_source_stays_when_many_small_ones_of_others_are_too_many() -> None:
    queue: FairQueue[str, str] = FairQueue(100, 1000)
    for number in range(200):
        queue.put(f"a{number % 10}", f"a{number}", 1)
    assert len(queue) == 100
    assert queue.put("b", "b0", 100) == ["a90"]
    for number in range(200):
        assert "b0" not in queue.put(f"a{number % 10}", f"again{number}", 1)
    assert "b0" in drain(queue)


def test_many_small_items_of_one_source_stay_when_those_of_others_are_too_large() -> None:
    queue: FairQueue[str, str] = FairQueue(100, 1000)
    for number in range(50):
        assert queue.put("a", f"a{number}", 1) == []
    for number in range(20):
        assert not any(lost.startswith("a") for lost in queue.put(f"b{number}", f"b{number}", 100))
    assert sum(one.startswith("a") for one in drain(queue)) == 50


def test_among_equal_sources_the_one_that_comes_last_gets_no_place() -> None:
    queue: FairQueue[str, str] = FairQueue(3, 30)
    for source in "abc":
        assert queue.put(source, source, 5) == []
    assert queue.put("d", "d", 1) == ["d"]
    queue = FairQueue(10, 15)
    for source in "abc":
        assert queue.put(source, source, 5) == []
    assert queue.put("d", "d", 5) == ["d"]
    assert drain(queue) == ["a", "b", "c"]


def test_making_room_takes_no_longer_with_thousands_of_sources() -> None:
    def looked_at(sources: int) -> int:
        queue: FairQueue[Counted, str] = FairQueue(sources, 1 << 30)
        for number in range(sources):
            queue.put(Counted(number), "", 1)
        queue.put(Counted(0), "", 1)  # counts them all, once until the queue is half empty
        Counted.looked_at = 0
        for number in range(100):
            queue.put(Counted(number), "", 1)
        return Counted.looked_at

    assert looked_at(4_000) <= 2 * looked_at(40)


class Counted(int):
    """A source that counts how often it is looked at."""

    looked_at = 0

    def __hash__(self) -> int:
        Counted.looked_at += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)
