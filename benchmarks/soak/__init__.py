"""A network under mixed load and faults for a long time: no data is lost, and no process grows.

``run(sizes)`` is the ten minutes of ``make bench``; ``python -m benchmarks.soak`` is the long run of ``make soak``.
"""

from benchmarks.soak.run import NAME, run, soak

__all__ = ["NAME", "run", "soak"]
