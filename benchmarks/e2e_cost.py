"""The extra cost of end-to-end security over security by the hop: for the two clients, the relay, and a message's latency.

Two pairs of clients on one relay, which differ only in their security, take turns in one run. A sealed stream is sealed
twice at the ends, so its clients have more to do; the relay sees the same frames, but fewer acknowledgements, because
those of a sealed stream are cumulative. MB are 10^6 bytes.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks.dials import LIMITS, PARALLEL
from benchmarks.processes import Cast, Child
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes

NAME: Final = "e2e_cost"
KINDS: Final = ("hop", "e2e")
WRITE_BYTES: Final = 16_384
_CLIENTS_TIMES_LIMIT: Final = 1.6
_RELAY_TIMES_LIMIT: Final = 1.1
_LIMIT_S: Final = 60.0


def run(sizes: Sizes) -> list[Row]:
    """Rows of the two ratios, then of their components, then of throughput, dials and ping-pong end to end."""
    clients: dict[str, list[float]] = {kind: [] for kind in KINDS}
    relay: dict[str, list[float]] = {kind: [] for kind in KINDS}
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    dials: list[float] = []
    pings: list[dict[str, Any]] = []
    with Cast() as cast:
        server = cast.start("server", limits=LIMITS)
        pairs = {
            kind: (
                cast.start("client", server=server.facts, security=kind, listen="sink"),
                cast.start("client", server=server.facts, security=kind),
            )
            for kind in KINDS
        }
        for kind in KINDS:  # warm
            _push(*pairs[kind], server, sizes.secure_bytes // 8)
        for number in range(sizes.repeats):
            for kind in KINDS if number % 2 else KINDS[::-1]:
                ends_ms, relay_ms, rate = _push(*pairs[kind], server, sizes.secure_bytes)
                clients[kind].append(ends_ms)
                relay[kind].append(relay_ms)
                rates[kind].append(rate)
        echo = cast.start("client", server=server.facts, security="e2e", listen="echo")
        sink, source = pairs["e2e"]
        for _ in range(sizes.repeats):
            opened = source.ask(
                "dials", target=sink.facts["key"], count=sizes.dials // 4, parallel=PARALLEL, timeout_s=_LIMIT_S
            )
            dials.append(sizes.dials // 4 / opened["elapsed_s"])
            pings.append(
                source.ask("pings", target=echo.facts["key"], size=64, rounds=sizes.pings, seconds=_LIMIT_S / 2)
            )
    what = f"{WRITE_BYTES} B writes"
    rows = [
        row(NAME, f"{what}: clients, e2e to hop", _ratios(clients), "x", at_most=_CLIENTS_TIMES_LIMIT),
        row(NAME, f"{what}: relay, e2e to hop", _ratios(relay), "x", at_most=_RELAY_TIMES_LIMIT),
    ]
    for kind in KINDS:
        rows.append(row(NAME, f"{what}: both clients, {kind}", clients[kind], "ms CPU/MB"))
        rows.append(row(NAME, f"{what}: relay, {kind}", relay[kind], "ms CPU/MB"))
        rows.append(row(NAME, f"{what}: {kind}", rates[kind], "MB/s"))
    rows.append(row(NAME, f"dial and close, {PARALLEL} in parallel, e2e", dials, "per s"))
    rows.append(row(NAME, "64 B ping-pong p50, e2e", [one["p50_ms"] for one in pings], "ms"))
    rows.append(row(NAME, "64 B ping-pong p99, e2e", [one["p99_ms"] for one in pings], "ms"))
    return rows


def _ratios(costs: dict[str, list[float]]) -> list[float]:
    return [e2e / hop for hop, e2e in zip(costs["hop"], costs["e2e"], strict=True)]


def _push(sink: Child, source: Child, server: Child, amount: int) -> tuple[float, float, float]:
    """Send ``amount`` bytes: CPU milliseconds for a MB, of both clients and of the relay, and MB a second."""
    total = max(1, amount // WRITE_BYTES) * WRITE_BYTES
    before = [one.cpu_s() for one in (sink, source, server)]
    result = source.ask(
        "push",
        target=sink.facts["key"],
        size=WRITE_BYTES,
        total=total,
        transports=1,
        limit_s=_LIMIT_S,
        timeout_s=2 * _LIMIT_S,
    )
    if result["acked_bytes"] != total:
        raise RuntimeError(f"{total} sent, {result['acked_bytes']} acknowledged")
    spent = [one.cpu_s() - start for one, start in zip((sink, source, server), before, strict=True)]
    megabytes = total / 1e6
    return (
        (spent[0] + spent[1]) / megabytes * 1000,
        spent[2] / megabytes * 1000,
        megabytes / result["elapsed_s"],
    )
