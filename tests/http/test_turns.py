"""A burst of calls takes a limited number of connections to one host; the others wait, and their time is counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred, fail
from twisted.internet.error import ConnectionRefusedError as TwistedConnectionRefused
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.web.iweb import IAgent
from zope.interface import implementer

from dmsg.http.client import CALLS_AT_ONCE, HttpCaller
from dmsg.http.errors import NoAnswer
from dmsg.testing.memory import MemoryNetwork

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody"


class Server(Factory):
    """Answers each request ``delay_s`` after it came; with ``None``, never. Counts connections and requests."""

    noisy = False

    def __init__(self, memory: MemoryNetwork, host: str, delay_s: float | None = 0.1) -> None:
        self.clock = memory.clock
        self.delay_s = delay_s
        self.opened = self.open = self.most = 0
        self.requests: list[bytes] = []
        memory.listenTCP(80, self, interface=host)

    def buildProtocol(self, addr: object) -> Protocol:
        return Answering(self)


class Answering(Protocol):
    """One connection of a :class:`Server`."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def connectionMade(self) -> None:
        self.server.opened += 1
        self.server.open += 1
        self.server.most = max(self.server.most, self.server.open)

    def dataReceived(self, data: bytes) -> None:
        self.server.requests.append(data.split()[1])
        if self.server.delay_s is not None:
            assert self.transport is not None
            self.server.clock.callLater(self.server.delay_s, self.transport.write, ANSWER)

    def connectionLost(self, reason: Any = None) -> None:
        self.server.open -= 1


class Calls:
    """Calls of one caller in a network in memory, and how they ended."""

    def __init__(self) -> None:
        self.memory = MemoryNetwork(hosts={"one.example": "192.0.2.1", "other.example": "192.0.2.2"})
        self.caller = HttpCaller.connect(self.memory)
        self.ended: dict[str, Any] = {}

    def begin(self, path: str, host: str = "one.example", method: str = "GET") -> Deferred[Any]:
        call = ensureDeferred(self.caller.call(method, f"http://{host}/{path}", limit_bytes=100))
        return call.addBoth(lambda outcome: self.ended.__setitem__(path, outcome))

    def answered(self) -> Counter[str]:
        return Counter(
            str(outcome.value) if isinstance(outcome, Failure) else outcome[2].decode()
            for outcome in self.ended.values()
        )


def test_a_burst_goes_over_a_limited_number_of_connections_in_order() -> None:
    calls = Calls()
    server = Server(calls.memory, "192.0.2.1")
    for number in range(10 * CALLS_AT_ONCE):
        calls.begin(str(number), "One.example" if number % 2 else "one.example")
    calls.memory.advance(5)
    assert calls.answered() == {"body": 10 * CALLS_AT_ONCE}
    assert server.opened == server.most == CALLS_AT_ONCE
    assert server.requests == [b"/%d" % number for number in range(10 * CALLS_AT_ONCE)]


def test_a_host_that_is_silent_holds_up_no_other_host_and_no_call_for_longer_than_its_time() -> None:
    calls = Calls()
    silent, other = Server(calls.memory, "192.0.2.1", delay_s=None), Server(calls.memory, "192.0.2.2")
    for number in range(CALLS_AT_ONCE + 10):
        calls.begin(str(number))
    calls.memory.advance(6)
    calls.begin("late")
    calls.begin("other", "other.example")
    calls.memory.advance(1)
    assert calls.answered() == {"body": 1} and other.opened == 1
    calls.memory.advance(4)
    assert calls.answered() == {"body": 1, "no answer within 10 s": CALLS_AT_ONCE + 10}
    assert silent.requests[-1] == b"/late"
    calls.memory.advance(5)
    assert calls.answered() == {"body": 1, "no answer within 10 s": CALLS_AT_ONCE + 11}
    assert silent.open == 0


def test_what_is_published_does_not_wait_for_look_ups() -> None:
    """A client that stops has 5 s to withdraw its entry, whatever it asks meanwhile."""
    calls = Calls()
    Server(calls.memory, "192.0.2.1", delay_s=1.0)
    for number in range(10 * CALLS_AT_ONCE):
        calls.begin(str(number))
    calls.begin("entry", method="POST")
    calls.memory.advance(2)
    assert calls.ended["entry"][2] == b"body"
    assert len(calls.ended) <= 2 * CALLS_AT_ONCE + 1


def test_a_cancelled_call_gives_its_turn_to_the_next() -> None:
    calls = Calls()
    server = Server(calls.memory, "192.0.2.1", delay_s=None)
    under_way = [calls.begin(f"under-way-{number}") for number in range(CALLS_AT_ONCE)]
    waiting = [calls.begin(f"waiting-{number}") for number in range(3)]
    calls.memory.advance(1)
    waiting[0].cancel()
    under_way[0].cancel()
    calls.memory.advance(1)
    assert [calls.ended[path].check(CancelledError) for path in ("waiting-0", "under-way-0")] == [CancelledError] * 2
    assert server.requests[CALLS_AT_ONCE:] == [b"/waiting-1"]
    under_way[1].cancel()
    calls.memory.advance(1)
    assert server.requests[CALLS_AT_ONCE:] == [b"/waiting-1", b"/waiting-2"]
    assert server.open == CALLS_AT_ONCE
    for call in (*under_way, *waiting):
        call.cancel()
    server.delay_s = 0.0
    for number in range(CALLS_AT_ONCE):
        calls.begin(f"afterwards-{number}")
    calls.memory.advance(0)
    assert sum(path.startswith("afterwards") and not isinstance(end, Failure) for path, end in calls.ended.items()) == (
        CALLS_AT_ONCE
    )


def test_calls_that_fail_give_their_turn_on() -> None:
    calls = Calls()
    for number in range(3 * CALLS_AT_ONCE):
        calls.begin(str(number))
    calls.memory.advance(5)
    assert len(calls.ended) == 3 * CALLS_AT_ONCE
    assert all(isinstance(end, Failure) and end.check(NoAnswer) for end in calls.ended.values())


@implementer(IAgent)
class Failing:
    """Its first requests fail when :meth:`end` is called, and those that come after that at once."""

    def __init__(self) -> None:
        self.under_way: list[Deferred[Any]] = []
        self.has_ended = False

    def request(self, *_: object) -> Deferred[Any]:
        if self.has_ended:
            return fail(TwistedConnectionRefused())
        self.under_way.append(Deferred())
        return self.under_way[-1]

    def end(self) -> None:
        self.has_ended = True
        for request in self.under_way:
            request.errback(TwistedConnectionRefused())
        self.under_way.clear()


def test_many_calls_that_fail_at_once_when_their_turn_comes_all_fail_and_leave_all_turns_to_others() -> None:
    """As over an agent of one's own whose connection has gone."""
    agent, ended = Failing(), []
    caller = HttpCaller(agent, Clock())
    for _ in range(2):
        agent.has_ended = False
        for _ in range(20 * CALLS_AT_ONCE):
            call = ensureDeferred(caller.call("GET", "http://one.example/", limit_bytes=100))
            call.addErrback(lambda failure: ended.append(str(failure.value)))
        assert len(agent.under_way) == CALLS_AT_ONCE
        agent.end()
    assert Counter(ended) == {"ConnectionRefusedError ('Connection was refused by other side.')": 40 * CALLS_AT_ONCE}
