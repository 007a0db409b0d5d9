"""What a client needs of the sessions of its protocol."""

from __future__ import annotations

from typing import Any, TypeVar
from typing import Protocol as TypingProtocol

from dmsg.relays.session import Session


class ClientSession(Session, TypingProtocol):
    """A session that streams to peers go through."""

    def transport(self, stream: Any, service: str = "") -> Any:
        """The transport over an open stream, for ``service``."""

    def abort_stream(self, stream: Any) -> None:
        """End a stream at once, or refuse an offered one."""

    def turn_away(self, stream: Any, *, busy: bool) -> None:
        """End a stream that the application did not take: for want of room, or because it does not want it."""


S = TypeVar("S", bound=ClientSession)
