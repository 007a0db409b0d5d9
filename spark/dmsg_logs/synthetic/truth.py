"""The exact counts of a generated landing zone, to compare a pipeline's results with."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from dmsg_logs.synthetic.bus import STRANGE_RELAY, WAYS
from dmsg_logs.synthetic.facts import Facts
from dmsg_logs.synthetic.flaws import Budget, Plan
from dmsg_logs.synthetic.fleet import Bools, End, Ints, as_dict
from dmsg_logs.synthetic.texts import CALLS, EVENT_OF, TRIED
from dmsg_logs.synthetic.timeline import Kind, Timeline, World
from dmsg_logs.synthetic.traffic import TRIES, Outcome, refusals
from dmsg_logs.synthetic.writer import WrittenFile

#: Beside the landing zone's directories; pipelines never read names that begin with an underscore.
NAME: Final = "_truth.json"


@dataclass(frozen=True, slots=True)
class Truth:
    """Exact counts. ``lines`` = ``good`` + ``dup`` + ``corrupt``; ``missing`` lines are in none of them.

    Everything below ``files`` is about good lines only, each counted once however often it was shipped.
    """

    seed: int
    start: float
    days: int
    lines: int
    good: int
    dup: int
    corrupt: int
    missing: int
    late: int
    newer: int
    healed: int
    files: int
    copies: int
    late_files: int
    missing_files: list[str]
    corrupt_forms: dict[str, int]
    bytes: int
    plain_bytes: int
    #: event -> lines
    events: dict[str, int]
    #: UTC day -> lines
    dates: dict[str, int]
    #: a run each: role, node, boot, lines, seq_sum, seq_square_sum (modulo 2**61 - 1), first_seq, last_seq, gaps, gap_lines,
    #: dup, corrupt, missing, late_lines, events_dropped, ended, files
    runs: list[dict[str, Any]]
    #: relay -> counts of its own lines; ``planted["protocols"]`` has the protocol of each relay
    relays: dict[str, dict[str, int]]
    #: all, ok, failed, and those of the messaging system
    dials: dict[str, int]
    #: relay (empty for discovery's stages) -> "stage/reason" -> leaves in trees of attempts
    dial_failures: dict[str, dict[str, int]]
    #: "relay reason" -> resumptions
    resumptions: dict[str, int]
    #: of the Reliable Message Bus: "relay way" -> envelopes (bytes), "relay" -> sessions and failed envelopes, "relay other"
    #: -> attempts and failures among them, reason -> calls
    bus: dict[str, dict[str, int]]
    planted: dict[str, Any]
    #: a file each: name, recorded, lines, good (copies included), corrupt, copy, late
    file_list: list[dict[str, Any]] = field(default_factory=list)

    def write(self, directory: Path) -> Path:
        """Write it into ``directory``; gives the path."""
        path = directory / NAME
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def read(cls, directory: str | Path) -> Truth:
        """What :meth:`write` wrote."""
        return cls(**json.loads((Path(directory) / NAME).read_text()))


def make_truth(
    world: World,
    timeline: Timeline,
    facts: Facts,
    plan: Plan,
    budget: Budget,
    files: list[WrittenFile],
    *,
    seed: int,
    days: int,
) -> Truth:
    """Count everything."""
    good = plan.good
    forms: Counter[str] = Counter()
    for file in files:
        forms.update(file.forms)
    return Truth(
        seed=seed,
        start=world.fleet.start,
        days=days,
        lines=sum(file.lines for file in files),
        good=int(good.sum()),
        dup=sum(file.good for file in files) - int(good.sum()),
        corrupt=sum(file.corrupt for file in files),
        missing=sum(file.missing for file in files),
        late=sum(file.good for file in files if file.late),
        newer=int((plan.newer & good).sum()),
        healed=budget.healed,
        files=len(files),
        copies=sum(file.copy for file in files),
        late_files=sum(file.late for file in files),
        missing_files=sorted(file.name for file in files if file.missing),
        corrupt_forms=dict(sorted(forms.items())),
        bytes=sum(file.bytes for file in files),
        plain_bytes=sum(file.plain_bytes for file in files),
        events=_events(timeline, good),
        dates=_dates(timeline, good),
        runs=_runs(world, timeline, plan, good, files),
        relays=_relays(world, timeline, facts, good),
        dials=_dials(world, timeline, good),
        dial_failures=_dial_failures(world, timeline, good),
        resumptions=_resumptions(world, timeline, good),
        bus=_bus(world, timeline, good),
        planted=as_dict(world.fleet),
        file_list=[
            {
                "name": file.name,
                "recorded": file.recorded,
                "lines": file.lines,
                "good": file.good,
                "corrupt": file.corrupt,
                "copy": file.copy,
                "late": file.late,
                "landed_at": file.landed_at,
            }
            for file in sorted(files, key=lambda one: one.name)
        ],
    )


def _events(timeline: Timeline, good: Bools) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for kind, count in zip(*np.unique(timeline.kind[good], return_counts=True), strict=True):
        counts[EVENT_OF[Kind(int(kind))]] += int(count)
    return dict(sorted(counts.items()))


def _dates(timeline: Timeline, good: Bools) -> dict[str, int]:
    days, counts = np.unique(np.floor(timeline.ts[good] / 86_400).astype("datetime64[D]"), return_counts=True)
    return {str(day): int(count) for day, count in zip(days, counts, strict=True)}


def _runs(world: World, timeline: Timeline, plan: Plan, good: Bools, files: list[WrittenFile]) -> list[dict[str, Any]]:
    by_run: dict[tuple[str, str], list[WrittenFile]] = {}
    for file in files:
        by_run.setdefault((file.node, file.boot), []).append(file)
    result = []
    for number, run in enumerate(world.fleet.runs):
        node = world.fleet.nodes[run.node]
        first, last = int(timeline.first[number]), int(timeline.first[number + 1])
        own = by_run.get((node.name, run.boot), [])
        rows = np.flatnonzero(good[first:last])
        if not len(rows):
            continue
        steps = np.diff(rows)
        kinds, refs = timeline.kind[first:last][rows], timeline.ref[first:last][rows]
        result.append(
            {
                "role": node.role,
                "node": node.name,
                "boot": run.boot,
                "files": len(own),
                "lines": len(rows),
                "seq_sum": int(rows.sum()),
                "seq_square_sum": sum(one * one for one in rows.tolist()) % (2**61 - 1),
                "first_seq": int(rows[0]),
                "last_seq": int(rows[-1]),
                "gaps": int((steps > 1).sum()),
                "gap_lines": int((steps - 1).sum()),
                "dup": sum(file.good for file in own) - len(rows),
                "corrupt": sum(file.corrupt for file in own),
                "missing": sum(file.missing for file in own),
                "late_lines": sum(file.good for file in own if file.late),
                "events_dropped": int(world.drops.count[refs[kinds == Kind.DROPPED]].sum()),
                "ended": bool((kinds == Kind.STOPPED).any()),
            }
        )
    return result


def _relays(world: World, timeline: Timeline, facts: Facts, good: Bools) -> dict[str, dict[str, int]]:
    fleet = world.fleet
    nodes = np.array([run.node for run in fleet.runs])[timeline.run]
    result = {}
    for relay in range(fleet.relays):
        own = good & (nodes == relay)
        kinds, refs = timeline.kind[own], timeline.ref[own]

        def of(kind: Kind, kinds: Any = kinds, refs: Any = refs) -> Ints:
            found: Ints = refs[kinds == kind]
            return found

        closed, refused = of(Kind.RELAY_CLOSED), of(Kind.REFUSED)
        counts = refusals(world.dials.outcome[refused // TRIES, refused % TRIES], refused // TRIES)
        result[fleet.nodes[relay].key] = {
            "lines": int(own.sum()),
            "connections_opened": len(of(Kind.CONNECTION_OPENED)),
            "connections_closed": len(of(Kind.CONNECTION_CLOSED)),
            "handshakes_failed": len(of(Kind.HANDSHAKE_FAILED)),
            "transports_opened": len(of(Kind.RELAY_OPENED)),
            "transports_closed": len(closed),
            "transports_never_opened": len(of(Kind.RELAY_NEVER_OPENED)),
            "bytes": int(facts.to_initiator[closed].sum() + facts.to_responder[closed].sum()),
            "refusals": int(counts.sum()),
        }
    return result


def _bus(world: World, timeline: Timeline, good: Bools) -> dict[str, dict[str, int]]:
    bus, nodes = world.bus, world.fleet.nodes

    def of(kind: Kind) -> Ints:
        found: Ints = timeline.ref[good & (timeline.kind == kind)].astype(np.int64)
        return found

    counts: dict[str, Counter[str]] = {
        name: Counter() for name in ("sessions", "envelopes", "failures", "limits", "attempts", "failed", "calls")
    }
    counts["sessions"].update(nodes[one].name for one in bus.sessions.relay[of(Kind.TWIN_OPENED)].tolist())
    for row in of(Kind.ROUTED).tolist():
        for way, amount in zip(WAYS, bus.routed.amounts[row].tolist(), strict=True):
            counts["envelopes"][f"{nodes[bus.routed.node[row]].name} {way}"] += amount
    for name, kind, part in (
        ("failures", Kind.ENVELOPE_FAILED, bus.failures),
        ("limits", Kind.RATE_LIMITED, bus.limits),
    ):
        for row in of(kind).tolist():
            counts[name][nodes[part.node[row]].name] += int(part.count[row])
    hosts = [*as_dict(world.fleet)["bus_relays"], STRANGE_RELAY]
    for row in of(Kind.FEDERATED).tolist():
        pair = f"{nodes[bus.attempts.node[row]].name} {hosts[bus.attempts.whom[row]]}"
        counts["attempts"][pair] += int(bus.attempts.count[row])
        counts["failed"][pair] += int(bus.attempts.count[row]) if bus.attempts.what[row] else 0
    for row in of(Kind.CALL).tolist():
        counts["calls"][CALLS[bus.calls.what[row]]] += int(bus.calls.count[row])
    return {name: dict(sorted(count.items())) for name, count in counts.items()}


def _dials(world: World, timeline: Timeline, good: Bools) -> dict[str, int]:
    refs = _dial_refs(timeline, good)
    ok, messaging = int((refs >= 0).sum()), int(world.dials.messaging[_dials_of(world, refs)].sum())
    return {"all": len(refs), "ok": ok, "failed": len(refs) - ok, "messaging": messaging}


def _dial_refs(timeline: Timeline, good: Bools) -> Ints:
    refs: Ints = timeline.ref[good & (timeline.kind == Kind.DIAL)].astype(np.int64)
    return refs


def _dials_of(world: World, refs: Ints) -> Ints:
    """The dials that lines about dials are of."""
    return np.where(refs >= 0, world.segments.dial[np.maximum(refs, 0)], -1 - refs)


def _dial_failures(world: World, timeline: Timeline, good: Bools) -> dict[str, dict[str, int]]:
    dials = world.dials
    dial = _dials_of(world, _dial_refs(timeline, good))
    outcome, relay = dials.outcome[dial], dials.relay[dial]
    told = ~np.isin(outcome, (Outcome.OK, Outcome.NOT_TRIED)) & (
        dials.elapsed_ms[dial] <= dials.finish_ms[dial][:, None]
    )
    pairs = outcome[told] * world.fleet.relays + relay[told]
    result: dict[str, dict[str, int]] = {}
    for pair, count in zip(*np.unique(pairs, return_counts=True), strict=True):
        kind = Outcome(int(pair) // world.fleet.relays)
        stage, reason, _ = TRIED[kind]
        key = "" if stage == "discovery" else world.fleet.nodes[int(pair) % world.fleet.relays].key
        leaves = result.setdefault(key, {})
        leaves[f"{stage}/{reason}"] = leaves.get(f"{stage}/{reason}", 0) + int(count)
    return result


def _resumptions(world: World, timeline: Timeline, good: Bools) -> dict[str, int]:
    refs = timeline.ref[good & (timeline.kind == Kind.RESUMED)]
    relays = world.segments.relay[refs].tolist()
    cuts = world.segments.cut[world.segments.before[refs]].tolist()
    counts = Counter(
        f"{world.fleet.nodes[relay].key} {'server_draining' if cut == End.DRAINED else 'ServerLost'}"
        for relay, cut in zip(relays, cuts, strict=True)
    )
    return dict(sorted(counts.items()))
