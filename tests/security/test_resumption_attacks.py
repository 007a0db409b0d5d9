"""What the peer that opened a transport can do to the other end by resuming it again and again, and what a relay can.

:ref:`spec-resume-attempts` and :ref:`spec-resume-memory`.
"""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IPushProducer
from zope.interface import implementer

from dmsg.crypto.keys import SecretKey
from dmsg.eventlog import schema as ev
from dmsg.mux.core.e2e_handshake import UPGRADE_MAGIC, Resume, SecureInitiator
from dmsg.mux.core.e2e_negotiation import Carrier
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.sealed_stream import SealedStream
from dmsg.mux.core.stream import StreamState
from dmsg.mux.core.wire import ACCEPT, ACK, CLOSE, FWD, HEADER_BYTES, REQUEST
from dmsg.testing.hostile import RelayFrame, drop

sync = pytest_twisted.ensureDeferred
WINDOW_BYTES = 64 * 1024


@implementer(IPushProducer)
class Source:
    """A producer that writes as long as it may."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.is_paused = False
        transport.registerProducer(self, True)
        self.resumeProducing()

    def resumeProducing(self) -> None:
        self.is_paused = False
        while not self.is_paused and self.transport.connected:
            self.transport.write(bytes(65_536))

    def pauseProducing(self) -> None:
        self.is_paused = True

    def stopProducing(self) -> None:
        self.is_paused = True


class Mallory:
    """An initiator that reads and never acknowledges. A raw client, so carrier B."""

    def __init__(self, scene: Any, raw: Any) -> None:
        self.scene, self.raw = scene, raw
        self.next_id = 2
        self.token = b""
        self.received_bytes = 0
        self.read_bytes = 0
        self.stream: SealedStream | None = None
        raw.on_frame = self.on_frame

    async def open(self, resume: Resume | None = None) -> bool:
        """Make a path, the first or another; ``False`` when Bob answers CLOSE."""
        s, raw = self.scene, self.raw
        bob, relay = s.bob.public_key, s.relay.key.public_key
        self.next_id += 2
        transport_id = self.next_id
        self.stream = None
        frame = await s.wait(raw.request(bob, transport_id))
        if frame.kind == CLOSE:
            return False
        handshake = SecureInitiator(raw.key, bob, relay, resume=resume)
        raw.send_frame(FWD, transport_id, b"\0\0" + UPGRADE_MAGIC + handshake.message)
        while frame.kind != FWD:
            frame = await s.wait(raw.next_frame(transport_id=transport_id))
            if frame.kind == CLOSE:
                return False
        keys, answer = handshake.finish(frame.payload[2 + len(UPGRADE_MAGIC) :])
        assert (answer is not None) is (resume is not None)
        base = PlainStream(transport_id, bob, b"", initiator=True, window_bytes=WINDOW_BYTES, first_sequence=0)
        stream = SealedStream(base, keys, window_bytes=WINDOW_BYTES, ack_limit_bytes=WINDOW_BYTES)
        stream.state = StreamState.OPEN
        self.token = self.token or keys.token
        raw.send_frame(ACK, transport_id, stream.take_ack()[HEADER_BYTES:])
        self.stream = stream
        await s.settle()
        return True

    def on_frame(self, frame: Any) -> bool:
        if self.stream is None or frame.transport_id != self.stream.id or frame.kind != FWD:
            return frame.transport_id == self.next_id - 2  # what comes on the path before
        data, _ = self.stream.receive_fwd(frame.payload, 0, len(frame.payload))
        self.received_bytes += len(data)
        return True

    async def resume(self, received_bytes: int) -> bool:
        return await self.open(Resume(self.token, received_bytes))


async def attack(s: Any, **config: Any) -> tuple[Mallory, Any]:
    # a relay of Mallory's own has no limits
    many = dict.fromkeys(
        ("request_burst", "stranger_request_burst", "pair_request_burst", "known_request_burst"), 10_000
    )
    s.limits = replace(s.limits, **many)
    await s.set(config=replace(s.CONFIG, **config))
    mallory = Mallory(s, await s.raw(SecretKey(b"\x66" * 32)))
    assert await mallory.open()
    (b,) = s.listener.built
    Source(b.transport)
    await s.settle()
    assert mallory.received_bytes > 0.9 * WINDOW_BYTES
    return mallory, b


@pytest.mark.parametrize("claims_all", [True, False], ids=["claims to have it all", "claims to have nothing"])
@pytest.mark.time_limit(60)
@sync
async def test_600_resumptions_without_an_acknowledgement_cost_one_window(scene, claims_all):
    """Without its rate limit, so that it is not that alone: 600 windows are read, and memory stays where it was."""
    async with scene() as s:
        connection = replace(s.CONFIG.connection, secure_window_bytes=WINDOW_BYTES)
        mallory, b = await attack(s, connection=connection, resume_rate_per_s=1e6, resume_burst=1_000)
        claimed = 0
        tracemalloc.start()
        try:
            sizes = []
            for number in range(600):
                if claims_all:
                    claimed = mallory.received_bytes
                assert await mallory.resume(claimed)
                s.relay.seen.clear()
                if number in (20, 599):
                    sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert mallory.received_bytes > 0.9 * 600 * WINDOW_BYTES
        # the relay and the logs of this test note some 2 KiB for each
        assert sizes[1] - sizes[0] < 2 << 20
        stream = b.transport.stream
        assert stream.pending.size + stream._outstanding_bytes <= 2 * WINDOW_BYTES + 2 * 65_536
        assert len(b.transport._carrier.connection.streams) == 1
        assert not b.lost


@sync
async def test_resumptions_of_a_transport_are_rate_limited(scene):
    """16 at once and 2 a second; more are answered CLOSE rate_limited, which is not final."""
    async with scene() as s:
        mallory, b = await attack(s)
        moved = sum([await mallory.resume(mallory.received_bytes) for _ in range(60)])
        assert moved <= 16 + 2
        assert not b.lost
        s.reactor.advance(1.0)
        assert {event.reason for event in s.bob_log.of(ev.Refused)} == {"rate_limited"}
        assert await mallory.resume(mallory.received_bytes)


@sync
async def test_a_peer_whose_relay_cuts_each_path_at_once_is_not_followed_without_end(scene):
    """The initiator's side of it: the peer takes every resumption, and its relay ends each path with the first frame."""
    async with scene() as s:
        many = dict.fromkeys(
            ("request_burst", "stranger_request_burst", "pair_request_burst", "known_request_burst"), 10_000
        )
        s.limits = replace(s.limits, **many)
        await s.set()
        s.bob.config = replace(s.bob.config, resume_rate_per_s=1e6, resume_burst=10_000)
        a, b = await s.open()
        alice = s.alice.public_key

        def cut(frame: RelayFrame) -> list[RelayFrame]:
            accepted = s.relay.frames(ACCEPT, to=alice)[-1]
            s.reactor.callLater(0.0, s.relay.send, replace(accepted, kind=CLOSE, payload=b"\0"))
            return [frame]

        s.relay.rule(cut, kind=ACK, to=s.bob.public_key, times=None)
        s.relay.rule(cut, kind=FWD, to=s.bob.public_key, times=None)
        a.send(10)
        for _ in range(40):
            s.reactor.advance(0.25)
        assert 16 <= len(s.alice_log.of(ev.TransportResumed)) <= 16 + 2 * 10 + 1
        s.relay.be_honest()
        a.send(10)
        await s.wait(b.when_received(20))
        assert not a.lost


@sync
async def test_the_old_stream_is_gone_at_once(scene):
    """By its reference count alone, with the garbage collector off, at both ends and however the path was lost."""
    async with scene() as s:
        await s.set(relays=2)
        a, b = await s.open()
        for how in ("close", "cut the initiator", "cut the responder"):
            a.send(100_000)
            b.send(100_000)
            old = [weakref.ref(one.transport.stream) for one in (a, b)]
            relay = next(r for r in s.relays if r.key.public_key == a.transport.getHost().server_public_key)
            resumed = len(s.alice_log.of(ev.TransportResumed))
            gc.disable()
            try:
                if how == "close":
                    stream = b.transport.stream
                    relay.send(RelayFrame(s.bob.public_key, CLOSE, stream.id, b"\0"))
                    del stream
                else:
                    relay.cut(s.alice.public_key if how == "cut the initiator" else s.bob.public_key)
                await s.wait(a.when_received(len(b.sent)))
                await s.wait(b.when_received(len(a.sent)))
                assert len(s.alice_log.of(ev.TransportResumed)) == resumed + 1
                assert [one() for one in old] == [None, None], how
            finally:
                gc.enable()


@pytest.mark.time_limit(60)
@sync
async def test_honest_transports_behind_a_relay_that_cuts_every_second(scene):
    """Five minutes of it: no byte is lost, no transport is refused, and no stream is left over."""
    async with scene() as s:
        await s.set(relays=2)
        ends = [await s.open() for _ in range(4)]

        def streams() -> int:
            gc.collect()
            return sum(isinstance(one, SealedStream) for one in gc.get_objects())

        counts = []
        for second in range(300):
            for a, b in ends:
                a.send(1_000)
                b.send(1_000)
            for relay in s.relays:
                member = relay.switch.members.get(s.alice.public_key.raw)
                if member is not None and second % 2 == s.relays.index(relay):
                    relay.cut(s.alice.public_key)
                relay.seen.clear()
            s.reactor.advance(0.5)
            s.reactor.advance(0.5)
            if second in (10, 299):
                for a, b in ends:
                    await s.wait(a.when_received(len(b.sent)))
                    await s.wait(b.when_received(len(a.sent)))
                counts.append(streams())
        assert counts[1] == counts[0]
        assert len(s.alice_log.of(ev.TransportResumed)) > 300
        assert not s.bob_log.of(ev.Refused)
        for a, b in ends:
            assert bytes(a.received) == b.sent and bytes(b.received) == a.sent
            a.transport.loseConnection()
            await s.over(a, b)
            assert isinstance(a.reason, ConnectionDone) and isinstance(b.reason, ConnectionDone)


@sync
async def test_a_relay_that_replays_resumptions_does_not_keep_a_transport_from_another(scene):
    """Replays are not proved: they use up nothing, and only one of them waits at a time."""
    async with scene() as s:
        await s.set(relays=2)
        a, b = await s.open()
        a.send(100)
        await s.wait(b.when_received(100))
        first, relay = sorted(s.relays, key=lambda r: r.key.public_key != a.transport.getHost().server_public_key)
        asked = relay.next_frame(REQUEST, s.bob.public_key)
        first.send(RelayFrame(s.alice.public_key, CLOSE, a.transport.stream.id, b"\0"))
        request = await s.wait(asked)
        await s.settle()
        relay.rule(drop, kind=ACCEPT, to=s.alice.public_key, times=None)
        for number in range(40):
            relay.send(replace(request, transport_id=1001 + 2 * number))
        await s.settle()
        session = s.bob.pool.sessions[relay.key.public_key]
        assert len(session.connection.streams) <= 2, "the transport, and the last replay"
        relay.rule(drop, times=None)
        relay.cut(s.alice.public_key)
        relay.cut(s.bob.public_key)
        a.send(100)
        await s.wait(b.when_received(200))
        s.reactor.advance(1.0)
        assert "busy" in {event.reason for event in s.bob_log.of(ev.Refused)}


@sync
async def test_what_comes_with_the_proof_for_a_made_up_token_is_not_counted_for_ever(scene):
    """It is held by no transport, and must not be missing to those of others."""
    async with scene() as s:
        connection = replace(s.CONFIG.connection, secure_window_bytes=16 * 1024)
        await s.set(config=replace(s.CONFIG, connection=connection))
        stranger = await s.client(publish=False, config=s.CONFIG)
        (session,) = stranger.pool.sessions.values()

        def say_much(opened: Any) -> Any:
            session.connection.send_data(opened.stream, bytes(60_000))
            return opened

        for number in range(5):
            resume = Resume(bytes((number,)) * 16, 0)
            asked = session.request(s.bob.public_key, Carrier.REQUEST, resume=resume)
            opened = await s.wait(asked.addCallback(say_much))
            await s.settle()
            assert opened.stream.state is StreamState.CLOSED
        assert s.bob._buffers.used_bytes == 0


@pytest.mark.parametrize("end", ["resumeProducing", "abortConnection"])
@sync
async def test_what_an_application_has_not_read_of_a_transport_that_is_over_still_counts(scene, end):
    """Else one transport after the other could be filled and ended."""
    async with scene() as s:
        connection = replace(s.CONFIG.connection, secure_window_bytes=16 * 1024)
        await s.set(config=replace(s.CONFIG, connection=connection))
        s.alice = await s.client(publish=False, config=s.CONFIG)
        held = []
        for _ in range(3):
            a, b = await s.open()
            b.transport.pauseProducing()
            a.send(60_000)
            await s.settle()
            a.transport.abortConnection()
            await s.over(a)
            await s.settle()
            held.append(b)
            assert not b.lost
        assert s.bob._buffers.used_bytes == 3 * (60_000 - 16 * 1024)
        for b in held:
            getattr(b.transport, end)()
        await s.over(*held)
        assert s.bob._buffers.used_bytes == 0
