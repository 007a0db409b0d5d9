"""``python -m bench``: the log pipeline beside DuckDB and Polars on one landing zone, each result checked in the run."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench import check, measure, report, zone
from bench.shape import ALONE
from dmsg_logs.runtime import class_archive
from dmsg_logs.synthetic import Truth

ENGINES: Final = ("spark", "duckdb", "polars")
STAGES: Final = ("start", "clean", "tables")
#: Landing zone to clean tables, start of the program included: no more than this many times DuckDB's time, over so many
#: lines or more. With fewer it is the start of a JVM that is measured.
AT_MOST_DUCKDB: Final = 1.5
DUCKDB_LINES: Final = 5_000_000
#: The whole pipeline (``python -m dmsg_logs run``, report included) over so many lines, on two cores.
FULL_LINES: Final = 2_000_000
FULL_S: Final = 120.0
FULL: Final = "full pass"
PREPARED: Final = "full pass, prepared"
_FAILURES: Final = (measure.EngineFailed, check.Wrong, class_archive.NotMade)
_DRIVER_MEMORY: Final = "DMSG_LOGS_DRIVER_MEMORY"


def _numbers(text: str) -> list[int]:
    return [int(part.replace("_", "")) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    """Run; 1 when a result was wrong, an engine failed or a target was missed."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.partition(": ")[2] if __doc__ else None)
    parser.add_argument("--lines", type=_numbers, default=[DUCKDB_LINES], metavar="N[,N…]", help="default: 5,000,000")
    parser.add_argument("--cores", type=_numbers, default=[2], metavar="N[,N…]", help="default: 2")
    parser.add_argument("--engines", default=",".join(ENGINES), help="of spark, duckdb, polars; default: all")
    parser.add_argument("--no-full", action="store_true", help="leave the full pass over 2,000,000 lines out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where zones are made, and kept for the next run")
    options = parser.parse_args(arguments)
    engines = options.engines.split(",")
    if not set(engines) <= set(ENGINES):
        parser.error(f"no such engine: {', '.join(sorted(set(engines) - set(ENGINES)))}")
    facts = report.machine()
    work = options.work or Path(tempfile.mkdtemp(prefix="dmsg-bench-"))
    cache = Path(tempfile.mkdtemp(prefix="dmsg-bench-cache-"))
    os.environ[class_archive.CACHE_VARIABLE] = str(cache)  # an earlier run's archive is not to count
    rows: list[report.Row] = []
    zones: list[dict[str, Any]] = []
    failures: list[str] = []
    try:
        for lines in options.lines:
            _note(f"{lines:,} lines …")
            place, truth = zone.make(work, lines)
            zones.append(_facts(truth))
            for cores in options.cores:
                rows += _compare(place, truth, work, engines, cores, failures)
        if not options.no_full and "spark" in engines:
            for name in (FULL, PREPARED):
                _attempt(lambda name=name: rows.append(full_pass(work, max(options.cores), name)), failures)
    finally:
        shutil.rmtree(cache, ignore_errors=True)
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    print(report.as_table(rows, facts), end="")
    for failure in failures:
        print(f"FAILED: {failure}")
    if options.json:
        options.json.write_text(report.as_json(rows, facts, zones))
    return int(bool(failures) or any(one.met is False for one in rows))


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _attempt(action: Callable[[], Any], failures: list[str]) -> None:
    try:
        action()
    except _FAILURES as failure:  # the figures of the others are not lost
        failures.append(str(failure))


def _facts(truth: Truth) -> dict[str, Any]:
    names = ("lines", "good", "dup", "corrupt", "late", "newer", "files", "bytes", "plain_bytes")
    return {name: getattr(truth, name) for name in names}


def _compare(
    place: Path, truth: Truth, work: Path, engines: Sequence[str], cores: int, failures: list[str]
) -> list[report.Row]:
    """All engines on one zone, one after the other."""
    measured: dict[str, list[measure.Stage]] = {}
    reference: dict[str, Any] = {}
    for engine in engines:

        def one(engine: str = engine) -> None:
            _note(f"  {engine}, {cores} cores …")
            zone.warm(place)
            out = work / engine
            shutil.rmtree(out, ignore_errors=True)
            stages = measure.run(
                f"bench.engine_{engine}",
                [str(place), str(out), str(cores)],
                cores=cores,
                environment={_DRIVER_MEMORY: "4g"},
            )
            check.check_clean(out, truth)
            found = check.check_tables(out, reference, truth)
            reference.update(found)
            measured[engine] = stages
            shutil.rmtree(out)

        _attempt(one, failures)
    return _rows(measured, truth.lines, cores)


def _rows(measured: dict[str, list[measure.Stage]], lines: int, cores: int) -> list[report.Row]:
    rows = []
    walls = {engine: {stage.name: stage.wall_s for stage in stages} for engine, stages in measured.items()}
    for engine, stages in measured.items():
        own = [stage for stage in stages if stage.name in STAGES]
        parts = [(stage.name, [stage]) for stage in own]
        parts.append(("start + clean", [stage for stage in own if stage.name != "tables"]))
        parts.append(("all", own))
        parts += [(ALONE, [stage]) for stage in stages if stage.name == ALONE]
        for name, members in parts:
            wall_s = sum(stage.wall_s for stage in members)
            others = walls.get("duckdb")
            base = sum(others["clean" if stage.name == ALONE else stage.name] for stage in members) if others else None
            judged = engine == "spark" and name == "start + clean" and base is not None and lines >= DUCKDB_LINES
            ratio = wall_s / base if base else None
            rows.append(
                report.Row(
                    engine,
                    name,
                    lines,
                    cores,
                    wall_s,
                    sum(stage.cpu_s for stage in members),
                    max(stage.peak_mib for stage in members),
                    lines / wall_s,
                    ratio,
                    f"<= {AT_MOST_DUCKDB:g}" if judged else "",
                    ratio <= AT_MOST_DUCKDB if judged and ratio is not None else None,
                )
            )
    return rows


def full_pass(work: Path, cores: int, name: str) -> report.Row:
    """``python -m dmsg_logs run`` over two million lines: ingest, every table, the ranks and the report; as the package
    comes, or after ``python -m dmsg_logs prepare``."""
    place, truth = zone.make(work, FULL_LINES)
    if name == PREPARED:
        _note("prepare …")
        class_archive.make()
    _note(f"{name} over {FULL_LINES:,} lines …")
    zone.warm(place)
    out = work / "full"
    shutil.rmtree(out, ignore_errors=True)
    stages = measure.run(
        "bench.full", [str(place), str(out), str(cores)], cores=cores, environment={_DRIVER_MEMORY: "2g"}
    )
    summary = stages[-1].results
    found = {name: summary[name] for name in ("in", "good", "dup", "corrupt")}
    wanted = {"in": truth.lines, "good": truth.good, "dup": truth.dup, "corrupt": truth.corrupt}
    if found != wanted:
        raise check.Wrong(f"full pass: {json.dumps(found)} instead of {json.dumps(wanted)}")
    shutil.rmtree(out)
    taken = stages[-1]
    met = taken.wall_s <= FULL_S
    rate = FULL_LINES / taken.wall_s
    return report.Row(
        "spark",
        name,
        FULL_LINES,
        cores,
        taken.wall_s,
        taken.cpu_s,
        taken.peak_mib,
        rate,
        None,
        f"<= {FULL_S:g} s",
        met,
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.SubprocessError as error:
        sys.exit(str(error))
