"""Data that did not arrive never looks like a clean close, in the hop or sealed, as a reset does not on TCP.

:ref:`spec-clean-ends`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone, ConnectionLost

from dmsg.glue.deadlines import LINGER_S
from dmsg.glue.stream_transport import TransportLost
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.errors import Refused
from dmsg.mux.core.wire import ACCEPT, ACK, CLOSE, FWD, REQUEST

sync = pytest_twisted.ensureDeferred
MIB = 1 << 20
relays = pytest.mark.parametrize("extended", [True, False], ids=["our relay", "base relay"])
kinds = pytest.mark.parametrize("security", [Security.HOP, Security.E2E], ids=["hop", "sealed"])


async def dial_base_peer(s: Any, extended: bool) -> tuple[Any, Any, int]:
    """Alice, a raw peer she has dialled, and the transport's id at that peer."""
    await s.set(extended=extended)
    s.alice_log = type(s.alice_log)()
    s.alice = await s.client(discovery=None, servers=s.pinned, events=s.alice_log, config=s.CONFIG)
    peer = await s.raw()
    a = s.End()
    dialling = Deferred.fromCoroutine(s.alice.dial(peer.key.public_key, security=Security.HOP))
    request = await s.wait(peer.next_frame(REQUEST))
    peer.send_frame(ACCEPT, request.transport_id, request.payload)
    transport = await s.wait(dialling)
    transport.attach(a)
    return a, peer, request.transport_id


@relays
@sync
async def test_an_answer_to_a_base_peer_that_closed_in_the_same_read(scene, extended):
    """It goes nowhere: whether the close comes in one read with the question or in the next one makes no difference."""
    async with scene() as s:
        a, peer, transport_id = await dial_base_peer(s, extended)
        a.on_data = lambda data: a.transport.write(b"answer")  # type: ignore[method-assign]
        peer.send_frames([(FWD, transport_id, b"\0\0question"), (CLOSE, transport_id, b"\0")])
        await s.over(a)
        assert a.received == b"question"
        assert isinstance(a.cause, Refused)


async def read_first(s: Any, peer: Any, transport_id: int, limit_bytes: int = 98_250) -> int:
    """Acknowledge what a program's first read takes; gives how much that was."""
    taken = 0
    while taken < limit_bytes:
        frame = await s.wait(peer.next_frame(FWD, transport_id))
        taken += len(frame.payload) - 2
        peer.send_frame(ACK, transport_id, frame.payload[:2])
    return taken


@relays
@sync
async def test_a_base_peer_that_closes_after_its_first_read(scene, extended):
    """1 MiB written, then closed; 98 KiB acknowledged."""
    async with scene() as s:
        a, peer, transport_id = await dial_base_peer(s, extended)
        a.send(MIB)
        a.transport.loseConnection()
        taken = await read_first(s, peer, transport_id)
        peer.send_frame(CLOSE, transport_id, b"\0")
        await s.over(a)
        assert isinstance(a.reason, TransportLost) and isinstance(a.reason, ConnectionLost)
        assert isinstance(a.cause, Refused)
        assert f"{MIB - taken} bytes" in str(a.reason)
        assert s.closed(s.alice_log) == [("refused", "peer")]


@relays
@sync
async def test_a_peer_that_is_killed_behind_a_base_relay(scene, extended):
    """A base relay says nothing of it until a frame comes for the peer, which it answers with CLOSE 0."""
    async with scene() as s:
        a, peer, transport_id = await dial_base_peer(s, extended)
        s.relay.rule(lambda f: [replace(f, payload=b"\0")], kind=CLOSE, to=s.alice.public_key)
        a.send(MIB)
        a.transport.loseConnection()
        await read_first(s, peer, transport_id)
        peer.abort()
        await s.over(a)
        assert isinstance(a.reason, TransportLost)


@sync
async def test_a_base_peer_that_closes_when_nothing_was_sent_yet(scene):
    """What was written in the turn in which the CLOSE came."""
    async with scene() as s:
        a, peer, transport_id = await dial_base_peer(s, True)
        s.relay.rule(lambda f: a.send(10) or [f], kind=CLOSE, to=s.alice.public_key)
        peer.send_frame(CLOSE, transport_id, b"\0")
        await s.over(a)
        assert isinstance(a.reason, TransportLost)


@pytest.mark.parametrize("who", ["we close", "the peer closes"])
@relays
@sync
async def test_a_close_behind_all_acknowledgements_is_clean(scene, extended, who):
    async with scene() as s:
        a, peer, transport_id = await dial_base_peer(s, extended)
        a.send(300_000)
        if who == "we close":
            a.transport.loseConnection()
        assert await read_first(s, peer, transport_id, 300_000) == 300_000
        if who == "the peer closes":
            peer.send_frame(CLOSE, transport_id, b"\0")
        await s.over(a)
        assert isinstance(a.reason, ConnectionDone)
        assert s.closed(s.alice_log) == [("normal", "local" if who == "we close" else "peer")]


@kinds
@sync
async def test_our_peer_that_closes_after_its_first_read(scene, security):
    async with scene() as s:
        await s.set(security=Security.PREFER if security is Security.E2E else Security.HOP)
        a, b = await s.open(security=security)
        assert a.transport.security == ("e2e" if security is Security.E2E else "hop")
        b.on_data = lambda data: b.send(100) or b.transport.loseConnection()
        a.send(MIB)
        await s.over(a, b)
        assert 0 < len(b.received) < MIB
        assert isinstance(a.reason, TransportLost)
        assert isinstance(b.reason, ConnectionDone), "what it wrote has arrived"
        assert bytes(a.received) == b.sent


@kinds
@sync
async def test_our_peer_that_closes_after_its_first_read_of_what_we_wrote_and_closed(scene, security):
    async with scene() as s:
        await s.set(security=Security.PREFER if security is Security.E2E else Security.HOP)
        a, b = await s.open(security=security)
        b.on_data = lambda data: b.transport.loseConnection()
        a.send(MIB)
        a.transport.loseConnection()
        await s.over(a, b)
        assert 0 < len(b.received) < MIB
        assert isinstance(a.reason, TransportLost)
        assert isinstance(b.reason, ConnectionDone)


@kinds
@sync
async def test_our_peer_that_closes_without_reading(scene, security):
    """It is paused, everything lies unread at its end."""
    async with scene() as s:
        await s.set(security=Security.PREFER if security is Security.E2E else Security.HOP)
        a, b = await s.open(security=security)
        b.transport.pauseProducing()
        a.send(MIB)
        await s.settle()
        b.send(100)
        b.transport.loseConnection()
        await s.over(a, b)
        assert isinstance(a.reason, TransportLost)
        assert bytes(a.received) == b.sent, "what it wrote has arrived all the same"
        assert isinstance(b.reason, ConnectionDone)


@kinds
@sync
async def test_a_writer_is_stopped_as_soon_as_the_reader_has_closed(scene, security):
    """It does not go on for as long as it has data."""
    async with scene() as s:
        await s.set(security=Security.PREFER if security is Security.E2E else Security.HOP)
        a, b = await s.open(security=security)
        b.on_data = lambda data: b.transport.loseConnection()
        a.send(16 * MIB)
        await s.over(a, b)
        assert isinstance(a.reason, TransportLost)
        assert a.transport.stream.sent_bytes < 3 * MIB


@sync
async def test_both_close_with_data_on_the_way(scene):
    """Neither waits for the other until the linger is over, and both are told."""
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        began = s.reactor.seconds()
        for end in (a, b):
            end.send(100)
            end.transport.loseConnection()
        await s.over(a, b)
        assert s.reactor.seconds() - began < 1.0
        assert not a.received and not b.received
        assert isinstance(a.reason, TransportLost) and isinstance(b.reason, TransportLost)


@sync
async def test_a_close_that_was_waited_for_is_clean_when_sealed(scene):
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        a.send(MIB)
        a.transport.loseConnection()
        await s.over(a, b)
        assert bytes(b.received) == a.sent
        assert isinstance(a.reason, ConnectionDone) and isinstance(b.reason, ConnectionDone)


@sync
async def test_data_that_was_dropped_is_still_cut_after_another_path(scene):
    """The relay drops the peer's last word: over the next path it is the same."""
    async with scene() as s:
        await s.set(relays=2)
        a, b = await s.open()
        b.on_data = lambda data: b.transport.loseConnection()
        relay = next(r for r in s.relays if r.key.public_key == a.transport.getHost().server_public_key)
        relay.rule(lambda f: [replace(f, payload=b"\0")], kind=CLOSE, to=s.alice.public_key)
        a.send(MIB)
        a.transport.loseConnection()
        await s.over(a)
        assert isinstance(a.reason, TransportLost)


@sync
async def test_a_sealed_peer_that_gives_up_a_half_closed_transport(scene):
    """Its end is acknowledged, ours never came: after the linger it closes, and what it had not taken is cut."""
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        # Bob's close has waited for its acknowledgement; what Alice writes then never reaches him
        a.transport.pauseProducing()
        b.transport.loseConnection()
        await s.settle()
        s.relay.rule(lambda f: [], kind=FWD, to=s.bob.public_key, times=None)
        a.send(100)
        s.reactor.advance(LINGER_S + 1)
        a.transport.resumeProducing()
        await s.over(a, b)
        assert isinstance(b.reason, ConnectionDone)
        assert isinstance(a.reason, TransportLost)
