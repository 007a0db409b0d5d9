"""The state of one channel at one of its ends (:ref:`spec-messaging-channels`): counts and ciphers, not a socket.

:class:`~dmsg.messaging.core.connection.Connection` moves its frames.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, Final

from dmsg.crypto.errors import CryptoError
from dmsg.crypto.keys import PublicKey
from dmsg.crypto.noise import HandshakeResult, NoiseHandshake
from dmsg.errors import DmsgError
from dmsg.messaging.core.ack import PAYLOAD_HEADER_BYTES, AckLayer
from dmsg.messaging.core.channel_cipher import ChannelCipher, channel_cipher
from dmsg.messaging.core.dialect import Dialect
from dmsg.messaging.core.errors import ChannelEndReason, ChannelFault
from dmsg.messaging.core.wire import CIPHERTEXT_LIMIT_BYTES, LENGTH_BYTES
from dmsg.sansio.buffer import ByteQueue


class ChannelState(Enum):
    """Where a channel is in its life."""

    __hash__ = object.__hash__  # identity is enough, and the hash of Enum is a function in Python

    OPENING = "opening"  # our OpenChannel is out
    ABANDONED = "abandoned"  # as before, and the application has given up
    OFFERED = "offered"  # the peer's OpenChannel waits for our decision
    OPEN = "open"
    CLOSING = "closing"  # our application has closed; what it wrote is still to be sent or acknowledged
    HALF_CLOSED = "half_closed"  # our CloseChannel is out; only the peer may send
    CLOSED = "closed"


#: The states that may follow each state; the state diagram in the documentation is drawn from this.
TRANSITIONS: Final[dict[ChannelState, frozenset[ChannelState]]] = {
    ChannelState.OPENING: frozenset({ChannelState.ABANDONED, ChannelState.OPEN, ChannelState.CLOSED}),
    ChannelState.ABANDONED: frozenset({ChannelState.CLOSED}),
    ChannelState.OFFERED: frozenset({ChannelState.OPEN, ChannelState.CLOSED}),
    ChannelState.OPEN: frozenset({ChannelState.CLOSING, ChannelState.HALF_CLOSED, ChannelState.CLOSED}),
    ChannelState.CLOSING: frozenset({ChannelState.HALF_CLOSED, ChannelState.CLOSED}),
    ChannelState.HALF_CLOSED: frozenset({ChannelState.CLOSED}),
    ChannelState.CLOSED: frozenset(),
}

#: States in which the peer may send, and those in which we may.
RECEIVING: Final = (ChannelState.OPEN, ChannelState.CLOSING, ChannelState.HALF_CLOSED)
SENDING: Final = (ChannelState.OPEN, ChannelState.CLOSING)


class ChannelOwner:
    """The owner of a channel, for example a Twisted transport. The core never calls it.

    Each method reports a fact; by default the fact is ignored.
    """

    def deliver(self, data: bytes) -> None:
        """Bytes came."""

    def opened(self, channel: Channel) -> None:
        """The peer has accepted."""

    def ended(self, reason: ChannelEndReason, *, local: bool) -> None:
        """The channel is over; ``local`` tells whether this side ended it."""

    def lost(self, error: DmsgError) -> None:
        """The link that carried the channel is gone."""

    def writable(self) -> None:
        """More may be written."""


#: The owner of channels that have none.
UNOWNED: Final = ChannelOwner()


class Channel:
    """One end of a channel. ``sent_bytes``, ``acked_bytes`` and ``received_bytes`` are offsets in the two byte streams."""

    __slots__ = (
        "_acks",
        "_tail",
        "blocked",
        "cut_bytes",
        "discarding",
        "dropped",
        "handshake",
        "id",
        "initiator",
        "offer",
        "opener",
        "owner",
        "payload_limit_bytes",
        "pending",
        "queued",
        "received_bytes",
        "remote",
        "sealer",
        "send_id",
        "sent_bytes",
        "state",
        "unread_bytes",
    )

    #: Encrypted from end to end, whatever the dialect.
    security: ClassVar[str] = "e2e"

    sealer: ChannelCipher
    opener: ChannelCipher

    def __init__(
        self,
        channel_id: int,
        send_id: int | None,
        remote: PublicKey,
        handshake: NoiseHandshake | None,
        *,
        initiator: bool,
    ) -> None:
        self.id = channel_id  # in received frames
        self.send_id = send_id  # in sent frames; None as long as it is not known
        self.remote = remote
        self.initiator = initiator
        self.state = ChannelState.OPENING if initiator else ChannelState.OFFERED
        self.owner: ChannelOwner = UNOWNED
        self.handshake = handshake
        self.offer = b""  # the peer's first handshake message, which is read once its key is admitted
        self.pending = ByteQueue()
        self.queued = False  # whether it stands in the connection's queue of channels with something to send
        self.blocked = False  # whether its writer was told to pause
        self.discarding = False  # whether the application is done with it: data that comes is dropped
        self.dropped = False  # whether data was dropped because our application had closed
        self.sent_bytes = self.received_bytes = self.unread_bytes = 0
        self.cut_bytes = 0  # written, and not sent or not acknowledged when it ended
        self.payload_limit_bytes = 0
        self._acks: AckLayer | None = None
        self._tail = bytearray()  # the received part of a ciphertext that comes in several Sends

    def __repr__(self) -> str:
        return f"<Channel {self.id} {self.state.value} with {self.remote}>"

    def move(self, state: ChannelState) -> None:
        """Change to ``state``; a change that ``TRANSITIONS`` does not list is a bug of ours."""
        assert state in TRANSITIONS[self.state], (self.state, state)
        self.state = state

    def open(self, keys: HandshakeResult, dialect: Dialect) -> None:
        """The handshake is done."""
        self.handshake, self.offer = None, b""
        self.sealer = channel_cipher(keys.send_key, dialect)
        self.opener = channel_cipher(keys.receive_key, dialect)
        self.payload_limit_bytes = CIPHERTEXT_LIMIT_BYTES - self.sealer.overhead_bytes
        if dialect.acks:
            self._acks = AckLayer()
        self.move(ChannelState.OPEN)

    # --- sending ---------------------------------------------------------------------------------------------------

    @property
    def acked_bytes(self) -> int:
        """Bytes that the peer's application has taken, if the dialect tells; otherwise the bytes sent."""
        return self.sent_bytes if self._acks is None else self._acks.acked_bytes

    @property
    def drained(self) -> bool:
        """Whether everything written has been sent, and acknowledged if the dialect has that."""
        return not self.pending.size and (self._acks is None or self._acks.waiting_bytes is None)

    @property
    def may_close(self) -> bool:
        """Whether nothing has to go out before a CloseChannel: neither data nor an acknowledgement of received data."""
        return self.drained and (self._acks is None or not self._acks.is_owing)

    @property
    def sendable(self) -> bool:
        """Whether a Send could go out now."""
        if self.state not in SENDING:
            return False
        acks = self._acks
        if acks is None:
            return self.pending.size > 0
        return acks.has_due or (acks.waiting_bytes is None and self.pending.size > 0)

    def next_ciphertext(self) -> bytes:
        """What the next Send carries; call only while :attr:`sendable`. Raises ``NonceExhausted``."""
        acks = self._acks
        if acks is None:
            plaintext = self.pending.take(self.payload_limit_bytes)
            self.sent_bytes += len(plaintext)
        else:
            data = None
            if acks.waiting_bytes is None and self.pending.size:
                data = self.pending.take(self.payload_limit_bytes - PAYLOAD_HEADER_BYTES - acks.acks_bytes())
                self.sent_bytes += len(data)
            plaintext = acks.wrap(data)
        return self.sealer.seal(plaintext)

    # --- receiving -------------------------------------------------------------------------------------------------

    def receive_send(self, frames: bytes, start: int, end: int) -> bytes:
        """Take the payload of a Send, which is ``frames[start:end]``; gives the data in it. Raises ``ChannelFault``.

        The payloads of all Sends are one stream of lengths and ciphertexts. Go writes one of each in every Send.
        """
        if not self._tail and end - start > LENGTH_BYTES:
            first = start + LENGTH_BYTES
            if first + (frames[start] << 8 | frames[start + 1]) == end:
                return self._open(frames[first:end])
        tail = self._tail
        tail += frames[start:end]
        at, size, parts = 0, len(tail), []
        while size - at >= LENGTH_BYTES:
            first = at + LENGTH_BYTES
            last = first + (tail[at] << 8 | tail[at + 1])
            if last > size:
                break
            parts.append(self._open(bytes(tail[first:last])))
            at = last
        del tail[:at]
        return b"".join(parts)

    def _open(self, ciphertext: bytes) -> bytes:
        try:
            plaintext = self.opener.open(ciphertext)
        except CryptoError:
            raise ChannelFault(ChannelEndReason.INTEGRITY) from None
        data = plaintext if self._acks is None else self._acks.unwrap(plaintext)
        self.received_bytes += len(data)
        self.unread_bytes += len(data)
        return data

    def consumed(self, size: int) -> None:
        """The application took ``size`` received bytes."""
        self.unread_bytes -= size
        if self._acks is not None:
            self._acks.consumed(size)

    def drop(self) -> None:
        """Received data is dropped, because the application has closed the channel."""
        self.dropped = True

    # --- the end ---------------------------------------------------------------------------------------------------

    def discard(self) -> None:
        """Count what is cut off, and keep nothing but the counts."""
        self.cut_bytes += self.pending.size
        if self._acks is not None:
            self.cut_bytes += self._acks.waiting_bytes or 0
            self._acks.waiting_bytes = None
        self.pending.clear()
        self._tail.clear()
        self.handshake = None
