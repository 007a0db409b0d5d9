"""The data of the report: small frames, bounded in size. :mod:`dmsg_logs.report.gathering` makes them from the tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, timezone
from typing import TYPE_CHECKING, Any, Final

import pandas as pd

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Whole days (UTC) that the report covers, the day of the last hour included.
DAYS: Final = 14
#: Relays that get a line of their own, those with most traffic first.
TOP_RELAYS: Final = 20
#: Most columns of a chart over time: more cannot be told apart on a telephone.
MAX_BUCKETS: Final = 112
#: Rows of the lists (abuse, talkers, nodes, paths, reasons): as many as a person reads; bounds the page's size.
TOP_KEYS: Final = 20
TOP_NODES: Final = 30
TOP_PATHS: Final = 20
TOP_REASONS: Final = 40
TOP_DIALS: Final = 300
#: Score (0 to 1) from which a key stands out; nearly every client is refused something some day.
LEAST_SCORE: Final = 0.1
HOUR_S: Final = 3600
DAY_S: Final = 86_400

#: Percentiles that are shown, as ``p50`` and so on.
POINTS: Final = (50, 95, 99)

#: Gives a table by its name: the pipeline's tables, ``events`` and ``accounts``.
Reader = Callable[[str], "DataFrame"]

#: Columns of the frames of :class:`ReportData`. ``at`` is the start of a bucket in Unix seconds, times are in
#: milliseconds unless stated otherwise, ``date`` and ``day`` are ISO dates, ``relay`` "" is the whole fleet.
#: ``transports`` were opened, ``refused`` never were; ``failed`` counts those of both that ended with an error.
#: A ``way`` is what happened to envelopes: a column of the table ``envelopes_hourly``.
FRAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "fleet": ("at", "bytes", "connections", "transports", "failed", "relays"),
    "load": ("relay", "at", "bytes", "connections"),
    "failures": ("at", "what", "reason", "count"),
    "latency": ("at", "metric", "count", "p50", "p95", "p99"),
    "latency_total": ("metric", "count", "p50", "p95", "p99"),
    "relays": (
        *(
            "relay",
            "protocol",
            "connections",
            "connections_max",
            "transports",
            "refused",
            "failed",
            "refusals",
            "bytes",
            "queue_max",
        ),
        *("handshake_p50", "handshake_p95", "handshake_p99", "accept_p50", "accept_p95", "accept_p99"),
    ),
    "dial_failures": ("stage", "reason", "relay", "protocol", "attempts", "clients", "p50", "p99"),
    "resumptions": ("date", "reason", "resumptions", "transports"),
    "resumption_times": ("reason", "count", "p50", "p95", "p99", "max"),
    "abuse": (
        *("key", "days", "relays", "refusals", "handshakes_failed", "abuse_closes", "dials", "dial_failures"),
        *("score", "flagged", "why"),
    ),
    "talkers": ("key", "days", "sent", "received", "bytes", "transports", "peers"),
    "history": ("relay", "date", "bytes", "connections"),
    "forecast": ("relay", "metric", "day", "value", "low", "high", "history_days", "method"),
    "bus": ("at", "way", "count"),
    "bus_failures": ("what", "reason", "count"),
    "federation": ("relay", "other", "attempts", "failed", "p99", "rate"),
    "calls": ("reason", "calls", "p50", "p99"),
    "discovery": ("at", "requests", "errors_4xx", "errors_5xx"),
    "paths": ("method", "path", "requests", "errors_4xx", "errors_5xx", "p50", "p95", "p99", "max"),
    "quality": (
        *("role", "node", "key", "runs", "files", "lines", "gaps", "gap_lines", "dup", "corrupt", "missing", "late"),
        *("lateness_p50", "lateness_p99", "lateness_max", "dropped", "unended", "first_at", "last_at"),
    ),
}


def empty_frames() -> dict[str, pd.DataFrame]:
    """All of :data:`FRAMES`, without rows."""
    return {name: pd.DataFrame(columns=list(columns)) for name, columns in FRAMES.items()}


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything :func:`dmsg_logs.report.render` needs to know.

    ``since`` and ``until`` bound the time looked at (Unix seconds, ``until`` is the end of the last hour; both 0 when
    there is nothing), ``bucket_s`` is the width of a bucket, ``totals`` are single figures by name, ``frames`` the
    tables of :data:`FRAMES`.
    """

    since: int = 0
    until: int = 0
    bucket_s: int = HOUR_S
    totals: Mapping[str, float] = field(default_factory=dict)
    frames: Mapping[str, pd.DataFrame] = field(default_factory=empty_frames)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of one frame as mappings; empty where the frame is missing. ``KeyError`` for an unknown name."""
        columns = FRAMES[name]
        frame = self.frames.get(name)
        if frame is None or frame.empty:
            return []
        rows: list[dict[str, Any]] = frame[list(columns)].to_dict("records")
        return rows

    def buckets(self) -> list[int]:
        """The start of every bucket from ``since`` to ``until``."""
        return list(range(self.since, self.until, self.bucket_s))


def bucket_s(since: int, until: int) -> int:
    """Width of a bucket: the fewest whole hours that divide a day and give at most ``MAX_BUCKETS`` buckets."""
    for hours in (1, 2, 3, 4, 6, 8, 12):
        if until - since <= MAX_BUCKETS * hours * HOUR_S:
            return hours * HOUR_S
    return DAY_S


def iso_date(at: int) -> str:
    """The UTC date of a Unix time."""
    return datetime.fromtimestamp(at, timezone.utc).date().isoformat()


def as_date(at: int) -> date:
    """The same as a value for comparisons in Spark."""
    return datetime.fromtimestamp(at, timezone.utc).date()
