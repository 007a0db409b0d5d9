"""Programs in a network in memory: each has its own host and a clock that may be off, and can be killed."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from twisted.internet import interfaces
from twisted.internet.base import DelayedCall
from twisted.internet.error import ConnectionLost
from twisted.internet.protocol import ClientFactory, Protocol
from twisted.internet.task import Clock, Cooperator
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.pipe import Pipe

#: Unix time of second 0.
EPOCH_S = 1_800_000_000
#: A host at which nothing ever answers.
BLACK_HOLE = "192.0.2.255"


class HeapClock(Clock):
    """A clock for many calls: Twisted's clock sorts all calls whenever one is added."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[float, int, Any]] = []
        self._numbers = count()

    def callLater(self, when: float, what: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        call = DelayedCall(self.rightNow + when, what, args, kw, lambda call: None, self._push, self.seconds)
        self._push(call)
        return call

    def _push(self, call: Any) -> None:
        heappush(self._heap, (call.getTime(), next(self._numbers), call))

    def getDelayedCalls(self) -> list[Any]:
        return [call for _, _, call in self._heap if call.active()]

    def advance(self, amount: float) -> None:
        """Move on, stopping at each call that is due."""
        end, heap = self.rightNow + amount, self._heap
        while heap and heap[0][0] <= end:
            due, _, call = heappop(heap)
            if not call.active():
                continue
            if call.getTime() > due:
                self._push(call)
                continue
            self.rightNow = max(self.rightNow, due)
            call.called = 1
            call.func(*call.args, **call.kw)
        self.rightNow = max(self.rightNow, end)


class Network(MemoryNetwork):
    """A network in memory on a :class:`HeapClock`."""

    def advance(self, amount_s: float = 0.0) -> None:
        self.clock.advance(amount_s)


class _Gone(ClientFactory):
    """In place of the factories of a program that was killed."""

    noisy = False

    def buildProtocol(self, addr: object) -> None:
        return None


def cooperator(network: MemoryNetwork) -> Cooperator:
    """Replaces Twisted's global cooperator, which sends the bodies of HTTP requests, by one on the network's clock."""
    return Cooperator(
        terminationPredicateFactory=lambda: lambda: True, scheduler=lambda work: network.callLater(0.0, work)
    )


@implementer(interfaces.IReactorTCP, interfaces.IReactorTime, interfaces.IReactorPluggableNameResolver)
class Process:
    """The reactor of a program at ``host``. After :meth:`kill` it does nothing more."""

    def __init__(self, network: MemoryNetwork, host: str, random: Random) -> None:
        self.network = network
        self.host = host
        self.random = random
        self.alive = True
        #: Seconds by which its clock is ahead.
        self.ahead_s = 0.0
        #: Hosts that it cannot reach.
        self.unreachable: set[str] = set()
        self.nameResolver = network.nameResolver
        self._calls: dict[Any, None] = {}
        self._ports: list[Any] = []
        self._connectors: list[Any] = []

    def now_s(self) -> float:
        """Unix time, as this program has it."""
        return EPOCH_S + self.network.seconds() + self.ahead_s

    def seconds(self) -> float:
        return self.network.seconds()

    def callLater(self, delay: float, callable: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        assert delay >= 0, f"{delay} s from now"

        def run() -> None:
            del self._calls[call]
            callable(*args, **kwargs)

        call = self.network.clock.callLater(delay, run if self.alive else lambda: None)
        call.of = callable
        if self.alive:
            self._calls[call] = None
        return call

    def getDelayedCalls(self) -> list[Any]:
        """Its pending calls."""
        return [call for call in self._calls if call.active()]

    def connectTCP(self, host: str, port: int, factory: Any, timeout: float = 30, bindAddress: Any = None) -> Any:
        if host in self.unreachable or not self.alive:
            host = BLACK_HOLE
        connector = self.network.connectTCP(host, port, factory, timeout, (self.host, 0))
        self._connectors = [one for one in self._connectors if one.state == "connecting"] + [connector]
        return connector

    def listenTCP(self, port: int, factory: Any, backlog: int = 50, interface: str = "") -> Any:
        listening = self.network.listenTCP(port, factory, backlog, self.host)
        self._ports.append(listening)
        return listening

    def pipes(self) -> list[Pipe]:
        """Its connections, oldest first."""
        return [pipe for pipe in self.network.pipes if self.host in ends_of(pipe)]

    def kill(self, *, silently: bool = False) -> None:
        """End like a process that gets SIGKILL; ``silently``, like a machine that loses its power."""
        self.alive = False
        for call in self.getDelayedCalls():  # not cancelled: objects that are collected as garbage may cancel them
            call.func, call.args, call.kw = lambda: None, (), {}
            call.cancel = lambda: None
        self._calls.clear()
        for port in self._ports:
            port.stopListening()
        for connector in self._connectors:
            connector.factory = _Gone()
        for pipe in self.pipes():
            for end in (pipe.a, pipe.b):
                if end.getHost().host == self.host:
                    end.protocol, end.on_lost = Protocol(), None
                    if silently:
                        pipe.freeze()
                    else:
                        end.abortConnection()


def ends_of(pipe: Pipe) -> tuple[str, str]:
    """The hosts of both ends: who has connected, and who has listened."""
    return pipe.a.getHost().host, pipe.b.getHost().host


def cut(pipe: Pipe) -> None:
    """Both ends lose the connection."""
    pipe.thaw()
    if not pipe.closed:
        for end in (pipe.a, pipe.b):
            if not end.disconnected:
                end.connectionLost(Failure(ConnectionLost()))
