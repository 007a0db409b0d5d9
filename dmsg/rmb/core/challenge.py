"""What the signature of an envelope covers. Pure."""

from __future__ import annotations

import hashlib

from dmsg.rmb.core.wire import Envelope


def challenge(envelope: Envelope) -> bytes:
    """The 16 bytes that are signed: MD5 over the texts and numbers of the envelope, without lengths or separators.

    See :ref:`spec-rmb-signature`, also for what that does not protect.
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
