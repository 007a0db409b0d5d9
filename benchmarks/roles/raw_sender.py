"""Sends frames of data as fast as the socket takes them, one write for each, and waits for no answer."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.raw import RawConnection
from benchmarks.raw_link import RawLink
from dmsg.address import PublicKey

USES_TWISTED = False


def connect(options: dict[str, Any]) -> RawConnection | RawLink:
    """A connection to ``server`` ({key, port, protocol: ``messaging`` or none})."""
    server = options["server"]
    kind = RawLink if server.get("protocol") == "messaging" else RawConnection
    return kind(server["port"], PublicKey.parse(server["key"]))


class Role:
    """Options: ``server``, see :func:`connect`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._connection = connect(options)
        self.facts: dict[str, Any] = {"key": self._connection.key.hex()}
        self._records: list[bytes] = []

    def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``dial`` (target), ``prepare`` (size, count: made beforehand), ``send`` (what was prepared), ``connect`` (count)."""
        connection = self._connection
        if command == "dial":
            connection.ask(bytes.fromhex(arguments["target"]))
            return {}
        if command == "prepare":
            self._records = [connection.message(arguments["size"]) for _ in range(arguments["count"])]
            return {}
        if command == "connect":
            for _ in range(arguments["count"]):
                connect(self._options).close()
            return {}
        if command == "send":
            began = time.perf_counter()
            send = connection.socket.sendall
            for record in self._records:
                send(record)
            self._records = []
            return {"elapsed_s": time.perf_counter() - began}
        raise ValueError(command)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
