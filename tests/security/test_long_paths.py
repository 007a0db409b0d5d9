"""A sealed transport that lives for days on one path, seen from outside (:ref:`spec-rekeying`)."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from twisted.internet.error import ConnectionDone

from dmsg.eventlog import schema as ev
from dmsg.mux.core.errors import IntegrityError
from dmsg.mux.core.wire import ACK
from dmsg.testing.hostile import RelayFrame, drop, repeat

sync = pytest_twisted.ensureDeferred
MARKER_BYTES = 16
HOUR_S = 3600.0


def markers(s: Any, to: Any) -> int:
    return sum(len(frame.payload) == MARKER_BYTES for frame in s.relay.frames(ACK, to.public_key))


async def an_hour(s: Any, a: Any, b: Any) -> None:
    """Data both ways, then an hour."""
    a.send(10_000)
    b.send(10_000)
    await s.wait(a.when_received(len(b.sent)))
    await s.wait(b.when_received(len(a.sent)))
    for _ in range(60):
        s.reactor.advance(HOUR_S / 60)


@sync
async def test_two_days_on_one_path(scene: Any) -> None:
    async with scene() as s:
        await s.set()
        a, b = await s.open()
        for hour in range(1, 49):
            await an_hour(s, a, b)
            assert abs(markers(s, s.alice) - hour) <= 1 and abs(markers(s, s.bob) - hour) <= 1
        assert bytes(a.received) == b.sent and bytes(b.received) == a.sent
        assert not s.alice_log.of(ev.TransportResumed), "it is one path"
        a.transport.loseConnection()
        await s.over(a, b)
        assert isinstance(a.reason, ConnectionDone) and isinstance(b.reason, ConnectionDone)


@pytest.mark.parametrize("act", [drop, repeat], ids=["dropped", "repeated"])
@sync
async def test_a_relay_that_touches_a_marker(scene: Any, act: Any) -> None:
    """It ends the transport, as with any other frame; nothing unverified is delivered."""

    def touch(frame: RelayFrame) -> list[RelayFrame]:
        return list(act(frame)) if len(frame.payload) == MARKER_BYTES else [frame]

    async with scene() as s:
        await s.set()
        a, b = await s.open()
        await an_hour(s, a, b)
        a.send(100)
        await s.wait(b.when_received(len(a.sent)))
        s.relay.rule(touch, kind=ACK, to=s.bob.public_key, times=None)
        for _ in range(60):
            s.reactor.advance(HOUR_S / 60)
        a.send(100)
        await s.over(a, b)
        assert isinstance(a.cause, IntegrityError) and isinstance(b.cause, IntegrityError)
        assert a.sent.startswith(bytes(b.received))
