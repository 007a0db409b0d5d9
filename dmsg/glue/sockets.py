"""Socket options a connection wants, where there is a socket at all."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Final

from twisted.internet.tcp import Connection

#: A silent peer is probed after the first, then each second one, and given up after the third: 45 s in all, so that a
#: host that has vanished does not keep its place for hours. Seconds, seconds, times.
KEEPALIVE: Final = (15, 10, 3)
#: Data that is not acknowledged by the peer's kernel for so long ends the connection: a peer that takes nothing at all.
USER_TIMEOUT_MS: Final = 60_000


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


def direct_sender(transport: object) -> Callable[[bytes], int] | None:
    """How to send at once on a plain TCP connection with nothing buffered; ``None`` where the transport must do it.

    The function gives how many bytes the socket took. That is 0, too, if the connection is lost: the transport will find
    out when it tries, and say why. Only Twisted's own TCP connections without TLS qualify: a wrapper would hand its
    handle on, which is the socket below its encryption.
    """
    if not isinstance(transport, Connection) or getattr(transport, "TLS", False) or transport.dataBuffer:
        return None
    if transport._tempDataBuffer:  # written in this turn of the reactor
        return None
    send = transport.getHandle().send

    def send_now(data: bytes) -> int:
        try:
            sent: int = send(data)
        except OSError:
            return 0
        return sent

    return send_now
