"""One batch of files, made and committed: every line once in effect, whatever is killed when.

1. ``scan``: tasks count the lines of each file and find the keys they claim (:mod:`dmsg_logs.ingest.claims`);
2. ``write``: write every line once, below ``state=good|dup|corrupt``. Plain lines, which almost all are, become columns
   in the tasks (:mod:`dmsg_logs.ingest.plain`). A line that is not plain was parsed on its own in step 1. A file that a
   task could not vouch for is read as text and parsed line by line, which takes longer;
3. ``check``: read the keys and counts back, prove them right, store the keys for later batches, sync all of it to disk;
4. ``commit``: create the commit. Until then nothing has changed that a reader sees.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from dmsg_logs.ingest import attempts, lines, plain, sinks, store
from dmsg_logs.ingest import claims as keys
from dmsg_logs.ingest import landing as landings
from dmsg_logs.ingest.accounts import AccountsError, Written, make_accounts
from dmsg_logs.ingest.landing import Landing, LandingFile
from dmsg_logs.runtime import lease, paths
from dmsg_logs.runtime.frames import local_frame
from dmsg_logs.runtime.together import workers

#: Bytes of text for each task, about 800,000 lines.
TASK_BYTES: Final = 256 * 1024**2
#: Lines that are not plain, for each task that writes them.
_LINES_A_TASK: Final = 200_000
#: Approximate number of output files of a batch: the more days, the fewer tasks.
MAX_OUTPUT_FILES: Final = 400
_ROW_GROUP_BYTES: Final = 16 * 1024**2
#: With more program runs in a batch than this, its keys are compared with those of all earlier batches.
_MAX_BOOTS: Final = 10_000
#: Most rulings (in words) to broadcast to every task; more of them are joined by a shuffle.
_MAX_BROADCAST: Final = 200_000
#: Most words of one file that a task keeps in memory to find keys that occur twice.
_MAX_WORDS: Final = 1_000_000
_ALL_BITS: Final = 2**64 - 1
_KEYS: Final = ("node", "boot", "word", "bits")


class _Claims(NamedTuple):
    """See :mod:`dmsg_logs.ingest.claims`: odd lines, claims of all lines, and these by file."""

    odd: DataFrame
    claimed: DataFrame
    found: list[Any]


class Batch:
    """One attempt at the next batch."""

    def __init__(
        self,
        session: SparkSession,
        source: Landing,
        tables: str,
        commits: list[store.Commit],
        renew: Callable[[], lease.Owner],
        tell: Callable[[str, int], None],
    ) -> None:
        """It follows ``commits``. ``renew`` renews the lease; ``tell`` is told a stage and how many files are done."""
        self._session = session
        self._source = source
        self._tables = tables
        self._renew = renew
        self._tell = tell
        self._commits = commits
        self._number = commits[-1].batch + 1 if commits else 1
        self._run = f"{self._number:0{store.BATCH_DIGITS}d}-{uuid.uuid4().hex[:8]}"
        self._files: list[LandingFile] = []
        self._names: dict[str, str] = {}
        self._tasks = 1
        self._by_line: set[str] = set()  # URIs of files to be read as text
        self._left_alone: dict[str, bool] = {}  # those among them that tasks refused -> whether they are damaged
        self._unread: set[str] = set()  # URIs of packed files that are not read at all, because they are too large

    def take(self, files: list[LandingFile]) -> list[dict[str, Any]] | None:
        """Make the batch of these files and commit it; its accounts, or ``None`` if another run was first."""
        marker = store.attempt_path(self._tables, self._run)
        paths.write_text(self._session, marker, self._renew().to_json())
        try:
            commit = self._make(files)
            self._tell("commit", len(files))
            path = store.commit_path(self._tables, self._number)
            if paths.create_text(self._session, path, commit.to_json()):
                paths.delete(self._session, marker)
                return commit.files
            attempts.remove(self._session, self._tables, self._run)
            return None
        except Exception:  # leave nothing half made, then pass the error on
            with contextlib.suppress(Exception):  # without a JVM it stays; a later run sweeps it
                attempts.remove(self._session, self._tables, self._run)
            raise

    def _make(self, files: list[LandingFile]) -> store.Commit:
        self._tell("fetch", 0)
        self._files = self._source.fetch(files)
        self._names = {each.uri: each.name for each in self._files}
        self._pack()
        return self._attempt()

    def _pack(self) -> None:
        """Few tasks, so that few files come out, but enough of them to keep every core busy."""
        conf = self._session.conf
        cores = self._session.sparkContext.defaultParallelism
        text_bytes = sum(each.text_bytes for each in self._files)
        wanted = max(1, min(text_bytes // TASK_BYTES, MAX_OUTPUT_FILES // landings.days(self._files)))
        self._tasks = -(-wanted // cores) * cores
        size = sum(each.size for each in self._files)
        conf.set("spark.sql.files.openCostInBytes", "4096")
        conf.set("spark.sql.files.maxPartitionBytes", str(max(1024**2, size * 21 // (20 * self._tasks))))

    def _attempt(self) -> store.Commit:
        """Scan, write and check."""
        self._tell("scan", 0)
        small = [each for each in self._files if each.size <= plain.MAX_FILE_BYTES]
        large = [each for each in self._files if each.size > plain.MAX_FILE_BYTES]
        # Tasks, which hold the whole file, bound what it unpacks to; Spark's own reader does not.
        self._unread = {each.uri for each in large if plain.is_packed(each.name)}
        self._by_line = {each.uri for each in large} - self._unread
        with contextlib.ExitStack() as stack, workers() as pool:
            scanned = stack.enter_context(_kept(self._work(small, plain.scan, plain.COUNTED)))
            refused = pool.submit(scanned.where("not whole").select("uri", "value").collect)
            claims = self._claims(scanned, stack)  # planned during the scan, on the guess that no file is refused
            if refused.result():
                self._by_line.update(row["uri"] for row in refused.result())
                self._left_alone = {row["uri"]: row["value"] is not None for row in refused.result()}
                claims = self._claims(scanned, stack)
            lines_of = self._by_name(claims.found)
            left = self._left(claims)
            earlier = self._earlier(_boots((row["boot"], row["last_boot"]) for row in claims.found), claims.claimed)
            self._tell("write", 0)
            self._renew()
            self._write(claims.odd, keys.rulings(claims.claimed, earlier), claims.found)
        self._tell("check", 0)
        with _kept(self._written()) as written:
            per_file, boots = _summed(written)
            accounts = make_accounts(self._files, lines_of, per_file, self._damaged(lines_of), self._number, left)
            contradictions = keys.contradictions(written, self._earlier(boots, written)).limit(1)
            with workers() as pool:
                keys_written = pool.submit(self._write_keys, written)
                if contradictions.count():
                    raise AccountsError(f"batch {self._number}: keys were lost or doubled in writing")
                keys_written.result()
        # The commit is durable at once, and its files would not be read again.
        paths.sync(self._session, *(path(self._tables, self._run) for path in (store.data_path, store.keys_path)))
        states = {state: sum(each[state] for each in accounts) for state in store.STATES}
        return store.Commit(self._number, self._run, states, None if boots is None else sorted(boots), accounts)

    def _work(
        self,
        files: list[LandingFile],
        work: Callable[[Iterable[plain.File]], Iterator[Any]],
        schema: StructType,
    ) -> DataFrame:
        """The output of tasks, each of which gets whole files."""
        if not files:
            return local_frame(self._session, [], schema)
        if all(each.local for each in files):
            shares = [[(each.uri, each.local) for each in share] for share in landings.shares(files, self._tasks)]
            numbers = self._session.range(0, len(shares), 1, len(shares))
            return numbers.mapInArrow(sinks.Task(sinks.FromDisk(shares), work), schema)
        read = self._session.read.format("binaryFile").load([each.path for each in files])
        return read.select(lines.uri(), "content").mapInArrow(sinks.Task(sinks.from_spark, work), schema)

    def _claims(self, scanned: DataFrame, stack: contextlib.ExitStack) -> _Claims:
        """The claims of all files, including those read by line."""
        counted = scanned
        if self._unread:
            rest = bytearray(lines.REST_LEFT.encode())
            left = [(uri, None, None, None, None, rest, 1, True) for uri in sorted(self._unread)]
            counted = scanned = scanned.unionByName(local_frame(self._session, left, plain.COUNTED))
        if self._by_line:
            texts = keys.count_lines(self._read([each for each in self._files if each.uri in self._by_line]))
            counted = scanned.where(~F.col("uri").isin(list(self._by_line))).unionByName(texts)
        odd = stack.enter_context(_kept(keys.odd_lines(counted)))
        claimed = stack.enter_context(_kept(keys.claims(counted, odd)))
        return _Claims(odd, claimed, keys.by_file(claimed).collect())

    def _left(self, claims: _Claims) -> list[str]:
        """The names of files that unpack to more than they may."""
        if not any(row["odd"] for row in claims.found):
            return []
        left = claims.odd.where(F.col("fault") == lines.UNPACKS_TOO_FAR).select("uri").distinct()
        return [self._names[row["uri"]] for row in left.collect()]

    def _by_name(self, rows: Iterable[Any]) -> dict[str, int]:
        strangers = [row["uri"] for row in rows if row["uri"] not in self._names]
        if strangers:
            raise AccountsError(f"lines of {strangers[0]}, which is not in the batch")
        return {self._names[row["uri"]]: int(row["lines"]) for row in rows}

    def _read(self, files: list[LandingFile]) -> DataFrame:
        return lines.read_lines(self._session, [each.path for each in files], tolerant=True)

    def _texts(self, files: list[LandingFile]) -> DataFrame:
        """The lines of files: tasks read again the files they could read before, Spark reads the others."""
        whole = [each for each in files if each.uri not in self._by_line]
        value = F.col("value").cast("string").alias("value")
        told = self._work(whole, plain.texts, plain.TEXTS).select(value, "uri")
        rest = [each for each in files if each.uri in self._by_line]
        return told.unionByName(self._read(rest)) if rest else told

    def _earlier(self, boots: set[str] | None, words: DataFrame) -> DataFrame:
        """The keys of earlier batches in the words of this batch; if ``boots`` is known, only those of these runs."""
        runs = [
            each.run
            for each in self._commits
            if each.states.get("good") and (boots is None or each.boots is None or not boots.isdisjoint(each.boots))
        ]
        held = store.read_keys(self._session, self._tables, runs)
        if not runs:
            return held
        return held.join(words.select(*_KEYS[:3]).distinct(), list(_KEYS[:3]), "left_semi")

    def _write(self, odd: DataFrame, ruled: DataFrame, found: list[Any]) -> None:
        """Every line of the batch, once."""
        rulings = ruled.limit(_MAX_BROADCAST + 1).collect()
        few = len(rulings) <= _MAX_BROADCAST
        if few:
            ruled = F.broadcast(local_frame(self._session, rulings, ruled.schema))
        dropped: dict[str, dict[tuple[str, str, int], int]] = {}
        for uri, *key, bits in rulings if few else ():
            dropped.setdefault(uri, {})[key[0], key[1], key[2]] = bits & _ALL_BITS
        by_line = self._by_line | {row["uri"] for row in found if row["oddly"] or row["words"] > _MAX_WORDS}
        if not few:
            by_line |= {row["uri"] for row in ruled.select("uri").distinct().collect()}
        full = {row["uri"] for row in found} - self._unread
        texts = [each for each in self._files if each.uri in by_line & full]
        plain_ones = [each for each in self._files if each.uri in full - by_line]
        told = plain.Told(
            {each.uri: each.name for each in plain_ones},
            {row["uri"] for row in found if row["odd"]},
            dropped,
            {row["uri"] for row in found if row["twice"]},
        )
        target = paths.local(self._session, store.data_path(self._tables, self._run))
        frames = []
        if plain_ones and target is None:
            frames.append(self._work(plain_ones, sinks.RowSink(told), sinks.ROWS))
        count = sum(row["odd"] for row in found if row["uri"] not in by_line)
        if count:
            others = keys.each_line(odd.where(~F.col("uri").isin(list(by_line))) if by_line else odd)
            few_tasks = others.coalesce(1 + count // _LINES_A_TASK)
            frames.append(self._shaped(keys.ruled_out(few_tasks.withColumn("again", F.lit(False)), ruled)))
        if texts:
            parsed = keys.repeated(lines.parse(self._texts(texts)))
            frames.append(self._shaped(keys.ruled_out(parsed, ruled)))
        with workers() as pool:  # at the same time as Spark's own writes
            written = None
            if plain_ones and target is not None:
                written = pool.submit(self._work(plain_ones, sinks.FileSink(told, target), sinks.FILES).collect)
            if frames:
                rows = functools.reduce(DataFrame.unionByName, frames)
                writer = rows.write.option("compression", "zstd").option("parquet.block.size", str(_ROW_GROUP_BYTES))
                writer.mode("append").partitionBy("state", "date").parquet(store.data_path(self._tables, self._run))
            if written is not None and target is not None:
                sinks.publish(target, written.result())

    def _shaped(self, rows: DataFrame) -> DataFrame:
        """Lines with ``again`` as they are written."""
        good = F.isnull("fault") & ~F.col("again")
        return rows.select(
            *(each for each in store.DATA.names if each != "file"),
            self._file_name().alias("file"),
            F.when(good, "good").when(F.col("again"), "dup").otherwise("corrupt").alias("state"),
            F.when(good, lines.date_of(F.col("ts"))).alias("date"),
        )

    def _file_name(self) -> Any:
        """The name of a line's file: the part of its URI after the root, except where characters had to be encoded."""
        plain, odd = None, []
        for each in self._files:
            if each.uri.endswith("/" + each.name):
                plain = each
            else:
                odd += [F.lit(each.uri), F.lit(each.name)]
        cut = F.lit(None)
        if plain is not None:  # counted in bytes: counting characters takes as long as parsing a short line
            start = len(plain.uri.encode()) - len(plain.name.encode()) + 1
            cut = F.substring(F.col("uri").cast("binary"), start, 2**20)
        cut = cut.cast("string")
        return F.coalesce(F.element_at(F.create_map(*odd), F.col("uri")), cut) if odd else cut

    def _written(self) -> DataFrame:
        """Read back what was written: lines and keys of each file, by state."""
        parts = [(self._run, state) for state in self._states()]
        read = store.read_runs(self._session, self._tables, parts)
        keyed = F.col("state") != "corrupt"
        narrow = read.select(
            "file", "state", *(F.when(keyed, F.col(name)).alias(name) for name in ("node", "boot", "seq"))
        )
        return narrow.groupBy("file", "state", "node", "boot", keys.word()).agg(
            keys.bits(), F.count(F.lit(1)).alias("n")
        )

    def _states(self) -> list[str]:
        directories = paths.names(self._session, store.data_path(self._tables, self._run))
        return [state for state in store.STATES if f"state={state}" in directories]

    def _write_keys(self, written: DataFrame) -> None:
        good = written.where("state = 'good'")
        index = (
            good.groupBy(*_KEYS[:3]).agg(F.bit_or("bits").alias("bits")).coalesce(1).sortWithinPartitions(*_KEYS[:3])
        )
        index.write.option("compression", "zstd").parquet(store.keys_path(self._tables, self._run))

    def _damaged(self, counted: dict[str, int]) -> list[str]:
        """The names of files that were read as text, seem too short, and fail when they are read strictly.

        Each check costs a job, so files that tasks have tried to unpack are not read again.
        """
        damaged = []
        for each in self._files:
            recorded = landings.parse_name(each.name).recorded
            if each.uri in self._by_line and (recorded is None or counted.get(each.name, 0) < recorded):
                if each.uri in self._left_alone:
                    if self._left_alone[each.uri]:
                        damaged.append(each.name)
                    continue
                try:
                    found = lines.read_lines(self._session, [each.path], tolerant=False).count()
                except (PySparkException, paths.JavaError) as error:
                    if not lines.is_unreadable(error):
                        raise
                    damaged.append(each.name)
                else:
                    if found != counted.get(each.name, 0):
                        raise AccountsError(f"{each.name}: {found} lines now, {counted.get(each.name, 0)} before")
        return damaged


def _summed(written: DataFrame) -> tuple[dict[str, Written], set[str] | None]:
    """Lines of each file by state, and the program runs of the good lines and duplicates (:func:`_boots`)."""
    per_file: dict[str, Written] = {}
    columns = (F.sum("n"), *(pick(name) for name in ("node", "boot") for pick in (F.min, F.max)))
    rows = written.groupBy("file", "state").agg(*columns).collect()
    for name, state, count, node, last_node, boot, last_boot in sorted(rows, key=lambda row: row["state"] == "good"):
        each = per_file.setdefault(name, Written())
        setattr(each, state, count)
        if state != "corrupt":
            each.node, each.boot = (node, boot) if (node, boot) == (last_node, last_boot) else (None, None)
    return per_file, _boots((row[5], row[6]) for row in rows)


def _boots(ranges: Iterable[tuple[str | None, str | None]]) -> set[str] | None:
    """The program runs in files, given each file's least and greatest. ``None`` if there are too many to list, or if a
    file has more than one: it could then have as many as lines."""
    found: set[str] = set()
    for boot, last in ranges:
        if boot != last or len(found) > _MAX_BOOTS:
            return None
        if boot is not None:
            found.add(boot)
    return found


@contextlib.contextmanager
def _kept(frame: DataFrame) -> Iterator[DataFrame]:
    """Persist a small frame that is used several times."""
    frame.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield frame
    finally:
        with contextlib.suppress(Exception):  # without a JVM there is nothing to let go of
            frame.unpersist()
