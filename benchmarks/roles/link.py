"""A long-distance path: a port that forwards connections with a delay, at a rate, through a bounded buffer.

Bytes of TCP cannot be dropped on the way, so a full path stops reading, like a sender whose window is the path's bandwidth
times its delay plus the buffer in front of the narrowest hop. The time for which it was full is counted.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from typing import Any, Final

USES_TWISTED = False
#: A piece arrives as a whole, like a packet: one of Ethernet, or as much as the path takes in this time.
_PACKET_BYTES: Final = 1448
_PIECE_S: Final = 0.00013
#: Pieces taken of one connection before the next has its turn.
_TURN: Final = 16
#: The kernel's buffers of this process are no part of the path, and kept small.
_SOCKET_BYTES: Final = 128 * 1024
#: Rate of a path without a limit.
_FASTEST_BITS_PER_S: Final = 4e9
_LONGEST_WAIT_S: Final = 0.2


class Lane:
    """One direction of one connection."""

    def __init__(self, path: Path, source: socket.socket, target: socket.socket) -> None:
        self.path = path
        self.source = source
        self.target = target
        self.ended = False  # the source has ended
        self.over = False  # and the target has been told
        self._pieces: deque[tuple[float, bytes]] = deque()  # when it arrives, what
        self._blocked = False

    def take(self, now: float) -> None:
        """Read as much as the path has room for."""
        for _ in range(_TURN):
            if self.ended or not self.path.has_room(now):
                return
            try:
                data = self.source.recv(self.path.piece_bytes)
            except BlockingIOError:
                return
            if not data:
                self.ended = True
                return
            self._pieces.append((self.path.arrival(len(data), now), data))

    def give(self, now: float) -> None:
        """Write what has arrived."""
        self._blocked = False
        while self._pieces and self._pieces[0][0] <= now:
            due, data = self._pieces[0]
            try:
                sent = self.target.send(data)
            except BlockingIOError:
                self._blocked = True
                return
            self.path.left(sent)
            if sent < len(data):
                self._pieces[0] = (due, data[sent:])
                self._blocked = True
                return
            self._pieces.popleft()
        if self.ended and not self._pieces and not self.over:
            self.over = True
            with contextlib.suppress(OSError):
                self.target.shutdown(socket.SHUT_WR)

    @property
    def wants(self) -> float | None:
        """When the next piece arrives; ``None`` if nothing is in flight, or the target takes nothing."""
        return self._pieces[0][0] if self._pieces and not self._blocked else None

    @property
    def blocked(self) -> bool:
        """Whether the target takes nothing."""
        return self._blocked

    def forget(self) -> None:
        """The connection is cut: data in flight is lost."""
        self.path.left(sum(len(data) for _, data in self._pieces))
        self._pieces.clear()


class Path:
    """One direction, shared by all connections: a rate, a delay, a buffer."""

    def __init__(self, delay_s: float, bits_per_s: float, buffer_bytes: int) -> None:
        self._delay_s = delay_s
        self._bytes_per_s = (bits_per_s or _FASTEST_BITS_PER_S) / 8
        self.piece_bytes = max(_PACKET_BYTES, int(self._bytes_per_s * _PIECE_S))
        self.most_bytes = int(self._bytes_per_s * delay_s) + buffer_bytes
        self._under_way = 0
        self._free_at = 0.0
        self._full_since = 0.0
        self.full_s = 0.0

    def has_room(self, now: float) -> bool:
        """Whether it takes more now."""
        room = self._under_way < self.most_bytes
        if not room and not self._full_since:
            self._full_since = now
        elif room and self._full_since:
            self.full_s += now - self._full_since
            self._full_since = 0.0
        return room

    def arrival(self, size: int, now: float) -> float:
        """When ``size`` bytes that are sent now arrive."""
        self._under_way += size
        self._free_at = max(now, self._free_at) + size / self._bytes_per_s
        return self._free_at + self._delay_s

    def left(self, size: int) -> None:
        """``size`` bytes have arrived, or are lost."""
        self._under_way -= size


class Role:
    """Options: ``to`` (a port), ``delay_s`` one way, ``bits_per_s`` (0: none), ``buffer_bytes``.

    With ``host``, an address of this machine, ``to`` is a list of ports: each port at ``host`` leads to the same port at
    ``to_host``, for programs that are given a host and find the ports themselves.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        host = options.get("host")
        places = [(host, port, port) for port in options["to"]] if host else [("127.0.0.1", 0, options["to"])]
        shape = (options["delay_s"], options.get("bits_per_s", 0), options.get("buffer_bytes", 256 * 1024))
        self._paths = (Path(*shape), Path(*shape))
        self._listeners = {socket.create_server((at, port), backlog=256): to for at, port, to in places}
        for listener in self._listeners:
            _keep_small(listener)
            listener.setblocking(False)
        self._to_host: str = options.get("to_host", "127.0.0.1")
        self.facts: dict[str, Any] = {"port": next(iter(self._listeners)).getsockname()[1]}
        self._lanes: list[tuple[Lane, Lane]] = []
        self._cutting = threading.Event()
        self._closing = threading.Event()
        self._worker = threading.Thread(target=self._run, daemon=True)
        self._worker.start()

    def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``full``: seconds without room in each direction since the last call; ``cut``: lose all connections."""
        if command == "full":
            full = [path.full_s for path in self._paths]
            for path in self._paths:
                path.full_s = 0.0
            return {"full_s": full}
        if command == "cut":
            self._cutting.set()
            return {}
        raise ValueError(command)

    def close(self) -> None:
        """End."""
        self._closing.set()
        self._worker.join(2 * _LONGEST_WAIT_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            now = time.monotonic()
            if self._cutting.is_set():
                self._cutting.clear()
                for pair in list(self._lanes):
                    self._drop(pair)
            for pair in list(self._lanes):
                try:
                    for lane in pair:
                        lane.give(now)
                        lane.take(now)
                except OSError:
                    self._drop(pair)
                    continue
                if all(lane.over for lane in pair):
                    self._drop(pair)
            self._wait(now)
        for pair in list(self._lanes):
            self._drop(pair)
        for listener in self._listeners:
            listener.close()

    def _wait(self, now: float) -> None:
        times = [lane.wants for pair in self._lanes for lane in pair]
        due = min((each for each in times if each is not None), default=now + _LONGEST_WAIT_S)
        with selectors.DefaultSelector() as selector:
            for listener in self._listeners:
                selector.register(listener, selectors.EVENT_READ)
            wanted: dict[socket.socket, int] = {}
            for pair in self._lanes:
                for lane in pair:
                    if not lane.ended and lane.path.has_room(now):
                        wanted[lane.source] = wanted.get(lane.source, 0) | selectors.EVENT_READ
                    if lane.blocked:
                        wanted[lane.target] = wanted.get(lane.target, 0) | selectors.EVENT_WRITE
            for each, events in wanted.items():
                selector.register(each, events)
            ready = selector.select(min(_LONGEST_WAIT_S, max(0.0, due - time.monotonic())))
        for key, _ in ready:
            if key.fileobj in self._listeners:
                self._accept(key.fileobj)

    def _accept(self, listener: Any) -> None:
        near, _ = listener.accept()
        far = socket.socket()
        _keep_small(far)
        try:
            far.connect((self._to_host, self._listeners[listener]))
        except OSError:
            near.close()
            far.close()
            return
        for each in (near, far):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.setblocking(False)
        self._lanes.append((Lane(self._paths[0], near, far), Lane(self._paths[1], far, near)))

    def _drop(self, pair: tuple[Lane, Lane]) -> None:
        self._lanes.remove(pair)
        for lane in pair:
            lane.forget()
            lane.source.close()


def _keep_small(each: socket.socket) -> None:
    each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
    each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
