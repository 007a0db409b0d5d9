"""Why envelopes went nowhere at each relay of the Reliable Message Bus in each hour, from its own lines."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dmsg_logs.tables.tabledef import Column, Inputs, Table
from dmsg_logs.tables.transforms.common import RUN, at, only, stands_for, total
from dmsg_logs.tables.transforms.federation_hourly import ATTEMPTED
from dmsg_logs.tables.transforms.relay_hourly import relays_of
from dmsg_logs.tables.transforms.twin_sessions import CLOSED

#: Reasons for the end of a session that are no failure.
NORMAL_ENDS: Final = ("closed by peer", "closed", "replaced", "server_draining")


def rmb_failures(events: DataFrame, runs: DataFrame) -> DataFrame:
    """The table ``rmb_failures`` from the lines and ``log_quality`` (for the relays' names)."""
    event, reason = F.col("event"), F.coalesce("reason", F.lit(""))
    what = (
        F.when(event == "envelope_failed", "envelope")
        .when((event == ATTEMPTED) & ~F.coalesce("ok", F.lit(False)), "federation")
        .when((event == CLOSED) & ~reason.isin(*NORMAL_ENDS), "session")
    )
    return (
        only(events, "envelope_failed", ATTEMPTED, CLOSED)
        .where("role = 'server'")
        .select(
            *RUN,
            *at(F.col("ts")),
            what.alias("what"),
            F.when(event == ATTEMPTED, F.coalesce("relay", F.lit(""))).otherwise("").alias("other"),
            reason.alias("reason"),
            F.when(event == CLOSED, 1).otherwise(stands_for()).alias("times"),
            F.when(F.col("twin") > 0, F.col("twin")).alias("twin"),
        )
        .where("what is not null")
        .join(relays_of(runs), list(RUN))
        .groupBy("relay", "hour", "what", "other", "reason", "date")
        .agg(total("times").cast("long").alias("count"), F.countDistinct("twin").alias("twins"))
        .select("relay", "hour", "what", "other", "reason", "count", "twins", "date")
    )


def _build(inputs: Inputs) -> DataFrame:
    return rmb_failures(inputs.events(), inputs.table("log_quality"))


RMB_FAILURES: Final = Table(
    "rmb_failures",
    "One row for each relay of the Reliable Message Bus, hour, kind of failure, other relay and reason.",
    (
        Column("relay", "string", "name of the relay"),
        Column("hour", "timestamp", "beginning of the hour, UTC"),
        Column(
            "what",
            "string",
            "envelope: it went nowhere; federation: another relay did not take one; session: it ended otherwise than by its "
            "twin, a newer one or a draining relay",
        ),
        Column(
            "other", "string", "host of the other relay of a failed federation; empty for the rest, and for several"
        ),
        Column("reason", "string", "why, as a short fixed text"),
        Column("count", "long", "how often"),
        Column("twins", "long", "twins the lines name"),
        Column("date", "date", "UTC date of the hour"),
    ),
    _build,
)
