"""``dmsg connect``: one transport between standard input and output and a peer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionAborted, ConnectionDone, ConnectionLost
from twisted.internet.protocol import connectionDone
from twisted.internet.stdio import StandardIO
from twisted.python.failure import Failure

from dmsg.cli.channel import TransportBroken
from dmsg.cli.client import open_client
from dmsg.cli.exits import CommandError, describe
from dmsg.cli.settings import PUBLIC_KEY, Invocation, common_options, service_option
from dmsg.cli.splice import End, join
from dmsg.crypto.keys import PublicKey

#: Twisted chooses it by platform and gives its methods no types.
_StandardIO: Any = StandardIO


@click.command(short_help="Connect standard input and output with PK.")
@click.argument("peer", metavar="PK", type=PUBLIC_KEY)
@common_options
@service_option
def connect(call: Invocation, peer: PublicKey, service: str) -> None:
    """Connect standard input and output with PK, which runs "dmsg expose" for example.

    For programs that take a command in place of an address: ssh -o ProxyCommand="dmsg connect PK" localhost
    """
    call.execute(lambda reactor: run_connect(call, reactor, peer, service=service))


async def run_connect(
    call: Invocation, reactor: Any, peer: PublicKey, *, service: str = "", stdin: int = 0, stdout: int = 1
) -> None:
    """``dmsg connect``, between two file descriptors.

    Raises ``DialError``, ``TransportBroken`` when the transport was cut off, and ``CommandError`` when nothing can be written
    to ``stdout`` any more.
    """
    async with open_client(call.settings, reactor, listening=False, out=call.out) as client:
        transport = await client.dial(peer, service)
        far, near = _WatchedEnd(), _WatchedEnd()
        transport.attach(far)
        with _same_mode(stdin, stdout):
            streams = StandardStreams(near, stdin, stdout, reactor)
            join(near, far, reactor)
            try:
                await near.over
                await far.over
            finally:
                streams.stop()
                transport.abortConnection()  # does nothing to a transport that is over
    if near.cut and near.ended_first:
        raise CommandError("nothing can be written to standard output any more")
    if far.cut:
        raise TransportBroken(f"the transport was cut off: {describe(far.cut)}")


class StandardStreams(_StandardIO):  # type: ignore[misc]
    """Standard input and output as the transport of an :class:`~dmsg.cli.splice.End`.

    What was received is written also when the other end was cut off: the exit code tells that it is not complete. A terminal
    is not read any more when the peer has said everything: its user cannot see that there is nothing to wait for.
    """

    def __init__(self, end: End, stdin: int, stdout: int, reactor: Any) -> None:
        self._stdout = stdout
        self._closing = self._written = False
        self._is_terminal = os.isatty(stdin)
        super().__init__(end, stdin, stdout, reactor)

    def loseWriteConnection(self) -> None:
        if self._is_terminal:
            self.loseConnection()
            return
        self._closing = True
        super().loseWriteConnection()

    def loseConnection(self) -> None:
        self._closing = True
        super().loseConnection()
        if self._written and not self.disconnected:  # Twisted waits for the end of its writes
            self.connectionLost(connectionDone)

    def abortConnection(self) -> None:
        """The same: there is no way to write an end that is none."""
        self.loseConnection()

    def stop(self) -> None:
        """Read and write nothing more."""
        if not self.disconnected:
            self.connectionLost(Failure(ConnectionAborted()))

    def childConnectionLost(self, fd: str, reason: Failure) -> None:
        """See ``StandardIO``: standard input has ended, or everything was written, or nothing can be."""
        if fd == "write" and not self.disconnected:
            if not self._closing:  # Twisted would go on reading, and some of its reactors call this a clean end
                self.connectionLost(Failure(ConnectionLost("the reader has gone")))
                return
            self._written = True
            nowhere = os.open(os.devnull, os.O_WRONLY)  # the program that reads sees the end before we end
            os.dup2(nowhere, self._stdout)
            os.close(nowhere)
        super().childConnectionLost(fd, reason)


class _WatchedEnd(End):
    """An end that tells how it ended: ``over`` fires when it did."""

    def __init__(self) -> None:
        super().__init__()
        self.over: Deferred[None] = Deferred()
        #: The error it ended with, if its end was not orderly.
        self.cut: BaseException | None = None
        #: Whether the other end was open when this one ended.
        self.ended_first = False

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.ended_first = self.other is not None
        super().connectionLost(reason)
        assert self.ended is not None
        if not self.ended.check(ConnectionDone):
            self.cut = self.ended.value
        self.over.callback(None)


@contextmanager
def _same_mode(*descriptors: int) -> Iterator[None]:
    """Leave ``descriptors`` as blocking as they were: other programs have the same terminal."""
    before = [os.get_blocking(one) for one in descriptors]
    try:
        yield
    finally:
        for one, blocking in zip(descriptors, before, strict=True):
            os.set_blocking(one, blocking)
