"""``dmsg send``: files to a peer, however often the transport breaks on the way."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any, Final

import click
from twisted.internet.task import deferLater

from dmsg.address import DmsgAddress
from dmsg.cli.channel import Channel, TimedOut, TransportBroken
from dmsg.cli.client import open_client
from dmsg.cli.exits import CommandError, Exit
from dmsg.cli.files.names import check_name
from dmsg.cli.files.store import ReadAhead, SourceFile, in_thread
from dmsg.cli.files.talk import CLOSE_TIMEOUT_S, HASH_TIMEOUT_S, Conversation
from dmsg.cli.files.wire import Done, End, Finish, Have, MalformedTransfer, Offer, Start, TransferFailed
from dmsg.cli.output import human_bytes
from dmsg.cli.protocols import Client, Transport
from dmsg.cli.settings import PUBLIC_KEY, Invocation, common_options, service_option
from dmsg.crypto.keys import PublicKey
from dmsg.errors import DialError
from dmsg.sansio.backoff import Backoff
from dmsg.sansio.jitter import Jitter

RETRIES: Final = 8
#: The pause before the first new dial, in seconds; twice as long each time, up to the longest, with half of jitter.
BACKOFF: Final = Backoff(0.5, 10.0)


@click.command()
@click.argument("peer", metavar="PK", type=PUBLIC_KEY)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--retries",
    type=click.IntRange(0, 1000),
    default=RETRIES,
    show_default=True,
    help="How often in a row to dial again without progress after the transport broke.",
)
@common_options
@service_option
def send(call: Invocation, peer: PublicKey, files: tuple[str, ...], retries: int, service: str) -> None:
    """Send each FILE to PK, which runs ``dmsg receive``.

    Ends with 0 only when the receiver has verified every file and put it in its place. What a broken transfer left
    behind is used when the same key sends the same file again.
    """
    call.execute(lambda reactor: run_send(call, reactor, peer, files, retries=retries, service=service))


async def run_send(
    call: Invocation, reactor: Any, peer: PublicKey, files: tuple[str, ...], *, retries: int, service: str = ""
) -> None:
    """``dmsg send``. Raises ``DialError``, ``TransferFailed``, ``TransportBroken``, ``TimedOut``, ``OSError``."""
    names = [check_name(Path(file).name) for file in files]
    if len(set(names)) < len(names):
        raise CommandError("two of the files have the same name", Exit.USAGE)
    sources = []
    try:
        for file in files:
            sources.append(SourceFile(file))
        async with open_client(call.settings, reactor, listening=False) as client:
            await _Sending(call, reactor, client, DmsgAddress(peer, service), sources, retries).run()
    finally:
        for source in sources:
            source.close()


class _Sending:
    """Files on their way to one peer."""

    def __init__(
        self,
        call: Invocation,
        reactor: Any,
        client: Client,
        target: DmsgAddress,
        sources: list[SourceFile],
        retries: int,
    ) -> None:
        self._out = call.out
        self._reactor = reactor
        self._client = client
        self._peer = target.public_key
        self._service = target.service
        self._pending = deque(sources)
        self._retries = retries
        self._dialled = False
        # What of the file at hand is known from before the transport broke.
        self._furthest = 0
        self._whole_sha256 = ""
        self._began = 0.0
        self._sent_bytes = 0
        self._attempts = 0

    async def run(self) -> None:
        """Send all of them; dial again while that leads anywhere."""
        failures = 0
        while self._pending:
            before = (len(self._pending), self._furthest)
            try:
                await self._deliver()
            except (TransportBroken, TimedOut, DialError) as error:
                if not self._dialled:
                    raise
                failures = 1 if (len(self._pending), self._furthest) != before else failures + 1
                if failures > self._retries:
                    raise
                reason = error.reason if isinstance(error, DialError) else str(error)
                self._out.note(f"{reason}; dialling again ({failures} of {self._retries})")
                await deferLater(self._reactor, BACKOFF.pause_s(failures, Jitter(os.urandom).random))

    async def _deliver(self) -> None:
        """Send what can be sent over one transport."""
        transport = await self._client.dial(self._peer, self._service)
        self._dialled = True
        channel = Channel(self._reactor)
        transport.attach(channel)
        talk = Conversation(channel)
        try:
            while self._pending:
                try:
                    await self._send(talk, self._pending[0], transport)
                except TransferFailed as error:
                    raise error.about(self._pending[0].name) from None
                self._pending.popleft()
                self._furthest, self._whole_sha256, self._began, self._sent_bytes, self._attempts = 0, "", 0.0, 0, 0
            await self._say_goodbye(talk)
        except TransportBroken:
            await self._verdict(talk)
            raise
        except TransferFailed as error:
            await talk.give_up(error)
            raise
        finally:
            channel.abort()

    async def _say_goodbye(self, talk: Conversation) -> None:
        try:
            await talk.say(End())
            await talk.channel.close(CLOSE_TIMEOUT_S)
        except (TransportBroken, TimedOut):
            pass  # everything has been acknowledged

    async def _verdict(self, talk: Conversation) -> None:
        try:
            await talk.verdict()
        except TransferFailed as error:
            raise error.about(self._pending[0].name if self._pending else "") from None

    async def _send(self, talk: Conversation, source: SourceFile, transport: Transport) -> None:
        if not self._attempts:
            self._began = self._reactor.seconds()
        self._attempts += 1
        await talk.say(Offer(source.name, source.size, self._whole_sha256))
        source.rewind()
        answer = await talk.hear(HASH_TIMEOUT_S)
        if isinstance(answer, Done) and self._whole_sha256:
            # The transport had broken between the receiver's last step and the word of it.
            self._report(source, transport, self._whole_sha256, source.size)
            return
        if not isinstance(answer, Have) or answer.offset > source.size:
            raise MalformedTransfer("something other than have")
        await in_thread(self._reactor, lambda: source.hash_to(answer.offset))
        if source.offset != answer.offset or source.sha256 != answer.sha256:
            self._out.note(f"{source.name}: what the receiver has is of another file; sending all of it")
            source.rewind()
        start = source.offset
        await talk.say(Start(start))
        await self._send_data(talk, source)
        self._whole_sha256 = source.sha256
        await talk.say(Finish(self._whole_sha256))
        await talk.expect(Done, HASH_TIMEOUT_S)
        self._report(source, transport, self._whole_sha256, start)

    async def _send_data(self, talk: Conversation, source: SourceFile) -> None:
        if source.offset:
            self._out.note(f"{source.name}: going on at {human_bytes(source.offset)} of {human_bytes(source.size)}")
        bar = self._out.bar(source.name, source.size, source.offset)
        sent = source.offset
        ahead = ReadAhead(self._reactor, source)
        try:
            while sent < source.size:
                try:
                    block = await ahead.next()
                except OSError:
                    block = b""
                if not block:
                    raise TransferFailed("source", source.name)
                await talk.send_data(block)
                sent += len(block)
                self._sent_bytes += len(block)
                self._furthest = max(self._furthest, sent)
                bar.advance(len(block), self._reactor.seconds())
        finally:
            bar.close()
            await ahead.stop()

    def _report(self, source: SourceFile, transport: Transport, sha256: str, start: int) -> None:
        elapsed_s = max(self._reactor.seconds() - self._began, 1e-9)
        rate = self._sent_bytes / elapsed_s
        server = str(transport.getPeer().server_public_key)
        self._out.result(
            {
                "file": source.name,
                "size_bytes": source.size,
                "sha256": sha256,
                "sent_bytes": self._sent_bytes,
                "resumed_from": start,
                "transports": self._attempts,
                "elapsed_s": round(elapsed_s, 6),
                "bytes_per_s": round(rate, 1),
                "peer": str(self._peer),
                "server": server,
                "security": transport.security,
            },
            f"sent {source.name}: {human_bytes(source.size)} in {elapsed_s:.2f} s ({human_bytes(rate)}/s,"
            f" {transport.security})  sha256 {sha256}",
        )
