"""Requests to discovery in each hour."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dmsg_logs.tables.tabledef import Column, Inputs, Table, percentile_columns
from dmsg_logs.tables.transforms.common import at, only, percentiles, spread, stands_for, total

_POINTS: Final = (50, 95, 99)


def discovery_hourly(events: DataFrame) -> DataFrame:
    """The table ``discovery_hourly`` from the lines. A line for several requests counts as often, with their mean."""
    return (
        only(events, "discovery_request")
        .select("node", *at(F.col("ts")), "method", "path", "status", "elapsed_ms", stands_for().alias("times"))
        .groupBy("node", "hour", "date", "method", "path")
        .agg(
            total("times").alias("requests"),
            total(F.when(F.col("status").between(400, 499), F.col("times"))).alias("errors_4xx"),
            total(F.when(F.col("status") >= 500, F.col("times"))).alias("errors_5xx"),
            percentiles("elapsed_ms", *_POINTS, times=F.col("times")),
            F.max("elapsed_ms").alias("elapsed_ms_max"),
        )
        .select(
            "node",
            "hour",
            "method",
            "path",
            "requests",
            "errors_4xx",
            "errors_5xx",
            *spread("elapsed_ms", *_POINTS),
            "elapsed_ms_max",
            "date",
        )
    )


def _build(inputs: Inputs) -> DataFrame:
    return discovery_hourly(inputs.events())


DISCOVERY_HOURLY: Final = Table(
    "discovery_hourly",
    "One row for each discovery node, hour and kind of request. A line that stands for several counts as often with their mean.",
    (
        Column("node", "string", "name of the discovery node"),
        Column("hour", "timestamp", "beginning of the hour, UTC"),
        Column("method", "string", "HTTP method"),
        Column("path", "string", "name of the family of paths"),
        Column("requests", "long", "requests that were answered"),
        Column("errors_4xx", "long", "answers with a status from 400 to 499"),
        Column("errors_5xx", "long", "answers with a status of 500 or more"),
        *percentile_columns("elapsed_ms", "how long the answers took", "ms", *_POINTS),
        Column("elapsed_ms_max", "double", "how long the slowest answer took", "ms"),
        Column("date", "date", "UTC date of the hour"),
    ),
    _build,
)
