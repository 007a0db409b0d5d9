"""A network in memory: enough of a reactor that Twisted's endpoints connect programs through pipes, on a fake clock.

Hosts are IPv4 addresses and names given in ``hosts``; all addresses belong to the same machine, so a listener without an
``interface`` answers on all of them. Tests cause failures with :meth:`MemoryNetwork.refuse`, :meth:`MemoryNetwork.silence`
and :meth:`MemoryNetwork.unreachable`, and control open connections through :attr:`MemoryNetwork.pipes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

from twisted.internet import defer, error, interfaces
from twisted.internet.abstract import isIPAddress
from twisted.internet.address import IPv4Address
from twisted.internet.base import BaseConnector
from twisted.internet.task import Clock
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.testing.link import Link
from dmsg.testing.pipe import Chunking, Pipe

_FIRST_FREE_PORT = 49152
_log = Logger()


@dataclass(frozen=True)
class Path:
    """The path to one place: the delay in seconds for connecting and for bytes one way, the share of writes that are lost and
    sent again, and the share of attempts to connect that are refused.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    refusals: float = 0.0


@implementer(interfaces.IListeningPort)
class _MemoryPort:
    """A listening port of a :class:`MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, interface: str, port: int, factory: Any) -> None:
        self.factory = factory
        self._network = network
        self._address = IPv4Address("TCP", interface or "0.0.0.0", port)
        self._key = (interface, port)

    def startListening(self) -> None:
        if self._key in self._network._listeners:
            raise error.CannotListenError(*self._key, OSError("address already in use"))
        self._network._listeners[self._key] = self
        self.factory.doStart()

    def stopListening(self) -> defer.Deferred[None]:
        if self._network._listeners.get(self._key) is self:
            del self._network._listeners[self._key]
            self.factory.doStop()
        return defer.succeed(None)

    def getHost(self) -> IPv4Address:
        return self._address

    def __repr__(self) -> str:
        return f"<MemoryPort {self._address.host}:{self._address.port} of {self.factory}>"


class _Attempt:
    """Takes the place of a connector's transport until it is connected."""

    def __init__(self, network: MemoryNetwork, connector: _MemoryConnector) -> None:
        self._connector = connector
        self._ended = False
        self._path = network._path(connector.host, connector.port)
        round_trip_s = 2 * network.link.out.delay_s if network.link is not None else 0.0
        self._call = network.clock.callLater(self._path.delay_s + round_trip_s, self._arrive)
        self._network = network

    def _arrive(self) -> None:
        connector, network = self._connector, self._network
        fate = network._fate(connector.host, connector.port)
        if self._path.refusals and network.random.random() < self._path.refusals:
            fate = error.ConnectionRefusedError()
        if fate is None:
            return  # silence: only the time limit ends it
        if isinstance(fate, Exception):
            self.failIfNotConnected(fate)
            return
        self._ended = True
        network._open(connector, fate)

    def failIfNotConnected(self, reason: Exception) -> None:
        if self._ended:
            return
        self._ended = True
        if self._call.active():
            self._call.cancel()
        self._connector.connectionFailed(Failure(reason))

    def loseConnection(self) -> None:
        self.failIfNotConnected(error.UserError())


class _MemoryConnector(BaseConnector):
    """An ``IConnector`` of a :class:`MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, host: str, port: int, factory: Any, timeout: float, source: Any) -> None:
        super().__init__(factory, timeout, network)  # type: ignore[arg-type]
        self.host, self.port, self.source = host, port, source

    def _makeTransport(self) -> Any:
        return _Attempt(self.reactor, self)  # type: ignore[arg-type]

    def getDestination(self) -> IPv4Address:
        return IPv4Address("TCP", self.host, self.port)


class _Refusal:
    """Takes the place of a protocol if a factory built none: closes at once."""

    def makeConnection(self, transport: Any) -> None:
        transport.loseConnection()

    def dataReceived(self, data: bytes) -> None:
        """The data is dropped."""

    def connectionLost(self, reason: Failure) -> None:
        """The loss is not reported."""


@implementer(interfaces.IHostResolution)
class _Resolution:
    """A resolution that has ended before it can be cancelled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def cancel(self) -> None:
        """Do nothing: it is too late."""


@implementer(interfaces.IHostnameResolver)
class _Resolver:
    """Looks names up in a mapping."""

    def __init__(self, hosts: Mapping[str, Sequence[str] | str]) -> None:
        self._hosts = hosts

    def addresses(self, name: str) -> Sequence[str]:
        if isIPAddress(name):
            return [name]
        found = self._hosts.get(name, ())
        return [found] if isinstance(found, str) else found

    def resolveHostName(
        self,
        resolutionReceiver: Any,
        hostName: str,
        portNumber: int = 0,
        addressTypes: Any = None,
        transportSemantics: str = "TCP",
    ) -> _Resolution:
        resolution = _Resolution(hostName)
        resolutionReceiver.resolutionBegan(resolution)
        for address in self.addresses(hostName):
            resolutionReceiver.addressResolved(IPv4Address("TCP", address, portNumber))
        resolutionReceiver.resolutionComplete()
        return resolution


@implementer(interfaces.IReactorTCP, interfaces.IReactorTime, interfaces.IReactorPluggableNameResolver)
class MemoryNetwork:
    """``listenTCP``, ``connectTCP``, time and names for a whole network in one process.

    Pass it to endpoints as their reactor. ``pipes`` are the open connections, oldest first; in each, ``a`` is the end that
    connected and ``b`` the end that listened.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        delay_s: float = 0.0,
        chunking: Chunking = None,
        high_water_bytes: int = 65536,
        random: Random | None = None,
        hosts: Mapping[str, Sequence[str] | str] | None = None,
    ) -> None:
        """``clock`` is a new one by default; ``delay_s`` holds for connecting and for bytes one way.

        ``chunking``, ``high_water_bytes`` and ``random`` are those of :class:`~dmsg.testing.pipe.Pipe`; ``hosts`` maps
        names to IPv4 addresses.
        """
        self.clock = clock if clock is not None else Clock()
        self.delay_s = delay_s
        self.chunking = chunking
        self.high_water_bytes = high_water_bytes
        self.random = random if random is not None else Random(0)
        self.pipes: list[Pipe] = []
        self.nameResolver = _Resolver({"localhost": "127.0.0.1", **(hosts or {})})
        self._listeners: dict[tuple[str, int], _MemoryPort] = {}
        self._fates: dict[tuple[str, int | None], Exception | None] = {}
        self._paths: dict[tuple[str, int], Path] = {}
        self._ports = count(_FIRST_FREE_PORT + 1)
        self.link: Link | None = None

    # --- time ---------------------------------------------------------------------------------------------------------

    def seconds(self) -> float:
        """The clock's time, in seconds."""
        return self.clock.seconds()

    def callLater(self, delay: float, callable: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        assert delay >= 0, f"{delay} s from now"  # reactors check this too, but Twisted's Clock does not
        return self.clock.callLater(delay, callable, *args, **kwargs)

    def getDelayedCalls(self) -> Sequence[Any]:
        return self.clock.getDelayedCalls()

    def advance(self, amount_s: float = 0.0) -> None:
        """Move the clock on, stopping at each call that is due, so that each sees the time at which it was due."""
        end = self.clock.seconds() + amount_s
        while (due := min((call.getTime() for call in self.clock.calls), default=end + 1)) <= end:
            self.clock.advance(max(0.0, due - self.clock.seconds()))
        self.clock.advance(max(0.0, end - self.clock.seconds()))

    # --- connections --------------------------------------------------------------------------------------------------

    def listenTCP(self, port: int, factory: Any, backlog: int = 50, interface: str = "") -> Any:
        """Listen; port 0 takes a free port. Raises ``CannotListenError`` when the port is taken."""
        if interface in ("", "0.0.0.0"):
            interface = ""
        listener = _MemoryPort(self, interface, port or self._free_port(), factory)
        listener.startListening()
        return listener

    def connectTCP(
        self,
        host: str,
        port: int,
        factory: Any,
        timeout: float = 30.0,
        bindAddress: tuple[str, int] | None = None,
    ) -> Any:
        """Connect; ``bindAddress`` is the source address that the other side sees."""
        connector = _MemoryConnector(self, host, port, factory, timeout, bindAddress)
        connector.connect()
        return connector

    def installNameResolver(self, resolver: Any) -> Any:
        """Look names up elsewhere; returns the resolver used so far. Connections by name go on using ``hosts``."""
        before, self.nameResolver = self.nameResolver, resolver
        return before

    def through(self, link: Link) -> MemoryNetwork:
        """This network as a reactor for programs behind ``link``, which carries all their connections.

        Connecting takes a round trip of the link. Time, listeners and pipes are those of this network.
        """
        behind = copy(self)
        behind.link = link
        return behind

    # --- what may go wrong --------------------------------------------------------------------------------------------

    def refuse(self, host: str, port: int | None = None) -> None:
        """Connecting there fails with ``ConnectionRefusedError``, even with a listener; no ``port`` means all."""
        self._fates[host, port] = error.ConnectionRefusedError()

    def silence(self, host: str, port: int | None = None) -> None:
        """Connecting there gets no answer, and ends with ``TimeoutError`` at the connector's time limit."""
        self._fates[host, port] = None

    def unreachable(self, host: str) -> None:
        """Connecting there fails with ``NoRouteError``."""
        self._fates[host, None] = error.NoRouteError()

    def heal(self, host: str, port: int | None = None) -> None:
        """Undo :meth:`refuse`, :meth:`silence` or :meth:`unreachable` for the same place."""
        self._fates.pop((host, port), None)

    def set_path(self, host: str, port: int, path: Path) -> None:
        """Set the path to a place from now on, also for open connections."""
        self._paths[host, port] = path
        for connection in self.pipes_to(port, host):
            connection.delay_s, connection.loss = path.delay_s, path.loss

    def _path(self, host: str, port: int) -> Path:
        return self._paths.get((host, port)) or Path(self.delay_s)

    def pipes_to(self, port: int, host: str | None = None) -> list[Pipe]:
        """The open connections to a listening port, oldest first."""
        return [p for p in self.pipes if p.b.getHost().port == port and host in (None, p.b.getHost().host)]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _free_port(self) -> int:
        taken = {port for _, port in self._listeners}
        return next(port for port in self._ports if port not in taken)

    def _fate(self, host: str, port: int) -> tuple[_MemoryPort, str] | Exception | None:
        """The listener and its address, the error of connecting there, or ``None`` if no answer ever comes."""
        resolved = self.nameResolver.addresses(host)
        if not resolved:
            return error.DNSLookupError(f"no such host: {host}")
        address = resolved[0]
        for place in ((host, port), (address, port), (host, None), (address, None)):
            if place in self._fates:
                return self._fates[place]
        listener = self._listeners.get((address, port)) or self._listeners.get(("", port))
        return error.ConnectionRefusedError() if listener is None else (listener, address)

    def _open(self, connector: _MemoryConnector, where: tuple[_MemoryPort, str]) -> None:
        listener, address = where
        source_host, source_port = connector.source or ("127.0.0.1", 0)
        source = IPv4Address("TCP", source_host, source_port or self._free_port())
        target = IPv4Address("TCP", address, connector.port)
        path = self._path(connector.host, connector.port)
        connection = Pipe(
            self.clock,
            chunking=self.chunking,
            delay_s=path.delay_s,
            high_water_bytes=self.high_water_bytes,
            random=self.random,
            addresses=(source, target),
            link=self.link,
        )
        connection.loss = path.loss
        connection.on_closed = self.pipes.remove
        connection.a.on_lost = connector.connectionLost
        self.pipes.append(connection)
        connector.transport = connection.a  # type: ignore[assignment]
        client = connector.buildProtocol(target)
        try:
            server = listener.factory.buildProtocol(source)
        except Exception:  # the application's fault, told as the reactor tells it
            _log.failure("Unhandled error in {factory}", factory=listener.factory)
            server = None
        connection.connect(
            _Refusal() if client is None else client,
            _Refusal() if server is None else server,
        )
