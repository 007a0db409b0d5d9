"""Who a stream belongs to: the shell's object behind it, which the core never calls. Pure."""

from __future__ import annotations

from typing import Final

from dmsg.errors import DmsgError


class StreamOwner:
    """What stands behind a stream, a Twisted transport for example. Each method tells a fact; by default it is ignored."""

    def deliver(self, data: bytes) -> None:
        """Bytes came."""

    def ended(self, code: int, *, local: bool, proven: bool = False) -> None:
        """The stream is over; ``proven`` says that the peer itself signed off, not only the relay."""

    def lost(self, error: DmsgError, code: int) -> None:
        """What carried the stream is gone."""

    def accepted(self, message: bytes) -> None:
        """The peer accepted."""

    def upgraded(self, message: bytes) -> None:
        """The peer's handshake message came behind the ACCEPT."""

    def confirmed(self) -> None:
        """The peer has proved itself."""

    def crowded_out(self) -> None:
        """A later attempt to resume the same transport has taken the place of this one."""

    def end_received(self) -> None:
        """Nothing more will come."""

    def end_acked(self) -> None:
        """Everything that was sent has arrived, its end included."""

    def writable(self) -> None:
        """More may be written."""


#: The owner of streams that have none.
UNOWNED: Final = StreamOwner()
