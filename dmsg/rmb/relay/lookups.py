"""Look-ups of twins with a limit for each network that causes them, so that one network cannot use all of them."""

from __future__ import annotations

from typing import Final

from dmsg.glue.waiters import Waiters
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.interfaces import ITwinRegistry

#: Look-ups for one network at a time: a registry that asks a chain runs 64 in all, of some 50 ms each.
LOOK_UPS_PER_NETWORK: Final = 16


class _Crowd:
    """The look-ups of one network: how many places are free, and who waits for one."""

    __slots__ = ("calling", "free", "line")

    def __init__(self, places: int) -> None:
        self.free = places
        self.line: Waiters[None] = Waiters()
        self.calling = False


class LookUps:
    """Asks ``registry``, with ``places`` look-ups at a time for each network; more have to wait. The caller limits how many."""

    def __init__(self, registry: ITwinRegistry, places: int = LOOK_UPS_PER_NETWORK) -> None:
        self._registry = registry
        self._places = places
        self._crowds: dict[str, _Crowd] = {}

    def __len__(self) -> int:
        """Networks with look-ups under way."""
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
        """Give free places to those that wait. A look-up that is answered at once calls this again, which must not recurse."""
        if crowd.calling:
            return
        crowd.calling = True
        while crowd.free and crowd.line:
            crowd.free -= 1
            crowd.line.fire_first(None)
        crowd.calling = False
        if crowd.free == self._places:
            del self._crowds[network]
