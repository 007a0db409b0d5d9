"""``python -m benchmarks.soak [--seconds N] [--table FILE] [--json FILE]``: the long run, two hours unless told otherwise."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks import report
from benchmarks.processes import ChildFailed, raise_open_files
from benchmarks.sizes import LONG_SOAK
from benchmarks.soak.levels import Levels
from benchmarks.soak.run import choose_seed, problems, soak, table, tell


def main(arguments: list[str] | None = None) -> int:
    """1 when something did not hold."""
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=LONG_SOAK.seconds, help="how long (7200)")
    parser.add_argument(
        "--fault-every", type=float, default=LONG_SOAK.fault_every_s, help="seconds between faults (20)"
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there, now and then")
    options = parser.parse_args(arguments)
    raise_open_files()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # leaves the block that ends every process
    size = replace(LONG_SOAK, seconds=options.seconds, fault_every_s=options.fault_every)

    def keep(levels: Levels) -> None:
        if options.json:
            options.json.write_text(json.dumps(levels.as_json()))

    try:
        outcome = soak(size, choose_seed(), keep)
    except (RuntimeError, ChildFailed) as failure:
        tell(f"failed: {failure}")
        return 1
    keep(outcome.levels)
    text = table(outcome, report.machine())
    print(text, end="")
    if options.table:
        options.table.write_text(text)
    found = problems(outcome)
    for line in found:
        tell(line)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
