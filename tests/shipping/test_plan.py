"""What a shipper plans: names, pauses, and which file is next, also after failures."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.sansio.backoff import Backoff
from dmsg.shipping.plan import FILE_REASONS, Plan, Sparing, Waiting, clip, landing_path, recognise, redact

FOLDER = "role=server/date=2026-01-02/hour=05"
NAME = "02c6047f9441ed7d-9f2c0011aabbccdd-000004-17.jsonl.zst"
SHA256 = "0123456789abcdef" * 4


def test_a_finished_file_at_its_place_is_recognised() -> None:
    name = recognise(f"{FOLDER}/{NAME}")
    assert name is not None
    assert (name.node, name.number, name.lines, name.digest) == ("02c6047f9441ed7d", 4, 17, "")
    assert landing_path(f"{FOLDER}/{NAME}", SHA256) == (
        f"{FOLDER}/02c6047f9441ed7d-9f2c0011aabbccdd-000004-17-0123456789abcdef.jsonl.zst"
    )


@pytest.mark.parametrize(
    "path",
    [
        NAME,
        f"more/{FOLDER}/{NAME}",
        f"{FOLDER}/{NAME}.part",
        f"{FOLDER}/.{NAME}",
        f"{FOLDER}/_{NAME}",
        f"{FOLDER}/02c6-9f2c0011aabbccdd-000004.jsonl.zst",
        f"{FOLDER}/02c6-9f2c0011aabbccdd-000004-17.jsonl.gz",
        f"{FOLDER}/02*6-9f2c0011aabbccdd-000004-17.jsonl.zst",
        f"{FOLDER}/ä-9f2c0011aabbccdd-000004-17.jsonl.zst",
        f"role=server/date=2026-1-2/hour=05/{NAME}",
        f"role=../date=2026-01-02/hour=5/{NAME}",
        f"role=a/b/date=2026-01-02/hour=05/{NAME}",
    ],
)
def test_anything_else_is_not(path: str) -> None:
    assert recognise(path) is None
    with pytest.raises(ValueError, match="no finished file"):
        landing_path(path, SHA256)


def test_urls_are_shown_without_what_is_secret_in_them() -> None:
    assert redact("sftp://user:pass@host/x and s3://b/k") == "sftp://…@host/x and s3://b/k"
    assert redact("https://host/a?X-Signature=abc done") == "https://host/a?… done"
    error = ValueError("login sftp://u:hunter2@h/ with hunter2 failed\nTraceback: hunter2" + "x" * 900)
    assert clip(error, "sftp://u:hunter2@h/") == "ValueError: login sftp://…@h/ with … failed"
    odd = "s3://me:hunter2@[bad/x?token=abc"  # no URL at all
    assert redact(odd) == "s3://…@[bad/x?…"
    assert clip(ValueError(f"hunter2: {odd}"), odd) == "ValueError: …: s3://…@[bad/x?…"
    assert clip(ValueError("a:b@c"), "sftp://user:a:b@c@host/x") == "ValueError: …"
    assert len(clip(ValueError("x" * 900))) == 300
    assert clip(ValueError()) == "ValueError: ValueError()"


def test_of_many_of_a_kind_one_a_minute_is_told_and_the_others_are_counted() -> None:
    sparing = Sparing(60.0)
    told = [sparing.lets("a", float(now)) for now in range(0, 200, 10)]
    assert [(10 * number, one) for number, one in enumerate(told) if one is not None] == [
        (0, 0), (60, 5), (120, 5), (180, 5),
    ]  # fmt: skip
    assert sparing.lets("b", 190.0) == 0, "another kind is told at once"
    assert sparing.rest() == {"a": 1} and sparing.rest() == {}
    assert sparing.lets("a", 240.0) == 0


# --- the plan --------------------------------------------------------------------------------------------------------


def files(*names: str) -> list[Waiting]:
    return [Waiting(name, 10, float(number)) for number, name in enumerate(names)]


def make(parallel: int = 2, give_up_after: int | None = None, *names: str) -> Plan:
    plan = Plan(parallel=parallel, backoff=Backoff(), uniform=lambda: 0.999999, give_up_after=give_up_after)
    plan.scan_begins()
    plan.scanned(files(*names))
    return plan


def take(plan: Plan, now: float) -> list[str]:
    taken = []
    while (one := plan.take(now)) is not None:
        taken.append(one.path)
    return taken


def test_the_oldest_go_first_and_only_so_many_at_a_time() -> None:
    plan = make(2)
    plan.scanned([Waiting("young", 1, 9.0), Waiting("old", 1, 1.0), Waiting("b", 1, 5.0), Waiting("a", 1, 5.0)])
    assert take(plan, 0.0) == ["old", "a"] and plan.in_flight == 2
    assert plan.next_due(0.0) is None
    plan.settled("a", reached=True)
    assert plan.next_due(0.0) == 0.0
    assert take(plan, 0.0) == ["b"]
    assert sorted(one.path for one in plan.backlog) == ["b", "old", "young"]


def test_a_bad_file_waits_for_longer_each_time_and_stops_no_other() -> None:
    plan = make(1, None, "bad", "b", "c")
    assert take(plan, 0.0) == ["bad"]
    assert plan.failed("bad", "conflict", 0.0) == pytest.approx(1.0, abs=0.001)
    assert plan.next_due(0.0) == 0.0, "the others need not wait"
    for name in ("b", "c"):
        assert take(plan, 0.1) == [name]
        plan.settled(name, reached=True)
    assert take(plan, 0.9) == [] and plan.next_due(0.9) == pytest.approx(1.0, abs=0.001)
    assert take(plan, 1.0) == ["bad"] and plan.attempt("bad") == 2
    assert plan.failed("bad", "conflict", 1.0) == pytest.approx(3.0, abs=0.001)


def test_a_file_with_failures_of_its_own_is_tried_once_an_hour_in_the_end() -> None:
    plan = make(1, None, "bad")
    tries, now = [], 0.0
    while now < 86_400.0:
        assert take(plan, now) == ["bad"]
        tries.append(now)
        now = plan.failed("bad", "unreadable", now)
    assert [one for one in tries if one < 60.0] == pytest.approx([0.0, 1.0, 3.0, 7.0, 15.0, 31.0], abs=0.001)
    assert [one - two for one, two in zip(tries[-10:], tries[-11:], strict=False)] == pytest.approx(
        [3600.0] * 10, abs=1
    )


def test_only_failures_of_its_own_hold_a_file_up_for_so_long() -> None:
    plan = make(1, None, "a")
    now = 0.0
    for _ in range(50):
        assert take(plan, now) == ["a"]
        due = plan.failed("a", "unreachable", now)
        assert due - now <= 60.0
        now = due
    assert take(plan, now) == ["a"]
    assert plan.failed("a", "unreadable", now) - now == pytest.approx(1.0, abs=0.001), "the first of its own"


def test_while_the_target_fails_one_file_at_a_time_tries_it_and_not_always_the_same() -> None:
    plan = make(3, None, *"abcdef")
    assert take(plan, 0.0) == ["a", "b", "c"]
    for name in "abc":
        plan.failed(name, "unreachable", 0.0)
    assert take(plan, 0.5) == []
    assert plan.next_due(0.5) == pytest.approx(1.0, abs=0.001), "one outage, one pause"
    tried, now = [], 0.0
    for _ in range(8):
        due = plan.next_due(now)
        assert due is not None
        now = due
        [name] = take(plan, now)
        tried.append(name)
        plan.failed(name, "unreachable", now)
    assert len(set(tried)) >= 5
    assert now > 60.0
    due = plan.next_due(now)
    assert due is not None and 30.0 <= due - now <= 60.0
    [name] = take(plan, due)
    plan.settled(name, reached=True)
    assert plan.in_flight == 0 and len(take(plan, due + 60.0)) == 3, "it is back"


@pytest.mark.parametrize("parallel", [1, 2])
def test_one_file_the_target_will_not_have_does_not_stop_the_others(parallel: int) -> None:
    plan = make(parallel, None, *(f"{number:03}" for number in range(100)))
    now, shipped = 0.0, 0
    while len(plan.backlog) > 1:
        for name in take(plan, now):
            if name == "000":
                plan.failed(name, "failed", now)
            else:
                plan.settled(name, reached=True)
                shipped += 1
        due = plan.next_due(now)
        assert due is not None
        now = max(now, due)
    assert shipped == 99 and now < 30.0


def test_files_that_settled_while_the_list_was_made_do_not_come_back() -> None:
    plan = make(2, None, "a", "b", "c")
    assert take(plan, 0.0) == ["a", "b"]
    plan.scan_begins()
    plan.settled("a", reached=True)
    plan.scanned(files("a", "b", "c"))
    assert take(plan, 0.0) == ["c"], "b is under way, a is gone"
    plan.scan_begins()
    plan.scanned([])
    assert {one.path for one in plan.backlog} == {"b", "c"}
    plan.failed("b", "unreadable", 0.0)
    plan.scan_begins()
    plan.scanned([])
    assert [one.path for one in plan.backlog] == ["c"] and plan.next_due(0.0) is None


def test_giving_up_on_a_file() -> None:
    plan = make(1, 2, "bad", "good")
    assert take(plan, 0.0) == ["bad"]
    assert plan.failed("bad", "unreadable", 0.0) < math.inf
    assert take(plan, 0.0) == ["good"] and not plan.finished
    plan.settled("good", reached=True)
    assert not plan.finished
    assert take(plan, 5.0) == ["bad"]
    assert plan.failed("bad", "unreadable", 5.0) == math.inf
    assert plan.finished and plan.next_due(5.0) is None and [one.path for one in plan.backlog] == ["bad"]


def test_giving_up_on_the_target() -> None:
    plan = make(4, 3, *"abcdefgh")
    now = 0.0
    for _ in range(3):
        for name in take(plan, now):
            plan.failed(name, "no_space", now)
        now = plan.next_due(now) or now
    assert plan.finished and take(plan, now + 1000) == [] and plan.next_due(now) is None
    assert len(plan.backlog) == 8


@given(st.data())
def test_everything_arrives_once_the_target_works(data: st.DataObject) -> None:
    """After any failures every file is shipped, and never two attempts on one at a time."""
    plan = make(data.draw(st.integers(1, 4)), None, *"abcdefg")
    running: list[str] = []
    now = 0.0
    draw: Callable[[list[str]], str] = lambda options: data.draw(st.sampled_from(options))  # noqa: E731
    for _ in range(data.draw(st.integers(0, 40))):
        new = take(plan, now)
        assert not set(new) & set(running)
        running += new
        if running:
            name = running.pop(data.draw(st.integers(0, len(running) - 1)))
            plan.failed(name, draw(["unreachable", "denied", *sorted(FILE_REASONS)]), now)
        else:
            now = plan.next_due(now) or now
    for name in running:
        plan.failed(name, "unreachable", now)
    shipped: list[str] = []
    while plan.backlog:
        due = plan.next_due(now)
        assert due is not None and due - now <= 3600.0
        now = due
        for name in take(plan, now):
            plan.settled(name, reached=True)
            shipped.append(name)
    assert sorted(shipped) == list("abcdefg") and plan.finished
