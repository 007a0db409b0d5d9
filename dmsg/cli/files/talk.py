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
    Ready,
    TransferFailed,
    data_prefix,
    encode,
    encode_offer,
)

M = TypeVar("M", bound=Message)

#: How many seconds a receiver may be silent in all at the beginning: its first word waits for no file and no disk. Something
#: else that listens there would be silent for ever.
READY_TIMEOUT_S: Final = 30.0
#: How many seconds the other side may be silent when it is its turn.
IDLE_TIMEOUT_S: Final = 60.0
#: The same when it may have to hash a large file first.
HASH_TIMEOUT_S: Final = 600.0
#: Up to so many pieces of data are passed on as they came: a block has some 30 of them.
_PIECES_LIMIT: Final = 256
#: How long closing may take, in seconds.
CLOSE_TIMEOUT_S: Final = 5.0


class Conversation:
    """Sends and receives units over ``channel``.

    Raises ``TransferFailed`` when the other side gives up, and ``MalformedTransfer`` when it breaks the protocol. A receiver
    has ``met`` a sender from the start. A sender has met a receiver once it has heard ``ready``, or any other unit.
    """

    def __init__(self, channel: Channel, *, met: bool = False) -> None:
        self.channel = channel
        #: Whether the other side has shown that it speaks the protocol.
        self.met = met
        self._decoder = Decoder()
        self._heard: deque[Message | bytes] = deque()
        #: Whether nothing more is sent, whatever comes.
        self.is_ended = False

    @property
    def is_compared(self) -> bool:
        """Whether the two ends of the transport compare what they have authenticated (:ref:`spec-sealed-acks`).

        The ends of a sealed transport of dmsg do. A channel of the messaging system is sealed, too, but compares nothing.
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
        :data:`~dmsg.cli.files.store.BLOCK_BYTES`, or fewer if they come slowly. Raises ``MalformedTransfer`` for other units.
        """
        await self._hear_more(timeout_s, min(left_bytes, BLOCK_BYTES))
        pieces = self._take_data()
        if not pieces:
            await self.hear()  # raises if the other side gave up
            raise MalformedTransfer("something other than data")
        if sum(map(len, pieces)) > left_bytes:
            raise MalformedTransfer("more data than was offered")
        # The sender chooses how small its pieces are, and each costs some 50 bytes.
        return pieces if len(pieces) <= _PIECES_LIMIT else [b"".join(pieces)]

    async def hear_all(self, size_bytes: int, came: Callable[[int], object]) -> bytes:
        """The next ``size_bytes`` of data, few enough for memory: they take no more than that, in whatever pieces they come.

        ``came`` is called with the number of bytes each time that some have come. Raises as :meth:`hear_data`.
        """
        data = bytearray()
        while (before := len(data)) < size_bytes:
            for piece in await self.hear_data(size_bytes - before):
                data += piece
            came(len(data) - before)
        return bytes(data)

    def overheard_data(self) -> bytes:
        """When the conversation is over: data that has come but was not taken."""
        with contextlib.suppress(MalformedTransfer):
            self._take_in(self.channel.take_unread())
        return b"".join(self._take_data())

    def _take_data(self) -> list[bytes]:
        pieces: list[bytes] = []
        while self._heard and isinstance(self._heard[0], bytes):
            pieces.append(self._heard.popleft())  # type: ignore[arg-type]
        return pieces

    async def _hear_more(self, timeout_s: float, enough_bytes: int = 1) -> None:
        while not self._heard:
            limit_s = timeout_s if self.met else min(timeout_s, READY_TIMEOUT_S)
            try:
                self._take_in(await self.channel.read_pieces(limit_s, enough_bytes))
            except TimedOut:
                if self.met:
                    raise
                raise TimedOut(f'the peer has not said within {limit_s:g} s that it runs "dmsg receive"') from None

    def _take_in(self, pieces: list[bytes]) -> None:
        for piece in pieces:
            self._heard.extend(self._decoder.feed(piece))
        if self._heard and not self.met:
            self.met = True
            if isinstance(self._heard[0], Ready):
                self._heard.popleft()

    async def expect(self, kind: type[M], timeout_s: float = IDLE_TIMEOUT_S) -> M:
        """The next unit, which has to be a header of ``kind``."""
        unit = await self.hear(timeout_s)
        if not isinstance(unit, kind):
            raise MalformedTransfer(f"something other than {kind.KIND}")
        return unit

    def take(self, kind: type[Message]) -> bool:
        """Take the next unit if it has come already and is a header of ``kind``; gives whether it was. Does not wait."""
        self._take_in(self.channel.take_unread())
        if not (self._heard and isinstance(self._heard[0], kind)):
            return False
        self._heard.popleft()
        return True

    async def say(self, *messages: Message) -> None:
        """Send headers."""
        await self.channel.write(b"".join(map(encode, messages)), IDLE_TIMEOUT_S)

    async def offer(self, offer: Offer, data: bytes) -> None:
        """Send an offer and the first ``data`` of the file."""
        await self.channel.write(encode_offer(offer, data), IDLE_TIMEOUT_S)

    async def send_data(self, block: bytes) -> None:
        """Send data, then raise if the other side has given up meanwhile."""
        await self.channel.write_pieces((data_prefix(len(block)), block), IDLE_TIMEOUT_S)
        self._take_in(self.channel.take_unread())
        if self._heard:
            await self.expect(Failed)

    async def end(self, *messages: Message) -> None:
        """Send ``messages``, the last ones. Our half ends at once if the transport has a half-close, else with its close."""
        self.is_ended = True
        await self.say(*messages)
        if getattr(self.channel.transport.stream, "half_closes", False):
            self.channel.end_writing()

    async def verdict(self) -> None:
        """Raise the reason for which the other side gave up before the transport ended, if it told one."""
        with contextlib.suppress(TransportBroken, TimedOut, MalformedTransfer):
            while True:
                await self.hear(0.0)

    async def give_up(self, error: TransferFailed) -> None:
        """Tell the other side and close."""
        with contextlib.suppress(TransportBroken, TimedOut):
            if not self.is_ended:
                await self.say(Failed(error.code))
            await self.channel.close(CLOSE_TIMEOUT_S)
