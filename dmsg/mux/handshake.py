"""The XK handshake of a connection as a core (protocol notes, sections 1.1 and 1.2).

Three packets of ``u16 length ‖ message``. When the last one is through, :class:`HandshakeDone` hands over a
:class:`~dmsg.mux.record.RecordLayer` and the bytes that came behind it; the handshake itself is then finished with.
"""

from __future__ import annotations

import os
from enum import Enum
from typing import Final

from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.crypto.noise import NoiseHandshake
from dmsg.errors import CryptoError, LocalProtocolError, RemoteProtocolError
from dmsg.mux.events import Event, HandshakeDone
from dmsg.mux.record import LENGTH_BYTES, RecordLayer

#: Longest handshake message taken: three keys' worth and 1,024 bytes of payload. Base peers send 49 and 65.
MESSAGE_LIMIT_BYTES: Final = 1_500
HANDSHAKE_TIMEOUT_S: Final = 10.0


class Role(Enum):
    """Which side of a connection this is."""

    CLIENT = "client"
    SERVER = "server"


class Handshake:
    """Bytes in, bytes out, one :class:`HandshakeDone` at the end.

    ``payload`` goes into message 2 (server) or 3 (client), the first that are both encrypted and authenticated; the
    peer's is in the event. Base peers send none and discard ours.
    """

    __slots__ = (
        "_buffer",
        "_deadline",
        "_noise",
        "_out",
        "_payload",
        "_peer_payload",
        "_role",
        "_step",
        "answer_due",
        "messages",
    )

    def __init__(
        self,
        role: Role,
        static: SecretKey,
        remote: PublicKey | None = None,
        *,
        now: float,
        payload: bytes = b"",
        timeout_s: float = HANDSHAKE_TIMEOUT_S,
        random: Random = os.urandom,
    ) -> None:
        initiator = role is Role.CLIENT
        if initiator is (remote is None):
            raise LocalProtocolError("a client knows its server's key, a server does not know its client's")
        self._noise = NoiseHandshake(
            "XK", initiator=initiator, static=static, remote_static=remote.raw if remote else None, random=random
        )
        self._role = role
        self._payload = payload
        self._peer_payload = b""
        self._buffer = b""
        self._out: list[bytes] = []
        self._deadline: float | None = now + timeout_s
        self._step = 0
        #: Whether the server's answer is still to be made. It costs as much as reading message 1 did, and is made when it
        #: is asked for, so that a busy server can do other things in between.
        self.answer_due = False
        #: How many messages of the peer's were looked at: the expensive part.
        self.messages = 0
        if initiator:
            self._write(b"")

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Take bytes from the network; raises ``RemoteProtocolError`` for anything that is not the handshake."""
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES:
            size = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
            if size > MESSAGE_LIMIT_BYTES:
                raise RemoteProtocolError("handshake", "message over the limit")
            if len(self._buffer) < LENGTH_BYTES + size:
                break
            message = self._buffer[LENGTH_BYTES : LENGTH_BYTES + size]
            self._buffer = self._buffer[LENGTH_BYTES + size :]
            done = self._on_message(message)
            if done is not None:
                return [done]
        return []

    def _on_message(self, message: bytes) -> Event | None:
        self.messages += 1
        if self.answer_due:
            raise RemoteProtocolError("handshake", "message out of turn")
        try:
            self._peer_payload = self._noise.read_message(message)
            self._step += 1
            if self._role is Role.CLIENT:
                self._write(self._payload)
        except CryptoError:
            raise RemoteProtocolError("handshake", f"message {self._step + 1} does not open") from None
        result = self._noise.result
        if result is None:
            self.answer_due = True
            return None
        self._deadline = None
        remote = PublicKey(result.remote_static)  # a point: Diffie-Hellman was done with it
        leftover, self._buffer = self._buffer, b""
        records = RecordLayer(result.send_key, result.receive_key)
        return HandshakeDone(remote, records, self._peer_payload, result.handshake_hash, leftover)

    def _write(self, payload: bytes) -> None:
        message = self._noise.write_message(payload)
        self._step += 1
        self._out.append(len(message).to_bytes(LENGTH_BYTES, "big") + message)

    def data_to_send(self) -> bytes:
        """What is to be written to the network now."""
        if self.answer_due:
            self.answer_due = False
            self._write(self._payload)  # cannot fail: the peer's ephemeral key went through a Diffie-Hellman already
        data = b"".join(self._out)
        self._out.clear()
        return data

    def next_timeout(self) -> float | None:
        """When :meth:`handle_timeout` wants to be called, or ``None``."""
        return self._deadline

    def handle_timeout(self, now: float) -> list[Event]:
        """Raises ``RemoteProtocolError`` once the handshake has taken too long."""
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            raise RemoteProtocolError("handshake", "timeout")
        return []
