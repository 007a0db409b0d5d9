"""WebSockets on Twisted connections: a server's, taken over from an HTTP request, and a client's.

Both give a :class:`WebSocketShell`, whose core is a :class:`dmsg.sansio.websocket.WebSocket`; messages and the other
side's close come to the owner's ``handle_events``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import urlsplit

from twisted.internet.defer import Deferred, fail
from twisted.internet.endpoints import wrapClientTLS
from twisted.internet.error import ConnectionClosed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure

from dmsg.address import HostPort
from dmsg.errors import DmsgError, InvalidAddress, StageError
from dmsg.glue.connecting import client_endpoint, connect_reason, quiet_factory, tls_options
from dmsg.glue.shell import Owner, Shell
from dmsg.sansio.core import Core
from dmsg.sansio.errors import WebSocketRefused, WebSocketViolation
from dmsg.sansio.websocket import Role, State, WebSocket, WebSocketConfig
from dmsg.sansio.websocket_frames import CloseCode
from dmsg.sansio.websocket_handshake import ClientHandshake, server_answer, wants_websocket

#: From our close frame until the connection is cut if the other side does not end it, in seconds.
CLOSE_TIMEOUT_S: Final = 5.0
#: From dialing to the end of the opening handshake, in seconds.
CONNECT_TIMEOUT_S: Final = 10.0
# Looked up once: an attribute of an Enum class takes a call in Python.
_OPEN, _CLOSED = State.OPEN, State.CLOSED
_PORTS: Final = {"ws": 80, "wss": 443}


class WebSocketShell(Shell):
    """A shell that ends its WebSocket with a close frame: after a violation, on :meth:`close`, and in answer to theirs.

    The owner gets messages as ``bytes`` (text messages as ``str``) and, when the other side closes,
    :class:`~dmsg.sansio.websocket_frames.Closed`; the connection then ends when the owner has flushed it. ``connection_lost``
    comes at most ``CLOSE_TIMEOUT_S`` after a close frame of either side.
    """

    core: Any
    #: As long as a relay lets a session take nothing. Silent peers are found by pings.
    user_timeout_ms = 60_000
    _cutting: IDelayedCall | None = None
    _closing_for: DmsgError | None = None
    _finished = False

    def __init__(self, core: Core, owner: Owner, clock: IReactorTime) -> None:
        super().__init__(core, owner, clock)
        #: The core, once the opening handshake is over.
        self.websocket = core if isinstance(core, WebSocket) else None

    def become(self, core: Core, leftover: bytes) -> None:
        """Replace the core by ``core`` and give it ``leftover``: received bytes that the old core did not need."""
        self.websocket = core if isinstance(core, WebSocket) else None
        super().become(core, leftover)

    @property
    def open(self) -> bool:
        """Whether messages can be sent."""
        core = self.websocket
        return core is not None and core.state is _OPEN and self.error is None and not self.lost

    def send(self, message: bytes | str) -> None:
        """Queue a message for the next flush. It is dropped when the WebSocket is not :attr:`open`."""
        core = self.websocket
        if core is not None and core.state is _OPEN and self.error is None and not self.lost:
            core.send(message)

    @property
    def queued_bytes(self) -> int:
        """Bytes that the network has not taken yet, without those that the transport holds."""
        return 0 if self.websocket is None else self.websocket.queued_bytes

    def flush(self) -> None:
        """Write what there is; once both sides have closed and all is written, end the connection."""
        super().flush()
        core = self.websocket
        if core is not None and core.state is _CLOSED and not core.queued_bytes and not self._busy:
            self._finish(self._closing_for)

    def hold(self, reason: str, held: bool) -> None:
        """Stop reading for ``reason``, or go on. While nothing is read, the other side counts neither as silent nor as slow."""
        super().hold(reason, held)
        core = self.websocket
        if core is not None and self._holds:
            core.listening = False
        elif core is not None and not core.listening:
            core.listen(self.clock.seconds())

    def resumeProducing(self) -> None:
        """The network has taken all that was written: the other side is alive, even if its answers wait or are not read."""
        if self.websocket is not None:
            self.websocket.progressed(self.clock.seconds(), read=not self._reading_paused)
        super().resumeProducing()

    def close(self, error: DmsgError | None = None, *, code: int = CloseCode.NORMAL, reason: str = "") -> None:
        """Send a close frame behind what is queued; end the connection when theirs has come, or ``CLOSE_TIMEOUT_S`` later.

        ``code`` and ``reason`` (at most 123 bytes of UTF-8) are what the other side is told, ``error`` is what the owner's
        ``connection_lost`` is given.
        """
        if self.websocket is None:
            super().close(error)
        elif not self.lost and self.error is None:
            self._closing_for = self._closing_for or error
            self.websocket.close(code, reason)
            self._cut_later()
            self.flush()

    def fail(self, error: DmsgError) -> None:
        """End the connection at once, for ``error``; after a violation of theirs with a close frame, if the network takes it."""
        core = self.websocket
        if self.lost or self.error is not None:
            return
        if core is not None and isinstance(error, WebSocketViolation) and not self.congested:
            core.give_up(error.code, error.reason)
            self._closing_for = error
            self._busy = False
            self.flush()
        if self.error is None:
            super().fail(error)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._cutting is not None and self._cutting.active():
            self._cutting.cancel()
        if self.error is None:
            self.error = self._closing_for
        super().connectionLost(reason)

    def _finish(self, error: DmsgError | None) -> None:
        """All is written. End our half, and read on until the other side ends the connection, too.

        Data that still comes is dropped. Closing at once would reset the connection if unread data had come meanwhile, and our
        close frame could be lost with it. (TLS has its own closing handshake, which waits for theirs.)
        """
        if self._finished or self.lost:
            return
        self._finished = True
        self._cut_later()
        direct = self._send is not None
        self.error, self._send = error, None
        self.transport.unregisterProducer()  # type: ignore[union-attr]
        if direct:
            self.transport.loseWriteConnection()  # type: ignore[union-attr]
        else:
            self.transport.loseConnection()  # type: ignore[union-attr]

    def _cut_later(self) -> None:
        if self._cutting is None:
            self._cutting = self.clock.callLater(CLOSE_TIMEOUT_S, self.cut)


# --- a server's --------------------------------------------------------------------------------------------------------


def asks_for_websocket(request: Any) -> bool:
    """Whether ``request``, one of twisted.web's, is for a WebSocket. Whether it may have one is another question."""
    return wants_websocket(_headers(request))


def accept_websocket(
    request: Any, owner: Owner, clock: IReactorTime, config: WebSocketConfig | None = None
) -> WebSocketShell:
    """Agree to a request of a :class:`dmsg.http.server.LimitedSite`, and take its connection over.

    The request is over with that: no answer may be written to it (``render`` gives ``NOT_DONE_YET``), and its
    connection holds no place of the site any more. Messages come to ``owner`` after the caller has gone on.
    Raises ``WebSocketRefused`` with the answer the request shall have, which is then the caller's to write, and
    ``ConnectionError`` when the client has gone meanwhile.
    """
    channel = request.channel
    if channel is None:
        raise ConnectionError("the client has gone")
    if request.method != b"GET" or request.clientproto != b"HTTP/1.1" or request.content.read(1):
        raise WebSocketRefused(400, "a WebSocket is asked for with GET, HTTP/1.1 and no body")
    head = server_answer(_headers(request))
    core = WebSocket(Role.SERVER, config or WebSocketConfig(), now=clock.seconds(), head=head)
    shell = WebSocketShell(core, owner, clock)
    leftover = channel.hand_over(shell)
    if leftover:
        shell.hold("leftover", True)
        clock.callLater(0, _give_leftover, shell, leftover)
    return shell


def _give_leftover(shell: WebSocketShell, leftover: bytes) -> None:
    shell.dataReceived(leftover)
    shell.hold("leftover", False)


def _headers(request: Any) -> dict[bytes, list[bytes]]:
    return {name.lower(): values for name, values in request.requestHeaders.getAllRawHeaders()}


# --- a client's --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WebSocketUrl:
    """``ws://host[:port][/path][?query]``, or ``wss://`` for TLS. ``target`` is path and query."""

    secure: bool
    address: HostPort
    target: str

    @classmethod
    def parse(cls, text: str) -> WebSocketUrl:
        """Read one or raise ``InvalidAddress``. It has no user, password or fragment."""
        try:
            parts = urlsplit(text)
            usual = _PORTS[parts.scheme]
            port = usual if parts.port is None else parts.port
            address = HostPort.parse(str(HostPort(parts.hostname or "", port)))
        except (ValueError, KeyError):
            raise InvalidAddress("must be ws://host:port/path or wss://host:port/path") from None
        if not text.isascii() or not text.isprintable() or " " in text or "#" in text or parts.username is not None:
            raise InvalidAddress("a WebSocket URL is of ASCII, without user, password and fragment")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(parts.scheme == "wss", address, target)

    @property
    def host_header(self) -> str:
        """The value of the Host header, without the port if that is the usual one."""
        text = str(self.address)
        return text.rpartition(":")[0] if self.has_usual_port else text

    @property
    def has_usual_port(self) -> bool:
        """Whether the port is the one that a URL without a port has."""
        return self.address.port == _PORTS["wss" if self.secure else "ws"]


class _Opening:
    """The owner of a client's shell until the server has agreed."""

    def __init__(self, owner: Owner) -> None:
        self.done: Deferred[WebSocketShell] = Deferred()
        self._owner = owner
        self._opened: WebSocket | None = None

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        [self._opened] = cast("Sequence[WebSocket]", events)

    def after_read(self, shell: Shell) -> None:
        if self.done.called:
            return
        if self._opened is not None:
            leftover = shell.core.leftover  # type: ignore[attr-defined]
            shell.owner = self._owner
            shell.become(self._opened, b"")
            self.done.callback(cast(WebSocketShell, shell))
            if leftover:
                shell.dataReceived(leftover)
        shell.flush()

    def flushed(self, shell: Shell) -> None:
        """The request has gone."""

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: Failure) -> None:
        if self.done.called:
            return
        problem: Exception = error or cast(ClientHandshake, shell.core).refused()
        if not reason.check(ConnectionClosed):  # TLS: a certificate that is not trusted, or for another host
            problem = StageError("connect", connect_reason(reason.value), reason.value)
        self.done.errback(problem)

    def fail(self, error: Exception) -> None:
        """There will be no WebSocket, because of ``error``."""
        if not self.done.called:
            self.done.errback(error)


def connect_websocket(
    reactor: Any,
    url: WebSocketUrl,
    owner: Owner,
    config: WebSocketConfig | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = CONNECT_TIMEOUT_S,
    random: Callable[[int], bytes] = os.urandom,
    trust: Any = None,
) -> Deferred[WebSocketShell]:
    """Connect to ``url``; fires with the open shell, whose ``owner`` gets everything from then on.

    ``trust`` is an ``IOpenSSLTrustRoot`` in place of the platform's; the certificate must be for the host of the URL.
    All of it may take ``timeout_s``. Fails with ``StageError("connect", …)`` if there is no connection in time,
    ``WebSocketRefused`` with what the server said, or ``RemoteProtocolError``. Cancelling ends what has begun.
    """
    handshake = ClientHandshake(
        url.host_header, url.target, config or WebSocketConfig(), random=random, headers=headers
    )
    opening = _Opening(owner)
    shell = WebSocketShell(handshake, opening, reactor)
    endpoint: Any = client_endpoint(reactor, url.address, timeout_s)
    if url.secure:
        try:
            options = tls_options(url.address.host, trust)
        except UnicodeError as error:  # "xn--" with an invalid encoding behind it
            return fail(StageError("connect", "host not found", error))
        endpoint = wrapClientTLS(options, endpoint)
    connecting: Deferred[Any] = endpoint.connect(quiet_factory(lambda: shell))
    timer = reactor.callLater(timeout_s, opening.fail, StageError("connect", "timeout"))

    def over(outcome: Any) -> Any:
        if timer.active():
            timer.cancel()
        if isinstance(outcome, Failure):
            connecting.cancel()
            shell.cut()
        return outcome

    connecting.addErrback(lambda why: opening.fail(StageError("connect", connect_reason(why.value), why.value)))
    return opening.done.addBoth(over)
