"""The first section: the key figures, and what is worth a look. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dmsg_logs.report import plots, text
from dmsg_logs.report.data import DAY_S, ReportData
from dmsg_logs.report.parts import Section, along, bucket_word, column_hints, figure, marks, stretch


def overview(data: ReportData, summary: Mapping[str, Any] | None, others: Sequence[Section]) -> Section:
    """Key figures of the fleet, the notices of all ``others``, and traffic over time."""
    totals = data.totals
    if not data.until and not totals.get("lines_in"):
        return Section("overview", "Overview", "There is no data yet: no log line has been taken in.", _run(summary))
    reading = "No relay, discovery or client has written anything in the time looked at."
    if data.until:
        days = max(1, -(-(data.until - data.since) // DAY_S))
        reading = (
            f"In {text.many(days, 'day')} up to {text.when(data.until)} (UTC), {text.many(totals.get('relays'), 'relay')} "
            f"carried {text.size(totals.get('bytes'))} in {text.many(totals.get('transports'), 'transport')} "
            f"for {text.many(totals.get('clients'), 'client')}."
        )
        if totals.get("dials"):
            reading += f" {text.percent(totals.get('dials_ok'), totals['dials'])} of their dials succeeded."
    came = totals.get("lines_in")
    tiles = [
        ("Lines in", text.about(came), "since the beginning"),
        ("Good", text.about(totals.get("good")), text.percent(totals.get("good"), came)),
        ("Duplicate", text.about(totals.get("dup")), text.percent(totals.get("dup"), came)),
        ("Corrupt", text.about(totals.get("corrupt")), text.percent(totals.get("corrupt"), came)),
        ("Missing", text.about(totals.get("missing")), "of what files should hold"),
        ("Relays", text.about(totals.get("relays")), f"{text.about(totals.get('connections'))} connections"),
        ("Clients", text.about(totals.get("clients")), ""),
        ("Transports", text.about(totals.get("transports")), f"{text.about(totals.get('transports_failed'))} failed"),
        (
            "Dial success",
            text.percent(totals.get("dials_ok"), totals.get("dials")),
            f"of {text.many(totals.get('dials'), 'dial')}",
        ),
        ("Traffic", text.size(totals.get("bytes")), ""),
    ]
    shown = "".join(
        f"<div><dt>{name}</dt><dd>{value}{f'<small>{more}</small>' if more else ''}</dd></div>"
        for name, value, more in tiles
    )
    body = f'<dl class="tiles">{shown}</dl>{_notices(others)}{_traffic(data)}{_run(summary)}'
    return Section("overview", "Overview", reading, body)


def _notices(others: Sequence[Section]) -> str:
    found = [f'<li>{notice} <a href="#{each.id}">{each.title}</a></li>' for each in others for notice in each.notices]
    if not found:
        return '<p class="calm"><b>✓ Nothing stands out.</b> No section has found anything that wants looking at.</p>'
    return f'<div class="notices"><h3>Worth a look</h3><ul>{"".join(found)}</ul></div>'


def _traffic(data: ReportData) -> str:
    rows = data.rows("fleet")
    if not rows:
        return ""
    buckets = data.buckets()
    series = [plots.Series("traffic", along(buckets, rows, "at", "bytes"), 1)]
    axis = plots.linear(plots.stacked_most(series))
    drawing = plots.columns(
        f"Columns: traffic of the whole fleet over time, at most {text.size(plots.stacked_most(series))}",
        series,
        axis,
        column_hints([stretch(data, at) for at in buckets], series, text.size),
    )
    plot = plots.frame(drawing, axis, text.size, marks(data))
    return figure("overview", plot, f"Traffic of the whole fleet for every {bucket_word(data)}")


def _run(summary: Mapping[str, Any] | None) -> str:
    """The lines that the run which made this page took in."""
    if not summary:
        return ""
    parts = [
        f"{text.count(summary[name])} {word}"
        for name, word in (
            ("in", "in"),
            ("good", "good"),
            ("dup", "duplicate"),
            ("corrupt", "corrupt"),
            ("missing", "missing"),
        )
        if text.number(summary.get(name)) is not None
    ]
    took = text.number(summary.get("seconds"))
    if not parts:
        return ""
    end = f", in {text.seconds(took)}" if took is not None else ""
    return f'<p class="run">This run: lines {", ".join(parts)}{end}.</p>'
