"""``dmsg send`` and ``dmsg receive`` in one process, and against senders and receivers that misbehave."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_twisted
from click.testing import CliRunner
from twisted.internet.task import deferLater

from dmsg.cli.channel import Channel, HalfOpenChannel, TransportBroken
from dmsg.cli.exits import CommandError, Exit, exit_code
from dmsg.cli.files.part_folder import FOLDER
from dmsg.cli.files.parts import PartStore
from dmsg.cli.files.receive import Rules, receive, run_receive
from dmsg.cli.files.send import run_send
from dmsg.cli.files.store import BLOCK_BYTES
from dmsg.cli.files.talk import Conversation
from dmsg.cli.files.wire import (
    BEGUN_LIMIT_BYTES,
    WHOLE_LIMIT_BYTES,
    Done,
    End,
    Finish,
    Have,
    MalformedTransfer,
    Offer,
    Start,
    TransferFailed,
    Whole,
    data_prefix,
    encode,
    encode_whole,
)
from dmsg.cli.settings import ValueType
from dmsg.crypto.keys import PublicKey
from dmsg.errors import DialError
from dmsg.eventlog.compress import read_lines
from dmsg.messaging.client.config import MessagingConfig
from dmsg.messaging.core.dialect import DIALECTS
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.ops.values import SIZE

GIBIBYTE = 1024**3
#: More than a small file: its sender asks what is there of it.
LARGE = bytes(range(256)) * (WHOLE_LIMIT_BYTES // 256) + b"large"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def offer(name: str, size: int, number: int = 0) -> Offer:
    """An offer with an id of this number."""
    return Offer(name, size, f"{number:032x}")


@pytest.fixture
def inbox(tmp_path) -> Path:
    path = tmp_path / "inbox"
    path.mkdir()
    return path


def source(tmp_path: Path, name: str, data: bytes) -> str:
    (tmp_path / name).write_bytes(data)
    return str(tmp_path / name)


async def receiver(
    bench,
    inbox,
    *,
    max_size=GIBIBYTE,
    overwrite=False,
    once=False,
    allow=(),
    quota=64 * GIBIBYTE,
    keep_free=0,
    **options,
):
    rules = Rules(inbox, max_size, overwrite=overwrite, quota_bytes=quota, keep_free_bytes=keep_free)
    command = bench.start(run_receive, rules, once=once, allow=allow, **options)
    ready = await command.ready()
    return command, PublicKey.parse(ready["public_key"])


async def talk_to(bench, peer, client=None) -> Conversation:
    client = client or await bench.client()
    transport = await client.dial(peer)
    channel = Channel(bench.reactor)
    transport.attach(channel)
    return Conversation(channel)


async def hear_all(talk, size) -> bytes:
    """So much data."""
    data = b""
    while len(data) < size:
        data += b"".join(await talk.hear_data(size - len(data)))
    return data


async def hear_offer(talk) -> tuple[Offer, bytes]:
    """An offer, and what the file begins with."""
    offered = await talk.expect(Offer)
    return offered, await hear_all(talk, offered.begun)


async def upload(talk, name, data) -> None:
    """Everything a sender says about a file, but for hearing what comes of it."""
    await talk.say(offer(name, len(data)))
    await talk.expect(Have)
    await talk.say(Start(0, True))
    if data:
        await talk.channel.write(data_prefix(len(data)) + data)
    await talk.say(Finish(sha256(data)))


@pytest.mark.parametrize("bench", [None, "messaging"], indirect=True)
@pytest_twisted.ensureDeferred
async def test_files_arrive(bench, inbox, tmp_path):
    contents = {"empty": b"", "small.txt": b"hello", "larger.bin": os.urandom(3 * 1024 * 1024 + 17)}
    files = tuple(source(tmp_path, name, data) for name, data in contents.items())
    receiving, peer = await receiver(bench, inbox, once=True)
    sent = await bench.run(run_send, peer, files, retries=0, sha256=True)
    await receiving.ended
    assert {path.name: path.read_bytes() for path in inbox.iterdir()} == contents
    assert [(line["file"], line["size_bytes"], line["sha256"]) for line in sent] == [
        (name, len(data), sha256(data)) for name, data in contents.items()
    ]
    larger = sent[-1]
    assert larger["resumed_from"] == 0 and larger["sent_bytes"] == larger["size_bytes"] and larger["transports"] == 1
    assert larger["server"] == str(bench.pinned[0].public_key)
    assert larger["security"] in ("hop", "e2e")
    received = receiving.stdout.objects()[1:]
    assert [(line["event"], line["file"], line["sha256"]) for line in received] == [
        ("received", name, sha256(data)) for name, data in contents.items()
    ]
    assert received[0]["path"] == str(inbox / "empty")


@pytest.mark.parametrize(
    ("bench", "security", "hashed"),
    [(None, Security.E2E, False), (None, Security.HOP, True), ("messaging", None, True)],
    indirect=["bench"],
)
@pytest_twisted.ensureDeferred
async def test_a_large_file_is_hashed_where_the_transport_compares_nothing(bench, inbox, tmp_path, security, hashed):
    receiving, peer = await receiver(bench, inbox, once=True, security=security)
    (sent,) = await bench.run(run_send, peer, (source(tmp_path, "a", LARGE),), retries=0, security=security)
    await receiving.ended
    digest = sha256(LARGE) if hashed else None
    assert sent["sha256"] == receiving.stdout.objects()[-1]["sha256"] == digest
    assert (inbox / "a").read_bytes() == LARGE


@pytest.mark.parametrize(
    ("bench", "security", "answer"),
    [(None, Security.E2E, "done"), (None, Security.HOP, "malformed"), ("messaging", None, "malformed")],
    indirect=["bench"],
)
@pytest_twisted.ensureDeferred
async def test_a_receiver_insists_on_a_hash_where_the_transport_compares_nothing(bench, inbox, security, answer):
    _, peer = await receiver(bench, inbox, security=security)
    talk = await talk_to(bench, peer, await bench.client(**({} if security is None else {"security": security})))
    await talk.channel.write(
        encode(offer("a", 4)) + encode(Start(0, False)) + data_prefix(4) + b"data" + encode(Finish())
    )
    await talk.expect(Have)
    try:
        told = (await talk.expect(Done)).KIND
    except TransferFailed as error:
        told = error.code
    assert told == answer and (inbox / "a").exists() is (answer == "done")


@pytest_twisted.ensureDeferred
async def test_a_hash_that_was_not_announced_is_a_wrong_one(bench, inbox):
    _, peer = await receiver(bench, inbox, security=Security.E2E)
    talk = await talk_to(bench, peer)
    await talk.channel.write(encode(offer("a", 4)) + encode(Start(0, False)) + data_prefix(4) + b"data")
    await talk.say(Finish(sha256(b"data")))
    await talk.expect(Have)
    with pytest.raises(TransferFailed) as caught:
        await talk.hear(5)
    assert caught.value.code == "mismatch" and not list(inbox.iterdir())


@pytest_twisted.ensureDeferred
async def test_a_file_that_was_not_hashed_is_still_told_from_another_of_its_name(bench, inbox, tmp_path):
    (inbox / "a").write_bytes(b"old")
    _, peer = await receiver(bench, inbox, security=Security.E2E)
    for _ in range(2):  # the second time it is there under that name already
        (sent,) = await bench.run(run_send, peer, (source(tmp_path, "a", LARGE),), retries=0)
        assert sent["sha256"] is None
    found = {path.name: path.read_bytes() for path in inbox.iterdir()}
    assert found == {"a": b"old", f"a-{sha256(LARGE)[:16]}": LARGE}


@pytest_twisted.ensureDeferred
async def test_what_came_of_a_file_that_was_not_hashed_is_gone_on_with(bench, inbox):
    _, peer = await receiver(bench, inbox, security=Security.E2E)
    client = await bench.client()
    talk = await talk_to(bench, peer, client)
    await talk.channel.write(encode(offer("a", 10)) + encode(Start(0, False)) + data_prefix(10) + b"first")
    await talk.expect(Have)
    part = None
    while part is None or part.stat().st_size < 5:
        await deferLater(bench.reactor, 0)
        part = next(iter(inbox.glob(f"{FOLDER}/*.part")), None)
    talk.channel.abort()
    talk = await talk_to(bench, peer, client)
    await talk.say(offer("a", 10, 1))
    assert await talk.expect(Have) == Have(5, sha256(b"first"))
    await talk.channel.write(encode(Start(5, True)) + data_prefix(5) + b" last" + encode(Finish(sha256(b"first last"))))
    await talk.expect(Done)
    assert (inbox / "a").read_bytes() == b"first last"


@pytest_twisted.ensureDeferred
async def test_both_logs_call_the_end_of_a_transfer_normal(bench, inbox, tmp_path):
    logs = [tmp_path / "receiver", tmp_path / "sender"]
    receiving, peer = await receiver(bench, inbox, once=True, events=str(logs[0]))
    await bench.run(run_send, peer, (source(tmp_path, "x", b"hello"),), retries=0, events=str(logs[1]))
    await receiving.ended
    for log in logs:
        written = [json.loads(line) for path in log.rglob("*.jsonl.zst") for line in read_lines(path)]
        (closed,) = [one for one in written if one["event"] == "transport_closed"]
        assert (closed["reason"], closed["code"]) == ("normal", 0)


@pytest.mark.parametrize("bench", [None, "messaging"], indirect=True)
@pytest_twisted.ensureDeferred
async def test_a_file_that_is_there_is_kept_unless_it_may_be_overwritten(bench, inbox, tmp_path):
    file = source(tmp_path, "a.txt", b"new")
    (inbox / "a.txt").write_bytes(b"old")
    second = f"a-{sha256(b'new')[:16]}.txt"
    receiving, peer = await receiver(bench, inbox)
    for _ in range(2):  # the second time it is there under that name already
        (sent,) = await bench.run(run_send, peer, (file,), retries=3)
        assert sent["file"] == "a.txt"
        assert {path.name: path.read_bytes() for path in inbox.iterdir()} == {"a.txt": b"old", second: b"new"}
    told = await receiving.stdout.wait_for(event="received")
    assert (told["file"], told["path"]) == (second, str(inbox / second))
    (inbox / second).unlink()
    _, peer = await receiver(bench, inbox, overwrite=True)
    await bench.run(run_send, peer, (file,), retries=0)
    assert {path.name: path.read_bytes() for path in inbox.iterdir()} == {"a.txt": b"new"}


@pytest_twisted.ensureDeferred
async def test_a_second_name_that_a_stranger_has_taken_does_not_cost_the_file(bench, inbox, tmp_path):
    second = f"a-{sha256(b'new')[:16]}"
    (inbox / "a").write_bytes(b"old")
    (inbox / second).write_bytes(b"bad")
    receiving, peer = await receiver(bench, inbox)
    await bench.run(run_send, peer, (source(tmp_path, "a", b"new"),), retries=0)
    told = await receiving.stdout.wait_for(event="received")
    assert Path(told["path"]).read_bytes() == b"new" and told["file"] not in ("a", second)
    assert sorted(path.read_bytes() for path in inbox.iterdir()) == [b"bad", b"new", b"old"]


@pytest_twisted.ensureDeferred
async def test_a_directory_or_a_link_in_the_way_is_never_replaced(bench, inbox, tmp_path):
    (inbox / "directory").mkdir()
    (inbox / "link").symlink_to(tmp_path / "elsewhere")
    _, peer = await receiver(bench, inbox, overwrite=True)
    for name in ("directory", "link"):
        await bench.run(run_send, peer, (source(tmp_path, name, b"x"),), retries=0)
        assert (inbox / f"{name}-{sha256(b'x')[:16]}").read_bytes() == b"x"
    assert (inbox / "directory").is_dir() and (inbox / "link").is_symlink()
    assert not (tmp_path / "elsewhere").exists()


@pytest_twisted.ensureDeferred
async def test_a_file_that_is_too_big_is_refused_before_a_byte_of_it_comes(bench, inbox, tmp_path):
    receiving, peer = await receiver(bench, inbox, max_size=9, once=True)
    with pytest.raises(TransferFailed) as caught:
        await bench.run(run_send, peer, (source(tmp_path, "a", b"0123456789"),), retries=3)
    assert caught.value.code == "too_big" and exit_code(caught.value) is Exit.FAILED
    with pytest.raises(TransferFailed):
        await receiving.ended
    assert not list(inbox.iterdir())
    failed = receiving.stdout.objects()[-1]
    assert (failed["event"], failed["code"], failed["file"]) == ("failed", "too_big", "a")


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", ".bashrc", "a\0b", "x\x1b[2J", "y.part"])
@pytest_twisted.ensureDeferred
async def test_a_name_that_could_do_harm_is_refused(bench, inbox, name):
    receiving, peer = await receiver(bench, inbox)
    talk = await talk_to(bench, peer)
    await talk.say(offer(name, 4))
    with pytest.raises(TransferFailed) as caught:
        await talk.hear(5)
    assert caught.value.code == "bad_name"
    await talk.channel.wait_closed(5)
    assert not list(inbox.iterdir()) and not (inbox.parent / "evil").exists()
    assert "\x1b" not in receiving.stdout.getvalue()


@pytest_twisted.ensureDeferred
async def test_a_bad_name_is_refused_by_the_sender_already(bench, tmp_path):
    with pytest.raises(TransferFailed) as caught:
        await bench.run(run_send, bench.key("x")[0].public_key, (source(tmp_path, ".hidden", b""),), retries=0)
    assert caught.value.code == "bad_name"


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("/proc/cpuinfo", "its size is not known beforehand"),
        ("/dev/null", "it is no plain file"),
        ("/proc/self/mem", "Input/output error"),  # as a disk that is broken
    ],
)
@pytest_twisted.ensureDeferred
async def test_what_is_not_sent_as_it_is_read_is_refused_by_the_sender(bench, file, why):
    with pytest.raises(TransferFailed) as caught:
        await bench.run(run_send, bench.key("x")[0].public_key, (file,), retries=0)
    assert caught.value.code == "source" and f"({why})" in str(caught.value)
    assert str(caught.value).startswith(os.path.basename(file))


@pytest.mark.parametrize("size", [10, len(LARGE)])
@pytest_twisted.ensureDeferred
async def test_why_a_file_cannot_be_sent_is_told(bench, inbox, tmp_path, size):
    _, peer = await receiver(bench, inbox, max_size=GIBIBYTE)
    first, second = source(tmp_path, "first", LARGE), source(tmp_path, "second", bytes(size))
    sending = bench.start(run_send, peer, (first, second), retries=0)
    os.unlink(second)
    with pytest.raises(TransferFailed) as caught:
        await sending.ended
    assert str(caught.value).startswith("second: ") and "(No such file or directory)" in str(caught.value)
    assert [path.name for path in inbox.iterdir()] == ["first"]


@pytest_twisted.ensureDeferred
async def test_two_files_of_one_name_are_a_usage_error(bench, tmp_path):
    (tmp_path / "sub").mkdir()
    files = (source(tmp_path, "a", b"1"), source(tmp_path / "sub", "a", b"2"))
    with pytest.raises(CommandError) as caught:
        await bench.run(run_send, bench.key("x")[0].public_key, files, retries=0)
    assert caught.value.exit is Exit.USAGE


@pytest_twisted.ensureDeferred
async def test_a_wrong_hash_is_found_and_nothing_is_left(bench, inbox):
    receiving, peer = await receiver(bench, inbox, once=True)
    talk = await talk_to(bench, peer)
    await talk.say(offer("a", 4))
    assert await talk.expect(Have) == Have(0, sha256(b""))
    await talk.say(Start(0, True))
    await talk.channel.write(data_prefix(4) + b"data")
    await talk.say(Finish(sha256(b"atad")))
    with pytest.raises(TransferFailed) as caught:
        await talk.hear(5)
    assert caught.value.code == "mismatch"
    with pytest.raises(TransferFailed) as outcome:
        await receiving.ended
    assert exit_code(outcome.value) is Exit.UNVERIFIED
    assert not list(inbox.iterdir())


@pytest_twisted.ensureDeferred
async def test_a_sender_that_is_told_of_a_mismatch_fails_verification(bench, tmp_path):
    async def lie(talk):
        _, begun = await hear_offer(talk)
        await talk.say(Have(0, sha256(b"")))
        await talk.expect(Start)
        assert begun + await hear_all(talk, len(LARGE) - len(begun)) == LARGE
        await talk.expect(Finish)
        await talk.give_up(TransferFailed("mismatch"))

    peer = await fake_receiver(bench, lie)
    with pytest.raises(TransferFailed) as caught:
        await bench.run(run_send, peer, (source(tmp_path, "a", LARGE),), retries=0)
    assert exit_code(caught.value) is Exit.UNVERIFIED and "a: " in str(caught.value)


async def fake_receiver(bench, *scripts):
    """Plays one script for each transport that comes in."""
    from twisted.internet.defer import Deferred
    from twisted.internet.protocol import Factory

    left = list(scripts)
    client = await bench.client()

    def opened(channel):
        async def play():
            try:
                await left.pop(0)(Conversation(channel))
            finally:
                channel.abort()

        Deferred.fromCoroutine(play())

    factory = Factory.forProtocol(lambda: HalfOpenChannel(bench.reactor, opened))
    factory.noisy = False
    client.listen(factory)
    return client.public_key


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        encode(Start(0, True)),
        encode(Finish("ab" * 32)),
        encode(Done()),
        data_prefix(1) + b"x",
        encode_whole(Whole("a", 4, "ab" * 32), b"1234567"),
        encode(Whole("a", 4, "ab" * 32)) + encode(Done()),
        encode(Whole("a", WHOLE_LIMIT_BYTES + 1, "ab" * 32)),
        encode(offer("a", 4)) + encode(Finish("ab" * 32)),
        encode(offer("a", 4)) + encode(Start(2, True)),
        encode(offer("a", 4)) + encode(Start(0, True)) + data_prefix(5) + b"12345",
        encode(offer("a", 4)) + encode(Start(0, True)) + encode(Finish("ab" * 32)),
        encode(offer("a", 4)) + encode(Start(0, True)) + data_prefix(4) + b"1234" + data_prefix(1) + b"5",
    ],
)
@pytest_twisted.ensureDeferred
async def test_a_sender_that_does_not_keep_to_the_protocol_is_cut_off(bench, inbox, raw):
    receiving, peer = await receiver(bench, inbox)
    talk = await talk_to(bench, peer)
    await talk.channel.write(raw)
    with pytest.raises(TransferFailed) as caught:
        while True:
            assert isinstance(await talk.hear(5), Have)
    assert caught.value.code == "malformed"
    await talk.channel.wait_closed(5)
    await receiving.stdout.wait_for(event="failed", code="malformed")
    assert not (inbox / "a").exists()


@pytest.mark.parametrize(
    "answer", [encode(Done()), encode(Have(len(LARGE) + 1, sha256(b""))), encode(End()), data_prefix(1) + b"x", b"\xff"]
)
@pytest_twisted.ensureDeferred
async def test_a_receiver_that_does_not_keep_to_the_protocol_is_given_up(bench, tmp_path, answer):
    async def play(talk):
        await hear_offer(talk)
        await talk.channel.write(answer)
        with pytest.raises(TransferFailed):
            await talk.hear(5)

    peer = await fake_receiver(bench, play)
    with pytest.raises(MalformedTransfer):
        await bench.run(run_send, peer, (source(tmp_path, "a", LARGE),), retries=0)


@pytest_twisted.ensureDeferred
async def test_a_sender_begins_a_file_before_the_answer_and_ends_behind_the_last(bench, tmp_path):
    """Each costs a way there and back else."""

    async def wait(talk):
        for number in range(2):
            _, begun = await hear_offer(talk)
            assert begun == LARGE[:BEGUN_LIMIT_BYTES]
            await talk.say(Have(0, sha256(b"")))
            await talk.expect(Start)
            await hear_all(talk, len(LARGE) - len(begun))
            await talk.expect(Finish)
            if number:
                await talk.expect(End)
                if talk.is_compared:  # a sealed transport, which has halves
                    with pytest.raises(TransportBroken) as ended:
                        await talk.hear(5)
                    assert ended.value.clean
            await talk.say(Done())
        await talk.channel.close(5)

    peer = await fake_receiver(bench, wait)
    files = tuple(source(tmp_path, name, LARGE) for name in "ab")
    assert len(await bench.run(run_send, peer, files, retries=0)) == 2


@pytest_twisted.ensureDeferred
async def test_what_a_file_begins_with_is_dropped_where_more_is_there(bench, inbox):
    client = await bench.client()
    part = PartStore(inbox).open(str(client.public_key), "a")
    part.append(LARGE[:1000])
    part.close()
    _, peer = await receiver(bench, inbox)
    talk = await talk_to(bench, peer, client)
    await talk.offer(Offer("a", len(LARGE), "0" * 32, 10), b"0123456789")
    have = await talk.expect(Have)
    assert (have.offset, have.sha256) == (1000, sha256(LARGE[:1000]))
    await talk.say(Start(1000, True))
    await talk.channel.write(data_prefix(len(LARGE) - 1000) + LARGE[1000:])
    await talk.end(Finish(sha256(LARGE)), End())
    await talk.expect(Done)
    assert (inbox / "a").read_bytes() == LARGE


@pytest_twisted.ensureDeferred
async def test_what_is_of_another_file_is_sent_again_from_its_beginning(bench, inbox, tmp_path):
    key, key_file = bench.key("sender")
    part = PartStore(inbox).open(str(key.public_key), "a")
    part.append(b"x" * 1000)
    part.close()
    _, peer = await receiver(bench, inbox)
    data = os.urandom(3 * BEGUN_LIMIT_BYTES + 5)
    (sent,) = await bench.run(run_send, peer, (source(tmp_path, "a", data),), retries=0, key_file=key_file)
    assert sent["resumed_from"] == 0 and (inbox / "a").read_bytes() == data


@pytest_twisted.ensureDeferred
async def test_more_than_the_file_has_is_no_beginning(bench, inbox):
    _, peer = await receiver(bench, inbox)
    talk = await talk_to(bench, peer)
    await talk.offer(Offer("a", 5, "0" * 32, 6), b"012345")
    with pytest.raises(TransferFailed) as caught:
        await talk.hear(5)
    assert caught.value.code == "malformed"


@pytest_twisted.ensureDeferred
async def test_a_partial_file_is_gone_on_with(bench, inbox, tmp_path):
    data = os.urandom(2_000_000)
    key, key_file = bench.key("sender")
    part = PartStore(inbox).open(str(key.public_key), "a")
    part.append(data[:1_234_567])
    part.close()
    receiving, peer = await receiver(bench, inbox)
    sent = await bench.run(run_send, peer, (source(tmp_path, "a", data),), retries=0, key_file=key_file)
    assert sent[0]["resumed_from"] == 1_234_567 and sent[0]["sent_bytes"] == len(data) - 1_234_567 + BEGUN_LIMIT_BYTES
    assert (await receiving.stdout.wait_for(event="received"))["resumed_from"] == 1_234_567
    assert (inbox / "a").read_bytes() == data
    assert [path.name for path in inbox.iterdir()] == ["a"]


@pytest.mark.parametrize("there", [b"not what was sent", b"x" * 900_000])
@pytest_twisted.ensureDeferred
async def test_a_partial_file_of_something_else_is_not_used(bench, inbox, tmp_path, there):
    data = os.urandom(600_000)
    key, key_file = bench.key("sender")
    part = PartStore(inbox).open(str(key.public_key), "a")
    part.append(there)
    part.close()
    _, peer = await receiver(bench, inbox)
    sent = await bench.run(run_send, peer, (source(tmp_path, "a", data),), retries=0, key_file=key_file)
    assert sent[0]["resumed_from"] == 0
    assert (inbox / "a").read_bytes() == data


@pytest.mark.parametrize("overwrite", [False, True])
@pytest_twisted.ensureDeferred
async def test_a_file_whose_receiver_was_killed_when_it_had_its_name_is_not_written_to_again(
    bench, inbox, tmp_path, overwrite
):
    key, key_file = bench.key("sender")
    part = PartStore(inbox).open(str(key.public_key), "a")
    part.append(b"x" * len(LARGE))
    part.close()
    os.link(next((inbox / FOLDER).iterdir()), inbox / "a")  # the step after this one removes the other name
    kept = (inbox / "a").open("rb")
    _, peer = await receiver(bench, inbox, overwrite=overwrite)
    (sent,) = await bench.run(run_send, peer, (source(tmp_path, "a", LARGE),), retries=0, key_file=key_file)
    with kept:
        assert sent["resumed_from"] == 0 and kept.read() == b"x" * len(LARGE)
    found = {path.read_bytes() for path in inbox.iterdir()}
    assert found == ({LARGE} if overwrite else {b"x" * len(LARGE), LARGE})


@pytest.mark.parametrize("size", [10, len(LARGE)])
@pytest_twisted.ensureDeferred
async def test_only_the_receiver_is_told_why_it_cannot_write(bench, inbox, tmp_path, size):
    receiving, peer = await receiver(bench, inbox, once=True)
    inbox.rmdir()
    with pytest.raises(TransferFailed) as caught:
        await bench.run(run_send, peer, (source(tmp_path, "a", bytes(size)),), retries=0)
    assert str(caught.value) == "a: the receiver could not write the file"
    with pytest.raises(TransferFailed) as outcome:
        await receiving.ended
    assert str(outcome.value) == "a: the receiver could not write the file (No such file or directory)"


@pytest_twisted.ensureDeferred
async def test_what_another_sender_left_is_neither_used_nor_told(bench, inbox, tmp_path):
    data = os.urandom(600_000)
    other, _ = bench.key("other")
    part = PartStore(inbox).open(str(other.public_key), "a")
    part.append(data[:1000])
    part.close()
    _, peer = await receiver(bench, inbox)
    sent = await bench.run(run_send, peer, (source(tmp_path, "a", data),), retries=0)
    assert sent[0]["resumed_from"] == 0
    assert len(list((inbox / FOLDER).iterdir())) == 1


@pytest_twisted.ensureDeferred
async def test_a_partial_file_in_use_by_another_program_is_busy(bench, inbox, tmp_path):
    key, key_file = bench.key("sender")
    part = PartStore(inbox).open(str(key.public_key), "a")
    try:
        _, peer = await receiver(bench, inbox)
        with pytest.raises(TransferFailed) as caught:
            await bench.run(run_send, peer, (source(tmp_path, "a", LARGE),), retries=0, key_file=key_file)
        assert caught.value.code == "busy"
    finally:
        part.close()


@pytest_twisted.ensureDeferred
async def test_a_link_in_place_of_the_partial_file_is_not_followed(bench, inbox, tmp_path):
    key, key_file = bench.key("sender")
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (inbox / FOLDER).mkdir(mode=0o700)
    PartStore(inbox).path(str(key.public_key), "a").symlink_to(victim)
    _, peer = await receiver(bench, inbox)
    with pytest.raises(TransferFailed) as caught:
        await bench.run(run_send, peer, (source(tmp_path, "a", LARGE),), retries=0, key_file=key_file)
    assert caught.value.code == "storage"
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("bench", "security"),
    [(None, Security.HOP), (None, Security.E2E), ("messaging", None)],
    indirect=["bench"],
)
@pytest_twisted.ensureDeferred
async def test_a_transfer_goes_on_when_the_connection_to_the_relay_breaks(bench, inbox, tmp_path, security):
    data = os.urandom(16 * 1024 * 1024)
    file = source(tmp_path, "a", data)
    receiving, peer = await receiver(bench, inbox, once=True, security=security)
    sending = bench.start(run_send, peer, (file,), retries=8, security=security)
    switch = bench.relays[0].switch
    part = next(iter(inbox.glob(f"{FOLDER}/*.part")), None)
    while part is None or part.stat().st_size < 2 * 1024 * 1024:
        await deferLater(bench.reactor, 0)
        part = next(iter(inbox.glob(f"{FOLDER}/*.part")), None)
    sender = next(member for member in switch.members.values() if member.remote != peer)
    sender.owner.transport.abortConnection()
    await sending.ended
    await receiving.ended
    (sent,) = sending.stdout.objects()
    if security is not Security.E2E:
        assert sent["transports"] == 2 and 2 * 1024 * 1024 <= sent["resumed_from"] < len(data)
    else:
        assert sent["transports"] == 1 and sent["resumed_from"] == 0
    assert (inbox / "a").read_bytes() == data


@pytest.mark.parametrize("bench", [None, "messaging"], indirect=True)
@pytest_twisted.ensureDeferred
async def test_an_acknowledgement_that_was_lost_is_asked_for_again(bench, inbox, tmp_path):
    data, heard = LARGE, []

    async def take_and_vanish(talk):
        offered, begun = await hear_offer(talk)
        heard.append(replace(offered, begun=0))
        await talk.say(Have(0, sha256(b"")))
        await talk.expect(Start)
        assert begun + await hear_all(talk, len(data) - len(begun)) == data
        await talk.expect(Finish)

    async def know_it(talk):
        assert [await talk.expect(Offer)] == heard
        await talk.say(Done())
        await talk.expect(End)
        await talk.channel.wait_closed(5)

    peer = await fake_receiver(bench, take_and_vanish, know_it)
    (sent,) = await bench.run(run_send, peer, (source(tmp_path, "a", data),), retries=1, sha256=True)
    assert sent["sha256"] == sha256(data) and sent["transports"] == 2


@pytest.mark.parametrize("bench", ["messaging"], indirect=True)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest_twisted.ensureDeferred
async def test_a_file_larger_than_what_a_channel_may_hold_unread_arrives_in_each_dialect(
    bench, inbox, tmp_path, dialect
):
    """Without acknowledgements a slow receiver may lose the channel; the sender dials again."""
    data = os.urandom(8 * 1024 * 1024)
    config = MessagingConfig(dialect_name=dialect)
    receiving, peer = await receiver(bench, inbox, once=True, config=config)
    await bench.run(run_send, peer, (source(tmp_path, "a", data),), retries=8, config=config)
    await receiving.ended
    assert (inbox / "a").read_bytes() == data


@pytest_twisted.ensureDeferred
async def test_a_receiver_confirms_a_file_to_the_sender_it_has_it_from_and_to_no_other(bench, inbox):
    _, peer = await receiver(bench, inbox)
    talk = await talk_to(bench, peer)
    await upload(talk, "a", b"data")
    await talk.expect(Done)
    await talk.say(offer("a", 4))
    await talk.expect(Done)
    await talk.say(offer("a", 4, 1))
    await talk.expect(Have)
    stranger = await talk_to(bench, peer)
    await stranger.say(offer("a", 4))
    assert await stranger.expect(Have) == Have(0, sha256(b""))


@pytest_twisted.ensureDeferred
async def test_dialling_again_has_an_end(bench, tmp_path):
    tries = []

    async def vanish(talk):
        tries.append(await talk.expect(Offer))

    peer = await fake_receiver(bench, vanish, vanish, vanish)
    with pytest.raises(TransportBroken):
        await bench.run(run_send, peer, (source(tmp_path, "a", LARGE),), retries=1)
    assert len(tries) == 2


@pytest_twisted.ensureDeferred
async def test_a_file_that_became_shorter_fails_on_both_sides(bench, inbox, tmp_path):
    file = source(tmp_path, "a", LARGE)

    async def shorten(talk):
        _, begun = await hear_offer(talk)
        os.truncate(file, 50)
        await talk.say(Have(0, sha256(b"")))
        await talk.expect(Start)
        assert begun == LARGE[:BEGUN_LIMIT_BYTES]
        with pytest.raises(TransferFailed) as told:
            await talk.hear(5)
        assert told.value.code == "source"

    peer = await fake_receiver(bench, shorten)
    with pytest.raises(TransferFailed) as caught:
        await bench.run(run_send, peer, (file,), retries=3)
    assert caught.value.code == "source"


@pytest_twisted.ensureDeferred
async def test_only_allowed_senders_get_in(bench, inbox, tmp_path):
    friend, friend_file = bench.key("friend")
    _, peer = await receiver(bench, inbox, allow=(friend.public_key,))
    file = source(tmp_path, "a", b"x")
    with pytest.raises(DialError) as caught:
        await bench.run(run_send, peer, (file,), retries=3)
    assert exit_code(caught.value) is Exit.UNREACHABLE and caught.value.reason == "access_denied"
    assert not list(inbox.iterdir())
    await bench.run(run_send, peer, (file,), retries=0, key_file=friend_file)
    assert (inbox / "a").read_bytes() == b"x"


@pytest_twisted.ensureDeferred
async def test_an_interrupted_receiver_keeps_what_it_has(bench, inbox):
    receiving, peer = await receiver(bench, inbox)
    talk = await talk_to(bench, peer)
    data = os.urandom(BLOCK_BYTES)
    await talk.say(offer("a", BLOCK_BYTES + 10))
    await talk.expect(Have)
    await talk.say(Start(0, True))
    await talk.channel.write(data_prefix(len(data)) + data)
    (part,) = (inbox / FOLDER).iterdir()
    while part.stat().st_size < len(data):
        await deferLater(bench.reactor, 0)
    await talk.channel.write(data_prefix(4) + b"more")
    await receiving.stop()
    with pytest.raises(TransportBroken):
        await talk.hear(5)
    assert part.read_bytes().removesuffix(b"more") == data


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1000", 1000), ("1k", 1024), ("1KB", 1000), ("64MiB", 64 * 1024**2), ("2 G", 2 * 1024**3), ("5B", 5)],
)
def test_sizes_are_read(text, size):
    assert ValueType(SIZE).convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5M", "1XB", "9" * 20])
def test_other_sizes_are_usage_errors(text):
    import click

    with pytest.raises(click.UsageError):
        ValueType(SIZE).convert(text, None, None)


@pytest.mark.parametrize("option", ["--quota", "--max-size"])
def test_a_receiver_that_could_take_nothing_is_a_usage_error(tmp_path, option):
    result = CliRunner().invoke(receive, [str(tmp_path), option, "0"])
    assert result.exit_code == Exit.USAGE
    assert f"Invalid value for '{option}': must be at least 1, not '0'" in result.output
