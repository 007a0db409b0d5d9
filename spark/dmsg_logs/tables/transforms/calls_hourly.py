"""Calls of other twins' commands over the Reliable Message Bus in each hour, from the lines of those that call."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dmsg_logs.tables.tabledef import Column, Inputs, Table, percentile_columns
from dmsg_logs.tables.transforms.common import at, only, percentiles, spread, stands_for, total

FINISHED: Final = "call_finished"
_POINTS: Final = (50, 95, 99)


def calls_hourly(events: DataFrame) -> DataFrame:
    """The table ``calls_hourly`` from the lines. A line for several calls counts as often, with their mean."""
    return (
        only(events, FINISHED)
        .select(
            "node",
            *at(F.col("ts")),
            F.coalesce("ok", F.lit(False)).alias("ok"),
            F.coalesce("reason", F.lit("")).alias("reason"),
            "elapsed_ms",
            stands_for().alias("times"),
        )
        .groupBy("hour", "ok", "reason", "date")
        .agg(
            total("times").cast("long").alias("calls"),
            F.countDistinct("node").alias("callers"),
            percentiles("elapsed_ms", *_POINTS, times=F.col("times")),
        )
        .select("hour", "ok", "reason", "calls", "callers", *spread("elapsed_ms", *_POINTS), "date")
    )


def _build(inputs: Inputs) -> DataFrame:
    return calls_hourly(inputs.events())


CALLS_HOURLY: Final = Table(
    "calls_hourly",
    "One row for each hour and way in which calls over the Reliable Message Bus ended.",
    (
        Column("hour", "timestamp", "beginning of the hour of the end, UTC"),
        Column("ok", "boolean", "whether they were answered, and not with an error"),
        Column("reason", "string", "why not, as a short fixed text; empty on success"),
        Column("calls", "long", "calls that ended so"),
        Column("callers", "long", "programs with such a call"),
        *percentile_columns("elapsed_ms", "how long the calls took", "ms", *_POINTS),
        Column("date", "date", "UTC date of the hour"),
    ),
    _build,
)
