"""How many connections in vain a stranger's registrations may cost others. Pure.

Failures are what is counted: a proof takes from each budget that concerns it, and gives back when it succeeds.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from dmsg.address import address_group, is_global, network_group
from dmsg.discovery.proofs.limits import ProofLimits
from dmsg.discovery.proofs.record import RelayRecord
from dmsg.sansio.rate import RateLimiterTable

#: A proof of an address whose budget is used up waits no longer than this, in seconds, while another proof is under way
#: there: if that one succeeds, the budget is there again.
_POLL_S: Final = 1.0
#: Shortest wait for a budget, in seconds, so that a rounding error does not become a loop.
_SHORTEST_WAIT_S: Final = 0.05
#: Longest wait for a budget, in seconds, unless it is emptier still.
_LONGEST_WAIT_S: Final = 180.0

_Claims = list[tuple[RateLimiterTable[str], str]]


class ProofBudgets:
    """Failed proofs left to each target address, each target network and each source of registrations.

    A source is a network, or an address for what it registers at itself.
    """

    def __init__(self, limits: ProofLimits) -> None:
        most = limits.relays
        self._addresses: RateLimiterTable[str] = RateLimiterTable(
            limits.failures_per_address_per_s, limits.failures_per_address, most
        )
        self._networks: RateLimiterTable[str] = RateLimiterTable(
            limits.failures_per_network_per_s, limits.failures_per_network, most
        )
        self._sources: RateLimiterTable[str] = RateLimiterTable(
            limits.failures_per_source_per_s, limits.failures_per_source, most
        )
        #: What is given back, and where the proof is under way. By record, because a key that was forgotten may come back
        #: while a proof of it is under way.
        self._under_way: dict[RelayRecord, tuple[_Claims, str]] = {}
        self._busy: Counter[str] = Counter()

    def take(self, record: RelayRecord, ip: str, now: float) -> float:
        """Take what a proof of ``record`` at ``ip`` may cost: 0, or how many seconds to wait because it is not there.

        The wait doubles each time: of thousands that wait for one budget only a few can get it.
        """
        claims, address = self._claims(record, ip), address_group(ip)
        for at, (table, name) in enumerate(claims):
            if not table.take(name, now):
                for taken, its_name in claims[:at]:
                    taken.give_back(its_name)
                if self._busy[address] and table is not self._sources:
                    return _POLL_S
                wait_s = max(table.wait_s(name, now), _SHORTEST_WAIT_S)
                record.postponements += 1
                return max(wait_s, min(wait_s * 2.0 ** min(record.postponements - 1, 10), _LONGEST_WAIT_S))
        self._under_way[record] = (claims, address)
        self._busy[address] += 1
        return 0.0

    def end(self, record: RelayRecord, *, give_back: bool) -> None:
        """The proof of ``record`` is over; silent when nothing was taken for it."""
        claims, address = self._under_way.pop(record, ([], ""))
        if not address:
            return
        self._busy[address] -= 1
        if not self._busy[address]:
            del self._busy[address]
        if give_back:
            for table, name in claims:
                table.give_back(name)

    def _claims(self, record: RelayRecord, ip: str) -> _Claims:
        network = network_group(ip)
        if record.network == network:
            return []  # it was proved there
        claims: _Claims = []
        address = address_group(ip)
        is_own = bool(record.source_host) and address_group(record.source_host) == address
        if is_global(record.source_host):  # else it is on a private network, or behind a web server with all others
            # What registers itself counts for its address alone, so that no neighbour in its network uses that up.
            claims.append((self._sources, address if is_own else record.source))
        if not is_own:
            claims += [(self._addresses, address), (self._networks, network)]
        return claims
