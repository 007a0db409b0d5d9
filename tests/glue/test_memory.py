"""What the process keeps of freed memory."""

from __future__ import annotations

import subprocess
import sys

_READS = """
import resource
from dmsg.glue.memory import keep_freed_memory
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


def test_what_is_freed_and_needed_again_makes_no_page_faults() -> None:
    found = subprocess.run([sys.executable, "-c", _READS], capture_output=True, text=True, timeout=60, check=True)
    assert int(found.stdout) < 100  # glibc by itself: 154 for each read
