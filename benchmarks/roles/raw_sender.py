"""Sends FWD frames as fast as the socket takes them, one record and one write for each; waits for no ACK."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.raw import RawConnection
from dmsg.address import PublicKey
from dmsg.mux.core.wire import ACCEPT, FWD, REQUEST

USES_TWISTED = False


class Role:
    """Options: ``server`` ({key, port})."""

    def __init__(self, options: dict[str, Any]) -> None:
        server = options["server"]
        self._connection = RawConnection(server["port"], PublicKey.parse(server["key"]))
        self.facts: dict[str, Any] = {"key": self._connection.key.hex()}
        self._id = 0
        self._records: list[bytes] = []

    def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``dial`` (target), ``prepare`` (size, count: made beforehand), ``send`` (what was prepared)."""
        connection = self._connection
        if command == "dial":
            self._id += 2
            connection.send(REQUEST, self._id, connection.key + bytes.fromhex(arguments["target"]))
            if connection.next_frame()[0] != ACCEPT:
                raise ConnectionError("not accepted")
            return {}
        if command == "prepare":
            payload = b"\x00\x01" + os.urandom(arguments["size"])
            self._records = [connection.seal(FWD, self._id, payload) for _ in range(arguments["count"])]
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
