"""``dmsg send``: files to a peer, however often the transport breaks on the way."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click
from twisted.internet.task import deferLater

from dmsg.address import DmsgAddress
from dmsg.cli.channel import Channel, TimedOut, TransportBroken
from dmsg.cli.client import open_client
from dmsg.cli.exits import CommandError, Exit
from dmsg.cli.files.names import check_name
from dmsg.cli.files.store import BLOCK_BYTES, ReadAhead, Source, SourceFile, find_source, in_thread
from dmsg.cli.files.talk import CLOSE_TIMEOUT_S, HASH_TIMEOUT_S, IDLE_TIMEOUT_S, Conversation
from dmsg.cli.files.wire import (
    BEGUN_LIMIT_BYTES,
    WHOLE_LIMIT_BYTES,
    Done,
    End,
    Finish,
    Have,
    MalformedTransfer,
    Offer,
    Start,
    TransferFailed,
    Whole,
    encode_whole,
)
from dmsg.cli.output import human_bytes
from dmsg.cli.protocols import Client, Transport
from dmsg.cli.settings import PUBLIC_KEY, Invocation, common_options, service_option
from dmsg.crypto.keys import PublicKey
from dmsg.errors import DialError
from dmsg.sansio.backoff import Backoff
from dmsg.sansio.jitter import Jitter

RETRIES: Final = 8
#: Small files sent before the first of them is confirmed: with a round trip of 100 ms that makes 5,000 files a second, or
#: 80 MB. A receiver remembers more files, so that those whose confirmation is lost are not stored twice.
UNDER_WAY_LIMIT: Final = 512
UNDER_WAY_BYTES: Final = 8 * 1024 * 1024
#: Bytes written at a time after a timeout: on a path of a few KB a second, a whole block takes longer than the other side may
#: be silent.
SLOW_BLOCK_BYTES: Final = 64 * 1024
#: The pause before the first new dial, in seconds; it doubles each time, up to the longest, with half as much jitter.
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
@click.option("--sha256", is_flag=True, help="Compare and print a SHA-256 of each file, where sealing is enough, too.")
@common_options
@service_option
def send(call: Invocation, peer: PublicKey, files: tuple[str, ...], retries: int, sha256: bool, service: str) -> None:
    """Send each FILE to PK, which runs "dmsg receive".

    Ends with 0 only when the receiver has verified every file and put it in its place. What a broken transfer left
    behind is used when the same key sends the same file again.
    """
    call.execute(lambda reactor: run_send(call, reactor, peer, files, retries=retries, sha256=sha256, service=service))


async def run_send(
    call: Invocation,
    reactor: Any,
    peer: PublicKey,
    files: tuple[str, ...],
    *,
    retries: int,
    sha256: bool = False,
    service: str = "",
) -> None:
    """``dmsg send``; with ``sha256`` each file is hashed, whatever the transport does.

    Raises ``DialError``, ``TransferFailed``, ``TransportBroken``, ``TimedOut``, ``OSError``.
    """
    names = [check_name(Path(file).name) for file in files]
    if len(set(names)) < len(names):
        raise CommandError("two of the files have the same name", Exit.USAGE)
    sources = [find_source(file) for file in files]
    async with open_client(call.settings, reactor, listening=False, out=call.out) as client:
        await _Sending(call, reactor, client, DmsgAddress(peer, service), sources, retries, sha256).run()


@dataclass(slots=True)
class _Outgoing:
    """A file that the receiver has not confirmed, and its state from before the transport broke."""

    source: Source
    began: float = 0.0
    attempts: int = 0
    sent_bytes: int = 0
    furthest: int = 0
    is_complete: bool = False  # all of it was sent
    sha256: str = ""  # if it is hashed
    id: str = field(default_factory=lambda: os.urandom(16).hex())

    def begin(self, now: float) -> None:
        """One more attempt."""
        if not self.attempts:
            self.began = now
        self.attempts += 1


class _Sending:
    """Files on their way to one peer."""

    def __init__(
        self,
        call: Invocation,
        reactor: Any,
        client: Client,
        target: DmsgAddress,
        sources: list[Source],
        retries: int,
        sha256: bool,
    ) -> None:
        self._sha256 = sha256
        self._out = call.out
        self._reactor = reactor
        self._client = client
        self._peer = target.public_key
        self._service = target.service
        self._pending = deque(map(_Outgoing, sources))
        self._retries = retries
        self._dialled = False
        self._met = False  # whether a receiver was there
        self._block_bytes = BLOCK_BYTES

    async def run(self) -> None:
        """Send all of them; dial again as long as that makes progress or attempts are left."""
        failures = 0
        while self._pending:
            before = (len(self._pending), self._pending[0].furthest)
            try:
                await self._deliver()
            except (TransportBroken, TimedOut, DialError) as error:
                if not self._dialled:
                    raise
                if not self._pending:
                    return  # the last confirmation came before the transport broke
                if isinstance(error, TimedOut):
                    if failures and not self._met:
                        raise  # the first transport may have been lost without a word, but hardly a second one
                    self._block_bytes = SLOW_BLOCK_BYTES
                failures = 1 if (len(self._pending), self._pending[0].furthest) != before else failures + 1
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
                    await self._send_small(talk, transport)
                    if self._pending:
                        await self._send(talk, self._pending[0], transport)
                        self._pending.popleft()
                except TransferFailed as error:
                    raise error.about(self._pending[0].source.name) from None
            await _say_goodbye(talk)
        except TransportBroken:
            await self._verdict(talk)
            raise
        except TransferFailed as error:
            await talk.give_up(error)
            raise
        finally:
            self._met |= talk.met
            channel.abort()

    async def _verdict(self, talk: Conversation) -> None:
        try:
            await talk.verdict()
        except TransferFailed as error:
            raise error.about(self._pending[0].source.name if self._pending else "") from None

    async def _send_small(self, talk: Conversation, transport: Transport) -> None:
        """Send the next small files; many are under way at a time."""
        under_way: deque[_Outgoing] = deque()
        problem: TransferFailed | None = None
        try:
            while True:
                some = self._next_small(under_way) if problem is None else []
                if some:
                    sent_at = self._reactor.seconds()
                    units, problem = await in_thread(self._reactor, lambda files=some: _read_small(files))  # type: ignore[misc]
                    for file in islice(some, len(units)):
                        file.begin(sent_at)
                        file.sent_bytes += file.source.size
                        under_way.append(file)
                    for block in _joined(units, self._block_bytes):
                        await talk.channel.write(block, IDLE_TIMEOUT_S)
                        self._take_confirmed(talk, under_way, transport)
                    if len(under_way) == len(self._pending):
                        await talk.end(End())
                if under_way:
                    await talk.expect(Done, HASH_TIMEOUT_S)
                    self._confirmed(under_way, transport)
                elif not some:
                    break
        except (TransportBroken, TimedOut):
            self._take_confirmed(talk, under_way, transport)
            raise
        if problem is not None:
            raise problem

    def _take_confirmed(self, talk: Conversation, under_way: deque[_Outgoing], transport: Transport) -> None:
        """Note confirmed files, so that they are not sent again; a refusal is about the file after them."""
        while under_way and talk.take(Done):
            self._confirmed(under_way, transport)

    def _confirmed(self, under_way: deque[_Outgoing], transport: Transport) -> None:
        self._report(under_way.popleft(), transport, 0)
        self._pending.popleft()

    def _next_small(self, under_way: Sequence[_Outgoing]) -> list[_Outgoing]:
        """The files after those ``under_way`` that may be sent with them."""
        room = UNDER_WAY_LIMIT - len(under_way)
        if room < UNDER_WAY_LIMIT // 2:
            return []  # wait: many at a time cost less
        room_bytes = UNDER_WAY_BYTES - sum(file.source.size for file in under_way)
        found: list[_Outgoing] = []
        for file in islice(self._pending, len(under_way), len(under_way) + room):
            room_bytes -= file.source.size
            if file.source.size > WHOLE_LIMIT_BYTES or room_bytes < 0:
                break
            found.append(file)
        return found

    async def _send(self, talk: Conversation, file: _Outgoing, transport: Transport) -> None:
        """Send a large file."""
        file.begin(self._reactor.seconds())
        try:
            source = file.source.open()
        except OSError as error:
            raise TransferFailed("source", problem=error.strerror or "") from None
        hashed = self._sha256 or not talk.is_compared
        blocks = ReadAhead(self._reactor, source, BEGUN_LIMIT_BYTES, hashed=hashed, block_bytes=self._block_bytes)
        try:
            # After an earlier attempt, ask first how much of the file the receiver has.
            begun = b"" if file.attempts > 1 else await _next(blocks)
            await talk.offer(Offer(file.source.name, source.size, file.id, len(begun)), begun)
            file.sent_bytes += len(begun)
            answer = await talk.hear(HASH_TIMEOUT_S)
            if isinstance(answer, Done) and file.is_complete:
                # The transport broke between the receiver's last step and its confirmation.
                self._report(file, transport, source.size)
                return
            if not isinstance(answer, Have) or answer.offset > source.size:
                raise MalformedTransfer("something other than have")
            start = 0
            if answer.offset:
                begun = b""
                await blocks.stop()
                start = await self._go_on(file, source, answer)
            await talk.say(Start(start, hashed))
            await self._send_data(talk, file, blocks, start, len(begun))
            file.is_complete = True
            file.sha256 = source.sha256 if hashed else ""
            if len(self._pending) == 1:
                await talk.end(Finish(file.sha256), End())
            else:
                await talk.say(Finish(file.sha256))
            await talk.expect(Done, HASH_TIMEOUT_S)
            self._report(file, transport, start)
        finally:
            await blocks.stop()
            source.close()

    async def _go_on(self, file: _Outgoing, source: SourceFile, have: Have) -> int:
        """Have ``source`` go on after what the receiver has, or begin again if that is of another file; gives the offset."""
        source.rewind()
        await in_thread(self._reactor, lambda: source.hash_to(have.offset))
        if source.offset != have.offset or source.sha256 != have.sha256:
            self._out.note(f"{file.source.name}: what the receiver has is of another file; sending all of it")
            source.rewind()
        return source.offset

    async def _send_data(self, talk: Conversation, file: _Outgoing, blocks: ReadAhead, start: int, begun: int) -> None:
        """Send all from ``start`` on, without its first ``begun`` bytes, which have been sent."""
        name, size, sent = file.source.name, file.source.size, start + begun
        if start:
            self._out.note(f"{name}: going on at {human_bytes(start)} of {human_bytes(size)}")
        bar = self._out.bar(name, size, start)
        bar.advance(begun, self._reactor.seconds())
        try:
            while sent < size:
                block = await _next(blocks)
                await talk.send_data(block)
                sent += len(block)
                file.sent_bytes += len(block)
                file.furthest = max(file.furthest, sent)
                bar.advance(len(block), self._reactor.seconds())
        finally:
            bar.close()

    def _report(self, file: _Outgoing, transport: Transport, start: int) -> None:
        source = file.source
        elapsed_s = max(self._reactor.seconds() - file.began, 1e-9)
        rate = file.sent_bytes / elapsed_s
        server = str(transport.getPeer().server_public_key)
        self._out.result(
            {
                "file": source.name,
                "size_bytes": source.size,
                "sha256": file.sha256 or None,
                "sent_bytes": file.sent_bytes,
                "resumed_from": start,
                "transports": file.attempts,
                "elapsed_s": round(elapsed_s, 6),
                "bytes_per_s": round(rate, 1),
                "peer": str(self._peer),
                "server": server,
                "security": transport.security,
            },
            f"sent {source.name}: {human_bytes(source.size)} in {elapsed_s:.2f} s ({human_bytes(rate)}/s,"
            f" {transport.security})" + (f"  sha256 {file.sha256}" if file.sha256 else ""),
        )


async def _next(blocks: ReadAhead) -> bytes:
    try:
        block = await blocks.next()
    except OSError as error:
        raise TransferFailed("source", problem=error.strerror or "") from None
    if not block:
        raise TransferFailed("source")
    return block


def _joined(units: Iterable[bytes], block_bytes: int) -> Iterator[bytes]:
    """``units`` in blocks as large as those of a large file: the time limit of a write is for that size."""
    block: list[bytes] = []
    size = 0
    for unit in units:
        if block and size + len(unit) > block_bytes:
            yield b"".join(block)
            block, size = [], 0
        block.append(unit)
        size += len(unit)
    if block:
        yield b"".join(block)


async def _say_goodbye(talk: Conversation) -> None:
    try:
        if not talk.is_ended:
            await talk.end(End())
        await talk.channel.close(CLOSE_TIMEOUT_S)
    except (TransportBroken, TimedOut):
        pass  # everything has been acknowledged


def _read_small(files: Sequence[_Outgoing]) -> tuple[list[bytes], TransferFailed | None]:
    """The units for small files, up to the first file that cannot be read, and the error for that one. Blocks."""
    units: list[bytes] = []
    for file in files:
        source = file.source
        try:
            data = source.read()
        except OSError as error:
            return units, TransferFailed("source", source.name, error.strerror or "")
        if len(data) < source.size:
            return units, TransferFailed("source", source.name)
        file.sha256 = hashlib.sha256(data).hexdigest()
        units.append(encode_whole(Whole(source.name, len(data), file.sha256, file.attempts > 0), data))
    return units, None
