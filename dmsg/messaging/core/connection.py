"""A client's end of a link after its handshake: frames in, channels, frames out.

:ref:`spec-messaging-channels`, :ref:`spec-messaging-closing`. ``send_data`` queues, ``data_to_send`` seals what may go out,
one Send of each channel in turn; ``receive_data`` does the reverse.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Final

from dmsg.crypto.errors import CryptoError, InvalidKey, NonceExhausted
from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.crypto.noise import NoiseHandshake
from dmsg.errors import LocalProtocolError
from dmsg.messaging.core.channel import RECEIVING, SENDING, Channel, ChannelState
from dmsg.messaging.core.channel_cipher import channel_handshake
from dmsg.messaging.core.dialect import V0, Dialect
from dmsg.messaging.core.errors import ChannelEndReason, ChannelFault, HandshakeFailed, NoFreeChannel, WriteOverflow
from dmsg.messaging.core.events import ChannelEnded, ChannelOffered, ChannelOpened, DataReceived, Event
from dmsg.messaging.core.limits import CLIENT_IDS, ConnectionConfig
from dmsg.messaging.core.wire import (
    CHANNEL_CLOSED,
    CHANNEL_OPENED,
    CHANNEL_OPENED_BYTES,
    CLOSE_CHANNEL,
    GO,
    KEY_BYTES,
    OPEN_CHANNEL,
    OPEN_CHANNEL_BYTES,
    SEND,
    Layout,
    RelayFrameReader,
)
from dmsg.sansio.core import Core


class Connection(Core):
    """All channels of a client over one relay."""

    def __init__(
        self,
        key: SecretKey,
        *,
        now: float,
        dialect: Dialect = V0,
        layout: Layout = GO,
        config: ConnectionConfig | None = None,
        random: Random = os.urandom,
    ) -> None:
        """``dialect`` is for other clients, ``layout`` for the relay."""
        self.identity = key.public_key
        self.dialect = dialect
        self.config = config or ConnectionConfig()
        #: By the id of frames that come.
        self.channels: dict[int, Channel] = {}
        #: Channels whose writer may go on; see :meth:`take_writable`.
        self.writable: list[Channel] = []
        self._key = key
        self._layout = layout
        self._random = random
        self._reader = RelayFrameReader(layout)
        self._now = now
        self._control: list[bytes] = []
        self._control_bytes = 0
        self._sending: deque[Channel] = deque()
        self._offered = self._incoming = 0
        if layout is not GO:
            # A relay learns the layout of a link from its first frame, and this client may only listen. There is no
            # channel 0 yet: the relay gives its lowest ids last.
            self.send_control(CHANNEL_CLOSED, 0)
        #: When a channel that waits for the other side's last frame is given up; ``None`` until the time is known.
        self._deadlines: dict[Channel, float | None] = {}
        #: Ids whose channels ended without a last frame of the other side. It may still come, so these ids are used last, the
        #: oldest of them first.
        self._late_ids: dict[int, None] = {}
        #: Channels that have something to send and no number for it; the next :meth:`handle_timeout` ends them.
        self._used_up: list[Channel] = []

    # --- what the application asks for -----------------------------------------------------------------------------

    def open(self, remote: PublicKey) -> Channel:
        """Send an OpenChannel to ``remote``; :class:`ChannelOpened` or :class:`ChannelEnded` follows.

        Raises ``NoFreeChannel`` when all 255 ids are taken.
        """
        handshake = channel_handshake(self._key, remote, initiator=True, random=self._random)
        channel_id = self._take_id()
        send_id = None if self.dialect.own_ids else channel_id
        channel = Channel(channel_id, send_id, remote, handshake, initiator=True)
        self.channels[channel_id] = channel
        self.send_control(OPEN_CHANNEL, channel_id, remote.raw + handshake.write_message())
        return channel

    def prove(self, channel: Channel) -> NoiseHandshake:
        """Find out whether an offered channel comes from the key it names, at the price of two Diffie-Hellmans.

        Before that, only the relay vouches for the key. Raises ``HandshakeFailed`` when the key is another one, and refuses
        the offer; ``LocalProtocolError`` when the channel is not waiting for a decision.
        """
        if channel.state is not ChannelState.OFFERED:
            raise LocalProtocolError(f"{channel!r} is not waiting for a decision")
        handshake = channel.handshake
        if handshake is None:
            handshake = channel_handshake(self._key, channel.remote, initiator=False, random=self._random)
            try:
                handshake.read_message(channel.offer)
            except CryptoError:
                self.abort(channel)
                raise HandshakeFailed("message 1 does not open") from None
            channel.handshake = handshake
        return handshake

    def accept(self, channel: Channel) -> None:
        """Accept an offered channel, which is open then. Raises as :meth:`prove`, which need not have been called."""
        handshake = self.prove(channel)
        # This cannot fail for the peer's ephemeral key: it went through a Diffie-Hellman already.
        message = handshake.write_message()
        assert handshake.result is not None and channel.send_id is not None
        self._offered -= 1
        channel.open(handshake.result, self.dialect)
        our_id = bytes((channel.id,)) if self.dialect.own_ids else b""
        self.send_control(CHANNEL_OPENED, channel.send_id, our_id + message)

    def refuse(self, channel: Channel) -> None:
        """Refuse an offered channel. Raises ``LocalProtocolError`` when it is not waiting for a decision."""
        if channel.state is not ChannelState.OFFERED:
            raise LocalProtocolError(f"{channel!r} is not waiting for a decision")
        self.abort(channel)

    def take_writable(self) -> list[Channel]:
        """Empty :attr:`writable` and give what was in it; the session asks after every flush."""
        channels = self.writable
        if channels:
            self.writable = []
        return channels

    def send_data(self, channel: Channel, data: bytes) -> bool:
        """Queue ``data``; ``True`` asks the writer to pause until the channel shows up in :attr:`writable`.

        Raises ``LocalProtocolError`` unless the channel is open, and ``WriteOverflow`` when the writer does not pause and more
        than ``pending_limit_bytes`` wait.
        """
        if channel.state is not ChannelState.OPEN:
            raise LocalProtocolError(f"{channel!r} takes no data")
        pending = channel.pending
        pending.append(data)
        if not channel.queued and channel.sendable:
            self._queue(channel)
        if pending.size <= self.config.pause_bytes:
            return False
        if pending.size > self.config.pending_limit_bytes:
            raise WriteOverflow("more was written than may wait to be sent")
        channel.blocked = True
        return True

    def consumed(self, channel: Channel, size: int) -> bool:
        """The application took ``size`` received bytes; ``True`` if there is something to send."""
        channel.consumed(size)
        if self._queue(channel):
            return True
        self._close_if_through(channel)
        return bool(self._control)

    def close(self, channel: Channel) -> bool:
        """End ``channel`` once everything written is sent, and acknowledged if the dialect has that.

        ``True`` if it is over right now; otherwise a :class:`ChannelEnded` follows. Data that comes until then is still
        reported. All received data must be :meth:`consumed`, because the peer waits for that.
        """
        if channel.state is ChannelState.OPEN:
            channel.move(ChannelState.CLOSING)
            self._close_if_through(channel)
        elif channel.state not in (ChannelState.CLOSING, ChannelState.HALF_CLOSED):
            self.abort(channel)
        return channel.state is ChannelState.CLOSED

    def abort(self, channel: Channel) -> None:
        """End ``channel`` now, give up a dial, or refuse an offer. Unsent data is dropped; no event follows."""
        channel.discarding = True
        state = channel.state
        if state in SENDING:
            self._drop(channel)
        elif state is ChannelState.OPENING:
            # The answer may be on its way, so the id is kept. If each side has ids of its own, only the answer has the one to
            # close.
            if channel.send_id is not None:
                self.send_control(CLOSE_CHANNEL, channel.send_id)
            channel.move(ChannelState.ABANDONED)
            channel.discard()
            self._deadlines[channel] = None
        elif state is ChannelState.OFFERED:
            self._answer_closed(channel)
            self._forget(channel)
        else:
            channel.discard()

    # --- towards the network ---------------------------------------------------------------------------------------

    @property
    def wants_write(self) -> bool:
        """Whether :meth:`data_to_send` would give anything."""
        return bool(self._control or self._sending)

    @property
    def overloaded(self) -> bool:
        """Whether so many control frames wait for the network that reading should stop."""
        return self._control_bytes > self.config.control_limit_bytes

    def data_to_send(self) -> bytes:
        """First control frames, then Sends of the channels in turn."""
        sending = self._sending
        parts = self._control
        if not parts and not sending:
            return b""
        config = self.config
        budget = config.flush_bytes - self._control_bytes
        self._control, self._control_bytes = [], 0
        once, turns = config.one_send_per_write, len(sending)
        header = self._layout.send_header
        while sending and turns and budget > 0:
            turns -= once
            channel = sending.popleft()
            channel.queued = False
            if not channel.sendable:
                continue
            try:
                ciphertext = channel.next_ciphertext()
            except NonceExhausted:  # the other channels go on
                self._used_up.append(channel)
                continue
            assert channel.send_id is not None
            parts.append(header(channel.send_id, len(ciphertext)))
            parts.append(ciphertext)
            budget -= len(ciphertext)
            if not self._queue(channel):
                self._close_if_through(channel)
            if channel.blocked and channel.pending.size <= config.resume_bytes:
                channel.blocked = False
                self.writable.append(channel)
        return b"".join(parts)

    def send_control(self, kind: int, channel_id: int, payload: bytes = b"") -> None:
        """Send a frame that is not data; it does not wait behind data."""
        frame = self._layout.encode(kind, channel_id, payload)
        self._control.append(frame)
        self._control_bytes += len(frame)

    # --- from the network ------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Take bytes from the network. ``RemoteProtocolError`` means that the link must be dropped."""
        self._now = now
        events: list[Event] = []
        buffer, frames = self._reader.read(data)
        channels = self.channels
        for kind, channel_id, start, end in frames:
            channel = channels.get(channel_id)
            if kind == SEND:
                if channel is not None and not channel.discarding and channel.state in RECEIVING:
                    self._on_send(channel, buffer, start, end, events)
            elif kind == OPEN_CHANNEL:
                self._on_open_channel(channel_id, buffer[start:end], events)
            elif channel is None:
                # A late frame, or one for a channel that never was, is ignored. Only the answer to a dial that was given up
                # has opened a channel at the peer. That is closed even if the answer comes when the id is not kept any more.
                if kind == CHANNEL_OPENED and self.dialect.own_ids and end - start == CHANNEL_OPENED_BYTES + 1:
                    self.send_control(CHANNEL_CLOSED, buffer[start])
            elif kind == CHANNEL_OPENED:
                self._on_channel_opened(channel, buffer[start:end], events)
            elif kind == CLOSE_CHANNEL:
                if channel.state is not ChannelState.OPENING:
                    # It may not be the last frame: the other side answers our CloseChannel, or gives up waiting.
                    self._late_ids[channel.id] = None
                self._answer_closed(channel)
                self._end(channel, _ENDS.get(channel.state, ChannelEndReason.CLOSED_BY_PEER), events)
            elif kind == CHANNEL_CLOSED:
                self._end(channel, _ENDS.get(channel.state, ChannelEndReason.PEER_GONE), events)
        return events

    def _on_send(self, channel: Channel, frames: bytes, start: int, end: int, events: list[Event]) -> None:
        try:
            data = channel.receive_send(frames, start, end)
        except ChannelFault as fault:
            self._fail(channel, fault.reason, events)
            return
        if data:
            if channel.unread_bytes > self.config.receive_limit_bytes:
                self._fail(channel, ChannelEndReason.SLOW_CONSUMER, events)
                return
            events.append(DataReceived(channel, data))
        if self.dialect.acks and not self._queue(channel):  # an acknowledgement came, or one is due
            self._close_if_through(channel)

    def _on_open_channel(self, their_id: int, payload: bytes, events: list[Event]) -> None:
        try:
            channel = self._offer(their_id, payload, events)
        except (InvalidKey, NoFreeChannel):
            self.send_control(CHANNEL_CLOSED, their_id)
            return
        self.channels[channel.id] = channel
        self._offered += 1
        self._incoming += 1
        events.append(ChannelOffered(channel))

    def _offer(self, their_id: int, payload: bytes, events: list[Event]) -> Channel:
        """The channel that an OpenChannel asks for. Raises ``InvalidKey`` or ``NoFreeChannel`` if there can be none.

        A client with ids of its own is not told that an offer is over, so at the limit the oldest offer makes room.
        """
        if len(payload) != OPEN_CHANNEL_BYTES:
            raise InvalidKey("not the length of a key and a handshake message")
        config = self.config
        own_ids, crowded = self.dialect.own_ids, self._offered >= config.offered_limit
        if (crowded and not own_ids) or self._incoming - (crowded and own_ids) >= config.incoming_limit:
            raise NoFreeChannel("too many channels of others")
        if their_id in self.channels and not own_ids:
            raise NoFreeChannel("the id is in use")
        remote = PublicKey(payload[:KEY_BYTES])
        if crowded:
            oldest = next(one for one in self.channels.values() if one.state is ChannelState.OFFERED)
            self._fail(oldest, ChannelEndReason.REFUSED, events)
        our_id = self._take_id() if own_ids else their_id
        channel = Channel(our_id, their_id, remote, None, initiator=False)
        channel.offer = payload[KEY_BYTES:]
        return channel

    def _on_channel_opened(self, channel: Channel, payload: bytes, events: list[Event]) -> None:
        excess = len(payload) - CHANNEL_OPENED_BYTES
        if channel.state is ChannelState.ABANDONED and not self.dialect.own_ids and excess != 1:
            return  # our CloseChannel is out and will be answered; unless the answer has changed our id at the relay
        if channel.state not in (ChannelState.OPENING, ChannelState.ABANDONED):
            return
        if excess not in (0, 1):
            self._fail(channel, ChannelEndReason.MALFORMED, events)
            return
        channel.send_id = payload[0] if excess else channel.id
        if excess != self.dialect.own_ids:
            self._fail(channel, ChannelEndReason.DIALECT, events)
            return
        payload = payload[excess:]
        handshake = channel.handshake
        if channel.state is ChannelState.ABANDONED or handshake is None:
            self._drop(channel)
            return
        try:
            handshake.read_message(payload)
        except CryptoError:
            self._fail(channel, ChannelEndReason.HANDSHAKE, events)
            return
        assert handshake.result is not None
        channel.open(handshake.result, self.dialect)
        events.append(ChannelOpened(channel))

    # --- time ------------------------------------------------------------------------------------------------------

    def next_timeout(self) -> float | None:
        """When the wait for the other side's last frame of a channel is over, or ``None``.

        A new wait begins with the next :meth:`handle_timeout`, which tells the core the time; so that is asked for at once. So it
        is for channels that have to end.
        """
        if self._used_up:
            return self._now
        deadlines = self._deadlines
        return min([self._now if at is None else at for at in deadlines.values()]) if deadlines else None

    def handle_timeout(self, now: float) -> list[Event]:
        """End channels whose other side has not sent its last frame in time, and those whose numbers are used up."""
        self._now = now
        events: list[Event] = []
        while self._used_up:
            channel = self._used_up.pop()
            if channel.state in SENDING:
                self._fail(channel, ChannelEndReason.EXHAUSTED, events)
        for channel, at in list(self._deadlines.items()):
            abandoned = channel.state is ChannelState.ABANDONED
            if at is None:
                wait_s = self.config.abandoned_id_s if abandoned else self.config.close_timeout_s
                self._deadlines[channel] = now + wait_s
            elif now >= at:
                self._late_ids[channel.id] = None
                if not abandoned:
                    self._answer_closed(channel)
                self._end(channel, ChannelEndReason.NORMAL, events)
        return events

    # --- bookkeeping -----------------------------------------------------------------------------------------------

    def _take_id(self) -> int:
        free = [number for number in range(CLIENT_IDS) if number not in self.channels]
        if not free:
            raise NoFreeChannel("all channel ids of this link are taken")
        channel_id = next((number for number in free if number not in self._late_ids), None)
        if channel_id is None:
            channel_id = next(number for number in self._late_ids if number in free)
        self._late_ids.pop(channel_id, None)
        return channel_id

    def _queue(self, channel: Channel) -> bool:
        """Give ``channel`` its turn to send if it has something to send; ``True`` if it waits for its turn."""
        if not channel.queued and channel.sendable:
            channel.queued = True
            self._sending.append(channel)
        return channel.queued

    def _close_if_through(self, channel: Channel) -> None:
        if channel.state is ChannelState.CLOSING and channel.may_close and channel not in self._used_up:
            self._half_close(channel)

    def _half_close(self, channel: Channel) -> None:
        """Send CloseChannel; then the other side sends the last frame, or its time runs out."""
        assert channel.send_id is not None
        self.send_control(CLOSE_CHANNEL, channel.send_id)
        channel.move(ChannelState.HALF_CLOSED)
        self._deadlines[channel] = None

    def _drop(self, channel: Channel) -> None:
        """Send ChannelClosed, which is no orderly end: written data may be cut off."""
        self._answer_closed(channel)
        self._late_ids[channel.id] = None
        self._forget(channel)

    def _answer_closed(self, channel: Channel) -> None:
        if channel.send_id is not None:
            self.send_control(CHANNEL_CLOSED, channel.send_id)

    def _fail(self, channel: Channel, reason: ChannelEndReason, events: list[Event]) -> None:
        """End a channel because of a frame that came on it."""
        told = channel.discarding
        channel.discarding = True
        if channel.state is ChannelState.HALF_CLOSED:
            channel.discard()  # the other side still sends the last frame
        else:
            self._drop(channel)
        if not told:
            events.append(ChannelEnded(channel, reason, local=True))

    def _end(self, channel: Channel, reason: ChannelEndReason, events: list[Event]) -> None:
        """The other side has sent its last frame, or its time is over."""
        told = channel.discarding
        self._forget(channel)
        if not told:
            events.append(ChannelEnded(channel, reason, local=reason is ChannelEndReason.NORMAL))

    def _forget(self, channel: Channel) -> None:
        if channel.state is ChannelState.OFFERED:
            self._offered -= 1
        if not channel.initiator:
            self._incoming -= 1
        channel.move(ChannelState.CLOSED)
        channel.discarding = True
        channel.discard()
        self._deadlines.pop(channel, None)
        del self.channels[channel.id]


#: In these states both CloseChannel and ChannelClosed are an answer, and mean this.
_ENDS: Final = {
    ChannelState.OPENING: ChannelEndReason.REFUSED,
    ChannelState.HALF_CLOSED: ChannelEndReason.NORMAL,
}
