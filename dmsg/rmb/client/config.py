"""Settings of a client of the Reliable Message Bus."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.rmb.core.limits import DEFAULT_TTL_S
from dmsg.sansio.rate import check_limits, check_more_than_zero


@dataclass(frozen=True, slots=True)
class RmbConfig:
    """Times in seconds, sizes in bytes."""

    #: Timeout for connecting to a relay, including the handshake.
    connect_timeout_s: float = 10.0
    #: The pause after a failure, doubled each time up to the limit, with up to half of jitter.
    backoff_first_s: float = 0.5
    backoff_limit_s: float = 30.0
    #: The longest pause while something waits for a relay.
    urgent_backoff_s: float = 1.0
    #: The pause when another program has taken our session, with up to half of jitter.
    replaced_pause_s: float = 60.0
    #: A connection that lasted this long ends a row of failures. Shorter ones do not: a relay may accept a client and drop it
    #: at once, as it does when another program has the same session, and then the pauses have to grow.
    stable_s: float = 10.0
    #: A relay from which nothing is heard for this long after something was sent is pinged. After as long again, its parcels
    #: go over another relay, if there is one: the WebSocket's own keepalive takes 40 s.
    probe_s: float = 3.0
    #: How long to wait for an answer if the caller does not say.
    call_timeout_s: float = DEFAULT_TTL_S
    #: Requests under way, and their bytes: they are kept until they are answered, to be sent over another relay if need be.
    calls: int = 10_000
    calls_bytes: int = 64 * 1024 * 1024
    #: Answers kept until they expire, for requests that come again, and to be sent over another relay.
    answers: int = 8_192
    answers_bytes: int = 16 * 1024 * 1024
    #: Bytes queued in one connection above which another is preferred.
    relay_queue_bytes: int = 1024 * 1024
    #: Running handlers, and requests that wait for them, with their bytes. One twin may have half of the handlers.
    handlers: int = 128
    waiting_requests: int = 2_048
    waiting_bytes: int = 32 * 1024 * 1024
    #: Envelopes of one relay whose source is being looked up, and their bytes; above that, the client stops reading.
    lookups: int = 512
    lookups_bytes: int = 8 * 1024 * 1024
    #: Time that running handlers and connections have to end when the client stops.
    stop_timeout_s: float = 2.0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for no time to connect, for no pause, and for limits that let no call or request through."""
        check_more_than_zero(self, "connect_timeout_s", "backoff_first_s", "backoff_limit_s", "urgent_backoff_s")
        check_more_than_zero(self, "replaced_pause_s", "probe_s", "call_timeout_s")
        check_limits(
            self, "calls", "calls_bytes", "answers", "answers_bytes", "relay_queue_bytes", "handlers", "lookups"
        )
