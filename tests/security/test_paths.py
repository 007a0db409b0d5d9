"""What a relay may say about the life of a transport: it can be a nuisance, and the stream heals or is known to be cut.

:ref:`spec-sealed-close`, :ref:`spec-clean-ends`, :ref:`spec-resumption`.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import pytest_twisted
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory

from dmsg.errors import DialError
from dmsg.eventlog import schema as ev
from dmsg.glue.stream_transport import TransportLost
from dmsg.mux.core.e2e_handshake import RESUME_CONFIRM_TIMEOUT_S, Resume, SecureInitiator, SecureResponder
from dmsg.mux.core.e2e_negotiation import Carrier
from dmsg.mux.core.errors import IntegrityError, Refused, close_error
from dmsg.mux.core.stream import StreamState
from dmsg.mux.core.wire import ACCEPT, ACK, CLOSE, FWD, REQUEST, REQUEST_BYTES, CloseReason
from dmsg.testing.hostile import HostileNetwork, RelayFrame, alter, drop, repeat
from dmsg.testing.memory import MemoryNetwork, Path
from dmsg.testing.network import LOOPBACK
from dmsg.testing.probes import ConformanceProtocol

sync = pytest_twisted.ensureDeferred
SIZE = 300_000
reasons = pytest.mark.parametrize("reason", [*CloseReason, 99, 255])


def forged(frame, payload):
    return RelayFrame(frame.to, CLOSE, frame.transport_id, payload)


def end_path(s):
    """The relay tells both ends that the path of their transport is over."""
    s.relay.send(forged(s.relay.frames(FWD, s.bob.public_key)[0], b"\0"))
    s.relay.send(forged(s.relay.frames(ACCEPT, s.alice.public_key)[0], b"\0"))


async def both_ways(s, a, b, size=SIZE):
    """More of both streams, and all of it arrives."""
    a.send(size)
    b.send(size)
    await s.wait(a.when_received(len(b.sent)))
    await s.wait(b.when_received(len(a.sent)))
    assert bytes(b.received) == a.sent
    assert bytes(a.received) == b.sent


async def close_cleanly(s, a, b):
    a.transport.loseConnection()
    await s.over(a, b)
    assert isinstance(a.reason, ConnectionDone)
    assert isinstance(b.reason, ConnectionDone)


@reasons
@pytest.mark.parametrize("victim", ["initiator", "responder"])
@sync
async def test_a_close_the_relay_made_up(scene, reason, victim):
    """In the middle of a transfer, in the other end's name: the transport goes on over a new path, nothing is missing."""
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        to = (s.alice if victim == "initiator" else s.bob).public_key
        s.relay.rule(lambda f: [f, forged(f, bytes([reason]))], kind=FWD, to=to, skip=3)
        await both_ways(s, a, b)
        await both_ways(s, a, b, 10)
        assert len(s.alice_log.of(ev.TransportResumed)) == 1
        assert not s.closed(s.alice_log) + s.closed(s.bob_log), "it has not ended"
        await close_cleanly(s, a, b)
        assert [reason for reason, _ in s.closed(s.alice_log) + s.closed(s.bob_log)] == ["normal", "normal"]


@pytest.mark.parametrize(
    "payload", [b"", b"\0" * 17, b"\x0c" * 17, b"\1" + bytes(500)], ids=["none", "0", "12", "long"]
)
@sync
async def test_a_close_with_a_made_up_seal(scene, payload):
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        s.relay.rule(lambda f: [f, forged(f, payload)], kind=FWD, to=s.bob.public_key, skip=1)
        await both_ways(s, a, b)
        await close_cleanly(s, a, b)


@sync
async def test_a_sealed_close_of_another_transport(scene):
    """Bob's own word for the end of one transport says nothing about another."""
    async with scene() as s:
        await s.set()
        a1, b1 = await s.open()
        a2, b2 = await s.open()
        coming = s.relay.next_frame(CLOSE, s.alice.public_key)
        b1.transport.abortConnection()
        close = await s.wait(coming)
        await s.over(a1)
        assert isinstance(a1.cause, Refused)
        s.relay.rule(lambda f: [f, forged(f, close.payload)], kind=FWD, to=s.alice.public_key)
        await both_ways(s, a2, b2)
        await close_cleanly(s, a2, b2)


@pytest.mark.parametrize("reason", [CloseReason.NORMAL, CloseReason.INTEGRITY, CloseReason.DEADLINE])
@sync
async def test_the_reason_of_a_sealed_close_is_altered(scene, reason):
    """Alice does not believe it, looks for another path, and hears from Bob himself that there is none."""
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        a.send(100)
        await s.wait(b.when_received(100))
        s.relay.rule(lambda f: [replace(f, payload=bytes([reason]) + f.payload[1:])], kind=CLOSE, to=s.alice.public_key)
        b.transport.abortConnection()
        await s.over(a, b)
        assert isinstance(a.reason, TransportLost)
        assert isinstance(a.cause, Refused)


@reasons
@sync
async def test_without_resumption_a_made_up_close_is_a_loss(scene, reason):
    """The application sees the relay's reason as the relay's: never ``ConnectionDone``, and never that the peer has aborted."""
    async with scene() as s:
        await s.set(config=s.MORTAL)
        a, b = await s.open()
        a.send(SIZE)
        b.send(SIZE)
        s.relay.rule(lambda f: [forged(f, bytes([reason]))], kind=FWD, to=s.bob.public_key, skip=3)
        await s.over(a, b)
        for end, other in ((a, b), (b, a)):
            assert isinstance(end.reason, TransportLost)
            assert other.sent.startswith(end.received)
            assert len(end.received) < SIZE or end is a
        of_the_peer = reason in (CloseReason.NORMAL, CloseReason.REFUSED)
        assert type(b.cause) is type(close_error(CloseReason.PEER_GONE if of_the_peer else reason))


@sync
async def test_a_connection_cut_in_the_middle(scene):
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        count = []

        def cut(frame):
            count.append(frame)
            s.relay.cut(s.bob.public_key)
            return []

        s.relay.rule(cut, kind=FWD, to=s.bob.public_key, skip=4)
        await both_ways(s, a, b)
        assert count
        await close_cleanly(s, a, b)


@sync
async def test_the_relay_cuts_again_and_again(scene):
    """Six times, on one relay or the other, at one end or the other, by a CLOSE or a reset."""
    async with scene() as s:
        await s.set(relays=2)
        a, b = await s.open()
        for number in range(6):
            for relay in s.relays:
                for client in (s.alice, s.bob)[:: 1 if number % 2 else -1]:
                    if number % 3:
                        relay.rule(lambda f: [f, forged(f, b"\0")], kind=FWD, to=client.public_key)
                    else:
                        relay.rule(lambda f, relay=relay: relay.cut(f.to) or [], kind=FWD, to=client.public_key)
            await both_ways(s, a, b)
            for relay in s.relays:
                relay.be_honest()
        await close_cleanly(s, a, b)
        assert len(s.alice_log.of(ev.TransportResumed)) >= 6


@sync
async def test_a_resumption_replayed(scene):
    """The REQUEST that moved a transport, and all that followed, played again: it does not move it again."""
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        s.relay.rule(lambda f: [f, forged(f, b"\0")], kind=FWD, to=s.bob.public_key)
        await both_ways(s, a, b, 1_000)
        requests = s.relay.frames(REQUEST, s.bob.public_key)
        assert len(requests) == 2, "the second one resumes"
        (session,) = s.bob.pool.sessions.values()
        (stream,) = session.connection.streams.values()
        recorded = [f for f in s.relay.frames(to=s.bob.public_key) if f.transport_id == requests[1].transport_id]
        s.relay.rule(drop, kind=CLOSE, to=s.bob.public_key, times=None)
        for frame in recorded:
            s.relay.send(replace(frame, transport_id=requests[1].transport_id ^ 0x1000))
            await s.settle()
        s.reactor.advance(RESUME_CONFIRM_TIMEOUT_S + 1)
        assert list(session.connection.streams.values()) == [stream]
        assert b.transport.stream is stream
        s.relay.be_honest()
        await both_ways(s, a, b)
        await close_cleanly(s, a, b)
        assert s.listener.built == [b]


@sync
async def test_resuming_the_transport_of_another_client(scene):
    """A token alone is worth nothing: the key that opened the transport has to be proved too."""
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        a.send(100)
        await s.wait(b.when_received(100))
        mallory = await s.client(config=s.CONFIG)
        (session,) = mallory.pool.sessions.values()
        resume = Resume(b.transport.token, 0)
        opened = await s.wait(session.request(s.bob.public_key, Carrier.REQUEST, resume=resume))
        assert opened.resume is None, "Bob's authenticated answer is that he knows no such transport"
        await s.settle()
        assert opened.stream.state is StreamState.CLOSED
        await both_ways(s, a, b)


@pytest.mark.parametrize("act", [alter, drop, repeat], ids=["altered", "dropped", "repeated"])
@pytest.mark.parametrize("kind", [REQUEST, ACCEPT], ids=["request", "accept"])
@sync
async def test_a_resumption_tampered_with(scene, kind, act):
    """It goes on in the end, and it is never wrong."""
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        a.send(1_000)
        await s.wait(b.when_received(1_000))
        s.relay.rule(act, kind=kind, to=(s.bob if kind == REQUEST else s.alice).public_key)
        s.relay.send(forged(s.relay.frames(FWD, s.bob.public_key)[0], b"\0"))
        a.send(SIZE)
        b.send(SIZE)
        await s.wait(a.when(lambda: a.lost or len(a.received) == SIZE))
        assert not a.lost, "what a relay alters is no word of Bob's: Alice tries again"
        await both_ways(s, a, b, 10)
        await close_cleanly(s, a, b)


@sync
async def test_an_application_that_ends_while_a_resumption_waits_for_its_proof(scene):
    """Bob has answered the resumption and then gives the transport up: Alice's proof must not bring it back to life."""
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        a.send(100)
        await s.wait(b.when_received(100))
        held = []
        s.relay.rule(lambda f: held.append(f) or [], kind=ACCEPT, to=s.alice.public_key)
        end_path(s)
        answered = s.relay.next_frame(ACCEPT, s.alice.public_key)
        a.send(100)
        await s.wait(answered)
        b.transport.abortConnection()
        await s.over(b)
        (accept,) = held
        s.relay.send(accept)
        await s.over(a)
        assert isinstance(a.reason, TransportLost)
        (session,) = s.bob.pool.sessions.values()
        await s.settle()
        assert not session.connection.streams


@pytest.mark.parametrize("value", [b"", bytes(23), bytes(25)], ids=len)
@sync
async def test_a_peer_with_a_malformed_resumption_costs_only_itself(scene, value, monkeypatch):
    """TLV ``resume`` of the wrong length from a peer that is otherwise authentic: this dial fails, the session lives."""
    async with scene() as s:
        await s.set()
        monkeypatch.setattr(Resume, "encode", lambda self: value)
        answer = SecureResponder.answer
        monkeypatch.setattr(SecureResponder, "answer", lambda self, resume=None: answer(self, Resume(b"", 0)))
        (session,) = s.alice.pool.sessions.values()
        with pytest.raises(DialError) as caught:
            await s.open()
        assert isinstance(caught.value.attempts[-1].error, IntegrityError)
        monkeypatch.undo()
        assert list(s.alice.pool.sessions.values()) == [session]
        a, b = await s.open()
        await both_ways(s, a, b, 100)


@pytest.mark.parametrize("value", [b"", bytes(23), bytes(25)], ids=len)
@sync
async def test_a_request_with_a_malformed_resumption(scene, value, monkeypatch):
    async with scene() as s:
        await s.set()
        monkeypatch.setattr(Resume, "encode", lambda self: value)
        message = SecureInitiator(s.alice.key, s.bob.public_key, s.relay.key.public_key, resume=Resume(b"", 0)).message
        (session,) = s.bob.pool.sessions.values()
        head = s.alice.public_key.raw + s.bob.public_key.raw
        assert len(head) == REQUEST_BYTES
        s.relay.send(RelayFrame(s.bob.public_key, REQUEST, 5, head + message))
        await s.settle()
        s.reactor.advance(1.0)
        assert [event.reason for event in s.bob_log.of(ev.Refused)] == ["integrity"]
        assert list(s.bob.pool.sessions.values()) == [session]
        assert not session.connection.streams


@pytest.mark.parametrize("act", [drop, alter], ids=["kept back", "altered"])
@sync
async def test_a_resumption_whose_proof_does_not_arrive_costs_one_path_and_not_the_transport(scene, act):
    """Alice has moved to the path that Bob has offered; the relay does something to her proof."""
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        a.send(100)
        await s.wait(b.when_received(100))
        held = s.relay.rule(act, kind=ACK, to=s.bob.public_key, times=None)
        end_path(s)
        s.reactor.advance(RESUME_CONFIRM_TIMEOUT_S + 0.5)
        assert held.hits and not a.lost and not b.lost
        s.relay.be_honest()
        await both_ways(s, a, b)
        await close_cleanly(s, a, b)


@sync
async def test_the_proof_of_a_resumption_may_come_late(scene):
    """As behind a slow link, on which the proof waits behind the data of all other transports."""
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        a.send(100)
        await s.wait(b.when_received(100))
        held = []
        s.relay.rule(lambda f: held.append(f) or [], kind=ACK, to=s.bob.public_key, times=None)
        end_path(s)
        s.reactor.advance(RESUME_CONFIRM_TIMEOUT_S - 1)
        s.relay.be_honest()
        for frame in held:
            s.relay.send(frame)
        await both_ways(s, a, b)
        assert len(s.relay.frames(REQUEST, s.bob.public_key)) == 2, "the second one resumes, and is enough"
        await close_cleanly(s, a, b)


@pytest.mark.parametrize("bad_relays", [1, 2])
@sync
async def test_relays_that_end_each_path_do_not_keep_a_transport_from_another(bad_relays):
    """They are the fastest, and let every handshake through; what comes on a new path they answer with CLOSE."""
    memory = MemoryNetwork(random=Random(1))
    async with HostileNetwork(memory, relays=0, random=Random(2).randbytes) as network:
        bad = [await network.add_relay() for _ in range(bad_relays)]
        good = await network.add_relay()
        memory.set_path(LOOPBACK, network.pinned[-1].address.port, Path(0.05))
        bob = await network.client(min_servers=bad_relays + 1)
        alice = await network.client(min_servers=bad_relays + 1)
        ends = ConformanceProtocol(), ConformanceProtocol()
        bob.listen(Factory.forProtocol(lambda: ends[1]))
        transport = await network.wait(alice.dial(bob.public_key))
        transport.attach(ends[0])
        transport.write(b"one")
        await network.wait(ends[1].when_received(3))
        assert transport.getHost().server_public_key != good.key.public_key
        for relay in bad:
            relay.rule(lambda frame: [forged(frame, bytes((CloseReason.PEER_GONE,)))], kind=FWD, times=None)
        transport.write(b" two")
        began = memory.seconds()
        await network.wait(ends[1].when_received(7))
        assert ends[1].received == b"one two"
        assert transport.getHost().server_public_key == good.key.public_key
        assert memory.seconds() - began < 5.0


@sync
async def test_a_relay_that_alters_data_is_not_dialled_through_again():
    """It is the fastest, and lets every handshake through. The next dial takes another one."""
    memory = MemoryNetwork(random=Random(1))
    async with HostileNetwork(memory, relays=0, random=Random(2).randbytes) as network:
        bad = await network.add_relay()
        good = await network.add_relay()
        memory.set_path(LOOPBACK, network.pinned[-1].address.port, Path(0.05))
        bob = await network.client(min_servers=2)
        alice = await network.client(min_servers=2)
        bob.listen(Factory.forProtocol(ConformanceProtocol))
        for relay, fault in ((bad, IntegrityError), (good, None)):
            bad.rule(alter, kind=FWD)
            transport = await network.wait(alice.dial(bob.public_key))
            assert transport.getHost().server_public_key == relay.key.public_key
            end = ConformanceProtocol()
            transport.attach(end)
            transport.write(b"data")
            memory.advance(1.0)
            assert [type(one.value.cause) for one in end.lost] == ([fault] if fault else [])


@sync
async def test_a_stranger_that_sends_garbage_makes_its_relay_no_worse_for_the_one_it_has_dialled():
    memory = MemoryNetwork(random=Random(1))
    async with HostileNetwork(memory, relays=0, random=Random(2).randbytes) as network:
        relay = await network.add_relay()
        bob = await network.client()
        alice = await network.client()
        bob.listen(Factory.forProtocol(ConformanceProtocol))

        def score():
            return bob.pool.scores.score(relay.key.public_key, memory.seconds())

        before = score()
        for _ in range(10):
            relay.rule(alter, kind=FWD)
            transport = await network.wait(alice.dial(bob.public_key))
            end = ConformanceProtocol()
            transport.attach(end)
            transport.write(b"data")
            await network.wait(end.when_lost())
            assert type(end.lost[0].value.cause) is IntegrityError
        assert score() > before - 10
