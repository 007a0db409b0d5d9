"""The work in Polars. Blocks of lines are parsed by its JSON reader, which stops at a bad line: what does not look like
an event is taken out before, and a block that fails is halved until the bad lines are alone, which Python then judges.

Parsed blocks wait on disk, so that memory holds the keys of all lines but not the lines. Tried and slower:
``str.json_decode`` (twice the work); ``unique()`` over whole rows (several times the memory).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import zstandard

from bench.shape import (
    ACCOUNTS,
    EARLIEST_S,
    GOOD,
    HOURLY,
    LATEST_S,
    QUARANTINE,
    TRANSPORTS,
    VERSIONS,
    Task,
    recorded,
    summary,
)
from bench.stages import stage
from dmsg_logs.schemas import ALL_COLUMNS

#: Lines parsed at once: enough to make the call worth it, few enough to be halved cheaply.
_BLOCK_LINES: Final = 8_000
#: Lines of one file on disk between the two passes.
_STAGED_LINES: Final = 120_000
_HALVE_FROM_LINES: Final = 64
_HEAD: Final = b'{"event":"'
_TYPES: Final = {"str": str, "int": int, "float": float, "bool": bool}
_KINDS: Final = {column.name: _TYPES[column.type] for column in ALL_COLUMNS}


@dataclass(slots=True)
class Block:
    """What became of the lines of a few files."""

    frames: list[Any] = field(default_factory=list)
    bad: list[tuple[str, str, str]] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)


def _judge(line: bytes) -> str:
    """Why a line is bad; empty for a good one."""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return "not_utf8"
    if not text.strip(" \t\r"):
        return "blank"
    if not text.lstrip(" \t\r").startswith("{"):
        return "not_an_object"
    try:
        value = json.loads(text)
    except ValueError:
        return "torn"
    for name, kind in _KINDS.items():
        given = value.get(name)
        if (
            given is not None
            and kind is not str
            and type(given) is not kind
            and not (kind is float and type(given) is int)
        ):
            return "wrong_type"
    return ""


def _parse(pl: Any, schema: dict[str, Any], lines: list[bytes], files: list[str], block: Block) -> None:
    """Parse ``lines`` of ``files`` into ``block``."""
    if not lines:
        return
    try:
        frame = pl.read_ndjson(b"\n".join(lines), schema=schema)
        if frame.height != len(lines):
            raise pl.exceptions.ComputeError("lines were left out")
    except pl.exceptions.ComputeError:
        if len(lines) > _HALVE_FROM_LINES:
            middle = len(lines) // 2
            _parse(pl, schema, lines[:middle], files[:middle], block)
            _parse(pl, schema, lines[middle:], files[middle:], block)
            return
        reasons = [_judge(line) for line in lines]
        for line, file, reason in zip(lines, files, reasons, strict=True):
            if reason:
                block.bad.append((file, line.decode(errors="replace"), reason))
        rest = [at for at, reason in enumerate(reasons) if not reason]
        if len(rest) == len(lines):
            raise
        _parse(pl, schema, [lines[at] for at in rest], [files[at] for at in rest], block)
        return
    block.frames.append(_sort_out(pl, frame, lines, files, block))


def _sort_out(pl: Any, frame: Any, lines: list[bytes], files: list[str], block: Block) -> Any:
    """Take lines without a key or a possible time out; note the text of those of a later version."""
    event = pl.col("event")
    known = pl.lit(None, pl.Int64)
    for name, version in VERSIONS.items():
        known = pl.when(event == name).then(pl.lit(version)).otherwise(known)
    no_key = (pl.col("node").fill_null("") == "") | (pl.col("boot").fill_null("") == "") | pl.col("seq").is_null()
    timely = ((pl.col("ts") >= EARLIEST_S) & (pl.col("ts") < LATEST_S)).fill_null(False)
    fault = (
        pl.when(no_key)
        .then(pl.lit("no_key"))
        .when(event.fill_null("") == "")
        .then(pl.lit("no_event"))
        .when(~timely)
        .then(pl.lit("bad_time"))
    )
    frame = frame.with_columns(
        pl.Series("file", files, pl.String),
        fault.alias("fault"),
        (known.is_null() | (pl.col("v").fill_null(0) > known)).alias("later"),
    )
    raw: list[str | None] = [None] * len(lines)
    for at in frame["later"].arg_true().to_list():
        raw[at] = lines[at].decode()
    frame = frame.with_columns(pl.Series("raw", raw, pl.String))
    for at in frame["fault"].is_not_null().arg_true().to_list():
        block.bad.append((files[at], lines[at].decode(), frame["fault"][at]))
    return frame.filter(pl.col("fault").is_null()).drop("fault", "later")


def _read(path: str) -> list[bytes]:
    with open(path, "rb") as file:
        packed = file.read()
    with zstandard.ZstdDecompressor().stream_reader(BytesIO(packed), read_across_frames=True) as reader:
        lines = reader.read().split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _blocks(files: list[str]) -> Iterator[list[str]]:
    """Groups of files with about ``_BLOCK_LINES`` lines."""
    group: list[str] = []
    count = 0
    for file in files:
        group.append(file)
        count += recorded(file)
        if count >= _BLOCK_LINES:
            yield group
            group, count = [], 0
    if group:
        yield group


def _take(pl: Any, schema: dict[str, Any], files: list[str]) -> Block:
    block = Block()
    plausible: list[bytes] = []
    origin: list[str] = []
    for file in files:
        lines = _read(file)
        block.lines[file] = len(lines)
        for line in lines:
            if line[:10] == _HEAD and line[-1:] == b"}":
                plausible.append(line)
                origin.append(file)
            else:
                reason = _judge(line)
                if reason:
                    block.bad.append((file, line.decode(errors="replace"), reason))
                else:
                    plausible.append(line)
                    origin.append(file)
    for at in range(0, len(plausible), 2 * _BLOCK_LINES):
        _parse(pl, schema, plausible[at : at + 2 * _BLOCK_LINES], origin[at : at + 2 * _BLOCK_LINES], block)
    return block


def clean(pl: Any, task: Task) -> dict[str, int]:
    """Stage ``clean``."""
    types = {"str": pl.String, "int": pl.Int64, "float": pl.Float64, "bool": pl.Boolean}
    schema = {column.name: types[column.type] for column in ALL_COLUMNS}
    files = task.files()
    staged = task.out / "staged"
    staged.mkdir()
    waiting: list[Any] = []
    keys: list[Any] = []
    bad: list[tuple[str, str, str]] = []
    lines: dict[str, int] = {}

    def put_away() -> None:
        number = sum(1 for _ in staged.iterdir())
        pl.concat(waiting).write_ipc(staged / f"{number:05d}.arrow", compression="lz4")
        waiting.clear()

    with ThreadPoolExecutor(task.cores) as pool:
        pending: list[Future[Block]] = []
        groups = _blocks(files)
        while True:
            # never far ahead of what has been put away
            while len(pending) < 2 * task.cores and (group := next(groups, None)) is not None:
                pending.append(pool.submit(_take, pl, schema, group))
            if not pending:
                break
            block = pending.pop(0).result()
            bad += block.bad
            lines.update(block.lines)
            for frame in block.frames:
                waiting.append(frame)
                keys.append(frame.select(pl.col("node", "boot", "file").cast(pl.Categorical), "seq"))
            if sum(frame.height for frame in waiting) >= _STAGED_LINES:
                put_away()
    if waiting:
        put_away()
    key = pl.concat(keys).with_columns(pl.struct("node", "boot", "seq").is_first_distinct().alias("first"))
    copies = key.with_row_index("row").filter(~pl.col("first")).select("row")
    good_by_file = key.group_by(pl.col("file").cast(pl.String)).agg(pl.col("first").sum().alias("good"))
    quarantine = pl.DataFrame(bad, schema={"file": pl.String, "line": pl.String, "reason": pl.String}, orient="row")
    quarantine.write_parquet(task.part(QUARANTINE) + ".parquet", compression="zstd")
    parsed_by_file = key.group_by(pl.col("file").cast(pl.String)).agg(pl.len().alias("parsed"))
    del key, keys
    (
        pl.scan_ipc(sorted(staged.iterdir()), row_index_name="row")
        .join(copies.lazy(), on="row", how="anti")
        .drop("row")
        .with_columns(pl.from_epoch((pl.col("ts") * 1_000_000).cast(pl.Int64), "us").dt.date().alias("date"))
        .sink_parquet(pl.PartitionBy(task.part(GOOD), key="date", include_key=False), compression="zstd", mkdir=True)
    )
    accounts = (
        pl.DataFrame({"file": files, "lines": [lines[file] for file in files], "recorded": list(map(recorded, files))})
        .join(good_by_file, on="file", how="left")
        .join(parsed_by_file, on="file", how="left")
        .join(quarantine.group_by("file").agg(pl.len().alias("corrupt")), on="file", how="left")
        .with_columns(pl.col("good", "parsed", "corrupt").fill_null(0).cast(pl.Int64))
        .with_columns((pl.col("parsed") - pl.col("good")).alias("dup"))
        .with_columns((pl.col("recorded") - pl.col("lines")).alias("missing"))
        .drop("parsed")
    )
    accounts.write_parquet(task.part(ACCOUNTS) + ".parquet", compression="zstd")
    total = accounts.select(pl.col("lines", "good", "dup", "corrupt", "missing").sum()).row(0)
    return summary(len(files), *total)


def tables(pl: Any, task: Task) -> dict[str, int]:
    """Stage ``tables``."""
    events = pl.scan_parquet(task.part(GOOD) + "/**/*.parquet").filter(pl.col("role") == "server")
    pair = ("node", "boot", "conn", "transport_id")
    ends = ("ts", "code", "bytes", "duration_s")
    opening = pl.col("event") == "transport_opened"
    closes = pl.col("event").shift(-1).over(pair) == "transport_closed"
    transports = (
        events.filter(pl.col("event").is_in(["transport_opened", "transport_closed"]))
        .select(
            *pair,
            "seq",
            "event",
            "initiator",
            "responder",
            "server",
            "ts",
            "accept_ms",
            "code",
            "duration_s",
            (pl.col("bytes_in") + pl.col("bytes_out")).alias("bytes"),
        )
        .sort(*pair, "seq")
        .with_columns(
            (pl.col("event").shift(1).over(pair) == "transport_opened").fill_null(False).alias("follows"),
            *[pl.when(closes).then(pl.col(name).shift(-1).over(pair)).alias(f"close_{name}") for name in ends],
        )
        .filter(opening | ~pl.col("follows"))
        .select(
            *pair,
            "initiator",
            "responder",
            "server",
            pl.when(opening & pl.col("close_ts").is_null())
            .then(pl.lit("open"))
            .otherwise(pl.lit("closed"))
            .alias("state"),
            pl.when(opening).then("ts").alias("opened_at"),
            pl.when(opening).then("close_ts").otherwise("ts").alias("closed_at"),
            "accept_ms",
            *[pl.when(opening).then(f"close_{name}").otherwise(name).alias(name) for name in ends[1:]],
        )
        .collect()
    )
    transports.write_parquet(task.part(TRANSPORTS) + ".parquet", compression="zstd")

    def of(name: str) -> Any:
        return pl.col("event") == name

    def points(column: str, name: str) -> Any:
        values = pl.col(column).filter(of(name))
        return [values.quantile(q, "linear").alias(f"{column}_{int(q * 100)}") for q in (0.5, 0.95, 0.99)]

    hourly = (
        events.group_by("node", (pl.col("ts") / 3600).floor().cast(pl.Int64).alias("hour"))
        .agg(
            of("connection_opened").sum().alias("connections_opened"),
            of("connection_closed").sum().alias("connections_closed"),
            of("handshake_failed").sum().alias("handshakes_failed"),
            of("transport_opened").sum().alias("transports_opened"),
            (of("transport_closed") & (pl.col("code") != 0)).sum().alias("transports_failed"),
            pl.col("count").filter(of("refused")).sum().alias("refusals"),
            (pl.col("bytes_in") + pl.col("bytes_out")).filter(of("transport_closed")).sum().alias("bytes"),
            *points("accept_ms", "transport_opened"),
            *points("queue_peak_bytes", "transport_closed"),
        )
        .with_columns(
            pl.concat_list("accept_ms_50", "accept_ms_95", "accept_ms_99").alias("accept_ms"),
            pl.concat_list("queue_peak_bytes_50", "queue_peak_bytes_95", "queue_peak_bytes_99").alias("queue_bytes"),
        )
        .select(pl.exclude("^.*_(50|95|99)$"))
        .collect()
    )
    hourly.write_parquet(task.part(HOURLY) + ".parquet", compression="zstd")
    return {TRANSPORTS: transports.height, HOURLY: hourly.height}


def main(arguments: list[str]) -> None:
    """One process: all stages."""
    task = Task.from_arguments(arguments)
    with stage("start"):
        os.environ["POLARS_MAX_THREADS"] = str(task.cores)
        import polars as pl

        Path(task.out).mkdir(parents=True)
    with stage("clean") as results:
        results.update(clean(pl, task))
    with stage("tables") as results:
        results.update(tables(pl, task))


if __name__ == "__main__":
    main(sys.argv[1:])
