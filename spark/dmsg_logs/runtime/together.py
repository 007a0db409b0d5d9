"""Several questions to Spark at the same time.

Every one of them is planned and compiled by one thread, and ends in a few small tasks; meanwhile others use the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, TypeVar

_Name = TypeVar("_Name")
_Answer = TypeVar("_Answer")

#: So many at once: enough to hide what each of them waits for, few enough to share the memory.
AT_ONCE: Final = 3


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Threads that begin what they are given in its order. If the block fails, what has not begun never will."""
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def together(calls: Mapping[_Name, Callable[[], _Answer]]) -> dict[_Name, _Answer]:
    """What the calls return, by the same names. The first exception, in their order, is raised when all have ended."""
    with workers() as pool:
        futures: dict[_Name, Future[_Answer]] = {name: pool.submit(call) for name, call in calls.items()}
        return {name: each.result() for name, each in futures.items()}
