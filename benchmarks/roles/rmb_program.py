"""A program at the Redis of a peer: calls a command of another twin, or serves one, over a blocking socket."""

from __future__ import annotations

import os
import socket
import time
from typing import Any, BinaryIO, Final, cast

from benchmarks.report import percentile
from dmsg.rmb.core.messages import IncomingRequest, OutgoingRequest, OutgoingResponse
from dmsg.rmb.peer.commands import LOCAL, REPLY

USES_TWISTED = False
_COMMAND: Final = "bench.echo"
_SERVED: Final = f"msgbus.{_COMMAND}"
_WAIT_S: Final = 20


class _Redis:
    """A client that can only push and pop."""

    def __init__(self, port: int, database: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), _WAIT_S + 5)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = cast(BinaryIO, self._socket.makefile("rb"))
        self._ask(b"SELECT", b"%d" % database)

    def push(self, name: str, value: bytes) -> None:
        """Put ``value`` into a list."""
        self._ask(b"LPUSH", name.encode(), value)

    def pop(self, name: str) -> bytes:
        """Wait for the oldest value of a list."""
        found = self._ask(b"BRPOP", name.encode(), b"%d" % _WAIT_S)
        if found is None:
            raise TimeoutError(f"nothing came to {name}")
        value: bytes = found[1]
        return value

    def _ask(self, *words: bytes) -> Any:
        parts = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
        self._socket.sendall(b"*%d\r\n%s" % (len(words), parts))
        return self._answer()

    def _answer(self) -> Any:
        line = self._file.readline()
        kind, rest = line[:1], line[1:-2]
        if kind in (b"+", b":"):
            return rest
        if kind == b"$":
            return None if rest == b"-1" else self._file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return None if rest == b"-1" else [self._answer() for _ in range(int(rest))]
        raise ConnectionError(f"Redis said {line!r}")

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class Role:
    """Options: ``redis`` (port) and ``database``."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._redis = _Redis(options["redis"], options["database"])
        self.facts: dict[str, Any] = {}

    def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``serve`` (rounds), ``call`` (to, rounds, size, window): ``window`` calls in flight at a time."""
        if command == "serve":
            return self._serve(**arguments)
        if command == "call":
            return self._call(**arguments)
        raise ValueError(command)

    def _serve(self, rounds: int) -> dict[str, Any]:
        for _ in range(rounds):
            request = IncomingRequest.from_json(self._redis.pop(_SERVED))
            answer = OutgoingResponse(
                uid=request.uid, destination=request.source, timestamp=int(time.time()), payload=request.payload
            )
            self._redis.push(REPLY, answer.to_json())
        return {}

    def _call(self, to: int, rounds: int, size: int, window: int) -> dict[str, Any]:
        answers = f"bench.{os.getpid()}"
        began_at: list[float] = []
        times_ms: list[float] = []
        payload = os.urandom(size)
        began = time.perf_counter()
        while len(times_ms) < rounds:
            while len(began_at) < rounds and len(began_at) - len(times_ms) < window:
                request = OutgoingRequest(
                    command=_COMMAND,
                    destinations=(to,),
                    reply_to=answers,
                    expiration=60,
                    timestamp=int(time.time()),
                    payload=payload,
                    reference=str(len(began_at)),
                )
                began_at.append(time.perf_counter())
                self._redis.push(LOCAL, request.to_json())
            answer = self._redis.pop(answers)
            if b'"err":null' not in answer:
                raise RuntimeError(f"a call failed: {answer[:200]!r}")
            times_ms.append((time.perf_counter() - began_at[len(times_ms)]) * 1000)
        return {
            "per_s": rounds / (time.perf_counter() - began),
            "p50_ms": percentile(times_ms, 0.5),
            "p99_ms": percentile(times_ms, 0.99),
        }

    def close(self) -> None:
        """Hang up."""
        self._redis.close()
