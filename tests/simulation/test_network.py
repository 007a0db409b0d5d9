"""Whole networks in virtual time, with random programs and random faults (:doc:`/explanation/fuzzing`)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.faults import ALL, OF_MOVING
from tests.simulation.run import run

#: Runs of one kind of fault each, then of several at a time. ``python -m tests.simulation`` runs others.
_SEEDS = {kind: seed for seed, kind in enumerate(ALL) if kind not in OF_MOVING} | {"clock": 21, "race": 38}
_ALONE = [pytest.param(seed, (kind,), False, id=kind) for kind, seed in _SEEDS.items()]
_TOGETHER = [pytest.param(seed, ALL, False, id=f"seed {seed}") for seed in (102, 103, 105, 7040)]
#: Each of these finds different faults in the moving of transports; those that are long take 5 s and more.
_MOVING = [
    pytest.param(seed, ALL, True, id=f"moving, seed {seed}", marks=[pytest.mark.long] * (seed in (6207, 6208)))
    for seed in (6204, 6206, 6207, 6208, 6209, 6218, 6221, 6225)
]


@pytest.mark.time_limit(120)
@pytest.mark.parametrize(("seed", "kinds", "moving"), _ALONE + _TOGETHER + _MOVING)
def test_the_promises_hold(seed: int, kinds: tuple[str, ...], moving: bool, logged_errors: Any) -> None:
    outcome = run(seed, kinds=kinds, moving=moving)
    logged_errors.flush()  # logged errors are among the violations, except those that programs raise on purpose
    again = f"python -m tests.simulation --trace --seeds {seed} --only {','.join(kinds)}{' --moving' * moving}"
    assert not outcome.violations, "\n".join([*outcome.violations, again])


def test_a_run_is_the_same_again(logged_errors: Any) -> None:
    assert run(200, kinds=("cut",)).notes == run(200, kinds=("cut",)).notes
    assert run(6209, moving=True).notes == run(6209, moving=True).notes
    logged_errors.flush()
