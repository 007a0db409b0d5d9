"""The sections on the fleet as a whole and on its relays: load, failures, latency, the league. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from dmsg_logs.report import plots, text
from dmsg_logs.report.data import TOP_RELAYS, ReportData
from dmsg_logs.report.parts import (
    Row,
    Section,
    along,
    bucket_word,
    column_hints,
    columns_over_time,
    figure,
    marks,
    nothing,
    side_by_side,
    stacked,
    stretch,
    table,
)

#: A period with this many times the usual failures, and at least BURST_LEAST, is worth a look.
BURST_FACTOR: Final = 3
BURST_LEAST: Final = 20
#: A relay whose p99 is this many times the median relay's is worth a look.
SLOW_FACTOR: Final = 2.5
#: A score below this (thousandths; 500 is neutral) is worth a look.
POOR_SCORE: Final = 350
_METRICS: Final = (
    ("handshake", "Handshakes", "from the TCP connection to the end of the handshake, at relays"),
    ("accept", "Accepts", "from a request for a transport to its acceptance, at relays"),
    ("dial", "Dials", "successful ones, from beginning to end, at clients"),
)
_PERCENTILES: Final = (("p50", 1, 0), ("p95", 2, 1), ("p99", 5, 2))


def load(data: ReportData) -> Section:
    """Which relay carried how much, and when."""
    title = "Load of the fleet"
    rows, relays = data.rows("load"), data.rows("relays")
    if not rows or not relays:
        return nothing("load", title, "No relay has written anything yet.")
    buckets = data.buckets()
    most = plots.heat_most([text.of(row["bytes"]) for row in rows])
    more = max(text.of(row["bytes"]) for row in rows) > most
    total = text.of(data.totals.get("bytes")) or sum(text.of(row["bytes"]) for row in relays)
    busiest = relays[0]
    peak = max(data.rows("fleet"), key=lambda row: text.of(row["bytes"]), default=None)
    reading = f"The busiest relay, {text.key(busiest['relay'])}, carried {text.percent(busiest['bytes'], total)} of all traffic"
    if peak is not None:
        reading += (
            f"; the fleet's busiest stretch was {stretch(data, peak['at'])} (UTC) with {text.size(peak['bytes'])}"
        )
    reading += "."
    if text.of(data.totals.get("relays")) > len(relays):
        reading += f" Shown are the {len(relays)} relays with most traffic of {text.count(data.totals['relays'])}."
    by_relay: dict[str, list[Row]] = {}
    for row in rows:
        by_relay.setdefault(str(row["relay"]), []).append(row)
    lines = [along(buckets, by_relay.get(str(row["relay"]), []), "at", "bytes") for row in relays]
    times = [stretch(data, at) for at in buckets]
    below = plots.frame("", None, text.size, marks(data))
    drawing = plots.heat_rows(
        f"Heat map: traffic of {len(relays)} relays over time",
        [(text.key(row["relay"]), line) for row, line in zip(relays, lines, strict=True)],
        most,
        lambda r, c: f"{text.safe(text.short_key(relays[r]['relay']))} · {times[c]} · {text.size(lines[r][c])}",
        below,
    )
    caption = f"Traffic of each relay, a cell for every {bucket_word(data)}; the stronger the colour, the more"
    return Section(
        "load", title, reading, figure("load", drawing + plots.heat_scale(most, text.size, more=more), caption)
    )


def failures(data: ReportData) -> Section:
    """Failures and refusals of relays by reason, over time."""
    title = "Failures over time"
    rows = [{**row, "name": _reason(row)} for row in data.rows("failures") if text.of(row["count"])]
    refused = [row for row in rows if row["what"] == "refused"]
    failed = [row for row in rows if row["what"] != "refused"]
    if not rows:
        return nothing("failures", title, "Relays report no failed handshake or transport and no refusal.")
    parts = (
        ("failures", failed, "failure", "failed", "Failed handshakes, connections and transports"),
        (
            "refusals",
            refused,
            "refusal",
            "was refused by a limit or rule",
            "What relays refused because of their limits and rules",
        ),
    )
    sentences, drawn, notices = [], [], []
    for name, mine, noun, verb, caption in parts:
        if not mine:
            sentences.append(f"Nothing {verb}.")
            continue
        sentence, plot, notice = _over_time(data, name, mine, noun, caption)
        sentences.append(sentence)
        drawn.append(plot)
        notices += notice
    total = sum(text.of(row["count"]) for row in rows)
    totals: dict[tuple[str, str], float] = {}
    for row in rows:
        pair = (str(row["what"]), str(row["reason"]))
        totals[pair] = totals.get(pair, 0) + text.of(row["count"])
    cells = [
        [
            text.shown(reason),
            text.shown(what),
            text.count(totals[what, reason]),
            text.percent(totals[what, reason], total),
        ]
        for what, reason in sorted(totals, key=lambda pair: (-totals[pair], pair))
    ]
    numbers = table("Failures and refusals by reason", ["Reason", "What", "Count", "Share"], cells, words=2)
    return Section("failures", title, " ".join(sentences), side_by_side(*drawn) + numbers, notices)


def _over_time(data: ReportData, name: str, rows: Sequence[Row], noun: str, caption: str) -> tuple[str, str, list[str]]:
    """Text on failures or refusals, their plot, and notices worth a look."""
    buckets = data.buckets()
    series = stacked(buckets, rows, "at", "name", "count")
    total = sum(text.of(row["count"]) for row in rows)
    sums = [sum(each.values[index] or 0 for each in series) for index in range(len(buckets))]
    worst = max(range(len(sums)), key=lambda index: sums[index])
    usual = median(sums)
    share = text.percent(sum(value or 0 for value in series[0].values), total)
    sentence = (
        f"Relays report {text.many(total, noun)}, most often {series[0].label} ({share}); the worst stretch, "
        f"{stretch(data, buckets[worst])}, had {text.about(sums[worst])}, where {text.about(usual)} are usual."
    )
    notices = []
    if sums[worst] >= BURST_LEAST and sums[worst] > BURST_FACTOR * usual:
        notices.append(f"A burst of {text.many(sums[worst], noun)} on {stretch(data, buckets[worst])}.")
    plot = columns_over_time(
        name,
        f"{caption}, for every {bucket_word(data)}",
        f"Columns: {noun}s over time by reason, at most {text.count(sums[worst])} in {bucket_word(data)}",
        series,
        [stretch(data, at) for at in buckets],
        marks(data),
    )
    return sentence, plot, notices


def _reason(row: Row) -> str:
    return str(row["reason"]) if row["what"] in ("", "refused") else f"{row['what']} · {row['reason']}"


def latency(data: ReportData) -> Section:
    """Percentiles of handshakes, accepts and dials over time."""
    title = "Latency"
    rows = data.rows("latency")
    if not rows:
        return nothing("latency", title, "No handshake, accept or dial has been measured.")
    buckets = data.buckets()
    whole = {row["metric"]: row for row in data.rows("latency_total")}
    drawn, sentences, cells = [], [], []
    for metric, name, meaning in _METRICS:
        mine = [row for row in rows if row["metric"] == metric]
        if not mine:
            continue
        series = [
            plots.Series(each, along(buckets, mine, "at", each), colour, dash) for each, colour, dash in _PERCENTILES
        ]
        axis = plots.logarithmic([text.of(row[each]) for row in mine for each, _, _ in _PERCENTILES])
        drawing = plots.lines(
            f"Lines: p50, p95 and p99 of {name.lower()} over time, between {text.ms(axis.low)} and {text.ms(axis.high)}",
            series,
            axis,
            column_hints([stretch(data, at) for at in buckets], series, text.ms),
        )
        key = plots.legend(series, lines=True)
        plot = plots.frame(drawing, axis, text.ms, marks(data))
        drawn.append(figure(f"latency-{metric}", plot, f"<b>{name}</b>: {meaning}", key))
        total = whole.get(metric)
        if total is not None:
            sentences.append(
                f"half of all {name.lower()} took at most {text.ms(total['p50'])}, "
                f"one in a hundred more than {text.ms(total['p99'])}"
            )
            cells.append([name, *(text.ms(total[each]) for each, _, _ in _PERCENTILES), text.count(total["count"])])
    reading = "; ".join(sentences)
    reading = f"{text.sentence(reading)}. The scale is logarithmic: the same way up is the same factor everywhere."
    numbers = table("Latency of the whole time", ["", "p50", "p95", "p99", "Measured"], cells, fold=False)
    return Section("latency", title, reading, side_by_side(*drawn) + numbers)


# --- the league ------------------------------------------------------------------------------------------------------


def league(data: ReportData, ranks: Mapping[str, Any] | None) -> Section:
    """The relays in the order of their scores, or of their success where there are no ranks."""
    title = "Relay league"
    rows = {str(row["relay"]): row for row in data.rows("relays")}
    scores = _scores(ranks)
    if not rows and not scores:
        return nothing("league", title, "There are no relays to compare.")
    success = {relay: _success(row) for relay, row in rows.items()}
    if scores:
        order = sorted({*rows, *scores}, key=lambda relay: (-scores.get(relay, {}).get("score", 500), relay))
        known = len(order)
        order = [*order[: TOP_RELAYS - 5], *order[-5:]] if known > TOP_RELAYS else order
        values = {relay: scores.get(relay, {}).get("score", 500.0) for relay in order}
        caption = "Score of each relay; 500 is neutral, 1000 the best there can be"
        ends = {relay: text.count(values[relay]) for relay in order}
        most = 1000.0
        if known > TOP_RELAYS:
            caption += f"; the best {TOP_RELAYS - 5} and the last 5 of {known}"
    else:
        order = sorted(rows, key=lambda relay: (-_known(success[relay]), relay))
        values = {relay: 100 * (success[relay] or 0) for relay in order}
        caption = "Share of transports that were accepted and ended well, for each relay; there are no ranks yet"
        ends = {relay: text.percent(success[relay]) for relay in order}
        most = 100.0
    best, worst = order[0], order[-1]
    reading = f"{text.key(best)} leads with {ends[best]}"
    reading += f", {text.key(worst)} comes last with {ends[worst]}." if worst != best else "."
    if ranks and scores:
        left_out = ranks.get("excluded")
        clients = left_out.get("clients") if isinstance(left_out, Mapping) else None
        reading += (
            f" Ranks were issued {text.when(ranks.get('issued'))} (UTC) by {text.key(ranks.get('issuer', ''))}; "
            f"{text.many(clients, 'client was', 'clients were')} left out."
        )
    alt = f"Bars: {'scores' if scores else 'success'} of {len(order)} relays, from {ends[best]} down to {ends[worst]}"
    bars = plots.bars(
        alt,
        [
            (text.key(relay), ((values[relay], 5 if scores and values[relay] < POOR_SCORE else 1),), ends[relay])
            for relay in order
        ],
        most,
    )
    cells = [_league_row(data, relay, rows.get(relay, {}), scores.get(relay), success.get(relay)) for relay in order]
    heads = ["Relay", "Protocol~", "Load~"]
    heads += ["Score", "Success", "Latency", "Capacity", "Drops"] if scores else []
    heads += [
        "Ended well",
        "Transports",
        "Refusals",
        "Accept p50",
        "p95",
        "p99",
        "Handshake p99",
        "Connections at peak",
        "Traffic",
    ]
    if not scores:
        cells = [[*row[:3], *row[8:]] for row in cells]
    numbers = table("Relays: scores and their parts, transports, latency, load", heads, cells, fold=False)
    notices = [
        f"Relay {text.key(relay)} has a score of {ends[relay]}."
        for relay in order
        if scores and relay in scores and values[relay] < POOR_SCORE
    ]
    notices += _slow(rows)
    return Section("league", title, reading, figure("league", bars, caption) + numbers, notices)


def _scores(ranks: Mapping[str, Any] | None) -> dict[str, dict[str, float]]:
    relays = ranks.get("relays") if ranks else None
    if not isinstance(relays, Mapping):
        return {}
    return {
        str(relay): {str(name): text.of(value) for name, value in parts.items()}
        for relay, parts in relays.items()
        if isinstance(parts, Mapping)
    }


def _success(row: Row) -> float | None:
    """Share of the transports asked for that were opened and ended well."""
    asked, failed = text.of(row.get("transports")) + text.of(row.get("refused")), text.of(row.get("failed"))
    return max(0.0, 1 - failed / asked) if asked else None


def _known(share: float | None) -> float:
    return -1.0 if share is None else share


def _league_row(
    data: ReportData, relay: str, row: Row, score: Mapping[str, float] | None, success: float | None
) -> list[str]:
    mine = [each for each in data.rows("load") if each["relay"] == relay]
    parts = [_meter(score.get(name)) if score else text.NOTHING for name in ("success", "latency", "capacity", "drops")]
    return [
        text.key(relay),
        text.shown(row.get("protocol") or ""),
        plots.spark(along(data.buckets(), mine, "at", "bytes"), "traffic over time") if mine else text.NOTHING,
        f"<b>{text.count(score.get('score'))}</b>" if score else "500",
        *parts,
        text.percent(success) if success is not None else text.NOTHING,
        text.count(row.get("transports")),
        text.count(row.get("refusals")),
        *(text.ms(row.get(name)) for name in ("accept_p50", "accept_p95", "accept_p99", "handshake_p99")),
        text.count(row.get("connections_max")),
        text.size(row.get("bytes")),
    ]


def _meter(value: float | None) -> str:
    if value is None:
        return text.NOTHING
    share = min(max(value / 10, 0), 100)
    return f'<span class="meter"><i style="width:{share:.0f}%"></i></span>{value:.0f}'


def _slow(rows: Mapping[str, Row]) -> Sequence[str]:
    """Relays that are slow among those of their protocol."""
    found = []
    for protocol in sorted({str(row["protocol"]) for row in rows.values()}):
        mine = {relay: row["accept_p99"] for relay, row in rows.items() if str(row["protocol"]) == protocol}
        known = {relay: value for relay, p99 in mine.items() if (value := text.number(p99)) is not None}
        usual = median(known.values()) if len(known) >= 3 else math.inf
        found += [
            f"Relay {text.key(relay)} is slow: its p99 of accepts is {text.ms(value)}, {text.ms(usual)} is usual."
            for relay, value in sorted(known.items(), key=lambda item: (-item[1], item[0]))
            if value > SLOW_FACTOR * usual
        ]
    return found
