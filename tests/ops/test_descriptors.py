"""Ports for whose connections there is no descriptor."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from twisted.internet import tcp
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.logger import formatEvent, globalLogPublisher

from dmsg.ops.descriptors import PAUSE_S, be_calm_without_descriptors


class Reactor(Clock):
    """Knows who reads."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: set[Any] = set()
        self.addReader = self.readers.add
        self.removeReader = self.readers.discard


class Connection:
    """A connection that has been accepted."""

    def __init__(self, free: Descriptors) -> None:
        self.free = free

    def close(self) -> None:
        self.free.left += 1


class Descriptors:
    """The descriptors of a process: so many are ``left``; ``waiting`` connections want one."""

    def __init__(self, left: int, waiting: int) -> None:
        self.left = left
        self.waiting = waiting
        self.error = errno.EMFILE
        self.accepts = 0

    def take(self) -> Connection:
        if not self.left:
            raise OSError(self.error, "none")
        self.left -= 1
        return Connection(self)

    def accept(self) -> tuple[Connection, tuple[str, int]]:
        self.accepts += 1
        if not self.waiting:
            raise OSError(errno.EAGAIN, "no more")
        taken = self.take()
        self.waiting -= 1
        return taken, ("192.0.2.1", 5)


class Refusing(Factory):
    protocol = Protocol

    def buildProtocol(self, addr: object) -> None:
        return None


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``make(left, waiting) -> (port, descriptors, reactor, lines)``; the reserve of the process has been lost."""
    for owner, name in ((tcp.Port, "doRead"), (tcp.Port, "_logger"), (tcp._FileDescriptorReservation, "_log")):
        monkeypatch.setattr(owner, name, vars(owner)[name])
    lines: list[str] = []

    def observe(event: dict[str, Any]) -> None:
        if event["log_namespace"].startswith(("dmsg.ops", "twisted.internet.tcp")):
            lines.append(formatEvent(event))

    globalLogPublisher.addObserver(observe)

    def made(left: int, waiting: int) -> tuple[Any, Descriptors, Reactor, list[str]]:
        reactor, descriptors = Reactor(), Descriptors(left, waiting)
        monkeypatch.setattr(tcp, "_reservedFD", tcp._FileDescriptorReservation(descriptors.take))
        be_calm_without_descriptors(reactor)
        port: Any = tcp.Port(0, Refusing(), reactor=reactor)
        port.socket, port.connected, port.numberAccepts = descriptors, True, 10
        port.startReading()
        return port, descriptors, reactor, lines

    yield made
    globalLogPublisher.removeObserver(observe)


def test_a_port_that_can_neither_accept_nor_refuse_tries_ten_times_a_second(make: Any) -> None:
    port, descriptors, reactor, lines = make(0, 3)
    for turn in range(1, 4):
        assert port in reactor.readers
        port.doRead()
        assert descriptors.accepts == turn and port not in reactor.readers
        reactor.advance(PAUSE_S)
    assert len(lines) == 1
    assert "file descriptors of this process are in use" in lines[0] and lines[0].endswith("(0 closed at once)")


def test_it_takes_a_reserve_again_before_connections_do_and_refuses_them(make: Any) -> None:
    port, descriptors, reactor, lines = make(0, 3)
    port.doRead()
    descriptors.left = 1
    reactor.advance(PAUSE_S)
    port.numberAccepts = 10
    port.doRead()
    assert descriptors.waiting == 0 and tcp._reservedFD.available()
    assert port in reactor.readers
    reactor.advance(10)
    descriptors.waiting, port.numberAccepts = 2, 10
    port.doRead()
    assert len(lines) == 2 and "(5 closed at once)" in lines[1]


@pytest.mark.parametrize("error", [errno.ENFILE, errno.ENOMEM, errno.ENOBUFS])
def test_it_pauses_too_when_the_system_has_nothing_left(make: Any, error: int) -> None:
    port, descriptors, reactor, lines = make(0, 1)
    descriptors.error = error
    port.doRead()
    assert port not in reactor.readers and port.connected
    assert errno.errorcode[error] not in lines[0] and "descriptors" not in lines[0]
    reactor.advance(PAUSE_S)
    assert port in reactor.readers


def test_a_client_that_left_before_it_was_accepted_makes_no_pause_for_others(make: Any) -> None:
    port, descriptors, reactor, lines = make(0, 1)
    descriptors.error = errno.ECONNABORTED
    for _ in range(3):
        port.doRead()
        assert port in reactor.readers
    assert lines == []


def test_a_port_that_was_closed_in_its_pause_stays_closed(make: Any) -> None:
    port, _, reactor, _ = make(0, 1)
    port.doRead()
    port.connected = False
    reactor.advance(PAUSE_S)
    assert port not in reactor.readers
