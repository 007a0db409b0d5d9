"""The CPU time of a start: of commands that need no network, of those that do, of a relay, and of an application's import.

The base is a start of Python that imports Twisted's reactor and endpoints with TLS, measured in the same repeat: what every
program on Twisted pays. Each program ends when it has shown its help, which is when it has imported what it needs.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Final

from benchmarks.commands import environment
from benchmarks.processes import ROOT, ChildFailed
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes

NAME: Final = "starts"
_TWISTED: Final = ("-c", "import twisted.internet.ssl, twisted.internet.endpoints, twisted.internet.reactor")
#: Program -> its arguments, and its greatest cost in bases.
_PROGRAMS: Final = {
    "dmsg --help": (("-m", "dmsg.cli.main", "--help"), 0.5),
    "dmsg keygen": (("-m", "dmsg.cli.main", "keygen", "--help"), 0.7),
    "dmsg ping": (("-m", "dmsg.cli.main", "ping", "--help"), 2.5),
    "twist dmsg-server": (("-m", "twisted", "dmsg-server", "--help"), 2.5),
    "import of a client": (("-c", "import dmsg.mux.client.service"), 2.0),
}
_TIMEOUT_S: Final = 60.0


def run(sizes: Sizes) -> list[Row]:
    """Rows for each program."""
    for arguments in (_TWISTED, *(each for each, _ in _PROGRAMS.values())):
        _cpu_s(arguments)  # caches the bytecode, as an installation has it
    bases: list[float] = []
    costs: dict[str, list[float]] = {name: [] for name in _PROGRAMS}
    for _ in range(sizes.repeats):
        bases.append(_cpu_s(_TWISTED))
        for name, (arguments, _) in _PROGRAMS.items():
            costs[name].append(_cpu_s(arguments))
    rows = [row(NAME, "import of Twisted, CPU", [each * 1e3 for each in bases], "ms")]
    for name, (_, multiple) in _PROGRAMS.items():
        multiples = [cost / base for cost, base in zip(costs[name], bases, strict=True)]
        rows.append(row(NAME, f"{name}, multiple of that", multiples, "x", at_most=multiple))
    return rows


def _cpu_s(arguments: tuple[str, ...]) -> float:
    """CPU seconds of Python with ``arguments``. Raises ``ChildFailed``."""
    before = _children_s()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _, said = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise ChildFailed(f"{arguments} did not end in {_TIMEOUT_S:g} s") from None
    if process.returncode:
        raise ChildFailed(f"{arguments} ended with {process.returncode}: {said.decode(errors='replace')}")
    return _children_s() - before


def _children_s() -> float:
    """CPU seconds of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
