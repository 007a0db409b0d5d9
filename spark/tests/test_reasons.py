"""The pipeline looks for reasons that events can have, and generated lines have no others."""

from __future__ import annotations

import pytest

from dmsg_logs.schemas import REASONS
from dmsg_logs.synthetic import texts
from dmsg_logs.tables.transforms import abuse, rank_evidence, relay_failures, rmb_failures


def test_reasons_are_listed_once() -> None:
    assert len(set(REASONS)) == len(REASONS) > 100


@pytest.mark.parametrize(
    "sought",
    [
        abuse.FRUITLESS,
        abuse.OFFENCES,
        rank_evidence.CONNECT_FAULTS,
        rank_evidence.HANDSHAKE_FAULTS,
        rank_evidence.NO_ROOM,
        rank_evidence.NO_ROOM_OWN,
        rank_evidence.OWN_ENDS,
        rank_evidence.UNANSWERED,
        (rank_evidence.LOST,),
        relay_failures.NORMAL_ENDS,
        rmb_failures.NORMAL_ENDS,
    ],
)
def test_what_is_sought_can_be_there(sought: tuple[str, ...]) -> None:
    assert set(sought) <= set(REASONS)


def test_generated_lines_have_reasons_of_the_list() -> None:
    found = {reason for _, reason, _ in texts.TRIED.values()} | {
        reason for strange in texts.STRANGE.values() for _, reason in strange
    }
    found |= set(texts.REFUSALS.values()) | set(texts.NAMES.values())
    found |= {reason for ends in texts.ENDS.values() for reason in ends}
    found |= {*texts.FAILURES, *texts.ATTEMPTS, *texts.CALLS}
    found |= {texts.NOT_FOUND, texts.WRONG_TIME, texts.DOWN}
    assert found <= set(REASONS)
