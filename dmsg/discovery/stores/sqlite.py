"""Entries in a SQLite file: when and in which thread :mod:`dmsg.discovery.stores.table` works on it.

Two lanes, one for reads and one for writes, each with a connection of its own; the file is in WAL mode, so that neither
waits for the other. A lane works in a pool thread on everything that had come together while it was busy: writes that
arrive at the same time share one transaction and one fsync, and are acknowledged only after it
(``synchronous=FULL``: what was acknowledged survives SIGKILL and a power cut).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from twisted.internet.defer import Deferred, fail
from zope.interface import implementer

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import DMSG, Entry
from dmsg.discovery.errors import DiscoveryError, DiscoveryUnavailable
from dmsg.discovery.stores import table as store_table
from dmsg.discovery.stores.rules import NewKeys, ReadMarks, StoreLimits, Watchers, network_of, stored_entry
from dmsg.errors import ConfigError
from dmsg.interfaces import IWatchedStore
from dmsg.sansio.jitter import Jitter, RandomNumbers

#: Most jobs done in one go: bounds how long a read or a transaction can keep those behind it waiting.
BATCH_LIMIT: Final = 256
#: Most jobs waiting in one lane; beyond, the store fails at once instead of growing.
QUEUE_LIMIT: Final = 4096

_Job = Callable[[store_table.Connection], Any]


class _Failed(NamedTuple):
    """A job's outcome when it is an error."""

    error: DiscoveryError


class _Lane:
    """One connection, used by one pool thread at a time. Everything but :meth:`_work` runs in the reactor's thread."""

    def __init__(self, connection: store_table.Connection, reactor: Any, pool: Any, *, transaction: bool) -> None:
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
        except BaseException as error:  # whatever it was, no caller may be left waiting
            failed = _Failed(DiscoveryUnavailable(f"the store failed ({error})"))
            results = [failed] * len(batch)
            with contextlib.suppress(store_table.SqlError):
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
                # The job refused before it wrote anything: its neighbours are not touched by that. Its traceback leads to
                # this list, and both would wait for the garbage collector.
                results.append(_Failed(error.with_traceback(None)))
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


@implementer(IWatchedStore)
class SqliteStore:
    """Entries in the SQLite file ``path``. Several processes may share the file.

    ``pool`` is a thread pool (default: the reactor's), of which at most two threads are used at a time. ``now_ns()`` is
    Unix time in nanoseconds: a file of an earlier version is brought up to date, and its clients live from now on. Raises
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
        random: RandomNumbers | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        limits = limits or StoreLimits()
        self._random: RandomNumbers = random or Jitter(os.urandom)
        self._table = store_table.EntryTable(limits)
        self._new_keys = NewKeys(limits)
        self._marks = ReadMarks()
        self._watchers = Watchers()
        pool = pool if pool is not None else reactor.getThreadPool()
        writer = store_table.connect(path)
        try:
            store_table.prepare(writer, limits, now_ns())
            reader = store_table.connect(path)
        except (store_table.SqlError, ConfigError) as error:
            writer.close()
            raise store_table.unusable(path, error) from None
        self._writes = _Lane(writer, reactor, pool, transaction=True)
        self._reads = _Lane(reader, reactor, pool, transaction=False)

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
        entry.to_json()  # made here, where it may be used again, rather than in the other thread

        def job(connection: store_table.Connection) -> bool:
            if marks:
                self._table.mark(connection, marks, now_ns)
            return self._table.put(connection, entry, network, slot, now_ns)

        return self._writes.submit(job).addCallback(self._watchers.tell, entry, now_ns)

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
