"""Packets and sealed records: what a connection is once its handshake is done.

:ref:`spec-packets`, :ref:`spec-records`: ``u16 length ‖ u32 counter ‖ ChaCha20-Poly1305``; a counter for each direction
begins with 1 and is always one more than the last.
"""

from __future__ import annotations

from typing import Final

from dmsg.crypto.aead import TAG_BYTES, DoesNotOpen, nonce, opener, sealer
from dmsg.crypto.errors import NonceExhausted
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.wire import RECORD_PLAINTEXT_LIMIT_BYTES

LENGTH_BYTES: Final = 2
COUNTER_BYTES: Final = 4
RECORD_MIN_BYTES: Final = COUNTER_BYTES + TAG_BYTES
#: The last counter ever used. A base peer wraps to 0 at 2^32 and would use nonces twice: stop well before.
COUNTER_LIMIT: Final = 2**32 - 2**16
#: From here on a client makes its connection anew at the first moment no transport is open on it.
COUNTER_SOFT_LIMIT: Final = 2**31


class RecordLayer:
    """Opens and seals the records of one connection.

    Holds at most one incomplete packet (65,537 bytes) of what was received.
    """

    __slots__ = ("_buffer", "_decrypt", "_encrypt", "_received", "_sent")

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._encrypt = sealer(send_key)
        self._decrypt = opener(receive_key)
        self._sent = 0
        self._received = 0
        self._buffer = b""

    @property
    def near_exhaustion(self) -> bool:
        """Whether a counter is so far on that the connection should be made anew when that does no harm."""
        return self._sent >= COUNTER_SOFT_LIMIT or self._received >= COUNTER_SOFT_LIMIT

    def open(self, data: bytes) -> list[bytes]:
        """The plaintexts of all whole records in what has been received so far.

        Raises ``RemoteProtocolError`` for a record that is too short, out of order, repeated, or does not open;
        the connection is then to be dropped.
        """
        if self._buffer:
            data = self._buffer + data
        plaintexts = []
        decrypt = self._decrypt
        counter = self._received
        position = 0
        total = len(data)
        view = memoryview(data)
        while total - position >= LENGTH_BYTES:
            size = data[position] << 8 | data[position + 1]
            if size < RECORD_MIN_BYTES:
                raise RemoteProtocolError("record", "too short")
            start = position + LENGTH_BYTES
            end = start + size
            if end > total:
                break
            counter += 1
            body = start + COUNTER_BYTES
            if data[start:body] != counter.to_bytes(4, "big") or counter > COUNTER_LIMIT:
                raise RemoteProtocolError("record", "out of sequence")
            try:
                plaintexts.append(decrypt(nonce(counter), view[body:end], None))
            except DoesNotOpen:
                raise RemoteProtocolError("record", "does not open") from None
            position = end
        self._received = counter
        self._buffer = data[position:] if position < total else b""
        return plaintexts

    def seal(self, plaintext: bytes, limit: int = RECORD_PLAINTEXT_LIMIT_BYTES) -> bytes:
        """``plaintext`` in records of up to ``limit`` bytes, as few as hold it; record borders mean nothing to a reader.

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
        if counter > COUNTER_LIMIT:
            raise NonceExhausted("the record counter is used up")
        self._sent = counter
        sealed = self._encrypt(nonce(counter), plaintext, None)
        return (len(sealed) + COUNTER_BYTES << 32 | counter).to_bytes(6, "big"), sealed
