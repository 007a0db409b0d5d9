"""What an engine's process says to its parent: one line of JSON when a stage begins, ends, and what came of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def say(**fields: Any) -> None:
    """Tell the parent something."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


@contextmanager
def stage(name: str) -> Iterator[dict[str, Any]]:
    """Measure a stage; what is put into the dictionary is told at its end."""
    results: dict[str, Any] = {}
    began = time.perf_counter()
    say(begin=name)
    yield results
    say(end=name, wall_s=time.perf_counter() - began, results=results)
