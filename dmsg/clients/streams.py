"""What a client looks at in the streams that carry its transports. Pure."""

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
        """Whether this side asked for it."""

    @property
    def sent_bytes(self) -> int:
        """What was sent."""

    @property
    def acked_bytes(self) -> int:
        """What the peer has taken of that, as far as it tells."""

    @property
    def received_bytes(self) -> int:
        """What the peer has sent."""
