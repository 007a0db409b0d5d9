"""Latency between pairs of clients, by day and relay."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dmsg_logs.tables.tabledef import Column, Inputs, Table, percentile_columns
from dmsg_logs.tables.transforms.common import RUN, count_where, date_of, only, percentiles, protocol_of, spread

_POINTS: Final = (50, 95, 99)
_GROUP: Final = ("date", "initiator", "responder", "server", "protocol")


def pair_latency(events: DataFrame, transports: DataFrame, runs: DataFrame) -> DataFrame:
    """The table ``pair_latency``: transports from the servers' side, dials from the clients'."""
    opened = transports.where("role = 'server' and opened_at is not null").select(
        date_of(F.col("opened_at")).alias("date"), "initiator", "responder", "server", "protocol", "accept_ms"
    )
    dialled = (
        only(events, "dial_finished")
        .join(F.broadcast(runs.select(*RUN, F.col("key").alias("client"))), list(RUN), "left")
        .select(
            date_of(F.col("ts")).alias("date"),
            F.coalesce(F.nullif("initiator", F.lit("")), "client", "node").alias("initiator"),
            F.col("target").alias("responder"),
            F.coalesce("server", F.lit("")).alias("server"),
            protocol_of(),
            F.col("elapsed_ms").alias("dial_ms"),
            F.coalesce("ok", F.lit(False)).alias("ok"),
        )
    )
    return (
        opened.unionByName(dialled, allowMissingColumns=True)
        .groupBy(*_GROUP)
        .agg(
            count_where(F.col("ok").isNull()).alias("transports"),
            percentiles("accept_ms", *_POINTS),
            count_where(F.col("ok").isNotNull()).alias("dials"),
            count_where(F.col("ok")).alias("dials_ok"),
            percentiles("dial_ms", *_POINTS),
        )
        .select(
            *_GROUP,
            "transports",
            *spread("accept_ms", *_POINTS),
            "dials",
            "dials_ok",
            *spread("dial_ms", *_POINTS),
        )
    )


def _build(inputs: Inputs) -> DataFrame:
    return pair_latency(inputs.events(), inputs.table("transports"), inputs.table("log_quality"))


PAIR_LATENCY: Final = Table(
    "pair_latency",
    "One row for each day, dialling client, dialled client, relay and protocol. A dial that failed went through no relay: such "
    "dials are the rows whose server is empty.",
    (
        Column("date", "date", "UTC date of the opening, or of the end of the dial"),
        Column("initiator", "string", "public key of the client that dialled; its name where no line tells the key"),
        Column("responder", "string", "public key of the client that was dialled"),
        Column("server", "string", "public key of the relay; empty for dials that failed"),
        Column("protocol", "string", "protocol of the transport or the dial: dmsg, messaging, …"),
        Column("transports", "long", "transports that were opened, as the relays saw it"),
        *percentile_columns("accept_ms", "from REQUEST to ACCEPT, as the relays saw it", "ms", *_POINTS),
        Column("dials", "long", "dials that ended, as the initiator saw it"),
        Column("dials_ok", "long", "those that gave a transport"),
        *percentile_columns("dial_ms", "how long the dials took, as the initiator saw it", "ms", *_POINTS),
    ),
    _build,
)
