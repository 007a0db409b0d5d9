"""Waiting envelopes in SQLite: in memory, or in a file that outlives the relay and belongs to one process at a time.

:class:`QueueTable` works on the rows. In memory that happens at once; for a file a pool thread does it, and operations that
come together share a transaction. Acknowledged envelopes survive the end of the process, but perhaps not a power cut: they
live for minutes, which is not worth a synchronous write for each.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterable
from heapq import nlargest
from sqlite3 import Connection
from typing import Any, Final

from twisted.internet.defer import Deferred, succeed

from dmsg.discovery.stores.table import SqlError, text_of
from dmsg.errors import ConfigError
from dmsg.glue.lane import QUEUE_LIMIT, InThisThread, Lane
from dmsg.glue.memory import give_memory_back
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.relay.errors import StoreError, StoreFull, StoreUnavailable
from dmsg.rmb.relay.stores.base import KEPT_S, QUEUE_BYTES, ROW_BYTES, QueueLimits, Stored
from dmsg.sansio.weights import Weights

#: Expired rows that are deleted in one go, and the seconds between two goes.
PURGE_ROWS: Final = 1000
PURGE_INTERVAL_S: Final = 1.0
#: Most rows that one query returns to evict.
EVICTED_ROWS: Final = 256
#: Senders in a full scope that are found in one search, because there may be 200,000.
RANKED: Final = 64
#: Free pages are released when at most this many bytes are in use, after a peak of at least four times as many: rebuilding
#: the database then takes some 10 ms.
SHRUNK_BYTES: Final = 8 << 20
#: Bytes of the disk that are left free, because deleting takes room too; seconds between two checks of the free bytes; and the
#: size to which a log of changes is truncated when all of it is in the file.
FREE_BYTES: Final = 16 << 20
DISK_INTERVAL_S: Final = 1.0
LOG_BYTES: Final = 8 << 20
#: Operations that may wait for a file, some 1 KB each besides their envelopes: new envelopes, what the keeper brings back, and
#: more reads and deletions than there are sessions, because all of them may come while a disk hangs.
OPERATIONS: Final = 8 * QUEUE_LIMIT
#: "dmRq", which tells a file of ours from others.
_APPLICATION_ID: Final = 0x646D5271
_VERSION: Final = 1

_SCHEMA: Final = (
    "CREATE TABLE waiting (id INTEGER PRIMARY KEY AUTOINCREMENT, session TEXT NOT NULL, source INTEGER NOT NULL,"
    " expires_s REAL NOT NULL, data BLOB NOT NULL)",
    "CREATE INDEX waiting_session ON waiting (session, id)",
    "CREATE INDEX waiting_source ON waiting (source, id)",
    "CREATE INDEX waiting_expires ON waiting (expires_s)",
    f"PRAGMA application_id = {_APPLICATION_ID}",
    f"PRAGMA user_version = {_VERSION}",
)
#: Created also in older files. A session begins with the number of its twin, so the cast gives the twin.
_INDEX: Final = "CREATE INDEX IF NOT EXISTS waiting_twin ON waiting (CAST(session AS INTEGER), source)"
#: A sender's rows in each scope, found without reading its other rows, which may be most of the store. For a queue, the search
#: uses the index of queues (the plus keeps SQLite from using the index of senders).
_ROWS_OF: Final = {
    "queue": "session = ? AND +source = ?",
    "twin": "CAST(session AS INTEGER) = ? AND source = ?",
    "store": "source = ?",
}


class _Account:
    """How much waits in one scope, in total and of each sender."""

    __slots__ = ("_first", "_least", "by_source", "bytes", "envelopes", "numbers")

    def __init__(self) -> None:
        self.envelopes = self.bytes = 0
        self.by_source: dict[int, int] = {}
        #: How many envelopes each sender has, in a queue that was full of them lately.
        self.numbers: Weights[int] | None = None
        #: Once the largest sender was asked for: the senders with at least so many bytes, among them the largest.
        self._least = float("inf")
        self._first: dict[int, None] | None = None

    def add(self, source: int, size: int) -> None:
        self.envelopes += 1
        self.bytes += size
        if self.numbers is not None:
            self.numbers.add(source, 1)
        held = self.by_source[source] = self.by_source.get(source, 0) + size
        if self._first is not None and held >= self._least:
            self._first[source] = None

    def remove(self, source: int, size: int) -> None:
        self.envelopes -= 1
        self.bytes -= size
        if self.numbers is not None:
            self.numbers.add(source, -1)
        left = self.by_source[source] - size
        if left:
            self.by_source[source] = left
        else:
            del self.by_source[source]
        if self._first is not None and left < self._least:
            self._first.pop(source, None)

    def largest(self) -> int:
        """The sender with the most bytes. All senders are searched only once for some :data:`RANKED` that make room."""
        size_of = self.by_source.__getitem__
        if not self._first or len(self._first) > 4 * RANKED:
            ranked = nlargest(RANKED, self._first or self.by_source, key=size_of)
            self._first, self._least = dict.fromkeys(ranked), size_of(ranked[-1])
        return max(self._first, key=size_of)


def _size(session: str, length: int) -> int:
    """Bytes that an envelope of ``length`` bytes counts for. The name of its session is in the row and in an index."""
    return length + ROW_BYTES + 2 * len(session.encode())


def _twin(session: str) -> str:
    return session.partition(":")[0]


class QueueTable:
    """Queues in the database behind a connection that one thread at a time uses. The caller begins and ends transactions.

    The bytes of each queue, twin and sender are counted in memory, and recounted when the database is opened. ``path`` is its
    file, if it has one.
    """

    def __init__(self, connection: Connection, limits: QueueLimits, path: str = "") -> None:
        self._limits = limits
        self._path = path
        #: Bytes that its disk had left for envelopes at the last check, less what came since; and the time of that check.
        self._disk_bytes, self._looked_s = 0, 0.0
        #: The most bytes since the database was last rebuilt.
        self._peak = 0
        self._purged_s = 0.0
        self.count(connection)

    def count(self, connection: Connection) -> None:
        """Count all rows: at the start, and after a transaction was rolled back."""
        self._store = _Account()
        self._queues: dict[str, _Account] = {}
        self._twins: dict[str, _Account] = {}
        for session, source, size in connection.execute("SELECT session, source, length(data) FROM waiting"):
            self._add(session, source, _size(session, size))

    def push(
        self, connection: Connection, session: str, data: bytes, now: float, expires_at: float, source: int
    ) -> bool:
        """See :meth:`~dmsg.rmb.relay.stores.base.QueueStore.push`."""
        if not 0 <= now - self._purged_s < PURGE_INTERVAL_S:
            self._purge(connection, now)
        expires_at = min(expires_at, now + KEPT_S)
        if expires_at <= now:
            return False
        size = _size(session, len(data))
        limits = self._limits
        if self._path and not self._has_disk(connection, size, now):
            raise StoreFull("disk")
        self._make_room(connection, "queue", session, source, size, limits.queue_bytes, limits.queue_envelopes)
        more = size + self._for_queue(session, source)
        self._make_room(connection, "twin", session, source, more, limits.twin_bytes)
        self._make_room(connection, "store", session, source, more, limits.store_bytes)
        connection.execute(
            "INSERT INTO waiting (session, source, expires_s, data) VALUES (?, ?, ?, ?)",
            (session, source, expires_at, data),
        )
        self._add(session, source, size)
        return True

    def read(
        self, connection: Connection, session: str, after: int, limit: int, max_bytes: int, now: float
    ) -> list[Stored]:
        """See :meth:`~dmsg.rmb.relay.stores.base.QueueStore.read`."""
        found: list[Stored] = []
        if session not in self._queues:
            return found
        rows = connection.execute(
            "SELECT id, data, expires_s FROM waiting WHERE session = ? AND id > ? AND expires_s > ? ORDER BY id LIMIT ?",
            (session, after, now, limit),
        )
        for number, data, expires_at in rows:
            max_bytes -= len(data)
            if found and max_bytes < 0:
                break
            found.append(Stored(str(number), data, expires_at))
        rows.close()
        return found

    def delete(self, connection: Connection, session: str, ids: Iterable[int]) -> None:
        """See :meth:`~dmsg.rmb.relay.stores.base.QueueStore.delete`."""
        for number in ids:
            self._delete(
                connection,
                connection.execute(
                    "SELECT id, session, source, length(data) FROM waiting WHERE id = ? AND session = ?",
                    (number, session),
                ).fetchall(),
            )

    def shrink(self, connection: Connection) -> None:
        """Release free pages, if they are most of the database. Not in a transaction."""
        left = self._store.bytes
        self._peak = max(self._peak, left)
        if left <= SHRUNK_BYTES <= self._peak // 4:
            self._peak = left
            with contextlib.suppress(sqlite3.Error):  # the disk may have no room for it
                connection.execute("VACUUM")
            give_memory_back()

    def _make_room(
        self,
        connection: Connection,
        scope: str,
        session: str,
        source: int,
        size: int,
        byte_limit: int,
        envelope_limit: float = float("inf"),
    ) -> None:
        """Evict until another envelope of ``size`` fits, or raise ``StoreFull``."""
        twin = _twin(session)
        account = {"queue": self._queues.get(session), "twin": self._twins.get(twin), "store": self._store}[scope]
        if account is None:
            account = _Account()
        if size > byte_limit:
            raise StoreFull(scope)
        of_scope: dict[str, tuple[str | int, ...]] = {"queue": (session,), "twin": (int(twin),), "store": ()}
        values = of_scope[scope]
        while (too_many := account.envelopes >= envelope_limit) or account.bytes + size > byte_limit:
            if too_many:
                numbers = self._numbers(connection, session)
                largest = numbers.largest()
                is_largest = numbers[source] + 1 >= numbers[largest]
            else:
                largest = account.largest()
                is_largest = account.by_source.get(source, 0) + size >= account.by_source[largest]
            if is_largest:
                raise StoreFull(scope)
            rows = connection.execute(
                f"SELECT id, session, source, length(data) FROM waiting WHERE {_ROWS_OF[scope]} ORDER BY id LIMIT ?",
                (*values, largest, 1 if too_many else EVICTED_ROWS),
            ).fetchall()
            needed = 1 if too_many else account.bytes + size - byte_limit
            evicted = 0
            for row in rows:
                evicted += 1
                needed -= _size(row[1], row[3])
                if needed <= 0:
                    break
            self._delete(connection, rows[:evicted])

    def _numbers(self, connection: Connection, session: str) -> Weights[int]:
        """How many envelopes each sender has in a full queue; kept until the queue is half empty."""
        queue = self._queues[session]
        if queue.numbers is None:
            queue.numbers = Weights()
            rows = connection.execute(
                "SELECT source, count(*) FROM waiting WHERE session = ? GROUP BY source", (session,)
            )
            for source, number in rows:
                queue.numbers.add(source, number)
        return queue.numbers

    def _has_disk(self, connection: Connection, size: int, now: float) -> bool:
        """Whether the disk has room for an envelope, and after that still enough to delete all rows."""
        if not 0 <= now - self._looked_s < DISK_INTERVAL_S or 2 * size > self._disk_bytes:
            self._looked_s = now
            self._disk_bytes = self._left_on_disk(connection)
        self._disk_bytes -= 2 * size
        return self._disk_bytes >= 0

    def _left_on_disk(self, connection: Connection) -> int:
        reused, page_bytes = (
            connection.execute(query).fetchall()[0][0] for query in ("PRAGMA freelist_count", "PRAGMA page_size")
        )
        try:
            free = free_bytes(self._path)
            logged = os.stat(f"{self._path}-wal").st_size  # the file may have to grow by it
        except OSError:  # somebody has removed the file; the write will show whether it still works
            return FREE_BYTES
        left: int = free + reused * page_bytes - logged - FREE_BYTES
        return left if free >= FREE_BYTES // 2 else 0

    def _purge(self, connection: Connection, now: float) -> None:
        self._purged_s = now
        self._delete(
            connection,
            connection.execute(
                "SELECT id, session, source, length(data) FROM waiting WHERE expires_s <= ? ORDER BY expires_s LIMIT ?",
                (now, PURGE_ROWS),
            ).fetchall(),
        )

    def _delete(self, connection: Connection, rows: list[tuple[int, str, int, int]]) -> None:
        connection.executemany("DELETE FROM waiting WHERE id = ?", [row[:1] for row in rows])
        for _, session, source, length in rows:
            size, twin = _size(session, length), _twin(session)
            queue, of_twin = self._queues[session], self._twins[twin]
            queue.remove(source, size)
            if 2 * queue.envelopes < self._limits.queue_envelopes:
                queue.numbers = None
            if not queue.envelopes:
                del self._queues[session]
            size += self._for_queue(session, source)
            self._store.remove(source, size)
            of_twin.remove(source, size)
            if not of_twin.envelopes:
                del self._twins[twin]

    def _add(self, session: str, source: int, size: int) -> None:
        more = size + self._for_queue(session, source)
        self._store.add(source, more)
        self._queues.setdefault(session, _Account()).add(source, size)
        self._twins.setdefault(_twin(session), _Account()).add(source, more)

    def _for_queue(self, session: str, source: int) -> int:
        """Additional bytes that the first envelope of ``source`` in a queue counts outside that queue; 0 for later ones."""
        queue = self._queues.get(session)
        return 0 if queue is not None and source in queue.by_source else QUEUE_BYTES


def free_bytes(path: str) -> int:
    """Bytes that are free on the disk with the file ``path``."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _open(path: str) -> Connection:
    try:
        if path != ":memory:":
            # Readable only by us, because it holds others' messages; SQLite gives the files beside it the same mode.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        # The lane begins and ends transactions, and makes threads take turns.
        connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError("store", f"{path} cannot be used ({error})") from None
    try:
        # The counts are in memory, so two processes on one file would both count wrong. Set before the file is first read, the
        # exclusive mode also avoids the shared-memory file, which cannot be created on a full disk.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        version, application, tables = (
            connection.execute(query).fetchall()[0][0]
            for query in ("PRAGMA user_version", "PRAGMA application_id", "SELECT count(*) FROM sqlite_master")
        )
        if tables and (application, version) != (_APPLICATION_ID, _VERSION):
            raise ConfigError("store", f"{path} is not a store of waiting envelopes of this version")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        # Some builds of SQLite overwrite deleted data with zeros, which would fail on a nearly full disk.
        connection.execute("PRAGMA secure_delete = FAST")
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        connection.execute("BEGIN IMMEDIATE")
        if not tables:
            for statement in _SCHEMA:
                connection.execute(statement)
        connection.execute(_INDEX)
        connection.execute("COMMIT")
    except (*SqlError, ConfigError) as error:
        connection.close()
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("store", f"{path} cannot be used ({text_of(error)})") from None
    return connection


class SqliteQueues:
    """A :class:`~dmsg.rmb.relay.stores.base.QueueStore` in the file ``path``, or in memory (``:memory:``).

    Raises :class:`~dmsg.errors.ConfigError` when the file cannot be used: it is not such a store, or another process has it.
    """

    shared = False
    new_pushes: float = 2 * QUEUE_LIMIT

    def __init__(self, path: str, reactor: Any, *, limits: QueueLimits | None = None) -> None:
        connection = _open(path)
        in_memory = path == ":memory:"
        try:
            self._table = QueueTable(connection, limits or QueueLimits(), "" if in_memory else path)
        except (sqlite3.Error, TypeError, ValueError, AttributeError) as error:  # damaged values are of any type
            connection.close()
            why = error if isinstance(error, sqlite3.Error) else "a row is damaged"
            raise ConfigError("store", f"{path} cannot be used ({why})") from None
        self._lane = Lane(
            connection,
            InThisThread if in_memory else reactor,
            InThisThread if in_memory else reactor.getThreadPool(),
            transaction=True,
            refusal=StoreError,
            unavailable=StoreUnavailable,
            undone=self._table.count,
            after=self._table.shrink,
            limit=OPERATIONS,
        )
        self._attached: set[SessionAddress] = set()

    def push(
        self, session: SessionAddress, data: bytes, now: float, expires_at: float, source: int = 0
    ) -> Deferred[bool]:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        key, table = str(session), self._table
        return self._lane.submit(lambda connection: table.push(connection, key, data, now, expires_at, source))

    def read(
        self, session: SessionAddress, after: str | None, limit: int, max_bytes: int, now: float
    ) -> Deferred[list[Stored]]:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        key, table, last = str(session), self._table, int(after or 0)
        return self._lane.submit(lambda connection: table.read(connection, key, last, limit, max_bytes, now))

    def delete(self, session: SessionAddress, ids: Iterable[str]) -> Deferred[None]:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        key, table, numbers = str(session), self._table, [int(one) for one in ids]
        return self._lane.submit(lambda connection: table.delete(connection, key, numbers))

    def attach(self, session: SessionAddress) -> None:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        self._attached.add(session)

    def detach(self, session: SessionAddress) -> None:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        self._attached.discard(session)

    def connected(self, session: SessionAddress) -> Deferred[bool]:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        return succeed(session in self._attached)

    def listen(self, pushed: Callable[[SessionAddress], None], replaced: Callable[[SessionAddress], None]) -> None:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`: no other process shares this one."""

    def close(self) -> Deferred[None]:
        """See :class:`~dmsg.rmb.relay.stores.base.QueueStore`."""
        return self._lane.close()
