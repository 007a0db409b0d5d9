"""The members of the synthetic fleet: nodes, runs of their programs, sessions between them.

Everything follows from the seed. Times are Unix seconds as floats.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: Monday, 5 January 2026, 00:00 UTC: the first day of a fleet unless another is asked for.
START: Final = 1_767_571_200.0
DAY_S: Final = 86_400.0
HOUR_S: Final = 3_600.0
_FIELD: Final = 2**256 - 2**32 - 977
#: Protocols of relays; every fourth relay speaks that of the messaging system.
DMSG: Final = "dmsg"
MESSAGING: Final = "messaging"
RMB: Final = "rmb"
_MESSAGING_SHARE: Final = 4
#: Relays of the Reliable Message Bus, and how many clients there are for one of its twins.
_BUS_RELAYS: Final = 2
_CLIENTS_PER_TWIN: Final = 4
#: Homes of a client: the relays its entry names.
HOMES: Final = 3


class End(IntEnum):
    """How a session ended."""

    OPEN = 0  # still open when the logs end
    KILLED = 1  # the relay was killed: its log does not tell the end
    DRAINED = 2  # the relay was stopped
    BROKEN = 3  # the network
    CLIENT_STOPPED = 4
    CLIENT_KILLED = 5
    ABUSE = 6  # the relay dropped it


def public_key(*words: object) -> str:
    """A point of secp256k1, compressed, as 66 hex digits, whose secret is unknown; the same for the same words."""
    digest = hashlib.sha256(repr(words).encode()).digest()
    while True:
        x = int.from_bytes(digest, "big")
        square = (pow(x, 3, _FIELD) + 7) % _FIELD
        if x < _FIELD and pow(square, (_FIELD - 1) // 2, _FIELD) == 1:
            return f"{2 + digest[0] % 2:02x}{x:064x}"
        digest = hashlib.sha256(digest).digest()


@dataclass(frozen=True, slots=True)
class Node:
    """One program: a relay, a client, discovery or a shipper. ``name`` is what its lines carry under ``node``.

    ``protocol`` is that of a relay, and empty for others.
    """

    role: str
    key: str
    name: str
    address: str
    protocol: str = ""

    @property
    def older(self) -> bool:
        """Whether it runs the version of the program before this one: about every ninth relay and client does.

        That version knows of one protocol only.
        """
        return self.protocol != MESSAGING and bool(self.key) and self.key[-2:] > "e2"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a node's program. ``clean`` is false if it was killed, or still runs when the logs end."""

    node: int
    boot: str
    start: float
    end: float
    clean: bool
    killed: bool


@dataclass(frozen=True, slots=True)
class Outage:
    """A time without a relay, which was ``killed`` or stopped in good order."""

    relay: int
    down: float
    up: float
    killed: bool


@dataclass(slots=True)
class Sessions:
    """Connections between clients and relays, a row each, ordered by pair and time."""

    client: Ints
    relay: Ints
    start: Floats
    end: Floats
    kind: Ints
    first: Bools
    conn: Ints
    handshake_ms: Floats


@dataclass(slots=True)
class Fleet:
    """The whole fleet. Indices of nodes: relays first, then clients, then discovery, then a shipper for each relay, then
    the relays of the Reliable Message Bus, then its twins, whose programs are clients of nothing else.

    Relays of the messaging system come after the other relays. Every client speaks dmsg; about every second client also
    speaks the messaging system, with the same key and in the same log (``bilingual``, by client). ``homes`` are the relays
    of either protocol in a client's entries, one row for each client, -1 where there are fewer.
    """

    start: float
    end: float
    nodes: list[Node]
    relays: int
    clients: int
    runs: list[Run] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    dmsg_relays: int = 0
    bus_relays: int = 0
    twins: int = 0
    bilingual: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    homes: dict[str, Ints] = field(default_factory=dict)
    slow: int = -1
    failing: int = -1
    dark: int = -1
    victim: int = -1
    abusers: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    liars: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def discovery(self) -> int:
        """Index of discovery."""
        return self.relays + self.clients

    @property
    def bus(self) -> int:
        """Index of the first relay of the Reliable Message Bus."""
        return self.discovery + 1 + self.relays

    def speaks(self, client: int, relay: int) -> bool:
        """Whether two nodes can be connected."""
        return relay < self.dmsg_relays or bool(self.bilingual[client - self.relays])

    def runs_of(self, node: int) -> list[Run]:
        """The runs of one node, in order."""
        return [run for run in self.runs if run.node == node]


def make_fleet(rng: np.random.Generator, seed: int, *, relays: int, clients: int, start: float, days: int) -> Fleet:
    """A fleet of ``relays`` (two or more) and ``clients`` (four or more) with its planted faults."""
    dmsg_relays = relays - relays // _MESSAGING_SHARE
    protocols = [DMSG if at < dmsg_relays else MESSAGING for at in range(relays)]
    nodes = [
        _node("server", seed, at, f"198.51.{at // 200}.{at % 200 + 10}:8080", protocol)
        for at, protocol in enumerate(protocols)
    ]
    nodes += [_node("client", seed, at, f"10.{at // 40000}.{at // 200 % 200}.{at % 200 + 10}") for at in range(clients)]
    nodes.append(Node("discovery", "", "discovery", "tcp:9090"))
    nodes += [Node("shipper", "", "shipper", "")] * relays
    fleet = Fleet(start, start + days * DAY_S, nodes, relays, clients)
    fleet.bus_relays, fleet.twins = _BUS_RELAYS, max(2, clients // _CLIENTS_PER_TWIN)
    nodes += [Node("server", "", f"r{at + 1}.bus.example", "tcp:8081", RMB) for at in range(fleet.bus_relays)]
    nodes += [Node("client", "", f"twin-{at + 11}", f"10.250.0.{at + 10}:40000") for at in range(fleet.twins)]
    fleet.dmsg_relays = dmsg_relays
    fleet.bilingual = np.array(
        [at % 2 == 0 and not node.older for at, node in enumerate(nodes[relays : relays + clients])]
    )
    fleet.dark, fleet.slow, fleet.failing, fleet.victim = 0, 1, 2 % dmsg_relays, 3 % dmsg_relays
    odd = rng.permutation(clients) + relays
    abusers = max(1, clients // 40)
    fleet.abusers = np.sort(odd[:abusers])
    fleet.liars = np.sort(odd[abusers : abusers + max(1, clients // 50)])
    fleet.homes = {DMSG: _choose_homes(rng, 0, dmsg_relays, clients)}
    if dmsg_relays < relays:
        fleet.homes[MESSAGING] = _choose_homes(rng, dmsg_relays, relays, clients)
    fleet.outages = _plan_outages(fleet, rng)
    for node in range(len(nodes)):
        fleet.runs += _plan_runs(fleet, node, rng)
    return fleet


def _node(role: str, seed: int, at: int, address: str, protocol: str = "") -> Node:
    key = public_key("dmsg-logs", seed, role, at)
    return Node(role, key, key[:16], address, protocol)


def _choose_homes(rng: np.random.Generator, first: int, end: int, clients: int) -> Ints:
    """Some of the relays from ``first`` to ``end`` (exclusive) for each client."""
    count = end - first
    weights, some = rng.dirichlet(np.full(count, 20.0)), min(HOMES, count)
    homes = np.full((clients, HOMES), -1, np.int64)
    for row in homes:
        row[:some] = first + rng.choice(count, some, replace=False, p=weights)
    return homes


def _plan_outages(fleet: Fleet, rng: np.random.Generator) -> list[Outage]:
    """One long outage in a busy hour, relays that are restarted one after the other, and one that crashes at times."""
    length = fleet.end - fleet.start
    middle = fleet.start + np.floor(length * 0.45 / DAY_S) * DAY_S + 14.2 * HOUR_S
    down = middle if middle < fleet.end - HOUR_S else fleet.start + 0.45 * length
    outages = [Outage(fleet.dark, float(down), float(down) + 25 * 60, True)]
    for relay in range(fleet.relays):
        at = fleet.start + length * 0.62 + relay * 600.0
        outages.append(Outage(relay, at, at + 40.0, False))
    for part in (0.21, 0.83):
        at = fleet.start + length * part + float(rng.uniform(0, 1800))
        outages.append(Outage(fleet.failing, at, at + 75.0, True))
    return sorted(outages, key=lambda outage: outage.down)


def _plan_runs(fleet: Fleet, node: int, rng: np.random.Generator) -> list[Run]:
    """Runs between the times a node is away."""
    if node < fleet.relays:
        away = [(one.down, one.up, one.killed) for one in fleet.outages if one.relay == node]
    elif node == fleet.discovery:
        at = fleet.start + (fleet.end - fleet.start) * 0.55
        away = [(at, at + 30.0, False)]
    elif node == fleet.bus:
        at = fleet.start + (fleet.end - fleet.start) * 0.4
        away = [(at, at + 20.0, True)]
    elif node > fleet.discovery:
        away = []
    else:
        away = []
        for at in np.sort(rng.uniform(fleet.start, fleet.end, rng.poisson(0.15 * (fleet.end - fleet.start) / DAY_S))):
            if not away or at > away[-1][1] + HOUR_S:
                away.append(
                    (float(at), float(at) + float(rng.exponential(1.5 * HOUR_S)) + 20.0, bool(rng.random() < 0.4))
                )
    runs = []
    since = fleet.start + float(rng.uniform(0, 30)) + (60.0 if fleet.relays <= node < fleet.discovery else 0.0)
    for down, up, killed in away:
        if down > since + 300 and down < fleet.end:
            runs.append(Run(node, rng.bytes(8).hex(), since, down, not killed, killed))
            since = up
    if since < fleet.end:
        runs.append(Run(node, rng.bytes(8).hex(), since, fleet.end, False, False))
    return runs


def make_sessions(fleet: Fleet, rng: np.random.Generator) -> Sessions:
    """Who was connected to whom: every client to every relay it can talk to whenever both run, except for breaks."""
    rows: list[tuple[int, int, float, float, int, bool]] = []
    abusers = set(fleet.abusers.tolist())
    runs: list[list[Run]] = [[] for _ in fleet.nodes]
    for run in fleet.runs:
        runs[run.node].append(run)
    pairs = product(range(fleet.relays, fleet.relays + fleet.clients), range(fleet.relays))
    for client, relay in (pair for pair in pairs if fleet.speaks(*pair)):
        mean_s = 8 * HOUR_S if client in abusers else 30 * HOUR_S
        for own in runs[client]:
            first = True
            for theirs in runs[relay]:
                since, until = max(own.start, theirs.start), min(own.end, theirs.end)
                at = since + float(rng.uniform(0.3, 2.0) if since == own.start else rng.uniform(1.0, 40.0))
                while at < until:
                    end = at + float(rng.exponential(mean_s))
                    kind = End.ABUSE if client in abusers and rng.random() < 0.7 else End.BROKEN
                    if end >= until:
                        end, kind = until, _last(fleet, own, theirs)
                    rows.append((client, relay, at, end, kind, first))
                    first = False
                    at = end + float(rng.uniform(0.5, 3.5))
    table = np.array(rows, np.float64)
    relays = table[:, 1].astype(np.int64)
    sessions = Sessions(
        table[:, 0].astype(np.int64),
        relays,
        table[:, 2].copy(),
        table[:, 3].copy(),
        table[:, 4].astype(np.int64),
        table[:, 5] > 0,
        np.zeros(len(rows), np.int64),
        np.zeros(len(rows), np.float64),
    )
    sessions.handshake_ms = rng.lognormal(np.log(28.0), 0.5, len(rows)) * np.where(relays == fleet.slow, 6.0, 1.0)
    _number(fleet, sessions)
    return sessions


def _last(fleet: Fleet, own: Run, theirs: Run) -> End:
    if min(own.end, theirs.end) >= fleet.end:
        return End.OPEN
    if theirs.end <= own.end:
        return End.KILLED if theirs.killed else End.DRAINED
    return End.CLIENT_KILLED if own.killed else End.CLIENT_STOPPED


def _number(fleet: Fleet, sessions: Sessions) -> None:
    """Number connections within each run of their relay, in the order they were opened."""
    for relay in range(fleet.relays):
        for run in fleet.runs_of(relay):
            chosen = np.flatnonzero(
                (sessions.relay == relay) & (sessions.start >= run.start) & (sessions.start < run.end)
            )
            ordered = chosen[np.argsort(sessions.start[chosen], kind="stable")]
            sessions.conn[ordered] = np.arange(1, len(ordered) + 1)


class SessionIndex:
    """Finds the session between a client and a relay at a time."""

    def __init__(self, fleet: Fleet, sessions: Sessions) -> None:
        self._fleet = fleet
        self._span = 2.0 * (fleet.end - fleet.start) + 1e6
        self._keys = self._key(sessions.client, sessions.relay, sessions.start)
        self._sessions = sessions

    def _key(self, client: Ints, relay: Ints, at: Floats) -> Floats:
        pair = client * self._fleet.relays + relay
        keys: Floats = pair * self._span + (at - self._fleet.start)
        return keys

    def find(self, client: Ints, relay: Ints, at: Floats) -> Ints:
        """Row of the session each pair had at its time; -1 where it had none."""
        row = np.searchsorted(self._keys, self._key(client, relay, at), side="right") - 1
        safe = np.maximum(row, 0)
        found = self._sessions
        good = (row >= 0) & (found.client[safe] == client) & (found.relay[safe] == relay) & (found.end[safe] > at)
        return np.where(good, row, -1)


class RunIndex:
    """Finds the run of a node at a time."""

    def __init__(self, fleet: Fleet) -> None:
        places = sorted(range(len(fleet.runs)), key=lambda place: (fleet.runs[place].node, fleet.runs[place].start))
        self._runs = [fleet.runs[place] for place in places]
        self._origin = fleet.start
        self._span = 2.0 * (fleet.end - fleet.start) + 1e6
        self._node = np.array([run.node for run in self._runs], np.int64)
        self._end = np.array([run.end for run in self._runs], np.float64)
        self._keys = self._node * self._span + np.array([run.start for run in self._runs]) - self._origin
        self._places = np.array(places, np.int64)

    def find(self, node: Ints, at: Floats, *, grace_s: float = 0.0) -> Ints:
        """Index (in ``fleet.runs``) of the run each node was in, or had left at most ``grace_s`` ago; -1 for none."""
        row = np.searchsorted(self._keys, node * self._span + at - self._origin, side="right") - 1
        safe = np.maximum(row, 0)
        good = (row >= 0) & (self._node[safe] == node) & (at < self._end[safe] + grace_s)
        return np.where(good, self._places[safe], -1)


def as_dict(fleet: Fleet) -> dict[str, Any]:
    """The planted faults of the fleet, for the truth."""

    def key(node: int) -> str:
        return fleet.nodes[node].key

    return {
        "protocols": {node.key: node.protocol for node in fleet.nodes[: fleet.relays]},
        "slow_relay": key(fleet.slow),
        "failing_relay": key(fleet.failing),
        "outages": [
            {"relay": key(one.relay), "down": one.down, "up": one.up, "killed": one.killed} for one in fleet.outages
        ],
        "abusive_keys": [key(int(node)) for node in fleet.abusers],
        "lying_keys": [key(int(node)) for node in fleet.liars],
        "slandered_relay": key(fleet.victim),
        "bus_relays": [node.name for node in fleet.nodes[fleet.bus : fleet.bus + fleet.bus_relays]],
        "relays": [node.key for node in fleet.nodes[: fleet.relays]],
        "clients": [node.key for node in fleet.nodes[fleet.relays : fleet.discovery]],
    }
