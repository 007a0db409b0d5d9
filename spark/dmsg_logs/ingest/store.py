"""The table of events: where its files lie, which of them count, and how to read them.

::

    <tables>/events/commits/00000007.json      batch 7 is part of the table: its files and their accounts
    <tables>/events/data/run=00000007-<id>/state=good/date=2026-03-01/*.parquet
                                          /state=dup/…   the same line delivered once more
                                          /state=corrupt/date=__HIVE_DEFAULT_PARTITION__/…   quarantine
    <tables>/events/keys/run=00000007-<id>/*.parquet     the keys of its good lines, 64 to a row
    <tables>/events/attempts/00000007-<id>.json          who makes, or made, those directories
    <tables>/events/running.json                         who is at work

A batch belongs to the table from the moment its commit exists; before that, no reader opens its directories. A commit is
created whole or not at all, and only if no other run has created it first. A killed run leaves a directory that no commit
names. So a reader never sees a part of a batch, and there is nothing to repair.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DateType, DoubleType, LongType, StringType, StructField, StructType

from dmsg_logs.runtime import paths
from dmsg_logs.runtime.frames import local_frame
from dmsg_logs.schemas import LINE

#: Most commits to read one by one; starting a job for them would take longer.
_FEW: Final = 40
#: States of a line; a directory level of a batch's data.
STATES: Final = ("good", "dup", "corrupt")
#: Digits of a batch's number in names, so that names sort as numbers do.
BATCH_DIGITS: Final = 8

_EXTRA: Final = (
    StructField("raw", StringType()),
    StructField("file", StringType()),
    StructField("line", StringType()),
    StructField("fault", StringType()),
)
#: The columns of a batch's Parquet files.
DATA: Final = StructType([*LINE.fields, *_EXTRA])
_PARTITIONS: Final = (
    StructField("run", StringType()),
    StructField("state", StringType()),
    StructField("date", DateType()),
)
#: One row a landing file in a commit and in :func:`read_accounts`.
ACCOUNT: Final = StructType(
    [
        StructField("file", StringType()),
        StructField("role", StringType()),
        StructField("node", StringType()),
        StructField("boot", StringType()),
        StructField("number", LongType()),
        StructField("recorded", LongType()),
        StructField("lines", LongType()),
        StructField("good", LongType()),
        StructField("dup", LongType()),
        StructField("corrupt", LongType()),
        StructField("missing", LongType()),
        StructField("batch", LongType()),
        StructField("landed_at", DoubleType()),
        StructField("problem", StringType()),
    ]
)


#: Good keys of a batch, 64 to a row: bit ``seq mod 64`` of ``bits`` stands for ``seq`` in ``word = floor(seq / 64)``.
KEYS: Final = StructType(
    [
        StructField("node", StringType()),
        StructField("boot", StringType()),
        StructField("word", LongType()),
        StructField("bits", LongType()),
    ]
)


#: Members of a commit, and their types in JSON.
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "batch": (int,),
    "run": (str,),
    "states": (dict,),
    "boots": (list, type(None)),
    "files": (list,),
}


@dataclass(frozen=True, slots=True)
class Commit:
    """One batch of the table.

    ``run`` names its directories, ``states`` counts its lines, ``boots`` are the program runs of its good lines (``None``:
    too many to list, or a file had lines of several), ``files`` are its accounts with two more fields, ``size`` and
    ``identity``.
    """

    batch: int
    run: str
    states: dict[str, int]
    boots: list[str] | None
    files: list[dict[str, Any]]

    def to_json(self) -> str:
        """One line of JSON, which :func:`read_accounts` reads with Spark."""
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Commit:
        """The commit of :meth:`to_json`, which may have more fields; ``ValueError`` for anything else."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON: {error}") from None
        found = fields if type(fields) is dict else {}
        lacking = [each for each, kinds in _KINDS.items() if type(found.get(each, ...)) not in kinds]
        if lacking:
            raise ValueError(f"a commit of the events has no {', '.join(lacking)}: it is of another program or version")
        return cls(**{each: fields[each] for each in cls.__slots__})


def commit_path(tables: str, batch: int) -> str:
    """Path of the commit of a batch."""
    return paths.join(tables, "events", "commits", f"{batch:0{BATCH_DIGITS}d}.json")


def data_path(tables: str, run: str = "") -> str:
    """Path of the lines of all batches, or of one attempt at a batch."""
    return paths.join(tables, "events", "data", *([f"run={run}"] if run else []))


def keys_path(tables: str, run: str = "") -> str:
    """Path of the keys of all batches, or of one attempt at a batch."""
    return paths.join(tables, "events", "keys", *([f"run={run}"] if run else []))


def attempt_path(tables: str, run: str) -> str:
    """Path of the note that says who attempts, or attempted, a batch under the name ``run``."""
    return paths.join(tables, "events", "attempts", f"{run}.json")


def lease_path(tables: str) -> str:
    """Path of the note of the run that is at work."""
    return paths.join(tables, "events", "running.json")


def commit_numbers(spark: SparkSession, tables: str) -> list[int]:
    """The numbers of all batches of the table, ascending."""
    names = paths.names(spark, paths.join(tables, "events", "commits"))
    return sorted(int(name[:BATCH_DIGITS]) for name in names if _is_commit(name))


def _is_commit(name: str) -> bool:
    return len(name) == BATCH_DIGITS + 5 and name.endswith(".json") and name[:BATCH_DIGITS].isdecimal()


def commits(
    spark: SparkSession, tables: str, known: Sequence[Commit] = (), *, of: Container[str] | None = None
) -> list[Commit]:
    """All batches of the table, ascending; those ``known`` from an earlier call are not read again.

    With ``of`` they have only the accounts of files with these identities: a fleet makes millions of files in a year.
    Raises ``ValueError`` that names the file of a commit which is damaged, or of another program or version.
    """
    have = {each.batch for each in known}
    new = [each for each in commit_numbers(spark, tables) if each not in have]
    made = (_one_by_one if len(new) <= _FEW else _together)(spark, tables, new)
    if of is not None:
        made = (replace(each, files=[one for one in each.files if one["identity"] in of]) for each in made)
    return sorted([*known, *made], key=lambda each: each.batch)


def _one_by_one(spark: SparkSession, tables: str, numbers: Sequence[int]) -> Iterator[Commit]:
    for number in numbers:
        path = commit_path(tables, number)
        try:
            text = paths.read_text(spark, path)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: {error}") from None
        yield _parsed(text, path, number)


def _together(spark: SparkSession, tables: str, numbers: Sequence[int]) -> Iterator[Commit]:
    """The same by a job of Spark, in any order."""
    read = spark.read.text([paths.literally(commit_path(tables, each)) for each in numbers])
    left = set(numbers)
    for text, uri in read.select("value", F.input_file_name()).toLocalIterator():
        number = int(uri.rpartition("/")[2][:BATCH_DIGITS])
        left.discard(number)
        yield _parsed(text, commit_path(tables, number), number)
    for number in sorted(left):  # Spark has no row for an empty file: its batch would be left out silently
        yield _parsed("", commit_path(tables, number), number)


def _parsed(text: str, path: str, number: int) -> Commit:
    try:
        commit = Commit.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if commit.batch != number:
        raise ValueError(f"{path}: it is the commit of batch {commit.batch}")
    return commit


def last_batch(spark: SparkSession, tables: str) -> int:
    """Number of the newest batch, 0 if there is none: it changes if and only if the table has changed."""
    return max(commit_numbers(spark, tables), default=0)


def read_events(spark: SparkSession, tables: str, of: Sequence[Commit] | None = None) -> DataFrame:
    """All good lines, each key once: the columns of ``schemas.LINE``, then ``raw`` (the whole line if it holds more than
    we know, else null), ``date`` (of ``ts``, UTC), ``file`` (relative to the landing zone), ``batch`` and ``landed_at``
    (Unix seconds of the file's last change).

    Here and below, ``of`` are the batches to read, by default all.
    """
    of = commits(spark, tables, of=()) if of is None else of
    # The optimizer drops this join in queries that do not ask for the time.
    landed = read_accounts(spark, tables, of).groupBy("file", "batch").agg(F.max("landed_at").alias("landed_at"))
    joined = read_state(spark, tables, "good", of).join(F.broadcast(landed), ["file", "batch"], "left")
    return joined.select(*LINE.names, "raw", "date", "file", "batch", "landed_at")


def read_quarantine(spark: SparkSession, tables: str) -> DataFrame:
    """Lines that could not be taken: ``file``, ``line``, ``reason``, ``batch``."""
    return read_state(spark, tables, "corrupt").select("file", "line", F.col("fault").alias("reason"), "batch")


def read_state(spark: SparkSession, tables: str, state: str, of: Sequence[Commit] | None = None) -> DataFrame:
    """All lines in one state, with all columns."""
    of = commits(spark, tables, of=()) if of is None else of
    runs = [each.run for each in of if each.states.get(state)]
    return read_runs(spark, tables, [(run, state) for run in runs])


def read_runs(spark: SparkSession, tables: str, parts: list[tuple[str, str]]) -> DataFrame:
    """The lines of some runs, given as run and state; both must have lines."""
    schema = StructType([*DATA.fields, *_PARTITIONS])
    if not parts:
        frame = local_frame(spark, [], schema)
    else:
        directories = [paths.literally(paths.join(data_path(tables, run), f"state={state}")) for run, state in parts]
        frame = spark.read.schema(schema).option("basePath", data_path(tables)).parquet(*directories)
    return frame.withColumn("batch", F.substring("run", 1, BATCH_DIGITS).cast("long"))


def read_keys(spark: SparkSession, tables: str, runs: list[str]) -> DataFrame:
    """The keys of the good lines of some runs, see ``KEYS``; a word has a row for each run with keys in it."""
    if not runs:
        return local_frame(spark, [], KEYS)
    return spark.read.schema(KEYS).parquet(*(paths.literally(keys_path(tables, run)) for run in runs))


def read_good_keys(spark: SparkSession, tables: str, of: Sequence[Commit] | None = None) -> DataFrame:
    """The keys of all good lines, as :func:`read_keys` gives them."""
    of = commits(spark, tables, of=()) if of is None else of
    return read_keys(spark, tables, [each.run for each in of if each.states.get("good")])


def read_accounts(spark: SparkSession, tables: str, of: Sequence[Commit] | None = None) -> DataFrame:
    """One row for each time a landing file was taken: ``file``, ``role``, ``node``, ``boot``, ``number``, ``recorded``
    (lines according to its name, or null), ``lines`` (found), ``good``, ``dup``, ``corrupt``, ``missing``, ``batch``,
    ``landed_at``, ``problem`` (why lines are missing, or null).

    When a file is taken again, only the last row counts its missing lines.
    """
    numbers = commit_numbers(spark, tables) if of is None else [each.batch for each in of]
    if not numbers:
        return local_frame(spark, [], ACCOUNT)
    schema = StructType([StructField("files", ArrayType(ACCOUNT))])
    read = spark.read.schema(schema).json([paths.literally(commit_path(tables, each)) for each in numbers])
    accounts = read.select(F.inline("files"))
    # The optimizer drops this in queries that do not ask what is missing.
    is_last = F.col("batch") == F.max("batch").over(Window.partitionBy("file"))
    return accounts.withColumns(
        {"missing": F.when(is_last, F.col("missing")).otherwise(0), "problem": F.when(is_last, F.col("problem"))}
    )
