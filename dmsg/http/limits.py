"""The limits of an HTTP server. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of every HTTP server, whatever it serves: bodies, heads, times and connections."""

    #: Largest request body in bytes.
    body_bytes: int
    #: Request bodies being received or worked on at one time: bounds their memory to 4 MiB. When all places are taken, a
    #: new body takes the place of a body that is still coming in, of the network that has the most.
    concurrent_bodies: int = 256
    #: A request line with its headers, in bytes, and the number of headers. Those of our clients take 300 bytes.
    headers_bytes: int = 8 * 1024
    headers: int = 64
    #: From a new connection to the first byte of its first request, in seconds. Clients send it at once.
    first_byte_timeout_s: float = 5.0
    #: From the first byte of a request to its last, in seconds.
    request_timeout_s: float = 10.0
    #: From the last byte of a request until the client has taken the answer, in seconds. An answer can have 4 MiB.
    answer_timeout_s: float = 60.0
    #: Between two requests on a connection, in seconds.
    idle_timeout_s: float = 60.0
    #: Open connections in all, and from one address. Above the first limit, a new connection takes the place of one of the
    #: network that holds the most; above the second limit, the place of an idle connection of its own address.
    connections: int = 4000
    connections_per_address: int = 250
