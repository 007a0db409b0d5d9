"""The weaknesses of the reference's clients, and those that need both sides.

Tests are named by rows of the table in docs/explanation/differences.rst. Real clients and servers on loopback, some of
them raw ones that misbehave; bystanders on a healthy server must go on echoing.
"""

from __future__ import annotations

import random
import time

import pytest
import pytest_twisted
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred, gatherResults
from twisted.internet.error import ConnectionLost
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.logger import globalLogPublisher

from dmsg.crypto.keys import SecretKey
from dmsg.errors import DialError
from dmsg.eventlog import schema as ev
from dmsg.glue.stream_transport import TransportLost
from dmsg.mux.client.service import ClientConfig
from dmsg.mux.core.errors import Busy, SlowConsumer
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.record import COUNTER_LIMIT, COUNTER_SOFT_LIMIT
from dmsg.mux.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FRAME_PAYLOAD_LIMIT_BYTES,
    FWD,
    OK,
    REQUEST,
    CloseReason,
    encode_frame,
)
from dmsg.mux.relay.limits import RelayLimits
from dmsg.relays.pool import PoolConfig
from dmsg.testing.strategies import BAD_POINTS

pytestmark = pytest.mark.system
sync = pytest_twisted.ensureDeferred

FAST_POOL = PoolConfig(connect_timeout_s=0.3, backoff_first_s=0.01, backoff_limit_s=0.05, poll_s=0.05)


async def _echoes(w, client, target):
    recorder = await w.connect(client, target)
    recorder.transport.write(b"still here")
    assert await w.soon(recorder.got(10)) == b"still here"
    recorder.transport.loseConnection()
    await w.soon(recorder.lost)


# --- crashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", BAD_POINTS.values(), ids=BAD_POINTS.keys())
@sync
async def test_w01_a_server_answers_with_a_bad_key(world, point):
    """A server's message 2 with a key that is no point killed the client's process. Here: this attempt has failed."""
    async with world() as w:
        bad, pinned = await w.raw_server(shake=False)
        peer = await w.echoer()
        client = await w.client(w.pinned, pinned)
        for _ in range(3):
            raw = await w.soon(bad.accept())
            await w.until(lambda raw=raw: len(raw.received) == 51)
            raw.send_packet(point + bytes(16))
            await w.soon(raw.lost(), 2.0)
        assert list(client.pool.sessions) == [w.pinned.public_key]
        await _echoes(w, client, peer)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 19])
@sync
async def test_w02_short_packets_to_a_client(world, size):
    """A packet shorter than 4 bytes killed the receiver. Here: the client drops this server and connects anew."""
    async with world() as w:
        server, pinned = await w.raw_server()
        client = await w.client(pinned)
        raw = await w.soon(server.accept())
        raw.send_packet(bytes(size))
        await w.soon(raw.lost(), 2.0)
        await w.soon(server.accept())
        await w.until(lambda: client.pool.sessions)


@sync
async def test_w03_writes_of_every_awkward_size(world):
    """Writes of 65509 bytes and more crashed the server or corrupted the stream. Here: legal frames, and all of it."""
    async with world() as w:
        server, pinned = await w.raw_server()
        client = await w.client(pinned)
        raw = await w.soon(server.accept())
        received = bytearray()

        def take(frame):
            if frame.kind == REQUEST:
                raw.send_frame(ACCEPT, frame.transport_id, frame.payload)
            elif frame.kind == FWD:
                assert 2 < len(frame.payload) <= FRAME_PAYLOAD_LIMIT_BYTES
                received.extend(frame.payload[2:])
                raw.send_frame(ACK, frame.transport_id, frame.payload[:2])
            return True

        raw.on_frame = take
        transport = await w.soon(client.dial(SecretKey.generate().public_key))
        transport.attach(Protocol())
        for size in (*range(65_507, 65_537), 70_000, 1 << 20):
            data = random.Random(size).randbytes(size)
            received.clear()
            transport.write(data)
            await w.until(lambda wanted=size: len(received) >= wanted)
            assert received == data
        transport.abortConnection()


@sync
async def test_w03_awkward_sizes_through_a_server(world):
    """The same through a server and back."""
    async with world() as w:
        peer, client = await w.echoer(), await w.client()
        recorder = await w.connect(client, peer)
        for size in (65_508, 65_509, 65_511, 65_513, 65_529, 65_536, 70_000, 1 << 20):
            data = random.Random(size).randbytes(size)
            recorder.received.clear()
            recorder.transport.write(data)
            assert await w.soon(recorder.got(size)) == data


# --- what a server or a peer can use up ------------------------------------------------------------------------------


@sync
async def test_w07_a_dial_when_all_ids_are_taken(world):
    """The client's Dial spun under its lock when all ids were taken. Here: it fails at once."""
    async with world() as w:
        _server, pinned = await w.raw_server()
        client = await w.client(pinned)
        (session,) = client.pool.sessions.values()
        target = SecretKey.generate().public_key
        for _ in range(32_768):
            session.connection.open(target)
        cpu = time.process_time()
        with pytest.raises(DialError) as caught:
            await w.soon(client.dial(target), 1.0)
        assert isinstance(caught.value.attempts[0].error, Busy)
        assert time.process_time() - cpu < 0.2
        session.abort()


@pytest.mark.parametrize("size", [10_000, 1, 0])
@sync
async def test_w10_a_sender_that_ignores_acknowledgements(world, size):
    """The receiver buffered without bound. Here: CLOSE at the cap, for pieces of every size."""
    limit = 256 * 1024
    config = ClientConfig(connection=ConnectionConfig(receive_limit_bytes=limit), pool=FAST_POOL)
    async with world() as w:
        victim = await w.client(config=config)
        inner = w.Recorder()
        victim.listen(Factory.forProtocol(lambda: inner))
        sender = await w.raw()
        closed = []
        sender.on_frame = lambda frame: frame.kind == CLOSE and not closed.append(frame.payload)
        assert (await w.soon(sender.request(victim.public_key, 2))).kind == ACCEPT
        await w.soon(inner.made)
        transport = inner.transport
        transport.pauseProducing()
        (session,) = victim.pool.sessions.values()
        (stream,) = session.connection.streams.values()
        sender.send_frames([(FWD, 2, bytes(60_000))] * 2)  # beyond the point up to which each FWD is acknowledged
        sent = held = 0
        while not closed:
            assert sent < 200_000, "nothing stopped the sender"
            batch = 1_000 if size < 100 else 5
            sender.send_frames([(FWD, 2, bytes(2 + size))] * batch)
            sent += batch
            await w.turn()
            await w.until(lambda: not sender.transport.dataBuffer and not sender.transport._tempDataBuffer)
            held = max(held, len(stream.gate.held) + len(transport._inbox))
        assert closed == [bytes([CloseReason.SLOW_CONSUMER])]
        assert sum(map(len, transport._inbox)) <= limit + 60_000
        assert held <= 3 * 65_536
        transport.resumeProducing()
        reason = await w.soon(inner.lost)
        assert isinstance(reason.cause, SlowConsumer)
        assert len(inner.received) <= limit + 60_000
        await w.unharmed()


@pytest.mark.parametrize("attack", ["replay", "drop", "alter"])
@sync
async def test_w11_a_servers_records_out_of_sequence(world, attack):
    """Replayed and reordered packets were accepted. Here: the client drops the server, ends its transports, reconnects."""
    async with world() as w:
        server, pinned = await w.raw_server()
        client = await w.client(pinned)
        raw = await w.soon(server.accept())
        raw.on_frame = lambda frame: (
            frame.kind == REQUEST and not raw.send_frame(ACCEPT, frame.transport_id, frame.payload)
        )
        transport = await w.soon(client.dial(SecretKey.generate().public_key))
        recorder = w.Recorder()
        transport.attach(recorder)
        records = [raw.seal(encode_frame(FWD, transport.stream.id, b"\0\0" + bytes([65 + i]))) for i in range(3)]
        raw.send_bytes(records[0])
        await w.soon(recorder.got(1))
        second = {"replay": records[0], "drop": records[2], "alter": records[1][:-1] + bytes([records[1][-1] ^ 1])}
        raw.send_bytes(second[attack])
        await w.soon(raw.lost(), 2.0)
        assert isinstance(await w.soon(recorder.lost), TransportLost)
        assert recorder.received == b"A"
        await w.soon(server.accept())


@sync
async def test_w11_connections_near_exhaustion_are_renewed_when_idle(world):
    """Counters far on: the connection is made anew when nothing is open on it, and not before."""
    async with world() as w:
        peer, client = await w.echoer(), await w.client()
        (first,) = client.pool.sessions.values()
        member = w.server.switch.members[client.public_key.raw]
        first.connection._records._sent = member.records._received = COUNTER_SOFT_LIMIT + 5
        recorder = await w.connect(client, peer)
        (second,) = client.pool.sessions.values()
        assert second is not first  # it was idle
        member = w.server.switch.members[client.public_key.raw]
        second.connection._records._sent = member.records._received = COUNTER_SOFT_LIMIT + 5
        recorder.transport.write(b"hello")
        assert await w.soon(recorder.got(5)) == b"hello"
        assert list(client.pool.sessions.values()) == [second]
        recorder.transport.loseConnection()
        await w.soon(recorder.lost)
        await w.until(lambda: list(client.pool.sessions.values()) not in ([], [second]))
        await _echoes(w, client, peer)


@pytest.mark.parametrize("who", ["client", "server"])
@sync
async def test_w11_the_hard_end_of_the_counter(world, who):
    """No nonce is ever used twice: at the end of the counter the connection ends, and the client connects again."""
    async with world() as w:
        peer, client = await w.echoer(), await w.client()
        recorder = await w.connect(client, peer)
        (session,) = client.pool.sessions.values()
        ours, theirs = session.connection._records, w.server.switch.members[client.public_key.raw].records
        sender, receiver = (ours, theirs) if who == "client" else (theirs, ours)
        sender._sent = receiver._received = COUNTER_LIMIT - 4
        for i in range(20):
            recorder.transport.write(b"%d" % i)
            await deferLater(w.reactor, 0.002)
            if recorder.reason is not None:
                break
        assert isinstance(await w.soon(recorder.lost), TransportLost)
        assert sender._sent <= COUNTER_LIMIT
        await w.until(lambda: list(client.pool.sessions.values()) not in ([], [session]))
        await _echoes(w, client, peer)


# --- order and ends --------------------------------------------------------------------------------------------------


@sync
async def test_w12_a_request_before_ok(world):
    """A base server may forward a REQUEST before it has said OK; the reference's client then gave up ("wrong frame")."""
    async with world() as w:
        server, pinned = await w.raw_server(say_ok=False)
        client = await w.echoer(pinned, ready=False)
        for _ in range(20):
            raw = await w.soon(server.accept())
            asking = SecretKey.generate().public_key
            payload = asking.raw + client.public_key.raw
            raw.send_frame(REQUEST, 7, payload)
            raw.send_frame(OK, 0)
            assert (await w.soon(raw.next_frame(ACCEPT))).payload == payload
            raw.send_frame(FWD, 7, b"\0\1hello")
            assert (await w.soon(raw.next_frame(FWD))).payload[2:] == b"hello"
            assert client.pool.sessions
            raw.abort()


@sync
async def test_w12_a_connection_that_never_gets_its_ok(world):
    """What was accepted before OK ends with the connection that never got it: no protocol waits for ever."""
    async with world() as w:
        server, pinned = await w.raw_server(say_ok=False)
        client = await w.client(pinned, ready=False)
        inner = w.Recorder()
        client.listen(Factory.forProtocol(lambda: inner))
        raw = await w.soon(server.accept())
        raw.send_frame(REQUEST, 7, SecretKey.generate().public_key.raw + client.public_key.raw)
        await w.soon(inner.made)
        raw.abort()
        assert isinstance(await w.soon(inner.lost), ConnectionLost)


@sync
async def test_w14_a_server_that_vanishes(world):
    """Transports through a server that is gone end at once, and their writers are not left waiting."""
    async with world() as w:
        server, pinned = await w.raw_server()
        client = await w.client(pinned)
        raw = await w.soon(server.accept())
        raw.on_frame = lambda frame: (
            frame.kind == REQUEST and not raw.send_frame(ACCEPT, frame.transport_id, frame.payload)
        )
        transport = await w.soon(client.dial(SecretKey.generate().public_key))
        recorder = w.Recorder()
        transport.attach(recorder)
        transport.write(bytes(1 << 20))
        transport.loseConnection()
        raw.abort()
        assert isinstance(await w.soon(recorder.lost, 2.0), TransportLost)


@pytest.mark.time_limit(60)
@sync
async def test_w17_close_and_write_at_the_same_time(world):
    """A Write that met a close could hang for ever. Here: however they meet, both ends are told within a bound."""
    choose = random.Random(17)
    limits = RelayLimits(requests_per_s=1e6, request_burst=10**6)
    async with world(limits) as w:
        listener, dialler = await w.client(), await w.client()
        accepted = []

        def build():
            accepted.append(w.Recorder())
            return accepted[-1]

        listener.listen(Factory.forProtocol(build))

        async def one() -> None:
            near = await w.connect(dialler, listener)
            far = next(end for end in accepted if end.transport.stream.remote and not hasattr(end, "taken"))
            far.taken = True
            for end in choose.sample([near, far] * 3, 6):
                action = choose.choice(["write", "write", "close", "abort", "wait"])
                if action == "write":
                    end.transport.write(bytes(choose.choice([1, 5_000, 400_000])))
                elif action == "close":
                    end.transport.loseConnection()
                elif action == "abort" and choose.random() < 0.3:
                    end.transport.abortConnection()
                else:
                    await deferLater(w.reactor, choose.choice([0, 0, 0.001]))
            near.transport.loseConnection()
            far.transport.loseConnection()
            near.transport.write(b"too late")
            await w.soon(gatherResults([near.lost, far.lost]))

        for _ in range(15):
            await w.soon(gatherResults([ensureDeferred(one()) for _ in range(8)]))
        (session,) = dialler.pool.sessions.values()
        await w.until(
            lambda: not session.connection.streams and not w.server.switch.members[listener.public_key.raw].legs
        )


@sync
async def test_w17_dials_that_are_given_up_while_they_are_answered(world):
    """One dial of two is cancelled by what the other's answer sets off, when both answers came in one read."""
    async with world() as w:
        server, pinned = await w.raw_server()
        client = await w.client(pinned)
        (session,) = client.pool.sessions.values()
        raw = await w.soon(server.accept())
        for answer in (ACCEPT, CLOSE):
            one = ensureDeferred(client.dial(SecretKey.generate().public_key))
            two = ensureDeferred(client.dial(SecretKey.generate().public_key))
            asked = [await w.soon(raw.next_frame(REQUEST)) for _ in range(2)]
            cancelled = []
            two.addErrback(lambda failure, seen=cancelled: seen.append(failure.trap(CancelledError)))

            def on_first(result, two=two):
                two.cancel()
                return result

            one.addBoth(on_first)
            answers = [(answer, frame.transport_id, frame.payload if answer == ACCEPT else b"\1") for frame in asked]
            answers.insert(1, (FWD, asked[0].transport_id, b"\0\0first"))
            answers.append((FWD, asked[1].transport_id, b"\0\0second"))
            raw.send_frames(answers)
            if answer == ACCEPT:
                recorder = w.Recorder()
                (await w.soon(one)).attach(recorder)
                await w.soon(recorder.got(5))
            else:
                with pytest.raises(DialError):
                    await w.soon(one)
            assert cancelled == [CancelledError]
            assert list(client.pool.sessions.values()) == [session]
        assert session.is_ready


@sync
async def test_w17_an_end_and_a_fault_in_one_read(world):
    """A transport's end is told although what came right behind it in the same bytes cost the whole connection."""
    async with world() as w:
        server, pinned = await w.raw_server()
        client = await w.client(pinned)
        raw = await w.soon(server.accept())
        raw.on_frame = lambda frame: (
            frame.kind == REQUEST and not raw.send_frame(ACCEPT, frame.transport_id, frame.payload)
        )
        transport = await w.soon(client.dial(SecretKey.generate().public_key))
        recorder = w.Recorder()
        transport.attach(recorder)
        raw.send_frames([(FWD, transport.stream.id, b"\0\0last"), (CLOSE, transport.stream.id, b"\0"), (OK, 0, b"")])
        await w.soon(recorder.lost, 2.0)
        assert recorder.received == b"last"
        await w.soon(raw.lost())

        # and at a server: what was opened and ended before the fault is in its log
        peer = await w.echoer()
        guilty = await w.raw()
        assert (await w.soon(guilty.request(peer.public_key, 2))).kind == ACCEPT
        guilty.send_frames([(CLOSE, 2, b"\0"), (0x7F, 2, b"")])
        await w.soon(guilty.lost(), 2.0)
        ended = [event for event in w.log.of(ev.TransportClosed) if event.initiator == str(guilty.key.public_key)]
        assert [(event.transport_id, event.opened_id) for event in ended] == [(2, 2)]
        assert all(event.opened_server == event.server for event in ended)


# --- busy waiting ----------------------------------------------------------------------------------------------------


@sync
async def test_w18_idle_costs_nothing(world):
    """Handing over a frame was a spin. Here: connected and idle, clients and server use no processor time."""
    async with world(bystanders=False) as w:
        peer, client = await w.echoer(), await w.client()
        recorder = await w.connect(client, peer)
        recorder.transport.pauseProducing()
        recorder.transport.write(b"an echo that is not read")
        await w.until(lambda: recorder.transport._inbox)
        cpu = time.process_time()
        await deferLater(w.reactor, 0.5)
        assert time.process_time() - cpu < 0.02


@sync
async def test_w18_round_trips(world):
    """Ping-pong took 3.8 ms in the median with the spin. Here: well below, and without a long tail."""
    async with world(bystanders=False) as w:
        peer, client = await w.echoer(), await w.client()
        recorder = await w.connect(client, peer)
        times = []
        for i in range(300):
            began = time.perf_counter()
            recorder.transport.write(bytes(64))
            await recorder.got(64 * (i + 1))
            times.append(time.perf_counter() - began)
        times.sort()
        assert times[150] < 0.004
        assert times[270] < 0.02


# --- connecting and logging ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["connect", "handshake", "OK"])
@sync
async def test_w21_servers_that_do_not_answer(world, descriptors, stage):
    """Nothing limited how long connecting or waiting for OK took, and failed sockets stayed open.

    Here: each step has its limit, the dial says where it ended, and the descriptors come back.
    """
    config = ClientConfig(
        connection=ConnectionConfig(ok_timeout_s=0.2), pool=PoolConfig(connect_timeout_s=0.2), handshake_timeout_s=0.2
    )
    async with world() as w:
        server, pinned = await w.raw_server(shake=stage == "OK", say_ok=False)
        before = descriptors()

        class Never:
            def connect(self, factory):
                return Deferred()

        endpoint_for = (lambda address: Never()) if stage == "connect" else None
        client = await w.client(pinned, ready=False, min_servers=0, config=config, endpoint_for=endpoint_for)
        for _ in range(5):
            began = w.reactor.seconds()
            with pytest.raises(DialError) as caught:
                await w.soon(client.dial(SecretKey.generate().public_key))
            assert 0.15 < w.reactor.seconds() - began < 2.0
            (attempt,) = caught.value.attempts
            assert (attempt.stage, attempt.reason) == {
                "connect": ("connect", "timeout"),
                "handshake": ("handshake", "timeout"),
                "OK": ("handshake", "no OK in time"),
            }[stage]
        await w.until(lambda: all(raw.lost_reason is not None for raw in server.connections))
        await w.until(lambda: descriptors() <= before)


@sync
async def test_w21_a_dial_that_ran_out_of_time_names_every_server_that_owed_an_answer(world):
    """A relay that says nothing is found out by who dials through it, and only if the log names it."""
    async with world() as w:
        silent = [await w.raw_server(shake=False) for _ in range(2)]
        client = await w.client(*(pinned for _, pinned in silent), ready=False, min_servers=0)
        with pytest.raises(DialError) as caught:
            await w.soon(client.dial(SecretKey.generate().public_key, timeout_s=0.5))
        assert {(one.stage, one.server, one.reason) for one in caught.value.attempts} == {
            ("handshake", str(pinned.public_key), "timeout") for _, pinned in silent
        }
        assert all(one.elapsed_ms >= 500 for one in caught.value.attempts)


@sync
async def test_w21_connections_that_fail_leave_no_descriptor(world, descriptors):
    """Neither side keeps the socket of a handshake that failed on either side."""
    async with world() as w:
        server, pinned = await w.raw_server(shake=False)
        before = descriptors()
        client = await w.client(pinned, ready=False, min_servers=0)
        for _ in range(10):
            dialled = ensureDeferred(client.dial(SecretKey.generate().public_key))
            raw = await w.soon(server.accept())
            raw.send_packet(bytes(49))
            with pytest.raises(DialError):
                await w.soon(dialled)
            stranger = await w.raw(shake=False)
            stranger.send_packet(bytes(49))
            await w.soon(stranger.lost())
        await w.until(lambda: descriptors() <= before)


@sync
async def test_w22_parallel_dials_make_one_connection(world):
    """Dials at the same time each opened a connection of their own. Here: 50 of them share one."""
    async with world() as w:
        peer = await w.echoer()
        client = await w.client(min_servers=0, ready=False)
        transports = await w.soon(gatherResults([ensureDeferred(client.dial(peer.public_key)) for _ in range(50)]))
        for transport in transports:
            transport.attach(Protocol())
        mine = [event for event in w.log.of(ev.ConnectionOpened) if event.remote == str(client.public_key)]
        assert len(mine) == 1
        assert len({transport.stream.id for transport in transports}) == 50


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
@sync
async def test_w23_a_dial_that_ended_takes_nothing_with_it(world, how):
    """A connection opened by a dial whose context had ended was never made again. Here: it is, for as long as we run."""
    async with world() as w:
        server, pinned = await w.raw_server(say_ok=False)
        client = await w.client(pinned, ready=False)
        dialled = ensureDeferred(
            client.dial(SecretKey.generate().public_key, timeout_s=0.1 if how == "timed out" else 10)
        )
        raw = await w.soon(server.accept())
        if how == "cancelled":
            dialled.cancel()
        with pytest.raises((CancelledError, DialError)):
            await w.soon(dialled)
        raw.send_frame(OK, 0)
        await w.soon(client.when_ready())
        for _ in range(3):
            raw.abort()
            raw = await w.soon(server.accept())
            raw.send_frame(OK, 0)
            await w.until(lambda: client.pool.sessions)
        assert len(server.connections) == 4


@sync
async def test_w24_no_log_line_for_a_frame(world):
    """The reference logged every frame. Here: a thousand frames, not one line in any log."""
    async with world() as w:
        from_clients = type(w.log)()
        peer = await w.echoer(events=from_clients)
        client = await w.client(events=from_clients)
        recorder = await w.connect(client, peer)
        raw = await w.raw()
        assert (await w.soon(raw.request(peer.public_key, 2))).kind == ACCEPT
        lines = []
        before = len(w.log.events), len(from_clients.events)
        globalLogPublisher.addObserver(lines.append)
        try:
            for i in range(500):
                raw.send_frame(FWD, 2, b"\0\0frame")
                if i % 10 == 0:
                    recorder.transport.write(bytes(100))
                    await w.soon(recorder.got(10 * i + 100))
            echoed = b""
            while len(echoed) < 500 * 5:
                echoed += (await w.soon(raw.next_frame(FWD))).payload[2:]
        finally:
            globalLogPublisher.removeObserver(lines.append)
        assert (len(w.log.events), len(from_clients.events)) == before
        assert not lines
