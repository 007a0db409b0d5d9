"""The store in Redis: the public relay's layout, several processes on one database, its bounds, and a Redis that is away."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred, DeferredQueue
from twisted.internet.protocol import Factory, Protocol

from dmsg.address import RedisAddress
from dmsg.glue.redis import RedisConnection
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.wire import Envelope
from dmsg.rmb.relay.errors import StoreFull, StoreUnavailable
from dmsg.rmb.relay.stores import redis as redis_store
from dmsg.rmb.relay.stores.base import QueueLimits
from dmsg.rmb.relay.stores.redis import QUEUES_OF_TWIN, RedisQueues
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.process import free_port

NOW = 1_700_000_000
BOB = SessionAddress(7)
SOME = 1 << 20


def envelope(text: str = "", lifetime_s: int = 300, size: int = 0) -> bytes:
    return Envelope(uid=text, timestamp=NOW, expiration=lifetime_s, plain=bytes(size)).SerializeToString()


async def push(store: Any, text: str = "", session: SessionAddress = BOB, source: int = 1, size: int = 0) -> None:
    assert await store.push(session, envelope(text, size=size), NOW, NOW + 300, source) is True


async def texts(store: Any, session: SessionAddress = BOB) -> list[str]:
    return [Envelope.FromString(one.data).uid for one in await store.read(session, None, 1000, SOME, NOW)]


async def attach(process: Process, session: SessionAddress = BOB) -> None:
    """Connect a session to a process; Redis knows of it then."""
    process.store.attach(session)
    await texts(process.store, SessionAddress(4_000_000_000))


class Process:
    """A relay process: its store, and what it is told."""

    def __init__(self, store: RedisQueues) -> None:
        self.store = store
        self.pushed: Any = DeferredQueue()
        self.replaced: Any = DeferredQueue()
        store.listen(self.pushed.put, self.replaced.put)


class Unhelpful(Protocol):
    """A program in Redis' place that does nothing, ends each connection, or says "not now"."""

    def __init__(self, what: str) -> None:
        self._what = what

    def connectionMade(self) -> None:
        if self._what == "ends connections":
            self.transport.loseConnection()  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        if self._what == "not now":
            self.transport.write(b"-LOADING\r\n" * data.count(b"*"))  # type: ignore[union-attr]


@pytest.fixture
def address(redis_url: str) -> RedisAddress:
    return RedisAddress.parse(redis_url)


@pytest.fixture
def redis(address: RedisAddress, reactor: Any) -> Any:
    """``await redis("COMMAND", …)``: any program at the same database."""
    link = RedisConnection(address, reactor)
    yield link.call
    pytest_twisted.blockon(Deferred.fromCoroutine(link.close()))


@pytest.fixture
def process(address: RedisAddress, reactor: Any) -> Any:
    """``process(**limits)``: one more :class:`Process` on the database."""
    made = []

    def start(**limits: int) -> Process:
        made.append(Process(RedisQueues(address, reactor, limits=QueueLimits(**limits))))
        return made[-1]

    yield start
    for one in made:
        pytest_twisted.blockon(one.store.close())


# --- the public layout ---------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_queue_is_the_public_relays_stream(process: Any, redis: Any) -> None:
    store = process().store
    for session, key in ((SessionAddress(7), "7"), (SessionAddress(7, ""), "7:"), (SessionAddress(7, "a:b"), "7:a:b")):
        await push(store, key, session)
        ((_, fields),) = await redis("XRANGE", f"stream:{key}", "-", "+")
        assert fields == [b"_", envelope(key)]
        assert 3590 < await redis("TTL", f"stream:{key}") <= 3600
    found = await store.read(BOB, None, 10, SOME, NOW)
    await store.delete(BOB, [one.id for one in found])
    assert await redis("XLEN", "stream:7") == 0


@pytest_twisted.ensureDeferred
async def test_what_the_public_relay_has_put_there_is_read(process: Any, redis: Any) -> None:
    store = process().store
    await redis("XADD", "stream:7", "MAXLEN", "~", "10000", "*", "_", envelope("public"))
    assert await texts(store) == ["public"]


@pytest_twisted.ensureDeferred
async def test_entries_of_another_shape_are_left_out_and_removed(process: Any, redis: Any) -> None:
    store = process().store
    for _ in range(30):
        await redis("XADD", "stream:7", "*", "msg", b"x")
        await redis("XADD", "stream:7", "*", "_", b"x", "more", b"x")
    await redis("XADD", "stream:7", "*", "_", b"\xff no envelope")
    await push(store, "good")
    found = await store.read(BOB, None, 3, SOME, NOW)
    assert [one.data for one in found] == [envelope("good")]
    assert await redis("XLEN", "stream:7") == 1


@pytest_twisted.ensureDeferred
async def test_all_keys_go_by_themselves(process: Any, redis: Any) -> None:
    first, second = process(), process()
    await attach(second)
    for number in range(5):
        await push(first.store, str(number))
        await push(first.store, str(number), SessionAddress(8, "x"))
    await texts(second.store)
    await attach(second, SessionAddress(9))
    await attach(second, SessionAddress(10))
    second.store.detach(SessionAddress(10))
    await texts(second.store)
    keys = await redis("KEYS", "*")
    assert len(keys) >= 7 and b"dmsg.rmb.queues:10" in keys
    assert [key for key in keys if await redis("TTL", key) < 0] == []


# --- several processes ---------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_process_is_told_what_others_put_for_its_sessions_and_only_once_before_it_reads(
    process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "SWEPT_EVERY_S", 1000.0)  # it does not find it out by itself
    first, second = process(), process()
    await attach(second)
    assert await second.store.connected(BOB) is True
    for number in range(10):
        await push(first.store, str(number))
    assert await second.pushed.get() == BOB
    assert await texts(second.store) == [str(number) for number in range(10)]
    assert second.pushed.pending == []
    await push(first.store, "10")
    assert await second.pushed.get() == BOB


@pytest_twisted.ensureDeferred
async def test_a_process_is_not_told_of_what_it_puts_itself_or_others_get(process: Any) -> None:
    first, second = process(), process()
    await attach(first)
    await attach(second, SessionAddress(8))
    await push(first.store, "mine")
    await push(first.store, "theirs", SessionAddress(8))
    await push(first.store, "nobody's", SessionAddress(9))
    assert await second.pushed.get() == SessionAddress(8)
    assert first.pushed.pending == []


@pytest_twisted.ensureDeferred
async def test_a_session_that_connects_elsewhere_is_replaced_here(
    process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "SWEPT_EVERY_S", 1000.0)  # it is told, and does not find it out by itself
    first, second = process(), process()
    await attach(first)
    assert await second.store.connected(BOB) is True
    await attach(second)
    assert await first.replaced.get() == BOB
    first.store.detach(BOB)  # says nothing: it is the other one's now
    await texts(first.store)
    assert await first.store.connected(BOB) is True
    assert second.replaced.pending == []


@pytest_twisted.ensureDeferred
async def test_a_session_that_was_replaced_and_left_there_is_connected_nowhere(process: Any) -> None:
    first, second = process(), process()
    await attach(first)
    await attach(second)
    assert await first.replaced.get() == BOB
    second.store.detach(BOB)
    await texts(second.store)
    assert await first.store.connected(BOB) is False


@pytest_twisted.ensureDeferred
async def test_word_of_an_older_connection_elsewhere_does_not_end_the_one_that_came_back(
    process: Any, redis: Any
) -> None:
    first, second = process(), process()
    await attach(first)
    inbox = await redis("GET", "dmsg.rmb.at:7")
    first.store.detach(BOB)
    await texts(first.store)
    await attach(second)
    await attach(first)
    assert await second.replaced.get() == BOB
    # What the second connection would have told the first process, if it had not left before, may be read only now.
    await redis("LPUSH", inbox, "r7")
    await redis("LPUSH", inbox, "p7")
    assert await first.pushed.get() == BOB
    assert first.replaced.pending == []
    assert await redis("GET", "dmsg.rmb.at:7") == inbox


@pytest_twisted.ensureDeferred
async def test_a_session_that_leaves_here_stays_where_it_is_by_now(
    process: Any, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "SWEPT_EVERY_S", 1000.0)
    first = process()
    await attach(first)
    await redis("SET", "dmsg.rmb.at:7", "dmsg.rmb.inbox:other", "EX", 30)  # whose word has not come yet
    first.store.detach(BOB)
    await texts(first.store)
    assert await redis("GET", "dmsg.rmb.at:7") == b"dmsg.rmb.inbox:other"


@pytest_twisted.ensureDeferred
async def test_a_session_is_said_to_be_here_again_and_again(
    process: Any, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis forgets those of a process that says nothing more."""
    monkeypatch.setattr(redis_store, "SWEPT_EVERY_S", 0.01)
    first, second = process(), process()
    await attach(first)
    assert 0 < await redis("TTL", "dmsg.rmb.at:7") <= redis_store.PRESENT_S
    await redis("DEL", "dmsg.rmb.at:7")
    while not await second.store.connected(BOB):
        pass


@pytest_twisted.ensureDeferred
async def test_each_notice_is_told_once(process: Any, redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "SWEPT_EVERY_S", 1000.0)
    only = process()
    sessions = [SessionAddress(number) for number in range(7, 12)]
    for session in sessions:
        await attach(only, session)
    inbox = await redis("GET", "dmsg.rmb.at:7")
    await redis("LPUSH", inbox, *(f"p{session}" for session in sessions))
    told = [await only.pushed.get() for _ in sessions]
    for _ in range(10):
        await texts(only.store)
    assert sorted(told) == sorted(sessions) and only.pushed.pending == []


@pytest.mark.parametrize(("age_s", "remembered"), [(4000, True), (0, False)])
@pytest_twisted.ensureDeferred
async def test_a_bounded_number_of_sessions_that_left_is_remembered(
    process: Any, redis: Any, age_s: int, remembered: bool
) -> None:
    """Those that left more than an hour ago are none of them."""
    only = process()
    session = SessionAddress(7, "leaves")
    await attach(only, session)
    goes_at = int((await redis("TIME"))[0]) + 3600 - age_s
    for number in range(redis_store.SESSIONS_OF_LATE):
        await redis("ZADD", "dmsg.rmb.queues:7", goes_at, f"7:{number}")
    only.store.detach(session)
    await texts(only.store)
    assert (await redis("ZSCORE", "dmsg.rmb.queues:7", str(session)) is not None) is remembered
    assert await redis("ZCARD", "dmsg.rmb.queues:7") == (1 if remembered else redis_store.SESSIONS_OF_LATE)


@pytest_twisted.ensureDeferred
async def test_a_session_that_left_is_connected_nowhere(process: Any) -> None:
    first, second = process(), process()
    await attach(first)
    await texts(first.store)
    assert await second.store.connected(BOB) is True
    first.store.detach(BOB)
    await texts(first.store)
    assert await second.store.connected(BOB) is False


@pytest_twisted.ensureDeferred
async def test_a_session_that_leaves_at_once_is_not_there_afterwards_in_a_redis_without_our_scripts(
    process: Any, redis: Any
) -> None:
    await redis("SCRIPT", "FLUSH")
    first, second = process(), process()
    first.store.attach(BOB)
    assert await first.store.connected(SessionAddress(8)) is False
    first.store.detach(BOB)
    assert await first.store.connected(BOB) is False
    assert await second.store.connected(BOB) is False


@pytest_twisted.ensureDeferred
async def test_what_a_program_puts_there_that_tells_nobody_is_found(process: Any, redis: Any) -> None:
    only = process()
    sessions = [SessionAddress(number, "x") for number in range(1, 700)]
    for session in sessions:
        only.store.attach(session)
    await redis("XADD", "stream:650:x", "*", "_", envelope("public"))
    assert await only.pushed.get() == SessionAddress(650, "x")


@pytest_twisted.ensureDeferred
async def test_a_process_that_was_killed_is_forgotten_and_others_can_have_its_sessions(
    process: Any, redis: Any, address: RedisAddress, reactor: Any
) -> None:
    await redis("SET", "dmsg.rmb.at:7", "dmsg.rmb.inbox:dead", "EX", "30")
    alive = process()
    await push(alive.store, "kept")
    assert 0 < await redis("TTL", "dmsg.rmb.inbox:dead") <= 60
    await redis("DEL", "dmsg.rmb.inbox:dead")
    await attach(alive)
    assert 0 < await redis("TTL", "dmsg.rmb.inbox:dead") <= 60, "it is told that the session is here now"
    assert await texts(alive.store) == ["kept"]
    assert await alive.store.connected(BOB) is True


@pytest_twisted.ensureDeferred
async def test_names_of_connections_may_have_any_characters(process: Any) -> None:
    first, second = process(), process()
    session = SessionAddress(7, "a:b\n\0é *[?] '\"$(x)")
    await attach(second, session)
    await texts(second.store)
    await push(first.store, "x", session)
    assert await second.pushed.get() == session
    assert await texts(second.store, session) == ["x"]


# --- room ----------------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_queue_is_bounded_in_bytes(process: Any) -> None:
    store = process(queue_bytes=1 << 20).store
    with pytest.raises(StoreFull) as caught:
        for _ in range(200):
            await push(store, size=10_000)
    assert caught.value.scope == "queue"
    assert 90 <= len(await store.read(BOB, None, 1000, 1 << 30, NOW)) <= 140


@pytest_twisted.ensureDeferred
async def test_a_twin_has_so_many_queues(process: Any) -> None:
    store = process().store
    for number in range(QUEUES_OF_TWIN):
        await push(store, "x", SessionAddress(7, str(number)))
    with pytest.raises(StoreFull) as caught:
        await push(store, "x", SessionAddress(7, "more"))
    assert caught.value.scope == "twin"
    await push(store, "x", SessionAddress(7, "0"))
    await push(store, "x", SessionAddress(77))


@pytest_twisted.ensureDeferred
async def test_made_up_names_of_a_twin_do_not_close_the_queues_of_its_sessions(process: Any) -> None:
    here, there = process(), process()
    here_now, of_late = SessionAddress(7, "here now"), SessionAddress(7, "of late")
    for session in (here_now, of_late):
        await attach(there, session)
    there.store.detach(of_late)
    await texts(there.store)
    for number in range(QUEUES_OF_TWIN - 1):
        await push(here.store, "x", SessionAddress(7, str(number)), source=666)
    with pytest.raises(StoreFull):
        await push(here.store, "x", SessionAddress(7, "more"), source=666)
    for session in (BOB, here_now, of_late):
        await push(here.store, "true", session)
        assert await texts(here.store, session) == ["true"]


@pytest_twisted.ensureDeferred
async def test_a_sender_has_so_many_bytes_for_sessions_that_are_away_and_any_for_others(process: Any) -> None:
    store = process(source_bytes=100_000).store
    with pytest.raises(StoreFull) as caught:
        for number in range(1, 101):
            await push(store, "x", SessionAddress(number), source=666, size=10_000)
    assert caught.value.scope == "source"
    await push(store, "mine", source=1)
    other = process()
    await attach(other, SessionAddress(500))
    await texts(other.store)
    await push(store, "read at once", SessionAddress(500), source=666, size=10_000)
    assert await texts(store, SessionAddress(9)) == ["x"]
    assert await texts(store, SessionAddress(11)) == []


class AtATime:
    """The reactor, at the time that it is told."""

    def __init__(self, reactor: Any) -> None:
        self.now = 5.0
        self._reactor = reactor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reactor, name)

    def seconds(self) -> float:
        return self.now


@pytest_twisted.ensureDeferred
async def test_a_few_senders_do_not_fill_a_redis(address: RedisAddress, redis: Any, reactor: Any) -> None:
    used = int((await redis("INFO", "memory")).partition(b"used_memory:")[2].split()[0])
    clock = AtATime(reactor)
    store = RedisQueues(address, clock, limits=QueueLimits(redis_bytes=used + 4_000_000))
    stored = 0
    for sender in range(100, 120):
        with pytest.raises(StoreFull) as caught:
            while True:
                clock.now += 1.0  # so that the Redis is measured before each
                await push(store, "x", SessionAddress(1 + stored), source=sender, size=10_000)
                stored += 1
        assert caught.value.scope == "source"
    assert stored > 100
    await push(store, "mine", source=1, size=10_000)
    await store.close()


@pytest_twisted.ensureDeferred
async def test_a_redis_with_too_much_in_it_takes_nothing_more(process: Any) -> None:
    store = process(redis_bytes=1000).store
    with pytest.raises(StoreFull) as caught:
        await push(store)
    assert caught.value.scope == "store"


@pytest_twisted.ensureDeferred
async def test_the_size_of_a_redis_is_asked_for_once_a_second(address: RedisAddress, redis: Any, reactor: Any) -> None:
    """Also after the clock was set back: what was free before would count until it has caught up."""

    async def asked() -> int:
        _, _, count = (await redis("INFO", "commandstats")).partition(b"cmdstat_info:calls=")
        return int(count.split(b",")[0] or 0) if count else 0

    clock = AtATime(reactor)
    store = RedisQueues(address, clock)
    before = await asked()
    for now in (5.0, 5.0, 5.9, 5.9, 6.0, 6.9, 2.0, 2.9):
        clock.now = now
        await push(store)
    assert await asked() - before == 3 + 1, "with our own question"
    await store.close()


@pytest_twisted.ensureDeferred
async def test_a_redis_without_memory_is_full(process: Any, redis: Any) -> None:
    await redis("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(StoreFull):
            await push(process().store)
    finally:
        await redis("CONFIG", "SET", "maxmemory", "0")


@pytest_twisted.ensureDeferred
async def test_sessions_come_and_go_while_a_redis_has_no_memory_and_are_known_when_it_has_some(
    process: Any, redis: Any
) -> None:
    async def refusals() -> int:
        _, _, count = (await redis("INFO", "errorstats")).partition(b"errorstat_OOM:count=")
        return int(count.split()[0] or 0) if count else 0

    here, there = process(), process()
    before = await refusals()
    await redis("CONFIG", "SET", "maxmemory", "1")
    try:
        for session in (BOB, SessionAddress(8)):
            await attach(here, session)
        here.store.detach(SessionAddress(8))
        while await refusals() < before + 3:  # the third is that of a look at all sessions
            pass
    finally:
        await redis("CONFIG", "SET", "maxmemory", "0")
    while not await there.store.connected(BOB):
        pass
    await push(there.store)
    assert await here.pushed.get() == BOB


@pytest_twisted.ensureDeferred
async def test_entries_too_old_to_be_delivered_make_room(process: Any, redis: Any) -> None:
    store = process(queue_envelopes=10).store
    for number in range(10):
        await redis("XADD", "stream:7", f"{NOW}000-{number}", "_", envelope("old"))
    await push(store, "new")
    assert await texts(store) == ["new"]


@pytest_twisted.ensureDeferred
async def test_entries_too_old_to_be_delivered_make_room_also_beside_new_ones(process: Any, redis: Any) -> None:
    store = process(queue_envelopes=10).store
    for number in range(9):
        await redis("XADD", "stream:7", f"{NOW}000-{number}", "_", envelope("old"))
    await redis("XADD", "stream:7", "*", "_", envelope("first"))
    await push(store, "second")
    assert await texts(store) == ["first", "second"]


@pytest_twisted.ensureDeferred
async def test_queues_of_a_twin_that_are_gone_do_not_count(process: Any, redis: Any) -> None:
    store = process().store
    for number in range(QUEUES_OF_TWIN):
        await redis("ZADD", "dmsg.rmb.queues:7", 1000 + number, f"7:{number}")
    await push(store, "x", SessionAddress(7, "new"))
    assert await redis("ZCARD", "dmsg.rmb.queues:7") == 1


@pytest_twisted.ensureDeferred
async def test_the_hour_of_a_sender_does_not_begin_anew_with_what_it_sends(process: Any, redis: Any) -> None:
    store = process().store
    await push(store, source=666)
    assert 3590 < await redis("TTL", "dmsg.rmb.from:666") <= 3600
    await redis("EXPIRE", "dmsg.rmb.from:666", 100)
    await push(store, source=666)
    assert await redis("TTL", "dmsg.rmb.from:666") <= 100


@pytest_twisted.ensureDeferred
async def test_what_was_refused_does_not_count_for_its_sender(process: Any) -> None:
    store = process(source_bytes=50_000).store
    for _ in range(3):
        with pytest.raises(StoreFull) as caught:
            await push(store, source=666, size=60_000)
        assert caught.value.scope == "source"
    await push(store, "fits", source=666, size=40_000)
    assert await texts(store) == ["fits"]


@pytest_twisted.ensureDeferred
async def test_a_redis_that_forgot_the_scripts_gets_them_again(process: Any, redis: Any) -> None:
    store = process().store
    await push(store, "before")
    await redis("SCRIPT", "FLUSH")
    await push(store, "after")
    assert await texts(store) == ["before", "after"]


# --- a Redis that is away ------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_redis_that_is_not_there_is_a_typed_error(reactor: Any) -> None:
    store = RedisQueues(RedisAddress.parse(f"redis://127.0.0.1:{free_port()}"), reactor)
    store.attach(BOB)
    assert await store.connected(BOB) is True
    closing = store.close()
    for call in (store.push(BOB, envelope(), NOW, NOW + 300, 1), store.read(BOB, None, 1, 1, NOW)):
        with pytest.raises(StoreUnavailable):
            await call
    await closing


@pytest.mark.parametrize("server", ["away", "unreachable", "silent", "ends connections", "not now"])
@pytest.mark.parametrize("at_s", [0.0, 0.03, 0.9, 1.0, 2.0, 4.5])
def test_a_store_that_is_closed_while_it_connects_leaves_nothing_behind(server: str, at_s: float) -> None:
    network = MemoryNetwork()
    if server == "unreachable":
        network.silence("192.0.2.1", 6379)
    elif server != "away":
        network.listenTCP(6379, Factory.forProtocol(lambda: Unhelpful(server)))
    store = RedisQueues(RedisAddress.parse("redis://192.0.2.1:6379"), network)
    store.attach(BOB)
    under_way = [store.push(BOB, envelope(), NOW, NOW + 300, 1)]
    network.advance(at_s)
    under_way += [store.read(BOB, None, 1, 1, NOW), store.close(), store.close()]
    for _ in range(100):
        network.advance(0.1)
    assert [one.called for one in under_way] == [True] * 4
    for one in under_way[:2]:
        one.addErrback(lambda failure: failure.trap(StoreUnavailable))
    assert network.getDelayedCalls() == []


@pytest_twisted.ensureDeferred
async def test_a_store_goes_on_after_its_connections_were_lost(process: Any, redis: Any) -> None:
    first, second = process(), process()
    await attach(second)
    await push(first.store, "before")
    assert await second.pushed.get() == BOB
    await texts(second.store)
    await redis("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    while True:
        try:
            await push(first.store, "after")
            break
        except StoreUnavailable:
            continue
    assert await second.pushed.get() == BOB
    assert "after" in await texts(second.store)
