"""Whole networks in virtual time with dishonest relays, peers and discoveries among the honest (:doc:`/explanation/fuzzing`)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.dishonest import run


@pytest.mark.time_limit(120)
@pytest.mark.parametrize("seed", [*range(7), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(7, 14))])
def test_the_honest_are_kept_their_promises(seed: int, logged_errors: Any) -> None:
    outcome = run(seed)
    logged_errors.flush()  # logged errors are among the violations, except those that programs raise on purpose
    again = f"python -m tests.simulation --trace --dishonest --seeds {seed}"
    assert not outcome.violations, "\n".join([*outcome.violations, again])


def test_a_run_is_the_same_again(logged_errors: Any) -> None:
    assert run(14).notes == run(14).notes
    logged_errors.flush()
