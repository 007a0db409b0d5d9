"""Connections that a role refuses are closed, whatever its endpoint wraps them in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from cryptography import x509
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, serverFromString
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.web.resource import Resource

from dmsg.http.limits import HttpLimits
from dmsg.http.server import LimitedSite
from dmsg.serving.shell import RelayFactory
from dmsg.taps._service import BoundEndpoint


class Silent(Protocol):
    """A client that says nothing."""

    def __init__(self) -> None:
        self.lost: Deferred[None] = Deferred()

    def connectionLost(self, reason: Any = None) -> None:
        self.lost.callback(None)


class RefusingFactory(Factory):
    """Refuses every connection."""

    noisy = False

    def buildProtocol(self, addr: Any) -> None:
        return None


@pytest.mark.filterwarnings("ignore:Passing pyOpenSSL")
@pytest.mark.parametrize("is_served", [True, False], ids=["served", "not yet served"])
@pytest.mark.parametrize("text", ["tcp:0", "ssl:port=0:privateKey=site.pem", "haproxy:tcp:0"])
@pytest_twisted.ensureDeferred
async def test_a_refused_connection_is_closed(
    reactor: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    self_signed: Any,
    logged_errors: Any,
    text: str,
    is_served: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.pem").write_bytes(self_signed(x509.DNSName("site")))
    endpoint = BoundEndpoint(reactor, "listen", f"{text}:interface=127.0.0.1")
    endpoint.bind()
    ports: list[Any] = []
    assert endpoint._port is not None
    endpoint._port.addCallback(lambda port: ports.append(port) or port)
    if is_served:
        await endpoint.listen(RefusingFactory())
    clients = [Silent() for _ in range(3)]
    for client in clients:
        await TCP4ClientEndpoint(reactor, "127.0.0.1", ports[0].getHost().port).connect(
            Factory.forProtocol(lambda client=client: client)
        )
        await client.lost
    await endpoint.close()
    assert logged_errors.texts() == []


def site_that_admits_nobody() -> Any:
    return LimitedSite(Resource(), reactor=Clock(), limits=HttpLimits(body_bytes=1), admit=lambda host: False)


@pytest.mark.filterwarnings("ignore:Passing pyOpenSSL")
@pytest.mark.parametrize(
    "factory", [site_that_admits_nobody, lambda: RelayFactory(lambda addr: None)], ids=["site", "relay"]
)
@pytest.mark.parametrize("text", ["tcp:0", "ssl:port=0:privateKey=site.pem", "haproxy:tcp:0"])
@pytest_twisted.ensureDeferred
async def test_over_an_endpoint_of_a_program_a_refused_connection_is_closed(
    reactor: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    self_signed: Any,
    logged_errors: Any,
    text: str,
    factory: Callable[[], Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.pem").write_bytes(self_signed(x509.DNSName("site")))
    port = await serverFromString(reactor, f"{text}:interface=127.0.0.1").listen(factory())
    client = Silent()
    await TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port).connect(Factory.forProtocol(lambda: client))
    await client.lost
    await port.stopListening()
    assert logged_errors.texts() == []


@pytest.mark.filterwarnings("ignore:Passing pyOpenSSL")
@pytest_twisted.ensureDeferred
async def test_over_tls_a_site_closes_whom_it_does_not_admit(
    reactor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, self_signed: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.pem").write_bytes(self_signed(x509.DNSName("site")))
    endpoint = BoundEndpoint(reactor, "listen", "ssl:port=0:privateKey=site.pem:interface=127.0.0.1")
    site = site_that_admits_nobody()
    port = await endpoint.listen(site)
    client = Silent()
    await TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port).connect(Factory.forProtocol(lambda: client))
    await client.lost
    assert site.refused == 1 and site.connections == 0
    await endpoint.close()
