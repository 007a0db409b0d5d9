"""``python -m fuzz.drive TARGET [libFuzzer options]``: one target under the fuzzer, until it fails or its time is over."""

from __future__ import annotations

import sys

import atheris

from fuzz import targets


def main(arguments: list[str]) -> None:
    """Instrument what the target is guided by, then search."""
    name, *options = arguments
    with atheris.instrument_imports(include=["dmsg", "dmsg_logs", "fuzz.targets", "twisted.web"]):
        target = targets.load(name)
    atheris.Setup([f"fuzz-{name}", *options], target.one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
