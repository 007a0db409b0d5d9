"""What endpoints need of a protocol's client, of its transports and of its ports."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IProtocol, IReactorTime


class Transport(TypingProtocol):
    """An open transport to a peer; what the peer sends waits until a protocol is attached."""

    #: Called once when it is over and its protocol knows.
    on_over: Callable[[], object] | None

    def getPeer(self) -> Any:
        """The peer's address."""

    def attach(self, protocol: IProtocol) -> None:
        """Connect ``protocol`` to it."""

    def abortConnection(self) -> None:
        """End it at once."""


class Port(TypingProtocol):
    """A port that a client listens on."""

    def stopListening(self) -> Deferred[None]:
        """Take no more transports; those that are open go on."""

    def getHost(self) -> Any:
        """The address it is reached under."""


class Client(TypingProtocol):
    """A client that keeps connections to relays."""

    #: Called for each transport that is opened, and for each that is over once its protocol knows.
    hold: Callable[[], object] | None
    release: Callable[[], object] | None

    @property
    def scheme(self) -> str:
        """What addresses of its protocol begin with."""

    @property
    def reactor(self) -> IReactorTime:
        """Its clock."""

    @property
    def dial(self) -> Callable[..., Awaitable[Transport]]:
        """``dial(public_key, service, *, timeout_s, …)``: an open transport, without a protocol.

        Raises ``DialError``; cancelling undoes it. What else can be said is the protocol's own, as in :attr:`listen`.
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
        """What keeps it from that, for people, if it is known."""


C = TypeVar("C", bound=Client)
C_co = TypeVar("C_co", bound=Client, covariant=True)


class ClientSource(TypingProtocol[C_co]):
    """Where an endpoint gets its client from."""

    @property
    def reactor(self) -> IReactorTime:
        """Its clock."""

    async def acquire(self) -> C_co:
        """A running client, held until :meth:`release`."""

    def release(self) -> Deferred[None]:
        """Give up one hold. Fires when the client has stopped, or at once if something else holds it."""


class Borrowed(ClientSource[C]):
    """A :class:`ClientSource` over a client that its owner starts and stops."""

    def __init__(self, client: C) -> None:
        self._client = client

    @classmethod
    def unless_source(cls, client: C | ClientSource[C]) -> ClientSource[C]:
        """``client`` itself if it is a source already."""
        either: Any = client
        source: ClientSource[C] = cls(either) if hasattr(either, "startService") else either
        return source

    @property
    def reactor(self) -> IReactorTime:
        """The client's."""
        return self._client.reactor

    async def acquire(self) -> C:
        """The client."""
        return self._client

    def release(self) -> Deferred[None]:
        """Nothing."""
        return succeed(None)
