"""The targets, one module each. ``one_input`` raises for a broken promise and for nothing else."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import Protocol


class Target(Protocol):
    """A module of this package. It may have a ``DICTIONARY``, too: words that inputs of its kind are made of."""

    def one_input(self, data: bytes) -> None:
        """Drive the code with one input. What an input means is the target's own affair, but any bytes are one."""

    def seeds(self) -> Iterable[bytes]:
        """The inputs the search begins with: made by today's code, so that they follow changes of a format."""


def names() -> list[str]:
    """The names of all targets."""
    return sorted(one.name for one in pkgutil.iter_modules(__path__))


def load(name: str) -> Target:
    """The target of that name."""
    module: Target = importlib.import_module(f"{__name__}.{name}")
    return module
