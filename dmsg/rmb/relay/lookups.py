"""Look-ups of twins with a limit for each network that causes them, so that one network cannot use all of them."""

from __future__ import annotations

from typing import Final

from twisted.internet.defer import Deferred, ensureDeferred

from dmsg.glue.line import Line
from dmsg.glue.waiters import Waiters
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.interfaces import ITwinRegistry

#: Look-ups for one network at a time: a registry that asks a chain runs 64 in all, of some 50 ms each.
LOOK_UPS_PER_NETWORK: Final = 16


class LookUps:
    """Asks ``registry``, with ``places`` look-ups at a time for each network; more have to wait. The caller limits how many."""

    def __init__(self, registry: ITwinRegistry, places: int = LOOK_UPS_PER_NETWORK) -> None:
        self._registry = registry
        self._places = places
        self._lines: dict[str, Line] = {}
        #: The callers that wait for the look-up of a twin, for each network.
        self._asking: dict[tuple[str, int], Waiters[Twin | None]] = {}

    def __len__(self) -> int:
        """Networks with look-ups under way."""
        return len(self._lines)

    async def get(self, twin: int, network: str) -> Twin | None:
        """See :class:`~dmsg.rmb.interfaces.ITwinRegistry`. Callers of one network that ask for one twin go on in their order."""
        key = network, twin
        waiters = self._asking.get(key)
        if waiters is None:
            asking: Deferred[Twin | None] = ensureDeferred(self._ask(twin, network))
            if asking.called:
                return await asking
            waiters = self._asking[key] = Waiters(asking.cancel)
            asking.addBoth(lambda found: self._asking.pop(key).fire(found))
        return await waiters.wait()

    async def _ask(self, twin: int, network: str) -> Twin | None:
        line = self._lines.get(network)
        if line is None:
            line = self._lines[network] = Line(self._places)
        await line.turn()
        try:
            return await self._registry.get(twin)
        finally:
            if line.over():
                del self._lines[network]
