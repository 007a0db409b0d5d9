"""``dmsg expose`` and ``dmsg forward``: TCP over dmsg and back."""

from __future__ import annotations

import os
import re
import socket
from contextlib import ExitStack, contextmanager

import pytest
import pytest_twisted
from twisted.internet import tcp
from twisted.internet.defer import Deferred, DeferredList, gatherResults
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater

from dmsg.cli import tunnels
from dmsg.cli.exits import CommandError, Exit
from dmsg.cli.ping import Echo
from dmsg.cli.tunnels import run_expose, run_forward
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.ops.descriptors import PAUSE_S
from dmsg.testing.process import free_port

pytestmark = pytest.mark.parametrize("bench", [None, "messaging"], indirect=True)


class Collector(Protocol):
    """Collects what comes; ``complete`` fires with it once it is ``size`` bytes, ``lost`` with the reason."""

    def __init__(self, size=0):
        self.size = size
        self.received = bytearray()
        self.made = Deferred()
        self.complete = Deferred()
        self.lost = Deferred()

    def connectionMade(self):
        self.made.callback(self)

    def dataReceived(self, data):
        self.received += data
        if len(self.received) >= self.size and not self.complete.called:
            self.complete.callback(bytes(self.received))

    def connectionLost(self, reason):
        self.lost.callback(reason.value)


class Target:
    """A TCP service to expose."""

    def __init__(self, reactor, build):
        factory = Factory.forProtocol(build)
        factory.noisy = False
        self.port = reactor.listenTCP(0, factory, interface="127.0.0.1")
        self.endpoint = f"tcp:127.0.0.1:{self.port.getHost().port}"


async def tunnel(bench, endpoint, *, allow=(), key_file=""):
    """Expose ``endpoint`` and forward a port to it: gives both commands and the port."""
    expose = bench.start(run_expose, endpoint, allow=allow)
    peer = PublicKey.parse((await expose.ready())["public_key"])
    forward = bench.start(run_forward, peer, "tcp:0:interface=127.0.0.1", key_file=key_file)
    address = (await forward.ready())["listening"]
    return expose, forward, int(address.rpartition(":")[2])


async def connect(bench, port, size=0):
    return await TCP4ClientEndpoint(bench.reactor, "127.0.0.1", port).connect(
        Factory.forProtocol(lambda: Collector(size))
    )


@pytest_twisted.ensureDeferred
async def test_five_mebibytes_go_round(bench):
    target = Target(bench.reactor, Echo)
    _, _, port = await tunnel(bench, target.endpoint)
    data = os.urandom(5 * 1024 * 1024)
    client = await connect(bench, port, len(data))
    client.transport.write(data)
    assert await client.complete == data
    client.transport.loseConnection()
    await client.lost
    await target.port.stopListening()


@pytest_twisted.ensureDeferred
async def test_programs_are_told_of_connections_that_cannot_be_made(bench):
    """Both commands go on: without a line of its own, a failure would look like nothing at all."""
    expose, _, port = await tunnel(bench, f"tcp:127.0.0.1:{free_port()}")
    await (await connect(bench, port)).lost
    told = await expose.stdout.wait_for(event="failed")
    assert told["error"] == "ConnectionRefusedError" and "refused" in told["message"] and "exit_code" not in told
    forward = bench.start(run_forward, SecretKey.generate().public_key, "tcp:0:interface=127.0.0.1")
    address = (await forward.ready())["listening"]
    await (await connect(bench, int(address.rpartition(":")[2]))).lost
    told = await forward.stdout.wait_for(event="failed")
    assert told["error"] == "DialError" and told["attempts"] and told["message"].startswith("could not reach")
    assert not expose.ended.called and not forward.ended.called


@pytest_twisted.ensureDeferred
async def test_a_forward_without_a_descriptor_for_a_connection_says_so(bench, monkeypatch):
    for name in ("doRead", "_logger"):
        monkeypatch.setattr(tcp.Port, name, vars(tcp.Port)[name])
    forward = bench.start(run_forward, SecretKey.generate().public_key, "tcp:0:interface=127.0.0.1")
    address = (await forward.ready())["listening"]

    def accept_none(logger, accepts, listener, reserve):
        logger.info("Could not accept new connection ({acceptError})", acceptError="EMFILE")
        return ()

    with monkeypatch.context() as without:
        without.setattr(tcp, "_accept", accept_none)
        client = await connect(bench, int(address.rpartition(":")[2]))
        told = await forward.stdout.wait_for(event="failed")
    assert "file descriptors of this process are in use" in told["message"] and not forward.ended.called
    client.transport.loseConnection()
    await deferLater(bench.reactor, 2 * PAUSE_S)


@pytest_twisted.ensureDeferred
async def test_a_service_that_does_not_read_holds_back_only_its_client(bench):
    accepted = []

    class Sleepy(Collector):
        def connectionMade(self):
            super().connectionMade()
            accepted.append(self)
            if len(accepted) == 1:
                self.transport.pauseProducing()

    target = Target(bench.reactor, lambda: Sleepy(5))
    _, _, port = await tunnel(bench, target.endpoint)

    class Pump:
        """Writes for as long as it may."""

        written = 0
        paused = None

        def resumeProducing(self):
            client.transport.write(b"x" * 65536)
            self.written += 65536

        def stopProducing(self):
            pass

    client = await connect(bench, port)
    pump = Pump()
    client.transport.registerProducer(pump, False)
    seen = -1
    while seen != pump.written:  # until nothing moves any more
        seen = pump.written
        await deferLater(bench.reactor, 0.3)
    assert 0 < pump.written < 48 * 1024 * 1024
    other = await connect(bench, port)
    other.transport.write(b"hello")
    while len(accepted) < 2:
        await deferLater(bench.reactor, 0.01)
    assert await accepted[1].complete == b"hello"
    client.transport.unregisterProducer()
    client.transport.loseConnection()
    accepted[0].transport.resumeProducing()
    assert isinstance(await accepted[0].lost, ConnectionDone)
    assert len(accepted[0].received) == pump.written
    other.transport.loseConnection()
    await other.lost
    await accepted[1].lost
    await target.port.stopListening()


@pytest.mark.parametrize("who", ["client", "service"])
@pytest_twisted.ensureDeferred
async def test_one_end_closing_closes_the_other_when_everything_has_arrived(bench, who):
    service = Collector(3_000_000)
    target = Target(bench.reactor, lambda: service)
    _, _, port = await tunnel(bench, target.endpoint)
    client = await connect(bench, port, 3_000_000)
    await service.made
    near, far = (client, service) if who == "client" else (service, client)
    data = os.urandom(3_000_000)
    near.transport.write(data)
    near.transport.loseConnection()
    assert await far.complete == data
    assert isinstance(await far.lost, ConnectionDone)
    await near.lost
    await target.port.stopListening()


@pytest_twisted.ensureDeferred
async def test_what_is_cut_off_at_one_end_does_not_look_complete_at_the_other(bench):
    service = Collector(5)
    target = Target(bench.reactor, lambda: service)
    _, _, port = await tunnel(bench, target.endpoint)
    client = await connect(bench, port)
    client.transport.write(b"begun")
    await service.complete
    client.transport.abortConnection()
    assert isinstance(await service.lost, ConnectionLost)
    await client.lost
    await target.port.stopListening()


@pytest_twisted.ensureDeferred
async def test_a_client_that_reads_nothing_and_is_cut_off_is_so_at_the_service(bench):
    """The service reads on when its answers are taken, and they are taken when it reads on: neither would be told."""
    lost = Deferred()

    class Service(Echo):
        def connectionLost(self, reason):
            lost.callback(reason.value)

    target = Target(bench.reactor, Service)
    _, _, port = await tunnel(bench, target.endpoint)
    client = await connect(bench, port)
    client.transport.pauseProducing()
    written = 0

    class Pump:
        def resumeProducing(self):
            nonlocal written
            client.transport.write(bytes(65_536))
            written += 65_536

        def stopProducing(self):
            pass

    client.transport.registerProducer(Pump(), False)
    seen = -1
    while seen != written:  # until nothing moves any more
        seen = written
        await deferLater(bench.reactor, 0.3)
    client.transport.abortConnection()
    assert isinstance(await lost, ConnectionLost)
    await client.lost
    await target.port.stopListening()


@pytest_twisted.ensureDeferred
async def test_a_service_that_is_not_there_ends_the_connection(bench):
    target = Target(bench.reactor, Echo)
    await target.port.stopListening()
    expose, _, port = await tunnel(bench, target.endpoint)
    client = await connect(bench, port)
    assert isinstance(await client.lost, ConnectionLost)
    # it goes on taking others
    second = await connect(bench, port)
    await second.lost
    assert not expose.ended.called


@contextmanager
def busy_service():
    """The endpoint of a service that takes no connection."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # the service accepts none, so the system answers no further ones
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        yield f"tcp:127.0.0.1:{full.getsockname()[1]}"


@pytest_twisted.ensureDeferred
async def test_a_peer_that_goes_before_the_service_answers_is_told_in_plain_words(bench):
    with busy_service() as endpoint:
        expose, forward, port = await tunnel(bench, endpoint)
        client = await connect(bench, port)
        await forward.stdout.wait_for(event="opened")
        client.transport.abortConnection()
        failed = await expose.stdout.wait_for(event="failed")
        assert failed["message"] == "the peer went before the connection was made"
        await connect(bench, port)
        while forward.stdout.getvalue().count('"opened"') < 2:
            await deferLater(bench.reactor, 0.005)
        await expose.stop()
    assert expose.stdout.getvalue().count('"failed"') == 1  # the command itself ended the second one


@pytest_twisted.ensureDeferred
async def test_a_service_that_takes_no_connection_is_told_in_plain_words(bench, monkeypatch):
    monkeypatch.setattr(tunnels, "CONNECT_TIMEOUT_S", 0.1)
    with busy_service() as endpoint:
        expose, _, port = await tunnel(bench, endpoint)
        expose.call.out.json = False
        client = await connect(bench, port)
        assert isinstance(await client.lost, ConnectionLost)
    assert expose.stderr.getvalue().splitlines()[1:] == [f"{endpoint}: no connection within 0.1 s"]


@pytest_twisted.ensureDeferred
async def test_only_allowed_peers_are_connected(bench):
    service = Collector()
    target = Target(bench.reactor, lambda: service)
    friend, friend_file = bench.key("friend")
    _, _, port = await tunnel(bench, target.endpoint, allow=(friend.public_key,))
    refused = await connect(bench, port)
    assert isinstance(await refused.lost, ConnectionLost)
    assert not service.made.called
    _, _, port = await tunnel(bench, target.endpoint, allow=(friend.public_key,), key_file=friend_file)
    client = await connect(bench, port)
    await service.made
    client.transport.loseConnection()
    await service.lost
    await client.lost
    await target.port.stopListening()


@pytest_twisted.ensureDeferred
async def test_interrupting_either_command_ends_what_runs_through_it(bench):
    for which in (0, 1):
        service = Collector()
        target = Target(bench.reactor, lambda service=service: service)
        commands = await tunnel(bench, target.endpoint)
        client = await connect(bench, commands[2])
        await service.made
        await commands[which].stop()
        await service.lost
        await client.lost
        await target.port.stopListening()


@pytest.mark.parametrize("text", ["", "nonsense", "tcp:", "tcp:a:b:c:d", "unknown:1"])
@pytest_twisted.ensureDeferred
async def test_a_bad_endpoint_is_a_usage_error(bench, text):
    with pytest.raises(CommandError) as caught:
        await bench.run(run_expose, text)
    assert caught.value.exit is Exit.USAGE
    with pytest.raises(CommandError) as caught:
        await bench.run(run_forward, bench.key("peer")[0].public_key, text)
    assert caught.value.exit is Exit.USAGE


@pytest.mark.parametrize(
    ("text", "exposed", "forwarded"),
    [
        ("8022", "did you mean tcp:127.0.0.1:8022?", "did you mean tcp:8022:interface=127.0.0.1?"),
        ("db.lan:5432", "did you mean tcp:db.lan:5432?", "did you mean tcp:5432:interface=db.lan?"),
        ("tcp:", "one is written as tcp:127.0.0.1:22", "one is written as tcp:8022:interface=127.0.0.1"),
        ("[::1]:22", "one is written as tcp:127.0.0.1:22", "one is written as tcp:8022:interface=127.0.0.1"),
        ("a b:1", "one is written as tcp:127.0.0.1:22", "one is written as tcp:8022:interface=127.0.0.1"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_what_is_not_an_endpoint_is_answered_with_one(bench, text, exposed, forwarded):
    with pytest.raises(CommandError, match=re.escape(exposed) + "$"):
        await bench.run(run_expose, text)
    with pytest.raises(CommandError, match=re.escape(forwarded) + "$"):
        await bench.run(run_forward, bench.key("peer")[0].public_key, text)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("certificate={}/none", "{}/none: No such file or directory; "),
        ("trustRoots={}/none", "{}/none: No such file or directory; "),
        ("certificate={}/damaged", "the file of its key, or of a certificate, is not whole, "),
    ],
)
@pytest_twisted.ensureDeferred
async def test_what_is_wrong_with_the_files_of_an_exposed_endpoint_is_told_in_words(
    bench, tmp_path, arguments, problem
):
    """Not as a list of OpenSSL's tuples, and not as nothing."""
    (tmp_path / "damaged").write_bytes(b"damaged")
    with pytest.raises(CommandError, match=re.escape(f"client endpoint: {problem.format(tmp_path)}")) as caught:
        await bench.run(run_expose, f"tls:example.com:443:{arguments.format(tmp_path)}")
    assert caught.value.exit is Exit.USAGE


@pytest.mark.parametrize(
    "text",
    [
        *("tcp:127.0.0.1:99999", r"tcp:\:\:1:65536:timeout=5", "tcp:localhost:0", "tcp:a:-5"),
        *("tcp:host=127.0.0.1:port=99999", "tcp:port=0:host=127.0.0.1"),
        *("tcp:host=127.0.0.1:timeout=5:port=99999", "tcp:timeout=5:127.0.0.1:99999", "tcp:127.0.0.1:timeout=5:99999"),
        *("TCP:127.0.0.1:99999", r"tcp:a\=b:99999", r"tcp:a\\:99999", "tcp:host=a:127.0.0.1:99999"),
        *("tcp:host=127.0.0.1:99999:port=22", "tcp:host=127.0.0.1:port=99999:a:22:b"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_a_port_that_is_none_is_refused_before_a_connection_comes(bench, text):
    with pytest.raises(CommandError, match=r"its port must be 1 to 65535$") as caught:
        await bench.run(run_expose, text)
    assert caught.value.exit is Exit.USAGE


@pytest.mark.parametrize(
    "text",
    [
        *(r"tcp:a\=b:22", r"tcp:a\\:22", "tcp:host=a:127.0.0.1:22", "TCP:127.0.0.1:22", r"tcp:127.0.0.1:\22"),
        *("tcp:host=127.0.0.1:22:port=99999", "tcp:host=127.0.0.1:port=22:a:99999:b"),
        *("tcp:127.0.0.1:22:port=99999", "unix:/run/a:timeout=99999", r"tls:example.com:0:endpoint=unix\:/run/a"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_every_endpoint_of_twisted_with_a_port_is_exposed(bench, text):
    assert (await bench.start(run_expose, text).ready())["endpoint"] == text
    await deferLater(bench.reactor, 0)  # the command is not interrupted in the middle of its line


@pytest_twisted.ensureDeferred
async def test_a_port_that_is_taken_is_told_in_one_line(bench):
    taken = await TCP4ServerEndpoint(bench.reactor, 0, interface="127.0.0.1").listen(Factory.forProtocol(Echo))
    command = bench.start(
        run_forward, bench.key("peer")[0].public_key, f"tcp:{taken.getHost().port}:interface=127.0.0.1"
    )
    with pytest.raises(CommandError) as caught:
        await command.ended
    assert "in use" in str(caught.value) and caught.value.exit is Exit.FAILED
    await taken.stopListening()


@pytest_twisted.ensureDeferred
async def test_a_path_that_cannot_be_listened_on_is_told_in_one_line(bench, tmp_path):
    place = f"unix:{tmp_path}/none/socket"
    with pytest.raises(CommandError) as caught:
        await bench.run(run_forward, bench.key("peer")[0].public_key, place)
    assert str(caught.value) == f"cannot listen on {place}: {tmp_path}/none/socket.lock: No such file or directory"


@pytest.mark.parametrize(
    ("place", "shown"), [("unix:{}", "{}"), ("tcp:0:interface=\\:\\:1", r"\[::1\]:\d+"), ("tcp:0", r"0\.0\.0\.0:\d+")]
)
@pytest_twisted.ensureDeferred
async def test_where_it_listens_is_told_as_others_take_it(bench, tmp_path, place, shown):
    forward = bench.start(run_forward, bench.key("peer")[0].public_key, place.format(tmp_path / "socket"))
    assert re.fullmatch(shown.format(tmp_path / "socket"), (await forward.ready())["listening"])


@pytest_twisted.ensureDeferred
async def test_forwarding_to_an_absent_peer_ends_the_connection(bench):
    forward = bench.start(run_forward, bench.key("peer")[0].public_key, "tcp:0:interface=127.0.0.1")
    port = int((await forward.ready())["listening"].rpartition(":")[2])
    client = await connect(bench, port)
    assert isinstance(await client.lost, ConnectionLost)
    assert not forward.ended.called


@pytest.mark.parametrize("connections", [32, 64, 128])
@pytest_twisted.ensureDeferred
async def test_a_burst_of_short_connections(bench, connections):
    """All at once through one pair of commands: none fails."""
    target = Target(bench.reactor, Echo)
    _, _, port = await tunnel(bench, target.endpoint)

    async def short(number):
        data = b"%08d" % number
        client = await connect(bench, port, len(data))
        client.transport.write(data)
        received = await DeferredList([client.complete, client.lost], fireOnOneCallback=True)
        client.transport.loseConnection()
        if received[1] == 0:
            await client.lost
        return received[0] == data

    came = await gatherResults([Deferred.fromCoroutine(short(number)) for number in range(connections)])
    assert came.count(True) == connections
    await target.port.stopListening()
