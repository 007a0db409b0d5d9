"""The Reliable Message Bus: throughput and cost of a relay, alone and with others, and calls between peers.

Relays and peers run as under ``twistd``, with a registry in a file; the load costs next to nothing. The targets come from
measurements of the public programs on a similar machine: twice their envelopes a second, half their CPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.connections import UNLIMITED
from benchmarks.processes import Cast, Child
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes
from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.key_file import make_twin_key
from dmsg.rmb.twins.table import TwinTable
from dmsg.testing.process import free_port

NAME: Final = "rmb"
#: Payload bytes of an envelope, and twice the public relay's best rate for that size (7,600 at 1 KiB, 4,000 at 16 KiB).
PAYLOADS: Final = {64: 15_200.0, 1024: 15_200.0, 16384: 8_000.0}
#: Half of the 72 µs that an envelope of 64 bytes cost the public relay, without the 50 in its Redis.
_CPU_LIMIT_US: Final = 36.0
#: Medians of round trips, in milliseconds: between raw WebSockets, and over two peers and Redis.
_RAW_P50_LIMIT_MS: Final = 0.68
_PEERS_P50_LIMIT_MS: Final = 2.13
_IDLE_LIMIT_KIB: Final = 17.4
_LARGE_BYTES: Final = 1_000_000
#: Number of large messages, at most half of whose memory the allocator may keep.
_LARGE_COUNT: Final = 64
_LARGE_KEPT_LIMIT_MIB: Final = 16.0
_READY_TIMEOUT_S: Final = 20.0


class _Bus:
    """A registry with twins, and the relays and peers that use it."""

    def __init__(self, cast: Cast, folder: Path) -> None:
        self.cast = cast
        self._folder = folder
        self._registry = str(folder / "twins.sqlite")

    def twins(self, count: int, *relays: str) -> list[tuple[int, str]]:
        """Number and secret of new twins."""
        table, found = TwinTable(self._registry), []
        for _ in range(count):
            secret = os.urandom(32)
            found.append((table.create(TwinKey(secret, KeyType.ED25519), relays, None), secret.hex()))
        table.close()
        return found

    def relay(self, port: int, **settings: Any) -> Child:
        """A relay that listens on ``port``, which is also its name."""
        return self._start(
            serve="relay",
            limits=UNLIMITED,
            paths=["relay_key"],
            listen=f"tcp:{port}:interface=127.0.0.1:backlog=1024",
            domain=[f"127.0.0.1:{port}"],
            **settings,
        )

    def peer(self, port: int, redis: str) -> tuple[Child, int]:
        """A peer with a new twin, connected to the relay on ``port``, and the twin's number."""
        path = self._folder / f"peer-{time.monotonic_ns()}"
        key = make_twin_key(path, KeyType.SR25519, os.urandom)  # the public peer's default
        table = TwinTable(self._registry)
        twin = table.create(key, [f"127.0.0.1:{port}"], None)
        table.close()
        return self._start(
            serve="peer", paths=["key"], key=str(path), redis=redis, relay=[f"ws://127.0.0.1:{port}/"]
        ), twin

    def _start(self, **options: Any) -> Child:
        child = self.cast.start(
            "rmb_node", registry=self._registry, events=str(self._folder / f"events-{time.monotonic_ns()}"), **options
        )
        give_up = time.monotonic() + _READY_TIMEOUT_S
        while why := child.ask("ready")["why"]:
            if time.monotonic() > give_up:
                raise RuntimeError(f"a {options['serve']} is not ready: {why}")
            time.sleep(0.05)
        return child

    def relay_key(self, name: str) -> tuple[str, str]:
        """A key file, and its public key in the form given to others."""
        path = self._folder / name
        return str(path), make_twin_key(path, KeyType.ED25519, os.urandom).account.hex()

    def raw(self, port: int, twins: list[tuple[int, str]]) -> Child:
        """Raw sessions of ``twins`` at the relay on ``port``."""
        return self.cast.start("rmb_raw", port=port, twins=twins)


@contextmanager
def _bus() -> Iterator[_Bus]:
    with tempfile.TemporaryDirectory(prefix="dmsg-bench-") as folder, Cast() as cast:
        yield _Bus(cast, Path(folder))


def run(sizes: Sizes) -> list[Row]:
    """Rows of envelopes a second, the cost of one, round trips, and memory."""
    return [*_one_relay(sizes), *_memory(sizes), *_two_relays(sizes), *_peers(sizes)]


def _carry(relays: list[Child], sender: Child, receiver: Child, to: int, size: int, count: int) -> tuple[float, float]:
    """Envelopes a second from ``sender`` to ``receiver``, and the cost of each to ``relays`` in CPU microseconds."""
    frame_bytes = sender.ask("prepare", size=size, count=count, to=to)["frame_bytes"]
    receiver.send("drain", size=count * frame_bytes)
    before = sum(relay.cpu_s() for relay in relays)
    sender.ask("send")
    elapsed_s = receiver.answer()["elapsed_s"]
    return count / elapsed_s, (sum(relay.cpu_s() for relay in relays) - before) / count * 1e6


def _one_relay(sizes: Sizes) -> list[Row]:
    rates: dict[int, list[float]] = {size: [] for size in PAYLOADS}
    costs: dict[int, list[float]] = {size: [] for size in PAYLOADS}
    trips: list[dict[str, float]] = []
    with _bus() as bus:
        port = free_port()
        relay = bus.relay(port)
        pair = bus.twins(2, f"127.0.0.1:{port}")
        sender, receiver = (bus.raw(port, [twin]) for twin in pair)
        for _ in range(sizes.repeats):
            for size in PAYLOADS:
                count = sizes.relay_frames if size < 8192 else sizes.relay_large_frames
                rate, cost = _carry([relay], sender, receiver, pair[1][0], size, count)
                rates[size].append(rate)
                costs[size].append(cost)
            there = sender.ask("prepare", size=64, count=1, to=pair[1][0])["frame_bytes"]
            back = receiver.ask("prepare", size=64, count=1, to=pair[0][0])["frame_bytes"]
            receiver.send("echo", rounds=sizes.pings, size=there)
            trips.append(sender.ask("pings", rounds=sizes.pings, size=back))
            receiver.answer()
    rows = []
    for size, target in PAYLOADS.items():
        rows.append(row(NAME, f"{size} B through one relay", rates[size], "envelopes/s", at_least=target))
        limit = _CPU_LIMIT_US if size == 64 else None
        rows.append(row(NAME, f"{size} B, CPU an envelope, relay", costs[size], "µs", at_most=limit))
    p50, p99 = ([one[name] for one in trips] for name in ("p50_ms", "p99_ms"))
    rows.append(row(NAME, "round trip of raw WebSockets, p50", p50, "ms", at_most=_RAW_P50_LIMIT_MS))
    rows.append(row(NAME, "round trip of raw WebSockets, p99", p99, "ms"))
    return rows


def _memory(sizes: Sizes) -> list[Row]:
    count = sizes.idle_connections
    with _bus() as bus:
        port = free_port()
        relay = bus.relay(port)
        twins = bus.twins(2 + (count + 50) // 200 + 1, f"127.0.0.1:{port}")
        receiver, sender = bus.raw(port, twins[:1]), bus.raw(port, twins[1:])
        sender.ask("fill", count=50)  # warm up imports and one-time set-up
        before = relay.rss_kib()
        sender.ask("fill", count=count, timeout_s=120)
        idle_kib = (relay.rss_kib() - before) / count
        if relay.ask("gauges")["sessions"] != count + 52:
            raise RuntimeError("sessions were closed")
        sender.ask("empty")
        before = relay.rss_kib()
        _carry([relay], sender, receiver, twins[0][0], _LARGE_BYTES, _LARGE_COUNT)
        kept_mib = (relay.rss_kib() - before) / 1024
    return [
        row(NAME, f"memory of an idle session, {count:,} open", [idle_kib], "KiB", at_most=_IDLE_LIMIT_KIB),
        row(
            NAME,
            f"memory kept after {_LARGE_COUNT} messages of 1 MB",
            [kept_mib],
            "MiB",
            at_most=_LARGE_KEPT_LIMIT_MIB,
        ),
    ]


def _two_relays(sizes: Sizes) -> list[Row]:
    runs: list[tuple[float, float]] = []
    with _bus() as bus:
        ports = [free_port(), free_port()]
        keys = [bus.relay_key(f"relay-{port}") for port in ports]
        relays = [
            bus.relay(port, relay_key=keys[at][0], trust=[f"127.0.0.1:{ports[1 - at]}={keys[1 - at][1]}"])
            for at, port in enumerate(ports)
        ]
        twins = [bus.twins(1, f"127.0.0.1:{port}") for port in ports]
        sender, receiver = (bus.raw(port, twin) for port, twin in zip(ports, twins, strict=True))
        for _ in range(sizes.repeats):
            runs.append(_carry(relays, sender, receiver, twins[1][0][0], 1024, sizes.relay_frames // 5))
    return [
        row(NAME, "1024 B from relay to relay", [rate for rate, _ in runs], "envelopes/s"),
        row(NAME, "1024 B, CPU an envelope, two relays", [cost for _, cost in runs], "µs"),
    ]


def _peers(sizes: Sizes) -> list[Row]:
    """Round trips over two peers, between programs that know only Redis."""
    program = shutil.which("redis-server")
    if program is None:
        raise RuntimeError("the bench of peers needs the program redis-server")
    single: list[dict[str, float]] = []
    many: list[float] = []
    with _bus() as bus:
        redis, port = free_port(), free_port()
        options = ["--port", str(redis), "--bind", "127.0.0.1", "--save", "", "--dir", "/", "--daemonize", "no"]
        server = subprocess.Popen([program, *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        bus.cast.close_at_end(server.wait)
        bus.cast.close_at_end(server.kill)
        bus.relay(port)
        (near, _), (far, twin) = (bus.peer(port, f"redis://127.0.0.1:{redis}/{number}") for number in (0, 1))
        caller, service = (bus.cast.start("rmb_program", redis=redis, database=number) for number in (0, 1))
        rounds = sizes.pings // 2
        for _ in range(sizes.repeats):
            for window in (1, 64):
                service.send("serve", rounds=rounds)
                result = caller.ask("call", to=twin, rounds=rounds, size=64, window=window)
                service.answer()
                if window == 1:
                    single.append(result)
                else:
                    many.append(result["per_s"])
        for peer in (near, far):
            peer.ask("stop")
    p50, p99 = ([one[name] for one in single] for name in ("p50_ms", "p99_ms"))
    return [
        row(NAME, "round trip over two peers and Redis, p50", p50, "ms", at_most=_PEERS_P50_LIMIT_MS),
        row(NAME, "round trip over two peers and Redis, p99", p99, "ms"),
        row(NAME, "calls over two peers and Redis, 64 at a time", many, "1/s"),
    ]
