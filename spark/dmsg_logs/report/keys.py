"""The sections on clients: failed dials, resumptions, candidates for abuse, top talkers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dmsg_logs.report import plots, text
from dmsg_logs.report.data import DAY_S, ReportData, iso_date
from dmsg_logs.report.parts import (
    Row,
    Section,
    columns_over_time,
    day_marks,
    figure,
    nothing,
    stacked,
    table,
)

#: Rows and columns of the table of stages and reasons by relay.
MATRIX_ROWS: Final = 12
MATRIX_COLUMNS: Final = 10
#: Share of failed dials that is worth a look.
MANY_FAILED: Final = 0.05


def days(data: ReportData) -> list[str]:
    """Every date of the time looked at."""
    return [iso_date(at) for at in range(data.since, data.until, DAY_S)]


def dials(data: ReportData) -> Section:
    """Where dials fail: stage, reason and relay."""
    title = "Dial failures"
    rows = data.rows("dial_failures")
    dialled, succeeded = text.of(data.totals.get("dials")), text.of(data.totals.get("dials_ok"))
    whole = ""
    if dialled:
        whole = f"Of {text.many(dialled, 'dial')} {text.percent(dialled - succeeded, dialled)} failed. "
    if not rows:
        return nothing("dials", title, whole + "No attempt of a client to reach another failed.")
    kinds: dict[tuple[str, str], float] = {}
    relays: dict[str, float] = {}
    cells: dict[tuple[tuple[str, str], str], float] = {}
    for row in rows:
        kind, relay, count = (str(row["stage"]), str(row["reason"])), str(row["relay"]), text.of(row["attempts"])
        kinds[kind] = kinds.get(kind, 0) + count
        if relay:
            relays[relay] = relays.get(relay, 0) + count
        cells[kind, relay] = cells.get((kind, relay), 0) + count
    total = sum(kinds.values())
    ranked = sorted(kinds, key=lambda kind: (-kinds[kind], kind))
    first = ranked[0]
    reading = (
        f"{whole}A dial may try several relays; of the {text.many(total, 'attempt')} that failed, "
        f"{text.percent(kinds[first], total)} ended at <em>{text.shown(first[0])}</em> because of "
        f"<em>{text.shown(first[1])}</em>."
    )
    order = sorted(relays, key=lambda relay: (-relays[relay], relay))
    if order:
        reading += (
            f" Of those at a relay {text.percent(relays[order[0]], sum(relays.values()))} "
            f"were at {text.key(order[0])}, more than at any other."
        )
    bars = plots.bars(
        f"Bars: failed attempts by stage and reason, at most {text.count(kinds[first])}",
        [(_kind(kind), ((kinds[kind], 1),), text.about(kinds[kind])) for kind in ranked[:MATRIX_ROWS]],
        kinds[first],
    )
    body = figure("dials", bars, "Failed attempts by stage and reason")
    body += _matrix(ranked[:MATRIX_ROWS], order, cells)
    listed = [
        [
            text.shown(row["stage"]),
            text.shown(row["reason"]),
            text.key(row["relay"]),
            text.shown(row["protocol"]),
            text.count(row["attempts"]),
            text.count(row["clients"]),
            text.ms(row["p50"]),
            text.ms(row["p99"]),
        ]
        for row in rows[:30]
    ]
    heads = [
        "Stage",
        "Reason",
        "Relay",
        "Protocol",
        "Attempts",
        "Clients (most in a day)",
        "p50, worst day",
        "p99, worst day",
    ]
    body += table("Failed attempts by stage, reason and relay", heads, listed, words=4)
    notices = []
    if dialled and 1 - succeeded / dialled > MANY_FAILED:
        notices.append(f"{text.percent(dialled - succeeded, dialled)} of all dials fail.")
    return Section("dials", title, reading, body, notices)


def _kind(kind: tuple[str, str]) -> str:
    return f"{text.shown(kind[0])} · {text.shown(kind[1])}"


def _matrix(
    kinds: Sequence[tuple[str, str]], relays: Sequence[str], cells: Mapping[tuple[tuple[str, str], str], float]
) -> str:
    """Stage and reason by relay, coloured by the count, which stands in the cell."""
    columns = relays[:MATRIX_COLUMNS]
    if not columns:
        return ""
    rest = set(relays[MATRIX_COLUMNS:])
    heads = [text.key(relay) for relay in columns]
    if rest:
        heads.append(text.many(len(rest), "other"))
    if any(not relay for _, relay in cells):
        heads.append("no relay")
    found = []
    for kind in kinds:
        line = [cells.get((kind, relay), 0.0) for relay in columns]
        if rest:
            line.append(sum(cells.get((kind, relay), 0.0) for relay in rest))
        if len(heads) > len(line):
            line.append(cells.get((kind, ""), 0.0))
        found.append(line)
    most = max((value for line in found for value in line), default=0)
    top = "".join(f'<th scope="col" class="n">{head}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{_kind(kind)}</th>'
        + "".join(
            f'<td class="{plots.level(value, most).replace("h", "b")}">{text.about(value) if value else ""}</td>'
            for value in line
        )
        + "</tr>"
        for kind, line in zip(kinds, found, strict=True)
    )
    caption = "Failed attempts: stage and reason by relay"
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{caption}"><table class="matrix">'
        f"<caption>{caption}</caption><thead><tr><td></td>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def resumptions(data: ReportData) -> Section:
    """Transports that went on over another path."""
    title = "Resumptions"
    rows = data.rows("resumptions")
    total = sum(text.of(row["resumptions"]) for row in rows)
    if not total:
        return nothing("resumptions", title, "No transport had to go on over another path.")
    slots = days(data)
    series = stacked(slots, rows, "date", "reason", "resumptions")
    times = data.rows("resumption_times")
    reading = (
        f"Transports went on over another path {text.many(total, 'time')}, "
        f"{text.percent(sum(value or 0 for value in series[0].values), total)} of them after {series[0].label}."
    )
    if times:
        longest = max(times, key=lambda row: text.of(row["max"]))
        reading += (
            f" Half of those after {text.shown(times[0]['reason'])} were without a path for at most "
            f"{text.ms(times[0]['p50'])}; the longest pause of all was {text.ms(longest['max'])}."
        )
    body = columns_over_time(
        "resumptions",
        "Resumptions for each day, by what ended the path before",
        f"Columns: resumptions for each day by reason, at most {text.count(plots.stacked_most(series))}",
        series,
        [text.day(each) for each in slots],
        day_marks(slots),
    )
    cells = [
        [text.shown(row["reason"]), text.count(row["count"]), *(text.ms(row[n]) for n in ("p50", "p95", "p99", "max"))]
        for row in times
    ]
    body += table("Time without a path", ["Reason", "Resumptions", "p50", "p95", "p99", "Longest"], cells)
    return Section("resumptions", title, reading, body)


def abuse(data: ReportData) -> Section:
    """Keys that look as if they did not mean well."""
    title = "Abuse candidates"
    rows = data.rows("abuse")
    if not rows:
        return nothing("abuse", title, "No key stands out.")
    flagged = text.of(data.totals.get("abuse_flagged")) or sum(bool(row["flagged"]) for row in rows)
    candidates = text.of(data.totals.get("abuse_keys")) or len(rows)
    worst = max(rows, key=lambda row: text.of(row["score"]))
    reading = f"{text.sentence(text.many(candidates, 'key'))} {'stands' if candidates == 1 else 'stand'} out; "
    if flagged:
        reading += (
            f"{text.about(flagged)} {'is' if flagged == 1 else 'are'} flagged (which leaves a key out of that day's ranks, "
            "unless one relay alone complains of it); "
        )
    reading += f"the highest score is {_score(worst['score'])} of {text.key(worst['key'])}"
    reading += f" ({text.safe(worst['why'], 120)})." if worst["why"] else "."
    bars = plots.bars(
        f"Bars: scores of {len(rows)} keys, at most {_score(worst['score'])}",
        [
            (
                text.key(row["key"]),
                ((text.of(row["score"]), 5 if row["flagged"] else 7),),
                _score(row["score"]) + (' <b class="flag">⚑ flagged</b>' if row["flagged"] else ""),
            )
            for row in rows
        ],
        1.0,
    )
    cells = [
        [
            text.key(row["key"]),
            "⚑ yes" if row["flagged"] else "no",
            _score(row["score"]),
            text.shown(row["why"]),
            *(
                text.count(row[name])
                for name in (
                    *("days", "relays", "refusals", "handshakes_failed", "abuse_closes"),
                    *("dials", "dial_failures"),
                )
            ),
        ]
        for row in rows
    ]
    heads = ["Key", "Flagged", "Score", "Why~", "Days", "Relays", "Refusals", "Failed handshakes", "Abuse closes"]
    heads += ["Dials", "Failed dials"]
    body = figure("abuse", bars, "Score of each key on its worst day, from 0 to 1")
    body += table("Keys that stand out", heads, cells, words=2)
    notices = [f"{text.many(flagged, 'key is', 'keys are')} flagged for abuse."] if flagged else []
    return Section("abuse", title, reading, body, notices)


def _score(value: Any) -> str:
    found = text.number(value)
    return text.NOTHING if found is None else f"{found:.2f}"


def talkers(data: ReportData) -> Section:
    """Who sends and receives most."""
    title = "Top talkers"
    rows = data.rows("talkers")
    if not rows:
        return nothing("talkers", title, "No client has sent anything.")
    # One client sends what another receives, so talkers exchange twice the bytes that relays carried.
    total = 2 * text.of(data.totals.get("bytes"))
    first = rows[0]
    reading = f"{text.key(first['key'])} talks most: {_talk(first)} over {text.many(first['transports'], 'transport')}"
    reading += f" with up to {text.many(first['peers'], 'peer')} a day." if text.of(first["peers"]) else "."
    if total:
        share = sum(text.of(row["bytes"]) for row in rows[:5])
        if share <= total:
            reading += f" The first {min(5, len(rows))} make up {text.percent(share, total)} of all traffic."
    most = max(text.of(row["sent"]) + text.of(row["received"]) for row in rows)
    series = [plots.Series("sent", [], 1), plots.Series("received", [], 2)]
    bars = plots.bars(
        f"Bars: bytes sent and received by {len(rows)} keys, at most {text.size(most)}",
        [_talker(row) for row in rows],
        most,
    )
    cells = [
        [
            text.key(row["key"]),
            *(text.size(row[name]) for name in ("sent", "received", "bytes")),
            *(text.count(row[name]) for name in ("transports", "peers", "days")),
        ]
        for row in rows
    ]
    body = figure("talkers", bars, "Bytes sent and received", plots.legend(series))
    heads = ["Key", "Sent", "Received", "Both", "Transports", "Peers (most in a day)", "Days"]
    return Section("talkers", title, reading, body + table("Top talkers", heads, cells))


def _talk(row: Row) -> str:
    return f"{text.size(row['sent'])} sent and {text.size(row['received'])} received"


def _talker(row: Row) -> tuple[str, Sequence[tuple[float, int]], str]:
    parts = ((text.of(row["sent"]), 1), (text.of(row["received"]), 2))
    return text.key(row["key"]), parts, text.size(row["bytes"])
