"""A session of the Reliable Message Bus that costs next to nothing, so that a bench measures the relay."""

from __future__ import annotations

import base64
import os
import socket
import time

from dmsg.rmb.core.keys import TwinKey
from dmsg.rmb.core.signing import sign_envelope
from dmsg.rmb.core.token import make_token
from dmsg.rmb.core.wire import Envelope, encode_envelope
from dmsg.sansio.websocket_frames import BINARY, FIN, MASKED, apply_mask, frame_head

_REQUEST = (
    "GET /?{token} HTTP/1.1\r\nHost: relay\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
)


def signed_envelope(size: int, key: TwinKey, source: tuple[int, str | None], destination: int) -> bytes:
    """A request of the session ``source`` with ``size`` random bytes to the twin ``destination``."""
    envelope = Envelope(uid=os.urandom(16).hex(), timestamp=int(time.time()), expiration=300, plain=os.urandom(size))
    envelope.source.twin, connection = source
    if connection is not None:
        envelope.source.connection = connection
    envelope.destination.twin = destination
    envelope.request.command = "bench"
    sign_envelope(envelope, key)
    return encode_envelope(envelope)


def sent_frame(message: bytes) -> bytes:
    """``message`` as a client sends it."""
    mask = os.urandom(4)
    return frame_head(FIN | BINARY, len(message), MASKED) + mask + apply_mask(message, mask)


def received_bytes(message: bytes) -> int:
    """Length of the frame in which a relay sends ``message``."""
    return len(frame_head(FIN | BINARY, len(message), 0)) + len(message)


class RawSession:
    """A WebSocket of ``twin`` at the relay on ``port``, on a blocking socket, without automatic replies."""

    def __init__(self, port: int, key: TwinKey, twin: int, connection: str | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 20.0)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        token = make_token(key, twin, connection, int(time.time()))
        request = _REQUEST.format(token=token, key=base64.b64encode(os.urandom(16)).decode())
        self.socket.sendall(request.encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            data = self.socket.recv(1)
            if not data:
                raise ConnectionError(f"the relay closed the connection: {head!r}")
            head += data
        if not head.startswith(b"HTTP/1.1 101 "):
            raise ConnectionError(f"the relay refused: {head!r}")

    def read(self, size: int) -> None:
        """Wait for ``size`` bytes, whatever they are."""
        while size > 0:
            data = self.socket.recv(min(size, 1 << 20))
            if not data:
                raise ConnectionError("the relay closed the connection")
            size -= len(data)

    def close(self) -> None:
        """Close the socket, without a goodbye."""
        self.socket.close()
