"""Files over a transport that takes its time, in virtual time."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from dmsg.cli.channel import TimedOut
from dmsg.cli.files import send
from dmsg.cli.files.receive import Receiver, Rules
from dmsg.cli.files.wire import (
    Decoder,
    Done,
    Failed,
    Finish,
    Have,
    Message,
    Offer,
    Ready,
    Start,
    TransferFailed,
    Whole,
    encode,
)
from dmsg.cli.output import Output
from dmsg.crypto.keys import SecretKey
from dmsg.testing.link import Link
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork

from .test_files import GIBIBYTE, LARGE, sha256, source

PEER = SecretKey.generate().public_key
BYTES_PER_S = 100_000
HIGH_WATER_BYTES = 65_536
TICK_S = 0.1


class Reactor(Clock):
    """Virtual time, and threads whose work is done at once, or with ``hold`` by :meth:`work`."""

    def __init__(self) -> None:
        super().__init__()
        self.hold = False
        self._held: list[Callable[[], None]] = []

    def getThreadPool(self) -> Reactor:
        return self

    def callInThreadWithCallback(self, done: Callable[[bool, Any], None], work: Callable[[], Any]) -> None:
        def do() -> None:
            try:
                result: tuple[bool, Any] = True, work()
            except Exception:
                result = False, Failure()
            done(*result)

        self._held.append(do)
        if not self.hold:
            self.work()

    def work(self) -> None:
        """Do what threads have to do by now."""
        held, self._held = self._held, []
        for each in held:
            each()

    def callFromThread(self, function: Callable[..., Any], *args: Any) -> None:
        function(*args)


class Slow:
    """A transport to a receiver that confirms files as they come, up to ``refused``, which it has no space for.

    It is lost when the file ``lost_behind`` has been confirmed. What comes of a large file is put on the ``disk``.
    """

    security = "e2e"
    stream = SimpleNamespace(resumable=True)

    def __init__(
        self,
        reactor: Reactor,
        *,
        refused: str = "",
        lost_behind: str = "",
        bytes_per_s: int = BYTES_PER_S,
        disk: bytearray | None = None,
    ) -> None:
        self._disk = bytearray() if disk is None else disk
        self._takes_data = True
        self.heard: list[Whole] = []
        self._reactor = reactor
        self._refused = refused
        self._lost_behind = lost_behind
        self._bytes_per_tick = int(bytes_per_s * TICK_S)
        self._decoder = Decoder()
        self._expected = 0
        self._waiting = bytearray()
        self._paused = self._closing = False
        self._channel: Any = None
        self._producer: Any = None
        self._tick = reactor.callLater(TICK_S, self._move)

    def getPeer(self) -> Any:
        return SimpleNamespace(public_key=PEER, server_public_key=PEER)

    def attach(self, channel: Any) -> None:
        self._channel = channel
        channel.makeConnection(self)

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        self._producer = producer

    def unregisterProducer(self) -> None:
        self._producer = None

    def write(self, data: bytes) -> None:
        self._waiting += data
        if len(self._waiting) > HIGH_WATER_BYTES and not self._paused:
            self._paused = True
            self._producer.pauseProducing()

    def loseConnection(self) -> None:
        self._closing = True

    def abortConnection(self) -> None:
        self._lose(ConnectionLost())

    def _lose(self, reason: Exception) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            self._tick.cancel()
            channel.connectionLost(Failure(reason))

    def _move(self) -> None:
        moved = bytes(self._waiting[: self._bytes_per_tick])
        del self._waiting[: self._bytes_per_tick]
        self._tick = self._reactor.callLater(TICK_S, self._move)
        for unit in self._decoder.feed(moved):
            if isinstance(unit, Whole):
                self.heard.append(unit)
                self._expected = unit.size
            elif isinstance(unit, Offer):
                self._say(Have(len(self._disk), sha256(bytes(self._disk))))
                self._takes_data = not self._disk
            elif isinstance(unit, Start):
                assert unit.offset in (0, len(self._disk))
                self._takes_data = True
            elif isinstance(unit, Finish):
                self._say(Done())
            elif isinstance(unit, bytes) and not self.heard:
                if self._takes_data:
                    self._disk += unit
            elif isinstance(unit, bytes):
                self._expected -= len(unit)
                if not self._expected:
                    self._answer(self.heard[-1].name)
        if self._channel is None:
            return
        if self._closing and not self._waiting:
            self._lose(ConnectionDone())
        elif self._paused and len(self._waiting) <= HIGH_WATER_BYTES and self._producer is not None:
            self._paused = False
            self._producer.resumeProducing()

    def _say(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.dataReceived(encode(message))

    def _answer(self, name: str) -> None:
        self._say(Failed("no_space") if name == self._refused else Done())
        if name == self._refused:
            self._lose(ConnectionDone())
        elif name == self._lost_behind:
            self._lose(ConnectionLost())


class Silent(Slow):
    """A transport to a program that reads, and says nothing."""

    def _say(self, message: Message) -> None:
        pass


class Late(Slow):
    """A transport to a receiver that says at once that it is there, and answers 400 seconds later."""

    def attach(self, channel: Any) -> None:
        super().attach(channel)
        super()._say(Ready())

    def _say(self, message: Message) -> None:
        self._reactor.callLater(400, super()._say, message)


class Sending:
    """``dmsg send`` of ``files`` over one of ``transports`` after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reactor: Reactor, *transports: Slow) -> None:
        self._reactor = reactor
        self.left = list(transports)

        async def dial(*args: Any) -> Slow:
            return self.left.pop(0)

        @asynccontextmanager
        async def open_client(*args: Any, **options: Any) -> Any:
            yield SimpleNamespace(dial=dial)

        monkeypatch.setattr(send, "open_client", open_client)

    def run(self, files: tuple[str, ...], *, retries: int) -> tuple[list[str], Any]:
        """The names of the files that were told to be sent, and the error, if any."""
        stdout = io.StringIO()
        call: Any = SimpleNamespace(settings=None, out=Output(stdout, io.StringIO(), json_lines=True))
        outcome: list[Any] = []
        running = Deferred.fromCoroutine(send.run_send(call, self._reactor, PEER, files, retries=retries))
        running.addBoth(outcome.append)
        for _ in range(10_000):
            if outcome:
                break
            self._reactor.advance(TICK_S)
        (result,) = outcome
        names = [json.loads(line)["file"] for line in stdout.getvalue().splitlines()]
        return names, result.value if isinstance(result, Failure) else result


def test_many_small_files_may_take_longer_than_an_answer(monkeypatch, tmp_path):
    reactor = Reactor()
    slow = Slow(reactor)
    names = [f"{number}" for number in range(40)]
    files = tuple(source(tmp_path, name, bytes(200_000)) for name in names)  # 80 seconds
    told, error = Sending(monkeypatch, reactor, slow).run(files, retries=0)
    assert error is None and told == names


def test_small_files_that_were_confirmed_before_the_transport_was_lost_are_not_sent_again(monkeypatch, tmp_path):
    reactor = Reactor()
    lost, slow = Slow(reactor, lost_behind="4"), Slow(reactor)
    names = [f"{number}" for number in range(12)]
    files = tuple(source(tmp_path, name, bytes(200_000)) for name in names)
    told, error = Sending(monkeypatch, reactor, lost, slow).run(files, retries=1)
    assert error is None and told == names
    assert [one.name for one in slow.heard] == names[5:]


def test_a_transport_that_is_lost_behind_the_word_of_the_last_small_file_is_no_failure(monkeypatch, tmp_path):
    reactor = Reactor()
    names = ["a", "b"]
    files = tuple(source(tmp_path, name, bytes(200_000)) for name in names)
    lost = Slow(reactor, lost_behind="b", bytes_per_s=100 * BYTES_PER_S)
    assert Sending(monkeypatch, reactor, lost).run(files, retries=0) == (names, None)


def test_the_small_file_that_was_refused_is_told_while_more_are_being_written(monkeypatch, tmp_path):
    reactor = Reactor()
    names = [f"{number}" for number in range(12)]
    files = tuple(source(tmp_path, name, bytes(200_000)) for name in names)
    told, error = Sending(monkeypatch, reactor, Slow(reactor, refused="3")).run(files, retries=0)
    assert isinstance(error, TransferFailed) and (error.code, error.data["file"]) == ("no_space", "3")
    assert told == names[:3]


def test_a_large_file_comes_through_where_a_block_takes_longer_than_an_answer(monkeypatch, tmp_path):
    reactor, disk, data = Reactor(), bytearray(), os.urandom(3 * 1024 * 1024)
    slow = [Slow(reactor, bytes_per_s=10_000, disk=disk) for _ in range(3)]
    files = (source(tmp_path, "a", data),)
    told, error = Sending(monkeypatch, reactor, *slow).run(files, retries=2)
    assert error is None and told == ["a"] and disk == data


@pytest.mark.parametrize("size", [1, len(LARGE)])
def test_a_program_that_is_no_receiver_is_not_waited_for(monkeypatch, tmp_path, size):
    reactor = Reactor()
    sending = Sending(monkeypatch, reactor, *(Silent(reactor, bytes_per_s=100 * BYTES_PER_S) for _ in range(9)))
    told, error = sending.run((source(tmp_path, "a", bytes(size)),), retries=8)
    assert told == [] and isinstance(error, TimedOut) and '"dmsg receive"' in str(error)
    assert len(sending.left) == 7 and reactor.seconds() < 65


@pytest.mark.parametrize("size", [1, len(LARGE)])
def test_a_receiver_may_need_minutes_for_its_disk(monkeypatch, tmp_path, size):
    reactor = Reactor()
    sending = Sending(monkeypatch, reactor, Late(reactor))
    told, error = sending.run((source(tmp_path, "a", bytes(size)),), retries=0)
    assert error is None and told == ["a"]


class Machine(MemoryNetwork):
    """A network whose threads end in the next turn of the reactor."""

    def getThreadPool(self) -> Machine:
        return self

    def callInThreadWithCallback(self, done: Callable[[bool, Any], None], work: Callable[[], Any]) -> None:
        self.callLater(0, done, True, work())

    def callFromThread(self, function: Callable[..., Any], *args: Any) -> None:
        self.callLater(0, function, *args)


@pytest.mark.parametrize("size", [200_000, len(LARGE)])
@pytest_twisted.ensureDeferred
async def test_a_first_frame_may_take_a_quarter_of_a_minute(monkeypatch, tmp_path, size):
    """64 KiB of a file come as a whole: on a path of 4 KB a second the receiver hears nothing for 16 seconds."""
    inbox, machine = tmp_path / "inbox", Machine()
    inbox.mkdir()
    data = os.urandom(size)
    call: Any = SimpleNamespace(settings=None, out=Output(io.StringIO(), io.StringIO(), json_lines=True))
    async with LocalNetwork(machine, relays=0, messaging_relays=1, discovery=None) as network:
        bob = await network.messaging_client()
        link = Link(machine, bits_per_s=32_000, buffer_bytes=20_000)
        alice = await network.messaging_client(link=link)

        @asynccontextmanager
        async def open_client(*args: Any, **options: Any) -> Any:
            yield alice

        monkeypatch.setattr(send, "open_client", open_client)
        receiver = Receiver(call, machine, Rules(inbox, GIBIBYTE, keep_free_bytes=0))
        bob.listen(receiver)
        await network.wait(send.run_send(call, machine, bob.public_key, (source(tmp_path, "a", data),), retries=0))
        receiver.stop()
    assert (inbox / "a").read_bytes() == data
