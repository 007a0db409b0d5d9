"""How much of the code the corpus reaches: ``python -m fuzz.reach [modules]`` says which statements no input executes.

Statements executed during the import do not count, because they need no input.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Final

from coverage import Coverage

from fuzz import corpus, targets

_ROOT: Final = corpus.FOLDER.parent
#: The inputs of a target are replayed in so many turns: one is enough for most modules.
_TURNS: Final = 16


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


def reach(paths: Iterable[str], names: Sequence[str], missing: Callable[[list[Reach]], Iterable[str]]) -> list[Reach]:
    """Replay the inputs of the targets ``names``, until all are replayed or no module is ``missing`` in what is found.

    After a sixteenth of them all, those of targets that reached something of the missing modules come first.

    The ``paths`` of the modules begin at the root of the repository. A module must not have been imported before, or coverage
    may miss what it executed.
    """
    files = [_ROOT / path for path in paths]
    coverage = Coverage(data_file=None, include=list(map(str, files)), config_file=False)
    turns = dict.fromkeys(names, 0)
    chosen = list(names)
    found: list[Reach] = []
    while chosen:
        coverage.start()
        for name in chosen:
            coverage.switch_context(name)
            one_input = targets.load(name).one_input
            for _, data in islice(corpus.inputs(name), turns[name], None, _TURNS):
                one_input(data)
            turns[name] += 1
        coverage.stop()
        found = [_reach(coverage, file) for file in files]
        wanted = set(missing(found))
        if not wanted:
            break
        left = [name for name in names if turns[name] < _TURNS]
        reaching = _reaching(coverage, wanted)
        chosen = [name for name in left if name in reaching] or left
    return found


def _reaching(coverage: Coverage, paths: Iterable[str]) -> set[str]:
    """The targets that executed statements in functions of modules at ``paths``."""
    found: set[str] = set()
    for path in paths:
        inside = _inside_functions(_ROOT / path)
        for line, names in coverage.get_data().contexts_by_lineno(str(_ROOT / path)).items():
            found |= set(names) if line in inside else set()
    return found


def _reach(coverage: Coverage, file: Path) -> Reach:
    inside = _inside_functions(file)
    _, statements, _, missing, _ = coverage.analysis2(str(file))
    path = str(file.relative_to(_ROOT))
    return Reach(path, inside & set(statements), inside & set(missing))


@cache
def _inside_functions(file: Path) -> frozenset[int]:
    """The lines of all bodies of functions."""
    return frozenset(
        line
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    )


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each module, the least reached first; with ``--below``, only modules below that share."""
    parser = argparse.ArgumentParser(prog="fuzz.reach", description="How much of the code the kept corpus reaches.")
    parser.add_argument("modules", nargs="+", metavar="module", help="as dmsg/mux/core/wire.py")
    parser.add_argument("--targets", nargs="*", help=f"whose corpus is replayed; all of {', '.join(targets.names())}")
    below = "leave out what is reached by so many per cent or more, and end as soon as nothing is left"
    parser.add_argument("--below", type=int, default=101, help=below)
    parser.add_argument("--least", type=int, default=0, help="leave out modules with fewer lines in functions")
    parser.add_argument("--but", nargs="*", default=(), help="modules that need not be reached to end")
    options = parser.parse_args(arguments)

    def left(found: list[Reach]) -> list[Reach]:
        return [one for one in found if one.percent < options.below and len(one.lines) >= options.least]

    found = reach(
        options.modules,
        options.targets or targets.names(),
        lambda found: {one.path for one in left(found)} - set(options.but),
    )
    for one in sorted(left(found), key=lambda one: one.percent):
        print(f"{one.percent:3} % of {len(one.lines):4}  {one.path}  {' '.join(map(str, sorted(one.missed)))}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
