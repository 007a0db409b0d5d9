"""``dmsg echo`` and ``dmsg ping``: a peer that answers, and how long that takes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import click
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.cli.channel import Channel
from dmsg.cli.client import open_client
from dmsg.cli.exits import CommandError, Exit
from dmsg.cli.output import tell_opened
from dmsg.cli.settings import PUBLIC_KEY, Invocation, ValueType, common_options, service_option
from dmsg.crypto.keys import PublicKey
from dmsg.ops.values import DURATION, SIZE

#: The longest ping: as much as two ends hold without waiting.
PING_LIMIT_BYTES: Final = 1024 * 1024
#: How long an answer may take, in seconds.
ANSWER_TIMEOUT_S: Final = 10.0
_CLOSE_TIMEOUT_S: Final = 2.0


@implementer(IHalfCloseableProtocol)
class Echo(Protocol):
    """Sends back what comes, at the pace at which it is taken. ``made`` is called with its transport."""

    transport: Any

    def __init__(self, made: Callable[[Any], object] | None = None) -> None:
        self._made = made

    def connectionMade(self) -> None:
        if self._made is not None:
            self._made(self.transport)
        # A transport is a producer and a consumer: it slows itself down.
        self.transport.registerProducer(self.transport, True)

    def dataReceived(self, data: bytes) -> None:
        self.transport.write(data)

    def readConnectionLost(self) -> None:
        """All data has come. With a producer still registered, the close would count as an abort."""
        self.transport.unregisterProducer()
        self.transport.loseConnection()

    def writeConnectionLost(self) -> None:
        """See ``IHalfCloseableProtocol``."""

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """See ``IProtocol``."""


@click.command()
@common_options
@service_option
def echo(call: Invocation, service: str) -> None:
    """Accept transports and send back what comes, until interrupted."""
    call.execute(lambda reactor: run_echo(call, reactor, service=service))


@click.command()
@click.argument("peer", metavar="PK", type=PUBLIC_KEY)
@click.option("--count", type=click.IntRange(1, 1_000_000), default=5, show_default=True, help="How many.")
@click.option("--size", type=ValueType(SIZE, 1, PING_LIMIT_BYTES), default=64, show_default=True, help="Bytes in each.")
@click.option(
    "--interval", type=ValueType(DURATION, 0, 3600), default=0.2, show_default=True, help="Seconds in between."
)
@common_options
@service_option
def ping(call: Invocation, peer: PublicKey, count: int, size: int, interval: float, service: str) -> None:
    """Measure round trips to PK, which runs "dmsg echo"."""
    call.execute(
        lambda reactor: run_ping(call, reactor, peer, count=count, size=size, interval_s=interval, service=service)
    )


async def run_echo(call: Invocation, reactor: Any, *, service: str = "") -> None:
    """``dmsg echo``."""
    factory: Any = Factory.forProtocol(lambda: Echo(lambda transport: tell_opened(call.out, transport)))
    factory.noisy = False
    async with open_client(call.settings, reactor, listening=True, out=call.out) as client:
        client.listen(factory, service)
        key = str(client.public_key)
        call.out.result({"event": "ready", "public_key": key}, key)
        call.out.note("ready: echoing until interrupted")
        await Deferred()


async def run_ping(
    call: Invocation, reactor: Any, peer: PublicKey, *, count: int, size: int, interval_s: float, service: str = ""
) -> None:
    """``dmsg ping``. Raises ``DialError``, and ``CommandError`` for an echo that is late or wrong."""
    round_trips: list[float] = []
    async with open_client(call.settings, reactor, listening=False, out=call.out) as client:
        began = reactor.seconds()
        transport = await client.dial(peer, service)
        dial_ms = (reactor.seconds() - began) * 1000
        server = str(transport.getPeer().server_public_key)
        channel = Channel(reactor)
        transport.attach(channel)
        call.out.note(f"{peer} through {server[:16]}… ({transport.security}), dialled in {dial_ms:.1f} ms")
        try:
            for number in range(count):
                if number and interval_s:
                    await deferLater(reactor, interval_s)
                round_trips.append(await _round_trip(channel, reactor, os.urandom(size)))
                call.out.note(f"{size} bytes: {number + 1} of {count}, {round_trips[-1]:.3f} ms")
        finally:
            await channel.close(_CLOSE_TIMEOUT_S)
    summary = summarize(round_trips)
    call.out.result(
        {
            "peer": str(peer),
            "server": server,
            "security": transport.security,
            "dial_ms": round(dial_ms, 3),
            "count": count,
            "size_bytes": size,
            "rtt_ms": summary,
        },
        "rtt " + "  ".join(f"{name} {value:.3f}" for name, value in summary.items()) + " ms",
    )


async def _round_trip(channel: Channel, reactor: Any, payload: bytes) -> float:
    """Milliseconds until ``payload`` is back; anything else coming back is an error."""
    began = reactor.seconds()
    await channel.write(payload, ANSWER_TIMEOUT_S)
    received = b""
    while len(received) < len(payload):
        received += await channel.read(ANSWER_TIMEOUT_S)
    elapsed_ms = (reactor.seconds() - began) * 1000
    if received != payload:
        raise CommandError("what came back is not what was sent: PK does not echo", Exit.UNVERIFIED)
    return float(elapsed_ms)


def summarize(samples_ms: Sequence[float]) -> dict[str, float]:
    """Smallest, percentiles (nearest rank) and largest of ``samples_ms``, in milliseconds."""
    ordered = sorted(samples_ms)

    def rank(percent: float) -> float:
        return round(ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)], 3)

    return {
        "min": round(ordered[0], 3),
        "p50": rank(50),
        "p90": rank(90),
        "p99": rank(99),
        "max": round(ordered[-1], 3),
    }
