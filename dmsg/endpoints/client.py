"""The interfaces of a protocol's client, transports and ports for endpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IProtocol, IReactorTime


class Transport(TypingProtocol):
    """An open transport to a peer; data of the peer is buffered until a protocol is attached."""

    #: Called once when it has ended and its protocol was told.
    on_over: Callable[[], object] | None

    def getPeer(self) -> Any:
        """The peer's address."""

    def attach(self, protocol: IProtocol) -> None:
        """Connect ``protocol`` to it."""

    def abortConnection(self) -> None:
        """End it at once."""


class Port(TypingProtocol):
    """A port that a client listens on."""

    def startListening(self) -> None:
        """Listen again after :meth:`stopListening`, or after the client has stopped; nothing happens while it listens."""

    def stopListening(self) -> Deferred[None]:
        """Accept no more transports; open transports go on."""

    def getHost(self) -> Any:
        """The address under which it can be reached."""


class Client(TypingProtocol):
    """A client that keeps connections to relays."""

    #: Called for each transport that is opened; and for each that has ended, after its protocol was told.
    hold: Callable[[], object] | None
    release: Callable[[], object] | None

    @property
    def scheme(self) -> str:
        """The prefix of addresses of its protocol."""

    @property
    def reactor(self) -> IReactorTime:
        """Its clock."""

    @property
    def dial(self) -> Callable[..., Awaitable[Transport]]:
        """``dial(public_key, service, *, timeout_s, …)``: an open transport, without a protocol.

        Raises ``DialError``; cancelling undoes it. Further arguments depend on the protocol, as in :attr:`listen`.
        """

    @property
    def listen(self) -> Callable[..., Port]:
        """``listen(factory, service, *, policy, limits, …)``: a port that listens. Raises ``CannotListenError``."""

    def startService(self) -> None:
        """Begin to connect."""

    def stopService(self) -> Deferred[None]:
        """End everything; fires when it has."""

    def when_ready(self) -> Deferred[None]:
        """Fires once peers can reach it."""

    @property
    def problem(self) -> str:
        """Why peers cannot reach it yet, for people, if the reason is known."""


C = TypeVar("C", bound=Client)
C_co = TypeVar("C_co", bound=Client, covariant=True)


class ClientSource(TypingProtocol[C_co]):
    """The source from which an endpoint gets its client."""

    @property
    def reactor(self) -> IReactorTime:
        """Its clock."""

    @property
    def shutting_down(self) -> bool:
        """Whether the client ends because the reactor shuts down."""

    async def acquire(self) -> C_co:
        """A running client, held until :meth:`release`."""

    def release(self) -> Deferred[None]:
        """Release one hold. Fires when the client has stopped, or at once if something else holds it."""


class Borrowed(ClientSource[C]):
    """A :class:`ClientSource` over a client that its owner starts and stops."""

    def __init__(self, client: C) -> None:
        self._client = client

    @classmethod
    def unless_source(cls, client: C | ClientSource[C]) -> ClientSource[C]:
        """A source over ``client``, or ``client`` itself if it is a source already."""
        either: Any = client
        source: ClientSource[C] = cls(either) if hasattr(either, "startService") else either
        return source

    @property
    def reactor(self) -> IReactorTime:
        """The client's."""
        return self._client.reactor

    @property
    def shutting_down(self) -> bool:
        """Never: its owner ends the client."""
        return False

    async def acquire(self) -> C:
        """The client."""
        return self._client

    def release(self) -> Deferred[None]:
        """Do nothing."""
        return succeed(None)
