"""Transports as their servers and clients saw them, opening and closing joined."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dmsg_logs.tables.tabledef import Column, Inputs, Table
from dmsg_logs.tables.transforms.common import RUN, date_of, only, protocol_of, sessionise

OPENED: Final = "transport_opened"
CLOSED: Final = "transport_closed"
_KEYS: Final = (*RUN, "initiator", "responder", "conn", "protocol", "server", "transport_id")
_CLOSING: Final = (
    "ts",
    "reason",
    "code",
    "by",
    "duration_s",
    "bytes_in",
    "bytes_out",
    "queue_peak_bytes",
    "security",
)


def transports(events: DataFrame, runs: DataFrame) -> DataFrame:
    """The table ``transports`` from the lines and ``log_quality`` (for runs that are over).

    A resumed transport ends under another id and server than it was opened with. Its client's closing line (from version 2
    of that event on) tells both; the first id and server count here.
    """
    moved = F.col("opened_server") != ""
    lines = only(events, OPENED, CLOSED).select(
        *[name for name in _KEYS if name not in ("protocol", "server", "transport_id")],
        protocol_of(),
        F.when(moved, F.col("opened_server")).otherwise(F.col("server")).alias("server"),
        F.when(moved, F.col("opened_id")).otherwise(F.col("transport_id")).alias("transport_id"),
        *dict.fromkeys(["seq", "event", "accept_ms", *_CLOSING]),
    )
    paired = sessionise(lines, _KEYS, OPENED, CLOSED, _CLOSING)
    opening, closing = F.col("opening"), F.col("closing")
    opened_at = F.when(opening, F.col("ts"))
    over = runs.where("run_over").select(*RUN, F.lit(True).alias("over"))
    was_open = opening | (closing["duration_s"] > 0)
    state = F.when(closing.isNull(), "open").when(was_open, "closed").otherwise("refused")
    return paired.join(F.broadcast(over), list(RUN), "left").select(
        *RUN,
        "conn",
        "transport_id",
        "initiator",
        "responder",
        "server",
        "protocol",
        state.alias("state"),
        opened_at.alias("opened_at"),
        F.col("closing.ts").alias("closed_at"),
        F.col("closing.duration_s").alias("duration_s"),
        F.when(opening, F.col("accept_ms")).alias("accept_ms"),
        *[f"closing.{name}" for name in ("reason", "code", "by", "bytes_in", "bytes_out", "queue_peak_bytes")],
        F.coalesce("closing.security", "security").alias("security"),
        date_of(F.coalesce(opened_at, closing["ts"])).alias("date"),
        (opening & closing.isNull() & F.coalesce("over", F.lit(False))).alias("run_over"),
    )


def _build(inputs: Inputs) -> DataFrame:
    return transports(inputs.events(), inputs.table("log_quality"))


TRANSPORTS: Final = Table(
    "transports",
    "One row for each transport as one program saw it (server, initiator and responder each write their own).",
    (
        Column("role", "string", "what wrote the lines: server or client"),
        Column("node", "string", "short form of the writer's key, or its given name"),
        Column("boot", "string", "id of the writer's run"),
        Column("conn", "long", "number of the connection in that run; on a server the initiator's, on a client 0"),
        Column("transport_id", "long", "id on that connection when it was opened; used again for later transports"),
        Column("initiator", "string", "public key of the client that dialled"),
        Column("responder", "string", "public key of the client that was dialled"),
        Column("server", "string", "public key of the server in between when it was opened"),
        Column("protocol", "string", "protocol it is of: dmsg, messaging, …"),
        Column("state", "string", "closed; open: no closing line yet; refused: the request was never accepted"),
        Column("opened_at", "double", "when it was accepted; null for refused, or if the line is missing", "Unix s"),
        Column("closed_at", "double", "null for open", "Unix s"),
        Column("duration_s", "double", "how long it was open, as the writer measured it; 0 for refused", "s"),
        Column("accept_ms", "double", "from REQUEST to ACCEPT", "ms"),
        Column("reason", "string", "name of the CLOSE code"),
        Column("code", "long", "CLOSE code; 0 is a normal end"),
        Column("by", "string", "who ended it: initiator, responder, server, local or peer"),
        Column("bytes_in", "long", "data from the responder to the initiator; on a client, received", "bytes"),
        Column("bytes_out", "long", "data from the initiator to the responder; on a client, sent", "bytes"),
        Column("queue_peak_bytes", "long", "most ever queued for one of its ends; 0 on a client", "bytes"),
        Column("security", "string", "e2e, hop, or unknown where it cannot be seen"),
        Column("date", "date", "UTC date of the opening, or of the closing if that is all there is"),
        Column("run_over", "boolean", "open, but the run is over: the program was killed or the closing line is lost"),
    ),
    _build,
)
