"""Clients that must not be fooled, in a network in memory whose relays do what a test says."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory
from zope.interface import implementer

from dmsg.clients.access import AllowKeys
from dmsg.crypto.keys import PublicKey
from dmsg.eventlog import schema as ev
from dmsg.interfaces import IEventLog
from dmsg.mux.client.service import ClientConfig, DmsgClient
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.ops.metrics import MetricsEventLog
from dmsg.relays.pool import PoolConfig
from dmsg.testing.conformance import ConformanceProtocol, pattern
from dmsg.testing.hostile import HostileNetwork, HostileRelay
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.raw import RawConnection, connect_raw

CONFIG = ClientConfig(pool=PoolConfig(backoff_first_s=0.1, backoff_limit_s=0.5, poll_s=0.5))
#: No resumption: the end of a path ends the transport.
MORTAL = ClientConfig(pool=CONFIG.pool, resume_grace_s=0)


@implementer(IEventLog)
class Log:
    """An event log in a list."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class End(ConformanceProtocol):
    """One end of a transport: what it was given, what it wrote, how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""

    def send(self, size: int) -> None:
        """Write ``size`` bytes more of a stream in which everything that is missing or moved shows."""
        data = pattern(size, len(self.sent))
        self.sent += data
        self.transport.write(data)

    @property
    def reason(self) -> Any:
        (failure,) = self.lost
        return failure.value

    @property
    def cause(self) -> Any:
        """Why it ended otherwise than cleanly."""
        assert not isinstance(self.reason, ConnectionDone), "reported as complete"
        return self.reason.cause


class Listener(Factory):
    """Builds :class:`End` objects and remembers them."""

    noisy = False

    def __init__(self, make: Any = End) -> None:
        self.built: list[Any] = []
        self._make = make
        self._waiters: list[Deferred[Any]] = []

    def buildProtocol(self, addr: Any) -> Any:
        end = self._make()
        self.built.append(end)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.callback(end)
        return end

    async def next(self) -> Any:
        waiter: Deferred[Any] = Deferred()
        self._waiters.append(waiter)
        return await waiter


class Scene(HostileNetwork):
    """Alice dials Bob through a relay; ``a`` and ``b`` are the ends of their transport."""

    relay: HostileRelay
    alice: DmsgClient
    bob: DmsgClient

    End, Listener, Log, CONFIG, MORTAL = End, Listener, Log, CONFIG, MORTAL

    def __init__(self) -> None:
        self.log = Log()
        self.registry = CollectorRegistry()
        super().__init__(MemoryNetwork(), relays=0, events=MetricsEventLog(self.log, self.registry))
        self.alice_log, self.bob_log = Log(), Log()
        self.listener = Listener()

    async def set(
        self,
        *,
        relays: int = 1,
        extended: bool = True,
        config: ClientConfig = CONFIG,
        listed: PublicKey | bool = False,
        asks: Security | None = None,
        **options: Any,
    ) -> None:
        """Put relays and both clients in place; Bob listens, to Alice alone if she is ``listed``, or to a key that is.

        ``asks`` is the security his listener is given.
        """
        for _ in range(relays):
            self.relay = await self.add_relay(extended=extended)
        options = {"min_servers": relays, "config": config, **options}
        self.bob = await self.client(events=self.bob_log, **options)
        self.alice = await self.client(events=self.alice_log, **options)
        key = self.alice.public_key if listed is True else listed
        self.bob.listen(self.listener, policy=AllowKeys([key]) if key else None, security=asks)

    async def open(self, **options: Any) -> tuple[End, End]:
        """A transport from Alice to Bob."""
        a = End()
        coming = Deferred.fromCoroutine(self.listener.next())
        transport = await self.wait(self.alice.dial(self.bob.public_key, **options))
        transport.attach(a)
        return a, await self.wait(coming)

    async def raw(self, key: Any = None, relay: HostileRelay | None = None) -> RawConnection:
        """A client that speaks only the base protocol, its OK taken."""
        pinned = next(one for one in self.pinned if one.public_key == (relay or self.relay).key.public_key)
        endpoint = TCP4ClientEndpoint(self.reactor, pinned.address.host, pinned.address.port)
        raw = await self.wait(connect_raw(endpoint, pinned.public_key, key))
        await self.wait(raw.next_frame())
        return raw

    async def over(self, *ends: End) -> None:
        """Wait until all of these ends were told that it is over."""
        for end in ends:
            await self.wait(end.when_lost())

    def closed(self, log: Log) -> list[tuple[str, str]]:
        """Reason and author of the transports that ended, as an event log has them."""
        return [(event.reason, event.by) for event in log.of(ev.TransportClosed)]


@pytest.fixture
def scene() -> Any:
    """``async with scene() as s``: see :class:`Scene`."""
    return Scene
