"""The section on the Reliable Message Bus: where envelopes went, what failed, federation and calls. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dmsg_logs.report import text
from dmsg_logs.report.data import ReportData
from dmsg_logs.report.parts import (
    Row,
    Section,
    bucket_word,
    columns_over_time,
    marks,
    nothing,
    stacked,
    stretch,
    table,
)

#: A relay that takes less than this share of the posts to it is worth a look, if there are at least POSTS_LEAST.
POOR_SHARE: Final = 0.8
POSTS_LEAST: Final = 50
#: The same of calls.
CALLS_LEAST: Final = 50


def bus(data: ReportData) -> Section:
    """The fate of envelopes at relays of the Reliable Message Bus, and the results of calls over it."""
    title = "Reliable Message Bus"
    rows, calls = data.rows("bus"), data.rows("calls")
    if not rows and not calls:
        return nothing("bus", title, "No relay of the Reliable Message Bus has written anything yet.")
    ways: dict[str, float] = {}
    for row in rows:
        ways[str(row["way"])] = ways.get(str(row["way"]), 0) + text.of(row["count"])
    taken = text.of(data.totals.get("envelopes"))
    reading = (
        f"{text.many(data.totals.get('bus_relays'), 'relay')} of it took {text.many(taken, 'envelope')} for "
        f"{text.many(data.totals.get('twins'), 'twin')}"
    )
    if taken:
        lost = ways.get("refused", 0)
        reading += (
            f": {text.percent(ways.get('local', 0), taken)} went to a session at once, "
            f"{text.percent(ways.get('federated', 0), taken)} to another relay; {text.percent(lost, taken)} went nowhere"
        )
    reading += "."
    made, good = sum(text.of(row["calls"]) for row in calls), _good(calls)
    if made:
        reading += f" {text.percent(good, made)} of {text.many(made, 'call')} were answered."
    buckets = data.buckets()
    plot = columns_over_time(
        "bus",
        f"Envelopes by where they went, for every {bucket_word(data)}",
        f"Columns: {text.about(taken)} envelopes over time by where they went",
        stacked(buckets, rows, "at", "way", "count"),
        [stretch(data, at) for at in buckets],
        marks(data),
    )
    notices = _poor(data.rows("federation"))
    if made >= CALLS_LEAST and good < POOR_SHARE * made:
        notices.append(f"{text.percent(made - good, made)} of all calls over the Reliable Message Bus fail.")
    return Section("bus", title, reading, plot + _tables(data), notices)


def _good(calls: Sequence[Row]) -> float:
    return sum(text.of(row["calls"]) for row in calls if not row["reason"])


def _poor(pairs: Sequence[Row]) -> list[str]:
    """Relays that do not take what is posted to them."""
    found = []
    for row in pairs:
        attempts, failed = text.of(row["attempts"]), text.of(row["failed"])
        if row["other"] and attempts >= POSTS_LEAST and attempts - failed < POOR_SHARE * attempts:
            found.append(
                f"{text.shown(row['other'])} did not take {text.percent(failed, attempts)} of the envelopes that "
                f"{text.shown(row['relay'])} posted to it."
            )
    return found


def _tables(data: ReportData) -> str:
    failures = [
        [text.shown(row["reason"]), text.shown(row["what"]), text.count(row["count"])]
        for row in data.rows("bus_failures")
    ]
    pairs = [
        [
            text.shown(row["relay"]),
            text.shown(row["other"] or "several"),
            text.count(row["attempts"]),
            text.percent(row["failed"], row["attempts"]),
            text.ms(row["p99"]),
            text.count(row["rate"]),
        ]
        for row in data.rows("federation")
    ]
    ends = [
        [text.shown(row["reason"] or "answered"), *(text.count(row["calls"]), text.ms(row["p50"]), text.ms(row["p99"]))]
        for row in data.rows("calls")
    ]
    return (
        table("Failures on the bus by reason", ["Reason", "What", "Count"], failures, words=2)
        + table(
            "Federation by relay",
            ["Relay", "Posted to", "Envelopes", "Failed", "p99, worst hour", "Failures an hour, at worst"],
            pairs,
            words=2,
        )
        + table("Calls by their end", ["End", "Calls", "p50, worst hour", "p99, worst hour"], ends)
    )
