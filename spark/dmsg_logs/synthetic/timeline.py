"""Every event of the synthetic fleet in order: which line is written by which run, when, and about what.

A line is four numbers: its kind (:class:`Kind`), the row it is about, its time and its run. :mod:`.lines` makes text of
them, file by file, so that memory holds about 50 bytes a line and never the text of them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dmsg_logs.synthetic.bus import Bus, make_bus
from dmsg_logs.synthetic.fleet import (
    HOUR_S,
    Bools,
    End,
    Fleet,
    Floats,
    Ints,
    RunIndex,
    SessionIndex,
    Sessions,
    make_sessions,
)
from dmsg_logs.synthetic.traffic import (
    REFUSED_BY_PEER,
    REFUSED_BY_RELAY,
    TRIES,
    Dials,
    Outcome,
    Segments,
    make_dials,
    make_segments,
)

#: A stopping run writes lines that are due up to this many seconds after its end just before it.
_GRACE_S: Final = 5.0
_LAST_S: Final = 0.03
_DISCOVERY_LESS: Final = (Outcome.UNAVAILABLE, Outcome.LIE)


class Kind(IntEnum):
    """The kind of a line; each kind refers to a row of one table."""

    STARTED = 0
    DRAINED = 1
    STOPPED = 2
    CONNECTION_OPENED = 3
    CONNECTION_CLOSED = 4
    HANDSHAKE_FAILED = 5
    RELAY_OPENED = 6
    RELAY_CLOSED = 7
    RELAY_NEVER_OPENED = 8
    REFUSED = 9
    DROPPED = 10
    DIAL = 11
    INITIATOR_OPENED = 12
    RESPONDER_OPENED = 13
    RESUMED = 14
    INITIATOR_CLOSED = 15
    RESPONDER_CLOSED = 16
    SESSION_UP = 17
    SESSION_DOWN = 18
    SESSION_FAILED = 19
    PUBLISHED = 20
    LOOKED_UP = 21
    POSTED = 22
    SERVERS_ASKED = 23
    RANKS_LOADED = 24
    SHIPPED = 25
    TWIN_OPENED = 26  # by a relay of the Reliable Message Bus
    TWIN_CLOSED = 27
    RELAY_JOINED = 28  # by a twin
    RELAY_LEFT = 29
    ROUTED = 30
    ENVELOPE_FAILED = 31
    RATE_LIMITED = 32
    FEDERATED = 33
    RANK_CHANGED = 34
    CALL = 35


@dataclass(slots=True)
class Entries:
    """Entries written to discovery."""

    node: Ints
    at: Floats
    sequence: Ints
    elapsed_ms: Floats
    fault: Ints  # 0: none; 1: discovery said no; 2: it could not be reached


@dataclass(slots=True)
class Strangers:
    """Handshakes that failed at relays."""

    relay: Ints
    at: Floats
    source: Ints  # a client's index, or minus the number of a stranger
    why: Ints
    elapsed_ms: Floats


@dataclass(slots=True)
class Waits:
    """Attempts of clients to get a session up while its relay was away."""

    client: Ints
    relay: Ints
    at: Floats
    attempt: Ints


@dataclass(slots=True)
class Drops:
    """Events that a log left out."""

    node: Ints
    at: Floats
    count: Ints


@dataclass(slots=True)
class Parcels:
    """Files that shippers took away, and ranks that discovery loaded."""

    relay: Ints
    at: Floats
    lines: Ints
    failed: Bools
    ranks_at: Floats


@dataclass(slots=True)
class World:
    """All tables that lines are about."""

    fleet: Fleet
    sessions: Sessions
    index: SessionIndex
    dials: Dials
    segments: Segments
    entries: Entries
    strangers: Strangers
    waits: Waits
    drops: Drops
    parcels: Parcels
    bus: Bus


@dataclass(slots=True)
class Timeline:
    """Lines by run, then by time; ``first`` is where each run of ``fleet.runs`` begins, with one more for the end."""

    kind: NDArray[Any]
    ref: Ints
    ts: Floats
    run: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.ts)

    @property
    def seq(self) -> Ints:
        """Number of each line in its run."""
        return np.arange(len(self), dtype=np.int64) - self.first[self.run]


def make_world(
    fleet: Fleet, rng: np.random.Generator, bus_rng: np.random.Generator, lines: int
) -> tuple[World, Timeline]:
    """A world with a ``Timeline`` of exactly ``lines`` lines."""
    bus = make_bus(fleet, bus_rng, lines)
    sessions = make_sessions(fleet, rng)
    index = SessionIndex(fleet, sessions)
    entries = _make_entries(fleet, rng, lines)
    strangers = _make_strangers(fleet, rng, lines)
    waits = _make_waits(fleet, rng)
    drops = _make_drops(fleet, rng)
    parcels = _make_parcels(fleet, rng, lines)
    per_dial, extra = 7.6, 1.02
    while True:
        dials = make_dials(fleet, index, rng, int(lines / per_dial * extra) + 40)
        segments = make_segments(fleet, sessions, index, rng, dials)
        world = World(fleet, sessions, index, dials, segments, entries, strangers, waits, drops, parcels, bus)
        timeline = _tell(world, rng, lines)
        if timeline is not None:
            return world, timeline
        extra *= 1.1


def _make_entries(fleet: Fleet, rng: np.random.Generator, lines: int) -> Entries:
    nodes = fleet.relays + fleet.clients
    each = max(2, int(lines * 0.015 / nodes))
    node = np.repeat(np.arange(nodes), each)
    at = np.sort(rng.uniform(fleet.start + 35, fleet.end, (nodes, each)), axis=1).ravel()
    fault = rng.choice(3, len(node), p=[0.992, 0.005, 0.003])
    return Entries(node, at, np.tile(np.arange(each), nodes), rng.lognormal(np.log(9.0), 0.7, len(node)), fault)


def _make_strangers(fleet: Fleet, rng: np.random.Generator, lines: int) -> Strangers:
    count = max(4, int(lines * 0.004))
    relay = rng.integers(0, fleet.relays, count)
    relay[: count // 4] = fleet.failing
    source = -rng.integers(1, 4000, count)
    known = rng.random(count) < 0.3
    source[known] = rng.choice(fleet.abusers, int(known.sum()))
    elapsed_ms = np.where(relay == fleet.failing, 5000.0 + rng.uniform(0, 20, count), rng.lognormal(4.0, 1.0, count))
    why = np.where(relay == fleet.failing, 1, rng.integers(0, 4, count))
    return Strangers(relay, rng.uniform(fleet.start + 60, fleet.end, count), source, why, elapsed_ms)


def _make_waits(fleet: Fleet, rng: np.random.Generator) -> Waits:
    rows = []
    for outage in fleet.outages:
        if outage.up - outage.down < 60:
            continue
        for client in range(fleet.relays, fleet.relays + fleet.clients):
            if not fleet.speaks(client, outage.relay):
                continue
            at, pause, attempt = outage.down + 0.6, 3.0, 1
            while at < outage.up:
                rows.append((client, outage.relay, at, attempt))
                at += pause * float(rng.uniform(0.5, 1.0))
                pause, attempt = min(60.0, 2 * pause), attempt + 1
    table = np.array(rows, np.float64).reshape(-1, 4)
    client_, relay_, attempt_ = (table[:, column].astype(np.int64) for column in (0, 1, 3))
    return Waits(client_, relay_, table[:, 2].copy(), attempt_)


def _make_drops(fleet: Fleet, rng: np.random.Generator) -> Drops:
    nodes = np.array([fleet.slow] * 6 + [fleet.discovery] * 2)
    return Drops(nodes, rng.uniform(fleet.start + HOUR_S, fleet.end, len(nodes)), rng.integers(1, 900, len(nodes)))


def _make_parcels(fleet: Fleet, rng: np.random.Generator, lines: int) -> Parcels:
    each = min(max(3, int(lines * 0.002 / fleet.relays)), int((fleet.end - fleet.start) / 300))
    at = np.linspace(fleet.start + 400, fleet.end, each, endpoint=False)
    count = each * fleet.relays
    return Parcels(
        np.repeat(np.arange(fleet.relays), each),
        np.tile(at, fleet.relays) + rng.uniform(0, 30, count),
        rng.integers(20, 9000, count),
        rng.random(count) < 0.01,
        np.arange(fleet.start + 6 * HOUR_S, fleet.end, 24 * HOUR_S),
    )


class _Teller:
    """Collects lines of every kind before they are sorted."""

    def __init__(self) -> None:
        self.parts: list[tuple[Ints, Ints, Ints, Floats, Ints]] = []

    def add(self, kind: Kind, ref: Ints, node: Ints, ts: Floats, dial: Ints | None = None) -> None:
        whose = np.full(len(ref), -1, np.int64) if dial is None else dial
        self.parts.append((np.full(len(ref), kind, np.int64), ref, node, ts, whose))


def _tell(world: World, rng: np.random.Generator, lines: int) -> Timeline | None:
    teller = _Teller()
    _tell_of_lives(world, teller)
    _tell_of_bus(world, teller)
    _tell_of_transports(world, rng, teller)
    _tell_of_dials(world, rng, teller)
    kind, ref, node, ts, dial = (np.concatenate(column) for column in zip(*teller.parts, strict=True))
    run, ts, kept = _place(world.fleet, node, ts)
    kind, ref, ts, run, dial = kind[kept], ref[kept], ts[kept], run[kept], dial[kept]
    if len(ts) < lines:
        return None
    chosen = _thin(dial, ts, lines, len(world.dials.at), rng)
    kind, ref, ts, run = kind[chosen], ref[chosen], np.round(ts[chosen], 6), run[chosen]
    order = np.lexsort((kind, ts, run))
    first = np.searchsorted(run[order], np.arange(len(world.fleet.runs) + 1))
    return Timeline(kind[order].astype(np.uint8), ref[order].astype(np.int32), ts[order], run[order], first)


def _place(fleet: Fleet, node: Ints, ts: Floats) -> tuple[Ints, Floats, Bools]:
    """The run of each line. Lines of a killed run after its end are lost; a stopping run writes them just before its end."""
    run = RunIndex(fleet).find(node, ts, grace_s=_GRACE_S)
    safe = np.maximum(run, 0)
    end = np.array([one.end for one in fleet.runs])[safe]
    clean = np.array([one.clean for one in fleet.runs])[safe]
    late = ts >= end - clean * _LAST_S
    moved = np.where(late & clean, end - _LAST_S + (ts - end + _LAST_S) / (_GRACE_S + _LAST_S) * 0.02, ts)
    return run, moved, (run >= 0) & (~late | clean)


def _thin(dial: Ints, ts: Floats, lines: int, dials: int, rng: np.random.Generator) -> Ints:
    """Rows of exactly ``lines`` lines: whole dials are left out, then the last few lines."""
    per_dial = np.bincount(dial[dial >= 0], minlength=dials)
    order = rng.permutation(dials)
    base = len(dial) - int(per_dial.sum())
    total = base + np.cumsum(per_dial[order])
    kept = np.zeros(dials + 1, np.bool_)  # the last one stands for lines of no dial
    kept[order[: int(np.searchsorted(total, lines)) + 1]] = True
    kept[dials] = True
    rows = np.flatnonzero(kept[dial])
    rows = rows[np.argsort(ts[rows], kind="stable")]
    return rows[:lines]


def _tell_of_lives(world: World, teller: _Teller) -> None:
    fleet, sessions = world.fleet, world.sessions
    for number, run in enumerate(fleet.runs):
        if fleet.nodes[run.node].role == "client":
            continue
        row, node = np.array([number]), np.array([run.node])
        teller.add(Kind.STARTED, row, node, np.array([run.start]))
        if run.clean:
            teller.add(Kind.DRAINED, row, node, np.array([run.end + 4.90]))
            teller.add(Kind.STOPPED, row, node, np.array([run.end + 4.95]))
    rows = np.arange(len(sessions.start))
    teller.add(Kind.CONNECTION_OPENED, rows, sessions.relay, sessions.start)
    teller.add(Kind.SESSION_UP, rows, sessions.client, sessions.start + 0.011)
    asked = rows[sessions.first]
    discovery = np.full(len(rows), fleet.discovery)
    teller.add(Kind.SERVERS_ASKED, asked, discovery[asked], sessions.start[asked] - 0.12)
    told = rows[~np.isin(sessions.kind, (End.OPEN, End.KILLED))]
    teller.add(Kind.CONNECTION_CLOSED, told, sessions.relay[told], sessions.end[told])
    lost = rows[~np.isin(sessions.kind, (End.OPEN, End.CLIENT_KILLED))]
    teller.add(Kind.SESSION_DOWN, lost, sessions.client[lost], sessions.end[lost] + 0.013)
    for kind, node, ts in (
        (Kind.HANDSHAKE_FAILED, world.strangers.relay, world.strangers.at),
        (Kind.SESSION_FAILED, world.waits.client, world.waits.at),
        (Kind.DROPPED, world.drops.node, world.drops.at),
        (Kind.PUBLISHED, world.entries.node, world.entries.at),
        (Kind.SHIPPED, world.parcels.relay + fleet.discovery + 1, world.parcels.at),
        (Kind.RANKS_LOADED, np.full(len(world.parcels.ranks_at), fleet.discovery), world.parcels.ranks_at),
    ):
        teller.add(kind, np.arange(len(ts)), node, ts)
    posted = np.flatnonzero(world.entries.fault != 2)
    teller.add(Kind.POSTED, posted, np.full(len(posted), fleet.discovery), world.entries.at[posted] - 0.003)


def _tell_of_bus(world: World, teller: _Teller) -> None:
    bus, sessions = world.bus, world.bus.sessions
    rows = np.arange(len(sessions.start))
    teller.add(Kind.TWIN_OPENED, rows, sessions.relay, sessions.start)
    teller.add(Kind.RELAY_JOINED, rows, sessions.twin, sessions.start + 0.004)
    told = rows[sessions.kind == End.BROKEN]
    teller.add(Kind.TWIN_CLOSED, told, sessions.relay[told], sessions.end[told])
    lost = rows[sessions.kind != End.OPEN]
    teller.add(Kind.RELAY_LEFT, lost, sessions.twin[lost], sessions.end[lost] + 0.004)
    for kind, part in (
        (Kind.ROUTED, bus.routed),
        (Kind.ENVELOPE_FAILED, bus.failures),
        (Kind.RATE_LIMITED, bus.limits),
        (Kind.FEDERATED, bus.attempts),
        (Kind.RANK_CHANGED, bus.ranks),
        (Kind.CALL, bus.calls),
    ):
        teller.add(kind, np.arange(len(part.at)), part.node, part.at)


def _tell_of_transports(world: World, rng: np.random.Generator, teller: _Teller) -> None:
    segments, dials = world.segments, world.dials
    rows = np.arange(len(segments))
    initiator, responder = dials.initiator[segments.dial], dials.responder[segments.dial]
    teller.add(Kind.RELAY_OPENED, rows, segments.relay, segments.open_at, segments.dial)
    told = rows[~np.isin(segments.cut, (End.OPEN, End.KILLED))]
    teller.add(Kind.RELAY_CLOSED, told, segments.relay[told], segments.close_at[told], segments.dial[told])
    # both ends learn of it within the time of one frame
    to_initiator, to_responder = rng.uniform(0.004, 0.02, len(rows)), rng.uniform(0.004, 0.02, len(rows))
    fresh, again = rows[segments.before < 0], rows[segments.before >= 0]
    over = rows[(segments.after < 0) & (segments.cut != End.OPEN)]

    def add(kind: Kind, chosen: Ints, node: Ints, ts: Floats) -> None:
        teller.add(kind, chosen, node[chosen], ts[chosen], segments.dial[chosen])

    add(Kind.INITIATOR_OPENED, fresh, initiator, segments.open_at + to_initiator)
    add(Kind.RESPONDER_OPENED, fresh, responder, segments.open_at - to_responder)
    add(Kind.RESUMED, again, initiator, segments.open_at + to_initiator)
    add(Kind.DIAL, fresh, initiator, segments.open_at + to_initiator + 0.00004)
    add(Kind.INITIATOR_CLOSED, over, initiator, segments.close_at + to_initiator * 0.9)
    add(Kind.RESPONDER_CLOSED, over, responder, segments.close_at + to_responder * 0.9)


def _tell_of_dials(world: World, rng: np.random.Generator, teller: _Teller) -> None:
    dials = world.dials
    rows = np.arange(len(dials.at))
    discovery = np.full(len(rows), world.fleet.discovery)
    asked = rows[~np.isin(dials.outcome[:, 0], _DISCOVERY_LESS)]
    teller.add(Kind.LOOKED_UP, asked, discovery[asked], (dials.at + dials.look_up_ms / 1500)[asked], asked)
    opened = np.zeros(len(rows), np.bool_)
    opened[world.segments.dial[world.segments.before < 0]] = True
    failed = rows[(dials.chosen < 0) & ~opened]
    finish = dials.at + dials.finish_ms / 1000
    # lines of dials carry the number of a segment, or -1 minus the number of the dial if it failed
    teller.add(Kind.DIAL, -1 - failed, dials.initiator[failed], finish[failed], failed)
    for outcomes, kind, delay in (
        (REFUSED_BY_RELAY, Kind.REFUSED, 0.7),
        (REFUSED_BY_PEER, Kind.RELAY_NEVER_OPENED, 0.0),
    ):
        dial, step = np.nonzero(np.isin(dials.outcome, outcomes))
        ts = np.minimum(dials.at[dial] + dials.elapsed_ms[dial, step] / 1000, finish[dial]) - 0.005
        ts = ts + delay * rng.random(len(dial))
        teller.add(kind, dial * TRIES + step, dials.relay[dial, step], ts, dial)
