"""Peers, a relay and Redis as processes: what programs push to Redis is answered, once and in time."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import sqlite3
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from dmsg.address import RedisAddress
from dmsg.glue.errors import RedisAway
from dmsg.glue.redis import Taker
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.peer.commands import BACKLOG, LOCAL, REPLY
from dmsg.rmb.peer.redis import RedisLists
from dmsg.rmb.twins.table import TwinTable
from dmsg.testing.process import Process, free_port

from ..rmb.peer.conftest import RedisProcess

pytestmark = pytest.mark.system
LIVE = json.loads((Path(__file__).parents[1] / "vectors" / "rmb-live.json").read_text("utf-8"))


class Programs:
    """What speaks Redis, as any program does: pushes, and takes."""

    def __init__(self, reactor: Any, address: RedisAddress) -> None:
        self._reactor = reactor
        self._address = address
        self.lists = RedisLists(address, reactor)
        self._takers: dict[str, Taker] = {}
        self._serving: Deferred[None] | None = None
        self._ended = False

    async def push(self, key: str, message: dict[str, Any]) -> None:
        """Push it, however long that takes."""
        while True:
            with contextlib.suppress(RedisAway):
                await self.lists.push(key, json.dumps(message).encode(), wait_s=20.0)
                return

    async def take(self, key: str, wait_s: int = 30) -> Any:
        if key not in self._takers:
            self._takers[key] = Taker(self._address, key, self._reactor)
        while True:
            with contextlib.suppress(RedisAway):
                found = await self._takers[key].take(wait_s)
                return None if found is None else json.loads(found)

    def serve(self, command: str, seen: list[str] | None = None) -> None:
        """Answer each request with its payload backwards."""

        async def work() -> None:
            while not self._ended:
                request = await self.take(f"msgbus.{command}", 1)
                if request is not None:
                    if seen is not None:
                        seen.append(base64.b64decode(request["dat"]).decode())
                    data = base64.b64encode(base64.b64decode(request["dat"])[::-1]).decode()
                    answer = {"ref": request["ref"], "dst": request["src"], "dat": data}
                    await self.push(REPLY, {"ver": 1, **answer, "shm": None, "now": int(time.time()), "err": None})

        self._serving = Deferred.fromCoroutine(work())

    async def close(self) -> None:
        self._ended = True
        if self._serving is not None:
            await self._serving
        for one in (self.lists, *self._takers.values()):
            await one.close()


class World:
    """A relay and a registry with the recorded twins 1 (as it was) and 2, and peers for them."""

    def __init__(self, reactor: Any, directory: Path, plugin_path: Path) -> None:
        self._reactor = reactor
        self._directory = directory
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DMSG_")}
        self._environ = {**clean, "PYTHONPATH": str(plugin_path), "PYTHONUNBUFFERED": "1"}
        self._port = free_port()
        table = TwinTable(str(directory / "registry"))
        for number in (1, 2):
            secret = next(bytes.fromhex(one["seed"][2:]) for one in LIVE["twins"] if one["id"] == number)
            key = TwinKey(secret, KeyType.ED25519)
            assert table.create(key, ["localhost"], EncryptionKey(secret).public_key) == number
            (directory / f"secret{number}").write_text(f"0x{secret.hex()}\n")
            (directory / f"secret{number}").chmod(0o600)
        table.close()

    def process(self, *arguments: str) -> Process:
        line = [sys.executable, "-m", "twisted", "--log-format=text", *arguments]
        return Process(self._reactor, line, environ=self._environ, directory=self._directory)

    def relay(self) -> Process:
        options = ("--listen", f"tcp:{self._port}:interface=127.0.0.1", "--domain", "localhost", "--events", "-")
        return self.process("rmb-relay", "--registry", "registry", *options)

    def peer(self, number: int, address: RedisAddress, *more: str) -> Process:
        key = ("-k", "ED25519", "-m", f"@secret{number}")
        where = ("--registry", "registry", "--relay", f"ws://127.0.0.1:{self._port}", "-r", str(address))
        return self.process("rmb-peer", "-d", "-u", "/uploads", *key, *where, "--events", "-", *more)

    @asynccontextmanager
    async def programs(self, *addresses: RedisAddress) -> AsyncIterator[list[Programs]]:
        found = [Programs(self._reactor, address) for address in addresses]
        try:
            yield found
        finally:
            for one in found:
                await one.close()


@pytest.fixture
def world(reactor: Any, tmp_path: Path, plugin_path: Path) -> World:
    return World(reactor, tmp_path, plugin_path)


def request(reference: str, *, payload: bytes = b"", command: str = "turn", exp: int = 60) -> dict[str, Any]:
    return {
        "ver": 1, "ref": reference, "cmd": command, "exp": exp, "dat": base64.b64encode(payload).decode(), "tag": None,
        "dst": [2], "ret": "answers", "shm": None, "now": int(time.time()),
    }  # fmt: skip


@pytest_twisted.ensureDeferred
async def test_recorded_requests_go_from_redis_to_redis_and_back(world: World, redis_url: str) -> None:
    mine, theirs = (RedisAddress.parse(f"{redis_url}/{number}") for number in (1, 2))
    async with AsyncExitStack() as stack:
        relay = await stack.enter_async_context(world.relay())
        await relay.line("server_started")
        peers = [await stack.enter_async_context(world.peer(n, at)) for n, at in ((1, mine), (2, theirs))]
        for peer in peers:
            await peer.line("twin_session_opened")
        here, there = await stack.enter_async_context(world.programs(mine, theirs))
        recorded = [one["json_in"] for one in LIVE["envelopes"] if "json_in" in one]
        assert len(recorded) > 2
        for message in recorded:
            now = int(time.time())
            await here.push(LOCAL, {**message, "dst": [2], "now": now, "ref": "mine"})
            found = await there.take(f"msgbus.{message['cmd']}")
            example = next(one["json_out"] for one in LIVE["envelopes"] if "json_out" in one)
            assert list(found) == list(example)
            assert found == {
                **example, "ref": found["ref"], "src": "1", "cmd": message["cmd"], "exp": found["exp"],
                "dat": message["dat"], "shm": message["shm"], "now": found["now"],
            }  # fmt: skip
            assert now + 60 - 1 <= found["now"] + found["exp"] <= now + 60
            answer = {"ver": 1, "ref": found["ref"], "dat": "cG9uZw", "dst": found["src"], "shm": "text/plain"}
            await there.push(REPLY, {**answer, "now": int(time.time()), "err": None})
            got = await here.take(message["ret"])
            assert list(got) == ["ver", "ref", "dat", "src", "shm", "now", "err"]
            assert got == {
                **got,
                "ver": 1,
                "ref": "mine",
                "dat": "cG9uZw==",
                "src": "2",
                "shm": "text/plain",
                "err": None,
            }
        assert await here.lists.notes(BACKLOG, 10) == []
        for peer in peers:
            peer.signal(signal.SIGTERM)
            assert await peer.ended() == 0
            assert "Traceback" not in peer.output
            assert '"event":"twin_session_closed"' in peer.output


@pytest_twisted.ensureDeferred
async def test_a_peer_that_is_killed_leaves_no_request_without_an_answer(world: World, redis_url: str) -> None:
    mine, theirs = (RedisAddress.parse(f"{redis_url}/{number}") for number in (1, 2))
    count, seen = 300, list[str]()
    async with AsyncExitStack() as stack:
        relay = await stack.enter_async_context(world.relay())
        await relay.line("server_started")
        first, server = [await stack.enter_async_context(world.peer(n, at)) for n, at in ((1, mine), (2, theirs))]
        for peer in (first, server):
            await peer.line("twin_session_opened")
        here, there = await stack.enter_async_context(world.programs(mine, theirs))
        for number in range(count):
            await here.push(LOCAL, request(str(number), payload=b"%d" % number, exp=15))
        there.serve("turn", seen)
        answers = [await here.take("answers") for _ in range(20)]
        first.signal(signal.SIGKILL)
        await first.ended()
        await stack.enter_async_context(world.peer(1, mine))
        answers += [await here.take("answers") for _ in range(count - 20)]
        assert sorted(int(one["ref"]) for one in answers) == list(range(count))
        assert await here.take("answers", 1) is None
        # what it had taken and not sent on, it could not answer
        failed = [one for one in answers if one["err"] is not None]
        assert {one["err"]["code"] for one in failed} <= {102} and len(failed) < count / 2
        assert len(seen) == len(set(seen))


@pytest_twisted.ensureDeferred
async def test_redis_is_killed_and_comes_back(world: World, redis_url: str, tmp_path: Path) -> None:
    redis = RedisProcess(tmp_path)
    redis.start()
    theirs = RedisAddress.parse(redis_url)
    count, seen = 300, list[str]()
    try:
        async with AsyncExitStack() as stack:
            relay = await stack.enter_async_context(world.relay())
            await relay.line("server_started")
            peers = ((1, redis.address), (2, theirs))
            for peer in [await stack.enter_async_context(world.peer(n, at)) for n, at in peers]:
                await peer.line("twin_session_opened")
            here, there = await stack.enter_async_context(world.programs(redis.address, theirs))
            there.serve("turn", seen)
            for number in range(count):
                await here.push(LOCAL, request(str(number), payload=b"%d" % number, exp=20))
            answers = [await here.take("answers") for _ in range(20)]
            redis.kill()
            redis.start()
            taken = [int(one["ref"]) for one in answers]
            # Redis may have handed out one message to us when it died. What it handed to the peer is taken once more.
            while len(taken) < count - 1:
                taken.append(int((await here.take("answers"))["ref"]))
            while (one := await here.take("answers", 1)) is not None:
                taken.append(int(one["ref"]))
            assert len(taken) == len(set(taken)) <= count
            assert len(seen) == len(set(seen))
    finally:
        redis.kill()


def page(port: int, path: str) -> tuple[int, str]:
    """A page of the admin site: status and body."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest_twisted.ensureDeferred
async def test_a_request_outlives_a_peer_that_had_no_relay_for_it(world: World, redis_url: str) -> None:
    mine, theirs = (RedisAddress.parse(f"{redis_url}/{number}") for number in (1, 2))
    port = free_port()
    async with AsyncExitStack() as stack:
        here, there = await stack.enter_async_context(world.programs(mine, theirs))
        async with world.peer(1, mine, "--admin", f"tcp:{port}:interface=127.0.0.1") as peer:
            await here.push(LOCAL, request("mine", payload=b"abc"))
            while not await here.lists.notes(BACKLOG, 1):
                await here.lists.ping()
            status, body = await deferToThread(page, port, "readyz")
            assert status == 503 and "not connected to a relay: ws://" in body and "connection refused" in body
            assert "dmsg_client_requests 1.0" in (await deferToThread(page, port, "metrics"))[1]
            assert (await deferToThread(page, port, "livez"))[0] == 200
            peer.signal(signal.SIGTERM)
            assert await peer.ended() == 0
        assert await here.lists.notes(BACKLOG, 1) == []
        assert await here.lists.redis.call("LLEN", LOCAL) == 1
        relay = await stack.enter_async_context(world.relay())
        await relay.line("server_started")
        for number, address in ((1, mine), (2, theirs)):
            peer = await stack.enter_async_context(world.peer(number, address))
            await peer.line("twin_session_opened")
        there.serve("turn")
        answer = await here.take("answers")
        assert (answer["ref"], answer["src"], base64.b64decode(answer["dat"])) == ("mine", "2", b"cba")


@pytest_twisted.ensureDeferred
async def test_a_peer_without_a_twin_says_so_and_fails(world: World, redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "secret1").write_text("0x" + "11" * 32)
    async with world.peer(1, RedisAddress.parse(redis_url)) as peer:
        await peer.line("no twin found in the registry")
        assert await peer.ended() == 1
        assert "Traceback" not in peer.output


@pytest_twisted.ensureDeferred
async def test_a_peer_that_cannot_find_its_twin_says_why_it_is_not_ready(
    world: World, redis_url: str, tmp_path: Path
) -> None:
    with sqlite3.connect(tmp_path / "registry") as connection:
        connection.execute("UPDATE twins SET relays = 'another.example'")
    connection.close()
    port = free_port()
    async with world.peer(1, RedisAddress.parse(redis_url), "--admin", f"tcp:{port}:interface=127.0.0.1") as peer:
        await peer.line("our twin is not known yet")
        status, body = await deferToThread(page, port, "readyz")
        assert status == 503 and "the registry of twins: altered" in body
        peer.signal(signal.SIGTERM)
        assert await peer.ended() == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "registry: must be given"),
        (("--registry", "registry"), "relay: must be given"),
        (("--registry", "registry", *("--relay", "ws://a"), *("--relay", "ws://b")), "key: must be given"),
        (("--registry", "registry", "--relay", "ws://a", "--seed", "nonsense words"), "seed: invalid bip39 phrase"),
        (("--registry", "registry", "--relay", "ws://a", "-m", "@/nowhere"), "mnemonic: /nowhere"),
        (("--registry", "registry", "--relay", "ws://a", "-m", "x", "--key", "y"), "key: must be given, or mnemonic"),
        (("-k", "rsa"), "key_type: must be ed25519 or sr25519"),
        (
            ("--registry", "registry", "--relay", "ws://a", "-m", "0x" + "11" * 32, "-r", "http://h"),
            "redis: a Redis URL",
        ),
    ],
)
@pytest_twisted.ensureDeferred
async def test_a_peer_says_in_one_line_what_is_wrong(world: World, arguments: Any, problem: str) -> None:
    async with world.process("rmb-peer", *arguments) as peer:
        assert await peer.ended() == 1
        assert f"rmb-peer: {problem}" in peer.output
        assert "11111111" not in peer.output and "nonsense" not in peer.output
