"""The weaknesses of the reference that a client can turn against a server.

Tests are named by rows of the table in docs/explanation/differences.rst. Every test runs a real server on loopback with
two bystanders, who must go on echoing on their connections while the attacker's ends.
"""

from __future__ import annotations

import time
from itertools import count

import pytest
import pytest_twisted
from twisted.internet.defer import ensureDeferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater

from dmsg.address import PinnedServer
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.crypto.noise import NoiseHandshake
from dmsg.eventlog import schema as ev
from dmsg.mux.core.errors import PeerGone
from dmsg.mux.core.record import COUNTER_LIMIT, RecordLayer
from dmsg.mux.core.tlv import Tlv, decode_tlvs
from dmsg.mux.core.wire import ACCEPT, ACK, CLOSE, FWD, OK, REQUEST, CloseReason, encode_frame
from dmsg.mux.relay.limits import RelayLimits
from dmsg.testing.raw import ForgedKey, connect_raw, packet
from dmsg.testing.strategies import BAD_POINTS

pytestmark = pytest.mark.system
sync = pytest_twisted.ensureDeferred


# --- crashes of the whole process ------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", BAD_POINTS.values(), ids=BAD_POINTS.keys())
@sync
async def test_w01_bad_ephemeral_in_message_1(world, point):
    """51 bytes before any authentication killed the reference's process. Here: this connection ends, no other."""
    async with world() as w:
        raw = await w.raw(shake=False)
        raw.send_packet(point + bytes(16))
        await w.soon(raw.lost(), 2.0)
        await w.until(lambda: w.log.of(ev.HandshakeFailed))
        assert w.log.of(ev.HandshakeFailed)[0].stage == "handshake"


@pytest.mark.parametrize("point", BAD_POINTS.values(), ids=BAD_POINTS.keys())
@sync
async def test_w01_bad_static_key_in_message_3(world, point):
    """A static key that is no point went the same way in the reference. Here: this connection ends, no other."""
    async with world() as w:
        raw = await w.raw(ForgedKey(point), ok=False)
        await w.soon(raw.lost(), 2.0)
        assert not raw.take_frames()
        await w.until(lambda: w.log.of(ev.HandshakeFailed))


@sync
async def test_w02_short_packets(world):
    """A packet of fewer than 4 bytes killed the receiver. Here: packets of 0 to 19 bytes end their own connection."""
    async with world() as w:
        for size in range(20):
            raw = await w.raw()
            raw.send_packet(bytes(size))
            await w.soon(raw.lost(), 2.0)
        assert len(w.server.switch.members) == 2


@sync
async def test_w02_a_record_of_nothing_is_legal(world):
    """20 bytes hold an empty plaintext: nothing happens."""
    async with world() as w:
        raw = await w.raw()
        raw.send_plain(b"", b"")
        raw.send_frame(FWD, 2, bytes(2))
        assert (await w.soon(raw.next_frame())).kind == CLOSE


@pytest.mark.parametrize("size", [65_511, 65_514, 65_515, 65_535])
@sync
async def test_w03_frames_over_the_limit_in_split_records(world, size):
    """Frames over the packet limit desynchronised or crashed the reference. Here: the sender is dropped, its peer told."""
    async with world() as w:
        peer = await w.echoer()
        raw = await w.raw()
        assert (await w.soon(raw.request(peer.public_key, 2))).kind == ACCEPT
        raw.send_frame(FWD, 2, bytes(size), cuts=[5, 40_000])
        await w.soon(raw.lost(), 2.0)
        await w.until(lambda: len(w.server.switch.members) == 3)
        assert not w.server.switch.members[peer.public_key.raw].legs


@sync
async def test_w03b_the_server_is_no_weapon_against_clients(world):
    """A frame of 65511 to 65514 bytes over two packets made the server emit a packet that killed the receiving client.

    Here: the server drops the sender before anything of it is forwarded, and the largest legal frame arrives whole.
    """
    async with world() as w:
        victim = await w.accepting_raw()
        ours = await w.client()
        received = w.Recorder()
        ours.listen(Factory.forProtocol(lambda: received))
        for size in (65_511, 65_512, 65_513, 65_514, 65_515, 65_530, 65_531, 65_535):
            raw = await w.raw()
            await w.soon(raw.request(victim.key.public_key, 2))
            raw.send_frame(FWD, 2, bytes(size), cuts=[size // 2])
            await w.soon(raw.lost(), 2.0)
            closed = await w.soon(victim.next_frame(CLOSE))
            assert closed.payload == bytes([CloseReason.PEER_GONE])
        assert all(frame.kind == REQUEST for frame in victim.take_frames())
        raw = await w.raw()
        payload = b"\0\1" + bytes(range(250)) * 262 + b"last 8.."
        assert len(payload) == 65_510
        for target, transport_id in ((victim.key.public_key, 2), (ours.public_key, 4)):
            await w.soon(raw.request(target, transport_id))
            raw.send_frame(FWD, transport_id, payload, cuts=[3, 30_000])
        assert (await w.soon(victim.next_frame(FWD))).payload == payload
        assert await w.soon(received.got(65_508)) == payload[2:]


# --- denial of service -----------------------------------------------------------------------------------------------


@sync
async def test_w05_silent_connections(world, descriptors):
    """Each silent connection stopped all accepts for 10 s, and its socket was never closed.

    Here: a new client gets in at once next to 100 of them, and they are gone after the handshake's time limit.
    """
    async with world(RelayLimits(first_byte_timeout_s=3.0)) as w:
        before = descriptors()
        silent = [await w.raw(source=f"127.0.0.{2 + i % 2}", shake=False) for i in range(100)]
        client = await w.client()
        assert w.server.stats()["half_open"] == 100  # it has waited for the end of none
        await client.stopService()
        for raw in silent:
            await w.soon(raw.lost(), 6.0)
        await w.until(lambda: descriptors() <= before)
        assert w.server.stats()["half_open"] == 0


@sync
async def test_w05_half_open_connections_of_one_address_are_limited(world):
    """The limits on strangers: above that of an address its oldest goes, above that of all the largest address's oldest."""
    limits = RelayLimits(half_open=12, half_open_per_address=8, first_byte_timeout_s=5.0)
    async with world(limits) as w:
        crowd = [await w.raw(source="127.0.0.2", shake=False) for _ in range(10)]
        await w.until(lambda: [raw.lost_reason is not None for raw in crowd] == [True] * 2 + [False] * 8)
        others = [await w.raw(source="127.0.0.3", shake=False) for _ in range(6)]
        await w.until(lambda: [raw.lost_reason is not None for raw in crowd] == [True] * 4 + [False] * 6)
        assert all(raw.lost_reason is None for raw in others)
        assert w.server.stats()["half_open"] == 12


@sync
async def test_w05_a_trickle_of_handshakes_keeps_no_new_client_waiting(world):
    """Strangers who send their first message byte by byte must not keep a new client waiting, nor pile up memory."""
    async with world() as w:
        crowd = [await w.raw(source=f"127.0.0.{2 + i % 2}", shake=False) for i in range(120)]
        going = True
        longest = 0

        def trickle() -> None:
            nonlocal longest
            longest = max(longest, len(w.server.pacer._waiting))
            for raw in crowd:
                raw.send_bytes(b"\x05")  # the length of the first message begins so: nothing wrong with it yet
            if going:
                w.reactor.callLater(0.001, trickle)

        trickle()
        try:
            cpu = time.process_time()  # all of it is spent on the crowd, whatever else the machine does
            await w.client()
            assert time.process_time() - cpu < 0.5
            assert longest <= len(crowd) + 1
        finally:
            going = False
            await deferLater(w.reactor, 0.01)


@sync
async def test_w05_bytes_that_follow_a_handshake_keep_their_order(world):
    """What a client sends right behind its handshake must not overtake it while both wait for a crowd of strangers."""
    async with world(RelayLimits(stray_burst=1_000)) as w:
        crowd = [await w.raw(shake=False) for _ in range(50)]
        firsts = [NoiseHandshake("XK", initiator=True, static=w.key, remote_static=w.key.public_key.raw) for _ in crowd]
        eager = await w.raw(shake=False)
        noise = NoiseHandshake("XK", initiator=True, static=eager.key, remote_static=w.key.public_key.raw)
        eager.send_packet(noise.write_message())
        await w.until(lambda: len(eager.received) == w.message_2_bytes)
        noise.read_message(bytes(eager.received[2:]))
        third = packet(noise.write_message())
        records = RecordLayer(noise.result.send_key, noise.result.receive_key)
        frames = [records.seal(encode_frame(FWD, 2 * i, bytes(2))) for i in range(200)]
        for raw, first in zip(crowd, firsts, strict=True):
            raw.send_packet(first.write_message())
        while len(w.server.pacer._waiting) <= 10:  # all turns are looked at: the crowd is through in milliseconds
            await w.turn()
        eager.send_bytes(third)
        for frame in frames:
            await w.turn()
            eager.send_bytes(frame)
        plaintext = bytearray()
        await w.until(lambda: len(eager.received) > w.message_2_bytes + 100)
        while plaintext.count(bytes([CLOSE])) < 200:
            assert eager.lost_reason is None
            sealed = bytes(eager.received[w.message_2_bytes :])
            del eager.received[w.message_2_bytes :]
            plaintext += b"".join(records.open(sealed))
            await w.turn()
        assert plaintext[:5] == encode_frame(OK, 0)


@pytest.mark.time_limit(60)
@sync
async def test_w06_running_out_of_descriptors(world):
    """Any error of accept ended the reference's server. Here: it goes on as soon as there are descriptors again."""
    async with world(bystanders=False) as w:
        program = w.program("server", "48")
        pinned = PinnedServer.parse(await w.soon(program.line(), 20.0))
        pinger = await w.bystanders(pinned)
        crowd = []
        for _ in range(60):
            raw = await w.soon(connect_raw(w.endpoint(pinned), pinned.public_key, shake=False))
            crowd.append(raw)
        w._raws += crowd
        await w.until(lambda: any(raw.lost_reason is not None for raw in crowd))
        await w.unharmed(pinger)
        for raw in crowd:
            if raw.lost_reason is None:
                raw.abort()
        newcomer = await w.client(pinned)
        await newcomer.stopService()
        await w.unharmed(pinger)
        assert program.alive


@pytest.mark.time_limit(60)
@sync
async def test_w07_all_ids_of_a_client_taken(world):
    """32768 requests to one victim made each further one burn a core for 10 s under the victim's lock.

    Here: the answer is an immediate CLOSE, and costs next to nothing.
    """
    limits = RelayLimits(
        transports_per_connection=70_000,
        pending_requests=70_000,
        unanswered_per_target=70_000,
        pair_request_burst=70_000,
        stranger_request_burst=140_000,
        requests_per_s=1e9,
        request_burst=10**9,
        request_timeout_s=60.0,
        control_backlog_bytes=1 << 30,
    )
    async with world(limits) as w:
        victim, attacker, honest = await w.raw(), await w.raw(), await w.raw()
        victim.on_frame = lambda frame: True
        payload = attacker.key.public_key.raw + victim.key.public_key.raw
        legs = w.server.switch.members[victim.key.public_key.raw].legs
        for first in range(0, 65_536, 2_048):
            attacker.send_frames((REQUEST, i, payload) for i in range(first, first + 2_048, 2))
            await w.until(lambda wanted=first // 2 + 1_024: len(legs) == wanted)
        assert len(legs) == 32_768
        cpu = time.process_time()
        for i in range(0, 40, 2):
            closed = await w.soon(honest.request(victim.key.public_key, i), 1.0)
            assert (closed.kind, closed.payload) == (CLOSE, bytes([CloseReason.BUSY]))
        assert time.process_time() - cpu < 1.0
        honest.send_request(honest.key.public_key, 50)
        assert (await w.soon(honest.next_frame(), 1.0)).kind == REQUEST
        attacker.abort()
        await w.until(lambda: not legs)


@sync
async def test_w07_transports_of_one_client_are_limited(world):
    """Neither who asks nor who is asked can be made to hold more transports than the limit, or more requests."""
    async with world(RelayLimits(transports_per_connection=20, unanswered_per_target=10, pending_requests=1_000)) as w:
        victim, attacker, other = await w.accepting_raw(), await w.raw(), await w.accepting_raw()
        for i in range(10):
            assert (await w.soon(attacker.request(victim.key.public_key, 2 * i), 1.0)).kind == ACCEPT
        closed = await w.soon(attacker.request(victim.key.public_key, 20), 1.0)
        assert (closed.kind, closed.payload) == (CLOSE, bytes([CloseReason.BUSY]))
        for i in range(10):
            assert (await w.soon(attacker.request(other.key.public_key, 22 + 2 * i), 1.0)).kind == ACCEPT
        closed = await w.soon(attacker.request(other.key.public_key, 42), 1.0)
        assert (closed.kind, closed.payload) == (CLOSE, bytes([CloseReason.BUSY]))
        asking, silent = await w.raw(), await w.raw()
        for i in range(10):
            asking.send_request(silent.key.public_key, 2 * i)
        closed = await w.soon(asking.request(silent.key.public_key, 20), 1.0)
        assert (closed.kind, closed.payload) == (CLOSE, bytes([CloseReason.BUSY]))


async def _pump(w, raw, transport_id, stop, limit_bytes=64 << 20):
    """Send data on a transport, heeding no ACK, until ``stop()``."""
    sent = 0
    data = bytes(2) + bytes(16_000)
    while not stop():
        assert sent < limit_bytes, "nothing stopped the sender"
        raw.send_frames([(FWD, transport_id, data)] * 8)
        sent += 8 * 16_000
        await w.turn()
        await w.until(lambda: not raw.transport.dataBuffer and not raw.transport._tempDataBuffer)


@pytest.mark.parametrize("pumping", ["beyond the hard limit", "to the soft limit"])
@pytest.mark.time_limit(60)
@sync
async def test_w08_a_stuck_receiver_stops_no_other_transport(world, pumping):
    """A receiver that did not read stopped all frames of its sender, and those of each client that sent it one frame.

    Here: others are served within 100 ms all the while, and the transport to the stuck one ends with slow_consumer.
    """
    limits = RelayLimits(slow_consumer_timeout_s=0.6)
    async with world(limits) as w:
        stuck, sender, third = await w.accepting_raw(), await w.raw(), await w.accepting_raw()
        other = await w.client()
        await w.soon(sender.request(stuck.key.public_key, 2))
        await w.soon(sender.request(third.key.public_key, 4))
        to_third = await w.connect(other, third)
        one_frame_to_stuck = await w.connect(other, stuck)
        third.take_frames()
        stuck.pause()
        ended = []
        sender.on_frame = lambda frame: frame.kind == CLOSE and not ended.append(frame)
        switch = w.server.switch

        def enough() -> bool:
            return bool(ended) or (pumping == "to the soft limit" and switch.queued_bytes > 3 << 19)

        await _pump(w, sender, 2, enough)
        one_frame_to_stuck.transport.write(b"one frame")
        slowest_s = 0.0
        rounds = 0
        stuck_since = w.reactor.seconds()
        while not ended or rounds < 10:
            assert w.reactor.seconds() - stuck_since < 3.0, "the stuck transport is still there"
            rounds += 1
            began = w.reactor.seconds()
            sender.send_frame(FWD, 4, b"\0\0from the sender")
            to_third.transport.write(b"from another client")
            for _ in range(2):
                frame = await w.soon(third.next_frame(FWD))
                third.send_frame(ACK, frame.transport_id, frame.payload[:2])
            slowest_s = max(slowest_s, w.reactor.seconds() - began)
            await w.turn()
        assert slowest_s < 0.1
        assert ended[0].payload == bytes([CloseReason.SLOW_CONSUMER])
        await w.until(lambda: switch.queued_bytes < limits.queue_soft_bytes)


@sync
async def test_w08_what_is_queued_in_all_is_limited(world):
    """Stuck receivers cannot fill the server's memory, nor keep others from opening transports."""
    limits = RelayLimits(queued_total_bytes=1 << 20, queue_soft_bytes=4 << 20, queue_hard_bytes=8 << 20)
    async with world(limits) as w:
        stuck = await w.accepting_raw()
        sender = await w.raw()
        await w.soon(sender.request(stuck.key.public_key, 2))
        stuck.pause()
        switch = w.server.switch
        ended = []
        sender.on_frame = lambda frame: frame.kind == CLOSE and not ended.append(frame)
        most = 0

        def closed() -> bool:
            nonlocal most
            most = max(most, switch.queued_bytes)
            return bool(ended)

        await _pump(w, sender, 2, closed)
        assert ended[0].payload == bytes([CloseReason.SLOW_CONSUMER])
        assert 1 << 19 < most <= limits.queued_total_bytes
        await w.connect(await w.client(), await w.echoer())


async def _busy_pair(w, **options):
    """Two raw clients with a transport between them."""
    asked, asking = await w.raw(**options), await w.raw(**options)
    asking.send_request(asked.key.public_key, 2)
    request = await w.soon(asked.next_frame(REQUEST))
    asked.send_frame(ACCEPT, request.transport_id, request.payload)
    await w.soon(asking.next_frame(ACCEPT))
    return asked, asking


@sync
async def test_w09_connections_are_limited(world):
    """There was no limit on connections. Here: what is too much is told why, and turned away."""
    async with world(RelayLimits(connections=4)) as w:
        await _busy_pair(w)
        turned_away = await w.raw(ok=False)
        ok = await w.soon(turned_away.next_frame())
        assert decode_tlvs(ok.payload)[Tlv.REASON] == b"too many connections"
        await w.soon(turned_away.lost(), 2.0)
        assert w.server.available_connections == 0


@sync
async def test_w09_connections_of_one_address_are_limited(world):
    """One address cannot take every place."""
    async with world(RelayLimits(connections_per_address=4)) as w:
        for _ in range(2):
            await _busy_pair(w, source="127.0.0.2")
        turned_away = await w.raw(source="127.0.0.2", ok=False)
        ok = await w.soon(turned_away.next_frame())
        assert decode_tlvs(ok.payload)[Tlv.REASON] == b"connections_per_address"
        await w.soon(turned_away.lost(), 2.0)
        await w.raw(source="127.0.0.3")


@sync
async def test_w09_connections_of_one_address_are_limited_for_keys_that_move_there_too(world):
    """A client's new connection takes the place of its earlier one, but not at an address where there are enough."""
    async with world(RelayLimits(connections_per_address=4)) as w:
        here = await _busy_pair(w, source="127.0.0.2")
        await _busy_pair(w, source="127.0.0.2")
        elsewhere = await w.raw(source="127.0.0.3")
        turned_away = await w.raw(elsewhere.key, source="127.0.0.2", ok=False)
        ok = await w.soon(turned_away.next_frame())
        assert decode_tlvs(ok.payload)[Tlv.REASON] == b"connections_per_address"
        await w.soon(turned_away.lost(), 2.0)
        asked = await w.raw(source="127.0.0.4")
        asked.send_request(elsewhere.key.public_key, 2)
        assert (await w.soon(elsewhere.next_frame(REQUEST))).payload
        await w.raw(here[0].key, source="127.0.0.2")
        await w.soon(here[0].lost(), 2.0)


@sync
async def test_w09_requests_are_limited(world):
    """Nothing limited unanswered requests, their rate, or how long they wait. Here: rate_limited and a time limit."""
    async with world(RelayLimits(pending_requests=5, request_timeout_s=0.5, request_burst=20, requests_per_s=1)) as w:
        victim, raw = await w.raw(), await w.raw()
        for i in range(0, 10, 2):
            raw.send_request(victim.key.public_key, i)
        closed = await w.soon(raw.request(victim.key.public_key, 10), 1.0)
        assert closed.payload == bytes([CloseReason.RATE_LIMITED])
        for _ in range(5):
            closed = await w.soon(raw.next_frame(CLOSE), 3.0)
            assert closed.payload == bytes([CloseReason.HANDSHAKE_TIMEOUT])
            closed = await w.soon(victim.next_frame(CLOSE), 3.0)
            assert closed.payload == bytes([CloseReason.HANDSHAKE_TIMEOUT])
        absent = SecretKey.generate().public_key
        answers = [(await w.soon(raw.request(absent, i), 1.0)).payload[0] for i in range(0, 60, 2)]
        assert answers.count(CloseReason.UNKNOWN_PEER) <= 16
        assert answers[-1] == CloseReason.RATE_LIMITED
        await w.soon(w.log.wait(ev.Refused), 3.0)


@pytest.mark.parametrize("kind", [CLOSE, ACCEPT, FWD, ACK])
@sync
async def test_w09_a_flood_of_strays_is_abuse(world, kind):
    """200 000 CLOSEs of unknown ids were answered one by one. Here: no CLOSE is, and soon the sender is dropped."""
    async with world() as w:
        raw = await w.raw()
        raw.send_frames((kind, i, bytes(2)) for i in range(0, 1_000, 2))
        await w.soon(raw.lost(), 2.0)
        answers = raw.take_frames()
        assert len(answers) <= (0 if kind == CLOSE else w.server.limits.stray_burst)
        closed = await w.soon(w.log.wait(ev.ConnectionClosed)) if not w.log.of(ev.ConnectionClosed) else None
        assert (closed or w.log.of(ev.ConnectionClosed)[0]).reason == "abuse"


@sync
async def test_w09_bytes_per_second_are_limited(world):
    """A connection may be held to a rate: it is read from more slowly, and loses nothing."""
    async with world(RelayLimits(bytes_per_s=1_000_000)) as w:
        receiver, raw = await w.accepting_raw(), await w.raw()
        await w.soon(raw.request(receiver.key.public_key, 2))
        began = w.reactor.seconds()
        raw.send_frames([(FWD, 2, bytes(15_000))] * 100)
        for _ in range(100):
            await w.soon(receiver.next_frame(FWD))
        assert w.reactor.seconds() - began > 0.4


# --- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ["replay", "drop", "swap", "alter", "repeat the first"])
@sync
async def test_w11_records_out_of_sequence(world, attack):
    """One packet sent four times was acted on four times. Here: anything but the next record ends the connection."""
    async with world() as w:
        raw = await w.raw()
        records = [raw.seal(encode_frame(FWD, 2 * i, bytes(2))) for i in range(4)]
        if attack == "replay":
            records.insert(2, records[1])
        elif attack == "drop":
            del records[1]
        elif attack == "swap":
            records[1], records[2] = records[2], records[1]
        elif attack == "alter":
            records[1] = records[1][:-1] + bytes([records[1][-1] ^ 1])
        else:
            records.append(records[0])
        raw.send_bytes(b"".join(records[:1]))
        assert (await w.soon(raw.next_frame(CLOSE))).transport_id == 0
        for record in records[1:]:
            raw.send_bytes(record)
        await w.soon(raw.lost(), 2.0)
        await w.until(lambda: w.log.of(ev.ConnectionClosed))
        assert w.log.of(ev.ConnectionClosed)[0].reason in ("out of sequence", "does not open")


@sync
async def test_w11_counters_end_before_nonces_repeat(world):
    """At 2^32 packets the counter wrapped and nonces were used twice. Here: the connection ends first, both ways."""
    async with world() as w:
        sending, receiving = await w.raw(), await w.raw()
        member = w.server.switch.members[sending.key.public_key.raw]
        member.records._received = sending.records._sent = COUNTER_LIMIT - 1
        sending.send_frame(FWD, 2, bytes(2))
        assert (await w.soon(sending.next_frame())).kind == CLOSE
        aead = sending.records._encrypt  # goes on where an honest sender stops
        counter = COUNTER_LIMIT + 1
        sealed = aead(bytes(4) + counter.to_bytes(8, "little"), encode_frame(FWD, 4, bytes(2)), None)
        sending.send_bytes(packet(counter.to_bytes(4, "big") + sealed))
        await w.soon(sending.lost(), 2.0)
        member = w.server.switch.members[receiving.key.public_key.raw]
        member.records._sent = receiving.records._received = COUNTER_LIMIT - 1
        receiving.send_frame(FWD, 2, bytes(2))
        assert (await w.soon(receiving.next_frame())).kind == CLOSE
        receiving.send_frame(FWD, 4, bytes(2))
        await w.soon(receiving.lost(), 2.0)
        assert not receiving.take_frames()


# --- the rules of transports -----------------------------------------------------------------------------------------


@sync
async def test_w12_ok_is_the_first_frame(world):
    """A client could be reached before it had been sent OK. Here: OK first, however eagerly others dial."""
    limits = RelayLimits(requests_per_s=1e6, request_burst=10**6, pending_requests=1_000, stray_burst=10**6)
    async with world(limits) as w:
        key = SecretKey.generate()
        eager = await w.raw()
        ids = count(0, 2)
        going = True

        def dial() -> None:
            eager.send_request(key.public_key, next(ids) % 65_536)
            if going:
                w.reactor.callLater(0, dial)

        dial()
        reached = 0
        try:
            for _ in range(40):
                raw = await w.raw(key, ok=False)
                assert (await w.soon(raw.next_frame())).kind == OK
                reached += (await w.soon(raw.next_frame())).kind == REQUEST
                raw.abort()
                await raw.lost()
        finally:
            going = False
            await w.turn()
        assert reached == 40


@sync
async def test_w13_the_newest_connection_of_a_key_wins(world):
    """When the older of two connections of one key ended, the newer could not be dialled any more.

    Here: the newer takes the place, the older is closed and its peers told, and later ends change nothing.
    """
    async with world() as w:
        dialler = await w.raw()
        key = SecretKey.generate()
        older = await w.raw(key)
        dialler.send_request(key.public_key, 2)
        asked = await w.soon(older.next_frame(REQUEST))
        older.send_frame(ACCEPT, asked.transport_id, asked.payload)
        await w.soon(dialler.next_frame(ACCEPT))
        for transport_id in (4, 6, 8):
            newer = await w.raw(key)
            await w.soon(older.lost(), 2.0)
            closed = await w.soon(dialler.next_frame(CLOSE))
            assert closed.payload == bytes([CloseReason.PEER_GONE])
            dialler.send_request(key.public_key, transport_id)
            assert (await w.soon(newer.next_frame(REQUEST))).payload[33:] == key.public_key.raw
            older = newer
        await w.soon(w.log.wait(ev.ConnectionClosed)) if not w.log.of(ev.ConnectionClosed) else None
        assert w.log.of(ev.ConnectionClosed)[0].reason == "replaced"


@sync
async def test_w13_the_older_connection_ends_by_itself(world):
    """The order that broke the reference: connect twice, close the first, dial."""
    async with world() as w:
        key = SecretKey.generate()
        older = await w.raw(key)
        newer = await w.raw(key)
        older.close()
        await w.soon(older.lost())
        client = await w.client()
        dialling = client.dial(key.public_key)
        dialled = ensureDeferred(dialling)
        asked = await w.soon(newer.next_frame(REQUEST))
        newer.send_frame(ACCEPT, asked.transport_id, asked.payload)
        transport = await w.soon(dialled)
        transport.attach(Protocol())


@pytest.mark.time_limit(60)
@sync
async def test_w14_a_peer_that_is_killed(world):
    """Peers were not told when a client vanished, and a Write waited for ever. Here: its transports end at once."""
    async with world() as w:
        program = w.program("echo", str(w.pinned))
        key = PublicKey.parse(await w.soon(program.line(), 20.0))
        client = await w.client()
        transport = await w.soon(client.dial(key))
        recorder = w.Recorder()
        transport.attach(recorder)
        transport.write(b"are you there")
        await w.soon(recorder.got(13))
        program.transport.signalProcess("KILL")
        began = w.reactor.seconds()
        reason = await w.soon(recorder.lost, 2.0)
        assert w.reactor.seconds() - began < 1.0
        assert isinstance(reason.cause, PeerGone)
        with pytest.raises(Exception, match="could not reach"):
            await w.soon(client.dial(key), 2.0)


@sync
async def test_w15_an_id_in_use_is_asked_for_again(world):
    """A second REQUEST with an id in use pointed the rule elsewhere and left the first peer dangling.

    Here: both lose the transport and are told; who keeps doing it is dropped.
    """
    async with world(RelayLimits(stray_burst=5, strays_per_s=0.0)) as w:
        first, second, raw = await w.accepting_raw(), await w.accepting_raw(), await w.raw()
        for _ in range(5):
            assert (await w.soon(raw.request(first.key.public_key, 2))).kind == ACCEPT
            closed = await w.soon(raw.request(second.key.public_key, 2))
            assert (closed.kind, closed.payload) == (CLOSE, bytes([CloseReason.BAD_ID]))
            assert (await w.soon(first.next_frame(CLOSE))).payload == bytes([CloseReason.BAD_ID])
            assert not second.take_frames()
        assert (await w.soon(raw.request(first.key.public_key, 2))).kind == ACCEPT
        raw.send_request(second.key.public_key, 2)
        await w.soon(raw.lost(), 2.0)
        await w.soon(first.next_frame(CLOSE))


@pytest.mark.parametrize(
    "attack",
    ["odd id", "foreign key", "short", "accept of one's own", "data before accept", "ack before accept", "altered accept",
     "second accept", "data without sequence", "accept of nothing"],
)  # fmt: skip
@sync
async def test_w16_frames_are_checked_against_the_rules(world, attack):
    """ACCEPT was taken from any side at any time, and data went through before it. Here: such a transport ends."""
    async with world() as w:
        responder, raw = await w.raw(), await w.raw()
        payload = raw.key.public_key.raw + responder.key.public_key.raw
        guilty, transport_id = raw, 2
        if attack in ("odd id", "foreign key", "short"):
            foreign = SecretKey.generate().public_key.raw + responder.key.public_key.raw
            transport_id = 3 if attack == "odd id" else 2
            raw.send_frame(REQUEST, transport_id, {"foreign key": foreign, "short": payload[:65]}.get(attack, payload))
        else:
            raw.send_frame(REQUEST, 2, payload)
            asked = await w.soon(responder.next_frame(REQUEST))
            match attack:
                case "accept of one's own":
                    raw.send_frame(ACCEPT, 2, payload)
                case "data before accept":
                    raw.send_frame(FWD, 2, b"\0\0data")
                case "ack before accept":
                    guilty, transport_id = responder, asked.transport_id
                    responder.send_frame(ACK, asked.transport_id, b"\0\0")
                case "altered accept":
                    guilty, transport_id = responder, asked.transport_id
                    responder.send_frame(ACCEPT, asked.transport_id, payload[::-1])
                case "second accept":
                    responder.send_frame(ACCEPT, asked.transport_id, payload)
                    responder.send_frame(ACCEPT, asked.transport_id, payload)
                    await w.soon(raw.next_frame(ACCEPT))
                    guilty, transport_id = responder, asked.transport_id
                case "data without sequence":
                    responder.send_frame(ACCEPT, asked.transport_id, payload)
                    await w.soon(raw.next_frame(ACCEPT))
                    raw.send_frame(FWD, 2, b"\0")
                case "accept of nothing":
                    guilty, transport_id = responder, 1 if asked.transport_id != 1 else 3
                    responder.send_frame(ACCEPT, transport_id, payload)
            if attack != "accept of nothing":
                other = responder if guilty is raw else raw
                frame = await w.soon(other.next_frame())
                assert (frame.kind, frame.payload) == (CLOSE, bytes([CloseReason.MALFORMED]))
                assert not other.take_frames()
        closed = await w.soon(guilty.next_frame(CLOSE), 2.0)
        assert closed.transport_id == transport_id
        assert raw.lost_reason is None
        assert responder.lost_reason is None


@sync
async def test_w16_unknown_types_end_the_connection(world):
    """Right in the reference, and kept: a frame of a type that does not exist ends the connection; so does a client's OK."""
    async with world() as w:
        for kind in (OK, 0x4, 0x9, 0xC, 0xFF):
            raw = await w.raw()
            raw.send_frame(kind, 2, b"payload")
            await w.soon(raw.lost(), 2.0)


# --- what ends is forgotten ------------------------------------------------------------------------------------------


@pytest.mark.time_limit(60)
@sync
async def test_w19_ended_transports_leave_nothing(world, resident):
    """Rules were set to nil and never removed. Here: 5,000 transports later nothing of them is held."""
    limits = RelayLimits(
        requests_per_s=1e6,
        request_burst=10**6,
        pending_requests=1_000,
        unanswered_per_target=1_000,
        pair_request_burst=1_000,
        stranger_request_burst=2_000,
        known_requests_per_s=1e6,
        known_request_burst=10**6,
        request_timeout_s=0.5,
    )
    async with world(limits) as w:
        dialler, listener = await w.raw(), await w.accepting_raw()
        switch = w.server.switch
        baseline = switch.open_transports
        payload = dialler.key.public_key.raw + listener.key.public_key.raw
        after_first = 0
        for batch in range(10):
            ids = range(batch * 1_000, batch * 1_000 + 1_000, 2)
            dialler.send_frames((REQUEST, i, payload) for i in ids)
            for _ in ids:
                await w.soon(dialler.next_frame(ACCEPT))
            assert switch.open_transports == baseline + 500
            dialler.send_frames((CLOSE, i, b"\0") for i in ids)
            await w.until(lambda: switch.open_transports == baseline)
            listener.take_frames()
            after_first = after_first or resident()
        members = [switch.members[raw.key.public_key.raw] for raw in (dialler, listener)]
        assert all(not member.legs and not member.waiting and not member.pending_requests for member in members)
        assert resident() - after_first < 8 << 20
        await w.until(lambda: switch._requests.next() is None, 3.0)
        assert switch.queues.next_timeout() is None
        assert switch.queued_bytes == 0
