"""New connections beside other traffic, and the memory of an idle connection.

A load process opens connections at an even pace while two clients play ping-pong. Their tail without the load is the mean
of their tails right before and right after it, in each repeat. The server has a core to itself, as on a machine of its
own; all other processes share the other cores.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from benchmarks.processes import Cast, Child, split_cores
from benchmarks.quiet import least_disturbed
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes

NAME: Final = "connections"
_P99_TIMES_LIMIT: Final = 2.0
_RATE_SHARE: Final = 0.98
_IDLE_LIMIT_KIB: Final = 24.0
#: Limits that do not disturb a load from few addresses of one network, which may also be slow.
UNLIMITED: Final = {
    "half_open_per_address": 10_000,
    "half_open": 10_000,
    "connections_per_address": 10_000,
    "first_byte_timeout_s": 5.0,
    "handshakes_per_s_per_address": 10_000.0,
    "handshake_burst_per_address": 100_000,
    "handshakes_per_s_per_network": 10_000.0,
    "handshake_burst_per_network": 100_000,
    "handshakes_per_s": 10_000.0,
    "handshake_burst": 100_000,
}
#: Idle connections are opened at this pace, which is not measured.
_FILL_PER_S: Final = 400.0
_PATIENT: Final = {**UNLIMITED, "handshake_timeout_s": 60.0}
_SETTLE_TIMEOUT_S: Final = 10.0


def run(sizes: Sizes) -> list[Row]:
    """Rows of rate, tail latency, cost and memory."""
    return [*_pace(sizes), *_idle(sizes)]


class _Paced(NamedTuple):
    """One repeat: connections a second, tails of the others' round trips without and with them, their cost."""

    rate: float
    alone_ms: float
    loaded_ms: float
    admission_ms: float
    cost_us: float


def _pace(sizes: Sizes) -> list[Row]:
    count = int(sizes.connect_per_s * sizes.connect_s)
    own, others = split_cores()
    with Cast() as cast:
        server = cast.start("server", own, limits=UNLIMITED)
        echo = cast.start("client", others, server=server.facts, listen="echo")
        pinger = cast.start("client", others, server=server.facts)
        load = cast.start("load", others, server=server.facts)
        _play(pinger, echo, 0.2)  # warm

        def once() -> _Paced:
            load.ask("prepare", count=count)
            start = server.cpu_s()
            alone = _play(pinger, echo, sizes.connect_s / 2)
            ping_s = (server.cpu_s() - start) / alone["rounds"]
            before = server.cpu_s()
            pinger.send("pings", target=echo.facts["key"], size=64, rounds=10**9, seconds=sizes.connect_s)
            result = load.ask("open", count=count, per_second=sizes.connect_per_s, limit_s=4 * sizes.connect_s + 5)
            loaded = pinger.answer()
            spent = server.cpu_s() - before
            load.ask("close")
            _settle(server, 2)
            alone_again = _play(pinger, echo, sizes.connect_s / 2)
            return _Paced(
                result["admitted"] / result["elapsed_s"],
                (alone["p99_ms"] + alone_again["p99_ms"]) / 2,
                loaded["p99_ms"],
                result["p99_ms"],
                (spent - ping_s * loaded["rounds"]) / count * 1e6,
            )

        runs = least_disturbed(sizes.repeats, once)
    target = _RATE_SHARE * sizes.connect_per_s
    return [
        row(
            NAME,
            f"admitted at {sizes.connect_per_s:g} a second for {sizes.connect_s:g} s",
            [run.rate for run in runs],
            "per s",
            at_least=target,
        ),
        row(
            NAME,
            "ping-pong p99 under that, times alone",
            [run.loaded_ms / run.alone_ms for run in runs],
            "x",
            at_most=_P99_TIMES_LIMIT,
        ),
        row(NAME, "ping-pong p99 alone", [run.alone_ms for run in runs], "ms"),
        row(NAME, "ping-pong p99 under load", [run.loaded_ms for run in runs], "ms"),
        row(NAME, "admission, p99", [run.admission_ms for run in runs], "ms"),
        row(NAME, "CPU a connection, server", [run.cost_us for run in runs], "µs"),
    ]


def _play(pinger: Child, echo: Child, seconds: float) -> dict[str, float]:
    result = pinger.ask("pings", target=echo.facts["key"], size=64, rounds=10**9, seconds=seconds)
    return {"p99_ms": result["p99_ms"], "rounds": result["rounds"]}


def _settle(server: Child, connections: int) -> None:
    for _ in range(int(_SETTLE_TIMEOUT_S / 0.05)):
        if server.ask("stats", pause_s=0.05)["connections"] <= connections:
            return
    raise RuntimeError("closed connections are still counted")


def _idle(sizes: Sizes) -> list[Row]:
    count = sizes.idle_connections
    held: list[float] = []
    with Cast() as cast:
        for _ in range(min(2, sizes.repeats)):  # a fresh server each time, because a process keeps its memory
            server = cast.start("server", limits=_PATIENT)
            load = cast.start("load", server=server.facts)
            load.ask("prepare", count=50)
            load.ask("open", count=50, per_second=_FILL_PER_S, limit_s=10)  # warm up imports and one-time set-up
            load.ask("prepare", count=count, timeout_s=60)
            before = server.rss_kib()
            result = load.ask("open", count=count, per_second=_FILL_PER_S, limit_s=60, timeout_s=90)
            after = server.rss_kib()
            if result["admitted"] != count or server.ask("stats")["connections"] != count + 50:
                raise RuntimeError(
                    f"{result['admitted']} of {count} connections were admitted, {result['failed']} refused"
                )
            held.append((after - before) / count)
            load.close()
            server.close()
    return [row(NAME, f"memory of an idle connection, {count:,} open", held, "KiB", at_most=_IDLE_LIMIT_KIB)]
