"""Files that are sent again, over a new transport, while the disk is still busy with what the old one brought."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from twisted.internet.error import ConnectionLost
from twisted.python.failure import Failure

from dmsg.cli.files.receive import Receiver, Rules
from dmsg.cli.files.small import WAITING_LIMIT
from dmsg.cli.files.wire import Decoder, Done, Ready, Whole, encode_whole
from dmsg.cli.output import Output

from .test_files import GIBIBYTE, sha256
from .test_slow import PEER, Reactor


class Line:
    """The receiver's end of a transport of ``PEER``."""

    security = "e2e"
    stream = SimpleNamespace(resumable=True)

    def __init__(self, receiving: Receiver) -> None:
        self.said: list[Any] = []
        self.aborted = False
        self._decoder = Decoder()
        self.channel: Any = receiving.buildProtocol(self.getPeer())
        self.channel.makeConnection(self)

    def getPeer(self) -> Any:
        return SimpleNamespace(public_key=PEER, server_public_key=PEER)

    def write(self, data: bytes) -> None:
        self.said += self._decoder.feed(data)

    def abortConnection(self) -> None:
        self.aborted = True

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """It takes everything."""

    def pauseProducing(self) -> None:
        """It brings nothing more."""

    resumeProducing = pauseProducing


def receiver(reactor: Reactor, directory: Path) -> Receiver:
    out = Output(io.StringIO(), io.StringIO(), json_lines=True)
    return Receiver(SimpleNamespace(out=out), reactor, Rules(directory, GIBIBYTE, keep_free_bytes=0))


def whole(name: str, data: bytes, *, again: bool) -> bytes:
    return encode_whole(Whole(name, len(data), sha256(data), again), data)


@pytest.mark.parametrize("noticed", [True, False], ids=["loss noticed", "loss not noticed"])
def test_small_files_that_wait_for_the_disk_are_stored_once(tmp_path, noticed):
    names = [f"{number}" for number in range(WAITING_LIMIT + 6)]
    reactor = Reactor()
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
