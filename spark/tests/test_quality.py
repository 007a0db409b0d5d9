"""Rules over tables: each counts exactly the rows that break it."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dmsg_logs.tables.generations import TABLES
from dmsg_logs.tables.quality import BALANCES, RULES, Balance, Rule, check


def test_rules_and_balances_count(spark: SparkSession) -> None:
    one = spark.createDataFrame([(1, 5.0), (2, None), (7, -3.0), (9, -1.0)], "id long, amount double")
    other = spark.createDataFrame([(1, 3), (2, 4)], "id long, count long")
    rules = (
        Rule("one", "negative", "amount < 0", "no amount is negative"),
        Rule("one", "large", "id > 100", "ids are small", "data"),
        Rule("other", "odd", "count % 2 = 1", "counts are even", "data"),
        Rule("absent", "never", "nothing > 0", "a table that is not there"),
    )
    balances = (
        Balance("ids", ("one", "sum(id)"), ("other", "sum(count)"), "19 are not 7"),
        Balance("rows", ("one", "count_if(id < 3)"), ("other", "count(*)"), "2 are 2"),
        Balance("absent", ("one", "sum(id)"), ("absent", "sum(count)"), "a table that is not there"),
        Balance("nothing", ("one", "sum(if(id > 100, id, null))"), ("other", "sum(0)"), "nothing is 0"),
    )
    found = check({"one": one, "other": other}, rules, balances)
    assert found.rows == {"one": 4, "other": 2}
    assert [(each.table, each.rule, each.kind, each.violations) for each in found.results] == [
        ("one", "negative", "table", 2),
        ("one", "large", "data", 0),
        ("other", "odd", "data", 1),
        ("one, other", "ids", "table", 12),
        ("one, other", "rows", "table", 0),
        ("one, other", "nothing", "table", 0),
    ]
    assert check({}, rules, balances) == ({}, [])


#: A row that breaks the rule of this name, and no other one of these.
BROKEN = {
    ("connections", "closed_before_opened"): "100d as opened_at, 99d as closed_at, 0d as duration_s",
    ("connections", "negative_duration"): "-1d as duration_s",
    ("connections", "negative_amounts"): "-1L as frames_in",
    ("connections", "duration_apart"): "100d as opened_at, 200d as closed_at, 90d as duration_s",
    ("connections", "open_with_end"): "'open' as state, 1d as closed_at",
    ("connections", "over_but_not_open"): "'closed' as state, true as run_over",
    ("transports", "closed_before_opened"): "100d as opened_at, 99d as closed_at",
    ("relay_hourly", "percentile_order"): "5d as accept_ms_p50, 4d as accept_ms_p95",
    ("relay_hourly", "queue_max"): "5d as queue_bytes_p99, 4L as queue_bytes_max",
    ("relay_hourly", "hour_in_date"): "timestamp'2026-03-02 23:00:00' as hour, date'2026-03-03' as date",
    ("pair_latency", "percentile_order"): "1d as dial_ms_p50, 2d as dial_ms_p95, 1.5d as dial_ms_p99",
    ("pair_latency", "dials_ok"): "3L as dials, 4L as dials_ok",
    ("discovery_hourly", "errors"): "3L as requests, 2L as errors_4xx, 2L as errors_5xx",
    ("dial_failures", "counts"): "2L as attempts, 3L as dials",
    ("top_talkers", "sum"): "1L as bytes_sent, 1L as bytes_received, 3L as bytes",
    ("capacity_forecast", "interval"): "5d as low, 4d as value",
    ("log_quality", "gaps"): "3L as gaps, 2L as gap_lines",
    ("log_quality", "dropped"): "1L as events_dropped",
}


def test_each_rule_finds_the_row_that_breaks_it(spark: SparkSession) -> None:
    """A table of one row for each entry, and a row of nulls, which breaks no rule but that there is a date."""
    frames = {}
    for name, table in TABLES.items():
        frame = spark.createDataFrame([(None,) * len(table.columns)], table.schema)
        for broken, row in BROKEN.items():
            if broken[0] == name:
                frame = frame.unionByName(spark.range(1).selectExpr(*row.split(", ")), allowMissingColumns=True)
        frames[name] = frame
    found = {(each.table, each.rule): each.violations for each in check(frames).results}
    rows = {name: 1 + sum(broken[0] == name for broken in BROKEN) for name in TABLES}
    for (table, rule), violations in found.items():
        if rule == "no_date":
            assert violations == rows[table]
        elif (table, rule) in BROKEN:
            assert violations == 1, (table, rule)


def test_rules_name_tables_and_columns_there_are(spark: SparkSession) -> None:
    assert {rule.table for rule in RULES} <= set(TABLES)
    sides = {side for balance in BALANCES for side in (balance.left, balance.right)}
    assert {table for table, _ in sides} <= {*TABLES, "accounts"}
    assert {rule.kind for rule in (*RULES, *BALANCES)} == {"table", "data"}
    assert len({(rule.table, rule.name) for rule in RULES}) == len(RULES)
    assert all(rule.meaning for rule in (*RULES, *BALANCES))
    empty = {name: spark.createDataFrame([], table.schema) for name, table in TABLES.items()}
    for rule in RULES:  # an unknown column would be an error here
        empty[rule.table].where(F.expr(rule.violation))
