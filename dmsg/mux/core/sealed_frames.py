"""The frames of a sealed stream as a relay sees them (:ref:`spec-sealed-frames`). Pure.

Each direction has one key and one counter for all its frames, in the order in which they are sent.
"""

from __future__ import annotations

from typing import Final

from dmsg.crypto.aead import AES_MESSAGES, Cipher
from dmsg.crypto.cipher import CipherState
from dmsg.crypto.errors import CryptoError, NonceExhausted
from dmsg.mux.core.stream import StreamFault
from dmsg.mux.core.wire import ACK, CLOSE, FWD, HEADER, CloseReason

_ASSOCIATED: Final = {kind: bytes((kind,)) for kind in (FWD, ACK, CLOSE)}


class SealedFrames:
    """Seals and opens the frames of the stream ``stream_id``, with a new key each ``rekey_after_frames`` sent."""

    __slots__ = ("_receiver", "_rekey_after_frames", "_rekey_nonce", "_rekeyed_nonce", "_sender", "_stream_id")

    def __init__(
        self,
        stream_id: int,
        send_key: bytes,
        receive_key: bytes,
        rekey_after_frames: int,
        cipher: Cipher = Cipher.CHACHA,
    ) -> None:
        self._stream_id = stream_id
        self._sender = CipherState(send_key, cipher=cipher)
        self._receiver = CipherState(receive_key, cipher=cipher)
        if cipher is Cipher.AES:
            rekey_after_frames = min(rekey_after_frames, AES_MESSAGES)
        self._rekey_after_frames = self._rekey_nonce = rekey_after_frames
        self._rekeyed_nonce = 0

    def seal(self, kind: int, inner: bytes) -> tuple[bytes, bytes]:
        """The next FWD or ACK as (header, payload). If the key has sealed enough, a marker stands before the header."""
        sender = self._sender
        marker = self.rekey() if sender.nonce >= self._rekey_nonce else b""
        payload = sender.seal(_ASSOCIATED[kind], inner)
        return marker + HEADER.pack(kind, self._stream_id, len(payload)), payload

    def open(self, kind: int, payload: bytes | memoryview) -> bytes:
        """The content of the next frame, a FWD or an ACK. Raises ``StreamFault``; after that no frame opens any more."""
        try:
            return self._receiver.open(_ASSOCIATED[kind], payload)
        except (CryptoError, NonceExhausted):
            raise StreamFault(CloseReason.INTEGRITY) from None

    @property
    def key_was_used(self) -> bool:
        """Whether anything was sealed under the key in use."""
        return self._sender.nonce > self._rekeyed_nonce

    def rekey(self) -> bytes:
        """The marker of :ref:`spec-rekeying`, a frame: the last one under the key in use."""
        payload = self._sender.seal(_ASSOCIATED[ACK], b"")
        self._sender.rekey()
        self._rekeyed_nonce = self._sender.nonce
        self._rekey_nonce = self._rekeyed_nonce + self._rekey_after_frames
        return HEADER.pack(ACK, self._stream_id, len(payload)) + payload

    def follow_marker(self) -> None:
        """The peer's marker has come: what follows is under its next key."""
        self._receiver.rekey()

    def seal_close(self, reason: int) -> bytes:
        """A CLOSE with its reason also sealed: the relay cannot make one up (:ref:`spec-sealed-close`)."""
        code = bytes((reason,))
        payload = code + self._sender.seal(_ASSOCIATED[CLOSE], code)
        return HEADER.pack(CLOSE, self._stream_id, len(payload)) + payload

    def proves_close(self, payload: bytes) -> bool:
        """Whether the payload of a CLOSE has the peer's seal, over the reason in the clear (:ref:`spec-sealed-close`)."""
        try:
            return len(payload) > 1 and self._receiver.open(_ASSOCIATED[CLOSE], payload[1:]) == payload[:1]
        except (CryptoError, NonceExhausted):
            return False

    def erase(self) -> None:
        """Drop the keys: what is sealed or opened from now on raises."""
        self._sender.erase()
        self._receiver.erase()
