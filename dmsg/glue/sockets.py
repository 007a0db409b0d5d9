"""Socket options a connection wants, where there is a socket at all."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable
from typing import Any, Final

from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.tcp import Connection
from twisted.python.failure import Failure

#: A silent peer is probed after the first, then each second one, and given up after the third: 45 s in all, so that a
#: host that has vanished does not keep its place for hours. Seconds, seconds, times.
KEEPALIVE: Final = (15, 10, 3)
#: Data that is not acknowledged by the peer's kernel for so long ends the connection: a peer that takes nothing at all.
USER_TIMEOUT_MS: Final = 60_000
#: The socket takes nothing just now.
_TRANSIENT: Final = frozenset((errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS, errno.EINTR))


def tune_socket(transport: object) -> None:
    """No Nagle delay, keep-alive, and an end for a peer that takes nothing. Harmless on transports without a socket."""
    if hasattr(transport, "setTcpNoDelay"):
        transport.setTcpNoDelay(True)
    if hasattr(transport, "setTcpKeepAlive"):
        transport.setTcpKeepAlive(True)
    get_handle = getattr(transport, "getHandle", None)
    handle = get_handle() if get_handle is not None else None
    if not isinstance(handle, socket.socket):
        return
    options = zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), KEEPALIVE, strict=True)
    for name, value in (*options, ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS)):
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                handle.setsockopt(socket.IPPROTO_TCP, option, value)


class DirectSender:
    """Sends at once on a plain TCP connection with nothing buffered; see :func:`direct_sender`."""

    __slots__ = ("_send", "failed")

    def __init__(self, send: Callable[[bytes], int]) -> None:
        self._send = send
        #: Whether the connection was found lost. The system says why only once: a reset then looks like an orderly end.
        self.failed = False

    def __call__(self, data: bytes) -> int:
        """How many bytes of ``data`` the socket took: 0, too, if the connection is lost, which the transport finds next."""
        try:
            return self._send(data)
        except OSError as error:
            self.failed = error.errno not in _TRANSIENT
            return 0

    def reason(self, reason: Failure) -> Failure:
        """Why the connection ended, if ``reason`` is what Twisted says."""
        return Failure(ConnectionLost()) if self.failed and reason.check(ConnectionDone) else reason


def direct_sender(transport: object) -> DirectSender | None:
    """How to send at once on a plain TCP connection with nothing buffered; ``None`` where the transport must do it.

    Only Twisted's own TCP connections without TLS qualify: a wrapper would hand its handle on, which is the socket below
    its encryption.
    """
    if not isinstance(transport, Connection) or getattr(transport, "TLS", False) or transport.dataBuffer:
        return None
    if transport._tempDataBuffer:  # written in this turn of the reactor
        return None
    return DirectSender(transport.getHandle().send)


class DirectWriter:
    """Writes to ``transport``: at once where :func:`direct_sender` can and nothing is buffered.

    The transport would wait for the next turn of the reactor, and ask the system twice more. What the socket does not take
    is buffered by the transport, so its producers pause and go on as ever.
    """

    __slots__ = ("_send", "_transport", "write")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._send = direct_sender(transport)
        #: ``write(data)``, as the transport's.
        self.write: Callable[[bytes], None] = transport.write if self._send is None else self._write_at_once

    @property
    def failed(self) -> bool:
        """See :attr:`DirectSender.failed`."""
        return self._send is not None and self._send.failed

    def reason(self, reason: Failure) -> Failure:
        """See :meth:`DirectSender.reason`."""
        return reason if self._send is None else self._send.reason(reason)

    def _write_at_once(self, data: bytes) -> None:
        connection = self._transport
        if not connection.dataBuffer and not connection._tempDataBuffer:
            assert self._send is not None
            sent = self._send(data)
            if sent == len(data):
                return
            data = data[sent:]
        connection.write(data)
