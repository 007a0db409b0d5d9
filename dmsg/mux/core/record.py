"""Packets and sealed records: all that a connection carries once its handshake is done.

:ref:`spec-packets`, :ref:`spec-records`: ``u16 length ‖ u32 counter ‖ sealed``; the counter of each direction begins with 1
and grows by 1 a record. After 2^22 records an AES key is replaced by the next one (:ref:`spec-ciphers`).
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from dmsg.crypto.aead import AES_MESSAGES, TAG_BYTES, Aead, Cipher, DoesNotOpen, next_key, nonce, pair
from dmsg.crypto.errors import NonceExhausted
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.wire import RECORD_PLAINTEXT_LIMIT_BYTES

LENGTH_BYTES: Final = 2
COUNTER_BYTES: Final = 4
RECORD_MIN_BYTES: Final = COUNTER_BYTES + TAG_BYTES
_HEAD: Final = Struct(">HI")  # length and counter
_HEAD_BYTES: Final = LENGTH_BYTES + COUNTER_BYTES
#: The last counter ever used. A base peer wraps to 0 at 2^32 and would use nonces twice: stop well before.
COUNTER_LIMIT: Final = 2**32 - 2**16
#: From here on a client replaces its connection as soon as no transport is open on it.
COUNTER_SOFT_LIMIT: Final = 2**31


class RecordLayer:
    """Opens and seals the records of one connection.

    Of the received bytes it keeps at most one incomplete packet (65,537 bytes). ``aes_records`` is for tests, and must be the
    same on both sides.
    """

    __slots__ = (
        "_buffer",
        "_cipher",
        "_decrypt",
        "_encrypt",
        "_key_records",
        "_received",
        "_receiver",
        "_receiving_until",
        "_sending_until",
        "_sent",
    )

    def __init__(
        self,
        send_key: bytes,
        receive_key: bytes,
        cipher: Cipher = Cipher.CHACHA,
        *,
        aes_records: int = AES_MESSAGES,
    ) -> None:
        self._cipher = cipher
        self._encrypt, _ = pair(send_key, cipher)
        self._receiver, self._decrypt = pair(receive_key, cipher)
        # The last counters for the keys in use. A ChaCha20-Poly1305 key lasts to the end.
        self._key_records = aes_records if cipher is Cipher.AES else COUNTER_LIMIT
        self._sending_until = self._receiving_until = self._key_records
        self._sent = 0
        self._received = 0
        self._buffer = b""

    @property
    def near_exhaustion(self) -> bool:
        """Whether a counter is so high that the connection should be replaced when that does no harm."""
        return self._sent >= COUNTER_SOFT_LIMIT or self._received >= COUNTER_SOFT_LIMIT

    @property
    def held_bytes(self) -> int:
        """Received bytes of a packet that is not complete."""
        return len(self._buffer)

    def open(self, data: bytes | memoryview) -> list[bytes]:
        """The plaintexts of all whole records received so far. Keeps copies, but no reference to ``data``.

        Raises ``RemoteProtocolError`` for a record that is too short, out of order, repeated, or does not open;
        the connection must then be dropped.
        """
        if not data:
            return []
        if begun := self._buffer:
            length = begun[:LENGTH_BYTES] + data[: LENGTH_BYTES - 1]
            missing = LENGTH_BYTES + (length[0] << 8 | length[1]) - len(begun)
            if missing < len(data):
                # Only this packet is joined. The rest, which may be four times as long, is opened in place.
                self._buffer = b""
                return self.open(begun + data[:missing]) + self.open(memoryview(data)[missing:])
            data = begun + data
        plaintexts = []
        decrypt, unpack_head = self._decrypt, _HEAD.unpack_from
        counter = self._received
        position = 0
        total = len(data)
        view = memoryview(data)
        while total - position >= _HEAD_BYTES:
            size, number = unpack_head(data, position)
            if size < RECORD_MIN_BYTES:
                raise RemoteProtocolError("record", "too short")
            end = position + LENGTH_BYTES + size
            if end > total:
                break
            counter += 1
            if number != counter:
                raise RemoteProtocolError("record", "out of sequence")
            if counter > self._receiving_until:
                decrypt = self._follow_key(counter)
            try:
                plaintexts.append(decrypt(nonce(counter), view[position + _HEAD_BYTES : end], None))
            except DoesNotOpen:
                raise RemoteProtocolError("record", "does not open") from None
            position = end
        else:
            if (
                total - position >= LENGTH_BYTES
                and int.from_bytes(data[position : position + 2], "big") < RECORD_MIN_BYTES
            ):
                raise RemoteProtocolError("record", "too short")
        self._received = counter
        self._buffer = bytes(data[position:]) if position < total else b""
        return plaintexts

    def seal(self, plaintext: bytes, limit: int = RECORD_PLAINTEXT_LIMIT_BYTES) -> bytes:
        """``plaintext`` in as few records of up to ``limit`` bytes as possible; record borders mean nothing to a reader.

        Raises ``NonceExhausted`` when the counter is used up.
        """
        if len(plaintext) > limit:
            view = memoryview(plaintext)
            parts: list[bytes] = []
            for at in range(0, len(plaintext), limit):
                parts += self._seal(view[at : at + limit])
            return b"".join(parts)
        head, sealed = self._seal(plaintext)
        return head + sealed

    def _seal(self, plaintext: bytes | memoryview) -> tuple[bytes, bytes]:
        counter = self._sent + 1
        if counter > self._sending_until:
            self._change_key(counter)
        self._sent = counter
        sealed = self._encrypt(nonce(counter), plaintext, None)
        return (len(sealed) + COUNTER_BYTES << 32 | counter).to_bytes(6, "big"), sealed

    def _change_key(self, counter: int) -> None:
        """Seal with the next key from ``counter`` on."""
        if counter > COUNTER_LIMIT:
            raise NonceExhausted("the record counter is used up")
        self._encrypt, _ = pair(next_key(self._encrypt), self._cipher)
        self._sending_until = min(self._sending_until + self._key_records, COUNTER_LIMIT)

    def _follow_key(self, counter: int) -> Aead:
        """Follow the peer's change of key at ``counter``; gives what opens records from there on."""
        if counter > COUNTER_LIMIT:
            raise RemoteProtocolError("record", "out of sequence")
        self._receiver, self._decrypt = pair(next_key(self._receiver), self._cipher)
        self._receiving_until = min(self._receiving_until + self._key_records, COUNTER_LIMIT)
        return self._decrypt
