"""What is in the list of a command, by the twins that have sent it."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st

from dmsg.rmb.peer.contents import Contents


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9), st.sampled_from(["push", "fail", "take", "found"]))))
def test_it_counts_what_is_in_the_list_as_far_as_it_was_told(steps: list[tuple[int, int, str]]) -> None:
    contents, there, known = Contents(), deque[tuple[int, int]](), deque[tuple[int, int]]()
    for twin, size, what in steps:
        if what == "take" and there:
            there.popleft()
        elif what == "found":
            contents.found(len(there))
            known = there.copy()
        elif what in ("push", "fail"):
            before = contents.of(twin)
            contents.push(twin, size)
            assert contents.of(twin) == (before[0] + 1, before[1] + size)
            if what == "fail":
                contents.not_pushed(twin, size)
            else:
                there.append((twin, size))
                contents.pushed(twin, size, len(there))
                known = there.copy()
        numbers, sizes = Counter(one for one, _ in known), Counter[int]()
        for one, its in known:
            sizes[one] += its
        assert [contents.of(one) for one in (1, 2, 3)] == [(numbers[one], sizes[one]) for one in (1, 2, 3)]


def test_nothing_is_left_of_twins_whose_requests_were_taken() -> None:
    contents = Contents()
    for twin in range(100):
        contents.push(twin, 1)
        contents.pushed(twin, 1, 1)
    contents.push(7, 1)
    contents.not_pushed(7, 1)
    assert len(contents._requests) == len(contents._numbers) == len(contents._bytes) == 1
    assert contents.of(99) == (1, 1)


def test_what_others_have_pushed_counts_for_none_of_ours() -> None:
    """A process before, say."""
    contents = Contents()
    contents.push(7, 5)
    contents.pushed(7, 5, 1_000)
    assert contents.of(7) == (1, 5)
    contents.found(999)
    assert contents.of(7) == (1, 5), "ours is the newest"
    contents.found(0)
    assert contents.of(7) == (0, 0)
