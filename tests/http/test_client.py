"""A server is asked by its IPv4 address, its IPv6 address or its name, whatever characters the name has."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.defer import ensureDeferred
from twisted.internet.protocol import Factory, Protocol

from dmsg.http.client import HttpCaller
from dmsg.testing.memory import MemoryNetwork

HOSTS = {"relay.example": "192.0.2.2", "my_discovery_1": "192.0.2.3", "2001:db8::1": "2001:db8::1"}


class Answering(Protocol):
    """Keeps the request and answers it."""

    def __init__(self, requests: list[bytes]) -> None:
        self.requests = requests

    def dataReceived(self, data: bytes) -> None:
        self.requests.append(data)
        assert self.transport is not None
        self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbody")
        self.transport.loseConnection()


@pytest.mark.parametrize(
    ("url", "place", "sent"),
    [
        ("http://192.0.2.1/a", "192.0.2.1", (b"/a", b"192.0.2.1")),
        ("http://[2001:db8::1]:80/a", "2001:db8::1", (b"/a", b"[2001:db8::1]")),
        ("http://Relay.example/a%20b?c=%3D&d", "192.0.2.2", (b"/a%20b?c=%3D&d", b"relay.example")),
        ("http://my_discovery_1/a", "192.0.2.3", (b"/a", b"my_discovery_1")),
    ],
)
def test_each_kind_of_host_is_asked(url: str, place: str, sent: tuple[bytes, bytes]) -> None:
    requests: list[bytes] = []
    memory = MemoryNetwork(hosts=HOSTS)
    factory: Any = Factory.forProtocol(lambda: Answering(requests))
    factory.noisy = False
    memory.listenTCP(80, factory, interface=place)
    caller = HttpCaller.connect(memory)
    answers: list[Any] = []
    ensureDeferred(caller.call("GET", url, limit_bytes=100)).addBoth(answers.append)
    memory.advance(1)
    status, _, body = answers[0]
    assert (status, body) == (200, b"body")
    head = requests[0].split(b"\r\n")
    assert head[0] == b"GET %s HTTP/1.1" % sent[0]
    assert b"Host: %s" % sent[1] in head
