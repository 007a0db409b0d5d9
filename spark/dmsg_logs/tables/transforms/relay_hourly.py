"""The activity of each relay in each hour, from its own lines."""

from __future__ import annotations

from functools import reduce
from typing import Final

from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from dmsg_logs.tables.tabledef import Column, Inputs, Table, percentile_columns
from dmsg_logs.tables.transforms.common import RUN, hour_of, only, percentiles, spread, stands_for, total

_POINTS: Final = (50, 95, 99)
_COUNTS: Final = (
    "connections_opened",
    "connections_closed",
    "handshakes_failed",
    "transports_opened",
    "transports_closed",
    "transports_failed",
    "refusals",
    "bytes",
)
_GROUP: Final = ("relay", "protocol", "hour")
_SERVER: Final = "role = 'server'"


def relay_hourly(events: DataFrame, connections: DataFrame, transports: DataFrame, runs: DataFrame) -> DataFrame:
    """The table ``relay_hourly`` from the lines and the tables ``connections``, ``transports`` and ``log_quality``."""
    relays = relays_of(runs)
    facts = reduce(
        lambda one, other: one.unionByName(other, allowMissingColumns=True),
        [
            _facts(
                connections.where("opened_at is not null"),
                "opened_at",
                relays,
                _one("connections_opened"),
                "handshake_ms",
            ),
            _facts(connections.where("closed_at is not null"), "closed_at", relays, _one("connections_closed")),
            _facts(
                transports.where("opened_at is not null"), "opened_at", relays, _one("transports_opened"), "accept_ms"
            ),
            _facts(transports.where("closed_at is not null"), "closed_at", relays, *_ended()),
            _facts(only(events, "handshake_failed"), "ts", relays, stands_for().alias("handshakes_failed")),
            _facts(only(events, "refused"), "ts", relays, stands_for().alias("refusals")),
        ],
    )
    hourly = facts.groupBy(*_GROUP).agg(
        *[total(name).alias(name) for name in _COUNTS],
        percentiles("handshake_ms", *_POINTS),
        percentiles("accept_ms", *_POINTS),
        percentiles("queue_bytes", *_POINTS),
        F.max("queue_bytes").alias("queue_bytes_max"),
    )
    earlier = Window.partitionBy("relay", "protocol").orderBy("hour").rowsBetween(Window.unboundedPreceding, -1)
    open_before = F.coalesce(F.sum("net").over(earlier), F.lit(0))
    return (
        hourly.join(_steps(connections, relays, runs), list(_GROUP), "full_outer")
        .withColumn("connections_open_max", open_before + F.greatest("peak", F.lit(0)))
        .where("bytes is not null")  # an hour whose only line was lost
        .select(
            *_GROUP,
            "connections_opened",
            "connections_closed",
            "connections_open_max",
            "handshakes_failed",
            *spread("handshake_ms", *_POINTS),
            "transports_opened",
            "transports_closed",
            "transports_failed",
            "refusals",
            "bytes",
            *spread("accept_ms", *_POINTS),
            *spread("queue_bytes", *_POINTS),
            "queue_bytes_max",
            F.to_date("hour").alias("date"),
        )
    )


def relays_of(runs: DataFrame) -> DataFrame:
    """Run of a server -> ``relay``, its full key, and ``protocol``; small."""
    return F.broadcast(runs.where(_SERVER).select(*RUN, F.col("key").alias("relay"), "protocol"))


def _one(name: str) -> Expression:
    return F.lit(1).cast("long").alias(name)


def _ended() -> list[Expression]:
    closed = F.col("state") == "closed"
    return [
        closed.cast("long").alias("transports_closed"),
        (F.col("code") != 0).cast("long").alias("transports_failed"),
        F.when(closed, F.col("bytes_in") + F.col("bytes_out")).alias("bytes"),
        F.when(closed, F.col("queue_peak_bytes")).alias("queue_bytes"),
    ]


def _facts(frame: DataFrame, time: str, relays: DataFrame, *values: Expression | str) -> DataFrame:
    """``values`` of a server's rows, with the relay, its protocol and the hour of the column ``time``."""
    own = frame.where(_SERVER).drop("protocol", "relay").join(relays, list(RUN))
    return own.select("relay", "protocol", hour_of(F.col(time)).alias("hour"), *values)


def _steps(connections: DataFrame, relays: DataFrame, runs: DataFrame) -> DataFrame:
    """Change of the number of open connections in an hour (``net``), and its highest rise above the start (``peak``).

    Each hour is added up on its own, so that hours can be processed in parallel; the number at the start of an hour is the
    sum of the hours before. A connection whose run was cut off ends with the last line of that run. A connection whose
    opening line is lost began when its closing line says. If the clock was set back meanwhile, so that a connection seems
    to end before it began, it was open for as long as the program measured.
    """
    ends = F.broadcast(runs.where(_SERVER).where("run_over").select(*RUN, F.col("last_at").alias("run_end")))
    own = connections.where(_SERVER).drop("protocol").join(relays, list(RUN)).join(ends, list(RUN), "left")
    duration_s = F.greatest(F.coalesce("duration_s", F.lit(0.0)), F.lit(0.0))
    began = F.coalesce("opened_at", F.col("closed_at") - duration_s)
    told = F.coalesce("closed_at", "run_end")
    ended = F.when(told < began, began + duration_s).otherwise(told)
    up, down = (
        F.struct(time.alias("at"), F.lit(step).cast("long").alias("step")) for time, step in ((began, 1), (ended, -1))
    )
    steps = (
        own.select("relay", "protocol", F.explode(F.array(up, down)).alias("one"))
        .select("relay", "protocol", hour_of(F.col("one.at")).alias("hour"), "one.*")
        .where("at is not null")
    )
    within = Window.partitionBy(*_GROUP).orderBy("at", "step")
    level = F.sum("step").over(within)
    return (
        steps.select(*_GROUP, "step", level.alias("level"))
        .groupBy(*_GROUP)
        .agg(F.sum("step").alias("net"), F.max("level").alias("peak"))
    )


def _build(inputs: Inputs) -> DataFrame:
    table = inputs.table
    return relay_hourly(inputs.events(), table("connections"), table("transports"), table("log_quality"))


RELAY_HOURLY: Final = Table(
    "relay_hourly",
    "One row for each relay and hour in which it wrote about connections, transports or refusals (server lines only).",
    (
        Column("relay", "string", "public key of the relay; its name where no line tells the key"),
        Column("protocol", "string", "what it speaks: dmsg, messaging, …"),
        Column("hour", "timestamp", "beginning of the hour, UTC"),
        Column("connections_opened", "long", "connections that finished their handshake"),
        Column("connections_closed", "long", "connections that ended"),
        Column("connections_open_max", "long", "most connections open at once, those opened in earlier hours included"),
        Column("handshakes_failed", "long", "connections that ended before their handshake did"),
        *percentile_columns("handshake_ms", "from the TCP connection to the end of the handshake", "ms", *_POINTS),
        Column("transports_opened", "long", "transports that were accepted"),
        Column("transports_closed", "long", "transports that ended after they had been accepted"),
        Column("transports_failed", "long", "transports and requests that ended with another CLOSE code than 0"),
        Column("refusals", "long", "refusals of any kind, as counted by the relay"),
        Column("bytes", "long", "data of the transports that ended in this hour, both directions", "bytes"),
        *percentile_columns("accept_ms", "from REQUEST to ACCEPT", "ms", *_POINTS),
        *percentile_columns("queue_bytes", "most ever queued for a transport that ended", "bytes", *_POINTS),
        Column("queue_bytes_max", "long", "most ever queued for any transport that ended", "bytes"),
        Column("date", "date", "UTC date of the hour"),
    ),
    _build,
)
