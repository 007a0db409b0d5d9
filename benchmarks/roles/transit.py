"""One of two ends that meet at Magic Wormhole's transit relay. It runs in an environment that has ``wormhole``."""

from __future__ import annotations

import importlib
import time
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IConsumer, IPushProducer
from zope.interface import implementer

from benchmarks.report import percentile

USES_TWISTED = True
#: It runs on the reactor that wormhole itself would run on.
IS_OF_OTHERS = True
#: The first byte of a record: data, a ping, its echo, the end of data, and the count of bytes after that.
_DATA, _PING, _PONG, _END, _COUNT = (bytes([number]) for number in range(5))


@implementer(IConsumer)
class Records:
    """Handles records: counts, answers, and fires ``answered`` with answers."""

    def __init__(self, connection: Any) -> None:
        self.answered: Deferred[bytes] = Deferred()
        self._connection = connection
        self._received = 0

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Never pauses a producer."""

    def unregisterProducer(self) -> None:
        """That was all."""

    def write(self, data: bytes) -> None:
        """Take a record."""
        kind = data[:1]
        if kind == _DATA:
            self._received += len(data)
        elif kind == _PING:
            self._connection.send_record(_PONG + data[1:])
        elif kind == _END:
            received, self._received = self._received, 0
            self._connection.send_record(_COUNT + received.to_bytes(8, "big"))
        else:
            answered, self.answered = self.answered, Deferred()
            answered.callback(data[1:])


@implementer(IPushProducer)
class Pusher:
    """Sends ``count`` records whenever it may, then the end."""

    def __init__(self, connection: Any, size: int, count: int) -> None:
        self._connection = connection
        self._record = _DATA + bytes(size - 1)
        self._left = count
        self._paused = False

    def resumeProducing(self) -> None:
        """Send until told to pause."""
        self._paused = False
        while self._left and not self._paused:
            self._left -= 1
            self._connection.send_record(self._record)
            if not self._left:
                self._connection.unregisterProducer()
                self._connection.send_record(_END)

    def pauseProducing(self) -> None:
        """Stop sending."""
        self._paused = True

    def stopProducing(self) -> None:
        """Stop for good."""
        self._left = 0


class Role:
    """Options: ``port`` of the relay, ``key`` (hexadecimal), ``sends`` (which of the two ends this is)."""

    def __init__(self, reactor: Any, options: dict[str, Any]) -> None:
        transit = importlib.import_module("wormhole.transit")
        kind = transit.TransitSender if options["sends"] else transit.TransitReceiver
        self._end = kind(f"tcp:127.0.0.1:{options['port']}", no_listen=True, reactor=reactor)
        self._end.set_transit_key(bytes.fromhex(options["key"]))

    async def start(self) -> dict[str, Any]:
        """Does not connect yet, because the other end must be ready first."""
        return {}

    async def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``connect``, ``push`` (size, total), ``pings`` (size, rounds, seconds)."""
        if command == "connect":
            await self._end.get_connection_hints()  # it does not connect without
            self._connection = await self._end.connect()
            self._records = Records(self._connection)
            self._connection.connectConsumer(self._records)
            return {}
        if command == "push":
            return await self._push(**arguments)
        if command == "pings":
            return await self._pings(**arguments)
        raise ValueError(command)

    async def _push(self, size: int, total: int) -> dict[str, Any]:
        answered = self._records.answered
        began = time.perf_counter()
        pusher = Pusher(self._connection, size, total // size)
        self._connection.registerProducer(pusher, True)
        pusher.resumeProducing()
        count = await answered
        return {"elapsed_s": time.perf_counter() - began, "received_bytes": int.from_bytes(count, "big")}

    async def _pings(self, size: int, rounds: int, seconds: float) -> dict[str, Any]:
        message = _PING + bytes(size - 1)
        times_ms: list[float] = []
        until = time.perf_counter() + seconds
        while len(times_ms) < rounds and time.perf_counter() < until:
            answered, began = self._records.answered, time.perf_counter()
            self._connection.send_record(message)
            await answered
            times_ms.append((time.perf_counter() - began) * 1000)
        return {"p50_ms": percentile(times_ms, 0.5), "p99_ms": percentile(times_ms, 0.99)}
