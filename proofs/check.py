"""Check the models of the secure extension with Spin, each property and each broken variant: ``make proof``.

A property that holds is explored over all states. A variant leaves one part of the protocol out and must violate the
property that this part is there for: otherwise the model would prove nothing about it.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
#: A search that needs more memory than this is cut off and counts as failed, in bytes.
MEMORY_LIMIT_BYTES: Final = 6 << 30
#: The deepest path of a search, in steps; more would be reported as an incomplete search.
DEPTH: Final = 100_000
#: What a search prints when an end waits for ever.
STUCK: Final = "invalid end state"
#: A property number that stands for all of a model's properties.
ALL: Final = 0


@dataclass(frozen=True)
class Check:
    """One search. ``violates`` is the text that must come up, or ``""`` when the property must hold.

    ``deadlocks`` says whether a state without a successor is an error: in a model of an intruder who may keep every
    message back it is none.
    """

    model: str
    name: str
    defines: tuple[str, ...]
    violates: str = ""
    deadlocks: bool = False


def _property(number: int) -> str:
    return f"PROPERTY={number}"


_VIOLATED: Final = "assertion violated"
CHECKS: Final = (
    Check("handshake", "secrecy, agreement of both ends, injectivity", (_property(ALL),)),
    Check("handshake", "the same with the responder's secret stolen before", (_property(ALL), "STOLEN_BEFORE")),
    Check("handshake", "secrecy without static keys", (_property(1), "NO_STATIC"), _VIOLATED),
    Check("handshake", "secrecy after theft without the ephemeral-ephemeral value", (_property(1), "NO_EE"), _VIOLATED),
    Check(
        "handshake",
        "the responder's agreement without the relay in the prologue",
        (_property(2), "NO_RELAY_BINDING"),
        _VIOLATED,
    ),
    Check(
        "handshake",
        "the responder's agreement, secret stolen, without the static-ephemeral value",
        (_property(2), "STOLEN_BEFORE", "NO_SE"),
        _VIOLATED,
    ),
    Check("handshake", "the initiator's agreement without static keys", (_property(3), "NO_STATIC"), _VIOLATED),
    Check("handshake", "injectivity without confirmation", (_property(4), "NO_CONFIRMATION"), _VIOLATED),
    Check("downgrade", "never in the clear, at the dialler, at the listener, at both", (_property(ALL),)),
    Check(
        "downgrade",
        "the dialler, when 'unsupported' leads to a plain transport",
        (_property(1), "FALL_BACK"),
        _VIOLATED,
    ),
    Check(
        "downgrade", "the listener, when no entry counts as no promise", (_property(2), "OPEN_WITHOUT_ENTRY"), _VIOLATED
    ),
    Check(
        "downgrade",
        "both, when a first FWD without a message is taken as data",
        (_property(3), "TAKE_PLAIN_FWD"),
        _VIOLATED,
    ),
    Check(
        "resumption",
        "every byte once, honest numbers, clean ends, no end that waits for ever; one fault",
        (_property(ALL), "FAULTS=1", "SIZE_1=2"),
        deadlocks=True,
    ),
    Check("resumption", "the same; two faults", (_property(ALL), "FAULTS=2"), deadlocks=True),
    Check(
        "resumption",
        "every byte once, without sending again",
        (_property(1), "FAULTS=1", "GO_ON_FROM_NEXT"),
        _VIOLATED,
        deadlocks=True,
    ),
    Check(
        "resumption",
        "every byte once, with the count as it was told",
        (_property(1), "FAULTS=1", "SKIP_AS_TOLD"),
        _VIOLATED,
        deadlocks=True,
    ),
    Check(
        "resumption",
        "honest numbers, with only the last path's counted",
        (_property(2), "FAULTS=2", "FURTHEST_OF_LAST_PATH"),
        _VIOLATED,
        deadlocks=True,
    ),
    Check(
        "resumption",
        "honest numbers, with a later count that may be smaller",
        (_property(2), "FAULTS=2", "FORGET_COUNT"),
        _VIOLATED,
        deadlocks=True,
    ),
    Check(
        "resumption",
        "honest numbers, with confirmations in any order",
        (_property(2), "FAULTS=2", "ANY_ORDER"),
        _VIOLATED,
        deadlocks=True,
    ),
    Check(
        "resumption",
        "clean ends, when any CLOSE is believed",
        (_property(3), "FAULTS=1", "BELIEVE_CLOSE"),
        _VIOLATED,
        deadlocks=True,
    ),
    Check(
        "resumption",
        "failing only without a peer, when a CLOSE ends the search",
        (_property(4), "FAULTS=2", "ONE_ATTEMPT"),
        _VIOLATED,
        deadlocks=True,
    ),
    Check(
        "resumption",
        "no end that waits for ever, when the transport moves on kk1 alone",
        (_property(ALL), "FAULTS=1", "MOVE_UNCONFIRMED"),
        STUCK,
        deadlocks=True,
    ),
    Check(
        "resumption",
        "no end that waits for ever, when an unproven CLOSE is not answered",
        (_property(ALL), "FAULTS=1", "KEEP_QUIET"),
        STUCK,
        deadlocks=True,
    ),
)


def search(check: Check) -> tuple[str, int]:
    """Run one search: the first error Spin found (``""`` for none) and the number of states stored.

    Raises ``RuntimeError`` when the search did not come to an end, and ``CalledProcessError`` when Spin or the C
    compiler failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        defines = [f"-D{define}" for define in check.defines]
        _run(["spin", *defines, "-a", str(HERE / f"{check.model}.pml")], folder)
        _run(["cc", "-w", "-O2", "-DSAFETY", "-DCOLLAPSE", "-o", "search", "pan.c"], folder)
        flags = [] if check.deadlocks else ["-E"]
        text = _run(["./search", f"-m{DEPTH}", *flags], folder)
    if "errors: " not in text or "max search depth too small" in text or "out of memory" in text:
        raise RuntimeError(f"the search did not end: {text[-500:]}")
    states = next(int(line.split()[0]) for line in text.splitlines() if "states, stored" in line)
    found = next((line.partition(": ")[2] for line in text.splitlines() if line.startswith("pan:1: ")), "")
    return found, states


def _run(command: list[str], folder: str) -> str:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))

    done = subprocess.run(
        command, cwd=folder, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=limit
    )
    return done.stdout


def main() -> int:
    """Run every check and print one line for each; the exit status is 1 when one did not come out as it must."""
    wrong = 0
    for check in CHECKS:
        began = time.monotonic()
        found, states = search(check)
        good = bool(check.violates) == bool(found) and check.violates in found
        wrong += not good
        outcome = (
            ("violated, as it must be" if check.violates else "holds") if good else f"WRONG: {found or 'no violation'}"
        )
        elapsed_s = time.monotonic() - began
        print(f"{check.model:<11} {check.name:<88} {outcome:<24} {states:>11,} states {elapsed_s:6.1f} s", flush=True)
    print(f"{len(CHECKS) - wrong} of {len(CHECKS)} as they must be")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
