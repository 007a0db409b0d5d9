"""``python -m dmsg_logs``: synthetic logs, and the pipeline as a whole or stage by stage.

With ``--json``, the last line of every command is one JSON object; progress and complaints go to standard error.
Exit status: 0 done; 1 failed, and the JSON object has ``error``; 2 wrong usage; 3 done, but with ``--strict`` and with
recorded lines missing or a failed data check.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import click

from dmsg_logs import __version__
from dmsg_logs.runtime.console import Console
from dmsg_logs.runtime.together import workers

EXIT_FAILED: Final = 1
EXIT_INCOMPLETE: Final = 3

_TRACEBACK: Final = "Traceback (most recent call last):\n"
#: Most causes to follow from a Java exception.
_CAUSES: Final = 10
#: The year 10000, which Spark's functions of time do not reach.
_END_OF_TIME_S: Final = 253_402_300_800
_SUMMARY: Final = ("files", "in", "good", "dup", "corrupt", "missing", "batches")
#: How the URL of a file begins: its scheme and, after two slashes, a host.
_URL: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?://(?P<host>[^/]*))?(?=/)")


def _path(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse a value that would become a path of the root directory once names are appended."""
    if value == "":
        raise click.BadParameter("a path is wanted, and this is empty", context, parameter)
    return value


def _local_path(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A path of this machine, also written as a ``file:`` URL; as with Hadoop, nothing in it is percent-encoded."""
    url = _URL.match(_path(context, parameter, value) or "")
    if value is None or url is None:
        return value
    if url["scheme"].lower() != "file" or url["host"]:
        raise click.BadParameter(f"{value}: this is written to a directory of this machine only", context, parameter)
    return value[url.end() :]


def _time(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Refuse what is no time, and what Spark has no time for."""
    if value is not None and not 0 <= value < _END_OF_TIME_S:
        raise click.BadParameter(f"seconds since 1970 are wanted, up to the year 9999: {value:g}", context, parameter)
    return value


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="End with one line of JSON."),
        click.option("--quiet", is_flag=True, help="No progress, even on a terminal."),
        click.option(
            "--conf", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of Spark; may be repeated."
        ),
        click.option(
            "--master", metavar="URL", help="Where Spark runs; otherwise local[*], or what spark-submit says."
        ),
    ):
        command = option(command)
    return command


_landing = click.option(
    "--landing", required=True, callback=_path, metavar="PATH", help="Landing zone: any Hadoop path or fsspec URL."
)
_tables = click.option(
    "--tables", required=True, callback=_path, metavar="PATH", help="Where the tables are: any Hadoop path."
)
_report: Final[dict[str, Any]] = {
    "callback": _local_path,
    "metavar": "DIR",
    "help": "Write report.html and its pictures there, on this machine.",
}
_ranks = click.option("--ranks", callback=_path, metavar="FILE", help="Write relay_ranks.json there; wants --key.")
_key = click.option("--key", callback=_path, metavar="FILE", help="The operator's dmsg key, which signs the ranks.")
_now = click.option(
    "--now", type=float, callback=_time, metavar="SECONDS", help="End of the window of the ranks (Unix time)."
)
_strict = click.option("--strict", is_flag=True, help="End with 3 if lines are missing or a data check fails.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dmsg_logs")
def main() -> None:
    """Event logs of a dmsg fleet to tables, a report and relay ranks."""


@main.command()
@click.option(
    "--out",
    required=True,
    callback=_local_path,
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Landing zone to write.",
)
@click.option("--events", type=click.IntRange(min=1), default=100_000, show_default=True, help="Lines in all.")
@click.option("--corrupt", type=click.FloatRange(0, 0.5), default=0.0001, show_default=True, help="Share of bad lines.")
@click.option("--duplicates", type=click.FloatRange(0, 0.5), default=0.01, show_default=True, help="Share sent twice.")
@click.option("--late", type=click.FloatRange(0, 0.5), default=0.005, show_default=True, help="Share that comes late.")
@click.option("--days", type=click.IntRange(1, 366), default=7, show_default=True, help="How long a time they span.")
@click.option("--relays", type=click.IntRange(2, 500), help="How many relays; otherwise as many as suit the lines.")
@click.option("--clients", type=click.IntRange(4, 5000), help="How many clients; likewise.")
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed gives the same bytes.")
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
def generate(out: str, *, as_json: bool, **fleet: Any) -> None:
    """Write the logs of a synthetic fleet, and the exact truth about them beside (_truth.json)."""
    from dmsg_logs.synthetic import generate as make

    began = time.monotonic()
    try:
        truth = make(out, **fleet)
    except (OSError, ValueError) as error:
        _fail(error, as_json)
    known = {"files": truth.files, "in": truth.lines, "good": truth.good, "dup": truth.dup, "corrupt": truth.corrupt}
    _end({**known, "seconds": round(time.monotonic() - began, 3)}, as_json)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
def prepare(as_json: bool) -> None:
    """Once after installing: archive Spark's classes, so that every later command starts in half the time."""
    from dmsg_logs.runtime import class_archive

    began = time.monotonic()
    try:
        made = class_archive.make()
    except (OSError, class_archive.NotMade) as error:
        _fail(error, as_json)
    if not as_json:
        click.echo(f"{made.path}: with it Spark starts in {made.start_s:.1f} s")
    seconds = round(time.monotonic() - began, 3)
    _end({"archive": str(made.path), "start_s": round(made.start_s, 3), "seconds": seconds}, as_json)


@main.command()
@_landing
@_tables
@click.option("--report", **_report)
@_ranks
@_key
@_now
@_strict
@_common
def run(
    landing: str,
    tables: str,
    report: str | None,
    ranks: str | None,
    key: str | None,
    now: float | None,
    strict: bool,
    **common: Any,
) -> None:
    """Everything: take in what is new, make the tables, the ranks and the report."""

    secret = _secret(ranks, key, common["as_json"])

    def work(spark: Any, console: Console, summary: dict[str, Any]) -> None:
        from dmsg_logs import pipeline
        from dmsg_logs.report import collect, figures

        with console.timed("ingest", summary):
            summary.update(pipeline.ingest_stage(spark, landing, tables, console.progress))
            if ranks is not None:
                pipeline.demand_good_events(spark, tables)
        with console.timed("tables", summary):
            summary.update(pipeline.tables_stage(spark, tables, console.progress))
        with workers() as pool:
            if report is not None:
                with console.timed("report", summary):
                    data = collect(spark, tables)
                pictures = pool.submit(figures, data)
            if ranks is not None:  # while the pictures are drawn
                with console.timed("ranks", summary):
                    summary["ranks"] = pipeline.ranks_stage(spark, tables, ranks, secret, now)
            if report is not None:
                with console.timed("report", summary):
                    shown = dict(summary)
                    summary["report"] = pipeline.report_stage(spark, data, pictures.result(), report, shown, ranks)

    _work("dmsg-logs run", work, strict, **common)


@main.command()
@_landing
@_tables
@_strict
@_common
def ingest(landing: str, tables: str, strict: bool, **common: Any) -> None:
    """Only take in what is new in the landing zone."""

    def work(spark: Any, console: Console, summary: dict[str, Any]) -> None:
        from dmsg_logs import pipeline

        with console.timed("ingest", summary):
            summary.update(pipeline.ingest_stage(spark, landing, tables, console.progress))

    _work("dmsg-logs ingest", work, strict, **common)


@main.command(name="tables")
@_tables
@_strict
@_common
def make_tables(tables: str, strict: bool, **common: Any) -> None:
    """Only make the tables of the events taken in so far."""

    def work(spark: Any, console: Console, summary: dict[str, Any]) -> None:
        from dmsg_logs import pipeline

        with console.timed("tables", summary):
            pipeline.demand_events(spark, tables)
            summary.update(pipeline.tables_stage(spark, tables, console.progress))

    _work("dmsg-logs tables", work, strict, **common)


@main.command(name="ranks")
@_tables
@click.option(
    "--ranks", required=True, callback=_path, metavar="FILE", help="Where relay_ranks.json goes: any Hadoop path."
)
@click.option(
    "--key", required=True, callback=_path, metavar="FILE", help="The operator's dmsg key, which signs the ranks."
)
@_now
@_common
def make_ranks(tables: str, ranks: str, key: str, now: float | None, **common: Any) -> None:
    """Only score the relays and sign the result."""

    secret = _secret(ranks, key, common["as_json"])

    def work(spark: Any, console: Console, summary: dict[str, Any]) -> None:
        from dmsg_logs import pipeline

        with console.timed("ranks", summary):
            pipeline.demand_good_events(spark, tables)
            summary["ranks"] = pipeline.ranks_stage(spark, tables, ranks, secret, now)

    _work("dmsg-logs ranks", work, False, **common)


@main.command()
@_tables
@click.option("--report", required=True, **_report)
@click.option("--ranks", callback=_path, metavar="FILE", help="A relay_ranks.json to show the scores of.")
@_common
def report(tables: str, report: str, ranks: str | None, **common: Any) -> None:
    """Only write the report of the tables there are."""

    def work(spark: Any, console: Console, summary: dict[str, Any]) -> None:
        from dmsg_logs import pipeline
        from dmsg_logs.report import collect, figures

        with console.timed("report", summary):
            data = collect(spark, tables)
            pictures = figures(data)
            summary["report"] = pipeline.report_stage(spark, data, pictures, report, None, ranks)

    _work("dmsg-logs report", work, False, **common)


def _secret(ranks: str | None, key: str | None, as_json: bool) -> Any:
    """The signing key, read before the expensive work; ``None`` if no ranks are wanted."""
    if ranks is None:
        if key is not None:
            raise click.UsageError("--key signs ranks: say with --ranks where they go")
        return None
    if key is None:
        raise click.UsageError("--ranks wants --key, which signs them")
    from dmsg_logs.ranks.signing import read_key_file

    try:
        return read_key_file(key)
    except Exception as error:  # whatever is wrong with the file, it ends in one line
        _fail(error, as_json)


def _work(
    name: str,
    work: Callable[[Any, Console, dict[str, Any]], None],
    strict: bool,
    *,
    as_json: bool,
    quiet: bool,
    settings: tuple[str, ...],
    master: str | None,
) -> None:
    """Run ``work`` in a session and exit with its result."""
    chosen: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise click.UsageError(f"--conf {setting}: KEY=VALUE is wanted")
        chosen[key] = value
    if master:
        chosen["spark.master"] = master
    from dmsg_logs.runtime.session import build_session

    began = time.monotonic()
    summary: dict[str, Any] = {}
    console = Console(quiet=quiet)
    spark = None
    try:
        with console:
            with console.timed("session", summary):
                spark = build_session(name, chosen)
            work(spark, console, summary)
    except click.ClickException:
        raise
    except Exception as error:  # Spark's, Java's, a disk's: the command ends in one line, or in JSON, and with 1
        _fail(error, as_json, summary)
    finally:
        if spark is not None:
            with contextlib.suppress(Exception):  # without a JVM there is nothing to stop
                spark.stop()
    summary["seconds"] = round(time.monotonic() - began, 3)
    _end(summary, as_json)
    if strict and (summary.get("missing") or summary.get("violations")):
        sys.exit(EXIT_INCOMPLETE)


def _end(summary: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(summary, separators=(",", ":"), default=str))
        return
    if "in" in summary:
        click.echo(", ".join(f"{name} {summary[name]:,}" for name in _SUMMARY if name in summary))
    for file in summary.get("missing_files", ()):
        click.echo(f"missing lines: {file}")
    for table, rows in summary.get("tables", {}).items():
        click.echo(f"{table:20} {rows:>12,} rows")
    click.echo(f"done after {summary['seconds']:.1f} s")


def _fail(error: Exception, as_json: bool, summary: Mapping[str, Any] | None = None) -> NoReturn:
    """Say in one line what went wrong: a JVM stack does not help a user who mistyped a path."""
    text = _text(error)
    click.echo(f"dmsg_logs: {type(error).__name__}: {text}", err=True)
    if as_json:
        click.echo(json.dumps({**(summary or {}), "error": text}, separators=(",", ":"), default=str))
    sys.exit(EXIT_FAILED)


def _text(error: Exception) -> str:
    """The first line of an exception's message. A Java exception gives its class, message and root cause; a failed Python
    task gives the exception that it raised.

    Spark and py4j fetch the message of a Java exception from the JVM only when asked, and the JVM may be gone by then.
    """
    origin = ""
    try:
        java = getattr(error, "java_exception", None)  # py4j's own text only names the method that was called
        if java is None:
            text = str(error)
        else:
            text = f"{java.getClass().getSimpleName()}: {java.getMessage() or 'no message'}"
            origin = _origin(java)
    except Exception:  # asking a dead JVM may raise anything
        return "the JVM of Spark does not answer any more; it may have been killed"
    _, in_python, text = text.rpartition(_TRACEBACK)  # the exception follows the indented stack frames
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("  ")]
    said = lines[0].strip() if lines else type(error).__name__
    return f"{said} ({origin})" if origin and not in_python and origin not in said else said


def _origin(java: Any) -> str:
    """The first line of the root cause of a Java exception, for example that a disk is full."""
    message = ""
    for _ in range(_CAUSES):
        java = java.getCause()
        if java is None:
            break
        message = str(java.getMessage() or "") or message
    return next((line.strip() for line in message.splitlines() if line.strip()), "")


if __name__ == "__main__":
    main(prog_name="python -m dmsg_logs")
