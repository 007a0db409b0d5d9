"""A client that stops while its network takes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest_twisted

from dmsg.testing.probes import ConformanceProtocol
from tests.worlds import AliceAndBob


@pytest_twisted.async_yield_fixture
async def stalled() -> AsyncIterator[Any]:
    """Alice, who has stopped while her connection took nothing of what she wrote: ``(network, connection)``."""
    async with AliceAndBob() as network:
        transport = await network.connect(ConformanceProtocol(), ConformanceProtocol())
        connection = network.reactor.pipes[-1]
        connection.freeze()
        transport.write(bytes(400_000))
        await network.settle()
        await network.wait(network.alice.stopService())
        yield network, connection


@pytest_twisted.ensureDeferred
async def test_it_dials_when_it_is_started_again(stalled: Any) -> None:
    network, _ = stalled
    alice = network.alice
    began = network.reactor.seconds()
    alice.startService()
    await network.wait(alice.when_ready())
    transport = await network.wait(alice.dial(network.bob.public_key))
    assert network.reactor.seconds() - began < 1.0
    transport.abortConnection()


@pytest_twisted.ensureDeferred
async def test_nothing_is_left_of_it_soon(stalled: Any) -> None:
    network, connection = stalled
    network.reactor.advance(11.0)
    assert connection.a.disconnected
    assert not network.alice.transports
