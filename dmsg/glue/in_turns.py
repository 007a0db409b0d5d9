"""Work on many things, some of them in each turn of the reactor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

T = TypeVar("T")

#: Things that are worked on in one turn, of some 50 µs each.
AT_ONCE: Final = 256


async def in_turns(things: Iterable[T], work: Callable[[T], object], clock: IReactorTime) -> None:
    """Call ``work`` with each of ``things`` that are there now, :data:`AT_ONCE` in a turn, and other work comes between.

    Things may be over before their turn comes; ``work`` has to take that.
    """
    for number, thing in enumerate(list(things), 1):
        work(thing)
        if number % AT_ONCE == 0:
            await deferLater(clock, 0)
