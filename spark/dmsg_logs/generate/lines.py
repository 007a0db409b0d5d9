"""Lines as the event log writes them: member for member, in the order of the schema, floats in their shortest form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from dmsg_logs.generate.facts import CODES, NEVER_OPENED_FROM, Facts
from dmsg_logs.generate.fleet import End, Ints, public_key
from dmsg_logs.generate.timeline import Kind, Timeline, World
from dmsg_logs.generate.traffic import TRIES, Outcome, refusals
from dmsg_logs.schemas import ENVELOPE, EVENTS

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
_STAGES: Final = ("discovery", "connect", "handshake", "request", "accept")
_DISCOVERY_OUTCOMES: Final = (Outcome.NO_ENTRY, Outcome.UNAVAILABLE, Outcome.NO_COMMON_SERVER)
_REFUSALS: Final = {
    Outcome.UNKNOWN_PEER: "unknown_peer",
    Outcome.BUSY: "busy",
    Outcome.RATE_LIMITED: "rate_limited",
}
_STRANGE: Final = (
    ("handshake", "message 1 does not open"),
    ("handshake", "timeout"),
    ("handshake", "closed by peer"),
    ("handshake", "message over the limit"),
)
_NAMES: Final = {code: name for name, code in CODES.items()}
_ENDS: Final = {
    End.DRAINED: ("server_draining", "server draining"),
    End.BROKEN: ("closed by peer", "Connection to the other side was lost in a non-clean fashion."),
    End.KILLED: ("", "Connection to the other side was lost in a non-clean fashion."),
    End.CLIENT_STOPPED: ("closed by peer", "Connection was closed cleanly."),
    End.CLIENT_KILLED: ("closed by peer", ""),
    End.ABUSE: ("abuse", "Connection was closed cleanly."),
}
_NOT_FOUND: Final = "entry of public key is not found"
_WRONG_TIME: Final = "entry validation error: previous entry timestamp is not set before current entry timestamp"
_DOWN: Final = "something unexpected happened"
_FAMILY: Final = "dmsg-discovery"

Columns = Mapping[str, Sequence[Any] | str]


class Scribe:
    """Makes text of lines of a :class:`Timeline`."""

    def __init__(self, world: World, timeline: Timeline, facts: Facts, seed: int) -> None:
        self._world = world
        self._timeline = timeline
        self._facts = facts
        self._keys = np.array([node.key for node in world.fleet.nodes], object)
        self._addresses = np.array([node.address for node in world.fleet.nodes], object)
        self._ghosts = np.array([public_key("dmsg-logs", seed, "ghost", number) for number in range(64)], object)
        self._makers: dict[Kind, Callable[[Ints], Columns]] = {
            Kind.STARTED: self._started,
            Kind.DRAINED: self._drained,
            Kind.STOPPED: self._stopped,
            Kind.CONNECTION_OPENED: self._connection_opened,
            Kind.CONNECTION_CLOSED: self._connection_closed,
            Kind.HANDSHAKE_FAILED: self._handshake_failed,
            Kind.RELAY_OPENED: self._relay_opened,
            Kind.RELAY_CLOSED: self._relay_closed,
            Kind.RELAY_NEVER_OPENED: self._never_opened,
            Kind.REFUSED: self._refused,
            Kind.DROPPED: lambda ref: {"count": world.drops.count[ref].tolist()},
            Kind.DIAL: self._dial,
            Kind.INITIATOR_OPENED: lambda ref: self._opened(ref, facts.transport_id),
            Kind.RESPONDER_OPENED: lambda ref: self._opened(ref, facts.responder_id),
            Kind.RESUMED: self._resumed,
            Kind.INITIATOR_CLOSED: lambda ref: self._closed(ref, initiator=True),
            Kind.RESPONDER_CLOSED: lambda ref: self._closed(ref, initiator=False),
            Kind.SESSION_UP: self._session_up,
            Kind.SESSION_DOWN: self._session_down,
            Kind.SESSION_FAILED: self._session_failed,
            Kind.PUBLISHED: self._published,
            Kind.LOOKED_UP: self._looked_up,
            Kind.POSTED: self._posted,
            Kind.SERVERS_ASKED: self._servers_asked,
        }

    def write(self, first: int, last: int) -> list[str]:
        """Lines ``first`` to ``last`` (exclusive), all of one run, without their ends."""
        timeline = self._timeline
        run = self._world.fleet.runs[int(timeline.run[first])]
        node = self._world.fleet.nodes[run.node]
        envelope = {"role": f'"{node.role}"', "node": f'"{node.name}"', "boot": f'"{run.boot}"'}
        kinds, refs, ts = timeline.kind[first:last], timeline.ref[first:last], timeline.ts[first:last]
        start = first - int(timeline.first[timeline.run[first]])
        lines: list[str] = [""] * (last - first)
        for number in np.unique(kinds).tolist():
            kind = Kind(number)
            rows = np.flatnonzero(kinds == number)
            columns = {**self._makers[kind](refs[rows].astype(np.int64)), "ts": ts[rows].tolist()}
            columns["seq"] = (rows + start).tolist()
            template, names = _template(EVENT_OF[kind], envelope, columns)
            for row, values in zip(rows.tolist(), zip(*(columns[name] for name in names), strict=True), strict=True):
                lines[row] = template % values
        return lines

    # --- a relay's and discovery's life ------------------------------------------------------------------------------

    def _started(self, ref: Ints) -> Columns:
        nodes = [self._world.fleet.nodes[self._world.fleet.runs[one].node] for one in ref.tolist()]
        return {"public_key": [one.key for one in nodes], "address": [one.address for one in nodes], "version": "0.1.0"}

    def _drained(self, ref: Ints) -> Columns:
        return {"elapsed_ms": (ref * 1.25 + 12.0).tolist(), "transports": (ref % 3).tolist()}

    def _stopped(self, ref: Ints) -> Columns:
        runs = [self._world.fleet.runs[one] for one in ref.tolist()]
        return {"reason": "stopped", "duration_s": [one.end - one.start for one in runs]}

    # --- connections -------------------------------------------------------------------------------------------------

    def _connection_opened(self, ref: Ints) -> Columns:
        sessions = self._world.sessions
        return {
            "conn": sessions.conn[ref].tolist(),
            "remote": self._keys[sessions.client[ref]].tolist(),
            "address": self._addresses[sessions.client[ref]].tolist(),
            "handshake_ms": sessions.handshake_ms[ref].tolist(),
            "extended": ["true" if one % 10 else "false" for one in sessions.client[ref].tolist()],
        }

    def _connection_closed(self, ref: Ints) -> Columns:
        sessions, facts = self._world.sessions, self._facts
        return {
            "conn": sessions.conn[ref].tolist(),
            "remote": self._keys[sessions.client[ref]].tolist(),
            "reason": [_ENDS[End(one)][0] for one in sessions.kind[ref].tolist()],
            "duration_s": (sessions.end - sessions.start)[ref].tolist(),
            "bytes_in": facts.session_in[ref].tolist(),
            "bytes_out": facts.session_out[ref].tolist(),
            "frames_in": facts.frames_in[ref].tolist(),
            "frames_out": facts.frames_out[ref].tolist(),
            "transports": facts.still_open[ref].tolist(),
        }

    def _handshake_failed(self, ref: Ints) -> Columns:
        strangers = self._world.strangers
        whys = [_STRANGE[one] for one in strangers.why[ref].tolist()]
        return {
            "address": [
                self._addresses[one] if one >= 0 else f"203.0.{-one // 250}.{-one % 250}"
                for one in strangers.source[ref].tolist()
            ],
            "stage": [one[0] for one in whys],
            "reason": [one[1] for one in whys],
            "elapsed_ms": strangers.elapsed_ms[ref].tolist(),
        }

    def _refused(self, ref: Ints) -> Columns:
        dials = self._world.dials
        dial, outcome = ref // TRIES, dials.outcome[ref // TRIES, ref % TRIES]
        return {
            "conn": self._conns(ref).tolist(),
            "remote": self._keys[dials.initiator[dial]].tolist(),
            "what": "request",
            "reason": [_REFUSALS[Outcome(one)] for one in outcome.tolist()],
            "count": refusals(outcome, dial).tolist(),
        }

    def _conns(self, tries: Ints) -> Ints:
        """Number of the connection a try was made on."""
        dials, index = self._world.dials, self._world.index
        dial, step = tries // TRIES, tries % TRIES
        at = dials.at[dial] + dials.look_up_ms[dial] / 1000
        found = index.find(dials.initiator[dial], dials.relay[dial, step], at)
        return np.where(found >= 0, self._world.sessions.conn[np.maximum(found, 0)], 0)

    # --- transports --------------------------------------------------------------------------------------------------

    def _ends(self, segment: Ints) -> dict[str, Sequence[Any] | str]:
        dials, segments = self._world.dials, self._world.segments
        dial = segments.dial[segment]
        return {
            "initiator": self._keys[dials.initiator[dial]].tolist(),
            "responder": self._keys[dials.responder[dial]].tolist(),
            "server": self._keys[segments.relay[segment]].tolist(),
        }

    def _relay_opened(self, ref: Ints) -> Columns:
        segments = self._world.segments
        return {
            **self._ends(ref),
            "conn": self._world.sessions.conn[segments.session[ref]].tolist(),
            "transport_id": self._facts.transport_id[ref].tolist(),
            "accept_ms": segments.accept_ms[ref].tolist(),
            "security": "unknown",
        }

    def _relay_closed(self, ref: Ints) -> Columns:
        segments, facts = self._world.segments, self._facts
        by = np.where(facts.by_server[ref], "server", np.where(facts.by_initiator[ref], "initiator", "responder"))
        return {
            **self._ends(ref),
            "conn": self._world.sessions.conn[segments.session[ref]].tolist(),
            "transport_id": facts.transport_id[ref].tolist(),
            "reason": [_NAMES[one] for one in facts.code[ref].tolist()],
            "code": facts.code[ref].tolist(),
            "by": by.tolist(),
            "duration_s": (segments.close_at - segments.open_at)[ref].tolist(),
            "bytes_in": facts.to_initiator[ref].tolist(),
            "bytes_out": facts.to_responder[ref].tolist(),
            "queue_peak_bytes": facts.queue_peak[ref].tolist(),
            "security": "unknown",
        }

    def _never_opened(self, ref: Ints) -> Columns:
        dials = self._world.dials
        dial, step = ref // TRIES, ref % TRIES
        outcome = dials.outcome[dial, step]
        given_up = dials.elapsed_ms[dial, step] > dials.finish_ms[dial]
        names = {Outcome.HANDSHAKE_TIMEOUT: "handshake_timeout", Outcome.REFUSED: "refused"}
        reasons = [
            "normal" if gone else names.get(Outcome(one), "access_denied")
            for one, gone in zip(outcome.tolist(), given_up.tolist(), strict=True)
        ]
        by = np.where(given_up, "initiator", np.where(outcome == Outcome.HANDSHAKE_TIMEOUT, "server", "responder"))
        return {
            "conn": self._conns(ref).tolist(),
            "transport_id": (NEVER_OPENED_FROM + (dial * 2) % (65_536 - NEVER_OPENED_FROM)).tolist(),
            "initiator": self._keys[dials.initiator[dial]].tolist(),
            "responder": self._keys[dials.responder[dial]].tolist(),
            "server": self._keys[dials.relay[dial, step]].tolist(),
            "reason": reasons,
            "code": [CODES[one] for one in reasons],
            "by": by.tolist(),
            "security": "unknown",
        }

    def _security(self, segment: Ints) -> Sequence[str]:
        return np.where(self._world.dials.e2e[self._world.segments.dial[segment]], "e2e", "hop").tolist()  # type: ignore[no-any-return]

    def _opened(self, ref: Ints, ids: Ints) -> Columns:
        """A client's line; its connections have no numbers."""
        return {
            **self._ends(ref),
            "transport_id": ids[ref].tolist(),
            "accept_ms": (self._world.segments.accept_ms[ref] * 1.3).tolist(),
            "security": self._security(ref),
        }

    def _closed(self, ref: Ints, *, initiator: bool) -> Columns:
        segments, facts = self._world.segments, self._facts
        ids = facts.transport_id if initiator else facts.responder_id
        received, sent = facts.all_to_initiator[ref].tolist(), facts.all_to_responder[ref].tolist()
        lost = np.isin(segments.cut[ref], (End.KILLED, End.BROKEN, End.ABUSE, End.CLIENT_KILLED))
        own = ~facts.by_server[ref] & (facts.by_initiator[ref] == initiator)
        return {
            **self._ends(ref),
            "transport_id": ids[ref].tolist(),
            "reason": [_NAMES[one] for one in facts.code[ref].tolist()],
            "code": facts.code[ref].tolist(),
            "by": np.where(lost | own, "local", "peer").tolist(),
            "duration_s": (segments.close_at[ref] - segments.open_at[facts.root[ref]]).tolist(),
            "bytes_in": received if initiator else sent,
            "bytes_out": sent if initiator else received,
            "security": self._security(ref),
        }

    def _resumed(self, ref: Ints) -> Columns:
        segments = self._world.segments
        cut = segments.cut[segments.before[ref]]
        return {
            **self._ends(ref),
            "transport_id": self._facts.transport_id[ref].tolist(),
            "reason": np.where(cut == End.DRAINED, "server_draining", "ServerLost").tolist(),
            "elapsed_ms": segments.gap_ms[ref].tolist(),
        }

    # --- clients -----------------------------------------------------------------------------------------------------

    def _dial(self, ref: Ints) -> Columns:
        dials, segments = self._world.dials, self._world.segments
        ok = ref >= 0
        dial = np.where(ok, segments.dial[np.maximum(ref, 0)], -1 - ref)
        trees = [self._tree(one) for one in dial.tolist()]
        server = self._keys[segments.relay[np.maximum(ref, 0)]]
        target = np.where(dials.ghost[dial] >= 0, self._ghosts[dials.ghost[dial]], self._keys[dials.responder[dial]])
        security = np.where(dials.e2e[dial], "e2e", "hop")
        return {
            "target": target.tolist(),
            "server": np.where(ok, server, "").tolist(),
            "ok": ["true" if one else "false" for one in ok.tolist()],
            "reason": ["" if good else reason for good, (_, reason) in zip(ok.tolist(), trees, strict=True)],
            "elapsed_ms": dials.finish_ms[dial].tolist(),
            "attempts": [tree for tree, _ in trees],
            "security": np.where(ok, security, "").tolist(),
        }

    def _tree(self, dial: int) -> tuple[str, str]:
        """The tree of attempts of one dial, ready to stand in a JSON text, and the reason of the furthest."""
        dials = self._world.dials
        outcomes = dials.outcome[dial].tolist()
        if outcomes[0] == Outcome.OK:
            return "[]", ""
        finish = float(dials.finish_ms[dial])
        entries: list[tuple[float, dict[str, object]]] = []
        best, reason = -1, ""
        for outcome, relay, elapsed in zip(
            outcomes, dials.relay[dial].tolist(), dials.elapsed_ms[dial].tolist(), strict=True
        ):
            if outcome in (Outcome.OK, Outcome.NOT_TRIED) or elapsed > finish:
                continue
            stage, why, detail = TRIED[Outcome(outcome)]
            server = "" if outcome in _DISCOVERY_OUTCOMES else self._keys[relay]
            entry = {"stage": stage, "server": server, "elapsed_ms": round(elapsed, 3), "reason": why, "detail": detail}
            entries.append((elapsed, entry))
        entries.sort(key=lambda one: one[0])
        for _, entry in entries:
            place = _STAGES.index(str(entry["stage"]))
            if place > best:
                best, reason = place, str(entry["reason"])
        text = json.dumps([entry for _, entry in entries], separators=(",", ":"))
        return text.replace('"', '\\"'), reason

    def _session_up(self, ref: Ints) -> Columns:
        sessions = self._world.sessions
        return {
            "server": self._keys[sessions.relay[ref]].tolist(),
            "reason": np.where(sessions.first[ref], "first", "reconnect").tolist(),
            "duration_s": (sessions.handshake_ms[ref] / 900.0).tolist(),
            "attempt": [1] * len(ref),
        }

    def _session_down(self, ref: Ints) -> Columns:
        sessions = self._world.sessions
        return {
            "server": self._keys[sessions.relay[ref]].tolist(),
            "reason": [_ENDS[End(one)][1] for one in sessions.kind[ref].tolist()],
            "duration_s": (sessions.end - sessions.start)[ref].tolist(),
            "attempt": [0] * len(ref),
        }

    def _session_failed(self, ref: Ints) -> Columns:
        waits = self._world.waits
        return {
            "server": self._keys[waits.relay[ref]].tolist(),
            "reason": "connection refused",
            "attempt": waits.attempt[ref].tolist(),
        }

    # --- discovery ---------------------------------------------------------------------------------------------------

    def _published(self, ref: Ints) -> Columns:
        entries, relays = self._world.entries, self._world.fleet.relays
        fault = entries.fault[ref].tolist()
        return {
            "sequence": entries.sequence[ref].tolist(),
            "kind": np.where(entries.node[ref] < relays, "server", "client").tolist(),
            "elapsed_ms": entries.elapsed_ms[ref].tolist(),
            "ok": ["false" if one else "true" for one in fault],
            "reason": [("", _WRONG_TIME, _DOWN)[one] for one in fault],
        }

    def _looked_up(self, ref: Ints) -> Columns:
        dials = self._world.dials
        missing = dials.outcome[ref, 0] == Outcome.NO_ENTRY
        target = np.where(dials.ghost[ref] >= 0, self._ghosts[dials.ghost[ref]], self._keys[dials.responder[ref]])
        return {
            "method": "GET",
            "path": f"{_FAMILY}/entry",
            "status": np.where(missing, 404, 200).tolist(),
            "elapsed_ms": (dials.look_up_ms[ref] * 0.4).tolist(),
            "reason": np.where(missing, _NOT_FOUND, "").tolist(),
            "key": target.tolist(),
        }

    def _posted(self, ref: Ints) -> Columns:
        entries = self._world.entries
        bad = entries.fault[ref] == 1
        return {
            "method": "POST",
            "path": f"{_FAMILY}/entry",
            "status": np.where(bad, 422, 200).tolist(),
            "elapsed_ms": (entries.elapsed_ms[ref] * 0.5).tolist(),
            "reason": np.where(bad, _WRONG_TIME, "").tolist(),
            "key": self._keys[entries.node[ref]].tolist(),
        }

    def _servers_asked(self, ref: Ints) -> Columns:
        return {
            "method": "GET",
            "path": f"{_FAMILY}/available_servers",
            "status": [200] * len(ref),
            "elapsed_ms": (self._world.sessions.handshake_ms[ref] * 0.11).tolist(),
        }


def _template(event: str, envelope: Mapping[str, str], columns: Columns) -> tuple[str, list[str]]:
    """A format for lines of one event and one run, and the columns it takes, in order."""
    members, names = [], []
    for each in ENVELOPE + EVENTS[event].columns:
        given = columns.get(each.name)
        if each.name == "event":
            text = f'"{event}"'
        elif each.name == "v":
            text = str(EVENTS[event].version)
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
