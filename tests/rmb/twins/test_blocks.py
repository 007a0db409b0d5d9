"""Blocks that change twins: what is forgotten because of them, and when nodes stop to tell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.twins.blocks import MAX_CHANGES, MAX_EVENTS_BYTES, changed_twins
from dmsg.rmb.twins.scale import EVENTS_KEY
from tests.rmb.twins import chain_bytes
from tests.rmb.twins.fake_node import SILENCE

ALICE = bytes([1]) * 32
STARTS = (b"\x19\x0b", b"\x19\x0c")


def relays(world, registry, number=7):
    twin = world.ask(registry.get(number))
    return twin and twin.relays


def storage_reads(world):
    return world.a.asked["state_getStorage"] + world.b.asked["state_getStorage"]


# --- events ------------------------------------------------------------------------------------------------------------


def listening_to_a_block_that_will_be_taken_back(world):
    """A registry that has heard of it, and the state of the chain before it."""
    world.chain.twin(7, ALICE, "before.example")
    before = world.chain.state
    registry = world.listening()
    world.chain.twin(7, ALICE, "lost.example")
    world.network.advance(0)
    assert relays(world, registry) == ("lost.example",)
    return registry, before


def test_changed_twins_are_found_between_other_events():
    twins = [chain_bytes.twin(number, ALICE, "r.example") for number in (1, 55, 2**32 - 1)]
    assert changed_twins(chain_bytes.events(*twins), STARTS) >= {1, 55, 2**32 - 1}
    assert changed_twins(chain_bytes.events(), STARTS) == set()


@given(st.binary(max_size=60), st.integers(0, 2**32 - 1), st.sampled_from(STARTS), st.binary(max_size=60))
def test_no_bytes_around_an_event_hide_it(before, number, start, after):
    assert number in changed_twins(before + start + number.to_bytes(4, "little") + after, STARTS)


def test_a_flood_of_changes_is_not_read_to_its_end():
    flood = b"".join(b"\x19\x0c" + number.to_bytes(4, "little") for number in range(MAX_EVENTS_BYTES // 6))
    assert changed_twins(flood, STARTS) is None
    assert changed_twins(b"\x19\x0c" * (MAX_CHANGES + 1), STARTS) is None  # of two numbers
    assert len(changed_twins(flood[: 6 * 9_000], STARTS) or ()) >= 9_000


# --- listening ---------------------------------------------------------------------------------------------------------


def test_a_twin_that_a_block_changes_is_read_anew(world):
    world.chain.twin(7, ALICE, "old.example")
    world.chain.twin(8, ALICE, "other.example")
    registry = world.listening()
    assert relays(world, registry) == ("old.example",)
    assert relays(world, registry, 8) == ("other.example",)
    reads = storage_reads(world)
    world.chain.twin(7, ALICE, "new.example")
    world.network.advance(0)
    assert relays(world, registry) == ("new.example",)
    assert relays(world, registry, 8) == ("other.example",)
    assert storage_reads(world) == reads + 2  # the block's events, and twin 7


def test_a_new_twin_is_found_though_there_was_none_a_moment_ago(world):
    registry = world.listening()
    assert relays(world, registry) is None
    world.chain.twin(7, ALICE, "new.example")
    world.network.advance(0)
    assert relays(world, registry) == ("new.example",)


def test_a_look_up_that_a_block_overtakes_is_not_remembered(world):
    world.chain.twin(7, ALICE, "old.example")
    registry = world.listening()
    old = "0x" + chain_bytes.twin(7, ALICE, "old.example").hex()
    late = world.a.hold("state_getStorage", lambda params: params[0] != "0x" + EVENTS_KEY.hex())
    asked = world.start(registry.get(7))
    world.chain.twin(7, ALICE, "new.example")
    world.network.advance(0)
    assert not asked.done
    late(old)
    world.network.advance(0)
    assert asked.result.relays == ("old.example",)
    assert relays(world, registry) == ("new.example",)


def test_blocks_that_came_while_the_node_was_away_are_caught_up_with(world):
    for number in (7, 8, 9):
        world.chain.twin(number, bytes([number]) * 32, "old.example")
    registry = world.listening()
    assert [relays(world, registry, number) for number in (7, 8, 9)] == [("old.example",)] * 3
    world.a.cut()
    for number in (7, 9):
        world.chain.block(chain_bytes.twin(number, bytes([number]) * 32, "new.example"))
        for _ in range(30):
            world.chain.block()
    reads = storage_reads(world)
    world.network.advance(1)  # the first pause
    assert [relays(world, registry, number) for number in (7, 8, 9)] == [
        ("new.example",),
        ("old.example",),
        ("new.example",),
    ]
    assert storage_reads(world) == reads + 1 + 62 + 2  # the last block it knew, those it missed, and two twins
    assert (world.a.connections, world.b.connections) == (2, 0)


def test_after_more_blocks_than_the_threshold_everything_is_forgotten(world):
    world.chain.twin(7, ALICE, "old.example")
    registry = world.listening(catchup_threshold=10)
    relays(world, registry)
    world.a.cut()
    world.chain.block(chain_bytes.twin(7, ALICE, "new.example"))
    for _ in range(10):
        world.chain.block()
    reads = storage_reads(world)
    world.network.advance(1)
    assert storage_reads(world) == reads + 1
    assert relays(world, registry) == ("new.example",)


def test_a_block_that_is_taken_back_makes_everything_be_forgotten(world):
    registry, before = listening_to_a_block_that_will_be_taken_back(world)
    # another block takes its place, and nodes tell only of the one behind that
    taken_back = world.chain.blocks.pop()
    world.chain.states[world.chain.blocks[-1]] = before
    assert world.chain.block(fork="other") != taken_back
    world.chain.block(fork="other")
    world.chain.tell()
    world.network.advance(0)
    assert relays(world, registry) == ("before.example",)


def test_a_block_that_is_taken_back_while_the_node_was_away_makes_everything_be_forgotten(world):
    registry, before = listening_to_a_block_that_will_be_taken_back(world)
    world.a.cut()
    world.chain.blocks.pop()
    world.chain.states[world.chain.blocks[-1]] = before
    for _ in range(3):
        world.chain.block(fork="other")
    world.network.advance(1)
    assert relays(world, registry) == ("before.example",)


def test_a_node_that_changes_its_mind_between_a_head_and_its_answers_makes_everything_be_forgotten(world):
    registry, before = listening_to_a_block_that_will_be_taken_back(world)
    number = len(world.chain.blocks)
    late = world.a.hold("chain_getBlockHash", lambda params: params == [number])
    world.chain.block()
    world.chain.tell()
    world.network.advance(0)
    del world.chain.blocks[-2:]
    world.chain.states[world.chain.blocks[-1]] = before
    for _ in range(2):
        world.chain.block(fork="other")
    late(world.chain.blocks[number])
    world.chain.tell()
    world.network.advance(0)
    assert registry.public_stats()["events_listener_last_processed_block_number"] == number
    assert relays(world, registry) == ("before.example",)


def test_the_first_block_may_be_another_one_than_was_told_of(world):
    world.chain.twin(7, ALICE, "before.example")
    before = world.chain.state
    world.chain.twin(7, ALICE, "lost.example")
    number = len(world.chain.blocks) - 1
    late = world.a.hold("chain_getBlockHash", lambda params: params == [number])
    registry = world.listening()
    assert relays(world, registry) == ("lost.example",)
    world.chain.blocks.pop()
    world.chain.states[world.chain.blocks[-1]] = before
    world.chain.block(fork="other")
    late(world.chain.blocks[number])
    world.network.advance(0)
    assert registry.public_stats()["events_listener_last_processed_block_number"] == number
    assert relays(world, registry) == ("before.example",)


def test_to_listen_again_makes_nothing_be_forgotten(world):
    world.chain.twin(7, ALICE, "r.example")
    world.chain.block()
    registry = world.listening()
    relays(world, registry)
    world.a.cut()
    reads = storage_reads(world)
    world.network.advance(1)
    assert relays(world, registry) == ("r.example",)
    assert storage_reads(world) == reads + 1  # the last block


def test_a_node_without_a_block_for_seven_seconds_is_left_for_the_next(world):
    world.chain.twin(7, ALICE, "old.example")
    registry = world.listening()
    assert world.a.heads and not world.b.heads
    for _ in range(5):  # a block in time keeps it
        world.network.advance(6.9)
        world.chain.block()
        world.chain.tell()
    assert world.a.heads and world.a.connections == 1
    world.network.advance(7 + 1)
    assert not world.a.heads and world.b.heads
    world.chain.twin(7, ALICE, "new.example")
    world.network.advance(0)
    assert relays(world, registry) == ("new.example",)


def test_nodes_that_tell_nothing_are_asked_again_with_growing_pauses(world):
    for node in (world.a, world.b):
        node.lies["chain_subscribeNewHeads"] = lambda params: SILENCE
    tried = []

    def note(params):
        tried.append(world.network.seconds())
        return SILENCE

    world.a.lies["state_call"] = world.b.lies["state_call"] = note
    world.listening()
    world.network.advance(100)
    # each takes twelve seconds to be given up
    assert tried == [0, 13, 27, 43, 61, 79, 97]
    assert world.a.connections == 4 and world.b.connections == 3


def test_the_pallet_has_the_number_the_node_says(world):
    world.chain.metadata["index"] = 11
    world.chain.twin(7, ALICE, "old.example")
    registry = world.listening()
    relays(world, registry)
    twin = chain_bytes.twin(7, ALICE, "new.example")
    world.chain.block(twin)
    world.chain.state[EVENTS_KEY] = chain_bytes.events(twin).replace(b"\x19\x0c", b"\x0b\x0c")
    world.chain.tell()
    world.network.advance(0)
    assert relays(world, registry) == ("new.example",)


def test_a_node_that_gives_one_name_to_two_subscriptions_is_left_for_the_next(world):
    world.a.lies["author_submitAndWatchExtrinsic"] = lambda params: next(iter(world.a.heads))
    key = TwinKey(bytes([5]) * 32, KeyType.ED25519)
    world.chain.twin(7, key.account)
    registry = world.listening()
    updating = world.start(registry.update(key, ["a.example"], None))
    assert not updating.done and not world.a.heads
    world.network.advance(2)
    assert updating.result is None
    assert world.b.connections == 1


def test_of_many_heads_at_once_the_last_counts(world):
    registry = world.listening()
    reads = storage_reads(world)
    [(name, shell)] = world.a.heads.items()
    late = world.a.hold("chain_getBlockHash", lambda params: params == [1])
    heads = []
    for number in range(1, 6):
        world.chain.block(chain_bytes.twin(number, ALICE, "r.example"))
        heads.append(world.chain.head())
    for head in heads:
        world.a.notice(shell, "chain_newHead", name, head)
    world.network.advance(0)
    assert storage_reads(world) == reads
    late(world.chain.blocks[1])
    world.network.advance(0)
    assert registry.public_stats()["events_listener_last_processed_block_number"] == 5
    assert storage_reads(world) == reads + 6  # block 1; then 5, for which 1 is looked at again with those in between


HEADS = {
    "a text": "head",
    "no number": {"parentHash": "0x" + "00" * 32},
    "a wrong number": {"number": "0x1_0", "parentHash": "0x" + "00" * 32},
    "a negative number": {"number": -1, "parentHash": "0x" + "00" * 32},
    "a huge number": {"number": hex(2**64 - 1), "parentHash": "0x" + "00" * 32},
    "no hash": {"number": "0x1", "parentHash": "0x00"},
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_a_head_that_cannot_be_is_the_nodes_last(world, head):
    world.chain.twin(7, ALICE, "old.example")
    registry = world.listening()
    [(name, shell)] = world.a.heads.items()
    world.a.notice(shell, "chain_newHead", name, head)
    world.network.advance(1)
    assert world.b.heads and not world.a.heads
    world.chain.twin(7, ALICE, "new.example")
    world.network.advance(0)
    assert relays(world, registry) == ("new.example",)


def test_heads_from_the_far_future_and_the_past_only_cost_look_ups(world):
    world.chain.twin(7, ALICE, "old.example")
    registry = world.listening()
    relays(world, registry)
    [(name, shell)] = world.a.heads.items()
    world.a.notice(shell, "chain_newHead", name, {**world.chain.head(), "number": hex(2**40)})
    world.network.advance(1)  # there is no such block: the next node
    assert world.b.heads
    assert relays(world, registry) == ("old.example",)
    world.chain.twin(7, ALICE, "new.example")
    world.network.advance(0)
    assert relays(world, registry) == ("new.example",)


def test_more_changes_than_a_block_has_make_everything_be_forgotten(world):
    world.chain.twin(7, ALICE, "old.example")
    world.chain.twin(8, ALICE, "old.example")
    registry = world.listening()
    assert relays(world, registry) == relays(world, registry, 8) == ("old.example",)
    flood = b"".join(b"\x19\x0c" + number.to_bytes(4, "little") for number in range(100, 100 + 2 * MAX_CHANGES))
    world.chain.block(chain_bytes.twin(7, ALICE, "new.example"))
    world.chain.state[EVENTS_KEY] = flood
    world.chain.tell()
    world.network.advance(0)
    assert relays(world, registry) == ("new.example",)


def test_events_that_are_too_long_make_everything_be_forgotten(world):
    world.chain.twin(7, ALICE, "old.example")
    registry = world.listening()
    relays(world, registry)
    world.chain.block(chain_bytes.twin(7, ALICE, "new.example"))
    world.chain.state[EVENTS_KEY] = bytes(MAX_EVENTS_BYTES + 1)
    world.chain.tell()
    world.network.advance(1)
    assert relays(world, registry) == ("new.example",)
    assert world.a.connections + world.b.connections == 2
    world.chain.twin(7, ALICE, "newer.example")
    world.network.advance(1)
    assert relays(world, registry) == ("newer.example",)
    assert world.a.connections + world.b.connections == 2


def test_the_public_relays_figures(world):
    world.chain.twin(7, ALICE, "r.example")
    registry = world.listening()
    for number in (7, 7, 8, 8):
        relays(world, registry, number)
    expected = {
        "rmb_cache_entries": 1,
        "rmb_cache_hits_total": 2,
        "rmb_cache_misses_total": 2,
        "rmb_cache_flushes_total": 1,  # at the beginning
        "events_listener_reconnecting": 0,
        "events_listener_reconnect_cycles_total": 0,
        "events_listener_last_processed_block_number": 1,
    }
    assert registry.public_stats() == expected
    world.a.cut()
    world.network.advance(0)
    changed = {"events_listener_reconnecting": 1, "events_listener_reconnect_cycles_total": 1}
    assert registry.public_stats() == expected | changed
    world.network.advance(1)
    assert registry.public_stats() == expected | {"events_listener_reconnect_cycles_total": 1}
