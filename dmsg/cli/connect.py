"""``dmsg connect``: one transport between standard input and output and a peer."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.protocol import connectionDone
from twisted.internet.stdio import StandardIO
from twisted.python.failure import Failure

from dmsg.cli.channel import TransportBroken
from dmsg.cli.client import open_client
from dmsg.cli.exits import CommandError
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

    Raises ``DialError``, ``TransportBroken`` when the transport was cut off, and ``CommandError`` when ``stdin`` cannot be read
    to its end, or not everything can be written to ``stdout``.
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
    if near.cut and (near.ended_first or not far.cut):
        raise near.cut
    if far.cut:
        raise TransportBroken(f"the transport was cut off: {getattr(far.cut, 'cause', far.cut)}")


class StandardStreams(_StandardIO):  # type: ignore[misc]
    """Standard input and output as the transport of an :class:`~dmsg.cli.splice.End`.

    What was received is written also when the other end was cut off: the exit code tells that it is not complete. A terminal
    is not read any more when the peer has said everything: its user cannot see that there is nothing to wait for.

    It ends with ``CommandError`` when reading or writing fails, which must not look like an end of the data.
    """

    def __init__(self, end: End, stdin: int, stdout: int, reactor: Any) -> None:
        self._stdout = stdout
        self._closing = self._written = False
        self._is_terminal = os.isatty(stdin)
        self._is_socket = _is_one_socket(stdin, stdout)
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
        """See ``StandardIO``: standard input has ended, or everything was written, or one of the two has failed."""
        if fd == "read" and not self.disconnected and not reason.check(ConnectionDone):
            self._fail("standard input cannot be read any more")
            return
        if fd == "write" and not self.disconnected:
            # Twisted would go on reading. Its reactors do not agree on what is an error here.
            if not self._closing or self._writer.dataBuffer or self._writer._tempDataBuffer:
                self._fail("nothing can be written to standard output any more")
                return
            self._written, reason = True, Failure(connectionDone.value)
            self._show_end()
        super().childConnectionLost(fd, reason)

    def _fail(self, why: str) -> None:
        self.connectionLost(Failure(CommandError(why)))

    def _show_end(self) -> None:
        """Let the program that reads standard output see the end before we end."""
        if self._is_socket and not self.disconnecting:  # standard input is another descriptor of it, which stays open
            with suppress(OSError), socket.socket(fileno=os.dup(self._stdout)) as both:
                both.shutdown(socket.SHUT_WR)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stdout)
        os.close(nowhere)


def _is_one_socket(stdin: int, stdout: int) -> bool:
    """Whether the two are one socket, as under inetd."""
    one, other = os.fstat(stdin), os.fstat(stdout)
    return stat.S_ISSOCK(one.st_mode) and os.path.samestat(one, other)


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
