"""What the process keeps of freed memory."""

from __future__ import annotations

import subprocess
import sys

_READS = """
import resource
from dmsg.glue.memory import keep_freed_memory
if {kept}:
    keep_freed_memory()
def read():
    pieces = [bytes(65_000) for _ in range(16)]
    del pieces[::-1]
for _ in range(10):
    read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    read()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(*, kept: bool) -> int:
    found = subprocess.run(
        [sys.executable, "-c", _READS.format(kept=kept)], capture_output=True, text=True, timeout=60, check=True
    )
    return int(found.stdout)


def test_what_is_freed_and_needed_again_makes_no_page_faults() -> None:
    assert _faults(kept=True) < 100
    assert _faults(kept=False) > 1_000  # else there is nothing to keep here, and nothing was shown
