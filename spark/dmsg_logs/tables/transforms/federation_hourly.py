"""Federation between each pair of relays of the Reliable Message Bus in each hour, from the sender's own lines."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dmsg_logs.tables.tabledef import Column, Inputs, Table, percentile_columns
from dmsg_logs.tables.transforms.common import RUN, hour_of, only, percentiles, spread, stands_for, total
from dmsg_logs.tables.transforms.relay_hourly import relays_of

ATTEMPTED: Final = "federation_attempted"
RANKED: Final = "relay_rank_changed"
_POINTS: Final = (50, 95, 99)


def federation_hourly(events: DataFrame, runs: DataFrame) -> DataFrame:
    """The table ``federation_hourly`` from the lines and ``log_quality`` (for the relays' names).

    A line for several attempts counts as often, with their mean time.
    """
    attempt, ok = F.col("event") == ATTEMPTED, F.col("ok")
    lines = only(events, ATTEMPTED, RANKED).where("role = 'server'")
    return (
        lines.select(
            *RUN,
            F.coalesce("relay", F.lit("")).alias("other"),
            hour_of(F.col("ts")).alias("hour"),
            F.when(attempt, stands_for()).alias("times"),
            F.when(attempt & ~F.coalesce(ok, F.lit(False)), stands_for()).alias("failures"),
            F.when(attempt & ok, F.col("elapsed_ms")).alias("elapsed_ms"),
            "failures_per_hour",
        )
        .join(relays_of(runs), list(RUN))
        .groupBy("relay", "other", "hour")
        .agg(
            total("times").cast("long").alias("attempts"),
            total("failures").cast("long").alias("failed"),
            percentiles("elapsed_ms", *_POINTS, times=F.coalesce("times", F.lit(1))),
            F.max("failures_per_hour").alias("failures_per_hour_max"),
        )
        .select(
            "relay",
            "other",
            "hour",
            "attempts",
            "failed",
            *spread("elapsed_ms", *_POINTS),
            "failures_per_hour_max",
            F.to_date("hour").alias("date"),
        )
    )


def _build(inputs: Inputs) -> DataFrame:
    return federation_hourly(inputs.events(), inputs.table("log_quality"))


FEDERATION_HOURLY: Final = Table(
    "federation_hourly",
    "One row for each relay of the Reliable Message Bus, other relay and hour in which the first posted envelopes to the "
    "second, or changed its rank.",
    (
        Column("relay", "string", "name of the relay that posted"),
        Column("other", "string", "host of the relay it posted to; empty for lines that stand for several"),
        Column("hour", "timestamp", "beginning of the hour, UTC"),
        Column("attempts", "long", "envelopes posted, or not"),
        Column("failed", "long", "those that were not taken"),
        *percentile_columns("elapsed_ms", "how long the posts took that were taken", "ms", *_POINTS),
        Column("failures_per_hour_max", "double", "highest rate of failures by which it was ranked; null: no change"),
        Column("date", "date", "UTC date of the hour"),
    ),
    _build,
)
