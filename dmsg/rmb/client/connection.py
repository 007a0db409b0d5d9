"""The connection to one relay: a token, a WebSocket, and a growing pause after each failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final
from typing import Protocol as TypingProtocol

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.errors import DmsgError, InvalidAddress
from dmsg.eventlog.reasons import Reason
from dmsg.glue.connecting import tls_problem
from dmsg.glue.shell import Owner, Shell
from dmsg.glue.waiters import Waiters
from dmsg.glue.websocket import WebSocketShell, WebSocketUrl
from dmsg.rmb.client.config import RmbConfig
from dmsg.rmb.core.close_codes import CloseCode
from dmsg.sansio.backoff import Backoff
from dmsg.sansio.errors import KeepaliveLost, WebSocketRefused
from dmsg.sansio.websocket_frames import Closed

_log = Logger()
#: Data read less than this many seconds after a pause of reading may have come at the beginning of the pause.
UNREAD_S: Final = 2.0
#: In the refusal of a token that the relay takes for too old or too new. Ours are new, and valid for a minute.
_OTHER_CLOCK: Final = ("jwt has expired", "jwt is not valid yet")
#: Opens a WebSocket to a URL for an owner: :func:`dmsg.glue.websocket.connect_websocket` with all other arguments bound.
Connect = Callable[[WebSocketUrl, Owner], "Deferred[WebSocketShell]"]


def relay_url(text: str) -> WebSocketUrl:
    """Parse the URL of a relay. Raises ``InvalidAddress`` if it is not valid."""
    where = WebSocketUrl.parse(text)
    if "?" in where.target:
        raise InvalidAddress("the URL of a relay has no query: there the token will be")
    return where


class ConnectionOwner(TypingProtocol):
    """Is told about a connection's messages and state."""

    def received(self, connection: RelayConnection, message: bytes) -> None:
        """A message came."""

    def connected(self, connection: RelayConnection) -> None:
        """The connection is up."""

    def lost(self, connection: RelayConnection) -> None:
        """The connection is lost; the last messages sent may not have arrived."""

    def failed(self, connection: RelayConnection) -> None:
        """An attempt to connect has failed."""

    def writable(self, connection: RelayConnection) -> None:
        """Something was written, so there may be room again."""

    def doubted(self, connection: RelayConnection) -> None:
        """The relay has not answered a ping in time; it may be dead or slow."""

    @property
    def in_haste(self) -> bool:
        """Whether something waits for a relay."""


class RelayConnection:
    """Keeps one relay connected from :meth:`start` to :meth:`stop`.

    ``token(self)`` makes a token for each attempt, because a token is valid for a minute and a connection lasts for days.
    Raises ``InvalidAddress`` for a ``url`` that is not ``ws://host[:port]`` or ``wss://host[:port]``.
    """

    def __init__(
        self,
        clock: Any,
        url: str,
        owner: ConnectionOwner,
        *,
        connect: Connect,
        token: Callable[[RelayConnection], str],
        uniform: Callable[[], float],
        config: RmbConfig,
    ) -> None:
        self.url = url
        self._where = relay_url(url)
        #: ``host`` or ``host:port``, as a registry may name it, and the host alone.
        self.place = self._where.host_header.lower()
        self.host = self._where.address.host.lower()
        #: Why it is not connected, for people and for the log; "" while it is.
        self.problem = "not connected yet"
        self.reason = Reason.NONE
        #: When it connected, how long that took, and the earliest time at which the last data may have come, in seconds.
        self.since_s = 0.0
        self.handshake_s = 0.0
        self.heard_at = 0.0
        #: Counts since it connected.
        self.envelopes_in = self.envelopes_out = self.bytes_in = self.bytes_out = 0
        #: Messages of so many bytes are too long for the relay, as it said when it closed the last connection: the longest one
        #: of that connection, though it may have been sent behind the one that the relay did not take.
        self.too_long_bytes = float("inf")
        #: The longest message sent since it connected.
        self._longest_bytes = 0
        self._clock = clock
        self._owner = owner
        self._connect = connect
        self._token = token
        self._uniform = uniform
        self._config = config
        self._backoff = Backoff(config.backoff_first_s, config.backoff_limit_s)
        self._urgent = Backoff(config.backoff_first_s, config.urgent_backoff_s)
        self._shell: WebSocketShell | None = None
        #: Whether another program has taken our session. If both reconnected at once, they would replace each other for ever.
        self._replaced = False
        self._work: Deferred[None] | None = None
        #: Whether it has not answered a ping in time. Then other relays are preferred; the keepalive may still end it.
        self.is_doubtful = False
        self._probe: IDelayedCall | None = None
        self._pinged = False
        self._sent_at = 0.0
        #: Whether reading is paused, when it was paused, and when it was resumed.
        self._is_held = False
        self._held_at, self._reads_since = 0.0, float("-inf")
        #: Whether messages of this read have been handed on. ``heard_at`` was set before, so answers count as sent after it.
        self._reading = False
        self._over: Waiters[None] = Waiters()
        self._pause: Deferred[None] | None = None
        self._pause_call: IDelayedCall | None = None

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect."""
        self._work = ensureDeferred(self._keep_connected())
        self._work.addErrback(lambda failure: failure.trap(CancelledError))

    async def stop(self) -> None:
        """End the connection. Messages sent before are written first, if that does not take long."""
        work, self._work = self._work, None
        shell = self._shell
        if shell is not None:
            over = self._over.wait_at_most(self._config.stop_timeout_s, self._clock)
            shell.close()
            await over
            if self._shell is not None:
                over = self._over.wait_at_most(self._config.stop_timeout_s, self._clock)
                shell.cut()
                await over
        if work is not None:
            work.cancel()

    async def _keep_connected(self) -> None:
        failures = 0
        while True:
            began_s = self._clock.seconds()
            try:
                shell = await self._connect(
                    replace(self._where, target=f"{self._where.target}?{self._token(self)}"), self
                )
            except DmsgError as error:
                self._explain(error)
                self._owner.failed(self)
                failures += 1
            else:
                self._came_up(shell, began_s)
                await self._over.wait()
                failures = 1 if self._clock.seconds() - self.since_s >= self._config.stable_s else failures + 1
            await self._rest(failures)

    def _came_up(self, shell: WebSocketShell, began_s: float) -> None:
        self._shell = shell
        self._is_held, self._reads_since = False, float("-inf")
        self._replaced = False
        self._longest_bytes = 0
        self.problem = ""
        self.since_s = self.heard_at = self._clock.seconds()
        self.handshake_s = self.since_s - began_s
        self.envelopes_in = self.envelopes_out = self.bytes_in = self.bytes_out = 0
        self._owner.connected(self)

    def _explain(self, error: DmsgError | None) -> None:
        if isinstance(error, WebSocketRefused):
            self.reason = Reason.UPGRADE_REFUSED
            self.problem = f"refused with status {error.status}: {_printable(error.text)}"
            if any(text in error.text for text in _OTHER_CLOCK):
                self.problem += " (it was made just now: is the clock of this machine right?)"
        elif isinstance(error, KeepaliveLost):
            self.reason, self.problem = Reason.SILENT, "silent"
        else:
            self.problem = getattr(error, "reason", "connection lost")
            self.reason = Reason.of(self.problem)
            detail = tls_problem(getattr(error, "error", None))
            if detail:
                self.problem += f": {detail}"

    async def _rest(self, failures: int) -> None:
        if self._replaced:
            _log.warn("another program has taken the session at {relay}; trying again later", relay=self.url)
            pause_s = self._config.replaced_pause_s * (0.5 + 0.5 * self._uniform())
        else:
            backoff = self._urgent if self._owner.in_haste else self._backoff
            pause_s = backoff.pause_s(failures, self._uniform)
        self._pause = Deferred()
        self._pause_call = self._clock.callLater(pause_s, self._go_on)
        try:
            await self._pause
        finally:
            if self._pause_call is not None:
                self._pause_call.cancel()
            self._pause = self._pause_call = None

    def _go_on(self) -> None:
        self._pause_call = None
        if self._pause is not None:
            self._pause.callback(None)

    def hurry(self) -> None:
        """Cut a long pause short: something waits for a relay."""
        call, limit_s = self._pause_call, self._config.urgent_backoff_s
        if call is not None and not self._replaced and call.getTime() - self._clock.seconds() > limit_s:
            call.reset(limit_s * (0.5 + 0.5 * self._uniform()))

    # --- sending -----------------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether messages can be sent."""
        return self._shell is not None and self._shell.open

    @property
    def has_room(self) -> bool:
        """Whether it is connected and its queue is below the limit."""
        shell = self._shell
        return shell is not None and shell.open and shell.core.queued_bytes < self._config.relay_queue_bytes

    def send(self, message: bytes) -> None:
        """Send ``message``; only while connected. Messages sent in one turn of the reactor are written together."""
        shell = self._shell
        assert shell is not None
        shell.core.send(message)
        self.envelopes_out += 1
        self.bytes_out += len(message)
        self._longest_bytes = max(self._longest_bytes, len(message))
        shell.flush_soon()
        self._sent_at = self._clock.seconds()
        if self._probe is None:
            self._probe = self._clock.callLater(self._config.probe_s, self._look)

    def _look(self) -> None:
        """Check after a send whether anything has come since: if not, ping, and if nothing comes then either, doubt."""
        self._probe = None
        shell = self._shell
        if shell is None or not shell.open:
            return
        if self.heard_at > self._sent_at:
            return
        now, probe_s = self._clock.seconds(), self._config.probe_s
        # While reading is paused, nothing can be heard.
        since = now if self._is_held else max(self.heard_at, self._reads_since)
        if now < since + probe_s:
            self._probe = self._clock.callLater(since + probe_s - now, self._look)
        elif not self._pinged:
            self._pinged = True
            shell.core.ping()
            shell.flush()
            self._probe = self._clock.callLater(probe_s, self._look)
        elif not self.is_doubtful:
            self.is_doubtful = True
            self._owner.doubted(self)

    def hold(self, held: bool) -> None:
        """Pause reading, or resume it."""
        if self._shell is None or held is self._is_held:
            return
        now, self._is_held = self._clock.seconds(), held
        if not held:
            self._reads_since = now
        elif now - self._reads_since >= UNREAD_S:
            self._held_at = now
        self._shell.hold("lookups", held)

    # --- from the shell ----------------------------------------------------------------------------------------------

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        """Hand messages on."""
        self._reading = True
        self._heard()
        for event in events:
            if isinstance(event, bytes):
                self.envelopes_in += 1
                self.bytes_in += len(event)
                self._owner.received(self, event)
            elif isinstance(event, Closed):
                self._replaced = event.code == CloseCode.REPLACED
                longest = self._longest_bytes if event.code == CloseCode.TOO_BIG else 0
                self.too_long_bytes = min(self.too_long_bytes, longest) if longest else float("inf")
                self.reason = Reason.REPLACED if self._replaced else Reason.CLOSED_BY_SERVER
                self.problem = f"closed by the relay with code {event.code}: {_printable(event.reason)}"

    def after_read(self, shell: Shell) -> None:
        """Write what a read has caused."""
        if not self._reading:  # the read was only a pong
            self._heard()
        self._reading = False
        shell.flush()

    def _heard(self) -> None:
        now = self._clock.seconds()
        self.heard_at = now if now - self._reads_since >= UNREAD_S else max(self.heard_at, self._held_at)
        self._pinged = self.is_doubtful = False

    def flushed(self, shell: Shell) -> None:
        """Tell the owner that there may be room."""
        self._owner.writable(self)

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: Failure) -> None:
        """Go on to the next attempt."""
        self._shell = None
        self._pinged = self.is_doubtful = False
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
        if self._work is None:
            self.problem, self.reason = "closed", Reason.CLOSED
        elif not self.problem:
            self.too_long_bytes = float("inf")  # it has not closed this connection: it may have been started anew
            self._explain(error)
        self._owner.lost(self)
        self._over.fire(None)


def _printable(text: str) -> str:
    """The beginning of a relay's text, safe to show."""
    return "".join(one if one.isprintable() else "?" for one in text[:200])
