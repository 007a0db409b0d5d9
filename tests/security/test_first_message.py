"""What the messages of a handshake tell the relay that carries them.

:ref:`spec-padding`.
"""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted

from dmsg.mux.core.wire import ACCEPT, CLOSE, FWD, REQUEST, REQUEST_BYTES
from dmsg.testing.hostile import RelayFrame

sync = pytest_twisted.ensureDeferred
SERVICES = ("", "a", "x" * 200, "é" * 127)


@pytest.mark.parametrize("extended", [True, False], ids=["carrier A", "carrier B"])
@sync
async def test_lengths_tell_the_relay_neither_the_service_nor_a_resumption(scene: Any, extended: bool) -> None:
    async with scene() as s:
        await s.set(extended=extended)
        for service in SERVICES[1:]:
            s.bob.listen(s.listener, service)
        ends = []
        for service in SERVICES:
            a = s.End()
            transport = await s.wait(s.alice.dial(s.bob.public_key, service))
            transport.attach(a)
            ends.append(a)
        await s.settle()
        a = ends[0]
        a.send(10)
        await s.settle()
        s.relay.send(RelayFrame(s.alice.public_key, CLOSE, a.transport.stream.id, b"\0"))
        await s.settle()
        a.send(10)
        await s.settle()
        asked, answered = s.relay.frames(REQUEST, s.bob.public_key), s.relay.frames(ACCEPT, s.alice.public_key)
        assert len(asked) == len(answered) == len(SERVICES) + 1, "the last one resumes"
        assert len({len(frame.payload) for frame in asked}) == len({len(frame.payload) for frame in answered}) == 1
        if extended:
            assert len(asked[0].payload) == REQUEST_BYTES + 369
            assert len(answered[0].payload) == REQUEST_BYTES + 113
        else:
            for to, size in ((s.bob, 369), (s.alice, 113)):
                first: dict[int, int] = {}
                for frame in s.relay.frames(FWD, to.public_key):
                    first.setdefault(frame.transport_id, len(frame.payload))  # it carries the message
                assert set(first.values()) == {2 + 16 + size}
