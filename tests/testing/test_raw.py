"""A raw client and a raw server understand each other, over a network in memory."""

from __future__ import annotations

from random import Random

import pytest
from twisted.internet.defer import ensureDeferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.error import ConnectionDone

from dmsg.crypto.keys import SecretKey
from dmsg.mux.core.wire import FrameType
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.raw import RawFrame, RawRelay, connect_raw


@pytest.fixture
def pair(clock):
    """A raw client and the server's end of it, after the handshake and OK, and the network they use."""
    network = MemoryNetwork(clock, chunking="random", random=Random(1))
    server = RawRelay(TCP4ServerEndpoint(network, 7), random=Random(2).randbytes)
    pinned = _done(network, server.listen())
    client = ensureDeferred(connect_raw(TCP4ClientEndpoint(network, "127.0.0.1", 7), pinned.public_key))
    there = _done(network, server.accept())
    return _done(network, client), there, network


def _done(network, work):
    waiting = ensureDeferred(work) if not hasattr(work, "addBoth") else work
    results = []
    waiting.addBoth(results.append)
    network.advance(0)
    (result,) = results
    if hasattr(result, "raiseException"):
        result.raiseException()
    return result


def test_frames_go_both_ways_however_they_are_cut(pair):
    client, server, network = pair
    assert _done(network, client.next_frame()) == RawFrame(FrameType.OK, 0, b"")
    payload = Random(3).randbytes(65_510)
    client.send_frame(FrameType.FWD, 8, payload, cuts=[1, 4, 5, 300, 65_000])
    assert _done(network, server.next_frame(FrameType.FWD)) == RawFrame(FrameType.FWD, 8, payload)
    server.send_frames([(FrameType.ACK, 8, b"\0\1"), (FrameType.CLOSE, 8, b"\0"), (FrameType.ACK, 6, b"\0\2")])
    assert _done(network, client.next_frame(transport_id=6)).payload == b"\0\2"
    assert client.take_frames() == []
    assert server.remote == client.key.public_key


def test_requests_and_their_answers(pair):
    client, server, network = pair

    def answer(frame):
        kind = FrameType.ACCEPT if frame.transport_id == 2 else FrameType.CLOSE
        server.send_frame(kind, frame.transport_id, frame.payload if kind == FrameType.ACCEPT else b"\1")
        return True

    server.on_frame = answer
    target = SecretKey.generate().public_key
    assert _done(network, client.request(target, 2)).payload == client.key.public_key.raw + target.raw
    assert _done(network, client.request(target, 4)).kind == FrameType.CLOSE
    assert server.take_frames() == []


def test_all_that_wait_are_told_of_the_end(pair):
    client, server, network = pair
    waiting = ensureDeferred(client.next_frame(FrameType.REQUEST))
    lost = ensureDeferred(client.lost())
    server.close()
    with pytest.raises(ConnectionDone):
        _done(network, waiting)
    assert isinstance(_done(network, lost), ConnectionDone)
    with pytest.raises(ConnectionDone):
        _done(network, client.next_frame())
