"""The embedded registry: twins in a SQLite file that the processes of a host share; :ref:`spec-rmb-registry-file`.

Each row is signed by its twin, and is used only if the signature is valid. Whoever can write to the file, but does not have
the twin's key, cannot change its relays or its encryption key. Such a writer can give a number to another account, or
restore an older row. Only a process that has read the number before notices that.
"""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final

from twisted.internet.interfaces import IReactorTime
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger
from zope.interface import implementer

from dmsg.discovery.stores.table import Connection, SqlError, connect, text_of
from dmsg.errors import ConfigError
from dmsg.rmb.core.errors import BadSignature, InvalidTwin
from dmsg.rmb.core.keys import TwinKey, verify
from dmsg.rmb.core.limits import MAX_TWIN
from dmsg.rmb.core.twin import Twin, format_relays, parse_relays
from dmsg.rmb.interfaces import ITwinRegistry
from dmsg.rmb.twins.errors import NoSuchAccount, RegistryError

_log = Logger()

#: Cached verified rows, and numbers whose account and version are remembered: some 200 bytes each.
CACHED_TWINS: Final = 10_000
REMEMBERED_TWINS: Final = 100_000

#: Seconds after which writes of another process are seen at the latest: checking the file takes as long as the rest of a
#: look-up.
FRESH_S: Final = 0.05

_APPLICATION_ID: Final = 0x726D6274  # "rmbt"
_VERSION: Final = 1
#: Nothing else that a twin signs begins like this: tokens are text without a zero byte, envelopes are signed as 16 bytes.
_SIGNED: Final = b"dmsg rmb twin 1\0"
_LAST_VERSION: Final = 2**63 - 1
_TABLE: Final = """
CREATE TABLE twins (
    id INTEGER PRIMARY KEY,
    account BLOB NOT NULL UNIQUE,
    version INTEGER NOT NULL,
    relays TEXT NOT NULL,
    pk BLOB,
    signature BLOB NOT NULL
)"""
_ROW: Final = "SELECT id, account, version, relays, pk, signature FROM twins WHERE "


def _signed_text(number: int, version: int, account: bytes, relays: str, pk: bytes | None) -> bytes:
    """What the twin signs: the label, number (4 bytes), version (8), account (32), length of relays (2), relays, pk."""
    text = relays.encode()
    return _SIGNED + struct.pack(">IQ32sH", number, version, account, len(text)) + text + (pk or b"")


def _open(path: str) -> Connection:
    try:
        # With a rollback journal, a process without permission to write can still read the file.
        connection = connect(path, "DELETE")
    except ConfigError as error:
        raise ConfigError("registry", error.problem) from None
    try:
        if _marks(connection) == (0, 0, 0):
            connection.execute("BEGIN IMMEDIATE")
            if _marks(connection) == (0, 0, 0):  # no other process was faster
                connection.execute(_TABLE)
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {_VERSION}")
            connection.execute("COMMIT")
        if _marks(connection)[:2] != (_APPLICATION_ID, _VERSION):
            raise ConfigError("registry", f"{path} is not a registry of twins of this version")
    except SqlError as error:
        connection.close()
        raise ConfigError("registry", f"{path} cannot be used ({text_of(error)})") from None
    except ConfigError:
        connection.close()
        raise
    return connection


def _marks(connection: Connection) -> tuple[int, ...]:
    names = ("application_id", "user_version", "schema_version")
    return tuple(connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names)


class TwinTable:
    """The file ``path``, created if it is missing; for one thread at a time. Methods that fail raise ``RegistryError``.

    Writes of other processes are seen at once, or with a ``clock`` within :data:`FRESH_S`. Raises
    :class:`~dmsg.errors.ConfigError` for a file that cannot be used or is not a registry.
    """

    def __init__(self, path: str, clock: IReactorTime | None = None) -> None:
        self._connection: Connection | None = _open(path)
        self._clock = clock
        self._fresh_until_s = float("-inf")
        self._data_version = -1
        self._twins: OrderedDict[int, Twin | None] = OrderedDict()
        self._numbers: OrderedDict[bytes, int | None] = OrderedDict()
        # Rows with verified signatures: after another process has written, most rows are unchanged.
        self._verified: OrderedDict[int, tuple[tuple[Any, ...], Twin]] = OrderedDict()
        self._seen: OrderedDict[int, tuple[bytes, int]] = OrderedDict()

    def get(self, number: int) -> Twin | None:
        """The twin of this number, ``None`` if there is none."""
        self._refresh()
        if number not in self._twins:
            row = self._row("id = ?", number)
            _put(self._twins, number, self._checked(row) if row else None, CACHED_TWINS)
        return self._twins[number]

    def find(self, account: bytes) -> int | None:
        """The number of the twin with this account, ``None`` if it has none."""
        self._refresh()
        if account not in self._numbers:
            row = self._row("account = ?", account)
            _put(self._numbers, account, self._checked(row).id if row else None, CACHED_TWINS)
        return self._numbers[account]

    def numbers(self) -> list[int]:
        """The numbers of all twins, in order."""
        return [number for (number,) in self._execute("SELECT id FROM twins ORDER BY id")]

    def create(self, key: TwinKey, relays: Iterable[str], pk: bytes | None) -> int:
        """Create a twin with the account of ``key``, or update the twin it has. Returns its number; a new one is last plus 1.

        Raises ``InvalidTwin`` for relays or a key that a twin cannot have.
        """
        return self._write(key, format_relays(relays), pk, create=True)

    def update(self, key: TwinKey, relays: Iterable[str], pk: bytes | None) -> int:
        """Change the twin with the account of ``key``; returns its number. Raises ``NoSuchAccount`` or ``InvalidTwin``."""
        return self._write(key, format_relays(relays), pk, create=False)

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _write(self, key: TwinKey, relays: str, pk: bytes | None, *, create: bool) -> int:
        self._execute("BEGIN IMMEDIATE")
        try:
            number = self._write_row(key, relays, pk, create=create)
            self._execute("COMMIT")
        except BaseException:
            if self._connection is not None and self._connection.in_transaction:  # SQLite ends it itself on a full disk
                self._execute("ROLLBACK")
            raise
        return number

    def _write_row(self, key: TwinKey, relays: str, pk: bytes | None, *, create: bool) -> int:
        row = self._row("account = ?", key.account)
        if row is None and not create:
            raise NoSuchAccount(key.account)
        if row is not None and not isinstance(row[0], int):
            raise RegistryError("unavailable", "the file is damaged")
        if row is None:
            number, version = int(self._execute("SELECT coalesce(max(id), 0) + 1 FROM twins")[0][0]), 1
        else:
            # Others may have changed the row, so it need not be valid: its twin writes it again.
            number, version = int(row[0]), row[2] + 1 if isinstance(row[2], int) else 1
            if row[3:5] == (relays, pk) and _is_signed(row):
                return number
        if not (0 < number <= MAX_TWIN and version <= _LAST_VERSION):
            raise RegistryError("full")
        Twin(number, key.account, (), pk)  # raises InvalidTwin
        signature = key.sign(_signed_text(number, version, key.account, relays, pk))
        new = (number, key.account, version, relays, pk, signature)
        self._execute("INSERT OR REPLACE INTO twins VALUES (?, ?, ?, ?, ?, ?)", *new)
        self._forget()
        return number

    def _checked(self, row: tuple[Any, ...]) -> Twin:
        number, account, version, relays, pk, _ = row
        known = self._verified.get(number)
        if known is not None and known[0] == row:
            return known[1]
        if not _is_signed(row):
            raise RegistryError("altered", f"twin {number} has not signed its row")
        seen = self._seen.get(number, (account, version))
        if seen[0] != account or seen[1] > version:
            raise RegistryError("altered", f"twin {number} is another one, or an older one, than before")
        _put(self._seen, number, (account, version), REMEMBERED_TWINS)
        twin = Twin(number, account, parse_relays(relays), pk)
        _put(self._verified, number, (row, twin), CACHED_TWINS)
        return twin

    def look_again(self) -> None:
        """Let the next read see everything written so far."""
        self._fresh_until_s = float("-inf")

    def _refresh(self) -> None:
        """Clear the cache if another connection has written since."""
        if self._clock is not None:
            now = self._clock.seconds()
            if now < self._fresh_until_s:
                return
            self._fresh_until_s = now + FRESH_S
        version = self._execute("PRAGMA data_version")[0][0]
        if version != self._data_version:
            self._data_version = version
            self._forget()

    def _forget(self) -> None:
        self._twins.clear()
        self._numbers.clear()

    def _row(self, condition: str, value: int | bytes) -> tuple[Any, ...] | None:
        rows = self._execute(_ROW + condition, value)
        return rows[0] if rows else None

    def _execute(self, statement: str, *values: int | bytes | str | None) -> list[tuple[Any, ...]]:
        if self._connection is None:
            raise RegistryError("closed")
        try:
            return self._connection.execute(statement, values).fetchall()
        except (*SqlError, OverflowError) as error:
            raise RegistryError("unavailable", text_of(error)) from None


def _put(table: OrderedDict[Any, Any], key: object, value: object, limit: int) -> None:
    table[key] = value
    if len(table) > limit:
        table.popitem(last=False)


def _is_signed(row: tuple[Any, ...]) -> bool:
    """Whether a row has the right types and its twin's signature."""
    match row:
        case (
            int() as number,
            bytes() as account,
            int() as version,
            str() as relays,
            bytes() | None as pk,
            bytes() as sig,
        ):
            try:
                Twin(number, account, (), pk)
                verify(account, _signed_text(number, version, account, relays, pk), sig)
            except (InvalidTwin, BadSignature, struct.error, UnicodeEncodeError):
                return False
            return True
    return False


@implementer(ITwinRegistry)
class SqliteRegistry:
    """The registry in the file ``path``, by means of :class:`TwinTable`.

    Reads happen at once: they read single rows by key, which are cached until another process writes. Writes wait for the disk;
    with a ``reactor`` they do so in a thread of its pool.
    """

    def __init__(self, path: str, reactor: Any = None) -> None:
        self._path = path
        self._reactor = reactor
        was_there = os.path.exists(path)  # also false for a file behind a directory that is closed to us
        self._table = TwinTable(path, reactor)
        if not was_there:
            _log.warn("The registry {path} was not there: it is made, without a twin", path=path)

    async def get(self, twin: int) -> Twin | None:
        """See :class:`~dmsg.rmb.interfaces.ITwinRegistry`."""
        return self._table.get(twin)

    async def find(self, account: bytes) -> int | None:
        """See :class:`~dmsg.rmb.interfaces.ITwinRegistry`."""
        return self._table.find(account)

    async def update(self, key: TwinKey, relays: Iterable[str], pk: bytes | None) -> None:
        """See :class:`~dmsg.rmb.interfaces.ITwinRegistry`."""
        if self._reactor is None:
            self._table.update(key, relays, pk)
        else:
            await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), self._update, key, list(relays), pk)
            self._table.look_again()

    async def close(self) -> None:
        """See :class:`~dmsg.rmb.interfaces.ITwinRegistry`."""
        self._table.close()

    def _update(self, key: TwinKey, relays: list[str], pk: bytes | None) -> None:
        try:
            table = TwinTable(self._path)
        except ConfigError as error:
            raise RegistryError("unavailable", error.problem) from None
        try:
            table.update(key, relays, pk)
        finally:
            table.close()
