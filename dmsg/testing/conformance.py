"""A kit of test cases to inherit, which check that a stream transport behaves like one of Twisted's.

A subclass says how to make a connected pair, and is collected by pytest (with pytest-twisted) or mixed into a trial
``TestCase``; every case returns a Deferred. TCP itself passes all of it. ::

    class TestMyTransport(TransportConformance):
        def make_endpoints(self):
            return server_endpoint, lambda port: client_endpoint
"""

from __future__ import annotations

from typing import Any

from twisted.internet import error, interfaces
from twisted.internet.defer import maybeDeferred
from twisted.python.failure import Failure
from zope.interface.verify import verifyObject

from dmsg.testing.harness import TransportHarness, case
from dmsg.testing.probes import ConformanceProtocol, OneProtocolFactory, PullProducer, PushProducer, pattern


class TransportConformance(TransportHarness):
    """Inherit and supply ``make_endpoints`` or ``make_pair`` to run these cases; see :class:`TransportHarness`."""

    # --- interfaces ---------------------------------------------------------------------------------------------------

    @case
    async def test_interfaces(self) -> None:
        """Transports are ITransport, IConsumer and IPushProducer; both ends have addresses."""
        for protocol in await self.pair():
            for interface in (interfaces.ITransport, interfaces.IConsumer, interfaces.IPushProducer):
                assert verifyObject(interface, protocol.transport)
            assert interfaces.IAddress.providedBy(protocol.transport.getHost())
            assert interfaces.IAddress.providedBy(protocol.transport.getPeer())
            assert protocol.made == 1

    # --- bytes --------------------------------------------------------------------------------------------------------

    @case
    async def test_bytes_arrive_in_order(self) -> None:
        """Write and writeSequence keep their order, both ways, and empty writes do nothing."""
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

    @case
    async def test_big_write(self) -> None:
        """One write of many MiB arrives whole, while as much data goes the other way."""
        client, server = await self.pair()
        data = pattern(self.big_bytes)
        client.transport.write(data)
        server.transport.write(data)
        await self.wait(server.when_received(len(data)))
        await self.wait(client.when_received(len(data)))
        assert server.received == data
        assert client.received == data

    @case
    async def test_many_small_writes(self) -> None:
        """Thousands of writes of every small size come out as one stream."""
        client, server = await self.pair()
        data = b"".join(pattern(size % 7, size) for size in range(5000))
        for size in range(5000):
            client.transport.write(pattern(size % 7, size))
        await self.wait(server.when_received(len(data)))
        assert server.received == data

    @case
    async def test_server_speaks_first(self) -> None:
        """Data that the server writes in connectionMade is the first that the client gets, and none of it is lost."""

        def prepare(client: ConformanceProtocol, server: ConformanceProtocol) -> None:
            server.on_made = lambda protocol: protocol.transport.write(b"welcome")  # type: ignore[union-attr]

        client, _server = await self.pair(prepare)
        await self.wait(client.when_received(7))
        assert client.received == b"welcome"
        assert not client.data_while_not_connected

    @case
    async def test_client_writes_in_connection_made(self) -> None:
        """Data that the client writes in connectionMade waits for the server's protocol."""

        def prepare(client: ConformanceProtocol, server: ConformanceProtocol) -> None:
            client.on_made = lambda protocol: protocol.transport.write(b"hello")  # type: ignore[union-attr]

        _client, server = await self.pair(prepare)
        await self.wait(server.when_received(5))
        assert server.received == b"hello"
        assert not server.data_while_not_connected

    @case
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

    @case
    async def test_lose_connection_flushes(self) -> None:
        """Everything written before loseConnection arrives before the end; both sides see ConnectionDone."""
        client, server = await self.pair()
        data = pattern(self.stream_bytes)
        client.transport.write(data)
        client.transport.loseConnection()
        await self.both_lost(client, server)
        assert server.received == data
        assert client.lost[0].check(error.ConnectionDone)
        assert server.lost[0].check(error.ConnectionDone)

    @case
    async def test_server_closes(self) -> None:
        """Closing works from the listening side as well."""
        client, server = await self.pair()
        server.transport.write(b"that was all")
        server.transport.loseConnection()
        await self.both_lost(client, server)
        assert client.received == b"that was all"
        assert client.lost[0].check(error.ConnectionDone)
        assert server.lost[0].check(error.ConnectionDone)

    @case
    async def test_closing_again_is_silent(self) -> None:
        """LoseConnection does nothing the second time or after the end, nor does abortConnection after the end."""
        client, server = await self.pair()
        client.transport.loseConnection()
        client.transport.loseConnection()
        await self.both_lost(client, server)
        for protocol in (client, server):
            protocol.transport.loseConnection()
            protocol.transport.abortConnection()
        await self.both_lost(client, server)

    @case
    async def test_writing_after_the_end(self) -> None:
        """A write after connectionLost is ignored and raises nothing."""
        client, server = await self.pair()
        client.transport.write(b"before")
        client.transport.loseConnection()
        await self.both_lost(client, server)
        for protocol in (client, server):
            protocol.transport.write(b"after the end")
            protocol.transport.writeSequence([b"after", b"the end"])
        await self.both_lost(client, server)
        assert server.received == b"before"

    @case
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

    @case
    async def test_abort(self) -> None:
        """abortConnection ends both sides without waiting for data that is not read."""
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

    @case
    async def test_abort_in_data_received(self) -> None:
        """A protocol may abort from inside dataReceived; no data comes after that."""
        client, server = await self.pair()
        server.on_data = lambda data: server.transport.abortConnection()
        client.transport.write(b"x")
        await self.both_lost(client, server)
        assert server.lost[0].check(error.ConnectionAborted, error.ConnectionLost)

    @case
    async def test_both_sides_close_at_once(self) -> None:
        """Both write and close at the same moment: both end once, and received data is a prefix."""
        client, server = await self.pair()
        for protocol in (client, server):
            protocol.transport.write(b"last words")
            protocol.transport.loseConnection()
        await self.both_lost(client, server)
        for protocol in (client, server):
            assert b"last words".startswith(protocol.received)

    @case
    async def test_stop_producing_closes(self) -> None:
        """StopProducing on the transport does the same as loseConnection."""
        client, server = await self.pair()
        client.transport.write(b"still sent")
        client.transport.stopProducing()
        await self.both_lost(client, server)
        assert server.received == b"still sent"
        assert client.lost[0].check(error.ConnectionDone)

    @case
    async def test_error_in_data_received(self) -> None:
        """A protocol that raises loses only its own connection, and the error is logged."""
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

    @case
    async def test_pause_and_resume(self) -> None:
        """A paused transport delivers nothing, a resumed one everything, in order. Both may be called twice."""
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

    @case
    async def test_pause_in_data_received(self) -> None:
        """Pausing from inside dataReceived holds back everything after that piece."""
        client, server = await self.pair()
        server.on_data = lambda data: server.transport.pauseProducing()
        data = pattern(self.stream_bytes)
        client.transport.write(data)
        await self.wait(server.when(lambda: len(server.received) > 0))
        await self.settle()
        first = len(server.received)
        assert first < len(data)
        server.on_data = None
        server.transport.resumeProducing()
        await self.wait(server.when_received(len(data)))
        assert server.received == data

    @case
    async def test_data_and_close_while_paused(self) -> None:
        """Data and end that come while paused are both delivered after resuming, data first."""
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

    @case
    async def test_lose_connection_while_paused(self) -> None:
        """A side that has paused its reading can still write and close."""
        client, server = await self.pair()
        client.transport.pauseProducing()
        client.transport.write(b"not listening")
        client.transport.loseConnection()
        await self.both_lost(client, server)
        assert server.received == b"not listening"

    # --- writing: the transport as a consumer -------------------------------------------------------------------------

    @case
    async def test_backpressure(self) -> None:
        """A push producer is paused when the other side stops reading, within the limit, and goes on when it reads."""
        client, server = await self.pair()
        server.transport.pauseProducing()
        total = 2 * self.in_flight_limit_bytes
        producer = PushProducer(client.transport, self.reactor, total)
        producer.start()
        await self.settle()
        assert producer.pauses > 0, "the producer was never paused although the receiver did not read"
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

    @case
    async def test_backpressure_while_the_other_way_flows(self) -> None:
        """A stalled direction does not stop the other."""
        client, server = await self.pair()
        server.transport.pauseProducing()
        producer = PushProducer(client.transport, self.reactor, 2 * self.in_flight_limit_bytes)
        producer.start()
        await self.settle()
        data = pattern(self.stream_bytes)
        server.transport.write(data)
        await self.wait(client.when_received(len(data)))
        assert client.received == data
        client.transport.unregisterProducer()

    @case
    async def test_pull_producer(self) -> None:
        """A pull producer is asked again and again, each time there is room."""
        client, server = await self.pair()
        producer = PullProducer(client.transport, 50)
        client.transport.registerProducer(producer, False)
        await self.wait(server.when_received(50_000))
        assert server.received == pattern(50_000)
        assert producer.stops == 0

    @case
    async def test_second_producer_is_refused(self) -> None:
        """A second producer raises RuntimeError, but is accepted after the first has unregistered."""
        client, _server = await self.pair()
        client.transport.registerProducer(PushProducer(client.transport, self.reactor, 0), True)
        try:
            client.transport.registerProducer(PushProducer(client.transport, self.reactor, 0), True)
        except RuntimeError:
            pass
        else:
            raise AssertionError("registerProducer took a second producer")
        client.transport.unregisterProducer()
        client.transport.registerProducer(PushProducer(client.transport, self.reactor, 0), True)
        client.transport.unregisterProducer()

    @case
    async def test_producer_of_a_lost_transport_is_stopped(self) -> None:
        """A producer is told to stop when its transport is lost, or at once if it was lost before."""
        client, server = await self.pair()
        early, late = (PushProducer(client.transport, self.reactor, 0) for _ in range(2))
        client.transport.registerProducer(early, True)
        server.transport.abortConnection()
        await self.both_lost(client, server)
        assert early.stops == 1
        client.transport.registerProducer(late, True)
        assert late.stops == 1

    @case
    async def test_lose_connection_waits_for_a_pull_producer(self) -> None:
        """LoseConnection takes effect when a pull producer has written all its data and unregistered."""
        client, server = await self.pair()
        client.transport.registerProducer(PullProducer(client.transport, 50), False)
        client.transport.loseConnection()
        await self.both_lost(client, server)
        assert server.received == pattern(50_000)
        assert server.lost[0].check(error.ConnectionDone)

    @case
    async def test_lose_connection_waits_for_a_paused_producer(self) -> None:
        """LoseConnection waits until a paused push producer has been resumed and has unregistered."""
        client, server = await self.pair()
        server.transport.pauseProducing()
        total = 2 * self.in_flight_limit_bytes
        producer = PushProducer(client.transport, self.reactor, total)
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

    @case
    async def test_lose_connection_waits_for_no_producer_that_may_write(self) -> None:
        """A push producer that is not paused, and never unregistered, does not keep a connection open."""
        client, server = await self.pair()
        producer = PushProducer(client.transport, self.reactor, 0)
        client.transport.registerProducer(producer, True)
        client.transport.write(b"all of it")
        client.transport.loseConnection()
        await self.both_lost(client, server)
        assert server.received == b"all of it"
        assert server.lost[0].check(error.ConnectionDone)
        assert client.lost[0].check(error.ConnectionDone)
        assert producer.stops == 1

    # --- connecting ---------------------------------------------------------------------------------------------------

    @case
    async def test_no_listener(self) -> None:
        """Connecting to an address without a listener fails the Deferred with an error."""
        client = await self._without_listener()
        if client is None:
            return
        try:
            await self.wait(client.connect(OneProtocolFactory(ConformanceProtocol())))
        except Exception as problem:
            assert not isinstance(problem, AssertionError)
        else:
            raise AssertionError("connected to a peer that does not exist")

    @case
    async def test_cancelled_connect(self) -> None:
        """A cancelled connect fails, and its protocol gets no lasting connection."""
        client = await self._without_listener()
        if client is None:
            return
        protocol = ConformanceProtocol()
        outcome: list[object] = []
        connecting = client.connect(OneProtocolFactory(protocol))
        connecting.addBoth(outcome.append)
        connecting.cancel()
        await self.settle()
        assert len(outcome) == 1
        assert isinstance(outcome[0], Failure)
        assert protocol.made == len(protocol.lost)

    async def _without_listener(self) -> Any:
        """A client endpoint for a port that was listening until a moment ago; ``None`` for pairs without endpoints."""
        if not self.refuses_connections:
            return None
        server_endpoint, client_endpoint_for = self.make_endpoints()
        port = await self.wait(server_endpoint.listen(OneProtocolFactory(ConformanceProtocol())))
        client = client_endpoint_for(port)
        await self.wait(maybeDeferred(port.stopListening))
        return client
