"""Entries in a SQLite file: the owner of :mod:`sqlite3`.

Two lanes, one for reads and one for writes, each with a connection of its own; the file is in WAL mode, so that neither
waits for the other. A lane works in a pool thread on everything that had come together while it was busy: writes that
arrive at the same time share one transaction and one fsync, and are acknowledged only after it
(``synchronous=FULL``: what was acknowledged survives SIGKILL and a power cut).
"""

from __future__ import annotations

import contextlib
import random as stdlib_random
import sqlite3
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from twisted.internet.defer import Deferred, fail
from zope.interface import implementer

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import Entry, check_iteration
from dmsg.discovery.store import Random, StoreLimits, check_first, expired, is_available, stored_entry
from dmsg.errors import ConfigError, DiscoveryError, DiscoveryUnavailable, EntryNotFound, StoreFull
from dmsg.interfaces import IRankedStore

#: Most jobs done in one go: bounds how long a read or a transaction can keep those behind it waiting.
BATCH_LIMIT: Final = 256
#: Most jobs waiting in one lane; beyond, the store fails at once instead of growing.
QUEUE_LIMIT: Final = 4096
#: How long to wait for another process that writes to the same file, in milliseconds.
BUSY_TIMEOUT_MS: Final = 5000
#: Expired rows are emptied at most this often (nanoseconds), and at most this many at a time.
PURGE_INTERVAL_NS: Final = 10_000_000_000
PURGE_ROWS: Final = 1000

_SCHEMA_VERSION: Final = 1
_SLOTS: Final = 1 << 32
_APPLICATION_ID: Final = 0x646D7367  # "dmsg"

# `sequence` is 8 bytes, because SQLite has no unsigned 64-bit integers. `body` is NULL in a tombstone. `slot` is a
# random number, new at each write: a walk from a random slot draws servers without looking at all of them.
_SCHEMA: Final = f"""
CREATE TABLE entries (
    key BLOB PRIMARY KEY NOT NULL,
    sequence BLOB NOT NULL,
    timestamp INTEGER NOT NULL,
    body BLOB,
    available INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    expires_ns INTEGER
);
CREATE INDEX entries_available ON entries (slot) WHERE available = 1;
CREATE INDEX entries_expiring ON entries (expires_ns) WHERE expires_ns IS NOT NULL AND body IS NOT NULL;
CREATE INDEX entries_tombstones ON entries (expires_ns) WHERE body IS NULL;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_SCHEMA_VERSION};
"""
_GET: Final = "SELECT body, sequence, timestamp, expires_ns FROM entries WHERE key = ?"
_GET_LATEST: Final = "SELECT sequence, timestamp FROM entries WHERE key = ?"
_PUT: Final = """
INSERT INTO entries (key, sequence, timestamp, body, available, slot, expires_ns) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET sequence = excluded.sequence, timestamp = excluded.timestamp, body = excluded.body,
    available = excluded.available, slot = excluded.slot, expires_ns = excluded.expires_ns
"""
_AVAILABLE: Final = """
SELECT {} FROM entries WHERE available = 1 AND slot {} ? AND (expires_ns IS NULL OR expires_ns > ?)
ORDER BY slot LIMIT ?
"""
_SERVER: Final = "SELECT body FROM entries WHERE key = ? AND available = 1 AND (expires_ns IS NULL OR expires_ns > ?)"
_BURY: Final = """
UPDATE entries SET body = NULL, available = 0 WHERE key IN
    (SELECT key FROM entries WHERE expires_ns <= ? AND expires_ns IS NOT NULL AND body IS NOT NULL LIMIT ?)
"""
_FORGET: Final = """
DELETE FROM entries WHERE key IN
    (SELECT key FROM entries WHERE body IS NULL AND expires_ns <= ? ORDER BY expires_ns LIMIT ?)
"""
_COUNT: Final = "SELECT count(*) FROM entries"

_Job = Callable[[sqlite3.Connection], Any]


class _Failed(NamedTuple):
    """A job's outcome when it is an error."""

    error: DiscoveryError


class _Lane:
    """One connection, used by one pool thread at a time. Everything but :meth:`_work` runs in the reactor's thread."""

    def __init__(self, connection: sqlite3.Connection, reactor: Any, pool: Any, *, transaction: bool) -> None:
        self._connection = connection
        self._reactor = reactor
        self._pool = pool
        self._transaction = transaction
        self._waiting: deque[tuple[_Job, Deferred[Any]]] = deque()
        self._busy = False
        self._closing: Deferred[None] | None = None

    def submit(self, job: _Job) -> Deferred[Any]:
        """Run ``job`` in its turn; fires with its result once that is committed."""
        if self._closing is not None:
            return fail(DiscoveryUnavailable("the store is closed"))
        if len(self._waiting) >= QUEUE_LIMIT:
            return fail(DiscoveryUnavailable("the store is overloaded"))
        done: Deferred[Any] = Deferred()
        self._waiting.append((job, done))
        self._start()
        return done

    def _start(self) -> None:
        if self._busy:
            return
        if self._waiting:
            self._busy = True
            batch = [self._waiting.popleft() for _ in range(min(BATCH_LIMIT, len(self._waiting)))]
            self._pool.callInThread(self._work, batch)
        elif self._closing is not None and not self._closing.called:
            self._connection.close()
            self._closing.callback(None)

    def _work(self, batch: list[tuple[_Job, Deferred[Any]]]) -> None:
        try:
            results = self._run([job for job, _ in batch])
        except BaseException as error:  # whatever it was, nobody may be left waiting
            failed = _Failed(DiscoveryUnavailable(f"the store failed ({error})"))
            results = [failed] * len(batch)
            with contextlib.suppress(sqlite3.Error):
                self._connection.rollback()
        self._reactor.callFromThread(self._finished, batch, results)

    def _run(self, jobs: list[_Job]) -> list[Any]:
        results: list[Any] = []
        if self._transaction:
            self._connection.execute("BEGIN IMMEDIATE")
        for job in jobs:
            try:
                results.append(job(self._connection))
            except DiscoveryError as error:
                # The job refused before it wrote anything: its neighbours are not touched by that.
                results.append(_Failed(error))
        if self._transaction:
            self._connection.execute("COMMIT")
        return results

    def _finished(self, batch: list[tuple[_Job, Deferred[Any]]], results: list[Any]) -> None:
        self._busy = False
        self._start()
        for (_, done), result in zip(batch, results, strict=True):
            if isinstance(result, _Failed):
                done.errback(result.error)
            else:
                done.callback(result)

    def close(self) -> Deferred[None]:
        """Close the connection after what is waiting; fires when done, every time it is asked."""
        done: Deferred[None] = Deferred()
        if self._closing is None:
            self._closing = Deferred()
        self._closing.addCallback(lambda _: done.callback(None))
        self._start()
        return done


@implementer(IRankedStore)
class SqliteStore:
    """Entries in the SQLite file ``path``. Several processes may share the file.

    ``pool`` is a thread pool (default: the reactor's), of which at most two threads are used at a time. Raises
    :class:`~dmsg.errors.ConfigError` when the file cannot be used.
    """

    durable = True

    def __init__(
        self,
        path: str,
        reactor: Any,
        *,
        pool: Any = None,
        limits: StoreLimits | None = None,
        random: Random | None = None,
    ) -> None:
        self._limits = limits or StoreLimits()
        self._random: Random = random or stdlib_random.SystemRandom()
        pool = pool if pool is not None else reactor.getThreadPool()
        writer = _connect(path)
        try:
            _prepare(writer)
            self._rows: int = writer.execute(_COUNT).fetchall()[0][0]
            reader = _connect(path)
        except (sqlite3.Error, ConfigError) as error:
            writer.close()
            raise _unusable(path, error) from None
        self._purged_ns = 0
        self._writes = _Lane(writer, reactor, pool, transaction=True)
        self._reads = _Lane(reader, reactor, pool, transaction=False)

    def get(self, public_key: PublicKey, now_ns: int) -> Deferred[Entry]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return self._reads.submit(lambda connection: stored_entry(_get(connection, public_key, now_ns)))

    def get_json(self, public_key: PublicKey, now_ns: int) -> Deferred[bytes]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return self._reads.submit(lambda connection: _get(connection, public_key, now_ns))

    def put(self, entry: Entry, now_ns: int) -> Deferred[bool]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        slot = self._random.randrange(_SLOTS)
        entry.to_json()  # made here, where it may be used again, rather than in the other thread
        return self._writes.submit(lambda connection: self._put(connection, entry, slot, now_ns))

    def _put(self, connection: sqlite3.Connection, entry: Entry, slot: int, now_ns: int) -> bool:
        if not 0 <= now_ns - self._purged_ns < PURGE_INTERVAL_NS:
            self._purge(connection, now_ns)
        found = connection.execute(_GET_LATEST, (entry.static.raw,)).fetchall()
        if found:
            check_iteration(entry.sequence, entry.timestamp, int.from_bytes(found[0][0], "big"), found[0][1])
        else:
            check_first(entry)
            if self._rows >= self._limits.entries + self._limits.tombstones:
                raise StoreFull
            self._rows += 1
        row = (
            entry.static.raw,
            entry.sequence.to_bytes(8, "big"),
            entry.timestamp,
            entry.to_json(),
            int(is_available(entry)),
            slot,
            self._limits.expires_ns(entry, now_ns),
        )
        connection.execute(_PUT, row)
        return not found

    def _purge(self, connection: sqlite3.Connection, now_ns: int) -> None:
        connection.execute(_BURY, (now_ns, PURGE_ROWS))
        connection.execute(_FORGET, (now_ns - self._limits.tombstone_ttl_ns, PURGE_ROWS))
        # Counted anew, because other processes may write to the file and because a transaction may be rolled back.
        self._rows = connection.execute(_COUNT).fetchall()[0][0]
        self._purged_ns = now_ns

    def available_servers(self, limit: int, now_ns: int) -> Deferred[list[Entry]]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        start = self._random.randrange(_SLOTS)

        def job(connection: sqlite3.Connection) -> list[Entry]:
            return [stored_entry(body) for body in _walk(connection, "body", start, limit, now_ns)]

        return self._reads.submit(job)

    def available_keys(self, limit: int, now_ns: int) -> Deferred[list[bytes]]:
        """See :class:`~dmsg.interfaces.IRankedStore`."""
        start = self._random.randrange(_SLOTS)
        return self._reads.submit(lambda connection: _walk(connection, "key", start, limit, now_ns))

    def servers_of(self, keys: list[bytes], now_ns: int) -> Deferred[list[Entry]]:
        """See :class:`~dmsg.interfaces.IRankedStore`."""

        def job(connection: sqlite3.Connection) -> list[Entry]:
            rows = (connection.execute(_SERVER, (key, now_ns)).fetchall() for key in keys)
            return [stored_entry(body) for found in rows for (body,) in found]

        return self._reads.submit(job)

    def close(self) -> Deferred[None]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return self._reads.close().addCallback(lambda _: self._writes.close())


def _get(connection: sqlite3.Connection, public_key: PublicKey, now_ns: int) -> bytes:
    found = connection.execute(_GET, (public_key.raw,)).fetchall()
    if not found:
        raise EntryNotFound
    body, sequence, timestamp, expires_ns = found[0]
    if body is None or (expires_ns is not None and expires_ns <= now_ns):
        raise expired(int.from_bytes(sequence, "big"), timestamp)
    return bytes(body)


def _walk(connection: sqlite3.Connection, column: str, start: int, limit: int, now_ns: int) -> list[bytes]:
    """``column`` of at most ``limit`` available servers, from slot ``start`` on and round."""
    found = connection.execute(_AVAILABLE.format(column, ">="), (start, now_ns, limit)).fetchall()
    if len(found) < limit:
        found += connection.execute(_AVAILABLE.format(column, "<"), (start, now_ns, limit - len(found))).fetchall()
    return [value for (value,) in found]


def _unusable(path: str, error: Exception) -> ConfigError:
    return ConfigError("store", f"{path} cannot be used ({error})")


def _connect(path: str) -> sqlite3.Connection:
    try:
        # Transactions are begun and ended by hand; the lane sees to it that threads take turns.
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise _unusable(path, error) from None
    try:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
    except sqlite3.Error as error:
        connection.close()
        raise _unusable(path, error) from None
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    """Make the tables in an empty file; refuse a file that is something else's or from a later version."""
    connection.execute("BEGIN IMMEDIATE")
    version = connection.execute("PRAGMA user_version").fetchall()[0][0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchall()[0][0]
    if tables == 0:
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
    connection.execute("COMMIT")
    application = connection.execute("PRAGMA application_id").fetchall()[0][0]
    if application != _APPLICATION_ID or (tables and version != _SCHEMA_VERSION):
        raise ConfigError("store", "the file is not an entry store of this version")
