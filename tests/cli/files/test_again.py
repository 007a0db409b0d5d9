"""Files that are sent again, over a new transport, while the disk is still busy with what the old one brought."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.python.failure import Failure

from dmsg.cli.files.places import MAX_TRANSFERS
from dmsg.cli.files.receive import Receiver, Rules
from dmsg.cli.files.small import WAITING_LIMIT
from dmsg.cli.files.wire import (
    Decoder,
    Done,
    End,
    Finish,
    Have,
    Ready,
    Start,
    Whole,
    data_prefix,
    encode,
    encode_whole,
)
from dmsg.cli.output import Output

from .test_files import GIBIBYTE, LARGE, offer, sha256
from .test_slow import PEER, Reactor


class Disk(Reactor):
    """As :class:`Reactor`; with ``slow`` the work of threads is done at once, and they end with :meth:`catch_up`."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = False
        self._ends: list[Callable[[], None]] = []

    def callInThreadWithCallback(self, done: Callable[[bool, Any], None], work: Callable[[], Any]) -> None:
        if self.slow:
            super().callInThreadWithCallback(lambda *result: self._ends.append(partial(done, *result)), work)
        else:
            super().callInThreadWithCallback(done, work)

    def catch_up(self) -> None:
        self.slow = False
        for end in self._ends:
            end()


class Line:
    """The receiver's end of a transport of ``PEER``."""

    security = "e2e"
    stream = SimpleNamespace(resumable=True)

    def __init__(self, receiving: Receiver, peer: Any = PEER) -> None:
        self.peer = peer
        self.said: list[Any] = []
        self.aborted = False
        self._decoder = Decoder()
        self.channel: Any = receiving.buildProtocol(self.getPeer())
        self.channel.makeConnection(self)

    def getPeer(self) -> Any:
        return SimpleNamespace(public_key=self.peer, server_public_key=PEER)

    def write(self, data: bytes) -> None:
        self.said += self._decoder.feed(data)

    def abortConnection(self) -> None:
        self.aborted = True

    def loseConnection(self) -> None:
        self.channel.connectionLost(Failure(ConnectionDone()))

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """It takes everything."""

    def unregisterProducer(self) -> None:
        """It took everything."""

    def pauseProducing(self) -> None:
        """It brings nothing more."""

    resumeProducing = pauseProducing


def receiver(reactor: Reactor, directory: Path, results: io.StringIO | None = None) -> Receiver:
    out = Output(io.StringIO() if results is None else results, io.StringIO(), json_lines=True)
    return Receiver(SimpleNamespace(out=out), reactor, Rules(directory, GIBIBYTE, keep_free_bytes=0))


def whole(name: str, data: bytes, *, again: bool) -> bytes:
    return encode_whole(Whole(name, len(data), sha256(data), again), data)


@pytest.mark.parametrize("noticed", [True, False], ids=["loss noticed", "loss not noticed"])
def test_small_files_that_wait_for_the_disk_are_stored_once(tmp_path, noticed):
    names = [f"{number}" for number in range(WAITING_LIMIT + 6)]
    reactor = Disk()
    reactor.hold = True
    receiving = receiver(reactor, tmp_path)
    old = Line(receiving)
    old.channel.dataReceived(b"".join(whole(name, b"data", again=False) for name in names))
    if noticed:
        old.channel.connectionLost(Failure(ConnectionLost()))
    new = Line(receiving)
    new.channel.dataReceived(b"".join(whole(name, b"data", again=True) for name in names))
    assert new.said == [Ready()]
    for _ in range(8):
        reactor.work()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert new.said == [Ready(), *[Done()] * len(names)]
    assert old.aborted is not noticed
    receiving.stop()


@pytest.mark.parametrize("noticed", [True, False], ids=["loss noticed", "loss not noticed"])
def test_a_large_file_that_has_its_name_already_is_not_asked_for_again(tmp_path, noticed):
    """The directory is being synced."""
    reactor = Disk()
    receiving = receiver(reactor, tmp_path)
    old = Line(receiving)
    asked = encode(offer("a", len(LARGE)))
    old.channel.dataReceived(asked)
    old.channel.dataReceived(encode(Start(0, True)) + data_prefix(len(LARGE)) + LARGE)
    reactor.slow = True
    old.channel.dataReceived(encode(Finish(sha256(LARGE))))
    assert (tmp_path / "a").exists() and old.said == [Ready(), Have(0, sha256(b""))]
    if noticed:
        old.channel.connectionLost(Failure(ConnectionLost()))
    new = Line(receiving)
    new.channel.dataReceived(asked)
    reactor.catch_up()
    assert new.said == [Ready(), Done()]
    receiving.stop()


def test_a_file_that_gets_its_name_is_told_also_if_its_sender_has_lost_its_place_meanwhile(tmp_path):
    reactor, results = Disk(), io.StringIO()
    receiving = receiver(reactor, tmp_path, results)
    one = Line(receiving)
    one.channel.dataReceived(encode(offer("a", len(LARGE))))
    one.channel.dataReceived(encode(Start(0, True)) + data_prefix(len(LARGE)) + LARGE)
    reactor.slow = True
    one.channel.dataReceived(encode(Finish(sha256(LARGE))))
    reactor.advance(len(LARGE))  # it has sent less than a byte a second, and the others have just begun
    others = [Line(receiving, f"stranger {number}") for number in range(MAX_TRANSFERS)]
    assert one.aborted and not any(other.aborted for other in others)
    reactor.catch_up()
    assert (tmp_path / "a").read_bytes() == LARGE
    [told] = [json.loads(line) for line in results.getvalue().splitlines()]
    assert (told["event"], told["file"], told["sha256"]) == ("received", "a", sha256(LARGE))
    receiving.stop()


def test_a_sender_that_got_no_answer_is_not_done(tmp_path):
    """Its transport is lost while the disk is busy: it comes again, and a receiver for one sender has to be there."""
    reactor = Disk()
    reactor.hold = True
    receiving = receiver(reactor, tmp_path)
    finished = []
    receiving.finished.addCallback(finished.append)
    old = Line(receiving)
    old.channel.dataReceived(whole("a", b"data", again=False) + encode(End()))
    old.channel.connectionLost(Failure(ConnectionLost()))
    reactor.hold = False
    reactor.work()
    assert (tmp_path / "a").exists() and finished == []
    new = Line(receiving)
    new.channel.dataReceived(whole("a", b"data", again=True) + encode(End()))
    assert new.said == [Ready(), Done()] and finished == [None]
    receiving.stop()
