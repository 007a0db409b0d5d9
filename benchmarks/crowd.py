"""As many idle connections as the descriptors of one process allow: their memory, and their cost to others.

Each end of a connection takes a descriptor, so the clients are processes of their own: raw sockets that send nothing after
the handshake. Two clients of ours play ping-pong before the crowd comes, beside it, and after it has gone.
"""

from __future__ import annotations

from typing import Final

from benchmarks.connections import UNLIMITED
from benchmarks.processes import Cast, Child, raise_open_files, split_cores
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes

NAME: Final = "crowd"
#: 1 GiB for 100,000, in KiB for one.
_IDLE_LIMIT_KIB: Final = 1024 * 1024 / 100_000
_P99_TIMES_LIMIT: Final = 1.2
#: Descriptors for anything but the crowd: files, the listener, other clients.
_OTHER_DESCRIPTORS: Final = 100
#: Connections for the warm-up of imports and one-time memory, which do not count.
_FIRST: Final = 50
_FILL_PER_S: Final = 400.0
_FILL_LIMIT_S: Final = 300.0


def run(sizes: Sizes) -> list[Row]:
    """Rows of memory, of the tail of two other clients, and of the cost of the idle crowd."""
    count = min(sizes.crowd, raise_open_files() - _OTHER_DESCRIPTORS - _FIRST)
    own, others = split_cores()
    limits = {
        **UNLIMITED,
        "first_byte_timeout_s": _FILL_LIMIT_S,
        "handshake_timeout_s": _FILL_LIMIT_S,
        "connections": count + _OTHER_DESCRIPTORS,
        "connections_per_address": count + _OTHER_DESCRIPTORS,
    }
    with Cast() as cast:
        server = cast.start("server", own, limits=limits)
        echo = cast.start("client", others, server=server.facts, listen="echo")
        pinger = cast.start("client", others, server=server.facts)
        load = cast.start("load", others, server=server.facts)
        _fill(load, _FIRST)
        _tail_ms(pinger, echo, 0.2)  # warm
        before_ms = [_tail_ms(pinger, echo, sizes.crowd_s) for _ in range(sizes.repeats)]
        before_kib = server.rss_kib()
        opening = server.cpu_s()
        _fill(load, count)
        opening = server.cpu_s() - opening
        held_kib = (server.rss_kib() - before_kib) / count
        idle = server.cpu_s()
        connections = server.ask("stats", pause_s=sizes.crowd_s)["connections"]
        idle = server.cpu_s() - idle
        beside_ms = [_tail_ms(pinger, echo, sizes.crowd_s) for _ in range(sizes.repeats)]
        if connections != count + _FIRST + 2:
            raise RuntimeError(f"{connections} connections are open")
        load.ask("close", timeout_s=_FILL_LIMIT_S)
        _tail_ms(pinger, echo, sizes.crowd_s)  # while the relay sees them go
        after_ms = [_tail_ms(pinger, echo, sizes.crowd_s) for _ in range(sizes.repeats)]
    alone_ms = [(before + after) / 2 for before, after in zip(before_ms, after_ms, strict=True)]
    times = [beside / alone for beside, alone in zip(beside_ms, alone_ms, strict=True)]
    crowd = f"{count:,} idle connections"
    return [
        row(NAME, f"{crowd}, memory of each", [held_kib], "KiB", at_most=_IDLE_LIMIT_KIB),
        row(NAME, f"{crowd}, CPU of all", [idle / sizes.crowd_s * 1000], "ms per s"),
        row(NAME, f"{crowd}, CPU a connection until it is open", [opening / count * 1e6], "µs"),
        row(NAME, f"ping-pong p99 beside {crowd}, times alone", times, "x", at_most=_P99_TIMES_LIMIT),
        row(NAME, "ping-pong p99 alone", alone_ms, "ms"),
        row(NAME, f"ping-pong p99 beside {crowd}", beside_ms, "ms"),
    ]


def _fill(load: Child, count: int) -> None:
    load.ask("prepare", count=count, timeout_s=_FILL_LIMIT_S)
    opened = load.ask("open", count=count, per_second=_FILL_PER_S, limit_s=_FILL_LIMIT_S, timeout_s=2 * _FILL_LIMIT_S)
    if opened["admitted"] != count:
        raise RuntimeError(f"{opened['admitted']} of {count} connections were admitted, {opened['failed']} refused")


def _tail_ms(pinger: Child, echo: Child, seconds: float) -> float:
    result = pinger.ask("pings", target=echo.facts["key"], size=64, rounds=10**9, seconds=seconds)
    return float(result["p99_ms"])
