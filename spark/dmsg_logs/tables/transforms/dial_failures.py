"""At which step, through which relay and why attempts to reach a peer failed."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dmsg_logs.ingest.lines import MAX_FLOAT
from dmsg_logs.tables.tabledef import Column, Inputs, Table, percentile_columns
from dmsg_logs.tables.transforms.common import RUN, date_of, only, percentiles, protocol_of, spread

#: What ``dial_finished.attempts`` holds: a list with one object for each step that failed. A dial without any is ``[]``.
ATTEMPTS: Final = "array<struct<stage: string, server: string, elapsed_ms: double, reason: string>>"
#: Stands for the steps of a failed dial without any, or with unreadable ones.
UNKNOWN: Final = "unknown"

_POINTS: Final = (50, 99)
_GROUP: Final = ("date", "relay", "protocol", "stage", "reason")


def dial_failures(events: DataFrame) -> DataFrame:
    """The table ``dial_failures`` from the lines. An impossible time of a step counts as missing."""
    elapsed_ms = F.col("step.elapsed_ms")
    told = F.filter(F.from_json("attempts", ATTEMPTS), lambda one: one["stage"].isNotNull())
    none_told = F.array(
        F.struct(
            F.lit(UNKNOWN).alias("stage"),
            F.lit("").alias("server"),
            F.col("elapsed_ms").alias("elapsed_ms"),
            F.col("reason").alias("reason"),
        )
    )
    steps = F.when(F.size(F.coalesce(told, F.array())) > 0, told).when(~F.col("ok"), none_told)
    return (
        only(events, "dial_finished")
        .where("not (ok and attempts = '[]')")
        .select(*RUN, "seq", date_of(F.col("ts")).alias("date"), protocol_of(), F.explode(steps).alias("step"))
        .select(
            "date",
            F.coalesce("step.server", F.lit("")).alias("relay"),
            "protocol",
            F.col("step.stage").alias("stage"),
            F.coalesce("step.reason", F.lit("")).alias("reason"),
            F.when(elapsed_ms.between(0.0, MAX_FLOAT), elapsed_ms).alias("elapsed_ms"),
            F.struct("node", "boot", "seq").alias("dial"),
            "node",
        )
        .groupBy(*_GROUP)
        .agg(
            F.count(F.lit(1)).alias("attempts"),
            F.count_distinct("dial").alias("dials"),
            F.count_distinct("node").alias("clients"),
            percentiles("elapsed_ms", *_POINTS),
        )
        .select(*_GROUP, "attempts", "dials", "clients", *spread("elapsed_ms", *_POINTS))
    )


def _build(inputs: Inputs) -> DataFrame:
    return dial_failures(inputs.events())


DIAL_FAILURES: Final = Table(
    "dial_failures",
    "One row for each day, relay, protocol, step and reason of failed attempts, those of dials that got through another way "
    "included.",
    (
        Column("date", "date", "UTC date of the end of the dial"),
        Column("relay", "string", "public key of the relay; empty for steps that need none, such as discovery"),
        Column("protocol", "string", "protocol of the client that dialled: dmsg, messaging, …"),
        Column(
            "stage", "string", f"discovery, connect, handshake, request or accept; {UNKNOWN} if the dial tells none"
        ),
        Column("reason", "string", "why, as a short fixed text"),
        Column("attempts", "long", "attempts that failed so"),
        Column("dials", "long", "dials with such an attempt"),
        Column("clients", "long", "clients with such a dial"),
        *percentile_columns("elapsed_ms", "from the start of the dial to the failure", "ms", *_POINTS),
    ),
    _build,
)
