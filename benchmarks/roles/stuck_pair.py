"""A receiver that never reads, and a sender in league with it that pushes data and ignores the server's answers.

The receiver cannot see the REQUESTs, but it knows which ids the server will choose, and accepts blindly.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any, Final

from benchmarks.raw import RawConnection
from dmsg.address import PublicKey
from dmsg.mux.core.wire import ACCEPT, CLOSE, FWD, REQUEST

USES_TWISTED = False
STANDS_FOR_OTHER_MACHINES = True
_FRAME_DATA_BYTES: Final = 16_384
_ABSENT: Final = PublicKey.parse("02" + "79be667ef9dcbbac55a06295ce870b07029bfcdb2dce28d959f2815b16f81798").raw


class Role:
    """Options: ``server`` ({key, port})."""

    def __init__(self, options: dict[str, Any]) -> None:
        server = options["server"]
        key = PublicKey.parse(server["key"])
        self._receiver = RawConnection(server["port"], key, receive_buffer_bytes=4096)
        self._sender = RawConnection(server["port"], key)
        self.facts: dict[str, Any] = {"key": self._receiver.key.hex()}
        self._id = 0
        self._their_id = -1

    def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``accept`` one request (and never read again), ``flood`` (total, per_second, limit_s)."""
        if command == "accept":
            self._accept(self._receiver.next_frame())
            return {}
        if command == "flood":
            return self._flood(**arguments)
        raise ValueError(command)

    def _accept(self, frame: tuple[int, int, bytes]) -> None:
        kind, self._their_id, payload = frame
        assert kind == REQUEST
        self._receiver.send(ACCEPT, self._their_id, payload)

    def _open(self) -> None:
        """Make a transport from the sender to the receiver, who may be stuck already."""
        sender, receiver = self._sender, self._receiver
        self._id += 2
        keys = sender.key + receiver.key
        sender.send(REQUEST, self._id, keys)
        if self._their_id < 0:
            self._accept(receiver.next_frame())
        else:
            # the refusal of a second request shows that the server has seen the first
            self._id += 2
            sender.send(REQUEST, self._id, sender.key + _ABSENT)
            while True:
                kind, transport_id, _ = sender.next_frame()
                if kind == CLOSE and transport_id == self._id - 2:
                    raise ConnectionError("refused")
                if kind == CLOSE and transport_id == self._id:
                    break
            self._id -= 2
            self._their_id = (self._their_id + 2) & 0xFFFF
            receiver.send(ACCEPT, self._their_id, keys)
        while sender.next_frame()[:2] != (ACCEPT, self._id):
            pass

    def _flood(self, total: int, per_second: float, limit_s: float) -> dict[str, Any]:
        """Push ``total`` bytes, at most ``per_second``, opening a new transport whenever one is closed."""
        sender = self._sender
        payload = os.urandom(2 + _FRAME_DATA_BYTES)
        began = time.perf_counter()
        written = transports = refused = 0
        is_open = False
        while written < total and time.perf_counter() - began < limit_s:
            if not is_open:
                try:
                    self._open()
                except ConnectionError:
                    refused += 1
                    time.sleep(0.02)
                    continue
                transports += 1
                is_open = True
            ahead_s = written / per_second - (time.perf_counter() - began)
            if ahead_s > 0:
                time.sleep(ahead_s)
            sender.send(FWD, self._id, payload)
            written += _FRAME_DATA_BYTES
            if any(kind == CLOSE and number == self._id for kind, number, _ in sender.frames_now()):
                is_open = False
                self._id += 2
        return {
            "written_bytes": written,
            "transports": transports,
            "refused": refused,
            "elapsed_s": time.perf_counter() - began,
        }

    def close(self) -> None:
        """Close both connections."""
        for one in (self._sender, self._receiver):
            one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            one.close()
