"""Server endpoints: from strings, with a backlog that a burst of connections fits, and of ports that are taken early."""

from __future__ import annotations

import contextlib
import re
from typing import Any, Final, cast

from twisted.internet.defer import Deferred, succeed
from twisted.internet.endpoints import serverFromString
from twisted.internet.interfaces import IAddress, IListeningPort, IProtocolFactory, IStreamServerEndpoint
from twisted.internet.protocol import Factory
from zope.interface import implementer

#: TCP connections that wait to be accepted, unless the endpoint string says how many. Twisted's 50 are full after one turn
#: of a busy relay: the kernel then drops what clients send, who try again after a second. Linux has 4,096 at most.
BACKLOG: Final = 1024
_HAS_BACKLOG: Final = re.compile(r"(haproxy:)?(tcp|tcp6|ssl|unix):")
_SAYS_BACKLOG: Final = re.compile(r"(?<!\\):backlog=")


def server_endpoint(reactor: Any, text: str) -> IStreamServerEndpoint:
    """The endpoint of ``text``, with :data:`BACKLOG` unless it says otherwise; raises what the parser does."""
    if _HAS_BACKLOG.match(text) and not _SAYS_BACKLOG.search(text):
        with contextlib.suppress(TypeError):  # it is given by position, or all else is wrong and told below
            return cast(IStreamServerEndpoint, serverFromString(reactor, f"{text}:backlog={BACKLOG}"))
    return cast(IStreamServerEndpoint, serverFromString(reactor, text))


class LateFactory(Factory):
    """Holds a port for a factory that comes later; until :meth:`serve` it refuses connections."""

    noisy = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._served: Any = None

    def serve(self, factory: IProtocolFactory) -> None:
        """Let ``factory`` make the protocols from now on."""
        self._served = factory
        factory.doStart()

    def logPrefix(self) -> str:
        return self._name

    def buildProtocol(self, addr: IAddress | None) -> Any:
        return None if self._served is None else self._served.buildProtocol(addr)

    def doStop(self) -> None:
        super().doStop()  # type: ignore[no-untyped-call]
        if self._served is not None:
            self._served.doStop()


@implementer(IStreamServerEndpoint)
class TakenPort:
    """An endpoint whose ``port`` listens already: a relay has to know its address before it is made."""

    def __init__(self, port: IListeningPort, factory: LateFactory) -> None:
        self.port = port
        self._factory = factory

    @classmethod
    async def take(cls, endpoint: IStreamServerEndpoint) -> TakenPort:
        """Listen on ``endpoint``; raises what that raises."""
        factory = LateFactory("taken port")
        return cls(await endpoint.listen(factory), factory)

    def listen(self, protocolFactory: IProtocolFactory) -> Deferred[IListeningPort]:
        """Serve with ``protocolFactory`` from now on."""
        self._factory.serve(protocolFactory)
        return succeed(self.port)
