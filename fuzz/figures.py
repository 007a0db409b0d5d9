"""The figures of the campaigns: ``figures.json`` beside this module, which is committed, and the table made of it.

Figures add up over runs, checkouts and machines. They are never reset, even if the code has changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

#: The figures of all campaigns.
FILE: Final = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Figures:
    """The figures of one target.

    ``seconds`` are CPU seconds of the fuzzing processes, without the imports they begin with. ``last_new`` is the value
    of ``seconds`` at the end of the slice in which the last new feature was reached. ``executions`` counts inputs that
    were tried, ``edges`` and ``features`` are the most a slice reached, ``inputs`` is the size of the corpus after the
    last one, and ``crashes`` the number of inputs that failed and lay in the working directory then.
    """

    seconds: float = 0.0
    last_new: float = 0.0
    executions: int = 0
    edges: int = 0
    features: int = 0
    inputs: int = 0
    crashes: int = 0


def load(path: Path) -> dict[str, Figures]:
    """The figures in a file by name of the target; nothing when there is no such file."""
    if not path.exists():
        return {}
    return {name: Figures(**values) for name, values in json.loads(path.read_text("utf-8")).items()}


def save(path: Path, figures: Mapping[str, Figures]) -> None:
    """Write a file for :func:`load`, sorted, one line for each target. It is replaced as a whole."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(asdict(figures[name]))}" for name in sorted(figures))
    write(path, f"{{\n{lines}\n}}\n")


def write(path: Path, text: str) -> None:
    """Replace a file, so that a reader sees the old text or the new one."""
    written = path.with_name(f"{path.name}.new")
    written.write_text(text, "utf-8")
    written.replace(path)


def describe(figures: Figures) -> str:
    """One line for people."""
    return (
        f"{figures.seconds:,.0f} CPU seconds, last new after {figures.last_new:,.0f}, {figures.executions:,} executions, "
        f"{figures.edges} edges, {figures.features} features, {figures.inputs} inputs, {figures.crashes} failures"
    )


def as_table(figures: Mapping[str, Figures]) -> str:
    """The table of the documentation."""
    header = (
        *("target", "CPU seconds", "last new after"),
        *("executions", "edges", "features", "inputs", "failures"),
    )
    rows = [header, *(_row(name, figures[name]) for name in sorted(figures))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], ""])


def _row(name: str, one: Figures) -> tuple[str, ...]:
    numbers = (one.seconds, one.last_new, one.executions, one.edges, one.features, one.inputs, one.crashes)
    return (name, *(f"{number:,.0f}" for number in numbers))
