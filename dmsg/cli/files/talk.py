"""One conversation of the file transfer protocol over one transport."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from dmsg.cli.channel import Channel, TimedOut, TransportBroken
from dmsg.cli.files.store import BLOCK_BYTES
from dmsg.cli.files.wire import (
    Decoder,
    Failed,
    MalformedTransfer,
    Message,
    Offer,
    TransferFailed,
    data_prefix,
    encode,
    encode_offer,
)

M = TypeVar("M", bound=Message)

#: How long the other side may say nothing when it is its turn, in seconds.
IDLE_TIMEOUT_S: Final = 60.0
#: The same when it may have to hash a large file first.
HASH_TIMEOUT_S: Final = 600.0
#: Pieces of data passed on as they came: a block has some 30 of them.
_PIECES_LIMIT: Final = 256
#: How long closing may take, in seconds.
CLOSE_TIMEOUT_S: Final = 5.0


class Conversation:
    """Says and hears units over ``channel``.

    What the other side gives up for is raised as ``TransferFailed``, what it says wrongly as ``MalformedTransfer``.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._decoder = Decoder()
        self._heard: deque[Message | bytes] = deque()
        #: Whether nothing more is said, whatever comes.
        self.is_ended = False

    @property
    def is_compared(self) -> bool:
        """Whether both ends of the transport compare what they have authenticated (:ref:`spec-sealed-acks`).

        A sealed one of dmsg does. A channel of the messaging system is sealed, too, but compares nothing.
        """
        return bool(getattr(self.channel.transport.stream, "resumable", False))

    async def hear(self, timeout_s: float = IDLE_TIMEOUT_S) -> Message | bytes:
        """The next header or piece of data; raises ``TransportBroken``, ``TimedOut``, ``TransferFailed``."""
        await self._hear_more(timeout_s)
        unit = self._heard.popleft()
        if isinstance(unit, Failed):
            raise TransferFailed(unit.code)
        return unit

    async def hear_data(self, left_bytes: int, timeout_s: float = IDLE_TIMEOUT_S) -> list[bytes]:
        """The next pieces of the ``left_bytes`` (at least 1) of data that are still to come: some
        :data:`~dmsg.cli.files.store.BLOCK_BYTES`, unless they come slowly. Raises ``MalformedTransfer`` for anything else.
        """
        await self._hear_more(timeout_s, min(left_bytes, BLOCK_BYTES))
        pieces = self._take_data()
        if not pieces:
            await self.hear()  # raises what the other side gave up for
            raise MalformedTransfer("something other than data")
        if sum(map(len, pieces)) > left_bytes:
            raise MalformedTransfer("more data than was offered")
        # The sender chooses how small its pieces are, and each costs some 50 bytes.
        return pieces if len(pieces) <= _PIECES_LIMIT else [b"".join(pieces)]

    async def hear_all(self, size_bytes: int, came: Callable[[int], object]) -> bytes:
        """The next ``size_bytes`` of data, few enough to be held: in whatever pieces they come, they take no more than that.

        ``came`` is called with how many have come, whenever some have. Raises as :meth:`hear_data`.
        """
        data = bytearray()
        while (before := len(data)) < size_bytes:
            for piece in await self.hear_data(size_bytes - before):
                data += piece
            came(len(data) - before)
        return bytes(data)

    def overheard_data(self) -> bytes:
        """Data that has come and that nothing waited for, when the conversation is over."""
        with contextlib.suppress(MalformedTransfer):
            for piece in self.channel.take_unread():
                self._heard.extend(self._decoder.feed(piece))
        return b"".join(self._take_data())

    def _take_data(self) -> list[bytes]:
        pieces: list[bytes] = []
        while self._heard and isinstance(self._heard[0], bytes):
            pieces.append(self._heard.popleft())  # type: ignore[arg-type]
        return pieces

    async def _hear_more(self, timeout_s: float, enough_bytes: int = 1) -> None:
        while not self._heard:
            for piece in await self.channel.read_pieces(timeout_s, enough_bytes):
                self._heard.extend(self._decoder.feed(piece))

    async def expect(self, kind: type[M], timeout_s: float = IDLE_TIMEOUT_S) -> M:
        """The next unit, which has to be a header of ``kind``."""
        unit = await self.hear(timeout_s)
        if not isinstance(unit, kind):
            raise MalformedTransfer(f"something other than {kind.KIND}")
        return unit

    def take(self, kind: type[Message]) -> bool:
        """Take the next unit if it has come already and is a header of ``kind``; whether it was. Waits for nothing."""
        for piece in self.channel.take_unread():
            self._heard.extend(self._decoder.feed(piece))
        if not (self._heard and isinstance(self._heard[0], kind)):
            return False
        self._heard.popleft()
        return True

    async def say(self, *messages: Message) -> None:
        """Send headers."""
        await self.channel.write(b"".join(map(encode, messages)), IDLE_TIMEOUT_S)

    async def offer(self, offer: Offer, data: bytes) -> None:
        """Send an offer and the ``data`` it begins with."""
        await self.channel.write(encode_offer(offer, data), IDLE_TIMEOUT_S)

    async def send_data(self, block: bytes) -> None:
        """Send data, then raise if the other side has given up meanwhile."""
        await self.channel.write_pieces((data_prefix(len(block)), block), IDLE_TIMEOUT_S)
        if self.channel.unread_bytes or self._heard:
            await self.expect(Failed)

    async def end(self, *messages: Message) -> None:
        """Send ``messages``, the last ones. Our end follows at once where a transport has halves, else with its close."""
        self.is_ended = True
        await self.say(*messages)
        if getattr(self.channel.transport.stream, "half_closes", False):
            self.channel.end_writing()

    async def verdict(self) -> None:
        """Raise what the other side gave up for before the transport ended, if it said so."""
        with contextlib.suppress(TransportBroken, TimedOut, MalformedTransfer):
            while True:
                await self.hear(0.0)

    async def give_up(self, error: TransferFailed) -> None:
        """Tell the other side and close."""
        with contextlib.suppress(TransportBroken, TimedOut):
            if not self.is_ended:
                await self.say(Failed(error.code))
            await self.channel.close(CLOSE_TIMEOUT_S)
