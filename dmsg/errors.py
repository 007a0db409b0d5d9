"""Every exception of the package, and the tables that join wire codes and texts to them.

Pure: Twisted's own reasons (``ConnectionDone``, ``ConnectionLost``) are joined to these in :mod:`dmsg.mux.client.transport`.
All data of an error is in attributes; the message is only for people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dmsg.foreign import quoted, refusal_reason


class DmsgError(Exception):
    """Base of every error the package raises on purpose."""


# --- keys, signatures, configuration -------------------------------------------------------------------------------


class InvalidKey(DmsgError, ValueError):
    """A public or secret key that is not one: wrong length, wrong prefix, not on the curve, out of range, not hex."""


class InvalidSignature(DmsgError, ValueError):
    """A signature that is malformed, not in the canonical (low s) form, or not made by the key it is held against."""


class KeyFileError(DmsgError):
    """A key file that cannot be used: missing, malformed, of another owner, readable by group or world, in a directory
    where others may write, or already there on creation. ``problem`` says how to mend it.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class InvalidAddress(DmsgError, ValueError):
    """A text that is not ``host:port``, ``pk@host:port`` or a dmsg address."""


class ConfigError(DmsgError, ValueError):
    """A setting that is unknown, malformed or contradicts another.

    ``option`` names it, ``source`` says where it stood.
    """

    def __init__(self, option: str, problem: str, source: str = "") -> None:
        super().__init__(f"{option}: {problem}" + (f" (in {source})" if source else ""))
        self.option = option
        self.problem = problem
        self.source = source


class ShippingError(DmsgError):
    """A file of the event log that could not be brought to its target; it is still where it was, or set aside.

    ``reason`` is a short fixed text for logs and metrics (:doc:`/howto/ship-events`), ``detail`` is for people.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


# --- protocol ------------------------------------------------------------------------------------------------------


class LocalProtocolError(DmsgError):
    """Our own program asked for something the state of the protocol does not allow (a bug on this side)."""


class RemoteProtocolError(DmsgError):
    """The other side broke the protocol; the connection that brought it is dropped.

    ``stage`` is where (``handshake``, ``record``, ``frame``, ``transport``), ``reason`` a short fixed text for logs and
    metrics; nothing the other side sent is part of it. ``events`` are what the core had found out before, in the bytes
    of the same read: they have happened and are to be acted on.
    """

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage = stage
        self.reason = reason
        self.events: Sequence[object] = ()


class CryptoError(DmsgError):
    """A Noise message or sealed record that does not open."""


class NonceExhausted(LocalProtocolError):
    """A record counter reached its end; the connection must be made anew before another record is sealed."""


class TransportClosed(DmsgError):
    """Base of the reasons a transport or a request for one can end for; one subclass for each CLOSE code.

    ``code`` is the byte of the CLOSE frame (:ref:`spec-close-reasons`), ``name`` its name there. ``by`` says who ended
    it: ``"peer"`` (peer or relay: one cannot tell without end-to-end security), ``"local"``.
    """

    code: ClassVar[int] = 0
    name: ClassVar[str] = "normal"

    def __init__(self, message: str = "", *, by: str = "peer") -> None:
        super().__init__(message or self.name.replace("_", " "))
        self.by = by


class Refused(TransportClosed):
    """The peer does not accept this transport."""

    code, name = 1, "refused"


class UnknownPeer(TransportClosed):
    """The relay has no connection with that key."""

    code, name = 2, "unknown_peer"


class Busy(TransportClosed):
    """A limit on open transports or queued bytes is reached."""

    code, name = 3, "busy"


class RateLimited(TransportClosed):
    """Requests came faster than the relay allows."""

    code, name = 4, "rate_limited"


class SlowConsumer(TransportClosed):
    """The receiving side did not take its data for too long, or too much of it had piled up."""

    code, name = 5, "slow_consumer"


class Abuse(TransportClosed):
    """Too many frames that belong to no transport."""

    code, name = 6, "abuse"


class BadTransportId(TransportClosed):
    """The transport id has the wrong parity or is in use."""

    code, name = 7, "bad_id"


class Malformed(TransportClosed):
    """A frame of this transport was not well formed, or came in the wrong state."""

    code, name = 8, "malformed"


class DowngradeRefused(TransportClosed):
    """A peer whose signed entry promises end-to-end security was about to be spoken to in the clear."""

    code, name = 9, "downgrade"


class Unsupported(TransportClosed):
    """The other side or its relay does not know this extension."""

    code, name = 10, "unsupported"


class HandshakeTimeout(TransportClosed):
    """The peer did not answer or confirm in time."""

    code, name = 11, "handshake_timeout"


class IntegrityError(TransportClosed):
    """Something between the two ends dropped, repeated, reordered, injected or altered frames."""

    code, name = 12, "integrity"


class PeerGone(TransportClosed):
    """The peer's connection to the relay ended."""

    code, name = 13, "peer_gone"


class ServerDraining(TransportClosed):
    """The relay is going down."""

    code, name = 14, "server_draining"


class DeadlineExceeded(TransportClosed):
    """A deadline set on the transport passed without progress."""

    code, name = 15, "deadline"


class AccessDenied(TransportClosed):
    """The listener's access policy does not admit this key, or nothing listens there: strangers are not told which."""

    code, name = 16, "access_denied"


class NoSuchService(TransportClosed):
    """Nothing listens there under that service name."""

    code, name = 17, "no_such_service"


def _close_classes() -> dict[int, type[TransportClosed]]:
    return {cls.code: cls for cls in TransportClosed.__subclasses__()}


#: CLOSE code -> exception class. 0 (normal) and codes we do not know map to :class:`TransportClosed` itself.
CLOSE_ERRORS: dict[int, type[TransportClosed]] = _close_classes()


def close_error(code: int, message: str = "", *, by: str = "peer") -> TransportClosed:
    """The exception for CLOSE ``code``; unknown codes give a plain :class:`TransportClosed` that names the number."""
    cls = CLOSE_ERRORS.get(code, TransportClosed)
    if cls is TransportClosed and code:
        message = message or f"closed with unknown reason {code}"
    return cls(message, by=by)


# --- dialling ------------------------------------------------------------------------------------------------------


class ConnectionRefusedByServer(DmsgError):
    """The relay finished the handshake, then refused the connection: ``reason`` is :func:`dmsg.foreign.refusal_reason`."""

    def __init__(self, text: str) -> None:
        self.reason = refusal_reason(text)
        super().__init__(f"the server refused the connection: {text if text == self.reason else quoted(text)}")


class ServerLost(DmsgError):
    """The connection to the relay ``server`` (hex) ended: ``reason`` is a fixed text, ``detail`` is for people."""

    def __init__(self, server: str, reason: str, detail: str = "") -> None:
        super().__init__(f"the connection to server {server} was lost: {detail or reason}")
        self.server, self.reason, self.detail = server, reason, detail


class StageError(DmsgError):
    """A step towards a peer failed: ``stage`` and ``reason`` as in :class:`Attempt`, ``error`` what it came from."""

    def __init__(self, stage: str, reason: str, error: BaseException | None = None) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage = stage
        self.reason = reason
        self.error = error


class NoCommonServer(DmsgError):
    """The peer's entry names no relay that could be tried."""


class SessionTimeout(DmsgError, TimeoutError):
    """A step of connecting or dialling took longer than its limit: ``stage`` names it, ``timeout_s`` is the limit."""

    def __init__(self, stage: str, timeout_s: float) -> None:
        super().__init__(f"{stage} took longer than {timeout_s:g} s")
        self.stage = stage
        self.timeout_s = timeout_s


@dataclass(frozen=True, slots=True)
class Attempt:
    """One step on the way to a peer and how it ended.

    ``stage`` is ``discovery``, ``connect``, ``handshake``, ``request`` or ``accept``; ``server`` the hex key of the
    relay (empty for discovery); ``elapsed_ms`` counts from the start of the dial; ``reason`` is a short fixed text and
    ``error`` the exception it came from, if any.
    """

    stage: str
    server: str
    elapsed_ms: float
    reason: str
    error: BaseException | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, object]:
        """A JSON-ready form, as the event log and ``dmsg --json`` print it."""
        return {
            "stage": self.stage,
            "server": self.server,
            "elapsed_ms": round(self.elapsed_ms, 3),
            "reason": self.reason,
            "detail": str(self.error) if self.error is not None else "",
        }


class DialError(DmsgError):
    """A dial that failed, with everything that was tried: ``target`` (hex key) and the tree of ``attempts``."""

    def __init__(self, target: str, attempts: Sequence[Attempt]) -> None:
        self.target = target
        self.attempts = tuple(attempts)
        lines = [f"could not reach {target}"]
        for one in self.attempts:
            where = f" via {one.server[:12]}…" if one.server else ""
            detail = f" ({one.error})" if one.error is not None and str(one.error) != one.reason else ""
            lines.append(f"  {one.stage}{where}: {one.reason}{detail} after {one.elapsed_ms:.0f} ms")
        super().__init__("\n".join(lines))

    @property
    def reason(self) -> str:
        """The reason of the attempt that got furthest: what a person wants to read first."""
        order = ("discovery", "connect", "handshake", "request", "accept")
        best = max(self.attempts, key=lambda a: order.index(a.stage) if a.stage in order else -1, default=None)
        return best.reason if best else "no attempt was made"


# --- discovery -----------------------------------------------------------------------------------------------------


class DiscoveryError(DmsgError):
    """Base of what discovery can answer. ``text`` is the reference's message, by which base clients tell them apart.

    ``status`` is the HTTP status on the paths described in 2019, ``reference_status`` the one on the reference's paths
    (:ref:`spec-discovery-http`).
    """

    text: ClassVar[str] = "something unexpected happened"
    status: ClassVar[int] = 500
    reference_status: ClassVar[int] = 500

    def __init__(self, detail: str = "") -> None:
        super().__init__(f"{self.text}: {detail}" if detail else self.text)
        self.detail = detail


class DiscoveryUnavailable(DiscoveryError):
    """Discovery could not be reached, took too long, or answered with something that is not an answer."""


class EntryNotFound(DiscoveryError):
    """No entry is stored under that key (or no server is available).

    For a key whose entry has expired, discovery may say how to go on: ``next_sequence`` is the sequence it will take,
    ``after_timestamp`` the nanoseconds the new timestamp has to be later than. Both are ``None`` for a key never seen.
    They are hints, not signed by anybody.
    """

    text, status, reference_status = "entry of public key is not found", 404, 404

    def __init__(
        self, detail: str = "", *, next_sequence: int | None = None, after_timestamp: int | None = None
    ) -> None:
        super().__init__(detail)
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


class EntryRolledBack(DiscoveryError):
    """Discovery handed out an entry older than one already seen under that key: refused (sequence pinning).

    ``entry`` is what it handed out, its signature verified: only the owner of the key has a use for it.
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

    ``reason`` is a short fixed text: ``no_address`` (the name has none), ``not_global`` (an address that is not taken
    here), ``refused``, ``unreachable``, ``timeout``, ``closed`` (no handshake came of the connection), ``wrong_key``
    (the handshake does not open with the entry's key).
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason.replace("_", " "))
        self.reason = reason


class StoreFull(DiscoveryError):
    """Discovery has no room for the entry, even if everything else of its kind went."""

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

#: message text -> exception class, as a client needs it.
DISCOVERY_ERRORS: dict[str, type[DiscoveryError]] = {
    cls.text: cls
    for cls in (
        EntryNotFound,
        BadInput,
        Unauthorized,
        RateLimitedByDiscovery,
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
