"""Twisted stream endpoints over the client of any protocol."""

from __future__ import annotations

from typing import Generic, cast

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.error import CannotListenError, ConnectError, ConnectingCancelledError, NoProtocol
from twisted.internet.interfaces import (
    IAddress,
    IListeningPort,
    IProtocol,
    IProtocolFactory,
    IStreamClientEndpoint,
    IStreamServerEndpoint,
)
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.endpoints.client import C, ClientSource, Port, Transport
from dmsg.endpoints.held_port import HeldPort
from dmsg.errors import DialError
from dmsg.relays.errors import SessionTimeout

_log = Logger()


class DmsgConnectError(DialError, ConnectError):
    """A connect that failed: a ``DialError`` with its attempts, and a ``ConnectError`` for programs written for TCP."""

    def __init__(self, error: DialError) -> None:
        super().__init__(error.target, error.attempts)
        self.osError = None
        self._text = error.args[0] if error.args else ""

    def __str__(self) -> str:
        return str(self._text)


@implementer(IStreamClientEndpoint)
class ClientEndpoint(Generic[C]):
    """Connects to ``address`` through the client of ``source``, which is held while a connect is under way.

    A protocol's own class says in :meth:`dial` how.
    """

    def __init__(self, source: ClientSource[C], address: object) -> None:
        self._source = source
        self._address = address

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self._address}>"

    async def dial(self, client: C) -> Transport:
        """An open transport to the address, without a protocol. Raises ``DialError``; cancelling undoes it."""
        raise NotImplementedError

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Dial and connect a protocol of ``protocolFactory``; fails with :class:`DmsgConnectError`.

        Cancelling undoes what was done so far.
        """
        return ensureDeferred(self._connect(protocolFactory))

    async def _connect(self, factory: IProtocolFactory) -> IProtocol:
        factory.doStart()
        transport: Transport | None = None
        try:
            client = await self._source.acquire()
            try:
                transport = await self.dial(client)
                return _attach(transport, factory)
            finally:
                self._source.release()
        except DialError as error:
            raise DmsgConnectError(error) from error
        except CancelledError:
            raise ConnectingCancelledError(cast(IAddress, self._address)) from None
        finally:
            if transport is None:
                factory.doStop()


def _attach(transport: Transport, factory: IProtocolFactory) -> IProtocol:
    """Connect a new protocol, and tell the factory when that is over, as Twisted's connectors do."""
    before = transport.on_over

    def over() -> None:
        factory.doStop()
        if before is not None:
            before()

    transport.on_over = over
    try:
        protocol = factory.buildProtocol(transport.getPeer())
        if protocol is None:
            raise NoProtocol
    except BaseException:
        transport.abortConnection()
        raise
    transport.attach(protocol)
    return protocol


@implementer(IStreamServerEndpoint)
class ServerEndpoint(Generic[C]):
    """Listens for ``service`` on the client of ``source``, which is held until the port is stopped.

    ``timeout_s`` limits the wait until the client can be reached; without it, it goes on for ever. A protocol's own class
    says in :meth:`listen_on` how, and what its addresses are called in ``scheme``.
    """

    def __init__(self, source: ClientSource[C], service: str, scheme: str, timeout_s: float | None) -> None:
        self.service = service
        self.timeout_s = timeout_s
        self._scheme = scheme
        self._source = source

    def listen_on(self, client: C, factory: Factory) -> Port:
        """A port of ``client`` that listens. Raises ``CannotListenError``."""
        raise NotImplementedError

    def listen(self, protocolFactory: IProtocolFactory) -> Deferred[IListeningPort]:
        """Fires with the port when it can be reached; fails with ``CannotListenError``. Cancelling undoes it.

        The port's ``getHost`` tells the address to dial.
        """
        return ensureDeferred(self._listen(cast(Factory, protocolFactory)))

    async def _listen(self, factory: Factory) -> IListeningPort:
        client = await self._source.acquire()
        port: Port | None = None
        try:
            port = self.listen_on(client, factory)
            ready = client.when_ready()
            if self.timeout_s is not None:
                ready.addTimeout(self.timeout_s, client.reactor, self._too_late)
            await ready
        except BaseException:
            if port is not None:
                port.stopListening()
            self._source.release()
            raise
        _log.info("{factory} is reached as {address}", factory=factory, address=port.getHost())
        return HeldPort(port, self._source)

    def _too_late(self, result: object, timeout_s: float) -> Failure:
        return Failure(
            CannotListenError(self._scheme, self.service, SessionTimeout("connecting to servers", timeout_s))
        )
