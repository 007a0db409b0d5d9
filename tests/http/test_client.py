"""A server is asked by its IPv4 address, its IPv6 address or its name, whatever characters the name has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from cryptography import x509
from twisted.internet.defer import ensureDeferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.ssl import Certificate, DefaultOpenSSLContextFactory
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.web.client import Agent

from dmsg.http.client import HttpCaller
from dmsg.http.errors import NoAnswer
from dmsg.http.heads import HeadLimitedEndpoints, HostPolicy
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


@pytest.mark.parametrize(
    ("holder", "trusted", "outcome"),
    [
        ("my_discovery_1", True, b"body"),
        ("my_discovery_2", True, "TLS failed: the certificate is not of this host"),
        ("my_discovery_1", False, "TLS failed: certificate verify failed"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_a_host_with_an_underscore_is_asked_over_tls(
    reactor: Any, host_names: Any, self_signed: Any, tmp_path: Path, holder: str, trusted: bool, outcome: bytes | str
) -> None:
    host_names("my_discovery_1")
    path, asked = tmp_path / "both.pem", []
    path.write_bytes(self_signed(x509.DNSName(holder)))
    tls = DefaultOpenSSLContextFactory(str(path), str(path))
    tls.getContext().set_tlsext_servername_callback(lambda connection: asked.append(connection.get_servername()))
    factory: Any = Factory.forProtocol(lambda: Answering([]))
    factory.noisy = False
    port = reactor.listenTCP(0, TLSMemoryBIOFactory(tls, False, factory), interface="127.0.0.1")
    policy = HostPolicy(Certificate.loadPEM(path.read_bytes()) if trusted else None)
    caller = HttpCaller(
        Agent.usingEndpointFactory(reactor, HeadLimitedEndpoints(reactor, timeout_s=5, policy=policy)), reactor
    )
    try:
        _, _, answer = await caller.call("GET", f"https://my_discovery_1:{port.getHost().port}/", limit_bytes=100)
        assert answer == outcome
    except NoAnswer as error:
        assert str(error) == outcome
    finally:
        await port.stopListening()
    assert asked == [b"my_discovery_1"]
