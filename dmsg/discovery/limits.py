"""The limits of a discovery's HTTP side. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dmsg.discovery.entry import ENTRY_LIMIT_BYTES
from dmsg.http.limits import HttpLimits
from dmsg.sansio.rate import check_limits, check_more_than_zero, check_rates


@dataclass(frozen=True, slots=True)
class DiscoveryLimits(HttpLimits):
    """The limits of a discovery's HTTP side. A rate of ``None`` means no limit."""

    #: Largest request body in bytes: the largest entry.
    body_bytes: int = ENTRY_LIMIT_BYTES
    #: GETs of entries from one address: per second in the long run, and at once. A base client asks once for each dial
    #: and does not know that it should wait; many clients may be behind one address.
    get_rate_per_s: float | None = 2_000.0
    get_burst: float = 10_000.0
    #: Seconds for which an entry is cached after it was read from the store; 0 for no cache. A write through this process
    #: drops the cached entry at once, a write by another process on the same store does not.
    cached_entry_lifetime_s: float = 1.0
    #: GETs of the list of servers from one address. The answer is fifty times as long, and serves for minutes.
    servers_rate_per_s: float | None = 200.0
    servers_burst: float = 400.0
    #: POSTs from one address. Each costs a signature check and a durable write.
    post_rate_per_s: float | None = 50.0
    post_burst: float = 200.0
    #: New connections from one address. More are closed before anything is read. One costs 0.1 ms, and over TLS 1.4 ms. Clients
    #: keep four for many requests, but a thousand clients may be behind one address.
    connect_rate_per_s: float | None = 200.0
    connect_burst: float = 2_000.0
    #: GETs, and POSTs, from all addresses together: fewer than one core can answer.
    total_get_rate_per_s: float | None = 4_000.0
    total_get_burst: float = 20_000.0
    total_post_rate_per_s: float | None = 1_000.0
    total_post_burst: float = 2_000.0
    #: GETs, and POSTs, of one network (a /24, or a /48 of IPv6) that are answered even when others use up the total.
    reserved_get_rate_per_s: float | None = 200.0
    reserved_get_burst: float = 400.0
    reserved_post_rate_per_s: float | None = 10.0
    reserved_post_burst: float = 100.0
    #: Addresses, and networks, whose rate is remembered.
    rate_addresses: int = 50_000
    #: Writes under way, whether a client still waits for them or not.
    pending_writes: int = 4096
    #: Servers in one answer, and its length in bytes.
    available_servers: int = 64
    available_servers_bytes: int = 1024 * 1024
    #: Times the relay ranks are sent to one address: per second in the long run, and at once. The ranks can have 4 MiB.
    ranks_rate_per_s: float | None = 0.2
    ranks_burst: float = 20.0

    def __post_init__(self) -> None:
        check_limits(self, "rate_addresses", "connections", "connections_per_address", "headers", "concurrent_bodies")
        check_limits(
            self, "body_bytes", "headers_bytes", "pending_writes", "available_servers", "available_servers_bytes"
        )
        check_more_than_zero(self, "first_byte_timeout_s", "request_timeout_s", "answer_timeout_s", "idle_timeout_s")
        # not the totals: a network has its reserved rate beside them
        own = "get_rate_per_s", "servers_rate_per_s", "post_rate_per_s", "connect_rate_per_s", "ranks_rate_per_s"
        check_rates(self, *own, off="none")

    @classmethod
    def unlimited_rates(cls) -> DiscoveryLimits:
        """Limits without any rate, for tests and proxies, where all requests come from one address."""
        rates: dict[str, Any] = {each.name: None for each in fields(cls) if each.name.endswith("_rate_per_s")}
        return cls(**rates)
