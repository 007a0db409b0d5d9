"""Writing past the transport, where that can be."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import pytest_twisted
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Protocol
from twisted.internet.testing import StringTransport
from twisted.internet.threads import deferToThread
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.glue.shell import Shell
from dmsg.glue.sockets import DirectWriter
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


def test_what_is_written_is_there_before_the_reactor_turns(connected):
    line, far = connected
    write = DirectWriter(line.transport).write
    for number in range(3):
        write(b"message %d" % number)
        assert far.recv(100) == b"message %d" % number


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
