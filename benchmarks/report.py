"""Rows of results, facts of their machine, and the printing of both."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("dmsg", "twisted", "cryptography", "coincurve", "noiseprotocol", "klein")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: its median, its target (``None``: informative) and the smallest and largest of the repeats."""

    bench: str
    name: str
    value: float
    unit: str
    target: str
    met: bool | None
    low: float
    high: float
    repeats: int


def row(
    bench: str,
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """The median of ``values`` compared with a target."""
    value = statistics.median(values)
    met: bool | None = None
    target = ""
    if at_least is not None:
        met, target = value >= at_least, f">= {at_least:g}"
    elif at_most is not None:
        met, target = value <= at_most, f"<= {at_most:g}"
    return Row(bench, name, value, unit, target, met, min(values), max(values), len(values))


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which ``fraction`` (0 to 1) of ``values`` lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def machine() -> dict[str, Any]:
    """Facts on which the figures depend besides the code: figures mean nothing without them."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


class Stolen:
    """Share of the processors' time that the host has given to other guests since this object was made."""

    def __init__(self) -> None:
        self._before = _processor_times()

    def share(self) -> float:
        """From 0 to 1; 0 if the system does not tell."""
        spent = [now - then for now, then in zip(_processor_times(), self._before, strict=True)]
        return spent[_STEAL] / total if (total := sum(spent)) else 0.0


#: Index of the stolen time in the first line of /proc/stat, and the number of its independent fields.
_STEAL, _FIELDS = 7, 8


def _processor_times() -> list[int]:
    try:
        with open("/proc/stat") as file:
            return [int(field) for field in file.readline().split()[1 : 1 + _FIELDS]]
    except OSError:
        return [0] * _FIELDS


def as_json(rows: Sequence[Row], facts: dict[str, Any], load_after: Sequence[float]) -> str:
    """Everything as one JSON document."""
    facts = {**facts, "load_average_after": [round(load, 2) for load in load_after]}
    return json.dumps({"machine": facts, "results": [asdict(one) for one in rows]}, indent=2) + "\n"


def as_table(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """Everything as one table of plain text."""
    head = ("bench", "what", "median", "unit", "target", "met", "min … max", "n")
    cells = [
        (
            one.bench,
            one.name,
            _number(one.value),
            one.unit,
            one.target,
            {True: "yes", False: "NO", None: ""}[one.met],
            f"{_number(one.low)} … {_number(one.high)}",
            str(one.repeats),
        )
        for one in rows
    ]
    widths = [max(len(line[at]) for line in (head, *cells)) for at in range(len(head))]
    right = (2, 7)
    lines = [
        "  ".join(text.rjust(width) if at in right else text.ljust(width) for at, (text, width) in columns).rstrip()
        for columns in (list(enumerate(zip(line, widths, strict=True))) for line in (head, *cells))
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    lines += [
        "",
        f"{facts['cpu']}, {facts['cores']} cores, {facts['system']}, Python {facts['python']}; {versions}",
        f"{facts['at'][:10]}, load average before: {facts['load_average']}",
    ]
    if stolen := facts.get("stolen"):
        shares = ", ".join(f"{name} {share:.0%}" for name, share in stolen.items())
        lines.append(f"time the host gave to other guests: {shares}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
