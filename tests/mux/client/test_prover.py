"""A relay is proved by the second message of its handshake: who has the key, who has not, and who says nothing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.protocol import Factory, Protocol

from dmsg.address import HostPort
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.errors import ProofFailed
from dmsg.discovery.proofs.handshake import TIMEOUT_S
from dmsg.eventlog import schema as ev
from dmsg.glue.names import resolve
from dmsg.interfaces import IRelayProver
from dmsg.mux.client.prover import XkProver
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork

sync = pytest_twisted.ensureDeferred


class Log:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)


class Speaker(Protocol):
    """Says what its factory says to anything that connects."""

    def connectionMade(self) -> None:
        if self.factory.words is None:
            self.transport.loseConnection()
        else:
            self.transport.write(self.factory.words)


@pytest.fixture
def memory() -> MemoryNetwork:
    return MemoryNetwork(hosts={"relay.example": ["20.0.0.1", "20.0.0.2"]})


def listen(memory: MemoryNetwork, words: bytes | None) -> HostPort:
    factory = Factory.forProtocol(Speaker)
    factory.words = words
    memory.listenTCP(80, factory, interface="20.0.0.1")
    return HostPort("20.0.0.1", 80)


async def reason_of(proof: Deferred[None]) -> str:
    with pytest.raises(ProofFailed) as caught:
        await proof
    return caught.value.reason


@sync
async def test_a_relay_with_the_key_is_proved_and_admits_no_client(memory: MemoryNetwork) -> None:
    log: Any = Log()
    async with LocalNetwork(memory, relays=1, discovery=None, events=log) as network:
        [relay] = network.pinned
        prover = XkProver(memory)
        assert IRelayProver.providedBy(prover)
        await network.wait(prover.prove(relay.public_key, relay.address))
        await network.settle()
        assert memory.pipes == [], "no connection is left"
        assert network.relays[0].stats()["connections"] == 0
        assert [type(event) for event in log.events if not isinstance(event, ev.ServerStarted)] == [ev.HandshakeFailed]


@sync
async def test_a_relay_with_another_key_is_not(memory: MemoryNetwork) -> None:
    async with LocalNetwork(memory, relays=1, discovery=None) as network:
        [relay] = network.pinned
        other = SecretKey.generate().public_key
        assert await network.wait(reason_of(XkProver(memory).prove(other, relay.address))) == "closed"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (None, "closed"),
        (b"\x00\x31" + b"\x02" + bytes(48), "wrong_key"),
        (b"HTTP/1.1 400 Bad Request\r\n", "wrong_key"),
    ],
)
@sync
async def test_what_is_no_relay_is_not(memory: MemoryNetwork, words: bytes | None, reason: str) -> None:
    proof = XkProver(memory).prove(SecretKey.generate().public_key, listen(memory, words))
    memory.advance(1.0)
    assert await reason_of(proof) == reason
    assert memory.pipes == [] and not memory.getDelayedCalls()


@sync
async def test_a_host_that_is_silent_after_the_connection(memory: MemoryNetwork) -> None:
    proof = XkProver(memory).prove(SecretKey.generate().public_key, listen(memory, b""))
    memory.advance(TIMEOUT_S + 1.0)
    assert await reason_of(proof) == "timeout"
    assert memory.pipes == [] and not memory.getDelayedCalls()


@pytest.mark.parametrize(
    ("how", "reason"), [("refuse", "refused"), ("silence", "timeout"), ("unreachable", "unreachable")]
)
@sync
async def test_a_host_that_takes_no_connection(memory: MemoryNetwork, how: str, reason: str) -> None:
    getattr(memory, how)("20.0.0.1")
    proof = XkProver(memory).prove(SecretKey.generate().public_key, HostPort("20.0.0.1", 80))
    memory.advance(TIMEOUT_S + 1.0)
    assert await reason_of(proof) == reason
    assert not memory.getDelayedCalls()


@pytest.mark.parametrize("connected", [True, False])
@sync
async def test_cancelling_closes_the_connection(memory: MemoryNetwork, connected: bool) -> None:
    address = listen(memory, b"")
    if not connected:
        memory.silence("20.0.0.1")
    proof = XkProver(memory).prove(SecretKey.generate().public_key, address)
    memory.advance(0.0)
    assert len(memory.pipes) == connected
    proof.cancel()
    with pytest.raises(CancelledError):
        await proof
    memory.advance(0.0)
    assert memory.pipes == [] and not memory.getDelayedCalls()


@pytest.mark.parametrize("interface", ["127.0.0.1", "::1"])
@sync
async def test_over_real_sockets(reactor: Any, interface: str) -> None:
    """A relay is proved over IPv4 and IPv6, and sees a handshake that was given up."""
    from dmsg.mux.relay.service import DmsgRelay

    key = SecretKey.generate()
    endpoint: Any = TCP4ServerEndpoint(reactor, 0, interface=interface)
    log: Any = Log()
    server = DmsgRelay(reactor, key, endpoint, events=log)
    server.startService()
    port = await server.listening()
    try:
        where = HostPort(interface, port.getHost().port)
        await XkProver(reactor).prove(key.public_key, where)
        with pytest.raises(ProofFailed):
            await XkProver(reactor).prove(SecretKey.generate().public_key, where)
    finally:
        await server.stopService()


@sync
async def test_names_are_resolved(memory: MemoryNetwork, reactor: Any) -> None:
    prover = XkProver(memory)
    assert await prover.resolve("relay.example") == ["20.0.0.1", "20.0.0.2"]
    assert await prover.resolve("nothing.example") == []
    assert set(await resolve(reactor, "localhost")) <= {"127.0.0.1", "::1"}


WITHOUT_DESCRIPTORS = """
import resource
from twisted.internet import reactor
from dmsg.address import HostPort
from dmsg.crypto.keys import SecretKey
from dmsg.mux.client.prover import XkProver

def prove():
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
    proof = XkProver(reactor).prove(SecretKey.generate().public_key, HostPort("127.0.0.1", 1))
    proof.addErrback(lambda failure: print(failure.value.reason)).addBoth(lambda _: reactor.stop())

reactor.callWhenRunning(prove)
reactor.run()
"""


def test_without_a_descriptor_nothing_is_said_of_the_relay() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_DESCRIPTORS], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("not_tried\n", "")
