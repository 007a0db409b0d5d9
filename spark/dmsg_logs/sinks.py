"""Where tasks get files from, and where they put the columns they have made of them.

Files come off the disk where the landing zone is on a file system of the machine, as every executor sees it, and
otherwise from Spark. Columns go into Parquet files of the task's own, or back to Spark, which writes them.

Spark's writer makes rows of the columns again, and columns of the rows, some sixty of them. So tasks write the files
themselves where the table is on a file system of the machine. On any other (``hdfs:``, ``s3a:``) Spark does, with what it
knows of them.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet
from pyspark import TaskContext
from pyspark.sql.types import DateType, LongType, StringType, StructField, StructType

from dmsg_logs import plain, store

#: Files a task writes to at once: a reader of lines cannot choose how many days they are of.
_OPEN_FILES: Final = 24
#: What is asked for by value. Every reader reads what is known of every column.
_STATISTICS: Final = ["event", "role", "ts"]
_BATCH_ROWS: Final = 10_000
_EPOCH: Final = date(1970, 1, 1)
_NO_DATE: Final = "__HIVE_DEFAULT_PARTITION__"

#: What :class:`RowSink` gives: lines as they are written, and where.
ROWS: Final = StructType([*store.DATA.fields, StructField("state", StringType()), StructField("date", DateType())])
#: What :class:`FileSink` gives: a row for each task.
FILES: Final = StructType([StructField("rows", LongType())])


class FromDisk:
    """Files that tasks read by themselves: URI and path of each, by task; a task is handed the number of its share."""

    def __init__(self, shares: Sequence[Sequence[tuple[str, str]]]) -> None:
        self._shares = shares

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[plain.File]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                for uri, path in self._shares[number]:
                    yield uri, pa.py_buffer(Path(path).read_bytes())


def from_spark(batches: Iterable[pa.RecordBatch]) -> Iterator[plain.File]:
    """Files that Spark has read: ``uri``, ``content``."""
    for batch in batches:
        for uri, content in zip(batch.column("uri"), batch.column("content"), strict=True):
            yield uri.as_py(), content.as_buffer()


class Task:
    """What a task does: some work on files from somewhere."""

    def __init__(
        self,
        source: Callable[[Iterable[pa.RecordBatch]], Iterable[plain.File]],
        work: Callable[[Iterable[plain.File]], Iterator[pa.RecordBatch]],
    ) -> None:
        self._source = source
        self._work = work

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self._work(self._source(batches))


class RowSink:
    """Work that hands plain lines back to Spark, as :data:`ROWS`."""

    def __init__(self, told: plain.Told) -> None:
        self._told = told

    def __call__(self, files: Iterable[plain.File]) -> Iterator[pa.RecordBatch]:
        for part in plain.tables(files, self._told):
            count = part.rows.num_rows
            state = pa.repeat(pa.scalar(part.state), count)
            day = pa.repeat(pa.scalar(part.day, pa.int32()), count).cast(pa.date32())
            rows = part.rows.append_column("state", state).append_column("date", day)
            yield from rows.to_batches(max_chunksize=_BATCH_ROWS)


class FileSink:
    """Work that writes plain lines to Parquet files below ``directory``, and says how many, as :data:`FILES`.

    Files get their names when all of them are complete. A second attempt at a task writes the same ones.
    """

    def __init__(self, told: plain.Told, directory: str) -> None:
        self._told = told
        self._directory = directory

    def __call__(self, files: Iterable[plain.File]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        if context is None:
            raise RuntimeError("not in a task")
        output = _Files(Path(self._directory), context.partitionId(), context.taskAttemptId())
        count = 0
        try:
            for part in plain.tables(files, self._told):
                output.write(part)
                count += part.rows.num_rows
            output.publish()
        finally:
            output.close()
        yield pa.record_batch([pa.array([count])], names=["rows"])


class _Files:
    """The files of one attempt at a task."""

    def __init__(self, directory: Path, task: int, attempt: int) -> None:
        self._directory = directory
        self._task = task
        self._attempt = attempt
        self._open: OrderedDict[Path, Any] = OrderedDict()
        self._names: dict[Path, Path] = {}

    def write(self, part: plain.Part) -> None:
        day = _NO_DATE if part.day is None else (_EPOCH + timedelta(days=part.day)).isoformat()
        where = self._directory / f"state={part.state}" / f"date={day}"
        writer = self._open.pop(where, None)
        if writer is None:
            if len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            writer = self._begin(where, part.rows.schema)
        self._open[where] = writer
        writer.write_table(part.rows)

    def _begin(self, where: Path, schema: pa.Schema) -> Any:
        where.mkdir(parents=True, exist_ok=True)
        name = where / f"part-{self._task:05d}-{len(self._names):05d}.parquet"
        hidden = where / f".{name.name}.{self._attempt}"
        self._names[hidden] = name
        return pyarrow.parquet.ParquetWriter(
            hidden, schema, compression="zstd", store_schema=False, write_statistics=_STATISTICS
        )

    def publish(self) -> None:
        """Close the files and give them their names."""
        for writer in self._open.values():
            writer.close()
        self._open.clear()
        for hidden, name in self._names.items():
            os.replace(hidden, name)
        self._names.clear()

    def close(self) -> None:
        """Remove what has no name yet."""
        for writer in self._open.values():
            writer.close()
        for hidden in self._names:
            hidden.unlink(missing_ok=True)
