"""How much of the code the corpus reaches: ``python -m fuzz.reach [modules]`` says which statements no input executes.

Statements executed during the import do not count, because they need no input.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from coverage import Coverage

from fuzz import corpus, targets

_ROOT: Final = corpus.FOLDER.parent


@dataclass(frozen=True)
class Reach:
    """Lines of a module on which statements in functions begin, and those that no input executed."""

    path: str
    lines: frozenset[int]
    missed: frozenset[int]

    @property
    def percent(self) -> int:
        """100 when all is reached, or there is nothing to reach."""
        return 100 * (len(self.lines) - len(self.missed)) // len(self.lines) if self.lines else 100


def reach(paths: Iterable[str], names: Sequence[str], every: int = 1) -> list[Reach]:
    """Replay each ``every``-th input of the targets ``names``. The ``paths`` of the modules begin at the repository's root.

    A module must not have been imported before, or coverage may miss what it executed.
    """
    files = [str(_ROOT / path) for path in paths]
    coverage = Coverage(data_file=None, include=files, config_file=False)
    coverage.start()
    for name in names:
        one_input = targets.load(name).one_input
        for _, data in islice(corpus.inputs(name), 0, None, every):
            one_input(data)
    coverage.stop()
    return [_reach(coverage, Path(file)) for file in files]


def _reach(coverage: Coverage, file: Path) -> Reach:
    inside = _inside_functions(file.read_text("utf-8"))
    _, statements, _, missing, _ = coverage.analysis2(str(file))
    path = str(file.relative_to(_ROOT))
    return Reach(path, frozenset(inside & set(statements)), frozenset(inside & set(missing)))


def _inside_functions(source: str) -> set[int]:
    """The lines of all bodies of functions."""
    return {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    }


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each module, the least reached first; with ``--below``, only modules below that share."""
    parser = argparse.ArgumentParser(prog="fuzz.reach", description="How much of the code the kept corpus reaches.")
    parser.add_argument("modules", nargs="+", metavar="module", help="as dmsg/mux/core/wire.py")
    parser.add_argument("--targets", nargs="*", help=f"whose corpus is replayed; all of {', '.join(targets.names())}")
    parser.add_argument("--below", type=int, default=101, help="leave out what is reached by so many per cent or more")
    parser.add_argument("--every", type=int, default=1, help="replay one of so many inputs, which is quicker")
    options = parser.parse_args(arguments)
    found = reach(options.modules, options.targets or targets.names(), options.every)
    for one in sorted(found, key=lambda one: one.percent):
        if one.percent < options.below:
            print(
                f"{one.percent:3} % of {len(one.lines):4}  {one.path}  {' '.join(map(str, sorted(one.missed)))}".rstrip()
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
