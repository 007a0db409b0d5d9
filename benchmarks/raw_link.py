"""A messaging client that costs next to nothing, so that a bench measures the relay. For benches only."""

from __future__ import annotations

import os
import socket
from typing import Final

from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.messaging.core.events import LinkDone
from dmsg.messaging.core.link import LinkInitiator
from dmsg.messaging.core.wire import CHANNEL_OPENED, GO, OPEN_CHANNEL, FrameReader

#: A Noise message as far as a relay checks it: a point, and a tag.
_MESSAGE: Final = SecretKey(b"\x07" * 32).public_key.raw + bytes(16)


class RawLink:
    """A link to a relay on a blocking socket, with at most one channel and no automatic replies."""

    def __init__(self, port: int, server: PublicKey, *, timeout_s: float = 20.0) -> None:
        secret = SecretKey.generate()
        self.key = secret.public_key.raw
        self.socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = FrameReader(GO)
        self._frames: list[tuple[int, int, bytes]] = []
        self._id = 0
        core = LinkInitiator(secret, server, now=0.0)
        while True:
            self.socket.sendall(core.data_to_send())
            for event in core.receive_data(self._receive(), 0.0):
                if isinstance(event, LinkDone):
                    self._take(event.leftover)
                    return

    def _receive(self) -> bytes:
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("the relay closed the connection")
        return data

    def _take(self, data: bytes) -> None:
        buffer, frames = self._reader.read(data)
        self._frames += [(kind, number, buffer[start:end]) for kind, number, start, end in frames]

    def _next_frame(self) -> tuple[int, int, bytes]:
        while not self._frames:
            self._take(self._receive())
        return self._frames.pop(0)

    def ask(self, target: bytes) -> None:
        """Open a channel to the raw key ``target``. Raises ``ConnectionError`` when it is refused."""
        self.socket.sendall(GO.encode(OPEN_CHANNEL, self._id, target + _MESSAGE))
        if self._next_frame()[0] != CHANNEL_OPENED:
            raise ConnectionError("not accepted")

    def accept(self) -> None:
        """Wait for an OpenChannel, and accept it."""
        kind, self._id, _ = self._next_frame()
        assert kind == OPEN_CHANNEL
        self.socket.sendall(GO.encode(CHANNEL_OPENED, self._id, _MESSAGE))

    def message(self, size: int) -> bytes:
        """A Send with ``size`` bytes and a tag, as bytes for the socket."""
        return GO.send_header(self._id, size + 16) + os.urandom(size + 16)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
