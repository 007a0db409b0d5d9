"""A Redis of their own for tests of the peer, which can go away and come back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred

from dmsg.address import HostPort, RedisAddress
from dmsg.glue.errors import RedisAway
from dmsg.glue.redis import Taker
from dmsg.glue.waiters import Waiters
from dmsg.rmb.client.errors import CallTimeout, Stopped, TooMuchUnderWay
from dmsg.rmb.client.exchange import Accepted, ExchangeOwner
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.replies import error_reply, response
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope
from dmsg.rmb.peer.gateway import Gateway
from dmsg.rmb.peer.redis import RedisLists
from dmsg.testing.process import free_port


@pytest.fixture
def address(redis_url: str) -> RedisAddress:
    """An empty Redis."""
    return RedisAddress.parse(redis_url)


@pytest.fixture
def opened(guard: None, reactor: Any) -> Iterator[Any]:
    """``opened(RedisLists, …)``: with the reactor, and closed when the test ends."""
    made: list[Any] = []

    def make(kind: type[Any], *arguments: Any, **options: Any) -> Any:
        made.append(kind(*arguments, reactor, **options))
        return made[-1]

    yield make
    for one in made:
        pytest_twisted.blockon(Deferred.fromCoroutine(one.close()))


@pytest.fixture
def lists(opened: Any, address: RedisAddress) -> RedisLists:
    """Pushes to the empty Redis."""
    return opened(RedisLists, address)


@pytest.fixture
def taker(opened: Any, address: RedisAddress) -> Any:
    """``taker("key")``: takes from it."""

    def make(key: str) -> Taker:
        return opened(Taker, address, key)

    return make


class RedisProcess:
    """A redis-server on one port, which keeps what it has (append-only file) from one start to the next."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.address = RedisAddress(HostPort("127.0.0.1", free_port()))

    def start(self, *more: str) -> None:
        """Start it, and wait until it listens."""
        program = shutil.which("redis-server")
        assert program is not None, "these tests need the program redis-server"
        options = ["--port", str(self.address.server.port), "--bind", "127.0.0.1", "--save", ""]
        options += ["--appendonly", "yes", "--appendfsync", "always", "--dir", str(self._directory), *more]
        self._process = subprocess.Popen([program, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if b"eady to accept connections" in line:
                return
        raise AssertionError("redis-server did not start")

    def pause(self) -> None:
        """It takes commands, and does nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # it could take one more before

    def resume(self) -> None:
        """It goes on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """It is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


@pytest.fixture
def redis_process(tmp_path: Path) -> Iterator[RedisProcess]:
    """A redis-server that is not running yet."""
    process = RedisProcess(tmp_path)
    yield process
    process.kill()


class FakeExchange:
    """Stands for the relays and all twins behind them.

    ``answer(envelope)`` gives, for each request that is sent, what it is answered with: an :class:`Accepted`, an error to
    raise, or ``None`` for nothing until its time is over.
    """

    def __init__(self, reactor: Any, owner: ExchangeOwner) -> None:
        self.address = SessionAddress(1)
        self.owner = owner
        self.answer: Callable[[Envelope], Accepted | Exception | None] = lambda envelope: answer_to(envelope, b"pong")
        #: Twins to which no relay has taken a request.
        self.unreachable: set[int] = set()
        #: Requests in the order in which they came, and the seconds they have.
        self.requests: list[tuple[Envelope, float]] = []
        self.answers: list[Envelope] = []
        #: Whether relays have taken enough of the answers.
        self.takes_answers = True
        #: How many calls it has under way at most.
        self.most_open = 10_000
        #: Answers that the relays have kept for us.
        self.kept: list[Accepted] = []
        self.sent: Waiters[None] = Waiters()
        self._reactor = reactor
        self._open: dict[str, tuple[SessionAddress, Deferred[Accepted]]] = {}

    async def find(self) -> None:
        """It knows its twin."""

    def connect(self) -> None:
        """The relays send what they have kept."""
        kept, self.kept = self.kept, []
        for answer in kept:
            if self.owner.is_awaited(answer.envelope.uid, answer.source.twin):
                self.owner.answer_received(answer)

    async def stop(self) -> None:
        waiting, self._open = self._open, {}
        for target, answer in waiting.values():
            if not answer.called:
                answer.errback(Stopped(target, sent=target.twin not in self.unreachable))

    @property
    def takes_calls(self) -> bool:
        return len(self._open) < self.most_open

    async def request(self, envelope: Envelope, timeout_s: float) -> Accepted:
        if not self.takes_calls:
            raise TooMuchUnderWay(SessionAddress.of(envelope.destination))
        self.requests.append((envelope, timeout_s))
        target = SessionAddress.of(envelope.destination)
        answer = self.answer(envelope)
        waiting: Deferred[Accepted] = Deferred()
        if answer is None:
            self._open[envelope.uid] = (target, waiting)
        self.sent.fire(None)  # last: a test that waits for this goes on now, and may give the answer
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            return answer

        def too_late(*_: object) -> None:
            raise CallTimeout(target, timeout_s, ("ws://relay",), ())

        return await waiting.addTimeout(timeout_s, self._reactor, too_late)

    def give(self, answer: Accepted) -> None:
        """The answer to a request that has had none so far."""
        self._open.pop(answer.envelope.uid)[1].callback(answer)

    async def send(self, envelope: Envelope, taken: Callable[[], object] = lambda: None) -> None:
        problem = self.answer(envelope)
        if isinstance(problem, Exception):
            raise problem
        self._sent(envelope)
        taken()

    def respond(self, request: Accepted, data: bytes, schema: str | None = None) -> None:
        envelope = Envelope(uid=request.envelope.uid, destination=request.envelope.source, plain=data)
        envelope.response.SetInParent()
        if schema is not None:
            envelope.schema = schema
        self._sent(envelope)

    def refuse(self, request: Accepted, code: int, text: str) -> None:
        self._sent(error_reply(request.envelope, code, text))

    def _sent(self, envelope: Envelope) -> None:
        self.answers.append(envelope)
        self.sent.fire(None)

    async def until_sent(self, count: int) -> None:
        """Wait until so many requests and answers have been sent."""
        while len(self.requests) + len(self.answers) < count:
            await self.sent.wait()


def accepted(envelope: Envelope, remaining_s: int = 60) -> Accepted:
    """What an exchange makes of an envelope it takes."""
    source = SessionAddress.of(envelope.source)
    twin = Twin(source.twin, bytes(32)) if source.twin else None
    return Accepted(envelope, envelope.plain, source, twin, "ws://relay", remaining_s)


def answer_to(request: Envelope, payload: bytes) -> Accepted:
    """The twin's answer."""
    envelope = response(request, payload)
    envelope.source.CopyFrom(request.destination)
    envelope.timestamp = request.timestamp
    return accepted(envelope)


def request_of(twin: int, command: str, payload: bytes = b"", uid: str = "uid") -> Accepted:
    """A request of another twin."""
    envelope = Envelope(uid=uid, timestamp=1_800_000_000, expiration=60, plain=payload)
    envelope.request.command = command
    envelope.source.twin = twin
    envelope.destination.twin = 1
    return accepted(envelope)


class LostPush:
    """Has the first :meth:`RedisLists.push_once` fail as if its connection was lost; the later ones go through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, maybe_done: bool) -> None:
        self.is_over = False
        push_once = RedisLists.push_once

        async def lose_the_first(lists: RedisLists, *arguments: Any, **options: Any) -> bool:
            if not self.is_over:
                self.is_over = True
                raise RedisAway(lists.redis.address, "connection lost", maybe_done=maybe_done)
            return await push_once(lists, *arguments, **options)

        monkeypatch.setattr(RedisLists, "push_once", lose_the_first)


class Peer:
    """A gateway on an exchange that does as it is told, and local programs at its Redis."""

    def __init__(self, reactor: Any, address: RedisAddress, now_s: Callable[[], float]) -> None:
        self.gateway = Gateway(reactor, address, lambda owner: FakeExchange(reactor, owner), now_s=now_s)  # type: ignore[arg-type, return-value]
        self.exchange: FakeExchange = self.gateway.exchange  # type: ignore[assignment]
        self.lists = RedisLists(address, reactor)
        self._address = address
        self._reactor = reactor
        self._takers: dict[str, Taker] = {}

    async def ask(self, method: str, *arguments: Any) -> Any:
        """What Redis says itself."""
        return await self.lists.redis.call(method, *arguments)

    async def push(self, key: str, message: Any) -> None:
        """As a local program does."""
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        try:
            await self.lists.push(key, data)
        except RedisAway:  # it was killed, which we did not know yet
            await self.lists.push(key, data, wait_s=20.0)

    async def take(self, key: str, wait_s: int = 20) -> Any:
        """The next JSON in a list; ``None`` if there is none."""
        if key not in self._takers:
            self._takers[key] = Taker(self._address, key, self._reactor)
        found = await self._takers[key].take(wait_s)
        return None if found is None else json.loads(found)

    async def close(self) -> None:
        await self.gateway.stop()
        for one in (self.lists, *self._takers.values()):
            await one.close()


@pytest.fixture
def make_peer(guard: None, reactor: Any) -> Iterator[Callable[..., Peer]]:
    """``make_peer(address)``: a peer that is not started."""
    made: list[Peer] = []

    def make(address: RedisAddress, now_s: Callable[[], float] = time.time) -> Peer:
        made.append(Peer(reactor, address, now_s))
        return made[-1]

    yield make
    for one in made:
        pytest_twisted.blockon(Deferred.fromCoroutine(one.close()))


@pytest.fixture
def peer(make_peer: Any, address: RedisAddress) -> Peer:
    """A peer that runs."""
    peer: Peer = make_peer(address)
    pytest_twisted.blockon(Deferred.fromCoroutine(peer.gateway.start()))
    return peer


@pytest.fixture(scope="session")
def live() -> Any:
    """What was recorded from the running public programs."""
    return json.loads((Path(__file__).parents[2] / "vectors" / "rmb-live.json").read_text("utf-8"))
