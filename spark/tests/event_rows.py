"""Lines of the event log for tests: small lists of events as the frame ``read_events`` gives, and as files of it."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

from dmsg_logs.schemas import EVENTS, LINE
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DateType, DoubleType, LongType, StringType, StructField, StructType

#: A Monday, 00:00 UTC.
DAY = 1_772_409_600.0
BOOT = "b0" * 4

RELAY = "02" + "aa" * 32
OTHER_RELAY = "03" + "bb" * 32
ALICE = "02" + "a1" * 32
BOB = "03" + "b2" * 32
CAROL = "02" + "c3" * 32

EVENTS_SCHEMA = StructType(
    [
        *LINE.fields,
        StructField("raw", StringType()),
        StructField("date", DateType()),
        StructField("file", StringType()),
        StructField("batch", LongType()),
        StructField("landed_at", DoubleType()),
    ]
)
ACCOUNTS_SCHEMA = StructType(
    [
        *[StructField(name, StringType()) for name in ("file", "role", "node", "boot")],
        *[
            StructField(name, LongType())
            for name in ("number", "recorded", "lines", "good", "dup", "corrupt", "missing", "batch")
        ],
        StructField("landed_at", DoubleType()),
    ]
)

Event = tuple[str, Mapping[str, Any]]


def node_of(key: str) -> str:
    """How a log names a node."""
    return key[:16]


def line_rows(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Whole rows of events given as name and fields.

    What is not given: ``role`` by the kind of event, ``node`` the relay (Alice for clients), ``boot`` the same for all,
    ``seq`` counts up within a node's run, ``ts`` begins at ``DAY`` and goes up by a second for each line, ``landed_at``
    is a minute after ``ts``.
    """
    counts: dict[tuple[str, str], int] = {}
    rows = []
    for number, (name, fields) in enumerate(events):
        unknown = set(fields) - set(EVENTS_SCHEMA.names)
        if unknown:
            raise KeyError(f"{name}: {unknown}")
        row: dict[str, Any] = dict.fromkeys(EVENTS_SCHEMA.names)
        role = {
            "dial_finished": "client",
            "session_up": "client",
            "session_down": "client",
            "transport_resumed": "client",
        }
        row.update(event=name, v=EVENTS[name].version, role=role.get(name, "server"), boot=BOOT, ts=DAY + number)
        if name == "discovery_request":
            row.update(role="discovery", node="discovery")
        row.update(fields)
        row["node"] = row["node"] or node_of(ALICE if row["role"] == "client" else RELAY)
        run = row["node"], row["boot"]
        if row["seq"] is None:
            row["seq"] = counts.get(run, 0)
        counts[run] = row["seq"] + 1
        row["ts"] = float(row["ts"])
        row["date"] = datetime.datetime.fromtimestamp(row["ts"], datetime.timezone.utc).date()
        row["file"] = row["file"] or f"role={row['role']}/{row['node']}-{row['boot']}-000000-9.jsonl.zst"
        row["batch"] = row["batch"] or 1
        row["landed_at"] = row["landed_at"] or row["ts"] + 60
        rows.append(row)
    return rows


def events(spark: SparkSession, lines: Iterable[Event]) -> DataFrame:
    """The frame ``read_events`` gives, of a few events."""
    rows = line_rows(lines)
    return spark.createDataFrame([tuple(row[name] for name in EVENTS_SCHEMA.names) for row in rows], EVENTS_SCHEMA)


def accounts(spark: SparkSession, rows: Iterable[Mapping[str, Any]]) -> DataFrame:
    """The frame ``read_accounts`` gives; amounts that are not given are 0."""
    zero = {"number": 0, "lines": 0, "good": 0, "dup": 0, "corrupt": 0, "missing": 0, "batch": 1, "landed_at": DAY}
    found = [{**dict.fromkeys(ACCOUNTS_SCHEMA.names), **zero, **row} for row in rows]
    return spark.createDataFrame([tuple(row[name] for name in ACCOUNTS_SCHEMA.names) for row in found], ACCOUNTS_SCHEMA)


def rows_of(frame: DataFrame, *columns: str) -> list[dict[str, Any]]:
    """The rows of a frame as dictionaries, in a fixed order; only ``columns`` if any are named."""
    found = frame.select(*columns) if columns else frame
    return sorted((row.asDict(recursive=True) for row in found.collect()), key=repr)
