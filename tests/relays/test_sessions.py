"""The pool keeps sessions of any protocol: here one in which a client says who it is and is admitted with a byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure

from dmsg.address import HostPort
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.errors import DmsgError, StageError
from dmsg.relays.pool import PoolConfig, SessionPool
from dmsg.testing.memory import MemoryNetwork

RELAY = SecretKey.generate().public_key
PLACE = HostPort("192.0.2.1", 80)


class Greeting(Protocol):
    """A client's session."""

    def __init__(self, clock: MemoryNetwork, server: PublicKey, lost: Callable[[Greeting, DmsgError], object]) -> None:
        self.server = server
        self.shell = self
        self.ready: Deferred[Greeting] = Deferred(lambda _: self.transport.abortConnection())
        self.started_at = clock.seconds()
        self.ready_at = 0.0
        self.spent = self.over = False
        self.idle = True
        self._clock = clock
        self._lost = lost

    def connectionMade(self) -> None:
        self.transport.write(b"me")

    def dataReceived(self, data: bytes) -> None:
        self.ready_at = self._clock.seconds()
        self.ready.callback(self)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.over = True
        if self.ready.called:
            self._lost(self, DmsgError("the relay has gone"))
        else:
            self.ready.errback(StageError("handshake", "connection lost"))

    def close(self) -> None:
        self.transport.loseConnection()


class Relay(Factory):
    """Admits clients, unless it is told to be silent."""

    noisy = False

    def __init__(self) -> None:
        self.clients: list[Protocol] = []
        self.silent = False

    def buildProtocol(self, addr: object) -> Protocol:
        protocol = Protocol()
        protocol.dataReceived = lambda data: None if self.silent else protocol.transport.write(b"!")  # type: ignore[method-assign]
        self.clients.append(protocol)
        return protocol


@pytest.fixture
def memory() -> MemoryNetwork:
    return MemoryNetwork(delay_s=0.01, random=Random(1))


@pytest.fixture
def relay(memory: MemoryNetwork) -> Relay:
    relay = Relay()
    memory.listenTCP(PLACE.port, relay, interface=PLACE.host)
    return relay


@pytest.fixture
def pool(memory: MemoryNetwork) -> Iterator[SessionPool[Greeting]]:
    pool: SessionPool[Greeting] = SessionPool(
        memory,
        lambda server: Greeting(memory, server, pool.lost),
        lambda address: TCP4ClientEndpoint(memory, address.host, address.port),
        discovery=None,
        pinned=[(RELAY, PLACE)],
        goal=1,
        config=PoolConfig(),
        uniform=lambda: 0.5,
        changed=lambda: None,
        went_down=lambda server, reason, attempt: None,
    )
    yield pool
    Deferred.fromCoroutine(pool.stop())
    memory.advance(1.0)


def run(memory: MemoryNetwork, seconds: float) -> None:
    for _ in range(round(seconds / 0.01)):
        memory.advance(0.01)


def test_all_that_ask_share_one_session(memory, relay, pool):
    asked = [pool.get(RELAY) for _ in range(3)]
    run(memory, 0.1)
    assert len({one.result for one in asked}) == len(relay.clients) == 1
    assert list(pool.sessions) == [RELAY]
    assert pool.get(RELAY).result is asked[0].result


def test_the_goal_makes_a_session_and_makes_it_again(memory, relay, pool):
    pool.start()
    run(memory, 0.1)
    (first,) = pool.sessions.values()
    assert first.ready_at > first.started_at
    relay.clients[0].transport.abortConnection()
    run(memory, 0.1)
    assert not pool.sessions
    run(memory, 3.0)
    (second,) = pool.sessions.values()
    assert second is not first


def test_a_spent_session_is_replaced_and_closed(memory, relay, pool):
    pool.get(RELAY)
    run(memory, 0.1)
    (first,) = pool.sessions.values()
    first.spent = True
    pool.get(RELAY)
    run(memory, 0.1)
    (second,) = pool.sessions.values()
    assert second is not first
    assert first.over and not second.over


def test_an_attempt_is_given_up(memory, relay, pool):
    relay.silent = True
    asked = pool.get(RELAY)
    run(memory, 0.1)
    outcome = []
    asked.addErrback(outcome.append)
    asked.cancel()
    assert outcome[0].check(CancelledError)
    assert pool.connecting(RELAY), "another dial may want it"
    pool.give_up(RELAY, blame=False)
    assert not pool.connecting(RELAY)
