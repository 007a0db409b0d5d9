"""The one ``Protocol`` that drives any core, and the only place that writes to sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast
from typing import Protocol as TypingProtocol

from twisted.internet.interfaces import IDelayedCall, IPushProducer, IReactorTime
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.errors import DmsgError, LocalProtocolError, RemoteProtocolError
from dmsg.glue.end_of_turn import AtEndOfTurn
from dmsg.glue.sockets import (
    USER_TIMEOUT_MS,
    DirectReader,
    DirectSender,
    direct_reader,
    direct_sender,
    tune_socket,
)
from dmsg.sansio.core import Core

#: A larger piece is part of a transfer, or takes longer to handle than a wake-up takes.
BULK_BYTES: Final = 32 * 1024


class Owner(TypingProtocol):
    """The receiver of a core's events."""

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        """Act on ``events``; nothing is flushed meanwhile."""

    def after_read(self, shell: Shell) -> None:
        """All events of one read, or of a timeout, are handled: flush this connection, and others that have to send now."""

    def flushed(self, shell: Shell) -> None:
        """Something was written, so a writer that was told to pause may be able to go on."""

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: Failure) -> None:
        """The connection is over: ``error`` is why we ended it, if we did; ``reason`` is Twisted's."""


@implementer(IPushProducer)
class Shell(Protocol):
    """Feeds a core from a Twisted transport and writes what it has to send.

    ``become`` replaces the core: after the handshake comes the sealed connection.
    """

    noisy = False
    #: How long the peer's kernel may leave data unacknowledged, in milliseconds.
    user_timeout_ms = USER_TIMEOUT_MS

    def __init__(self, core: Core, owner: Owner, clock: IReactorTime) -> None:
        self.core = core
        self.owner = owner
        self.clock = clock
        self.congested = False
        self.lost = False
        #: Why this side ended the connection, if it did.
        self.error: DmsgError | None = None
        self._busy = False
        self._end_waits = False  # whether to end the connection once all that the core has queued is written
        self._soon = AtEndOfTurn(clock)
        self._timer: IDelayedCall | None = None
        self._holds: set[str] = set()
        self._reading_paused = False
        self._send: DirectSender | None = None
        self._read: DirectReader | None = None
        #: Tells our own reactor not to stay awake for the next message. Other reactors have no such method.
        self._note_bulk: Callable[[], object] = getattr(clock, "note_bulk", _ignore)

    # --- from Twisted ----------------------------------------------------------------------------------------------

    def connectionMade(self) -> None:
        """Begin: send what the core has to say first."""
        transport = self.transport
        assert transport is not None
        tune_socket(transport, self.user_timeout_ms)
        self._send = direct_sender(transport)
        self._read = direct_reader(transport, self, self.dataReceived, self._takes_views)
        # A pull producer is called whenever the transport's buffer is empty. Sending past the transport needs just that.
        transport.registerProducer(self, self._send is None)  # type: ignore[attr-defined]
        self.flush()

    def dataReceived(self, data: bytes | memoryview) -> None:
        """Give bytes to the core and its events to the owner, which then flushes."""
        if self.lost or self.error is not None:
            return
        if len(data) > BULK_BYTES:
            self._note_bulk()
        self._busy = True
        try:
            events = self.core.receive_data(cast(bytes, data), self.clock.seconds())  # a view only if the core takes it
            if events:
                self.owner.handle_events(self, events)
        except RemoteProtocolError as error:
            self._offended(error)
            return
        finally:
            self._busy = False
        self.owner.after_read(self)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost = True
        self._soon.cancel()
        timer, self._timer = self._timer, None
        if timer is not None and timer.active():
            timer.cancel()
        if self._read is not None:
            self._read.stop()
            self._read = None
        self.owner.connection_lost(self, self.error, reason if self._send is None else self._send.reason(reason))

    def pauseProducing(self) -> None:
        self.congested = True
        self.core.pause()

    def resumeProducing(self) -> None:
        self.congested = False
        self.core.resume()
        self.flush()

    def stopProducing(self) -> None:
        """The transport takes nothing any more; ``connectionLost`` follows."""

    # --- from the owner --------------------------------------------------------------------------------------------

    def become(self, core: Core, leftover: bytes) -> None:
        """Replace the core by ``core`` and give it ``leftover``: received bytes that the old core did not need."""
        self._write(self.core.data_to_send())  # what the old core still has to send
        self.core = core
        if self.congested:
            self.pauseProducing()
        if leftover:
            events = core.receive_data(leftover, self.clock.seconds())
            if events:
                self.owner.handle_events(self, events)

    def flush(self) -> None:
        """Write what the core has to send, as much as the network takes."""
        if self.lost or self._busy:
            return
        wrote = False
        try:
            while not self.congested:
                data = self.core.data_to_send()
                if not data:
                    break
                wrote = True
                self._write(data)
        except LocalProtocolError as error:  # the record counter is used up
            self.fail(error)
            return
        if wrote:
            self.owner.flushed(self)
        if self._end_waits and not self.congested:
            self._end()
            return
        if self.congested or self._reading_paused:
            self._check_reading()
        self._arm()

    def flush_between(self) -> None:
        """Flush while events of a read are still being handled, so that the other side need not wait for all of them."""
        busy, self._busy = self._busy, False
        self.flush()
        self._busy = busy

    def flush_soon(self) -> None:
        """Flush at the end of this turn of the reactor, so that everything written in it goes out together."""
        if not self._busy and not self.lost:
            self._soon.ask(self.flush)

    def hold(self, reason: str, held: bool) -> None:
        """Stop reading for ``reason``, or drop that reason; reading goes on when no reason is left."""
        if held:
            self._holds.add(reason)
        else:
            self._holds.discard(reason)
        self._check_reading()

    def fail(self, error: DmsgError) -> None:
        """End the connection at once, for ``error``."""
        if (self.error is None or self._end_waits) and not self.lost:
            _drop_frames(error)
            self.error = self.error or error
            self._end_waits = False
            self._send = None
            if self.transport is not None:
                self.transport.abortConnection()  # type: ignore[attr-defined]

    def close(self, error: DmsgError | None = None) -> None:
        """End the connection once everything is sent: what is written already, and what the core has queued."""
        if self.error is not None or self.lost or self._end_waits:
            return
        if self.congested:
            self.hold("closing", True)  # before the error is set: later calls neither stop nor resume reading
            self.error, self._end_waits = error, True
        else:
            self.error = error
            self._end()

    def cut(self) -> None:
        """End the connection at once, even while it is closing: the other side may never take what was written."""
        if not self.lost and self.transport is not None:
            self.transport.abortConnection()  # type: ignore[attr-defined]

    def say_last(self, data: bytes, error: DmsgError) -> None:
        """Write ``data`` past the core, then end the connection for ``error``."""
        self.core = _LastWords(data)
        self._busy = False
        self.flush()
        self.close(error)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._end_waits = False
        self._send = None
        self.transport.unregisterProducer()  # type: ignore[union-attr]
        self.transport.loseConnection()  # type: ignore[union-attr]

    def _write(self, data: bytes) -> None:
        """Send what the socket takes now. The rest goes to the transport, which asks for more once that is sent.

        The transport alone would send everything in the next turn of the reactor, after three more system calls.
        """
        if not data:
            return
        if len(data) > BULK_BYTES:
            self._note_bulk()
        if self._send is not None and not self.congested:
            sent = self._send(data)
            if sent == len(data):
                return
            data = data[sent:]
            self.pauseProducing()
        self.transport.write(data)  # type: ignore[union-attr]

    def _takes_views(self) -> bool:
        return self.core.takes_views

    def _check_reading(self) -> None:
        wanted = bool(self._holds) or (self.congested and self.core.overloaded)
        if wanted is not self._reading_paused and not self.lost and self.error is None:
            self._reading_paused = wanted
            if wanted:
                self.transport.pauseProducing()  # type: ignore[union-attr]
            else:
                self.transport.resumeProducing()  # type: ignore[union-attr]

    def _arm(self) -> None:
        due = self.core.next_timeout()
        timer = self._timer
        if due is None:
            if timer is not None and timer.active():
                timer.cancel()
            self._timer = None
        elif timer is None or not timer.active() or due < timer.getTime():
            if timer is not None and timer.active():
                timer.cancel()  # Twisted's ``reset`` to an earlier time would search all timed calls of the reactor
            self._timer = self.clock.callLater(max(0.0, due - self.clock.seconds()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        try:
            events = self.core.handle_timeout(self.clock.seconds())
            if events:
                self.owner.handle_events(self, events)
                self.owner.after_read(self)
        except RemoteProtocolError as error:
            self._offended(error)
            return
        self.flush()

    def _offended(self, error: RemoteProtocolError) -> None:
        if error.events:
            self.owner.handle_events(self, error.events)
            self.owner.after_read(self)
        self.fail(error)


def _drop_frames(error: BaseException) -> None:
    """Remove the tracebacks of ``error`` and its causes. Their frames refer to the data that was read, and to the shell, which
    keeps the error: such a cycle lives until the garbage collector runs.
    """
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__


def _ignore() -> None:
    """Do nothing."""


class _LastWords(Core):
    """The core of a connection that is about to be closed."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def receive_data(self, data: bytes, now: float) -> Sequence[object]:
        return ()

    def data_to_send(self) -> bytes:
        data, self._data = self._data, b""
        return data
