"""A client that costs next to nothing, so that a bench measures the server.

A second implementation of the handshake (:ref:`spec-handshake`) on blocking or non-blocking sockets: everything that needs
no answer of the server is made beforehand, and one key serves as static and ephemeral key, which halves the rest. The
server cannot tell, and does its full work. For benches only: such a client has no forward secrecy.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.glue.processor import has_aes
from dmsg.mux.core.hello import AnnouncedLimits, hello_payload
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.wire import ACCEPT, FWD, REQUEST, encode_frame, split_frames

#: Bytes of our server's answer to message 1: length, key, tag, and the limits it announces.
MESSAGE_2_BYTES: Final = 51 + len(hello_payload(AnnouncedLimits(0, 0, 0), 1, aes=has_aes()))
_NAME: Final = b"Noise_XK_Secp256k1_ChaChaPoly_SHA256"
_NONCES: Final = (bytes(12), bytes(4) + (1).to_bytes(8, "little"))


def _hash(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def _hkdf(chaining_key: bytes, material: bytes) -> tuple[bytes, bytes]:
    temporary = hmac.digest(chaining_key, material, "sha256")
    first = hmac.digest(temporary, b"\x01", "sha256")
    return first, hmac.digest(temporary, first + b"\x02", "sha256")


class CheapHandshake:
    """The initiator of XK: :attr:`message_1` is ready when this object is made, :meth:`finish` answers message 2."""

    __slots__ = ("_chaining_key", "_hash", "_secret", "message_1")

    def __init__(self, server: PublicKey, secret: SecretKey) -> None:
        self._secret = secret
        public = secret.public_key.raw
        state = _hash(_hash(_hash(_NAME), b""), server.raw)
        state = _hash(state, public)
        chaining_key, key = _hkdf(_hash(_NAME), secret.ecdh(server.raw) + b"\x00")
        tag = ChaCha20Poly1305(key).encrypt(_NONCES[0], b"", state)
        self._hash = _hash(state, tag)
        self._chaining_key = chaining_key
        self.message_1 = b"\x00\x31" + public + tag

    def finish(self, message_2: bytes) -> tuple[bytes, RecordLayer]:
        """Message 3 and the record layer, from message 2."""
        theirs, tag = message_2[2:35], message_2[35:]
        # with one key in both places the secrets of "ee" and "se" are the same
        shared = self._secret.ecdh(theirs) + b"\x00"
        chaining_key, key = _hkdf(self._chaining_key, shared)
        state = _hash(_hash(self._hash, theirs), tag)
        sealed = ChaCha20Poly1305(key).encrypt(_NONCES[1], self._secret.public_key.raw, state)
        chaining_key, key = _hkdf(chaining_key, shared)
        last = ChaCha20Poly1305(key).encrypt(_NONCES[0], b"", _hash(state, sealed))
        first, second = _hkdf(chaining_key, b"")
        return b"\x00\x41" + sealed + last, RecordLayer(second, first)


class RawConnection:
    """A connection to a server on a blocking socket: bare frames, no automatic replies."""

    def __init__(
        self,
        port: int,
        server: PublicKey,
        *,
        receive_buffer_bytes: int = 0,
        source: str = "",
        timeout_s: float = 20.0,
    ) -> None:
        self.secret = SecretKey.generate()
        self.key = self.secret.public_key.raw
        handshake = CheapHandshake(server, self.secret)
        self.socket = socket.socket()
        if receive_buffer_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(timeout_s)
        if source:
            self.socket.bind((source, 0))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.connect(("127.0.0.1", port))
        self.socket.sendall(handshake.message_1)
        answer = b""
        while len(answer) < MESSAGE_2_BYTES:
            answer += self._receive(MESSAGE_2_BYTES - len(answer))
        message_3, self.records = handshake.finish(answer)
        self.socket.sendall(message_3)
        self._stream = b""
        self._id = 0
        self._frames: list[tuple[int, int, bytes]] = []
        self.next_frame()  # OK

    def _receive(self, limit: int) -> bytes:
        data = self.socket.recv(limit)
        if not data:
            raise ConnectionError("the server closed the connection")
        return data

    def seal(self, kind: int, transport_id: int, payload: bytes = b"") -> bytes:
        """A frame as one record."""
        return self.records.seal(encode_frame(kind, transport_id, payload))

    def send(self, kind: int, transport_id: int, payload: bytes = b"") -> None:
        """Send a frame as one record."""
        self.socket.sendall(self.seal(kind, transport_id, payload))

    def _take(self, data: bytes) -> None:
        self._stream += b"".join(self.records.open(data))
        frames, used = split_frames(self._stream)
        self._frames += [(kind, number, self._stream[start:end]) for kind, number, start, end in frames]
        self._stream = self._stream[used:]

    def next_frame(self) -> tuple[int, int, bytes]:
        """Wait for the next frame: type, transport id, payload."""
        while not self._frames:
            self._take(self._receive(65536))
        return self._frames.pop(0)

    def frames_now(self) -> list[tuple[int, int, bytes]]:
        """The frames that have arrived, without waiting."""
        while select.select([self.socket], [], [], 0)[0]:
            self._take(self._receive(65536))
        frames, self._frames = self._frames, []
        return frames

    def ask(self, target: bytes) -> None:
        """Open a transport to the raw key ``target``. Raises ``ConnectionError`` when it is refused."""
        self._id += 2
        self.send(REQUEST, self._id, self.key + target)
        if self.next_frame()[0] != ACCEPT:
            raise ConnectionError("not accepted")

    def accept(self) -> None:
        """Wait for a REQUEST, and accept it."""
        kind, transport_id, payload = self.next_frame()
        assert kind == REQUEST
        self.send(ACCEPT, transport_id, payload)

    def message(self, size: int) -> bytes:
        """A FWD with ``size`` bytes on the requested transport, as bytes for the socket."""
        return self.seal(FWD, self._id, b"\x00\x01" + os.urandom(size))

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
