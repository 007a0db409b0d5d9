"""The log of a real relay of the Reliable Message Bus and two twins, and what the tables say of it.

It ran in memory and is told in dmsg's tests (``tests/eventlog/test_rmb_log.py``): Alice, twin 1, calls Bob, who is offline, who
is not there, and whose relay takes one envelope and no other; Bob's session is taken by another program of his, and Alice
sends five messages more than she may. The relay is killed at the end.
"""

from __future__ import annotations

from datetime import date, datetime

import pytest
from log_tables import LogTables
from pyspark.sql import SparkSession

from dmsg_logs.report import collect, render

DAY, HOUR = date(2026, 3, 2), datetime(2026, 3, 2, 9)
RELAY, OTHER = "r1.example", "r2.example"


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> LogTables:
    return LogTables(spark, "rmb_log", tmp_path_factory.mktemp("tables"))


def test_every_line_is_good_and_no_rule_is_broken(tables: LogTables) -> None:
    summary = tables.summary
    assert (summary.files, summary.good, summary.missing) == (4, summary.lines_in, 0)
    assert (tables.manifest.violations, tables.manifest.findings) == ({}, {})


def test_sessions_are_told_by_both_sides(tables: LogTables) -> None:
    rows = [
        ("server", RELAY, 1, "open", None),
        ("server", RELAY, 2, "closed", "replaced"),
        ("server", RELAY, 2, "open", None),
        ("client", "alice", 1, "closed", "closed"),
        ("client", "bob", 2, "closed", "replaced"),
        ("client", "bob-again", 2, "closed", "closed"),
    ]
    tables.check("twin_sessions", "role node twin state reason", rows)


def test_each_envelope_went_somewhere(tables: LogTables) -> None:
    """Requests and answers of 3 + 20 calls and of one that is refused; two go elsewhere, of which one gets nowhere in time."""
    columns = "relay hour sessions_opened sessions_closed received local stored federated expired refused rate_limited"
    tables.check("envelopes_hourly", columns, [(RELAY, HOUR, 3, 1, 56, 48, 0, 2, 1, 7, 5)])


def test_failures_have_the_reasons_that_senders_were_told(tables: LogTables) -> None:
    rows = [
        ("envelope", "", "destination offline", 1, 1),
        ("envelope", "", "message has expired", 1, 1),
        ("federation", OTHER, "timeout", 4, 0),
    ]
    tables.check("rmb_failures", "what other reason count twins", rows)


def test_the_relay_that_does_not_answer_has_a_rank(tables: LogTables) -> None:
    tables.check("federation_hourly", "relay other attempts failed failures_per_hour_max", [(RELAY, OTHER, 5, 4, 1.0)])


def test_every_call_has_ended(tables: LogTables) -> None:
    rows = [
        (True, "", 23, 1, 20.0),
        (False, "answered with an error", 7, 1, 10.0),
        (False, "unknown twin", 1, 1, 0.0),
        (False, "timeout", 2, 1, 5000.0),
    ]
    tables.check("calls_hourly", "ok reason calls callers elapsed_ms_p50", rows)


def test_there_is_nothing_in_the_tables_of_the_other_protocols(tables: LogTables) -> None:
    for name in ("connections", "transports", "relay_hourly", "relay_failures", "pair_latency", "dial_failures"):
        assert tables.table(name).count() == 0, name


def test_the_report_tells_of_it(tables: LogTables) -> None:
    page = render(collect(tables.spark, tables.directory))
    assert "1 relay of it took 56 envelopes for 2 twins" in page
    assert " of 33 calls were answered" in page
