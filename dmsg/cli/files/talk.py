"""One conversation of the file transfer protocol over one transport."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Final, TypeVar

from dmsg.cli.channel import Channel, TimedOut, TransportBroken
from dmsg.cli.files.wire import Decoder, Failed, MalformedTransfer, Message, TransferFailed, data_prefix, encode

M = TypeVar("M", bound=Message)

#: How long the other side may say nothing when it is its turn, in seconds.
IDLE_TIMEOUT_S: Final = 60.0
#: The same when it may have to hash a large file first.
HASH_TIMEOUT_S: Final = 600.0
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

    async def hear(self, timeout_s: float = IDLE_TIMEOUT_S) -> Message | bytes:
        """The next header or piece of data; raises ``TransportBroken``, ``TimedOut``, ``TransferFailed``."""
        while not self._heard:
            self._heard.extend(self._decoder.feed(await self.channel.read(timeout_s)))
        unit = self._heard.popleft()
        if isinstance(unit, Failed):
            raise TransferFailed(unit.code)
        return unit

    async def expect(self, kind: type[M], timeout_s: float = IDLE_TIMEOUT_S) -> M:
        """The next unit, which has to be a header of ``kind``."""
        unit = await self.hear(timeout_s)
        if not isinstance(unit, kind):
            raise MalformedTransfer(f"something other than {kind.KIND}")
        return unit

    async def say(self, message: Message) -> None:
        """Send a header."""
        await self.channel.write(encode(message), IDLE_TIMEOUT_S)

    async def send_data(self, block: bytes) -> None:
        """Send data, then raise if the other side has given up meanwhile."""
        await self.channel.write(data_prefix(len(block)) + block, IDLE_TIMEOUT_S)
        if self.channel.unread_bytes or self._heard:
            await self.expect(Failed)

    async def verdict(self) -> None:
        """Raise what the other side gave up for before the transport ended, if it said so."""
        with contextlib.suppress(TransportBroken, TimedOut, MalformedTransfer):
            while True:
                await self.hear(0.0)

    async def give_up(self, error: TransferFailed) -> None:
        """Tell the other side and close."""
        with contextlib.suppress(TransportBroken, TimedOut):
            await self.say(Failed(error.code))
            await self.channel.close(CLOSE_TIMEOUT_S)
