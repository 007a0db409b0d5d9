"""Transports that went on over another path."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dmsg_logs.tables.tabledef import Column, Inputs, Table, percentile_columns
from dmsg_logs.tables.transforms.common import date_of, only, percentiles, spread

_POINTS: Final = (50, 95, 99)
_GROUP: Final = ("date", "server", "reason")


def resumptions(events: DataFrame) -> DataFrame:
    """The table ``resumptions`` from the lines."""
    return (
        only(events, "transport_resumed")
        .select(
            date_of(F.col("ts")).alias("date"),
            "server",
            F.coalesce("reason", F.lit("")).alias("reason"),
            "elapsed_ms",
            F.struct("node", "boot", "initiator", "responder", "transport_id").alias("transport"),
        )
        .groupBy(*_GROUP)
        .agg(
            F.count(F.lit(1)).alias("resumptions"),
            F.count_distinct("transport").alias("transports"),
            percentiles("elapsed_ms", *_POINTS),
            F.max("elapsed_ms").alias("elapsed_ms_max"),
        )
        .select(*_GROUP, "resumptions", "transports", *spread("elapsed_ms", *_POINTS), "elapsed_ms_max")
    )


def _build(inputs: Inputs) -> DataFrame:
    return resumptions(inputs.events())


RESUMPTIONS: Final = Table(
    "resumptions",
    "One row for each day, relay and reason: transports that went on over another path.",
    (
        Column("date", "date", "UTC date"),
        Column("server", "string", "public key of the relay they went on through"),
        Column("reason", "string", "why the path before ended, as a short fixed text"),
        Column("resumptions", "long", "times a transport went on"),
        Column("transports", "long", "different ids under which they went on, for each client, run and pair of ends"),
        *percentile_columns("elapsed_ms", "how long there was no path", "ms", *_POINTS),
        Column("elapsed_ms_max", "double", "longest time without a path", "ms"),
    ),
    _build,
)
