"""For ``spark-submit``: takes in what is new in the landing zone. Options: those of ``python -m dmsg_logs ingest``."""

from __future__ import annotations

from dmsg_logs.__main__ import ingest

if __name__ == "__main__":
    ingest(prog_name="ingest.py")
