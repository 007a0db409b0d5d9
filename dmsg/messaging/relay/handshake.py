"""A stranger's link handshake at a relay (:ref:`spec-messaging-handshake`), which takes a token of its address. Pure."""

from __future__ import annotations

from collections.abc import Callable

from dmsg.crypto.keys import Random, SecretKey
from dmsg.errors import RemoteProtocolError
from dmsg.messaging.core.events import Event
from dmsg.messaging.core.link import LinkFrame, LinkResponder
from dmsg.messaging.relay.limits import RelayLimits


class StrangerHandshake(LinkResponder):
    """The relay's side of a link handshake (a :class:`dmsg.serving.shell.StrangerCore`).

    ``take`` is called with the time when the first byte comes. It takes the tokens of a handshake, and gives the name of the
    limit that refuses it, or "".
    """

    __slots__ = ("_silent_until", "_take", "messages")

    #: Answers are made at once: a signature costs little.
    answer_due = False

    def __init__(
        self, key: SecretKey, limits: RelayLimits, take: Callable[[float], str], *, now: float, random: Random
    ) -> None:
        super().__init__(key, now=now, timeout_s=limits.handshake_timeout_s, random=random)
        self._take: Callable[[float], str] | None = take
        self._silent_until: float | None = now + limits.first_byte_timeout_s
        #: Objects that were handled: each costs a signature, or the verification of one.
        self.messages = 0

    def heard(self) -> None:
        """The client has sent something: it is not silent, even if its data is handled only later."""
        self._silent_until = None

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Take bytes from the network; raises ``RemoteProtocolError`` also for a stranger that is turned away."""
        self.heard()
        take, self._take = self._take, None
        refusal = take(now) if take is not None else ""
        if refusal:
            raise RemoteProtocolError("accept", refusal)
        return super().receive_data(data, now)

    def next_timeout(self) -> float | None:
        """When :meth:`handle_timeout` wants to be called, or ``None``."""
        return super().next_timeout() if self._silent_until is None else self._silent_until

    def handle_timeout(self, now: float) -> list[Event]:
        """The end of the pause before the first frame; ``RemoteProtocolError`` for a client that is silent or slow."""
        if self._silent_until is not None and now >= self._silent_until:
            self._silent_until = None
            raise RemoteProtocolError("handshake", "silent")
        return super().handle_timeout(now)

    def _on_frame(self, frame: LinkFrame) -> None:
        self.messages += 1
        super()._on_frame(frame)
