"""Dictionaries: words that a search would take long to find."""

from __future__ import annotations

JSON = (
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"null", b"true", b"false", b"\\u0000", b"\\ud800", b"\\\\", b'\\"'),
    *(b"-0", b"1e9", b"9223372036854775807", b"-9223372036854775808", b"18446744073709551615", b"\xe2\x80\xa8", b"NaN"),
)


def members(*names: str) -> tuple[bytes, ...]:
    """The words of JSON, and the names of an object's members."""
    return (*JSON, *(f'"{name}":'.encode() for name in names))


ENTRY = members(
    *("version", "sequence", "timestamp", "static", "client", "delegated_servers", "client_type", "server", "address"),
    *("port", "available_connections", "availableSessions", "serverType", "signature", "Version", "\u017ftatic"),
)
DOCUMENT = members("format", "version", "issued", "expires", "issuer", "signature", "relays", "address")
RANKS = members(
    *("format", "version", "issued", "lifetime_s", "window_s", "issuer", "signature", "relays", "excluded"),
    *("score", "success", "latency", "capacity", "drops", "dials", "clients", "events"),
)
HTTP = (
    *(b"GET ", b"POST ", b"HEAD ", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 C\r\n"),
    *(
        b"\r\n\r\n",
        b"\n\n",
        b"\r\n ",
        b": ",
        b"Content-Length: ",
        b"Transfer-Encoding: chunked\r\n",
        b"Expect: 100-continue\r\n",
    ),
    *(
        b"Connection: close\r\n",
        b"Connection: upgrade\r\n",
        b"Upgrade: h2c\r\n",
        b"Host: ",
        b"Content-Encoding: gzip\r\n",
    ),
    *(b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"HTTP/1.1 304 N\r\n", b"HTTP/1.1 204 N\r\n", b"/dmsg-discovery/entry/"),
    *(b"/messaging-discovery/available_servers", b"/discovery/entries/", b"/discovery/relay_ranks", b"If-None-Match: "),
)
