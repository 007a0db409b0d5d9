"""The sections on the forecast, on discovery and on the quality of the data. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dmsg_logs.report import plots, text
from dmsg_logs.report.data import ReportData
from dmsg_logs.report.parts import (
    Row,
    Section,
    along,
    bucket_word,
    column_hints,
    columns_over_time,
    day_marks,
    figure,
    marks,
    nothing,
    side_by_side,
    stretch,
    table,
)

#: Relays that get a small plot of their own forecast.
SMALL_PLOTS: Final = 8
#: Share of requests that may fail on discovery's side before it is worth a look.
MANY_5XX: Final = 0.01
#: Share of a node's lines that may be lost before it is worth a look.
MANY_LOST: Final = 0.001
_METRICS: Final = (
    ("bytes", "Traffic a day", text.size),
    ("connections", "Connections opened a day", text.about),
)
#: A forecast whose days differ by no more than this share is level.
LEVEL: Final = 0.02
#: The models of a forecast, in words.
_METHODS: Final = {
    "weekday_trend": "by weekday and trend",
    "level": "the usual level of the days so far",
    "insufficient": "too little for more than a guess",
}
_LOSSES: Final = (
    ("gap_lines", "in gaps of the numbering", 1),
    ("missing", "missing from files", 2),
    ("dropped", "dropped by the writer", 3),
    ("corrupt", "corrupt", 5),
)


def forecast(data: ReportData) -> Section:
    """The expected load of the relays in the next days."""
    title = "Capacity forecast"
    rows = data.rows("forecast")
    if not rows:
        return nothing("forecast", title, "There is too little history for a forecast.")
    fleet = [row for row in rows if row["relay"] == ""]
    drawn, sentences = [], []
    for metric, name, form in _METRICS:
        ahead = [row for row in fleet if row["metric"] == metric]
        if not ahead:
            continue
        peak = max(ahead, key=lambda row: text.of(row["value"]))
        what = "traffic" if metric == "bytes" else "new connections"
        least = min(text.of(row["value"]) for row in ahead)
        level = text.of(peak["value"]) - least <= LEVEL * text.of(peak["value"])
        should = "stay at about" if level else "peak at"
        at = "a day" if level else f"on {text.day(str(peak['day']))}"
        sentences.append(
            f"{what} of the fleet should {should} {form(peak['value'])} {at} "
            f"(between {form(peak['low'])} and {form(peak['high'])})"
        )
        past = [row for row in data.rows("history") if row["relay"] == ""]
        drawn.append(_outlook(f"forecast-{metric}", name, past, ahead, metric, form))
    reading = "; ".join(sentences)
    days = min((text.of(row["history_days"]) for row in fleet), default=0)
    reading = (
        f"{text.sentence(reading)}. It rests on {text.many(days, 'day')} of history "
        f"({', '.join(sorted({_method(row['method']) for row in fleet}))}); "
        "the bands of the relays are added up, as if all erred the same way."
    )
    body = side_by_side(*drawn)
    relays = data.rows("relays")
    small = [_small(data, str(relay["relay"]), rows) for relay in relays[:SMALL_PLOTS]]
    if any(small):
        body += '<h3 class="over">Traffic of each relay, and the most it should carry</h3>'
        body += f'<div class="multiples">{"".join(small)}</div>'
    cells = [cell for relay in relays for cell in _ahead(data, relay, rows)]
    heads = ["Relay", "Protocol~", "What~", "Highest so far", "Highest ahead", "Low", "High", "Change"]
    return Section("forecast", title, reading, body + table("Forecast for each relay", heads, cells))


def _method(name: object) -> str:
    return _METHODS.get(str(name)) or text.shown(name or "method unknown")


def _outlook(
    name: str, caption: str, past: Sequence[Row], ahead: Sequence[Row], metric: str, form: plots.Format
) -> str:
    days = sorted({str(row["date"]) for row in past} | {str(row["day"]) for row in ahead})
    was = along(days, past, "date", metric)
    value, low, high = (along(days, ahead, "day", each) for each in ("value", "low", "high"))
    axis = plots.linear(max(each for each in (*was, *value, *high, 0.0) if each is not None))
    series = [plots.Series("so far", was, 1), plots.Series("expected", value, 5)]
    hint = column_hints([text.day(each) for each in days], series, form)
    hint = [
        text_ if a is None or b is None else f"{text_} ({form(a)} to {form(b)})"
        for text_, a, b in zip(hint, low, high, strict=True)
    ]
    shapes = (
        plots.grid(axis)
        + plots.stack([series[0]], axis, len(days))
        + plots.band(low, high, axis, "band s5")
        + plots.line(value, axis, "line s5 d0")
        + plots.hints(hint)
    )
    alt = f"{caption}: columns of what was, a line with its interval of what is expected, up to {form(axis.high)}"
    key = plots.legend([series[0]])[:-5] + '<li><span class="area c5"></span>expected, with interval</li></ul>'
    return figure(name, plots.frame(plots.svg(alt, shapes), axis, form, day_marks(days)), f"<b>{caption}</b>", key)


def _small(data: ReportData, relay: str, rows: Sequence[Row]) -> str:
    """One relay's traffic, past and expected, as a small plot."""
    ahead = [row for row in rows if row["relay"] == relay and row["metric"] == "bytes"]
    past = [row for row in data.rows("history") if row["relay"] == relay]
    if not ahead or not past:
        return ""
    days = sorted({str(row["date"]) for row in past} | {str(row["day"]) for row in ahead})
    was = along(days, past, "date", "bytes")
    value, low, high = (along(days, ahead, "day", each) for each in ("value", "low", "high"))
    most = max(each for each in (*was, *value, *high, 1.0) if each is not None)
    axis = plots.Axis(0.0, most * 1.05, ())
    shapes = plots.band(low, high, axis, "band s5") + plots.line(was, axis, "line s1 d0")
    shapes += plots.line(value, axis, "line s5 d0")
    alt = f"Traffic of one relay, past and expected, up to {text.size(most)}"
    return (
        f"<div class=multiple><p>{text.key(relay)} <span>≤ {text.size(max(text.of(each) for each in value))}</span></p>"
        f"{plots.svg(alt, shapes)}</div>"
    )


def _ahead(data: ReportData, one: Row, rows: Sequence[Row]) -> list[list[str]]:
    relay, cells = str(one["relay"]), []
    for metric, name, form in _METRICS:
        mine = [row for row in rows if row["relay"] == relay and row["metric"] == metric]
        if not mine:
            continue
        before = max((text.of(row[metric]) for row in data.rows("history") if row["relay"] == relay), default=0.0)
        peak = max(mine, key=lambda row: text.of(row["value"]))
        change = text.of(peak["value"]) / before - 1 if before else None
        sign = "+" if change is not None and change > 0 else ""
        cells.append(
            [
                text.key(relay),
                text.shown(one["protocol"]),
                name,
                form(before),
                form(peak["value"]),
                form(peak["low"]),
                form(peak["high"]),
                text.NOTHING if change is None else f"{sign}{text.percent(change)}",
            ]
        )
    return cells


# --- discovery -------------------------------------------------------------------------------------------------------


def discovery(data: ReportData) -> Section:
    """How many requests discovery answered, and how."""
    title = "Discovery"
    rows = data.rows("discovery")
    total = sum(text.of(row["requests"]) for row in rows)
    if not total:
        return nothing("discovery", title, "Discovery has answered no request.")
    buckets = data.buckets()
    wrong, broken = (sum(text.of(row[name]) for row in rows) for name in ("errors_4xx", "errors_5xx"))
    every = along(buckets, rows, "at", "requests")
    bad = along(buckets, rows, "at", "errors_4xx")
    worse = along(buckets, rows, "at", "errors_5xx")
    good = [max((a or 0) - (b or 0) - (c or 0), 0) for a, b, c in zip(every, bad, worse, strict=True)]
    series = [
        plots.Series("answered", good, 1),
        plots.Series("not found or refused (4xx)", bad, 2),
        plots.Series("failed (5xx)", worse, 5),
    ]
    paths = data.rows("paths")
    reading = (
        f"Discovery answered {text.many(total, 'request')}; {text.percent(wrong, total)} were not found or refused (4xx), "
        f"{text.percent(broken, total)} failed on its own side (5xx)."
    )
    if paths:
        slow = max(paths, key=lambda row: text.of(row["p99"]))
        reading += (
            f" The slowest is {text.shown(slow['method'])} {text.shown(slow['path'])}: "
            f"one in a hundred takes more than {text.ms(slow['p99'])}."
        )
    body = columns_over_time(
        "discovery",
        f"Requests for every {bucket_word(data)}, by outcome",
        f"Columns: requests over time by outcome, at most {text.about(plots.stacked_most(series))}",
        series,
        [stretch(data, at) for at in buckets],
        marks(data),
    )
    cells = [
        [
            f"{text.shown(row['method'])} {text.shown(row['path'])}",
            text.count(row["requests"]),
            text.percent(row["errors_4xx"], row["requests"]),
            text.percent(row["errors_5xx"], row["requests"]),
            *(text.ms(row[name]) for name in ("p50", "p95", "p99", "max")),
        ]
        for row in paths
    ]
    heads = ["Request", "Count", "4xx", "5xx", "p50", "p95", "p99", "Slowest"]
    notices = [f"Discovery fails {text.percent(broken, total)} of its requests."] if broken > MANY_5XX * total else []
    return Section("discovery", title, reading, body + table("Requests by path", heads, cells, fold=False), notices)


# --- quality of the data ---------------------------------------------------------------------------------------------


def quality(data: ReportData) -> Section:
    """How far the figures can be trusted: gaps, lateness, corrupt and missing lines."""
    title = "Data quality"
    totals, rows = data.totals, data.rows("quality")
    came = text.of(totals.get("lines_in"))
    if not came and not rows:
        return nothing("quality", title, "No line has been read.")
    parts = {name: text.of(totals.get(name)) for name in ("good", "dup", "corrupt", "missing")}
    balanced = came == parts["good"] + parts["dup"] + parts["corrupt"]
    reading = (
        f"Of all {text.many(came, 'line')} ever taken in, from {text.many(totals.get('files'), 'file')}, "
        f"{text.percent(parts['good'], came)} are in the tables, {text.percent(parts['dup'], came)} had come before, "
        f"{text.percent(parts['corrupt'], came)} could not be read. "
        f"{'The accounts balance' if balanced else '<strong>The accounts do not balance</strong>'}: "
        f"{text.count(came)} in, {text.count(parts['good'])} good, {text.count(parts['dup'])} duplicate, "
        f"{text.count(parts['corrupt'])} corrupt. {text.sentence(text.many(parts['missing'], 'line'))} that files should "
        f"hold {'is' if parts['missing'] == 1 else 'are'} missing; the numbering of lines has "
        f"{text.many(totals.get('gaps'), 'gap')} ({text.many(totals.get('gap_lines'), 'line')})."
    )
    troubled = [row for row in rows if _lost(row)]
    if troubled:
        most = max(map(_lost, troubled))
        bars = plots.bars(
            f"Bars: lines lost or unreadable for each node, at most {text.count(most)}",
            [
                (
                    f"{text.key(row['key'] or row['node'])} {text.shown(row['role'])}",
                    [(text.of(row[name]), colour) for name, _, colour in _LOSSES],
                    text.count(_lost(row)),
                )
                for row in troubled[:15]
            ],
            most,
        )
        key = plots.legend([plots.Series(meaning, [], colour) for _, meaning, colour in _LOSSES])
    else:
        bars = plots.bars(
            "Bar: all lines are there", [("all nodes", ((max(came, 1), 3),), "nothing lost")], max(came, 1)
        )
        key = ""
    body = figure("quality", bars, "Lines that were lost or could not be read, for each node", key)
    return Section("quality", title, reading, body + _nodes(rows), _quality_notices(rows, balanced, parts["missing"]))


def _lost(row: Row) -> float:
    return sum(text.of(row[name]) for name, _, _ in _LOSSES)


def _nodes(rows: Sequence[Row]) -> str:
    names = ("gaps", "gap_lines", "missing", "dropped", "corrupt", "dup", "late")
    cells = [
        [
            text.key(row["key"] or row["node"]),
            text.shown(row["role"]),
            *(text.count(row[name]) for name in ("runs", "unended", "files", "lines", *names)),
            *(text.seconds(row[name]) for name in ("lateness_p50", "lateness_p99", "lateness_max")),
            text.when(row["last_at"]),
        ]
        for row in rows
    ]
    heads = ["Node", "Role", "Runs", "Not ended", "Files", "Lines", "Gaps", "Lines in gaps", "Missing", "Dropped"]
    heads += ["Corrupt", "Duplicate", "Late", "Lateness p50", "p99", "Most", "Last line"]
    return table("Quality for each node (lateness: that of the worst run)", heads, cells, words=2)


def _quality_notices(rows: Sequence[Row], balanced: bool, missing: float) -> list[str]:
    notices = [] if balanced else ["The accounts of lines do not balance."]
    if missing:
        notices.append(
            f"{text.many(missing, 'line')} that files should hold {'is' if missing == 1 else 'are'} missing."
        )
    for row in rows:
        lost = text.of(row["gap_lines"]) + text.of(row["dropped"])
        whole = text.of(row["lines"]) + lost
        if whole and lost / whole > MANY_LOST:
            notices.append(
                f"{text.percent(lost, whole)} of the lines of node {text.key(row['key'] or row['node'])} are lost."
            )
    return notices[:6]
