"""HTTP without a network: connections in memory, on a clock that only the target advances."""

from __future__ import annotations

from typing import Any

from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.logger import ILogObserver, LogEvent, LogLevel, globalLogPublisher
from twisted.python.failure import Failure
from twisted.web.client import Agent
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from dmsg.http.heads import _HeadLimitedEndpoint


class Transport(StringTransport):
    """A transport in memory that can be aborted, and remembers it."""

    def __init__(self) -> None:
        super().__init__(peerAddress=IPv4Address("TCP", "192.0.2.1", 4_321))  # type: ignore[no-untyped-call]
        self.aborted = False

    def abortConnection(self) -> None:
        """Close at once."""
        self.aborted = True
        self.disconnecting = True

    def resumeProducing(self) -> None:
        """Read again. Does nothing while it is closing, like a connection of Twisted."""
        if not self.disconnecting:
            super().resumeProducing()  # type: ignore[no-untyped-call]


@implementer(IStreamClientEndpoint)
class _Memory:
    def __init__(self, agent: HostileAgent) -> None:
        self._agent = agent

    def connect(self, factory: Any) -> Deferred[Any]:
        protocol = factory.buildProtocol(None)
        transport = Transport()
        self._agent.connections.append((protocol, transport))
        protocol.makeConnection(transport)
        return succeed(protocol)


@implementer(IAgentEndpointFactory)
class HostileAgent:
    """Makes an ``Agent`` whose server is the target; ``connections`` lists its connections."""

    def __init__(self, clock: Clock) -> None:
        self.connections: list[tuple[Any, Transport]] = []
        self.agent = Agent.usingEndpointFactory(clock, self)

    def endpointForURI(self, uri: Any) -> Any:
        """For any URI."""
        return _HeadLimitedEndpoint(_Memory(self))

    def end(self) -> None:
        """Lose all connections."""
        for protocol, _ in self.connections:
            protocol.connectionLost(Failure(ConnectionDone()))


@implementer(ILogObserver)
class Complaints:
    """The errors that Twisted logs while this context is entered."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __call__(self, event: LogEvent) -> None:
        """An event of Twisted's log."""
        if event.get("log_level") in (LogLevel.error, LogLevel.critical) or "log_failure" in event:
            failure = event.get("log_failure")
            self.found.append(failure.getTraceback() if failure is not None else str(event.get("log_format")))

    def __enter__(self) -> Complaints:
        globalLogPublisher.addObserver(self)
        return self

    def __exit__(self, *_: object) -> None:
        globalLogPublisher.removeObserver(self)
