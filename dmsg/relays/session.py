"""A client's connection to one relay, of any protocol, as the pool keeps it."""

from __future__ import annotations

from typing import Any, Final, TypeVar
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocol

from dmsg.crypto.keys import PublicKey

#: ``reason`` of the error of a session that this side ended because it was not needed any more, so not because of the relay.
CLOSED: Final = "closed"


class Session(TypingProtocol):
    """One connection to one relay. The protocol that makes it does the handshake, and tells the pool when it is lost.

    It is made once there is a connection.
    """

    #: When the pool began to connect, in seconds on its clock.
    started_at: float

    @property
    def server(self) -> PublicKey:
        """The relay's key."""

    @property
    def shell(self) -> IProtocol:
        """The protocol that is connected to the relay's address."""

    @property
    def ready(self) -> Deferred[Any]:
        """Fires once the relay has admitted this client; fails with a ``StageError``. Cancelling ends the connection."""

    @property
    def ready_at(self) -> float:
        """When the relay admitted this client, in seconds on the pool's clock."""

    @property
    def spent(self) -> bool:
        """Whether nothing is open on it and nothing should be opened: the next use needs a new session."""

    @property
    def idle(self) -> bool:
        """Whether nothing is open on it and nothing is requested."""

    def close(self) -> None:
        """End the connection once everything queued is written."""


S = TypeVar("S", bound=Session)
