"""Small files: many under way at a time, stored together, answered in order."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred

from dmsg.cli.channel import TransportBroken
from dmsg.cli.files import small
from dmsg.cli.files.part_folder import FOLDER
from dmsg.cli.files.parts import PartStore, SmallFile
from dmsg.cli.files.send import UNDER_WAY_BYTES, UNDER_WAY_LIMIT, run_send
from dmsg.cli.files.small import WAITING_LIMIT
from dmsg.cli.files.wire import WHOLE_LIMIT_BYTES, Done, End, Failed, TransferFailed, Whole, encode_whole

from .test_files import LARGE, fake_receiver, inbox, offer, receiver, sha256, source, talk_to

__all__ = ["inbox"]


def whole(name: str, data: bytes, *, again: bool = False) -> bytes:
    return encode_whole(Whole(name, len(data), sha256(data), again), data)


@pytest.mark.parametrize("bench", [None, "messaging"], indirect=True)
@pytest_twisted.ensureDeferred
async def test_many_files_arrive_in_order_with_large_ones_between(bench, inbox, tmp_path):
    sizes = (0, 1, 4096, WHOLE_LIMIT_BYTES, len(LARGE))
    contents = {f"{number}": os.urandom(sizes[number % 97 % 5]) for number in range(WAITING_LIMIT + 50)}
    files = tuple(source(tmp_path, name, data) for name, data in contents.items())
    receiving, peer = await receiver(bench, inbox, once=True)
    sent = await bench.run(run_send, peer, files, retries=0, sha256=True)
    await receiving.ended
    assert {path.name: path.read_bytes() for path in inbox.iterdir()} == contents
    told = receiving.stdout.objects()[1:]
    for lines in (sent, told):
        assert [(line["file"], line["size_bytes"], line["sha256"]) for line in lines] == [
            (name, len(data), sha256(data)) for name, data in contents.items()
        ]
    assert all(line["transports"] == 1 and line["sent_bytes"] == line["size_bytes"] for line in sent)


@pytest_twisted.ensureDeferred
async def test_a_sender_waits_for_no_answer_but_not_without_end(bench, tmp_path):
    heard = []

    async def listen(talk):
        while len(heard) < UNDER_WAY_LIMIT:
            heard.append((await talk.expect(Whole)).name)
            assert await talk.hear(5) == b"x"
        with pytest.raises(Exception, match="did not answer"):
            await talk.hear(0.3)
        await talk.say(*[Done()] * UNDER_WAY_LIMIT)
        for _ in range(100):
            heard.append((await talk.expect(Whole)).name)
            assert await talk.hear(5) == b"x"
        await talk.expect(End)  # without an answer
        await talk.say(*[Done()] * 100)
        await talk.channel.close(5)

    names = [f"{number}" for number in range(UNDER_WAY_LIMIT + 100)]
    peer = await fake_receiver(bench, listen)
    files = tuple(source(tmp_path, name, b"x") for name in names)
    sent = await bench.run(run_send, peer, files, retries=0)
    assert heard == names == [line["file"] for line in sent]


@pytest.fixture
def few_descriptors():
    """Room for the files of one store at a time, not for all that are sent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2 * WAITING_LIMIT, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest_twisted.ensureDeferred
async def test_more_files_than_may_be_open_are_sent(bench, inbox, tmp_path, few_descriptors):
    names = [f"{number}" for number in range(4 * WAITING_LIMIT)]
    _, peer = await receiver(bench, inbox)
    files = tuple(source(tmp_path, name, b"x") for name in names)
    sent = await bench.run(run_send, peer, files, retries=0)
    assert [line["file"] for line in sent] == names
    assert {path.name for path in inbox.iterdir()} == set(names)


@pytest_twisted.ensureDeferred
async def test_what_is_under_way_is_bounded_in_bytes_too(bench, tmp_path):
    count = UNDER_WAY_BYTES // WHOLE_LIMIT_BYTES
    data = bytes(WHOLE_LIMIT_BYTES)

    async def listen(talk):
        for _ in range(count):
            size = (await talk.expect(Whole)).size
            while size:
                size -= sum(map(len, await talk.hear_data(size)))
        with pytest.raises(Exception, match="did not answer"):
            await talk.hear(0.3)
        await talk.give_up(TransferFailed("busy"))

    peer = await fake_receiver(bench, listen)
    files = tuple(source(tmp_path, f"{number}", data) for number in range(count + 5))
    with pytest.raises(TransferFailed):
        await bench.run(run_send, peer, files, retries=0)


@pytest_twisted.ensureDeferred
async def test_those_before_a_file_that_is_refused_are_stored_and_confirmed(bench, inbox, tmp_path):
    receiving, peer = await receiver(bench, inbox, max_size=100, once=True)
    contents = {"a": b"1", "b": b"2" * 100, "c": b"3" * 101, "d": b"4"}
    files = tuple(source(tmp_path, name, data) for name, data in contents.items())
    sending = bench.start(run_send, peer, files, retries=3)
    with pytest.raises(TransferFailed) as caught:
        await sending.ended
    assert (caught.value.code, caught.value.data["file"]) == ("too_big", "c")
    assert [line["file"] for line in sending.stdout.objects()] == ["a", "b"]
    with pytest.raises(TransferFailed):
        await receiving.ended
    assert sorted(path.name for path in inbox.iterdir()) == ["a", "b"]


@pytest_twisted.ensureDeferred
async def test_a_quota_that_is_used_up_on_the_way_stops_there(bench, inbox, tmp_path):
    _, peer = await receiver(bench, inbox, quota=20_000)  # half of it for one sender
    files = tuple(source(tmp_path, f"{number}", bytes(4_000)) for number in range(5))
    sending = bench.start(run_send, peer, files, retries=3)
    with pytest.raises(TransferFailed) as caught:
        await sending.ended
    assert (caught.value.code, caught.value.data["file"]) == ("quota", "2")
    assert [line["file"] for line in sending.stdout.objects()] == ["0", "1"]
    assert sorted(path.name for path in inbox.iterdir()) == ["0", "1"]
    # what was refused is not counted
    await bench.run(run_send, peer, (source(tmp_path, "x", bytes(2_000)),), retries=0, key_file=bench.key("other")[1])


@pytest_twisted.ensureDeferred
async def test_a_wrong_hash_is_found_behind_the_answers_to_those_before(bench, inbox):
    receiving, peer = await receiver(bench, inbox)
    talk = await talk_to(bench, peer)
    wrong = encode_whole(Whole("b", 4, sha256(b"atad")), b"data")
    await talk.channel.write(whole("a", b"data") + wrong + whole("c", b"data"))
    await talk.expect(Done)
    with pytest.raises(TransferFailed) as caught:
        await talk.hear(5)
    assert caught.value.code == "mismatch"
    told = await receiving.stdout.wait_for(event="failed")
    assert told["file"] == "b"
    assert (inbox / "a").read_bytes() == b"data" and not (inbox / "b").exists()
    assert not list(inbox.glob(f"{FOLDER}/*"))


@pytest_twisted.ensureDeferred
async def test_a_name_that_could_do_harm_is_refused_behind_the_answers_to_those_before(bench, inbox):
    _, peer = await receiver(bench, inbox)
    talk = await talk_to(bench, peer)
    await talk.channel.write(whole("a", b"data") + whole("../b", b"data"))
    await talk.expect(Done)
    with pytest.raises(TransferFailed) as caught:
        await talk.hear(5)
    assert caught.value.code == "bad_name"
    assert [path.name for path in inbox.iterdir()] == ["a"] and not (inbox.parent / "b").exists()


@pytest_twisted.ensureDeferred
async def test_files_whose_confirmation_was_lost_are_sent_again_and_said_to_be(bench, tmp_path):
    heard = []

    async def confirm_one(talk):
        for _ in range(3):
            await talk.expect(Whole)
            await talk.hear(5)
        await talk.say(Done())
        await talk.channel.close(5)

    async def know_them(talk):
        for _ in range(2):
            heard.append(await talk.expect(Whole))
            await talk.hear(5)
        await talk.expect(End)
        await talk.say(Done(), Done())
        await talk.channel.close(5)

    peer = await fake_receiver(bench, confirm_one, know_them)
    files = tuple(source(tmp_path, name, b"data") for name in "abc")
    sent = await bench.run(run_send, peer, files, retries=1)
    assert [(one.name, one.again) for one in heard] == [("b", True), ("c", True)]
    assert [line["transports"] for line in sent] == [1, 2, 2]


@pytest_twisted.ensureDeferred
async def test_a_file_that_is_sent_again_is_not_stored_twice_unless_that_is_meant(bench, inbox):
    _, peer = await receiver(bench, inbox)
    client = await bench.client()
    for again, names in ((False, 1), (True, 1), (False, 2), (True, 2)):
        talk = await talk_to(bench, peer, client)
        await talk.channel.write(whole("a", b"data", again=again))
        await talk.expect(Done)
        assert len(list(inbox.iterdir())) == names
        talk.channel.abort()
    talk = await talk_to(bench, peer)  # another sender is told of nothing
    await talk.channel.write(whole("b", b"data", again=True))
    await talk.expect(Done)
    assert (inbox / "b").read_bytes() == b"data"


@pytest_twisted.ensureDeferred
async def test_a_file_that_became_shorter_fails_behind_those_before(bench, inbox, tmp_path):
    names = ["a", "b", "c"]
    files = tuple(source(tmp_path, name, b"data") for name in names)
    _, peer = await receiver(bench, inbox)
    sending = bench.start(run_send, peer, files, retries=3)
    os.truncate(files[1], 2)
    with pytest.raises(TransferFailed) as caught:
        await sending.ended
    assert (caught.value.code, caught.value.data["file"]) == ("source", "b")
    assert [line["file"] for line in sending.stdout.objects()] == ["a"]
    assert [path.name for path in inbox.iterdir()] == ["a"]


@pytest_twisted.ensureDeferred
async def test_a_receiver_that_answers_what_was_not_sent_is_given_up(bench, tmp_path):
    async def answer(talk):
        await talk.expect(Whole)
        await talk.say(offer("x", 1))
        assert isinstance(await hear_failed(talk), Failed)

    async def hear_failed(talk):
        try:
            while True:
                await talk.hear(5)
        except TransferFailed as error:
            return Failed(error.code)

    peer = await fake_receiver(bench, answer)
    with pytest.raises(TransferFailed) as caught:
        files = (source(tmp_path, "a", b"data"), source(tmp_path, "b", LARGE))
        await bench.run(run_send, peer, files, retries=0)
    assert caught.value.code == "malformed"


@pytest_twisted.ensureDeferred
async def test_what_goes_wrong_behind_the_disk_ends_the_conversation(bench, inbox, logged_errors):
    receiving, peer = await receiver(bench, inbox)
    receiving.stdout.close()  # where it is told what was received
    talk = await talk_to(bench, peer)
    await talk.channel.write(whole("a", b"x"))
    with pytest.raises(TransportBroken):
        await talk.hear(5)
    assert logged_errors.flush(ValueError)


def test_two_small_files_of_one_name_both_stay(tmp_path):
    files = [SmallFile("a", data, sha256(data), 0.0) for data in (b"one", b"two", b"two")]
    names, problem = PartStore(tmp_path).keep_small("02ab", files, overwrite=False, admit=lambda size: None)
    assert problem is None and names[0] == "a" and names[1] == names[2] != "a"
    assert [(tmp_path / name).read_bytes() for name in names] == [b"one", b"two", b"two"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_disk_that_fails_leaves_nothing_and_says_so(tmp_path):
    (tmp_path / FOLDER).write_bytes(b"in the way")
    names, problem = PartStore(tmp_path).keep_small(
        "02ab", [SmallFile("a", b"x", sha256(b"x"), 0.0)], overwrite=False, admit=lambda size: None
    )
    assert names == [] and isinstance(problem, OSError)


def test_those_that_had_their_names_when_the_disk_failed_are_told(tmp_path):
    directory = tmp_path
    while len(os.fsencode(directory)) < 3_900:  # so long a path has no room for a long name
        directory /= "d" * min(200, 3_899 - len(os.fsencode(directory)) or 1)
    directory.mkdir(parents=True)
    files = [SmallFile(name, b"x", sha256(b"x"), 0.0) for name in ("a", "b" * 199, "c")]
    names, problem = PartStore(directory).keep_small("02" * 33, files, overwrite=False, admit=lambda size: None)
    assert names == ["a"] and isinstance(problem, OSError)
    assert [path.name for path in directory.iterdir()] == ["a"]


@pytest_twisted.ensureDeferred
async def test_files_whose_names_may_be_lost_are_refused(bench, inbox, monkeypatch):
    """The directory cannot be synced, behind the names of all files."""
    sync = os.fsync

    def synced(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(inbox):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    _, peer = await receiver(bench, inbox)
    talk = await talk_to(bench, peer)
    await talk.channel.write(whole("a", b"x") + whole("b", b"y"))
    with pytest.raises(TransferFailed) as caught:
        await talk.expect(Done, 5)
    assert caught.value.code == "storage"


@pytest_twisted.ensureDeferred
async def test_files_that_are_there_need_no_disk_that_works(bench, inbox, monkeypatch):
    """Only their answer was lost."""
    _, peer = await receiver(bench, inbox)
    talk = await talk_to(bench, peer)
    await talk.channel.write(whole("a", b"x"))
    await talk.expect(Done, 5)

    def synced(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", synced)
    await talk.channel.write(whole("a", b"x", again=True) + whole("b", b"y"))
    await talk.expect(Done, 5)
    with pytest.raises(TransferFailed) as caught:
        await talk.expect(Done, 5)
    assert caught.value.code == "storage"


def test_who_waits_for_the_disk_is_told_when_it_takes_no_more(monkeypatch):
    """Nothing else would wake it: the thread that stores has stopped."""
    begun, said, interrupted, ended = [], [], [], []

    def in_thread(_, work):
        begun.append((Deferred(), work))
        return begun[-1][0]

    async def say(*messages):
        said.extend(messages)

    monkeypatch.setattr(small, "in_thread", in_thread)
    talk = SimpleNamespace(say=say, channel=SimpleNamespace(interrupt=interrupted.append))
    files = small.SmallFiles(
        None,
        talk,
        keep=lambda files: ([], OSError(errno.ENOSPC, "No space left on device")),
        known=lambda file: False,
        stored=lambda file, name: None,
        sender="02ab",
        storing=set(),
    )
    for number in range(1 + WAITING_LIMIT):  # one is being stored
        Deferred.fromCoroutine(files.put(SmallFile(f"{number}", b"x", sha256(b"x"), 0.0))).addBoth(ended.append)
    assert ended == [None] * WAITING_LIMIT
    [(done, work)] = begun
    done.callback(work())
    assert ended[WAITING_LIMIT].check(TransferFailed) and ended[WAITING_LIMIT].value.code == "no_space"
    assert interrupted == [ended[WAITING_LIMIT].value]
    assert not said and len(begun) == 1
    Deferred.fromCoroutine(files.done()).addBoth(ended.append)
    assert ended[-1].value is interrupted[0]
