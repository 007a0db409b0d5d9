"""Holds what an engine made of a landing zone against the truth, and engines against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import duckdb

from bench.shape import ACCOUNTS, GOOD, HOURLY, QUARANTINE, TRANSPORTS
from dmsg_logs.synthetic import Truth

_MODULUS: Final = 2**61 - 1
#: Floats are sums and interpolations in another order.
_DIGITS: Final = 6


class Wrong(AssertionError):
    """An engine's result is not the truth."""


def _rows(query: str) -> list[tuple[Any, ...]]:
    return duckdb.execute(query).fetchall()


def _files(out: Path, name: str) -> str:
    for pattern in (f"{name}.parquet", f"{name}/**/*.parquet"):
        if list(out.glob(pattern)):
            return str(out / pattern)
    raise Wrong(f"{out.name} has no {name}")


def check_clean(out: Path, truth: Truth) -> None:
    """Every good key exactly once, lines on their day, every corrupt line in quarantine, accounts that balance."""
    good = _files(out, GOOD) if (out / GOOD).exists() else _files(out, GOOD + "_keys")
    source = f"read_parquet('{good}', hive_partitioning=true)"
    rows = _rows(
        f"select node, boot, count(*), sum(seq), sum(cast(seq as hugeint) * seq) % {_MODULUS}, count(distinct seq) "
        f"from {source} group by node, boot"
    )
    found = {(node, boot): tuple(map(int, figures)) for node, boot, *figures in rows}
    wanted = {
        (run["node"], run["boot"]): (run["lines"], run["seq_sum"], run["seq_square_sum"], run["lines"])
        for run in truth.runs
    }
    _same(out, "keys of good lines by run", found, wanted)
    dates = _rows(f"select cast(date as varchar), count(*) from {source} group by date")
    _same(out, "good lines by date", dict(dates), truth.dates)
    raw = _rows(f"select count(raw) from {source}")
    _same(out, "lines of later versions", raw[0][0], truth.newer)
    corrupt = _rows(f"select count(*), count(reason) from '{_files(out, QUARANTINE)}'")
    _same(out, "quarantine", corrupt[0], (truth.corrupt, truth.corrupt))
    accounts = _rows(
        "select count(*), sum(lines), sum(good), sum(dup), sum(corrupt), sum(missing), "
        f"count(*) filter (lines <> good + dup + corrupt) from '{_files(out, ACCOUNTS)}'"
    )
    expected = (truth.files, truth.lines, truth.good, truth.dup, truth.corrupt, truth.missing, 0)
    _same(out, "accounts", tuple(map(int, accounts[0])), expected)


def tables_of(out: Path) -> dict[str, Any]:
    """What the tables of one engine say, in a form that does not depend on order."""
    transports = _rows(
        "select state, count(*), count(opened_at), count(closed_at), sum(bytes), sum(code), "
        "round(sum(accept_ms), 3), round(sum(duration_s), 3), round(sum(closed_at - opened_at), 3) "
        f"from '{_files(out, TRANSPORTS)}' group by state order by state"
    )
    columns = "connections_opened, connections_closed, handshakes_failed, transports_opened, transports_failed, refusals, bytes"
    hourly = _rows(
        f"select node, hour, {columns}, {_rounded('accept_ms')}, {_rounded('queue_bytes')} "
        f"from '{_files(out, HOURLY)}' order by node, hour"
    )
    return {
        TRANSPORTS: [tuple(_plain(value) for value in row) for row in transports],
        HOURLY: [tuple(_plain(value) for value in row) for row in hourly],
    }


def _rounded(column: str) -> str:
    return ", ".join(f"round({column}[{at}], {_DIGITS}) as {column}_{at}" for at in (1, 2, 3))


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, int) or hasattr(value, "as_tuple") else value


def check_tables(out: Path, reference: dict[str, Any], truth: Truth) -> dict[str, Any]:
    """The tables agree with another engine's (``reference``, empty for the first one) and with the truth."""
    found = tables_of(out)
    for name, rows in reference.items():
        _same(out, name, found[name], rows)
    opened = sum(relay["transports_opened"] for relay in truth.relays.values())
    _same(out, "transports opened", int(sum(row[2] for row in found[TRANSPORTS])), opened)
    for at, name in ((2, "connections_opened"), (4, "handshakes_failed"), (7, "refusals"), (8, "bytes")):
        wanted = sum(relay[name] for relay in truth.relays.values())
        _same(out, name, int(sum(row[at] for row in found[HOURLY])), wanted)
    return found


def _same(out: Path, what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        shown = _first_difference(found, wanted)
        raise Wrong(f"{out.name}: {what}: {shown}")


def _first_difference(found: Any, wanted: Any) -> str:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in {**wanted, **found}:
            if found.get(key) != wanted.get(key):
                return f"{key}: {found.get(key)} instead of {wanted.get(key)}"
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        for one, other in zip(found, wanted, strict=True):
            if one != other:
                return f"{one} instead of {other}"
    return f"{found!s:.300} instead of {wanted!s:.300}"
