"""The places at one member of a relay: how many each source holds, and which source gives one up.

Pure. :ref:`spec-places`. Places are lent: while there is room a source may take them all, so that a burst through one
tunnel is served. When all are taken, a newcomer gets one from the source that holds the most. Sources are groups of
addresses first and connections second, because keys are free and addresses are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar
from typing import Protocol as TypingProtocol


class Source(Hashable, TypingProtocol):
    """A connection that takes places."""

    @property
    def group(self) -> str:
        """The group of addresses it comes from."""


S = TypeVar("S", bound=Source)


class Places(Generic[S]):
    """The places that sources hold at one member."""

    __slots__ = ("_held", "count")

    def __init__(self) -> None:
        self.count = 0
        self._held: dict[S, int] = {}

    def add(self, source: S) -> None:
        """Give ``source`` one more place."""
        self._held[source] = self._held.get(source, 0) + 1
        self.count += 1

    def remove(self, source: S) -> None:
        """Take one place of ``source`` back."""
        held = self._held[source]
        if held > 1:
            self._held[source] = held - 1
        else:
            del self._held[source]
        self.count -= 1

    def __contains__(self, source: S) -> bool:
        return source in self._held

    def yielding(self, newcomer: S, *, per_source: int, per_pair: int) -> S | None:
        """The connection that has to give up a place for ``newcomer``, or ``None`` when none has to.

        It is the connection with the most places in the group with the most places, if that group has at least two more than
        the newcomer's (with one more the two groups would only swap), and the newcomer's group has fewer than ``per_source``.
        Otherwise it is the connection with the most places in the newcomer's own group, by the same rule with ``per_pair``.
        """
        groups: Counter[str] = Counter()
        for source, held in self._held.items():
            groups[source.group] += held
        own = newcomer.group
        largest = max(groups, key=groups.__getitem__, default=own)
        if groups[own] < per_source and groups[largest] >= groups[own] + 2:
            return self._most(largest)
        if own not in groups:
            return None
        most, held = self._most(own), self._held.get(newcomer, 0)
        return most if held < per_pair and self._held[most] >= held + 2 else None

    def _most(self, group: str) -> S:
        """The connection of ``group`` with the most places."""
        return max((source for source in self._held if source.group == group), key=self._held.__getitem__)
