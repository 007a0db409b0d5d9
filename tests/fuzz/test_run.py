"""What runs the targets, with a program in place of the fuzzer that says what libFuzzer says."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FUZZER = """
import pathlib, sys
name, *options, found = sys.argv[1:]
options = dict(one.lstrip("-").split("=", 1) for one in options if "=" in one)
if "merge" in options:
    target = [one for one in sys.argv[2:] if not one.startswith("-")][0]
    (pathlib.Path(target) / "kept").write_bytes(b"new input")
elif name == "tlv":
    (pathlib.Path(options["artifact_prefix"]) / "crash-1").write_bytes(b"bad")
    print("#1\\tINITED cov: 5 ft: 6 corp: 1/1b exec/s: 0 rss: 1Mb", file=sys.stderr)
    print("stat::number_of_executed_units: 7", file=sys.stderr)
    sys.exit(77)
else:
    print("#9\\tDONE   cov: 12 ft: 34 corp: 5/67Kb lim: 8 exec/s: 9 rss: 1Mb", file=sys.stderr)
    print("stat::number_of_executed_units: 1000", file=sys.stderr)
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("fuzz.run")


def campaign(run: Any, folder: Path, seconds: int) -> Any:
    program = folder / "fuzzer.py"
    program.write_text(FUZZER)
    return run.Campaign(folder / "work", seconds=seconds, jobs=2, program=(sys.executable, str(program)))


def test_a_run_goes_on_where_it_was(run: Any, tmp_path: Path) -> None:
    first = campaign(run, tmp_path, 400)
    first.run(["frames", "hop"])
    assert first.figures["frames"] == run.Figures(400, 2_000, 12, 34, 5, 0)
    again = campaign(run, tmp_path, 400)
    again.run(["frames"])
    assert again.figures == first.figures  # it has had its time
    longer = campaign(run, tmp_path, 500)
    longer.run(["frames"])
    assert longer.figures["frames"] == run.Figures(500, 3_000, 12, 34, 5, 0)
    assert longer.figures["hop"] == first.figures["hop"]


def test_failures_are_counted_until_they_are_removed(run: Any, tmp_path: Path, capsys: Any) -> None:
    failing = campaign(run, tmp_path, 400)
    failing.run(["tlv", "hop"])
    assert failing.figures["tlv"].crashes == 1 and failing.figures["tlv"].seconds < 400
    assert failing.figures["hop"].crashes == 0 and failing.figures["hop"].seconds == 400
    assert "tlv: could not be run: it failed as before" in capsys.readouterr().err
    (tmp_path / "work" / "crashes" / "tlv" / "crash-1").unlink()
    assert campaign(run, tmp_path, 400).figures["tlv"].crashes == 0


def test_the_kept_corpus_is_the_shortest_that_was_not_known(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = importlib.import_module("fuzz.corpus")
    monkeypatch.setattr(corpus, "FOLDER", tmp_path)
    found = campaign(run, tmp_path, 1)
    found.run(["frames"])
    assert found.minimise("frames") == len(b"new input")
    assert corpus.kept("frames") == [b"new input"]
    assert ("line 1 of corpus/frames.txt", b"new input") in list(corpus.inputs("frames"))
    chosen = corpus.keep(
        "frames", [bytes(corpus.INPUT_BYTES + 1), b"b", b"a", b"b", *(bytes(n) for n in range(2, 300))]
    )
    assert chosen[:3] == [b"a", b"b", bytes(2)] and sum(map(len, chosen)) <= corpus.KEPT_BYTES


def test_the_table_has_a_row_for_each_target(run: Any) -> None:
    table = run.as_table({"frames": run.Figures(60, 123_456, 34, 5, 6, 0)}, "on this machine")
    header, line, row, *_ = table.splitlines()
    assert header.split() == ["target", "seconds", "executions", "edges", "features", "inputs", "failures"]
    assert set(line) == {"-"} and row.split() == ["frames", "60", "123,456", "34", "5", "6", "0"]
