"""Sends frames of data as fast as the socket takes them, one write for each, and waits for no answer."""

from __future__ import annotations

import time
from typing import Any, Final

from benchmarks.raw import RawConnection
from benchmarks.raw_link import RawLink
from dmsg.address import PublicKey

USES_TWISTED = False
#: How far ahead of its pace a sender may be, in seconds.
_TURN_S: Final = 0.001


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
        """``dial`` (target), ``prepare`` (size, count: made beforehand), ``send`` (what was prepared; ``bytes_per_s``, or as
        fast as it goes), ``connect`` (count).
        """
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
            pace = arguments.get("bytes_per_s")
            sent = 0
            for record in self._records:
                send(record)
                sent += len(record)
                if pace and (ahead_s := began + sent / pace - time.perf_counter()) > _TURN_S:
                    time.sleep(ahead_s)
            self._records = []
            return {"elapsed_s": time.perf_counter() - began}
        raise ValueError(command)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
