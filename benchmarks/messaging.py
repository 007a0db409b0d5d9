"""A messaging relay beside a dmsg relay, in the same run: the cost of a message and of a connection.

Clients that cost next to nothing send data, one frame in a write, to a client that reads it without parsing. Connections
are made one after the other; the CPU time that each costs the relay is compared.
"""

from __future__ import annotations

import time
from typing import Final

from benchmarks.connections import UNLIMITED
from benchmarks.processes import Cast, Child
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes

NAME: Final = "messaging"
#: Data bytes in a message.
MESSAGES: Final = (64, 1024, 16384)
PROTOCOLS: Final = ("messaging", "dmsg")
#: Least overhead of a frame and a record for a message.
_LEAST_OVERHEAD_BYTES: Final = 7


def run(sizes: Sizes) -> list[Row]:
    """Rows of messages a second, of the relay's cost of one, and of connections."""
    rates: dict[tuple[str, int], list[float]] = {}
    costs: dict[tuple[str, int], list[float]] = {}
    connects: dict[str, list[float]] = {}
    with Cast() as cast:
        servers = {name: cast.start("server", protocol=name, limits=UNLIMITED) for name in PROTOCOLS}
        pairs = {name: _pair(cast, server) for name, server in servers.items()}
        for _ in range(sizes.repeats):
            for size in MESSAGES:
                count = sizes.relay_frames if size < 8192 else sizes.relay_large_frames
                for name, (sender, receiver) in pairs.items():
                    sender.ask("prepare", size=size, count=count)
                    receiver.send("drain", least_bytes=count * (size + _LEAST_OVERHEAD_BYTES), limit_s=60)
                    before, began = servers[name].cpu_s(), time.perf_counter()
                    sender.send("send")
                    elapsed_s = receiver.answer()["ended"] - began
                    sender.answer()
                    costs.setdefault((name, size), []).append((servers[name].cpu_s() - before) / count * 1e6)
                    rates.setdefault((name, size), []).append(count / elapsed_s)
            for name, (sender, _) in pairs.items():
                before = servers[name].cpu_s()
                sender.ask("connect", count=sizes.dials // 5, timeout_s=60)
                connects.setdefault(name, []).append((servers[name].cpu_s() - before) / (sizes.dials // 5) * 1e6)
    rows = []
    for size in MESSAGES:
        for name in PROTOCOLS:
            rows.append(row(NAME, f"{size} B, {name}", rates[name, size], "messages/s"))
            rows.append(row(NAME, f"{size} B, {name}", [one * size / 1e6 for one in rates[name, size]], "MB/s"))
            rows.append(row(NAME, f"{size} B, {name}, CPU a message", costs[name, size], "µs"))
        ratios = [ours / theirs for ours, theirs in zip(*(costs[name, size] for name in PROTOCOLS), strict=True)]
        rows.append(row(NAME, f"{size} B, CPU a message, times dmsg's", ratios, "x", at_most=1.0))
    for name in PROTOCOLS:
        rows.append(row(NAME, f"{name}, connections of one core", [1e6 / one for one in connects[name]], "1/s"))
    ratios = [theirs / ours for ours, theirs in zip(*(connects[name] for name in PROTOCOLS), strict=True)]
    rows.append(row(NAME, "connections of one core, times dmsg's", ratios, "x", at_least=1.0))
    return rows


def _pair(cast: Cast, server: Child) -> tuple[Child, Child]:
    """A sender and a receiver, with a transport or channel between them."""
    receiver = cast.start("raw_receiver", server=server.facts)
    sender = cast.start("raw_sender", server=server.facts)
    receiver.send("accept")
    sender.ask("dial", target=receiver.facts["key"])
    receiver.answer()
    return sender, receiver
