"""Expressions that several transforms share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

#: What names one run of one program.
RUN: Final = ("role", "node", "boot")
#: The protocol of lines that were written before lines named it.
FIRST_PROTOCOL: Final = "dmsg"
#: A public key, and the short form of one that names a node. Not ``$``, which Java finds before a line end as well.
KEY_PATTERN: Final = r"^0[23][0-9a-f]{64}(?![\s\S])"
SHORT_PATTERN: Final = r"^0[23][0-9a-f]{14}(?![\s\S])"
#: Seconds by which a program's clock may be ahead of the clock that stamps landed files; later lines are left out.
CLOCK_SLACK_S: Final = 3600


def only(events: DataFrame, *names: str) -> DataFrame:
    """The lines of some events; the filter reaches the Parquet reader."""
    return events.where(F.col("event").isin(*names))


def date_of(ts: Column) -> Column:
    """The UTC date of Unix seconds."""
    return F.to_date(F.timestamp_seconds(ts))


def hour_of(ts: Column) -> Column:
    """The beginning of the UTC hour of Unix seconds."""
    return F.timestamp_seconds(F.floor(ts / 3600) * 3600)


def at(ts: Column) -> list[Column]:
    """The columns ``hour`` and ``date`` of Unix seconds."""
    return [hour_of(ts).alias("hour"), date_of(ts).alias("date")]


def credible_until(earliest: float | None, landed_at: float | None, now: float) -> float:
    """The latest credible time of an event, given the ``earliest`` event; all in Unix seconds.

    An event cannot be later than the newest file, which landed at ``landed_at``, nor than ``now``, the reader's clock: a
    copied file may keep the time that a wrong clock gave it. A later event comes from a wrong clock, and one such clock
    must not move the period of all others. If even the ``earliest`` event is later than one of these bounds, that bound is
    wrong (the files were copied or unpacked, or the reader's clock is wrong): then the other bound decides, and if that is
    wrong, too, there is no limit.
    """
    told = [at for at in (landed_at, now) if at is not None]
    limits = [at + CLOCK_SLACK_S for at in (min(told), *told)]
    return next((limit for limit in limits if earliest is None or earliest <= limit), math.inf)


def protocol_of() -> Column:
    """The protocol of a line about a relay, session, dial or transport, also for lines of older versions."""
    return F.coalesce(F.nullif("protocol", F.lit("")), F.lit(FIRST_PROTOCOL)).alias("protocol")


def total(column: Column | str) -> Column:
    """A sum that is 0 without rows."""
    return F.coalesce(F.sum(column), F.lit(0))


#: One line stands for at most this many events.
STANDS_FOR_LIMIT: Final = 1_000_000


def stands_for() -> Column:
    """Number of events that a line stands for: its ``count``, or 1 for a line of an older version without it."""
    return F.least(F.greatest(F.coalesce(F.col("count"), F.lit(1)), F.lit(1)), F.lit(STANDS_FOR_LIMIT))


def count_where(condition: Column) -> Column:
    """How many rows a condition holds for; null counts as no."""
    return F.count(F.when(condition, F.lit(1)))


def percentiles(column: str, *points: int, times: Column | None = None) -> Column:
    """Exact percentiles of a column as an array, by one aggregate. Nulls do not count; other values count ``times``, by
    default once. See :func:`spread`."""
    shares = F.array(*[F.lit(point / 100) for point in points])
    return F.percentile(column, shares, F.lit(1) if times is None else times).alias(f"{column}_percentiles")


def spread(column: str, *points: int, prefix: str | None = None) -> list[Column]:
    """The array of :func:`percentiles` as columns ``<prefix>p50`` and so on, ``<column>_p50`` by default; null where there
    was no value."""
    before = f"{column}_" if prefix is None else prefix
    return [F.col(f"{column}_percentiles")[index].alias(f"{before}p{point}") for index, point in enumerate(points)]


def sessionise(frame: DataFrame, keys: Sequence[str], opened: str, closed: str, closing: Sequence[str]) -> DataFrame:
    """Join each ``opened`` line with the ``closed`` line that follows it under the same ``keys``, in one pass.

    Ids are reused within a run, and ``seq`` is the order in which the run wrote. So the line after an opening decides: a
    closing belongs to it; another opening means that the closing was lost, which must not shift all later pairs. Gives the
    columns of ``frame``, taken from the opening, and ``closing``, a struct of the columns ``closing`` of the closing line
    (null if there is none). A closing without an opening before it gives a row of its own, with ``opening`` false.

    The first key is a hash: sorting compares the first eight bytes first, and those of names and keys are mostly equal.
    """
    opening = F.col("event") == opened
    own = F.when(~opening, F.struct(*closing))  # so the line after an opening has none if it is another opening
    hashed = frame.select("*", F.xxhash64(*keys).alias("_hash"), opening.alias("opening"), own.alias("_own"))
    order = Window.partitionBy("_hash", *keys).orderBy("seq")
    following, follows = F.lead("_own").over(order), F.lag("opening", 1, False).over(order)
    return (
        hashed.select("*", following.alias("_following"), follows.alias("_follows"))
        .where(F.col("opening") | ~F.col("_follows"))
        .select(
            *frame.columns,
            "opening",
            F.when(F.col("opening"), F.col("_following")).otherwise(F.col("_own")).alias("closing"),
        )
    )
