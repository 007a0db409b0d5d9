"""Who moves the most data."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from dmsg_logs.tables.tabledef import Column, Inputs, Table
from dmsg_logs.tables.transforms.common import date_of, total

#: Number of keys kept for each day.
TALKERS: Final = 100


def top_talkers(transports: DataFrame) -> DataFrame:
    """The table ``top_talkers`` from the table ``transports``.

    Uses the servers' lines, because they count the data of both ends. Sums are first made for each key and peer, then for
    each key, so that no group needs a count of distinct values.
    """
    ended = transports.where("role = 'server' and state = 'closed'")

    def side(key: str, peer: str, sent: str, received: str) -> list[Expression]:
        return [
            F.col(key).alias("key"),
            F.col(peer).alias("peer"),
            F.col(sent).alias("sent"),
            F.col(received).alias("received"),
        ]

    sides = F.explode(
        F.array(
            F.struct(*side("initiator", "responder", "bytes_out", "bytes_in")),
            F.struct(*side("responder", "initiator", "bytes_in", "bytes_out")),
        )
    )
    talked = (
        ended.select(date_of(F.col("closed_at")).alias("date"), sides.alias("side"))
        .select("date", "side.*")
        .groupBy("date", "key", "peer")
        .agg(total("sent").alias("sent"), total("received").alias("received"), F.count(F.lit(1)).alias("transports"))
        .groupBy("date", "key")
        .agg(
            F.sum("sent").alias("bytes_sent"),
            F.sum("received").alias("bytes_received"),
            F.sum("transports").alias("transports"),
            F.count(F.lit(1)).alias("peers"),
        )
        .withColumn("bytes", F.col("bytes_sent") + F.col("bytes_received"))
    )
    place = F.row_number().over(Window.partitionBy("date").orderBy(F.desc("bytes"), "key"))
    return (
        talked.withColumn("position", place.cast("long"))
        .where(F.col("position") <= TALKERS)
        .select("date", "key", "bytes_sent", "bytes_received", "bytes", "transports", "peers", "position")
    )


def _build(inputs: Inputs) -> DataFrame:
    return top_talkers(inputs.table("transports"))


TOP_TALKERS: Final = Table(
    "top_talkers",
    f"The {TALKERS} keys with the most data of each day, by the transports that ended on it (server lines only).",
    (
        Column("date", "date", "UTC date of the transports' end"),
        Column("key", "string", "public key of the client"),
        Column("bytes_sent", "long", "data it sent", "bytes"),
        Column("bytes_received", "long", "data it received", "bytes"),
        Column("bytes", "long", "both together", "bytes"),
        Column("transports", "long", "transports, whichever end dialled"),
        Column("peers", "long", "different keys at the other ends"),
        Column("position", "long", "place of the day, from 1; equal ones in the order of their keys"),
    ),
    _build,
)
