"""The store of entries in memory. The rules are in :mod:`dmsg.discovery.stores.rules`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TypeVar

from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import implementer

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import DMSG, Entry
from dmsg.discovery.errors import DiscoveryError
from dmsg.discovery.stores import table as store_table
from dmsg.discovery.stores.rules import (
    NewKeys,
    ReadMarks,
    StoreLimits,
    Watchers,
    network_of,
    stored_entry,
)
from dmsg.interfaces import IWatchedStore
from dmsg.sansio.jitter import Jitter, RandomNumbers

T = TypeVar("T")


@implementer(IWatchedStore)
class MemoryStore:
    """Entries in this process only: the table of the store in SQLite, without a file. Every Deferred has fired."""

    durable = False

    def __init__(self, *, limits: StoreLimits | None = None, random: RandomNumbers | None = None) -> None:
        limits = limits or StoreLimits()
        self._random: RandomNumbers = random or Jitter(os.urandom)
        self._table = store_table.EntryTable(limits)
        self._new_keys = NewKeys(limits)
        self._marks = ReadMarks()
        self._watchers = Watchers()
        self._connection = store_table.connect(":memory:")
        store_table.prepare(self._connection, limits, 0)
        weakref.finalize(self, self._connection.close)

    def get(self, public_key: PublicKey, now_ns: int) -> Deferred[Entry]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return self.get_json(public_key, now_ns).addCallback(stored_entry)

    def get_json(self, public_key: PublicKey, now_ns: int) -> Deferred[bytes]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return _done(lambda: self._get(public_key, now_ns))

    def _get(self, public_key: PublicKey, now_ns: int) -> bytes:
        body, read_hour = store_table.get(self._connection, public_key, now_ns)
        self._marks.note(public_key.raw, read_hour, now_ns)
        return body

    def put(self, entry: Entry, now_ns: int, poster: str = "") -> Deferred[bool]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return _done(lambda: self._put(entry, now_ns, poster))

    def _put(self, entry: Entry, now_ns: int, poster: str) -> bool:
        self._new_keys.check(entry, poster, now_ns)
        marks = self._marks.take(now_ns)
        if marks:
            self._table.mark(self._connection, marks, now_ns)
        slot = self._random.randrange(store_table.SLOTS)
        is_first = self._table.put(self._connection, entry, network_of(poster), slot, now_ns)
        return self._watchers.tell(is_first, entry, now_ns)

    def watch(self, changed: Callable[[Entry, int], None]) -> None:
        """See :class:`~dmsg.interfaces.IWatchedStore`."""
        self._watchers.add(changed)

    def available_servers(self, limit: int, now_ns: int, protocol: str = DMSG) -> Deferred[list[Entry]]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        bodies = store_table.draw(self._connection, "body", limit, now_ns, self._random, protocol)
        return succeed([stored_entry(body) for body in bodies])

    def available_keys(self, limit: int, now_ns: int, protocol: str = DMSG) -> Deferred[list[bytes]]:
        """See :class:`~dmsg.interfaces.IRankedStore`."""
        return succeed(store_table.draw(self._connection, "key", limit, now_ns, self._random, protocol))

    def servers_of(self, keys: list[bytes], now_ns: int, protocol: str = DMSG) -> Deferred[list[Entry]]:
        """See :class:`~dmsg.interfaces.IRankedStore`."""
        return succeed(store_table.servers_of(self._connection, keys, now_ns, protocol))

    def close(self) -> Deferred[None]:
        """See :class:`~dmsg.interfaces.IEntryStore`."""
        return succeed(None)


def _done(operation: Callable[[], T]) -> Deferred[T]:
    try:
        return succeed(operation())
    except DiscoveryError as error:
        return fail(error)
