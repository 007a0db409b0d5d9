"""Batches of work on a database connection, in a pool thread: all jobs that came while it was busy are the next batch."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, TypeVar

from twisted.internet.defer import Deferred, fail

from dmsg.errors import DmsgError

C = TypeVar("C")

#: Most jobs in one batch: bounds how long a read or a transaction can keep later jobs waiting.
BATCH_LIMIT: Final = 256
#: Most jobs waiting in one lane, if its owner sets no other limit; beyond, the store fails at once instead of growing.
QUEUE_LIMIT: Final = 4096


class _Failed(NamedTuple):
    """A job's outcome when it is an error."""

    error: DmsgError


class InThisThread:
    """A reactor and a pool for a :class:`Lane` that works in the caller's thread: for a database in memory."""

    @staticmethod
    def callInThread(work: Callable[..., None], *arguments: object) -> None:
        """Call ``work`` now."""
        work(*arguments)

    callFromThread = callInThread


class Lane(Generic[C]):
    """One connection, used by one pool thread at a time. Everything but :meth:`_work` runs in the reactor's thread.

    With ``transaction`` the jobs of one batch share a transaction (``BEGIN IMMEDIATE`` … ``COMMIT``), and are answered after
    it. A job that refuses raises ``refusal`` before it writes. Any other error fails all jobs of the batch with
    ``unavailable(text)``, and ``undone(connection)`` is called after the rollback. ``after(connection)`` is called after
    each batch, and must not fail.
    """

    def __init__(
        self,
        connection: C,
        reactor: Any,
        pool: Any,
        *,
        transaction: bool,
        refusal: type[DmsgError],
        unavailable: Callable[[str], DmsgError],
        undone: Callable[[C], object] = lambda _: None,
        after: Callable[[C], object] = lambda _: None,
        limit: int | None = None,
    ) -> None:
        self._connection: Any = connection
        self._reactor = reactor
        self._pool = pool
        self._transaction = transaction
        self._refusal = refusal
        self._unavailable = unavailable
        self._undone = undone
        self._after = after
        self._limit = limit
        self._waiting: deque[tuple[Callable[[C], Any], Deferred[Any]]] = deque()
        self._busy = False
        self._closing: Deferred[None] | None = None

    def submit(self, job: Callable[[C], Any]) -> Deferred[Any]:
        """Run ``job`` in its turn; fires with its result once that is committed."""
        if self._closing is not None:
            return fail(self._unavailable("the store is closed"))
        if len(self._waiting) >= (QUEUE_LIMIT if self._limit is None else self._limit):
            return fail(self._unavailable("the store is overloaded"))
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
            try:
                self._pool.callInThread(self._work, batch)
            except RuntimeError as error:  # no thread to be had, or no memory for one: later jobs may get one
                self._finished(batch, [self._failed(error)] * len(batch))
        elif self._closing is not None and not self._closing.called:
            self._connection.close()
            self._closing.callback(None)

    def _work(self, batch: list[tuple[Callable[[C], Any], Deferred[Any]]]) -> None:
        try:
            results = self._run([job for job, _ in batch])
        except BaseException as error:  # whatever it was, no caller may be left without an answer
            results = [self._failed(error)] * len(batch)
            with contextlib.suppress(Exception):
                self._connection.rollback()
                self._undone(self._connection)
        self._reactor.callFromThread(self._finished, batch, results)

    def _failed(self, error: BaseException) -> _Failed:
        return _Failed(self._unavailable(f"the store failed ({error})"))

    def _run(self, jobs: list[Callable[[C], Any]]) -> list[Any]:
        results: list[Any] = []
        if self._transaction:
            self._connection.execute("BEGIN IMMEDIATE")
        for job in jobs:
            try:
                results.append(job(self._connection))
            except self._refusal as error:
                # The job wrote nothing before it refused, so the other jobs are not affected. Its traceback refers to this
                # list: both would live until the garbage collector runs.
                results.append(_Failed(error.with_traceback(None)))
        if self._transaction:
            self._connection.execute("COMMIT")
        self._after(self._connection)
        return results

    def _finished(self, batch: list[tuple[Callable[[C], Any], Deferred[Any]]], results: list[Any]) -> None:
        self._busy = False
        self._start()
        for (_, done), result in zip(batch, results, strict=True):
            if isinstance(result, _Failed):
                done.errback(result.error)
            else:
                done.callback(result)

    def close(self) -> Deferred[None]:
        """Close the connection after the jobs that wait. The Deferred of each call fires when that is done."""
        done: Deferred[None] = Deferred()
        if self._closing is None:
            self._closing = Deferred()
        self._closing.addCallback(lambda _: done.callback(None))
        self._start()
        return done
