"""Envelopes at each relay of the Reliable Message Bus in each hour, from its own lines."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dmsg_logs.tables.tabledef import Column, Inputs, Table
from dmsg_logs.tables.transforms.common import RUN, count_where, hour_of, only, stands_for, total
from dmsg_logs.tables.transforms.relay_hourly import relays_of
from dmsg_logs.tables.transforms.twin_sessions import CLOSED, OPENED

ROUTED: Final = "envelopes_routed"
#: Columns of ``envelopes_routed`` that are added up.
WAYS: Final = ("received", "ingested", "local", "stored", "fetched", "federated", "expired", "refused", "bytes")


def envelopes_hourly(events: DataFrame, runs: DataFrame) -> DataFrame:
    """The table ``envelopes_hourly`` from the lines and ``log_quality`` (for the relays' names)."""
    event = F.col("event")

    def summed(name: str) -> Expression:
        return total(F.when(event == ROUTED, F.col(name))).alias(name)

    return (
        only(events, ROUTED, "rate_limited", OPENED, CLOSED)
        .where("role = 'server'")
        .drop("relay")
        .join(relays_of(runs), list(RUN))
        .groupBy("relay", hour_of(F.col("ts")).alias("hour"))
        .agg(
            count_where(event == OPENED).alias("sessions_opened"),
            count_where(event == CLOSED).alias("sessions_closed"),
            *[summed(name) for name in WAYS],
            total(F.when(event == "rate_limited", stands_for())).cast("long").alias("rate_limited"),
        )
        .select(
            "relay",
            "hour",
            "sessions_opened",
            "sessions_closed",
            *WAYS,
            "rate_limited",
            F.to_date("hour").alias("date"),
        )
    )


def _build(inputs: Inputs) -> DataFrame:
    return envelopes_hourly(inputs.events(), inputs.table("log_quality"))


ENVELOPES_HOURLY: Final = Table(
    "envelopes_hourly",
    "One row for each relay of the Reliable Message Bus and hour in which it wrote about envelopes or sessions.",
    (
        Column("relay", "string", "name of the relay"),
        Column("hour", "timestamp", "beginning of the hour, UTC"),
        Column("sessions_opened", "long", "sessions of twins that came up"),
        Column("sessions_closed", "long", "sessions of twins that ended"),
        Column("received", "long", "envelopes that sessions sent"),
        Column("ingested", "long", "envelopes that other relays posted"),
        Column("local", "long", "envelopes handed to a session that was connected"),
        Column("stored", "long", "envelopes put into the store for a session that was not"),
        Column("fetched", "long", "envelopes taken from the store for a session that came"),
        Column("federated", "long", "envelopes given to federation"),
        Column("expired", "long", "envelopes left out because their time was over"),
        Column("refused", "long", "envelopes that went nowhere, those whose time was over when they came among them"),
        Column("bytes", "long", "of the envelopes received and ingested", "bytes"),
        Column("rate_limited", "long", "envelopes dropped because their twin sends too many"),
        Column("date", "date", "UTC date of the hour"),
    ),
    _build,
)
