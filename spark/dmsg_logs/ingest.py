"""From files in the landing zone to the table of events, each line exactly once in effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pyspark.sql import SparkSession

#: Called with a stage, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class IngestSummary:
    """What one call of :func:`ingest` took in. ``lines_in == good + dup + corrupt``, always.

    ``lines_in`` is counted in the files as text; the three others in what was written. ``missing`` lines were recorded
    in the names of files, but are not in them: ``missing_files`` names these.
    """

    files: int = 0
    lines_in: int = 0
    good: int = 0
    dup: int = 0
    corrupt: int = 0
    missing: int = 0
    batches: int = 0
    missing_files: list[str] = field(default_factory=list)
    seconds: float = 0.0


def ingest(spark: SparkSession, landing: str, tables: str, *, progress: Progress | None = None) -> IngestSummary:
    """Take every file of ``landing`` that is not yet in the table below ``tables``."""
    raise NotImplementedError
