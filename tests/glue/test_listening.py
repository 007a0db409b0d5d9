"""Ports that are taken before what serves them is known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from cryptography import x509
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.error import CannotListenError

from dmsg.glue.listening import TakenPort, listen_problem, server_endpoint
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.probes import ConformanceProtocol, OneProtocolFactory

HOST, PORT = "127.0.0.1", 80


class Counting(OneProtocolFactory):
    """Notes when it is started and stopped."""

    def __init__(self, protocol: ConformanceProtocol) -> None:
        super().__init__(protocol)
        self.told: list[str] = []

    def startFactory(self) -> None:
        self.told.append("started")

    def stopFactory(self) -> None:
        self.told.append("stopped")


def connect(network: MemoryNetwork) -> ConformanceProtocol:
    client = ConformanceProtocol()
    TCP4ClientEndpoint(network, HOST, PORT).connect(OneProtocolFactory(client))
    network.advance(0)
    return client


@pytest_twisted.ensureDeferred
async def test_a_taken_port_refuses_connections_until_it_is_served() -> None:
    network: Any = MemoryNetwork()
    taken = await TakenPort.take(TCP4ServerEndpoint(network, PORT, interface=HOST))
    assert connect(network).lost
    server = ConformanceProtocol()
    factory = Counting(server)
    assert await taken.listen(factory) is taken.port
    client = connect(network)
    client.transport.write(b"hello")  # type: ignore[union-attr]
    network.advance(0)
    assert (server.received, client.lost) == (b"hello", [])
    await taken.port.stopListening()
    assert factory.told == ["started", "stopped"]


@pytest_twisted.ensureDeferred
async def test_a_port_in_use_cannot_be_taken() -> None:
    endpoint = TCP4ServerEndpoint(MemoryNetwork(), PORT, interface=HOST)
    await TakenPort.take(endpoint)
    with pytest.raises(CannotListenError):
        await TakenPort.take(endpoint)


@pytest.mark.parametrize("damaged", ["key.pem", "certificate.pem"])
def test_what_is_wrong_with_the_files_of_tls_is_told_in_words(
    reactor: Any, tmp_path: Path, self_signed: Any, damaged: str
) -> None:
    """Not as a list of OpenSSL's tuples."""
    certificate, key = re.findall(rb"-----BEGIN.*?-----END[^\n]*\n", self_signed(x509.DNSName("site")), re.DOTALL)
    (tmp_path / "key.pem").write_bytes(key)
    (tmp_path / "certificate.pem").write_bytes(certificate)
    whole = (tmp_path / damaged).read_bytes()
    for content in (b"", b"\0" * 100, whole[: len(whole) // 2]):
        (tmp_path / damaged).write_bytes(content)
        with pytest.raises(Exception, match=r"routines") as caught:
            server_endpoint(reactor, f"ssl:0:privateKey={tmp_path}/key.pem:certKey={tmp_path}/certificate.pem")
        problem = listen_problem(caught.value)
        assert problem.startswith(
            "the file of its key, or of a certificate, is not whole, needs a passphrase, or has another format than PEM"
        )
        assert "[" not in problem


def test_a_file_of_tls_that_is_missing_is_named(reactor: Any, tmp_path: Path) -> None:
    path = tmp_path / "missing.pem"
    with pytest.raises(OSError) as caught:
        server_endpoint(reactor, f"ssl:0:privateKey={path}")
    assert listen_problem(caught.value) == f"{path}: No such file or directory"


@pytest_twisted.ensureDeferred
async def test_the_path_of_a_unix_socket_is_named_where_there_is_no_directory(reactor: Any, tmp_path: Path) -> None:
    """And not the process id that the link beside it, its lock, is to lead to."""
    path = tmp_path / "missing" / "socket"
    with pytest.raises(OSError) as caught:
        await server_endpoint(reactor, f"unix:{path}").listen(OneProtocolFactory(ConformanceProtocol()))
    assert listen_problem(caught.value) == f"{path}.lock: No such file or directory"
