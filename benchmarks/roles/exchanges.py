"""Short connections one after another at an even pace: random bytes there, the same bytes back, closed."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

from twisted.internet.defer import Deferred, TimeoutError, ensureDeferred
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.task import LoopingCall
from twisted.python.failure import Failure

#: Timeout of an answer, in seconds: longer than the absence of a killed relay.
_ANSWER_TIMEOUT_S: Final = 20.0
#: Most exchanges in progress; at this number, further ones are skipped and counted.
_LIMIT: Final = 64
_LARGEST_BYTES: Final = 8_192
_TURN_S: Final = 0.02


class Exchange(Protocol):
    """Sends a message, and says with ``done`` what came back: ``ok``, ``altered`` or ``lost``."""

    def __init__(self, message: bytes) -> None:
        self.done: Deferred[str] = Deferred()
        self._missing = message

    def connectionMade(self) -> None:
        """Ask."""
        self.transport.write(self._missing)  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        """Compare."""
        fits = self._missing.startswith(data)
        self._missing = self._missing[len(data) :]
        if not fits or not self._missing:
            self._tell("ok" if fits else "altered")
            self.transport.loseConnection()  # type: ignore[union-attr]

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The exchange has ended, perhaps too early."""
        self._tell("lost")

    def _tell(self, result: str) -> None:
        if not self.done.called:
            self.done.callback(result)


class Exchanges:
    """``per_s`` exchanges a second, each over a connection that ``connect`` opens and attaches the protocol to.

    ``results`` counts ``ok``, ``altered``, ``lost``, ``late``, ``held back`` and, for those that were not opened, ``failed``;
    ``reasons`` counts why.
    """

    def __init__(self, reactor: Any, per_s: float, connect: Callable[[Exchange], Awaitable[None]]) -> None:
        self.results: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self._reactor = reactor
        #: May be changed at any time.
        self.per_s = per_s
        self._connect = connect
        self._due = 0.0
        self._under_way = 0
        self._pace = LoopingCall.withCount(self._turn)
        self._pace.clock = reactor

    def start(self) -> None:
        """Begin."""
        self._pace.start(_TURN_S)

    def stop(self) -> None:
        """Begin no more."""
        if self._pace.running:
            self._pace.stop()

    def _turn(self, count: int) -> None:
        self._due += min(count * _TURN_S, 1.0) * self.per_s  # a stopped process does not catch up
        while self._due >= 1:
            self._due -= 1
            if self._under_way >= _LIMIT:
                self.results["held back"] += 1
            else:
                ensureDeferred(self._one())

    async def _one(self) -> None:
        self._under_way += 1
        exchange = Exchange(os.urandom(random.randint(1, _LARGEST_BYTES)))
        try:
            await self._connect(exchange)
            self.results[await exchange.done.addTimeout(_ANSWER_TIMEOUT_S, self._reactor)] += 1
        except TimeoutError:
            self.results["late"] += 1
            exchange.transport.abortConnection()  # type: ignore[union-attr]
        except Exception as error:
            self.results["failed"] += 1
            self.reasons[str(getattr(error, "reason", "")) or type(error).__name__] += 1
        finally:
            self._under_way -= 1
