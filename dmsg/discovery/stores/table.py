"""The table of entries in SQLite, in a file or in memory: the owner of :mod:`sqlite3`. Nothing here waits or threads.

Triggers keep the counts and bytes of each kind and network, in the transaction of the change itself: they are right
after a crash, and for every process that shares the file.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import Final

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import DMSG, Entry, check_iteration, is_available
from dmsg.discovery.errors import DiscoveryError, EntryNotFound, StoreFull
from dmsg.discovery.stores.rules import (
    CLIENT,
    EVICTED_AT_ONCE,
    FORGOTTEN_AT_ONCE,
    RELAY,
    ROW_BYTES,
    TOMBSTONE,
    StoreLimits,
    check_first,
    expired,
    hour_of,
    kind_of,
    stored_entry,
)
from dmsg.errors import ConfigError
from dmsg.sansio.jitter import RandomNumbers

Connection = sqlite3.Connection
#: What SQLite raises: where the text of its error has bytes of a damaged file in it, that is ``UnicodeDecodeError``.
SqlError: Final = (sqlite3.Error, UnicodeDecodeError)

#: How long to wait for another process that writes to the same file, in milliseconds.
BUSY_TIMEOUT_MS: Final = 5000
#: Expired rows become tombstones at most this often (nanoseconds), and at most this many at a time.
PURGE_INTERVAL_NS: Final = 5_000_000_000
PURGE_ROWS: Final = 500
#: Up to this many available servers are drawn with equal probability; of more, those behind a random place are drawn.
DRAWN_FROM: Final = 1024

SCHEMA_VERSION: Final = 3
SLOTS: Final = 1 << 32
_APPLICATION_ID: Final = 0x646D7367  # "dmsg"

# `sequence` is 8 bytes, because SQLite has no unsigned 64-bit integers. `body` is NULL in a tombstone. `slot` is a
# random number, new at each write: a walk from a random slot draws servers without looking at all of them.
# `kind`, `network` and `bytes` say what the row counts for, `read_hour` when it was last read (0: never), `protocol`
# what the server speaks.
_ENTRIES: Final = """
CREATE TABLE entries (
    key BLOB PRIMARY KEY NOT NULL,
    sequence BLOB NOT NULL,
    timestamp INTEGER NOT NULL,
    body BLOB,
    available INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    expires_ns INTEGER
)"""
_COLUMNS: Final = (
    "ALTER TABLE entries ADD COLUMN kind INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE entries ADD COLUMN network TEXT NOT NULL DEFAULT ''",
    f"ALTER TABLE entries ADD COLUMN bytes INTEGER NOT NULL DEFAULT {ROW_BYTES}",
    "ALTER TABLE entries ADD COLUMN read_hour INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE entries ADD COLUMN posted_ns INTEGER NOT NULL DEFAULT 0",
)
_GONE: Final = """
    UPDATE networks SET entries = entries - 1, bytes = bytes - old.bytes
        WHERE kind = old.kind AND network = old.network;
    DELETE FROM networks WHERE kind = old.kind AND network = old.network AND entries = 0;
    UPDATE totals SET entries = entries - 1, bytes = bytes - old.bytes WHERE kind = old.kind;
"""
_COME: Final = """
    INSERT INTO networks VALUES (new.kind, new.network, 1, new.bytes) ON CONFLICT (kind, network)
        DO UPDATE SET entries = entries + 1, bytes = bytes + excluded.bytes;
    UPDATE totals SET entries = entries + 1, bytes = bytes + new.bytes WHERE kind = new.kind;
"""
_ACCOUNTS: Final = (
    "CREATE INDEX entries_expiring ON entries (kind, expires_ns) WHERE expires_ns IS NOT NULL",
    "CREATE INDEX entries_unread ON entries (kind, network, read_hour, posted_ns)",
    "CREATE TABLE networks (kind INTEGER NOT NULL, network TEXT NOT NULL, entries INTEGER NOT NULL,"
    " bytes INTEGER NOT NULL, PRIMARY KEY (kind, network)) WITHOUT ROWID",
    "CREATE INDEX networks_largest ON networks (kind, bytes)",
    "CREATE TABLE totals (kind INTEGER PRIMARY KEY, entries INTEGER NOT NULL, bytes INTEGER NOT NULL)",
    "INSERT INTO networks SELECT kind, network, count(*), sum(bytes) FROM entries GROUP BY kind, network",
    "INSERT INTO totals VALUES (0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)",
    "INSERT OR REPLACE INTO totals SELECT kind, sum(entries), sum(bytes) FROM networks GROUP BY kind",
    f"CREATE TRIGGER entries_came AFTER INSERT ON entries BEGIN {_COME} END",
    f"CREATE TRIGGER entries_went AFTER DELETE ON entries BEGIN {_GONE} END",
    "CREATE TRIGGER entries_changed AFTER UPDATE OF kind, network, bytes ON entries"
    " WHEN old.kind <> new.kind OR old.network <> new.network OR old.bytes <> new.bytes"
    f" BEGIN {_GONE} {_COME} END",
    f"PRAGMA application_id = {_APPLICATION_ID}",
)
#: Additions of version 3 to version 2. No server named a protocol before.
_PROTOCOLS: Final = (
    "DROP INDEX IF EXISTS entries_available",
    f"ALTER TABLE entries ADD COLUMN protocol TEXT NOT NULL DEFAULT '{DMSG}'",
    "CREATE INDEX entries_available ON entries (protocol, slot) WHERE available = 1",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
_OLD_INDEXES: Final = ("entries_available", "entries_expiring", "entries_tombstones")

_GET: Final = "SELECT body, sequence, timestamp, expires_ns, read_hour FROM entries WHERE key = ?"
_GET_LATEST: Final = "SELECT sequence, timestamp, kind, bytes FROM entries WHERE key = ?"
_PUT: Final = """
INSERT INTO entries
    (key, sequence, timestamp, body, available, slot, expires_ns, kind, network, bytes, posted_ns, protocol)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET sequence = excluded.sequence, timestamp = excluded.timestamp, body = excluded.body,
    available = excluded.available, slot = excluded.slot, expires_ns = excluded.expires_ns, kind = excluded.kind,
    network = excluded.network, bytes = excluded.bytes, posted_ns = excluded.posted_ns, protocol = excluded.protocol
"""
_AVAILABLE: Final = """
SELECT {} FROM entries WHERE available = 1 AND protocol = ? AND slot {} ? AND (expires_ns IS NULL OR expires_ns > ?)
ORDER BY slot LIMIT ?
"""
_SERVER: Final = """
SELECT body FROM entries WHERE key = ? AND available = 1 AND protocol = ? AND (expires_ns IS NULL OR expires_ns > ?)
"""
_EXPIRED: Final = "SELECT key, kind FROM entries WHERE kind = ? AND expires_ns <= ? ORDER BY expires_ns LIMIT ?"
_FORGET: Final = """
DELETE FROM entries WHERE key IN (SELECT key FROM entries WHERE kind = ? AND expires_ns <= ? ORDER BY expires_ns LIMIT ?)
"""
_BURY: Final = f"""
UPDATE entries SET body = NULL, available = 0, expires_ns = ?, kind = kind + {TOMBSTONE}, bytes = {ROW_BYTES},
    read_hour = 0, posted_ns = ? WHERE key = ?
"""
_TOTAL: Final = "SELECT entries, bytes FROM totals WHERE kind = ?"
_LARGEST: Final = "SELECT network, bytes FROM networks WHERE kind = ? ORDER BY bytes DESC LIMIT 2"
_NETWORK: Final = "SELECT bytes FROM networks WHERE kind = ? AND network = ?"
_UNREAD: Final = """
SELECT key FROM entries WHERE kind = ? AND network = ? AND key <> ? ORDER BY read_hour, posted_ns LIMIT 1
"""


class EntryTable:
    """Entries in the database behind ``connection``, which one thread at a time may use. The caller makes transactions."""

    def __init__(self, limits: StoreLimits) -> None:
        self._limits = limits
        self._purged_ns = 0

    def put(self, connection: Connection, entry: Entry, network: str, slot: int, now_ns: int) -> bool:
        """See :meth:`~dmsg.interfaces.IEntryStore.put`. The entry counts for ``network``; ``slot`` is below ``SLOTS``."""
        if not 0 <= now_ns - self._purged_ns < PURGE_INTERVAL_NS:
            self._purge(connection, now_ns)
        key, kind, body = entry.static.raw, kind_of(entry), entry.to_json()
        size = len(body) + ROW_BYTES
        found = connection.execute(_GET_LATEST, (key,)).fetchall()
        if found:
            sequence, timestamp, old_kind, old_size = found[0]
            check_iteration(entry.sequence, entry.timestamp, int.from_bytes(sequence, "big"), timestamp)
            known = old_kind == kind
            self._make_room(
                connection, kind, network, key, 0 if known else 1, size - old_size if known else size, now_ns
            )
        else:
            check_first(entry)
            self._make_room(connection, kind, network, key, 1, size, now_ns)
        row = (
            key,
            entry.sequence.to_bytes(8, "big"),
            entry.timestamp,
            body,
            int(is_available(entry)),
            slot,
            self._limits.expires_ns(entry, now_ns),
            kind,
            network,
            size,
            now_ns,
            entry.protocol,
        )
        connection.execute(_PUT, row)
        return not found

    def mark(self, connection: Connection, keys: list[bytes], now_ns: int) -> None:
        """Note that the entries of ``keys`` were read."""
        hour = hour_of(now_ns)
        connection.executemany(
            f"UPDATE entries SET read_hour = ? WHERE key = ? AND kind < {TOMBSTONE}", [(hour, key) for key in keys]
        )

    def _make_room(
        self, connection: Connection, kind: int, network: str, key: bytes, rows: int, size: int, now_ns: int
    ) -> None:
        """Evict until ``rows`` more of ``kind`` with ``size`` more bytes fit, for ``key``, which is not evicted itself.

        No more than :data:`EVICTED_AT_ONCE`: when limits were lowered, later puts evict the rest.
        """
        row_limit, byte_limit = self._limits.room(kind)
        for _ in range(EVICTED_AT_ONCE):
            entries, total = connection.execute(_TOTAL, (kind,)).fetchall()[0]
            if entries + rows <= row_limit and total + size <= byte_limit:
                return
            victim = self._victim(connection, kind, network, key, size, now_ns)
            if victim is None:
                raise StoreFull
            self._bury(connection, victim, kind, now_ns)

    @staticmethod
    def _victim(connection: Connection, kind: int, network: str, key: bytes, size: int, now_ns: int) -> bytes | None:
        for found, _ in connection.execute(_EXPIRED, (kind, now_ns, 2)).fetchall():
            if found != key:
                return bytes(found)
        largest = connection.execute(_LARGEST, (kind,)).fetchall()
        own = connection.execute(_NETWORK, (kind, network)).fetchall()
        names = [name for name, _ in largest]
        if own and largest and own[0][0] + size >= largest[0][1]:
            names.insert(0, network)
        for name in names:
            for (found,) in connection.execute(_UNREAD, (kind, name, key)).fetchall():
                return bytes(found)
        return None

    def _bury(self, connection: Connection, key: bytes, kind: int, now_ns: int) -> None:
        """Turn an entry into a tombstone; of too many, the oldest of the network with the most is forgotten."""
        connection.execute(_BURY, (now_ns, now_ns, key))
        kind += TOMBSTONE
        for _ in range(FORGOTTEN_AT_ONCE):
            if connection.execute(_TOTAL, (kind,)).fetchall()[0][0] <= self._limits.tombstones:
                return
            network = connection.execute(_LARGEST, (kind,)).fetchall()[0][0]
            oldest = connection.execute(_UNREAD, (kind, network, b"")).fetchall()[0][0]
            connection.execute("DELETE FROM entries WHERE key = ?", (oldest,))

    def _purge(self, connection: Connection, now_ns: int) -> None:
        self._purged_ns = now_ns
        for kind in (RELAY, CLIENT):
            for key, _ in connection.execute(_EXPIRED, (kind, now_ns, PURGE_ROWS)).fetchall():
                self._bury(connection, key, kind, now_ns)
            forgotten_ns = now_ns - self._limits.tombstone_ttl_ns
            connection.execute(_FORGET, (kind + TOMBSTONE, forgotten_ns, PURGE_ROWS))


def get(connection: Connection, public_key: PublicKey, now_ns: int) -> tuple[bytes, int]:
    """The JSON of an entry, and the hour of its last read as its row has it. Raises ``EntryNotFound``."""
    found = connection.execute(_GET, (public_key.raw,)).fetchall()
    if not found:
        raise EntryNotFound
    body, sequence, timestamp, expires_ns, read_hour = found[0]
    if body is None or (expires_ns is not None and expires_ns <= now_ns):
        raise expired(int.from_bytes(sequence, "big"), timestamp)
    return bytes(body), read_hour


def draw(
    connection: Connection, column: str, limit: int, now_ns: int, random: RandomNumbers, protocol: str
) -> list[bytes]:
    """``column`` of at most ``limit`` available servers that speak ``protocol``, at random."""
    found = _walk(connection, column, 0, DRAWN_FROM, now_ns, protocol)
    if len(found) < DRAWN_FROM:
        return random.sample(found, min(limit, len(found)))
    return _walk(connection, column, random.randrange(SLOTS), limit, now_ns, protocol)


def _walk(connection: Connection, column: str, start: int, limit: int, now_ns: int, protocol: str) -> list[bytes]:
    """``column`` of at most ``limit`` available servers, from slot ``start`` on, wrapping around."""

    def slots(compared: str, most: int) -> list[tuple[bytes]]:
        return connection.execute(_AVAILABLE.format(column, compared), (protocol, start, now_ns, most)).fetchall()

    found = slots(">=", limit)
    if len(found) < limit and start:
        found += slots("<", limit - len(found))
    return [value for (value,) in found]


def servers_of(connection: Connection, keys: list[bytes], now_ns: int, protocol: str) -> list[Entry]:
    """The entries of ``keys`` that are available servers now and speak ``protocol``."""
    rows = (connection.execute(_SERVER, (key, protocol, now_ns)).fetchall() for key in keys)
    return [stored_entry(body) for found in rows for (body,) in found]


# --- files -------------------------------------------------------------------------------------------------------------


#: A file can be opened only if there is room beside it: for an index of its log, 32 KiB.
_ROOM_BYTES: Final = 64 * 1024


def text_of(error: Exception) -> str:
    """What ``error``, one of :data:`SqlError` or another, says to people."""
    return "its schema is damaged" if isinstance(error, UnicodeDecodeError) else str(error)


def unusable(path: str, error: Exception) -> ConfigError:
    """The error for a file that is not a store, or is on a full disk, for which SQLite says ``disk I/O error``."""
    why = text_of(error)
    if isinstance(error, SqlError):
        with contextlib.suppress(OSError):  # there is no such directory
            status = os.statvfs(os.path.dirname(path) or ".")
            if status.f_flag & os.ST_RDONLY:  # what is made to be read only often has no room either
                why = f"{why}: the file system is read-only"
            elif status.f_blocks and status.f_bavail * status.f_frsize < _ROOM_BYTES:
                why = f"{why}: the disk is full"
    return ConfigError("store", f"{path} cannot be used ({why})")


def connect(path: str, journal: str = "WAL") -> Connection:
    """A connection to the file ``path``, or to a new database in memory (``:memory:``); raises ``ConfigError``.

    ``journal`` is SQLite's mode: with ``WAL``, readers and writers do not wait for each other, but readers need write access.
    """
    try:
        # Transactions are begun and ended by hand; the lane makes threads take turns.
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except SqlError as error:
        raise unusable(path, error) from None
    try:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute(f"PRAGMA journal_mode = {journal}")
        connection.execute("PRAGMA synchronous = FULL")
    except SqlError as error:
        connection.close()
        raise unusable(path, error) from None
    return connection


def prepare(connection: Connection, limits: StoreLimits, now_ns: int) -> None:
    """Make the tables in an empty file, or migrate those of versions 1 and 2, in one transaction.

    Raises ``ConfigError`` for a file of another program or of a later version.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = connection.execute("PRAGMA user_version").fetchall()[0][0]
        application = connection.execute("PRAGMA application_id").fetchall()[0][0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchall()[0][0]
        if tables and (application != _APPLICATION_ID or version not in (1, 2, SCHEMA_VERSION)):
            raise ConfigError("store", "the file is not an entry store of this version")
        if not tables:
            connection.execute(_ENTRIES)
        if not tables or version == 1:
            for name in _OLD_INDEXES:
                connection.execute(f"DROP INDEX IF EXISTS {name}")
            for statement in _COLUMNS:
                connection.execute(statement)
            _date(connection, limits, now_ns)
            for statement in _ACCOUNTS:
                connection.execute(statement)
        if version != SCHEMA_VERSION:
            for statement in _PROTOCOLS:
                connection.execute(statement)
    except BaseException:
        if connection.in_transaction:  # SQLite ends it itself on a full disk
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _date(connection: Connection, limits: StoreLimits, now_ns: int) -> None:
    """Fill the new columns of rows of version 1. Clients never expired there; their life begins now."""
    connection.execute(f"UPDATE entries SET kind = {RELAY + TOMBSTONE} WHERE body IS NULL")
    last = b""
    while True:
        rows = connection.execute(
            "SELECT key, body, expires_ns FROM entries WHERE key > ? AND body IS NOT NULL ORDER BY key LIMIT 1000",
            (last,),
        ).fetchall()
        if not rows:
            return
        changes = []
        for key, body, expires in rows:
            expires_ns = expires
            try:
                entry = stored_entry(bytes(body))
            except DiscoveryError:  # beyond today's limits: keep a tombstone, and its owner has to post again
                changes.append((CLIENT + TOMBSTONE, None, ROW_BYTES, now_ns, now_ns, key))
                continue
            if entry.server is None:
                expires_ns = limits.expires_ns(entry, now_ns)
            changes.append((kind_of(entry), body, len(body) + ROW_BYTES, now_ns, expires_ns, key))
        connection.executemany(
            "UPDATE entries SET kind = ?, body = ?, bytes = ?, posted_ns = ?, expires_ns = ? WHERE key = ?", changes
        )
        last = rows[-1][0]
