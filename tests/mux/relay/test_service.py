"""The server as a service: what the tests of its rules and of its weaknesses do not touch."""

from __future__ import annotations

import pytest
import pytest_twisted
from twisted.internet.defer import CancelledError, TimeoutError
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.error import CannotListenError
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater

from dmsg.address import HostPort
from dmsg.crypto.keys import SecretKey
from dmsg.eventlog.schema import ServerStopped, SessionDown, SessionUp, TransportOpened
from dmsg.mux.core.wire import ACCEPT, CLOSE, FWD, OK, REQUEST, CloseReason, encode_close, encode_frame
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.service import DmsgRelay
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork
from dmsg.testing.raw import connect_raw
from tests.memory_log import MemoryEventLog


@pytest_twisted.ensureDeferred
async def test_listening_on_a_port_that_is_taken(reactor, logged_errors):
    taken = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory())
    endpoint = TCP4ServerEndpoint(reactor, taken.getHost().port, interface="127.0.0.1")
    server = DmsgRelay(reactor, SecretKey.generate(), endpoint)
    server.startService()
    with pytest.raises(CannotListenError):
        await server.listening()
    assert not server.ready
    assert len(logged_errors.flush(CannotListenError)) == 1
    await server.stopService()
    await taken.stopListening()


@pytest_twisted.ensureDeferred
async def test_a_relay_that_does_not_run_is_stopped_and_one_that_stops_is_stopped_once():
    memory, log = MemoryNetwork(), MemoryEventLog()
    endpoint = TCP4ServerEndpoint(memory, 7_000, interface="127.0.0.1")
    server = DmsgRelay(memory, SecretKey.generate(), endpoint, events=log)
    await server.stopService()
    server.startService()
    assert server.ready and log.of(ServerStopped) == []
    first, second = server.stopService(), server.stopService()
    assert not server.ready
    memory.advance(0)
    assert first.called and second.called and len(log.of(ServerStopped)) == 1
    await server.stopService()
    assert len(log.of(ServerStopped)) == 1


def test_a_relay_may_be_stopped_as_soon_as_it_listens():
    memory = MemoryNetwork()
    server = DmsgRelay(memory, SecretKey.generate(), TCP4ServerEndpoint(memory, 7_000, interface="127.0.0.1"))
    stopped = server.listening().addCallback(lambda _: server.stopService())
    server.startService()
    memory.advance(0)
    assert stopped.called and not server.running and not memory.getDelayedCalls()
    server.startService()
    assert server.ready
    server.stopService()
    memory.advance(0)


def test_a_relay_that_has_stopped_does_not_listen_until_it_is_started_again():
    memory = MemoryNetwork()
    server = DmsgRelay(memory, SecretKey.generate(), TCP4ServerEndpoint(memory, 7_000, interface="127.0.0.1"))
    ports = []
    server.listening().addCallback(ports.append)
    server.startService()
    server.stopService()
    server.listening().addCallback(ports.append)  # while it stops
    memory.advance(0)
    server.listening().addCallback(ports.append)  # and when it has
    assert len(ports) == 1, "the port is the one that was closed"
    server.startService()
    assert len(ports) == 3 and ports[1] is ports[2] is not ports[0]
    server.stopService()
    memory.advance(0)


@pytest_twisted.ensureDeferred
async def test_a_relay_that_is_started_twice_goes_on():
    """As one that a program starts, and then gives to a parent that runs."""
    async with LocalNetwork(MemoryNetwork(), relays=1) as network:
        [relay] = network.relays
        port = await relay.listening()
        relay.startService()
        await network.settle()
        assert await relay.listening() is port
        alice, bob = await network.client(), await network.client()
        bob.listen(Factory.forProtocol(Protocol))
        await network.wait(alice.dial(bob.public_key))


@pytest_twisted.ensureDeferred
async def test_a_relay_that_is_started_again_is_listed_and_carries_again():
    memory = MemoryNetwork()
    async with LocalNetwork(memory, relays=0) as network:
        endpoint = TCP4ServerEndpoint(memory, 7_000, interface="127.0.0.1")
        address = HostPort("127.0.0.1", 7_000)
        relay = DmsgRelay(
            memory,
            SecretKey.generate(),
            endpoint,
            public_address=address,
            discovery=network.discovery,
            now_ns=lambda: int(memory.seconds() * 1e9),
        )
        relay.startService()
        alice, bob = await network.client(), await network.client()
        for _ in range(3):
            [entry] = await network.discovery.available_servers()
            assert entry.static == relay.key.public_key and entry.server.available_connections > 0
            bob_port = bob.listen(Factory.forProtocol(Protocol))
            transport = await network.wait(alice.dial(bob.public_key))
            assert relay.switch.open_transports == 1
            transport.abortConnection()
            await network.wait(bob_port.stopListening())
            await network.wait(relay.stopService())
            await network.settle()
            assert not alice.pool.sessions and await network.discovery.available_servers() == []
            relay.startService()
            for client in (alice, bob):
                await network.wait(client.when_ready())
        await network.wait(relay.stopService())


@pytest.mark.parametrize("again", [1, 2])
@pytest.mark.parametrize("waits", [True, False])
@pytest_twisted.ensureDeferred
async def test_a_relay_that_is_started_before_it_has_stopped_begins_then(waits, again):
    memory = MemoryNetwork()
    async with LocalNetwork(memory, relays=0) as network:
        endpoint = TCP4ServerEndpoint(memory, 7_000, interface="127.0.0.1")
        address = HostPort("127.0.0.1", 7_000)
        now_ns, discovery = network.now_ns, network.discovery
        key = SecretKey.generate()
        relay = DmsgRelay(memory, key, endpoint, public_address=address, discovery=discovery, now_ns=now_ns)
        relay.startService()
        alice, bob = await network.client(), await network.client()
        bob.listen(Factory.forProtocol(Protocol))
        (await network.wait(alice.dial(bob.public_key))).attach(Protocol())  # the relay drains until this ends
        stopping = relay.stopService()
        if waits:
            with pytest.raises(TimeoutError):
                await network.wait(stopping.addTimeout(0.5, memory))
        for _ in range(again):
            relay.startService()
        listening = relay.listening()
        assert not listening.called and not relay.ready, "the port is the one that was closed"
        await network.wait(listening)
        assert relay.ready and relay.running
        for client in (alice, bob):
            await network.wait(client.when_ready())
        (await network.wait(alice.dial(bob.public_key))).abortConnection()
        await network.wait(relay.stopService())
        assert not relay.running


@pytest_twisted.ensureDeferred
async def test_a_relay_that_is_stopped_again_before_it_has_begun_stays_stopped():
    memory = MemoryNetwork()
    async with LocalNetwork(memory, relays=0, discovery=None) as network:
        relay = DmsgRelay(memory, SecretKey.generate(), TCP4ServerEndpoint(memory, 7_000, interface="127.0.0.1"))
        relay.startService()
        raw = await network.wait(connect_raw(TCP4ClientEndpoint(memory, "127.0.0.1", 7_000), relay.key.public_key))
        first = relay.stopService()
        relay.startService()
        listening = relay.listening()
        second = relay.stopService()
        with pytest.raises(CancelledError):
            await network.wait(listening)
        for stopping in (first, second):
            await network.wait(stopping)
        await network.wait(raw.lost())
        memory.advance(60.0)
        assert not relay.running and not relay.ready


@pytest_twisted.ensureDeferred
async def test_who_takes_no_answers_is_not_read_from():
    """What waits for him stays within the limit and one read's answers; once he takes them he gets every one."""
    pipe_bytes, limit_bytes, requests = 8_192, 2_000, 20_000
    memory = MemoryNetwork(high_water_bytes=pipe_bytes)
    limits = RelayLimits(requests_per_s=1e9, request_burst=10**9, control_backlog_bytes=limit_bytes)
    async with LocalNetwork(memory, relays=1, discovery=None, limits=limits) as network:
        [pinned] = network.pinned
        endpoint = TCP4ClientEndpoint(memory, pinned.address.host, pinned.address.port)
        raw = await network.wait(connect_raw(endpoint, pinned.public_key))
        raw.pause()
        payload = raw.key.public_key.raw + SecretKey.generate().public_key.raw
        for first in range(0, requests, 100):
            raw.send_frames((REQUEST, 2 * at, payload) for at in range(first, first + 100))
            memory.advance(0)
        [server] = network.relays
        member = server.switch.members[raw.key.public_key.raw]
        answers_of_a_read = pipe_bytes // len(encode_frame(REQUEST, 0, payload)) * len(encode_close(0, 0))
        assert limit_bytes < member.control_backlog_bytes <= limit_bytes + answers_of_a_read
        assert member.frames_in < requests
        raw.resume()
        while member.frames_in < requests or member.control_backlog_bytes:
            await network.settle()
        await network.settle()
        assert [(frame.kind, frame.transport_id) for frame in raw.take_frames()[1:]] == [
            (CLOSE, 2 * at) for at in range(requests)
        ]
        raw.close()


async def from_address(network, host, count=1):
    """Connections to the first relay from one address, which have read what it says first."""
    [pinned] = network.pinned
    endpoint = TCP4ClientEndpoint(network.reactor, pinned.address.host, pinned.address.port, bindAddress=(host, 0))
    found = [await network.wait(connect_raw(endpoint, pinned.public_key)) for _ in range(count)]
    for raw in found:
        await network.wait(raw.next_frame(OK))
    return found


@pytest_twisted.ensureDeferred
async def test_halves_of_records_and_frames_are_bounded_in_all():
    """A key each, 131 KB each: 1,000 keys of one address took 131 MB, and 10,000 of ten 1.3 GB."""
    limit = 1 << 20
    async with LocalNetwork(
        MemoryNetwork(), relays=1, discovery=None, limits=RelayLimits(queued_total_bytes=limit)
    ) as network:
        [relay], memory = network.relays, network.reactor
        strangers = await from_address(network, "203.0.113.1", 20)
        [alice], [bob] = await from_address(network, "192.0.2.1"), await from_address(network, "192.0.2.2")
        frame = encode_frame(REQUEST, 2, alice.key.public_key.raw + SecretKey.generate().public_key.raw)
        half = alice.seal(frame[:20]) + alice.seal(frame[20:])
        alice.send_bytes(half[:-30])
        for raw in strangers:
            raw.send_plain(encode_frame(FWD, 2, bytes(60_000))[:-1])
            raw.send_bytes(raw.seal(bytes(60_000))[:-1])
        for _ in range(5):
            memory.advance(8.0)
            bob.send_frame(CLOSE, 2)  # a relay looks when it reads
            memory.advance(0)
        left = [raw for raw in strangers if raw.lost_reason is None]
        assert 0 < len(left) * 120_000 <= limit
        assert len(relay.switch.members) == len(left) + 2
        alice.send_bytes(half[-30:])  # hers was not what is too much
        assert (await network.wait(alice.next_frame(CLOSE))).payload == bytes((CloseReason.UNKNOWN_PEER,))


@pytest_twisted.ensureDeferred
async def test_answers_that_are_not_taken_are_bounded_in_all():
    limit = 40_000
    memory = MemoryNetwork(high_water_bytes=4_096)
    limits = RelayLimits(queued_total_bytes=limit, requests_per_s=1e9, request_burst=10**9)
    async with LocalNetwork(memory, relays=1, discovery=None, limits=limits) as network:
        [relay] = network.relays
        strangers = await from_address(network, "203.0.113.1", 20)
        [alice], [bob] = await from_address(network, "192.0.2.1"), await from_address(network, "192.0.2.2")
        for raw, requests in ((alice, 1_500), *((raw, 2_000) for raw in strangers)):
            raw.pause()
            payload = raw.key.public_key.raw + SecretKey.generate().public_key.raw
            for first in range(0, requests, 100):
                raw.send_frames((REQUEST, 2 * at, payload) for at in range(first, first + 100))
                memory.advance(0)
        for _ in range(5):
            memory.advance(8.0)
            bob.send_frame(CLOSE, 2)
            memory.advance(0)
        left = [raw for raw in strangers if raw.lost_reason is None]
        held = sum(member.control_backlog_bytes for member in relay.switch.members.values())
        assert 0 < len(left) < 10 and 0 < held <= limit and alice.lost_reason is None
        alice.resume()
        memory.advance(1.0)
        assert len(alice.take_frames()) == 1_500


@pytest.mark.parametrize("receiver_is_first", [True, False])
@pytest.mark.parametrize(
    ("ended", "drain_s", "resumes_after_s"),
    [(True, 1.0, 0.5), (True, 8.0, 5.0), (False, 1.0, 1.5)],
    ids=["ended", "ended and late", "open"],
)
@pytest_twisted.ensureDeferred
async def test_a_relay_that_stops_writes_out_what_is_queued_before_it_closes(
    ended, drain_s, resumes_after_s, receiver_is_first
):
    """What came before the end of a transport, and why it ended, for a receiver that takes it in time."""
    memory = MemoryNetwork(high_water_bytes=8_192)
    async with LocalNetwork(memory, relays=1, discovery=None, limits=RelayLimits(drain_timeout_s=drain_s)) as network:
        [pinned], [server] = network.pinned, network.relays
        endpoint = TCP4ClientEndpoint(memory, pinned.address.host, pinned.address.port)
        clients = [await network.wait(connect_raw(endpoint, pinned.public_key)) for _ in range(2)]
        alice, bob = reversed(clients) if receiver_is_first else clients
        keys = alice.key.public_key.raw + bob.key.public_key.raw
        alice.send_frame(REQUEST, 2, keys)
        asked = await network.wait(bob.next_frame(REQUEST))
        bob.send_frame(ACCEPT, asked.transport_id, keys)
        await network.wait(alice.next_frame(ACCEPT))
        bob.pause()
        sent = [sequence.to_bytes(2, "big") + bytes(4_000) for sequence in range(100)]
        for payload in sent:
            alice.send_frame(FWD, 2, payload)
            memory.advance(0)
        if ended:
            alice.send_frame(CLOSE, 2, b"\0")
            memory.advance(0)
        assert server.switch.queued_bytes > 300_000
        stopped = server.stopService()
        memory.advance(resumes_after_s)
        assert not stopped.called
        bob.resume()
        memory.advance(0.5)
        assert stopped.called and bob.lost_reason is not None
        *data, close = bob.take_frames()
        assert [frame.payload for frame in data] == sent
        reason = CloseReason.NORMAL if ended else CloseReason.SERVER_DRAINING
        assert (close.kind, close.transport_id, close.payload) == (CLOSE, asked.transport_id, bytes((reason,)))


@pytest_twisted.ensureDeferred
async def test_times_are_kept_however_long_the_relay_runs():
    memory = MemoryNetwork()
    memory.advance(1_000_000.0)
    async with LocalNetwork(memory, relays=1, discovery=None, limits=RelayLimits(request_timeout_s=3.0)) as network:
        [pinned] = network.pinned
        endpoint = TCP4ClientEndpoint(memory, pinned.address.host, pinned.address.port)
        alice, bob = [await network.wait(connect_raw(endpoint, pinned.public_key)) for _ in range(2)]
        alice.send_frame(REQUEST, 2, alice.key.public_key.raw + bob.key.public_key.raw)
        await network.wait(bob.next_frame(REQUEST))
        memory.advance(2.5)
        assert [frame for frame in alice.take_frames() if frame.kind == CLOSE] == []
        memory.advance(2.0)
        [close] = alice.take_frames()
        assert (close.kind, close.transport_id) == (CLOSE, 2)


@pytest_twisted.ensureDeferred
async def test_the_log_says_how_long_the_peer_took_to_accept():
    """At the side that asked; the other answered at once."""
    memory = MemoryNetwork(delay_s=0.25)
    log = MemoryEventLog()
    async with LocalNetwork(memory, relays=1, discovery=None, events=log) as network:
        alice, bob = await network.client(), await network.client()
        bob.listen(Factory.forProtocol(Protocol))
        await network.wait(alice.connect(Factory.forProtocol(Protocol), bob.public_key))
        memory.advance(1.0)  # Bob is told once Alice has proved herself
        taken = sorted(event.accept_ms for event in log.of(TransportOpened) if event.security != "unknown")
    # to the relay and on, and back the same way
    assert taken == [0.0, pytest.approx(1_000.0)]


@pytest_twisted.ensureDeferred
async def test_the_log_of_a_client_tells_when_sessions_come_and_go():
    memory = MemoryNetwork()
    log = MemoryEventLog()
    async with LocalNetwork(memory, relays=1, discovery=None) as network:
        await network.client(events=log)
        [server] = network.relays
        for member in list(server.switch.members.values()):
            member.owner.transport.abortConnection()
        await network.wait(deferLater(memory, 10.0))
    server_key = str(server.key.public_key)
    assert [(event.server, event.reason) for event in log.of(SessionUp)] == [
        (server_key, "first"),
        (server_key, "reconnect"),
    ]
    assert server_key in {event.server for event in log.of(SessionDown)}
