"""Socket options, and reads and writes that go past the transport, where there is a socket at all."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.main import CONNECTION_DONE, CONNECTION_LOST
from twisted.internet.tcp import Connection
from twisted.python.failure import Failure

from dmsg.glue.memory import keep_freed_memory

#: A silent peer is probed after 15 s, then every 10 s, and given up after 3 probes: 45 s in all, so that a host that has
#: vanished does not keep its place for hours.
KEEPALIVE: Final = (15, 10, 3)
#: The connection ends when the peer's kernel has acknowledged no data for this long: the peer takes nothing at all. Linux also
#: gives up a silent peer after this time, instead of after the number of probes: a larger value would let it stay for longer.
USER_TIMEOUT_MS: Final = 1000 * (KEEPALIVE[0] + KEEPALIVE[1] * KEEPALIVE[2])
#: The most that one read takes: four full records, each of 65,535 bytes after a length of two.
READ_BYTES: Final = 4 * 65_537
#: At most this many connections get such large reads: the last ones that had much to read.
LARGE_READERS: Final = 4
#: Reads up to this size are copied, because that costs little.
SMALL_READ_BYTES: Final = 16 * 1024
#: The socket has nothing just now.
_NOTHING_YET: Final = frozenset((errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR))
#: The socket takes nothing just now.
_TRANSIENT: Final = frozenset((errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS, errno.EINTR))


def tune_socket(transport: object, user_timeout_ms: int = USER_TIMEOUT_MS) -> None:
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
    for name, value in (*options, ("TCP_USER_TIMEOUT", user_timeout_ms)):
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                handle.setsockopt(socket.IPPROTO_TCP, option, value)


class DirectSender:
    """Sends at once on a plain TCP connection with nothing buffered; see :func:`direct_sender`."""

    __slots__ = ("_send", "failed")

    def __init__(self, send: Callable[[bytes], int]) -> None:
        self._send = send
        #: Whether the connection was found lost. The system reports a reset only once: later it looks like an orderly end.
        self.failed = False

    def __call__(self, data: bytes) -> int:
        """Send ``data``; gives how many bytes the socket took. 0 also means a lost connection: the transport finds out next."""
        try:
            return self._send(data)
        except OSError as error:
            self.failed = error.errno not in _TRANSIENT
            return 0

    def reason(self, reason: Failure) -> Failure:
        """Why the connection ended; ``reason`` is what Twisted says."""
        return Failure(ConnectionLost()) if self.failed and reason.check(ConnectionDone) else reason


def direct_sender(transport: object) -> DirectSender | None:
    """What sends at once on a plain TCP connection with nothing buffered; ``None`` where the transport must do it.

    Only Twisted's own TCP connections without TLS qualify: a wrapper gives away the socket below its encryption.
    """
    if not isinstance(transport, Connection) or getattr(transport, "TLS", False) or transport.dataBuffer:
        return None
    if transport._tempDataBuffer:  # written in this turn of the reactor
        return None
    return DirectSender(transport.getHandle().send)


class DirectReader:
    """Reads a plain TCP connection in place of its transport; see :func:`direct_reader`.

    A transport reads 64 KiB at a time, into memory that is allocated and freed for each read. A full record has one byte
    more, so in a transfer each read ends within a record, and its bytes are copied to the rest of that record. Here one read
    takes up to four records, into memory that all connections of a thread share. While more than :data:`LARGE_READERS`
    connections have much to read, a read takes 64 KiB, so that no connection waits longer for its turn.
    """

    __slots__ = ("_connection", "_has_much", "_latest", "_receive", "_take", "_takes_views", "_views")

    def __init__(
        self,
        connection: Connection,
        take: Callable[[bytes | memoryview], None],
        takes_views: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._receive: Callable[[memoryview], int] = connection.getHandle().recv_into
        self._take = take
        self._takes_views = takes_views
        self._views, self._latest = _shared()
        self._has_much = False  # at its last read

    def __call__(self) -> ConnectionDone | ConnectionLost | None:
        """Read once and hand the data over; gives why the connection is over, if it is."""
        large, small = self._views
        views = self._takes_views()
        try:
            size = self._receive(large if views and self._has_much and id(self) in self._latest else small)
        except OSError as error:
            return None if error.errno in _NOTHING_YET else CONNECTION_LOST
        if not size:
            return CONNECTION_DONE
        data = large[:size]
        self._has_much = size > SMALL_READ_BYTES
        if self._has_much:
            self._latest.append(id(self))
        self._take(data if views and self._has_much else bytes(data))
        return None

    def stop(self) -> None:
        """Let go of the connection, which holds this reader, and with it its protocol."""
        if self._connection.__dict__.get("doRead") is self:  # aborting a connection replaces it
            del self._connection.doRead


_local: Final = threading.local()


def _shared() -> tuple[tuple[memoryview, memoryview], deque[int]]:
    """What the readers of this thread share: memory (all of it, and as much of it as a transport would read), and the ids of
    the last readers that had much to read.
    """
    found: tuple[tuple[memoryview, memoryview], deque[int]] | None = getattr(_local, "shared", None)
    if found is None:
        keep_freed_memory()
        large = memoryview(bytearray(READ_BYTES))
        found = _local.shared = ((large, large[: Connection.bufferSize]), deque(maxlen=LARGE_READERS))
    return found


def direct_reader(
    transport: object,
    protocol: object,
    take: Callable[[bytes | memoryview], None],
    takes_views: Callable[[], bool],
) -> DirectReader | None:
    """Have ``take`` called with what comes on a plain TCP connection to ``protocol``, past the transport.

    Gives ``None``, and changes nothing, where the transport must do it: as in :func:`direct_sender`, and where a wrapper
    between transport and ``protocol`` may want to see the data. While ``takes_views()`` is true, data above
    :data:`SMALL_READ_BYTES` is a view, which the next read overwrites.
    """
    if not isinstance(transport, Connection) or type(transport).doRead is not Connection.doRead:
        return None
    receiver = getattr(transport, "protocol", None)
    if getattr(transport, "TLS", False) or protocol not in (receiver, getattr(receiver, "_wrappedProtocol", None)):
        return None
    reader = DirectReader(transport, take, takes_views)
    transport.doRead = reader  # type: ignore[method-assign]
    return reader


class DirectWriter:
    """Writes to ``transport``: at once where :func:`direct_sender` can and nothing is buffered.

    The transport would wait for the next turn of the reactor, and make two more system calls. It buffers what the socket does
    not take, so that its producers pause and go on as usual.
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
