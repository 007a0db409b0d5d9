"""The report: one self-contained page with plots, made from the tables.

>>> data = collect(spark, tables)                                            # doctest: +SKIP
>>> write_report(render(data, summary=summary, ranks=ranks), figures(data), directory)  # doctest: +SKIP
"""

from __future__ import annotations

from dmsg_logs.report.data import ReportData
from dmsg_logs.report.figures import figures
from dmsg_logs.report.gathering import collect, gather
from dmsg_logs.report.page import render, write_report

__all__ = ["ReportData", "collect", "figures", "gather", "render", "write_report"]
