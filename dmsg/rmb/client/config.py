"""What is set for a client of the Reliable Message Bus."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.rmb.core.limits import DEFAULT_TTL_S


@dataclass(frozen=True, slots=True)
class RmbConfig:
    """Times in seconds, sizes in bytes."""

    #: To connect one relay, until it has answered the handshake.
    connect_timeout_s: float = 10.0
    #: The pause after a failure, twice as long each time, up to the limit; with up to half of jitter.
    backoff_first_s: float = 0.5
    backoff_limit_s: float = 30.0
    #: No pause is longer while something waits for a relay.
    urgent_backoff_s: float = 1.0
    #: The pause when another program has taken our session, with up to half of jitter.
    replaced_pause_s: float = 60.0
    #: A connection that lasted this long ends a row of failures: before, a relay that lets one in and drops one at once,
    #: as it does when another program has the same session, would be asked again without a growing pause.
    stable_s: float = 10.0
    #: With nothing heard from a relay for so long after something was sent it is pinged, and after as long again what it
    #: carries goes over another one, if there is one: the WebSocket's own keepalive takes 40 s.
    probe_s: float = 3.0
    #: How long an answer is waited for unless the caller says.
    call_timeout_s: float = DEFAULT_TTL_S
    #: Requests under way, with their bytes: they are kept until they are answered, to go over another relay.
    calls: int = 10_000
    calls_bytes: int = 64 * 1024 * 1024
    #: Answers kept until they expire, for requests that come again, and to go over another relay.
    answers: int = 8_192
    answers_bytes: int = 16 * 1024 * 1024
    #: What waits in one connection before another is preferred.
    relay_queue_bytes: int = 1024 * 1024
    #: Handlers at work, and requests that wait for them, with their bytes; half of what waits may be one twin's.
    handlers: int = 128
    waiting_requests: int = 2_048
    waiting_bytes: int = 32 * 1024 * 1024
    #: Envelopes of one relay whose source is being looked up, and their bytes; above, no more are read.
    lookups: int = 512
    lookups_bytes: int = 8 * 1024 * 1024
    #: What was begun when the client stops has this long to come to an end.
    stop_timeout_s: float = 2.0
