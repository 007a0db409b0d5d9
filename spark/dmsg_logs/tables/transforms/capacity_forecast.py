"""The expected load of each relay in the next seven days."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterator
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dmsg_logs.runtime.frames import local_frame
from dmsg_logs.tables.tabledef import Column, Inputs, Table
from dmsg_logs.tables.transforms.common import credible_until
from dmsg_logs.tables.transforms.forecast_model import COVERAGE, HISTORY_DAYS, LEVEL_DAYS, WEEKDAY_DAYS, forecast

#: Days ahead.
DAYS: Final = 7
#: A relay without lines for this many days was away; its forecast uses only the days since its return.
AWAY_DAYS: Final = 28
METRICS: Final = ("bytes", "connections")
_DAY: Final = datetime.timedelta(days=1)
_DAY_S: Final = 86_400
_HOUR_S: Final = 3600


def capacity_forecast(relay_hourly: DataFrame, runs: DataFrame, latest: float = math.inf) -> DataFrame:
    """The table ``capacity_forecast`` from ``relay_hourly`` and ``log_quality``.

    The few sums of days are brought to the driver; the model is :mod:`dmsg_logs.tables.transforms.forecast_model`. Days that
    are not whole are left out: a relay's first one unless its lines begin in its first hour, and the last one unless
    the fleet's lines reach its last hour. Hours after ``latest`` (Unix seconds) come from clocks that are wrong; a run
    with a line from such an hour does not tell how far the fleet's lines reach, but its other hours do.
    """
    hour = F.unix_timestamp("hour")
    daily = (
        relay_hourly.where(hour <= latest)
        .groupBy("relay", "protocol", "date")
        .agg(
            F.sum("bytes").alias("bytes"),
            F.sum("connections_opened").alias("connections"),
            F.min(hour).alias("first_hour"),
            F.max(hour).alias("last_hour"),
        )
    )
    told = runs.where("role = 'server'").where(F.col("last_at") <= latest).agg(F.max("last_at").alias("told"))
    rows = daily.join(F.broadcast(told)).orderBy("relay", "protocol", "date").collect()
    end = max((at for row in rows for at in (row["last_hour"], row["told"]) if at is not None), default=0)
    relays: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        relays.setdefault((row["relay"], row["protocol"]), []).append(row)
    found = [each for relay, days in relays.items() for each in _relay(relay, _since_return(days), end)]
    return local_frame(relay_hourly.sparkSession, found, CAPACITY_FORECAST.schema)


def _since_return(days: list[Any]) -> list[Any]:
    """The days since the relay was last away. A line with a clock far behind looks like an absence."""
    away = [index for index in range(1, len(days)) if (days[index]["date"] - days[index - 1]["date"]).days > AWAY_DAYS]
    return days[away[-1] :] if away else days


def _relay(relay: tuple[str, str], days: list[Any], end: float) -> Iterator[tuple[Any, ...]]:
    last_day = datetime.datetime.fromtimestamp(end, datetime.timezone.utc).date()
    first = days[0]["date"] + (_DAY if days[0]["first_hour"] % _DAY_S >= _HOUR_S else datetime.timedelta())
    last = last_day if end % _DAY_S >= _DAY_S - _HOUR_S else last_day - _DAY
    ahead = [last_day + _DAY * step for step in range(1, DAYS + 1)]
    for metric in METRICS:
        by_day = {row["date"]: max(0.0, float(row[metric])) for row in days}  # only a forged line gives a negative sum
        history = [by_day.get(first + _DAY * step, 0.0) for step in range((last - first).days + 1)]
        outlook = forecast(history, [(day - last).days for day in ahead], max(by_day.values()))
        for day, (value, low, high) in zip(ahead, outlook.days, strict=True):
            yield *relay, metric, day, value, low, high, outlook.history_days, outlook.method


def _latest(accounts: DataFrame, runs: DataFrame) -> float:
    """The latest credible hour; see :func:`~dmsg_logs.tables.transforms.common.credible_until`."""
    landed = accounts.agg(F.max("landed_at").alias("landed_at"))
    began = runs.where("role = 'server'").agg(F.min("first_at").alias("first_at"))
    (found,) = landed.crossJoin(began).collect()
    return credible_until(found["first_at"], found["landed_at"], time.time())


def _build(inputs: Inputs) -> DataFrame:
    runs = inputs.table("log_quality")
    latest = _latest(inputs.accounts(), runs)  # asked while the hours are still being made
    return capacity_forecast(inputs.table("relay_hourly"), runs, latest)


CAPACITY_FORECAST: Final = Table(
    "capacity_forecast",
    f"One row for each relay, metric and day of the {DAYS} days after the last one with lines. Hours later than the "
    f"newest file are left out, and what a relay did before {AWAY_DAYS} days without lines.",
    (
        Column("relay", "string", "public key of the relay; its name where no line tells the key"),
        Column("protocol", "string", "what it speaks: dmsg, messaging, …"),
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
