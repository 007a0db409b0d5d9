"""Lines of the event log for tests: small lists of events as the frame ``read_events`` gives, and as files of it."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DateType, DoubleType, LongType, StringType, StructField, StructType

from dmsg_logs.ingest.claims import bits, word
from dmsg_logs.schemas import EVENTS, LINE

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
        row["date"] = datetime.datetime.fromtimestamp(row["ts"], datetime.timezone.utc).date()
        row["file"] = row["file"] or f"role={row['role']}/{row['node']}-{row['boot']}-000000-9.jsonl.zst"
        row["batch"] = row["batch"] or 1
        row["landed_at"] = row["landed_at"] or row["ts"] + 60
        rows.append(row)
    return rows


def events(spark: SparkSession, lines: Iterable[Event]) -> DataFrame:
    """The frame ``read_events`` gives, of a few events."""
    return _frame(spark, line_rows(lines), EVENTS_SCHEMA)


def keys_of(lines: DataFrame) -> DataFrame:
    """The frame ``read_keys`` gives, of these lines."""
    return lines.groupBy("node", "boot", word()).agg(bits())


def accounts(spark: SparkSession, rows: Iterable[Mapping[str, Any]]) -> DataFrame:
    """The frame ``read_accounts`` gives; amounts that are not given are 0."""
    zero = {"number": 0, "lines": 0, "good": 0, "dup": 0, "corrupt": 0, "missing": 0, "batch": 1, "landed_at": DAY}
    found = [{**dict.fromkeys(ACCOUNTS_SCHEMA.names), **zero, **row} for row in rows]
    return _frame(spark, found, ACCOUNTS_SCHEMA)


def _frame(spark: SparkSession, rows: Iterable[Mapping[str, Any]], schema: StructType) -> DataFrame:
    def value(row: Mapping[str, Any], field: StructField) -> Any:
        found = row[field.name]
        return float(found) if isinstance(field.dataType, DoubleType) and found is not None else found

    return spark.createDataFrame([tuple(value(row, field) for field in schema.fields) for row in rows], schema)


def rows_of(frame: DataFrame, *columns: str) -> list[dict[str, Any]]:
    """The rows of a frame as dictionaries, in a fixed order; only ``columns`` if any are named."""
    found = frame.select(*columns) if columns else frame
    return sorted((row.asDict(recursive=True) for row in found.collect()), key=repr)


def random_fleet(seed: int, sessions: int) -> list[Event]:
    """Lines of two relays and four clients over two days: transports whose ids are used again, refused requests, lost
    lines, connections and failures. Times are in order within a run."""
    random = Random(seed)
    relays, clients = (RELAY, OTHER_RELAY), (ALICE, BOB, CAROL, "03" + "d4" * 32)
    script: list[tuple[float, str, dict[str, Any]]] = []
    for relay in relays:
        script.append((0.0, "server_started", {"node": node_of(relay), "public_key": relay}))
    busy: dict[tuple[str, int, int], float] = {}
    for number in range(sessions):
        relay, (initiator, responder) = random.choice(relays), random.sample(clients, 2)
        start, length = random.uniform(1, 172_000), random.expovariate(1 / 600)
        conn, id_ = random.randrange(1, 4), 2 * random.randrange(40)
        both = {"node": node_of(relay), "conn": conn}
        ends = {**both, "transport_id": id_, "initiator": initiator, "responder": responder, "server": relay}
        if busy.get((relay, conn, id_), 0) > start:
            continue
        busy[relay, conn, id_] = start + length + 1
        fate = random.random()
        end = {"reason": "normal", "code": 0, "by": "initiator", "duration_s": length, "queue_peak_bytes": number % 977}
        end |= {"bytes_in": random.randrange(10**6), "bytes_out": random.randrange(10**6)}
        if fate < 0.1:
            refused = {"code": 1, "reason": "refused", "duration_s": 0.0, "bytes_in": 0, "bytes_out": 0}
            script.append((start, "transport_closed", {**ends, **end, **refused}))
            continue
        if fate > 0.13:
            script.append((start, "transport_opened", {**ends, "accept_ms": random.uniform(1, 300)}))
        if fate < 0.95:
            end |= {"code": 13, "reason": "peer_gone"} if fate > 0.85 else {}
            script.append((start + length, "transport_closed", {**ends, **end}))
        peer = {**both, "conn": 100 + number, "remote": initiator}
        script.append((start, "connection_opened", {**peer, "handshake_ms": random.uniform(1, 90), "extended": True}))
        script.append((start + length, "connection_closed", {**peer, "reason": "closed by peer", "duration_s": length}))
        if fate > 0.9:
            script.append((start, "refused", {**peer, "what": "request", "reason": "busy", "count": number % 7 + 1}))
            script.append((start, "handshake_failed", {"node": node_of(relay), "reason": "timeout", "elapsed_ms": 1.0}))
    script.sort(key=lambda one: one[0])
    return [(name, {**fields, "ts": DAY + at}) for at, name, fields in script]
