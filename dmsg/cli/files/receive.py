"""``dmsg receive``: files from peers into a directory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.address import DmsgAddress
from dmsg.cli.channel import Channel, HalfOpenChannel, TimedOut, TransportBroken
from dmsg.cli.client import open_client
from dmsg.cli.exits import CommandError
from dmsg.cli.files.arrivals import Arrival, Arrivals
from dmsg.cli.files.names import check_name, local_name
from dmsg.cli.files.part_file import PartFile
from dmsg.cli.files.parts import PartStore, SmallFile
from dmsg.cli.files.places import Places
from dmsg.cli.files.quota import KEEP_FREE, QUOTA, Quota
from dmsg.cli.files.small import SmallFiles
from dmsg.cli.files.store import WriteBehind, in_thread, start_in_thread, storage_failure
from dmsg.cli.files.talk import HASH_TIMEOUT_S, IDLE_TIMEOUT_S, Conversation
from dmsg.cli.files.wire import (
    WHOLE_LIMIT_BYTES,
    Done,
    End,
    Finish,
    Have,
    MalformedTransfer,
    Offer,
    Ready,
    Start,
    TransferFailed,
    Whole,
)
from dmsg.cli.output import human_bytes
from dmsg.cli.protocols import security_of
from dmsg.cli.settings import PUBLIC_KEY, Invocation, ValueType, common_options, service_option
from dmsg.clients.access import AllowKeys
from dmsg.crypto.keys import PublicKey
from dmsg.glue.waiters import Waiters
from dmsg.ops.values import SIZE

MAX_SIZE: Final = "10GiB"
#: How many seconds a new transport may be silent: ``dmsg send`` offers its first file at once. The offer may be in one frame
#: with 64 KiB of the file, which comes as a whole: this is enough for 2.2 KB a second.
FIRST_OFFER_TIMEOUT_S: Final = 30.0
#: Seconds between two searches for parts that are too old.
SWEEP_INTERVAL_S: Final = 3600.0
_log = Logger()


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, writable=True))
@click.option("--once", is_flag=True, help="End when the first sender is done with its files, or one of them failed.")
@click.option("--allow", metavar="PK", type=PUBLIC_KEY, multiple=True, help="Accept this sender only; may be repeated.")
@click.option("--overwrite", is_flag=True, help="Replace files that are there already.")
@click.option("--max-size", type=ValueType(SIZE, 1), default=MAX_SIZE, show_default=True, help="Largest file accepted.")
@click.option(
    "--quota", type=ValueType(SIZE, 1), default=QUOTA, show_default=True, help="What DIR may grow by meanwhile."
)
@click.option(
    "--keep-free",
    type=ValueType(SIZE),
    default=KEEP_FREE,
    show_default=True,
    help="What stays free on DIR's file system.",
)
@common_options
@service_option
def receive(
    call: Invocation,
    directory: str,
    once: bool,
    allow: tuple[PublicKey, ...],
    overwrite: bool,
    max_size: int,
    quota: int,
    keep_free: int,
    service: str,
) -> None:
    """Receive files into DIR until interrupted.

    A file gets its name when it is complete and verified. Without --allow, all clients that know the key may send.
    """
    rules = Rules(Path(directory), max_size, overwrite=overwrite, quota_bytes=quota, keep_free_bytes=keep_free)
    call.execute(lambda reactor: run_receive(call, reactor, rules, once=once, allow=allow, service=service))


@dataclass(frozen=True, slots=True)
class Rules:
    """Where files go, how large they may be, whether they may replace others, how much the directory may grow while they are
    received, and how much stays free on its file system. Sizes are in bytes."""

    directory: Path
    max_size_bytes: int
    overwrite: bool = False
    quota_bytes: int = 64 * 1024**3
    keep_free_bytes: int = 1024**3


async def run_receive(
    call: Invocation,
    reactor: Any,
    rules: Rules,
    *,
    once: bool = False,
    allow: tuple[PublicKey, ...] = (),
    service: str = "",
) -> None:
    """``dmsg receive``. With ``once`` it returns when the first sender is done, or fails as that sender did."""
    async with open_client(call.settings, reactor, listening=True, out=call.out) as client:
        receiver = Receiver(call, reactor, rules, listed=bool(allow))
        policy = AllowKeys(allow) if allow else None
        port = client.listen(receiver, service, policy=policy, **security_of(call.settings))
        try:
            key = str(client.public_key)
            call.out.result({"event": "ready", "public_key": key, "directory": str(rules.directory)}, key)
            call.out.note(f"ready: receiving into {rules.directory}")
            while True:
                receiver.finished = Deferred()
                outcome = await receiver.finished
                if once:
                    if outcome is not None:
                        raise outcome
                    return
        finally:
            await port.stopListening()
            receiver.stop()


class Receiver(Factory):
    """Has a conversation over every transport. ``listed``: all senders are on a list of the owner.

    ``finished`` fires with ``None`` when a sender says that it is done, with an error when one of its files failed. A broken
    transport is no end: its sender will come again.
    """

    noisy = False

    def __init__(self, call: Invocation, reactor: Any, rules: Rules, *, listed: bool = False) -> None:
        self.finished: Deferred[CommandError | None] = Deferred()
        self._out = call.out
        self._reactor = reactor
        self._rules = rules
        self._running: dict[Channel, Deferred[None]] = {}
        self._writing: dict[tuple[str, str], Channel] = {}
        self._storing: set[SmallFiles] = set()
        #: Large files that are being given their names, by sender and offered name.
        self._publishing: dict[tuple[str, str], Waiters[str]] = {}
        self._places: Places[Channel] = Places()
        self._arrived = Arrivals()
        self._parts = PartStore(rules.directory)
        self._quota = Quota(
            (rules.directory, self._parts.folder), rules.quota_bytes, rules.keep_free_bytes, shared=not listed
        )
        self._sweeping: IDelayedCall | None = None
        self._sweep()

    def buildProtocol(self, addr: Any) -> Channel | None:
        """A channel for one more sender, if there is room for it."""
        return HalfOpenChannel(self._reactor, self._opened) if self._places.is_open_to(str(addr.public_key)) else None

    def stop(self) -> None:
        """Break off all conversations; partial files stay for a later attempt."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for channel in list(self._running):
            self._break_off(channel)

    def _sweep(self) -> None:
        self._sweeping = self._reactor.callLater(SWEEP_INTERVAL_S, self._sweep)
        sweeping = Deferred.fromCoroutine(in_thread(self._reactor, self._parts.sweep))
        sweeping.addErrback(lambda failure: _log.failure("Removing old parts failed", failure=failure))

    def _opened(self, channel: Channel) -> None:
        sender = str(channel.transport.getPeer().public_key)
        loser = self._places.take(channel, sender, self._reactor.seconds())
        if loser is not None:
            self._break_off(loser)
        running = Deferred.fromCoroutine(self._converse(channel))
        self._running[channel] = running

        def ended(result: object) -> None:
            self._running.pop(channel, None)
            self._places.leave(channel)
            channel.abort()
            if isinstance(result, Failure) and not result.check(CancelledError):
                _log.failure("Receiving failed", failure=result)

        running.addBoth(ended)

    async def _converse(self, channel: Channel) -> None:
        talk = Conversation(channel, met=True)
        peer: DmsgAddress = channel.transport.getPeer()
        outcome: CommandError | None = None
        timeout_s = FIRST_OFFER_TIMEOUT_S
        small = self._small_files(talk, peer)
        try:
            await talk.say(Ready())
            while True:
                message = await talk.hear(timeout_s)
                timeout_s = IDLE_TIMEOUT_S
                if isinstance(message, Whole):
                    await self._take_whole(talk, message, small)
                    continue
                await small.done()
                if isinstance(message, End):
                    break
                if not isinstance(message, Offer):
                    raise MalformedTransfer("something other than offer")
                await self._take(talk, message, peer)
            await channel.close(IDLE_TIMEOUT_S)
        except TransferFailed as error:
            self._tell_failure(error, peer)
            await talk.give_up(error)
            outcome = error
        except (TransportBroken, TimedOut) as error:
            if not (isinstance(error, TransportBroken) and error.clean):
                self._out.note(f"from {str(peer.public_key)[:16]}…: {error}")
            return
        if not self.finished.called:
            self.finished.callback(outcome)

    def _small_files(self, talk: Conversation, peer: DmsgAddress) -> SmallFiles:
        sender = str(peer.public_key)
        came = self._reactor.seconds

        def keep(files: Sequence[SmallFile]) -> tuple[list[str], OSError | TransferFailed | None]:
            admitted: list[int] = []

            def admit(size: int) -> None:
                self._quota.check(sender, size)
                self._quota.add(sender, size, files=1)
                admitted.append(size)

            names, problem = self._parts.keep_small(sender, files, overwrite=self._rules.overwrite, admit=admit)
            for size in admitted[len(names) :]:
                self._quota.add(sender, -size, files=-1)
            return names, problem

        def stored(file: SmallFile, name: str) -> None:
            self._arrived.add(Arrival(sender, file.name, len(file.data), file.sha256))
            self._tell(len(file.data), name, file.sha256, peer, 0, came() - file.came_at, talk)

        def known(file: SmallFile) -> bool:
            return file.again and Arrival(sender, file.name, len(file.data), file.sha256) in self._arrived

        return SmallFiles(
            self._reactor, talk, keep=keep, known=known, stored=stored, sender=sender, storing=self._storing
        )

    async def _take_whole(self, talk: Conversation, whole: Whole, small: SmallFiles) -> None:
        """Receive one small file."""
        try:
            if whole.size > WHOLE_LIMIT_BYTES:
                raise MalformedTransfer("a whole file that is not small")
            name = check_name(whole.name)
            if whole.size > self._rules.max_size_bytes:
                raise TransferFailed("too_big", local_name(name))
        except TransferFailed:
            await small.done()  # answers come in order
            raise
        if whole.again:
            await self._settle_earlier(talk.channel, small)
        data = await talk.hear_all(whole.size, partial(self._places.received, talk.channel))
        await small.put(SmallFile(name, data, whole.sha256, self._reactor.seconds(), whole.again))

    async def _settle_earlier(self, channel: Channel, small: SmallFiles) -> None:
        """Wait until the small files that earlier transports of this sender have brought are stored: it sends them again.

        It has given these transports up, whether or not we have noticed that they are gone.
        """
        for earlier in list(self._running):
            if earlier is channel:
                break
            if str(earlier.transport.getPeer().public_key) == small.sender:
                self._break_off(earlier)
        for other in [one for one in self._storing if one.sender == small.sender and one is not small]:
            await other.idle()

    async def _take(self, talk: Conversation, offer: Offer, peer: DmsgAddress) -> None:
        """Receive one large file."""
        name, sender = check_name(offer.name), str(peer.public_key)
        if offer.size > self._rules.max_size_bytes:
            raise TransferFailed("too_big", local_name(name))
        key = (sender, name)
        if key in self._publishing:  # its sender has dialled again, because the disk takes long
            with contextlib.suppress(OSError, ValueError):
                await self._publishing[key].wait()
        # A sender that asks whether a file has arrived gets an answer only about files that it has sent itself.
        if Arrival(sender, name, offer.size, offer.id) in self._arrived:
            await talk.say(Done())
            return
        older = self._writing.get(key)
        if older is not None:
            # Its sender has dialled again before we noticed that the old transport is gone.
            self._break_off(older)
        self._writing[key] = talk.channel
        try:
            await self._write(talk, offer, peer)
        finally:
            if self._writing.get(key) is talk.channel:
                del self._writing[key]

    def _break_off(self, channel: Channel) -> None:
        running = self._running.get(channel)
        if running is not None:
            running.cancel()  # which closes its partial file
        channel.abort()

    async def _write(self, talk: Conversation, offer: Offer, peer: DmsgAddress) -> None:
        began = self._reactor.seconds()
        sender = str(peer.public_key)
        part: PartFile | None = None
        try:
            part = self._parts.open(sender, offer.name)
            start, begun = await self._agree(talk, offer, part, sender)
            await self._write_data(talk, offer, part, sender, begun, hashed=start.hashed)
            finish = await talk.expect(Finish)
            sha256 = part.sha256 if start.hashed else ""
            if finish.sha256 != sha256:
                raise TransferFailed("mismatch")

            def named(name: str) -> None:
                elapsed_s = self._reactor.seconds() - began
                self._tell(offer.size, name, sha256, peer, start.offset, elapsed_s, talk)

            await self._publish(offer, part, sender, named)
        except OSError as error:
            raise storage_failure(error, local_name(offer.name)) from error
        except TransferFailed as error:
            if part is not None and error.code in ("mismatch", "source"):
                part.discard()  # of no further use
            raise error.about(local_name(offer.name)) from None
        finally:
            if part is not None:
                part.close()
        await talk.say(Done())

    async def _publish(self, offer: Offer, part: PartFile, sender: str, named: Callable[[str], object]) -> None:
        """Give a complete file its name, and call ``named`` with it.

        The file counts as arrived then, even if its transport is broken off meanwhile.
        """
        key, ends = (sender, offer.name), Waiters[str]()

        def ended(result: str | Failure) -> None:
            del self._publishing[key]
            try:
                if not isinstance(result, Failure):
                    self._arrived.add(Arrival(sender, offer.name, offer.size, offer.id))
                    self._quota.add(sender, 0, files=1)
                    named(result)
            finally:
                ends.fire(result)

        self._publishing[key] = ends
        waiting = ends.wait()
        start_in_thread(self._reactor, lambda: part.publish(overwrite=self._rules.overwrite)).addBoth(ended)
        await waiting

    async def _agree(self, talk: Conversation, offer: Offer, part: PartFile, sender: str) -> tuple[Start, list[bytes]]:
        """Tell the sender what is there, and cut it back to where the sender goes on; gives that, and data that came already.

        Raises ``TransferFailed`` if there is no room.
        """
        if offer.begun > offer.size:
            raise MalformedTransfer("more data than was offered")
        await in_thread(self._reactor, lambda: part.load(offer.size))
        await in_thread(self._reactor, lambda: self._quota.check(sender, offer.size - part.offset))
        await talk.say(Have(part.offset, part.sha256))
        begun = await talk.hear_all(offer.begun, partial(self._places.received, talk.channel))
        start = await talk.expect(Start, HASH_TIMEOUT_S)
        if not start.hashed and not talk.is_compared:
            raise MalformedTransfer("a file without a hash on a transport that needs one")
        if start.offset != part.offset:
            if start.offset:
                raise MalformedTransfer("a start that was not agreed on")
            part.restart()
            begun = b""
        return start, [] if start.offset or not begun else [begun]

    async def _write_data(
        self, talk: Conversation, offer: Offer, part: PartFile, sender: str, begun: list[bytes], *, hashed: bool
    ) -> None:
        name = local_name(offer.name)
        if offer.size - part.offset:
            sizes = f"{human_bytes(part.offset)} of {human_bytes(offer.size)}" if part.offset else ""
            self._out.note(f"receiving {name} ({sizes or human_bytes(offer.size)})")
        bar = self._out.bar(name, offer.size, part.offset)
        left = offer.size - part.offset

        def keep(pieces: list[bytes]) -> None:
            size = sum(map(len, pieces))
            self._quota.check(sender, size, quickly=True)  # other senders may have taken room since the offer
            part.append(*pieces, hashed=hashed)
            self._quota.add(sender, size)

        behind = WriteBehind(self._reactor, keep, quick=not hashed)
        try:
            while left:
                is_counted = bool(begun)  # when it came
                pieces, begun = begun or await talk.hear_data(left), []
                size = sum(map(len, pieces))
                left -= size
                self._places.received(talk.channel, 0 if is_counted else size)
                bar.advance(size, self._reactor.seconds())
                await behind.put(pieces)
            await behind.done()
        except (TransportBroken, TimedOut, CancelledError):
            behind.finish(talk.overheard_data()[:left])  # so that it need not be sent twice
            raise
        finally:
            behind.stop()
            bar.close()

    def _tell(
        self,
        size: int,
        name: str,
        sha256: str,
        peer: DmsgAddress,
        start: int,
        elapsed_s: float,
        talk: Conversation,
    ) -> None:
        rate = (size - start) / max(elapsed_s, 1e-9)
        security = talk.channel.transport.security
        server = talk.channel.transport.getPeer().server_public_key  # the transport may have moved
        self._out.result(
            {
                "event": "received",
                "file": name,
                "path": str(self._rules.directory / name),
                "size_bytes": size,
                "sha256": sha256 or None,
                "resumed_from": start,
                "elapsed_s": round(elapsed_s, 6),
                "bytes_per_s": round(rate, 1),
                "peer": str(peer.public_key),
                "server": str(server),
                "security": security,
            },
            f"received {name}: {human_bytes(size)} in {elapsed_s:.2f} s ({human_bytes(rate)}/s, {security})"
            + (f"  sha256 {sha256}" if sha256 else ""),
        )

    def _tell_failure(self, error: TransferFailed, peer: DmsgAddress) -> None:
        key = str(peer.public_key)
        file = error.data["file"]
        self._out.result(
            {"event": "failed", "file": file, "code": error.code, "peer": key}, f"from {key[:16]}…: {error}"
        )
