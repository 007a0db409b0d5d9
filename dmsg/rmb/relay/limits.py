"""The limits of a relay of the Reliable Message Bus. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.http.rates import FairRate, Rate, SharedRate
from dmsg.rmb.core.limits import MAX_TOKEN_LIFETIME_S
from dmsg.sansio.rate import check_limits, check_rates
from dmsg.serving.limits import AdmissionLimits


@dataclass(frozen=True, slots=True)
class RelayLimits(AdmissionLimits):
    """The limits of one relay. A login is its handshake. Refused logins, posts and envelopes are counted."""

    #: Clients get more time than those of other protocols: they may come through a proxy that ends TLS.
    first_byte_timeout_s: float = 5.0
    #: Sessions of one twin; above that, a new session closes the one that was idle longest.
    sessions_per_twin: int = 256
    #: The longest lifetime that a token may claim. TypeScript clients ask for 1,000 s.
    token_lifetime_s: int = MAX_TOKEN_LIFETIME_S
    #: Used tokens that the relay remembers, 200 bytes each, to refuse them from a second network. Above this number it forgets
    #: the oldest of the twin with the most.
    used_tokens: int = 65_536
    #: A silent session is pinged after the first time, and closed when nothing at all has come for the second.
    ping_after_s: float = 20.0
    dead_after_s: float = 60.0
    #: Bytes queued for one session; more goes to the store, as for a session that is not connected.
    queue_bytes: int = 8 * 1024 * 1024
    #: Bytes queued for all sessions; above that, sessions of the network with the most are closed, the largest first, until 1/64
    #: of the limit is free.
    queued_total_bytes: int = 256 * 1024 * 1024
    #: Bytes of incomplete messages from all sessions; above that, sessions are closed in the same way.
    incoming_total_bytes: int = 256 * 1024 * 1024
    #: A session that has read nothing of its queue is closed after this time, as by the public relay.
    slow_consumer_timeout_s: float = 60.0
    #: How long a closing handshake may take.
    close_timeout_s: float = 2.0
    #: Envelopes of one session that wait for the registry, the store or federation, and their bytes; above that, the relay
    #: stops reading from the session. The third limit is for all sessions, and a network may use as much of it as it leaves
    #: free; above that, requests are answered "overloaded". Envelopes that wait until earlier ones for their sessions are in the
    #: store do not count for these limits, and have as much as the third beside it, by the networks of the sessions they are for.
    pending_per_session: int = 256
    pending_session_bytes: int = 2 * 1024 * 1024
    pending_total_bytes: int = 64 * 1024 * 1024
    #: Envelopes and bytes that are read from the store at a time for a session that has connected.
    page_envelopes: int = 100
    page_bytes: int = 256 * 1024
    #: How long an envelope may wait in the store, whatever its own lifetime; the public relay has the same limit.
    stored_s: int = 3_600
    #: Twins for which the relay keeps a rate limit (with ``--limit``): 300 bytes each. Twins with sessions always keep theirs.
    limited_twins: int = 65_536
    #: Posts of one address, of all addresses, and reserved for each network.
    posts_per_s_per_address: float = 500.0
    post_burst_per_address: int = 2_000
    posts_per_s: float = 5_000.0
    post_burst: int = 10_000
    posts_per_s_per_network: float = 10.0
    post_burst_per_network: int = 100
    #: Requests that are neither logins nor posts, such as for metrics or missing pages, in the same way. A Prometheus and a web
    #: server in front ask once a second at most.
    gets_per_s_per_address: float = 20.0
    get_burst_per_address: int = 200
    gets_per_s: float = 500.0
    get_burst: int = 2_000
    gets_per_s_per_network: float = 5.0
    get_burst_per_network: int = 50
    #: New connections, in the same way: an address may need one for each post and each login.
    arrivals_per_s_per_address: float = 600.0
    arrival_burst_per_address: int = 4_000
    arrivals_per_s: float = 6_000.0
    arrival_burst: int = 20_000
    arrivals_per_s_per_network: float = 50.0
    arrival_burst_per_network: int = 500
    #: Addresses and networks that each of these rate limits remembers: 200 bytes each.
    rate_addresses: int = 16_384

    def __post_init__(self) -> None:
        AdmissionLimits.__post_init__(self, "slow_consumer_timeout_s")
        check_limits(
            self,
            *("rate_addresses", "sessions_per_twin", "token_lifetime_s", "page_envelopes"),
            *("queued_total_bytes", "incoming_total_bytes", "pending_total_bytes"),
        )
        # not the totals: a network has its own rate beside them
        check_rates(self, "posts_per_s_per_address", "gets_per_s_per_address", "arrivals_per_s_per_address")
        if not 0 < self.ping_after_s < self.dead_after_s:
            raise ValueError("ping_after_s must be more than 0, and less than dead_after_s")


def post_rate(limits: RelayLimits) -> FairRate:
    """How often each address may post."""
    return _fair(
        limits,
        (limits.posts_per_s_per_address, limits.post_burst_per_address),
        (limits.posts_per_s, limits.post_burst),
        (limits.posts_per_s_per_network, limits.post_burst_per_network),
    )


def get_rate(limits: RelayLimits) -> FairRate:
    """How often each address may send a request that is neither a login nor a post."""
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
    return FairRate(own, SharedRate(total, reserved, limits.rate_addresses), limits.rate_addresses)
