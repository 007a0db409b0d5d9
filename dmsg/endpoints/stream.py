"""Twisted stream endpoints over the client of any protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, cast

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred, fail
from twisted.internet.error import CannotListenError, ConnectError, ConnectingCancelledError, NoProtocol
from twisted.internet.interfaces import (
    IAddress,
    IListeningPort,
    IProtocol,
    IProtocolFactory,
    IStreamClientEndpoint,
    IStreamServerEndpoint,
)
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.address import DmsgAddress, check_service_name
from dmsg.clients.errors import ClientStopped
from dmsg.clients.limits import ListenerLimits
from dmsg.endpoints.client import Borrowed, C, Client, ClientSource, Port, Transport
from dmsg.endpoints.held_port import HeldPort
from dmsg.errors import Attempt, DialError, DmsgError
from dmsg.eventlog.reasons import Reason
from dmsg.interfaces import IAccessPolicy
from dmsg.relays.errors import SessionTimeout

_log = Logger()


class DmsgConnectError(DialError, ConnectError):
    """A connect that failed: a ``DialError`` with its attempts, and a ``ConnectError`` for programs written for TCP."""

    def __init__(self, error: DialError) -> None:
        super().__init__(error.target, error.attempts)
        self.osError = None
        self.args = error.args  # ConnectError has none of its own, and repr() would show nothing

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


@implementer(IStreamClientEndpoint)
class ClientEndpoint(Generic[C]):
    """Connects to ``address`` through ``client``.

    ``client`` is a running client, or a :class:`~dmsg.endpoints.client.ClientSource`, which is held while a connect is under
    way. ``timeout_s`` limits a whole connect (default: the client's own limit). ``how`` are further arguments of a dial, which
    depend on the protocol.
    """

    def __init__(
        self, client: C | ClientSource[C], address: DmsgAddress, timeout_s: float | None = None, **how: Any
    ) -> None:
        self.address = address
        self.timeout_s = _checked(timeout_s)
        self._source = Borrowed.unless_source(client)
        self._how = how

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.address}>"

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Dial and connect a protocol of ``protocolFactory``; fails with :class:`DmsgConnectError`.

        When the client of a string cannot begin, it fails with another ``DmsgError``: with ``ConfigError`` if nothing can be
        written to the directory of ``events=``. Cancelling undoes what was done so far, also while the protocol is made and
        connected.
        """

        is_attached = False

        def attach(transport: Transport) -> IProtocol:
            nonlocal is_attached
            is_attached = True
            return _attach(transport, protocolFactory, connecting)

        def cancel(connecting: Deferred[IProtocol]) -> None:
            dialing.cancel()
            if not connecting.called:  # the call comes from the factory or the protocol, and _attach looks at it next
                connecting.errback(self._cancelled())

        def pass_on(result: IProtocol | Failure) -> None:
            try:
                if not connecting.called:
                    connecting.callback(cast(IProtocol, result))
                elif isinstance(result, Failure):
                    result.trap(ConnectingCancelledError)
            finally:
                if not is_attached:  # a program may have begun to connect again meanwhile, with the same factory
                    protocolFactory.doStop()

        try:
            protocolFactory.doStart()
        except BaseException:  # an application may raise anything
            return fail()
        connecting: Deferred[IProtocol] = Deferred(cancel)
        dialing = ensureDeferred(self._connect(attach))
        dialing.addBoth(pass_on)
        return connecting

    def _cancelled(self) -> ConnectingCancelledError:
        return ConnectingCancelledError(cast(IAddress, self.address))

    async def _connect(self, attach: Callable[[Transport], IProtocol]) -> IProtocol:
        try:
            client, left_s = await self._acquire()
            try:
                address = self.address
                transport = await client.dial(address.public_key, address.service, timeout_s=left_s, **self._how)
                return attach(transport)
            finally:
                self._source.release()
        except DialError as error:
            raise DmsgConnectError(error) from error
        except CancelledError:
            raise self._cancelled() from None

    async def _acquire(self) -> tuple[C, float | None]:
        """The client, and the time left for the dial: a previous client with the same key may have to stop first."""
        limit_s, clock = self.timeout_s, self._source.reactor
        if limit_s is None:
            return await self._source.acquire(), None

        def too_late(result: object, timeout_s: float) -> Failure:
            timeout = Attempt(
                "connect", "", timeout_s * 1000, Reason.TIMEOUT, SessionTimeout("the client's start", timeout_s)
            )
            return Failure(DialError(str(self.address.public_key), [timeout]))

        started = clock.seconds()
        client = await ensureDeferred(self._source.acquire()).addTimeout(limit_s, clock, too_late)
        return client, max(0.0, started + limit_s - clock.seconds())


def _attach(transport: Transport, factory: IProtocolFactory, connecting: Deferred[IProtocol]) -> IProtocol:
    """Connect a new protocol, and stop the factory when the transport has ended, as Twisted's connectors do.

    Raises ``CancelledError`` when ``connecting`` is cancelled meanwhile.
    """
    before = transport.on_over

    def over() -> None:
        try:
            factory.doStop()
        finally:
            if before is not None:
                before()

    transport.on_over = over
    try:
        protocol = factory.buildProtocol(transport.getPeer())
        if not connecting.called:
            if protocol is None:
                raise NoProtocol
            transport.attach(protocol)
        if protocol is None or connecting.called:
            raise CancelledError
    except BaseException:
        transport.abortConnection()
        raise
    return protocol


@implementer(IStreamServerEndpoint)
class ServerEndpoint(Generic[C]):
    """Listens for ``service`` of the key of ``client``, which is as for :class:`ClientEndpoint`.

    A source is held until the port is stopped. ``policy`` says who may connect (all, if there is none), ``limits`` how many
    may wait for its decision and be connected. ``timeout_s`` limits the wait until the client can be reached; by default it is
    unlimited. ``how`` are further arguments of a port, which depend on the protocol.
    """

    def __init__(
        self,
        client: C | ClientSource[C],
        service: str = "",
        *,
        policy: IAccessPolicy | None = None,
        limits: ListenerLimits | None = None,
        timeout_s: float | None = None,
        **how: Any,
    ) -> None:
        self.service = check_service_name(service)
        self.policy = policy
        self.limits = limits
        self.timeout_s = _checked(timeout_s)
        self._source = Borrowed.unless_source(client)
        self._how = how

    def listen(self, protocolFactory: IProtocolFactory) -> Deferred[IListeningPort]:
        """Fires with the port when it can be reached; fails with ``CannotListenError``, or with a ``DmsgError`` when
        the client of a string cannot begin, as a connect does. Cancelling undoes it. When the reactor shuts down while
        the client of a string waits to be reached, it does neither: a program that is interrupted has no error to report.

        The port's ``getHost`` returns the address to dial.
        """
        return ensureDeferred(self._listen(protocolFactory))

    async def _listen(self, factory: IProtocolFactory) -> IListeningPort:
        client = await self._source.acquire()
        port: Port | None = None
        try:
            port = client.listen(factory, self.service, policy=self.policy, limits=self.limits, **self._how)
            ready = client.when_ready()
            if self.timeout_s is not None:
                ready.addTimeout(self.timeout_s, client.reactor, lambda _, limit_s: Failure(_too_late(client, limit_s)))
            await ready
        except BaseException as error:
            if port is not None:
                port.stopListening()
            self._source.release()
            if isinstance(error, ClientStopped) and self._source.shutting_down:
                await Deferred()  # until cancelled
            if isinstance(error, DmsgError):
                where = self.service if port is None else str(port.getHost()).removeprefix(f"{client.scheme}:")
                raise CannotListenError(client.scheme, where, error) from error
            raise
        _log.info("{factory} is reached as {address}", factory=factory, address=port.getHost())
        return HeldPort(port, self._source)


def _too_late(client: Client, limit_s: float) -> SessionTimeout:
    return SessionTimeout("connecting to servers", limit_s, client.problem)


def _checked(timeout_s: float | None) -> float | None:
    if timeout_s is not None and not timeout_s >= 0:  # NaN is refused too
        raise ValueError(f"timeout_s of an endpoint is 0 or more, not {timeout_s!r}")
    return timeout_s
