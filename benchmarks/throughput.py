"""The rate of data from one client through a server to another, and the round trip of a message.

Discovery, server and both clients are processes of their own. The time is up to the last acknowledgement; the writer
respects back-pressure. The same message through plain Twisted TCP and a relay that only copies serves as comparison.
MB are 10^6 bytes. Security is by the hop, for which the targets were set; :mod:`benchmarks.e2e_cost` measures the extra
cost of end-to-end security.
"""

from __future__ import annotations

from typing import Final

from benchmarks.processes import Cast
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes

NAME: Final = "throughput"
#: Bytes in a write, transports, least MB/s.
TRANSFERS: Final = ((16384, 1, 60.0), (1024, 1, 40.0), (1024, 32, 40.0))
_P50_LIMIT_MS: Final = 0.6
_P99_LIMIT_MS: Final = 3.0
_LIMIT_S: Final = 30.0


def run(sizes: Sizes) -> list[Row]:
    """Rows of the transfers and the ping-pong, and their cost to each process."""
    rates: dict[tuple[int, int], list[float]] = {}
    costs: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    p50: list[float] = []
    p99: list[float] = []
    plain: list[float] = []
    with Cast() as cast:
        url = cast.start("discovery").facts["url"]
        server = cast.start("server", discovery=url)
        sink = cast.start("client", server=server.facts, discovery=url, listen="sink")
        echo = cast.start("client", server=server.facts, discovery=url, listen="echo")
        source = cast.start("client", server=server.facts, discovery=url)
        plain_echo = cast.start("plain", listen="echo")
        plain_relay = cast.start("plain", listen="relay", to=plain_echo.facts["port"])
        plain_source = cast.start("plain")
        processes = (source, server, sink)
        for _ in range(sizes.repeats):
            for size, transports, _ in TRANSFERS:
                total = sizes.transfer_bytes // (size * transports) * size * transports
                received = sink.ask("received")["bytes"]
                before = [one.cpu_s() for one in processes]
                result = source.ask(
                    "push",
                    target=sink.facts["key"],
                    size=size,
                    total=total,
                    transports=transports,
                    limit_s=_LIMIT_S,
                    timeout_s=2 * _LIMIT_S,
                )
                spent = [one.cpu_s() - start for one, start in zip(processes, before, strict=True)]
                received = sink.ask("received")["bytes"] - received
                if not received == result["acked_bytes"] == total:
                    raise RuntimeError(f"{total} sent, {result['acked_bytes']} acknowledged, {received} delivered")
                rates.setdefault((size, transports), []).append(total / result["elapsed_s"] / 1e6)
                costs.setdefault((size, transports), []).append(tuple(one / total * 1e9 for one in spent))
            pings = source.ask("pings", target=echo.facts["key"], size=64, rounds=sizes.pings, seconds=_LIMIT_S)
            p50.append(pings["p50_ms"])
            p99.append(pings["p99_ms"])
            port = plain_relay.facts["port"]
            pings = plain_source.ask("pings", port=port, size=64, rounds=sizes.pings, seconds=_LIMIT_S)
            plain.append(pings["p50_ms"])
    rows = []
    for size, transports, target in TRANSFERS:
        name = f"{size} B writes, {transports} transport{'s' * (transports > 1)}"
        rows.append(row(NAME, name, rates[size, transports], "MB/s", at_least=target))
        for at, process in enumerate(("sender", "server", "receiver")):
            spent_ms = [one[at] for one in costs[size, transports]]
            rows.append(row(NAME, f"{name}, {process}", spent_ms, "ms CPU/MB"))
    rows.append(row(NAME, "64 B ping-pong p50", p50, "ms", at_most=_P50_LIMIT_MS))
    rows.append(row(NAME, "64 B ping-pong p99", p99, "ms", at_most=_P99_LIMIT_MS))
    times = [ours / theirs for ours, theirs in zip(p50, plain, strict=True)]
    rows.append(row(NAME, "64 B ping-pong p50, times plain TCP through a copying relay", times, "x"))
    rows.append(row(NAME, "64 B ping-pong p50, plain TCP through a copying relay", plain, "ms"))
    return rows
