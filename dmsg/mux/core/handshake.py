"""The XK handshake of a connection as a core (:ref:`spec-handshake`).

Three packets of ``u16 length ‖ message``. After the last one, :class:`HandshakeDone` hands over a
:class:`~dmsg.mux.core.record.RecordLayer` and the bytes that came after that packet; the core is not used any more then.
"""

from __future__ import annotations

import os
from enum import Enum
from typing import Final
from typing import Protocol as TypingProtocol

from dmsg.crypto.errors import CryptoError
from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.crypto.noise import NoiseHandshake
from dmsg.errors import LocalProtocolError, RemoteProtocolError
from dmsg.mux.core.ciphers import agreed
from dmsg.mux.core.events import Event, HandshakeDone
from dmsg.mux.core.hello import read_hello
from dmsg.mux.core.record import LENGTH_BYTES, RecordLayer
from dmsg.sansio.core import Core

#: Longest handshake message taken: three keys' worth and 1,024 bytes of payload. Base peers send 49 and 65.
MESSAGE_LIMIT_BYTES: Final = 1_500
HANDSHAKE_TIMEOUT_S: Final = 10.0
#: A server's answer to message 1 that is this long is a cookie. A Noise message 2 has 49 bytes at least; and every Noise
#: reader refuses what is shorter than a key (33 bytes), so that a base client ends its handshake and does nothing else.
COOKIE_BYTES: Final = 32


class Role(Enum):
    """Which side of a connection this is."""

    CLIENT = "client"
    SERVER = "server"


class FirstMessageGate(TypingProtocol):
    """Asked by a server before it does a Diffie-Hellman for the first message of a stranger."""

    def judge(self, message: bytes, now: float) -> tuple[bytes, bytes]:
        """The message to go on with and ``b""``; or ``b""`` and a cookie, which the client has to append to the same message.

        Raises ``RemoteProtocolError`` for a stranger that is turned away.
        """


class Handshake(Core):
    """Bytes in, bytes out, one :class:`HandshakeDone` at the end.

    ``payload`` goes into message 2 (server) or 3 (client), the first that are both encrypted and authenticated; the event has
    what the peer's payload says. Base peers send none and discard ours. A client that ``takes_cookie`` sends its first message
    again with the cookie of a server under load (:ref:`spec-cookie`); a base client does not.

    The ``gate`` of a server decides whether to ask for a cookie. ``first_byte_timeout_s`` is how long its client may be silent
    at first.
    """

    __slots__ = (
        "_buffer",
        "_deadline",
        "_first_message",
        "_gate",
        "_noise",
        "_out",
        "_payload",
        "_peer_payload",
        "_role",
        "_silent_until",
        "_step",
        "_takes_cookie",
        "answer_due",
        "challenged",
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
        first_byte_timeout_s: float | None = None,
        gate: FirstMessageGate | None = None,
        takes_cookie: bool = True,
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
        self._silent_until = None if first_byte_timeout_s is None else now + first_byte_timeout_s
        self._gate = gate
        self._takes_cookie = initiator and takes_cookie
        self._first_message = b""
        #: Whether a cookie was sent (server) or received (client). It happens once at most.
        self.challenged = False
        self._step = 0
        #: Whether the server's answer is still to be made. That costs as much as reading message 1, and is done only when the
        #: data is asked for, so that a busy server can do other work in between.
        self.answer_due = False
        #: How many messages of the peer's were looked at: the expensive part.
        self.messages = 0
        if initiator:
            self._write(b"")

    def heard(self) -> None:
        """The peer has sent something: it is not silent, even if its data is handled only later."""
        self._silent_until = None

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Take bytes from the network; raises ``RemoteProtocolError`` for anything that is not the handshake."""
        self.heard()
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES:
            size = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
            if size > MESSAGE_LIMIT_BYTES:
                raise RemoteProtocolError("handshake", "message over the limit")
            if len(self._buffer) < LENGTH_BYTES + size:
                break
            message = self._buffer[LENGTH_BYTES : LENGTH_BYTES + size]
            self._buffer = self._buffer[LENGTH_BYTES + size :]
            if self._on_cookie(message):
                continue
            done = self._on_message(message, now)
            if done is not None:
                return [done]
        return []

    def _on_cookie(self, message: bytes) -> bool:
        """Send message 1 again with the cookie, if ``message`` is one and this is a client that takes it."""
        if len(message) != COOKIE_BYTES or not self._takes_cookie or self.challenged:
            return False
        self.challenged = True
        self._send(self._first_message + message)
        return True

    def _on_message(self, message: bytes, now: float) -> Event | None:
        if self._gate is not None and self._step == 0:
            message, cookie = self._gate.judge(message, now)
            if cookie:
                if self.challenged:
                    raise RemoteProtocolError("handshake", "no cookie")
                self.challenged = True
                self._send(cookie)
                return None
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
        peer = read_hello(self._peer_payload)
        cipher = agreed(ours=read_hello(self._payload).aes, theirs=peer.aes)
        records = RecordLayer(result.send_key, result.receive_key, cipher)
        return HandshakeDone(remote, records, peer, leftover)

    def _write(self, payload: bytes) -> None:
        message = self._noise.write_message(payload)
        if not self._step:
            self._first_message = message
        self._step += 1
        self._send(message)

    def _send(self, message: bytes) -> None:
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
        if self._silent_until is None or self._deadline is None:
            return self._deadline
        return min(self._silent_until, self._deadline)

    def handle_timeout(self, now: float) -> list[Event]:
        """Raises ``RemoteProtocolError`` once the peer was silent, or the handshake has taken, too long."""
        if self._silent_until is not None and now >= self._silent_until:
            self._deadline = self._silent_until = None
            raise RemoteProtocolError("handshake", "silent")
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            raise RemoteProtocolError("handshake", "timeout")
        return []
