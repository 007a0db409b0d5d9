"""Why things failed at each relay in each hour, from its own lines."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dmsg_logs.tables.tabledef import Column, Inputs, Table
from dmsg_logs.tables.transforms.common import RUN, at, only, stands_for, total
from dmsg_logs.tables.transforms.relay_hourly import relays_of

#: Reasons for the end of a connection that are no failure.
NORMAL_ENDS: Final = ("closed by peer", "server_draining")


def relay_failures(events: DataFrame, runs: DataFrame) -> DataFrame:
    """The table ``relay_failures`` from the lines and ``log_quality`` (for the relays' keys)."""
    event = F.col("event")
    what = (
        F.when(event == "handshake_failed", "handshake")
        .when(event == "refused", "refused")
        .when((event == "transport_closed") & (F.col("code") != 0), "transport")
        .when((event == "connection_closed") & ~F.col("reason").isin(*NORMAL_ENDS), "connection")
    )
    lines = only(events, "handshake_failed", "refused", "transport_closed", "connection_closed").where(
        "role = 'server'"
    )
    return (
        lines.select(
            *RUN,
            *at(F.col("ts")),
            what.alias("what"),
            F.coalesce("reason", F.lit("")).alias("reason"),
            F.when(event.isin("refused", "handshake_failed"), stands_for()).otherwise(1).alias("count"),
        )
        .where("what is not null")
        .join(relays_of(runs), list(RUN))
        .groupBy("relay", "protocol", "hour", "what", "reason", "date")
        .agg(total("count").alias("count"))
        .select("relay", "protocol", "hour", "what", "reason", "count", "date")
    )


def _build(inputs: Inputs) -> DataFrame:
    return relay_failures(inputs.events(), inputs.table("log_quality"))


RELAY_FAILURES: Final = Table(
    "relay_failures",
    "One row for each relay, hour, kind of failure and reason (server lines only).",
    (
        Column("relay", "string", "public key of the relay; its name where no line tells the key"),
        Column("protocol", "string", "what it speaks: dmsg, messaging, …"),
        Column("hour", "timestamp", "beginning of the hour, UTC"),
        Column(
            "what",
            "string",
            "handshake: failed before its end; transport: ended with another CLOSE code than 0; connection: ended "
            "otherwise than by its client or a draining relay; refused: a limit or rule",
        ),
        Column("reason", "string", "why, as a short fixed text"),
        Column("count", "long", "how often"),
        Column("date", "date", "UTC date of the hour"),
    ),
    _build,
)
