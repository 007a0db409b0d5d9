"""The commands as their users run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from dmsg_logs.__main__ import _text, main
from dmsg_logs.ingest.store import Commit, commit_path
from dmsg_logs.runtime import session

_LINES = 1_000
_TIMEOUT_S = 150.0
_SMALL = (
    *("--master", "local[1]", "--conf", "spark.sql.shuffle.partitions=1", "--conf", "spark.driver.memory=1g"),
    *("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"),
    *("--conf", "spark.sql.adaptive.enabled=false", "--conf", "spark.sql.codegen.wholeStage=false"),
    *("--conf", "spark.sql.codegen.factoryMode=NO_CODEGEN"),
)


def _run(*arguments: str, cwd: Path) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "dmsg_logs", *arguments],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    return done.returncode, json.loads(lines[-1]), done.stderr


def _key_file(path: Path) -> Path:
    path.write_text("11" * 32 + "\n")
    path.chmod(0o600)
    return path


@pytest.mark.process
def test_generate_then_run_and_run_again(tmp_path: Path) -> None:
    landing, tables = tmp_path / "landing", tmp_path / "tables"
    fleet = ["--days", "1", "--relays", "3", "--clients", "6", "--seed", "5"]
    flaws = ["--corrupt", "0.002", "--duplicates", "0.02", "--late", "0.01"]
    made = CliRunner().invoke(
        main, ["generate", "--out", f"file://{landing}", "--events", str(_LINES), *fleet, *flaws, "--json"]
    )
    assert made.exit_code == 0, made.output
    truth = json.loads(made.stdout.splitlines()[-1])
    assert truth["in"] == _LINES

    key = _key_file(tmp_path / "operator.key")
    command = (
        "run",
        "--landing",
        str(landing),
        "--tables",
        str(tables),
        *_SMALL,
        "--json",
        "--report",
        f"file:{tmp_path}/report",
    )
    code, summary, problems = _run(*command, "--ranks", "relay_ranks.json", "--key", str(key), cwd=tmp_path)
    assert code == 0, problems
    assert {name: summary[name] for name in ("in", "good", "dup", "corrupt")} == {
        name: truth[name] for name in ("in", "good", "dup", "corrupt")
    }
    assert summary["in"] == summary["good"] + summary["dup"] + summary["corrupt"]
    assert summary["seconds"] > 0
    assert set(summary["stage_seconds"]) == {"session", "ingest", "tables", "ranks", "report"}
    assert "<html" in (tmp_path / "report" / "report.html").read_text()
    ranks = json.loads((tmp_path / "relay_ranks.json").read_text())
    assert ranks["relays"] and ranks["signature"]

    before = {path: path.stat().st_mtime_ns for path in tables.rglob("*.parquet")}
    code, again, problems = _run(
        "run", "--landing", str(landing), "--tables", str(tables), *_SMALL, "--json", cwd=tmp_path
    )
    assert code == 0, problems
    assert [again[name] for name in ("files", "in", "good", "dup", "corrupt")] == [0, 0, 0, 0, 0]
    assert again["generation"] == summary["generation"]
    assert {path: path.stat().st_mtime_ns for path in tables.rglob("*.parquet")} == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--landing", "l", "--tables", "t", "--ranks", "r.json"],
        ["run", "--landing", "l", "--tables", "t", "--key", "k"],
        ["run", "--tables", "t"],
        ["run", "--landing", "l", "--tables", "t", "--conf", "no-equals-sign"],
        ["generate", "--out", "x", "--events", "0"],
        ["generate", "--out", "x", "--corrupt", "0.9"],
        ["generate", "--out", "hdfs:///x"],
        ["run", "--landing", "l", "--tables", ""],
        ["run", "--landing", "", "--tables", "t"],
        ["run", "--landing", "l", "--tables", "t", "--report", ""],
        ["run", "--landing", "l", "--tables", "t", "--report", "hdfs://h/report"],
        ["ranks", "--tables", "t", "--ranks", "", "--key", "k"],
        ["ranks", "--tables", "t", "--ranks", "r", "--key", ""],
        ["report", "--tables", "t", "--report", "s3a://bucket/report"],
        ["report", "--tables", "t", "--report", "file://another/report"],
        *(
            ["ranks", "--tables", "t", "--ranks", "r", "--key", "k", f"--now={now}"]
            for now in ("nan", "inf", "-1", "1e12")
        ),
        ["no-such-command"],
    ],
)
def test_wrong_usage_says_so_before_spark_starts(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "Error:" in result.output


def test_a_key_others_can_read_is_refused_before_spark_starts(tmp_path: Path) -> None:
    key = _key_file(tmp_path / "operator.key")
    key.chmod(0o644)
    arguments = ["run", "--landing", "l", "--tables", "t", "--ranks", "r.json", "--key", str(key), "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert json.loads(result.stdout.splitlines()[-1])["error"]


@pytest.mark.process
def test_a_landing_zone_that_is_not_there_is_an_error_in_one_line(tmp_path: Path) -> None:
    code, summary, problems = _run(
        "run",
        "--landing",
        str(tmp_path / "nowhere"),
        "--tables",
        str(tmp_path / "tables"),
        *_SMALL,
        "--json",
        cwd=tmp_path,
    )
    assert code == 1
    assert "nowhere" in summary["error"]
    assert [line for line in problems.splitlines() if line.startswith("dmsg_logs: ")]


class _Lent:
    """The session of the tests, lent to a command, which may not stop it."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spark, name)

    def stop(self) -> None:
        pass


def _in_session(monkeypatch: pytest.MonkeyPatch, lent: Any, *arguments: str) -> Result:
    monkeypatch.setattr(session, "build_session", lambda *_: lent)
    return CliRunner().invoke(main, [*arguments, "--json"])


class _Untold(Exception):
    """An exception of Java's whose text the JVM was asked for too late."""

    def __str__(self) -> str:
        raise ConnectionRefusedError(111, "Connection refused")


class _Dead:
    """A session whose JVM has been killed."""

    @property
    def _jvm(self) -> Any:
        raise _Untold

    def stop(self) -> None:
        raise ConnectionRefusedError(111, "Connection refused")


def test_a_jvm_that_dies_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    result = _in_session(monkeypatch, _Dead(), "tables", "--tables", "t")
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "JVM" in json.loads(result.stdout.splitlines()[-1])["error"]
    assert len(result.stderr.splitlines()) == 1


def test_an_error_of_java_says_what_it_is_about(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    (tmp_path / "landing").mkdir()
    (tmp_path / "landing" / "a.jsonl").write_text("{}\n")
    arguments = ("--landing", f"{tmp_path}/landing", "--tables", f"{tmp_path}/file")
    result = _in_session(monkeypatch, _Lent(spark), "ingest", *arguments)
    assert result.exit_code == 1
    error = json.loads(result.stdout.splitlines()[-1])["error"]
    assert "Exception: " in error and f"{tmp_path}/file" in error and "calling" not in error
    assert error in result.stderr and len(result.stderr.splitlines()) == 1


def test_ranks_of_tables_that_are_not_there_do_not_replace_those_there_are(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document without relays would be newer than the one in force, and readers would believe it."""
    key, target = _key_file(tmp_path / "operator.key"), tmp_path / "relay_ranks.json"
    target.write_text("those there are")
    arguments = ("--tables", f"{tmp_path}/mistyped", "--ranks", str(target), "--key", str(key))
    result = _in_session(monkeypatch, _Lent(spark), "ranks", *arguments)
    assert result.exit_code == 1
    error = json.loads(result.stdout.splitlines()[-1])["error"]
    assert f"no events have been taken in at {tmp_path}/mistyped" in error
    assert target.read_text() == "those there are" and not (tmp_path / "mistyped").exists()


def test_tables_that_are_not_there_are_not_made_of_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = _in_session(monkeypatch, _Lent(spark), "tables", "--tables", f"{tmp_path}/mistyped")
    assert result.exit_code == 1
    error = json.loads(result.stdout.splitlines()[-1])["error"]
    assert f"no events have been taken in at {tmp_path}/mistyped" in error and not list(tmp_path.iterdir())


def test_a_run_over_an_empty_landing_zone_does_not_replace_the_ranks_there_are(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, target = _key_file(tmp_path / "operator.key"), tmp_path / "relay_ranks.json"
    target.write_text("those there are")
    (tmp_path / "landing").mkdir()
    arguments = ("--landing", f"{tmp_path}/landing", "--tables", f"{tmp_path}/tables")
    result = _in_session(monkeypatch, _Lent(spark), "run", *arguments, "--ranks", str(target), "--key", str(key))
    assert result.exit_code == 1
    error = json.loads(result.stdout.splitlines()[-1])["error"]
    assert f"no events have been taken in at {tmp_path}/tables" in error
    assert target.read_text() == "those there are" and not (tmp_path / "tables").exists()


@pytest.mark.parametrize("command", ["ranks", "run"])
def test_ranks_of_corrupt_lines_alone_do_not_replace_those_there_are(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """As of a mistyped landing zone with files of another kind."""
    key, target, tables = _key_file(tmp_path / "operator.key"), tmp_path / "relay_ranks.json", f"{tmp_path}/tables"
    target.write_text("those there are")
    commit = Path(commit_path(tables, 1))
    commit.parent.mkdir(parents=True)
    commit.write_text(Commit(1, "one", {"corrupt": 3}, [], []).to_json())
    (tmp_path / "landing").mkdir()
    landing = ("--landing", f"{tmp_path}/landing") if command == "run" else ()
    arguments = (*landing, "--tables", tables, "--ranks", str(target), "--key", str(key))
    result = _in_session(monkeypatch, _Lent(spark), command, *arguments)
    assert result.exit_code == 1
    assert f"no events have been taken in at {tables}" in json.loads(result.stdout.splitlines()[-1])["error"]
    assert target.read_text() == "those there are"


class _Thrown:
    """As much of an exception of Java's as is asked for."""

    def __init__(self, message: str | None, cause: _Thrown | None = None) -> None:
        self.getMessage, self.getCause = lambda: message, lambda: cause
        self.getClass = lambda: self
        self.getSimpleName = lambda: "SparkException"


@pytest.mark.parametrize(
    ("thrown", "said"),
    [
        (_Thrown("alone"), "SparkException: alone"),
        (
            _Thrown("a task failed\nwhere", _Thrown("in between", _Thrown("No space left on device\n  where"))),
            "SparkException: a task failed (No space left on device)",
        ),
        (_Thrown("no file x", _Thrown("no file x")), "SparkException: no file x"),
        (_Thrown("one", _Thrown("two", _Thrown(None))), "SparkException: one (two)"),
        (
            _Thrown("x: Traceback (most recent call last):\n  File y\nOSError: no", _Thrown("Traceback of y")),
            "OSError: no",
        ),
    ],
)
def test_an_error_of_java_says_what_it_came_from(thrown: _Thrown, said: str) -> None:
    """Spark only says which of its tasks failed."""
    error = Exception("An error occurred while calling o1.parquet")
    error.java_exception = thrown  # type: ignore[attr-defined]
    assert _text(error) == said


def test_an_error_of_a_task_says_what_it_is_about(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "landing").mkdir()
    (tmp_path / "landing" / "a.jsonl").symlink_to("/proc/self/mem")
    result = _in_session(
        monkeypatch, _Lent(spark), "ingest", "--landing", f"{tmp_path}/landing", "--tables", f"{tmp_path}/tables"
    )
    assert result.exit_code == 1
    error = json.loads(result.stdout.splitlines()[-1])["error"]
    assert "Input/output error" in error and f"{tmp_path}/landing/a.jsonl" in error
    assert error in result.stderr and "Traceback" not in result.stderr


def test_commits_of_another_format_are_an_error_in_one_line(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = tmp_path / "events" / "commits"
    commits.mkdir(parents=True)
    commit = commits / "00000001.json"
    for text, about in (("{}", "boots"), ("[1]", "boots"), ('{"batch":1,"run":"r","states":{},"files":[]}', "boots")):
        commit.write_text(text)
        result = _in_session(monkeypatch, _Lent(spark), "tables", "--tables", str(tmp_path))
        assert result.exit_code == 1
        error = json.loads(result.stdout.splitlines()[-1])["error"]
        assert error.startswith(f"{commit}: a commit of the events has no ") and about in error
