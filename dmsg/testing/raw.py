"""A client and a relay under a test's control: they shake hands and seal records, and send any bytes that a test wants.

For tests of how a dmsg relay or client handles a peer that is broken, hostile or merely unusual. A
:class:`RawConnection` speaks handshake, records and frames (:doc:`/spec/connection`, :doc:`/spec/frames`), but follows none
of the rules above them. It works over any endpoint, of real sockets or of
:class:`~dmsg.testing.memory.MemoryNetwork`::

    raw = await connect_raw(endpoint, server.key.public_key)
    await raw.next_frame(FrameType.OK)
    raw.send_frame(FrameType.FWD, 2, b"a frame of no transport")
    closed = await raw.next_frame(FrameType.CLOSE)
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from twisted.internet.interfaces import IStreamClientEndpoint, IStreamServerEndpoint
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure

from dmsg.address import HostPort, PinnedServer
from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.crypto.noise import NoiseHandshake
from dmsg.glue.connecting import quiet_factory
from dmsg.glue.waiters import Waiters
from dmsg.mux.core.record import LENGTH_BYTES, RecordLayer
from dmsg.mux.core.wire import FrameType, encode_frame, split_frames


@dataclass(frozen=True, slots=True)
class RawFrame:
    """A frame as it was received."""

    kind: int
    transport_id: int
    payload: bytes


def packet(body: bytes) -> bytes:
    """``body`` behind its length, as handshake messages and records travel (:ref:`spec-packets`)."""
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class ForgedKey(SecretKey):
    """A key that presents 33 bytes of the test's choice as its public half, in a handshake or elsewhere."""

    def __init__(self, public: bytes, secret: bytes = bytes(31) + b"\x01") -> None:
        """The other side sees ``public``; ``secret`` is used for calculations."""
        super().__init__(secret)
        forged = object.__new__(PublicKey)
        object.__setattr__(forged, "raw", public)
        self.public_key = forged


class RawConnection(Protocol):
    """One end of a connection, under a test's control.

    With ``remote``, the relay's key, this is a client; without it a relay. If ``shake`` is false, the test has to do the
    handshake itself, and finds received bytes in :attr:`received`. :attr:`on_frame` sees every frame first; frames for which
    it returns ``True`` go no further. :attr:`records` seals and opens after the handshake; :attr:`lost_reason` is set when the
    connection has ended.
    """

    noisy = False

    def __init__(
        self, key: SecretKey, remote: PublicKey | None = None, *, shake: bool = True, random: Random = os.urandom
    ) -> None:
        self.key = key
        self.remote = remote
        self.on_frame: Callable[[RawFrame], bool] | None = None
        #: Called when the connection is made, and when its handshake is done, before anything else happens.
        self.on_made: Callable[[], None] | None = None
        self.on_sealed: Callable[[], None] | None = None
        #: All received bytes that belong to no record: without ``shake``, all bytes.
        self.received = bytearray()
        #: How many bytes were received in all.
        self.received_bytes = 0
        self.records: RecordLayer | None = None
        self.lost_reason: Failure | None = None
        self._noise: NoiseHandshake | None = None
        if shake:
            self._noise = NoiseHandshake(
                "XK",
                initiator=remote is not None,
                static=key,
                remote_static=None if remote is None else remote.raw,
                random=random,
            )
        self._shake = shake
        self._tail = b""
        self._frames: deque[RawFrame] = deque()
        self._frame_waiters: Waiters[None] = Waiters()
        self._sealed_waiters: Waiters[None] = Waiters()
        self._lost_waiters: Waiters[None] = Waiters()

    # --- Twisted ------------------------------------------------------------------------------------------------------

    def connectionMade(self) -> None:
        set_no_delay = getattr(self.transport, "setTcpNoDelay", None)
        if set_no_delay is not None:
            set_no_delay(True)
        if self._noise is not None and self.remote is not None:
            self.send_packet(self._noise.write_message())
        if self.on_made is not None:
            self.on_made()

    def dataReceived(self, data: bytes) -> None:
        self.received_bytes += len(data)
        if self.records is None:
            self.received += data
            if self._shake:
                self._on_handshake()
        else:
            self._on_records(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Fire waits for the end, and fail all others."""
        self.lost_reason = reason
        self._lost_waiters.fire(None)
        self._frame_waiters.fire(reason)
        self._sealed_waiters.fire(reason)

    # --- sending ------------------------------------------------------------------------------------------------------

    def send_bytes(self, data: bytes) -> None:
        """Write ``data`` to the socket as it is."""
        self.transport.write(data)  # type: ignore[union-attr]

    def send_packet(self, body: bytes) -> None:
        """Write ``body`` after its length, not sealed."""
        self.send_bytes(packet(body))

    def seal(self, plaintext: bytes) -> bytes:
        """``plaintext`` as records, which are not sent, so that a test can repeat, drop, swap or alter them."""
        assert self.records is not None, "the handshake is not done"
        return self.records.seal(plaintext)

    def send_plain(self, *plaintexts: bytes) -> None:
        """Send each piece as a record of its own; the pieces need not be frames."""
        self.send_bytes(b"".join([self.seal(piece) for piece in plaintexts]))

    def send_frame(self, kind: int, transport_id: int, payload: bytes = b"", *, cuts: Iterable[int] = ()) -> None:
        """Send one frame, split over records at each offset in ``cuts``. The size field is right up to 65,535 bytes."""
        frame = encode_frame(kind, transport_id, payload)
        edges = [0, *sorted(cuts), len(frame)]
        self.send_plain(*[frame[start:end] for start, end in pairwise(edges)])

    def send_frames(self, frames: Iterable[tuple[int, int, bytes]]) -> None:
        """Send ``(type, transport id, payload)`` one behind the other, in as few records as hold them."""
        self.send_plain(b"".join([encode_frame(*frame) for frame in frames]))

    def pause(self) -> None:
        """Stop reading."""
        self.transport.pauseProducing()  # type: ignore[union-attr]

    def resume(self) -> None:
        """Read again."""
        self.transport.resumeProducing()  # type: ignore[union-attr]

    def close(self) -> None:
        """End the connection once all written data has been sent."""
        self.transport.loseConnection()  # type: ignore[union-attr]

    def abort(self) -> None:
        """End the connection with a reset."""
        self.transport.abortConnection()  # type: ignore[union-attr]

    # --- waiting ------------------------------------------------------------------------------------------------------

    async def sealed(self) -> None:
        """Wait until the handshake is done; raises the reason if the connection is lost before."""
        if self.records is None:
            await self._wait(self._sealed_waiters)

    async def next_frame(self, kind: int | None = None, transport_id: int | None = None) -> RawFrame:
        """Wait for a frame, of this type and id if given; drops others. Raises the reason if the connection is lost."""
        while True:
            while self._frames:
                frame = self._frames.popleft()
                if kind in (None, frame.kind) and transport_id in (None, frame.transport_id):
                    return frame
            await self._wait(self._frame_waiters)

    def take_frames(self) -> list[RawFrame]:
        """All received frames that have not been taken yet."""
        frames = list(self._frames)
        self._frames.clear()
        return frames

    async def lost(self) -> BaseException:
        """Wait for the end of the connection, and return its reason."""
        if self.lost_reason is None:
            await self._lost_waiters.wait()
        assert self.lost_reason is not None
        assert self.lost_reason.value is not None
        return self.lost_reason.value

    async def request(self, target: PublicKey, transport_id: int) -> RawFrame:
        """Send a REQUEST for ``target`` and wait for the ACCEPT or CLOSE that answers it."""
        self.send_request(target, transport_id)
        while True:
            frame = await self.next_frame(transport_id=transport_id)
            if frame.kind in (FrameType.ACCEPT, FrameType.CLOSE):
                return frame

    def send_request(self, target: PublicKey, transport_id: int) -> None:
        """Send a REQUEST for ``target``."""
        self.send_frame(FrameType.REQUEST, transport_id, self.key.public_key.raw + target.raw)

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _wait(self, waiters: Waiters[None]) -> None:
        if self.lost_reason is not None:
            self.lost_reason.raiseException()
        await waiters.wait()

    def _on_handshake(self) -> None:
        noise = self._noise
        assert noise is not None
        while noise.result is None and len(self.received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self.received[:LENGTH_BYTES], "big")
            if len(self.received) < end:
                return
            message = bytes(self.received[LENGTH_BYTES:end])
            del self.received[:end]
            noise.read_message(message)
            if noise.result is None:
                self.send_packet(noise.write_message())
        if noise.result is None:
            return
        if self.remote is None:
            self.remote = PublicKey(noise.result.remote_static)
        self.records = RecordLayer(noise.result.send_key, noise.result.receive_key)
        if self.on_sealed is not None:
            self.on_sealed()
        self._sealed_waiters.fire(None)
        leftover = bytes(self.received)
        self.received.clear()
        self._on_records(leftover)

    def _on_records(self, data: bytes) -> None:
        assert self.records is not None
        for record in self.records.open(data):
            plaintext = self._tail + record
            frames, used = split_frames(plaintext)
            self._tail = plaintext[used:]
            for kind, transport_id, start, end in frames:
                frame = RawFrame(kind, transport_id, plaintext[start:end])
                if self.on_frame is None or not self.on_frame(frame):
                    self._frames.append(frame)
        if self._frames:
            self._frame_waiters.fire(None)


async def connect_raw(
    endpoint: IStreamClientEndpoint,
    server: PublicKey,
    key: SecretKey | None = None,
    *,
    shake: bool = True,
    random: Random = os.urandom,
    connection: RawConnection | None = None,
) -> RawConnection:
    """A raw client of ``server`` behind ``endpoint``, its handshake done unless ``shake`` is false.

    ``connection`` is used if given, otherwise one is made. The first frame to take is the server's OK. Raises the errors of
    connecting, and the reason if the connection is lost.
    """
    raw = connection or RawConnection(key or SecretKey.generate(random), server, shake=shake, random=random)
    await endpoint.connect(quiet_factory(lambda: raw))
    if shake:
        await raw.sealed()
    return raw


class RawRelay:
    """Accepts connections as a relay does; each is a :class:`RawConnection`.

    With ``say_ok`` it sends OK to every client after the handshake; the test does the rest.
    """

    def __init__(
        self,
        endpoint: IStreamServerEndpoint,
        key: SecretKey | None = None,
        *,
        shake: bool = True,
        say_ok: bool = True,
        random: Random = os.urandom,
    ) -> None:
        self.key = key or SecretKey.generate(random)
        self.connections: list[RawConnection] = []
        self._endpoint = endpoint
        self._shake = shake
        self._say_ok = say_ok
        self._random = random
        self._port: Any = None
        self._given = 0
        self._waiters: Waiters[None] = Waiters()

    async def listen(self) -> PinnedServer:
        """Begin to listen; returns where clients can connect."""
        self._port = await self._endpoint.listen(quiet_factory(self._build))
        host = self._port.getHost()
        return PinnedServer(self.key.public_key, HostPort(host.host, host.port))

    async def accept(self) -> RawConnection:
        """The next connection in the order they came; with ``shake``, once its handshake is done."""
        while len(self.connections) <= self._given:
            await self._waiters.wait()
        raw = self.connections[self._given]
        self._given += 1
        if self._shake:
            await raw.sealed()
        return raw

    async def stop(self) -> None:
        """Stop listening, and reset all connections."""
        if self._port is not None:
            port, self._port = self._port, None
            await port.stopListening()
        for raw in self.connections:
            if raw.lost_reason is None:
                raw.abort()
                await raw.lost()

    def _build(self) -> RawConnection:
        raw = RawConnection(self.key, shake=self._shake, random=self._random)
        if self._say_ok:
            raw.on_sealed = lambda: raw.send_frame(FrameType.OK, 0)
        raw.on_made = lambda: self._made(raw)
        return raw

    def _made(self, raw: RawConnection) -> None:
        self.connections.append(raw)
        self._waiters.fire(None)
