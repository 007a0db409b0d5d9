"""Networks of RMB relays, clients and peers keep their promises whatever fails. ``python -m tests.simulation_rmb`` runs more."""

from __future__ import annotations

from typing import Any

import pytest

from dmsg.rmb.relay.switch import Switch

from .world import World

pytestmark = pytest.mark.time_limit(120)


#: Runs that once failed: a peer's request was both put back and awaited; a twin moved to the relay that had its envelopes;
#: data of a killed peer reached its Redis after the next peer had answered; a peer has a long way to its Redis.
ONCE = (5078, 5129, 64003, 63007)


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 12)), *ONCE]
)
def test_a_network_keeps_its_promises_whatever_happens(seed: int) -> None:
    failures = World(seed).run()
    assert not failures, f"again: python -m tests.simulation_rmb --seeds {seed} --verbose"


def test_a_run_follows_from_its_number() -> None:
    runs = [World(5129) for _ in range(2)]
    for run in runs:
        run.run()
    assert runs[0].trace == runs[1].trace and len(runs[0].trace) > 100


def test_what_a_relay_loses_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    route = Switch.route

    def forgetful(self: Switch, session: Any, messages: Any, *times: float) -> Any:
        return route(self, session, messages[:1], *times)

    monkeypatch.setattr(Switch, "route", forgetful)
    assert any("lost: envelope" in failure or "without faults" in failure for failure in World(7).run())
