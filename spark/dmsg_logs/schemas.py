"""The lines of the event log: their envelope, the columns of each event, and the reasons they may give.

A copy, because this package must run where the package that writes the logs is not installed; a test of the project
compares the two. Fields are only ever added, at the end of an event: a line of an older version has ``null`` in newer
columns, and a line newer than this table keeps its unknown fields in ``raw``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pyspark.sql.types import BooleanType, DataType, DoubleType, LongType, StringType, StructField, StructType

#: The Spark type of each primitive a field can have.
SPARK_TYPES: Final[dict[str, DataType]] = {
    "str": StringType(),
    "int": LongType(),
    "float": DoubleType(),
    "bool": BooleanType(),
}


class Column(NamedTuple):
    """One field of a line: its name and the name of its primitive type (a key of ``SPARK_TYPES``)."""

    name: str
    type: str


class EventSchema(NamedTuple):
    """One event: its version and its own fields, in the order they are written."""

    version: int
    columns: tuple[Column, ...]


def _columns(text: str) -> tuple[Column, ...]:
    return tuple(Column(*word.split(":")) for word in text.split())


#: The fields every line carries.
ENVELOPE: Final = _columns("event:str v:int ts:float role:str node:str boot:str seq:int")

#: Values of ``reason`` in events and in the steps of a dial; any other reason is written as ``other``.
REASONS: Final = (
    "",
    "other",
    "stopped",
    "uploads were abandoned",
    "normal",
    "refused",
    "unknown_peer",
    "busy",
    "rate_limited",
    "slow_consumer",
    "abuse",
    "bad_id",
    "malformed",
    "downgrade",
    "unsupported",
    "handshake_timeout",
    "integrity",
    "peer_gone",
    "server_draining",
    "deadline",
    "access_denied",
    "no_such_service",
    "unknown",
    "too many connections",
    "connections_per_address",
    "connects_per_address",
    "connects_per_network",
    "half_open",
    "half_open_per_address",
    "handshakes",
    "handshakes_per_address",
    "handshakes_per_network",
    "requests_per_target",
    "evicted",
    "replaced",
    "too short",
    "out of sequence",
    "does not open",
    "message 1 does not open",
    "message 2 does not open",
    "message 3 does not open",
    "message out of turn",
    "message over the limit",
    "no cookie",
    "silent",
    "timeout",
    "no OK in time",
    "frame before OK",
    "second OK",
    "unknown type",
    "payload over the limit",
    "REQUEST for an id in use",
    "malformed resume",
    "TLV list over the limit",
    "TLV list is cut",
    "TLV given twice",
    "not JSON",
    "no line feed",
    "unknown version",
    "malformed initiator",
    "malformed responder",
    "malformed nonce",
    "malformed sig1",
    "malformed sig2",
    "malformed accepted",
    "not an echo",
    "not our key",
    "signed too early",
    "sig1 does not verify",
    "sig2 does not verify",
    "no channel id",
    "first frame not recognised",
    "closed",
    "closed by peer",
    "closed by server",
    "connection lost",
    "given up",
    "refused by server",
    "server under load",
    "NonceExhausted",
    "LocalProtocolError",
    "unavailable",
    "no entry",
    "no common server",
    "server has no entry",
    "entry is not a server's",
    "entry has no usable address",
    "server is not pinned and there is no discovery",
    "not on the relay list",
    "speaks another protocol",
    "network in use already",
    "connection refused",
    "host not found",
    "unreachable",
    "no file descriptor is free",
    "server connection lost",
    "request rejected",
    "accept check failed",
    "the factory built no protocol",
    "no attempt was made",
    "first",
    "reconnect",
    "moved",
    "ServerLost",
    "something unexpected happened",
    "entry of public key is not found",
    "error bad input",
    "invalid signature",
    "too many requests",
    "access is forbidden",
    "entry is older than one seen before",
    "server address is not global",
    "entry validation error: entry has no version",
    "entry validation error: entry has no signature",
    "entry validation error: entry has neither client or server field",
    "entry validation error: entry Keys is nil",
    "entry validation error: new entry has non-zero sequence",
    "entry validation error: sequence field of new entry is not sequence of old entry + 1",
    "entry validation error: previous entry timestamp is not set before current entry timestamp",
    "client gone",
    "cancelled",
    "unreadable",
    "too_long",
    "not_json",
    "wrong_format",
    "wrong_version",
    "bad_field",
    "too_many_relays",
    "untrusted",
    "bad_signature",
    "from_the_future",
    "expired",
    "rolled_back",
    "failed",
    "damaged",
    "conflict",
    "mismatch",
    "no_such_place",
    "no_space",
    "denied",
    "no token",
    "token malformed",
    "token expired",
    "token lives too long",
    "token from the future",
    "token for another relay",
    "token does not verify",
    "unknown twin",
    "registry failed",
    "upgrade refused",
    "no answer",
    "the answer is not HTTP/1.1",
    "the answer's head is too long",
    "keepalive",
    "masked",
    "not masked",
    "length in too many bytes",
    "message too long",
    "message too slow",
    "reserved bit",
    "unknown opcode",
    "fragmented control frame",
    "long control frame",
    "continuation of nothing",
    "message within a message",
    "text message",
    "too many frames without data",
    "close code",
    "not UTF-8",
    "exceeded rate limits, dropping message",
    "message wrong source",
    "message with missing destination",
    "unknown twin destination",
    "relay info is not set for this twin",
    "destination offline",
    "message has expired",
    "remote relay rejected permanently: destination offline",
    "remote relay rejected permanently: self twin not found!",
    "remote relay rejected permanently: relay is not set for this twin",
    "envelope malformed",
    "failed to route message to peer",
    "failed to get twin information",
    "message is too large",
    "relay is overloaded, try again later",
    "TLS failed",
    "answered 4xx",
    "answered 5xx",
    "answered otherwise",
    "not signed",
    "unknown relay",
    "time is off",
    "not our twin",
    "not connected",
    "answered with an error",
    "unknown command",
    "no message",
    "wrong destination",
    "unsigned source",
    "bad signature",
    "replayed",
    "plain",
    "no sender key",
    "no public key",
    "encryption",
)

#: Name of the event -> its version and fields.
EVENTS: Final[dict[str, EventSchema]] = {
    "server_started": EventSchema(
        2,
        _columns("public_key:str address:str version:str protocol:str"),
    ),
    "server_stopped": EventSchema(
        1,
        _columns("reason:str duration_s:float"),
    ),
    "drained": EventSchema(
        1,
        _columns("elapsed_ms:float transports:int"),
    ),
    "connection_opened": EventSchema(
        1,
        _columns("conn:int remote:str address:str handshake_ms:float extended:bool"),
    ),
    "connection_closed": EventSchema(
        1,
        _columns(
            "conn:int remote:str reason:str duration_s:float bytes_in:int bytes_out:int frames_in:int "
            "frames_out:int transports:int"
        ),
    ),
    "handshake_failed": EventSchema(
        2,
        _columns("address:str stage:str reason:str elapsed_ms:float count:int"),
    ),
    "transport_opened": EventSchema(
        2,
        _columns(
            "conn:int transport_id:int initiator:str responder:str server:str accept_ms:float security:str protocol:str"
        ),
    ),
    "transport_closed": EventSchema(
        3,
        _columns(
            "conn:int transport_id:int initiator:str responder:str server:str reason:str code:int by:str "
            "duration_s:float bytes_in:int bytes_out:int queue_peak_bytes:int security:str "
            "opened_id:int opened_server:str protocol:str"
        ),
    ),
    "transport_resumed": EventSchema(
        1,
        _columns("transport_id:int initiator:str responder:str server:str reason:str elapsed_ms:float"),
    ),
    "refused": EventSchema(
        1,
        _columns("conn:int remote:str what:str reason:str count:int"),
    ),
    "dial_finished": EventSchema(
        3,
        _columns(
            "target:str server:str ok:bool reason:str elapsed_ms:float attempts:str security:str initiator:str "
            "protocol:str"
        ),
    ),
    "session_up": EventSchema(
        2,
        _columns("server:str reason:str duration_s:float attempt:int protocol:str"),
    ),
    "session_down": EventSchema(
        2,
        _columns("server:str reason:str duration_s:float attempt:int protocol:str"),
    ),
    "entry_published": EventSchema(
        1,
        _columns("sequence:int kind:str elapsed_ms:float ok:bool reason:str"),
    ),
    "discovery_request": EventSchema(
        2,
        _columns("method:str path:str status:int elapsed_ms:float reason:str key:str count:int"),
    ),
    "ranks_loaded": EventSchema(
        1,
        _columns("ok:bool reason:str issuer:str issued:int relays:int"),
    ),
    "twin_session_opened": EventSchema(
        1,
        _columns("conn:int twin:int connection:str address:str handshake_ms:float"),
    ),
    "twin_session_closed": EventSchema(
        1,
        _columns(
            "conn:int twin:int connection:str reason:str duration_s:float envelopes_in:int envelopes_out:int "
            "bytes_in:int bytes_out:int"
        ),
    ),
    "envelopes_routed": EventSchema(
        1,
        _columns(
            "received:int ingested:int local:int stored:int fetched:int federated:int expired:int refused:int bytes:int"
        ),
    ),
    "envelope_failed": EventSchema(
        1,
        _columns("twin:int reason:str count:int"),
    ),
    "rate_limited": EventSchema(
        1,
        _columns("twin:int count:int"),
    ),
    "federation_attempted": EventSchema(
        1,
        _columns("relay:str ok:bool reason:str elapsed_ms:float count:int"),
    ),
    "relay_rank_changed": EventSchema(
        1,
        _columns("relay:str failures_per_hour:float"),
    ),
    "call_finished": EventSchema(
        1,
        _columns("twin:int ok:bool reason:str elapsed_ms:float count:int"),
    ),
    "events_dropped": EventSchema(
        1,
        _columns("count:int"),
    ),
    "events_discarded": EventSchema(
        1,
        _columns("files:int lines:int bytes:int"),
    ),
    "file_shipped": EventSchema(
        1,
        _columns("name:str lines:int bytes:int elapsed_ms:float attempt:int ok:bool reason:str"),
    ),
}


def _struct(columns: tuple[Column, ...]) -> StructType:
    return StructType([StructField(each.name, SPARK_TYPES[each.type]) for each in columns])


def event_struct(name: str) -> StructType:
    """The whole line of one event, envelope first; ``KeyError`` for an unknown event."""
    return _struct(ENVELOPE + EVENTS[name].columns)


def _union() -> tuple[Column, ...]:
    seen: dict[str, Column] = {each.name: each for each in ENVELOPE}
    for event in EVENTS.values():
        for each in event.columns:
            if seen.setdefault(each.name, each).type != each.type:
                raise TypeError(f"{each.name} is declared with two types")
    return tuple(seen.values())


#: Every field of every event, each once: a field of one name has one type wherever it occurs.
ALL_COLUMNS: Final = _union()
#: The same as a schema for Spark's JSON reader.
LINE: Final = _struct(ALL_COLUMNS)
#: The columns that tell one line from another.
KEY: Final = ("node", "boot", "seq")
