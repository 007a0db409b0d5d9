"""The tables of a log in ``vectors``, for tests that say what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.testing import assertDataFrameEqual

from dmsg_logs.ingest.batches import ingest
from dmsg_logs.tables.generations import TABLES, build_tables, read_manifest, read_table

_VECTORS = Path(__file__).parent / "vectors"


class LogTables:
    """The tables of the log called ``log``, made in ``directory``."""

    def __init__(self, spark: SparkSession, log: str, directory: Path) -> None:
        self.spark = spark
        self.directory = str(directory)
        self.summary = ingest(spark, str(_VECTORS / log), self.directory)
        self.rows = build_tables(spark, self.directory)
        self.manifest = read_manifest(spark, self.directory)

    def table(self, name: str) -> DataFrame:
        """One of them."""
        return read_table(self.spark, self.directory, name)

    def check(self, name: str, columns: str, rows: list[tuple[Any, ...]], where: str = "true") -> None:
        """These columns of a table, in these rows of it, in any order."""
        names = columns.split()
        found = self.table(name).where(where).select(*names)
        schema = ", ".join(f"{each} {dict(TABLES[name].dtypes)[each]}" for each in names)
        expected: DataFrame = self.spark.createDataFrame(rows, schema)
        assertDataFrameEqual(found, expected, ignoreNullable=True, atol=0.01)
