"""Relays and peers of the Reliable Message Bus as processes: calls outlive a relay that is killed, and wait for a peer."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted

from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.keys import KeyType
from dmsg.rmb.key_file import make_twin_key
from dmsg.rmb.twins.table import TwinTable
from dmsg.testing.process import Process, free_port

pytestmark = [pytest.mark.system, pytest.mark.time_limit(240)]

PROGRAM = Path(__file__).with_name("rmb_program.py")
#: How long a program may take here: 10,000 calls on two busy cores.
PATIENCE_S = 200.0
CALLS = 10_000


class Bus:
    """Relays and peers that share a registry file, all on loopback."""

    def __init__(self, reactor: Any, directory: Path, plugin_path: Path) -> None:
        self._reactor = reactor
        self._directory = directory
        self._registry = directory / "registry"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DMSG_")}
        self._environ = {**clean, "PYTHONPATH": str(plugin_path), "PYTHONUNBUFFERED": "1"}
        self.ports: list[int] = []

    def _process(self, *arguments: str) -> Process:
        return Process(
            self._reactor,
            [sys.executable, *arguments],
            environ=self._environ,
            directory=self._directory,
            patience_s=PATIENCE_S,
        )

    def relay(self, port: int | None = None) -> Process:
        if port is None:
            port = free_port()
            self.ports.append(port)
        listen = f"tcp:{port}:interface=127.0.0.1"
        options = ("--listen", listen, "--registry", str(self._registry), "--domain", f"localhost:{port}")
        posts = ("--federation", "open", "--federation-scheme", "http")
        return self._process("-m", "twisted", "--log-format=text", "rmb-relay", "--events", "-", *options, *posts)

    def twin(self, name: str, *ports: int) -> int:
        """Make a twin that is reached over the relays at ``ports``, or over all."""
        key = make_twin_key(self._directory / name, KeyType.ED25519, os.urandom)
        table = TwinTable(str(self._registry))
        try:
            relays = [f"localhost:{port}" for port in ports or self.ports]
            return table.create(key, relays, EncryptionKey(key.secret).public_key)
        finally:
            table.close()

    def peer(self, name: str, *ports: int, concurrency: int = 25) -> Process:
        urls = [f"ws://localhost:{port}" for port in ports or self.ports]
        return self._process(str(PROGRAM), name, str(self._registry), str(concurrency), *urls)


@pytest.fixture
def bus(reactor: Any, tmp_path: Path, plugin_path: Path) -> Bus:
    return Bus(reactor, tmp_path, plugin_path)


async def told(peer: Process, line: str, answer: str) -> dict[str, int]:
    """Tell a peer something; the JSON of the line that begins with ``answer``."""
    peer.write(line.encode() + b"\n")
    result: dict[str, int] = json.loads((await peer.line(rf"^{answer} (.*)$")).group(1))
    return result


async def started(stack: AsyncExitStack, process: Process, line: str) -> Process:
    await stack.enter_async_context(process)
    await process.line(line)
    return process


@pytest_twisted.ensureDeferred
async def test_ten_thousand_calls_while_one_of_two_relays_is_killed(bus: Bus) -> None:
    async with AsyncExitStack() as stack:
        # Lines of the event log name a relay by its domain.
        relays = [await started(stack, bus.relay(), '"server_started".*"node":"localhost:') for _ in range(2)]
        names = ["a", "b", "c", "d"]
        twins = [bus.twin(name) for name in names]
        peers = [await started(stack, bus.peer(name), "^ready") for name in names]
        for peer, own in zip(peers, twins, strict=True):
            others = " ".join(str(twin) for twin in twins if twin != own)
            peer.write(f"call {CALLS // 4} 30 {others}\n".encode())
        sent = json.loads((await peers[0].line("^halfway (.*)$")).group(1))
        busiest = relays[sent.index(max(sent))]
        busiest.signal(signal.SIGKILL)
        results = [json.loads((await peer.line("^called (.*)$")).group(1)) for peer in peers]
        assert await busiest.ended() == -signal.SIGKILL
        # The other relay is there all the time: nothing has a reason to fail.
        assert results == [{"late": 0, "answered": CALLS // 4}] * 4
        served = [await told(peer, "served", "served") for peer in peers]
        assert sum(one["all"] for one in served) == CALLS
        assert all(one["all"] == one["different"] for one in served)


@pytest_twisted.ensureDeferred
async def test_calls_are_answered_while_one_of_two_relays_hangs(bus: Bus) -> None:
    async with AsyncExitStack() as stack:
        relays = [await started(stack, bus.relay(), "server_started") for _ in range(2)]
        twins = {name: bus.twin(name) for name in "ab"}
        peers = {name: await started(stack, bus.peer(name), "^ready") for name in "ab"}
        for name, other in (("a", "b"), ("b", "a")):
            peers[name].write(f"call 1000 35 {twins[other]}\n".encode())
        sent = json.loads((await peers["a"].line("^halfway (.*)$")).group(1))
        relays[sent.index(max(sent))].signal(signal.SIGSTOP)
        for peer in peers.values():
            result = json.loads((await peer.line("^called (.*)$")).group(1))
            assert result == {"late": 0, "answered": 1000}
        for peer in peers.values():  # each has served the other, which may have been done later than itself
            served = await told(peer, "served", "served")
            assert served == {"all": 1000, "different": 1000}


@pytest_twisted.ensureDeferred
async def test_calls_without_any_relay_fail_in_time_and_say_why(bus: Bus) -> None:
    async with AsyncExitStack() as stack:
        relays = [await started(stack, bus.relay(), "server_started") for _ in range(2)]
        names = ["a", "b"]
        twins = [bus.twin(name) for name in names]
        peers = [await started(stack, bus.peer(name, concurrency=200), "^ready") for name in names]
        peers[0].write(b"hold\n")  # it could be at the end before the relays are
        for peer, target in zip(peers, reversed(twins), strict=True):
            peer.write(f"call 1000 5 {target}\n".encode())
        await peers[0].line("^halfway")
        for relay in relays:
            relay.signal(signal.SIGKILL)
            await relay.ended()
        peers[0].write(b"go\n")
        results = [json.loads((await peer.line("^called (.*)$")).group(1)) for peer in peers]
        for result in results:
            assert result.pop("late") == 0
            assert set(result) <= {"answered", "CallTimeout", "NotConnected"}
            assert sum(result.values()) == 1000
        assert results[0]["NotConnected"] >= 100
        served = [await told(peer, "served", "served") for peer in peers]
        assert all(one["all"] == one["different"] for one in served)


@pytest_twisted.ensureDeferred
async def test_a_request_waits_for_a_peer_that_is_offline(bus: Bus) -> None:
    async with AsyncExitStack() as stack:
        await started(stack, bus.relay(), "server_started")
        _, offline = bus.twin("a"), bus.twin("b")
        caller = await started(stack, bus.peer("a"), "^ready")
        caller.write(f"call 20 60 {offline}\n".encode())
        assert await told(caller, "served", "served") == {"all": 0, "different": 0}
        peer = await started(stack, bus.peer("b"), "^ready")
        assert json.loads((await caller.line("^called (.*)$")).group(1)) == {"late": 0, "answered": 20}
        assert await told(peer, "served", "served") == {"all": 20, "different": 20}


@pytest_twisted.ensureDeferred
async def test_a_peer_that_is_killed_and_comes_again_answers_what_waits_for_it(bus: Bus) -> None:
    async with AsyncExitStack() as stack:
        await started(stack, bus.relay(), "server_started")
        _, target = bus.twin("a"), bus.twin("b")
        caller = await started(stack, bus.peer("a"), "^ready")
        first = await started(stack, bus.peer("b"), "^ready")
        assert await told(caller, f"call 100 30 {target}", "called") == {"late": 0, "answered": 100}
        first.signal(signal.SIGKILL)
        await first.ended()
        caller.write(f"call 20 60 {target}\n".encode())
        await started(stack, bus.peer("b"), "^ready")
        assert json.loads((await caller.line("^called (.*)$")).group(1)) == {"late": 0, "answered": 120}


@pytest_twisted.ensureDeferred
async def test_calls_between_peers_at_different_relays_outlive_the_death_of_one(bus: Bus) -> None:
    async with AsyncExitStack() as stack:
        _, second = [await started(stack, bus.relay(), "server_started") for _ in range(2)]
        ports = dict(zip("ab", bus.ports, strict=True))
        twins = {name: bus.twin(name, port) for name, port in ports.items()}
        peers = {name: await started(stack, bus.peer(name, port), "^ready") for name, port in ports.items()}
        for name, other in (("a", "b"), ("b", "a")):
            peers[name].write(f"call 1000 60 {twins[other]}\n".encode())
        await peers["a"].line("^halfway")
        second.signal(signal.SIGKILL)
        await second.ended()
        await started(stack, bus.relay(ports["b"]), "server_started")
        for peer in peers.values():
            result = json.loads((await peer.line("^called (.*)$")).group(1))
            assert (result["late"], sum(result.values())) == (0, 1000)
            assert set(result) <= {"late", "answered", "CallTimeout", "CallRefused"}
            # What only the dead relay knew is lost, if both twins think that it has arrived.
            assert result["answered"] >= 900
            assert (await told(peer, "served", "served"))["all"] <= 1000
