"""The strings of a pipe and of a network in memory: cutting, freezing, delays."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet import error, interfaces
from twisted.internet.address import IPv4Address
from twisted.internet.endpoints import HostnameEndpoint, TCP4ClientEndpoint, clientFromString, serverFromString
from twisted.internet.protocol import ClientFactory, Factory
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer
from zope.interface.verify import verifyObject

from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.pipe import Pipe
from dmsg.testing.probes import ConformanceProtocol, OneProtocolFactory


@pytest.fixture
def ends():
    return ConformanceProtocol(), ConformanceProtocol()


class Pieces(ConformanceProtocol):
    """Remembers where one piece ended and the next began."""

    def __init__(self):
        super().__init__()
        self.pieces = []
        self.on_data = self.pieces.append


@implementer(interfaces.IHalfCloseableProtocol)
class HalfCloseable(ConformanceProtocol):
    """Goes on when one direction has ended."""

    def __init__(self):
        super().__init__()
        self.half = []

    def readConnectionLost(self):
        self.half.append("read")

    def writeConnectionLost(self):
        self.half.append("write")


# --- pipes -----------------------------------------------------------------------------------------------------------


def test_nothing_happens_before_the_clock_moves(ends, clock):
    Pipe(clock).connect(*ends)
    ends[0].transport.write(b"hello")
    assert ends[1].received == b""
    clock.advance(0)
    assert ends[1].received == b"hello"


def test_delay_is_one_way_and_keeps_order(ends, clock):
    Pipe(clock, delay_s=0.5).connect(*ends)
    ends[0].transport.write(b"a")
    clock.advance(0)
    clock.advance(0.25)
    ends[0].transport.write(b"b")
    ends[0].transport.loseConnection()
    clock.advance(0)
    clock.advance(0.2)
    assert ends[1].received == b""
    clock.advance(0.05)
    assert ends[1].received == b"a"
    clock.advance(0.2)
    assert (ends[1].received, ends[1].lost) == (b"a", [])
    clock.advance(0.05)
    assert ends[1].received == b"ab"
    assert ends[1].lost[0].check(error.ConnectionDone)


@pytest.mark.parametrize(
    ("chunking", "sizes"),
    [(None, [10]), ("bytes", [1] * 10), (4, [4, 4, 2]), (lambda available: available - 3, [7, 1, 1, 1])],
)
def test_chunking(clock, chunking, sizes):
    receiver = Pieces()
    sender = ConformanceProtocol()
    Pipe(clock, chunking=chunking).connect(sender, receiver)
    sender.transport.write(b"0123456789")
    clock.advance(0)
    assert [len(piece) for piece in receiver.pieces] == sizes
    assert receiver.received == b"0123456789"


def test_random_chunks_come_from_the_random_given(clock):
    def cut(seed):
        receiver, sender = Pieces(), ConformanceProtocol()
        Pipe(clock, chunking="random", random=Random(seed)).connect(sender, receiver)
        sender.transport.write(bytes(300))
        clock.advance(0)
        return [len(piece) for piece in receiver.pieces]

    assert cut(1) == cut(1) != cut(2)
    assert sum(cut(1)) == 300
    with pytest.raises(ValueError, match="chunking"):
        Pipe(clock, chunking="bits").connect(ConformanceProtocol(), ConformanceProtocol())


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=200)), max_size=30), st.integers(0, 2**32), st.booleans())
def test_any_writes_arrive_whole_under_any_chunks(writes, seed, close):
    clock, ends = Clock(), (ConformanceProtocol(), ConformanceProtocol())
    made = Pipe(clock, chunking="random", random=Random(seed), delay_s=0.1, high_water_bytes=64).connect(*ends)
    sent = {ends[0]: b"", ends[1]: b""}
    for first, data in writes:
        sender = ends[0] if first else ends[1]
        sender.transport.write(data)
        sent[sender] += data
    clock.pump([0.1] * 200)
    if close:
        ends[0].transport.loseConnection()
        clock.pump([0.1] * 3)
        assert made.closed
    assert (ends[1].received, ends[0].received) == (sent[ends[0]], sent[ends[1]])


def test_a_frozen_pipe_tells_neither_end_anything(ends, clock):
    made = Pipe(clock).connect(*ends)
    made.freeze()
    ends[0].transport.write(b"into the void")
    ends[0].transport.loseConnection()
    clock.advance(1e6)
    assert len(ends[0].lost) == 1, "its own side ends as far as it can see"
    assert (ends[1].received, ends[1].lost) == (b"", [])
    assert made.frozen
    made.thaw()
    clock.advance(0)
    assert ends[1].received == b"into the void"
    assert len(ends[1].lost) == 1


def test_abort_passes_a_frozen_pipe_once_it_is_thawed(ends, clock):
    made = Pipe(clock).connect(*ends)
    made.freeze()
    ends[0].transport.abortConnection()
    clock.advance(100)
    assert len(ends[0].lost) == 1
    assert ends[1].lost == []
    made.thaw()
    clock.advance(0)
    assert ends[1].lost[0].check(error.ConnectionLost), "as the next probe of TCP keepalive would show"
    assert made.closed


def test_cut_ends_both_at_once_with_the_reason_given(ends, clock):
    made = Pipe(clock, delay_s=1).connect(*ends)
    ends[0].transport.write(b"on its way")
    clock.advance(0.5)
    made.cut()
    clock.advance(100)
    for end in ends:
        assert [failure.check(error.ConnectionLost) for failure in end.lost] == [error.ConnectionLost]
        assert end.received == b""
    made.cut()
    assert [len(end.lost) for end in ends] == [1, 1]
    again = ConformanceProtocol(), ConformanceProtocol()
    Pipe(clock).connect(*again).cut(error.TimeoutError())
    assert again[0].lost[0].check(error.TimeoutError)


def test_half_close(clock):
    first, second = HalfCloseable(), HalfCloseable()
    Pipe(clock).connect(first, second)
    first.transport.write(b"question")
    first.transport.loseWriteConnection()
    clock.advance(0)
    assert (second.received, second.half, first.half) == (b"question", ["read"], ["write"])
    second.transport.write(b"answer")
    second.transport.loseConnection()
    clock.advance(0)
    assert first.received == b"answer"
    assert first.half == ["write", "read"]
    assert len(second.lost) == 1


@pytest.mark.parametrize("late", [False, True])
def test_who_goes_on_to_write_to_an_end_that_is_gone_is_told_even_if_it_does_not_read(ends, clock, late):
    """The end of the stream waits to be read. The end that is gone answers what is sent to it with a reset, as TCP does it."""
    paused, other = ends
    Pipe(clock, delay_s=0.5).connect(paused, other)
    paused.transport.pauseProducing()
    if not late:
        paused.transport.write(b"on its way when the other end goes")
        clock.advance(0)
    other.transport.loseConnection()
    clock.advance(0)
    if late:
        clock.pump([1, 1])
        paused.transport.write(b"too late")
        clock.advance(0)
    clock.advance(0.9)
    paused.transport.write(b"the reset is still on its way")
    clock.advance(0)
    assert other.lost and not paused.lost
    clock.advance(0.1)
    paused.transport.write(b"too late")
    clock.advance(0)
    assert paused.lost[0].check(error.ConnectionLost)
    assert clock.getDelayedCalls() == []


def test_what_the_other_end_had_sent_before_it_went_is_read_in_spite_of_a_reset(clock):
    reader, other = HalfCloseable(), ConformanceProtocol()
    Pipe(clock, delay_s=0.5).connect(reader, other)
    other.transport.write(bytes(300_000))
    other.transport.loseConnection()
    for _ in range(24):
        clock.pump([0.25, 0, 0, 0])
        if reader.half:
            reader.transport.write(b"?")
    assert len(reader.received) == 300_000 and reader.half == ["read"]
    assert reader.lost[0].check(error.ConnectionLost)


def test_a_producer_that_has_no_end_stops_when_the_other_end_is_gone(ends, clock):
    @implementer(interfaces.IPullProducer)
    class Endless:
        def resumeProducing(self):
            ends[0].transport.write(bytes(1000))

        def stopProducing(self):
            """It has no state."""

    Pipe(clock).connect(*ends)
    ends[0].transport.pauseProducing()
    ends[0].transport.registerProducer(Endless(), False)
    ends[1].transport.loseConnection()
    clock.pump([0] * 20)
    assert ends[0].lost[0].check(error.ConnectionLost)


def test_half_close_ends_protocols_that_do_not_know_it(ends, clock):
    Pipe(clock).connect(*ends)
    ends[0].transport.loseWriteConnection()
    clock.advance(0)
    assert ends[1].lost[0].check(error.ConnectionDone)
    assert ends[0].lost[0].check(error.ConnectionDone)


def test_error_in_connection_lost_is_logged_and_stops_nothing(ends, clock, logged_errors):
    class Broken(ConformanceProtocol):
        def connectionLost(self, reason=None):
            raise ZeroDivisionError

    broken, other = Broken(), ends[0]
    made = Pipe(clock).connect(broken, other)
    broken.transport.loseConnection()
    clock.advance(0)
    assert made.closed
    assert len(other.lost) == 1
    assert len(logged_errors.flush(ZeroDivisionError)) == 1


def test_ends_are_tcp_transports_with_addresses(ends, clock):
    addresses = IPv4Address("TCP", "10.0.0.1", 5), IPv4Address("TCP", "10.0.0.2", 6)
    made = Pipe(clock, addresses=addresses).connect(*ends)
    for end, host, peer in ((made.a, *addresses), (made.b, *reversed(addresses))):
        assert verifyObject(interfaces.ITCPTransport, end)
        assert (end.getHost(), end.getPeer()) == (host, peer)
        assert (end.getTcpNoDelay(), end.getTcpKeepAlive()) == (False, False)
        end.setTcpNoDelay(True)
        end.setTcpKeepAlive(1)
        assert (end.getTcpNoDelay(), end.getTcpKeepAlive()) == (True, True)


def test_nothing_is_left_on_the_clock(ends, clock):
    Pipe(clock, delay_s=1).connect(*ends)
    ends[0].transport.write(bytes(1000))
    ends[0].transport.loseConnection()
    clock.pump([1] * 3)
    assert clock.getDelayedCalls() == []


# --- networks --------------------------------------------------------------------------------------------------------


def connect(network, host, port, protocol=None, **options):
    outcome = []
    endpoint = TCP4ClientEndpoint(network, host, port, **options)
    endpoint.connect(OneProtocolFactory(protocol or ConformanceProtocol())).addBoth(outcome.append)
    return outcome


def listen(network, port, protocol=None, interface=""):
    return network.listenTCP(port, OneProtocolFactory(protocol or ConformanceProtocol()), interface=interface)


def test_network_provides_what_endpoints_ask_for():
    network = MemoryNetwork()
    for interface in (interfaces.IReactorTCP, interfaces.IReactorTime, interfaces.IReactorPluggableNameResolver):
        assert verifyObject(interface, network)
    port = listen(network, 0)
    assert verifyObject(interfaces.IListeningPort, port)
    assert "MemoryPort" in repr(port)
    connector = network.connectTCP("127.0.0.1", port.getHost().port, ClientFactory.forProtocol(ConformanceProtocol))
    assert verifyObject(interfaces.IConnector, connector)
    assert connector.getDestination().port == port.getHost().port
    connector.disconnect()


def test_endpoint_strings_work():
    network, server = MemoryNetwork(hosts={"relay.test": ["10.0.0.9"]}), ConformanceProtocol()
    serverFromString(network, "tcp:8080").listen(OneProtocolFactory(server))
    outcome = []
    client = ConformanceProtocol()
    clientFromString(network, "tcp:relay.test:8080").connect(OneProtocolFactory(client)).addBoth(outcome.append)
    network.advance(1)
    assert outcome == [client]
    assert server.transport.getHost() == IPv4Address("TCP", "10.0.0.9", 8080)
    assert client.transport.getPeer() == server.transport.getHost()
    assert server.transport.getPeer() == client.transport.getHost()


def test_bind_address_is_what_the_server_sees():
    network, server = MemoryNetwork(), ConformanceProtocol()
    listen(network, 80, server)
    connect(network, "10.0.0.1", 80, bindAddress=("10.9.9.9", 0))
    network.advance()
    assert server.transport.getPeer().host == "10.9.9.9"


def test_listeners_are_told_apart_by_interface_and_port():
    network = MemoryNetwork()
    one, two = ConformanceProtocol(), ConformanceProtocol()
    listen(network, 80, one, "10.0.0.1")
    listen(network, 80, two, "10.0.0.2")
    with pytest.raises(error.CannotListenError):
        listen(network, 80, None, "10.0.0.2")
    connect(network, "10.0.0.2", 80)
    [refused] = [connect(network, "10.0.0.3", 80)]
    network.advance()
    assert (one.made, two.made) == (0, 1)
    assert refused[0].check(error.ConnectionRefusedError)


def test_a_port_that_is_listened_on_is_not_given_as_a_free_one():
    network = MemoryNetwork()
    first = network.listenTCP(0, Factory()).getHost().port
    network.listenTCP(first + 1, Factory())
    assert network.listenTCP(0, Factory()).getHost().port == first + 2


def test_stopped_port_refuses_and_keeps_what_is_open():
    network, server, client = MemoryNetwork(), ConformanceProtocol(), ConformanceProtocol()
    port = listen(network, 80, server)
    connect(network, "10.0.0.1", 80, client)
    network.advance()
    port.stopListening()
    refused = connect(network, "10.0.0.1", 80)
    client.transport.write(b"still here")
    network.advance()
    assert refused[0].check(error.ConnectionRefusedError)
    assert server.received == b"still here"
    listen(network, 80)


@pytest.mark.parametrize(
    ("spoil", "reason", "after_s"),
    [
        (lambda n: n.refuse("10.0.0.1", 80), error.ConnectionRefusedError, 0.1),
        (lambda n: n.refuse("10.0.0.1"), error.ConnectionRefusedError, 0.1),
        (lambda n: n.unreachable("10.0.0.1"), error.NoRouteError, 0.1),
        (lambda n: n.silence("10.0.0.1", 80), error.TimeoutError, 7.0),
    ],
)
def test_ways_to_fail(spoil, reason, after_s):
    network = MemoryNetwork(delay_s=0.1)
    listen(network, 80)
    spoil(network)
    outcome = connect(network, "10.0.0.1", 80, timeout=7)
    network.advance(after_s - 0.05)
    assert outcome == []
    network.advance(0.05)
    assert isinstance(outcome[0], Failure)
    assert outcome[0].check(reason)
    network.heal("10.0.0.1", 80)
    network.heal("10.0.0.1")
    healed = connect(network, "10.0.0.1", 80)
    network.advance(0.2)
    assert isinstance(healed[0], ConformanceProtocol)
    assert network.getDelayedCalls() == []


def test_unknown_names():
    network = MemoryNetwork()
    for outcome in ([], []):
        HostnameEndpoint(network, "nowhere.test", 80).connect(Factory()).addBoth(outcome.append)
        network.advance(1)
        assert outcome[0].check(error.DNSLookupError)
    direct = connect(network, "nowhere.test", 80)
    network.advance(1)
    assert direct[0].check(error.DNSLookupError)


def test_cancelling_and_late_answers():
    network, server = MemoryNetwork(delay_s=1), ConformanceProtocol()
    listen(network, 80, server)
    outcome = []
    connecting = TCP4ClientEndpoint(network, "10.0.0.1", 80).connect(OneProtocolFactory(ConformanceProtocol()))
    connecting.addBoth(outcome.append)
    network.advance(0.5)
    connecting.cancel()
    network.advance(10)
    assert outcome[0].check(error.ConnectingCancelledError)
    assert server.made == 0
    assert network.getDelayedCalls() == []


def test_factories_without_a_protocol_close_the_connection():
    class Picky(Factory):
        def buildProtocol(self, addr):
            return None

    network, client = MemoryNetwork(), ConformanceProtocol()
    network.listenTCP(80, Picky())
    connect(network, "10.0.0.1", 80, client)
    network.advance()
    assert client.lost[0].check(error.ConnectionDone)
    assert network.pipes == []


def test_open_pipes_are_listed():
    network = MemoryNetwork()
    network.listenTCP(80, Factory.forProtocol(ConformanceProtocol))
    network.listenTCP(81, Factory.forProtocol(ConformanceProtocol))
    clients = [ConformanceProtocol() for _ in range(3)]
    for client, port in zip(clients, (80, 81, 80), strict=True):
        connect(network, "10.0.0.1", port, client)
    network.advance()
    assert [made.a for made in network.pipes] == [client.transport for client in clients]
    assert [made.a for made in network.pipes_to(80)] == [clients[0].transport, clients[2].transport]
    assert network.pipes_to(80, "10.0.0.2") == []
    network.pipes_to(81)[0].cut()
    assert [made.a for made in network.pipes] == [clients[0].transport, clients[2].transport]


def test_connectors_tell_their_factory():
    class Remembering(ClientFactory):
        protocol = ConformanceProtocol

        def __init__(self):
            self.told = []

        def clientConnectionLost(self, connector, reason):
            self.told.append(reason.type)
            if len(self.told) == 1:
                connector.connect()

    network, factory = MemoryNetwork(), Remembering()
    network.listenTCP(80, Factory.forProtocol(ConformanceProtocol))
    connector = network.connectTCP("10.0.0.1", 80, factory)
    network.advance()
    connector.disconnect()
    network.advance()
    assert factory.told == [error.ConnectionDone]
    assert len(network.pipes) == 1, "it has connected again"
    network.pipes[0].cut()
    assert factory.told == [error.ConnectionDone, error.ConnectionLost]
    assert connector.state == "disconnected"


def test_advance_stops_at_each_call_that_is_due():
    network = MemoryNetwork()
    seen = []

    def again():
        seen.append(round(network.seconds(), 6))
        network.callLater(0.3, again)

    network.callLater(0.3, again)
    network.advance(1.0)
    assert seen == [0.3, 0.6, 0.9]
    assert network.seconds() == pytest.approx(1.0)


def test_name_resolver_can_be_replaced():
    one, two = MemoryNetwork(), MemoryNetwork(hosts={"relay.test": "10.0.0.2"})
    before = one.installNameResolver(two.nameResolver)
    assert one.nameResolver is two.nameResolver
    assert verifyObject(interfaces.IHostnameResolver, before)
    outcome = []
    HostnameEndpoint(one, "relay.test", 80).connect(Factory()).addBoth(outcome.append)
    one.advance(1)
    assert outcome[0].check(error.ConnectionRefusedError)
