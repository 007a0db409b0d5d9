"""The last steps before an envelope leaves its twin. Pure."""

from __future__ import annotations

from collections.abc import Callable

from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.e2e import NONCE_BYTES, EncryptionKey
from dmsg.rmb.core.errors import EnvelopeExpired, EnvelopeTooLarge, NoReceiverKey
from dmsg.rmb.core.keys import TwinKey
from dmsg.rmb.core.lifetime import stamp
from dmsg.rmb.core.limits import DEFAULT_TTL_S, MAX_ENVELOPE_BYTES, MAX_TTL_S
from dmsg.rmb.core.signing import sign_envelope
from dmsg.rmb.core.wire import Envelope, encode_envelope


class Sender:
    """Encrypts, stamps and signs what one session of a twin sends: :ref:`spec-rmb-e2e`, :ref:`spec-rmb-lifetime`.

    ``random(n)`` gives ``n`` bytes, as ``os.urandom`` does.
    """

    def __init__(
        self,
        address: SessionAddress,
        key: TwinKey,
        encryption: EncryptionKey | None,
        random: Callable[[int], bytes],
        *,
        allow_plain: bool = False,
    ) -> None:
        self.address = address
        self._key = key
        self._encryption = encryption
        self._random = random
        self._allow_plain = allow_plain

    def seal(self, envelope: Envelope, their_pk: bytes | None, now: int) -> bytes:
        """Complete ``envelope``, which has a plain payload or none, and return its bytes.

        ``their_pk`` is the receiver's key in the registry. If both twins have a key, the payload is encrypted, even an empty
        one. An ``expiration`` of 0 becomes :data:`~dmsg.rmb.core.limits.DEFAULT_TTL_S` if the timestamp is 0 too.

        Raises, all of :mod:`dmsg.rmb.core.errors`: ``NoReceiverKey`` when the payload would have to go in plain text,
        ``E2eError`` for an invalid key, ``EnvelopeExpired``, and ``EnvelopeTooLarge``.
        """
        if their_pk is not None and self._encryption is not None:
            envelope.cipher = self._encryption.encrypt(their_pk, envelope.plain, self._random(NONCE_BYTES))
        elif envelope.plain and not self._allow_plain:
            raise NoReceiverKey
        self.address.write_to(envelope.source)
        expiration = min(envelope.expiration, MAX_TTL_S) or (0 if envelope.timestamp else DEFAULT_TTL_S)
        envelope.timestamp, envelope.expiration = stamp(now, envelope.timestamp, expiration)
        if not envelope.expiration:
            raise EnvelopeExpired
        sign_envelope(envelope, self._key)
        data = encode_envelope(envelope)
        if len(data) > MAX_ENVELOPE_BYTES:
            raise EnvelopeTooLarge(len(data))
        return data
