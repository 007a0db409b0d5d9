"""A client of ours, with the applications the benches need on top of it."""

from __future__ import annotations

import time
from typing import Any

from twisted.internet.defer import Deferred, DeferredList, ensureDeferred
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from benchmarks.processes import raise_open_files
from benchmarks.report import percentile
from dmsg.address import HostPort, PinnedServer, PublicKey
from dmsg.crypto.keys import SecretKey
from dmsg.mux.client.service import DmsgClient
from dmsg.mux.client.transport import DmsgTransport
from dmsg.mux.core.e2e_negotiation import Security

USES_TWISTED = True


class Sink(Protocol):
    """Counts received data."""

    received_bytes = 0

    def dataReceived(self, data: bytes) -> None:
        """Count."""
        Sink.received_bytes += len(data)


class Echo(Protocol):
    """Sends received data back."""

    def dataReceived(self, data: bytes) -> None:
        """Send back."""
        assert self.transport is not None
        self.transport.write(data)


@implementer(IPushProducer)
class Pusher(Protocol):
    """Writes ``total`` bytes in pieces of ``size`` when allowed, then closes; ``done`` fires once all is acknowledged."""

    def __init__(self, size: int, total: int) -> None:
        self.done: Deferred[int] = Deferred()
        self._piece = bytes(size)
        self._left = total
        self._paused = False

    def connectionMade(self) -> None:
        """Begin."""
        self.transport.registerProducer(self, True)  # type: ignore[union-attr]
        self.resumeProducing()

    def resumeProducing(self) -> None:
        """Write until told to pause."""
        self._paused = False
        transport, piece = self.transport, self._piece
        assert transport is not None
        while self._left > 0 and not self._paused:
            self._left -= len(piece)
            transport.write(piece)
        if self._left <= 0:
            transport.unregisterProducer()  # type: ignore[attr-defined]
            self.finish()

    def finish(self) -> None:
        """Everything is written."""
        self.transport.loseConnection()  # type: ignore[union-attr]

    def pauseProducing(self) -> None:
        """Stop writing."""
        self._paused = True

    def stopProducing(self) -> None:
        """Stop for good."""
        self._paused = True

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Everything is acknowledged, or the transport is lost."""
        acked: int = self.transport.stream.acked_bytes  # type: ignore[union-attr]
        self.done.callback(acked)


class Pinger(Protocol):
    """Sends a message, waits for its echo, and again; ``done`` fires with the round trips in milliseconds."""

    def __init__(self, size: int, rounds: int, seconds: float) -> None:
        self.done: Deferred[list[float]] = Deferred()
        self._message = bytes(size)
        self._rounds = rounds
        self._until = time.perf_counter() + seconds
        self._missing = 0
        self._times_ms: list[float] = []

    def connectionMade(self) -> None:
        """Begin."""
        self._ping()

    def stop(self) -> None:
        """Close after the next echo."""
        self._rounds = 0

    def _ping(self) -> None:
        self._missing = len(self._message)
        self._sent_at = time.perf_counter()
        self.transport.write(self._message)  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        """Take the echo."""
        self._missing -= len(data)
        if self._missing:
            return
        now = time.perf_counter()
        self._times_ms.append((now - self._sent_at) * 1000)
        if len(self._times_ms) < self._rounds and now < self._until:
            self._ping()
        else:
            self.transport.loseConnection()  # type: ignore[union-attr]

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Tell."""
        self.done.callback(self._times_ms)


class Role:
    """Options: ``server`` ({key, port}), ``discovery`` (a URL, used when given), ``listen`` (``sink``, ``echo``, or ``both``:
    the echo as the service ``echo``), ``security`` (``hop`` without it).
    """

    def __init__(self, reactor: Any, options: dict[str, Any]) -> None:
        raise_open_files()
        self._reactor = reactor
        self._options = options
        server = options["server"]
        pinned = PinnedServer(PublicKey.parse(server["key"]), HostPort("127.0.0.1", server["port"]))
        discovery = None
        if options.get("discovery"):
            from benchmarks.roles.discovery import connect_discovery  # HTTP takes long to import and most need none

            discovery = connect_discovery(options["discovery"], reactor)
        self.client = DmsgClient(
            reactor,
            SecretKey.generate(),
            discovery=discovery,
            servers=() if discovery else (pinned,),
            security=Security(options.get("security", "hop")),
        )

    async def start(self) -> dict[str, Any]:
        """Connect and listen."""
        listen = self._options.get("listen")
        if listen:
            self.client.listen(Factory.forProtocol(Echo if listen == "echo" else Sink))
        if listen == "both":
            self.client.listen(Factory.forProtocol(Echo), "echo")
        self.client.startService()
        await self.client.when_ready()
        return {"key": str(self.client.public_key)}

    async def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``push``, ``pings``, ``pings_beside``, ``dials``, ``received``: see the methods."""
        if command == "received":
            return {"bytes": Sink.received_bytes}
        target = PublicKey.parse(arguments.pop("target"))
        if command == "push":
            return await self._push(target, **arguments)
        if command == "pings":
            return await self._pings(target, **arguments)
        if command == "pings_beside":
            return await self._pings_beside(target, **arguments)
        if command == "dials":
            return await self._dials(target, **arguments)
        raise ValueError(command)

    async def _push(self, target: PublicKey, size: int, total: int, transports: int, limit_s: float) -> dict[str, Any]:
        """Send ``total`` bytes over ``transports`` at once; the time is up to the last acknowledgement."""
        opened = [await self.client.dial(target) for _ in range(transports)]
        pushers = [Pusher(size, total // transports) for _ in opened]
        began, cpu = time.perf_counter(), time.process_time()
        for transport, pusher in zip(opened, pushers, strict=True):
            transport.attach(pusher)
        give_up = self._reactor.callLater(limit_s, _abort_all, opened)
        results = await DeferredList([pusher.done for pusher in pushers], fireOnOneErrback=True)
        elapsed_s = time.perf_counter() - began
        if give_up.active():
            give_up.cancel()
        acked = sum(amount for _, amount in results)
        return {"acked_bytes": acked, "elapsed_s": elapsed_s, "cpu_s": time.process_time() - cpu}

    async def _pings(
        self, target: PublicKey, size: int, rounds: int, seconds: float, service: str = ""
    ) -> dict[str, Any]:
        """Round trips one after the other, until there are enough or the time is up."""
        transport = await self.client.dial(target, service)
        pinger = Pinger(size, rounds, seconds)
        transport.attach(pinger)
        times_ms = await pinger.done
        return {
            "rounds": len(times_ms),
            "p50_ms": percentile(times_ms, 0.5),
            "p90_ms": percentile(times_ms, 0.9),
            "p99_ms": percentile(times_ms, 0.99),
            "times_ms": [round(one, 4) for one in times_ms] if len(times_ms) <= 20_000 else [],
        }

    async def _pings_beside(self, target: PublicKey, size: int, total: int, limit_s: float) -> dict[str, Any]:
        """Round trips of 64 bytes to the service ``echo`` while ``total`` bytes are sent on another transport."""
        transport = await self.client.dial(target, "echo")
        pinger = Pinger(64, 1_000_000, limit_s)
        pushing = ensureDeferred(self._push(target, size, total, 1, limit_s))
        transport.attach(pinger)
        await pushing
        pinger.stop()
        times_ms = await pinger.done
        return {"rounds": len(times_ms), "p50_ms": percentile(times_ms, 0.5), "p99_ms": percentile(times_ms, 0.99)}

    async def _dials(self, target: PublicKey, count: int, parallel: int) -> dict[str, Any]:
        """Dial and close ``count`` times, ``parallel`` at a time."""
        left = count

        async def one_after_the_other() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                transport = await self.client.dial(target)
                transport.loseConnection()

        began, cpu = time.perf_counter(), time.process_time()
        workers = [ensureDeferred(one_after_the_other()) for _ in range(parallel)]
        await DeferredList(workers, fireOnOneErrback=True, consumeErrors=True)
        return {"elapsed_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def _abort_all(transports: list[DmsgTransport]) -> None:
    for transport in transports:
        transport.abortConnection()
