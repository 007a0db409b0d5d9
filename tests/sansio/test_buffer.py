"""ByteQueue against the simplest model there is: one bytes object."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmsg.sansio.buffer import ByteQueue

actions = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.binary(max_size=12)),
        st.tuples(st.just("take"), st.integers(1, 30)),
        st.tuples(st.just("clear"), st.none()),
    ),
    max_size=60,
)


@given(actions)
def test_behaves_like_one_bytes_object(steps: list[tuple[str, object]]) -> None:
    queue, model = ByteQueue(), b""
    for name, argument in steps:
        if name == "append":
            assert isinstance(argument, bytes)
            queue.append(argument)
            model += argument
        elif name == "take":
            assert isinstance(argument, int)
            assert queue.take(argument) == model[:argument]
            model = model[argument:]
        else:
            queue.clear()
            model = b""
        assert len(queue) == len(model)
        assert bool(queue) == bool(model)
    assert queue.take(10_000) == model
    assert len(queue) == 0


def test_a_chunk_that_fits_is_passed_on_without_a_copy() -> None:
    queue, chunk = ByteQueue(), bytes(1000)
    queue.append(chunk)
    assert queue.take(1000) is chunk


def test_takes_less_than_a_chunk_the_rest_of_it_and_the_next_whole_one() -> None:
    queue = ByteQueue()
    queue.append(b"abcdef")
    queue.append(b"ghi")
    assert queue.take(2) == b"ab"
    assert queue.take(4) == b"cdef"
    assert queue.take(4) == b"ghi"
    assert queue.take(4) == b""
