"""Why the messaging protocol refuses or ends; all data is in attributes."""

from __future__ import annotations

from enum import Enum
from typing import Final

from dmsg.errors import DmsgError, RemoteProtocolError


class LinkRefused(RemoteProtocolError):
    """The relay says ``accepted: false`` in the link handshake: it does not want this client."""

    def __init__(self) -> None:
        super().__init__("handshake", "refused by server")


class ChannelEndReason(Enum):
    """Why a channel is over. The values are short fixed texts for logs."""

    #: This side closed it, and the other side knows or had its time to answer.
    NORMAL = "normal"
    #: The peer closed it.
    CLOSED_BY_PEER = "closed by peer"
    #: ChannelClosed came for an open channel: the peer or the relay has dropped it.
    PEER_GONE = "peer_gone"
    #: The peer or the relay did not want it.
    REFUSED = "refused"
    #: The peer's answer is not that of the key that was dialled.
    HANDSHAKE = "message 2 does not open"
    #: The peer answers as clients of other dialects do: with an id of its own, or without one.
    DIALECT = "unsupported"
    #: Something between the two ends dropped, repeated, reordered or altered a ciphertext, or acknowledged other data.
    INTEGRITY = "integrity"
    #: A frame or plaintext of this channel is not well formed.
    MALFORMED = "malformed"
    #: The application did not take received data, and too much of it waited.
    SLOW_CONSUMER = "slow_consumer"
    #: A deadline set on the transport passed without progress.
    DEADLINE = "deadline"
    #: All numbers that the dialect has for the ciphertexts of one direction are used.
    EXHAUSTED = "NonceExhausted"


#: Reason -> exception class; :attr:`ChannelEndReason.NORMAL` and ``CLOSED_BY_PEER`` are no faults.
END_ERRORS: Final[dict[ChannelEndReason, type[ChannelError]]] = {}


class ChannelError(DmsgError):
    """Base of the faults of a channel; ``reason`` is for logs. One subclass for each reason."""

    reason = ChannelEndReason.NORMAL

    def __init_subclass__(cls, *, reason: ChannelEndReason) -> None:
        """Make ``cls`` the exception of ``reason``."""
        cls.reason = reason
        END_ERRORS[reason] = cls

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self.reason.value)


class PeerGone(ChannelError, reason=ChannelEndReason.PEER_GONE):
    """The peer or the relay dropped the channel."""


class ChannelRefused(ChannelError, reason=ChannelEndReason.REFUSED):
    """The peer does not accept the channel, or the relay has no such client."""


class HandshakeFailed(ChannelError, reason=ChannelEndReason.HANDSHAKE):
    """The answer to a dial was not made with the key that was dialled, or an offer not with the key that it names."""


class OtherDialect(ChannelError, reason=ChannelEndReason.DIALECT):
    """The peer speaks another dialect. That shows only where one side has ids of its own and the other has not."""

    def __init__(self) -> None:
        super().__init__("the peer speaks another dialect: both ends have to be set to the same one")


class IntegrityError(ChannelError, reason=ChannelEndReason.INTEGRITY):
    """Something between the two ends dropped, repeated, reordered, injected or altered ciphertexts."""


class Malformed(ChannelError, reason=ChannelEndReason.MALFORMED):
    """The peer sent something that is not well formed."""


class SlowConsumer(ChannelError, reason=ChannelEndReason.SLOW_CONSUMER):
    """More data came than may wait for the application."""


class ChannelDeadline(ChannelError, reason=ChannelEndReason.DEADLINE):
    """A deadline set on the transport passed without progress."""


class NumbersUsedUp(ChannelError, reason=ChannelEndReason.EXHAUSTED):
    """This side has sent as many Sends as the dialect has numbers for: 4,294,967,295 in v5. A new channel begins at 1 again."""

    def __init__(self) -> None:
        super().__init__("all numbers of the channel are used up; a new channel has new ones")


class NoServices(DmsgError):
    """A service was asked for by name: a listener of this protocol has only one, without a name."""


class NoFreeChannel(DmsgError):
    """All ids that a client may give to channels of one link are taken."""


class WriteOverflow(DmsgError):
    """More was written to a channel than may wait to be sent: the writer did not pause."""


def end_error(reason: ChannelEndReason) -> ChannelError | None:
    """The exception for ``reason``; ``None`` for an orderly end."""
    cls = END_ERRORS.get(reason)
    return cls() if cls is not None else None


class ChannelFault(Exception):
    """Something that this channel cannot have got from an honest peer over an honest relay. It never leaves the core."""

    def __init__(self, reason: ChannelEndReason) -> None:
        super().__init__(reason.value)
        self.reason = reason
