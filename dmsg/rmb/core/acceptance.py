"""Which envelopes a receiver accepts, with the checks in their order: :ref:`spec-rmb-acceptance`. Pure.

Between the two steps, :meth:`Receiver.admit` and :meth:`Receiver.open`, the caller looks the sender up, which takes time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.errors import (
    EnvelopeExpired,
    NoKeyHere,
    NoMessage,
    NoSenderKey,
    OverlongText,
    PlainRefused,
    Replayed,
    UnknownSource,
    UnsignedSource,
    WrongDestination,
)
from dmsg.rmb.core.lifetime import remaining
from dmsg.rmb.core.limits import (
    LATE_S,
    MAX_COMMAND_BYTES,
    MAX_CONNECTION_BYTES,
    MAX_RELAYS,
    MAX_RELAYS_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_TAGS_BYTES,
    MAX_UID_BYTES,
    SEEN_MESSAGES,
)
from dmsg.rmb.core.signing import verify_envelope
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope
from dmsg.sansio.tally import Tally

#: Most bytes of a character in UTF-8: a text short enough by this measure need not be encoded to check its length.
_CHARACTER_BYTES = 4


class SeenMessages:
    """Remembers messages until they expire, to detect duplicates. A twin's message is identified by its uid and kind.

    At most ``capacity`` are remembered. Above that, the oldest message of the twin with the most is forgotten, so that a
    twin that sends much does not make another twin's messages new again.
    """

    __slots__ = ("_capacity", "_count", "_tally", "_twins")

    def __init__(self, capacity: int = SEEN_MESSAGES) -> None:
        self._capacity = capacity
        self._twins: OrderedDict[int, OrderedDict[tuple[str, str], float]] = OrderedDict()
        self._tally: Tally[int] = Tally()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def has(self, twin: int, uid: str, kind: str, now: float) -> bool:
        """Whether the message is remembered and has not expired."""
        seen = self._twins.get(twin)
        return seen is not None and seen.get((uid, kind), now) > now

    def is_new(self, twin: int, uid: str, kind: str, now: float, until: float) -> bool:
        """Remember the message until the time ``until``; ``False`` if it is remembered already."""
        self._forget_old(next(iter(self._twins), twin), now)
        if self.has(twin, uid, kind, now):
            return False
        seen = self._twins.setdefault(twin, OrderedDict())
        if (uid, kind) not in seen:
            self._tally.add(twin)
            self._count += 1
        seen[uid, kind] = until
        seen.move_to_end((uid, kind))
        self._forget_old(twin, now)
        if self._count > self._capacity:
            self._forget(self._tally.largest())
        return True

    def _forget_old(self, twin: int, now: float) -> None:
        """Forget the expired messages of ``twin``, up to the first that is still valid, and move ``twin`` to the end."""
        seen = self._twins.get(twin)
        while seen and next(iter(seen.values())) <= now:
            self._forget(twin)
            seen = self._twins.get(twin)
        if seen is not None:
            self._twins.move_to_end(twin)

    def _forget(self, twin: int) -> None:
        seen = self._twins[twin]
        seen.popitem(last=False)
        if not seen:
            del self._twins[twin]
        self._tally.remove(twin)
        self._count -= 1


class Receiver:
    """Decides for one session of a twin. ``awaits(uid)`` says whether an answer to that message is awaited.

    ``encryption`` is ``None`` for a twin without a published key. ``allow_plain`` accepts payloads that are not encrypted
    though both twins have keys.
    """

    def __init__(
        self,
        address: SessionAddress,
        encryption: EncryptionKey | None,
        awaits: Callable[[str], bool],
        *,
        allow_plain: bool = False,
    ) -> None:
        self.address = address
        self.seen = SeenMessages()
        self._encryption = encryption
        self._awaits = awaits
        self._allow_plain = allow_plain

    def admit(self, envelope: Envelope, now: float) -> int | None:
        """The twin to look up for :meth:`open`, or ``None`` for a relay's error, which is accepted as it is.

        Raises a kind of :class:`~dmsg.rmb.core.errors.EnvelopeRefused`.
        """
        kind = envelope.WhichOneof("message")
        if kind not in ("request", "response", "error"):
            raise NoMessage
        check_texts(envelope)
        from_relay = kind == "error" and not envelope.source.twin
        destination = SessionAddress.of(envelope.destination)
        # The public relay leaves out the destination of an error if the sender of the request has disconnected.
        if destination != self.address and not (from_relay and not destination.twin):
            raise WrongDestination
        if remaining(now, envelope.timestamp, envelope.expiration, late_s=LATE_S) is None:
            raise EnvelopeExpired
        source = envelope.source.twin
        if source:
            # Only messages with a good signature are remembered. A flood of copies could use the 100 µs that a check takes.
            if self.seen.has(source, envelope.uid, kind, now):
                raise Replayed
            return source
        if not from_relay or not self._awaits(envelope.uid):
            raise UnsignedSource
        return None

    def open(self, envelope: Envelope, sender: Twin | None, now: float) -> bytes:
        """The decrypted payload of an admitted envelope, if ``sender``, its source, has signed it.

        Raises a kind of :class:`~dmsg.rmb.core.errors.EnvelopeRefused`. A message passes only once.
        """
        if sender is None or sender.id != envelope.source.twin:
            raise UnknownSource(envelope.source.twin)
        verify_envelope(envelope, sender.account)
        payload = self._decrypt(envelope, sender.pk)
        left = remaining(now, envelope.timestamp, envelope.expiration, late_s=LATE_S)
        if left is None:
            raise EnvelopeExpired
        kind = envelope.WhichOneof("message") or ""
        if not self.seen.is_new(sender.id, envelope.uid, kind, now, now + left + 1):
            raise Replayed
        return payload

    def _decrypt(self, envelope: Envelope, their_pk: bytes | None) -> bytes:
        payload = envelope.WhichOneof("payload")
        if payload == "cipher":
            if self._encryption is None:
                raise NoKeyHere
            if their_pk is None:
                raise NoSenderKey
            return self._encryption.decrypt(their_pk, envelope.cipher)
        # A plain answer or error may be empty. A plain request may not: with its signature alone it could be for another twin.
        if envelope.plain or envelope.HasField("request"):
            both_have_keys = their_pk is not None and self._encryption is not None
            if both_have_keys and not self._allow_plain:
                raise PlainRefused
        return envelope.plain


def check_texts(envelope: Envelope) -> None:
    """Raise :class:`~dmsg.rmb.core.errors.OverlongText` for a text that no receiver accepts."""
    for name, text, limit_bytes in (
        ("uid", envelope.uid, MAX_UID_BYTES),
        ("tags", envelope.tags, MAX_TAGS_BYTES),
        ("schema", envelope.schema, MAX_SCHEMA_BYTES),
        ("connection", envelope.source.connection, MAX_CONNECTION_BYTES),
        ("command", envelope.request.command, MAX_COMMAND_BYTES),
        ("federation", envelope.federation, MAX_RELAYS_BYTES),
    ):
        if len(text) * _CHARACTER_BYTES > limit_bytes and len(text.encode()) > limit_bytes:
            raise OverlongText(name)
    # Nothing reads the relays, but the signature covers them: half a million empty texts would take long to join.
    if len(envelope.relays) > MAX_RELAYS:
        raise OverlongText("relays")
