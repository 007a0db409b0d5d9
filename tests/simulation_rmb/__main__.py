"""``python -m tests.simulation_rmb --seeds 1000:2000``: many runs, or one again (``--seeds 1234 --verbose``)."""

from __future__ import annotations

import argparse
import gc
import sys
import time

from .profiles import FAULTS
from .world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation_rmb", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="one seed, or FIRST:LAST, which is not run")
    parser.add_argument("--faults", help=f"only these, with commas between them, of: {', '.join(FAULTS)}")
    parser.add_argument("--verbose", action="store_true", help="tell all that happens")
    parser.add_argument("--stop", action="store_true", help="stop at the first that fails")
    options = parser.parse_args()
    faults = tuple(options.faults.split(",")) if options.faults is not None else None
    first, colon, last = options.seeds.partition(":")
    seeds = range(int(first), int(last) if colon else int(first) + 1)
    gc.collect()
    gc.freeze()
    failed, began = [], time.monotonic()
    for seed in seeds:
        try:
            failures = World(seed, faults=faults, verbose=options.verbose).run()
        except Exception as error:
            if options.verbose:
                raise
            failures = [f"the run broke off: {type(error).__name__}: {error}"]
        if failures:
            failed.append(seed)
            again = f"python -m tests.simulation_rmb --seeds {seed} --verbose"
            again += f" --faults {options.faults!r}" if faults is not None else ""
            print(f"seed {seed}: {len(failures)} failures; again: {again}", flush=True)
            for failure in failures[:3]:
                print("   ", failure[:2000].replace("\n", "\n        "), flush=True)
            if options.stop:
                break
    print(f"{len(seeds)} seeds, {len(failed)} failed {failed}, {time.monotonic() - began:.1f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
