"""The period that the report covers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import reduce
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dmsg_logs.report.data import DAY_S, HOUR_S, Reader
from dmsg_logs.tables.transforms.common import credible_until, hour_of


def window(read: Reader, days: int) -> tuple[int, int]:
    """Unix seconds from midnight ``days - 1`` days before the last hour with data to that hour's end; (0, 0) if none.

    Clients' lines count only if there are none of relays and discoveries. Hours after the last landing come from wrong
    clocks and are no data; see :func:`~dmsg_logs.tables.transforms.common.credible_until`.
    """
    spans = _spans([read(name).select("hour") for name in ("relay_hourly", "discovery_hourly", "envelopes_hourly")])
    if not spans:  # relays and discovery belong to others
        spans = _spans(_told_by_clients(read))
    landed = read("accounts").agg(F.max("landed_at")).first()
    earliest = min((row["day"] for row in spans), default=None)
    latest = credible_until(earliest, landed[0] if landed is not None else None, time.time())
    ends = [min(row["last"], latest // HOUR_S * HOUR_S) for row in spans if row["day"] <= latest]
    if not ends:
        return 0, 0
    last = int(max(ends))
    first = last // DAY_S * DAY_S - (days - 1) * DAY_S
    return min(int(row["day"]) for row in spans if row["day"] >= first), last + HOUR_S


def _told_by_clients(read: Reader) -> list[DataFrame]:
    """The days of dials, the hours of calls, and those of the first and the last line of each client's run."""
    runs = read("log_quality").where("role = 'client' and first_at is not null")
    ends = [runs.select(hour_of(F.col(name)).alias("hour")) for name in ("first_at", "last_at")]
    return [
        read("pair_latency").select(F.col("date").cast("timestamp").alias("hour")),
        read("calls_hourly").select("hour"),
        *ends,
    ]


def _spans(told: Sequence[DataFrame]) -> list[Any]:
    """The days (``day``, Unix seconds) in the column ``hour`` of frames, and the ``last`` hour of each."""
    at = F.unix_timestamp("hour")
    hours = reduce(DataFrame.unionByName, told)
    return hours.groupBy((F.floor(at / DAY_S) * DAY_S).alias("day")).agg(F.max(at).alias("last")).collect()
