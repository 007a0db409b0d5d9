"""Listening ports of a client: who may come in, and what protocol they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IAddress, IListeningPort
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from zope.interface import implementer

from dmsg.address import DmsgAddress, check_service_name
from dmsg.crypto.keys import PublicKey
from dmsg.interfaces import IAccessPolicy
from dmsg.mux.negotiation import Security
from dmsg.mux.stream import Stream
from dmsg.mux.wire import CloseReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dmsg.mux.client import DmsgClient
    from dmsg.mux.session import ServerSession

DEFAULT_BACKLOG = 20
_log = Logger()


@implementer(IAccessPolicy)
class AllowKeys:
    """An access policy that admits the keys it is given and nobody else."""

    def __init__(self, keys: Iterable[PublicKey]) -> None:
        self.keys = frozenset(keys)

    def allow(self, remote: PublicKey, service: str) -> bool:
        """Whether ``remote`` is on the list."""
        return remote in self.keys


@implementer(IListeningPort)
class DmsgPort:
    """Where transports for one service come in.

    At most ``backlog`` wait at a time for the access policy or for their initiator to prove itself (D22); more are refused
    as busy. ``security`` says who may come in the clear.
    """

    def __init__(
        self,
        client: DmsgClient,
        factory: Factory,
        service: str = "",
        *,
        policy: IAccessPolicy | None = None,
        backlog: int = DEFAULT_BACKLOG,
        security: Security = Security.PREFER,
    ) -> None:
        self.client = client
        self.factory = factory
        self.service = check_service_name(service)
        self.policy = policy
        self.backlog = backlog
        self.security = security
        #: Transports that wait for a decision or a proof.
        self.waiting = 0
        self._listening = False

    def startListening(self) -> None:
        """Begin; ``CannotListenError`` when the client has a port for this service already."""
        if self._listening:
            return
        try:
            self.client.add_port(self)
        except ValueError as error:
            raise CannotListenError("dmsg", self.service, error) from None
        self._listening = True
        self.factory.doStart()

    def stopListening(self) -> Deferred[None]:
        """Take no more transports; those that are open stay."""
        if self._listening:
            self._listening = False
            self.client.remove_port(self)
            self.factory.doStop()
        return succeed(None)

    def getHost(self) -> IAddress:
        """The key and the service that are listened on, as a ``DmsgAddress``."""
        return cast(IAddress, DmsgAddress(self.client.public_key, self.service))

    def open(self, session: ServerSession, stream: Stream) -> None:
        """Give an open stream to the application."""
        peer = DmsgAddress(stream.remote, "", session.server)
        try:
            protocol = self.factory.buildProtocol(cast(IAddress, peer)) if self._listening else None
        except Exception:  # an application may raise anything; it costs it this one transport
            _log.failure("Unhandled error in {factory}.buildProtocol", factory=self.factory)
            protocol = None
        if protocol is None:
            session.abort_stream(stream, CloseReason.REFUSED)
            return
        transport = session.transport(stream, self.service)
        self.client.transport_opened(session, transport)
        transport.attach(protocol)
