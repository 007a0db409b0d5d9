"""``python -m tests.simulation --seeds 1000:2000``: run many seeds, and tell how to replay those that fail."""

from __future__ import annotations

import argparse
import sys
import time

from twisted.logger import globalLogBeginner

from tests.simulation import dishonest
from tests.simulation.faults import ALL
from tests.simulation.run import run


def main() -> int:
    """Run the seeds that the command line names; 1 when any failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="one seed, or FIRST:END (default: %(default)s)")
    parser.add_argument("--trace", action="store_true", help="print all that happens")
    parser.add_argument("--only", default=",".join(ALL), help="kinds of faults (default: all): %(default)s")
    parser.add_argument("--moving", action="store_true", help="transports that move, in each run")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that fails")
    parser.add_argument("--dishonest", action="store_true", help="with dishonest relays, peers and discovery")
    arguments = parser.parse_args()
    first, _, end = arguments.seeds.partition(":")
    kinds = tuple(filter(None, arguments.only.split(",")))
    globalLogBeginner.beginLoggingTo([], redirectStandardIO=False)  # what is logged is looked at by each run
    began, failed = time.monotonic(), []
    seeds = range(int(first), int(end) if end else int(first) + 1)
    for done, seed in enumerate(seeds, 1):
        on_note, moving = print if arguments.trace else None, arguments.moving or None
        if arguments.dishonest:
            outcome = dishonest.run(seed, on_note=on_note)
        else:
            outcome = run(seed, kinds=kinds, on_note=on_note, moving=moving)
        if outcome.violations:
            failed.append(seed)
            how = " --dishonest" if arguments.dishonest else " --moving" if moving else ""
            print(f"seed {seed} failed; python -m tests.simulation --trace{how} --seeds {seed}")
            for text in outcome.violations[:5]:
                print(f"    {text}", flush=True)
            if not arguments.keep_going:
                break
        if done % 50 == 0:
            print(f"{done} seeds, {time.monotonic() - began:.0f} s, {len(failed)} failed", flush=True)
    print(f"failed: {failed}" if failed else f"no failure in {len(seeds)} seeds, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
