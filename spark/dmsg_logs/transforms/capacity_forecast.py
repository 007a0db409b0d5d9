"""What each relay will have to carry in the next seven days."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dmsg_logs.frames import local_frame
from dmsg_logs.tabledef import Column, Inputs, Table
from dmsg_logs.transforms.common import date_of
from dmsg_logs.transforms.forecast_model import COVERAGE, HISTORY_DAYS, LEVEL_DAYS, WEEKDAY_DAYS, forecast

#: Days ahead.
DAYS: Final = 7
METRICS: Final = ("bytes", "connections")
_DAY: Final = datetime.timedelta(days=1)


def capacity_forecast(relay_hourly: DataFrame, runs: DataFrame) -> DataFrame:
    """The table ``capacity_forecast`` from ``relay_hourly`` and ``log_quality``.

    The few sums of days are brought to the driver; the model is :mod:`dmsg_logs.transforms.forecast_model`. Days that
    are not whole are left out: a relay's first one unless its lines begin in its first hour, and the last one unless
    the fleet's lines reach its last hour.
    """
    daily = relay_hourly.groupBy("relay", "date").agg(
        F.sum("bytes").alias("bytes"),
        F.sum("connections_opened").alias("connections"),
        F.min("hour").alias("first_hour"),
    )
    end = runs.where("role = 'server'").select(
        date_of(F.max("last_at")).alias("last_day"), (F.max("last_at") % 86400 >= 23 * 3600).alias("whole")
    )
    rows = daily.join(F.broadcast(end)).orderBy("relay", "date").collect()
    relays: dict[str, list[Any]] = {}
    for row in rows:
        relays.setdefault(row["relay"], []).append(row)
    found = [each for relay, days in relays.items() for each in _relay(relay, days)]
    return local_frame(relay_hourly.sparkSession, found, CAPACITY_FORECAST.schema)


def _relay(relay: str, days: list[Any]) -> Iterator[tuple[Any, ...]]:
    last_day: datetime.date = days[0]["last_day"]
    first = days[0]["date"] + (_DAY if days[0]["first_hour"].hour else datetime.timedelta())
    last = last_day if days[0]["whole"] else last_day - _DAY
    ahead = [last_day + _DAY * step for step in range(1, DAYS + 1)]
    for metric in METRICS:
        by_day = {row["date"]: float(row[metric]) for row in days}
        history = [by_day.get(first + _DAY * step, 0.0) for step in range((last - first).days + 1)]
        outlook = forecast(history, [(day - last).days for day in ahead], max(by_day.values()))
        for day, (value, low, high) in zip(ahead, outlook.days, strict=True):
            yield relay, metric, day, value, low, high, outlook.history_days, outlook.method


def _build(inputs: Inputs) -> DataFrame:
    return capacity_forecast(inputs.table("relay_hourly"), inputs.table("log_quality"))


CAPACITY_FORECAST: Final = Table(
    "capacity_forecast",
    f"One row for each relay, metric and day of the {DAYS} days after the last one with lines.",
    (
        Column("relay", "string", "public key of the relay; its name where no line tells the key"),
        Column("metric", "string", "bytes: data of transports that end on the day; connections: that are opened on it"),
        Column("day", "date", "UTC date the forecast is for"),
        Column("value", "double", "expected value of the whole day", "bytes or connections"),
        Column(
            "low", "double", f"lower end of the interval that holds {COVERAGE:.0%} of such days", "bytes or connections"
        ),
        Column("high", "double", "upper end of that interval", "bytes or connections"),
        Column("history_days", "long", f"whole days it is made from, {HISTORY_DAYS} at most"),
        Column(
            "method",
            "string",
            f"weekday_trend from {WEEKDAY_DAYS} days on, level from {LEVEL_DAYS} on; insufficient: a guess, and its "
            "interval is no more than that",
        ),
    ),
    _build,
    partition="",
)
