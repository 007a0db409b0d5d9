"""The errors and refusals of the Reliable Message Bus; all data is in attributes. Pure.

Texts that go over the wire are those of the public programs, whose users tell problems apart by them. The codes are
listed in :ref:`spec-rmb-problems`.
"""

from __future__ import annotations

from enum import Enum, IntEnum

from dmsg.errors import DmsgError, LocalProtocolError, RemoteProtocolError


class PeerCode(IntEnum):
    """The ``code`` of an error with which a receiver answers; the public peer knows 100 to 106 and 500."""

    WRONG_PAYLOAD_TYPE = 100
    WRONG_PAYLOAD = 101
    INVALID = 102
    UNKNOWN_TWIN = 103
    BAD_SIGNATURE = 104
    NO_SENDER_KEY = 105
    ENCRYPTION = 106
    #: Ours: the receiver takes encrypted messages only.
    PLAIN_REFUSED = 107
    #: Ours: no such command here.
    UNKNOWN_COMMAND = 108
    #: Ours: the receiver has reached its limit of requests under way.
    BUSY = 109
    #: A handler of the Go and Python programs raised an error.
    HANDLER_FAILED = 255
    OTHER = 500


class RelayProblem(Enum):
    """Why a relay does not deliver: ``code`` is ours (the public relay always sends 0), ``text`` the public relay's."""

    RATE_LIMITED = 120, "exceeded rate limits, dropping message"
    WRONG_SOURCE = 121, "message wrong source"
    NO_DESTINATION = 122, "message with missing destination"
    UNKNOWN_TWIN = 123, "unknown twin destination"
    NO_RELAYS = 124, "relay info is not set for this twin"
    OFFLINE = 125, "destination offline"
    EXPIRED = 126, "message has expired"
    REJECTED = 127, "remote relay rejected permanently: destination offline"
    UNKNOWN_TWIN_LATER = 128, "remote relay rejected permanently: self twin not found!"
    NO_RELAYS_LATER = 129, "remote relay rejected permanently: relay is not set for this twin"
    NOT_STORED = 130, "failed to route message to peer"
    REGISTRY_FAILED = 131, "failed to get twin information"
    TOO_LARGE = 132, "message is too large"
    OVERLOADED = 133, "relay is overloaded, try again later"

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        self.text = text

    @classmethod
    def is_certain(cls, text: str) -> bool:
        """Whether a relay that answers ``text`` has certainly not passed the envelope on.

        It is not certain for a failed routing, an overload, an expired message or an unknown text: another relay may have
        received the envelope without confirming it.
        """
        return any(text == one.text for one in cls if one not in (cls.NOT_STORED, cls.OVERLOADED, cls.EXPIRED))


class LibraryMissing(DmsgError, ImportError):
    """``library``, which the extra ``rmb`` installs, is missing or too old."""

    def __init__(self, library: str, problem: str = "is missing") -> None:
        super().__init__(f"{library} {problem}: install dmsg[rmb]")
        self.library = library


class InvalidTwin(DmsgError, ValueError):
    """A value that cannot be the number, the account, a relay or the encryption key of a twin."""


class InvalidLimit(DmsgError, ValueError):
    """A rate limit that is not two numbers."""


class InvalidSecret(DmsgError, ValueError):
    """A text that is not the secret of a twin: neither a BIP-39 phrase, nor 0x and 64 hex digits."""


class InvalidMessage(DmsgError, ValueError):
    """A malformed JSON message of a local program. ``problem`` is the reason, ``reply_to`` and ``reference`` who to tell."""

    def __init__(self, problem: str, reply_to: str = "", reference: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.reply_to = reply_to
        self.reference = reference


class NoReceiverKey(DmsgError):
    """The receiver has published no key, so the payload would go in plain text, which is not allowed here."""

    def __init__(self) -> None:
        super().__init__("the receiver has published no key, and plain text is not allowed")


class EnvelopeTooLarge(LocalProtocolError):
    """An envelope of ``size`` bytes, more than relays accept."""

    def __init__(self, size: int) -> None:
        super().__init__(f"an envelope of {size} bytes is too large")
        self.size = size


class TokenRefused(RemoteProtocolError):
    """A relay refuses this token: the HTTP ``status`` and the ``text`` of the answer's body."""

    def __init__(self, status: int, text: str, reason: str) -> None:
        super().__init__("token", reason)
        self.status = status
        self.text = text


class MalformedEnvelope(RemoteProtocolError):
    """Bytes that are not an envelope: they are not protobuf, or a text in them is not UTF-8."""

    def __init__(self) -> None:
        super().__init__("envelope", "malformed")


class EnvelopeRefused(RemoteProtocolError):
    """An envelope that the receiver does not hand on. ``reason`` is for logs.

    ``code`` and ``text`` are the answer to the sender of a request. With a ``code`` of ``None`` there is no answer: it
    would go to a twin that did not send the request, or tell an attacker something new.
    """

    def __init__(self, reason: str, code: PeerCode | None = None, text: str = "") -> None:
        super().__init__("envelope", reason)
        self.code = code
        self.text = text


class EnvelopeExpired(EnvelopeRefused):
    """The envelope has expired, or its stamp is too far in the future."""

    def __init__(self) -> None:
        super().__init__("expired", PeerCode.INVALID, "envelope validation error: message has expired")


class UnknownSource(EnvelopeRefused):
    """The registry does not have the twin that the envelope names as its source."""

    def __init__(self, twin: int) -> None:
        super().__init__("unknown twin", PeerCode.UNKNOWN_TWIN, f"unknown twin id '{twin}'")
        self.twin = twin


class BadSignature(EnvelopeRefused):
    """Not signed by the account. ``problem`` says what is wrong with the signature."""

    def __init__(self, problem: str) -> None:
        super().__init__("bad signature", PeerCode.BAD_SIGNATURE, f"invalid envelope signature: {problem}")
        self.problem = problem


class NoSenderKey(EnvelopeRefused):
    """Encrypted by a twin that has published no key."""

    def __init__(self) -> None:
        super().__init__("no sender key", PeerCode.NO_SENDER_KEY, "sender twin has no public key")


class E2eError(EnvelopeRefused):
    """Encryption or decryption failed. ``problem`` says why."""

    def __init__(self, problem: str) -> None:
        super().__init__("encryption", PeerCode.ENCRYPTION, f"e2e error: {problem}")
        self.problem = problem


class NoKeyHere(E2eError):
    """The receiver has published no key: it cannot decrypt, and its answer could not be encrypted."""

    def __init__(self) -> None:
        super().__init__("receiver twin has no public key")


class PlainRefused(EnvelopeRefused):
    """Not encrypted, though both sides have keys: the signing key alone must not be enough to impersonate the twin."""

    def __init__(self) -> None:
        super().__init__("plain", PeerCode.PLAIN_REFUSED, "plain payload refused: encrypt to the key in the registry")


class UnsignedSource(EnvelopeRefused):
    """From twin 0, but not an error about a message that awaits an answer: anyone could have made it."""

    def __init__(self) -> None:
        super().__init__("unsigned source")


class WrongDestination(EnvelopeRefused):
    """Addressed to another session. A relay or an eavesdropper has brought it here."""

    def __init__(self) -> None:
        super().__init__("wrong destination")


class Replayed(EnvelopeRefused):
    """Seen before."""

    def __init__(self) -> None:
        super().__init__("replayed")


class NoMessage(EnvelopeRefused):
    """Neither a request nor an answer to one."""

    def __init__(self) -> None:
        super().__init__("no message")


class OverlongText(EnvelopeRefused):
    """A ``field`` of the envelope is longer than receivers accept."""

    def __init__(self, field: str) -> None:
        super().__init__(f"overlong {field}")
        self.field = field
