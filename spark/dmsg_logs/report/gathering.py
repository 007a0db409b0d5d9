"""The report's data, aggregated in Spark from the pipeline's tables.

Percentiles over the whole fleet are exact: they are computed from the single connections, transports, dials and
requests, because percentiles of hours or of relays cannot be combined.

Spark is imported when it is used: pages are made of the data without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dmsg_logs.report.data import DAYS, FRAMES, Reader, ReportData, bucket_s, empty_frames
from dmsg_logs.runtime.together import workers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Tables with a row for single connections, transports or pairs; the others have a few for each hour, run, or key and day.
LARGE: Final = ("connections", "transports", "pair_latency")


def collect(spark: SparkSession, tables: str) -> ReportData:
    """The report's data from the tables under the URI ``tables``."""
    from dmsg_logs.ingest.store import read_accounts, read_events
    from dmsg_logs.runtime.session import UNCOMPILED, session_with
    from dmsg_logs.tables.generations import read_table

    quick = session_with(spark, UNCOMPILED)

    @functools.cache
    def read(name: str) -> DataFrame:
        if name == "events":
            return read_events(spark, tables)
        if name == "accounts":
            return read_accounts(quick, tables)
        return read_table(spark if name in LARGE else quick, tables, name)

    return gather(read)


def gather(read: Reader) -> ReportData:
    """The same from any source of tables. Reads, aggregates and fetches each table once or a few times."""
    from dmsg_logs.report import queries
    from dmsg_logs.report.window import window

    since, until = window(read, DAYS)
    if not until:
        return ReportData(totals=queries.account_totals(read))
    step = bucket_s(since, until)
    span = (read, since, until)
    frames = empty_frames()

    def top() -> list[str]:
        return [str(relay) for relay in first.result()["relay"]]

    asked: dict[str, Callable[[], Any]] = {
        "latency": lambda: queries.latency_frames(*span, step),  # the longest ones first
        "paths": lambda: queries.request_paths(*span),
        "accepts": lambda: queries.accepts(*span, top()),
        "handshakes": lambda: queries.handshakes(*span, top()),
        "totals": lambda: queries.totals(*span),
        "fleet": lambda: queries.fleet(*span, step),
        "load": lambda: queries.load(*span, step, top()),
        "failures": lambda: queries.failures(*span, step),
        "dial_failures": lambda: queries.dial_failures(*span),
        "resumptions": lambda: queries.resumptions(*span),
        "resumption_times": lambda: queries.resumption_times(*span),
        "abuse": lambda: queries.abuse(*span),
        "talkers": lambda: queries.talkers(*span),
        "history": lambda: queries.history(*span, top()),
        "forecast": lambda: queries.forecast(read, top()),
        "bus": lambda: queries.bus(*span, step),
        "bus_failures": lambda: queries.bus_failures(*span),
        "federation": lambda: queries.federation(*span),
        "calls": lambda: queries.calls(*span),
        "discovery": lambda: queries.discovery(*span, step),
        "quality": lambda: queries.quality(read),
    }
    with workers() as pool:
        first = pool.submit(queries.relays, *span)  # the first to begin, since others wait for it
        begun = {name: pool.submit(call) for name, call in asked.items()}
        found = {name: each.result() for name, each in begun.items()}
    relays = first.result()
    totals = found.pop("totals")
    frames.update(found.pop("latency"))
    for latency in (found.pop("handshakes"), found.pop("accepts")):
        relays = relays.merge(latency, on="relay", how="left")
    frames.update(found, relays=relays)
    checked = {name: frames[name][list(columns)] for name, columns in FRAMES.items()}
    return ReportData(since, until, step, totals, checked)
