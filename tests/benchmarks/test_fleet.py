"""The simulated fleet: the same run for the same seed, relays that are what the plan says, and what ranks give there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from twisted.internet.task import Clock

from benchmarks import fleet as bench
from benchmarks import simulated_fleet as fleet
from benchmarks.heapclock import HeapClock
from benchmarks.simulated_fleet import FleetPlan, FleetRun, RelayState
from benchmarks.sizes import TINY, FleetSize
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.ranks import Ranks, sign_ranks
from dmsg.eventlog import schema as ev

STEADY = RelayState()
SLOW = RelayState(fleet.Path(delay_s=0.3))
SMALL = FleetSize(clients=20, duration_s=300.0, dial_every_s=15.0)


def small(*relays: Sequence[RelayState], **options: Any) -> FleetPlan:
    return FleetPlan(relays, **{"clients": 6, "duration_s": 90.0, "dial_every_s": 10.0, **options})


# --- the clock -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Clock, HeapClock])
def test_calls_come_in_the_order_of_their_times(make: Any) -> None:
    clock = make()
    told: list[object] = []
    clock.callLater(3, told.append, "third")
    early = clock.callLater(9, told.append, "first")
    late = clock.callLater(1, told.append, "last")
    gone = clock.callLater(1, told.append, "never")
    clock.callLater(2, told.append, "second")
    early.reset(1)
    late.delay(4)
    gone.cancel()
    assert len(clock.getDelayedCalls()) == 4
    clock.advance(10)
    assert told == ["first", "second", "third", "last"]
    assert not clock.getDelayedCalls()


def test_each_call_sees_the_time_it_asked_for() -> None:
    clock, told = HeapClock(1000.0), []
    clock.callLater(2, lambda: told.append(clock.seconds()))
    clock.callLater(1, lambda: clock.callLater(0.5, lambda: told.append(clock.seconds())))
    clock.advance(5)
    assert told == [1001.5, 1002.0] and clock.seconds() == 1005.0
    assert not clock.step(2000.0)


# --- the fleet -------------------------------------------------------------------------------------------------------


def lines(run: FleetRun) -> list[tuple[float, str, str]]:
    return [(one.ts, one.role, repr(one.event)) for one in run.events]


def test_a_seed_is_a_run() -> None:
    plan = small([STEADY], [SLOW])
    first, again, other = (fleet.run_fleet(one) for one in (plan, plan, replace(plan, seed=2)))
    # what happens at one moment may come in another order
    assert first.dials == again.dials and sorted(lines(first)) == sorted(lines(again))
    assert first.dials != other.dials
    assert first.success == 1.0 and len(first.dials) > 20


def test_events_are_those_of_clients_and_servers() -> None:
    plan = small([STEADY], [STEADY])
    run = fleet.run_fleet(plan)
    roles = Counter((one.role, type(one.event)) for one in run.events)
    assert roles["server", ev.ServerStarted] == roles["server", ev.ServerStopped] == 2
    assert roles["client", ev.DialFinished] == len(run.dials)
    assert roles["client", ev.SessionUp] >= 6
    relays = {str(fleet.relay_key(plan, number).public_key) for number in range(2)}
    assert {one.event.server for one in run.events if isinstance(one.event, ev.SessionUp)} <= relays
    assert all(plan.starts_at_s <= one.ts <= run.ended_at_s for one in run.events)


def test_relays_change_when_the_plan_says_so() -> None:
    healing, failing = (fleet.run_fleet(small(states)) for states in ([SLOW, STEADY], [STEADY, SLOW]))

    def slowest_ms(run: FleetRun, *, late: bool) -> float:
        return max(one.elapsed_ms for one in run.dials if (one.at_s > 50 if late else one.at_s < 40))

    assert slowest_ms(healing, late=False) > 1000 > slowest_ms(healing, late=True)
    assert slowest_ms(failing, late=False) < 1000 < slowest_ms(failing, late=True)


def test_relays_that_fall_silent_make_dials_fail() -> None:
    silent = RelayState(stalls_per_hour=600.0)
    run = fleet.run_fleet(small([silent], duration_s=150.0))
    assert run.success < 0.7
    assert any(one.reason == "timeout" for one in run.dials)
    lost = [one for one in run.events if isinstance(one.event, ev.SessionDown) and one.event.duration_s]
    assert lost


def test_a_relay_over_capacity_refuses() -> None:
    run = fleet.run_fleet(small([STEADY], limits={0: fleet.FULL}, dial_every_s=3.0))
    assert Counter(one.reason for one in run.dials)["rate_limited"] > 5


# --- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.time_limit(150)
def test_ranks_make_dials_fail_less_often_and_take_less_long() -> None:
    """Four relays of fourteen slow, four failing: half the failures or less, and half the time at the 99th percentile."""
    fates = ("ssss",) * 6 + ("llll",) * 4 + ("ffff",) * 4
    outcomes = [bench.simulate(SMALL, seed=seed, variants=("nothing", "both"), fates=fates) for seed in (1, 2)]
    without, with_ranks = (bench.pool([one.second[name] for one in outcomes]) for name in ("nothing", "both"))
    assert len(without.dials) > 500 and len(with_ranks.dials) > 500
    assert 1 - with_ranks.success <= 0.5 * (1 - without.success)
    assert with_ranks.successful_ms(0.99) <= 0.5 * without.successful_ms(0.99)
    assert with_ranks.successful_ms(0.5) <= without.successful_ms(0.5)


def test_the_reference_ranks_tell_relays_apart() -> None:
    plan = small([STEADY], [SLOW], [RelayState(stalls_per_hour=600.0)], clients=24)
    run = fleet.run_fleet(plan, measure=False)
    data = bench.reference_ranks(run.events, run.ended_at_s)
    ranks = Ranks.parse(data, {bench.OPERATOR.public_key}, run.ended_at_s)
    # A slow relay loses the race with others when a client connects: it may be that none of them used it.
    steady, slow, failing = (ranks.scores.get(fleet.relay_key(plan, number).public_key.raw, 0) for number in range(3))
    assert steady > 600
    assert max(slow, failing) < 400


# --- the bench -------------------------------------------------------------------------------------------------------


def test_ranks_from_elsewhere_are_taken() -> None:
    tiny = FleetSize(clients=15, duration_s=80.0, dial_every_s=10.0)
    fates = ("ssss", "ffff")
    one, _ = bench.plans(tiny, 1, fates)
    run = fleet.run_fleet(one, measure=False)
    document = json.loads(bench.reference_ranks(run.events, run.ended_at_s))
    late_s = document["issued"] = int(run.ended_at_s) + 86_400  # as late as a pipeline may be
    pipeline = SecretKey(bytes(31) + b"\x09")
    ranks = sign_ranks(document, pipeline)
    outcome = bench.simulate(tiny, variants=("nothing", "ranks"), ranks=ranks, fates=fates)
    failing = str(fleet.relay_key(one, 1).public_key)

    def share(run: FleetRun) -> float:
        """How many of the sessions are with the failing relay."""
        ups = [line.event.server for line in run.events if isinstance(line.event, ev.SessionUp)]
        return ups.count(failing) / len(ups)

    assert outcome.second["ranks"].events[0].ts >= late_s
    assert share(outcome.second["ranks"]) < 0.5 * share(outcome.second["nothing"])


def test_the_log_is_written_as_roles_write_it(tmp_path: Path) -> None:
    run = fleet.run_fleet(small([STEADY]))
    assert bench.write_events(run, tmp_path) == len(run.events)
    count = 0
    for path in tmp_path.rglob("*"):
        if path.is_dir():
            continue
        role = path.parts[len(tmp_path.parts)].removeprefix("role=")
        *_, node, boot, number, said = [*path.name.removesuffix(".jsonl.zst").split("-")]
        assert (len(node), len(boot), len(number)) == (16, 16, 6)
        read = [json.loads(line) for line in zstandard.decompress(path.read_bytes()).splitlines()]
        assert len(read) == int(said)
        assert {(one["role"], one["node"], one["boot"]) for one in read} == {(role, node, boot)}
        count += len(read)
    assert count == len(run.events)


def test_the_bench_gives_rows() -> None:
    size = FleetSize(clients=6, duration_s=70.0, dial_every_s=8.0, seeds=2)
    rows = bench.run(replace(TINY, fleet=size))
    assert {one.bench for one in rows} == {"fleet"}
    assert any(one.target for one in rows)
    assert all(one.low <= one.value <= one.high for one in rows)
