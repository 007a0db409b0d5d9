"""How long two clients wait for each other, day by day and relay by relay."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dmsg_logs.tabledef import Column, Inputs, Table, percentile_columns
from dmsg_logs.transforms.common import RUN, count_where, date_of, only, percentiles, spread

_POINTS: Final = (50, 95, 99)
_GROUP: Final = ("date", "initiator", "responder", "server")
_SHORT_DIGITS: Final = 16


def pair_latency(events: DataFrame, transports: DataFrame, connections: DataFrame, runs: DataFrame) -> DataFrame:
    """The table ``pair_latency``: transports from the servers' side, dials from the clients'."""
    opened = transports.where("role = 'server' and opened_at is not null").select(
        date_of(F.col("opened_at")).alias("date"), "initiator", "responder", "server", "accept_ms"
    )
    dialled = (
        only(events, "dial_finished")
        .join(clients_of(runs, connections), list(RUN), "left")
        .select(
            date_of(F.col("ts")).alias("date"),
            F.coalesce("client", "node").alias("initiator"),
            F.col("target").alias("responder"),
            F.coalesce("server", F.lit("")).alias("server"),
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


def clients_of(runs: DataFrame, connections: DataFrame) -> DataFrame:
    """Run of a client -> ``client``, its full key; small.

    A client that never had a transport does not tell its key, but the relays it was connected with do: its name is the
    beginning of it.
    """
    seen = (
        connections.select("remote")
        .distinct()
        .groupBy(F.substring("remote", 1, _SHORT_DIGITS).alias("node"))
        .agg(F.max("remote").alias("remote"))
    )
    known = runs.where("role = 'client'").select(*RUN, "key").join(seen, "node", "left")
    key = F.when(F.col("key") == F.col("node"), F.coalesce("remote", "key")).otherwise(F.col("key"))
    return F.broadcast(known.select(*RUN, key.alias("client")))


def _build(inputs: Inputs) -> DataFrame:
    table = inputs.table
    return pair_latency(inputs.events(), table("transports"), table("connections"), table("log_quality"))


PAIR_LATENCY: Final = Table(
    "pair_latency",
    "One row for each day, dialling client, dialled client and relay. A dial that failed went through no relay: such "
    "dials are the rows whose server is empty.",
    (
        Column("date", "date", "UTC date of the opening, or of the end of the dial"),
        Column("initiator", "string", "public key of the client that dialled; its name where no line tells the key"),
        Column("responder", "string", "public key of the client that was dialled"),
        Column("server", "string", "public key of the relay; empty for dials that failed"),
        Column("transports", "long", "transports that were opened, as the relays saw it"),
        *percentile_columns("accept_ms", "from REQUEST to ACCEPT, as the relays saw it", "ms", *_POINTS),
        Column("dials", "long", "dials that ended, as the initiator saw it"),
        Column("dials_ok", "long", "those that gave a transport"),
        *percentile_columns("dial_ms", "how long the dials took, as the initiator saw it", "ms", *_POINTS),
    ),
    _build,
)
