"""For ``spark-submit``: does everything. Options: those of ``python -m dmsg_logs run``."""

from __future__ import annotations

from dmsg_logs.__main__ import run

if __name__ == "__main__":
    run(prog_name="run.py")
