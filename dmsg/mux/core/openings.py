"""The streams of one connection that are not open yet, requested or offered, and their end-to-end handshakes. Pure.

:ref:`spec-establishing`, :ref:`spec-carriers`. :class:`~dmsg.mux.core.connection.Connection` shares its streams and its
queues with this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey, Random
from dmsg.errors import LocalProtocolError, RemoteProtocolError
from dmsg.mux.core.buffers import Buffers
from dmsg.mux.core.e2e_handshake import UPGRADE_MAGIC, Resume, SecureKeys
from dmsg.mux.core.e2e_negotiation import KNOWN_PEERS, Carrier, EndToEnd
from dmsg.mux.core.errors import IntegrityError
from dmsg.mux.core.events import Event, StreamOffered, StreamOpened, UpgradeReceived
from dmsg.mux.core.ids import TransportIds
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.outgoing import Outgoing
from dmsg.mux.core.path_window import PathWindow
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.rekeying import KeyTimer
from dmsg.mux.core.sealed_stream import SealedStream
from dmsg.mux.core.stream import UNOWNED, Stream, StreamFault, StreamState
from dmsg.mux.core.wire import (
    ACCEPT,
    EXTENDED_REQUEST_LIMIT_BYTES,
    REQUEST,
    REQUEST_BYTES,
    CloseReason,
    encode_close,
    encode_frame,
)

#: Flush after so many finished handshakes, so that a burst of dials does not delay the first one.
ANSWERS_AT_ONCE: Final = 8
#: Peers whose paths are remembered, so that the next stream need not measure them anew. Some 1 KiB each.
PATHS_REMEMBERED: Final = 64


class Openings:
    """Opens streams from both ends. ``offered`` is how many wait for the application's decision."""

    __slots__ = (
        "_buffers",
        "_clock",
        "_config",
        "_end_to_end",
        "_identity",
        "_ids",
        "_key_timer",
        "_longest_request_bytes",
        "_out",
        "_paths",
        "_random",
        "_read_key",
        "_streams",
        "answers",
        "offered",
    )

    def __init__(
        self,
        identity: PublicKey,
        streams: dict[int, Stream],
        ids: TransportIds,
        out: Outgoing,
        key_timer: KeyTimer,
        *,
        config: ConnectionConfig,
        random: Random,
        extended: bool,
        end_to_end: EndToEnd | None,
        clock: Callable[[], float] | None,
        buffers: Buffers,
    ) -> None:
        self.offered = 0
        self._identity = identity
        self._streams = streams
        self._ids = ids
        self._out = out
        self._key_timer = key_timer
        self._config = config
        self._random = random
        self._read_key = lru_cache(maxsize=KNOWN_PEERS)(PublicKey)  # the check that a key is a point takes 6 µs
        self._longest_request_bytes = EXTENDED_REQUEST_LIMIT_BYTES if extended else REQUEST_BYTES
        self._end_to_end = end_to_end
        self._clock = clock
        self._buffers = buffers
        self._paths: dict[PublicKey, PathWindow] = {}  # the one that was used last at the end
        # Streams whose peers have answered our handshake message, with the answer.
        self.answers: deque[tuple[PlainStream, bytes]] = deque()

    # --- asking ----------------------------------------------------------------------------------------------------

    def request(self, remote: PublicKey, carrier: Carrier, service: str, resume: Resume | None) -> PlainStream:
        """Send a REQUEST. Raises ``Busy`` when all ids are taken."""
        request = self._identity.raw + remote.raw
        handshake = None
        if carrier is not Carrier.NONE:
            handshake = self._keys().initiate(remote, service, resume)
            if carrier is Carrier.REQUEST:
                request += handshake.message
        stream = self._new_stream(self._ids.take(self._streams), remote, request, initiator=True)
        stream.handshake = handshake
        self._out.control(encode_frame(REQUEST, stream.id, request))
        return stream

    def receive_accept(self, stream: PlainStream, payload: bytes, events: list[Event]) -> None:
        """The peer has accepted: the stream is open, or its handshake goes on. A turn of :meth:`finish` ends that."""
        if stream.handshake is None:
            stream.move(StreamState.OPEN)
            events.append(StreamOpened(stream))
        elif len(stream.request) == REQUEST_BYTES:
            stream.move(StreamState.UPGRADING)
            self._out.control(stream.upgrade_frame(stream.handshake.message))
        else:
            self.answers.append((stream, payload[REQUEST_BYTES:]))

    def take_answers(self) -> list[tuple[PlainStream, bytes]]:
        """The next streams to :meth:`finish`, ``ANSWERS_AT_ONCE`` at most."""
        return [self.answers.popleft() for _ in range(min(len(self.answers), ANSWERS_AT_ONCE))]

    def finish(self, stream: PlainStream, message: bytes) -> StreamOpened:
        """End the handshake of a stream whose peer has answered. Raises ``IntegrityError``."""
        assert stream.handshake is not None
        keys, resume = stream.handshake.finish(message)
        sealed = self._seal(stream, keys, StreamState.OPEN)
        self._out.prove(sealed)
        return StreamOpened(sealed, resume)

    def receive_upgrade(self, stream: PlainStream, data: bytes, events: list[Event]) -> None:
        """The first FWD of a stream in ``UPGRADING``. Raises ``StreamFault`` unless it brings the peer's handshake."""
        if not data.startswith(UPGRADE_MAGIC):
            raise StreamFault(CloseReason.DOWNGRADE)
        message = data[len(UPGRADE_MAGIC) :]
        if stream.initiator:
            self.answers.append((stream, message))
        elif stream.wants_seal:  # a second one is nothing an honest peer sends
            raise StreamFault(CloseReason.MALFORMED)
        else:
            stream.message = message
            events.append(UpgradeReceived(stream))

    # --- being asked -----------------------------------------------------------------------------------------------

    def receive_request(self, stream_id: int, payload: bytes, events: list[Event]) -> None:
        """A peer's REQUEST with an id that is not in use: offer it, or refuse it."""
        if stream_id % 2 == 0:
            self._out.control(encode_close(stream_id, CloseReason.BAD_ID))
            return
        try:
            fits = REQUEST_BYTES <= len(payload) <= self._longest_request_bytes
            if not fits or payload[33:REQUEST_BYTES] != self._identity.raw:
                raise InvalidKey("not for us")
            remote = self._read_key(payload[:33])
        except InvalidKey:
            self._out.control(encode_close(stream_id, CloseReason.MALFORMED))
            return
        if self.offered >= self._config.offered_limit:
            self._out.control(encode_close(stream_id, CloseReason.BUSY))
            return
        self._ids.taken(stream_id)
        self.offered += 1
        events.append(StreamOffered(self._new_stream(stream_id, remote, payload, initiator=False)))

    def read_offer(self, stream: PlainStream) -> tuple[str, Resume | None]:
        """See :meth:`Connection.read_offer`."""
        message, stream.message = stream.message, b""
        stream.responder = responder = self._keys().respond(stream.remote, message)
        try:
            return responder.service, responder.resume
        except RemoteProtocolError as error:
            raise IntegrityError(str(error), by="local") from None

    def accept_for_upgrade(self, stream: PlainStream) -> None:
        """See :meth:`Connection.accept_for_upgrade`."""
        self._send_accept(stream)
        stream.move(StreamState.UPGRADING)

    def accept(self, stream: PlainStream) -> Stream:
        """See :meth:`Connection.accept`."""
        if stream.state in (StreamState.OFFERED, StreamState.UPGRADING) and stream.responder is not None:
            return self.accept_sealed(stream, None)
        self._send_accept(stream)
        stream.move(StreamState.OPEN)
        return stream

    def accept_sealed(self, stream: PlainStream, resume: Resume | None) -> SealedStream:
        """Accept a stream whose handshake message was read; it is open once its initiator has proved itself."""
        assert stream.responder is not None
        if stream.state is StreamState.UPGRADING:
            message, keys = stream.responder.answer(resume)
            self._out.control(stream.upgrade_frame(message))
        else:
            self._check_offered(stream)
            message, keys = stream.responder.answer(resume)
            self._send_accept(stream, message)
        return self._seal(stream, keys, StreamState.CONFIRMING)

    @property
    def server(self) -> PublicKey:
        """The relay, to which each handshake is bound."""
        return self._keys().server

    def _check_offered(self, stream: Stream) -> None:
        if stream.state is not StreamState.OFFERED:
            raise LocalProtocolError(f"{stream!r} is not waiting for a decision")

    def _send_accept(self, stream: PlainStream, message: bytes = b"") -> None:
        self._check_offered(stream)
        self.offered -= 1
        self._out.control(encode_frame(ACCEPT, stream.id, stream.request[:REQUEST_BYTES] + message))

    # --- both ------------------------------------------------------------------------------------------------------

    def _keys(self) -> EndToEnd:
        if self._end_to_end is None:
            raise LocalProtocolError("this connection has no key for end-to-end handshakes")
        return self._end_to_end

    def _new_stream(self, stream_id: int, remote: PublicKey, request: bytes, *, initiator: bool) -> PlainStream:
        stream = PlainStream(
            stream_id,
            remote,
            request,
            initiator=initiator,
            window_bytes=self._config.send_window_bytes,
            first_sequence=int.from_bytes(self._random(2), "big"),
        )
        self._streams[stream_id] = stream
        return stream

    def _path(self, remote: PublicKey) -> PathWindow | None:
        """The path that all streams with ``remote`` share; it is remembered for the next one."""
        if self._clock is None:
            return None
        paths = self._paths
        path = paths[remote] = paths.pop(remote) if remote in paths else PathWindow(self._clock)
        if len(paths) > PATHS_REMEMBERED:
            del paths[next(iter(paths))]
        return path

    def _seal(self, stream: PlainStream, keys: SecureKeys, state: StreamState) -> SealedStream:
        """Replace ``stream`` by a sealed one in ``state``; nothing more may go through the old one."""
        config = self._config
        sealed = SealedStream(
            stream,
            keys,
            window_bytes=config.secure_window_bytes,
            largest_window_bytes=config.largest_window_bytes,
            ack_limit_bytes=config.ack_limit_bytes,
            rekey_after_frames=config.rekey_after_frames,
            path=self._path(stream.remote),
            buffers=self._buffers,
        )
        sealed.move(state)
        self._streams[stream.id] = sealed
        stream.move(StreamState.CLOSED)
        stream.owner = UNOWNED
        self._key_timer.watch(sealed)
        return sealed
