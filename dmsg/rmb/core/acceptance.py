"""Which envelopes a receiver accepts, with the checks in their order: :ref:`spec-rmb-acceptance`. Pure.

Between the two steps, :meth:`Receiver.admit` and :meth:`Receiver.open`, the caller looks the sender up, which takes time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush
from math import ceil
from typing import TypeAlias

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
#: Expired messages that are forgotten for each new one: more than one, so that what has expired never grows.
_FORGOTTEN_AT_ONCE = 2

#: Its twin, its uid and its kind.
_Message: TypeAlias = tuple[int, str, str]


class SeenMessages:
    """Remembers messages until they expire, to detect duplicates. A twin's message is identified by its uid and kind.

    At most ``capacity`` are remembered. Above that, when none of them has expired, the oldest message of the twin with the
    most is forgotten, so that a twin that sends much does not make another twin's messages new again.
    """

    __slots__ = ("_capacity", "_count", "_ends", "_forgotten", "_seconds", "_tally", "_twins")

    def __init__(self, capacity: int = SEEN_MESSAGES) -> None:
        self._capacity = capacity
        self._twins: dict[int, OrderedDict[_Message, float]] = {}
        self._tally: Tally[int] = Tally()
        self._count = 0
        # The messages that end in a second, and these seconds as a heap. No message lives long, so the seconds are few.
        self._ends: dict[int, dict[_Message, None]] = {}
        self._seconds: list[int] = []
        #: Messages forgotten since the dictionaries of ``_ends`` were copied.
        self._forgotten = 0

    def __len__(self) -> int:
        return self._count

    def has(self, twin: int, uid: str, kind: str, now: float) -> bool:
        """Whether the message is remembered and has not expired."""
        seen = self._twins.get(twin)
        return seen is not None and seen.get((twin, uid, kind), now) > now

    def is_new(self, twin: int, uid: str, kind: str, now: float, until: float) -> bool:
        """Remember the message until the time ``until``; ``False`` if it is remembered already."""
        for _ in range(_FORGOTTEN_AT_ONCE):
            self._forget_expired(now)
        if self.has(twin, uid, kind, now):
            return False
        message = twin, uid, kind
        if message in self._twins.get(twin, ()):
            self._forget(message)
        self._twins.setdefault(twin, OrderedDict())[message] = until
        second = ceil(until)
        if second not in self._ends:
            self._ends[second] = {}
            heappush(self._seconds, second)
        self._ends[second][message] = None
        self._tally.add(twin)
        self._count += 1
        if self._count > self._capacity:
            self._forget(next(iter(self._twins[self._tally.largest()])))
        return True

    def _forget_expired(self, now: float) -> None:
        """Forget one message that has expired, if there is one."""
        while self._seconds and self._seconds[0] <= now:
            ended = self._ends[self._seconds[0]]
            if ended:
                self._forget(ended.popitem()[0])  # not the first one: that walks over those forgotten before
                return
            del self._ends[heappop(self._seconds)]

    def _forget(self, message: _Message) -> None:
        twin = message[0]
        seen = self._twins[twin]
        self._ends[ceil(seen.pop(message))].pop(message, None)
        if not seen:
            del self._twins[twin]
        self._tally.remove(twin)
        self._count -= 1
        self._forgotten += 1
        if self._forgotten > self._capacity:  # a dictionary keeps the memory of what was deleted, and its copy does not
            self._forgotten = 0
            self._ends = {second: dict(messages) for second, messages in self._ends.items()}


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
