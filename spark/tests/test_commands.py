"""The commands as their users run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dmsg_logs.__main__ import main

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
        main, ["generate", "--out", str(landing), "--events", str(_LINES), *fleet, *flaws, "--json"]
    )
    assert made.exit_code == 0, made.output
    truth = json.loads(made.stdout.splitlines()[-1])
    assert truth["in"] == _LINES

    key = _key_file(tmp_path / "operator.key")
    command = ("run", "--landing", str(landing), "--tables", str(tables), "--report", "report", *_SMALL, "--json")
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
