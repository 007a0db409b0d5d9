"""A client is not led into the clear: not by a relay, not by discovery, not by a peer that uses the name of another.

:ref:`spec-downgrade-rule`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import pytest_twisted

from dmsg.clients.limits import ListenerLimits
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.entry import BASE_VERSION, SECURE_VERSION, ClientPart, Entry
from dmsg.discovery.errors import DiscoveryUnavailable
from dmsg.errors import DialError
from dmsg.eventlog import schema as ev
from dmsg.mux.core.e2e_handshake import CONFIRM_TIMEOUT_S, UPGRADE_MAGIC
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.errors import DowngradeRefused
from dmsg.mux.core.wire import ACCEPT, ACK, CLOSE, FWD, REQUEST, REQUEST_BYTES, SEQUENCE_BYTES, CloseReason
from dmsg.testing.hostile import alter

sync = pytest_twisted.ensureDeferred
SECRET = b"what only Bob may read"


async def publish(s, key, version):
    """An entry for a client that is none of ours."""
    server = s.relay.key.public_key
    entry = Entry(version, 0, s.now_ns(), key.public_key, ClientPart((server,))).sign(key)
    await s.wait(s.discovery.post_entry(entry))


async def exchange_secret(s):
    a, b = await s.open()
    a.transport.write(SECRET)
    await s.wait(b.when_received(len(SECRET)))
    b.transport.write(SECRET)
    await s.wait(a.when_received(len(SECRET)))
    assert a.transport.security == b.transport.security == "e2e"
    assert not any(SECRET in frame.payload for frame in s.relay.seen), "the relay has read it"
    return a, b


def carrier_b_was_used(s):
    return [len(frame.payload) for frame in s.relay.frames(REQUEST, s.bob.public_key)] == [REQUEST_BYTES]


# --- the hop capability ------------------------------------------------------------------------------------------------


@sync
async def test_a_relay_that_knows_no_extension(scene):
    async with scene() as s:
        await s.set(extended=False)
        await exchange_secret(s)
        assert carrier_b_was_used(s)


@pytest.mark.parametrize("who", ["initiator", "responder", "both"])
@sync
async def test_a_relay_that_takes_the_capability_from(scene, who):
    """Extended in the handshake, base afterwards."""
    async with scene() as s:
        relay = s.relay = await s.add_relay()
        keys = [SecretKey.generate(), SecretKey.generate()]
        if who != "responder":
            relay.switch.treat_as_base.add(keys[0].public_key)
        if who != "initiator":
            relay.switch.treat_as_base.add(keys[1].public_key)
        s.alice = await s.client(key=keys[0], config=s.CONFIG)
        s.bob = await s.client(key=keys[1], config=s.CONFIG)
        s.bob.listen(s.listener)
        if who == "responder":
            await exchange_secret(s)
            assert carrier_b_was_used(s)
        else:
            # Alice goes on believing what the handshake proved to her; the relay can only refuse her
            with pytest.raises(DialError):
                await s.open()
            assert not s.listener.built


@sync
async def test_a_relay_that_says_unsupported(scene):
    """A made-up ``unsupported`` leads to carrier B."""
    async with scene() as s:
        await s.set()
        s.relay.rule(
            lambda f: [replace(f, kind=CLOSE, payload=bytes([CloseReason.UNSUPPORTED]))],
            kind=ACCEPT,
            to=s.alice.public_key,
        )
        a, b = await exchange_secret(s)
        sizes = [len(frame.payload) for frame in s.relay.frames(REQUEST, s.bob.public_key)]
        assert sizes[0] > REQUEST_BYTES
        assert sizes[1] == REQUEST_BYTES
        s.reactor.advance(CONFIRM_TIMEOUT_S + 1)
        await s.settle()
        assert s.listener.built == [b]
        a.transport.write(SECRET)
        await s.wait(b.when_received(2 * len(SECRET)))


@pytest.mark.parametrize("security", [Security.PREFER, Security.E2E])
@sync
async def test_a_relay_that_keeps_saying_unsupported(scene, security):
    """The dial fails; it never ends in the clear."""
    async with scene() as s:
        await s.set(security=security)
        s.relay.rule(
            lambda f: [replace(f, kind=CLOSE, payload=bytes([CloseReason.UNSUPPORTED]))],
            kind=ACCEPT,
            to=s.alice.public_key,
            times=None,
        )
        with pytest.raises(DialError) as caught:
            await s.open()
        assert caught.value.attempts[-1].reason == "unsupported"
        assert not s.listener.built


@sync
async def test_a_relay_that_breaks_the_magic_of_the_upgrade(scene):
    """Bob expects an upgrade and gets something else: ``downgrade``."""
    async with scene() as s:
        await s.set(extended=False)
        s.relay.rule(lambda f: alter(f, SEQUENCE_BYTES), kind=FWD, to=s.bob.public_key)
        with pytest.raises(DialError) as caught:
            await s.open()
        assert isinstance(caught.value.attempts[-1].error, DowngradeRefused)
        assert caught.value.reason == "downgrade"
        assert not s.listener.built
        s.reactor.advance(1.0)
        assert [event.reason for event in s.bob_log.of(ev.Refused)] == ["downgrade"]


@sync
async def test_a_relay_that_breaks_the_magic_of_the_answer(scene):
    """Alice expects Bob's part of the upgrade and gets something else: she refuses to go on in the clear."""
    async with scene() as s:
        await s.set(extended=False)
        s.relay.rule(lambda f: alter(f, SEQUENCE_BYTES), kind=FWD, to=s.alice.public_key)
        with pytest.raises(DialError) as caught:
            await s.open()
        assert isinstance(caught.value.attempts[-1].error, DowngradeRefused)
        assert caught.value.reason == "downgrade"
        s.reactor.advance(CONFIRM_TIMEOUT_S + 1)
        assert not s.listener.built


# --- peers that are, or play, base ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [b"plain data", UPGRADE_MAGIC[:15], b""], ids=["data", "half a magic", "nothing"])
@sync
async def test_a_plain_request_in_the_name_of_a_key_that_promises_security(scene, first):
    """The REQUEST is taken for carrier B; the first FWD is no upgrade: CLOSE ``downgrade``."""
    async with scene() as s:
        await s.set()
        key = SecretKey.generate()
        await publish(s, key, SECURE_VERSION)
        raw = await s.raw(key)
        assert (await s.wait(raw.request(s.bob.public_key, 2))).kind == ACCEPT
        raw.send_frame(FWD, 2, b"\0\0" + first)
        closed = await s.wait(raw.next_frame())
        assert (closed.kind, closed.payload) == (CLOSE, bytes([CloseReason.DOWNGRADE]))
        assert not s.listener.built
        s.reactor.advance(1.0)
        assert [(e.remote, e.reason) for e in s.bob_log.of(ev.Refused)] == [(str(key.public_key), "downgrade")]


@sync
async def test_a_plain_request_that_is_never_upgraded(scene):
    async with scene() as s:
        await s.set()
        key = SecretKey.generate()
        await publish(s, key, SECURE_VERSION)
        raw = await s.raw(key)
        assert (await s.wait(raw.request(s.bob.public_key, 2))).kind == ACCEPT
        closed = await s.wait(raw.next_frame())
        assert (closed.kind, closed.payload) == (CLOSE, bytes([CloseReason.HANDSHAKE_TIMEOUT]))
        assert s.reactor.seconds() >= CONFIRM_TIMEOUT_S
        assert not s.listener.built


@sync
async def test_plain_requests_do_not_pile_up(scene):
    """Of one key, no more than its share of the places wait for their upgrade."""
    async with scene() as s:
        await s.set(config=replace(s.CONFIG, listener=ListenerLimits(offers_per_key=20)))
        key = SecretKey.generate()
        await publish(s, key, SECURE_VERSION)
        raw = await s.raw(key)
        for number in range(30):
            raw.send_request(s.bob.public_key, 2 * number + 2)
        await s.settle()
        answers = raw.take_frames()
        assert [frame.kind for frame in answers].count(ACCEPT) == 20
        assert [frame.payload for frame in answers if frame.kind == CLOSE] == [bytes([CloseReason.BUSY])] * 10
        s.reactor.advance(CONFIRM_TIMEOUT_S + 1)
        await s.settle()
        await exchange_secret(s)


@sync
async def test_a_base_peer_is_spoken_to_in_the_clear_under_prefer(scene):
    """Its entry promises nothing: that is no downgrade."""
    async with scene() as s:
        await s.set()
        key = SecretKey.generate()
        await publish(s, key, BASE_VERSION)
        raw = await s.raw(key)
        assert (await s.wait(raw.request(s.bob.public_key, 2))).kind == ACCEPT
        raw.send_frame(FWD, 2, b"\0\7hello")
        (b,) = s.listener.built
        await s.wait(b.when_received(5))
        assert b.transport.security == "hop"
        assert (await s.wait(raw.next_frame(ACK))).payload == b"\0\7"


@sync
async def test_a_base_peer_and_a_listener_that_wants_end_to_end(scene):
    async with scene() as s:
        await s.set(security=Security.E2E)
        key = SecretKey.generate()
        await publish(s, key, BASE_VERSION)
        raw = await s.raw(key)
        assert (await s.wait(raw.request(s.bob.public_key, 2))).kind == ACCEPT
        raw.send_frame(FWD, 2, b"\0\7hello")
        closed = await s.wait(raw.next_frame())
        assert (closed.kind, closed.payload) == (CLOSE, bytes([CloseReason.DOWNGRADE]))
        assert not s.listener.built


@sync
async def test_dialling_a_base_peer_end_to_end(scene):
    """``e2e`` never speaks plain: refused before anything is sent."""
    async with scene() as s:
        await s.set()
        key = SecretKey.generate()
        await publish(s, key, BASE_VERSION)
        await s.raw(key)
        with pytest.raises(DialError) as caught:
            await s.wait(s.alice.dial(key.public_key, security=Security.E2E))
        assert isinstance(caught.value.attempts[-1].error, DowngradeRefused)
        assert not s.relay.frames(REQUEST)


@pytest.mark.parametrize("answer", ["an acknowledgement", "data", "data with the ACCEPT"])
@sync
async def test_a_base_peer_whose_entry_promised_security(scene, answer):
    """A base client in place of a peer who promised 0.1 treats the upgrade as data: Alice refuses, at once."""
    async with scene() as s:
        await s.set()
        key = SecretKey.generate()
        await publish(s, key, SECURE_VERSION)
        raw = await s.raw(key)

        def act(frame):
            if frame.kind == REQUEST:
                frames = [(ACCEPT, frame.transport_id, frame.payload)]
                if answer == "data with the ACCEPT":
                    frames.append((FWD, frame.transport_id, b"\0\0hello"))
                raw.send_frames(frames)
            elif frame.kind == FWD and answer == "an acknowledgement":
                raw.send_frame(ACK, frame.transport_id, frame.payload[:2])
            elif frame.kind == FWD and answer == "data":
                raw.send_frame(FWD, frame.transport_id, b"\0\0hello")
            return True

        raw.on_frame = act
        with pytest.raises(DialError) as caught:
            await s.wait(s.alice.dial(key.public_key))
        assert isinstance(caught.value.attempts[-1].error, DowngradeRefused)
        assert s.reactor.seconds() < 1, "not only when the dial's time was up"


# --- discovery ---------------------------------------------------------------------------------------------------------


@sync
async def test_discovery_out_of_reach_for_a_dialler(scene):
    """Nothing is cached and a server is pinned: it is end-to-end or nothing."""
    async with scene() as s:
        await s.set()
        s.alice = await s.client(servers=s.pinned, config=s.CONFIG, publish=False)
        s.discovery.failure = DiscoveryUnavailable("down")
        await exchange_secret(s)
        base = await s.raw()
        base.on_frame = lambda frame: (
            frame.kind == REQUEST and not base.send_frame(ACCEPT, frame.transport_id, frame.payload)
        )
        with pytest.raises(DialError):
            await s.wait(s.alice.dial(base.key.public_key))
        seen = s.relay.frames(FWD, base.key.public_key)
        assert all(frame.payload[2:].startswith(UPGRADE_MAGIC) for frame in seen)
        s.discovery.failure = None


@pytest.mark.parametrize("security", Security, ids=lambda one: one.value)
@sync
async def test_discovery_out_of_reach_for_a_listener(scene, security):
    """``prefer`` treats a stranger as promising 0.1, ``e2e`` never speaks plain, ``hop`` does not ask."""
    async with scene() as s:
        await s.set(security=security)
        key = SecretKey.generate()
        await publish(s, key, BASE_VERSION)
        raw = await s.raw(key)
        s.discovery.failure = DiscoveryUnavailable("down")
        assert (await s.wait(raw.request(s.bob.public_key, 2))).kind == ACCEPT
        raw.send_frame(FWD, 2, b"\0\7hello")
        answer = await s.wait(raw.next_frame())
        if security is Security.HOP:
            assert answer.kind == ACK
            assert s.listener.built[0].received == b"hello"
        else:
            assert (answer.kind, answer.payload) == (CLOSE, bytes([CloseReason.DOWNGRADE]))
            assert not s.listener.built
        s.discovery.failure = None


@sync
async def test_what_was_looked_up_is_remembered_for_a_while(scene):
    """A look-up that is still fresh is used although discovery is gone; one that is not fails closed."""
    async with scene() as s:
        await s.set()
        key = SecretKey.generate()
        await publish(s, key, BASE_VERSION)
        raw = await s.raw(key)
        assert (await s.wait(raw.request(s.bob.public_key, 2))).kind == ACCEPT
        s.discovery.failure = DiscoveryUnavailable("down")
        await s.wait(raw.request(s.bob.public_key, 4))
        assert len(s.listener.built) == 2
        s.reactor.advance(s.CONFIG.dial.entry_lifetime_s + 1)
        await s.wait(raw.request(s.bob.public_key, 6))
        raw.send_frame(FWD, 6, b"\0\7hello")
        assert (await s.wait(raw.next_frame())).payload == bytes([CloseReason.DOWNGRADE])
        assert len(s.listener.built) == 2
        s.discovery.failure = None
