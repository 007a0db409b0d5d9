"""Many channels of one link at once, over sockets: no byte is lost, doubled or moved."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.protocols.wire import Echo
from twisted.python.failure import Failure

from dmsg.messaging.client.config import MessagingConfig
from dmsg.testing.network import LocalNetwork

pytestmark = [pytest.mark.system, pytest.mark.time_limit(300)]

CHANNELS = 50
MESSAGES = 10_000
#: Messages that are written at once: all sizes, so that they fall on the borders of Sends, writes and reads.
BURSTS = (1, 2, 3, 5, 20, 100, 400, 1000)


class Counter(Protocol):
    """Writes numbered messages in bursts, a new one for each that has come back, and compares every byte that comes."""

    def __init__(self, channel: int, bursts: tuple[int, ...]) -> None:
        self.done: Deferred[int] = Deferred()
        self.came_back = 0
        self._random = Random(channel)
        self._bursts = bursts
        self._written = 0
        self._texts: Iterator[bytes] = (b"<channel %d message %d>" % (channel, number) for number in range(MESSAGES))
        self._expected = bytearray()

    def connectionMade(self) -> None:
        self._burst()

    def _burst(self) -> None:
        count = min(self._random.choice(self._bursts), MESSAGES - self._written)
        self._written += count
        data = b"".join(next(self._texts) for _ in range(count))
        self._expected += data
        self.transport.write(data)  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        if not self._expected.startswith(data):
            self.done.errback(AssertionError(f"after {self.came_back} bytes came {data[:60]!r}"))
            self.transport.abortConnection()  # type: ignore[union-attr]
            return
        self.came_back += len(data)
        del self._expected[: len(data)]
        if self._expected:
            return
        if self._written < MESSAGES:
            self._burst()
        else:
            self.transport.loseConnection()  # type: ignore[union-attr]

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if not self.done.called:
            self.done.callback(self.came_back)


@pytest.mark.parametrize(
    ("dialect", "bursts"),
    [
        pytest.param("v0", BURSTS, id="v0"),
        pytest.param("v5", BURSTS, id="v5"),
        pytest.param("v0", (1,), id="each message by itself", marks=pytest.mark.long),
    ],
)
@pytest_twisted.ensureDeferred
async def test_50_channels_echo_10_000_messages_each(reactor: Any, dialect: str, bursts: tuple[int, ...]) -> None:
    config = MessagingConfig(dialect_name=dialect)
    async with LocalNetwork(reactor, relays=0, messaging_relays=1) as network:
        alice, bob = [await network.messaging_client(config=config) for _ in range(2)]
        bob.listen(Factory.forProtocol(Echo))
        counters = [Counter(number, bursts) for number in range(CHANNELS)]
        transports = [await alice.dial(bob.public_key) for _ in counters]
        for counter, transport in zip(counters, transports, strict=True):
            transport.attach(counter)
        results: Any = await DeferredList([counter.done for counter in counters], fireOnOneErrback=True)
        sizes = [sum(len(f"<channel {one} message {number}>") for number in range(MESSAGES)) for one in range(CHANNELS)]
        assert [size for _, size in results] == sizes
