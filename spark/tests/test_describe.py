"""The reference of the tables in the documentation is the one the tables declare."""

from __future__ import annotations

from pathlib import Path

from dmsg_logs.tables.describe import describe

_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "log-tables.rst"


def test_the_reference_of_the_tables_is_current() -> None:
    assert _PAGE.read_text() == describe(), "run: python -m dmsg_logs.tables.describe > docs/reference/log-tables.rst"
