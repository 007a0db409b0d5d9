"""Where tasks get files from, and where they put their columns.

Tasks read files from disk if the landing zone is on a file system of the machine that every executor sees; otherwise
Spark reads them. Tasks write columns into Parquet files of their own, or hand them back to Spark, which writes them.

Spark's writer turns the columns, some sixty, into rows and back. So tasks write the files themselves if the table is on a
file system of the machine. On other file systems (``hdfs:``, ``s3a:``) Spark writes them, because it knows these.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet
from pyspark import TaskContext
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DateType, LongType, StringType, StructField, StructType

from dmsg_logs.ingest import plain, store

#: Files that a task keeps open at once: its lines may come from any number of days.
_OPEN_FILES: Final = 24
#: Columns that queries filter by value. No statistics of others, because every reader reads all statistics.
_STATISTICS: Final = ["event", "role", "ts"]
#: Columns that are worth a dictionary; numbers mostly differ.
_STRINGS: Final = [each.name for each in store.DATA if isinstance(each.dataType, StringType)]
_BATCH_ROWS: Final = 10_000
_EPOCH: Final = date(1970, 1, 1)
#: Directory of files without a final name: readers ignore it, and so does Spark when it writes beside it.
_HIDDEN: Final = "_plain"
_NO_DATE: Final = "__HIVE_DEFAULT_PARTITION__"

#: The rows of :class:`RowSink`: lines as they are written, and where.
ROWS: Final = StructType([*store.DATA.fields, StructField("state", StringType()), StructField("date", DateType())])
#: The rows of :class:`FileSink`, one for each file. See :func:`publish`.
FILES: Final = StructType(
    [StructField("hidden", StringType()), StructField("name", StringType()), StructField("rows", LongType())]
)


class FromDisk:
    """Files that tasks read themselves: the URI and path of each, by task; a task is handed the number of its share."""

    def __init__(self, shares: Sequence[Sequence[tuple[str, str]]]) -> None:
        self._shares = shares

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[plain.File]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                for uri, path in self._shares[number]:
                    try:
                        content = Path(path).read_bytes()
                    except OSError as error:  # an error in the middle of a file does not name it
                        raise OSError(error.errno, error.strerror, path) from None
                    yield uri, pa.py_buffer(content)


def from_spark(batches: Iterable[pa.RecordBatch]) -> Iterator[plain.File]:
    """Files that Spark has read: ``uri``, ``content``."""
    for batch in batches:
        for uri, content in zip(batch.column("uri"), batch.column("content"), strict=True):
            yield uri.as_py(), content.as_buffer()


class Task:
    """The work of a task on files from a source."""

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
    """Work that writes plain lines to Parquet files below ``directory`` and returns their names, as :data:`FILES`.

    The files are hidden until :func:`publish` gives them their names, so that only files of completed tasks get one, and
    another writer can write there meanwhile.
    """

    def __init__(self, told: plain.Told, directory: str) -> None:
        self._told = told
        self._directory = directory

    def __call__(self, files: Iterable[plain.File]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        if context is None:
            raise RuntimeError("not in a task")
        output = _Files(Path(self._directory), context.partitionId(), context.taskAttemptId())
        try:
            for part in plain.tables(files, self._told):
                output.write(part)
            written = output.finish()
        finally:
            output.close()
        rows = [dict(zip(FILES.names, each, strict=True)) for each in written]
        yield pa.RecordBatch.from_pylist(rows, schema=to_arrow_schema(FILES))


def publish(directory: str, written: Iterable[tuple[str, str, int]]) -> None:
    """Give the files that tasks have written (:data:`FILES`) their names below ``directory``."""
    for hidden, name, _ in written:
        target = Path(directory, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(Path(directory, hidden), target)
    shutil.rmtree(Path(directory, _HIDDEN), ignore_errors=True)  # the rest is from failed tasks


class _File(NamedTuple):
    """A file that a task writes: its path, the directory it belongs into, and its writer."""

    path: Path
    directory: str
    writer: Any


class _Files:
    """The files of one attempt at a task."""

    def __init__(self, directory: Path, task: int, attempt: int) -> None:
        self._directory = directory
        self._task = task
        self._attempt = attempt
        self._open: OrderedDict[str, _File] = OrderedDict()
        self._begun: list[_File] = []
        self._rows: Counter[Path] = Counter()
        self._finished = False

    def write(self, part: plain.Part) -> None:
        day = _NO_DATE if part.day is None else (_EPOCH + timedelta(days=part.day)).isoformat()
        directory = f"state={part.state}/date={day}"
        file = self._open.pop(directory, None)
        if file is None:
            if len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)[1].writer.close()
            file = self._begin(directory, part.rows.schema)
        self._open[directory] = file
        file.writer.write_table(part.rows)
        self._rows[file.path] += part.rows.num_rows

    def _begin(self, directory: str, schema: pa.Schema) -> _File:
        hidden = self._directory / _HIDDEN
        hidden.mkdir(parents=True, exist_ok=True)
        path = hidden / f"part-{self._task:05d}-{len(self._begun):05d}.{self._attempt}.parquet"
        writer = pyarrow.parquet.ParquetWriter(
            path,
            schema,
            compression="zstd",
            store_schema=False,
            write_statistics=_STATISTICS,
            use_dictionary=_STRINGS,
        )
        file = _File(path, directory, writer)
        self._begun.append(file)
        return file

    def finish(self) -> list[tuple[str, str, int]]:
        """Close the files; a row of :data:`FILES` for each."""
        for file in self._open.values():
            file.writer.close()
        self._open.clear()
        self._finished = True
        return [
            (
                str(path.relative_to(self._directory)),
                f"{directory}/{path.name.partition('.')[0]}.parquet",
                self._rows[path],
            )
            for path, directory, _ in self._begun
        ]

    def close(self) -> None:
        """Remove the files, unless they are finished."""
        for file in self._open.values():
            file.writer.close()
        for file in () if self._finished else self._begun:
            file.path.unlink(missing_ok=True)
