"""The errors that discovery answers with, and their HTTP statuses; errors of documents and of proofs of relays. Pure."""

from __future__ import annotations

from typing import ClassVar

from dmsg.errors import DmsgError


class DiscoveryError(DmsgError):
    """Base of discovery's answers. ``text`` is the reference's message, by which base clients distinguish them.

    ``status`` is the HTTP status on the paths described in 2019, ``reference_status`` the one on the reference's paths
    (:ref:`spec-discovery-http`).
    """

    text: ClassVar[str] = "something unexpected happened"
    status: ClassVar[int] = 500
    reference_status: ClassVar[int] = 500

    def __init__(self, detail: str = "") -> None:
        super().__init__(f"{self.text}: {detail}" if detail else self.text)
        self.detail = detail

    @property
    def own_text(self) -> str:
        """The reference's message, without discovery's own detail."""
        return self.text


class DiscoveryUnavailable(DiscoveryError):
    """Discovery could not be reached, took too long, or sent no valid answer.

    ``detail`` tells people which; the reference's text would tell them nothing.
    """

    def __str__(self) -> str:
        return self.detail or "no answer"


class EntryNotFound(DiscoveryError):
    """No entry is stored under that key (or no server is available).

    For a key whose entry has expired, discovery may say how to go on: ``next_sequence`` is the sequence it will accept,
    and the new timestamp must be later than ``after_timestamp`` (nanoseconds). Both are ``None`` for a key never seen.
    They are hints that no key has signed.
    """

    text, status, reference_status = "entry of public key is not found", 404, 404

    def __init__(self, *, next_sequence: int | None = None, after_timestamp: int | None = None) -> None:
        super().__init__()
        self.next_sequence = next_sequence
        self.after_timestamp = after_timestamp


class BadInput(DiscoveryError):
    """The request could not be understood."""

    text, status, reference_status = "error bad input", 400, 400


class Unauthorized(DiscoveryError):
    """The entry's signature is not its key's."""

    text, status, reference_status = "invalid signature", 401, 401


class RateLimitedByDiscovery(DiscoveryError):
    """Too many requests from one address."""

    text, status, reference_status = "too many requests", 429, 429


class ListingForbidden(DiscoveryError):
    """Discovery does not list relays for this client."""

    text, status, reference_status = "access is forbidden", 403, 403


class EntryRolledBack(DiscoveryError):
    """Discovery handed out an entry older than one already seen under that key: refused (sequence pinning).

    ``entry`` is that entry, its signature verified: only the owner of the key has a use for it.
    """

    text = "entry is older than one seen before"

    def __init__(self, detail: str = "", *, entry: object = None) -> None:
        super().__init__(detail)
        self.entry = entry


class AddressNotGlobal(DiscoveryError):
    """A server's entry names an IP address that cannot be reached from everywhere, and this discovery wants global ones.

    ``address`` is the host as the entry has it. A discovery on a private network is told to take such addresses
    (``private_addresses``).
    """

    text, status, reference_status = "server address is not global", 422, 422

    def __init__(self, address: str = "") -> None:
        super().__init__(address)
        self.address = address


class ProofFailed(DmsgError):
    """A relay did not prove that it is where its entry says, so discovery does not list it.

    ``reason`` is a short fixed text: ``no_address`` (the name has none), ``not_global`` (an address that is not accepted
    here), ``refused``, ``unreachable``, ``timeout``, ``closed`` (the connection ended without a handshake), ``wrong_key``
    (the handshake does not open with the entry's key). With ``not_tried`` there is no result, because no descriptor was
    left for a connection.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason.replace("_", " "))
        self.reason = reason


class StoreFull(DiscoveryError):
    """Discovery has no room for the entry, even after it has evicted all others of its kind."""

    status, reference_status = 503, 503


class EntryValidationError(DiscoveryError):
    """Base of the entry validation errors; ``rule`` is the reference's text without its prefix."""

    rule: ClassVar[str] = ""
    status, reference_status = 500, 422


def _validation(name: str, rule: str, doc: str) -> type[EntryValidationError]:
    return type(
        name,
        (EntryValidationError,),
        {"rule": rule, "text": f"entry validation error: {rule}", "__doc__": doc, "__module__": __name__},
    )


NoVersion = _validation("NoVersion", "entry has no version", "The entry has no version.")
NoSignature = _validation("NoSignature", "entry has no signature", "The entry has no signature.")
NoClientOrServer = _validation(
    "NoClientOrServer", "entry has neither client or server field", "The entry has neither a client nor a server half."
)
NilKeys = _validation("NilKeys", "entry Keys is nil", "The entry's static key is the null key.")
NonZeroSequence = _validation(
    "NonZeroSequence", "new entry has non-zero sequence", "The first entry of a key must have sequence 0."
)
WrongSequence = _validation(
    "WrongSequence",
    "sequence field of new entry is not sequence of old entry + 1",
    "The sequence of a new entry must be that of the old one plus 1.",
)
WrongTime = _validation(
    "WrongTime",
    "previous entry timestamp is not set before current entry timestamp",
    "The timestamp of a new entry must be later than that of the old one.",
)

#: message text -> exception class, for clients.
DISCOVERY_ERRORS: dict[str, type[DiscoveryError]] = {
    cls.text: cls
    for cls in (
        EntryNotFound,
        BadInput,
        Unauthorized,
        RateLimitedByDiscovery,
        ListingForbidden,
        AddressNotGlobal,
        NoVersion,
        NoSignature,
        NoClientOrServer,
        NilKeys,
        NonZeroSequence,
        WrongSequence,
        WrongTime,
    )
}


class DocumentError(DmsgError):
    """A signed document that is refused or cannot be read; the one known before stays in force.

    ``reason`` is a short fixed text: ``unreadable`` (the file or URL gives nothing), ``too_long``, ``not_json``,
    ``wrong_format``, ``wrong_version``, ``bad_field``, ``too_many_relays``, ``untrusted`` (signed by no key that is
    trusted), ``bad_signature``, ``from_the_future``, ``expired``, ``rolled_back`` (older than one seen before).
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        text = reason.replace("_", " ").replace("json", "JSON")
        super().__init__(f"{text}: {detail}" if detail and not detail.startswith(text) else detail or text)
        self.reason = reason
        self.detail = detail


class RanksError(DocumentError):
    """A document of relay ranks that is refused or cannot be read; the one known before stays in force."""
