"""What a stream transport has to do to pass for one of Twisted's: a kit of test cases to inherit.

A subclass says how to make a connected pair, and is collected by pytest (with pytest-twisted) or mixed into a trial
``TestCase``; every case returns a Deferred. TCP itself passes all of it. ::

    class TestMyTransport(TransportConformance):
        def make_endpoints(self):
            return server_endpoint, lambda port: client_endpoint
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

from twisted.internet import error, interfaces
from twisted.internet.defer import Deferred, DeferredList, maybeDeferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from zope.interface import implementer
from zope.interface.verify import verifyObject

__all__ = ["ConformanceProtocol", "TransportConformance"]

T = TypeVar("T")
Case = Callable[["TransportConformance"], Coroutine[Any, Any, None]]

#: Reactor turns that let everything under way on an idle loopback connection arrive.
_SETTLE_TURNS = 40
_MIB = 1024 * 1024


def _case(function: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], Deferred[None]]:
    """Make a coroutine method a test that gives a Deferred, closes what it opened and has a time limit."""

    @wraps(function)
    def run(self: TransportConformance) -> Deferred[None]:
        return Deferred.fromCoroutine(self._run(function))

    del run.__dict__["__wrapped__"]  # pytest must see that this is not a coroutine function
    return run


def pattern(size: int, start: int = 0) -> bytes:
    """``size`` bytes in which a byte that is missing, doubled or moved shows (period 251)."""
    turn = bytes(range(251))
    offset = start % 251
    return (turn * (size // 251 + 2))[offset : offset + size]


class ConformanceProtocol(Protocol):
    """Records what happens to it, in order, and fires Deferreds when it does.

    ``received`` is all the bytes so far, ``lost`` the reasons of ``connectionLost`` (one, if all is well),
    ``connected_at_data`` whether ``connectionMade`` came before the data.
    """

    def __init__(self) -> None:
        self.received = bytearray()
        self.lost: list[Failure] = []
        self.made = 0
        self.data_while_not_connected = 0
        self.on_made: Callable[[ConformanceProtocol], object] | None = None
        self.on_data: Callable[[bytes], object] | None = None
        self._waiting: list[tuple[Callable[[], bool], Deferred[None]]] = []

    def connectionMade(self) -> None:
        """Count, and do what the test wants done first."""
        self.made += 1
        if self.on_made is not None:
            self.on_made(self)
        self._check()

    def dataReceived(self, data: bytes) -> None:
        """Remember the data."""
        if self.made != 1 or self.lost:
            self.data_while_not_connected += 1
        self.received += data
        if self.on_data is not None:
            self.on_data(data)
        self._check()

    def connectionLost(self, reason: Failure = Failure(error.ConnectionDone())) -> None:  # noqa: B008
        """Remember the reason."""
        self.lost.append(reason)
        self._check()

    def when(self, condition: Callable[[], bool]) -> Deferred[None]:
        """Fires as soon as ``condition`` holds; it is looked at after everything that happens to this protocol."""
        waiter: Deferred[None] = Deferred()
        self._waiting.append((condition, waiter))
        self._check()
        return waiter

    def when_received(self, size: int) -> Deferred[None]:
        """Fires when ``size`` bytes have come in all."""
        return self.when(lambda: len(self.received) >= size)

    def when_lost(self) -> Deferred[None]:
        """Fires when the connection is lost."""
        return self.when(lambda: bool(self.lost))

    def _check(self) -> None:
        ready = [one for one in self._waiting if one[0]()]
        self._waiting = [one for one in self._waiting if one not in ready]
        for _, waiter in ready:
            waiter.callback(None)


@implementer(interfaces.IPushProducer)
class _PushProducer:
    """Writes pieces as long as it is not paused, up to ``total`` bytes; counts what it is told."""

    def __init__(self, transport: Any, reactor: Any, total: int, piece: int = 16384) -> None:
        self.transport, self.reactor, self.total, self.piece = transport, reactor, total, piece
        self.written = self.pauses = self.resumes = self.stops = 0
        self.paused = False
        self.on_end: Callable[[], object] | None = None

    def start(self) -> None:
        self.transport.registerProducer(self, True)
        self._work()

    def _work(self) -> None:
        while not self.paused and not self.stops and self.written < self.total:
            size = min(self.piece, self.total - self.written)
            start, self.written = self.written, self.written + size
            self.transport.write(pattern(size, start))
            if self.written == self.total and self.on_end is not None:
                self.on_end()

    def pauseProducing(self) -> None:
        self.pauses += 1
        self.paused = True

    def resumeProducing(self) -> None:
        self.resumes += 1
        self.paused = False
        # Not from inside the consumer's own call: what is told here may come in the middle of a write.
        self.reactor.callLater(0, self._work)

    def stopProducing(self) -> None:
        self.stops += 1


@implementer(interfaces.IPullProducer)
class _PullProducer:
    """Writes one piece each time it is asked to; unregisters at the end."""

    def __init__(self, transport: Any, pieces: int) -> None:
        self.transport, self.pieces, self.done, self.stops = transport, pieces, 0, 0

    def resumeProducing(self) -> None:
        if self.done < self.pieces:
            start = self.done * 1000
            self.done += 1
            self.transport.write(pattern(1000, start))
        if self.done == self.pieces:
            self.done += 1
            self.transport.unregisterProducer()

    def stopProducing(self) -> None:
        self.stops += 1


class TransportConformance:
    """Inherit, supply :meth:`make_endpoints` or :meth:`make_pair`, and the cases below are yours.

    ``limit_s`` is the time limit of a case and ``in_flight_limit_bytes`` how many bytes may be on their way to a side
    that does not read before the producer on the other must have been paused (buffers of the operating system included).
    ``refuses_connections`` is for transports that can be told that nobody listens. Every wait goes through :meth:`wait`
    and :meth:`settle`: override both, and ``reactor``, for a transport that lives on a fake clock.
    """

    limit_s = 20.0
    in_flight_limit_bytes = 8 * _MIB
    big_bytes = 10 * _MIB
    refuses_connections = True

    # --- what a subclass may say --------------------------------------------------------------------------------------

    def make_endpoints(self) -> tuple[Any, Callable[[Any], Any]]:
        """A server endpoint, and a function that gives a client endpoint for the listening port it gave."""
        raise NotImplementedError("supply make_endpoints, or make_pair")

    async def make_pair(
        self, client: ConformanceProtocol, server: ConformanceProtocol
    ) -> tuple[ConformanceProtocol, ConformanceProtocol]:
        """Connect the two protocols and give them, connected; by default through :meth:`make_endpoints`."""
        server_endpoint, client_endpoint_for = self.make_endpoints()
        port = await self.wait(server_endpoint.listen(_OneProtocol(server)))
        self.add_cleanup(port.stopListening)
        await self.wait(client_endpoint_for(port).connect(_OneProtocol(client)))
        await self.wait(server.when(lambda: server.made > 0))
        return client, server

    @property
    def reactor(self) -> Any:
        """Who tells the time: the real reactor, or the clock the transport under test lives on."""
        from twisted.internet import reactor

        return reactor

    async def wait(self, deferred: Deferred[T]) -> T:
        """Wait for ``deferred``, at most ``limit_s`` seconds."""
        return await deferred.addTimeout(self.limit_s, self.reactor)

    async def settle(self) -> None:
        """Let everything that is under way arrive, for the cases in which nothing must."""
        for _ in range(_SETTLE_TURNS):
            await deferLater(self.reactor, 0)

    def flush_logged_errors(self, *types: type[BaseException]) -> list[Failure]:
        """Take back the errors of ``types`` that were logged; override it where logged errors fail a test."""
        return []

    # --- what the cases use -------------------------------------------------------------------------------------------

    def add_cleanup(self, function: Callable[[], Any]) -> None:
        """Call ``function`` at the end of the case and wait for its Deferred, if it gives one."""
        self._cleanups.append(function)

    _cleanups: list[Callable[[], Any]]

    async def _run(self, function: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        self._cleanups = []
        try:
            await function(self)
        finally:
            for cleanup in reversed(self._cleanups):
                await self.wait(maybeDeferred(cleanup))

    async def pair(self, prepare: Callable[[Any, Any], object] | None = None) -> tuple[Any, Any]:
        """A connected client and server protocol, closed again at the end; ``prepare`` sees them before."""
        client, server = ConformanceProtocol(), ConformanceProtocol()
        if prepare is not None:
            prepare(client, server)
        await self.make_pair(client, server)
        self.add_cleanup(lambda: self._close(client, server))
        return client, server

    async def both_lost(self, *protocols: ConformanceProtocol) -> None:
        """Wait until each has lost its connection, and see that each was told exactly once."""
        for protocol in protocols:
            await self.wait(protocol.when_lost())
        await self.settle()
        for protocol in protocols:
            assert len(protocol.lost) == 1, "connectionLost is called exactly once"
            assert not protocol.data_while_not_connected, "data only between connectionMade and connectionLost"

    def _close(self, *protocols: ConformanceProtocol) -> Deferred[Any]:
        for protocol in protocols:
            if protocol.transport is not None and not protocol.lost:
                transport: Any = protocol.transport
                transport.abortConnection()
        return DeferredList([protocol.when_lost() for protocol in protocols if protocol.made])

    # --- interfaces ---------------------------------------------------------------------------------------------------

    @_case
    async def test_interfaces(self) -> None:
        """Transports are ITransport, IConsumer and IPushProducer; both ends have addresses."""
        for protocol in await self.pair():
            for interface in (interfaces.ITransport, interfaces.IConsumer, interfaces.IPushProducer):
                assert verifyObject(interface, protocol.transport)
            assert interfaces.IAddress.providedBy(protocol.transport.getHost())
            assert interfaces.IAddress.providedBy(protocol.transport.getPeer())
            assert protocol.made == 1

    # --- bytes --------------------------------------------------------------------------------------------------------

    @_case
    async def test_bytes_arrive_in_order(self) -> None:
        """Write and writeSequence keep their order, both ways, and empty ones do nothing."""
        client, server = await self.pair()
        for sender, receiver in ((client, server), (server, client)):
            sender.transport.write(b"one ")
            sender.transport.write(b"")
            sender.transport.writeSequence([b"two ", b"", b"three "])
            sender.transport.writeSequence([])
            sender.transport.write(b"four")
            await self.wait(receiver.when_received(18))
            await self.settle()
            assert receiver.received == b"one two three four"
            assert not sender.lost

    @_case
    async def test_big_write(self) -> None:
        """One write of many MiB arrives whole, while as much goes the other way."""
        client, server = await self.pair()
        data = pattern(self.big_bytes)
        client.transport.write(data)
        server.transport.write(data)
        await self.wait(server.when_received(len(data)))
        await self.wait(client.when_received(len(data)))
        assert server.received == data
        assert client.received == data

    @_case
    async def test_many_small_writes(self) -> None:
        """Thousands of writes of every small size come out as one stream."""
        client, server = await self.pair()
        data = b"".join(pattern(size % 7, size) for size in range(5000))
        for size in range(5000):
            client.transport.write(pattern(size % 7, size))
        await self.wait(server.when_received(len(data)))
        assert server.received == data

    @_case
    async def test_server_speaks_first(self) -> None:
        """What the server writes in connectionMade is the first the client gets, and nothing of it is lost."""

        def prepare(client: ConformanceProtocol, server: ConformanceProtocol) -> None:
            server.on_made = lambda protocol: protocol.transport.write(b"welcome")  # type: ignore[union-attr]

        client, _server = await self.pair(prepare)
        await self.wait(client.when_received(7))
        assert client.received == b"welcome"
        assert not client.data_while_not_connected

    @_case
    async def test_client_writes_in_connection_made(self) -> None:
        """What the client writes in connectionMade waits for the server's protocol."""

        def prepare(client: ConformanceProtocol, server: ConformanceProtocol) -> None:
            client.on_made = lambda protocol: protocol.transport.write(b"hello")  # type: ignore[union-attr]

        _client, server = await self.pair(prepare)
        await self.wait(server.when_received(5))
        assert server.received == b"hello"
        assert not server.data_while_not_connected

    @_case
    async def test_server_speaks_and_closes_at_once(self) -> None:
        """A server that writes and closes in connectionMade still gets its bytes through."""

        def prepare(client: ConformanceProtocol, server: ConformanceProtocol) -> None:
            def greet_and_leave(protocol: Any) -> None:
                protocol.transport.write(b"goodbye")
                protocol.transport.loseConnection()

            server.on_made = greet_and_leave

        client, server = await self.pair(prepare)
        await self.both_lost(client, server)
        assert client.received == b"goodbye"
        assert client.lost[0].check(error.ConnectionDone)

    # --- closing ------------------------------------------------------------------------------------------------------

    @_case
    async def test_lose_connection_flushes(self) -> None:
        """Everything written before loseConnection arrives before the end; both sides see ConnectionDone."""
        client, server = await self.pair()
        data = pattern(2 * _MIB)
        client.transport.write(data)
        client.transport.loseConnection()
        await self.both_lost(client, server)
        assert server.received == data
        assert client.lost[0].check(error.ConnectionDone)
        assert server.lost[0].check(error.ConnectionDone)

    @_case
    async def test_server_closes(self) -> None:
        """Closing works from the listening side as well."""
        client, server = await self.pair()
        server.transport.write(b"that was all")
        server.transport.loseConnection()
        await self.both_lost(client, server)
        assert client.received == b"that was all"
        assert client.lost[0].check(error.ConnectionDone)
        assert server.lost[0].check(error.ConnectionDone)

    @_case
    async def test_closing_again_is_silent(self) -> None:
        """A second loseConnection, one after the end, and an abortConnection after it do nothing and raise nothing."""
        client, server = await self.pair()
        client.transport.loseConnection()
        client.transport.loseConnection()
        await self.both_lost(client, server)
        for protocol in (client, server):
            protocol.transport.loseConnection()
            protocol.transport.abortConnection()
        await self.both_lost(client, server)

    @_case
    async def test_writing_after_the_end(self) -> None:
        """A write after connectionLost is ignored: it raises nothing and nothing happens."""
        client, server = await self.pair()
        client.transport.write(b"before")
        client.transport.loseConnection()
        await self.both_lost(client, server)
        for protocol in (client, server):
            protocol.transport.write(b"after the end")
            protocol.transport.writeSequence([b"after", b"the end"])
        await self.both_lost(client, server)
        assert server.received == b"before"

    @_case
    async def test_lose_connection_in_data_received(self) -> None:
        """A protocol may answer and close from inside dataReceived."""
        client, server = await self.pair()

        def answer(data: bytes) -> None:
            server.transport.write(b"answer")
            server.transport.loseConnection()

        server.on_data = answer
        client.transport.write(b"question")
        await self.both_lost(client, server)
        assert client.received == b"answer"

    @_case
    async def test_abort(self) -> None:
        """abortConnection ends both sides without waiting for data that nobody reads."""
        client, server = await self.pair()
        server.transport.pauseProducing()
        client.transport.write(pattern(self.in_flight_limit_bytes))
        client.transport.abortConnection()
        client.transport.abortConnection()
        await self.wait(client.when_lost())
        server.transport.resumeProducing()
        await self.both_lost(client, server)
        assert client.lost[0].check(error.ConnectionAborted, error.ConnectionLost)
        assert not server.lost[0].check(error.ConnectionDone), "the other side must not take it for a clean end"

    @_case
    async def test_abort_in_data_received(self) -> None:
        """A protocol may abort from inside dataReceived; no data comes after that."""
        client, server = await self.pair()
        server.on_data = lambda data: server.transport.abortConnection()
        client.transport.write(b"x")
        await self.both_lost(client, server)
        assert server.lost[0].check(error.ConnectionAborted, error.ConnectionLost)

    @_case
    async def test_both_sides_close_at_once(self) -> None:
        """Both write and close in the same moment: both end once, cleanly, and whatever arrived is a prefix."""
        client, server = await self.pair()
        for protocol in (client, server):
            protocol.transport.write(b"last words")
            protocol.transport.loseConnection()
        await self.both_lost(client, server)
        for protocol in (client, server):
            assert b"last words".startswith(protocol.received)

    @_case
    async def test_stop_producing_closes(self) -> None:
        """StopProducing on the transport is loseConnection."""
        client, server = await self.pair()
        client.transport.write(b"still sent")
        client.transport.stopProducing()
        await self.both_lost(client, server)
        assert server.received == b"still sent"
        assert client.lost[0].check(error.ConnectionDone)

    @_case
    async def test_error_in_data_received(self) -> None:
        """A protocol that raises loses its connection, that one only, and the error is logged."""
        client, server = await self.pair()

        def fail(data: bytes) -> None:
            raise ZeroDivisionError("the protocol's own mistake")

        server.on_data = fail
        client.transport.write(b"x")
        await self.both_lost(client, server)
        self.flush_logged_errors(ZeroDivisionError)
        again_client, again_server = await self.pair()
        again_client.transport.write(b"others go on")
        await self.wait(again_server.when_received(12))

    # --- reading: the transport as a producer -------------------------------------------------------------------------

    @_case
    async def test_pause_and_resume(self) -> None:
        """A paused transport delivers nothing; a resumed one everything, in order. Both may be said twice."""
        client, server = await self.pair()
        server.transport.pauseProducing()
        server.transport.pauseProducing()
        client.transport.write(b"held back")
        await self.settle()
        assert server.received == b""
        server.transport.resumeProducing()
        server.transport.resumeProducing()
        await self.wait(server.when_received(9))
        assert server.received == b"held back"

    @_case
    async def test_pause_in_data_received(self) -> None:
        """Pausing from inside dataReceived holds back everything after that piece."""
        client, server = await self.pair()
        server.on_data = lambda data: server.transport.pauseProducing()
        data = pattern(_MIB)
        client.transport.write(data)
        await self.wait(server.when(lambda: len(server.received) > 0))
        await self.settle()
        first = len(server.received)
        assert first < len(data)
        server.on_data = None
        server.transport.resumeProducing()
        await self.wait(server.when_received(len(data)))
        assert server.received == data

    @_case
    async def test_data_and_close_while_paused(self) -> None:
        """Data and end that come while paused are both there after resuming, data first."""
        client, server = await self.pair()
        server.transport.pauseProducing()
        client.transport.write(b"the end is near")
        client.transport.loseConnection()
        await self.settle()
        assert server.received == b""
        assert not server.lost
        server.transport.resumeProducing()
        await self.both_lost(client, server)
        assert server.received == b"the end is near"
        assert server.lost[0].check(error.ConnectionDone)

    @_case
    async def test_lose_connection_while_paused(self) -> None:
        """A side that has paused its reading can still write and close."""
        client, server = await self.pair()
        client.transport.pauseProducing()
        client.transport.write(b"not listening")
        client.transport.loseConnection()
        await self.both_lost(client, server)
        assert server.received == b"not listening"

    # --- writing: the transport as a consumer -------------------------------------------------------------------------

    @_case
    async def test_backpressure(self) -> None:
        """A push producer is paused when the other side stops reading, within the limit, and goes on when it reads."""
        client, server = await self.pair()
        server.transport.pauseProducing()
        total = 2 * self.in_flight_limit_bytes
        producer = _PushProducer(client.transport, self.reactor, total)
        producer.start()
        await self.settle()
        assert producer.pauses > 0, "the producer was never paused although nobody read"
        assert producer.written <= self.in_flight_limit_bytes, "too much was taken from the producer"
        assert server.received == b""
        server.transport.resumeProducing()
        await self.wait(server.when_received(total))
        assert server.received == pattern(total)
        assert producer.resumes > 0
        client.transport.unregisterProducer()
        client.transport.loseConnection()
        await self.both_lost(client, server)
        assert producer.stops == 0, "a producer that has unregistered is not told any more"

    @_case
    async def test_backpressure_while_the_other_way_flows(self) -> None:
        """One direction that stands still does not stop the other."""
        client, server = await self.pair()
        server.transport.pauseProducing()
        producer = _PushProducer(client.transport, self.reactor, 2 * self.in_flight_limit_bytes)
        producer.start()
        await self.settle()
        data = pattern(_MIB)
        server.transport.write(data)
        await self.wait(client.when_received(len(data)))
        assert client.received == data
        client.transport.unregisterProducer()

    @_case
    async def test_pull_producer(self) -> None:
        """A pull producer is asked again and again, each time there is room."""
        client, server = await self.pair()
        producer = _PullProducer(client.transport, 50)
        client.transport.registerProducer(producer, False)
        await self.wait(server.when_received(50_000))
        assert server.received == pattern(50_000)
        assert producer.stops == 0

    @_case
    async def test_second_producer_is_refused(self) -> None:
        """Only one producer at a time: a second one is a RuntimeError, one after the first has gone is fine."""
        client, _server = await self.pair()
        client.transport.registerProducer(_PushProducer(client.transport, self.reactor, 0), True)
        try:
            client.transport.registerProducer(_PushProducer(client.transport, self.reactor, 0), True)
        except RuntimeError:
            pass
        else:
            raise AssertionError("registerProducer took a second producer")
        client.transport.unregisterProducer()
        client.transport.registerProducer(_PushProducer(client.transport, self.reactor, 0), True)
        client.transport.unregisterProducer()

    @_case
    async def test_producer_of_a_lost_transport_is_stopped(self) -> None:
        """A producer is told to stop when its transport is lost, and at once when it was lost before."""
        client, server = await self.pair()
        early, late = (_PushProducer(client.transport, self.reactor, 0) for _ in range(2))
        client.transport.registerProducer(early, True)
        server.transport.abortConnection()
        await self.both_lost(client, server)
        assert early.stops == 1
        client.transport.registerProducer(late, True)
        assert late.stops == 1

    @_case
    async def test_lose_connection_waits_for_a_pull_producer(self) -> None:
        """LoseConnection takes effect when a pull producer has had its say and unregistered."""
        client, server = await self.pair()
        client.transport.registerProducer(_PullProducer(client.transport, 50), False)
        client.transport.loseConnection()
        await self.both_lost(client, server)
        assert server.received == pattern(50_000)
        assert server.lost[0].check(error.ConnectionDone)

    @_case
    async def test_lose_connection_waits_for_a_paused_producer(self) -> None:
        """LoseConnection while a push producer is paused waits until that could go on and has unregistered."""
        client, server = await self.pair()
        server.transport.pauseProducing()
        total = 2 * self.in_flight_limit_bytes
        producer = _PushProducer(client.transport, self.reactor, total)
        producer.on_end = client.transport.unregisterProducer
        producer.start()
        await self.settle()
        client.transport.loseConnection()
        await self.settle()
        assert not client.lost
        server.transport.resumeProducing()
        await self.both_lost(client, server)
        assert server.received == pattern(total)
        assert server.lost[0].check(error.ConnectionDone)

    # --- connecting ---------------------------------------------------------------------------------------------------

    @_case
    async def test_nobody_listens(self) -> None:
        """Connecting to where nobody listens fails the Deferred with an error."""
        client = await self._nobody_listens()
        if client is None:
            return
        try:
            await self.wait(client.connect(_OneProtocol(ConformanceProtocol())))
        except Exception as problem:
            assert not isinstance(problem, AssertionError)
        else:
            raise AssertionError("connected to nobody")

    @_case
    async def test_cancelled_connect(self) -> None:
        """A connect that is cancelled fails, and its protocol never gets a connection it keeps."""
        client = await self._nobody_listens()
        if client is None:
            return
        protocol = ConformanceProtocol()
        outcome: list[object] = []
        connecting = client.connect(_OneProtocol(protocol))
        connecting.addBoth(outcome.append)
        connecting.cancel()
        await self.settle()
        assert len(outcome) == 1
        assert isinstance(outcome[0], Failure)
        assert protocol.made == len(protocol.lost)

    async def _nobody_listens(self) -> Any:
        """A client endpoint for a port that was listening until a moment ago; ``None`` for pairs without endpoints."""
        if not self.refuses_connections:
            return None
        server_endpoint, client_endpoint_for = self.make_endpoints()
        port = await self.wait(server_endpoint.listen(_OneProtocol(ConformanceProtocol())))
        client = client_endpoint_for(port)
        await self.wait(maybeDeferred(port.stopListening))
        return client


class _OneProtocol(Factory):
    """A factory that gives the protocol it was made for."""

    noisy = False

    def __init__(self, protocol: ConformanceProtocol) -> None:
        self._protocol = protocol

    def buildProtocol(self, addr: Any) -> ConformanceProtocol:
        return self._protocol
