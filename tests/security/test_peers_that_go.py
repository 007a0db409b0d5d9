"""What an application sees of a peer that is killed, that has a twin with its key, or that speaks in the clear.

:ref:`W13 <weakness-two-connections>`, :ref:`W14 <weakness-vanished-peer>`, and plain REQUESTs under
:ref:`spec-downgrade-rule`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred

from dmsg.crypto.keys import SecretKey
from dmsg.errors import DialError
from dmsg.eventlog import schema as ev
from dmsg.glue.stream_transport import TransportLost
from dmsg.mux.client.service import ClientConfig
from dmsg.mux.core.e2e_handshake import CONFIRM_TIMEOUT_S
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.errors import PeerGone, Refused, UnknownPeer
from dmsg.mux.core.wire import ACCEPT, ACK, CLOSE, FWD, CloseReason

sync = pytest_twisted.ensureDeferred
TWIN = SecretKey(b"\x77" * 32)


def kill(s: Any, client: Any) -> None:
    """End a client as SIGKILL does: its connections are gone, and it does nothing any more."""
    sessions = list(client.pool.sessions.values())
    client.pool.lost = lambda *_: None
    for session in sessions:
        session.shell.transport.abortConnection()


@sync
async def test_a_sealed_peer_that_is_killed_is_lost_after_the_grace(scene: Any) -> None:
    """30 seconds in which it could have come back over another relay; what was tried last is the cause."""
    async with scene() as s:
        await s.set(config=ClientConfig())
        a, b = await s.open()
        a.send(100)
        await s.wait(b.when_received(100))
        kill(s, s.bob)
        began = s.reactor.seconds()
        a.send(1_000)
        await s.over(a)
        assert s.reactor.seconds() - began == pytest.approx(30.0, abs=0.5)
        assert isinstance(a.reason, TransportLost)
        assert isinstance(a.cause, DialError)
        assert isinstance(a.cause.attempts[-1].error, UnknownPeer)


@pytest.mark.parametrize("how", ["without resumption", "in the hop"])
@sync
async def test_a_peer_that_is_killed_is_lost_at_once(scene: Any, how: str) -> None:
    async with scene() as s:
        hop = how == "in the hop"
        config = s.CONFIG if hop else replace(s.CONFIG, resume_grace_s=0)
        await s.set(config=config, security=Security.HOP if hop else Security.PREFER)
        a, b = await s.open()
        a.send(100)
        await s.wait(b.when_received(100))
        kill(s, s.bob)
        began = s.reactor.seconds()
        await s.over(a)
        assert s.reactor.seconds() == began
        assert isinstance(a.cause, PeerGone)


@sync
async def test_two_programs_with_one_key_take_turns(scene: Any) -> None:
    """The relay keeps the newest connection, and the one it drops comes back after its pause."""
    async with scene() as s:
        await s.set(config=ClientConfig())
        logs, listeners = [s.Log(), s.Log()], [s.Listener(), s.Listener()]
        for log, listener in zip(logs, listeners, strict=True):
            twin = await s.client(key=TWIN, events=log, config=ClientConfig())
            twin.listen(listener)
        for _ in range(600):
            s.reactor.advance(0.1)
        for log in logs:
            assert 10 <= len(log.of(ev.SessionUp)) <= 25, "each has it again every 3 to 6 seconds, for a minute"
        for _ in range(40):
            a = s.End()
            transport = await s.wait(s.alice.dial(TWIN.public_key))
            transport.attach(a)
            s.reactor.advance(0.5)
            transport.abortConnection()
        assert all(listener.built for listener in listeners), "a dial reaches whichever is connected"


@sync
async def test_a_sealed_transport_does_not_go_on_with_a_twin(scene: Any) -> None:
    """The other program has the key and not the transport. It says so, and that is final: no 30 seconds."""
    async with scene() as s:
        await s.set(config=ClientConfig())
        listener = s.Listener()
        twin = await s.client(key=TWIN, config=ClientConfig())
        twin.listen(listener)
        a = s.End()
        (await s.wait(s.alice.dial(TWIN.public_key))).attach(a)
        began = s.reactor.seconds()
        other = await s.client(key=TWIN, config=ClientConfig())
        other.listen(s.Listener())
        await s.over(a)
        assert isinstance(a.cause, Refused)
        assert s.reactor.seconds() - began < 5.0


@pytest.mark.parametrize("what", ["data in the clear", "an ACK", "nothing"])
@sync
async def test_a_plain_request_to_a_listener_that_wants_a_handshake(scene: Any, what: str) -> None:
    """ACCEPT, because the handshake may come in the first FWD; then CLOSE. The application is not told of it."""
    async with scene() as s:
        await s.set(security=Security.E2E)
        peer = await s.raw()
        answer = await s.wait(peer.request(s.bob.public_key, 2))
        assert answer.kind == ACCEPT
        began = s.reactor.seconds()
        closing = Deferred.fromCoroutine(peer.next_frame(CLOSE))
        if what != "nothing":
            peer.send_frame(FWD if what == "data in the clear" else ACK, 2, b"\0\0" + b"hello" * (what != "an ACK"))
        close = await s.wait(closing)
        expected = CloseReason.HANDSHAKE_TIMEOUT if what == "nothing" else CloseReason.DOWNGRADE
        assert close.payload == bytes((expected,))
        waited_s = CONFIRM_TIMEOUT_S if what == "nothing" else 0.0
        assert s.reactor.seconds() - began == pytest.approx(waited_s, abs=0.1)
        assert not s.listener.built
