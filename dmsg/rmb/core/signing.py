"""Signing envelopes, and looking whether they were: :ref:`spec-rmb-signature`. Pure."""

from __future__ import annotations

from dmsg.rmb.core.challenge import challenge
from dmsg.rmb.core.errors import BadSignature
from dmsg.rmb.core.keys import TwinKey, verify
from dmsg.rmb.core.wire import Envelope


def sign_envelope(envelope: Envelope, key: TwinKey) -> None:
    """Put ``key``'s signature into the envelope, which has to be complete, its payload encrypted."""
    envelope.signature = key.sign(challenge(envelope))


def verify_envelope(envelope: Envelope, account: bytes) -> None:
    """Raise :class:`~dmsg.rmb.core.errors.BadSignature` unless ``account``'s key signed the envelope."""
    if not envelope.HasField("signature"):
        raise BadSignature("message is not signed")
    verify(account, challenge(envelope), envelope.signature)
