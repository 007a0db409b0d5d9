"""Reading and writing past the transport, where that can be."""

from __future__ import annotations

import hashlib
import socket
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest
import pytest_twisted
from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.internet.testing import StringTransport
from twisted.internet.threads import deferToThread
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.glue.shell import Shell
from dmsg.glue.sockets import LARGE_READERS, READ_BYTES, SMALL_READ_BYTES, DirectWriter, direct_reader, direct_sender
from dmsg.glue.websocket import WebSocketShell
from dmsg.rmb.relay.limits import RelayLimits
from dmsg.sansio.core import Core
from tests.tcp import far_socket, reset

MIB = 1 << 20


class Line(Protocol):
    def __init__(self) -> None:
        self.lost: Deferred[Any] = Deferred()

    def connectionLost(self, reason: Any) -> None:  # type: ignore[override]
        self.lost.callback(reason.value)


@pytest_twisted.async_yield_fixture
async def connected():
    line = Line()
    async with far_socket(line) as far:
        yield line, far
    await line.lost


class Nothing:
    """A core without anything to say, and its owner."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None

    def data_to_send(self) -> bytes:
        return b""


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such option")
@pytest_twisted.ensureDeferred
async def test_a_silent_peer_is_given_up_when_it_has_not_answered_its_probes():
    shell = Shell(cast(Core, Nothing()), cast(Any, Nothing()), cast(Any, reactor))
    async with far_socket(shell):
        options = cast(Any, shell.transport).getHandle()
        assert options.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        idle_s, pause_s, probes, limit_ms = (
            options.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"))
            for name in ("KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")
        )
    assert idle_s + pause_s * probes == 45
    # Linux does not count probes where there is such a limit: it ends the connection at the first one due after that time.
    assert limit_ms == 45_000


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such option")
@pytest_twisted.ensureDeferred
async def test_a_session_of_a_relay_may_take_nothing_for_as_long_as_the_relay_lets_it():
    shell = WebSocketShell(cast(Core, Nothing()), cast(Any, Nothing()), cast(Any, reactor))
    async with far_socket(shell):
        options = cast(Any, shell.transport).getHandle()
        limit_ms = options.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert limit_ms == 60_000 == 1000 * RelayLimits().slow_consumer_timeout_s


def test_what_is_written_is_there_before_the_reactor_turns(connected):
    line, far = connected
    write = DirectWriter(line.transport).write
    for number in range(3):
        write(b"message %d" % number)
        assert far.recv(100) == b"message %d" % number


@pytest_twisted.ensureDeferred
async def test_nothing_goes_past_a_transport_that_has_something_to_write(connected):
    line, far = connected
    assert direct_sender(line.transport) is not None
    line.transport.write(b"first")
    assert direct_sender(line.transport) is None, "it is written when the reactor turns"
    while direct_sender(line.transport) is None:
        await deferLater(reactor, 0)
    assert far.recv(100) == b"first"


@pytest_twisted.ensureDeferred
async def test_it_stays_behind_what_the_transport_has(connected):
    line, far = connected
    write = DirectWriter(line.transport).write
    line.transport.write(b"first ")
    write(b"second")
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(100)
    far.settimeout(10)
    assert await deferToThread(far.recv, 100) == b"first second"


@implementer(IPushProducer)
class Source:
    """Writes ``left`` bytes in pieces as long as it is not told to pause."""

    def __init__(self, line: Line, left: int) -> None:
        self.line, self.left = line, left
        self.write = DirectWriter(line.transport).write
        self.paused = False
        self.given = 0
        self.hash = hashlib.sha256()

    def resumeProducing(self) -> None:
        self.paused = False
        while self.left and not self.paused:
            self.given += 1
            data = hashlib.shake_128(b"%d" % self.given).digest(min(self.left, 50_000))
            self.left -= len(data)
            self.hash.update(data)
            self.write(data)
        if not self.left:
            self.line.transport.unregisterProducer()  # type: ignore[union-attr]
            self.line.transport.loseConnection()  # type: ignore[union-attr]

    def pauseProducing(self) -> None:
        self.paused = True

    def stopProducing(self) -> None:
        self.left = 0


@pytest_twisted.ensureDeferred
async def test_everything_comes_in_order_and_a_producer_is_paused_while_the_socket_is_full(connected):
    line, far = connected
    source = Source(line, 20 * MIB)
    line.transport.registerProducer(source, True)
    source.resumeProducing()
    assert source.paused and source.left

    def read_all() -> str:
        found = hashlib.sha256()
        while data := far.recv(1 << 16):
            found.update(data)
        return found.hexdigest()

    assert await deferToThread(read_all) == source.hash.hexdigest()
    assert not source.left


@pytest_twisted.ensureDeferred
async def test_a_connection_that_was_reset_is_lost_as_any_other(connected):
    line, far = connected
    writer = DirectWriter(line.transport)
    reset(far)
    for _ in range(3):
        writer.write(b"to a lost peer")
    assert isinstance(writer.reason(Failure(await line.lost)).value, ConnectionLost)
    writer.write(b"silent")


@pytest_twisted.ensureDeferred
async def test_a_full_socket_is_no_lost_connection(connected):
    line, _ = connected
    writer = DirectWriter(line.transport)
    for _ in range(100):
        writer.write(bytes(MIB))
    assert not writer.failed
    reason = Failure(ConnectionDone())
    assert writer.reason(reason) is reason


def test_a_transport_that_is_no_tcp_connection_is_written_to_as_ever():
    transport = StringTransport()
    assert DirectWriter(transport).write == transport.write


class Reads:
    """Takes what a direct reader of ``line`` reads; ``views``: whether it may be views."""

    def __init__(self, line: Line, *, views: bool) -> None:
        self.views = views
        self.kinds: list[type] = []
        self.sizes: list[int] = []
        self.data = b""
        self.came: Deferred[None] = Deferred()
        self.wanted = 0
        assert direct_reader(line.transport, line, self._take, lambda: self.views) is not None

    def _take(self, data: bytes | memoryview) -> None:
        self.kinds.append(type(data))
        self.sizes.append(len(data))
        self.data += data
        if self.wanted and len(self.data) >= self.wanted:
            self.wanted = 0
            self.came.callback(None)

    async def send(self, far: Any, data: bytes) -> None:
        """Have ``data`` come, and wait for it."""
        self.data, self.wanted, self.came = b"", len(data), Deferred()
        self.kinds.clear()
        self.sizes.clear()
        await deferToThread(far.sendall, data)
        await self.came


@pytest_twisted.ensureDeferred
async def test_one_read_of_a_transfer_takes_several_records_and_little_is_no_view(connected):
    line, far = connected
    reads = Reads(line, views=True)
    data = hashlib.shake_128(b"a transfer").digest(8 * MIB)
    await reads.send(far, data)
    assert reads.data == data
    assert 65_536 < max(reads.sizes) <= READ_BYTES
    assert all(
        (kind is memoryview) == (size > SMALL_READ_BYTES) for kind, size in zip(reads.kinds, reads.sizes, strict=True)
    )
    await reads.send(far, b"a message")
    assert (reads.data, reads.kinds) == (b"a message", [bytes])


@pytest.mark.parametrize("connections", [LARGE_READERS, LARGE_READERS + 2])
@pytest_twisted.ensureDeferred
async def test_where_many_have_much_to_read_each_is_read_less_at_a_time(connections):
    async with AsyncExitStack() as stack:
        sizes: list[int] = []
        sending = []
        lines = [Line() for _ in range(connections)]
        for line in lines:
            far = await stack.enter_async_context(far_socket(line))
            reads = Reads(line, views=True)
            reads.sizes = sizes
            reads.wanted = 2 * MIB
            line.transport.pauseProducing()
            sending += [deferToThread(far.sendall, bytes(2 * MIB)), reads.came]
        await deferLater(reactor, 0.05)  # all have something to read
        for line in lines:
            line.transport.resumeProducing()
        await gatherResults(sending)
        early = sizes[: 4 * connections]
        assert (max(early) > 65_536) == (connections == LARGE_READERS)
    await gatherResults([line.lost for line in lines])


@pytest_twisted.ensureDeferred
async def test_who_takes_no_views_gets_bytes_of_a_transports_size(connected):
    line, far = connected
    reads = Reads(line, views=False)
    data = hashlib.shake_128(b"another").digest(4 * MIB)
    await reads.send(far, data)
    assert reads.data == data
    assert max(reads.sizes) <= 65_536 and set(reads.kinds) == {bytes}
    reads.views = True  # a handshake is over
    await reads.send(far, data)
    assert reads.data == data and max(reads.sizes) > 65_536


@pytest.mark.parametrize("end", ["closed", "reset"])
@pytest_twisted.ensureDeferred
async def test_the_end_of_a_connection_is_told_as_ever(connected, end):
    line, far = connected
    Reads(line, views=True)
    if end == "closed":
        far.close()
    else:
        reset(far)
    assert isinstance(await line.lost, ConnectionDone if end == "closed" else ConnectionLost)


@pytest_twisted.ensureDeferred
async def test_a_paused_transport_is_not_read(connected):
    line, far = connected
    reads = Reads(line, views=True)
    line.transport.pauseProducing()
    far.sendall(b"for later")
    await deferLater(reactor, 0.02)
    assert not reads.data
    reads.wanted = 1
    line.transport.resumeProducing()
    await reads.came
    assert reads.data == b"for later"


def test_what_is_no_tcp_connection_and_what_has_something_between_is_read_as_ever(connected):
    line, _ = connected
    assert direct_reader(StringTransport(), line, print, lambda: True) is None
    assert direct_reader(line.transport, Protocol(), print, lambda: True) is None  # a policy stands before it
    assert "doRead" not in vars(line.transport)


@pytest_twisted.ensureDeferred
async def test_a_unix_socket_is_read_as_ever(tmp_path):
    line, far = Line(), Line()
    server, client = Factory.forProtocol(lambda: line), Factory.forProtocol(lambda: far)
    server.noisy = False
    port = reactor.listenUNIX(str(tmp_path / "socket"), server)
    await UNIXClientEndpoint(reactor, str(tmp_path / "socket")).connect(client)
    assert direct_reader(far.transport, far, print, lambda: True) is None
    far.transport.loseConnection()
    await far.lost
    await port.stopListening()


class Talking(Core):
    """A core that says what it is told to."""

    def __init__(self) -> None:
        self.says = b""

    def receive_data(self, data: bytes, now: float) -> list[object]:
        return []

    def data_to_send(self) -> bytes:
        says, self.says = self.says, b""
        return says


class Owner:
    def __init__(self) -> None:
        self.lost: Deferred[Any] = Deferred()

    def after_read(self, shell: Shell) -> None:
        shell.flush()

    def flushed(self, shell: Shell) -> None:
        """Nothing waits for it."""

    def connection_lost(self, shell: Shell, error: object, reason: Any) -> None:
        self.lost.callback(reason.value)


@pytest_twisted.ensureDeferred
async def test_a_shell_whose_connection_is_reset_while_it_writes_does_not_take_that_for_an_orderly_end():
    core, owner = Talking(), Owner()
    shell = Shell(core, owner, reactor)
    async with far_socket(shell) as far:
        reset(far)
        for _ in range(3):
            core.says = b"to a lost peer"
            shell.flush()
        assert isinstance(await owner.lost, ConnectionLost)
