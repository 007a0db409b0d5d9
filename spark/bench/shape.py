"""What every engine has to make of a landing zone; the names, limits and rules they share.

Stage ``clean``: each file is read as text, each line is one of good, dup or corrupt. A line is good if it is one JSON
object, its fields have the types of ``dmsg_logs.schemas``, it has a key (node, boot, seq) and a possible time; of good
lines with one key, one stays. Results: Parquet (zstd) partitioned by UTC date with every column of the schema, ``raw``
where a line is of a later version, ``file``; a quarantine with file, line and reason; an account of every file.

Stage ``tables``: of the clean lines, every transport a server told of with its opening and closing joined, and what each
relay did in each hour, with exact percentiles.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dmsg_logs.schemas import ALL_COLUMNS, ENVELOPE, EVENTS

PATTERN: Final = "role=*/date=*/hour=*/*.jsonl.zst"
RECORDED: Final = re.compile(r"-(\d{1,12})-[0-9a-f]{16}\.jsonl\.zst$")
EARLIEST_S: Final = 946_684_800.0
LATEST_S: Final = 4_102_444_800.0
#: Columns of the schema that are no text: what a wrong type can be found in.
TYPED: Final = tuple(column for column in ALL_COLUMNS if column.type != "str")
#: event -> fields of its own
FIELDS: Final = {name: tuple(column.name for column in event.columns) for name, event in EVENTS.items()}
VERSIONS: Final = {name: event.version for name, event in EVENTS.items()}
NAMES: Final = tuple(column.name for column in ALL_COLUMNS)
ENVELOPE_NAMES: Final = tuple(column.name for column in ENVELOPE)

GOOD: Final = "clean"
QUARANTINE: Final = "quarantine"
ACCOUNTS: Final = "accounts"
TRANSPORTS: Final = "transports"
HOURLY: Final = "relay_hourly"
#: A stage of Spark's only: see ``bench.engine_spark.alone``.
ALONE: Final = "reader + writer"


@dataclass(frozen=True, slots=True)
class Task:
    """What an engine's process is told."""

    zone: Path
    out: Path
    cores: int

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> Task:
        """``zone out cores``, as the parent gives them."""
        return cls(Path(arguments[0]), Path(arguments[1]), int(arguments[2]))

    def files(self) -> list[str]:
        """Every file of the landing zone, sorted."""
        return sorted(map(str, self.zone.glob(PATTERN)))

    def part(self, name: str) -> str:
        """Where a result goes."""
        return str(self.out / name)


def recorded(file: str) -> int:
    """How many lines a file's name says it has."""
    found = RECORDED.search(file)
    if found is None:
        raise ValueError(f"{file} does not say how many lines it has")
    return int(found[1])


def summary(files: int, lines: int, good: int, dup: int, corrupt: int, missing: int) -> dict[str, Any]:
    """The counts an engine reports of the stage ``clean``."""
    return {"files": files, "in": lines, "good": good, "dup": dup, "corrupt": corrupt, "missing": missing}
