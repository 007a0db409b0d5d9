"""What relay ranks and clients' own measurements are worth: a simulated fleet with slow and failing relays.

Phase 1 runs without ranks and gives a log of events. Phase 2 follows it, four times with the same seed: with nothing,
with what clients measure themselves, with ranks computed from phase 1's log, and with both. Halfway through each phase
some relays heal and others fail, so that the ranks are partly wrong by then. Time is a fake clock's: the figures do not
depend on the machine.

``python -m benchmarks fleet`` computes the ranks with the small function here. ``python -m benchmarks.fleet --events DIR``
writes phase 1's log as the roles would, for the log pipeline; ``--ranks FILE`` takes the document that came of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from benchmarks import report
from benchmarks.report import Row, row
from benchmarks.sizes import FULL as FULL_SIZES
from benchmarks.sizes import QUICK, FleetSize, Sizes
from dmsg.address import PublicKey
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.ranks import sign_ranks
from dmsg.ops import events as ev
from dmsg.ops.logs import Encoder, short_node
from dmsg.testing import fleet
from dmsg.testing.fleet import FleetPlan, FleetRun, LoggedEvent, RelayState

NAME: Final = "fleet"
OPERATOR: Final = SecretKey(bytes(31) + b"\x07")
#: How much ranks and measurements together have to improve on nothing at all.
_FEWER_FAILURES: Final = 0.5
_FASTER_P99: Final = 0.5

_STEADY: Final = RelayState()
_SLOW: Final = RelayState(fleet.Path(delay_s=0.3))
_LOSSY: Final = RelayState(fleet.Path(delay_s=0.02, loss=0.3))
_FAILING: Final = RelayState(fleet.Path(delay_s=0.02, refusals=0.2), stalls_per_hour=240.0)
_STATES: Final = {"s": _STEADY, "l": _SLOW, "x": _LOSSY, "f": _FAILING, "o": _STEADY}
#: One word a relay, one letter a half of a phase: first and second of phase 1, then of phase 2. ``o`` is over capacity.
_FATES: Final = (
    *("ssss", "llll", "ssss", "ffff", "ssss", "xxxx", "ssss", "llls", "sssf", "slll", "ssss", "sfff"),
    *("lsss", "xxxs", "ssss", "oooo", "ffss", "fffs", "sssl", "ffff"),
)
_HALVES: Final = 2
VARIANTS: Final = ("nothing", "own", "ranks", "both")


def plans(size: FleetSize) -> tuple[FleetPlan, FleetPlan]:
    """Phase 1 and phase 2."""
    fates = _FATES[:: size.every]

    def states(start: int) -> list[list[RelayState]]:
        return [[_STATES[one] for one in fate[start : start + _HALVES]] for fate in fates]

    full = {number: fleet.FULL for number, fate in enumerate(fates) if fate.startswith("o")}
    first = FleetPlan(states(0), full, size.clients, size.duration_s, size.dial_every_s)
    # The dials, faults and choices of phase 2 are others, its keys are not.
    return first, replace(first, relays=states(_HALVES), starts_at_s=first.starts_at_s + size.duration_s + 120.0)


# --- ranks -----------------------------------------------------------------------------------------------------------


def reference_ranks(
    events: Iterable[LoggedEvent], now_s: float, *, window_s: int = 86_400, lifetime_s: int = 172_800
) -> bytes:
    """A signed document from what clients logged: simple on purpose, and independent of the log pipeline's.

    Four things are asked of a relay: that it lets clients in, that it keeps them, that transports come about, and how
    fast. Each is the share of what went well, the newest counting most, no client for more than :data:`_CLIENT_LIMIT`
    observations, and one that is nobody's pulling towards :data:`_UNKNOWN`. The score is the product of the four.
    """
    half_life_s = min(window_s, 600.0)
    votes: dict[str, dict[str, dict[PublicKey, list[float]]]] = {}
    seen: dict[str, int] = defaultdict(int)
    for line in events:
        for relay, what, quality in _observations(line):
            seen[relay] += 1
            amount = 0.5 ** ((now_s - line.ts) / half_life_s)
            by_client = votes.setdefault(relay, {what: {} for what in _ASKED})[what]
            vote = by_client.setdefault(line.key, [0.0, 0.0])
            vote[0] += amount * quality
            vote[1] += amount
    document = {
        "format": "dmsg-relay-ranks",
        "version": 1,
        "issued": int(now_s),
        "lifetime_s": lifetime_s,
        "window_s": window_s,
        "relays": {relay: _rank(found, seen[relay]) for relay, found in votes.items()},
        "excluded": {"clients": 0, "events": 0},
    }
    return sign_ranks(document, OPERATOR)


_ASKED: Final = ("enter", "stay", "open", "speed")
_UNKNOWN: Final = 0.8
_CLIENT_LIMIT: Final = 5.0


def _rank(votes: dict[str, dict[PublicKey, list[float]]], seen: int) -> dict[str, int]:
    means = {}
    for what, by_client in votes.items():
        good, total = _UNKNOWN, 1.0
        for one_good, one_total in by_client.values():
            counts = _CLIENT_LIMIT / max(one_total, _CLIENT_LIMIT)
            good, total = good + counts * one_good, total + counts * one_total
        means[what] = good / total
    clients = set().union(*votes.values())
    return {
        "score": round(1000 * means["enter"] * means["stay"] * means["open"] * means["speed"]),
        "success": round(1000 * means["open"]),
        "latency": round(1000 * means["speed"]),
        "capacity": round(1000 * means["enter"]),
        "drops": round(1000 * means["stay"]),
        "dials": seen,
        "clients": len(clients),
    }


def _observations(line: LoggedEvent) -> list[tuple[str, str, float]]:
    """Relay, which of :data:`_ASKED`, and how well it went, from 0 to 1."""
    event = line.event
    if line.role != "client":
        return []
    match event:
        case ev.SessionUp():
            speed = 1.0 / (1.0 + event.duration_s)
            return [(event.server, "enter", 1.0), (event.server, "stay", 1.0), (event.server, "speed", speed)]
        case ev.SessionDown() if event.reason != "closed":
            return [(event.server, "stay" if event.duration_s else "enter", 0.0)]
        case ev.TransportOpened() if event.initiator == str(line.key):
            return [(event.server, "open", 1.0), (event.server, "speed", 500.0 / (500.0 + event.accept_ms))]
        case ev.DialFinished():
            leaves = [one for one in json.loads(event.attempts) if one["stage"] in ("request", "accept")]
            return [(one["server"], "open", 0.0) for one in leaves if one["server"]]
    return []


# --- running ---------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Phase 1, and phase 2 by variant."""

    first: FleetRun
    second: dict[str, FleetRun]


def simulate(
    size: FleetSize,
    *,
    variants: Sequence[str] = VARIANTS,
    ranks: bytes = b"",
    on_first: Callable[[FleetRun], None] = lambda run: None,
) -> Outcome:
    """Both phases. ``ranks`` takes the place of those computed here; then phase 2 begins when that was issued."""
    one, two = plans(size)
    first = fleet.run_fleet(one, measure=False)
    on_first(first)
    trusted = [OPERATOR.public_key]
    if ranks:
        document = json.loads(ranks)
        trusted = [PublicKey.parse(document["issuer"])]
        two = replace(two, starts_at_s=max(two.starts_at_s, document["issued"] + 60.0))
    else:
        ranks = reference_ranks(first.events, first.ended_at_s)
    second = {}
    for name in variants:
        document = ranks if name in ("ranks", "both") else b""
        second[name] = fleet.run_fleet(two, measure=name in ("own", "both"), ranks=document, trusted=trusted)
    return Outcome(first, second)


def rows_of(outcome: Outcome) -> list[Row]:
    """Success and times of each variant; the last one's are held against the first one's."""
    rows = []
    base = outcome.second["nothing"]
    for name, run in outcome.second.items():
        judged = name == "both"
        label = {"nothing": "without ranks", "own": "own measurements", "ranks": "ranks", "both": "ranks and own"}[name]
        failed = 100 * (1 - run.success)
        most = _FEWER_FAILURES * 100 * (1 - base.success) if judged else None
        slowest = _FASTER_P99 * base.successful_ms(0.99) if judged else None
        rows += [
            row(NAME, f"{label}: dials", [float(len(run.dials))], ""),
            row(NAME, f"{label}: dials that fail", [failed], "%", at_most=most),
            row(NAME, f"{label}: p50 of a dial", [run.successful_ms(0.5)], "ms"),
            row(NAME, f"{label}: p99 of a dial", [run.successful_ms(0.99)], "ms", at_most=slowest),
        ]
    return rows


def run(sizes: Sizes) -> list[Row]:
    """Rows of every variant."""
    return rows_of(simulate(sizes.fleet))


# --- for the log pipeline ---------------------------------------------------------------------------------------------


def write_events(run: FleetRun, directory: Path) -> int:
    """The log of ``run`` in files as roles finish them; how many lines."""
    import zstandard

    nodes: dict[tuple[str, PublicKey], list[LoggedEvent]] = defaultdict(list)
    for line in run.events:
        nodes[line.role, line.key].append(line)
    lines = 0
    for (role, key), logged in nodes.items():
        encoder = Encoder(role, short_node(key), bytes(key)[-8:].hex())
        hours: dict[datetime, list[bytes]] = defaultdict(list)
        for line in logged:
            hour = datetime.fromtimestamp(line.ts, timezone.utc).replace(minute=0, second=0, microsecond=0)
            hours[hour].append(encoder.encode(line.event, line.ts))
        for number, (hour, encoded) in enumerate(sorted(hours.items())):
            folder = directory / f"role={role}" / f"date={hour:%Y-%m-%d}" / f"hour={hour:%H}"
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{short_node(key)}-{bytes(key)[-8:].hex()}-{number:06d}-{len(encoded)}.jsonl.zst"
            part = folder / f"{name}.part"
            part.write_bytes(zstandard.compress(b"".join(encoded)))
            os.replace(part, folder / name)
            lines += len(encoded)
    return lines


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 when a target was missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.fleet", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=Path, metavar="DIR", help="write phase 1's event log there and end")
    parser.add_argument("--ranks", type=Path, metavar="FILE", help="relay ranks to use in phase 2")
    parser.add_argument("--quick", action="store_true", help="a smaller fleet for a shorter time")
    options = parser.parse_args(arguments)
    size = (QUICK if options.quick else FULL_SIZES).fleet
    if options.events is not None and options.ranks is None:
        one, _ = plans(size)
        done = fleet.run_fleet(one, measure=False)
        summary: dict[str, Any] = {
            "lines": write_events(done, options.events),
            "ended_at": done.ended_at_s,
            "relays": {str(fleet.relay_key(one, at).public_key): fate for at, fate in enumerate(_FATES[:: size.every])},
        }
        print(json.dumps(summary))
        return 0
    ranks = options.ranks.read_bytes() if options.ranks is not None else b""
    facts = report.machine()
    rows = rows_of(simulate(size, ranks=ranks))
    print(report.as_table(rows, facts), end="")
    return int(any(one.met is False for one in rows))


if __name__ == "__main__":
    sys.exit(main())
