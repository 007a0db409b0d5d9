"""Connections of servers, opening and closing joined."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dmsg_logs.tables.tabledef import Column, Inputs, Table
from dmsg_logs.tables.transforms.common import RUN, date_of, only, sessionise

OPENED: Final = "connection_opened"
CLOSED: Final = "connection_closed"
_KEYS: Final = (*RUN, "conn")
_CLOSING: Final = (
    "ts",
    "remote",
    "reason",
    "duration_s",
    "bytes_in",
    "bytes_out",
    "frames_in",
    "frames_out",
    "transports",
)


def connections(events: DataFrame, runs: DataFrame) -> DataFrame:
    """The table ``connections`` from the lines and ``log_quality`` (for runs that are over, and what they speak)."""
    columns = dict.fromkeys([*_KEYS, "seq", "event", "address", "handshake_ms", "extended", *_CLOSING])
    paired = sessionise(only(events, OPENED, CLOSED).select(*columns), _KEYS, OPENED, CLOSED, _CLOSING)
    opening, closing = F.col("opening"), F.col("closing")
    opened_at = F.when(opening, F.col("ts"))
    own = runs.where("run_over or protocol is not null").select(*RUN, "protocol", F.col("run_over").alias("over"))
    state = F.when(~opening, "unopened").when(closing.isNull(), "open").otherwise("closed")
    return paired.join(F.broadcast(own), list(RUN), "left").select(
        *_KEYS,
        F.coalesce("remote", "closing.remote").alias("remote"),
        F.when(opening, F.col("address")).alias("address"),
        "protocol",
        state.alias("state"),
        opened_at.alias("opened_at"),
        F.col("closing.ts").alias("closed_at"),
        F.col("closing.duration_s").alias("duration_s"),
        F.when(opening, F.col("handshake_ms")).alias("handshake_ms"),
        F.when(opening, F.col("extended")).alias("extended"),
        *[f"closing.{name}" for name in ("reason", "bytes_in", "bytes_out", "frames_in", "frames_out", "transports")],
        date_of(F.coalesce(opened_at, closing["ts"])).alias("date"),
        (opening & closing.isNull() & F.coalesce("over", F.lit(False))).alias("run_over"),
    )


def _build(inputs: Inputs) -> DataFrame:
    return connections(inputs.events(), inputs.table("log_quality"))


CONNECTIONS: Final = Table(
    "connections",
    "One row for each connection a server took: its opening and closing lines joined.",
    (
        Column("role", "string", "what wrote the lines: server"),
        Column("node", "string", "short form of the server's key, or its given name"),
        Column("boot", "string", "id of the server's run"),
        Column("conn", "long", "number of the connection in that run"),
        Column("remote", "string", "public key of the other side"),
        Column("address", "string", "network address of the other side; null if the opening line is missing"),
        Column("protocol", "string", "what the server speaks: dmsg, messaging, …"),
        Column("state", "string", "closed; open: no closing line yet; unopened: the opening line is missing"),
        Column("opened_at", "double", "end of the handshake; null for unopened", "Unix s"),
        Column("closed_at", "double", "null for open", "Unix s"),
        Column("duration_s", "double", "how long it was open, as the server measured it", "s"),
        Column("handshake_ms", "double", "from the TCP connection to the end of the handshake", "ms"),
        Column("extended", "boolean", "whether both sides speak the extension"),
        Column("reason", "string", "why it ended, as a short fixed text"),
        Column("bytes_in", "long", "received on the socket", "bytes"),
        Column("bytes_out", "long", "written to the socket", "bytes"),
        Column("frames_in", "long", "frames received"),
        Column("frames_out", "long", "frames sent"),
        Column("transports", "long", "transports that were open when it ended"),
        Column("date", "date", "UTC date of the opening, or of the closing if that is all there is"),
        Column("run_over", "boolean", "open, but the run is over: the program was killed or the closing line is lost"),
    ),
    _build,
)
