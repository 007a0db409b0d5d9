"""Writing to many connections after a read on one."""

from __future__ import annotations

from typing import Protocol, TypeVar


class Flushing(Protocol):
    """A shell."""

    def flush(self) -> None:
        """Write what the core has to send."""


class Output(Protocol):
    """One destination: a core whose ``owner`` is the shell that drives it, or ``None`` when that is gone."""

    @property
    def owner(self) -> Flushing | None:
        """The shell."""


AnyOutput = TypeVar("AnyOutput", bound=Output)


def flush_all(outputs: list[AnyOutput]) -> None:
    """Flush the shell of each output once. The list is emptied first, and may grow meanwhile."""
    while outputs:
        batch = outputs[:]
        outputs.clear()
        for output in batch:
            shell = output.owner
            if shell is not None:
                shell.flush()
