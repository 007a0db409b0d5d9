"""Sessions of twins with relays of the Reliable Message Bus, as relays and twins saw them, opening and closing joined."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dmsg_logs.tables.tabledef import Column, Inputs, Table
from dmsg_logs.tables.transforms.common import RUN, date_of, only, sessionise

OPENED: Final = "twin_session_opened"
CLOSED: Final = "twin_session_closed"
_KEYS: Final = (*RUN, "conn")
_AMOUNTS: Final = ("envelopes_in", "envelopes_out", "bytes_in", "bytes_out")
_CLOSING: Final = ("ts", "twin", "connection", "reason", "duration_s", *_AMOUNTS)


def twin_sessions(events: DataFrame, runs: DataFrame) -> DataFrame:
    """The table ``twin_sessions`` from the lines and ``log_quality`` (for runs that are over)."""
    columns = dict.fromkeys([*_KEYS, "seq", "event", "address", "handshake_ms", *_CLOSING])
    paired = sessionise(only(events, OPENED, CLOSED).select(*columns), _KEYS, OPENED, CLOSED, _CLOSING)
    opening, closing = F.col("opening"), F.col("closing")
    opened_at = F.when(opening, F.col("ts"))
    over = runs.where("run_over").select(*RUN, F.lit(True).alias("over"))
    never = ~opening & (F.col("role") == "client") & (closing["duration_s"] == 0)
    state = F.when(closing.isNull(), "open").when(opening, "closed").when(never, "failed").otherwise("unopened")
    return paired.join(F.broadcast(over), list(RUN), "left").select(
        *_KEYS,
        F.coalesce("twin", "closing.twin").alias("twin"),
        F.coalesce("connection", "closing.connection").alias("connection"),
        F.when(opening, F.col("address")).alias("address"),
        state.alias("state"),
        opened_at.alias("opened_at"),
        F.col("closing.ts").alias("closed_at"),
        F.col("closing.duration_s").alias("duration_s"),
        F.when(opening, F.col("handshake_ms")).alias("handshake_ms"),
        *[f"closing.{name}" for name in ("reason", *_AMOUNTS)],
        date_of(F.coalesce(opened_at, closing["ts"])).alias("date"),
        (opening & closing.isNull() & F.coalesce("over", F.lit(False))).alias("run_over"),
    )


def _build(inputs: Inputs) -> DataFrame:
    return twin_sessions(inputs.events(), inputs.table("log_quality"))


TWIN_SESSIONS: Final = Table(
    "twin_sessions",
    "One row for each session of a twin with a relay of the Reliable Message Bus as one program saw it (the relay and "
    "the twin each write their own).",
    (
        Column("role", "string", "what wrote the lines: server or client"),
        Column("node", "string", "given name of the writer"),
        Column("boot", "string", "id of the writer's run"),
        Column("conn", "long", "number of the session in that run"),
        Column("twin", "long", "number of the twin"),
        Column("connection", "string", "digest of the session's name; empty if it has none"),
        Column("address", "string", "network address of the other side; on a client, host of the relay"),
        Column(
            "state",
            "string",
            "closed; open: no closing line yet; failed: it did not come up; unopened: the opening line is missing",
        ),
        Column("opened_at", "double", "end of the handshake; null for failed and unopened", "Unix s"),
        Column("closed_at", "double", "null for open", "Unix s"),
        Column("duration_s", "double", "how long it was open, as the writer measured it; 0 for failed", "s"),
        Column("handshake_ms", "double", "from the TCP connection to the end of the handshake", "ms"),
        Column("reason", "string", "why it ended, as a short fixed text"),
        Column("envelopes_in", "long", "envelopes received"),
        Column("envelopes_out", "long", "envelopes sent"),
        Column("bytes_in", "long", "of the envelopes received", "bytes"),
        Column("bytes_out", "long", "of the envelopes sent", "bytes"),
        Column("date", "date", "UTC date of the opening, or of the closing if that is all there is"),
        Column("run_over", "boolean", "open, but the run is over: the program was killed or the closing line is lost"),
    ),
    _build,
)
