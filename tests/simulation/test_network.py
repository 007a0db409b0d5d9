"""Whole networks in virtual time, in which chance decides what programs do and what goes wrong (:doc:`/explanation/fuzzing`)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.faults import ALL
from tests.simulation.run import run

#: Runs of one kind of fault each, then of several at a time. ``python -m tests.simulation`` runs others.
_ALONE = [pytest.param(seed, (kind,), id=kind) for seed, kind in enumerate(ALL)]
_TOGETHER = [pytest.param(seed, ALL, id=f"seed {seed}") for seed in (0, *range(100, 111), 116)]


@pytest.mark.time_limit(120)
@pytest.mark.parametrize(("seed", "kinds"), _ALONE + _TOGETHER)
def test_the_promises_hold(seed: int, kinds: tuple[str, ...], logged_errors: Any) -> None:
    outcome = run(seed, kinds=kinds)
    logged_errors.flush()  # what was logged is among the violations, but for what programs raise on purpose
    again = f"python -m tests.simulation --trace --seeds {seed} --only {','.join(kinds)}"
    assert not outcome.violations, "\n".join([*outcome.violations, again])


def test_a_run_is_the_same_again(logged_errors: Any) -> None:
    assert run(200).notes == run(200).notes
    logged_errors.flush()
