"""The base of the cases of the conformance kit: connected pairs, waiting, cleaning up."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import wraps
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, DeferredList, maybeDeferred
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from dmsg.testing.probes import ConformanceProtocol, OneProtocolFactory

T = TypeVar("T")

#: Reactor turns that let everything under way on an idle loopback connection arrive.
_SETTLE_TURNS = 40
MIB = 1024 * 1024


def case(function: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], Deferred[None]]:
    """Make a coroutine method a test that returns a Deferred, and closes what it has opened."""

    @wraps(function)
    def run(self: TransportHarness) -> Deferred[None]:
        return Deferred.fromCoroutine(self._run(function))

    del run.__dict__["__wrapped__"]  # pytest must see that this is not a coroutine function
    return run


class TransportHarness:
    """Inherit, supply :meth:`make_endpoints` or :meth:`make_pair`, and write cases with :func:`case`.

    ``limit_s`` is the time limit of a wait, and ``in_flight_limit_bytes`` how many bytes may be on their way to a side that
    does not read before the producer at the other side must be paused (buffers of the operating system included).
    ``big_bytes`` is the size of the one big write, ``stream_bytes`` of the data in other cases (more than one read).
    ``refuses_connections`` is for transports that learn of a missing listener. Every wait goes through :meth:`wait`
    and :meth:`settle`: override both, and ``reactor``, for a transport on a fake clock.
    """

    limit_s = 20.0
    in_flight_limit_bytes = 8 * MIB
    big_bytes = 10 * MIB
    stream_bytes = 2 * MIB
    refuses_connections = True

    # --- what a subclass may say --------------------------------------------------------------------------------------

    def make_endpoints(self) -> tuple[Any, Callable[[Any], Any]]:
        """A server endpoint, and a function that returns a client endpoint for its listening port."""
        # Not abstract: a harness that supplies make_pair needs no endpoints.
        raise TypeError(f"{type(self).__name__} supplies neither make_endpoints nor make_pair")

    async def make_pair(
        self, client: ConformanceProtocol, server: ConformanceProtocol
    ) -> tuple[ConformanceProtocol, ConformanceProtocol]:
        """Connect the two protocols and return them; by default through :meth:`make_endpoints`."""
        server_endpoint, client_endpoint_for = self.make_endpoints()
        port = await self.wait(server_endpoint.listen(OneProtocolFactory(server)))
        self.add_cleanup(port.stopListening)
        await self.wait(client_endpoint_for(port).connect(OneProtocolFactory(client)))
        await self.wait(server.when(lambda: server.made > 0))
        return client, server

    @property
    def reactor(self) -> Any:
        """The source of time: the real reactor, or the clock of the transport under test."""
        from twisted.internet import reactor

        return reactor

    async def wait(self, deferred: Deferred[T]) -> T:
        """Wait for ``deferred``, at most ``limit_s`` seconds."""
        return await deferred.addTimeout(self.limit_s, self.reactor)

    async def settle(self) -> None:
        """Let everything under way arrive, for cases that check that nothing arrives."""
        for _ in range(_SETTLE_TURNS):
            await deferLater(self.reactor, 0)

    def flush_logged_errors(self, *types: type[BaseException]) -> list[Failure]:
        """Take back the errors of ``types`` that were logged; override it where logged errors fail a test."""
        return []

    # --- what the cases use -------------------------------------------------------------------------------------------

    def add_cleanup(self, function: Callable[[], Any]) -> None:
        """Call ``function`` at the end of the case, and wait for its Deferred, if it returns one."""
        self._cleanups.push_async_callback(lambda: self.wait(maybeDeferred(function)))

    _cleanups: AsyncExitStack

    async def _run(self, function: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        async with AsyncExitStack() as self._cleanups:
            await function(self)

    async def pair(self, prepare: Callable[[Any, Any], object] | None = None) -> tuple[Any, Any]:
        """A connected client and server protocol, closed at the end; ``prepare`` gets them before they are connected."""
        client, server = ConformanceProtocol(), ConformanceProtocol()
        if prepare is not None:
            prepare(client, server)
        await self.make_pair(client, server)
        self.add_cleanup(lambda: self._close(client, server))
        return client, server

    async def both_lost(self, *protocols: ConformanceProtocol) -> None:
        """Wait until each has lost its connection, and check that each was told exactly once."""
        for protocol in protocols:
            await self.wait(protocol.when_lost())
        await self.settle()
        for protocol in protocols:
            assert len(protocol.lost) == 1, "connectionLost is called exactly once"
            assert not protocol.data_while_not_connected, "data only between connectionMade and connectionLost"

    def _close(self, *protocols: ConformanceProtocol) -> Deferred[Any]:
        for protocol in protocols:
            if protocol.transport is not None and not protocol.lost:
                transport: Any = protocol.transport
                transport.abortConnection()
        return DeferredList([protocol.when_lost() for protocol in protocols if protocol.made])
