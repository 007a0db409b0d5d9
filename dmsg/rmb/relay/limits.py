"""The limits of a relay of the Reliable Message Bus. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.http.rates import FairRate, Rate, SharedRate
from dmsg.rmb.core.limits import MAX_TOKEN_LIFETIME_S
from dmsg.sansio.rate import check_limits
from dmsg.serving.limits import AdmissionLimits


@dataclass(frozen=True, slots=True)
class RelayLimits(AdmissionLimits):
    """The limits of one relay. A login is its handshake. Every refusal is counted."""

    #: Clients get some time longer than those of other protocols: they may come through a proxy that ends TLS.
    first_byte_timeout_s: float = 5.0
    #: Sessions of one twin; with more, the one that was idle longest is closed for the newcomer.
    sessions_per_twin: int = 256
    #: The longest life a token may claim. TypeScript clients ask for 1,000 s.
    token_lifetime_s: int = MAX_TOKEN_LIFETIME_S
    #: Tokens that were used: 200 bytes each. A token is not taken from a second network. Of more, the twin with most has its
    #: oldest forgotten.
    used_tokens: int = 65_536
    #: A session that is silent is pinged after the first, and closed when nothing at all has come for the second.
    ping_after_s: float = 20.0
    dead_after_s: float = 60.0
    #: Bytes waiting for one session; what is more goes to the store, as for a session that is not connected.
    queue_bytes: int = 8 * 1024 * 1024
    #: Bytes waiting for all sessions: above it those of the network that has most are closed, the largest first.
    queued_total_bytes: int = 256 * 1024 * 1024
    #: Bytes of messages that are not complete, of all sessions: above it, the same.
    incoming_total_bytes: int = 256 * 1024 * 1024
    #: A session that has taken nothing of what waits for it is closed after this, as by the public relay.
    slow_consumer_timeout_s: float = 60.0
    #: How long a closing handshake may take.
    close_timeout_s: float = 2.0
    #: Envelopes of one session that wait for the registry, the store or federation, and their bytes; above, it is not read
    #: from. The bytes of all sessions, of which a network may have as much as it leaves free: above, requests are answered
    #: "overloaded".
    pending_per_session: int = 256
    pending_session_bytes: int = 2 * 1024 * 1024
    pending_total_bytes: int = 64 * 1024 * 1024
    #: What is fetched from the store at a time for a session that has come.
    page_envelopes: int = 100
    page_bytes: int = 256 * 1024
    #: How long an envelope may wait in the store, whatever it says itself; the public relay keeps them as long.
    stored_s: int = 3_600
    #: Twins whose sending is counted (with ``--limit``): 300 bytes each. The counts of those with sessions are never lost.
    limited_twins: int = 65_536
    #: Posts of one address, of all, and kept free for each network.
    posts_per_s_per_address: float = 500.0
    post_burst_per_address: int = 2_000
    posts_per_s: float = 5_000.0
    post_burst: int = 10_000
    posts_per_s_per_network: float = 10.0
    post_burst_per_network: int = 100
    #: Requests that are neither logins nor posts, for metrics or for pages there are none of, in the same way. A Prometheus and
    #: a web server in front ask once a second at most.
    gets_per_s_per_address: float = 20.0
    get_burst_per_address: int = 200
    gets_per_s: float = 500.0
    get_burst: int = 2_000
    gets_per_s_per_network: float = 5.0
    get_burst_per_network: int = 50
    #: New connections, in the same way: an address may need one for each post and each login that it may have.
    arrivals_per_s_per_address: float = 600.0
    arrival_burst_per_address: int = 4_000
    arrivals_per_s: float = 6_000.0
    arrival_burst: int = 20_000
    arrivals_per_s_per_network: float = 50.0
    arrival_burst_per_network: int = 500
    #: Addresses and networks of which each of these is counted: 200 bytes each.
    rate_addresses: int = 16_384

    def __post_init__(self) -> None:
        AdmissionLimits.__post_init__(self)
        check_limits(self, "rate_addresses")


def post_rate(limits: RelayLimits) -> FairRate:
    """How often each address may post."""
    return _fair(
        limits,
        (limits.posts_per_s_per_address, limits.post_burst_per_address),
        (limits.posts_per_s, limits.post_burst),
        (limits.posts_per_s_per_network, limits.post_burst_per_network),
    )


def get_rate(limits: RelayLimits) -> FairRate:
    """How often each address may ask for anything else than a login."""
    return _fair(
        limits,
        (limits.gets_per_s_per_address, limits.get_burst_per_address),
        (limits.gets_per_s, limits.get_burst),
        (limits.gets_per_s_per_network, limits.get_burst_per_network),
    )


def arrival_rate(limits: RelayLimits) -> FairRate:
    """How many connections each address may open."""
    return _fair(
        limits,
        (limits.arrivals_per_s_per_address, limits.arrival_burst_per_address),
        (limits.arrivals_per_s, limits.arrival_burst),
        (limits.arrivals_per_s_per_network, limits.arrival_burst_per_network),
    )


def _fair(limits: RelayLimits, own: Rate, total: Rate, reserved: Rate) -> FairRate:
    capacity = limits.rate_addresses
    return FairRate(own, SharedRate(total, reserved, capacity), capacity)
