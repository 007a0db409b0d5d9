"""The schema of the structured event log: every event the package writes, declared once. Pure.

An event is a dataclass with slots; it is not frozen, because making a frozen one costs three times as much. Its fields
are primitives (``str``, ``int``, ``float``, ``bool``) and each carries its meaning in the annotation, so that the table
in the documentation and the schema of the log pipeline are generated from here (:func:`describe`). A field ``reason`` is
a text of a closed list, :class:`~dmsg.eventlog.reasons.Reason`.

The maker of an event gives facts only. The log adds the envelope (:data:`ENVELOPE`): when, who, and a key
``(node, boot, seq)`` by which readers recognise a line that is delivered twice. Keys are hex text. Times in fields
are durations; the unit is part of the name. No event ever holds a payload, a secret, or a text that another side sent. For the
name that a twin gives its connection an event has a digest (:func:`digest`), and for relays of the Reliable Message Bus the
host names of the registry, checked.

``protocol`` is the protocol that the entry of a relay names (:ref:`spec-entry-protocol`): "dmsg", "messaging", … A client may
speak several at once, under one key and in one log, so its lines about relays and transports have this field. A relay speaks
one protocol; the lines of its start and of its transports have the field. Lines of versions without the field are about
"dmsg". The Reliable Message Bus, "rmb", has events of its own, because its twins are numbers and its relays are hosts:
neither is a key. Its relays have the role "server", its peers and clients the role "client".

Rule for changes: a field is never renamed, removed or given another type; a new field is added at the end with a
default, and ``VERSION`` goes up by one.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, NamedTuple, get_args, get_origin, get_type_hints

from dmsg.eventlog.reasons import Reason

Primitive = str | int | float | bool


class FieldDoc(NamedTuple):
    """One column of an event: its name, its primitive type, what it means, and whether its texts are those of ``Reason``."""

    name: str
    type: type[Primitive]
    meaning: str
    is_reason: bool = False


class EventDoc(NamedTuple):
    """One event: its name in the log, its version, what it means and its columns, in the order they are written."""

    name: str
    version: int
    meaning: str
    fields: tuple[FieldDoc, ...]


@dataclass(slots=True)
class Event:
    """Base of all events. ``NAME`` is the value of ``event`` in a line, ``VERSION`` the value of ``v``."""

    NAME: ClassVar[str] = ""
    VERSION: ClassVar[int] = 1


def digest(name: str | None) -> str:
    """The digest that an event has for the name another side gave its connection: 16 hex digits; empty for no name."""
    return "" if name is None else hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]


#: The columns every line carries besides the event's own.
ENVELOPE: Final = (
    FieldDoc("event", str, "name of the event"),
    FieldDoc("v", int, "version of the event's fields"),
    FieldDoc("ts", float, "Unix time in seconds at which the log took the event"),
    FieldDoc("role", str, "what wrote it: server, client, discovery or shipper"),
    FieldDoc("node", str, "which entity wrote it: the short form of its public key, or a given name"),
    FieldDoc("boot", str, "random id of this run of the program"),
    FieldDoc("seq", int, "number of the event in this run, from 0, without gaps"),
)


# --- a server's or client's life -------------------------------------------------------------------------------------


@dataclass(slots=True)
class ServerStarted(Event):
    """A server or discovery listens, or a shipper, or a peer of the Reliable Message Bus, has started."""

    NAME = "server_started"
    VERSION = 2
    public_key: Annotated[str, "key of the server; empty for others"] = ""
    address: Annotated[str, "address it publishes or listens on; empty for a shipper"] = ""
    version: Annotated[str, "version of the program"] = ""
    protocol: Annotated[str, "what it speaks with clients; empty for a discovery or shipper"] = ""


@dataclass(slots=True)
class ServerStopped(Event):
    """A server, discovery, shipper or peer has stopped; the last event of a run that was not killed."""

    NAME = "server_stopped"
    reason: Annotated[Reason, "why, as a short fixed text"] = Reason.NONE
    duration_s: Annotated[float, "how long it ran"] = 0.0


@dataclass(slots=True)
class Drained(Event):
    """A draining server has no transport left, or stopped waiting for them."""

    NAME = "drained"
    elapsed_ms: Annotated[float, "how long draining took"] = 0.0
    transports: Annotated[int, "transports that were still open when it ended"] = 0


# --- connections -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ConnectionOpened(Event):
    """A connection finished its handshake."""

    NAME = "connection_opened"
    conn: Annotated[int, "number of the connection in this run"]
    remote: Annotated[str, "key of the other side"]
    address: Annotated[str, "network address of the other side"]
    handshake_ms: Annotated[float, "from the TCP connection to the end of the handshake"]
    extended: Annotated[bool, "whether both sides speak the extension on this connection"]


@dataclass(slots=True)
class ConnectionClosed(Event):
    """A connection that had been opened has ended."""

    NAME = "connection_closed"
    conn: Annotated[int, "number of the connection in this run"]
    remote: Annotated[str, "key of the other side"]
    reason: Annotated[Reason, "why, as a short fixed text"]
    duration_s: Annotated[float, "how long it was open"]
    bytes_in: Annotated[int, "bytes received on the socket"]
    bytes_out: Annotated[int, "bytes written to the socket"]
    frames_in: Annotated[int, "frames received"]
    frames_out: Annotated[int, "frames sent"]
    transports: Annotated[int, "transports that were open when it ended"]


@dataclass(slots=True)
class HandshakeFailed(Event):
    """A connection ended before its handshake did; above some lines a second, one line stands for several."""

    NAME = "handshake_failed"
    VERSION = 2
    address: Annotated[str, "network address of the other side; empty if the line stands for several"]
    stage: Annotated[str, "how far it came"]
    reason: Annotated[Reason, "why, as a short fixed text"]
    elapsed_ms: Annotated[float, "from the TCP connection to the failure; the mean if there were several"]
    count: Annotated[int, "failures this line stands for"] = 1


# --- transports ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TransportOpened(Event):
    """A transport was accepted."""

    NAME = "transport_opened"
    VERSION = 2
    conn: Annotated[int, "number of the connection in this run; on a server, the initiator's"]
    transport_id: Annotated[int, "transport id on that connection"]
    initiator: Annotated[str, "key of the client that dialled"]
    responder: Annotated[str, "key of the client that was dialled"]
    server: Annotated[str, "key of the server in between"]
    accept_ms: Annotated[float, "from REQUEST to ACCEPT"]
    security: Annotated[str, "e2e, hop, or unknown where it cannot be seen"]
    protocol: Annotated[str, "protocol of the transport"] = ""


@dataclass(slots=True)
class TransportClosed(Event):
    """A transport ended, or a request for one was never accepted."""

    NAME = "transport_closed"
    VERSION = 3
    conn: Annotated[int, "number of the connection in this run; on a server, the initiator's"]
    transport_id: Annotated[int, "transport id on that connection"]
    initiator: Annotated[str, "key of the client that dialled"]
    responder: Annotated[str, "key of the client that was dialled"]
    server: Annotated[str, "key of the server in between"]
    reason: Annotated[Reason, "name of the CLOSE code"]
    code: Annotated[int, "CLOSE code"]
    by: Annotated[str, "who ended it: initiator, responder, server, local or peer"]
    duration_s: Annotated[float, "how long it was open; 0 if it was never accepted"]
    bytes_in: Annotated[int, "data bytes from the responder to the initiator; on a client, received"]
    bytes_out: Annotated[int, "data bytes from the initiator to the responder; on a client, sent"]
    queue_peak_bytes: Annotated[int, "most bytes ever queued for one of its ends"]
    security: Annotated[str, "e2e, hop, or unknown where it cannot be seen"]
    opened_id: Annotated[int, "transport id it was opened with; another one after it was resumed over another path"] = 0
    opened_server: Annotated[str, "key of the server it was opened through; another one if it was resumed"] = ""
    protocol: Annotated[str, "protocol of the transport"] = ""


@dataclass(slots=True)
class TransportResumed(Event):
    """An end-to-end transport goes on over another path; its initiator writes this."""

    NAME = "transport_resumed"
    transport_id: Annotated[int, "transport id on the new connection"]
    initiator: Annotated[str, "key of the client that dialled"]
    responder: Annotated[str, "key of the client that was dialled"]
    server: Annotated[str, "key of the server now in between"]
    reason: Annotated[Reason, "why the path before ended, as a short fixed text"]
    elapsed_ms: Annotated[float, "how long there was no path"]


@dataclass(slots=True)
class Refused(Event):
    """A client was refused, once a second for each client and reason; above some lines a second, one is for several."""

    NAME = "refused"
    conn: Annotated[int, "number of the connection in this run; 0 if it had none yet"]
    remote: Annotated[str, "key of the client, or its address if the key is not known yet; empty if there were several"]
    what: Annotated[str, "what was refused: connection, request, frame, transport, or post of another relay"]
    reason: Annotated[Reason, "which limit or rule, as a short fixed text"]
    count: Annotated[int, "refusals this line stands for"]


# --- clients ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class DialFinished(Event):
    """A dial ended, well or not."""

    NAME = "dial_finished"
    VERSION = 3
    target: Annotated[str, "key that was dialled"]
    server: Annotated[str, "key of the server it goes through; empty on failure"]
    ok: Annotated[bool, "whether there is a transport now"]
    reason: Annotated[Reason, "why not, as a short fixed text; empty on success"]
    elapsed_ms: Annotated[float, "how long the dial took"]
    attempts: Annotated[str, "JSON text: a list of the steps that failed, each with stage, server, elapsed_ms, reason"]
    security: Annotated[str, "e2e or hop; empty on failure"]
    initiator: Annotated[str, "key that dialled"] = ""
    protocol: Annotated[str, "protocol of the client that dialled"] = ""


@dataclass(slots=True)
class SessionUp(Event):
    """A client's session with a server is up."""

    NAME = "session_up"
    VERSION = 2
    server: Annotated[str, "key of the server"]
    reason: Annotated[Reason, "why it was made: first, dial, reconnect or pool"]
    duration_s: Annotated[float, "how long it took to get it up"]
    attempt: Annotated[int, "attempts it took, from 1"]
    protocol: Annotated[str, "protocol of the session"] = ""


@dataclass(slots=True)
class SessionDown(Event):
    """A client's session with a server is down, or could not be made."""

    NAME = "session_down"
    VERSION = 2
    server: Annotated[str, "key of the server"]
    reason: Annotated[Reason, "why, as a short fixed text"]
    duration_s: Annotated[float, "how long it was up; 0 if it never was"]
    attempt: Annotated[int, "attempts since it was last up"]
    protocol: Annotated[str, "protocol of the session"] = ""


# --- discovery -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class EntryPublished(Event):
    """A client or server wrote its entry to discovery, or failed to."""

    NAME = "entry_published"
    sequence: Annotated[int, "sequence of the entry"]
    kind: Annotated[str, "client or server"]
    elapsed_ms: Annotated[float, "how long it took"]
    ok: Annotated[bool, "whether discovery acknowledged it"]
    reason: Annotated[Reason, "why not, as a short fixed text; empty on success"]


@dataclass(slots=True)
class DiscoveryRequest(Event):
    """Discovery answered a request; above some lines a second, one line stands for several."""

    NAME = "discovery_request"
    VERSION = 2
    method: Annotated[str, "HTTP method"]
    path: Annotated[
        str, "fixed name of the family of paths, never the path itself; unknown for a path that there is not"
    ]
    status: Annotated[int, "HTTP status of the answer"]
    elapsed_ms: Annotated[float, "how long the answer took; the mean if there were several"]
    reason: Annotated[Reason, "why it failed, as a short fixed text; empty on success"]
    key: Annotated[str, "key the request is about; empty if there is none, or several"]
    count: Annotated[int, "requests this line stands for"] = 1


@dataclass(slots=True)
class RanksLoaded(Event):
    """A discovery took a new document of relay ranks, or refused one for a new reason."""

    NAME = "ranks_loaded"
    ok: Annotated[bool, "whether it is in force now"]
    reason: Annotated[Reason, "why not, as a short fixed text; empty on success"]
    issuer: Annotated[str, "key that signed it; empty on failure"]
    issued: Annotated[int, "Unix time in seconds at which it was made; 0 on failure"]
    relays: Annotated[int, "relays it names; 0 on failure"]


# --- the Reliable Message Bus ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class TwinSessionOpened(Event):
    """A twin's session with a relay is up; the relay and the twin's program each write it."""

    NAME = "twin_session_opened"
    conn: Annotated[int, "number of the session in this run"]
    twin: Annotated[int, "number of the twin whose session it is"]
    connection: Annotated[str, "digest of the session's name; empty if it has none"]
    address: Annotated[str, "network address of the other side; on a client, host of the relay"]
    handshake_ms: Annotated[float, "from the TCP connection to the end of the handshake"]


@dataclass(slots=True)
class TwinSessionClosed(Event):
    """A twin's session has ended; on a client, also one that did not come up, without a line of its opening."""

    NAME = "twin_session_closed"
    conn: Annotated[int, "number of the session in this run"]
    twin: Annotated[int, "number of the twin whose session it was"]
    connection: Annotated[str, "digest of the session's name; empty if it has none"]
    reason: Annotated[Reason, "why, as a short fixed text"]
    duration_s: Annotated[float, "how long it was open; 0 if it never was"]
    envelopes_in: Annotated[int, "envelopes received"]
    envelopes_out: Annotated[int, "envelopes sent"]
    bytes_in: Annotated[int, "bytes of the envelopes received"]
    bytes_out: Annotated[int, "bytes of the envelopes sent"]


@dataclass(slots=True)
class EnvelopesRouted(Event):
    """What a relay did with envelopes since the line before: one line in 10 s at most, none if there were none."""

    NAME = "envelopes_routed"
    received: Annotated[int, "envelopes that sessions sent"]
    ingested: Annotated[int, "envelopes that other relays posted"]
    local: Annotated[int, "envelopes handed to a session that was connected"]
    stored: Annotated[int, "envelopes put into the store for a session that was not"]
    fetched: Annotated[int, "envelopes taken from the store for a session that came"]
    federated: Annotated[int, "envelopes given to federation"]
    expired: Annotated[int, "envelopes left out because their time was over"]
    refused: Annotated[
        int, "envelopes that went nowhere, expired ones too; lines envelope_failed and rate_limited tell why"
    ]
    bytes: Annotated[int, "bytes of the envelopes received and ingested"]


@dataclass(slots=True)
class EnvelopeFailed(Event):
    """An envelope failed, once a second for each twin and reason; above some lines a second, one is for several."""

    NAME = "envelope_failed"
    twin: Annotated[int, "number of the twin that sent it; 0 if it is unknown, or several"]
    reason: Annotated[Reason, "why, as a short fixed text"]
    count: Annotated[int, "envelopes this line stands for"] = 1


@dataclass(slots=True)
class RateLimited(Event):
    """A twin sent more than the relay's limit allows, once a second for each twin."""

    NAME = "rate_limited"
    twin: Annotated[int, "number of the twin; 0 if there were several"]
    count: Annotated[int, "envelopes that were dropped"] = 1


@dataclass(slots=True)
class FederationAttempted(Event):
    """A relay posted an envelope to another one, or failed to; above some lines a second, one line stands for several."""

    NAME = "federation_attempted"
    relay: Annotated[str, "host of the other relay; empty if there were several"]
    ok: Annotated[bool, "whether it took the envelope"]
    reason: Annotated[Reason, "why not, as a short fixed text; empty on success"]
    elapsed_ms: Annotated[float, "how long the attempt took; the mean if there were several"]
    count: Annotated[int, "attempts this line stands for"] = 1


@dataclass(slots=True)
class RelayRankChanged(Event):
    """Another relay's rate of failures is no longer what it was: it failed once more, or a failure is forgotten."""

    NAME = "relay_rank_changed"
    relay: Annotated[str, "host of the other relay"]
    failures_per_hour: Annotated[float, "failures within the window of the ranks, an hour"]


@dataclass(slots=True)
class CallFinished(Event):
    """A call of another twin's command ended, well or not; above some lines a second, one line stands for several."""

    NAME = "call_finished"
    twin: Annotated[int, "number of the twin that was called; 0 if there were several"]
    ok: Annotated[bool, "whether it was answered, and not with an error"]
    reason: Annotated[Reason, "why not, as a short fixed text; empty on success"]
    elapsed_ms: Annotated[float, "how long the call took; the mean if there were several"]
    count: Annotated[int, "calls this line stands for"] = 1


# --- the log itself --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class EventsDropped(Event):
    """The log could not keep up and left events out; they had no ``seq``."""

    NAME = "events_dropped"
    count: Annotated[int, "events left out since the line before"]


@dataclass(slots=True)
class EventsDiscarded(Event):
    """Finished files were deleted before they were shipped, because the directory had reached its limit."""

    NAME = "events_discarded"
    files: Annotated[int, "files deleted since the last line of this kind"]
    lines: Annotated[int, "lines in them, as their names have them"]
    bytes: Annotated[int, "their size"]


# --- shipping the log ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class FileShipped(Event):
    """An attempt to ship a file of the log ended, well or not; never written about the shipper's own files."""

    NAME = "file_shipped"
    name: Annotated[str, "path of the file below the target; on failure, below the event directory"]
    lines: Annotated[int, "lines in the file, as its name has them"]
    bytes: Annotated[int, "size of the file"]
    elapsed_ms: Annotated[float, "how long the attempt took"]
    attempt: Annotated[int, "which attempt on this file it was in this run, from 1"]
    ok: Annotated[bool, "whether the target has the file, verified, and it is gone from here"]
    reason: Annotated[Reason, "why not, as a short fixed text; empty on success"]


#: Name in the log -> class, of every event. (``dataclass`` makes a second class with slots; the first class may still be
#: among the subclasses.)
EVENTS: dict[str, type[Event]] = {cls.NAME: cls for cls in Event.__subclasses__() if "__slots__" in vars(cls)}


def describe_event(cls: type[Event]) -> EventDoc:
    """The declaration of one event class. Raises ``TypeError`` for a field without a meaning or of another type."""
    hints = get_type_hints(cls, include_extras=True)
    fields = []
    for each in dataclasses.fields(cls):
        hint: Any = hints[each.name]
        arguments = get_args(hint)
        if get_origin(hint) is not Annotated or arguments[0] not in (str, int, float, bool, Reason):
            raise TypeError(f"{cls.__name__}.{each.name} is not an annotated primitive")
        is_reason = arguments[0] is Reason
        fields.append(FieldDoc(each.name, str if is_reason else arguments[0], arguments[1], is_reason))
    meaning = (cls.__doc__ or "").partition("\n")[0]
    return EventDoc(cls.NAME, cls.VERSION, meaning, tuple(fields))


def describe() -> tuple[EventDoc, ...]:
    """Every event with its meaning and columns, in the order they are declared: the source of the generated tables."""
    return tuple(describe_event(cls) for cls in EVENTS.values())
