"""For ``spark-submit``: writes the report. Options: those of ``python -m dmsg_logs report``."""

from __future__ import annotations

from dmsg_logs.__main__ import report

if __name__ == "__main__":
    report(prog_name="report.py")
