"""The tables: which there are, how a generation of them is built, and how they are read.

::

    <tables>/_manifest.json                     the current generation: its source, path and rows of each table
    <tables>/<name>/v=00000007-<id>/*.parquet   (or date=…/*.parquet) one generation of one table

A generation is written under names no other run uses, read back and checked, and then shown by replacing the manifest
atomically. So a reader has all tables of one generation or all of another, and a killed run changes nothing. The
generation before the current one stays, for readers that have just opened it; older ones are deleted once the manifest is
replaced. A failed run deletes its files at its end; files of a killed run are deleted before the next run begins. That
would delete the files of a concurrent run, so a note (``_building.json``, see :mod:`dmsg_logs.runtime.lease`) keeps a
second run out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pkgutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any, Final, Protocol

from pyspark.sql import DataFrame, SparkSession

from dmsg_logs import __version__
from dmsg_logs.ingest import store
from dmsg_logs.runtime import lease, paths
from dmsg_logs.runtime.together import workers
from dmsg_logs.tables import quality, transforms
from dmsg_logs.tables.tabledef import Inputs, Table
from dmsg_logs.tables.transforms.abuse import ABUSE_CANDIDATES
from dmsg_logs.tables.transforms.calls_hourly import CALLS_HOURLY
from dmsg_logs.tables.transforms.capacity_forecast import CAPACITY_FORECAST
from dmsg_logs.tables.transforms.connections import CONNECTIONS
from dmsg_logs.tables.transforms.dial_failures import DIAL_FAILURES
from dmsg_logs.tables.transforms.discovery_hourly import DISCOVERY_HOURLY
from dmsg_logs.tables.transforms.envelopes_hourly import ENVELOPES_HOURLY
from dmsg_logs.tables.transforms.federation_hourly import FEDERATION_HOURLY
from dmsg_logs.tables.transforms.log_quality import LOG_QUALITY
from dmsg_logs.tables.transforms.pair_latency import PAIR_LATENCY
from dmsg_logs.tables.transforms.relay_failures import RELAY_FAILURES
from dmsg_logs.tables.transforms.relay_hourly import RELAY_HOURLY
from dmsg_logs.tables.transforms.resumptions import RESUMPTIONS
from dmsg_logs.tables.transforms.rmb_failures import RMB_FAILURES
from dmsg_logs.tables.transforms.top_talkers import TOP_TALKERS
from dmsg_logs.tables.transforms.transports import TRANSPORTS
from dmsg_logs.tables.transforms.twin_sessions import TWIN_SESSIONS

#: Called for every step: name of the step, steps done, steps in all.
Progress = Callable[[str, int, int], None]

MANIFEST: Final = "_manifest.json"
BUILDING: Final = "_building.json"
_FORMAT: Final = "dmsg-log-tables"
_FORMAT_VERSION: Final = 1
_GENERATION_DIGITS: Final = 8

#: Every table by its name, in the order in which they are begun: a table may be made from earlier ones, and waits for them.
#: The longest chain goes first: log_quality, transports, the tables made from transports; the others fill the gaps.
TABLES: Final[dict[str, Table]] = {
    table.name: table
    for table in (
        LOG_QUALITY,
        ABUSE_CANDIDATES,
        TRANSPORTS,
        DIAL_FAILURES,
        CONNECTIONS,
        DISCOVERY_HOURLY,
        RELAY_FAILURES,
        RESUMPTIONS,
        PAIR_LATENCY,
        RELAY_HOURLY,
        TOP_TALKERS,
        CAPACITY_FORECAST,
        TWIN_SESSIONS,
        ENVELOPES_HOURLY,
        FEDERATION_HOURLY,
        RMB_FAILURES,
        CALLS_HOURLY,
    )
}


class Source(Protocol):
    """A source of lines."""

    def batches(self) -> list[int]:
        """Numbers of all batches: they change if and only if the lines change. The other methods read these batches."""

    def events(self) -> DataFrame:
        """Every good line, each once: the columns of ``dmsg_logs.ingest.store.read_events``."""

    def keys(self) -> DataFrame:
        """The keys of these lines: the columns of ``dmsg_logs.ingest.store.read_keys``."""

    def accounts(self) -> DataFrame:
        """One row for each landing file: the columns of ``dmsg_logs.ingest.store.read_accounts``."""


class NoTables(LookupError):
    """No generation of the tables has been built yet, or it lacks the requested table."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The generation that readers see.

    It was made from the ``batches`` of events by ``code`` (see :func:`code_version`). ``built_at`` is Unix seconds;
    ``tables`` and ``previous`` are paths by name, below the tables' directory, of this generation and of the one before.
    ``quality`` holds the results of all rules as dictionaries, see :class:`dmsg_logs.tables.quality.Result`.
    """

    generation: int
    code: str
    batches: list[int]
    built_at: float
    tables: dict[str, str]
    rows: dict[str, int]
    previous: dict[str, str] = field(default_factory=dict)
    quality: list[dict[str, Any]] = field(default_factory=list)

    def is_of(self, source: Source) -> bool:
        """Whether it was made from these events, by this code."""
        return (self.batches, self.code) == (source.batches(), code_version())

    @property
    def violations(self) -> dict[str, int]:
        """Broken rules of kind ``table``, as ``table.rule`` with the number of violations: mistakes in the tables."""
        return self._broken("table")

    @property
    def findings(self) -> dict[str, int]:
        """The same of kind ``data``: faults of the lines."""
        return self._broken("data")

    def _broken(self, kind: str) -> dict[str, int]:
        broken = [each for each in self.quality if each["kind"] == kind and each["violations"]]
        return {f"{each['table']}.{each['rule']}": each["violations"] for each in broken}

    def to_json(self) -> str:
        """The text of the manifest."""
        return json.dumps({"format": _FORMAT, "version": _FORMAT_VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest of :meth:`to_json`; ``ValueError`` for anything else, also for another format or version."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON: {error}") from None
        if type(fields) is not dict or (fields.pop("format", 0), fields.pop("version", 0)) != (
            _FORMAT,
            _FORMAT_VERSION,
        ):
            raise ValueError("it is not one of this program's")
        try:
            return cls(**fields)
        except TypeError:
            raise ValueError("it has other members than one of this program's") from None


def read_manifest(spark: SparkSession, tables: str) -> Manifest:
    """The current manifest; ``NoTables`` before the first generation is complete, and ``ValueError`` that names the file if
    it is damaged, or of another program or version."""
    path = paths.join(tables, MANIFEST)
    try:
        return Manifest.from_json(paths.read_text(spark, path))
    except FileNotFoundError:
        raise NoTables(f"no tables have been built in {tables}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_table(spark: SparkSession, tables: str, name: str) -> DataFrame:
    """One table of the current generation, with the columns of ``TABLES[name]``; ``NoTables`` if there is none.

    The frame keeps reading this generation after a newer one is built, but not after the one after that.
    """
    path = read_manifest(spark, tables).tables.get(name)
    if path is None or name not in TABLES:
        raise NoTables(f"there is no table {name} in {tables}")
    return _read(spark, paths.join(tables, path), TABLES[name])


def build_tables(
    spark: SparkSession,
    tables: str,
    *,
    progress: Progress | None = None,
    source: Source | None = None,
    registry: Mapping[str, Table] = TABLES,
) -> dict[str, int]:
    """Build every table from the events in ``tables``, show the new generation, and give the rows of each.

    Does nothing if the current generation was made from the same events by the same code. An exception of ``progress``
    ends the work as a crash would. ``source`` replaces the events in ``tables``, ``registry`` the list of all tables.
    :class:`~dmsg_logs.runtime.lease.BusyError` if another run is building them.
    """
    tell = progress or (lambda step, done, total: None)
    source = source or _Store(spark, tables)
    shown = _shown(spark, tables)
    if shown is not None and shown.is_of(source):
        return shown.rows
    with lease.hold(spark, paths.join(tables, BUILDING), f"the tables of {tables}") as renew:
        shown = _shown(spark, tables)  # another run may have just been done
        if shown is not None and shown.is_of(source):
            return shown.rows
        _sweep(spark, tables, registry)  # files of killed runs may take the room that this run needs
        run = uuid.uuid4().hex[:8]
        try:
            return _build_anew(spark, tables, source, registry, tell, renew, shown, run)
        except Exception:  # above all a full disk: half-made tables must not keep it full
            with contextlib.suppress(Exception):  # without a JVM it stays; the next run sweeps it
                _sweep(spark, tables, registry, of_run=run)  # not the files of a run that took its place
            raise


def _shown(spark: SparkSession, tables: str) -> Manifest | None:
    with contextlib.suppress(NoTables):
        return read_manifest(spark, tables)
    return None


def _build_anew(
    spark: SparkSession,
    tables: str,
    source: Source,
    registry: Mapping[str, Table],
    tell: Progress,
    renew: Callable[[], lease.Owner],
    current: Manifest | None,
    run: str,
) -> dict[str, int]:
    """Make the generation after ``current`` and show it. Only the names of its versions contain ``run``."""
    batches = source.batches()
    generation = current.generation + 1 if current is not None else 1
    version = f"v={generation:0{_GENERATION_DIGITS}d}-{run}"
    built = _Build(spark, tables, source)
    total = len(registry) + 3
    with workers() as pool:
        for table in registry.values():
            built.begin(pool, table, f"{table.name}/{version}")
        for done, name in enumerate(registry):
            tell(name, done, total)
            renew()
            built.table(name)
    tell("checks", len(registry), total)
    findings = quality.check({**{name: built.table(name) for name in registry}, "accounts": built.accounts})
    rows = {name: findings.rows[name] for name in registry}
    tell("manifest", len(registry) + 1, total)
    paths.sync(spark, *(paths.join(tables, each) for each in built.paths.values()))
    manifest = Manifest(
        generation,
        code_version(),
        batches,
        time.time(),
        built.paths,
        rows,
        current.tables if current is not None else {},
        [each._asdict() for each in findings.results],
    )
    paths.write_text(spark, paths.join(tables, MANIFEST), manifest.to_json())
    tell("sweep", len(registry) + 2, total)
    _sweep(spark, tables, registry)
    tell("done", total, total)
    return rows


def code_version() -> str:
    """Identifies the code of the tables: a digest of the package's version and of every transform's text."""
    digest = hashlib.sha256(__version__.encode())
    names = [f"{transforms.__name__}.{each.name}" for each in pkgutil.iter_modules(transforms.__path__)]
    for name in sorted([*names, "dmsg_logs.tables.quality", "dmsg_logs.tables.tabledef", __name__]):
        spec = find_spec(name)
        get_source = getattr(spec.loader if spec is not None else None, "get_source", lambda name: None)
        source = get_source(name)  # of a file or, on a cluster, of a wheel
        digest.update(f"\0{name}\0{source}".encode())
    return digest.hexdigest()[:16]


class _Store:
    """The events in the tables' own directory, of the batches that :meth:`batches` named last. A batch committed while
    tables are made is left out, so lines, keys and accounts are always of the same batches."""

    def __init__(self, spark: SparkSession, tables: str) -> None:
        self._spark = spark
        self._tables = tables
        self._numbers: list[int] = []
        self._commits: list[store.Commit] = []

    def batches(self) -> list[int]:
        self._numbers = store.commit_numbers(self._spark, self._tables)
        return self._numbers

    def events(self) -> DataFrame:
        return store.read_events(self._spark, self._tables, self._named())

    def keys(self) -> DataFrame:
        return store.read_good_keys(self._spark, self._tables, self._named())

    def accounts(self) -> DataFrame:
        return store.read_accounts(self._spark, self._tables, self._named())

    def _named(self) -> list[store.Commit]:
        if [each.batch for each in self._commits] != self._numbers:
            known = frozenset(self._numbers)
            found = store.commits(self._spark, self._tables, self._commits, of=())
            self._commits = [each for each in found if each.batch in known]
        return self._commits


class _Build:
    """One generation being written: several tables at once, each of which waits for the tables it is made from."""

    def __init__(self, spark: SparkSession, tables: str, source: Source) -> None:
        self._spark = spark
        self._tables = tables
        self.events = source.events()
        self.keys = source.keys()
        self.accounts = source.accounts()
        self.paths: dict[str, str] = {}
        self._written: dict[str, Future[DataFrame]] = {}

    def begin(self, pool: Executor, table: Table, path: str) -> None:
        """Start writing a table; tables begun later can be made from it."""
        earlier = _Earlier(self, dict(self._written))
        self.paths[table.name] = path
        self._written[table.name] = pool.submit(self._write, table, earlier, paths.join(self._tables, path))

    def _write(self, table: Table, earlier: Inputs, target: str) -> DataFrame:
        write_table(table.build(earlier), table, target)
        return _read(self._spark, target, table)

    def table(self, name: str) -> DataFrame:
        """A table, when it is written."""
        return self._written[name].result()


class _Earlier:
    """The ``Inputs`` of one table."""

    def __init__(self, build: _Build, written: Mapping[str, Future[DataFrame]]) -> None:
        self._build = build
        self._written = written

    def events(self) -> DataFrame:
        return self._build.events

    def keys(self) -> DataFrame:
        return self._build.keys

    def accounts(self) -> DataFrame:
        return self._build.accounts

    def table(self, name: str) -> DataFrame:
        return self._written[name].result()


def write_table(frame: DataFrame, table: Table, target: str) -> None:
    """Write a frame that has exactly the table's columns (else ``TypeError``), in few files.

    The rebalancing gives each date one file, and a large one as many as it needs.
    """
    if frame.dtypes != table.dtypes:
        raise TypeError(f"{table.name} has the columns {frame.dtypes}, not {table.dtypes}")
    keys = [table.partition] if table.partition else []
    writer = frame.hint("rebalance", *keys).write.mode("overwrite").option("compression", "zstd")
    (writer.partitionBy(*keys) if keys else writer).parquet(target)


def _read(spark: SparkSession, path: str, table: Table) -> DataFrame:
    return spark.read.schema(table.schema).parquet(paths.literally(path)).select(*table.names)


def _sweep(spark: SparkSession, tables: str, registry: Iterable[str], of_run: str = "") -> None:
    """Delete every version of a table, or only those of one run, except the versions of the current generation and of the
    one before."""
    manifest = _shown(spark, tables)
    kept = {*manifest.tables.values(), *manifest.previous.values()} if manifest is not None else set()
    for name in sorted({*registry, *(path.partition("/")[0] for path in kept)}):
        for entry in paths.names(spark, paths.join(tables, name)):
            path = f"{name}/{entry}"
            if entry.startswith("v=") and entry.endswith(of_run) and path not in kept:
                paths.delete(spark, paths.join(tables, path))
