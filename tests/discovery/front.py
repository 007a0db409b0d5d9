"""A discovery's HTTP site on a clock that stands still, and connections to it in memory from any address."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from twisted.internet import defer
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.protocol import connectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.web.http import HTTPChannel

from dmsg.discovery.api import DiscoveryApi, DiscoveryLimits, make_site
from dmsg.discovery.stores.memory import MemoryStore

from .conftest import NOW_NS

GET = b"GET /discovery/available_servers HTTP/1.1\r\nHost: h\r\n\r\n"


class CountingStore(MemoryStore):
    """Counts its reads; ``gate`` holds their answers back."""

    reads = 0
    gate: defer.Deferred[None] | None = None

    def get_json(self, public_key: Any, now_ns: int) -> Any:
        self.reads += 1
        read = super().get_json(public_key, now_ns)
        return read if self.gate is None else self.gate.addCallback(lambda _: read)


class Wire(StringTransport):
    """A connection in memory that knows whether it was aborted."""

    channel: HTTPChannel
    aborting = False

    def abortConnection(self) -> None:
        self.aborting = True
        super().abortConnection()

    def pauseProducing(self) -> None:
        """Stop reading; nothing when it is closing, as with a connection of Twisted's."""
        if not self.disconnecting:
            super().pauseProducing()

    def resumeProducing(self) -> None:
        """Read again; nothing when it is closing."""
        if not self.disconnecting:
            super().resumeProducing()

    def hang_up(self) -> None:
        """Let the client go."""
        self.channel.connectionLost(connectionDone)


class Front:
    """A discovery's site with shipped limits, but for ``limits``; ``resource`` answers in place of its API."""

    def __init__(self, clock: Clock, *, resource: Any = None, store: Any = None, **limits: Any) -> None:
        chosen = DiscoveryLimits(**limits)
        self.store = store if store is not None else CountingStore(random=random.Random(1))
        if resource is None:
            now_ns = lambda: NOW_NS + round(clock.seconds() * 1e9)  # noqa: E731
            api = DiscoveryApi(self.store, clock_ns=now_ns, random=random.Random(2), limits=chosen)
            resource = api.resource()
        self.site: Any = make_site(resource, reactor=clock, limits=chosen)

    def connect(self, host: str, sent: bytes = b"", wire: type[Wire] = Wire) -> Wire | None:
        """A connection from ``host``, a ``wire``, on which ``sent`` was sent; ``None`` when it was refused."""
        address = (IPv6Address if ":" in host else IPv4Address)("TCP", host, 1000)
        channel = self.site.buildProtocol(address)
        made = wire(peerAddress=address)
        made.channel = channel
        channel.makeConnection(made)
        if made.aborting:
            return None
        if sent:
            channel.dataReceived(sent)
        return made

    def answers(self, host: str) -> bool:
        """Whether a client at ``host`` that connects and asks now is answered."""
        wire = self.connect(host, GET)
        answered = wire is not None and b"404" in wire.value()
        if wire is not None and not wire.aborting:
            wire.hang_up()
        return answered

    def begin(self, path: str, host: str = "192.0.2.1", body: bytes = b"") -> Wire:
        """Send a request on a connection of its own; what is answered is in ``value()`` of what is given."""
        method = b"POST" if body else b"GET"
        head = b"%s %s HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (method, path.encode(), len(body))
        wire = self.connect(host, head + body)
        assert wire is not None
        return wire

    def ask(self, path: str, host: str = "192.0.2.1", body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of the answer."""
        wire = self.begin(path, host, body)
        wire.hang_up()
        head, _, answer = wire.value().partition(b"\r\n\r\n")
        return int(head.split()[1]), answer

    def statuses(self, path: str, host: str, times: int) -> dict[int, int]:
        """How often each status was answered."""
        return Counter(self.ask(path, host)[0] for _ in range(times))
