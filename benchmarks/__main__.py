"""``python -m benchmarks [names] [--json FILE] [--quick]``"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Final

from benchmarks import report
from benchmarks.processes import ChildFailed, raise_open_files
from benchmarks.sizes import FULL, QUICK

BENCHES: Final = (
    "starts",
    "relay_cost",
    "throughput",
    "messaging",
    "rmb",
    "dials",
    "e2e_cost",
    "files",
    "connections",
    "stuck_receiver",
    "discovery",
    "soak",
)
#: Run only if named: they take minutes on every machine.
LONG: Final = ("kills", "fleet", "wan", "beside", "crowd", "cores")
_NAMES_HELP: Final = f"of {', '.join(BENCHES)}, which are the default, and {', '.join(LONG)}"


def main(arguments: list[str] | None = None) -> int:
    """Run the named benches (by default all); 1 if one missed a target or failed."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Measure dmsg on this machine, over loopback.")
    parser.add_argument("names", nargs="*", metavar="name", help=_NAMES_HELP)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time; rougher figures")
    options = parser.parse_args(arguments)
    names = options.names or list(BENCHES)
    unknown = sorted(set(names) - {*BENCHES, *LONG})
    if unknown:
        parser.error(f"no such bench: {', '.join(unknown)}")
    raise_open_files()
    facts = report.machine()
    facts["stolen"] = {}
    rows: list[report.Row] = []
    failed = False
    for name in names:
        print(f"{name} …", file=sys.stderr, flush=True)
        others = report.Stolen()
        try:
            rows += importlib.import_module(f"benchmarks.{name}").run(QUICK if options.quick else FULL)
        except (RuntimeError, ChildFailed) as failure:  # the figures of the others are not lost
            print(f"{name} failed: {failure}", file=sys.stderr, flush=True)
            failed = True
        facts["stolen"][name] = round(others.share(), 3)
    print(report.as_table(rows, facts), end="")
    if options.json:
        options.json.write_text(report.as_json(rows, facts, os.getloadavg()))
    return int(failed or any(one.met is False for one in rows))


if __name__ == "__main__":
    sys.exit(main())
