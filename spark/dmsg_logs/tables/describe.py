"""``python -m dmsg_logs.tables.describe``: the reference of the tables as reST, made of what the tables declare."""

from __future__ import annotations

from dmsg_logs.tables.generations import TABLES
from dmsg_logs.tables.tabledef import Column

_HEAD = """\
.. Made by "python -m dmsg_logs.tables.describe"; a test compares the two.

====================
Tables of event logs
====================

What ``python -m dmsg_logs run`` makes of the event logs; :doc:`../howto/analyse-logs` tells how to run it and how to
read the tables. Times named ``ts`` or ending in ``_at`` are Unix seconds, an ``hour`` is a timestamp in UTC, a ``date``
a day in UTC. Keys are hexadecimal text. Percentiles are exact, interpolated between neighbours. Every column may be
null where a line did not tell.
"""


def describe() -> str:
    """The whole page."""
    sections = [_HEAD]
    for table in TABLES.values():
        partition = f" Partitioned by ``{table.partition}``." if table.partition else ""
        sections.append(
            f"\n{table.name}\n{'=' * len(table.name)}\n\n{table.meaning}{partition}\n\n{_list(table.columns)}"
        )
    return "".join(sections)


def _list(columns: tuple[Column, ...]) -> str:
    lines = [".. list-table::", "   :header-rows: 1", "   :widths: 22 12 10 56", ""]
    for row in (Column("column", "type", "what it is", "unit"), *columns):
        head = row.name == "column" and row.type == "type"
        name = row.name if head else f"``{row.name}``"
        lines += [f"   * - {name}", f"     - {row.type}", f"     - {row.unit}".rstrip(), f"     - {row.meaning}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(describe(), end="")
