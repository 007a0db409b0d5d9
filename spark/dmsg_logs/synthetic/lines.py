"""Lines as the event log writes them: member for member, in the order of the schema, floats in their shortest form."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np

from dmsg_logs.synthetic.bus_lines import BusScribe
from dmsg_logs.synthetic.facts import CODES, NEVER_OPENED_FROM, Facts
from dmsg_logs.synthetic.fleet import DMSG, MESSAGING, End, Ints, public_key
from dmsg_logs.synthetic.texts import (
    DISCOVERY_OUTCOMES,
    DOWN,
    ENDS,
    EVENT_OF,
    FAMILY,
    NAMES,
    NOT_FOUND,
    REFUSALS,
    STAGES,
    STRANGE,
    TRIED,
    WRONG_TIME,
    Columns,
    template,
)
from dmsg_logs.synthetic.timeline import Kind, Timeline, World
from dmsg_logs.synthetic.traffic import TRIES, Outcome, refusals


class Scribe:
    """Makes text of lines of a :class:`Timeline`."""

    def __init__(self, world: World, timeline: Timeline, facts: Facts, seed: int) -> None:
        self._world = world
        self._timeline = timeline
        self._facts = facts
        self._keys = np.array([node.key for node in world.fleet.nodes], object)
        self._protocols = np.array([node.protocol for node in world.fleet.nodes], object)
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
            Kind.RANKS_LOADED: self._ranks_loaded,
            Kind.SHIPPED: self._shipped,
            **BusScribe(world).makers,
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
            form, names = template(EVENT_OF[kind], envelope, columns, older=node.older)
            for row, values in zip(rows.tolist(), zip(*(columns[name] for name in names), strict=True), strict=True):
                lines[row] = form % values
        return lines

    # --- a relay's and discovery's life ------------------------------------------------------------------------------

    def _started(self, ref: Ints) -> Columns:
        nodes = [self._world.fleet.nodes[self._world.fleet.runs[one].node] for one in ref.tolist()]
        return {
            "public_key": [one.key for one in nodes],
            "address": [one.address for one in nodes],
            "version": "0.1.0",
            "protocol": [one.protocol for one in nodes],
        }

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
            "extended": [
                "true" if client % 10 and protocol == DMSG else "false"
                for client, protocol in zip(
                    sessions.client[ref].tolist(), self._protocols[sessions.relay[ref]].tolist(), strict=True
                )
            ],
        }

    def _connection_closed(self, ref: Ints) -> Columns:
        sessions, facts = self._world.sessions, self._facts
        return {
            "conn": sessions.conn[ref].tolist(),
            "remote": self._keys[sessions.client[ref]].tolist(),
            "reason": [ENDS[End(one)][0] for one in sessions.kind[ref].tolist()],
            "duration_s": (sessions.end - sessions.start)[ref].tolist(),
            "bytes_in": facts.session_in[ref].tolist(),
            "bytes_out": facts.session_out[ref].tolist(),
            "frames_in": facts.frames_in[ref].tolist(),
            "frames_out": facts.frames_out[ref].tolist(),
            "transports": facts.still_open[ref].tolist(),
        }

    def _handshake_failed(self, ref: Ints) -> Columns:
        strangers = self._world.strangers
        spoken = self._protocols[strangers.relay[ref]].tolist()
        whys = [STRANGE[each][one] for each, one in zip(spoken, strangers.why[ref].tolist(), strict=True)]
        return {
            "address": [
                self._addresses[one] if one >= 0 else f"203.0.{-one // 250}.{-one % 250}"
                for one in strangers.source[ref].tolist()
            ],
            "stage": [one[0] for one in whys],
            "reason": [one[1] for one in whys],
            "elapsed_ms": strangers.elapsed_ms[ref].tolist(),
            "count": [1] * len(ref),
        }

    def _refused(self, ref: Ints) -> Columns:
        dials = self._world.dials
        dial, outcome = ref // TRIES, dials.outcome[ref // TRIES, ref % TRIES]
        return {
            "conn": self._conns(ref).tolist(),
            "remote": self._keys[dials.initiator[dial]].tolist(),
            "what": "request",
            "reason": [REFUSALS[Outcome(one)] for one in outcome.tolist()],
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
            "protocol": self._protocols[segments.relay[segment]].tolist(),
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
            "reason": [NAMES[one] for one in facts.code[ref].tolist()],
            "code": facts.code[ref].tolist(),
            "by": by.tolist(),
            "duration_s": (segments.close_at - segments.open_at)[ref].tolist(),
            "bytes_in": facts.to_initiator[ref].tolist(),
            "bytes_out": facts.to_responder[ref].tolist(),
            "queue_peak_bytes": facts.queue_peak[ref].tolist(),
            "security": "unknown",
            "opened_id": facts.transport_id[ref].tolist(),
            "opened_server": self._keys[segments.relay[ref]].tolist(),
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
        ids = (NEVER_OPENED_FROM + (dial * 2) % (65_536 - NEVER_OPENED_FROM)).tolist()
        server = self._keys[dials.relay[dial, step]].tolist()
        by = np.where(given_up, "initiator", np.where(outcome == Outcome.HANDSHAKE_TIMEOUT, "server", "responder"))
        return {
            "conn": self._conns(ref).tolist(),
            "transport_id": ids,
            "initiator": self._keys[dials.initiator[dial]].tolist(),
            "responder": self._keys[dials.responder[dial]].tolist(),
            "server": server,
            "reason": reasons,
            "code": [CODES[one] for one in reasons],
            "by": by.tolist(),
            "security": "unknown",
            "opened_id": ids,
            "opened_server": server,
            "protocol": self._protocols[dials.relay[dial, step]].tolist(),
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
            "reason": [NAMES[one] for one in facts.code[ref].tolist()],
            "code": facts.code[ref].tolist(),
            "by": np.where(lost | own, "local", "peer").tolist(),
            "duration_s": (segments.close_at[ref] - segments.open_at[facts.root[ref]]).tolist(),
            "bytes_in": received if initiator else sent,
            "bytes_out": sent if initiator else received,
            "security": self._security(ref),
            "opened_id": ids[facts.root[ref]].tolist(),
            "opened_server": self._keys[segments.relay[facts.root[ref]]].tolist(),
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
            "initiator": self._keys[dials.initiator[dial]].tolist(),
            "protocol": np.where(dials.messaging[dial], MESSAGING, DMSG).tolist(),
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
            server = "" if outcome in DISCOVERY_OUTCOMES else self._keys[relay]
            entry = {"stage": stage, "server": server, "elapsed_ms": round(elapsed, 3), "reason": why, "detail": detail}
            entries.append((elapsed, entry))
        entries.sort(key=lambda one: one[0])
        for _, entry in entries:
            place = STAGES.index(str(entry["stage"]))
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
            "protocol": self._protocols[sessions.relay[ref]].tolist(),
        }

    def _session_down(self, ref: Ints) -> Columns:
        sessions = self._world.sessions
        return {
            "server": self._keys[sessions.relay[ref]].tolist(),
            "reason": [ENDS[End(one)][1] for one in sessions.kind[ref].tolist()],
            "duration_s": (sessions.end - sessions.start)[ref].tolist(),
            "attempt": [0] * len(ref),
            "protocol": self._protocols[sessions.relay[ref]].tolist(),
        }

    def _session_failed(self, ref: Ints) -> Columns:
        waits = self._world.waits
        return {
            "server": self._keys[waits.relay[ref]].tolist(),
            "reason": "connection refused",
            "attempt": waits.attempt[ref].tolist(),
            "protocol": self._protocols[waits.relay[ref]].tolist(),
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
            "reason": [("", WRONG_TIME, DOWN)[one] for one in fault],
        }

    def _looked_up(self, ref: Ints) -> Columns:
        dials = self._world.dials
        missing = dials.outcome[ref, 0] == Outcome.NO_ENTRY
        target = np.where(dials.ghost[ref] >= 0, self._ghosts[dials.ghost[ref]], self._keys[dials.responder[ref]])
        return {
            "method": "GET",
            "path": f"{FAMILY}/entry",
            "status": np.where(missing, 404, 200).tolist(),
            "elapsed_ms": (dials.look_up_ms[ref] * 0.4).tolist(),
            "reason": np.where(missing, NOT_FOUND, "").tolist(),
            "key": target.tolist(),
            "count": [1] * len(ref),
        }

    def _posted(self, ref: Ints) -> Columns:
        entries = self._world.entries
        bad = entries.fault[ref] == 1
        return {
            "method": "POST",
            "path": f"{FAMILY}/entry",
            "status": np.where(bad, 422, 200).tolist(),
            "elapsed_ms": (entries.elapsed_ms[ref] * 0.5).tolist(),
            "reason": np.where(bad, WRONG_TIME, "").tolist(),
            "key": self._keys[entries.node[ref]].tolist(),
            "count": [1] * len(ref),
        }

    def _servers_asked(self, ref: Ints) -> Columns:
        return {
            "method": "GET",
            "path": f"{FAMILY}/available_servers",
            "status": [200] * len(ref),
            "elapsed_ms": (self._world.sessions.handshake_ms[ref] * 0.11).tolist(),
            "count": [1] * len(ref),
        }

    def _ranks_loaded(self, ref: Ints) -> Columns:
        return {
            "ok": ["true"] * len(ref),
            "issuer": self._ghosts[0],
            "issued": (self._world.parcels.ranks_at[ref] - 60).astype(np.int64).tolist(),
            "relays": [self._world.fleet.relays] * len(ref),
        }

    # --- shippers ----------------------------------------------------------------------------------------------------

    def _shipped(self, ref: Ints) -> Columns:
        parcels, nodes = self._world.parcels, self._world.fleet.nodes
        failed, lines = parcels.failed[ref].tolist(), parcels.lines[ref].tolist()
        names = []
        for row, at, count, bad in zip(ref.tolist(), parcels.at[ref].tolist(), lines, failed, strict=True):
            when = datetime.fromtimestamp(at, timezone.utc)
            boot = f"{row * 2654435761 % 2**64:016x}"
            digest = "" if bad else f"-{(row + 1) * 11400714819323198485 % 2**64:016x}"
            folder = f"role=server/date={when:%Y-%m-%d}/hour={when:%H}"
            names.append(f"{folder}/{nodes[parcels.relay[row]].name}-{boot}-{row % 1000:06d}-{count}{digest}.jsonl.zst")
        return {
            "name": names,
            "lines": lines,
            "bytes": (parcels.lines[ref] * 41).tolist(),
            "elapsed_ms": (40.0 + parcels.lines[ref] / 97).tolist(),
            "attempt": [1] * len(ref),
            "ok": ["false" if bad else "true" for bad in failed],
            "reason": ["unreachable" if bad else "" for bad in failed],
        }
