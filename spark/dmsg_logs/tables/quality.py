"""Rules for the tables, checked on the written files before readers see them.

A rule counts its violations and stops nothing: a fleet's clocks jump and lines get lost, and people should see that.
Only a mistake in this package can break a rule of ``kind`` ``table``; rules of ``kind`` ``data`` are about the lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from itertools import pairwise
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

#: Allowed difference, in seconds, between a duration that a program measured and the times of its lines.
CLOCK_TOLERANCE_S: Final = 5


class Rule(NamedTuple):
    """A rule for each row of a table: ``violation`` is the SQL condition of a row that breaks it."""

    table: str
    name: str
    violation: str
    meaning: str
    kind: str = "table"


class Balance(NamedTuple):
    """Two sums that must be equal, each a table and an SQL aggregate; violations are by how much they differ."""

    name: str
    left: tuple[str, str]
    right: tuple[str, str]
    meaning: str
    kind: str = "table"


class Result(NamedTuple):
    """The result of a rule: ``table`` (both for a balance), ``rule``, its kind, its violations, its meaning."""

    table: str
    rule: str
    kind: str
    violations: int
    meaning: str


class Findings(NamedTuple):
    """Rows of each table, as read back, and the results of all rules."""

    rows: dict[str, int]
    results: list[Result]


def _falling(prefix: str, *columns: str) -> str:
    names = [f"{prefix}_{each}" for each in columns]
    return " or ".join(f"{one} > {other}" for one, other in pairwise(names))


def _negative(*columns: str) -> str:
    return " or ".join(f"{each} < 0" for each in columns)


def _session_rules(table: str, *amounts: str) -> tuple[Rule, ...]:
    apart = f"abs(closed_at - opened_at - duration_s) > {CLOCK_TOLERANCE_S}"
    return (
        Rule(table, "closed_before_opened", "closed_at < opened_at", "a closing is not before its opening", "data"),
        Rule(table, "negative_duration", "duration_s < 0", "no duration is negative", "data"),
        Rule(table, "negative_amounts", _negative(*amounts), "no amount is negative", "data"),
        Rule(table, "duration_apart", apart, f"times and duration agree to {CLOCK_TOLERANCE_S} s", "data"),
        Rule(table, "open_with_end", "state = 'open' and closed_at is not null", "what is open has no end"),
        Rule(table, "over_but_not_open", "run_over and state <> 'open'", "only what is open is cut off"),
        Rule(table, "no_date", "date is null", "every row has a date"),
    )


_POINTS: Final = ("p50", "p95", "p99")

RULES: Final = (
    *_session_rules("connections", "bytes_in", "bytes_out", "frames_in", "frames_out", "transports"),
    Rule("connections", "unopened", "state = 'unopened'", "every closing has its opening", "data"),
    Rule("connections", "cut_off", "run_over", "every connection of a run that is over has its closing", "data"),
    *_session_rules("transports", "bytes_in", "bytes_out", "queue_peak_bytes"),
    Rule("transports", "unopened", "state = 'closed' and opened_at is null", "every closing has its opening", "data"),
    Rule("transports", "cut_off", "run_over", "every transport of a run that is over has its closing", "data"),
    Rule(
        "relay_hourly",
        "percentile_order",
        " or ".join(_falling(name, *_POINTS) for name in ("handshake_ms", "accept_ms", "queue_bytes")),
        "percentiles rise",
    ),
    Rule("relay_hourly", "queue_max", "queue_bytes_p99 > queue_bytes_max", "no percentile is above the maximum"),
    Rule("relay_hourly", "open_below_opened", "connections_open_max < 0", "never less than no connection is open"),
    Rule("relay_hourly", "hour_in_date", "to_date(hour) <> date", "the hour lies in the date"),
    Rule("relay_failures", "count", "count is null or count < 1", "a row stands for one failure at least", "data"),
    Rule("pair_latency", "dials_ok", "dials_ok > dials", "no more dials succeed than there are"),
    Rule(
        "pair_latency",
        "percentile_order",
        f"{_falling('accept_ms', *_POINTS)} or {_falling('dial_ms', *_POINTS)}",
        "percentiles rise",
    ),
    Rule(
        "pair_latency", "failed_through", "server = '' and dials_ok > 0", "a dial that succeeds names its relay", "data"
    ),
    Rule("discovery_hourly", "errors", "errors_4xx + errors_5xx > requests", "no more errors than requests"),
    Rule("discovery_hourly", "percentile_order", _falling("elapsed_ms", *_POINTS, "max"), "percentiles rise"),
    Rule(
        "dial_failures", "counts", "clients > dials or dials > attempts", "attempts, their dials, their clients: fewer"
    ),
    Rule("dial_failures", "percentile_order", _falling("elapsed_ms", "p50", "p99"), "percentiles rise"),
    Rule("resumptions", "counts", "transports > resumptions", "no more transports than resumptions"),
    Rule("resumptions", "percentile_order", _falling("elapsed_ms", *_POINTS, "max"), "percentiles rise"),
    Rule("top_talkers", "sum", "bytes <> bytes_sent + bytes_received", "the sum is that of its parts"),
    Rule("capacity_forecast", "interval", "low > value or value > high", "the value lies in its interval"),
    *_session_rules("twin_sessions", "envelopes_in", "envelopes_out", "bytes_in", "bytes_out"),
    Rule("twin_sessions", "unopened", "state = 'unopened'", "every closing has its opening", "data"),
    Rule("twin_sessions", "cut_off", "run_over", "every session of a run that is over has its closing", "data"),
    Rule("envelopes_hourly", "hour_in_date", "to_date(hour) <> date", "the hour lies in the date"),
    Rule("federation_hourly", "failed", "failed > attempts", "no more attempts fail than there are"),
    Rule("federation_hourly", "percentile_order", _falling("elapsed_ms", *_POINTS), "percentiles rise"),
    Rule("rmb_failures", "count", "count is null or count < 1", "a row stands for one failure at least", "data"),
    Rule("calls_hourly", "callers", "callers > calls", "a caller has one call at least"),
    Rule("calls_hourly", "percentile_order", _falling("elapsed_ms", *_POINTS), "percentiles rise"),
    Rule(
        "log_quality", "gaps", "gaps > gap_lines or gap_lines < 0", "a gap is one line at least; no number comes twice"
    ),
    Rule("log_quality", "lost", "gap_lines > 0", "no number of a run is missing", "data"),
    Rule("log_quality", "short_files", "missing > 0", "files hold the lines their names promise", "data"),
    Rule("log_quality", "corrupt", "corrupt > 0", "every line can be read", "data"),
    Rule("log_quality", "dropped", "events_dropped > 0", "every writer keeps up", "data"),
    Rule("log_quality", "percentile_order", _falling("lateness_s", "p50", "p99", "max"), "percentiles rise"),
)

_OPENED: Final = "count_if(role = 'server' and opened_at is not null)"
_CLOSED: Final = "count_if(role = 'server' and state = 'closed')"

BALANCES: Final = (
    Balance(
        "connections_opened",
        ("connections", _OPENED),
        ("relay_hourly", "sum(connections_opened)"),
        "connections opened in the hours are those of the list",
    ),
    Balance(
        "transports_opened",
        ("transports", _OPENED),
        ("relay_hourly", "sum(transports_opened)"),
        "transports opened in the hours are those of the list",
    ),
    Balance(
        "transports_closed",
        ("transports", _CLOSED),
        ("relay_hourly", "sum(transports_closed)"),
        "transports closed in the hours are those of the list",
    ),
    Balance(
        "bytes",
        ("transports", "sum(if(role = 'server' and state = 'closed', bytes_in + bytes_out, 0))"),
        ("relay_hourly", "sum(bytes)"),
        "bytes of the hours are those of the list",
    ),
    Balance(
        "transport_failures",
        ("relay_failures", "sum(if(what = 'transport', count, 0))"),
        ("relay_hourly", "sum(transports_failed)"),
        "failed transports have each a reason",
    ),
    Balance(
        "refusals",
        ("relay_failures", "sum(if(what = 'refused', count, 0))"),
        ("relay_hourly", "sum(refusals)"),
        "refusals have each a reason",
    ),
    Balance(
        "pair_transports",
        ("transports", _OPENED),
        ("pair_latency", "sum(transports)"),
        "transports of the pairs are those of the list",
    ),
    Balance(
        "twin_sessions_opened",
        ("twin_sessions", _OPENED),
        ("envelopes_hourly", "sum(sessions_opened)"),
        "sessions of twins opened in the hours are those of the list",
    ),
    Balance(
        "federation_failures",
        ("rmb_failures", "sum(if(what = 'federation', count, 0))"),
        ("federation_hourly", "sum(failed)"),
        "failed posts to other relays have each a reason",
    ),
    Balance(
        "good_lines",
        ("accounts", "sum(good)"),
        ("log_quality", "sum(lines)"),
        "the lines of the runs are the good ones of the files",
    ),
)


def check(
    tables: Mapping[str, DataFrame],
    rules: tuple[Rule, ...] = RULES,
    balances: tuple[Balance, ...] = BALANCES,
) -> Findings:
    """Check all rules in one job; each table is read once, and only the columns its rules name.

    Rules of a table that is not among ``tables`` are left out; ``accounts`` may be one of them.
    """
    mine = [rule for rule in rules if rule.table in tables]
    sides = [balance for balance in balances if {balance.left[0], balance.right[0]} <= set(tables)]
    sums = sorted({side for balance in sides for side in (balance.left, balance.right)})
    if not tables:
        return Findings({}, [])

    def summary(name: str, frame: DataFrame) -> DataFrame:
        violations = [F.expr(f"count_if({rule.violation})") for rule in mine if rule.table == name]
        own_sums = [F.expr(f"cast({text} as long)") for table, text in sums if table == name]
        return frame.agg(
            F.lit(name).alias("name"),
            F.count(F.lit(1)).alias("rows"),
            _array(violations).alias("violations"),
            _array(own_sums).alias("sums"),
        )

    union: Callable[[DataFrame, DataFrame], DataFrame] = DataFrame.unionAll
    found: dict[str, Any] = {
        row["name"]: row for row in reduce(union, [summary(*item) for item in tables.items()]).collect()
    }
    counted = {name: iter(row["violations"]) for name, row in found.items()}
    values = {name: iter(row["sums"]) for name, row in found.items()}
    results = [Result(rule.table, rule.name, rule.kind, next(counted[rule.table]), rule.meaning) for rule in mine]
    summed = {side: next(values[side[0]]) or 0 for side in sums}
    for balance in sides:
        both = f"{balance.left[0]}, {balance.right[0]}"
        apart = abs(summed[balance.left] - summed[balance.right])
        results.append(Result(both, balance.name, balance.kind, apart, balance.meaning))
    return Findings({name: found[name]["rows"] for name in tables}, results)


def _array(columns: list[Column]) -> Column:
    return F.array(*columns) if columns else F.array().cast("array<bigint>")
