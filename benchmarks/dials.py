"""Rate and cost of opening and closing transports on one connection, without discovery.

16 at a time and one after another; with security by the hop, and sealed. Single dials cost each process more: it wakes up
for every dial, with cold caches.
"""

from __future__ import annotations

from typing import Final

from benchmarks.processes import Cast, Child
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes

NAME: Final = "dials"
PARALLEL: Final = 16
_TARGET_PER_S: Final = 2_500.0
#: CPU of a sealed dial, 16 at a time, in microseconds.
_TARGETS_US: Final = {"dialling client": 400.0, "listening client": 350.0}
LIMITS: Final = {
    "requests_per_s": 1e6,
    "request_burst": 1_000_000,
    "pending_requests": 1_000,
    "known_requests_per_s": 1e6,
    "known_request_burst": 1_000_000,
}


class _Pair:
    """Two clients of one kind of security, and the cost of their dials so far."""

    def __init__(self, cast: Cast, server: Child, security: str) -> None:
        listening = cast.start("client", server=server.facts, security=security, listen="sink")
        dialling = cast.start("client", server=server.facts, security=security)
        self._target = listening.facts["key"]
        self._processes = {"dialling client": dialling, "server": server, "listening client": listening}
        self.rates: dict[int, list[float]] = {PARALLEL: [], 1: []}
        self.costs_us: dict[int, dict[str, list[float]]] = {
            parallel: {name: [] for name in self._processes} for parallel in self.rates
        }

    def dial(self, count: int, parallel: int) -> None:
        """Open and close ``count`` transports, ``parallel`` at a time."""
        before = {name: one.cpu_s() for name, one in self._processes.items()}
        dialling = self._processes["dialling client"]
        result = dialling.ask("dials", target=self._target, count=count, parallel=parallel, timeout_s=60)
        for name, one in self._processes.items():
            self.costs_us[parallel][name].append((one.cpu_s() - before[name]) / count * 1e6)
        self.rates[parallel].append(count / result["elapsed_s"])


def run(sizes: Sizes) -> list[Row]:
    """Rows of the rates and of each process's cost of a dial."""
    with Cast() as cast:
        server = cast.start("server", limits=LIMITS)
        plain, sealed = _Pair(cast, server, "hop"), _Pair(cast, server, "e2e")
        for _ in range(sizes.repeats):
            for pair, count in ((plain, sizes.dials), (sealed, max(1, sizes.dials // 4))):
                pair.dial(count, PARALLEL)
                pair.dial(max(1, count // 4), 1)
    rows = []
    for pair, kind, target in ((plain, "", _TARGET_PER_S), (sealed, "sealed ", None)):
        rows.append(
            row(NAME, f"{kind}dial and close, {PARALLEL} in parallel", pair.rates[PARALLEL], "per s", at_least=target)
        )
        for name, values in pair.costs_us[PARALLEL].items():
            at_most = _TARGETS_US.get(name) if kind else None
            rows.append(row(NAME, f"CPU a {kind}dial, {name}", values, "µs", at_most=at_most))
        rows.append(row(NAME, f"{kind}dial and close, one after another", pair.rates[1], "per s"))
        for name, values in pair.costs_us[1].items():
            rows.append(row(NAME, f"CPU a {kind}dial after another, {name}", values, "µs"))
    return rows
