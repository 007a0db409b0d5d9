"""The limits of a relay of any protocol: how much it accepts from its clients, from each and from all. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.sansio.rate import check_limits, check_more_than_zero, check_rates


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How much a relay accepts from strangers, and how many clients it has. Each refusal is counted."""

    #: A connection that is silent is dropped after the first, an unfinished handshake after the second.
    first_byte_timeout_s: float = 1.0
    handshake_timeout_s: float = 5.0
    #: Unfinished handshakes in all, and from one address (IPv6: from one /64); above that, the oldest of the largest network,
    #: or of the address, is dropped.
    half_open: int = 512
    half_open_per_address: int = 64
    #: Handshakes of one address, of one network (/24, /48) and of all. A relay that gives cookies keeps half of each for
    #: clients that bring one.
    handshakes_per_s_per_address: float = 50.0
    handshake_burst_per_address: int = 500
    handshakes_per_s_per_network: float = 100.0
    handshake_burst_per_network: int = 800
    handshakes_per_s: float = 1_000.0
    handshake_burst: int = 2_000
    #: Clients in all, and from one address (IPv6: from one /64); above that, an idle client makes room, and without an idle one
    #: the newcomer is turned away.
    connections: int = 10_000
    connections_per_address: int = 1_000
    #: How long a stopping relay lets open transports go on.
    drain_timeout_s: float = 10.0

    def __post_init__(self, *times: str) -> None:
        """Raise ``ValueError`` for a burst, a rate, a number of handshakes or clients, or a time, that lets nothing through.

        ``times`` names further such times, of a subclass.
        """
        check_limits(self, "half_open", "half_open_per_address", "connections", "connections_per_address")
        check_more_than_zero(self, "first_byte_timeout_s", "handshake_timeout_s", *times)
        check_rates(self, "handshakes_per_s_per_address", "handshakes_per_s_per_network", "handshakes_per_s")


@dataclass(frozen=True, slots=True)
class ServingLimits(AdmissionLimits):
    """The limits of a relay that carries transports. Each refusal is counted."""

    #: Open and requested transports of one connection; more are refused as busy. Half of them are kept for its own dials.
    transports_per_connection: int = 1_024
    #: When all places of a connection for transports that others open are taken, a newcomer gets one from the source that has
    #: the most, if the newcomer's address group, or within the largest group its key, has fewer than this; others are busy.
    transports_per_source: int = 64
    transports_per_pair: int = 64
    #: Requests towards one connection that it has not answered. They take no places; above that, the same rule holds.
    unanswered_per_target: int = 256
    #: Requests of one connection, and how many may be unanswered at once; more are refused as rate_limited.
    requests_per_s: float = 200.0
    request_burst: int = 500
    pending_requests: int = 64
    #: Requests towards one connection, each second and at once, of all that have no transport to it and that it has not
    #: accepted lately; address groups share them. More are refused as rate_limited.
    stranger_requests_per_s: float = 100.0
    stranger_request_burst: int = 512
    #: The part of these that one connection may send; as many at once as may be unanswered.
    pair_requests_per_s: float = 10.0
    pair_request_burst: int = 64
    #: Requests towards one connection of all that it knows: more than two of them send at their own limit.
    known_requests_per_s: float = 400.0
    known_request_burst: int = 1_024
    #: Offences that a connection may commit before it is dropped for abuse: malformed requests and, where the protocol counts
    #: them, frames of no transport.
    strays_per_s: float = 20.0
    stray_burst: int = 100
    #: A request that is not answered is closed after this.
    request_timeout_s: float = 10.0
    #: Bytes waiting for one transport's receiver: above the first it is closed after a time without progress, at the
    #: second at once.
    queue_soft_bytes: int = 1024 * 1024
    queue_hard_bytes: int = 1280 * 1024
    slow_consumer_timeout_s: float = 10.0
    #: A client whose network takes none of the waiting data for this long loses the transports that the data belongs to.
    queue_stall_timeout_s: float = 30.0
    #: Bytes waiting for one connection, and bytes of one connection waiting for others: above it the largest queues are
    #: closed. A quarter of the next limit, so that no two connections can fill that one.
    queued_per_connection_bytes: int = 64 * 1024 * 1024
    #: Bytes waiting in all: above it the largest queues are closed, by groups of addresses. As many bytes beside the queues may
    #: not have moved for 10 s: above it the connections with the most are dropped, in the same way.
    queued_total_bytes: int = 256 * 1024 * 1024
    #: Bytes of frames that are not data and wait for one connection that takes nothing. Above half of it the connection gets no
    #: requests of strangers; above all of it, it gets no requests at all, and is not read from.
    control_backlog_bytes: int = 256 * 1024
    #: Bytes a connection may send each second; 0 is no limit.
    bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` as for strangers, and for numbers of transports and requests, or times, that let none through."""
        AdmissionLimits.__post_init__(self, "request_timeout_s", "queue_stall_timeout_s")
        check_limits(self, "transports_per_connection", "unanswered_per_target", "pending_requests")
        check_rates(self, "requests_per_s", "stranger_requests_per_s", "pair_requests_per_s", "known_requests_per_s")
