"""The forecast: what it says, and whether its intervals hold what they promise."""

from __future__ import annotations

import datetime
import math
from typing import Any

import numpy as np
import pytest
from event_rows import DAY, OTHER_RELAY, RELAY, accounts
from pyspark.sql import DataFrame, SparkSession

from dmsg_logs.tables.generations import TABLES
from dmsg_logs.tables.transforms.capacity_forecast import AWAY_DAYS, CAPACITY_FORECAST, capacity_forecast
from dmsg_logs.tables.transforms.common import CLOCK_SLACK_S, credible_until
from dmsg_logs.tables.transforms.forecast_model import COVERAGE, GUESS_FACTOR, forecast, student_t90

WEEK = range(1, 8)


def _series(random: np.random.Generator, days: int, kind: str) -> np.ndarray:
    """Daily values like those of a relay: a level, by kind also weekdays, growth, and errors that last or are heavy."""
    day = np.arange(days + len(WEEK))
    errors = random.normal(0, 0.2, len(day))
    if kind == "lasting":
        for one in day[1:]:
            errors[one] += 0.4 * errors[one - 1]
    if kind == "heavy":
        errors = 0.15 * random.standard_t(4, len(day))
    weekdays = 0.0 if kind == "level" else 0.3 * np.sin(2 * np.pi * ((day + 3) % 7) / 7)
    growth = 0.01 * day if kind in ("weekdays", "heavy") else 0.0
    found: np.ndarray = np.exp(20 + growth + weekdays + errors)
    return found


@pytest.mark.parametrize("days", [7, 14, 21, 28, 56])
@pytest.mark.parametrize("kind", ["level", "weekdays", "lasting", "heavy"])
def test_intervals_cover_what_they_promise(kind: str, days: int) -> None:
    random = np.random.default_rng([days, len(kind)])
    hits = []
    for _ in range(300):
        values = _series(random, days, kind)
        outlook = forecast(list(values[:days]), WEEK)
        assert outlook.method == ("weekday_trend" if days >= 21 else "level")
        hits += [one.low <= value <= one.high for one, value in zip(outlook.days, values[days:], strict=True)]
    assert np.mean(hits) == pytest.approx(COVERAGE, abs=0.07)


def test_trend_and_weekdays_are_followed() -> None:
    values = [1000.0 + 10 * day + (500 if day % 7 == 5 else 0) for day in range(28)]
    outlook = forecast([0.0, *values[1:]], WEEK)  # a zero: no logarithms
    assert outlook.days[5].value - outlook.days[4].value > 400
    exact = forecast(values, [1])
    assert exact.days[0].value == pytest.approx(1280, rel=0.02) and exact.history_days == 28
    assert all(one.low >= 0 for one in forecast([0.0, 9.0, 0.0, 0.0, 1.0, 0.0, 0.0, 2.0], WEEK).days)
    assert forecast([5.0] * 100, [1]) == ([pytest.approx((5.0, 5.0, 5.0))], 56, "weekday_trend")


def test_too_little_history_is_said() -> None:
    outlook = forecast([10.0, 30.0], WEEK)
    assert (outlook.method, outlook.history_days) == ("insufficient", 2)
    assert set(outlook.days) == {(20.0, 0.0, 30 * GUESS_FACTOR)}
    assert forecast([], [1, 2], 7.0).days == [(7.0, 0.0, 7 * GUESS_FACTOR)] * 2


@pytest.mark.parametrize(("freedom", "value"), [(1, 3.0777), (6, 1.4398), (30, 1.3104), (40, 1.3031), (120, 1.2886)])
def test_student_t(freedom: int, value: float) -> None:
    assert student_t90(freedom) == pytest.approx(value, abs=0.001)


def test_capacity_forecast(spark: SparkSession) -> None:
    """Half days at both ends are left out, days without lines are days without traffic."""
    first = datetime.datetime.fromtimestamp(DAY, datetime.timezone.utc)

    def hours(relay: str, days: Any, hour: int = 0) -> list[tuple[Any, ...]]:
        found = []
        for day in days:
            at = first + datetime.timedelta(days=day, hours=hour)
            found.append((relay, "dmsg", at, at.date(), 1000 + day % 7, 10))
        return found

    hourly = spark.createDataFrame(
        [
            *hours(RELAY, [0], hour=13),  # begins in the middle of a day
            *hours(RELAY, [day for day in range(1, 24) if day != 9]),
            *hours(RELAY, range(1, 24), hour=5),
            *hours(OTHER_RELAY, [22, 23]),
        ],
        "relay string, protocol string, hour timestamp, date date, bytes long, connections_opened long",
    )
    end = DAY + 23 * 86_400 + 3600.0  # in the middle of the last day
    runs = spark.createDataFrame([("server", end), ("client", end + 10**6)], "role string, last_at double")
    found = capacity_forecast(hourly, runs)
    assert found.dtypes == CAPACITY_FORECAST.dtypes
    rows = found.collect()
    assert len(rows) == 2 * 2 * 7 and TABLES["capacity_forecast"] is CAPACITY_FORECAST
    bytes_rows = [row for row in rows if (row.relay, row.metric) == (RELAY, "bytes")]
    assert [row.day for row in bytes_rows] == [
        datetime.date(2026, 3, 26) + datetime.timedelta(days=n) for n in range(7)
    ]
    assert {(row.history_days, row.method) for row in bytes_rows} == {(22, "weekday_trend")}
    assert all(row.low < row.value < row.high and 1500 < row.value < 2500 for row in bytes_rows)
    young = [row for row in rows if row.relay == OTHER_RELAY]
    assert {(row.history_days, row.method) for row in young} == {(1, "insufficient")}
    assert {(row.metric, row.value, row.high) for row in young} == {
        ("bytes", 1001.0, 5010.0),
        ("connections", 10.0, 50.0),
    }


#: The last second of the year 2099.
FORGED = 4_102_444_799.0
YEAR_2000 = 946_684_800.0
Hour = tuple[str, float, int]


class Given:
    """What the table is made from: hours as (relay, time, connections), runs of servers as (first, last)."""

    def __init__(
        self, spark: SparkSession, hours: list[Hour], runs: list[tuple[float, float]], landed_at: float
    ) -> None:
        self._spark = spark
        self._landed_at = landed_at
        self._tables = {"relay_hourly": self._hours(hours), "log_quality": self._runs(runs)}

    def _hours(self, hours: list[Hour]) -> DataFrame:
        rows = []
        for relay, at, connections in hours:
            moment = datetime.datetime.fromtimestamp(at, datetime.timezone.utc)
            rows.append((relay, "dmsg", moment, moment.date(), 100 * connections, connections))
        schema = "relay string, protocol string, hour timestamp, date date, bytes long, connections_opened long"
        return self._spark.createDataFrame(rows, schema)

    def _runs(self, runs: list[tuple[float, float]]) -> DataFrame:
        rows = [("server", *run) for run in runs] + [("client", YEAR_2000, FORGED)]
        return self._spark.createDataFrame(rows, "role string, first_at double, last_at double")

    def events(self) -> DataFrame:
        raise AssertionError("the lines are not read again")

    keys = events

    def accounts(self) -> DataFrame:
        return accounts(self._spark, [{"file": "a", "landed_at": self._landed_at}, {"file": "b", "landed_at": 0}])

    def table(self, name: str) -> DataFrame:
        return self._tables[name]


HEALTHY = [(RELAY, DAY + day * 86_400 + hour * 3600, 1) for day in range(10) for hour in (0, 12, 23)]
#: Where they end, the day after, and two landings: shortly afterwards, and by a file without a time.
END = HEALTHY[-1][1] + 1800
NEXT = datetime.date(2026, 3, 12)
LANDED = END + 60


@pytest.mark.parametrize(
    ("hours", "runs", "landed_at"),
    [
        pytest.param([], [(DAY, END)], LANDED, id="every clock is right"),
        pytest.param([], [(DAY, END), (FORGED, FORGED)], LANDED, id="another relay ahead"),
        pytest.param([(RELAY, FORGED - 3599, 9)], [(DAY, FORGED)], LANDED, id="its own clock ahead for a line"),
        pytest.param([(RELAY, FORGED - 3599, 9)], [(DAY, FORGED)], 0.0, id="and files without a time"),
        pytest.param([(RELAY, FORGED - 3599, 9)], [(DAY, FORGED)], -1.0, id="and files before all time"),
        pytest.param([(RELAY, YEAR_2000, 9)], [(YEAR_2000, END)], LANDED, id="its own clock behind for a line"),
    ],
)
def test_one_wrong_clock_changes_no_forecast(
    spark: SparkSession, hours: list[Hour], runs: list[tuple[float, float]], landed_at: float
) -> None:
    found = CAPACITY_FORECAST.build(Given(spark, HEALTHY + hours, runs, landed_at)).where("metric = 'connections'")

    rows = [tuple(row) for row in found.orderBy("day").collect()]
    days = [NEXT + datetime.timedelta(days=step) for step in range(len(WEEK))]
    assert rows == [(RELAY, "dmsg", "connections", day, *[pytest.approx(3.0)] * 3, 10, "level") for day in days]


def test_less_than_nothing_is_forecast_as_nothing(spark: SparkSession) -> None:
    """Of a relay whose lines are forged: a value lies in its interval all the same."""
    at = datetime.datetime.fromtimestamp(DAY, datetime.timezone.utc)
    hourly = spark.createDataFrame(
        [(RELAY, "dmsg", at, at.date(), -5, 0)],
        "relay string, protocol string, hour timestamp, date date, bytes long, connections_opened long",
    )
    runs = spark.createDataFrame([("server", DAY + 1)], "role string, last_at double")
    rows = capacity_forecast(hourly, runs).select("low", "value", "high").distinct().collect()
    assert [tuple(row) for row in rows] == [(0.0, 0.0, 0.0)]


def test_a_forged_relay_has_no_forecast_and_without_any_hour_there_is_none(spark: SparkSession) -> None:
    forged = Given(spark, [*HEALTHY, (OTHER_RELAY, FORGED, 1)], [(DAY, END), (FORGED, FORGED)], LANDED)
    assert {row.relay for row in CAPACITY_FORECAST.build(forged).collect()} == {RELAY}
    assert CAPACITY_FORECAST.build(Given(spark, [], [], LANDED)).collect() == []


@pytest.mark.parametrize(("empty", "history_days"), [(AWAY_DAYS - 1, 10 + AWAY_DAYS - 1 + 8), (AWAY_DAYS, 8)])
def test_a_relay_that_was_away_is_forecast_from_its_return(spark: SparkSession, empty: int, history_days: int) -> None:
    back = [(RELAY, DAY + (10 + empty + day) * 86_400 + hour * 3600, 2) for day in range(8) for hour in (0, 23)]
    end = back[-1][1] + 1800

    found = CAPACITY_FORECAST.build(Given(spark, HEALTHY + back, [(DAY, end)], end)).where("metric = 'connections'")

    assert {row.history_days for row in found.collect()} == {history_days}


@pytest.mark.parametrize(
    ("earliest", "landed_at", "until"),
    [
        (1000.0, 9000.0, 9000.0),
        (None, 9000.0, 9000.0),
        (9000.0 + CLOCK_SLACK_S, 9000.0, 9000.0),
        (9001.0 + CLOCK_SLACK_S, 9000.0, 50_000.0),
        (9000.0, None, 50_000.0),
        (9000.0, -1.0, 50_000.0),
        (90_000.0, 1.0, math.inf),
        (1000.0, 4e9, 50_000.0),  # a file of the future
        (60_000.0, 70_000.0, 70_000.0),  # a reader of the past
    ],
)
def test_until_when_clocks_are_believed(earliest: float | None, landed_at: float | None, until: float) -> None:
    assert credible_until(earliest, landed_at, 50_000.0) == until + CLOCK_SLACK_S
