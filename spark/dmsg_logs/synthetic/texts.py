"""The event and the fixed texts of each kind of line, and the template that joins them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dmsg_logs.schemas import ENVELOPE, EVENTS
from dmsg_logs.synthetic.facts import CODES
from dmsg_logs.synthetic.fleet import DMSG, MESSAGING, End
from dmsg_logs.synthetic.timeline import Kind
from dmsg_logs.synthetic.traffic import Outcome

Columns = Mapping[str, Sequence[Any] | str]
_EMPTY: Final = {"str": '""', "int": "0", "float": "0.0", "bool": "false"}
#: The event each kind of line is.
EVENT_OF: Final = {
    Kind.STARTED: "server_started",
    Kind.DRAINED: "drained",
    Kind.STOPPED: "server_stopped",
    Kind.CONNECTION_OPENED: "connection_opened",
    Kind.CONNECTION_CLOSED: "connection_closed",
    Kind.HANDSHAKE_FAILED: "handshake_failed",
    Kind.RELAY_OPENED: "transport_opened",
    Kind.RELAY_CLOSED: "transport_closed",
    Kind.RELAY_NEVER_OPENED: "transport_closed",
    Kind.REFUSED: "refused",
    Kind.DROPPED: "events_dropped",
    Kind.DIAL: "dial_finished",
    Kind.INITIATOR_OPENED: "transport_opened",
    Kind.RESPONDER_OPENED: "transport_opened",
    Kind.RESUMED: "transport_resumed",
    Kind.INITIATOR_CLOSED: "transport_closed",
    Kind.RESPONDER_CLOSED: "transport_closed",
    Kind.SESSION_UP: "session_up",
    Kind.SESSION_DOWN: "session_down",
    Kind.SESSION_FAILED: "session_down",
    Kind.PUBLISHED: "entry_published",
    Kind.LOOKED_UP: "discovery_request",
    Kind.POSTED: "discovery_request",
    Kind.SERVERS_ASKED: "discovery_request",
    Kind.RANKS_LOADED: "ranks_loaded",
    Kind.SHIPPED: "file_shipped",
    Kind.TWIN_OPENED: "twin_session_opened",
    Kind.TWIN_CLOSED: "twin_session_closed",
    Kind.RELAY_JOINED: "twin_session_opened",
    Kind.RELAY_LEFT: "twin_session_closed",
    Kind.ROUTED: "envelopes_routed",
    Kind.ENVELOPE_FAILED: "envelope_failed",
    Kind.RATE_LIMITED: "rate_limited",
    Kind.FEDERATED: "federation_attempted",
    Kind.RANK_CHANGED: "relay_rank_changed",
    Kind.CALL: "call_finished",
}
#: Stage, reason and detail of a failed try, as a tree of attempts has them.
TRIED: Final = {
    Outcome.CONNECT_REFUSED: (
        "connect",
        "connection refused",
        "Connection was refused by other side: 111: Connection refused.",
    ),
    Outcome.CONNECT_TIMEOUT: ("connect", "timeout", "connect: timeout"),
    Outcome.CONNECTION_LOST: ("handshake", "connection lost", "Connection was closed cleanly."),
    Outcome.UNKNOWN_PEER: ("accept", "unknown_peer", "unknown peer"),
    Outcome.BUSY: ("accept", "busy", "busy"),
    Outcome.RATE_LIMITED: ("accept", "rate_limited", "rate limited"),
    Outcome.HANDSHAKE_TIMEOUT: ("accept", "handshake_timeout", "handshake timeout"),
    Outcome.REFUSED: ("accept", "refused", "refused"),
    Outcome.ACCESS_DENIED: ("accept", "access_denied", "access denied"),
    Outcome.NO_ENTRY: ("discovery", "no entry", "entry of public key is not found"),
    Outcome.UNAVAILABLE: ("discovery", "unavailable", "something unexpected happened: no answer"),
    Outcome.NO_COMMON_SERVER: ("discovery", "no common server", "the entry names no server to go through"),
    Outcome.LIE: ("accept", "handshake_timeout", "handshake timeout"),
}
#: Fields that are new in the current version of an event; programs of the older version do not write them.
ADDED: Final = dict.fromkeys(
    ("server_started", "transport_opened", "transport_closed", "dial_finished", "session_up", "session_down"),
    ("protocol",),
)
STAGES: Final = ("discovery", "connect", "handshake", "request", "accept")
DISCOVERY_OUTCOMES: Final = (Outcome.NO_ENTRY, Outcome.UNAVAILABLE, Outcome.NO_COMMON_SERVER)
REFUSALS: Final = {
    Outcome.UNKNOWN_PEER: "unknown_peer",
    Outcome.BUSY: "busy",
    Outcome.RATE_LIMITED: "rate_limited",
}
#: Stage and reason of a failed handshake at a relay of each protocol.
STRANGE: Final = {
    DMSG: (
        ("handshake", "message 1 does not open"),
        ("handshake", "timeout"),
        ("handshake", "closed by peer"),
        ("handshake", "message over the limit"),
    ),
    MESSAGING: (
        ("handshake", "not JSON"),
        ("handshake", "timeout"),
        ("handshake", "closed by peer"),
        ("handshake", "sig2 does not verify"),
    ),
}
NAMES: Final = {code: name for name, code in CODES.items()}
#: How a session ends: the reason in the relay's line and in the client's.
ENDS: Final = {
    End.DRAINED: ("server_draining", "server_draining"),
    End.BROKEN: ("closed by peer", "connection lost"),
    End.KILLED: ("", "connection lost"),
    End.CLIENT_STOPPED: ("closed by peer", "closed"),
    End.CLIENT_KILLED: ("closed by peer", ""),
    End.ABUSE: ("abuse", "closed by server"),
}
#: How envelopes, posts to other relays and calls of the Reliable Message Bus end; the first value is success.
FAILURES: Final = (
    "",
    "destination offline",
    "unknown twin destination",
    "message wrong source",
    "relay info is not set for this twin",
)
ATTEMPTS: Final = ("", "timeout", "connection refused", "answered 4xx")
CALLS: Final = ("", "timeout", "destination offline", "answered with an error", "unknown command")
NOT_FOUND: Final = "entry of public key is not found"
WRONG_TIME: Final = "entry validation error: previous entry timestamp is not set before current entry timestamp"
DOWN: Final = "something unexpected happened"
FAMILY: Final = "dmsg-discovery"


def template(event: str, envelope: Mapping[str, str], columns: Columns, *, older: bool) -> tuple[str, list[str]]:
    """A format for lines of one event and one run, and its columns in order."""
    members, names = [], []
    version = EVENTS[event].version
    added = ADDED.get(event, ()) if older and version > 1 else ()
    for each in ENVELOPE + EVENTS[event].columns:
        if each.name in added:
            continue
        given = columns.get(each.name)
        if each.name == "event":
            text = f'"{event}"'
        elif each.name == "v":
            text = str(version - 1 if added else version)
        elif each.name in envelope:
            text = envelope[each.name]
        elif given is None:
            text = _EMPTY[each.type]
        elif isinstance(given, str):
            text = json.dumps(given)
        else:
            names.append(each.name)
            text = {"str": '"%s"', "int": "%d", "float": "%r", "bool": "%s"}[each.type]
        members.append(f'"{each.name}":{text}')
    return "{" + ",".join(members) + "}", names
