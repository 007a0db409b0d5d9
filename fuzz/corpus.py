"""The inputs of a target: today's seeds, the kept corpus, and former findings.

``corpus/TARGET.txt`` has one input a line, in base64: the smallest set that reaches what was ever reached, as far as it
fits. ``findings/TARGET/NAME`` has an input that once failed, whole, under a name that says how.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from fuzz import targets

FOLDER: Final = Path(__file__).parent
#: Most bytes of inputs to keep for one target: all targets together stay below 2 MB.
KEPT_BYTES: Final = 20_000
#: Longest input that is kept.
INPUT_BYTES: Final = 4_096


def inputs(name: str) -> Iterator[tuple[str, bytes]]:
    """Every input of a target, with a name that tells its origin."""
    for number, data in enumerate(targets.load(name).seeds()):
        yield f"seed {number}", data
    for number, data in enumerate(kept(name)):
        yield f"line {number + 1} of corpus/{name}.txt", data
    for path in sorted((FOLDER / "findings" / name).glob("*")):
        yield f"findings/{name}/{path.name}", path.read_bytes()


def kept(name: str) -> list[bytes]:
    """The kept corpus of a target."""
    path = _path(name)
    return [base64.b64decode(line) for line in path.read_text("ascii").splitlines()] if path.exists() else []


def keep(name: str, found: Iterable[bytes]) -> list[bytes]:
    """Write the kept corpus of a target: the shortest inputs ``found``, as many as fit."""
    room, chosen = KEPT_BYTES, []
    for data in sorted(set(found), key=lambda one: (len(one), one)):
        room -= len(data)
        if room < 0 or len(data) > INPUT_BYTES:
            break
        chosen.append(data)
    _path(name).parent.mkdir(exist_ok=True)
    _path(name).write_text("".join(base64.b64encode(data).decode("ascii") + "\n" for data in chosen), "ascii")
    return chosen


def _path(name: str) -> Path:
    return FOLDER / "corpus" / f"{name}.txt"
