"""``python -m fuzz [targets] [--seconds N] [--jobs N] [--table FILE] [--minimise]``"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path

from fuzz import targets
from fuzz.run import Campaign, as_table, describe


def main(arguments: list[str] | None = None) -> int:
    """Run the targets named (all of them if none is); 1 when one of them failed or was not run."""
    parser = argparse.ArgumentParser(
        prog="fuzz", description="Search for inputs that break a promise, guided by coverage."
    )
    parser.add_argument("names", nargs="*", metavar="target", help=f"of {', '.join(targets.names())}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target, with what it was run before (60)")
    parser.add_argument("--jobs", type=int, default=2, help="targets at the same time (2)")
    parser.add_argument(
        "--folder", type=Path, default=Path(".fuzz"), help="where everything that is found lies (.fuzz)"
    )
    parser.add_argument("--table", type=Path, help="write the figures there, too")
    parser.add_argument(
        "--minimise", action="store_true", help="make the kept corpus of what was found; search nothing"
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(targets.names()))
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}")
    names = options.names or targets.names()
    campaign = Campaign(options.folder.absolute(), seconds=options.seconds, jobs=max(1, options.jobs))
    if options.minimise:
        for name in names:
            print(f"{name}: {campaign.minimise(name):,} bytes are kept", flush=True)
        return 0
    os.nice(10)
    campaign.run(names)
    machine = f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}, one core for each target."
    table = as_table(campaign.figures, machine)
    print(table)
    if options.table:
        options.table.write_text(table, "utf-8")
    chosen = {name: campaign.figures[name] for name in names}
    for name, figures in chosen.items():
        if figures.crashes:
            print(f"{name}: {describe(figures)}; see {options.folder}/crashes/{name}", file=sys.stderr)
    return int(any(one.crashes or one.seconds < options.seconds for one in chosen.values()))


if __name__ == "__main__":
    sys.exit(main())
