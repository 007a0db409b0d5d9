"""The whole pipeline, stage after stage: landing zone to events, tables, ranks and report.

Each stage can be run alone and again; one that has nothing to do says so within a second or two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dmsg_logs.ingest.batches import ingest
from dmsg_logs.ingest.store import commits, last_batch, read_events
from dmsg_logs.ranks import document as scoring
from dmsg_logs.ranks.signing import SecretKey
from dmsg_logs.report import ReportData, render, write_report
from dmsg_logs.runtime import paths
from dmsg_logs.tables.generations import build_tables, read_manifest
from dmsg_logs.tables.transforms.common import CLOCK_SLACK_S

#: Told of every step: name of the stage, steps done, steps in all (0 while that is not known).
Progress = Callable[[str, int, int], None]

#: Most files with missing lines that a summary names.
MISSING_FILES_SHOWN: Final = 20


def ingest_stage(spark: SparkSession, landing: str, tables: str, progress: Progress | None = None) -> dict[str, Any]:
    """Take in what is new in ``landing``. Of this call, ``in = good + dup + corrupt`` always."""
    result = ingest(spark, landing, tables, progress=progress)
    return {
        "files": result.files,
        "in": result.lines_in,
        "good": result.good,
        "dup": result.dup,
        "corrupt": result.corrupt,
        "missing": result.missing,
        "missing_files": list(result.missing_files)[:MISSING_FILES_SHOWN],
        "batches": result.batches,
    }


def tables_stage(spark: SparkSession, tables: str, progress: Progress | None = None) -> dict[str, Any]:
    """Make the tables anew if the events have changed; gives the rows of each and the findings of the data checks."""
    rows = build_tables(spark, tables, progress=progress)
    manifest = read_manifest(spark, tables)
    return {
        "tables": dict(rows),
        "generation": manifest.generation,
        "violations": manifest.violations,
        "findings": manifest.findings,
    }


class NoEvents(LookupError):
    """No events have been taken in yet, or the path of the tables is wrong."""


def demand_events(spark: SparkSession, tables: str) -> None:
    """Raise :class:`NoEvents` if nothing has been taken in at ``tables``: tables of nothing would look as if a mistyped path
    were right.
    """
    if not last_batch(spark, tables):
        raise NoEvents(f"no events have been taken in at {tables}")


def demand_good_events(spark: SparkSession, tables: str) -> None:
    """Raise :class:`NoEvents` if no good line has been taken in at ``tables``.

    Ranks of nothing would be a document without relays, and newer than the one in force. A mistyped landing zone may have
    files of another kind, of which all lines are corrupt.
    """
    if not any(each.states.get("good", 0) for each in commits(spark, tables, of=())):
        raise NoEvents(f"no events have been taken in at {tables}")


def ranks_stage(
    spark: SparkSession, tables: str, target: str, key: SecretKey, now: float | None = None
) -> dict[str, Any]:
    """Score the relays, sign, and replace ``target``.

    ``now`` is the end of the window, in Unix seconds; by default the time that the logs of relays and discoveries have
    reached, but not later than the clock's. So a document is as old as its evidence, and a document made of last month's
    logs counts for nothing.
    """
    events = read_events(spark, tables)
    if now is None:
        now = min(time.time(), _told_until(events))
    ranks = scoring.compute_ranks(events, now=now)
    scoring.write_ranks(spark, ranks, target, key)
    return {"relays": len(ranks.relays), "excluded_clients": ranks.excluded_clients}


def _told_until(events: DataFrame) -> float:
    """The time that at least two logs of relays and discoveries have reached: so one of two relays may be down, and the
    ranks see it. The time of the only log if there is one, the clock's if there is none.

    Not the newest line of all: a single forged line would move all other evidence out of the window. Only live logs count:
    those with a file that landed within a window before the newest file, with lines that were fresh then. Otherwise a
    relay that is gone for good would hold the time up, and an old log that lands late would set it back. If no log is
    live, all count.
    """
    logs = events.where("role in ('server', 'discovery')").groupBy("role", "node")
    found = logs.agg(F.max("ts").alias("newest"), F.max("landed_at").alias("landed_at")).collect()
    clock = time.time()
    told = [(row.newest, min(row.landed_at or 0.0, clock)) for row in found]  # a copy may have a time in the future
    since = max((at for _, at in told), default=0.0) - scoring.WINDOW_S
    live = [ts for ts, at in told if at > since and at - scoring.WINDOW_S < ts <= at + CLOCK_SLACK_S]
    times = sorted(live or [ts for ts, _ in told])
    return float(times[-2:][0]) if times else clock


def _document(spark: SparkSession, ranks: str) -> dict[str, Any]:
    try:
        return scoring.parse_document(paths.read_text(spark, ranks))
    except ValueError as error:  # also of bytes that are no text
        raise scoring.RanksError(f"{ranks}: {error}") from None


def report_stage(
    spark: SparkSession,
    data: ReportData,
    pictures: Mapping[str, bytes],
    directory: str,
    summary: Mapping[str, Any] | None,
    ranks: str | None,
) -> dict[str, Any]:
    """Write ``report.html`` and its pictures, PNG by name, into ``directory``; ``ranks`` is the path of a document to
    show; ``RanksError`` if it is another kind of file. ``data`` and ``pictures`` are made beforehand: drawing does not need
    Spark, which can work meanwhile."""
    document = _document(spark, ranks) if ranks is not None else None
    html = render(data, summary=summary, ranks=document)
    write_report(html, pictures, directory)
    return {"bytes": len(html.encode())}
