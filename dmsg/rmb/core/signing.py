"""Making and checking the signature of an envelope, and what it covers: :ref:`spec-rmb-signature`. Pure."""

from __future__ import annotations

import hashlib

from dmsg.rmb.core.errors import BadSignature
from dmsg.rmb.core.keys import TwinKey, verify
from dmsg.rmb.core.wire import Envelope


def challenge(envelope: Envelope) -> bytes:
    """The 16 bytes that are signed: MD5 over the texts and numbers of the envelope, without lengths or separators.

    See :ref:`spec-rmb-signature`, also for what the signature does not protect.
    """
    match envelope.WhichOneof("message"):
        case "request":
            message = envelope.request.command
        case "error":
            message = f"{envelope.error.code}{envelope.error.message}"
        case _:
            message = ""
    source, destination = envelope.source, envelope.destination
    head = (
        f"{envelope.uid}{envelope.tags}{envelope.timestamp}{envelope.expiration}"
        f"{source.twin}{source.connection}{destination.twin}{destination.connection}"
        f"{message}{envelope.schema}{envelope.federation}"
    )
    digest = hashlib.md5(head.encode(), usedforsecurity=False)
    digest.update(envelope.cipher or envelope.plain)
    if envelope.relays:
        digest.update("".join(envelope.relays).encode())
    return digest.digest()


def sign_envelope(envelope: Envelope, key: TwinKey) -> None:
    """Put ``key``'s signature into the envelope, which has to be complete, with its payload encrypted."""
    envelope.signature = key.sign(challenge(envelope))


def verify_envelope(envelope: Envelope, account: bytes) -> None:
    """Raise :class:`~dmsg.rmb.core.errors.BadSignature` unless ``account``'s key signed the envelope."""
    if not envelope.HasField("signature"):
        raise BadSignature("message is not signed")
    verify(account, challenge(envelope), envelope.signature)
