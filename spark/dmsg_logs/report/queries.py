"""The questions the report asks of the tables, in Spark's terms; each answer is a frame of a bounded size."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import reduce

import pandas as pd
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from dmsg_logs.report.data import (
    DAYS,
    LEAST_SCORE,
    POINTS,
    TOP_DIALS,
    TOP_KEYS,
    TOP_NODES,
    TOP_PATHS,
    TOP_REASONS,
    TOP_RELAYS,
    Reader,
    as_date,
)
from dmsg_logs.tables.transforms.common import (
    KEY_PATTERN,
    RUN,
    percentiles,
    spread,
    stands_for,
)

Frames = dict[str, pd.DataFrame]
#: How many hex digits of a relay's key name it in its own log lines.
NODE_DIGITS = 16


def _hours(table: DataFrame, since: int, until: int) -> DataFrame:
    at = F.unix_timestamp("hour")
    return table.where(_days(since, until)).where((at >= since) & (at < until)).withColumn("second", at)


def _days(since: int, until: int, column: str = "date") -> Column:
    return F.col(column).between(F.lit(as_date(since)), F.lit(as_date(until - 1)))


def _fetch(small: DataFrame, *order: str) -> pd.DataFrame:
    """Collect rows, which the caller has bounded, and sort them here: Spark would compute them twice to sort them."""
    found: pd.DataFrame = small.toPandas()
    return found.sort_values(list(order), na_position="first", ignore_index=True) if order else found


def _figures(*one_row_each: DataFrame) -> dict[str, float]:
    """The numbers in several one-row frames, by the names of their columns, with one query."""
    union: Callable[[DataFrame, DataFrame], DataFrame] = DataFrame.unionAll
    numbered = [
        each.select(F.lit(index).alias("frame"), F.array(*(F.col(name).cast("double") for name in each.columns)))
        for index, each in enumerate(one_row_each)
    ]
    found: dict[str, float] = {}
    for index, numbers in reduce(union, numbered).collect():
        found.update(zip(one_row_each[index].columns, numbers, strict=True))
    return found


def _bucket(second: str, step: int) -> Column:
    return (F.floor(F.col(second) / step) * step).cast("long").alias("at")


def _total(column: str, name: str | None = None) -> Column:
    return F.coalesce(F.sum(column), F.lit(0)).alias(name or column)


def _date(column: str, name: str) -> Column:
    return F.col(column).cast("date").cast("string").alias(name)


# --- the fleet -------------------------------------------------------------------------------------------------------


def account_totals(read: Reader) -> dict[str, float]:
    """Lines and files of everything ever ingested."""
    return _figures(_accounts(read))


def totals(read: Reader, since: int, until: int) -> dict[str, float]:
    """The same, lines lost or late over all nodes according to the logs, and single figures of the reported period."""
    return _figures(
        _accounts(read),
        read("log_quality").agg(
            F.countDistinct("node").alias("nodes"),
            *(_total(name) for name in ("gaps", "gap_lines", "late_lines", "events_dropped")),
            F.coalesce(F.sum((~F.col("ended")).cast("int")), F.lit(0)).alias("unended"),
        ),
        _hours(read("relay_hourly"), since, until).agg(
            F.countDistinct("relay").alias("relays"),
            _total("connections_opened", "connections"),
            _total("transports_opened", "transports"),
            _total("transports_failed"),
            _total("handshakes_failed"),
            _total("refusals"),
            _total("bytes"),
        ),
        _present(read, "connections", since, until).agg(F.countDistinct("remote").alias("clients")),
        _hours(read("envelopes_hourly"), since, until).agg(
            F.countDistinct("relay").alias("bus_relays"),
            F.coalesce(F.sum(F.col("received") + F.col("ingested")), F.lit(0)).alias("envelopes"),
        ),
        _present(read, "twin_sessions", since, until).agg(F.countDistinct("twin").alias("twins")),
        read("pair_latency").where(_days(since, until)).agg(_total("dials"), _total("dials_ok")),
        read("resumptions").where(_days(since, until)).agg(_total("resumptions")),
        read("abuse_candidates")
        .where(_days(since, until) & (F.col("score") >= LEAST_SCORE))
        .agg(
            F.countDistinct("key").alias("abuse_keys"),
            F.countDistinct(F.when(F.col("flagged"), F.col("key"))).alias("abuse_flagged"),
        ),
    )


def _present(read: Reader, name: str, since: int, until: int) -> DataFrame:
    """The connections, or sessions of twins, that relays had in the window, including those opened before it. An open one
    ends with the last line of its run: a relay that is killed and not started again does not say that its run is over."""
    runs = read("log_quality").select(*RUN, F.col("last_at").alias("run_end"))
    opened_within, still_open = _days(since, until), F.col("state") == "open"
    ended = F.when(still_open, F.col("run_end")).otherwise(F.col("closed_at"))
    return (
        read(name)
        .where((F.col("role") == "server") & (F.col("date") <= F.lit(as_date(until - 1))))
        .where(opened_within | still_open | (F.col("closed_at") >= since))
        .join(F.broadcast(runs), list(RUN), "left")
        .where(opened_within | F.isnull(ended) | (ended >= since))
    )


def _accounts(read: Reader) -> DataFrame:
    return read("accounts").agg(
        F.count_distinct("file").alias("files"),  # a file may have been taken in several times
        _total("lines", "lines_in"),
        *(_total(name) for name in ("good", "dup", "corrupt", "missing")),
    )


def relays(read: Reader, since: int, until: int) -> pd.DataFrame:
    """The relays with most traffic."""
    return _fetch(
        _hours(read("relay_hourly"), since, until)
        .groupBy("relay")
        .agg(
            F.array_join(F.array_sort(F.collect_set("protocol")), ", ").alias("protocol"),
            _total("connections_opened", "connections"),
            F.max("connections_open_max").alias("connections_max"),
            _total("transports_opened", "transports"),
            _total("transports_failed", "failed"),
            _total("refusals"),
            _total("bytes"),
            F.max("queue_bytes_max").alias("queue_max"),
        )
        .orderBy(F.desc("bytes"), "relay")
        .limit(TOP_RELAYS)
    )


def fleet(read: Reader, since: int, until: int, step: int) -> pd.DataFrame:
    """The load of all relays together; connections are the maximum of any hour."""
    hours = (
        _hours(read("relay_hourly"), since, until)
        .groupBy("second")
        .agg(
            *(_total(name) for name in ("bytes", "transports_opened", "transports_failed")),
            _total("connections_open_max"),
            F.countDistinct("relay").alias("relays"),
        )
    )
    buckets = hours.groupBy(_bucket("second", step)).agg(
        _total("bytes"),
        F.max("connections_open_max").alias("connections"),
        _total("transports_opened", "transports"),
        _total("transports_failed", "failed"),
        F.max("relays").alias("relays"),
    )
    return _fetch(buckets, "at")


def load(read: Reader, since: int, until: int, step: int, top: Sequence[str]) -> pd.DataFrame:
    """The load of each relay in ``top``."""
    buckets = (
        _hours(read("relay_hourly"), since, until)
        .where(F.col("relay").isin(list(top)))
        .groupBy("relay", _bucket("second", step))
        .agg(_total("bytes"), F.max("connections_open_max").alias("connections"))
    )
    return _fetch(buckets, "relay", "at")


def handshakes(read: Reader, since: int, until: int, top: Sequence[str]) -> pd.DataFrame:
    """The relays' own exact percentiles; a relay's connections carry only the start of its key, or its whole name."""
    nodes = [relay[:NODE_DIGITS] if re.match(KEY_PATTERN, relay) else relay for relay in top]
    named = pd.DataFrame({"relay": list(top), "node": nodes}, dtype=object)
    found = _fetch(
        _served(read("connections"), since, until)
        .where(F.col("node").isin(nodes))
        .groupBy("node")
        .agg(percentiles("handshake_ms", *POINTS))
        .select("node", *spread("handshake_ms", *POINTS, prefix="handshake_"))
    )
    return named.merge(found, on="node", how="left").drop(columns="node")


def accepts(read: Reader, since: int, until: int, top: Sequence[str]) -> pd.DataFrame:
    """The same of transports, and how many were refused."""
    return _fetch(
        _served(read("transports"), since, until)
        .where(F.col("server").isin(list(top)))
        .groupBy(F.col("server").alias("relay"))
        .agg(F.count(F.when(F.col("state") == "refused", 1)).alias("refused"), percentiles("accept_ms", *POINTS))
        .select("relay", "refused", *spread("accept_ms", *POINTS, prefix="accept_"))
    )


def _served(table: DataFrame, since: int, until: int) -> DataFrame:
    """Relays' own rows on connections or transports that were opened or refused in the window."""
    opened = F.coalesce("opened_at", "closed_at")
    return table.where(_days(since, until)).where((F.col("role") == "server") & (opened >= since) & (opened < until))


def latency_frames(read: Reader, since: int, until: int, step: int) -> Frames:
    """``latency`` of handshakes and accepts as relays measured them, of dials as clients did, and ``latency_total``."""
    ts = F.col("ts")
    dials = read("events").where(
        _days(since, until) & (ts >= since) & (ts < until) & (F.col("event") == "dial_finished") & F.col("ok")
    )
    asked = (
        ("handshake", _served(read("connections"), since, until), "opened_at", "handshake_ms"),
        ("accept", _served(read("transports"), since, until), "opened_at", "accept_ms"),
        ("dial", dials, "ts", "elapsed_ms"),
    )
    found = None
    for metric, table, second, value in asked:
        one = (
            table.where(F.col(value).isNotNull())
            .select(_bucket(second, step), value)
            .rollup("at")  # all buckets together have at = null
            .agg(F.count(value).alias("count"), percentiles(value, *POINTS))
            .where("count > 0")
            .select("at", F.lit(metric).alias("metric"), "count", *spread(value, *POINTS, prefix=""))
        )
        found = one if found is None else found.unionByName(one)
    assert found is not None
    both = _fetch(found, "metric", "at")
    whole = both["at"].isna()
    latency = both[~whole].astype({"at": "int64"}).reset_index(drop=True)
    return {"latency": latency, "latency_total": both[whole].reset_index(drop=True)}


# --- what went wrong -------------------------------------------------------------------------------------------------


def failures(read: Reader, since: int, until: int, step: int) -> pd.DataFrame:
    """Failures at relays; all but the most frequent reasons are added up as "other"."""
    failed = _hours(read("relay_failures"), since, until)
    kinds = failed.groupBy("what", "reason").agg(_total("count", "total"))
    common = kinds.orderBy(F.desc("total"), "what", "reason").limit(TOP_REASONS).select("what", "reason")
    named = failed.join(F.broadcast(common.withColumn("common", F.lit(True))), ["what", "reason"], "left").select(
        _bucket("second", step),
        F.when(F.col("common"), F.col("what")).otherwise("").alias("what"),
        F.when(F.col("common"), F.col("reason")).otherwise("other").alias("reason"),
        "count",
    )
    return _fetch(named.groupBy("at", "what", "reason").agg(_total("count")), "at", "what", "reason")


def dial_failures(read: Reader, since: int, until: int) -> pd.DataFrame:
    """Failed attempts; clients and percentiles are those of the day on which they were highest."""
    return _fetch(
        read("dial_failures")
        .where(_days(since, until))
        .groupBy("stage", "reason", F.coalesce("relay", F.lit("")).alias("relay"), "protocol")
        .agg(
            _total("attempts"),
            F.max("clients").alias("clients"),
            F.max("elapsed_ms_p50").alias("p50"),
            F.max("elapsed_ms_p99").alias("p99"),
        )
        .orderBy(F.desc("attempts"), "stage", "reason", "relay", "protocol")
        .limit(TOP_DIALS)
    )


def resumptions(read: Reader, since: int, until: int) -> pd.DataFrame:
    """Resumptions of each day, by reason."""
    return _fetch(
        read("resumptions")
        .where(_days(since, until))
        .groupBy(_date("date", "date"), "reason")
        .agg(_total("resumptions"), _total("transports"))
        .orderBy(F.desc("resumptions"), "date", "reason")
        .limit(TOP_REASONS * DAYS)
    )


def resumption_times(read: Reader, since: int, until: int) -> pd.DataFrame:
    """How long there was no path, by reason."""
    return _fetch(
        read("events")
        .where(_days(since, until) & (F.col("event") == "transport_resumed"))
        .groupBy("reason")
        .agg(F.count("*").alias("count"), percentiles("elapsed_ms", *POINTS), F.max("elapsed_ms").alias("max"))
        .select("reason", "count", *spread("elapsed_ms", *POINTS, prefix=""), "max")
        .orderBy(F.desc("count"), "reason")
        .limit(TOP_KEYS)
    )


# --- keys ------------------------------------------------------------------------------------------------------------


def abuse(read: Reader, since: int, until: int) -> pd.DataFrame:
    """Candidates: the days a key stood out added up; its score and the reason are those of its worst day."""
    return _fetch(
        read("abuse_candidates")
        .where(_days(since, until) & (F.col("score") >= LEAST_SCORE))
        .groupBy("key")
        .agg(
            F.countDistinct("date").alias("days"),
            F.max("relays").alias("relays"),
            *(_total(n) for n in ("refusals", "handshakes_failed", "abuse_closes", "dials", "dial_failures")),
            F.max(F.struct("score", F.col("date").cast("string"), "why")).alias("worst"),
            F.max("flagged").alias("flagged"),
        )
        .select("*", F.col("worst.score").alias("score"), F.col("worst.why").alias("why"))
        .drop("worst")
        .orderBy(F.desc("flagged"), F.desc("score"), "key")
        .limit(TOP_KEYS)
    )


def talkers(read: Reader, since: int, until: int) -> pd.DataFrame:
    """Keys that moved most data; peers are those of the day with most peers."""
    return _fetch(
        read("top_talkers")
        .where(_days(since, until))
        .groupBy("key")
        .agg(
            F.countDistinct("date").alias("days"),
            _total("bytes_sent", "sent"),
            _total("bytes_received", "received"),
            _total("bytes"),
            _total("transports"),
            F.max("peers").alias("peers"),
        )
        .orderBy(F.desc("bytes"), "key")
        .limit(TOP_KEYS)
    )


# --- the Reliable Message Bus ----------------------------------------------------------------------------------------


def bus(read: Reader, since: int, until: int, step: int) -> pd.DataFrame:
    """What happened to the envelopes that relays took."""
    ways = ("local", "stored", "federated", "refused")
    hours = _hours(read("envelopes_hourly"), since, until).groupBy(_bucket("second", step))
    found = _fetch(hours.agg(*(_total(way) for way in ways)), "at")
    return found.melt("at", var_name="way", value_name="count")


def bus_failures(read: Reader, since: int, until: int) -> pd.DataFrame:
    """Why envelopes went nowhere and sessions ended, the most frequent first."""
    failed = _hours(read("rmb_failures"), since, until).groupBy("what", "reason").agg(_total("count"))
    return _fetch(failed.orderBy(F.desc("count"), "what", "reason").limit(TOP_REASONS))


def federation(read: Reader, since: int, until: int) -> pd.DataFrame:
    """Pairs of relays, those with most failures first; the percentile is that of the worst hour."""
    pairs = (
        _hours(read("federation_hourly"), since, until)
        .groupBy("relay", "other")
        .agg(
            _total("attempts"),
            _total("failed"),
            F.max("elapsed_ms_p99").alias("p99"),
            F.max("failures_per_hour_max").alias("rate"),
        )
    )
    return _fetch(pairs.orderBy(F.desc("failed"), F.desc("attempts"), "relay", "other").limit(TOP_KEYS))


def calls(read: Reader, since: int, until: int) -> pd.DataFrame:
    """How calls ended; percentiles are those of the worst hour."""
    ends = (
        _hours(read("calls_hourly"), since, until)
        .groupBy("reason")
        .agg(_total("calls"), F.max("elapsed_ms_p50").alias("p50"), F.max("elapsed_ms_p99").alias("p99"))
    )
    return _fetch(ends.orderBy(F.desc("calls"), "reason").limit(TOP_REASONS))


# --- what comes, and what it rests on --------------------------------------------------------------------------------


def history(read: Reader, since: int, until: int, relays: Sequence[str]) -> pd.DataFrame:
    """Each relay's load for each day, and the fleet's as the relay ""."""
    daily = (
        _hours(read("relay_hourly"), since, until)
        .groupBy("relay", _date("date", "date"))
        .agg(_total("bytes"), _total("connections_opened", "connections"))
    )
    fleet = daily.groupBy("date").agg(_total("bytes"), _total("connections"))
    both = fleet.select(F.lit("").alias("relay"), "date", "bytes", "connections").unionByName(
        daily.where(F.col("relay").isin(list(relays)))
    )
    return _fetch(both, "relay", "date")


def forecast(read: Reader, relays: Sequence[str]) -> pd.DataFrame:
    """The expected load of relays, and of the fleet as the relay "": the sums of values and of ends of intervals."""
    ahead = read("capacity_forecast").withColumn("day", _date("day", "day"))
    sums = [
        *(_total(name) for name in ("value", "low", "high")),
        *(F.min(name).alias(name) for name in ("history_days", "method")),
    ]
    fleet = ahead.groupBy("metric", "day").agg(*sums).withColumn("relay", F.lit(""))
    some = ahead.where(F.col("relay").isin(list(relays))).groupBy("relay", "metric", "day").agg(*sums)
    both = fleet.unionByName(some)
    return _fetch(both, "relay", "metric", "day")


def discovery(read: Reader, since: int, until: int, step: int) -> pd.DataFrame:
    """Requests over time."""
    served = _hours(read("discovery_hourly"), since, until).groupBy(_bucket("second", step))
    return _fetch(served.agg(*(_total(name) for name in ("requests", "errors_4xx", "errors_5xx"))), "at")


def request_paths(read: Reader, since: int, until: int) -> pd.DataFrame:
    """Requests by method and path, with percentiles; a line for several requests counts as often, with their mean."""
    requests = read("events").where(_days(since, until) & (F.col("event") == "discovery_request"))
    paths = requests.groupBy("method", "path").agg(
        F.sum(stands_for()).alias("requests"),
        F.coalesce(F.sum(F.when(F.col("status").between(400, 499), stands_for())), F.lit(0)).alias("errors_4xx"),
        F.coalesce(F.sum(F.when(F.col("status") >= 500, stands_for())), F.lit(0)).alias("errors_5xx"),
        percentiles("elapsed_ms", *POINTS, times=stands_for()),
        F.max("elapsed_ms").alias("max"),
    )
    foremost = paths.orderBy(F.desc("requests"), "method", "path").limit(TOP_PATHS)
    return _fetch(foremost.select("*", *spread("elapsed_ms", *POINTS, prefix="")).drop("elapsed_ms_percentiles"))


def quality(read: Reader) -> pd.DataFrame:
    """Nodes, those that lost most first; lateness is that of a node's worst run."""
    lost = ("gaps", "gap_lines", "dup", "corrupt", "missing")
    nodes = (
        read("log_quality")
        .groupBy("role", "node")
        .agg(
            F.max("key").alias("key"),
            F.count("*").alias("runs"),
            *(_total(name) for name in ("files", "lines", *lost)),
            _total("late_lines", "late"),
            F.max("lateness_s_p50").alias("lateness_p50"),
            F.max("lateness_s_p99").alias("lateness_p99"),
            F.max("lateness_s_max").alias("lateness_max"),
            _total("events_dropped", "dropped"),
            F.coalesce(F.sum((~F.col("ended")).cast("int")), F.lit(0)).alias("unended"),
            F.min("first_at").alias("first_at"),
            F.max("last_at").alias("last_at"),
        )
        .withColumn("trouble", F.col("gap_lines") + F.col("corrupt") + F.col("missing") + F.col("dropped"))
    )
    return _fetch(nodes.orderBy(F.desc("trouble"), F.desc("lines"), "role", "node").limit(TOP_NODES))
