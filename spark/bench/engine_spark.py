"""The work in Spark: the ingest of ``dmsg_logs`` as it is, then two tables from what it gives."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from bench.shape import (
    ACCOUNTS,
    ALONE,
    EARLIEST_S,
    GOOD,
    HOURLY,
    LATEST_S,
    PATTERN,
    QUARANTINE,
    TRANSPORTS,
    Task,
    summary,
)
from bench.stages import stage


def clean(spark: Any, task: Task) -> dict[str, int]:
    """Stage ``clean``. Its results lie where readers of the tables find them."""
    from dmsg_logs.ingest.batches import ingest

    done = ingest(spark, str(task.zone), task.part("tables"))
    facts = asdict(done)
    return summary(*(facts[name] for name in ("files", "lines_in", "good", "dup", "corrupt", "missing")))


def tables(spark: Any, task: Task) -> dict[str, int]:
    """Stage ``tables``."""
    from pyspark.sql import functions as F

    from dmsg_logs.ingest import store
    from dmsg_logs.tables.transforms.common import sessionise

    events = store.read_events(spark, task.part("tables")).where("role = 'server'")
    keys = ("node", "boot", "conn", "transport_id")
    closing = ("ts", "code", "bytes", "duration_s")
    lines = events.where("event in ('transport_opened', 'transport_closed')").select(
        *keys,
        *("seq", "event", "initiator", "responder", "server", "ts", "accept_ms", "code", "duration_s"),
        (F.col("bytes_in") + F.col("bytes_out")).alias("bytes"),
    )
    opening = F.col("opening")
    sessionise(lines, keys, "transport_opened", "transport_closed", closing).select(
        *keys,
        *("initiator", "responder", "server", "accept_ms"),
        F.when(F.col("closing").isNull(), "open").otherwise("closed").alias("state"),
        F.when(opening, F.col("ts")).alias("opened_at"),
        F.col("closing.ts").alias("closed_at"),
        *[f"closing.{name}" for name in closing[1:]],
    ).write.option("compression", "zstd").parquet(task.part(TRANSPORTS))

    def of(name: str, value: Any = 1) -> Any:
        return F.when(F.col("event") == name, value)

    points = F.array(F.lit(0.5), F.lit(0.95), F.lit(0.99))
    moved = F.col("bytes_in") + F.col("bytes_out")
    failed = (F.col("event") == "transport_closed") & (F.col("code") != 0)
    events.groupBy("node", F.floor(F.col("ts") / 3600).alias("hour")).agg(
        F.count(of("connection_opened")).alias("connections_opened"),
        F.count(of("connection_closed")).alias("connections_closed"),
        F.count(of("handshake_failed")).alias("handshakes_failed"),
        F.count(of("transport_opened")).alias("transports_opened"),
        F.count(F.when(failed, 1)).alias("transports_failed"),
        F.coalesce(F.sum(of("refused", F.col("count"))), F.lit(0)).alias("refusals"),
        F.coalesce(F.sum(of("transport_closed", moved)), F.lit(0)).alias("bytes"),
        F.percentile(of("transport_opened", F.col("accept_ms")), points).alias("accept_ms"),
        F.percentile(of("transport_closed", F.col("queue_peak_bytes")), points).alias("queue_bytes"),
    ).write.option("compression", "zstd").parquet(task.part(HOURLY))
    return {name: spark.read.parquet(task.part(name)).count() for name in (TRANSPORTS, HOURLY)}


def alone(spark: Any, task: Task) -> dict[str, int]:
    """Stage ``reader + writer``: what Spark's own JSON reader and Parquet writer take for the same files, and nothing of
    ours: no line is counted, checked or compared, and only those of no possible date are kept out. The JVM is warm."""
    from pyspark.sql import functions as F

    from dmsg_logs.schemas import LINE

    spark.conf.set("spark.sql.files.openCostInBytes", "4096")  # few tasks, and no sorting by date, as in the ingest
    spark.conf.set("spark.sql.maxConcurrentOutputFileWriters", "24")
    read = spark.read.schema(LINE).json(f"{task.zone}/{PATTERN}").where(F.col("ts").between(EARLIEST_S, LATEST_S))
    dated = read.withColumn("date", F.date_from_unix_date(F.floor(F.col("ts") / 86_400).cast("int")))
    dated.write.option("compression", "zstd").partitionBy("date").parquet(task.part("alone"))
    return {}


def export(spark: Any, task: Task) -> None:
    """Not measured: what the check compares, under the names the other engines give it."""
    from pyspark.sql import functions as F

    from dmsg_logs.ingest import store

    where = task.part("tables")
    keys = ("node", "boot", "seq", "date", "raw")
    store.read_events(spark, where).select(*keys).write.parquet(task.part(GOOD) + "_keys")
    store.read_quarantine(spark, where).write.parquet(task.part(QUARANTINE))
    names = ("file", "recorded", "lines", "good", "dup", "corrupt", "missing")
    whole = F.concat(F.lit(f"{task.zone}/"), F.col("file"))
    store.read_accounts(spark, where).select(*names).withColumn("file", whole).write.parquet(task.part(ACCOUNTS))


def main(arguments: list[str]) -> None:
    """One process: all stages."""
    task = Task.from_arguments(arguments)
    with stage("start"):
        from dmsg_logs.runtime.session import build_session

        task.out.mkdir(parents=True)
        spark = build_session("bench", {"spark.master": f"local[{task.cores}]"})
    with stage("clean") as results:
        results.update(clean(spark, task))
    with stage("tables") as results:
        results.update(tables(spark, task))
    with stage(ALONE) as results:
        results.update(alone(spark, task))
    with stage("export"):
        export(spark, task)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
