"""The Reliable Message Bus of the synthetic fleet: its relays, twins' sessions with them, and their events.

Two relays federate with each other and with a strangers' relay, which fails often; the first relay is killed once. A few
twins are connected to both relays and call each other, and one twin sends too much.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np

from dmsg_logs.synthetic.fleet import End, Fleet, Floats, Ints, Run

#: Name of the relay that is not of the fleet.
STRANGE_RELAY: Final = "r9.bus.example"
#: Share of all lines that are about envelopes, federation and calls; those about sessions come on top.
_SHARE: Final = 0.04
_PARTS: Final = {"routed": 0.25, "calls": 0.4, "attempts": 0.2, "failures": 0.08, "limits": 0.04, "ranks": 0.03}
#: The columns of ``Routed.amounts``.
WAYS: Final = ("received", "ingested", "local", "stored", "fetched", "federated", "expired", "refused", "bytes")
#: Number of the first twin.
FIRST_TWIN: Final = 11


@dataclass(slots=True)
class TwinSessions:
    """Sessions of twins, one row each. ``twin`` and ``relay`` are nodes; each run has its own number for the session."""

    twin: Ints
    relay: Ints
    start: Floats
    end: Floats
    kind: Ints
    relay_conn: Ints
    twin_conn: Ints
    handshake_ms: Floats
    sent: Ints
    received: Ints


@dataclass(slots=True)
class Told:
    """Facts of one kind, one row for each line: which node writes it, when, its count, and its content."""

    node: Ints
    at: Floats
    count: Ints
    what: Ints  # which reason; 0 is none
    whom: Ints  # number of a twin, or which other relay
    value: Floats  # milliseconds, or a rate
    amounts: Ints  # a row of ``WAYS``


@dataclass(slots=True)
class Bus:
    """All of it."""

    sessions: TwinSessions
    routed: Told
    failures: Told
    limits: Told
    attempts: Told
    ranks: Told
    calls: Told


def twin_number(fleet: Fleet, node: Ints) -> Ints:
    """The number of the twin that a node is."""
    return node - (fleet.bus + fleet.bus_relays) + FIRST_TWIN


def make_bus(fleet: Fleet, rng: np.random.Generator, lines: int) -> Bus:
    """The bus of ``fleet``, with about ``_SHARE`` of ``lines`` to tell of besides sessions."""
    counts = {name: max(2, int(lines * _SHARE * share)) for name, share in _PARTS.items()}
    relays = np.arange(fleet.bus, fleet.bus + fleet.bus_relays)
    twins = np.arange(fleet.bus + fleet.bus_relays, fleet.bus + fleet.bus_relays + fleet.twins)
    numbers = twin_number(fleet, twins)

    def told(name: str, nodes: Ints, reasons: list[float], whom: Ints) -> Told:
        n = counts[name]
        why = rng.choice(len(reasons), n, p=reasons)
        return Told(
            rng.choice(nodes, n),
            np.sort(rng.uniform(fleet.start + 90, fleet.end, n)),
            np.where(rng.random(n) < 0.1, rng.integers(2, 400, n), 1),
            why,
            rng.choice(whom, n),
            rng.lognormal(2.0, 0.6, n),
            np.zeros((0, len(WAYS)), np.int64),
        )

    routed = told("routed", relays, [1.0], numbers)
    routed.amounts = _amounts(rng, len(routed.at))
    others = np.arange(fleet.bus_relays + 1)
    attempts, ranks = (told(name, relays, [1.0], others) for name in ("attempts", "ranks"))
    own = attempts.whom == attempts.node - fleet.bus  # none posts to itself
    attempts.whom[own] = fleet.bus_relays
    ranks.whom[:] = fleet.bus_relays
    ranks.value = rng.integers(0, 40, len(ranks.at)).astype(np.float64)
    strange = attempts.whom == fleet.bus_relays
    attempts.what = np.where(rng.random(len(own)) < np.where(strange, 0.35, 0.02), rng.integers(1, 4, len(own)), 0)
    attempts.value[attempts.what == 1] = 3_000.0
    calls = told("calls", twins, [0.94, 0.03, 0.01, 0.01, 0.01], numbers)
    calls.value[calls.what == 1] = 5_000.0
    return Bus(
        _sessions(fleet, rng, relays, twins),
        routed,
        told("failures", relays, [0.0, 0.6, 0.25, 0.1, 0.05], numbers),
        told("limits", relays, [1.0], numbers[:1]),
        attempts,
        ranks,
        calls,
    )


def _amounts(rng: np.random.Generator, n: int) -> Ints:
    received, ingested, fetched = rng.poisson(300, n), rng.poisson(80, n), rng.poisson(6, n)
    local, stored, federated, refused = rng.multinomial(received + ingested, [0.7, 0.05, 0.23, 0.02]).T
    columns = [received, ingested, local, stored, fetched, federated, refused // 4, refused]
    return np.stack([*columns, (received + ingested) * 437], axis=1).astype(np.int64)


def _sessions(fleet: Fleet, rng: np.random.Generator, relays: Ints, twins: Ints) -> TwinSessions:
    rows: list[tuple[int, int, float, float, int]] = []
    for twin, relay in product(twins.tolist(), relays.tolist()):
        for own, theirs in product(fleet.runs_of(twin), fleet.runs_of(relay)):
            since, until = max(own.start, theirs.start), min(own.end, theirs.end)
            at = since + float(rng.uniform(0.3, 2.0))
            while at < until:
                end, kind = at + float(rng.exponential(60 * 3_600)), End.BROKEN
                if end >= until:
                    end, kind = until, End.KILLED if theirs.killed and theirs.end < own.end else End.OPEN
                rows.append((twin, relay, at, end, kind))
                at = end + float(rng.uniform(0.5, 3.5))
    table = np.array(rows, np.float64).reshape(-1, 5)
    twin_, relay_, kind_ = (table[:, column].astype(np.int64) for column in (0, 1, 4))
    start, n = table[:, 2].copy(), len(table)
    return TwinSessions(
        twin_,
        relay_,
        start,
        table[:, 3].copy(),
        kind_,
        _numbers(fleet, relay_, start),
        _numbers(fleet, twin_, start),
        rng.lognormal(np.log(14.0), 0.4, n),
        rng.poisson(900, n),
        rng.poisson(900, n),
    )


def _numbers(fleet: Fleet, node: Ints, start: Floats) -> Ints:
    """The number of each session in the run of its node."""
    numbers = np.zeros(len(node), np.int64)
    for run in fleet.runs:
        own = np.flatnonzero((node == run.node) & _within(start, run))
        numbers[own[np.argsort(start[own], kind="stable")]] = np.arange(1, len(own) + 1)
    return numbers


def _within(at: Floats, run: Run) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    inside: np.ndarray[tuple[int], np.dtype[np.bool_]] = (at >= run.start) & (at < run.end)
    return inside
