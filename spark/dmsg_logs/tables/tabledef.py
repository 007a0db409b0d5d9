"""The definition of a table: its documented columns and the pure function that makes it. All tables are listed in
:mod:`dmsg_logs.tables.generations`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from pyspark.sql import DataFrame
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

#: Short name of a type in a column's declaration -> the Spark type.
TYPES: Final[dict[str, DataType]] = {
    "string": StringType(),
    "long": LongType(),
    "double": DoubleType(),
    "boolean": BooleanType(),
    "date": DateType(),
    "timestamp": TimestampType(),
}


class Column(NamedTuple):
    """One column: name, type (a key of ``TYPES``), what it means, and its unit (empty where it has none)."""

    name: str
    type: str
    meaning: str
    unit: str = ""


class Inputs(Protocol):
    """The inputs of a table. Asking for a table that is built later raises ``KeyError``."""

    def events(self) -> DataFrame:
        """Every good line: see ``dmsg_logs.ingest.store.read_events``."""

    def keys(self) -> DataFrame:
        """The keys of all good lines: see ``dmsg_logs.ingest.store.read_keys``."""

    def accounts(self) -> DataFrame:
        """One row for each landing file: see ``dmsg_logs.ingest.store.read_accounts``."""

    def table(self, name: str) -> DataFrame:
        """A table of this generation that was built before."""


class Table(NamedTuple):
    """One table: its name, what a row is, its columns in order, and how it is made.

    ``build`` gives a frame with exactly these columns. ``partition`` is the column whose values become directories, or
    empty for a table without.
    """

    name: str
    meaning: str
    columns: tuple[Column, ...]
    build: Callable[[Inputs], DataFrame]
    partition: str = "date"

    @property
    def schema(self) -> StructType:
        """The columns as Spark's schema; every one may be null."""
        return StructType([StructField(each.name, TYPES[each.type]) for each in self.columns])

    @property
    def dtypes(self) -> list[tuple[str, str]]:
        """Names and types as a frame's own ``dtypes`` gives them."""
        return [(each.name, TYPES[each.type].simpleString()) for each in self.columns]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(each.name for each in self.columns)


def percentile_columns(prefix: str, meaning: str, unit: str, *points: int) -> tuple[Column, ...]:
    """Declarations of ``<prefix>_p50`` and so on, exact percentiles (interpolated between neighbours)."""
    return tuple(Column(f"{prefix}_p{point}", "double", f"{meaning}, {point}th percentile", unit) for point in points)
