"""Lists on a real Redis."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred

from dmsg.address import RedisAddress
from dmsg.glue.errors import RedisAway, RedisRefused
from dmsg.glue.redis import Taker
from dmsg.rmb.peer.redis import RedisLists

ROOM = {"most": 3, "most_bytes": 1 << 20, "own": (3, 1 << 20), "keep_s": 60, "wait_s": 5.0}


async def ask(lists: RedisLists, method: str, *arguments: Any) -> Any:
    """What Redis says itself."""
    return await lists.redis.call(method, *arguments)


@pytest_twisted.ensureDeferred
async def test_messages_are_taken_in_the_order_in_which_they_were_pushed(lists: Any, taker: Any) -> None:
    for data in (b"one", b"two", bytes(range(256))):
        await lists.push("list", data)
    found = taker("list")
    assert [await found.take() for _ in range(3)] == [b"one", b"two", bytes(range(256))]
    assert await found.take(1) is None


@pytest_twisted.ensureDeferred
async def test_who_waits_gets_a_message_when_it_comes(lists: Any, taker: Any) -> None:
    waiting = Deferred.fromCoroutine(taker("list").take(20))
    await lists.ping()
    await lists.push("list", b"late")
    assert await waiting == b"late"


@pytest_twisted.ensureDeferred
async def test_what_is_put_back_is_taken_next(lists: Any, taker: Any) -> None:
    for data in (b"one", b"two"):
        await lists.push("list", data)
    found = taker("list")
    await lists.put_back("list", await found.take())
    assert [await found.take(), await found.take()] == [b"one", b"two"]


@pytest_twisted.ensureDeferred
async def test_what_is_put_back_in_the_place_of_its_note_is_taken_next_and_once(lists: Any, taker: Any) -> None:
    for data in (b"one", b"two"):
        await lists.push("list", data)
    found = taker("list")
    data = await found.take()
    await lists.done("list.taken", data, [("note", 60, b"of one")])
    assert await lists.put_back_noted("note", "list", data)
    assert await ask(lists, "exists", "note") == 0
    assert not await lists.put_back_noted("note", "list", data)
    assert [await found.take(), await found.take()] == [b"one", b"two"]
    assert await ask(lists, "llen", "list") == 0


@pytest_twisted.ensureDeferred
async def test_a_full_list_takes_no_more_and_every_list_expires(lists: Any) -> None:
    assert [await lists.push_if_room("list", b"x", **ROOM) for _ in range(4)] == [1, 2, 3, -3]
    assert await ask(lists, "llen", "list") == 3
    assert 50 < await ask(lists, "ttl", "list") <= 60


@pytest_twisted.ensureDeferred
async def test_a_list_of_large_messages_is_full_before_its_number_is_reached(lists: Any) -> None:
    room = {**ROOM, "most": 10_000}
    taken = [await lists.push_if_room("list", bytes(100_000), **room) for _ in range(40)]
    assert taken == [*range(1, 17), *[-16] * 24]
    assert await lists.push_if_room("other", b"small", **room)


@pytest_twisted.ensureDeferred
async def test_a_full_list_takes_up_to_twice_as_much_of_senders_with_little_in_it(lists: Any) -> None:
    numbers = [3, 3, 3, 3, 2, 2, 1, 0, 0]
    taken = [await lists.push_if_room("list", b"x", **{**ROOM, "own": (number, 0)}) for number in numbers]
    assert taken == [1, 2, 3, -3, 4, -4, 5, 6, -6]
    room = {**ROOM, "most": 10_000}
    for own in (1 << 20, 100_000, 0):
        taken = [await lists.push_if_room("other", bytes(100_000), **{**room, "own": (0, own)}) for _ in range(20)]
        full = next(at for at, length in enumerate(taken) if length < 0)
        assert taken[full:] == [-taken[full - 1]] * (20 - full) and full == {1 << 20: 16, 100_000: 2, 0: 1}[own]


@pytest_twisted.ensureDeferred
async def test_a_message_is_pushed_once_however_often_it_is_tried(lists: Any) -> None:
    async def push(note: str, data: bytes, **options: Any) -> bool:
        return await lists.push_once(note, "list", data, most=2, keep_s=60, wait_s=5.0, **options)

    await lists.redis.call("SETEX", "note", 60, b"x")
    assert await push("note", b"one", note_tells=True)
    assert not await push("note", b"one", note_tells=True)
    assert await ask(lists, "lrange", "list", 0, -1) == [b"one"]
    assert await push("missing", b"two", mark="mark", mark_s=60)
    assert 50 < await ask(lists, "ttl", "mark") <= 60
    await ask(lists, "rpop", "list")
    await ask(lists, "rpop", "list")
    assert not await push("missing", b"two", mark="mark", mark_s=60)
    assert await ask(lists, "llen", "list") == 0
    assert not await push("missing", b"two", mark="mark", mark_s=0)
    assert await push("missing", b"two", mark="other", mark_s=0) and not await ask(lists, "exists", "other")
    assert await push("missing", b"three")
    assert await ask(lists, "lrange", "list", 0, -1) == [b"three", b"two"]
    assert 50 < await ask(lists, "ttl", "list") <= 60


@pytest_twisted.ensureDeferred
async def test_notes_are_found_by_the_beginning_of_their_names(lists: Any) -> None:
    for number in range(5):
        await lists.redis.call("SETEX", f"note.{number}", 60, str(number))
    await lists.redis.call("SETEX", "other", 60, b"x")
    assert sorted(await lists.notes("note.", 100)) == [(f"note.{n}", str(n).encode()) for n in range(5)]
    assert len(await lists.notes("note.", 2)) == 2
    await lists.forget(["note.0", "note.1"])
    await lists.forget([])
    assert len(await lists.notes("note.", 100)) == 3


@pytest_twisted.ensureDeferred
async def test_a_key_that_is_no_list_is_refused(lists: Any, taker: Any) -> None:
    await lists.redis.call("SETEX", "list", 60, b"x")
    for attempt in (lists.push("list", b"x"), taker("list").take(), lists.push_if_room("list", b"x", **ROOM)):
        with pytest.raises(RedisRefused) as caught:
            await attempt
        assert "WRONGTYPE" in caught.value.reason


@pytest_twisted.ensureDeferred
async def test_a_command_waits_for_a_redis_that_comes_late(opened: Any, redis_process: Any) -> None:
    lists = opened(RedisLists, redis_process.address)
    with pytest.raises(RedisAway) as caught:
        await lists.redis.call("LPUSH", "list", b"early", wait_s=0.01)
    assert not caught.value.maybe_done
    waiting = Deferred.fromCoroutine(lists.push("list", b"late", wait_s=20.0))
    redis_process.start()
    await waiting
    assert await ask(lists, "lrange", "list", 0, -1) == [b"late"]


@pytest_twisted.ensureDeferred
async def test_who_takes_finds_a_redis_that_was_away(opened: Any, redis_process: Any) -> None:
    redis_process.start()
    lists, found = opened(RedisLists, redis_process.address), opened(Taker, redis_process.address, "list")
    await lists.ping()
    waiting = Deferred.fromCoroutine(found.take(20))
    await lists.ping()
    redis_process.kill()
    with pytest.raises(RedisAway):
        await waiting
    redis_process.start()
    await lists.push("list", b"again", wait_s=20.0)
    assert await found.take(20) == b"again"


@pytest_twisted.ensureDeferred
async def test_a_command_under_way_when_redis_dies_may_have_been_carried_out(opened: Any, redis_process: Any) -> None:
    redis_process.start()
    lists = opened(RedisLists, redis_process.address)
    await lists.ping()
    redis_process.pause()
    waiting = Deferred.fromCoroutine(lists.push("list", b"x"))
    redis_process.kill()
    with pytest.raises(RedisAway) as caught:
        await waiting
    assert caught.value.maybe_done


@pytest_twisted.ensureDeferred
async def test_a_wrong_password_is_told_and_a_right_one_later_works(opened: Any, redis_process: Any) -> None:
    redis_process.start("--requirepass", "open sesame")
    right = RedisAddress(redis_process.address.server, 3, None, "open sesame")
    wrong = opened(RedisLists, RedisAddress(right.server, password="x"))
    with pytest.raises((RedisAway, RedisRefused)):
        await wrong.redis.call("PING", wait_s=2.0)
    lists = opened(RedisLists, right)
    await lists.ping()
    await ask(lists, "CONFIG", "SET", "requirepass", "x")
    await wrong.redis.call("PING", wait_s=10.0)


@pytest_twisted.ensureDeferred
async def test_a_megabyte_goes_through(lists: Any, taker: Any) -> None:
    data = base64.b64encode(bytes(range(256)) * 4096)
    await lists.push("list", data)
    assert await taker("list").take() == data
