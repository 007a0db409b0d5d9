"""Rows of results, the facts of the machine they are from, and how both are printed."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

_PACKAGES: Final = ("pyspark", "duckdb", "polars", "pyarrow", "zstandard")


@dataclass(frozen=True, slots=True)
class Row:
    """One engine, one stage, one size. ``ratio`` is its wall time over DuckDB's."""

    engine: str
    stage: str
    lines: int
    cores: int
    wall_s: float
    cpu_s: float
    peak_mib: float
    lines_per_s: float
    ratio: float | None = None
    target: str = ""
    met: bool | None = None


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code: read them together or not at all."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
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


def as_json(rows: Sequence[Row], facts: dict[str, Any], zones: Sequence[dict[str, Any]]) -> str:
    """Everything as one JSON document."""
    facts = {**facts, "load_average_after": [round(load, 2) for load in os.getloadavg()]}
    document = {"machine": facts, "zones": list(zones), "results": [asdict(one) for one in rows]}
    return json.dumps(document, indent=2) + "\n"


def as_table(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """Everything as one table of plain text."""
    head = ("engine", "stage", "lines", "cores", "wall s", "CPU s", "peak MiB", "lines/s", "/ DuckDB", "target", "met")
    cells = [
        (
            one.engine,
            one.stage,
            f"{one.lines:,}",
            str(one.cores),
            f"{one.wall_s:.1f}",
            f"{one.cpu_s:.1f}",
            f"{one.peak_mib:,.0f}",
            f"{one.lines_per_s:,.0f}",
            "" if one.ratio is None else f"{one.ratio:.2f}",
            one.target,
            {True: "yes", False: "NO", None: ""}[one.met],
        )
        for one in rows
    ]
    widths = [max(len(line[at]) for line in (head, *cells)) for at in range(len(head))]
    left = (0, 1, 9, 10)
    lines = [
        "  ".join(text.ljust(width) if at in left else text.rjust(width) for at, (text, width) in columns).rstrip()
        for columns in (list(enumerate(zip(line, widths, strict=True))) for line in (head, *cells))
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    lines += [
        "",
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, {facts['system']}, "
        f"Python {facts['python']}; {versions}",
        f"load average before: {facts['load_average']}",
    ]
    return "\n".join(lines) + "\n"
