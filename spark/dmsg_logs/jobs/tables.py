"""For ``spark-submit``: makes the tables. Options: those of ``python -m dmsg_logs tables``."""

from __future__ import annotations

from dmsg_logs.__main__ import make_tables

if __name__ == "__main__":
    make_tables(prog_name="tables.py")
