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
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from benchmarks import report
from benchmarks import simulated_fleet as fleet
from benchmarks.report import Row, row
from benchmarks.simulated_fleet import FleetPlan, FleetRun, LoggedEvent, RelayState
from benchmarks.sizes import FULL as FULL_SIZES
from benchmarks.sizes import QUICK, FleetSize, Sizes
from dmsg.address import PublicKey
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.ranks import sign_ranks
from dmsg.eventlog import schema as ev
from dmsg.eventlog.log import Encoder, short_node

NAME: Final = "fleet"
OPERATOR: Final = SecretKey(bytes(31) + b"\x07")
#: Targets of ranks, as factors: for the share of failed dials, and for the 99 % time of the others.
_FEWER_FAILURES: Final = 0.8
_FASTER_P99: Final = 0.7

_STEADY: Final = RelayState()
_SLOW: Final = RelayState(fleet.Path(delay_s=0.3))
_LOSSY: Final = RelayState(fleet.Path(delay_s=0.02, loss=0.3))
_FAILING: Final = RelayState(fleet.Path(delay_s=0.02, refusals=0.2), stalls_per_hour=240.0)
_STATES: Final = {"s": _STEADY, "l": _SLOW, "x": _LOSSY, "f": _FAILING, "o": _STEADY}
#: One word for each relay, one letter for each half phase: two of phase 1, then two of phase 2. ``o`` is over capacity.
FATES: Final = (
    *("ssss", "llll", "ssss", "ffff", "ssss", "xxxx", "ssss", "llls", "sssf", "slll", "ssss", "sfff"),
    *("lsss", "xxxs", "ssss", "oooo", "ffss", "fffs", "ssss", "ffff"),
)
_HALVES: Final = 2
VARIANTS: Final = ("nothing", "own", "ranks", "both")


def plans(size: FleetSize, seed: int = 1, fates: Sequence[str] = FATES) -> tuple[FleetPlan, FleetPlan]:
    """Phase 1 and phase 2."""

    def states(start: int) -> list[list[RelayState]]:
        return [[_STATES[one] for one in fate[start : start + _HALVES]] for fate in fates]

    full = {number: fleet.FULL for number, fate in enumerate(fates) if fate.startswith("o")}
    first = FleetPlan(states(0), full, size.clients, size.duration_s, size.dial_every_s, seed=seed)
    return first, replace(first, relays=states(_HALVES), starts_at_s=first.starts_at_s + size.duration_s + 120.0)


# --- ranks -----------------------------------------------------------------------------------------------------------


def reference_ranks(
    events: Iterable[LoggedEvent], now_s: float, *, window_s: int = 86_400, lifetime_s: int = 172_800
) -> bytes:
    """A signed document from clients' logs: simple on purpose, and independent of the log pipeline's.

    A relay is judged by four qualities: it lets clients in, it keeps them, transports open, and fast. Each is the share of
    good observations, where the newest count most, no client counts for more than :data:`_CLIENT_LIMIT` observations, and
    an imaginary one pulls towards :data:`_UNKNOWN`; speed is relative to the fastest relay. The score is the product of the
    four.
    """
    half_life_s = min(window_s, 120.0)
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
    shares = {relay: {what: _share(by_client) for what, by_client in found.items()} for relay, found in votes.items()}
    fastest = max((found["speed"] for found in shares.values()), default=1.0)
    relays = {}
    for relay, found in shares.items():
        parts = {**found, "speed": found["speed"] / fastest}
        relays[relay] = {
            "score": round(1000 * math.prod(parts.values())),
            **{member: round(1000 * parts[what]) for what, member in _ASKED.items()},
            "dials": seen[relay],
            "clients": len(set().union(*votes[relay].values())),
        }
    document = {
        "format": "dmsg-relay-ranks",
        "version": 1,
        "issued": int(now_s),
        "lifetime_s": lifetime_s,
        "window_s": window_s,
        "relays": relays,
        "excluded": {"clients": 0, "events": 0},
    }
    return sign_ranks(document, OPERATOR)


#: The qualities of a relay, and their members in the document.
_ASKED: Final = {"enter": "capacity", "stay": "drops", "open": "success", "speed": "latency"}
_UNKNOWN: Final = 0.8
_CLIENT_LIMIT: Final = 5.0


def _share(by_client: dict[PublicKey, list[float]]) -> float:
    good, total = _UNKNOWN, 1.0
    for one_good, one_total in by_client.values():
        counts = _CLIENT_LIMIT / max(one_total, _CLIENT_LIMIT)
        good, total = good + counts * one_good, total + counts * one_total
    return good / total


def _observations(line: LoggedEvent) -> list[tuple[str, str, float]]:
    """Relay, quality (of :data:`_ASKED`), and how well it went, from 0 to 1."""
    event = line.event
    if line.role != "client":
        return []
    match event:
        case ev.SessionUp():
            speed = 0.5 / (0.5 + event.duration_s)
            return [(event.server, "enter", 1.0), (event.server, "stay", 1.0), (event.server, "speed", speed)]
        case ev.SessionDown() if event.reason != "closed":
            return [(event.server, "stay" if event.duration_s else "enter", 0.0)]
        case ev.TransportOpened() if event.initiator == str(line.key):
            return [(event.server, "open", 1.0), (event.server, "speed", 250.0 / (250.0 + event.accept_ms))]
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
    seed: int = 1,
    variants: Sequence[str] = VARIANTS,
    ranks: bytes = b"",
    fates: Sequence[str] = FATES,
) -> Outcome:
    """Both phases. ``ranks`` replaces the ranks computed here; then phase 2 begins when that document was issued."""
    one, two = plans(size, seed, fates)
    first = fleet.run_fleet(one, measure=False)
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


_LABELS: Final = {"nothing": "without ranks", "own": "own measurements", "ranks": "ranks", "both": "ranks and own"}


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    """Success and times of each variant over all seeds; variants with ranks are compared with those without."""
    pooled = {name: pool([one.second[name] for one in outcomes]) for name in outcomes[0].second}
    base = pooled["nothing"]
    rows = []
    for name, label in _LABELS.items():
        runs = [one.second[name] for one in outcomes]
        judged = name in ("ranks", "both")
        most = _FEWER_FAILURES * _failing(base) if judged else None
        slowest = _FASTER_P99 * base.successful_ms(0.99) if judged else None
        each = pooled[name]
        rows += [
            row(NAME, f"{label}: dials", [float(len(each.dials))], ""),
            _spread(row(NAME, f"{label}: dials that fail", [_failing(each)], "%", at_most=most), map(_failing, runs)),
        ]
        for percent, limit in ((50, None), (95, None), (99, slowest)):
            times = [one.successful_ms(percent / 100) for one in runs]
            whole = [each.successful_ms(percent / 100)]
            rows.append(_spread(row(NAME, f"{label}: p{percent} of a dial", whole, "ms", at_most=limit), times))
    return rows


def pool(runs: Sequence[FleetRun]) -> FleetRun:
    """The dials of several runs as one run."""
    return FleetRun([dial for one in runs for dial in one.dials], [], runs[0].ended_at_s)


def _failing(run: FleetRun) -> float:
    return 100 * (1 - run.success)


def _spread(one: Row, values: Iterable[float]) -> Row:
    """``one`` with the smallest and the largest of the seeds."""
    each = [*values, one.value]
    return replace(one, low=min(each), high=max(each), repeats=len(each) - 1)


def run(sizes: Sizes) -> list[Row]:
    """Rows of every variant."""
    return rows_of([simulate(sizes.fleet, seed=seed) for seed in range(1, sizes.fleet.seeds + 1)])


# --- for the log pipeline ---------------------------------------------------------------------------------------------


def write_events(run: FleetRun, directory: Path) -> int:
    """Write the log of ``run`` as files of roles; gives the number of lines."""
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
            "relays": {str(fleet.relay_key(one, at).public_key): fate for at, fate in enumerate(FATES)},
        }
        print(json.dumps(summary))
        return 0
    ranks = options.ranks.read_bytes() if options.ranks is not None else b""
    facts = report.machine()
    # a document is about the relays of one seed
    rows = rows_of([simulate(size, ranks=ranks)]) if ranks else run(replace(FULL_SIZES, fleet=size))
    print(report.as_table(rows, facts), end="")
    return int(any(one.met is False for one in rows))


if __name__ == "__main__":
    sys.exit(main())
