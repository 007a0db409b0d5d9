"""Whose post to another relay is next when too many are under way."""

from __future__ import annotations

import pytest

from dmsg.rmb.core.limits import RANKED_RELAYS
from dmsg.rmb.relay.lanes import Lane
from dmsg.rmb.relay.turns import AGAIN, PROMPT_S, Turns
from dmsg.sansio.backoff import Backoff


def lane() -> Lane:
    return Lane(3, Backoff(1.0, 2.0))


def post(turns: Turns, relay: str, took_s: float | None = 0.0) -> None:
    turns.end(relay, turns.begin(relay), took_s)


def order(turns: Turns) -> list[str]:
    """The relays whose turns come, one after the other."""
    found = []
    while (turn := turns.next()) is not None:
        found.append(turn[0])
    return found


def test_relays_that_are_not_prompt_leave_posts_to_those_that_are() -> None:
    turns = Turns(4, 2)
    post(turns, "prompt", PROMPT_S)
    for relay in ("new", "newer"):
        assert turns.has_room(relay)
        turns.begin(relay)
    assert not turns.has_room("newest")
    for _ in range(2):
        assert turns.has_room("prompt")
        turns.begin("prompt")
    assert not turns.has_room("prompt") and turns.under_way == 4
    turns.end("new", False, None)
    assert turns.has_room("newest") and turns.has_room("prompt")


@pytest.mark.parametrize("took_s", [PROMPT_S + 0.01, None], ids=["slow", "no answer"])
def test_a_relay_that_was_not_prompt_has_to_be_so_for_longer(took_s: float | None) -> None:
    turns = Turns(2, 1)
    turns.begin("new")
    post(turns, "relay")
    assert turns.has_room("relay")
    post(turns, "relay", took_s)
    for _ in range(AGAIN):
        assert not turns.has_room("relay")
        post(turns, "relay")
    assert turns.has_room("relay")


def test_both_kinds_and_in_each_all_relays_take_turns() -> None:
    turns = Turns(1, 1)
    for relay in ("a", "b"):
        post(turns, relay)
    turns.begin("under way")
    lanes = {relay: lane() for relay in ("x", "a", "y", "b", "z", "x")}
    for relay, one in lanes.items():
        turns.wait(relay, one)
    assert turns and turns.waiting == 5 and turns.next() is None
    turns.end("under way", False, None)
    assert order(turns) == ["a", "x", "b", "y", "z"]
    assert not turns


def test_a_relay_waits_among_those_that_are_as_it_is_by_now() -> None:
    turns = Turns(2, 1)
    turns.begin("new")
    turns.wait("relay", lane())
    assert turns.next() is None
    post(turns, "relay")
    turns.wait("relay", lane())
    assert turns.waiting == 1 and order(turns) == ["relay"]
    turns.wait("relay", lane())
    post(turns, "relay", None)
    turns.wait("relay", lane())
    assert turns.waiting == 1 and turns.next() is None


def test_so_many_relays_are_remembered_as_the_ranker_remembers() -> None:
    turns = Turns(2, 1)
    turns.begin("new")
    for number in range(RANKED_RELAYS):
        post(turns, str(number))
    assert turns.has_room("0")
    post(turns, "one more")
    assert not turns.has_room("0") and turns.has_room("1")
