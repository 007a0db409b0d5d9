"""What a relay may do to sealed frames: it is noticed, told as ``integrity``, counted, and nothing unverified is delivered.

:ref:`spec-sealed-frames`, :ref:`spec-sealed-acks`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import pytest_twisted
from twisted.internet.error import ConnectionDone

from dmsg.eventlog import schema as ev
from dmsg.glue.stream_transport import TransportLost
from dmsg.mux.core.errors import DeadlineExceeded, IntegrityError
from dmsg.mux.core.held_acks import HELD_S
from dmsg.mux.core.wire import ACK, CLOSE, FWD
from dmsg.testing.hostile import Swap, alter, drop, insert, repeat, truncate

sync = pytest_twisted.ensureDeferred
SIZE = 400_000

ATTACKS = {
    "dropped": (drop, 1),
    "repeated": (repeat, 1),
    "altered": (alter, 1),
    "altered at the front": (lambda frame: alter(frame, 0), 1),
    "truncated": (truncate, 1),
    "emptied": (lambda frame: [replace(frame, payload=b"\0\0")], 1),
    "made up": (insert, 1),
    "reordered": (Swap, 2),
    "turned into an ACK": (lambda frame: [replace(frame, kind=ACK)], 1),
}
attacks = pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
both_carriers = pytest.mark.parametrize("extended", [True, False], ids=["carrier A", "carrier B"])


def action(attack):
    act, times = attack
    return {"act": act() if act is Swap else act, "times": times}


def check_victim(victim, sender, log):
    """Who got what the relay had been at: typed, counted, and nothing but what was sent reached it."""
    assert isinstance(victim.reason, TransportLost)
    assert type(victim.cause) is IntegrityError
    assert victim.cause.by == "local"
    assert sender.sent.startswith(victim.received)
    assert len(victim.received) < len(sender.sent)
    assert [(event.reason, event.by, event.security) for event in log.of(ev.TransportClosed)] == [
        ("integrity", "local", "e2e")
    ]


@attacks
@both_carriers
@pytest.mark.parametrize("victim", ["responder", "initiator"])
@sync
async def test_a_data_frame_is(scene, attack, extended, victim):
    async with scene() as s:
        await s.set(extended=extended)
        a, b = await s.open()
        to_bob = victim == "responder"
        rule = s.relay.rule(kind=FWD, to=(s.bob if to_bob else s.alice).public_key, skip=2, **action(attack))
        a.send(SIZE)
        b.send(SIZE)
        await s.over(a, b)
        assert rule.hits == rule.times
        harmed, other = (b, a) if to_bob else (a, b)
        check_victim(harmed, other, s.bob_log if to_bob else s.alice_log)
        # the other end learns it from the victim itself, and it is final
        assert type(other.cause) is IntegrityError
        assert other.cause.by == "peer"
        assert harmed.sent.startswith(other.received)
        assert s.closed(s.alice_log if to_bob else s.bob_log) == [("integrity", "peer")]


@pytest.mark.parametrize(
    "attack", [ATTACKS[name] for name in ("dropped", "repeated", "altered", "truncated", "made up")]
)
@sync
async def test_an_acknowledgement_is(scene, attack):
    """A dropped one shows in the next frame: ACK and FWD share one counter."""
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        rule = s.relay.rule(kind=ACK, to=s.alice.public_key, skip=1, **action(attack))
        while not a.lost:
            a.send(50_000)
            await s.settle()
            b.send(100) if not b.lost else None
            await s.settle()
        await s.over(a, b)
        assert rule.hits == 1
        assert type(a.cause) is IntegrityError
        assert a.cause.by == "local"
        assert type(b.cause) is IntegrityError
        assert a.sent.startswith(b.received)
        assert b.sent.startswith(a.received)


@sync
async def test_an_integrity_fault_is_counted_in_the_metrics(scene):
    async with scene() as s:
        await s.set()
        s.alice._record._events = s.bob._record._events = s._events
        a, b = await s.open()
        s.relay.rule(alter, kind=FWD, to=s.bob.public_key)
        a.send(10)
        await s.over(a, b)
        counted = [
            sample.value
            for metric in s.registry.collect()
            for sample in metric.samples
            if sample.name.endswith("transports_closed_total") and sample.labels["reason"] == "integrity"
        ]
        assert sum(counted) == 3  # by both ends and by the relay


@sync
async def test_frames_of_one_transport_delivered_into_another(scene):
    """Two transports between the same two clients: the frames of one do not open in the other."""
    async with scene() as s:
        await s.set()
        a1, b1 = await s.open()
        a2, b2 = await s.open()
        a2.send(1_000)
        await s.wait(b2.when_received(1_000))
        (first, second) = dict.fromkeys(
            frame.transport_id for frame in s.relay.frames(to=s.bob.public_key) if frame.peer == s.alice.public_key
        )
        s.relay.rule(
            lambda frame: [replace(frame, transport_id={first: second, second: first}[frame.transport_id])],
            kind=FWD,
            to=s.bob.public_key,
            times=None,
        )
        a1.send(1_000)
        await s.over(a2, b2)
        assert type(b2.cause) is IntegrityError
        assert b2.received == a2.sent
        assert not b1.received
        s.relay.be_honest()
        a1.send(1_000)
        await s.over(a1, b1)
        assert type(b1.cause) is IntegrityError
        assert not b1.received


@sync
async def test_frames_reflected_to_their_sender(scene):
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        b.send(100)
        await s.wait(a.when_received(100))
        s.reactor.advance(HELD_S)  # else the acknowledgement goes along with what Alice says
        await s.settle()
        to_alice = s.relay.frames(FWD, s.alice.public_key)[-1].transport_id
        s.relay.rule(
            lambda frame: [replace(frame, to=s.alice.public_key, transport_id=to_alice)], kind=FWD, to=s.bob.public_key
        )
        reflected = s.relay.next_frame(FWD, s.bob.public_key)
        a.send(100)
        frame = await s.wait(reflected)
        s.relay.send(replace(frame, to=s.alice.public_key, transport_id=to_alice))
        await s.over(a, b)
        assert type(a.cause) is IntegrityError
        assert a.received == b.sent


@sync
async def test_a_delay_is_no_attack(scene):
    """Frames held back for a while and then let go in order: slow, and intact."""
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        held = []
        s.relay.rule(lambda frame: held.append(frame) or [], to=s.bob.public_key, times=None)
        a.send(SIZE)
        await s.settle()
        s.reactor.advance(5.0)
        assert held and not b.received
        s.relay.be_honest()
        for frame in held:
            s.relay.send(frame)
        await s.wait(b.when_received(SIZE))
        assert b.received == a.sent
        a.transport.loseConnection()
        await s.over(a, b)
        assert isinstance(b.reason, ConnectionDone)


@both_carriers
@sync
async def test_a_stream_without_its_end_is_never_complete(scene, extended):
    """Every byte arrives, the end does not: Bob is not told that this was all."""
    async with scene() as s:
        await s.set(extended=extended, config=s.MORTAL)
        a, b = await s.open()
        a.send(1_000)
        await s.wait(b.when_received(1_000))
        end = s.relay.rule(drop, kind=FWD, to=s.bob.public_key, times=None)
        a.transport.loseConnection()
        await s.settle()
        assert end.hits == 1
        assert not b.lost
        s.relay.cut(s.bob.public_key)
        await s.over(b)
        assert not isinstance(b.reason, ConnectionDone)
        assert b.received == a.sent
        s.relay.cut(s.alice.public_key)
        await s.over(a)
        assert not isinstance(a.reason, ConnectionDone), "Alice does not know that Bob has the end"


@pytest.mark.parametrize("reason", [0, 1, 12, 13])
@sync
async def test_a_forged_close_in_place_of_the_end(scene, reason):
    """The relay drops the end of the stream and says CLOSE instead; without resumption that is a loss, with every reason."""
    async with scene() as s:
        await s.set(config=s.MORTAL)
        a, b = await s.open()
        a.send(1_000)
        await s.wait(b.when_received(1_000))
        s.relay.rule(lambda frame: [replace(frame, kind=CLOSE, payload=bytes([reason]))], kind=FWD, to=s.bob.public_key)
        a.transport.loseConnection()
        await s.over(b)
        assert isinstance(b.reason, TransportLost)
        ((logged, _),) = s.closed(s.bob_log)
        assert logged != "normal"
        a.transport.abortConnection()
        await s.over(a)


@sync
async def test_a_relay_that_delivers_nothing_any_more(scene):
    """Silence cannot be told from a slow peer; a deadline ends it, and the stream is not complete."""
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        s.relay.rule(drop, to=s.bob.public_key, times=None)
        b.transport.set_read_deadline(s.reactor.seconds() + 3)
        a.send(1_000)
        a.transport.loseConnection()
        await s.over(b)
        assert isinstance(b.cause, DeadlineExceeded)
        assert not b.received
        s.relay.be_honest()
        await s.over(a)
        assert not isinstance(a.reason, ConnectionDone)
