"""What happens when a process is killed, and when one is asked to stop."""

from __future__ import annotations

import signal

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory, Protocol
from twisted.protocols.wire import Echo

from dmsg.address import HostPort, PinnedServer
from dmsg.errors import DialError
from dmsg.glue.stream_transport import TransportLost
from dmsg.mux.client.service import ClientConfig, DmsgClient
from dmsg.mux.core.errors import PeerGone, ServerDraining
from dmsg.relays.errors import ServerLost
from dmsg.testing.network import LocalNetwork
from dmsg.testing.process import free_port

pytestmark = pytest.mark.system

#: How long it may take until the other side knows, in seconds. (The kernel closes a dead process's sockets at once.)
BOUND_S = 5.0
#: What a lost path means for a transport that may not look for another; how they do is in ``test_resumption``.
ONE_PATH = ClientConfig(resume_grace_s=0.0)


class Talk(Protocol):
    """Collects what it gets; ``when(text)`` fires once that has come, ``over`` with the reason of the end."""

    def __init__(self) -> None:
        self.received = b""
        self.over: Deferred[Exception] = Deferred()
        self._waiting: list[tuple[bytes, Deferred[None]]] = []

    def when(self, text: bytes) -> Deferred[None]:
        waiter: Deferred[None] = Deferred()
        self._waiting.append((text, waiter))
        self.dataReceived(b"")
        return waiter

    def dataReceived(self, data: bytes) -> None:
        self.received += data
        for one in list(self._waiting):
            if one[0] in self.received:
                self._waiting.remove(one)
                one[1].callback(None)

    def connectionLost(self, reason=None) -> None:
        self.over.callback(reason.value.with_traceback(None))


async def connect(client, public_key) -> Talk:
    talk = Talk()
    await client.connect(Factory.forProtocol(lambda: talk), public_key)
    return talk


async def relay(start, secret_of, *options: str):
    """A relay in a process of its own, and how to reach it."""
    key_file, public_key = secret_of("relay")
    port = free_port()
    listen = f"tcp:{port}:interface=127.0.0.1"
    arguments = ("--key", str(key_file), "--listen", listen, "--events", "-", *options)
    program = start("twist", "--log-format=text", "dmsg-server", *arguments)
    await program.saw('"event":"server_started"')
    return program, PinnedServer(public_key, HostPort("127.0.0.1", port))


async def two_clients(reactor, pin):
    """An echo server and one who may dial it, both on the relay."""
    from dmsg.crypto.keys import SecretKey

    clients = [DmsgClient(reactor, SecretKey.generate(), servers=[pin], config=ONE_PATH) for _ in range(2)]
    for client in clients:
        client.startService()
        await client.when_ready()
    alice, bob = clients
    bob.listen(Factory.forProtocol(Echo))
    return alice, bob


# --- SIGKILL ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", [False, True])
@pytest_twisted.ensureDeferred
async def test_a_killed_peer(reactor, start, secret_of, busy):
    """Also with more written than the peer will ever take: no write waits for a peer that is gone."""
    key_file, public_key = secret_of()
    async with LocalNetwork(reactor, relays=1, discovery=None) as network:
        server = start("chat_server.py", f"dmsg:key={key_file}:{network.endpoint_arguments}")
        await server.saw("listening at ")
        talk = await connect(await network.client(config=ONE_PATH), public_key)
        await talk.when(b"Your name?\n")
        if busy:
            server.kill(signal.SIGSTOP)
            talk.transport.write(bytes(8 * 1024 * 1024))
            await network.settle()
            assert talk.transport.stream.acked_bytes < 8 * 1024 * 1024
            talk.transport.loseConnection()
        server.kill(signal.SIGKILL)
        reason = await talk.over.addTimeout(BOUND_S, reactor)
        assert isinstance(reason, TransportLost)
        assert isinstance(reason.cause, PeerGone)
        assert await server.ended() == -signal.SIGKILL


@pytest_twisted.ensureDeferred
async def test_a_killed_relay(reactor, start, secret_of):
    program, pin = await relay(start, secret_of)
    alice, bob = await two_clients(reactor, pin)
    talk = await connect(alice, bob.public_key)
    talk.transport.write(b"hello")
    await talk.when(b"hello")
    program.kill(signal.SIGKILL)
    reason = await talk.over.addTimeout(BOUND_S, reactor)
    assert isinstance(reason, TransportLost)
    assert isinstance(reason.cause, ServerLost)
    assert reason.cause.server == str(pin.public_key)
    assert await program.ended() == -signal.SIGKILL
    with pytest.raises(DialError) as caught:
        await alice.dial(bob.public_key)
    assert caught.value.reason == "connection refused"
    for client in (alice, bob):
        await client.stopService()


# --- SIGTERM ---------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_relay_that_drains_waits_for_open_transports(reactor, start, secret_of):
    program, pin = await relay(start, secret_of, "--drain-timeout", "60")
    alice, bob = await two_clients(reactor, pin)
    talk = await connect(alice, bob.public_key)
    talk.transport.write(b"before")
    await talk.when(b"before")
    program.kill(signal.SIGTERM)
    # it takes nothing new …
    while True:
        try:
            late = await alice.dial(bob.public_key)
        except DialError as error:
            assert error.reason == "server_draining"
            break
        late.abortConnection()  # the signal had not arrived yet
    # … but what is open goes on to its own end
    talk.transport.write(b"after")
    await talk.when(b"after")
    assert program.status is None
    talk.transport.loseConnection()
    assert isinstance(await talk.over, ConnectionDone)
    assert await program.ended() == 0
    assert '"transports":0' in await program.saw('"event":"drained"')
    assert "Traceback" not in program.output, program.output
    for client in (alice, bob):
        await client.stopService()


@pytest_twisted.ensureDeferred
async def test_a_relay_that_drains_does_not_wait_for_ever(reactor, start, secret_of):
    program, pin = await relay(start, secret_of, "--drain-timeout", "0.5")
    alice, bob = await two_clients(reactor, pin)
    talk = await connect(alice, bob.public_key)
    program.kill(signal.SIGTERM)
    reason = await talk.over
    assert isinstance(reason, TransportLost)
    assert isinstance(reason.cause, ServerDraining)
    assert await program.ended() == 0
    for client in (alice, bob):
        await client.stopService()
