"""The run: load, faults and samples until the time is up, then the results."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.kills import Findings, compare
from benchmarks.processes import Cast
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes, SoakSize
from benchmarks.soak.levels import NAMES, Levels, Verdict
from benchmarks.soak.network import Network

NAME: Final = "soak"
#: Share of each life that is ignored, at most 15 minutes: caches fill, and memory pools find their size.
WARM_UP_SHARE: Final = 0.2
WARM_UP_LIMIT_S: Final = 900.0
#: Discovery is restarted during this part of a run only.
YOUNG_SHARE: Final = 0.25
#: Share of short transports that must end well: a killed relay ends those that run through it.
OK_SHARE: Final = 0.97
#: Seconds after the load for streams to send everything, and for relays to forget every transport.
_FINISH_LIMIT_S: Final = 60.0
_FORGET_LIMIT_S: Final = 20.0
_SLICE_S: Final = 4.0
_TURN_S: Final = 0.2
_IDS: Final = ("Member.legs", "Connection.streams")

Tell = Callable[[str], None]


@dataclass
class Outcome:
    """The results of a run."""

    seed: int
    seconds: float
    warm_up_s: float
    streams: Findings
    levels: Levels
    faults: Counter[str] = field(default_factory=Counter)
    strangers: dict[str, int] = field(default_factory=dict)
    #: Short transports by result; reasons why they were not opened.
    short: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    lookups: Counter[str] = field(default_factory=Counter)
    pings: int = 0
    ping_fault: str = ""
    #: Transport ids still in use after everything was closed.
    ids_left: int = 0
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def ok_share(self) -> float:
        """The share of short transports that ended well; those held back do not count."""
        begun = sum(self.short.values()) - self.short["held back"]
        return self.short["ok"] / begun if begun else 0.0

    @property
    def grown(self) -> list[Verdict]:
        """Levels that are not flat."""
        return [one for one in self.verdicts if not one.flat]


def run(sizes: Sizes) -> list[Row]:
    """Rows of losses and of growth."""
    return rows_of(soak(sizes.soak, choose_seed()))


def choose_seed() -> int:
    """``SOAK_SEED`` of the environment, else a new one; it is printed."""
    seed = int(os.environ.get("SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
    tell(f"SOAK_SEED={seed}")
    return seed


def tell(line: str) -> None:
    """Print a line of progress."""
    print(f"soak: {line}", file=sys.stderr, flush=True)


def soak(size: SoakSize, seed: int, levels_of: Callable[[Levels], None] = lambda _: None) -> Outcome:
    """Run it once; nothing is left behind. ``levels_of`` gets the samples from time to time."""
    chance = random.Random(seed)
    began = time.monotonic()
    levels = Levels(lambda: time.monotonic() - began)
    warm_up_s = min(WARM_UP_SHARE * size.seconds, WARM_UP_LIMIT_S)
    outcome = Outcome(seed, size.seconds, warm_up_s, Findings(size.streams, seed=seed), levels)
    with tempfile.TemporaryDirectory(prefix="dmsg-soak-", ignore_cleanup_errors=True) as home, Cast() as cast:
        network = Network(cast, levels, Path(home), size, seed)
        network.begin()
        levels.loaded()
        tell(f"{len(levels.series)} processes under load for {size.seconds:g} s")
        _go_on(network, outcome, chance, began=time.monotonic(), levels_of=levels_of)
        _end(network, outcome)
    outcome.verdicts = levels.verdicts(warm_up_s)
    return outcome


def _go_on(
    network: Network, outcome: Outcome, chance: random.Random, *, began: float, levels_of: Callable[[Levels], None]
) -> None:
    """Load, faults and samples until the time is up."""
    size, levels = network.size, outcome.levels
    sample_at = count_at = 0.0
    fault_at = size.fault_every_s
    misbehave = {"seconds": _SLICE_S, "per_s": size.strangers_per_s}
    network.strangers.send("misbehave", **misbehave)
    slice_at, settle_at = _SLICE_S, outcome.warm_up_s
    while (now := time.monotonic() - began) < size.seconds:
        if now >= slice_at:
            outcome.strangers = network.strangers.answer()
            network.strangers.send("misbehave", **misbehave)
            slice_at = now + _SLICE_S
        if now >= sample_at:
            levels.sample()
            sample_at = now + size.sample_every_s
        if now >= count_at:
            levels.count()
            levels_of(levels)
            count_at = now + size.count_every_s
        if now >= settle_at:
            network.settle()
            settle_at = float("inf")
        if now >= fault_at:
            name = network.fault(chance, young=now < YOUNG_SHARE * size.seconds)
            outcome.faults[name] += 1
            fault_at = max(fault_at + size.fault_every_s, time.monotonic() - began + 1)
        time.sleep(_TURN_S)
    outcome.strangers = network.strangers.answer()
    outcome.streams.elapsed_s = time.monotonic() - began


def _end(network: Network, outcome: Outcome) -> None:
    """End the load, compare sent with received data, and check that every transport is forgotten."""
    network.strangers.close()
    pair = (network.dialling, network.answering)
    loaded = [*pair, *(network.base or ())]
    for one in loaded:
        one.ask("calm")
    time.sleep(1.0)  # let transports in progress end
    for one in loaded:
        _take(one.ask("calm"), outcome)
    if network.tcp is not None:
        _take(network.tcp[0].ask("calm"), outcome)
        network.tcp[0].close()
    for one in pair:
        one.send("finish", limit_s=_FINISH_LIMIT_S)
    for one in pair:
        one.answer(_FINISH_LIMIT_S + 10)
    compare(network.dialling.ask("result"), network.answering.ask("result"), outcome.streams)
    give_up = time.monotonic() + _FORGET_LIMIT_S
    holders = [*loaded, *(relay.process for relay in network.relays)]
    while True:
        tables = [one.ask("census")["tables"] for one in holders]
        outcome.ids_left = sum(one.get(name, 0) for one in tables for name in _IDS)
        if not outcome.ids_left or time.monotonic() > give_up:
            return
        time.sleep(0.5)


def _take(result: dict[str, Any], outcome: Outcome) -> None:
    outcome.short.update(result["results"])
    outcome.reasons.update(result["reasons"])
    outcome.lookups.update(result.get("lookups", {}))
    outcome.pings += result.get("ping_rounds", 0)
    outcome.ping_fault = outcome.ping_fault or result.get("ping_fault", "")


# --- what is printed ---------------------------------------------------------------------------------------------------


def problems(outcome: Outcome) -> list[str]:
    """Everything that did not hold."""
    found = list(outcome.streams.faults)
    if outcome.streams.lost_bytes:
        found.append(f"{outcome.streams.lost_bytes} bytes lost")
    if outcome.short["altered"]:
        found.append(f"{outcome.short['altered']} short transports brought back other bytes")
    if outcome.ok_share < OK_SHARE:
        found.append(f"{outcome.ok_share:.1%} of the short transports came to a good end: {dict(outcome.reasons)}")
    if outcome.ping_fault:
        found.append(f"ping-pong: {outcome.ping_fault}")
    if outcome.ids_left:
        found.append(f"{outcome.ids_left} transport ids still in use after the end")
    for one in outcome.grown:
        found.append(f"not flat: {_line(one)}")
        for name, first, last in outcome.levels.grown(one.role, outcome.warm_up_s):
            found.append(f"    {name}: {first:,.1f} to {last:,.1f}")
    return found


def _line(one: Verdict) -> str:
    name, unit = NAMES[one.level]
    line = one.fit
    return (
        f"{one.role}, {name}: {line.slope_per_h:+,.1f} ± {line.error_per_h:,.1f} {unit} an hour "
        f"(bound {one.bound_per_h:,.1f}) at {line.mean:,.0f}"
    )


def rows_of(outcome: Outcome) -> list[Row]:
    """The rows of ``make bench``."""
    for line in problems(outcome):
        tell(line)
    streams = outcome.streams
    what = f"{outcome.seconds / 60:.3g} min, {sum(outcome.faults.values())} faults"
    rows = [
        row(NAME, f"{what}: streams with a fault", [len(streams.faults) + bool(outcome.ping_fault)], "", at_most=0),
        row(NAME, f"{what}: lost", [streams.lost_bytes], "bytes", at_most=0),
        row(NAME, f"{what}: verified on streams", [streams.verified_bytes / 1e6], "MB"),
        row(NAME, f"{what}: short transports", [sum(outcome.short.values())], ""),
        row(NAME, f"{what}: short transports with other bytes", [outcome.short["altered"]], "", at_most=0),
        row(NAME, f"{what}: short transports that held", [outcome.ok_share * 100], "%", at_least=OK_SHARE * 100),
        row(NAME, f"{what}: transport ids left", [outcome.ids_left], "", at_most=0),
        row(NAME, f"{what}: levels that are not flat", [len(outcome.grown)], "", at_most=0),
    ]
    for one in outcome.verdicts:
        if one.level == "uss":
            rows.append(row(NAME, f"{one.role}: own memory, growth", [one.fit.slope_per_h], "KiB/h"))
    return rows


def table(outcome: Outcome, facts: dict[str, Any]) -> str:
    """The text that the documentation shows."""
    head = ("role", "level", "unit", "mean", "growth an hour", "± error", "bound", "flat", "minutes")
    cells = [head]
    lives = Counter(one.role for one in outcome.levels.series)
    for one in outcome.verdicts:
        name, unit = NAMES[one.level]
        line = one.fit
        cells.append(
            (
                one.role,
                name,
                unit,
                f"{line.mean:,.1f}" if line.mean < 100 else f"{line.mean:,.0f}",
                f"{line.slope_per_h:+,.2f}",
                f"{line.error_per_h:,.2f}",
                f"{one.bound_per_h:,.1f}",
                "yes" if one.flat else "NO",
                f"{line.hours * 60:.0f}",
            )
        )
    widths = [max(len(line[at]) for line in cells) for at in range(len(head))]
    left = (0, 1, 2, 7)
    lines = [
        "  ".join(
            text.ljust(width) if at in left else text.rjust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    streams = outcome.streams
    verdict = "everything held" if not problems(outcome) else "NOT everything held"
    lines += [
        "",
        f"{outcome.streams.elapsed_s / 60:.0f} minutes, warm-up {outcome.warm_up_s / 60:.3g} minutes of each life, "
        f"seed {outcome.seed}: {verdict}",
        "faults: " + _listed(outcome.faults),
        "lives: " + ", ".join(f"{role} {number}" for role, number in lives.items() if number > 1),
        f"streams: {streams.transports}, {streams.verified_bytes / 1e6:,.0f} MB verified, {streams.lost_bytes} bytes lost, "
        f"{len(streams.faults)} with a fault, {len(streams.resumed_ms):,} resumptions; {outcome.pings:,} ping-pongs",
        f"short transports: {_listed(outcome.short)} ({outcome.ok_share:.2%} ok); not opened: {_listed(outcome.reasons)}",
        f"lookups: {_listed(outcome.lookups)}",
        f"strangers: {_listed(outcome.strangers)}",
        f"transport ids in use after the end: {outcome.ids_left}",
        f"{facts['cpu']}, {facts['cores']} cores, {facts['system']}, Python {facts['python']}, {facts['at']}",
    ]
    return "\n".join(lines) + "\n"


def _listed(counts: Any) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items())) or "none"
