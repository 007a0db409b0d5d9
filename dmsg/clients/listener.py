"""Listening ports of a client: who may come in, and which protocol is connected to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, cast
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IAddress, IDelayedCall, IListeningPort, IProtocolFactory, IReactorTime
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from zope.interface import classImplements, implementer

from dmsg.address import DmsgAddress, check_service_name
from dmsg.clients.limits import ListenerLimits
from dmsg.clients.offers import Offer, Offers
from dmsg.clients.opened import LOOK_S, OpenTransports
from dmsg.clients.services import Services
from dmsg.clients.sessions import ClientSession
from dmsg.clients.transports import T
from dmsg.crypto.keys import PublicKey
from dmsg.interfaces import IAccessPolicy, IKeyPolicy

_log = Logger()
classImplements(DmsgAddress, IAddress)


class PortClient(TypingProtocol[T]):
    """The client that has the port."""

    reactor: IReactorTime
    public_key: PublicKey

    @property
    def scheme(self) -> str:
        """The prefix of addresses of its protocol."""

    @property
    def services(self) -> Services[Any]:
        """Its ports."""

    def transport_opened(
        self, session: Any, transport: T, *, accept_ms: float = 0.0, closed: Callable[[T], object] | None = None
    ) -> None:
        """Note a transport that has just been opened; ``closed`` is called when it has ended."""


@implementer(IListeningPort)
class ListeningPort(Generic[T]):
    """Accepts transports for one service; ``limits`` say how many may wait and how many may be open."""

    def __init__(
        self,
        client: PortClient[T],
        factory: IProtocolFactory | Factory,
        service: str = "",
        *,
        policy: IAccessPolicy | None = None,
        limits: ListenerLimits | None = None,
    ) -> None:
        if policy is not None and not callable(getattr(policy, "allow", None)):
            raise TypeError(f"a policy is an IAccessPolicy, such as AllowKeys(keys), not {policy!r}")
        self.client = client
        self.factory = factory
        self.service = check_service_name(service)
        self.policy = policy
        self.limits = limits = limits or ListenerLimits()
        #: Transports that wait for a decision or a proof, each in a place.
        self.offers: Offers[Offer] = Offers(limits.offers, limits.offers_per_key)
        self._key_policy = policy if IKeyPolicy.providedBy(policy) else None
        self._opened: OpenTransports[T] = OpenTransports(limits)
        self._look: IDelayedCall | None = None
        self._listening = False

    def startListening(self) -> None:
        """Begin to listen; raises ``CannotListenError`` when the client has a port for this service already.

        If the factory fails to start, nothing listens.
        """
        if self._listening:
            return
        try:
            self.client.services.add(self)
        except ValueError as error:
            scheme = self.client.scheme
            raise CannotListenError(scheme, str(self.getHost()).removeprefix(f"{scheme}:"), error) from None
        try:
            self.factory.doStart()
        except BaseException:
            self.client.services.remove(self)
            raise
        self._listening = True

    def stopListening(self) -> Deferred[None]:
        """Accept no more transports; open transports stay."""
        if self._listening:
            self._listening = False
            self.client.services.remove(self)
            try:
                self.factory.doStop()
            except BaseException:  # an application may raise anything; the port is closed anyway
                _log.failure("Unhandled error in {factory}.stopFactory", factory=self.factory)
        return succeed(None)

    def getHost(self) -> IAddress:
        """The key and the service of this port, as a ``DmsgAddress``."""
        return cast(IAddress, DmsgAddress(self.client.public_key, self.service, None, self.client.scheme))

    # --- who may come in -------------------------------------------------------------------------------------------

    def may_admit(self, remote: PublicKey) -> bool:
        """Whether ``remote`` could be admitted, as far as its key alone can say: ``False`` is final."""
        if self._key_policy is None:
            return True
        try:
            return self._key_policy.admits_key(remote) is True
        except BaseException:  # an application's policy may raise anything; as in ask(), access is denied then
            _log.failure("The access policy failed; access is denied")
            return False

    def is_open_to(self, remote: PublicKey) -> bool:
        """Whether ``remote`` may know that this listener exists: as far as its key tells, it would be admitted."""
        return self.policy is None or (self._key_policy is not None and self.may_admit(remote))

    def make_room(self) -> bool:
        """Whether another transport may be opened; closes an unused one for it if need be."""
        if self._opened.is_full:
            self._end(self._opened.unused(1, self.client.reactor.seconds(), 0.0), "unused, and the listener is full")
        return not self._opened.is_full

    # --- open transports -------------------------------------------------------------------------------------------

    def open(self, session: ClientSession, stream: Any) -> None:
        """Give an open stream to the application."""
        if self._opened.is_full:
            session.turn_away(stream, busy=True)
            return
        peer = DmsgAddress(stream.remote, "", session.server, self.client.scheme)
        services = self.client.services
        services.building += 1
        try:
            protocol = self.factory.buildProtocol(cast(IAddress, peer)) if self._listening else None
        except BaseException:  # an application may raise anything; it loses only this transport
            _log.failure("Unhandled error in {factory}.buildProtocol", factory=self.factory)
            protocol = None
        finally:
            services.building -= 1
        if protocol is None:
            session.turn_away(stream, busy=False)
            return
        transport: T = session.transport(stream, self.service, peer)
        self._opened.add(transport, self.client.reactor.seconds())
        self.client.transport_opened(session, transport, closed=self._closed)
        self._watch()
        transport.attach(protocol)

    def _closed(self, transport: T) -> None:
        self._opened.remove(transport)
        if self._look is not None and not self._opened.needs_look:
            self._look.cancel()
            self._look = None

    def _watch(self) -> None:
        if self._look is None and self._opened.needs_look:
            self._look = self.client.reactor.callLater(LOOK_S, self._end_idle)

    def _end_idle(self) -> None:
        self._look = None
        self._end(self._opened.idle(self.client.reactor.seconds()), "idle for too long")
        self._watch()

    def _end(self, transports: Iterable[T], why: str) -> None:
        for transport in transports:
            transport.deadline_exceeded(why)
