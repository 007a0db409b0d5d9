"""What runs the targets, with a program in place of the fuzzer that says what libFuzzer says."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
#: CPU seconds of one slice of the program below: before it says that the search begins, and after.
START_CPU_S, SEARCH_CPU_S = 0.2, 0.2
#: It finds something new when it has found nothing yet.
FUZZER = f"""
import pathlib, sys, time
name, *options, found = sys.argv[1:]
options = dict(one.lstrip("-").split("=", 1) for one in options if "=" in one)
def work(until):
    while time.process_time() < until:
        pass
work({START_CPU_S})
print(f"fuzz.drive: {{time.process_time():.2f}} CPU seconds before the search", file=sys.stderr)
work({START_CPU_S} + {SEARCH_CPU_S})
if "merge" in options:
    target = [one for one in sys.argv[2:] if not one.startswith("-")][0]
    (pathlib.Path(target) / "kept").write_bytes(b"new input")
    print("MERGE-OUTER: 3 new files with 37 new features added; 13 new coverage edges", file=sys.stderr)
elif name == "tlv":
    (pathlib.Path(options["artifact_prefix"]) / "crash-1").write_bytes(b"bad")
    print("#1\\tINITED cov: 5 ft: 6 corp: 1/1b exec/s: 0 rss: 1Mb", file=sys.stderr)
    print("stat::number_of_executed_units: 7", file=sys.stderr)
    sys.exit(77)
else:
    known = pathlib.Path(found) / "known"
    features = 34 if known.exists() else 30
    known.write_bytes(b"x")
    print(f"#3\\tINITED cov: 12 ft: {{features}} corp: 4/9b exec/s: 0 rss: 1Mb", file=sys.stderr)
    print("#9\\tDONE   cov: 12 ft: 34 corp: 5/67Kb lim: 8 exec/s: 9 rss: 1Mb", file=sys.stderr)
    print("stat::number_of_executed_units: 1000", file=sys.stderr)
"""
#: In place of atheris: a search that says through a named pipe that it runs, and goes on until it is told to end.
ENDLESS = """
import contextlib, os, signal, sys, time
def instrument_imports(include):
    return contextlib.nullcontext()
def Setup(options, one_input):
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
def Fuzz():
    print("#3\\tINITED cov: 12 ft: 30 corp: 4/9b exec/s: 0 rss: 1Mb", file=sys.stderr)
    while time.process_time() < 1:
        pass
    with open(os.environ["RUNNING"], "w") as running:
        print(os.getpid(), file=running)
    while True:
        pass
def end(*_):
    print("#9\\tNEW    cov: 12 ft: 34 corp: 5/67Kb lim: 8 exec/s: 9 rss: 1Mb", file=sys.stderr)
    print("==1== libFuzzer: run interrupted; exiting", file=sys.stderr)
    print("stat::number_of_executed_units: 8", file=sys.stderr)
    sys.stderr.flush()
    os._exit(72)
"""
#: In place of atheris: each input takes six seconds by the clock that the limit is measured with.
SLOW = """
import contextlib, itertools, time
def instrument_imports(include):
    return contextlib.nullcontext()
def Setup(options, one_input):
    global target
    target = one_input
def Fuzz():
    time.thread_time = itertools.count(0, 6).__next__
    target(b"")
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("fuzz.run")


def campaign(run: Any, folder: Path, **options: Any) -> Any:
    program = folder / "fuzzer.py"
    program.write_text(FUZZER)
    options = {"record": folder / "figures.json", "program": (sys.executable, str(program)), **options}
    return run.Campaign(folder / "work", **options)


def in_place_of_atheris(folder: Path, source: str) -> dict[str, str]:
    """The environment for processes that import it."""
    (folder / "atheris.py").write_text(source)
    return {**os.environ, "PYTHONPATH": str(folder)}


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_cpu_seconds_of_the_fuzzer_are_counted(run: Any, tmp_path: Path) -> None:
    """A slice is of seconds by the clock on the wall; it counts as what the process used for the search."""
    began, counted = children_cpu_s(), campaign(run, tmp_path)
    counted.run({"frames": 0.1})
    figures = counted.figures["frames"]
    assert figures.executions == 1_000
    assert figures.seconds == pytest.approx(children_cpu_s() - began - START_CPU_S, abs=0.1)
    assert figures.seconds >= SEARCH_CPU_S


def test_figures_add_up_over_runs_and_checkouts(run: Any, tmp_path: Path) -> None:
    first = campaign(run, tmp_path, jobs=2)
    first.run({"frames": 0.3, "hello": 0.1})
    known = first.figures
    assert known["frames"].seconds >= 0.3 and known["frames"].executions == 2_000
    assert known["hello"].seconds >= 0.1 and known["hello"].executions == 1_000
    assert (known["hello"].edges, known["hello"].features, known["hello"].inputs, known["hello"].crashes) == (
        12,
        34,
        5,
        0,
    )
    campaign(run, tmp_path).run({"frames": 0.3})
    assert campaign(run, tmp_path).figures == known  # it has had its time
    record = tmp_path / "figures.json"
    (tmp_path / "other").mkdir()
    elsewhere = campaign(run, tmp_path / "other", record=record)
    elsewhere.run({"frames": known["frames"].seconds + 0.1})
    assert elsewhere.figures["frames"].executions == 3_000
    assert elsewhere.figures["frames"].seconds > known["frames"].seconds
    assert elsewhere.figures["hello"] == known["hello"]
    assert list(json.loads(record.read_text())) == ["frames", "hello"]


def test_it_is_noted_when_the_last_new_feature_was_found(run: Any, tmp_path: Path) -> None:
    searching = campaign(run, tmp_path)
    searching.run({"frames": 0.1})
    first = searching.figures["frames"]
    assert first.last_new == first.seconds
    searching.run({"frames": first.seconds + 0.1})
    second = searching.figures["frames"]
    assert second.last_new == first.seconds < second.seconds


def test_the_target_with_the_fewest_seconds_is_next(run: Any, tmp_path: Path) -> None:
    record, figures = tmp_path / "figures.json", importlib.import_module("fuzz.figures")
    figures.save(record, {"frames": figures.Figures(seconds=0.5), "hello": figures.Figures()})
    states = [figures.load(record)]

    def noted(now: Mapping[str, Any]) -> None:
        states.append(dict(now))

    campaign(run, tmp_path, noted=noted).run({"frames": 0.8, "hello": 0.8})
    order = []
    for before, after in itertools.pairwise(states):
        (name,) = (name for name in after if after[name] != before[name])
        assert before[name].seconds == min(one.seconds for one in before.values())
        order.append(name)
    assert order[0] == "hello" and set(order) == {"frames", "hello"}
    assert all(one.seconds >= 0.8 for one in states[-1].values())


def test_failures_are_counted_until_they_are_removed(run: Any, tmp_path: Path, capsys: Any) -> None:
    failing = campaign(run, tmp_path, jobs=2)
    failing.run({"tlv": 10.0, "hello": 0.1})
    assert failing.figures["tlv"].crashes == 1 and failing.figures["tlv"].seconds < 10
    assert failing.figures["hello"].crashes == 0 and failing.figures["hello"].seconds >= 0.1
    assert "tlv: could not be run: it failed as before" in capsys.readouterr().err
    (tmp_path / "work" / "crashes" / "tlv" / "crash-1").unlink()
    assert campaign(run, tmp_path).figures["tlv"].crashes == 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_ends_the_fuzzer_and_keeps_the_figures(tmp_path: Path, how: signal.Signals) -> None:
    pipe, record, table = (tmp_path / name for name in ("running", "figures.json", "table.txt"))
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "fuzz", "frames", "--folder", str(tmp_path / "work"), "--seconds", "3600"]
    with subprocess.Popen(
        [*command, "--figures", str(record), "--table", str(table)],
        cwd=ROOT,
        env={**in_place_of_atheris(tmp_path, ENDLESS), "RUNNING": str(pipe)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as stopped:
        child = int(pipe.read_text())
        stopped.send_signal(how)
        output, errors = stopped.communicate(timeout=60)
    assert stopped.returncode == 1 and not errors
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    noted = json.loads(record.read_text())["frames"]
    assert noted["executions"] == 8 and noted["features"] == 34
    assert 0 < noted["seconds"] == noted["last_new"] < 3_600
    assert table.read_text() in output.decode() and "frames" in table.read_text()


def test_an_input_that_takes_too_many_cpu_seconds_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fuzz.drive", "frames"]
    ended = subprocess.run(command, cwd=ROOT, env=in_place_of_atheris(tmp_path, SLOW), capture_output=True, check=False)
    assert ended.returncode and b"this input took 6.0 CPU seconds" in ended.stderr


def test_the_kept_corpus_is_the_shortest_that_was_not_known(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = importlib.import_module("fuzz.corpus")
    monkeypatch.setattr(corpus, "FOLDER", tmp_path)
    found = campaign(run, tmp_path)
    found.run({"frames": 0.1})
    searched = found.figures["frames"]
    assert found.minimise("frames") == len(b"new input")
    assert corpus.kept("frames") == [b"new input"]
    assert ("line 1 of corpus/frames.txt", b"new input") in list(corpus.inputs("frames"))
    reached = found.figures["frames"]
    assert (reached.edges, reached.features, reached.inputs) == (13, 37, 3)
    assert (reached.seconds, reached.executions) == (searched.seconds, searched.executions)
    chosen = corpus.keep(
        "frames", [bytes(corpus.INPUT_BYTES + 1), b"b", b"a", b"b", *(bytes(n) for n in range(2, 300))]
    )
    assert chosen[:3] == [b"a", b"b", bytes(2)] and sum(map(len, chosen)) <= corpus.KEPT_BYTES
