"""Listening ports of a client: who may come in, and what protocol they meet."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, cast

from twisted.internet.defer import Deferred, ensureDeferred, maybeDeferred, succeed
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IAddress, IListeningPort
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.address import DmsgAddress
from dmsg.crypto.keys import PublicKey
from dmsg.interfaces import IAccessPolicy
from dmsg.mux.stream import Stream, StreamState
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
    """Where transports come in. At most ``backlog`` requests wait for the access policy at a time (D22)."""

    def __init__(
        self,
        client: DmsgClient,
        factory: Factory,
        service: str = "",
        *,
        policy: IAccessPolicy | None = None,
        backlog: int = DEFAULT_BACKLOG,
    ) -> None:
        self.client = client
        self.factory = factory
        self.service = service
        self.policy = policy
        self.backlog = backlog
        self._deciding: dict[Stream, Deferred[object]] = {}
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
            for decision in list(self._deciding.values()):
                decision.cancel()
            self.factory.doStop()
        return succeed(None)

    def getHost(self) -> IAddress:
        """The key and the service that are listened on, as a ``DmsgAddress``."""
        return cast(IAddress, DmsgAddress(self.client.public_key, self.service))

    def requested(self, session: ServerSession, stream: Stream) -> None:
        """Decide on an offered stream."""
        if self.policy is None:
            self._admit(session, stream)
        elif len(self._deciding) >= self.backlog:
            session.refuse(stream, CloseReason.BUSY)
        else:
            self._ask(session, stream, self.policy)

    def withdrawn(self, stream: Stream) -> None:
        """The peer gave up before the policy answered."""
        decision = self._deciding.pop(stream, None)
        if decision is not None:
            decision.cancel()

    def _ask(self, session: ServerSession, stream: Stream, policy: IAccessPolicy) -> None:
        def call() -> object:
            answer = policy.allow(stream.remote, self.service)
            return ensureDeferred(answer) if isinstance(answer, Coroutine) else answer

        decision: Deferred[object] = maybeDeferred(call)
        self._deciding[stream] = decision

        def decided(allowed: object) -> None:
            self._deciding.pop(stream, None)
            if stream.state is not StreamState.OFFERED:
                return
            if allowed is True:
                self._admit(session, stream)
            else:
                session.refuse(stream, CloseReason.ACCESS_DENIED)

        def failed(failure: Failure) -> None:
            self._deciding.pop(stream, None)
            if stream.state is not StreamState.OFFERED:
                return
            if self._listening:
                _log.failure("The access policy failed; access is denied", failure=failure)
            session.refuse(stream, CloseReason.ACCESS_DENIED)

        decision.addCallbacks(decided, failed)

    def _admit(self, session: ServerSession, stream: Stream) -> None:
        peer = DmsgAddress(stream.remote, "", session.server)
        try:
            protocol = self.factory.buildProtocol(cast(IAddress, peer))
        except Exception:
            # an application's fault costs it this one transport
            _log.failure("Unhandled error in {factory}.buildProtocol", factory=self.factory)
            protocol = None
        if protocol is None:
            session.refuse(stream, CloseReason.REFUSED)
            return
        session.accept(stream)
        transport = session.transport(stream, self.service)
        self.client.transport_opened(session, transport)
        transport.attach(protocol)
