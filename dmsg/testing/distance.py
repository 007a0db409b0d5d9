"""A transfer between two distant clients in virtual time: how long it would take if programs needed no time.

::

    figures = simulate(delay_s=0.025, bits_per_s=100e6, total_bytes=20_000_000, pings=1)
    print(figures.bytes_per_s, figures.ping_s(0.5), figures.relay_queue_peak_bytes)

The clients, the relay and every byte between them are real; links, time and randomness are not, so that the same
arguments give the same figures on any machine, however busy.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from twisted.internet.defer import Deferred, ensureDeferred, gatherResults
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import Clock
from twisted.protocols.wire import Echo
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.mux.client.service import ClientConfig
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.relay.limits import RelayLimits
from dmsg.testing.link import BUFFER_BYTES, FASTEST_BITS_PER_S, Link
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork

_WRITE_BYTES: Final = 16 * 1024
_PING_BYTES: Final = 64


@dataclass
class Figures:
    """How a simulation went; all times are virtual.

    ``elapsed_s`` is from the first write to the last acknowledgement, ``dial_s`` the time to open a transport before.
    ``round_trips_s`` are the round trips of the pings, in order. ``relay_queue_peak_bytes`` is the most that waited in the
    relay's queues. ``near`` and ``far`` are the links of the sending and of the receiving client, with their own figures:
    data goes over ``near.out`` and ``far.back``.
    """

    near: Link
    far: Link
    dial_s: float = 0.0
    elapsed_s: float = 0.0
    acked_bytes: int = 0
    relay_queue_peak_bytes: int = 0
    round_trips_s: list[float] = field(default_factory=list)

    @property
    def bytes_per_s(self) -> float:
        """The rate of the application's data, up to the last acknowledgement."""
        return self.acked_bytes / self.elapsed_s if self.elapsed_s else 0.0

    def ping_s(self, share: float) -> float:
        """The round trip that a ``share`` (0 to 1) of all pings did not exceed."""
        times_s = sorted(self.round_trips_s)
        return times_s[min(len(times_s) - 1, int(share * len(times_s)))]


@implementer(IPushProducer)
class _Pusher(Protocol):
    """Writes ``left`` bytes while it is not paused, then closes. ``done`` fires with how many were acknowledged."""

    transport: Any

    def __init__(self, left: int) -> None:
        self.done: Deferred[int] = Deferred()
        self._left = left
        self._paused = False

    def connectionMade(self) -> None:
        self.transport.registerProducer(self, True)
        self.resumeProducing()

    def resumeProducing(self) -> None:
        self._paused = False
        while self._left and not self._paused:
            size = min(_WRITE_BYTES, self._left)
            self._left -= size
            self.transport.write(bytes(size))
        if not self._left:
            self.transport.unregisterProducer()
            self.transport.loseConnection()

    def pauseProducing(self) -> None:
        self._paused = True

    def stopProducing(self) -> None:
        self._paused = True

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.done.callback(self.transport.stream.acked_bytes)


class _Pinger(Protocol):
    """Sends messages and waits for each echo, at least ``least`` times and until ``pushers`` are done; then fires ``done``."""

    transport: Any

    def __init__(self, seconds: Callable[[], float], figures: Figures, least: int, pushers: list[_Pusher]) -> None:
        self.done: Deferred[None] = Deferred()
        self._seconds = seconds
        self._times_s = figures.round_trips_s
        self._least = least
        self._pushers = pushers
        self._missing = 0
        self._sent_at = 0.0

    def connectionMade(self) -> None:
        self._ping()

    def _ping(self) -> None:
        self._missing = _PING_BYTES
        self._sent_at = self._seconds()
        self.transport.write(bytes(_PING_BYTES))

    def dataReceived(self, data: bytes) -> None:
        self._missing -= len(data)
        if self._missing:
            return
        self._times_s.append(self._seconds() - self._sent_at)
        if len(self._times_s) < self._least or not all(pusher.done.called for pusher in self._pushers):
            self._ping()
        else:
            self.transport.loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.done.callback(None)


def simulate(
    *,
    delay_s: float = 0.025,
    bits_per_s: float = FASTEST_BITS_PER_S,
    buffer_bytes: int = BUFFER_BYTES,
    far: dict[str, Any] | None = None,
    total_bytes: int = 0,
    transports: int = 1,
    pings: int = 0,
    security: Security = Security.E2E,
    cuts_s: tuple[float, ...] = (),
    config: ClientConfig | None = None,
    limits: RelayLimits | None = None,
    reader: Callable[[], Protocol] | None = None,
    seed: int = 1,
) -> Figures:
    """Send ``total_bytes`` from client to client through a relay, with pings of 64 bytes beside it; returns the figures.

    Each client reaches the relay over a :class:`~dmsg.testing.link.Link` of its own with ``delay_s``, ``bits_per_s`` and
    ``buffer_bytes``, so a round trip from client to client takes ``4 * delay_s``; ``far`` replaces some of these for the
    receiving client (``{"bits_per_s": 1e6}``). The data is divided over ``transports``, each read by a ``reader()`` (by
    default, one that reads everything). Pings follow each other on a transport of their own, at least ``pings`` of them and
    until the transfer has ended; 0 means no pings. The sender's link is cut at ``cuts_s``, in seconds after the transfer
    began. ``config`` is for both clients, ``limits`` for the relay, and ``seed`` for all random numbers.

    Raises ``AssertionError`` when it takes longer than :data:`~dmsg.testing.network.WAIT_LIMIT_S` of virtual time.
    """
    clock = _WatchedClock()
    memory = MemoryNetwork(clock, random=Random(seed))
    network = LocalNetwork(memory, relays=1, discovery=None, limits=limits, random=Random(seed).randbytes)
    shape: dict[str, Any] = {"delay_s": delay_s, "bits_per_s": bits_per_s, "buffer_bytes": buffer_bytes}
    figures = Figures(Link(clock, **shape), Link(clock, **{**shape, **(far or {})}))

    def note_queues() -> None:
        queued = sum(relay.switch.queued_bytes for relay in network.relays)
        figures.relay_queue_peak_bytes = max(figures.relay_queue_peak_bytes, queued)

    clock.watch = note_queues

    async def run() -> None:
        async with network:
            options: dict[str, Any] = {"security": security, "config": config}
            sink = await network.client(link=figures.far, **options)
            source = await network.client(link=figures.near, **options)
            pushers = [_Pusher((total_bytes + at) // transports) for at in range(transports if total_bytes else 0)]
            pinger = _Pinger(clock.seconds, figures, pings, pushers)
            ends: list[Protocol] = [pinger, *pushers] if pings else [*pushers]
            answers = iter([Echo() if end is pinger else (reader or _Sink)() for end in ends])
            sink.listen(Factory.forProtocol(lambda: next(answers)))
            opened = []
            for end in ends:
                began = clock.seconds()
                opened.append((await network.wait(source.dial(sink.public_key)), end))
                figures.dial_s = clock.seconds() - began
            began = clock.seconds()
            figures.near.cut_at(*[began + at_s for at_s in cuts_s])
            for transport, end in opened:
                transport.attach(end)
            results = await network.wait(gatherResults([pusher.done for pusher in pushers], consumeErrors=True))
            figures.acked_bytes = sum(results)
            figures.elapsed_s = clock.seconds() - began if pushers else 0.0
            if pings:
                await network.wait(pinger.done)

    [outcome] = _outcomes(run())
    if isinstance(outcome, Failure):
        outcome.raiseException()
    return figures


def _outcomes(coroutine: Coroutine[Any, Any, None]) -> list[object]:
    """The outcome of ``coroutine``, which waits only for the clock that it moves itself."""
    outcomes: list[object] = []
    ensureDeferred(coroutine).addBoth(outcomes.append)
    return outcomes


class _WatchedClock(Clock):
    """Calls ``watch`` after all calls that are due at one time."""

    watch: Callable[[], None] | None = None

    def advance(self, amount: float) -> None:
        super().advance(amount)
        if self.watch is not None:
            self.watch()


class _Sink(Protocol):
    """Reads all data and drops it."""

    def dataReceived(self, data: bytes) -> None:
        """The data is dropped."""
