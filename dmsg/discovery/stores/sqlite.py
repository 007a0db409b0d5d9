"""Entries in a SQLite file: runs :mod:`dmsg.discovery.stores.table` in threads.

There are two lanes, one for reads and one for writes, each with a connection of its own; the file is in WAL mode, so neither
waits for the other. A lane processes in a pool thread all operations that have come while it was busy: writes that arrive at
the same time share one transaction and one fsync, and are acknowledged only after it (``synchronous=FULL``: acknowledged
entries survive SIGKILL and a power cut).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred, fail
from zope.interface import implementer

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import DMSG, Entry
from dmsg.discovery.errors import DiscoveryError, DiscoveryUnavailable
from dmsg.discovery.stores import table as store_table
from dmsg.discovery.stores.rules import (
    NewKeys,
    ReadMarks,
    StoreLimits,
    Watchers,
    network_of,
    shielded,
    stored_entry,
)
from dmsg.errors import ConfigError
from dmsg.glue.lane import Lane
from dmsg.interfaces import IWatchedStore
from dmsg.sansio.jitter import Jitter, RandomNumbers


@implementer(IWatchedStore)
class SqliteStore:
    """Entries in the SQLite file ``path``. Several processes may share the file.

    At most two threads of the reactor's pool are used at a time. ``now_ns()`` is Unix time in nanoseconds: a file of an
    earlier version is migrated, and the life of its clients begins now. Raises :class:`~dmsg.errors.ConfigError` when
    the file cannot be used.
    """

    durable = True

    def __init__(
        self,
        path: str,
        reactor: Any,
        *,
        limits: StoreLimits | None = None,
        random: RandomNumbers | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        limits = limits or StoreLimits()
        self._random: RandomNumbers = random or Jitter(os.urandom)
        self._table = store_table.EntryTable(limits)
        self._new_keys = NewKeys(limits)
        self._marks = ReadMarks()
        self._watchers = Watchers()
        pool = reactor.getThreadPool()
        writer = store_table.connect(path)
        try:
            store_table.prepare(writer, limits, now_ns())
            reader = store_table.connect(path)
        except (*store_table.SqlError, ConfigError) as error:
            writer.close()
            raise store_table.unusable(path, error) from None
        kinds: Any = {"refusal": DiscoveryError, "unavailable": DiscoveryUnavailable}
        self._writes = Lane(writer, reactor, pool, transaction=True, **kinds)
        self._reads = Lane(reader, reactor, pool, transaction=False, **kinds)

    def get(self, public_key: PublicKey, now_ns: int) -> Deferred[Entry]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return self.get_json(public_key, now_ns).addCallback(stored_entry)

    def get_json(self, public_key: PublicKey, now_ns: int) -> Deferred[bytes]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        found = self._reads.submit(lambda connection: store_table.get(connection, public_key, now_ns))
        return found.addCallback(self._read, public_key, now_ns)

    def _read(self, found: tuple[bytes, int], public_key: PublicKey, now_ns: int) -> bytes:
        self._marks.note(public_key.raw, found[1], now_ns)
        return found[0]

    def put(self, entry: Entry, now_ns: int, poster: str = "") -> Deferred[bool]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        try:
            self._new_keys.check(entry, poster, now_ns)
        except DiscoveryError as error:
            return fail(error)
        slot, network = self._random.randrange(store_table.SLOTS), network_of(poster)
        marks = self._marks.take(now_ns)
        entry.to_json()  # made and cached here, rather than in the other thread

        def job(connection: store_table.Connection) -> bool:
            if marks:
                self._table.mark(connection, marks, now_ns)
            return self._table.put(connection, entry, network, slot, now_ns)

        return shielded(self._writes.submit(job).addCallback(self._watchers.tell, entry, now_ns))

    def watch(self, changed: Callable[[Entry, int], None]) -> None:
        """See :class:`~dmsg.interfaces.IWatchedStore`."""
        self._watchers.add(changed)

    def available_servers(self, limit: int, now_ns: int, protocol: str = DMSG) -> Deferred[list[Entry]]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""

        def job(connection: store_table.Connection) -> list[Entry]:
            bodies = store_table.draw(connection, "body", limit, now_ns, self._random, protocol)
            return [stored_entry(body) for body in bodies]

        return self._reads.submit(job)

    def available_keys(self, limit: int, now_ns: int, protocol: str = DMSG) -> Deferred[list[bytes]]:
        """See :class:`~dmsg.interfaces.IRankedStore`."""
        return self._reads.submit(
            lambda connection: store_table.draw(connection, "key", limit, now_ns, self._random, protocol)
        )

    def servers_of(self, keys: list[bytes], now_ns: int, protocol: str = DMSG) -> Deferred[list[Entry]]:
        """See :class:`~dmsg.interfaces.IRankedStore`."""
        return self._reads.submit(lambda connection: store_table.servers_of(connection, keys, now_ns, protocol))

    def close(self) -> Deferred[None]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return self._reads.close().addCallback(lambda _: self._writes.close())
