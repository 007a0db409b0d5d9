"""A Redis in the network in memory: the commands that a peer uses, and its scripts in Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from twisted.internet.protocol import Factory, Protocol

from dmsg.rmb.peer import redis as scripts

from .network import Network, Process

PORT = 6379


class _Connection(Protocol):
    """One client. While it waits for a list, its further commands wait, too."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._received = b""
        self._commands: deque[list[bytes]] = deque()
        self.waits: Any = None
        self.lost = False

    def dataReceived(self, data: bytes) -> None:
        self._received += data
        while (command := self._next()) is not None:
            self._commands.append(command)
        self._redis.later(self.work)

    def _next(self) -> list[bytes] | None:
        """A whole command: ``*2``, ``$4``, ``PING``, and so on, each with its line end."""
        head, end, rest = self._received.partition(b"\r\n")
        if not end:
            return None
        words = []
        for _ in range(int(head[1:])):
            size, end, rest = rest.partition(b"\r\n")
            if not end or len(rest) < int(size[1:]) + 2:
                return None
            words.append(rest[: int(size[1:])])
            rest = rest[int(size[1:]) + 2 :]
        self._received = rest
        return words

    def work(self) -> None:
        """Carry out received commands."""
        while self._commands and self.waits is None and not self.lost:
            words = self._commands.popleft()
            reply = self._redis.carry_out(self, words)
            if self.waits is None:
                self.reply(reply)

    def reply(self, reply: Any) -> None:
        if not self.lost and self.transport is not None:
            self.transport.write(_encode(reply))

    def connectionLost(self, reason: object) -> None:  # type: ignore[override]
        self.lost = True
        if self.waits is not None:
            self.waits[1].cancel()
            self.waits = None
        self._redis.connections.discard(self)


def _encode(reply: Any) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, str):
        return b"+%s\r\n" % reply.encode()
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%s\r\n" % (len(reply), reply)
    return b"*%d\r\n" % len(reply) + b"".join(map(_encode, reply))


class Redis(Factory):
    """A Redis at ``host``. Lists have their head at the left; ``pushed`` is called for each message pushed to a list."""

    noisy = False

    def __init__(self, network: Network, host: str, random: Random, pushed: Callable[[str, bytes], object]) -> None:
        self.process = Process(network, host, random)
        self.host = host
        self.lists: dict[str, deque[bytes]] = {}
        self.notes: dict[str, bytes] = {}
        self.expires: dict[str, float] = {}
        self.slow_s = 0.0
        self.connections: set[_Connection] = set()
        self._blocked: dict[str, list[_Connection]] = {}
        self._pushed = pushed
        self._port: Any = None
        self._random = random
        self.start()

    def buildProtocol(self, addr: object) -> Protocol:  # type: ignore[override]
        made = _Connection(self)
        self.connections.add(made)
        return made

    @property
    def running(self) -> bool:
        return self._port is not None

    def start(self) -> None:
        self._port = self.process.listenTCP(PORT, self)

    def stop(self) -> None:
        """Stop like a killed one that keeps its data on disk."""
        self._port.stopListening()
        self._port = None
        for pipe in self.process.pipes():
            pipe.thaw()
            pipe.b.abortConnection()
        for connection in list(self.connections):
            connection.connectionLost(None)
        self._blocked.clear()

    def later(self, work: Callable[[], None]) -> None:
        if self.slow_s:
            self.process.callLater(self._random.random() * self.slow_s, work)
        else:
            work()

    # --- data ----------------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        now = self.process.seconds()
        for key in [key for key, at in self.expires.items() if at <= now]:
            self.delete(key)

    def delete(self, *keys: str) -> int:
        gone = 0
        for key in keys:
            gone += (self.lists.pop(key, None) or self.notes.pop(key, None)) is not None
            self.expires.pop(key, None)
        return gone

    def push(self, key: str, data: bytes, *, left: bool = True) -> int:
        """Push, and hand the message to a waiting connection."""
        found = self.lists.setdefault(key, deque())
        (found.appendleft if left else found.append)(data)
        length = len(found)
        self._pushed(key, data)
        self._serve(key)
        return length

    def pop(self, key: str, *, left: bool = False) -> bytes | None:
        found = self.lists.get(key)
        if not found:
            return None
        data = found.popleft() if left else found.pop()
        if not found:
            self.delete(key)
        return data

    def _serve(self, key: str) -> None:
        waiting = self._blocked.get(key, [])
        while waiting and self.lists.get(key):
            connection = waiting.pop(0)
            waits, connection.waits = connection.waits, None
            if waits is None or connection.lost:
                continue
            waits[1].cancel()
            # A lost connection still gets the message if Redis has not noticed the loss.
            connection.reply(self._take(key, waits[0]))
            self.later(connection.work)

    def _take(self, key: str, taken: str) -> bytes | None:
        data = self.pop(key)
        if data is not None:
            self.lists.setdefault(taken, deque()).appendleft(data)
        return data

    # --- commands ------------------------------------------------------------------------------------------------------

    def carry_out(self, connection: _Connection, words: list[bytes]) -> Any:
        """The reply to a command."""
        self._expire()
        name, arguments = words[0].decode(), words[1:]
        if name == "PING":
            return "PONG"
        if name == "EVAL":
            count = int(arguments[1])
            keys = [key.decode() for key in arguments[2 : 2 + count]]
            return self._script(arguments[0].decode(), keys, arguments[2 + count :])
        keys = [key.decode("utf-8", "replace") for key in arguments]
        if name in ("LPUSH", "RPUSH"):
            return self.push(keys[0], arguments[1], left=name == "LPUSH")
        if name == "DEL":
            return self.delete(*keys)
        if name == "SCAN":
            prefix = keys[2].rstrip("*")
            return [b"0", [key.encode() for key in [*self.notes, *self.lists] if key.startswith(prefix)]]
        if name == "MGET":
            return [self.notes.get(key) for key in keys]
        assert name == "BRPOPLPUSH", name
        found = self._take(keys[0], keys[1])
        if found is not None:
            return found

        def too_late() -> None:
            connection.waits = None
            self._blocked[keys[0]].remove(connection)
            connection.reply(None)
            connection.work()

        connection.waits = keys[1], self.process.callLater(int(arguments[2]), too_late)
        self._blocked.setdefault(keys[0], []).append(connection)
        return None

    def _script(self, text: str, keys: list[str], arguments: list[bytes]) -> int:
        now = self.process.seconds()
        if text == scripts._PUSH_IF_ROOM:
            length, most, own = len(self.lists.get(keys[0], ())), int(arguments[1]), int(arguments[4])
            if length >= most and length + own >= 2 * most:
                return -length
            length = self.push(keys[0], arguments[0])
            self.expires[keys[0]] = now + int(arguments[3])
            return length
        if text == scripts._PUSH_ONCE:
            was_there = self.delete(keys[0])
            if arguments[3] == b"1" and not was_there:
                return 0
            for mark in keys[2:]:
                if mark in self.notes:
                    return 0
                if int(arguments[4]):
                    self.notes[mark] = b""
                    self.expires[mark] = now + int(arguments[4])
            self.push(keys[1], arguments[0])
            self.expires[keys[1]] = now + int(arguments[2])
            return 1
        if text == scripts._DONE:
            for at, key in enumerate(keys[1:]):
                self.notes[key] = arguments[2 + 2 * at]
                self.expires[key] = now + int(arguments[1 + 2 * at])
            taken = self.lists.get(keys[0], deque())
            if arguments[0] in taken:
                taken.remove(arguments[0])
                if not taken:
                    self.delete(keys[0])
                return 1
            return 0
        if text == scripts._PUT_BACK:
            if not self.delete(keys[0]):
                return 0
            self.push(keys[1], arguments[0], left=False)
            return 1
        assert text == scripts._GIVE_BACK
        while (data := self.pop(keys[0], left=True)) is not None:
            self.push(keys[1], data, left=False)
        return 1
