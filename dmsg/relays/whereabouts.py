"""The addresses of relays: from the program, from an earlier run, or from their entries in discovery."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from twisted.internet.defer import ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.address import HostPort
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.errors import DiscoveryError, EntryNotFound
from dmsg.errors import InvalidAddress, StageError
from dmsg.interfaces import IDiscovery
from dmsg.relays.candidates import Candidate
from dmsg.relays.listed import WAIT_S
from dmsg.relays.state import RelayFile

_NO_SERVER: Final = "entry is not a server's"
ANOTHER_PROTOCOL: Final = "speaks another protocol"
#: For how many seconds the entry of a relay that speaks another protocol is not looked up again, and how many such relays are
#: remembered: a peer's entry may name 64.
ANOTHER_PROTOCOL_REST_S: Final = 300.0
ANOTHER_PROTOCOL_LIMIT: Final = 1_000
#: How many addresses of relays that were looked up are kept: as many as entries of peers.
FOUND_LIMIT: Final = 1_024


class Whereabouts:
    """Finds the addresses of relays that speak ``protocol`` (:ref:`spec-entry-protocol`).

    ``pinned`` relays are not looked up. ``memory`` forgets relays whose entry is gone or cannot be used. If discovery does not
    answer, the last address of a relay is used.
    """

    def __init__(
        self,
        clock: IReactorTime,
        discovery: IDiscovery | None,
        pinned: Mapping[PublicKey, HostPort],
        memory: RelayFile | None,
        protocol: str,
    ) -> None:
        self._clock = clock
        self._discovery = discovery
        self._pinned = pinned
        self._memory = memory
        self._protocol = protocol
        #: Until when relays that speak another protocol are left alone.
        self._strangers: dict[PublicKey, float] = {}
        #: The addresses of relays when they were last looked up, the latest at the end.
        self._found: OrderedDict[PublicKey, HostPort] = OrderedDict()

    def left_alone_until(self, relay: PublicKey) -> float:
        """Until when ``relay`` is not to be connected to, because it speaks another protocol; in seconds on the clock."""
        return self._strangers.get(relay, 0.0)

    async def find(self, candidate: Candidate) -> HostPort:
        """The address of ``candidate``. Raises ``StageError``."""
        relay, address = candidate.public_key, candidate.address
        if relay in self._pinned:
            return self._pinned[relay]
        if address is not None and not candidate.remembered:
            return address
        address = self._found.get(relay, address)
        looking = ensureDeferred(self._look_up(relay))
        if address is None:
            return await looking
        try:
            return await looking.addTimeout(WAIT_S, self._clock, _unavailable)
        except StageError as error:
            wrong = (_NO_SERVER, ANOTHER_PROTOCOL)
            if not isinstance(error.error, EntryNotFound | InvalidAddress) and error.reason not in wrong:
                return address  # discovery is gone; the last address may still be right
            self._found.pop(relay, None)
            if self._memory is not None:
                self._memory.forget(relay)
            raise

    async def _look_up(self, relay: PublicKey) -> HostPort:
        if self._discovery is None:
            raise StageError("discovery", "server is not pinned and there is no discovery")
        try:
            entry = await self._discovery.get_entry(relay)
        except EntryNotFound as error:
            raise StageError("discovery", "server has no entry", error) from None
        except DiscoveryError as error:
            raise StageError("discovery", "unavailable", error) from None
        if entry.server is None:
            raise StageError("discovery", _NO_SERVER)
        if entry.protocol != self._protocol:
            if len(self._strangers) >= ANOTHER_PROTOCOL_LIMIT:
                self._strangers.clear()
            self._strangers[relay] = self._clock.seconds() + ANOTHER_PROTOCOL_REST_S
            raise StageError("connect", ANOTHER_PROTOCOL)
        try:
            address = self._found[relay] = entry.server.host_port
        except InvalidAddress as error:
            raise StageError("discovery", "entry has no usable address", error) from None
        self._found.move_to_end(relay)
        if len(self._found) > FOUND_LIMIT:
            self._found.popitem(last=False)
        return address


def _unavailable(result: object, timeout_s: float) -> Failure:
    return Failure(StageError("discovery", "unavailable"))
