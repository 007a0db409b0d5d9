"""Why the mux protocol refuses or ends: an exception for each CLOSE code, and those for connections."""

from __future__ import annotations

from typing import ClassVar, Final

from dmsg.errors import DmsgError
from dmsg.foreign import quoted
from dmsg.mux.core.wire import CloseReason, reason_name
from dmsg.relays.errors import RelayFault

#: The texts (TLV ``reason``) with which relays refuse a connection, and the one that stands for all others.
SERVER_REFUSALS: Final = ("server_draining", "too many connections", "connections_per_address")
REFUSED_BY_SERVER: Final = "refused by server"


#: CLOSE code -> exception class. 0 (normal) and codes we do not know map to :class:`TransportClosed` itself.
CLOSE_ERRORS: Final[dict[int, type[TransportClosed]]] = {}


class TransportClosed(DmsgError):
    """Base of the reasons for the end of a transport, or of a request for one; one subclass for each CLOSE code.

    ``code`` is the byte of the CLOSE frame (:ref:`spec-close-reasons`), ``name`` its name there. ``by`` says who ended
    it: ``"local"``, or ``"peer"`` (the peer or the relay: without end-to-end security nobody can tell which).
    """

    code: ClassVar[int] = int(CloseReason.NORMAL)
    name: ClassVar[str] = reason_name(CloseReason.NORMAL)

    def __init_subclass__(cls, *, reason: CloseReason) -> None:
        """Make ``cls`` the exception of ``reason``; each has one."""
        assert reason not in CLOSE_ERRORS, f"CLOSE code {reason} has an exception already"
        cls.code, cls.name = int(reason), reason_name(reason)
        CLOSE_ERRORS[cls.code] = cls

    def __init__(self, message: str = "", *, by: str = "peer") -> None:
        super().__init__(message or self.name.replace("_", " "))
        self.by = by


class Refused(TransportClosed, reason=CloseReason.REFUSED):
    """The peer does not accept this transport."""


class UnknownPeer(TransportClosed, reason=CloseReason.UNKNOWN_PEER):
    """The relay has no connection with that key."""


class Busy(TransportClosed, RelayFault, reason=CloseReason.BUSY):
    """A limit on open transports or queued bytes is reached."""


class RateLimited(TransportClosed, RelayFault, reason=CloseReason.RATE_LIMITED):
    """Requests came faster than the relay allows."""


class SlowConsumer(TransportClosed, reason=CloseReason.SLOW_CONSUMER):
    """The receiving side did not take its data for too long, or too much data waited for it."""


class Abuse(TransportClosed, reason=CloseReason.ABUSE):
    """Too many frames that belong to no transport."""


class BadTransportId(TransportClosed, reason=CloseReason.BAD_ID):
    """The transport id has the wrong parity or is in use."""


class Malformed(TransportClosed, reason=CloseReason.MALFORMED):
    """A frame of this transport was not well formed, or came in the wrong state."""


class DowngradeRefused(TransportClosed, reason=CloseReason.DOWNGRADE):
    """A peer whose signed entry promises end-to-end security was about to be spoken to in the clear."""


class Unsupported(TransportClosed, reason=CloseReason.UNSUPPORTED):
    """The other side or its relay does not know this extension."""


class HandshakeTimeout(TransportClosed, RelayFault, reason=CloseReason.HANDSHAKE_TIMEOUT):
    """The peer did not answer or confirm in time."""


class IntegrityError(TransportClosed, RelayFault, reason=CloseReason.INTEGRITY):
    """Something between the two ends dropped, repeated, reordered, injected or altered frames."""


class PeerGone(TransportClosed, reason=CloseReason.PEER_GONE):
    """The peer's connection to the relay ended."""


class ServerDraining(TransportClosed, RelayFault, reason=CloseReason.SERVER_DRAINING):
    """The relay is going down."""


class DeadlineExceeded(TransportClosed, reason=CloseReason.DEADLINE):
    """A deadline set on the transport passed without progress."""


class AccessDenied(TransportClosed, reason=CloseReason.ACCESS_DENIED):
    """The listener's access policy does not admit this key, or nothing listens there: strangers are not told which."""


class NoSuchService(TransportClosed, reason=CloseReason.NO_SUCH_SERVICE):
    """Nothing listens there under that service name."""


def close_error(code: int, message: str = "", *, by: str = "peer") -> TransportClosed:
    """The exception for CLOSE ``code``; unknown codes give a plain :class:`TransportClosed` that names the number."""
    cls = CLOSE_ERRORS.get(code, TransportClosed)
    if cls is TransportClosed and code:
        message = message or f"closed with unknown reason {code}"
    return cls(message, by=by)


def refusal_reason(text: str) -> str:
    """The reason for a relay's own words: one of :data:`SERVER_REFUSALS`, or :data:`REFUSED_BY_SERVER`."""
    return text if text in SERVER_REFUSALS else REFUSED_BY_SERVER


class ConnectionRefusedByServer(DmsgError):
    """The relay finished the handshake, then refused the connection: ``reason`` is :func:`refusal_reason`."""

    def __init__(self, text: str) -> None:
        self.reason = refusal_reason(text)
        super().__init__(f"the server refused the connection: {text if text == self.reason else quoted(text)}")

    @property
    def own_text(self) -> str:
        """The reason, as :func:`refusal_reason` gives it."""
        return self.reason
