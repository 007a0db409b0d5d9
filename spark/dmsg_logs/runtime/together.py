"""Several Spark queries at the same time.

One thread plans and compiles each query, which ends in a few small tasks; meanwhile other queries use the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, TypeVar

_Name = TypeVar("_Name")
_Answer = TypeVar("_Answer")

#: Concurrent queries: enough to hide the waits of each, few enough to share the memory.
AT_ONCE: Final = 3


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Threads that begin calls in the order given. If the block fails, calls that have not begun are cancelled."""
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def together(calls: Mapping[_Name, Callable[[], _Answer]]) -> dict[_Name, _Answer]:
    """The results of the calls by name. Once all have ended, the first exception (in their order) is raised."""
    with workers() as pool:
        futures: dict[_Name, Future[_Answer]] = {name: pool.submit(call) for name, call in calls.items()}
        return {name: each.result() for name, each in futures.items()}
