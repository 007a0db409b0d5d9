"""What an HTTP server limits: the numbers. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What an HTTP server limits whatever it serves: bodies, heads, times and connections."""

    #: Largest request body in bytes.
    body_bytes: int
    #: Request bodies being received or worked on at one time: bounds their memory to 4 MiB. When all places are taken, a
    #: new one takes that of one being received, of the network that has the most.
    concurrent_bodies: int = 256
    #: A request line and headers, in bytes and in number. Ours take 300 bytes.
    headers_bytes: int = 8 * 1024
    headers: int = 64
    #: From a new connection to the first byte of its first request, in seconds. Clients send it at once.
    first_byte_timeout_s: float = 5.0
    #: From the first byte of a request to its last, in seconds.
    request_timeout_s: float = 10.0
    #: From the last byte of a request until the client has taken the answer, in seconds. It can have 4 MiB.
    answer_timeout_s: float = 60.0
    #: Between two requests on a connection, in seconds.
    idle_timeout_s: float = 60.0
    #: Open connections, and of those from one address. When all places are taken a new connection takes the place of
    #: another: an idle one of its own address above the second limit, one of the network that holds the most above the first.
    connections: int = 4000
    connections_per_address: int = 250
