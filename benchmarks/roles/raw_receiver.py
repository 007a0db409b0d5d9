"""Accepts a transport and reads its data without parsing, so that the server's only cost is the relaying."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any, Final

from benchmarks.roles.raw_sender import connect

USES_TWISTED = False
_SILENCE_S: Final = 0.1


class Role:
    """Options: ``server``, see :func:`~benchmarks.roles.raw_sender.connect`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._connection = connect(options)
        self.facts: dict[str, Any] = {"key": self._connection.key.hex()}

    def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``accept`` one request, ``drain``: read until at least ``least_bytes`` came, and silence; ``ended`` is
        when the last of it came, on the clock that all processes of a machine share.
        """
        if command == "accept":
            self._connection.accept()
            return {}
        if command == "drain":
            return self._drain(arguments["least_bytes"], arguments["limit_s"])
        raise ValueError(command)

    def _drain(self, least_bytes: int, limit_s: float) -> dict[str, Any]:
        sock: socket.socket = self._connection.socket
        buffer = bytearray(1 << 20)
        began = last = time.perf_counter()
        got, limit = 0, sock.gettimeout()
        while got < least_bytes and time.perf_counter() - began < limit_s:
            got += sock.recv_into(buffer)
            last = time.perf_counter()
        sock.settimeout(_SILENCE_S)  # the rest of this data must not count for the next
        with contextlib.suppress(TimeoutError):
            while got and time.perf_counter() - began < limit_s:
                got += sock.recv_into(buffer)
                last = time.perf_counter()
        sock.settimeout(limit)
        return {"bytes": got, "ended": last}

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
