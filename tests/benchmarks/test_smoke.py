"""Every bench still runs, with sizes that say nothing about speed, and leaves no process behind."""

from __future__ import annotations

import importlib
import itertools
import json
import os
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import quiet, report
from benchmarks.processes import Cast, ChildFailed
from benchmarks.raw import RawConnection
from benchmarks.sizes import TINY
from dmsg.address import PublicKey


def children() -> set[int]:
    """The processes this one has started and not reaped."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


#: Their tests take 7 s and more of a core each.
LONG = {"rmb", "stuck_receiver", "throughput", "soak", "files", "e2e_cost", "dials", "starts"}


@pytest.mark.system
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name in LONG else name
        for name in (*command.BENCHES, "crowd", "cores")
    ],
)
def test_bench_gives_rows(name: str) -> None:
    before = children()
    rows = importlib.import_module(f"benchmarks.{name}").run(TINY)
    assert rows
    assert {one.bench for one in rows} == {name}
    assert any(one.target for one in rows)
    assert all(one.low <= one.value <= one.high for one in rows)
    assert children() <= before


@pytest.mark.system
def test_cheap_client_is_a_client_to_the_server() -> None:
    with Cast() as cast:
        server = cast.start("server")
        connection = RawConnection(server.facts["port"], PublicKey.parse(server.facts["key"]))
        assert server.ask("stats")["connections"] == 1
        connection.close()


@pytest.mark.system
def test_child_that_fails_is_told_of_and_reaped() -> None:
    before = children()
    with Cast() as cast:
        server = cast.start("server")
        with pytest.raises(ChildFailed, match="AssertionError"):
            server.ask("no such command")
        with pytest.raises(ChildFailed, match="server ended with 1"):
            cast.start("server", limits={"no_such_limit": 1})
    assert children() <= before


def test_rows_are_held_against_their_targets() -> None:
    met = report.row("bench", "fast", [3.0, 1.0, 2.0], "per s", at_least=2.0)
    missed = report.row("bench", "slow", [3.0, 1.0, 2.0], "ms", at_most=1.5)
    informative = report.row("bench", "plain", [1.0], "ms")
    assert (met.value, met.met, met.low, met.high, met.repeats) == (2.0, True, 1.0, 3.0, 3)
    assert missed.met is False
    assert informative.met is None
    facts = {**report.machine(), "stolen": {"bench": 0.126}}
    table = report.as_table([met, missed, informative], facts).splitlines()
    assert [line.split()[0] for line in table[2:5]] == ["bench"] * 3
    assert " yes " in table[2] and " NO " in table[3]
    assert table[-1].endswith("other guests: bench 13%")
    assert 0 <= report.Stolen().share() <= 1
    document = json.loads(report.as_json([met, missed], facts, (0.0, 0.0, 0.0)))
    assert {"cpu", "cores", "python", "versions", "load_average", "load_average_after"} <= set(document["machine"])
    assert [one["met"] for one in document["results"]] == [True, False]


@pytest.mark.parametrize(
    ("shares", "kept"),
    [
        ([0.0, 0.01, 0.02], [0, 1, 2]),
        ([0.3, 0.01, 0.0, 0.02], [1, 2, 3]),
        ([0.3, 0.2, 0.1, 0.4, 0.5, 0.05], [1, 2, 5]),
    ],
    ids=["all quiet", "one again", "never quiet"],
)
def test_repeats_count_in_which_the_host_took_least(shares: list[float], kept: list[int]) -> None:
    class Fake(report.Stolen):
        def __init__(self) -> None:
            self._share = left.pop(0)

        def share(self) -> float:
            return self._share

    left, calls = list(shares), itertools.count()
    assert quiet.least_disturbed(3, lambda: next(calls), Fake) == kept
    assert not left


def test_percentile() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert report.percentile(values, 0.5) == 51.0
    assert report.percentile(values, 0.99) == 100.0
    assert report.percentile([7.0], 0.99) == 7.0


def test_unknown_bench_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["no_such_bench"])
    assert "no such bench: no_such_bench" in capsys.readouterr().err
