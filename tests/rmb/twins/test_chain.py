"""Twins read from nodes: what is asked, what is remembered, and what nodes can do about it."""

from __future__ import annotations

import itertools
import json

import pytest
from twisted.internet.defer import CancelledError

from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.twins.cache import CacheLimits
from dmsg.rmb.twins.errors import NoSuchAccount, RegistryError
from dmsg.rmb.twins.scale import account_key, twin_key
from tests.rmb.twins import chain_bytes
from tests.rmb.twins.fake_node import SILENCE

ALICE, BOB = bytes([1]) * 32, bytes([2]) * 32
PK = b"\2" + bytes(32)


# --- reading and remembering -------------------------------------------------------------------------------------------


def test_a_twin_is_read_once_until_its_time_is_over(world):
    world.chain.twin(7, ALICE, "r2.example_r1.example", PK)
    registry = world.registry()
    expected = Twin(7, ALICE, ("r1.example", "r2.example"), PK)
    assert [world.ask(registry.get(7)) for _ in range(3)] == [expected] * 3
    assert world.a.asked["state_getStorage"] == 1
    world.chain.twin(7, ALICE, "new.example")
    world.network.advance(299)
    assert world.ask(registry.get(7)) == expected
    world.network.advance(1)
    assert world.ask(registry.get(7)) == Twin(7, ALICE, ("new.example",), None)
    assert world.a.connections == 1 and world.b.connections == 0


def test_that_there_is_no_twin_is_remembered_for_a_shorter_time(world):
    registry = world.registry()
    assert [world.ask(registry.get(9)) for _ in range(3)] == [None] * 3
    assert world.a.asked["state_getStorage"] == 1
    world.chain.twin(9, ALICE)
    world.network.advance(14.9)
    assert world.ask(registry.get(9)) is None
    world.network.advance(0.2)
    assert world.ask(registry.get(9)).account == ALICE


@pytest.mark.parametrize("number", [-1, 0, 2**32])
def test_what_is_no_number_of_a_twin_is_not_asked_for(world, number):
    assert world.ask(world.registry().get(number)) is None
    assert world.a.connections == 0


def test_those_who_ask_for_one_twin_wait_for_one_look_up(world):
    world.chain.twin(7, ALICE)
    registry = world.registry()
    waiting = [world.start(registry.get(7)) for _ in range(50)]
    world.network.advance(0)
    assert {one.result.account for one in waiting} == {ALICE}
    assert world.a.asked["state_getStorage"] == 1


def test_one_who_stops_waiting_takes_nothing_from_the_others(world):
    world.a.lies["state_getStorage"] = lambda params: SILENCE
    world.chain.twin(7, ALICE)
    registry = world.registry()
    first, second = world.start(registry.get(7)), world.start(registry.get(7))
    first.deferred.cancel()
    world.network.advance(12)  # the other node answers
    assert second.result.account == ALICE


def test_look_ups_under_way_are_bounded(world):
    world.a.lies["state_getStorage"] = lambda params: SILENCE
    registry = world.registry(cache=CacheLimits(at_once=2, waiting=1))
    waiting = [world.start(registry.get(number)) for number in range(1, 4)]
    with pytest.raises(RegistryError, match="overloaded"):
        world.ask(registry.get(4))
    assert world.start(registry.get(3)).done is False
    world.network.advance(12)
    assert [one.result for one in waiting] == [None] * 3
    assert world.ask(registry.get(4)) is None


def test_look_ups_wait_for_their_turn(world):
    for number in range(1, 301):
        world.chain.twin(number, number.to_bytes(32, "big"))
    registry = world.registry()
    waiting = [world.start(registry.get(number)) for number in range(1, 301)]
    world.network.advance(1)
    assert [one.result.id for one in waiting] == list(range(1, 301))


def test_a_look_up_that_all_gave_up_before_its_turn_is_left_out_and_others_of_the_line_go_on(world):
    world.a.lies["state_getStorage"] = lambda params: SILENCE
    world.chain.twin(4, ALICE)
    registry = world.registry(cache=CacheLimits(at_once=1))
    _, second, third, fourth = (world.start(registry.get(number)) for number in range(1, 5))
    second.deferred.cancel()
    third.deferred.cancel()
    again = world.start(registry.get(3))
    world.network.advance(12)
    assert fourth.result.account == ALICE and again.result is None
    assert world.b.asked["state_getStorage"] == 3


def test_an_old_twin_is_given_while_too_much_is_looked_up(world):
    world.chain.twin(7, ALICE)
    registry = world.registry(cache=CacheLimits(at_once=1, waiting=1))
    world.ask(registry.get(7))
    world.network.advance(1000)
    world.a.lies["state_getStorage"] = world.b.lies["state_getStorage"] = lambda params: SILENCE
    for number in (1, 2):
        world.start(registry.get(number))
    assert world.ask(registry.get(7)).account == ALICE
    world.network.advance(3600)
    for number in (1, 2):
        world.start(registry.get(number))
    with pytest.raises(RegistryError, match="overloaded"):
        world.ask(registry.get(7))


def test_all_in_the_line_hear_at_once_that_the_nodes_are_away_or_the_registry_is_closed(world):
    world.a.lies["state_getStorage"] = world.b.lies["state_getStorage"] = lambda params: SILENCE
    registry = world.registry(cache=CacheLimits(at_once=1))
    waiting = [world.start(registry.get(number)) for number in range(1, 500)]
    world.ask(registry.close())
    assert {one.error.reason for one in waiting} == {"closed"}


def test_what_is_remembered_is_bounded(world):
    for number in range(1, 4):
        world.chain.twin(number, bytes([number]) * 32)
    registry = world.registry(cache=CacheLimits(twins=2, missing=2))
    for number in (1, 2, 1, 3):  # 2 was not asked for longest
        world.ask(registry.get(number))
    before = world.a.asked["state_getStorage"]
    assert world.ask(registry.get(1)) and world.ask(registry.get(3))
    assert world.a.asked["state_getStorage"] == before
    assert world.ask(registry.get(2))
    assert world.a.asked["state_getStorage"] == before + 1
    for number in (11, 12, 13, 11):
        assert world.ask(registry.get(number)) is None
    assert world.a.asked["state_getStorage"] == before + 5


def test_an_old_twin_is_better_than_none_while_no_node_answers(world):
    world.chain.twin(7, ALICE, "r.example")
    registry = world.registry("ws://a:9944")
    world.ask(registry.get(7))
    world.network.refuse("192.0.2.1")
    world.a.cut()
    world.network.advance(3600)
    known = world.start(registry.get(7))
    world.network.advance(301)
    assert known.result.relays == ("r.example",)
    unknown = world.start(registry.get(7))
    world.network.advance(1)
    assert isinstance(unknown.error, RegistryError)


def test_the_number_of_an_account_is_found(world):
    world.chain.twin(7, ALICE)
    registry = world.registry()
    assert (world.ask(registry.find(ALICE)), world.ask(registry.find(BOB))) == (7, None)


# --- several nodes -----------------------------------------------------------------------------------------------------


def test_two_nodes_that_cannot_be_reached_and_one_that_can(world):
    world.chain.twin(7, ALICE)
    world.network.refuse("192.0.2.3", 1)
    world.network.silence("192.0.2.3", 2)
    registry = world.registry("ws://nowhere:1", "ws://nowhere:2", "ws://b:9945")
    asked = world.start(registry.get(7))
    world.network.advance(12)
    assert not asked.done
    world.network.advance(1)
    assert asked.result.account == ALICE


def test_all_nodes_are_tried_twice_and_then_left_alone_for_a_while(world):
    world.a.lies["chain_getBlockHash"] = world.b.lies["chain_getBlockHash"] = lambda params: SILENCE
    world.chain.twin(7, ALICE)
    registry = world.registry()
    asked = world.start(registry.get(7))
    world.network.advance(4 * 12 - 0.1)
    assert not asked.done
    world.network.advance(0.1)
    with pytest.raises(RegistryError) as error:
        asked.result  # noqa: B018
    assert error.value.reason == "unavailable"
    assert (world.a.connections, world.b.connections) == (2, 2)
    world.a.lies.clear()
    with pytest.raises(RegistryError, match="a moment ago"):
        world.ask(registry.get(7))
    world.network.advance(2)
    assert world.ask(registry.get(7)).account == ALICE


def test_a_connection_that_is_lost_is_made_again_to_the_same_node(world):
    world.chain.twin(7, ALICE)
    registry = world.registry()
    world.ask(registry.get(1))
    world.a.cut()
    world.network.advance(0)
    assert world.ask(registry.get(7)).account == ALICE
    assert (world.a.connections, world.b.connections) == (2, 0)


def test_a_question_that_dies_with_its_connection_is_asked_again(world):
    world.chain.twin(7, ALICE)

    def die_once(params):
        del world.a.lies["state_getStorage"]
        world.a.cut()
        return SILENCE

    world.a.lies["state_getStorage"] = die_once
    assert world.ask(world.registry().get(7)).account == ALICE
    assert (world.a.connections, world.b.connections) == (2, 0)


def test_a_node_that_always_hangs_up_is_left_for_the_next(world):
    def die(params):
        world.a.cut()
        return SILENCE

    world.a.lies["state_getStorage"] = die
    world.chain.twin(7, ALICE)
    assert world.ask(world.registry().get(7)).account == ALICE
    assert (world.a.connections, world.b.connections) == (2, 1)


def test_a_node_that_is_slow_with_each_answer_is_left_for_the_next(world):
    world.chain.twin(7, ALICE)
    answers = []
    for method in ("chain_getBlockHash", "state_getStorage"):
        answers.append(world.a.hold(method, lambda params: True))
    asked = world.start(world.registry().get(7))
    world.network.advance(11)
    answers[0](world.chain.blocks[-1])
    world.network.advance(0.9)
    assert not asked.done
    world.network.advance(0.2)
    assert asked.result.account == ALICE
    assert world.b.connections == 1


def test_an_error_of_a_node_is_not_the_last_word(world):
    def refuse(params):
        raise ValueError("State already discarded")

    world.a.lies["state_getStorage"] = refuse
    world.chain.twin(7, ALICE)
    assert world.ask(world.registry().get(7)).account == ALICE
    assert world.b.connections == 1


# --- hostile nodes -----------------------------------------------------------------------------------------------------

HOSTILE = {
    "no JSON": b"\x7b",
    "no object": b"[]",
    "another question's answer": b'{"jsonrpc":"2.0","id":99,"result":null}',
    "an answer for true": b'{"jsonrpc":"2.0","id":true,"result":null}',
    "no result": b'{"jsonrpc":"2.0","id":2}',
    "deep": b'{"jsonrpc":"2.0","id":2,"result":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "many values": b'{"jsonrpc":"2.0","id":2,"result":[' + b"[]," * 60_000 + b"0]}",
    "a long answer": json.dumps({"jsonrpc": "2.0", "id": 2, "result": "0x" + "00" * 400_000}).encode(),
    "a huge message": b'"' + b"x" * 5_000_000 + b'"',
    "bytes": b"\xff\0",
    "a notice of nothing": b'{"jsonrpc":"2.0","method":"chain_newHead","params":[]}',
    "a number": b'{"jsonrpc":"2.0","id":2,"result":7}',
    "no hex": b'{"jsonrpc":"2.0","id":2,"result":"0xzz"}',
    "spaced hex": b'{"jsonrpc":"2.0","id":2,"result":"0x00 00 0"}',
    "another twin": json.dumps({"jsonrpc": "2.0", "id": 2, "result": "0x" + chain_bytes.twin(8, ALICE).hex()}).encode(),
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_node_that_talks_nonsense_is_left_for_the_next(world, answer):
    world.a.lies["state_getStorage"] = lambda params: answer
    world.chain.twin(7, BOB)
    assert world.ask(world.registry().get(7)).account == BOB
    assert (world.a.connections, world.b.connections) == (1, 1)
    assert not world.network.pipes_to(9944)


def test_endless_notices_end_the_connection(world):
    notice = b'{"jsonrpc":"2.0","method":"x","params":{"subscription":"y","result":1}}'

    def flood(params):
        for _ in range(300):
            world.a.send(world.a.shells[-1], notice.decode())
        return SILENCE

    world.a.lies["state_getStorage"] = flood
    world.chain.twin(7, ALICE)
    assert world.ask(world.registry().get(7)).account == ALICE
    assert world.b.connections == 1


def test_a_node_that_never_answers_is_left_for_the_next(world):
    world.a.lies["state_getStorage"] = lambda params: SILENCE
    world.chain.twin(7, ALICE)
    asked = world.start(world.registry().get(7))
    world.network.advance(11.9)
    assert not asked.done
    world.network.advance(0.2)
    assert asked.result.account == ALICE


def test_a_node_that_gives_an_account_another_twin_is_left_for_the_next(world):
    world.chain.twin(7, ALICE)
    world.chain.twin(8, BOB)
    honest = world.chain.state
    keys = {"0x" + account_key(BOB).hex(): "0x07000000", "0x" + twin_key(7).hex(): "0x" + honest[twin_key(7)].hex()}
    world.a.lies["state_getStorage"] = lambda params: keys[params[0]]
    assert world.ask(world.registry().find(BOB)) == 8
    assert world.b.connections == 1


def test_a_twin_that_is_not_understood_costs_no_connection(world):
    world.chain.twin(7, ALICE)
    world.chain.state[twin_key(7)] = b"\7\0\0\0"
    registry = world.registry()
    with pytest.raises(RegistryError) as error:
        world.ask(registry.get(7))
    assert error.value.reason == "malformed"
    assert (world.a.connections, len(world.network.pipes_to(9944))) == (1, 1)


def test_one_who_gives_up_hears_no_late_answer(world):
    world.chain.twin(7, ALICE)
    registry = world.registry("ws://a:9944")
    late = world.a.hold("state_getStorage", lambda params: True)
    asked = world.start(registry.find(ALICE))
    asked.deferred.cancel()
    late("0x07000000")
    assert world.ask(registry.find(ALICE)) == 7
    assert isinstance(asked.error, CancelledError)
    assert world.a.connections == 1


def test_a_node_that_says_goodbye_is_connected_again(world):
    world.chain.twin(7, ALICE)

    def close_once(params):
        world.a.lies.clear()
        world.a.shells[-1].close(code=1001)
        return SILENCE

    world.a.lies["state_getStorage"] = close_once
    asked = world.start(world.registry("ws://a:9944").get(7))
    world.network.advance(6)
    assert asked.result.account == ALICE
    assert world.a.connections == 2


def test_the_end_comes_while_a_node_is_being_reached(world):
    world.network.silence("192.0.2.3", 2)
    registry = world.registry("ws://nowhere:2")
    asked = world.start(registry.get(7))
    world.ask(registry.close())
    assert isinstance(asked.error, RegistryError) and asked.error.reason == "closed"


def test_nothing_is_asked_after_the_end(world):
    registry = world.registry()
    waiting = world.start(registry.get(1))
    world.a.lies["state_getStorage"] = lambda params: SILENCE
    pending = world.start(registry.get(2))
    world.ask(registry.close())
    assert waiting.result is None
    for asked in (pending, world.start(registry.get(3))):
        with pytest.raises(RegistryError, match="closed"):
            asked.result  # noqa: B018


# --- updating ----------------------------------------------------------------------------------------------------------

KEY = TwinKey(bytes([5]) * 32, KeyType.ED25519)


@pytest.mark.parametrize("kind", KeyType)
def test_a_twin_is_updated_and_then_read_anew(world, kind):
    key = TwinKey(bytes([5]) * 32, kind)
    world.chain.twin(7, key.account, "old.example")
    registry = world.registry()
    world.ask(registry.get(7))
    world.ask(registry.update(key, ["b.example:443", "a.example"], PK))
    assert world.ask(registry.get(7)) == Twin(7, key.account, ("a.example", "b.example"), PK)
    assert world.chain.transactions == 1
    assert world.a.asked["author_unwatchExtrinsic"] == 1


def test_nothing_is_sent_when_nothing_differs(world):
    world.chain.twin(7, KEY.account, "b.example_a.example", PK)
    world.ask(world.registry().update(KEY, ["a.example", "b.example"], PK))
    assert world.chain.transactions == 0


def test_the_pallet_has_the_number_the_node_says(world):
    world.chain.metadata["index"] = 11
    world.chain.twin(7, KEY.account)
    world.ask(world.registry().update(KEY, ["a.example"], None))
    assert world.chain.transactions == 1


def test_an_account_without_a_twin_cannot_update_it(world):
    with pytest.raises(NoSuchAccount):
        world.ask(world.registry().update(KEY, ["a.example"], None))


def test_a_transaction_that_went_through_unseen_is_not_sent_twice(world):
    world.chain.twin(7, KEY.account)

    def take_and_die(params):
        world.chain.apply(bytes.fromhex(params[0][2:]))
        world.a.lies.clear()
        world.a.cut()
        return SILENCE

    world.a.lies["author_submitAndWatchExtrinsic"] = take_and_die
    updating = world.start(world.registry().update(KEY, ["a.example"], None))
    world.network.advance(1.9)
    assert updating.done is False or world.chain.transactions == 1
    world.network.advance(1)
    assert updating.result is None
    assert world.chain.transactions == 1


def test_a_transaction_that_is_refused_is_tried_again_with_pauses_and_given_up(world):
    tried = []

    def refuse(params):
        tried.append(world.network.seconds())
        raise ValueError("Transaction is temporarily banned")

    world.a.lies["author_submitAndWatchExtrinsic"] = world.b.lies["author_submitAndWatchExtrinsic"] = refuse
    world.chain.twin(7, KEY.account)
    updating = world.start(world.registry().update(KEY, ["a.example"], None))
    world.network.advance(60)
    with pytest.raises(RegistryError, match="1010"):
        updating.result  # noqa: B018
    assert [later - earlier for earlier, later in itertools.pairwise(tried)] == [1.5, 3.0, 6.0, 12.0, 22.5]
    assert (world.a.connections, world.b.connections) == (3, 3)


@pytest.mark.parametrize("state", ["invalid", "dropped", {"usurped": "0x00"}, {"finalityTimeout": "0x00"}])
def test_a_transaction_that_the_node_drops_is_sent_again(world, state):
    world.chain.twin(7, KEY.account)
    told = []

    def drop(params):
        world.a.lies.clear()
        world.network.callLater(0, world.a.notice, world.a.shells[-1], "author_extrinsicUpdate", "dropped", state)
        told.append(state)
        return "dropped"

    world.a.lies["author_submitAndWatchExtrinsic"] = drop
    updating = world.start(world.registry().update(KEY, ["a.example"], None))
    assert not updating.done
    world.network.advance(2)
    assert updating.result is None and told == [state]
    assert (world.a.asked["author_submitAndWatchExtrinsic"], world.chain.transactions) == (1, 1)


def test_an_update_in_its_last_trial_ends_at_once_when_the_registry_is_closed(world):
    world.chain.twin(1, KEY.account)
    world.a.lies["state_getRuntimeVersion"] = world.b.lies["state_getRuntimeVersion"] = lambda params: SILENCE
    registry = world.registry()
    updating = world.start(registry.update(KEY, ["a.example"], None))
    world.ask(registry.close())
    assert isinstance(updating.error, RegistryError) and updating.error.reason == "closed"


def test_an_update_that_never_becomes_final_fails_in_time(world):
    world.a.final = False
    world.chain.twin(7, KEY.account, "old.example")
    world.a.lies["state_getStorage"] = lambda params: "0x" + {
        "0x" + twin_key(7).hex(): chain_bytes.twin(7, KEY.account),
        "0x" + account_key(KEY.account).hex(): b"\7\0\0\0",
    }[params[0]].hex()  # fmt: skip
    updating = world.start(world.registry("ws://a:9944").update(KEY, ["a.example"], None))
    world.network.advance(89)
    assert not updating.done
    world.network.advance(1)
    with pytest.raises(RegistryError):
        updating.result  # noqa: B018


def test_a_node_that_calls_it_final_and_has_the_old_twin_is_not_believed(world):
    world.chain.twin(7, KEY.account, "old.example")
    old = world.chain.blocks[-1]
    world.a.final = False
    notices = world.a.notice

    def notice(shell, method, name, result):
        notices(shell, method, name, {"finalized": old} if method == "author_extrinsicUpdate" else result)

    world.a.notice = notice
    updating = world.start(world.registry("ws://a:9944").update(KEY, ["a.example"], None))
    assert not updating.done
    world.network.advance(2)
    assert updating.result is None  # by then the best block has it
    assert world.chain.transactions == 1


def test_nothing_is_signed_for_another_chain(world):
    world.chain.twin(7, KEY.account)
    updating = world.start(world.registry(genesis=bytes(32)).update(KEY, ["a.example"], None))
    world.network.advance(60)
    with pytest.raises(RegistryError, match="another chain"):
        updating.result  # noqa: B018
    assert world.a.asked["author_submitAndWatchExtrinsic"] + world.b.asked["author_submitAndWatchExtrinsic"] == 0


def test_nothing_is_signed_with_an_extension_that_is_not_known(world):
    world.chain.metadata["extensions"] = ["CheckSomethingNew"]
    world.chain.twin(7, KEY.account)
    updating = world.start(world.registry().update(KEY, ["a.example"], None))
    world.network.advance(60)
    with pytest.raises(RegistryError, match="extension"):
        updating.result  # noqa: B018
    assert world.a.asked["author_submitAndWatchExtrinsic"] == 0
