"""Sessions at a relay of the Reliable Message Bus that cost next to nothing: one that talks, and idle ones."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.processes import raise_open_files
from benchmarks.raw_session import RawSession, received_bytes, sent_frame, signed_envelope
from benchmarks.report import percentile
from dmsg.rmb.core.keys import KeyType, TwinKey

USES_TWISTED = False
#: Fewer than a twin may have.
_SESSIONS_OF_A_TWIN = 200


class Role:
    """Options: ``port`` of the relay, ``twins``: number and secret of each. The first has the session that talks."""

    def __init__(self, options: dict[str, Any]) -> None:
        raise_open_files()
        self.facts: dict[str, Any] = {}
        self._port = options["port"]
        self._twins = [(number, TwinKey(bytes.fromhex(secret), KeyType.ED25519)) for number, secret in options["twins"]]
        self._twin, self._key = self._twins[0]
        self._session = RawSession(self._port, self._key, self._twin)
        self._idle: list[RawSession] = []
        self._frames: list[bytes] = []
        self._one_bytes = 0

    def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``prepare`` (size, count, to), ``send`` what was prepared, one frame in a write; ``drain`` (size: bytes in all);
        ``pings`` and ``echo`` (rounds, size: bytes that are waited for) after ``prepare``; ``fill`` (count), ``empty``.
        """
        method: Any = getattr(self, f"_{command}")
        result: dict[str, Any] = method(**arguments)
        return result

    def _prepare(self, size: int, count: int, to: int) -> dict[str, Any]:
        envelope = signed_envelope(size, self._key, (self._twin, None), to)
        # A few masks are reused: making all frames would take longer than sending them.
        frames = [sent_frame(envelope) for _ in range(min(count, 64))]
        self._frames = [frames[number % len(frames)] for number in range(count)]
        return {"frame_bytes": received_bytes(envelope)}

    def _send(self) -> dict[str, Any]:
        send = self._session.socket.sendall
        for frame in self._frames:
            send(frame)
        return {}

    def _drain(self, size: int) -> dict[str, Any]:
        sock, buffer = self._session.socket, bytearray(1 << 20)
        began = time.perf_counter()
        while size > 0:
            got = sock.recv_into(buffer)
            if not got:
                raise ConnectionError("the relay closed the connection")
            size -= got
        return {"elapsed_s": time.perf_counter() - began}

    def _pings(self, rounds: int, size: int) -> dict[str, Any]:
        """Send one, wait for the answer of ``size`` bytes, and again."""
        session, frame = self._session, self._frames[0]
        times_ms = []
        for _ in range(rounds):
            began = time.perf_counter()
            session.socket.sendall(frame)
            session.read(size)
            times_ms.append((time.perf_counter() - began) * 1000)
        return {"p50_ms": percentile(times_ms, 0.5), "p99_ms": percentile(times_ms, 0.99)}

    def _echo(self, rounds: int, size: int) -> dict[str, Any]:
        """Wait for ``size`` bytes, send one, and again."""
        for _ in range(rounds):
            self._session.read(size)
            self._session.socket.sendall(self._frames[0])
        return {}

    def _fill(self, count: int) -> dict[str, Any]:
        for number in range(len(self._idle), len(self._idle) + count):
            twin, key = self._twins[1 + number // _SESSIONS_OF_A_TWIN]
            self._idle.append(RawSession(self._port, key, twin, str(number)))
        return {}

    def _empty(self) -> dict[str, Any]:
        for session in self._idle:
            session.close()
        self._idle.clear()
        return {}

    def close(self) -> None:
        """Close all sessions."""
        self._session.close()
        self._empty()
