"""What a relay may do to the end-to-end handshake: nothing is opened, and the dialler learns why.

:ref:`spec-e2e-handshake`, :ref:`spec-carriers`, :ref:`spec-confirmation`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import pytest_twisted

from dmsg.clients.limits import ListenerLimits
from dmsg.crypto.keys import Point, PublicKey, SecretKey
from dmsg.errors import DialError
from dmsg.eventlog import schema as ev
from dmsg.mux.core.e2e_handshake import CONFIRM_TIMEOUT_S, UPGRADE_MAGIC, SecureInitiator
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.errors import DowngradeRefused, HandshakeTimeout, IntegrityError, Malformed, NoSuchService
from dmsg.mux.core.wire import ACCEPT, ACK, CLOSE, FWD, REQUEST, REQUEST_BYTES, SEQUENCE_BYTES, CloseReason
from dmsg.testing.hostile import RelayFrame, alter, drop, repeat, truncate
from dmsg.testing.raw import ForgedKey
from dmsg.testing.strategies import BAD_POINTS

sync = pytest_twisted.ensureDeferred

#: What precedes the handshake message in REQUEST and ACCEPT, and in a FWD.
HEADS = {REQUEST: REQUEST_BYTES, ACCEPT: REQUEST_BYTES, FWD: SEQUENCE_BYTES + len(UPGRADE_MAGIC)}


def with_point(point):
    """Put another ephemeral key into a handshake message."""

    def act(frame):
        head = HEADS[frame.kind]
        return [replace(frame, payload=frame.payload[:head] + point + frame.payload[head + 33 :])]

    return act


TAMPERINGS = {
    "altered": alter,
    "altered key": lambda frame: alter(frame, HEADS[frame.kind] + 5),
    "truncated": truncate,
    "one byte": lambda frame: [replace(frame, payload=frame.payload[: HEADS[frame.kind] + 1])],
    "too long": lambda frame: [replace(frame, payload=frame.payload + bytes(100))],
    **{f"key {name}": with_point(point) for name, point in BAD_POINTS.items()},
}
tamperings = pytest.mark.parametrize("tampering", TAMPERINGS.values(), ids=TAMPERINGS.keys())
both_carriers = pytest.mark.parametrize("extended", [True, False], ids=["carrier A", "carrier B"])


async def refused(s, *errors, **options):
    """The dial fails with one of ``errors`` and nothing has happened for Bob's application."""
    with pytest.raises(DialError) as caught:
        await s.wait(s.alice.dial(s.bob.public_key, **options))
    found = [attempt.error for attempt in caught.value.attempts]
    assert any(type(error) in errors for error in found), found
    await s.settle()
    assert not s.listener.built
    (event,) = [one for one in s.alice_log.of(ev.DialFinished) if one.target == str(s.bob.public_key)][-1:]
    assert not event.ok
    return caught.value


async def still_works(s):
    """The clients are unharmed: the next transport is fine."""
    s.relay.be_honest()
    a, b = await s.open()
    a.send(10)
    await s.wait(b.when_received(10))
    assert a.transport.security == b.transport.security == "e2e"
    a.transport.abortConnection()
    await s.over(a, b)


@tamperings
@both_carriers
@sync
async def test_message_1_is(scene, tampering, extended):
    async with scene() as s:
        await s.set(extended=extended)
        rule = s.relay.rule(tampering, kind=REQUEST if extended else FWD, to=s.bob.public_key)
        error = await refused(s, IntegrityError)
        assert rule.hits == 1
        assert error.reason == "integrity"
        await still_works(s)


@tamperings
@both_carriers
@sync
async def test_message_2_is(scene, tampering, extended):
    async with scene() as s:
        await s.set(extended=extended)
        rule = s.relay.rule(tampering, kind=ACCEPT if extended else FWD, to=s.alice.public_key)
        error = await refused(s, IntegrityError)
        assert rule.hits == 1
        assert error.reason == "integrity"
        await still_works(s)


@both_carriers
@sync
async def test_the_relay_answers_itself(scene, extended):
    """Bob never hears of Alice: the relay makes up the answer, as well as one can without his key."""
    async with scene() as s:
        await s.set(extended=extended)
        mallory = SecretKey.generate()
        forged = SecureInitiator(mallory, s.alice.public_key, s.relay.key.public_key).message

        def answer(frame: RelayFrame) -> list[RelayFrame]:
            (leg,) = s.relay.switch.members[s.alice.public_key.raw].legs.values()
            head = frame.payload[: HEADS[frame.kind]]
            kind = ACCEPT if frame.kind == REQUEST else FWD
            s.relay.send(RelayFrame(s.alice.public_key, kind, leg.id, head + forged))
            return []

        rule = s.relay.rule(answer, kind=REQUEST if extended else FWD, to=s.bob.public_key)
        await refused(s, IntegrityError)
        assert rule.hits == 1
        await still_works(s)


@sync
async def test_a_forged_accept_without_a_message(scene):
    """A plain ACCEPT does not answer a REQUEST that carried a handshake."""
    async with scene() as s:
        await s.set()
        s.relay.rule(lambda f: [replace(f, payload=f.payload[:REQUEST_BYTES])], kind=ACCEPT, to=s.alice.public_key)
        await refused(s, Malformed)
        await still_works(s)


@sync
async def test_the_message_is_taken_out_of_the_request(scene):
    """Bob takes the plain REQUEST for carrier B and waits for the upgrade; Alice does not take his plain ACCEPT."""
    async with scene() as s:
        await s.set()
        s.relay.rule(lambda f: [replace(f, payload=f.payload[:REQUEST_BYTES])], kind=REQUEST, to=s.bob.public_key)
        with pytest.raises(DialError):
            await s.wait(s.alice.dial(s.bob.public_key))
        assert not s.listener.built
        await still_works(s)


@sync
async def test_message_2_of_another_handshake(scene):
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        (old,) = s.relay.frames(ACCEPT, s.alice.public_key)
        s.listener.built.clear()
        s.relay.rule(lambda frame: [replace(frame, payload=old.payload)], kind=ACCEPT, to=s.alice.public_key)
        await refused(s, IntegrityError)
        a.send(10)
        await s.wait(b.when_received(10))


@sync
async def test_a_request_recorded_at_another_relay(scene):
    """The relay is part of what both ends agree on: a request does not open behind another relay."""
    async with scene() as s:
        await s.set(relays=2)
        first, second = s.relays
        a, b = await s.open()
        used, other = (first, second) if first.frames(REQUEST, s.bob.public_key) else (second, first)
        (request,) = used.frames(REQUEST, s.bob.public_key)
        other.send(replace(request, transport_id=1))
        await s.settle()
        s.reactor.advance(1.0)
        (event,) = s.bob_log.of(ev.Refused)
        assert (event.remote, event.what, event.reason) == (str(s.alice.public_key), "transport", "integrity")
        assert s.listener.built == [b]
        a.send(10)
        await s.wait(b.when_received(10))


class _Stolen(ForgedKey):
    """Alice's key as a thief of Bob's key can use it: he calculates their shared secrets with Bob's."""

    def __init__(self, alice: PublicKey, bob: SecretKey) -> None:
        super().__init__(alice.raw)
        self._bob = bob

    def ecdh(self, public_key: bytes | Point) -> bytes:
        assert isinstance(public_key, Point) and public_key.raw == self._bob.public_key.raw
        return self._bob.ecdh(self.public_key.raw)


@pytest.mark.parametrize("then", ["silence", "a made-up confirmation"])
@sync
async def test_message_1_forged_with_the_responders_stolen_key(scene, then):
    """A thief of Bob's key can send Bob a request in Alice's name, but never confirm it: the application sees nothing."""
    async with scene() as s:
        await s.set()
        stolen = _Stolen(s.alice.public_key, s.bob.key)
        forged = SecureInitiator(stolen, s.bob.public_key, s.relay.key.public_key)
        request = stolen.public_key.raw + s.bob.public_key.raw + forged.message
        bob = s.bob.public_key
        (session,) = s.bob.pool.sessions.values()
        s.relay.rule(drop, kind=CLOSE, to=bob, times=None)  # what an honest switch says to an ACCEPT it has no rule for
        s.relay.send(RelayFrame(bob, REQUEST, 7, request))
        await s.settle()
        (stream,) = session.connection.streams.values()
        assert stream.security == "e2e", "Bob took message 1 for Alice's"
        assert not s.listener.built
        began = s.reactor.seconds()
        if then == "silence":
            s.reactor.advance(CONFIRM_TIMEOUT_S - 0.1)
            assert session.connection.streams
            s.reactor.advance(0.2)
            assert s.reactor.seconds() - began == pytest.approx(CONFIRM_TIMEOUT_S + 0.1)
            reason = "handshake_timeout"
        else:
            s.relay.send(RelayFrame(bob, ACK, 7, bytes(SEQUENCE_BYTES + 4 + 16)))
            reason = "integrity"
        await s.settle()
        assert not session.connection.streams
        assert not s.listener.built
        s.reactor.advance(1.0)
        assert [(e.remote, e.what, e.reason) for e in s.bob_log.of(ev.Refused)] == [
            (str(s.alice.public_key), "transport", reason)
        ]


@both_carriers
@sync
async def test_a_request_replayed_later(scene, extended):
    """A REQUEST that was recorded is played again: Bob answers, waits for a proof, and his live transport is untouched."""
    async with scene() as s:
        await s.set(extended=extended)
        a, b = await s.open()
        a.send(1_000)
        await s.wait(b.when_received(1_000))
        recorded = [f for f in s.relay.frames(to=s.bob.public_key) if f.kind in (REQUEST, FWD, ACK)]
        fresh = recorded[0].transport_id ^ 0x1000
        s.relay.rule(drop, kind=CLOSE, to=s.bob.public_key, times=None)
        for frame in recorded:  # the REQUEST, and everything sealed that came behind it
            s.relay.send(replace(frame, transport_id=fresh))
            await s.settle()
        s.reactor.advance(CONFIRM_TIMEOUT_S + 2)
        await s.settle()
        assert s.listener.built == [b]
        (session,) = s.bob.pool.sessions.values()
        assert len(session.connection.streams) == 1
        a.send(1_000)
        b.send(1_000)
        await s.wait(b.when_received(2_000))
        await s.wait(a.when_received(1_000))
        assert b.received == a.sent
        assert a.received == b.sent


@sync
async def test_replayed_requests_alone_time_out(scene):
    """Without the frames behind it a replayed REQUEST ends with ``handshake_timeout``; Bob is not filled up by them."""
    async with scene() as s:
        await s.set(config=replace(s.CONFIG, listener=ListenerLimits(offers_per_key=20)))
        a, b = await s.open()
        (request,) = s.relay.frames(REQUEST, s.bob.public_key)
        (session,) = s.bob.pool.sessions.values()
        s.relay.rule(drop, kind=CLOSE, to=s.bob.public_key, times=None)
        ids = [number for number in range(1, 201, 2) if number != request.transport_id][:50]
        for number in ids:
            s.relay.send(replace(request, transport_id=number))
        await s.settle()
        assert len(session.connection.streams) == 1 + 20, "no more than a key's share wait for a proof"
        s.reactor.advance(CONFIRM_TIMEOUT_S + 1)
        await s.settle()
        assert len(session.connection.streams) == 1
        s.reactor.advance(1.0)
        counted = {event.reason: event.count for event in s.bob_log.of(ev.Refused)}
        assert counted == {"busy": 30, "handshake_timeout": 20}
        assert s.listener.built == [b]
        a.send(10)
        await s.wait(b.when_received(10))
        c, d = await s.open()  # the places are free again
        c.send(10)
        await s.wait(d.when_received(10))


@sync
async def test_an_accept_that_comes_twice(scene):
    async with scene() as s:
        await s.set()
        s.relay.rule(repeat, kind=ACCEPT, to=s.alice.public_key)
        try:
            transport = await s.wait(s.alice.dial(s.bob.public_key))
        except DialError as error:
            assert isinstance(error.attempts[-1].error, Malformed)
        else:
            end = s.End()
            transport.attach(end)
            end.send(10)
            await s.wait(s.listener.built[0].when_received(10))
        await still_works(s)


@sync
async def test_an_accept_that_never_comes(scene):
    async with scene() as s:
        await s.set()
        s.relay.rule(drop, kind=ACCEPT, to=s.alice.public_key, times=None)
        with pytest.raises(DialError) as caught:
            await s.wait(s.alice.dial(s.bob.public_key, timeout_s=3.0))
        assert caught.value.attempts[-1].reason == "timeout"
        s.reactor.advance(CONFIRM_TIMEOUT_S)
        assert not s.listener.built
        await still_works(s)


REFUSALS = [reason for reason in CloseReason if reason is not CloseReason.UNSUPPORTED]


@pytest.mark.parametrize("reason", REFUSALS, ids=lambda reason: reason.name.lower())
@sync
async def test_a_request_that_the_relay_refuses_in_bobs_name(scene, reason):
    """The relay can keep Alice from Bob; it is a failed dial with that reason, and no more."""
    async with scene() as s:
        await s.set()
        s.relay.rule(lambda f: [replace(f, kind=CLOSE, payload=bytes([reason]))], kind=ACCEPT, to=s.alice.public_key)
        with pytest.raises(DialError) as caught:
            await s.wait(s.alice.dial(s.bob.public_key))
        error = caught.value.attempts[-1].error
        assert error.code == reason
        assert error.by == "peer"
        assert not s.listener.built


@sync
async def test_a_client_that_wants_the_clear_gets_only_what_it_asked_for(scene):
    """``hop`` on both sides is the base protocol, and says so."""
    async with scene() as s:
        await s.set(security=Security.HOP)
        a, b = await s.open()
        a.send(10)
        await s.wait(b.when_received(10))
        assert a.transport.security == b.transport.security == "hop"
        assert any(a.sent in frame.payload for frame in s.relay.frames(FWD))


@sync
async def test_names_of_errors_used_here_are_those_of_the_page():
    """9, 11, 12 and 17 of :ref:`spec-close-reasons`."""
    assert [error.code for error in (DowngradeRefused, HandshakeTimeout, IntegrityError, NoSuchService)] == [
        9,
        11,
        12,
        17,
    ]
