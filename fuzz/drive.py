"""``python -m fuzz.drive TARGET [libFuzzer options]``: one target under the fuzzer, until it fails or its time is over."""

from __future__ import annotations

import shlex
import sys

import atheris

from fuzz import targets


def main(arguments: list[str]) -> None:
    """Instrument what the target is guided by, then search."""
    name, *options = arguments
    with atheris.instrument_imports(include=["dmsg", "dmsg_logs", "fuzz.targets", "twisted.web"]):
        target = targets.load(name)
    # For a merge libFuzzer runs its own first argument in a shell.
    again = f"{shlex.quote(sys.executable)} -m fuzz.drive {name}"
    atheris.Setup([again, *options], target.one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
