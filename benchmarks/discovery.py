"""Requests a second a discovery answers over SQLite: the figures of :mod:`benchmarks.discovery_load` as rows."""

from __future__ import annotations

import os
from typing import Final

from benchmarks import discovery_load
from benchmarks.processes import ROOT
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes

NAME: Final = "discovery"
_CONNECTIONS: Final = 32
_KINDS: Final = (("get", "GET"), ("post", "signed POST"), ("available_servers", "list of servers"))


def run(sizes: Sizes) -> list[Row]:
    """Rows of rate and tail latency for each kind of request; one repeat, because filling the store takes longest."""
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), path)))  # its server is a script of its own
    try:
        results = discovery_load.run(sizes.discovery_entries, sizes.discovery_s, _CONNECTIONS)
    except SystemExit as failure:
        raise RuntimeError(str(failure)) from None
    finally:
        os.environ["PYTHONPATH"] = path
    rows = []
    for kind, name in _KINDS:
        what = f"{name}, {sizes.discovery_entries:,} entries"
        goal = discovery_load.GOALS.get(kind)
        rows.append(row(NAME, what, [results[kind]["per_second"]], "per s", at_least=goal))
        rows.append(row(NAME, f"{what}, p99", [results[kind]["p99_ms"]], "ms"))
    return rows
