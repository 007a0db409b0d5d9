"""Limits of the proofs that discovery makes before it lists relays. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.sansio.rate import check_limits, check_rates


@dataclass(frozen=True, slots=True)
class ProofLimits:
    """When discovery proves relays before it lists them, and the cost that this may have for others."""

    #: A listed relay is proved again after this many seconds, up to a fifth more or less: a dead relay is listed no longer.
    interval_s: float = 180.0
    #: A listed relay that was not reached, but is not certainly gone (port closed, another key there), is tried this often in
    #: all, with this many seconds in between, before it leaves the list: a flood of connections that keeps it busy for a
    #: moment does not take it off.
    attempts: int = 3
    attempt_pause_s: float = 3.0
    #: Timeout of one proof with name resolution, TCP and handshake: long enough for two lost SYNs.
    timeout_s: float = 4.0
    #: Proofs at one time, and proofs begun per second in the long run and at once: at 1 ms of work each, a tenth of a core.
    concurrent: int = 64
    proofs_per_s: float = 100.0
    proof_burst: float = 200.0
    #: The pause after a first failed proof of a key, in seconds, doubled with each further one up to the interval.
    retry_first_s: float = 10.0
    #: Failed proofs towards one address (/64 in IPv6) that strangers registered: at once, and per second in the long
    #: run. A relay that registers itself from its own address does not count, nor does one that is proved in that network.
    failures_per_address: float = 3.0
    failures_per_address_per_s: float = 1 / 60
    #: The same towards one network (/24, /48).
    failures_per_network: float = 16.0
    failures_per_network_per_s: float = 0.1
    #: Failed proofs of relays that one network (/24, /48) registered, and of those that one address registered at itself.
    failures_per_source: float = 64.0
    failures_per_source_per_s: float = 0.5
    #: Relays that are remembered in all, and of one network or domain: one for each address of a /24.
    relays: int = 20_000
    relays_per_network: int = 256
    #: Name resolutions at one time, in all and of one source: each holds a thread until it ends.
    resolving: int = 4
    resolving_per_source: int = 2
    #: How often the store is searched for relays that another process registered, in seconds, and how many new ones are
    #: read at a time.
    sync_s: float = 10.0
    sync_relays: int = 1000
    #: Seconds for which an answer waits for first proofs when there is nothing to list yet, or discovery has just started.
    first_proofs_s: float = 1.0

    def __post_init__(self) -> None:
        if min(self.interval_s, self.timeout_s, self.sync_s, self.retry_first_s) <= 0:
            raise ValueError("times of proofs must be more than 0 (list_unproven switches proofs off)")
        check_limits(self, "failures_per_address", "failures_per_network", "failures_per_source", "relays")
        check_limits(self, "concurrent", "relays_per_network", "resolving", "resolving_per_source", "sync_relays")
        check_rates(self, "proofs_per_s")
