"""How many transports a second can be opened and closed on one connection, 16 at a time, without discovery.

Security is by the hop, for which the target was set; :mod:`benchmarks.e2e_cost` has the rate of the end-to-end kind.
"""

from __future__ import annotations

from typing import Final

from benchmarks.processes import Cast
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes

NAME: Final = "dials"
PARALLEL: Final = 16
_TARGET_PER_S: Final = 2_500.0
LIMITS: Final = {
    "requests_per_s": 1e6,
    "request_burst": 1_000_000,
    "pending_requests": 1_000,
    "known_requests_per_s": 1e6,
    "known_request_burst": 1_000_000,
}


def run(sizes: Sizes) -> list[Row]:
    """Rows of the rate and of what a dial costs each process."""
    rates: list[float] = []
    costs: dict[str, list[float]] = {"dialling client": [], "server": [], "listening client": []}
    with Cast() as cast:
        server = cast.start("server", limits=LIMITS)
        listening = cast.start("client", server=server.facts, listen="sink")
        dialling = cast.start("client", server=server.facts)
        for _ in range(sizes.repeats):
            processes = (dialling, server, listening)
            before = [one.cpu_s() for one in processes]
            result = dialling.ask(
                "dials", target=listening.facts["key"], count=sizes.dials, parallel=PARALLEL, timeout_s=60
            )
            for name, one, start in zip(costs, processes, before, strict=True):
                costs[name].append((one.cpu_s() - start) / sizes.dials * 1e6)
            rates.append(sizes.dials / result["elapsed_s"])
    rows = [row(NAME, f"dial and close, {PARALLEL} in parallel", rates, "per s", at_least=_TARGET_PER_S)]
    return rows + [row(NAME, f"CPU a dial, {name}", values, "µs") for name, values in costs.items()]
