"""A messaging client for tests that shakes hands and then says and keeps frames, without any channel of its own."""

from __future__ import annotations

from dataclasses import dataclass

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure

from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.errors import RemoteProtocolError
from dmsg.messaging.core.events import LinkDone
from dmsg.messaging.core.link import LinkInitiator
from dmsg.messaging.core.wire import GO, OPEN_CHANNEL, FrameReader

#: A Noise message as far as a relay looks at it: a point, and a tag.
MESSAGE = SecretKey(b"\x07" * 32).public_key.raw + bytes(16)


@dataclass
class Said:
    """A frame that a client got."""

    kind: int
    channel_id: int
    payload: bytes


class RawLink(Protocol):
    """A client of the relay ``relay``. ``said`` are the frames that came; ``error`` is how the handshake failed."""

    def __init__(self, relay: PublicKey, key: SecretKey) -> None:
        self.key = key
        self.said: list[Said] = []
        self.error: RemoteProtocolError | None = None
        self.linked = self.lost = False
        #: Fire when the handshake is through, and when the connection is lost.
        self.up: Deferred[None] = Deferred()
        self.over: Deferred[None] = Deferred()
        self._reader = FrameReader(GO)
        self._core = LinkInitiator(key, relay, now=0.0)
        self._waiters: list[tuple[int, Deferred[None]]] = []

    def connectionMade(self) -> None:
        self._go_on()

    def _go_on(self) -> None:
        assert self.transport is not None
        self.transport.write(self._core.data_to_send())

    def dataReceived(self, data: bytes) -> None:
        if self.linked:
            self._read(data)
            return
        try:
            events = self._core.receive_data(data, 0.0)
        except RemoteProtocolError as error:
            self.error = error
            return
        self._go_on()
        for event in events:
            assert isinstance(event, LinkDone)
            self.linked = True
            self._read(event.leftover)
            self.up.callback(None)

    def _read(self, data: bytes) -> None:
        data, frames = self._reader.read(data)
        self.said += [Said(kind, channel_id, data[start:end]) for kind, channel_id, start, end in frames]
        self._tell()

    def _tell(self) -> None:
        for waiter in [one for one in self._waiters if len(self.said) >= one[0]]:
            self._waiters.remove(waiter)
            waiter[1].callback(None)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost = True
        self.over.callback(None)

    def say(self, kind: int, channel_id: int, payload: bytes = b"") -> None:
        assert self.transport is not None
        self.transport.write(GO.encode(kind, channel_id, payload))

    def ask(self, other: RawLink, channel_id: int = 0) -> None:
        self.say(OPEN_CHANNEL, channel_id, other.key.public_key.raw + MESSAGE)

    def take(self) -> list[Said]:
        """The frames that came since this was last called."""
        said, self.said = self.said, []
        return said

    async def next(self, count: int = 1) -> list[Said]:
        """Wait for ``count`` frames and take them."""
        waiter: Deferred[None] = Deferred()
        self._waiters.append((count, waiter))
        self._tell()
        await waiter
        return self.take()
