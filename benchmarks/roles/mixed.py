"""A client under mixed load: long streams with numbered blocks, an endless ping-pong, short transports and look-ups.

Every received byte is checked. With ``extended`` false it is a client of the base protocol of 2019, which names no
services and cannot resume: it has only short transports.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any, Final

from twisted.internet.defer import ensureDeferred
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import LoopingCall, deferLater
from twisted.python.failure import Failure

from benchmarks.roles import streams
from benchmarks.roles.client import Echo
from benchmarks.roles.discovery import connect_discovery
from benchmarks.roles.exchanges import Exchange, Exchanges
from dmsg.address import PublicKey
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.errors import DiscoveryError, EntryNotFound
from dmsg.errors import DialError
from dmsg.mux.client.service import ClientConfig, DmsgClient
from dmsg.mux.core.e2e_negotiation import Security

USES_TWISTED = True
#: One stream in ten carries bulk data; block sizes of the others come from the options.
_BULK_EVERY: Final = 10
_BULK_SIZES: Final = (1, 65_536)
_PING_PAUSE_S: Final = 0.05
_PING_BYTES: Final = 64
_DIAL_TIMEOUT_S: Final = 20.0


class PingPong(Protocol):
    """Sends random bytes, waits for their echo, pauses, and again, until it is told to stop."""

    def __init__(self, reactor: Any) -> None:
        self.rounds = 0
        self.fault = ""
        self._reactor = reactor
        self._missing = b""
        self._stopping = False

    def connectionMade(self) -> None:
        """Begin."""
        self._ping()

    def _ping(self) -> None:
        if self._stopping:
            self.transport.loseConnection()  # type: ignore[union-attr]
        elif not self.fault:
            self._missing = os.urandom(_PING_BYTES)
            self.transport.write(self._missing)  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        """Compare."""
        if not self._missing.startswith(data):
            self.fault = f"altered in round {self.rounds}"
            return
        self._missing = self._missing[len(data) :]
        if not self._missing:
            self.rounds += 1
            self._reactor.callLater(_PING_PAUSE_S, self._ping)

    def stop(self) -> None:
        """End after this round."""
        self._stopping = True

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """It may end only when it was told to."""
        if not self._stopping and not self.fault:
            self.fault = f"ended in round {self.rounds}: {type(reason.value).__name__}"


class Role(streams.Role):
    """Options: those of :class:`benchmarks.roles.streams.Role`, ``extended`` and ``security``."""

    def __init__(self, reactor: Any, options: dict[str, Any]) -> None:
        self.lookups: Counter[str] = Counter()
        self._discovery = connect_discovery(options["discovery"], reactor)
        self._exchanges: Exchanges | None = None
        self._looking: LoopingCall | None = None
        self._ping_pong: PingPong | None = None
        self._known: list[PublicKey] = []
        super().__init__(reactor, options)

    def sizes_of(self, stream: int) -> tuple[int, int]:
        """Small blocks, or large ones."""
        return self.block_sizes if stream % _BULK_EVERY else _BULK_SIZES

    def make_client(self, options: dict[str, Any]) -> DmsgClient:
        """A client of ours, or one of the base protocol."""
        return DmsgClient(
            self.reactor,
            SecretKey.generate(),
            discovery=self._discovery,
            min_servers=options["min_servers"],
            security=Security(options["security"]),
            config=ClientConfig(extended=options["extended"]),
            events=streams.ResumedOnly(self.resumed_ms),
        )

    async def start(self) -> dict[str, Any]:
        """Connect, listen for streams, and echo on the service without a name."""
        factory = Factory.forProtocol(Echo)
        factory.noisy = False
        self.client.listen(factory)
        facts = await super().start()
        return facts

    async def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``begin`` (target, short_per_s, lookups_per_s, ping): the load; ``pace`` (per_s): another rate of short
        transports; ``cut``: abort one connection to a relay; ``calm``: end all load except the streams, and give its
        results; else as a streams role.
        """
        if command == "begin":
            return await self._begin(PublicKey.parse(arguments.pop("target")), **arguments)
        if command == "pace":
            if self._exchanges is not None:
                self._exchanges.per_s = arguments["per_s"]
            return {}
        if command == "cut":
            sessions = list(self.client.pool.sessions.values())
            if sessions:
                random.choice(sessions).shell.transport.abortConnection()  # type: ignore[union-attr]
            return {}
        if command == "calm":
            return self._calm()
        return await super().do(command, arguments)

    async def _begin(self, target: PublicKey, short_per_s: float, lookups_per_s: float, ping: bool) -> dict[str, Any]:
        self._known = [target, self.client.public_key]

        async def connect(exchange: Exchange) -> None:
            transport = await self.client.dial(target, timeout_s=_DIAL_TIMEOUT_S)
            transport.attach(exchange)

        self._exchanges = Exchanges(self.reactor, short_per_s, connect)
        self._exchanges.start()
        if lookups_per_s:
            self._looking = LoopingCall(lambda: ensureDeferred(self._look_up()) and None)
            self._looking.clock = self.reactor
            self._looking.start(1 / lookups_per_s)
        if ping:
            self._ping_pong = PingPong(self.reactor)
            while True:
                try:
                    transport = await self.client.dial(target, timeout_s=_DIAL_TIMEOUT_S)
                    break
                except DialError:
                    await deferLater(self.reactor, 0.1)
            transport.attach(self._ping_pong)
        return {}

    async def _look_up(self) -> None:
        """Look up a key that exists, or one that does not."""
        known = bool(random.getrandbits(1))
        key = random.choice(self._known) if known else SecretKey.generate().public_key
        try:
            await self._discovery.get_entry(key)
            self.lookups["found"] += 1
        except EntryNotFound:
            self.lookups["missing" if known else "not there"] += 1
        except DiscoveryError as error:
            self.lookups[type(error).__name__] += 1

    def _calm(self) -> dict[str, Any]:
        if self._looking is not None and self._looking.running:
            self._looking.stop()
        if self._ping_pong is not None:
            self._ping_pong.stop()
        if self._exchanges is not None:
            self._exchanges.stop()
        return {
            "results": self._exchanges.results if self._exchanges else {},
            "reasons": self._exchanges.reasons if self._exchanges else {},
            "lookups": self.lookups,
            "ping_rounds": self._ping_pong.rounds if self._ping_pong else 0,
            "ping_fault": self._ping_pong.fault if self._ping_pong else "",
        }
