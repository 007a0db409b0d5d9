"""Random and systematic garbage at every stage of a connection, for server and client.

The property is always the same: at most the guilty connection ends, the bystanders echo on theirs, nothing reaches the
log as an error (the guard of every test sees to that), and nothing of it is left behind. All randomness is seeded.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import ensureDeferred
from twisted.internet.protocol import Factory

from dmsg.crypto.keys import SecretKey
from dmsg.crypto.noise import NoiseHandshake
from dmsg.mux.core.stream import StreamState
from dmsg.mux.core.wire import ACCEPT, ACK, CLOSE, FWD, OK, REQUEST, encode_frame
from dmsg.mux.relay.limits import RelayLimits
from dmsg.testing.raw import RawConnection, connect_raw, packet

pytestmark = pytest.mark.system
sync = pytest_twisted.ensureDeferred

#: Generous rates, so that garbage is judged for what it is and not for how much of it there is.
LIMITS = RelayLimits(
    requests_per_s=1e6, request_burst=10**6, stray_burst=10**6, half_open_per_address=500, handshake_timeout_s=2.0
)


async def _finish(w: Any, raw: RawConnection) -> None:
    """Close a guilty connection, however far it came, and wait until the server is rid of it."""
    if raw.lost_reason is None:
        raw.close()
        await w.soon(raw.lost())
    await w.until(lambda: len(w.server._shells) <= 2)


def _check_switch(w: Any) -> None:
    """Rules come in pairs, counters agree with them, nothing is queued."""
    switch = w.server.switch
    legs = [leg for member in switch.members.values() for leg in member.legs.values()]
    for leg in legs:
        assert leg.member.legs[leg.id] is leg
        assert leg.other.other is leg
        assert leg.other.member.legs[leg.other.id] is leg.other
        assert leg.open is leg.other.open
    assert switch.open_transports == sum(leg.open for leg in legs if leg.initiator)
    for member in switch.members.values():
        waiting = [leg for leg in member.legs.values() if leg.initiator and not leg.open]
        assert member.pending_requests == len(waiting)
    assert switch.queued_bytes == 0


# --- the server as victim --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@sync
async def test_server_random_bytes_before_the_handshake(world, seed):
    """Bytes of any number in any pieces instead of a handshake."""
    choose = random.Random(seed)
    async with world(LIMITS) as w:
        for _ in range(60):
            raw = await w.raw(shake=False)
            for _ in range(choose.randint(1, 4)):
                raw.send_bytes(choose.randbytes(choose.choice([0, 1, 2, 49, 51, 67, choose.randint(0, 3_000)])))
                await w.turn()
            await _finish(w, raw)
        assert w.server.stats()["half_open"] == 0


@sync
async def test_server_every_byte_of_message_1_altered(world):
    """All 51 bytes, one after the other: no altered message 1 is answered."""
    choose = random.Random(1)
    async with world(LIMITS) as w:
        raws = []
        for offset in range(51):
            raw = await w.raw(shake=False)
            noise = NoiseHandshake("XK", initiator=True, static=raw.key, remote_static=w.key.public_key.raw)
            message = bytearray(packet(noise.write_message()))
            message[offset] ^= choose.randint(1, 255)
            raw.send_bytes(bytes(message))
            raws.append(raw)
        await w.until(lambda: sum(raw.lost_reason is not None for raw in raws) >= 49)
        assert not any(raw.received for raw in raws)
        for raw in raws:
            await _finish_all(w, raw)


@sync
async def test_server_every_byte_of_message_3_altered(world):
    """All 67 bytes of the last message: no altered one is admitted."""
    choose = random.Random(3)
    async with world(LIMITS) as w:
        raws = []
        for offset in range(67):
            raw = await w.raw(shake=False)
            noise = NoiseHandshake("XK", initiator=True, static=raw.key, remote_static=w.key.public_key.raw)
            raw.send_packet(noise.write_message())
            await w.until(lambda raw=raw: len(raw.received) == w.message_2_bytes)
            noise.read_message(bytes(raw.received[2:]))
            message = bytearray(packet(noise.write_message()))
            message[offset] ^= choose.randint(1, 255)
            raw.send_bytes(bytes(message))
            raws.append(raw)
        await w.until(lambda: sum(raw.lost_reason is not None for raw in raws) >= 65)
        assert all(len(raw.received) == w.message_2_bytes for raw in raws)
        assert len(w.server.switch.members) == 2
        for raw in raws:
            await _finish_all(w, raw)


async def _finish_all(w: Any, raw: RawConnection) -> None:
    if raw.lost_reason is None:
        raw.abort()
        await w.soon(raw.lost())


@pytest.mark.parametrize("size", [*range(0, 49, 7), 48, 50, 64, 65, 66, 1_073, 1_500])
@sync
async def test_server_handshake_messages_of_any_size(world, size):
    """Random messages of every kind of length, as message 1 and as message 3."""
    async with world(LIMITS) as w:
        for stage in (1, 3):
            raw = await w.raw(shake=False)
            if stage == 3:
                noise = NoiseHandshake("XK", initiator=True, static=raw.key, remote_static=w.key.public_key.raw)
                raw.send_packet(noise.write_message(random.Random(size).randbytes(min(size, 1_400))))
                await w.until(lambda raw=raw: len(raw.received) == w.message_2_bytes)
            raw.send_packet(random.Random(size).randbytes(size))
            await w.soon(raw.lost(), 2.0)


@pytest.mark.parametrize("seed", range(3))
@sync
async def test_server_random_bytes_for_records(world, seed):
    """Bytes that are no records, behind a handshake that was right."""
    choose = random.Random(seed)
    async with world(LIMITS) as w:
        for _ in range(40):
            raw = await w.raw()
            good = raw.seal(encode_frame(CLOSE, 2, b"\0"))
            bad = choose.choice(
                [
                    choose.randbytes(choose.randint(22, 3_000)),
                    packet(choose.randbytes(choose.randint(0, 3_000))),
                    good[: choose.randint(0, len(good) - 1)] + choose.randbytes(40),
                    good + good[2:],
                ]
            )
            raw.send_bytes(bad)
            await _finish(w, raw)
        assert len(w.server.switch.members) == 2


@pytest.mark.parametrize("seed", range(4))
@sync
async def test_server_random_plaintext(world, seed):
    """Records are sealed correctly, but hold random bytes in place of frames."""
    choose = random.Random(seed)
    async with world(LIMITS) as w:
        for _ in range(40):
            raw = await w.raw()
            raw.send_plain(*[choose.randbytes(choose.choice([0, 1, 4, 5, 200])) for _ in range(choose.randint(1, 10))])
            await _finish(w, raw)
        _check_switch(w)


def _random_frame(choose: random.Random, keys: list[bytes], ids: list[int], requests: list[bytes]) -> bytes:
    """A frame that is wrong in one way at most: what rules are broken by."""
    kind = choose.choice([REQUEST, REQUEST, ACCEPT, CLOSE, FWD, FWD, FWD, ACK, ACK])
    transport_id = choose.choice(ids)
    payload = choose.randbytes(choose.choice([0, 1, 2, 3, 66, 500]))
    if kind in (REQUEST, ACCEPT) and choose.random() < 0.8:
        payload = choose.choice(requests) if choose.random() < 0.7 else choose.choice(keys) + choose.choice(keys)
    elif kind == ACK and choose.random() < 0.8:
        payload = choose.randbytes(2)
    return encode_frame(kind, transport_id, payload)


@pytest.mark.parametrize("seed", range(6))
@sync
async def test_server_random_frames(world, seed):
    """Frames that are well formed and in no sensible order, from a client with peers, some of whom misbehave as well."""
    choose = random.Random(seed)
    async with world(LIMITS) as w:
        echoer, accepting, silent = await w.echoer(), await w.accepting_raw(), await w.raw()
        for _ in range(12):
            raw = await w.raw()
            keys = [one.key.public_key.raw for one in (raw, accepting, silent)] + [echoer.public_key.raw, bytes(33)]
            requests = [keys[0] + key for key in keys]
            for _ in range(30):
                guilty = raw if choose.random() < 0.8 else silent
                ids = (
                    [0, 2, 4, 6, 7] if guilty is raw else [frame.transport_id for frame in silent.take_frames()] or [1]
                )
                if guilty.lost_reason is None:
                    guilty.send_plain(
                        b"".join(_random_frame(choose, keys, ids, requests) for _ in range(choose.randint(1, 4)))
                    )
                if choose.random() < 0.3:
                    await w.turn()
                    _check_switch(w)
            if raw.lost_reason is None:
                raw.close()
                await w.soon(raw.lost())
            await w.until(lambda raw=raw: raw.key.public_key.raw not in w.server.switch.members)
            _check_switch(w)
            accepting.take_frames()
        assert accepting.lost_reason is None
        assert silent.lost_reason is None
        (session,) = echoer.pool.sessions.values()
        await w.until(lambda: not session.connection.streams)


@sync
async def test_server_frames_cut_at_every_offset(world):
    """A REQUEST, its data and its end, cut into two records at every place: it makes no difference."""
    async with world(LIMITS) as w:
        echoer = await w.echoer()
        raw = await w.raw()
        for offset in range(1, 71 + 12 + 6):
            transport_id = 2 * offset
            request = encode_frame(REQUEST, transport_id, raw.key.public_key.raw + echoer.public_key.raw)
            if offset < len(request):
                raw.send_plain(request[:offset], request[offset:])
            else:
                raw.send_plain(request)
            assert (await w.soon(raw.next_frame(transport_id=transport_id))).kind == ACCEPT
            rest = encode_frame(FWD, transport_id, b"\1\2hello") + encode_frame(CLOSE, transport_id, b"\0")
            data = rest[: 5 + 7]
            cut = min(offset, len(data) - 1)
            raw.send_plain(data[:cut], b"", data[cut:])
            assert (await w.soon(raw.next_frame(FWD, transport_id))).payload[2:] == b"hello"
            close = rest[5 + 7 :]
            raw.send_plain(*[bytes([byte]) for byte in close])
        (session,) = echoer.pool.sessions.values()
        await w.until(lambda: not session.connection.streams)
        assert raw.lost_reason is None


@sync
async def test_server_bytes_one_at_a_time(world):
    """The whole conversation, one byte to a segment, from the first of the handshake on."""
    async with world(LIMITS) as w:
        echoer = await w.echoer()
        raw = RawConnection(SecretKey.generate(), w.key.public_key)
        pending = bytearray()
        raw.send_bytes = pending.extend  # type: ignore[method-assign]

        async def trickle() -> None:
            while raw.lost_reason is None and not done:
                if pending:
                    raw.transport.write(bytes(pending[:1]))  # type: ignore[union-attr]
                    del pending[:1]
                await w.turn()

        done = False

        async def talk() -> None:
            nonlocal done
            await raw.next_frame(OK)
            assert (await raw.request(echoer.public_key, 2)).kind == ACCEPT
            raw.send_frame(FWD, 2, b"\0\1hello")
            assert (await raw.next_frame(FWD)).payload[2:] == b"hello"
            done = True

        connecting = ensureDeferred(connect_raw(w.endpoint(), w.key.public_key, connection=raw))
        await w.until(lambda: raw.transport is not None)
        trickling = ensureDeferred(trickle())
        await w.soon(connecting)
        w._raws.append(raw)
        await w.soon(talk())
        await w.soon(trickling)


# --- the client as victim --------------------------------------------------------------------------------------------


class _Victim:
    """A client with one session to the world's healthy server and one to a raw one; it listens and records."""

    def __init__(self, w: Any) -> None:
        self.w = w
        self.ends: list[Any] = []

    async def start(self, **options: Any) -> None:
        self.server, pinned = await self.w.raw_server(**options)
        self.peer = await self.w.echoer()
        self.client = await self.w.client(self.w.pinned, pinned)
        self.client.listen(Factory.forProtocol(self._build))
        self.healthy = self.client.pool.sessions.get(self.w.pinned.public_key)

    def _build(self) -> Any:
        self.ends.append(self.w.Recorder())
        return self.ends[-1]

    async def next_connection(self) -> RawConnection:
        return await self.w.soon(self.server.accept())

    async def unharmed(self) -> None:
        """The session with the healthy server is the one it was, and works."""
        await self.w.until(lambda: self.w.pinned.public_key in self.client.pool.sessions)
        healthy = self.client.pool.sessions[self.w.pinned.public_key]
        assert self.healthy in (None, healthy)
        recorder = await self.w.connect(self.client, self.peer)
        recorder.transport.write(b"hello")
        await self.w.soon(recorder.got(5))
        recorder.transport.loseConnection()
        await self.w.soon(recorder.lost)
        await self.w.until(lambda: not healthy.connection.streams)


@pytest.mark.parametrize("seed", range(3))
@sync
async def test_client_random_bytes_for_message_2(world, seed):
    """What a server answers the first message with: altered, cut, random, of any size."""
    choose = random.Random(seed)
    async with world() as w:
        victim = _Victim(w)
        await victim.start(shake=False)
        for _ in range(30):
            raw = await victim.next_connection()
            await w.until(lambda raw=raw: len(raw.received) == 51 or raw.lost_reason is not None)
            noise = NoiseHandshake("XK", initiator=False, static=victim.server.key)
            noise.read_message(bytes(raw.received[2:51]))
            answer = bytearray(packet(noise.write_message()))
            how = choose.choice(["alter", "cut", "random", "long"])
            if how == "alter":
                answer[choose.randrange(2, 51)] ^= choose.randint(1, 255)
            elif how == "random":
                answer = bytearray(choose.randbytes(choose.randint(1, 2_000)))
            elif how == "long":
                answer = bytearray(b"\xff\xff" + choose.randbytes(4_000))
            raw.send_bytes(bytes(answer[: choose.randint(1, 50)] if how == "cut" else answer))
            raw.close()
            await w.soon(raw.lost())
        await victim.unharmed()


@pytest.mark.parametrize("seed", range(3))
@sync
async def test_client_random_bytes_for_records_and_frames(world, seed):
    """After the handshake: bytes that are no records, and records that hold no frames."""
    choose = random.Random(seed)
    async with world() as w:
        victim = _Victim(w)
        await victim.start(say_ok=False)
        for i in range(40):
            raw = await victim.next_connection()
            if choose.random() < 0.7:
                raw.send_frame(OK, 0)
            if i % 2:
                raw.send_bytes(choose.choice([choose.randbytes(300), packet(choose.randbytes(choose.randint(0, 300)))]))
            else:
                raw.send_plain(*[choose.randbytes(choose.choice([0, 1, 5, 100])) for _ in range(5)])
            raw.close()
            await w.soon(raw.lost())
        await victim.unharmed()


@pytest.mark.parametrize("seed", range(6))
@sync
async def test_client_random_frames(world, seed):
    """Well-formed frames in no sensible order, while the client dials through the server that sends them."""
    choose = random.Random(seed)
    async with world() as w:
        victim = _Victim(w)
        await victim.start()
        ours = victim.client.public_key.raw
        ended = []
        for _ in range(12):
            raw = await victim.next_connection()
            await w.until(lambda: len(victim.client.pool.sessions) == 2)
            session = victim.client.pool.sessions[victim.server.key.public_key]
            targets = [SecretKey.generate().public_key for _ in range(3)]
            for target in targets:
                session.request(target).addCallbacks(
                    lambda opened, session=session: session.transport(opened.stream).attach(victim._build()),
                    ended.append,
                )
            dialled = [await w.soon(raw.next_frame(REQUEST)) for _ in targets]
            keys = [ours, *[target.raw for target in targets], bytes(33)]
            requests = [key + ours for key in keys] + [frame.payload for frame in dialled]
            ids = [frame.transport_id for frame in dialled] + [1, 3, 5, 8]
            for _ in range(25):
                if raw.lost_reason is not None:
                    break
                if choose.random() < 0.2:  # an answer that is right, so that there is something to be wrong with
                    right = choose.choice(dialled)
                    raw.send_frame(ACCEPT, right.transport_id, right.payload)
                raw.send_plain(
                    b"".join(_random_frame(choose, keys, ids, requests) for _ in range(choose.randint(1, 4)))
                )
                if choose.random() < 0.3:
                    await w.turn()
                    connection = session.connection
                    offered = [one for one in connection.streams.values() if one.state is StreamState.OFFERED]
                    assert connection._openings.offered == len(offered)
            if raw.lost_reason is None:
                raw.close()
                await w.soon(raw.lost())
            await w.until(lambda session=session: not session.is_ready)
            assert not session.connection.streams
        await w.until(lambda: all(end.reason is not None for end in victim.ends if end.made.called))
        assert victim.ends
        await victim.unharmed()


@sync
async def test_client_frames_cut_at_every_offset(world):
    """A server's frames cut into two records at every place: it makes no difference."""
    async with world() as w:
        victim = _Victim(w)
        await victim.start()
        raw = await victim.next_connection()
        asking = SecretKey.generate().public_key
        for offset in range(1, 71):
            transport_id = 2 * offset + 1
            request = encode_frame(REQUEST, transport_id, asking.raw + victim.client.public_key.raw)
            raw.send_plain(request[:offset], request[offset:])
            assert (await w.soon(raw.next_frame(transport_id=transport_id))).kind == ACCEPT
            data = encode_frame(FWD, transport_id, b"\0\7hello")
            cut = min(offset, len(data) - 1)
            raw.send_plain(data[:cut], b"", data[cut:])
            assert await w.soon(victim.ends[-1].got(5)) == b"hello"
            assert (await w.soon(raw.next_frame(transport_id=transport_id))).payload == b"\0\7"
            raw.send_plain(*[bytes([byte]) for byte in encode_frame(CLOSE, transport_id, b"\0")])
            await w.soon(victim.ends[-1].lost)
        await victim.unharmed()
