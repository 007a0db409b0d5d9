"""Limits for failed connections to others that a stranger's registrations cause. Pure.

Only failures count: a proof takes a token of each budget that concerns it, and gives the tokens back when it succeeds.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from dmsg.address import address_group, is_global, network_group
from dmsg.discovery.proofs.limits import ProofLimits
from dmsg.discovery.proofs.record import RelayRecord
from dmsg.sansio.rate import RateLimiterTable

#: Longest wait in seconds for the used-up budget of an address while another proof is under way there: if that proof
#: succeeds, its token comes back.
_POLL_S: Final = 1.0
#: Shortest wait for a budget, in seconds, so that a rounding error does not become a loop.
_SHORTEST_WAIT_S: Final = 0.05
#: Longest wait for a budget, in seconds, unless it is emptier still.
_LONGEST_WAIT_S: Final = 180.0

_Claims = list[tuple[RateLimiterTable[str], str]]


class ProofBudgets:
    """Budgets of failed proofs for each target address, each target network and each source of registrations.

    A source is a network; for relays that an address registers at itself, it is that address.
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
        #: The tokens to give back, and the address of the proof that is under way. By record, because a forgotten key may come
        #: back while its proof is under way.
        self._under_way: dict[RelayRecord, tuple[_Claims, str]] = {}
        self._busy: Counter[str] = Counter()

    def take(self, record: RelayRecord, ip: str, now: float) -> float:
        """Take the tokens for a proof of ``record`` at ``ip``. Returns 0, or the seconds to wait if a budget is used up.

        The wait doubles each time, because only a few of thousands that wait for one budget can get a token.
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
            return []  # already proved there
        claims: _Claims = []
        address = address_group(ip)
        is_own = bool(record.source_host) and address_group(record.source_host) == address
        if is_global(record.source_host):  # else it is on a private network, or behind a web server with all others
            # A relay that registers itself counts for its address alone, so that neighbours cannot use its budget up.
            claims.append((self._sources, address if is_own else record.source))
        if not is_own:
            claims += [(self._addresses, address), (self._networks, network)]
        return claims
