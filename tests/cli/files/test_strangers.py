"""Strangers against ``dmsg receive``: its places, its disk, its processor, and what it lets them know."""

from __future__ import annotations

import io
import os
import re
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.error import ConnectionLost
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from dmsg.cli.channel import GATHER_S
from dmsg.cli.files import quota as quota_module
from dmsg.cli.files.arrivals import REMEMBERED, Arrival, Arrivals
from dmsg.cli.files.part_folder import FOLDER
from dmsg.cli.files.parts import KEPT_S, PARTS_LIMIT, PARTS_PER_SENDER, PartStore
from dmsg.cli.files.places import MAX_TRANSFERS, TRANSFERS_PER_SENDER, Places
from dmsg.cli.files.quota import FILES_PER_SENDER, SHARE_PERIOD_S, Quota
from dmsg.cli.files.receive import FIRST_OFFER_TIMEOUT_S, SWEEP_INTERVAL_S, Receiver, Rules
from dmsg.cli.files.send import run_send
from dmsg.cli.files.small import WAITING_LIMIT
from dmsg.cli.files.store import start_in_thread
from dmsg.cli.files.talk import HASH_TIMEOUT_S
from dmsg.cli.files.wire import (
    BEGUN_LIMIT_BYTES,
    WHOLE_LIMIT_BYTES,
    Done,
    Have,
    Ready,
    Start,
    TransferFailed,
    Whole,
    data_prefix,
    encode,
    encode_whole,
)
from dmsg.cli.output import Output, human_bytes
from dmsg.errors import DmsgError

from .test_files import GIBIBYTE, inbox, offer, receiver, sha256, source, talk_to, upload
from .test_slow import Reactor

__all__ = ["inbox"]


def pread_bytes() -> int:
    """What this process has read so far, by any system call."""
    lines = Path("/proc/self/io").read_text("ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar:")))


@pytest_twisted.ensureDeferred
async def test_strangers_that_hold_every_place_do_not_keep_a_friend_out(bench, inbox, tmp_path):
    _, peer = await receiver(bench, inbox)
    for _ in range(MAX_TRANSFERS // TRANSFERS_PER_SENDER + 1):
        stranger = await bench.client()
        for number in range(TRANSFERS_PER_SENDER):
            talk = await talk_to(bench, peer, stranger)
            await talk.say(offer(f"{number}", 1000))
    (sent,) = await bench.run(run_send, peer, (source(tmp_path, "a", b"hello"),), retries=0)
    assert sent["transports"] == 1
    assert (inbox / "a").read_bytes() == b"hello"


@pytest_twisted.ensureDeferred
async def test_one_key_has_only_some_of_the_places(bench, inbox):
    _, peer = await receiver(bench, inbox)
    stranger = await bench.client()
    answers = []
    for number in range(TRANSFERS_PER_SENDER + 2):
        try:
            talk = await talk_to(bench, peer, stranger)
            await talk.say(offer(f"{number}", 1000))
            answers.append(type(await talk.hear(5)))
        except DmsgError:
            answers.append(None)
        except Exception as error:
            answers.append(type(error))
    assert answers[:TRANSFERS_PER_SENDER] == [Have] * TRANSFERS_PER_SENDER
    assert Have not in answers[TRANSFERS_PER_SENDER:]


def test_the_slowest_goes_for_a_newcomer():
    places: Places[int] = Places()
    for number in range(MAX_TRANSFERS):
        assert places.take(number, f"key {number}", float(number)) is None
        places.received(number, 1000 * (1 + number % 7))
    places.received(3, 10**9)
    assert places.take(100, "new", 100.0) == 0  # 1000 bytes in 100 s
    assert places.take(101, "new", 200.0) == 100  # nothing at all, for long
    places.received(100, 10**9)  # what was under way when it lost its place
    places.leave(100)
    places.leave(101)
    assert places.take(102, "new", 200.0) is None


def test_strangers_that_send_a_little_on_every_place_do_not_keep_a_friend_from_beginning():
    """His offer takes a round trip, in which strangers come again; then he sends faster than they do."""
    places: Places[object] = Places()
    for number in range(MAX_TRANSFERS):
        places.take(number, f"stranger {number}", 0.0)
    now = 10.0
    for number in range(MAX_TRANSFERS):
        places.received(number, 1_000)
    assert places.take("friend", "friend", now) in range(MAX_TRANSFERS)
    for number in range(20):
        now += 0.05
        assert places.take(f"another {number}", f"another {number}", now) != "friend"
    places.received("friend", 100_000)
    for number in range(200):
        now += 0.05
        places.received("friend", 5_000)
        assert places.take(f"one more {number}", f"one more {number}", now) != "friend"


def test_a_sender_has_few_places():
    places: Places[int] = Places()
    for number in range(TRANSFERS_PER_SENDER):
        assert places.is_open_to("new")
        places.take(number, "new", 0.0)
    assert not places.is_open_to("new") and places.is_open_to("other")


@pytest_twisted.ensureDeferred
async def test_one_sender_cannot_fill_the_quota(bench, inbox, tmp_path):
    size = 1024 * 1024
    _, peer = await receiver(bench, inbox, quota=size)
    _, stranger = bench.key("stranger")
    half = source(tmp_path, "half", os.urandom(size // 2))
    await bench.run(run_send, peer, (half,), retries=0, key_file=stranger)
    with pytest.raises(TransferFailed) as caught:
        await bench.run(run_send, peer, (source(tmp_path, "one", b"x"),), retries=3, key_file=stranger)
    assert caught.value.code == "quota"
    await bench.run(run_send, peer, (source(tmp_path, "friend's", os.urandom(size // 2)),), retries=0)
    with pytest.raises(TransferFailed) as caught:
        await bench.run(run_send, peer, (source(tmp_path, "more", b"x"),), retries=3)
    assert caught.value.code == "quota"
    assert sorted(path.name for path in inbox.iterdir()) == ["friend_s", "half"]


@pytest_twisted.ensureDeferred
async def test_senders_on_a_list_may_use_all_of_the_quota(bench, inbox, tmp_path):
    friend, friend_file = bench.key("friend")
    _, peer = await receiver(bench, inbox, quota=1000, allow=(friend.public_key,))
    await bench.run(run_send, peer, (source(tmp_path, "a", b"x" * 1000),), retries=0, key_file=friend_file)


@pytest_twisted.ensureDeferred
async def test_a_disk_is_never_filled(bench, inbox, tmp_path):
    status = os.statvfs(inbox)
    keep_free = status.f_bavail * status.f_frsize + GIBIBYTE
    receiving, peer = await receiver(bench, inbox, once=True, keep_free=keep_free)
    with pytest.raises(TransferFailed) as caught:
        await bench.run(run_send, peer, (source(tmp_path, "a", b"x"),), retries=3)
    assert caught.value.code == "no_space"
    with pytest.raises(TransferFailed) as outcome:  # only the receiver is told that it is a rule, not the disk
        await receiving.ended
    assert str(outcome.value) == f"{caught.value} ({human_bytes(keep_free)} stay free)"
    assert not list(inbox.iterdir())


@pytest.mark.parametrize("quickly", [False, True])
def test_a_quota_has_room_again_when_files_are_taken_away(tmp_path, quickly):
    now = [0.0]
    (tmp_path / "before").write_bytes(b"x" * 5000)
    quota = Quota((tmp_path,), 1000, 0, shared=False, clock=lambda: now[0])
    quota.check("a", 1000, quickly=quickly)
    (tmp_path / "new").write_bytes(b"x" * 900)
    quota.add("a", 900, files=1)
    for sender in ("a", "b"):
        with pytest.raises(TransferFailed):
            quota.check(sender, 101, quickly=quickly)
    (tmp_path / "new").unlink()
    now[0] += 10.0
    quota.check("a", 1000, quickly=quickly)
    with pytest.raises(TransferFailed):
        quota.check("a", 1001, quickly=quickly)


def test_a_directory_is_not_measured_for_each_question(tmp_path, monkeypatch):
    """It may have 100,000 files, and strangers ask."""
    now, measured = [0.0], []
    monkeypatch.setattr(quota_module, "measure", lambda *directories: measured.append(now[0]) or (0, 0))
    quota = Quota((tmp_path,), 1000, 0, shared=False, clock=lambda: now[0], free=lambda path: 10**9)
    for now[0] in (5.0, 10.0, 15.0, 19.0, 20.0, 25.0):
        quota.check("a", 1000, quickly=True)
    assert measured == [0.0]
    for now[0] in (30.0, 35.0, 39.0, 40.0):
        quota.check("a", 1000)
    assert measured == [0.0, 30.0, 40.0]


def test_space_that_stays_free_and_the_number_of_files_are_bounds_too(tmp_path):
    now = [0.0]
    quota = Quota((tmp_path,), 10**9, 500, shared=True, clock=lambda: now[0], free=lambda path: 1000)
    quota.check("a", 500)
    with pytest.raises(TransferFailed) as caught:
        quota.check("a", 501)
    assert caught.value.code == "no_space"
    for _ in range(FILES_PER_SENDER):
        quota.add("a", 0, files=1)
    with pytest.raises(TransferFailed) as caught:
        quota.check("a", 0)
    assert caught.value.code == "quota"
    quota.check("b", 0)
    now[0] += SHARE_PERIOD_S
    quota.check("a", 0)


@pytest_twisted.ensureDeferred
async def test_an_offer_does_not_make_the_receiver_hash_a_part_again(bench, inbox):
    _, peer = await receiver(bench, inbox)
    stranger = await bench.client()
    size, tries = 16 * 1024 * 1024, 10
    talk = await talk_to(bench, peer, stranger)
    await talk.say(offer("a", size + 1))
    await talk.expect(Have)
    await talk.say(Start(0, True))
    for _ in range(16):
        await talk.channel.write(data_prefix(1024 * 1024) + bytes(1024 * 1024), 30)
    part = next((inbox / FOLDER).iterdir())
    while part.stat().st_size < size:
        await wait(bench)
    talk.channel.abort()
    before = pread_bytes()
    for _ in range(tries):
        talk = await talk_to(bench, peer, stranger)
        await talk.say(offer("a", size + 1))
        have = await talk.expect(Have)
        assert have == Have(size, sha256(bytes(size)))
        talk.channel.abort()
        await talk.channel.wait_closed(5)
    assert pread_bytes() - before < 2 * size  # it was ten times the part


async def wait(bench):
    await deferLater(bench.reactor, 0.001)


def test_a_part_that_was_changed_meanwhile_is_hashed_again(tmp_path):
    store = PartStore(tmp_path)
    part = store.open("02ab", "a")
    part.append(b"what came")
    part.close()
    store.path("02ab", "a").write_bytes(b"and now..")
    part = store.open("02ab", "a")
    part.load(100)
    assert (part.offset, part.sha256) == (9, sha256(b"and now.."))
    part.close()


@pytest_twisted.ensureDeferred
async def test_a_sender_that_comes_again_does_not_wait_with_all_others_until_the_disk_is_done(tmp_path, reactor):
    (tmp_path / "a").write_bytes(b"so that the other one is hashed, which takes long")
    store, data = PartStore(tmp_path), b"all of it"
    part = store.open("02" * 33, "a")
    part.append(b"x", hashed=False)
    os.truncate(store.path("02" * 33, "a"), 4 * GIBIBYTE)
    part.offset = 4 * GIBIBYTE
    publishing = start_in_thread(reactor, lambda: part.publish(overwrite=False))
    while not part.hashed:
        await deferLater(reactor, 0)
    part.close()
    with pytest.raises(ValueError, match="closed"):
        await publishing
    again = store.open("02" * 33, "a")
    again.load(4 * GIBIBYTE - 1)  # it is another one
    again.append(data)
    again.publish(overwrite=True)
    again.close()
    assert (tmp_path / "a").read_bytes() == data and [path.name for path in tmp_path.iterdir()] == ["a"]


class Stranger:
    """A transport to a receiver in virtual time; ``heard`` is what comes after its first word."""

    security = "e2e"
    stream = SimpleNamespace(resumable=True)

    def __init__(self, reactor: Reactor, receiver: Receiver, number: int = 0) -> None:
        self.heard = b""
        self.lost = False
        self._reactor = reactor
        self._key = f"02{number:064}"
        self.channel: Any = receiver.buildProtocol(self.getPeer())
        self.channel.makeConnection(self)
        assert self.heard == encode(Ready())  # before anything was said
        self.heard = b""

    def getPeer(self) -> Any:
        return SimpleNamespace(public_key=self._key, server_public_key="03" * 33)

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.heard += data

    def say(self, data: bytes) -> None:
        self.channel.dataReceived(data)
        self._reactor.advance(GATHER_S)

    def abortConnection(self) -> None:
        if not self.lost:
            self.lost = True
            self.channel.connectionLost(Failure(ConnectionLost()))


@pytest.fixture
def still(inbox):
    """A receiver in virtual time."""
    reactor = Reactor()
    call: Any = SimpleNamespace(out=Output(io.StringIO(), io.StringIO(), json_lines=True))
    found = Receiver(call, reactor, Rules(inbox, GIBIBYTE, keep_free_bytes=0))
    yield reactor, found
    found.stop()


@pytest.mark.parametrize(
    "head",
    [
        encode(Whole("a", WHOLE_LIMIT_BYTES, sha256(b"ab" * (WHOLE_LIMIT_BYTES // 2)))),
        encode(replace(offer("a", GIBIBYTE), begun=BEGUN_LIMIT_BYTES)),
    ],
    ids=["whole", "begun"],
)
def test_data_in_the_smallest_pieces_takes_no_more_memory_than_any_other(inbox, still, head):
    stranger = Stranger(*still)
    stranger.say(head)
    pieces = (data_prefix(2) + b"ab") * 200
    tracemalloc.start()
    for _ in range(WHOLE_LIMIT_BYTES // 400):
        stranger.say(pieces)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1024 * 1024
    stranger.say((data_prefix(2) + b"ab") * (WHOLE_LIMIT_BYTES % 400 // 2))
    if b"whole" in head:
        assert stranger.heard == encode(Done()) and (inbox / "a").read_bytes() == b"ab" * (WHOLE_LIMIT_BYTES // 2)


@pytest.mark.parametrize(
    "head",
    [
        encode(Whole("a", WHOLE_LIMIT_BYTES, sha256(bytes(WHOLE_LIMIT_BYTES)))),
        encode(replace(offer("a", GIBIBYTE), begun=BEGUN_LIMIT_BYTES)),
    ],
    ids=["whole", "begun"],
)
def test_strangers_that_send_less_do_not_take_the_place_of_a_friend_on_a_slow_path(still, head):
    friend = Stranger(*still)
    friend.say(head)
    strangers = [Stranger(*still, number) for number in range(1, MAX_TRANSFERS)]
    for number in range(100):
        friend.say(data_prefix(2_000) + bytes(2_000))  # 20 KB a second
        for stranger in strangers[number % 10 :: 10]:  # 1 KB a second each
            if not stranger.lost:
                stranger.channel.dataReceived(encode_whole(Whole("x", 1_000, sha256(bytes(1_000))), bytes(1_000)))
        if number > 60 and not number % 5:
            strangers.append(Stranger(*still, 1_000 + number))
    assert not friend.lost and any(stranger.lost for stranger in strangers)
    friend.abortConnection()
    for stranger in strangers:
        stranger.abortConnection()


def test_a_transport_that_is_lost_while_many_small_files_wait_for_the_disk_leaves_its_place(inbox, still):
    reactor, receiver = still
    small = encode_whole(Whole("a", 1, sha256(b"x")), b"x")
    for _ in range(2 * TRANSFERS_PER_SENDER):
        reactor.hold = True
        sender = Stranger(reactor, receiver)
        sender.say(small * 2 * WAITING_LIMIT)
        sender.abortConnection()
        reactor.hold = False
        reactor.work()
    sender = Stranger(reactor, receiver)
    sender.say(small)
    assert sender.heard == encode(Done())
    sender.abortConnection()


def test_files_of_a_stranger_do_not_make_the_receiver_forget_those_of_a_friend(inbox, still):
    """The friend's transport is lost with the confirmation, and while it dials again a stranger sends thousands."""
    friend = Stranger(*still, 1)
    friend.say(encode_whole(Whole("a", 4, sha256(b"data")), b"data"))
    assert friend.heard == encode(Done())
    friend.abortConnection()
    (inbox / "a").rename(inbox / "read")  # by its owner
    stranger = Stranger(*still, 2)
    reactor, _ = still
    reactor.hold = True  # so that files are stored together
    stranger.say(b"".join(encode_whole(Whole(f"{number}", 0, sha256(b"")), b"") for number in range(1_100)))
    while stranger.heard != encode(Done()) * 1_100:
        reactor.work()
    reactor.hold = False
    friend = Stranger(*still, 1)
    friend.say(encode_whole(Whole("a", 4, sha256(b"data"), again=True), b"data"))
    assert friend.heard == encode(Done()) and not (inbox / "a").exists()
    for sender in (friend, stranger):
        sender.abortConnection()


def test_remembered_arrivals_are_bounded_and_those_of_the_sender_with_the_most_go_first():
    arrivals = Arrivals()
    friend = [Arrival("friend", f"{number}", 1, "") for number in range(512)]
    for arrival in (*friend, friend[0]):
        arrivals.add(arrival)
    for number in range(3 * REMEMBERED):
        arrivals.add(Arrival("stranger", f"{number}", 1, ""))
    assert all(arrival in arrivals for arrival in friend) and len(arrivals) == REMEMBERED
    assert Arrival("stranger", f"{3 * REMEMBERED - 1}", 1, "") in arrivals
    for number in range(3_000):  # keys cost nothing, but each needs a transport
        arrivals.add(Arrival(f"stranger {number}", "", 1, ""))
    assert all(arrival in arrivals for arrival in friend) and Arrival("stranger 0", "", 1, "") in arrivals
    for number in range(REMEMBERED):
        arrivals.add(Arrival("friend", f"again {number}", 1, ""))
    assert len(arrivals) == REMEMBERED and friend[1] not in arrivals


def test_a_stranger_that_says_nothing_loses_its_transport_and_its_place(still):
    reactor, receiver = still
    strangers = [Stranger(reactor, receiver) for _ in range(TRANSFERS_PER_SENDER)]
    reactor.advance(FIRST_OFFER_TIMEOUT_S - 0.1)
    assert not any(stranger.lost for stranger in strangers)
    reactor.advance(0.2)
    assert all(stranger.lost for stranger in strangers)
    for number in range(TRANSFERS_PER_SENDER):
        strangers[number] = Stranger(reactor, receiver)
        strangers[number].say(encode(offer(f"{number}", 1000)))
    reactor.advance(HASH_TIMEOUT_S - 1)
    assert not any(stranger.lost for stranger in strangers)
    reactor.advance(2)
    assert all(stranger.lost for stranger in strangers)
    Stranger(reactor, receiver).abortConnection()


def test_the_older_transport_of_a_sender_that_comes_again_is_cut_off(inbox, still):
    first, second = Stranger(*still), Stranger(*still)
    data = b"all of it"
    for sender in (first, second):
        sender.say(encode(offer("a", len(data))))
    assert first.lost and second.heard and not second.lost
    second.abortConnection()


def test_a_sender_that_comes_again_while_its_part_is_looked_at_goes_on_with_it(still):
    reactor, _ = still
    reactor.hold = True
    first, second = Stranger(*still), Stranger(*still)
    for sender in (first, second):
        sender.say(encode(offer("a", 1000)))
    reactor.hold = False
    reactor.work()
    assert first.lost and second.heard == encode(Have(0, sha256(b"")))
    second.abortConnection()


def test_parts_that_are_too_old_are_removed_each_hour(inbox, still):
    reactor, receiver = still
    for _ in range(3):
        store = PartStore(inbox)
        leave(store, "02ab", "old", b"x", time.time() - KEPT_S - 60)
        reactor.advance(SWEEP_INTERVAL_S / 2)
        assert store.path("02ab", "old").exists()
        reactor.advance(SWEEP_INTERVAL_S / 2)
        assert not store.folder.exists()
    receiver.stop()
    assert not reactor.getDelayedCalls()


@pytest_twisted.ensureDeferred
async def test_an_offer_alone_leaves_nothing_behind(bench, inbox):
    _, peer = await receiver(bench, inbox)
    stranger = await bench.client()
    for number in range(20):
        talk = await talk_to(bench, peer, stranger)
        await talk.say(offer(f"{number}", 1000))
        await talk.expect(Have)
        talk.channel.abort()
        await talk.channel.wait_closed(5)
    while list(inbox.iterdir()):
        await wait(bench)


def leave(store: PartStore, sender: str, name: str, data: bytes, changed_at: float = 0.0) -> None:
    part = store.open(sender, name)
    part.append(data)
    part.close()
    if changed_at:
        os.utime(store.path(sender, name), (changed_at, changed_at))


def test_parts_age_out(tmp_path):
    now = 1_800_000_000.0
    store = PartStore(tmp_path, clock=lambda: now)
    leave(store, "02ab", "old", b"x", now - KEPT_S - 1)
    leave(store, "02ab", "young", b"x", now - KEPT_S + 60)
    busy = store.open("02ab", "busy")
    busy.append(b"x")
    os.utime(store.path("02ab", "busy"), (0, 0))
    store.sweep()
    assert [store.path("02ab", name).exists() for name in ("old", "young", "busy")] == [False, True, True]
    busy.close()
    store.sweep()
    assert not store.path("02ab", "busy").exists()


def test_parts_of_a_thousand_keys_push_a_larger_one_of_a_friend_not_out(tmp_path):
    now = 1_800_000_000.0
    store = PartStore(tmp_path)
    leave(store, "friend", "a", b"x" * 100, now)
    for number in range(PARTS_LIMIT + 20):
        leave(store, f"{number:04x}", "a", b"x", now + number)
    assert store.path("friend", "a").exists()
    assert len(list(store.folder.iterdir())) == PARTS_LIMIT
    for number in range(PARTS_PER_SENDER + 5):
        leave(store, "one", f"{number}", b"y" * 50, now + number)
    names = [path.name for path in store.folder.iterdir() if path.name.startswith("one-")]
    assert len(names) == PARTS_PER_SENDER
    assert not store.path("one", "4").exists() and store.path("one", "5").exists()


def test_a_receiver_is_told_that_others_may_write_to_its_parts(tmp_path):
    """On some file systems, such as a folder that a virtual machine shares with its host, each directory has that mode."""
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER).chmod(0o770)
    with pytest.raises(TransferFailed, match=rf"\({re.escape(FOLDER)} must be a directory of this user") as caught:
        PartStore(tmp_path).open("02ab", "a")
    assert caught.value.code == "storage"


def test_a_folder_of_parts_that_is_another_s_is_not_used(tmp_path):
    (tmp_path / "inbox").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "inbox" / FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TransferFailed) as caught:
        PartStore(tmp_path / "inbox").open("02ab", "a")
    assert caught.value.code == "storage"
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest_twisted.ensureDeferred
async def test_a_stranger_cannot_tell_which_files_are_there(bench, inbox):
    (inbox / "there").write_bytes(b"data")
    (inbox / "directory").mkdir()
    _, peer = await receiver(bench, inbox)
    heard = {}
    for name in ("there", "directory", "not there"):
        heard[name] = []
        for number in range(3):
            talk = await talk_to(bench, peer)
            await talk.say(offer(name, 4, number))
            heard[name].append(await talk.hear(5))
            talk.channel.abort()
        talk = await talk_to(bench, peer)
        await upload(talk, name, b"mine")
        heard[name].append(await talk.hear(5))
        await talk.channel.write(encode_whole(Whole(name, 4, sha256(b"ours"), again=True), b"ours"))
        heard[name].append(await talk.hear(5))
    assert heard["there"] == heard["directory"] == heard["not there"]
    assert heard["there"][-1] == Done()
    assert (inbox / "there").read_bytes() == b"data"


@pytest.mark.parametrize(
    "name", ["-rf", "--checkpoint-action=exec=sh", "*", "$(id)", "NUL", "z" + "\u0334\u0315\u031b\u0322" * 20]
)
@pytest_twisted.ensureDeferred
async def test_a_name_that_programs_could_obey_is_received_under_another(bench, inbox, name):
    receiving, peer = await receiver(bench, inbox)
    talk = await talk_to(bench, peer)
    await upload(talk, name, b"data")
    await talk.expect(Done)
    told = await receiving.stdout.wait_for(event="received")
    (path,) = inbox.iterdir()
    assert path.name == told["file"] != name
    assert path.name.startswith("_") or path.name.startswith("z")
    assert not set(path.name) & set("$*=") and len(path.name) <= 40
