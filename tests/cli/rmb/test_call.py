"""``dmsg rmb call`` and ``dmsg rmb serve``, over a relay and through the Redis of a peer."""

from __future__ import annotations

import base64
import json
import os
import sqlite3
import sys
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from click.testing import CliRunner
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from dmsg.address import RedisAddress
from dmsg.cli.commands import group
from dmsg.cli.exits import CommandError, Exit
from dmsg.cli.rmb import serve
from dmsg.cli.rmb.call import read_payload, run_call
from dmsg.cli.rmb.serve import run_serve
from dmsg.glue.errors import RedisAway
from dmsg.glue.redis import Taker
from dmsg.rmb.client import introduction
from dmsg.rmb.client.relays import Relays
from dmsg.rmb.core.limits import MAX_ENVELOPE_BYTES
from dmsg.rmb.peer.commands import REPLY
from dmsg.rmb.peer.redis import RedisLists
from dmsg.rmb.twins.errors import RegistryError
from dmsg.rmb.twins.table import SqliteRegistry
from dmsg.sansio.backoff import Backoff
from dmsg.testing.process import free_port

from ...rmb.peer.conftest import RedisProcess

PROGRAM = f"{sys.executable} -c"


async def refused(work: Any) -> CommandError:
    """What a command fails with."""
    with pytest.raises(CommandError) as caught:
        await work
    return caught.value


@pytest_twisted.ensureDeferred
async def test_a_program_answers_a_call_over_a_relay(bus: Any) -> None:
    caller, server = bus.twin(1), bus.twin(2)
    serving = bus.start(run_serve, "shout", "tr a-z A-Z", key_file=server)
    assert await serving.out.wait_for(event="ready") == {"event": "ready", "twin": 2, "command": "shout"}
    answer = await bus.run(run_call, 2, "shout", b"anyone there?", key_file=caller)
    assert answer == {"twin": 2, "command": "shout", "source": "2", "schema": None, "data": "ANYONE THERE?"}
    answered = await serving.out.wait_for(event="answered")
    assert answered["source"].startswith("1:call-") and answered["error"] is None
    unicode = "ÄÖ ✓".encode()
    assert (await bus.run(run_call, 2, "shout", unicode, key_file=caller))["data"] == "ÄÖ ✓"
    binary = await bus.run(run_call, 2, "shout", b"\xff\0", key_file=caller)
    assert "data" not in binary and base64.b64decode(binary["data_base64"]) == b"\xff\0"


@pytest_twisted.ensureDeferred
async def test_who_waits_for_a_relay_is_told_why_there_is_none(bus: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(serve, "PATIENCE_S", 0.1)
    server, bus.url = bus.twin(1), f"ws://127.0.0.1:{free_port()}"
    serving = bus.start(run_serve, "shout", "cat", key_file=server, json_lines=False)
    await serving.errors.saw("refused")
    assert f"not connected to {bus.url} yet: " in serving.errors.getvalue()
    assert serving.out.getvalue() == ""


@pytest_twisted.ensureDeferred
async def test_a_program_that_waits_for_a_relay_is_told_why_there_is_none(bus: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(serve, "PATIENCE_S", 0.1)
    server, bus.url = bus.twin(1), f"ws://127.0.0.1:{free_port()}"
    serving = bus.start(run_serve, "shout", "cat", key_file=server)
    failed = await serving.out.wait_for(event="failed", relay=bus.url)
    assert failed["message"].startswith(f"not connected to {bus.url} yet: ")
    assert "exit_code" not in failed and serving.errors.getvalue() == ""
    await deferLater(bus.reactor, 0)  # the command is not interrupted in the middle of its line


@pytest_twisted.ensureDeferred
async def test_a_program_that_waits_for_the_registry_is_told_so_once_and_not_of_relays(
    bus: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(serve, "PATIENCE_S", 0.01)
    monkeypatch.setattr(introduction, "_PAUSES", Backoff(0.1, 0.1))
    real, answers, is_asked = SqliteRegistry.find, Deferred[None](), 0

    async def find(registry: SqliteRegistry, account: bytes) -> int | None:
        nonlocal is_asked
        is_asked += 1
        if is_asked == 1:
            await answers
        if is_asked < 4:
            raise RegistryError("unavailable", "the disk is away")
        return await real(registry, account)

    monkeypatch.setattr(SqliteRegistry, "find", find)
    serving = bus.start(run_serve, "shout", "cat", key_file=bus.twin(1))
    no_answer = await serving.out.wait_for(event="failed")
    assert no_answer["message"] == "the registry of twins: no answer yet"
    answers.callback(None)
    await serving.out.wait_for(event="ready")
    told = [one["message"] for one in serving.out.objects() if one["event"] == "failed"]
    assert told[:2] == [no_answer["message"], "the registry of twins: unavailable (the disk is away)"]
    assert len(told) == len(set(told))
    await deferLater(bus.reactor, 0)  # the command is not interrupted in the middle of its line


@pytest_twisted.ensureDeferred
async def test_a_program_whose_session_another_one_takes_is_told_so_once(bus: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(serve, "PATIENCE_S", 0.1)
    asked, real, looked_thrice = [], Relays.problems, Deferred[None]()

    def problems(relays: Relays) -> dict[str, str]:
        asked.append(relays)
        if len(asked) == 3:
            bus.reactor.callLater(0, looked_thrice.callback, None)
        return real(relays)

    monkeypatch.setattr(Relays, "problems", problems)
    server = bus.twin(1)
    first = bus.start(run_serve, "shout", "cat", key_file=server)
    await first.out.wait_for(event="ready")
    second = bus.start(run_serve, "shout", "cat", key_file=server)
    failed = await first.out.wait_for(event="failed", relay=bus.url)
    assert failed["message"].startswith(f"not connected to {bus.url} any more: closed by the relay with code ")
    await looked_thrice
    assert first.out.getvalue().count('"failed"') == 1
    assert "failed" not in second.out.getvalue()


@pytest_twisted.ensureDeferred
async def test_a_program_whose_relay_comes_back_is_told_so(bus: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(serve, "PATIENCE_S", 0.1)
    serving = bus.start(run_serve, "shout", "cat", key_file=bus.twin(1), json_lines=False)
    await serving.errors.saw("shout is served by twin 1\n")
    await bus.relay.stopService()
    await serving.errors.saw(" any more: ")
    serving.errors.seek(0)
    serving.errors.truncate()
    bus.relay.startService()
    await serving.errors.saw("shout is served by twin 1\n")


@pytest_twisted.ensureDeferred
async def test_a_twin_may_call_itself(bus: Any) -> None:
    only = bus.twin(1)
    serving = bus.start(run_serve, "cat", "cat", key_file=only)
    await serving.out.wait_for(event="ready")
    assert (await bus.run(run_call, 1, "cat", b"me", key_file=only))["data"] == "me"


@pytest_twisted.ensureDeferred
async def test_a_program_knows_who_asks_for_what(bus: Any) -> None:
    caller, server = bus.twin(1), bus.twin(2)
    source = "import os, sys; [sys.stdout.write(os.environ['RMB_' + n] + ' ') for n in ('SOURCE', 'COMMAND', 'SCHEMA', 'UID')]"
    serving = bus.start(run_serve, "who", f'{PROGRAM} "{source}"', key_file=server)
    await serving.out.wait_for(event="ready")
    answer = await bus.run(run_call, 2, "who", b"", key_file=caller, schema="text/plain")
    who, command, schema, uid = answer["data"].split()
    assert who.startswith("1:call-") and (command, schema) == ("who", "text/plain")
    assert str(uuid.UUID(uid)) == uid


@pytest_twisted.ensureDeferred
async def test_what_a_program_fails_with_is_told_to_the_caller(bus: Any) -> None:
    caller, server = bus.twin(1), bus.twin(2)
    script = f'{PROGRAM} "import sys; sys.exit(sys.stdin.read())"'
    serving = bus.start(run_serve, "fail", script, key_file=server)
    await serving.out.wait_for(event="ready")
    error = await refused(bus.run(run_call, 2, "fail", b"no such number", key_file=caller))
    assert (error.exit, error.data["code"]) == (Exit.FAILED, 255)
    assert error.data["text"] == "the program ended with 1: no such number"
    error = await refused(bus.run(run_call, 2, "other", b"", key_file=caller))
    assert (error.exit, error.data["code"]) == (Exit.FAILED, 108)
    answered = await serving.out.wait_for(event="answered")
    assert answered["error"] == "the program ended with 1: no such number"


@pytest_twisted.ensureDeferred
async def test_programs_run_beside_each_other_but_not_too_many(bus: Any, tmp_path: Path) -> None:
    caller, server = bus.twin(1), bus.twin(2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # the first waits for the second, which is another program at the same time
    script = f"sh -c 'read word; if [ $word = wait ]; then cat {pipe}; else echo -n met > {pipe}; echo -n sent; fi'"
    serving = bus.start(run_serve, "meet", script, key_file=server, concurrency=4)
    await serving.out.wait_for(event="ready")
    first = bus.start(run_call, 2, "meet", b"wait", key_file=caller)
    assert (await bus.run(run_call, 2, "meet", b"go", key_file=caller))["data"] == "sent"
    await first.ended
    assert first.out.objects()[0]["data"] == "met"


@pytest.mark.parametrize("altered", [1, 2])
@pytest_twisted.ensureDeferred
async def test_a_call_of_or_by_a_twin_whose_row_was_altered_is_not_verified(bus: Any, altered: int) -> None:
    caller = bus.twin(1)
    bus.twin(2)
    with closing(sqlite3.connect(bus.registry_file, isolation_level=None)) as table:
        table.execute("UPDATE twins SET relays = 'evil.example' WHERE id = ?", (altered,))
    error = await refused(bus.run(run_call, 2, "x", b"", key_file=caller, timeout_s=0.5))
    assert error.exit == Exit.UNVERIFIED and "altered" in str(error)


@pytest_twisted.ensureDeferred
async def test_a_call_of_what_is_not_there(bus: Any) -> None:
    caller = bus.twin(1)
    bus.twin(2)
    assert (await refused(bus.run(run_call, 9, "x", b"", key_file=caller))).exit == Exit.NOT_FOUND
    offline = await refused(bus.run(run_call, 2, "x", b"", key_file=caller, fail_fast=True))
    assert (offline.exit, offline.data["code"]) == (Exit.UNREACHABLE, 125)
    late = await refused(bus.run(run_call, 2, "x", b"", key_file=caller, timeout_s=0.5))
    assert late.exit == Exit.UNREACHABLE
    await bus.relay.stopService()
    lost = await refused(bus.run(run_call, 2, "x", b"", key_file=caller, timeout_s=0.5))
    assert lost.exit == Exit.UNREACHABLE


@pytest_twisted.ensureDeferred
async def test_a_program_answers_a_call_through_redis(bus: Any, redis_url: str) -> None:
    mine = f"{redis_url}/1", f"{redis_url}/2"
    for number, url in enumerate(mine, 1):
        await bus.peer(bus.twin(number), url)
    serving = bus.start(run_serve, "shout", "tr a-z A-Z", redis=mine[1])
    assert await serving.out.wait_for(event="ready") == {"event": "ready", "twin": None, "command": "shout"}
    answer = await bus.run(run_call, 2, "shout", b"anyone there?", redis=mine[0])
    assert answer == {"twin": 2, "command": "shout", "source": "2", "schema": None, "data": "ANYONE THERE?"}
    error = await refused(bus.run(run_call, 9, "shout", b"", redis=mine[0]))
    assert (error.exit, error.data["code"]) == (Exit.NOT_FOUND, 103)


@pytest_twisted.ensureDeferred
async def test_a_failure_comes_through_redis_and_rubbish_is_passed_over(bus: Any, redis_url: str, reactor: Any) -> None:
    mine = f"{redis_url}/1", f"{redis_url}/2"
    for number, url in enumerate(mine, 1):
        await bus.peer(bus.twin(number), url)
    lists = RedisLists(RedisAddress.parse(mine[1]), reactor)
    expired = {"ver": 1, "ref": "x", "src": "1", "cmd": "fail", "exp": 1, "dat": "", "ret": "x", "now": 1}
    for rubbish in (b"", b"{}", json.dumps(expired).encode()):
        await lists.push("msgbus.fail", rubbish)
    await lists.close()
    serving = bus.start(run_serve, "fail", "false", redis=mine[1], concurrency=1)
    await serving.out.wait_for(event="ready")
    error = await refused(bus.run(run_call, 2, "fail", b"", redis=mine[0]))
    assert (error.exit, error.data["code"], error.data["text"]) == (Exit.FAILED, 255, "the program ended with 1")
    assert (await serving.out.wait_for(event="answered"))["source"] == "1"


@pytest_twisted.ensureDeferred
async def test_who_serves_outlives_a_redis_and_gives_back_what_it_does_not_answer(
    bus: Any, tmp_path: Path, reactor: Any
) -> None:
    redis = RedisProcess(tmp_path)
    redis.start()
    lists, taker = (kind(redis.address, *more, reactor) for kind, more in ((RedisLists, ()), (Taker, (REPLY,))))
    request = {
        "ver": 1,
        "ref": "x",
        "src": "1",
        "cmd": "up",
        "exp": 60,
        "dat": "YQ==",
        "ret": "x",
        "now": int(time.time()),
    }
    try:
        serving = bus.start(run_serve, "up", "tr a-z A-Z", redis=str(redis.address))
        await serving.out.wait_for(event="ready")
        redis.kill()
        redis.start()
        await lists.push("msgbus.up", json.dumps(request).encode(), 20.0)
        answer = json.loads(await taker.take(20) or b"{}")
        assert (answer["ref"], answer["dst"], answer["dat"], answer["err"]) == ("x", "1", "QQ==", None)
        stopping = Deferred.fromCoroutine(serving.stop())
        await lists.push("msgbus.up", json.dumps(request).encode())
        await stopping
        assert await lists.redis.call("LLEN", "msgbus.up") == 1
    finally:
        redis.kill()
        await lists.close()
        await taker.close()


@pytest_twisted.ensureDeferred
async def test_who_asks_over_redis_is_told_that_the_program_was_stopped(
    bus: Any, redis_url: str, tmp_path: Path, reactor: Any
) -> None:
    address = RedisAddress.parse(redis_url)
    lists, taker = RedisLists(address, reactor), Taker(address, REPLY, reactor)
    begun = tmp_path / "begun"
    serving = bus.start(run_serve, "wait", f"sh -c 'touch {begun}; exec sleep 1000'", redis=redis_url)
    await serving.out.wait_for(event="ready")
    request = {
        "ver": 1,
        "ref": "x",
        "src": "1",
        "cmd": "wait",
        "exp": 60,
        "dat": "",
        "ret": "x",
        "now": int(time.time()),
    }
    await lists.push("msgbus.wait", json.dumps(request).encode())
    while not begun.exists():
        await deferLater(reactor, 0.01)
    await serving.stop()
    answer = json.loads(await taker.take(1) or b"{}")
    assert (answer["ref"], answer["dst"]) == ("x", "1")
    assert answer["err"] == {"code": 255, "message": "the program was stopped"}
    assert (await serving.out.wait_for(event="answered"))["error"] == "the program was stopped"
    await lists.close()
    await taker.close()


@pytest.mark.parametrize("json_lines", [False, True])
@pytest_twisted.ensureDeferred
async def test_who_serves_says_once_that_its_redis_takes_nothing(
    bus: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch, json_lines: bool
) -> None:
    """As one that cannot write to its disk, which may take days."""
    tried: Deferred[None] = Deferred()

    class Stuck:
        def __init__(self, address: RedisAddress, *_: object) -> None:
            self.address = address
            self.trials = 0

        async def take(self) -> bytes | None:
            self.trials += 1
            if self.trials < 50:
                raise RedisAway(self.address, "MISCONF it cannot persist on disk", maybe_done=False)
            if not tried.called:
                tried.callback(None)
            return await Deferred()

        async def close(self) -> None:
            pass

    monkeypatch.setattr(serve, "Taker", Stuck)
    monkeypatch.setattr(serve, "RETRY_S", 0.0)
    serving = bus.start(run_serve, "up", "cat", redis=redis_url, json_lines=json_lines)
    await tried
    await serving.stop()
    if json_lines:
        [failed] = [line for line in serving.out.objects() if line["event"] == "failed"]
        assert failed["error"] == "RedisAway" and "MISCONF" in failed["message"]
    else:
        assert serving.errors.getvalue().count("MISCONF") == 1


@pytest_twisted.ensureDeferred
async def test_a_command_whose_key_is_no_list_ends(bus: Any, redis_url: str, reactor: Any) -> None:
    lists = RedisLists(RedisAddress.parse(redis_url), reactor)
    await lists.redis.call("SETEX", "msgbus.up", 60, b"x")
    await lists.close()
    command = bus.start(run_serve, "up", "cat", redis=redis_url)
    assert "WRONGTYPE" in str(await refused(command.ended))


@pytest_twisted.ensureDeferred
async def test_without_a_peer_or_a_redis_a_call_fails(bus: Any, redis_url: str) -> None:
    error = await refused(bus.run(run_call, 2, "x", b"", redis=redis_url, timeout_s=0.5))
    assert error.exit == Exit.UNREACHABLE and "rmb-peer" in str(error)
    port = free_port()
    nothing = f"redis://me:secret@127.0.0.1:{port}/3"
    error = await refused(bus.run(run_call, 2, "x", b"", redis=nothing, timeout_s=0.5))
    assert error.exit == Exit.UNREACHABLE
    assert str(error) == f"redis://127.0.0.1:{port}/3 failed: connection refused"


@pytest.mark.parametrize("command", ["system.local", "backlog.x", "a\nb"])
@pytest_twisted.ensureDeferred
async def test_a_command_that_no_peer_hands_out_cannot_be_served(bus: Any, redis_url: str, command: str) -> None:
    assert (await refused(bus.run(run_serve, command, "cat", redis=redis_url))).exit == Exit.USAGE


@pytest.mark.parametrize("program", ["", "'", "/nowhere/at/all", "no-such-program-here x"])
@pytest_twisted.ensureDeferred
async def test_a_program_that_is_not_there_is_told_at_once(bus: Any, program: str) -> None:
    assert (await refused(bus.run(run_serve, "x", program, key_file=bus.twin(1)))).exit == Exit.USAGE


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "key: must be given (--key), or --redis"),
        (("--key", "k"), "registry: must be given"),
        (("--key", "k", "--registry", "r"), "relay: must be given"),
        (
            ("--key", "k", "--registry", "r", *(f"--relay=ws://h{one}" for one in range(5))),
            "relay: 1 to 4 relays, not 5",
        ),
        *(
            (("--key", "k", "--registry", "r", "--relay", url), "relay: must be ws://")
            for url in ("h", "https://h:443", "http://h:80")
        ),
        (("--redis", "redis://h", "--relay", "ws://h"), "relay: belongs to the peer"),
        (("--redis", "http://h"), "redis: a Redis URL is"),
    ],
)
def test_a_command_line_says_where_the_bus_is_once(arguments: Any, problem: str) -> None:
    result = CliRunner().invoke(group, ["rmb", "call", "2", "x", *arguments])
    assert result.exit_code == Exit.USAGE
    assert problem in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("call", "2", "\udcff"),
        ("call", "2", "x", "--schema", "\udcff"),
        ("call", "2", "x", "--session", "\udcff"),
        ("serve", "\udcff", "--exec", "cat"),
    ],
)
def test_what_other_twins_are_sent_is_unicode(words: tuple[str, ...]) -> None:
    """A service under another name would wait in vain."""
    result = CliRunner().invoke(group, ["rmb", *words, "--redis", "http://h"])
    assert result.exit_code == Exit.USAGE and "must be Unicode text, not '\\udcff'" in result.stderr


def test_a_payload_is_a_text_a_file_or_standard_input(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "payload").write_bytes(b"\0\xff")
    assert read_payload(f"@{tmp_path / 'payload'}") == b"\0\xff"
    assert read_payload("text ✓") == "text ✓".encode()
    assert read_payload("") == b""
    with (tmp_path / "payload").open("rb") as file:
        monkeypatch.setattr(sys, "stdin", type("Input", (), {"buffer": file}))
        assert read_payload("-") == b"\0\xff"
    result = CliRunner().invoke(group, ["rmb", "call", "2", "x", "--data", "@/nowhere", "--redis", "redis://h"])
    assert result.exit_code == Exit.FAILED and "No such file" in result.stderr


def test_a_payload_of_which_more_than_a_message_takes_is_not_read_has_no_length(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(3 * MAX_ENVELOPE_BYTES))
    words = ("rmb", "call", "2", "x", "--redis", "redis://h", "--data")
    for data, given, name in (
        (f"@{tmp_path / 'big'}", b"", str(tmp_path / "big")),
        ("-", bytes(2**21), "standard input"),
    ):
        result = CliRunner().invoke(group, [*words, data], input=given)
        assert result.exit_code == Exit.FAILED
        assert f"{name} is longer than 1 MiB" in result.stderr
    result = CliRunner().invoke(group, [*words, "-", "--json"], input=bytes(2**21))
    assert json.loads(result.stdout or result.stderr)["reason"] == "EnvelopeTooLarge"
