"""Strangers from many networks that misbehave a few times a second, in ways that cost a relay or a discovery something.

Each keeps its connection open as long as possible, so that timeouts and evictions are always at work. The number of sockets
is bounded.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections import Counter, deque
from typing import Any, Final

from benchmarks.processes import raise_open_files
from benchmarks.raw import CheapHandshake, RawConnection
from dmsg.address import PublicKey
from dmsg.crypto.keys import SecretKey
from dmsg.mux.core.wire import ACCEPT, ACK, CLOSE, FWD, REQUEST

USES_TWISTED = False
STANDS_FOR_OTHER_MACHINES = True
#: Sockets held at a time: the oldest is closed for a new one.
_HELD: Final = 120
_TIMEOUT_S: Final = 2.0
_NETWORKS: Final = 200


class Role:
    """Options: ``relays`` (a list of {key, port}), ``discovery`` (a port), ``targets`` (keys of clients), ``seed``."""

    def __init__(self, options: dict[str, Any]) -> None:
        raise_open_files()
        self.facts: dict[str, Any] = {}
        self._relays = [(PublicKey.parse(one["key"]), one["port"]) for one in options["relays"]]
        self._discovery: int = options["discovery"]
        self._targets = [PublicKey.parse(key) for key in options["targets"]]
        self._random = random.Random(options["seed"])
        self._held: deque[socket.socket] = deque()
        self._done: Counter[str] = Counter()
        self._ways = (
            self._silent,
            self._garbage,
            self._half_handshake,
            self._idle,
            self._made_up_requests,
            self._broken_record,
            self._silent_http,
            self._half_http,
            self._unknown_entries,
            self._false_posts,
        )

    def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``misbehave`` for ``seconds``, ``per_s`` times a second; gives the counts of each way since the beginning."""
        assert command == "misbehave"
        began, count = time.monotonic(), 0
        while (elapsed := time.monotonic() - began) < arguments["seconds"]:
            if count >= elapsed * arguments["per_s"]:
                time.sleep(0.02)
                continue
            count += 1
            way = self._random.choice(self._ways)
            try:
                way()
                self._done[way.__name__.strip("_")] += 1
            except (OSError, ValueError):  # refused, cut, or the relay is dead at the moment
                self._done["refused"] += 1
        return dict(self._done)

    # --- sockets ---------------------------------------------------------------------------------------------------

    def _hold(self, one: socket.socket) -> socket.socket:
        self._held.append(one)
        while len(self._held) > _HELD:
            self._held.popleft().close()
        return one

    def _source(self) -> str:
        return f"127.7.{self._random.randrange(_NETWORKS)}.{self._random.randrange(1, 255)}"

    def _connect(self, port: int) -> socket.socket:
        sock = socket.socket()
        sock.settimeout(_TIMEOUT_S)
        self._hold(sock)
        sock.bind((self._source(), 0))
        sock.connect(("127.0.0.1", port))
        return sock

    def _relay(self) -> tuple[PublicKey, int]:
        return self._random.choice(self._relays)

    def _raw(self) -> RawConnection:
        key, port = self._relay()
        raw = RawConnection(port, key, source=self._source(), timeout_s=_TIMEOUT_S)
        self._hold(raw.socket)
        return raw

    # --- at a relay ------------------------------------------------------------------------------------------------

    def _silent(self) -> None:
        self._connect(self._relay()[1])

    def _garbage(self) -> None:
        self._connect(self._relay()[1]).sendall(os.urandom(self._random.randint(1, 500)))

    def _half_handshake(self) -> None:
        key, port = self._relay()
        message = CheapHandshake(key, SecretKey.generate()).message_1
        self._connect(port).sendall(message[: self._random.choice((3, 30, len(message)))])

    def _idle(self) -> None:
        self._raw()

    def _made_up_requests(self) -> None:
        raw = self._raw()
        for number in range(10):
            target = self._random.choice([*self._targets, SecretKey.generate().public_key])
            extra = os.urandom(self._random.choice((0, 5, 120)))
            raw.send(REQUEST, 2 * number, raw.key + target.raw + extra)
        for kind in (ACCEPT, FWD, ACK, CLOSE):
            raw.send(kind, self._random.randrange(1 << 16), os.urandom(self._random.randint(0, 40)))
        raw.frames_now()
        if self._random.random() < 0.5:
            raw.close()

    def _broken_record(self) -> None:
        raw = self._raw()
        record = bytearray(raw.seal(REQUEST, 0, raw.key * 2))
        record[-1] ^= 1
        raw.socket.sendall(record)

    # --- at a discovery --------------------------------------------------------------------------------------------

    def _silent_http(self) -> None:
        self._connect(self._discovery)

    def _half_http(self) -> None:
        self._connect(self._discovery).sendall(
            b"POST /discovery/entries HTTP/1.1\r\nHost: d\r\nContent-Length: 900\r\n\r\n{"
        )

    def _unknown_entries(self) -> None:
        sock = self._connect(self._discovery)
        for _ in range(3):
            key = str(SecretKey.generate().public_key)
            sock.sendall(f"GET /discovery/entries/{key} HTTP/1.1\r\nHost: d\r\n\r\n".encode())
            sock.recv(4096)

    def _false_posts(self) -> None:
        sock = self._connect(self._discovery)
        for body in (os.urandom(50), b'{"version":"0.0.1"}', b"[" * 300):
            head = f"POST /discovery/entries HTTP/1.1\r\nHost: d\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            sock.recv(4096)

    def close(self) -> None:
        """Close everything."""
        for one in self._held:
            one.close()
