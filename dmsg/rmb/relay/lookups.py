"""Twins that a relay looks up for the networks that ask for them: one network cannot take all look-ups there are."""

from __future__ import annotations

from typing import Final

from dmsg.glue.waiters import Waiters
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.interfaces import ITwinRegistry

#: Look-ups for one network at a time: a registry that asks a chain has 64 for all, of some 50 ms each.
LOOK_UPS_PER_NETWORK: Final = 16


class _Crowd:
    """Those of one network: how many places are free, and who waits for one."""

    __slots__ = ("calling", "free", "line")

    def __init__(self, places: int) -> None:
        self.free = places
        self.line: Waiters[None] = Waiters()
        self.calling = False


class LookUps:
    """Asks ``registry``, for each network ``places`` questions at a time; the next ones wait. The caller bounds how many."""

    def __init__(self, registry: ITwinRegistry, places: int = LOOK_UPS_PER_NETWORK) -> None:
        self._registry = registry
        self._places = places
        self._crowds: dict[str, _Crowd] = {}

    def __len__(self) -> int:
        """Networks for which something is asked."""
        return len(self._crowds)

    async def get(self, twin: int, network: str) -> Twin | None:
        """See :class:`~dmsg.rmb.interfaces.ITwinRegistry`."""
        crowd = self._crowds.get(network)
        if crowd is None:
            crowd = self._crowds[network] = _Crowd(self._places)
        if crowd.free and not crowd.line:
            crowd.free -= 1
        else:
            await crowd.line.wait()
        try:
            return await self._registry.get(twin)
        finally:
            crowd.free += 1
            self._call(crowd, network)

    def _call(self, crowd: _Crowd, network: str) -> None:
        """Give free places to who waits. One that is answered at once comes back here, and must not go on from there."""
        if crowd.calling:
            return
        crowd.calling = True
        while crowd.free and crowd.line:
            crowd.free -= 1
            crowd.line.fire_first(None)
        crowd.calling = False
        if crowd.free == self._places:
            del self._crowds[network]
