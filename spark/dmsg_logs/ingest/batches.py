"""From files in the landing zone to the table of events, batch after batch.

A run lists the landing zone, leaves out what commits name, and takes the rest in batches
(:mod:`dmsg_logs.ingest.batch`). A run that is killed before it commits a batch has changed nothing that a reader sees; the
next run makes the batch again under another name. Two concurrent runs would both make the batch with the next number, but
only one can create its commit; the other run discards its work and starts over. (Normally a note prevents concurrent runs:
:mod:`dmsg_logs.runtime.lease`.)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Final

from pyspark.sql import SparkSession

from dmsg_logs.ingest import attempts, store
from dmsg_logs.ingest import landing as landings
from dmsg_logs.ingest.accounts import IngestSummary
from dmsg_logs.ingest.batch import Batch
from dmsg_logs.ingest.landing import LandingFile
from dmsg_logs.runtime import lease
from dmsg_logs.runtime.session import session_with

#: Called with a stage, how many files are done, and how many there are.
Progress = Callable[[str, int, int], None]

#: Partitions that a task keeps open at once; above that it sorts its lines.
_OPEN_WRITERS: Final = 24


def ingest(spark: SparkSession, landing: str, tables: str, *, progress: Progress | None = None) -> IngestSummary:
    """Take every file of ``landing`` that is not yet in the table below ``tables``.

    ``landing`` is anything Hadoop or fsspec can read, ``tables`` anything Hadoop can write. Nothing is changed if there
    is nothing new. Raises ``FileNotFoundError`` without a landing zone, :class:`~dmsg_logs.runtime.lease.BusyError` while
    another run is at work, and :class:`~dmsg_logs.ingest.accounts.AccountsError` if what was written is not what was read.
    """
    started = time.monotonic()
    summary = IngestSummary()
    session = _session(spark)
    source = landings.open_landing(session, landing)
    tell = progress or (lambda stage, done, total: None)
    tell("list", 0, 0)
    listed = source.files()
    named = frozenset(each.identity for each in listed)
    commits = store.commits(session, tables, of=named)
    fresh = _fresh(listed, commits)
    if fresh:
        with (
            lease.hold(session, store.lease_path(tables), f"the events of {tables}") as renew,
            contextlib.ExitStack() as stack,
        ):
            stack.callback(source.release)
            total = len(fresh)
            while fresh:
                commits = store.commits(session, tables, commits, of=named)  # another run may have been quicker
                attempts.sweep(session, tables, commits)
                batch = landings.batches(fresh)[0]
                report = _after(tell, total - len(fresh), total)
                accounts = Batch(session, source, tables, commits, renew, report).take(batch)
                if accounts is not None:
                    summary.add(accounts)
                commits = store.commits(session, tables, commits, of=named)
                fresh = _fresh(listed, commits)
            attempts.sweep(session, tables, commits)
            tell("done", total, total)
    summary.seconds = round(time.monotonic() - started, 3)
    return summary


def _after(tell: Progress, done: int, total: int) -> Callable[[str, int], None]:
    return lambda stage, files: tell(stage, done + files, total)


def _fresh(listed: Iterable[LandingFile], commits: Iterable[store.Commit]) -> list[LandingFile]:
    """The files with something new in them.

    A name vouches only for a file that was read whole: a file that was cut or damaged is taken again once it has changed.
    """
    known = {each["identity"]: each for commit in commits for each in commit.files}

    def has_new(file: LandingFile) -> bool:
        taken = known.get(file.identity)
        if taken is None:
            return True
        return bool(taken["problem"]) and (taken["size"], taken["landed_at"]) != (file.size, file.changed_at)

    return [each for each in listed if has_new(each)]


def _session(spark: SparkSession) -> SparkSession:
    """A session of our own on the same context, because settings decide how files are packed and written."""
    settings = {
        "spark.sql.maxConcurrentOutputFileWriters": str(_OPEN_WRITERS),
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1",  # of files, each whole
        # Words are shuffled, not lines: so little data that adaptive replanning takes longer than each step.
        "spark.sql.shuffle.partitions": str(spark.sparkContext.defaultParallelism),
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.ansi.enabled": "true",
        # Constraints inferred from the fault rules help no plan, and Spark takes minutes to infer them.
        "spark.sql.constraintPropagation.enabled": "false",
    }
    return session_with(spark, settings)
