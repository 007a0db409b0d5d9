"""One conformance test for every store of waiting envelopes: order, expiry, bounds, fairness; and what each has alone."""

from __future__ import annotations

import random
import shutil
import sqlite3
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted

from dmsg.errors import ConfigError
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.wire import Envelope
from dmsg.rmb.relay.errors import StoreFull, StoreUnavailable
from dmsg.rmb.relay.stores import sqlite as sqlite_stores
from dmsg.rmb.relay.stores.base import KEPT_S, QUEUE_BYTES, ROW_BYTES, QueueLimits
from dmsg.rmb.relay.stores.open import open_queues
from dmsg.rmb.relay.stores.sqlite import QueueTable

NOW = 1_700_000_000
BOB = SessionAddress(7)
SOME = 1 << 20


def envelope(text: str = "", lifetime_s: int = 300, size: int = 0) -> bytes:
    made = Envelope(uid=text, timestamp=NOW, expiration=lifetime_s, plain=bytes(size))
    return made.SerializeToString()


async def texts(store: Any, session: SessionAddress = BOB, now: float = NOW, limit: int = 100) -> list[str]:
    found = await store.read(session, None, limit, SOME, now)
    return [Envelope.FromString(one.data).uid for one in found]


async def push(store: Any, text: str, session: SessionAddress = BOB, *, source: int = 1, size: int = 0) -> None:
    assert await store.push(session, envelope(text, size=size), NOW, NOW + 300, source) is True


@pytest.fixture(params=["memory", "sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        return request.getfixturevalue("redis_url") + "/3"
    return "memory:" if request.param == "memory" else f"sqlite:{tmp_path / 'queues'}"


@pytest.fixture
def opened_at(reactor: Any) -> Any:
    """``opened_at(url, **limits)``: a store, closed when the test ends."""
    stores = []

    def open_one(url: str, **limits: int) -> Any:
        stores.append(open_queues(url, reactor, limits=QueueLimits(**limits)))
        return stores[-1]

    yield open_one
    for store in stores:
        pytest_twisted.blockon(store.close())


@pytest.fixture
def opened(url: str, opened_at: Any) -> Any:
    """``opened(**limits)``: an empty store of each kind."""
    return partial(opened_at, url)


@pytest.fixture
def store(opened: Any) -> Any:
    return opened()


@pytest_twisted.ensureDeferred
async def test_what_was_pushed_is_read_in_order_until_it_is_deleted(store: Any) -> None:
    data = [envelope(str(number)) for number in range(5)]
    for one in data:
        assert await store.push(BOB, one, NOW, NOW + 300, 1) is True
    found = await store.read(BOB, None, 100, SOME, NOW)
    assert [one.data for one in found] == data
    assert [one.expires_at for one in found] == [NOW + 300] * 5
    await store.delete(BOB, [found[0].id, found[2].id])
    await store.delete(BOB, [found[0].id])  # gone already
    assert await texts(store) == ["1", "3", "4"]


@pytest_twisted.ensureDeferred
async def test_reading_goes_on_behind_what_was_read(store: Any) -> None:
    for number in range(7):
        await push(store, str(number))
    first = await store.read(BOB, None, 3, SOME, NOW)
    second = await store.read(BOB, first[-1].id, 3, SOME, NOW)
    await store.delete(BOB, [one.id for one in second])
    third = await store.read(BOB, second[-1].id, 3, SOME, NOW)
    assert [len(first), len(second), len(third)] == [3, 3, 1]
    assert third[0].data == envelope("6")
    assert await store.read(BOB, third[-1].id, 3, SOME, NOW) == []


@pytest_twisted.ensureDeferred
async def test_no_connection_and_an_empty_one_are_two_sessions(store: Any) -> None:
    sessions = [
        SessionAddress(7),
        SessionAddress(7, ""),
        SessionAddress(7, "a"),
        SessionAddress(77),
        SessionAddress(7, ":"),
    ]
    for number, session in enumerate(sessions):
        await push(store, str(number), session)
    for number, session in enumerate(sessions):
        assert await texts(store, session) == [str(number)]
    (stored,) = await store.read(sessions[0], None, 1, SOME, NOW)
    await store.delete(sessions[1], [stored.id])
    assert await texts(store, sessions[0]) == ["0"]


@pytest_twisted.ensureDeferred
async def test_a_read_has_at_most_so_many_bytes_but_always_one_envelope(store: Any) -> None:
    for number in range(4):
        await push(store, str(number), size=10_000)
    size = len(envelope("0", size=10_000))
    assert len(await store.read(BOB, None, 100, 1, NOW)) == 1
    assert len(await store.read(BOB, None, 100, size * 3, NOW)) == 3
    assert len(await store.read(BOB, None, 100, size * 3 - 1, NOW)) == 2


@pytest_twisted.ensureDeferred
async def test_nothing_is_delivered_after_its_time(store: Any) -> None:
    await store.push(BOB, envelope("short", 10), NOW, NOW + 10, 1)
    await store.push(BOB, envelope("long", 300), NOW, NOW + 300, 1)
    assert await texts(store, now=NOW + 9) == ["short", "long"]
    assert await texts(store, now=NOW + 10) == ["long"]
    assert await texts(store, now=NOW + 300) == []


@pytest_twisted.ensureDeferred
async def test_what_has_expired_is_not_stored(store: Any) -> None:
    assert await store.push(BOB, envelope("late", 10), NOW + 10, NOW + 10, 1) is False
    assert await texts(store) == []


@pytest_twisted.ensureDeferred
async def test_an_expired_head_does_not_hide_what_is_behind_it(store: Any) -> None:
    for number in range(30):
        await store.push(BOB, envelope(f"short {number}", 10), NOW, NOW + 10, 1)
    await store.push(BOB, envelope("long", 300), NOW, NOW + 300, 1)
    assert await texts(store, now=NOW + 20, limit=5) == ["long"]


@pytest_twisted.ensureDeferred
async def test_a_session_of_this_process_is_connected_until_it_leaves(store: Any) -> None:
    assert await store.connected(BOB) is False
    store.attach(BOB)
    assert await store.connected(BOB) is True
    assert await store.connected(SessionAddress(7, "")) is False
    store.detach(BOB)
    store.detach(BOB)
    assert await store.connected(BOB) is False


@pytest_twisted.ensureDeferred
async def test_an_envelope_larger_than_a_queue_is_refused(opened: Any) -> None:
    store = opened(queue_bytes=5000)
    with pytest.raises(StoreFull):
        await store.push(BOB, envelope(size=5000), NOW, NOW + 300, 1)
    assert await texts(store) == []


@pytest_twisted.ensureDeferred
async def test_a_closed_store_says_so(store: Any) -> None:
    await push(store, "x")
    await store.close()
    for call in (
        store.push(BOB, envelope(), NOW, NOW + 300, 1),
        store.read(BOB, None, 1, 1, NOW),
        store.delete(BOB, ["1"]),
    ):
        with pytest.raises(StoreUnavailable):
            await call


# --- room --------------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_full_queue_refuses_the_sender_that_filled_it(opened: Any) -> None:
    store = opened(queue_envelopes=10)
    for number in range(10):
        await push(store, str(number))
    with pytest.raises(StoreFull) as caught:
        await store.push(BOB, envelope(), NOW, NOW + 300, 1)
    assert caught.value.scope == "queue"
    assert await texts(store) == [str(number) for number in range(10)]
    await push(store, "elsewhere", SessionAddress(8))


@pytest_twisted.ensureDeferred
async def test_deleting_makes_room(opened: Any) -> None:
    store = opened(queue_envelopes=3)
    for number in range(3):
        await push(store, str(number))
    found = await store.read(BOB, None, 1, SOME, NOW)
    await store.delete(BOB, [found[0].id])
    await push(store, "3")
    assert await texts(store) == ["1", "2", "3"]


# --- SQLite alone: it knows who sent what ---------------------------------------------------------------------------------


@pytest.fixture
def memory(opened_at: Any) -> Any:
    """``memory(**limits)``: an empty store in memory."""
    return partial(opened_at, "memory:")


@pytest_twisted.ensureDeferred
async def test_a_file_leaves_the_room_on_its_disk_without_which_nothing_can_be_deleted(
    reactor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk stayed so: to delete takes room, too."""
    free = 1 << 30
    monkeypatch.setattr(sqlite_stores, "free_bytes", lambda path: free)
    store = open_queues(f"sqlite:{tmp_path / 'queues'}", reactor)
    await push(store, "1")
    free = sqlite_stores.FREE_BYTES
    with pytest.raises(StoreFull, match="the disk is full"):
        await store.push(BOB, envelope("2"), NOW + 1, NOW + 300, 2)
    assert await texts(store) == ["1"]
    await store.delete(BOB, [one.id for one in await store.read(BOB, None, 1, 1, NOW)])
    assert await texts(store) == []
    free = 1 << 30
    assert await store.push(BOB, envelope("3"), NOW + 2, NOW + 300, 1)
    assert await texts(store) == ["3"]
    await store.close()


@pytest_twisted.ensureDeferred
async def test_what_is_free_within_a_file_is_used_though_its_disk_has_little_room(
    reactor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 30
    monkeypatch.setattr(sqlite_stores, "free_bytes", lambda path: free)
    store = open_queues(f"sqlite:{tmp_path / 'queues'}", reactor)
    for number in range(14):
        await push(store, str(number), size=1_000_000)
    for number in range(1, 15):
        await store.delete(BOB, [str(number)])
    free = sqlite_stores.FREE_BYTES - 1
    assert await store.push(BOB, envelope("again", size=1_000_000), NOW + 1, NOW + 300, 1)
    assert await texts(store) == ["again"]
    free = sqlite_stores.FREE_BYTES // 2 - 1
    with pytest.raises(StoreFull):
        await store.push(BOB, envelope("more"), NOW + 2, NOW + 300, 1)
    await store.close()


@pytest_twisted.ensureDeferred
async def test_the_largest_sender_makes_room_for_others_in_a_full_queue(memory: Any) -> None:
    store = memory(queue_envelopes=10)
    for number in range(10):
        await push(store, f"flood {number}", source=666)
    await push(store, "mine", source=1)
    await push(store, "yours", source=2)
    with pytest.raises(StoreFull):
        await store.push(BOB, envelope(), NOW, NOW + 300, 666)
    assert await texts(store) == [*(f"flood {number}" for number in range(2, 10)), "mine", "yours"]


@pytest_twisted.ensureDeferred
async def test_short_envelopes_of_many_do_not_displace_a_long_one_from_a_full_queue(memory: Any) -> None:
    store = memory(queue_envelopes=100)
    for number in range(100):
        await push(store, f"before {number}", source=10 + number % 10)
    await push(store, "long", source=1, size=100_000)
    for number in range(100):
        with pytest.raises(StoreFull):
            await store.push(BOB, envelope(), NOW, NOW + 300, 11 + number % 9)
    await push(store, "another", source=2)
    assert len(await texts(store)) == 100
    assert (await texts(store))[-2:] == ["long", "another"]


def test_a_full_queue_knows_who_has_most_envelopes_in_it(connection: sqlite3.Connection) -> None:
    numbers = random.Random(1)
    table = QueueTable(connection, QueueLimits(queue_envelopes=60))
    made_room = 0
    for at in range(3_000):
        before = counts(connection)
        source = numbers.randrange(4 if numbers.random() < 0.7 else 40)
        try:
            table.push(connection, "7", bytes(numbers.randrange(1_000)), NOW, NOW + 300, source)
        except StoreFull:
            assert before.total() == 60
            assert before[source] + 1 >= max(before.values())
        else:
            losers = before - counts(connection)
            assert losers.total() == (before.total() == 60)
            assert all(before[one] == max(before.values()) > before[source] + 1 for one in losers)
            made_room += losers.total()
        if at % 300 == 299:  # the session comes and reads
            ids = [
                number for (number,) in connection.execute("SELECT id FROM waiting LIMIT ?", (numbers.randrange(61),))
            ]
            table.delete(connection, "7", ids)
    assert made_room > 100


def counts(connection: sqlite3.Connection) -> Counter[int]:
    """How many envelopes each sender has in the store, counted anew."""
    return Counter(source for (source,) in connection.execute("SELECT source FROM waiting"))


@pytest_twisted.ensureDeferred
async def test_many_session_names_give_a_twin_no_more_room(memory: Any) -> None:
    store = memory(twin_bytes=10 * (1000 + ROW_BYTES) + 1000)
    with pytest.raises(StoreFull) as caught:
        for number in range(11):
            await push(store, "x", SessionAddress(7, str(number)), size=1000)
    assert caught.value.scope == "twin"
    await push(store, "x", SessionAddress(77), size=1000)
    await push(store, "another sender", SessionAddress(7, "new"), source=2, size=1000)
    assert await texts(store, SessionAddress(7, "0")) == []
    assert await texts(store, SessionAddress(7, "1")) == ["x"]


@pytest_twisted.ensureDeferred
async def test_a_flood_to_many_twins_does_not_keep_others_out_of_a_full_store(memory: Any) -> None:
    store = memory(store_bytes=100 * (1000 + ROW_BYTES))
    refused = 0
    for number in range(1, 201):
        try:
            await push(store, "flood", SessionAddress(number), source=666, size=1000)
        except StoreFull as error:
            assert error.scope == "store"
            refused += 1
    assert refused >= 100
    for number in range(1, 41):
        await push(store, "fair", SessionAddress(1000), source=number, size=1000)
    assert await texts(store, SessionAddress(1000)) == ["fair"] * 40


@pytest.mark.parametrize(
    "limits", [{"queue_envelopes": 10}, {"twin_bytes": 10 * (ROW_BYTES + 8) + QUEUE_BYTES}], ids=["queue", "twin"]
)
@pytest_twisted.ensureDeferred
async def test_making_room_is_as_much_work_however_much_the_largest_sender_has_elsewhere(
    reactor: Any, tmp_path: Path, limits: dict[str, int]
) -> None:
    await open_queues(f"sqlite:{tmp_path / 'queues'}", reactor).close()
    connection = sqlite3.connect(tmp_path / "queues", isolation_level=None)
    connection.execute("BEGIN")
    table = QueueTable(connection, QueueLimits(**limits))
    for number in range(20_000):
        table.push(connection, str(1_000 + number // 10), b"", NOW, NOW + 300, 666)
    for _ in range(10):  # it is full now
        table.push(connection, "7:x", b"", NOW, NOW + 300, 666)
    steps = []
    connection.set_progress_handler(lambda: steps.append(1), 100)  # after 100 steps of SQLite's machine
    assert table.push(connection, "7:x", b"", NOW, NOW + 300, 1)
    connection.close()
    assert len(steps) < 20


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    """A database in memory as a store makes it, in a transaction."""
    made = sqlite_stores._open(":memory:")
    made.execute("BEGIN")
    yield made
    made.close()


def test_making_room_in_a_full_store_is_as_much_work_however_many_senders_it_has(
    connection: sqlite3.Connection,
) -> None:
    size = ROW_BYTES + 4

    def cost(senders: int) -> float:
        connection.execute("DELETE FROM waiting")
        table = QueueTable(connection, QueueLimits(store_bytes=senders * (size + QUEUE_BYTES) + 2_000 * size))
        for number in range(senders):
            table.push(connection, str(10 + number % 90), b"", NOW, NOW + 300, number)
        for _ in range(2_000):  # one sender has most, and makes room for the others
            table.push(connection, "10", b"", NOW, NOW + 300, 0)
        cpu = time.process_time()
        for number in range(200):
            assert table.push(connection, "10", b"", NOW, NOW + 300, senders + number)
        return time.process_time() - cpu

    assert cost(30_000) < 2.5 * cost(300)


def test_the_sender_with_the_most_makes_room_however_much_all_of_them_send(connection: sqlite3.Connection) -> None:
    numbers = random.Random(1)
    table = QueueTable(connection, QueueLimits(store_bytes=500_000))
    before, made_room = sizes(connection), 0
    for _ in range(2_000):
        source = numbers.randrange(40 if numbers.random() < 0.3 else 400)
        try:
            table.push(connection, "7", bytes(numbers.randrange(1_000)), NOW, NOW + 300, source)
        except StoreFull:
            continue
        after = sizes(connection)
        losers = [size for one, size in before.items() if after.get(one, 0) < size]
        assert not losers or max(before.values()) in losers
        made_room += bool(losers)
        before = after
    assert made_room > 500


def sizes(connection: sqlite3.Connection) -> dict[int, int]:
    """What each sender has in the store, counted anew. All of it is in one queue."""
    rows = f"SELECT source, sum(length(data) + {ROW_BYTES + 2}) + {QUEUE_BYTES} FROM waiting GROUP BY source"
    return dict(connection.execute(rows).fetchall())


@pytest.mark.parametrize(
    "name",
    [
        lambda at: str(at).ljust(128, "n"),
        lambda at: f"{at:02x}".ljust(64, "ü"),
        lambda at: "n" * 128,
        str,
        lambda at: "",
    ],
    ids=["long", "bytes", "one", "short", "none"],
)
@pytest_twisted.ensureDeferred
async def test_a_full_store_has_no_more_in_memory_than_it_counts(
    reactor: Any, tmp_path: Path, name: Callable[[int], str]
) -> None:
    """Whatever the sessions are called."""
    await open_queues(f"sqlite:{tmp_path / 'queues'}", reactor).close()
    connection = sqlite3.connect(tmp_path / "queues", isolation_level=None)
    connection.execute("BEGIN")
    most = 4 << 20
    limits = QueueLimits(1 << 30, 1 << 40, 1 << 40, most)
    tracemalloc.start()
    try:
        table = QueueTable(connection, limits)
        with pytest.raises(StoreFull):
            for at in range(1 << 20):
                table.push(connection, f"4000000000:{name(at)}", bytes(60), NOW, NOW + 300, 7)
        of_python, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    pages, page_bytes = (connection.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_count", "page_size"))
    connection.close()
    assert most // 4 < of_python + pages * page_bytes < most


@pytest_twisted.ensureDeferred
async def test_nothing_stays_in_memory_of_sessions_twins_and_senders_whose_envelopes_are_gone(memory: Any) -> None:
    """Names of sessions cost nothing."""
    store = memory()

    async def come_and_go(round_: int) -> int:
        for number in range(1000):
            session = SessionAddress(1 + number + 1000 * round_, f"{number}".ljust(128, "n"))
            await store.push(session, envelope(), NOW, NOW + 300, number + 1000 * round_)
            (stored,) = await store.read(session, None, 1, SOME, NOW)
            await store.delete(session, [stored.id])
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = await come_and_go(1)
        assert await come_and_go(2) - before < 20_000
    finally:
        tracemalloc.stop()


@pytest_twisted.ensureDeferred
async def test_expired_envelopes_leave_their_room_to_others(memory: Any) -> None:
    store = memory(queue_envelopes=10)
    for number in range(10):
        await store.push(BOB, envelope(str(number), 10), NOW, NOW + 10, 1)
    await store.push(BOB, envelope("next"), NOW + 10, NOW + 310, 1)
    assert await texts(store, now=NOW + 10) == ["next"]


@pytest_twisted.ensureDeferred
async def test_nothing_waits_longer_than_an_hour(memory: Any, reactor: Any) -> None:
    store = memory()
    await store.push(BOB, envelope("x", 10**6), NOW, NOW + 10**6, 1)
    assert await texts(store, now=NOW + KEPT_S - 1) == ["x"]
    assert await texts(store, now=NOW + KEPT_S) == []


MEMORY = """
import os, sys
from twisted.internet import reactor
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.relay.stores.open import open_queues
from dmsg.rmb.relay.stores.sqlite import QueueTable

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

store = open_queues("memory:", reactor)
before = resident()
for number in range(6000):
    store.push(SessionAddress(number % 50 + 1), bytes(16384), 1000.0, 1300.0, number % 7)
for number in range(50):
    store.push(SessionAddress(number + 1), bytes(1 << 20), 1000.0, 1300.0, number % 7)
full = resident()
for number in range(50):
    while True:
        found = []
        store.read(SessionAddress(number + 1), None, 100, 1 << 20, 1001.0).addCallback(found.extend)
        if not found:
            break
        store.delete(SessionAddress(number + 1), [one.id for one in found])
print(full - before, resident() - before)
"""


@pytest.mark.system
def test_memory_comes_back_when_many_and_large_envelopes_are_gone() -> None:
    result = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=60, check=True)
    grown, left = map(int, result.stdout.split())
    assert grown > 100 << 20
    assert left < 16 << 20


WRITER = """
import sys
import tracemalloc
from collections.abc import Callable
from twisted.internet import defer, reactor
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.relay.stores.open import open_queues
from dmsg.rmb.relay.stores.sqlite import QueueTable

store = open_queues("sqlite:" + sys.argv[1], reactor)

async def write():
    for number in range(100):
        await store.push(SessionAddress(7), b"%d" % number, 1000.0, 1300.0, 1)
    print("written", flush=True)

reactor.callWhenRunning(lambda: defer.Deferred.fromCoroutine(write()))
reactor.run()
"""


@pytest.mark.system
@pytest_twisted.ensureDeferred
async def test_a_file_has_what_was_acknowledged_after_sigkill_and_counts_it(reactor: Any, tmp_path: Path) -> None:
    path = tmp_path / "queues"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "written\n"
        with pytest.raises(ConfigError):
            open_queues(f"sqlite:{path}", reactor)  # one process at a time
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert path.stat().st_mode & 0o077 == 0
    store = open_queues(f"sqlite:{path}", reactor, limits=QueueLimits(queue_envelopes=100))
    found = await store.read(BOB, None, 1000, SOME, 1001.0)
    assert [one.data for one in found] == [b"%d" % number for number in range(100)]
    with pytest.raises(StoreFull):
        await store.push(BOB, b"more", 1001.0, 1300.0, 1)
    await store.close()


@pytest_twisted.ensureDeferred
async def test_what_a_killed_relay_left_is_read_where_no_more_files_can_be_made(reactor: Any, tmp_path: Path) -> None:
    store = open_queues(f"sqlite:{tmp_path / 'queues'}", reactor)
    await push(store, "kept")
    left = tmp_path / "left"
    left.mkdir()
    for name in ("queues", "queues-wal"):
        shutil.copy(tmp_path / name, left)
    (left / "queues-shm").mkdir()  # where SQLite has shared memory
    again = open_queues(f"sqlite:{left / 'queues'}", reactor)
    assert await texts(again) == ["kept"]
    for one in (store, again):
        await one.close()


@pytest_twisted.ensureDeferred
async def test_a_transaction_that_fails_is_a_typed_error_and_leaves_the_counts_right(
    reactor: Any, tmp_path: Path
) -> None:
    store: Any = open_queues(f"sqlite:{tmp_path / 'queues'}", reactor, limits=QueueLimits(queue_envelopes=2))
    await push(store, "0")
    with pytest.raises(StoreUnavailable):
        await store.push(BOB, 3.5j, NOW, NOW + 300, 1)
    await push(store, "1")
    with pytest.raises(StoreFull):
        await store.push(BOB, envelope(), NOW, NOW + 300, 1)
    await store.close()


@pytest.mark.parametrize("kind", ["directory", "text", "foreign"])
def test_a_file_of_something_else_is_refused(reactor: Any, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "directory":
        path.mkdir()
    elif kind == "text":
        path.write_text("no database " * 1000)
    else:
        other = sqlite3.connect(path)
        other.execute("CREATE TABLE waiting (id)")
        other.commit()
        other.close()
    with pytest.raises(ConfigError):
        open_queues(f"sqlite:{path}", reactor)


@pytest.mark.parametrize("damaged", ["page", "row"])
@pytest_twisted.ensureDeferred
async def test_a_damaged_file_is_refused_and_is_no_longer_held(reactor: Any, tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "queues"
    store = open_queues(f"sqlite:{path}", reactor)
    await push(store, "")
    await store.close()
    connection = sqlite3.connect(path)
    root, page_bytes = connection.execute(
        "SELECT rootpage, page_size FROM sqlite_master, pragma_page_size WHERE name = 'waiting'"
    ).fetchone()
    if damaged == "row":
        connection.execute("UPDATE waiting SET session = x'ff'")
        connection.commit()
    connection.close()
    if damaged == "page":
        content = bytearray(path.read_bytes())
        content[(root - 1) * page_bytes] = 0xFF  # no kind of page
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="queues cannot be used"):
        open_queues(f"sqlite:{path}", reactor)
    connection = sqlite3.connect(path, timeout=0)
    connection.execute("PRAGMA user_version = 1")  # a lock that was left would stop this
    connection.close()


@pytest.mark.parametrize("url", ["", "memory", "sqlite:", "mysql://host/", "memory:x"])
def test_a_url_that_names_no_store_is_refused(reactor: Any, url: str) -> None:
    with pytest.raises(ConfigError):
        open_queues(url, reactor)
