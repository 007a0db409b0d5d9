"""``python -m fuzz [targets] [--seconds N | --more N] [--jobs N] [--table FILE] [--minimise]``"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from fuzz import targets
from fuzz.figures import FILE, Figures, as_table, describe, load, write
from fuzz.run import Campaign


def main(arguments: list[str] | None = None) -> int:
    """Run the named targets (by default all); 1 if one of them failed or did not get its time."""
    parser = argparse.ArgumentParser(
        prog="fuzz", description="Search for inputs that break a promise, guided by coverage."
    )
    parser.add_argument("names", nargs="*", metavar="target", help=f"of {', '.join(targets.names())}")
    until = parser.add_mutually_exclusive_group()
    until.add_argument("--seconds", type=float, help="CPU seconds for each target, with those of all earlier runs")
    until.add_argument("--more", type=float, default=60, help="CPU seconds for each target besides those (60)")
    parser.add_argument("--jobs", type=int, default=2, help="targets at the same time (2)")
    parser.add_argument(
        "--folder", type=Path, default=Path(".fuzz"), help="where everything that is found lies (.fuzz)"
    )
    parser.add_argument("--figures", type=Path, default=FILE, help="the figures that are added to (fuzz/figures.json)")
    parser.add_argument("--table", type=Path, help="write the figures there, too, for people")
    parser.add_argument(
        "--minimise", action="store_true", help="make the kept corpus of what was found; search nothing"
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(targets.names()))
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}")
    names = options.names or targets.names()

    def noted(figures: Mapping[str, Figures]) -> None:
        if options.table:
            write(options.table, as_table(figures))

    campaign = Campaign(options.folder.absolute(), jobs=max(1, options.jobs), record=options.figures, noted=noted)
    if options.minimise:
        for name in names:
            print(f"{name}: {campaign.minimise(name):,} bytes are kept", flush=True)
        return 0
    known = campaign.figures
    goals = {name: options.seconds or known[name].seconds + options.more for name in names}
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda *_: campaign.stop())
    os.nice(10)
    campaign.run(goals)
    print(as_table(load(options.figures)))
    figures = campaign.figures
    for name in names:
        if figures[name].crashes:
            print(f"{name}: {describe(figures[name])}; see {options.folder}/crashes/{name}", file=sys.stderr)
    return int(any(figures[name].crashes or figures[name].seconds < goals[name] for name in names))


if __name__ == "__main__":
    sys.exit(main())
