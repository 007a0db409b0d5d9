"""Accepts a transport and reads what comes without looking at it, so that it costs the server nothing but the relaying."""

from __future__ import annotations

import socket
import time
from typing import Any

from benchmarks.roles.raw_sender import connect

USES_TWISTED = False


class Role:
    """Options: ``server``, see :func:`~benchmarks.roles.raw_sender.connect`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._connection = connect(options)
        self.facts: dict[str, Any] = {"key": self._connection.key.hex()}

    def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``accept`` one request, ``drain``: read until at least ``least_bytes`` came."""
        if command == "accept":
            self._connection.accept()
            return {}
        if command == "drain":
            return self._drain(arguments["least_bytes"], arguments["limit_s"])
        raise ValueError(command)

    def _drain(self, least_bytes: int, limit_s: float) -> dict[str, Any]:
        sock: socket.socket = self._connection.socket
        buffer = bytearray(1 << 20)
        began = time.perf_counter()
        got = 0
        while got < least_bytes and time.perf_counter() - began < limit_s:
            got += sock.recv_into(buffer)
        return {"bytes": got, "elapsed_s": time.perf_counter() - began}

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
