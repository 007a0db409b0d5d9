"""The interface of the streams that carry a client's transports. Pure."""

from __future__ import annotations

from typing import Protocol as TypingProtocol

from dmsg.crypto.keys import PublicKey


class CarriedStream(TypingProtocol):
    """The stream under a transport."""

    @property
    def id(self) -> int:
        """Its number on the connection to the relay."""

    @property
    def remote(self) -> PublicKey:
        """The peer."""

    @property
    def initiator(self) -> bool:
        """Whether this side requested it."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that were sent."""

    @property
    def acked_bytes(self) -> int:
        """Bytes of those that the peer has acknowledged."""

    @property
    def received_bytes(self) -> int:
        """Bytes that the peer has sent."""
