"""The reactor of our programs does what Twisted's own does. Each test runs one of its own to its end."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure

from dmsg.glue.lean_epoll import LeanEpollReactor

#: Nothing here takes long; a reactor that is never stopped is stopped then, and fails its test by what is missing.
PATIENCE_S = 10.0


@pytest.fixture
def own() -> Iterator[Any]:
    """A reactor that nothing else knows. ``run()`` returns when it is stopped."""
    reactor: Any = LeanEpollReactor()
    reactor.callLater(PATIENCE_S, reactor.crash)
    yield reactor
    for each in reactor.removeAll():
        each.connectionLost(Failure(ConnectionDone()))
    reactor._poller.close()


def run(reactor: Any) -> None:
    reactor.run(installSignalHandlers=False)


class Recorder(Protocol):
    """Keeps what came, and how it ended; then ``on_end`` is called."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.data = b""
        self.end: BaseException | None = None
        self._on_end = on_end

    def dataReceived(self, data: bytes) -> None:
        self.data += data

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.end = reason.value
        self._on_end()


def listen(reactor: Any, protocol: Protocol) -> socket.socket:
    """A connection to ``protocol``, which a reactor that does not run yet serves."""
    factory = Factory()
    factory.noisy = False
    factory.protocol = lambda: protocol  # type: ignore[assignment]
    port = reactor.listenTCP(0, factory, interface="127.0.0.1")
    client = socket.create_connection(("127.0.0.1", port.getHost().port))
    client.setblocking(False)
    return client


def test_what_came_before_the_end_of_a_connection_is_delivered(own: Any) -> None:
    protocol = Recorder(own.stop)
    with listen(own, protocol) as client:
        client.send(b"hello")
        client.shutdown(socket.SHUT_WR)
        run(own)
    assert protocol.data == b"hello"
    assert isinstance(protocol.end, ConnectionDone)


def test_a_reset_behind_more_data_than_one_read_takes_ends_the_connection(own: Any) -> None:
    protocol = Recorder(own.stop)
    with listen(own, protocol) as client:
        client.send(bytes(300_000))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    run(own)
    assert isinstance(protocol.end, ConnectionLost)


def test_a_reset_while_reading_is_paused_shows_when_it_goes_on(own: Any) -> None:
    class Paused(Recorder):
        def connectionMade(self) -> None:
            self.transport.pauseProducing()  # type: ignore[union-attr]
            own.callLater(0.05, self.transport.resumeProducing)  # type: ignore[union-attr]

    protocol = Paused(own.stop)
    with listen(own, protocol) as client:
        client.send(bytes(300_000))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    run(own)
    assert isinstance(protocol.end, ConnectionLost)


def test_more_is_written_than_the_network_takes_at_once(own: Any) -> None:
    class Writer(Recorder):
        def connectionMade(self) -> None:
            self.transport.write(bytes(8_000_000))  # type: ignore[union-attr]
            self.transport.loseConnection()  # type: ignore[union-attr]

    got = []

    def read(client: socket.socket) -> None:
        client.setblocking(True)
        while data := client.recv(1 << 20):
            got.append(len(data))

    with listen(own, Writer(own.stop)) as client:
        reader = threading.Thread(target=read, args=(client,))
        reader.start()
        run(own)
        reader.join()
    assert sum(got) == 8_000_000


def test_an_error_of_an_application_ends_its_connection_alone(own: Any, logged_errors: Any) -> None:
    class Faulty(Recorder):
        def dataReceived(self, data: bytes) -> None:
            raise ValueError(data)

    def next_to_it() -> None:
        second.send(b"still here")
        second.shutdown(socket.SHUT_WR)

    faulty, healthy = Faulty(next_to_it), Recorder(own.stop)
    with listen(own, faulty) as first, listen(own, healthy) as second:
        first.send(b"x")
        run(own)
    assert isinstance(faulty.end, ValueError)
    assert healthy.data == b"still here"
    [failure] = logged_errors.flush(ValueError)
    assert failure.value is faulty.end


def test_an_error_at_the_end_of_a_connection_ends_nothing_else(own: Any, logged_errors: Any) -> None:
    def fail() -> None:
        second.send(b"still here")
        second.shutdown(socket.SHUT_WR)
        raise ValueError("at the end")

    faulty, healthy = Recorder(fail), Recorder(own.stop)
    with listen(own, faulty) as first, listen(own, healthy) as second:
        first.shutdown(socket.SHUT_WR)
        run(own)
    assert isinstance(faulty.end, ConnectionDone)
    assert healthy.data == b"still here"
    assert len(logged_errors.flush(ValueError)) == 1


def test_calls_come_when_they_are_due_in_their_order(own: Any) -> None:
    order: list[str] = []

    def first() -> None:
        order.append("first")
        own.callLater(0, order.append, "at once")
        own.callLater(0.01, order.append, "a new one that is due before")

    own.callLater(0.03, order.append, "third")
    own.callLater(0.0, first)
    later = own.callLater(0.02, order.append, "never")
    moved = own.callLater(PATIENCE_S, own.stop)
    own.callLater(0, later.cancel)
    own.callLater(0, moved.reset, 0.06)
    own.callLater(100 * 86_400.0, order.append, "after more days than epoll counts milliseconds")
    run(own)
    assert order == ["first", "at once", "a new one that is due before", "third"]


SET_CLOCK = """
import signal, time
real, ahead_s = time.time, 0.0
time.time = lambda: real() + ahead_s

from dmsg.glue.lean_epoll import LeanEpollReactor

def set_clock():
    global ahead_s
    ahead_s = %r

signal.alarm(10)
reactor = LeanEpollReactor()
reactor.callLater(0.1, set_clock)
reactor.callLater(0.2, reactor.stop)
reactor.callLater(60.0, print, "too early")
reactor.run()
print("in time")
"""


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_setting_the_clock_of_the_machine_moves_no_timed_call(ahead_s: float) -> None:
    done = subprocess.run([sys.executable, "-c", SET_CLOCK % ahead_s], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("in time\n", "")


@pytest.mark.parametrize("where", ["at_end_of_turn", "callFromThread"])
def test_after_the_process_stood_still_what_came_meanwhile_is_read_before_time_limits_expire(
    own: Any, where: str
) -> None:
    real, order, ahead_s = own.seconds, list[str](), 0.0
    own.seconds = lambda: real() + ahead_s

    class Reader(Recorder):
        def connectionMade(self) -> None:
            own.callLater(5.0, order.append, "silent for 5 s")
            own.callLater(0.01, getattr(own, where), stand_still)

        def dataReceived(self, data: bytes) -> None:
            order.append("read")

    def stand_still() -> None:
        nonlocal ahead_s
        client.send(b"x")
        ahead_s = 6.0
        own.callLater(0.01, own.stop)

    with listen(own, Reader(lambda: None)) as client:
        run(own)
    assert order == ["read", "silent for 5 s"]


@pytest.mark.parametrize("runs", [True, False])
def test_a_call_that_is_asked_for_in_one_comes_after_the_timed_calls_that_are_due(own: Any, runs: bool) -> None:
    """Twisted's own tests (``testCallFromThreadStops``) ask for that."""
    order: list[str] = []

    def first() -> None:
        order.append("first")
        own.callFromThread(last)
        own.callLater(0, order.append, "timed")

    def last() -> None:
        order.append("last")
        own.crash()

    own.callFromThread(first)
    if runs:
        run(own)
    else:
        for _ in range(3):
            own.iterate()
    assert order == ["first", "timed", "last"]


def test_a_call_of_a_thread_that_iterates_is_made_once(own: Any) -> None:
    order: list[str] = []

    def first() -> None:
        order.append("first")
        own.iterate()
        order.append("iterated")

    for call in (first, lambda: order.append("second"), own.stop):
        own.callFromThread(call)
    run(own)
    assert order == ["first", "second", "iterated"]


def test_where_each_turn_takes_long_timed_calls_come_all_the_same(own: Any) -> None:
    real, ahead_s, left = own.seconds, 0.0, 3
    own.seconds = lambda: real() + ahead_s

    class Slow(Protocol):
        def dataReceived(self, data: bytes) -> None:
            nonlocal ahead_s
            ahead_s += 1.0
            client.send(data)  # the next turn has something to read as well

    def count() -> None:
        nonlocal left
        left -= 1
        if left:
            own.callLater(0.5, count)
        else:
            own.stop()

    with listen(own, Slow()) as client:
        client.send(b"x")
        own.callLater(0.5, count)
        run(own)
    assert left == 0
    assert ahead_s < PATIENCE_S


def test_an_error_in_a_timed_call_ends_nothing(own: Any, logged_errors: Any) -> None:
    def fail() -> None:
        raise ValueError("here")

    own.callLater(0, fail)
    own.callLater(0.01, own.stop)
    run(own)
    assert len(logged_errors.flush(ValueError)) == 1


def test_other_threads_wake_it(own: Any) -> None:
    names: list[str] = []

    def in_thread() -> None:
        own.callFromThread(lambda: (names.append(threading.current_thread().name), own.stop()))

    own.callWhenRunning(threading.Thread(target=in_thread).start)
    run(own)
    assert names == [threading.current_thread().name]


def test_what_is_to_be_done_at_the_end_of_a_turn_is_done_behind_all_that_was_ready(own: Any) -> None:
    order: list[str] = []

    class Reader(Protocol):
        def dataReceived(self, data: bytes) -> None:
            order.append("read")
            own.at_end_of_turn(lambda: order.append("end"))
            own.callLater(0, order.append, "timed")

    with listen(own, Reader()) as one, listen(own, Reader()) as two:
        own.callLater(0.05, own.stop)
        for client in (one, two):
            client.send(b"x")
        own.callLater(0, lambda: None)  # both connections are accepted before they are read
        run(own)
    assert order in (["read", "read", "end", "end", "timed", "timed"], ["read", "end", "timed"] * 2)


def test_timed_calls_and_ends_of_turns_ask_for_ends_of_turns(own: Any) -> None:
    order: list[str] = []

    def again() -> None:
        order.append("again")
        own.callLater(0, own.stop)

    def first() -> None:
        order.append("first")
        own.at_end_of_turn(again)

    own.callLater(0, own.at_end_of_turn, first)
    run(own)
    assert order == ["first", "again"]


def test_what_asks_again_and_again_keeps_nobody_else_waiting(own: Any) -> None:
    def again() -> None:
        own.at_end_of_turn(again)

    got = Recorder(own.stop)
    with listen(own, got) as client:
        own.callLater(0, again)
        own.callLater(0.01, client.send, b"hello")
        own.callLater(0.02, client.shutdown, socket.SHUT_WR)
        run(own)
    assert got.data == b"hello"


def test_a_program_that_turns_it_by_hand_has_ends_of_turns() -> None:
    reactor: Any = LeanEpollReactor()
    order: list[int] = []

    def again() -> None:
        order.append(1)
        reactor.at_end_of_turn(lambda: order.append(2))

    reactor.startRunning(installSignalHandlers=False)
    reactor.at_end_of_turn(again)
    for _ in range(3):
        reactor.iterate(0)
    reactor.stop()
    reactor.iterate(0)
    assert order == [1, 2]
    reactor.removeAll()
    reactor._poller.close()


def test_an_error_at_the_end_of_a_turn_keeps_nothing_from_being_done(own: Any, logged_errors: Any) -> None:
    def fail() -> None:
        raise ValueError("here")

    for call in (fail, fail, own.stop):
        own.callLater(0, own.at_end_of_turn, call)
    run(own)
    assert len(logged_errors.flush(ValueError)) == 2


ECHO = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while data := connection.recv(1000):
    connection.sendall(data)
"""


def test_messages_that_follow_each_other_closely_are_all_echoed_and_timed_calls_keep_their_time(own: Any) -> None:
    class Pinger(Protocol):
        count = 0
        ticks = 0

        def connectionMade(self) -> None:
            self.transport.setTcpNoDelay(True)  # type: ignore[union-attr]
            self.tick()
            self.ping()

        def tick(self) -> None:
            self.ticks += 1
            own.callLater(0.001, self.tick)

        def ping(self) -> None:
            self.transport.write(b"%d" % self.count)  # type: ignore[union-attr]

        def dataReceived(self, data: bytes) -> None:
            assert data == b"%d" % self.count
            self.count += 1
            if self.count == 3_000:
                own.callFromThread(own.stop)
            else:
                self.ping()

    pinger = Pinger()
    factory = Factory.forProtocol(lambda: pinger)  # type: ignore[arg-type]
    factory.noisy = False
    port = own.listenTCP(0, factory, interface="127.0.0.1").getHost().port
    with subprocess.Popen([sys.executable, "-c", ECHO, str(port)]) as echo:
        began_s = own.seconds()
        run(own)
        took_s = own.seconds() - began_s
        echo.kill()
    assert pinger.count == 3_000
    assert pinger.ticks > took_s / 0.001 / 20


@pytest.mark.parametrize("where", ["at_end_of_turn", "callFromThread"])
def test_it_crashes_at_once_wherever_that_is_asked_for(own: Any, where: str) -> None:
    """As trial does when the Deferred of a test fires."""
    own.callLater(0, getattr(own, where), own.crash)
    too_late = own.callLater(PATIENCE_S / 2, lambda: None)
    run(own)
    assert own.seconds() < too_late.getTime()


def test_it_stops_in_order_and_crashes_at_once(own: Any) -> None:
    order: list[str] = []
    own.addSystemEventTrigger("before", "shutdown", order.append, "before")
    own.addSystemEventTrigger("after", "shutdown", order.append, "after")
    own.callLater(0, own.stop)
    run(own)
    assert order == ["before", "after"]

    other: Any = LeanEpollReactor()
    other.callLater(0, other.crash)
    other.callLater(PATIENCE_S, order.append, "too late")
    run(other)
    assert order == ["before", "after"]
    other.removeAll()
    other._poller.close()
