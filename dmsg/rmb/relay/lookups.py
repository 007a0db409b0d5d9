"""Look-ups of twins with a limit for each network that causes them, so that one network cannot use all of them."""

from __future__ import annotations

from typing import Final

from twisted.internet.interfaces import IReactorTime

from dmsg.glue.line import Line
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.interfaces import ITwinRegistry

#: Look-ups for one network at a time: a registry that asks a chain runs 64 in all, of some 50 ms each.
LOOK_UPS_PER_NETWORK: Final = 16
#: Callers that use a place one after the other in a turn of the reactor, if the registry answers them at once: some 20 ms of work
#: for all places. With one for each place, a line of callers that ask for known twins might never end at a busy relay.
_AT_ONCE: Final = 16


class LookUps:
    """Asks ``registry``, with ``places`` look-ups at a time for each network; more have to wait. The caller limits how many.

    With ``clock``, those that waited are asked in a later turn of the reactor than the one in which an answer made room. Callers
    that ask for one twin then go on in their order: the registry knows it by now and answers the later ones at once.
    """

    def __init__(
        self, registry: ITwinRegistry, places: int = LOOK_UPS_PER_NETWORK, *, clock: IReactorTime | None = None
    ) -> None:
        self._registry = registry
        self._places = places
        self._clock = clock
        self._lines: dict[str, Line] = {}

    def __len__(self) -> int:
        """Networks with look-ups under way."""
        return len(self._lines)

    async def get(self, twin: int, network: str) -> Twin | None:
        """See :class:`~dmsg.rmb.interfaces.ITwinRegistry`."""
        line = self._lines.get(network)
        if line is None:
            line = self._lines[network] = Line(self._places)
        await line.turn()
        try:
            return await self._registry.get(twin)
        finally:
            if self._clock is None or not line.waiting or 0 < line.started < _AT_ONCE:
                self._over(network, line)
            else:
                self._clock.callLater(0, self._over, network, line)

    def _over(self, network: str, line: Line) -> None:
        if line.over():
            del self._lines[network]
