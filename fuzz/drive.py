"""``python -m fuzz.drive TARGET [libFuzzer options]``: one target under the fuzzer, until it fails or its time is over."""

from __future__ import annotations

import shlex
import sys
import time
from typing import Final

import atheris

from fuzz import targets

#: CPU seconds one input may take. Not wall clock time, in which inputs are slow on a busy machine.
INPUT_CPU_S: Final = 5.0


def main(arguments: list[str]) -> None:
    """Instrument the modules that guide the target, then search."""
    name, *options = arguments
    with atheris.instrument_imports(include=["dmsg", "dmsg_logs", "fuzz.targets", "twisted.web"]):
        target = targets.load(name)

    def one_input(data: bytes) -> None:
        began = time.thread_time()
        target.one_input(data)
        took = time.thread_time() - began
        assert took < INPUT_CPU_S, f"this input took {took:.1f} CPU seconds"

    # For a merge libFuzzer runs its own first argument in a shell.
    again = f"{shlex.quote(sys.executable)} -m fuzz.drive {name}"
    atheris.Setup([again, *options], one_input)
    # Read by fuzz.run. On a busy machine imports take most of a slice, and they are no search.
    print(f"fuzz.drive: {time.process_time():.2f} CPU seconds before the search", file=sys.stderr, flush=True)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
