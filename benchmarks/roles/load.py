"""Opens connections at a pace and holds them, with little CPU (raw sockets, epoll, handshakes made beforehand)."""

from __future__ import annotations

import select
import socket
import time
from typing import Any

from benchmarks.processes import raise_open_files
from benchmarks.raw import MESSAGE_2_BYTES, CheapHandshake
from dmsg.address import PublicKey
from dmsg.crypto.keys import SecretKey

USES_TWISTED = False
STANDS_FOR_OTHER_MACHINES = True
#: Number of loopback addresses that connections come from, so that limits for one address do not apply.
_ADDRESSES = 16
#: The OK frame as a record: 2 length, 4 counter, 5 frame, 16 tag.
_OK_RECORD_BYTES = 27


class _Opening:
    __slots__ = ("began", "buffer", "handshake", "need", "socket")

    def __init__(self, handshake: CheapHandshake) -> None:
        self.handshake = handshake
        self.buffer = b""
        self.need = MESSAGE_2_BYTES
        self.began = 0.0
        self.socket: socket.socket | None = None


class Role:
    """Options: ``server`` ({key, port})."""

    def __init__(self, options: dict[str, Any]) -> None:
        raise_open_files()
        self.facts: dict[str, Any] = {}
        self._server = PublicKey.parse(options["server"]["key"])
        self._port = options["server"]["port"]
        self._ready: list[_Opening] = []
        self._open: list[socket.socket] = []

    def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``prepare`` (count), ``open`` (count, per_second, limit_s), ``close`` (all)."""
        if command == "prepare":
            self._ready = [
                _Opening(CheapHandshake(self._server, SecretKey.generate())) for _ in range(arguments["count"])
            ]
            return {}
        if command == "open":
            return self._open_all(**arguments)
        if command == "close":
            self.close()
            return {}
        raise ValueError(command)

    def _open_all(self, count: int, per_second: float, limit_s: float) -> dict[str, Any]:
        """Open ``count`` connections, evenly ``per_second``; gives the number admitted and the time it took."""
        poll = select.epoll()
        opening: dict[int, _Opening] = {}
        latencies_ms: list[float] = []
        failed = started = 0
        began, cpu = time.perf_counter(), time.process_time()
        while len(latencies_ms) + failed < count:
            now = time.perf_counter()
            if now - began > limit_s:
                break
            due = min(count, int((now - began) * per_second) + 1)
            while started < due:
                one = self._ready.pop()
                started += 1
                opening[self._connect(one, poll, started)] = one
            wait_s = max(0.0005, began + started / per_second - time.perf_counter()) if started < count else 0.05
            for descriptor, _ in poll.poll(wait_s):
                one = opening[descriptor]
                try:
                    over = self._on_readable(one)
                except OSError:
                    over, failed = True, failed + 1
                else:
                    if over:
                        latencies_ms.append((time.perf_counter() - one.began) * 1000)
                if over:
                    poll.unregister(descriptor)
                    del opening[descriptor]
                    assert one.socket is not None
                    self._open.append(one.socket)
        poll.close()
        latencies_ms.sort()
        return {
            "admitted": len(latencies_ms),
            "failed": failed,
            "elapsed_s": time.perf_counter() - began,
            "cpu_s": time.process_time() - cpu,
            "p50_ms": latencies_ms[len(latencies_ms) // 2] if latencies_ms else 0.0,
            "p99_ms": latencies_ms[int(len(latencies_ms) * 0.99)] if latencies_ms else 0.0,
        }

    def _connect(self, one: _Opening, poll: select.epoll, number: int) -> int:
        one.began = time.perf_counter()
        one.socket = sock = socket.socket()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT: ports are per destination, not per bind
        sock.bind((f"127.0.0.{2 + number % _ADDRESSES}", 0))
        sock.connect(("127.0.0.1", self._port))  # at once on loopback: the kernel accepts
        sock.setblocking(False)
        sock.send(one.handshake.message_1)
        poll.register(sock, select.EPOLLIN)
        return sock.fileno()

    def _on_readable(self, one: _Opening) -> bool:
        sock = one.socket
        assert sock is not None
        data = sock.recv(4096)
        if not data:
            raise ConnectionError("closed")
        one.buffer += data
        if one.need == MESSAGE_2_BYTES and len(one.buffer) >= MESSAGE_2_BYTES:
            message_3, _ = one.handshake.finish(one.buffer[:MESSAGE_2_BYTES])
            sock.send(message_3)
            one.buffer = one.buffer[MESSAGE_2_BYTES:]
            one.need = _OK_RECORD_BYTES
        return one.need == _OK_RECORD_BYTES and len(one.buffer) >= _OK_RECORD_BYTES

    def close(self) -> None:
        """Close everything."""
        for sock in self._open:
            sock.close()
        self._open = []
        self._ready = []
