"""The parts of the page: sections, figures, tables, marks on the time axis. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dmsg_logs.report import plots, text
from dmsg_logs.report.data import DAY_S, HOUR_S, ReportData

Row = Mapping[str, Any]
Mark = tuple[float, str, bool]
#: Series in a stacked plot that are drawn on their own; rarer ones are drawn as one.
SERIES: Final = plots.COLOURS - 1
#: Rows from which on a table is folded away.
FOLDED_ROWS: Final = 6
#: Marks below a plot on a narrow screen, and on a wide one.
NARROW_MARKS: Final = 5
WIDE_MARKS: Final = 15


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the page. ``reading`` describes it in a sentence or two; ``notices`` go to the overview."""

    id: str
    title: str
    reading: str
    body: str = ""
    notices: Sequence[str] = field(default_factory=tuple)

    def html(self) -> str:
        """The section with its heading."""
        return (
            f'<section id="{self.id}" aria-labelledby="{self.id}-title"><h2 id="{self.id}-title">{self.title}</h2>'
            f'<p class="reading">{self.reading}</p>{self.body}</section>'
        )


def figure(name: str, drawing: str, caption: str, key: str = "") -> str:
    """A plot with its caption and, if need be, the meaning of its colours. ``name`` is its id, once in the page."""
    return f'<figure class="plot" id="plot-{name}"><figcaption>{caption}</figcaption>{key}{drawing}</figure>'


def side_by_side(*figures: str) -> str:
    """Figures beside each other where there is room."""
    return f'<div class="side">{"".join(figures)}</div>'


def table(
    caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1, fold: bool = True
) -> str:
    """A table of ready cells in a box of its own that scrolls; the first ``words`` columns are texts, the others numbers.

    A heading may end in ``~`` for a column of text further right. Long tables are folded away.
    """
    if not rows:
        return ""
    text_columns = {index for index, head in enumerate(heads) if index < words or head.endswith("~")}
    top = "".join(
        f'<th scope="col"{"" if index in text_columns else " class=n"}>{head.removesuffix("~")}</th>'
        for index, head in enumerate(heads)
    )
    body = []
    for row in rows:
        cells = "".join(
            f"<td{'' if index in text_columns else ' class=n'}>{cell}</td>" for index, cell in enumerate(row) if index
        )
        body.append(f'<tr><th scope="row">{row[0]}</th>{cells}</tr>')
    whole = (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{caption}"><table><caption>{caption}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )
    if not fold or len(rows) < FOLDED_ROWS:
        return whole
    return f"<details><summary>{caption} <span>({text.many(len(rows), 'row')})</span></summary>{whole}</details>"


def nothing(name: str, title: str, what: str) -> Section:
    """A section without data."""
    return Section(name, title, what, '<p class="empty">No data.</p>')


# --- the axis of time ------------------------------------------------------------------------------------------------


def marks(data: ReportData) -> list[Mark]:
    """Marks for days, or for hours of a short period, below a plot over the buckets of ``data``."""
    buckets = data.buckets()
    if not buckets:
        return []
    width = len(buckets) * data.bucket_s
    short = width <= 2 * DAY_S
    if not short:  # a day's name stands under its middle
        noons = range(data.since + DAY_S // 2, data.until, DAY_S)
        return thin([((noon - data.since) / width, text.day(noon)) for noon in noons])
    step = (3 if width <= DAY_S else 6) * HOUR_S
    hours = range(data.since, data.until, step)
    return thin([((at - data.since) / width, text.clock(at) if at % DAY_S else text.day(at)) for at in hours])


def day_marks(days: Sequence[str]) -> list[Mark]:
    """ISO dates below a plot with a column for each."""
    return thin([((index + 0.5) / len(days), text.day(each)) for index, each in enumerate(days)])


def thin(places: Sequence[tuple[float, str]]) -> list[Mark]:
    """As many marks as have room, the minor ones only on wide screens."""
    wide = max(1, -(-len(places) // WIDE_MARKS))
    kept = list(places)[::wide]
    narrow = max(1, -(-len(kept) // NARROW_MARKS))
    return [(share, name, bool(index % narrow)) for index, (share, name) in enumerate(kept)]


def stretch(data: ReportData, at: float) -> str:
    """A bucket in words."""
    return f"{text.day(at)}, {text.clock(at)}–{text.clock(at + data.bucket_s)}"


def bucket_word(data: ReportData) -> str:
    """What a bucket is called: ``hour``, ``3 hours``."""
    hours = data.bucket_s // HOUR_S
    return "hour" if hours == 1 else f"{hours} hours"


def along(slots: Sequence[Any], rows: Iterable[Row], at: str, value: str) -> list[float | None]:
    """The values of ``rows`` in the order of ``slots``, nothing where there is no row."""
    found = {row[at]: text.number(row[value]) for row in rows}
    return [found.get(slot) for slot in slots]


def stacked(slots: Sequence[Any], rows: Sequence[Row], at: str, name: str, value: str) -> list[plots.Series]:
    """The most important values of ``name`` as series over ``slots``, the others together as the last series.

    Importance is the sum of the squares, so that a rare value that comes all at once is not hidden among the others.
    """
    totals: dict[str, float] = {}
    weights: dict[str, float] = {}
    for row in rows:
        kind, count = str(row[name]), text.of(row[value])
        totals[kind] = totals.get(kind, 0) + count
        weights[kind] = weights.get(kind, 0) + count * abs(count)
    heavy = sorted(weights, key=lambda each: (-weights[each], each))
    heavy = heavy if len(heavy) <= SERIES + 1 else heavy[:SERIES]
    rare = set(weights) - set(heavy)
    ranked = sorted(heavy, key=lambda each: (-totals[each], each))
    place = {slot: index for index, slot in enumerate(slots)}
    sums: dict[str, list[float | None]] = {each: [0.0] * len(slots) for each in [*ranked, ""]}
    for row in rows:
        index = place.get(row[at])
        if index is not None:
            line = sums["" if row[name] in rare else str(row[name])]
            line[index] = (line[index] or 0.0) + text.of(row[value])
    series = [plots.Series(text.shown(each), sums[each], index + 1) for index, each in enumerate(ranked)]
    if rare:
        series.append(plots.Series(text.many(len(rare), "other"), sums[""], plots.COLOURS))
    return series


def column_hints(slots: Sequence[str], series: Sequence[plots.Series], form: plots.Format) -> list[str]:
    """The hint for each column under the pointer: its name, then its series."""
    found = []
    for index, slot in enumerate(slots):
        parts = [
            f"{_words(each.label)}: {form(value)}"
            for each in series
            if (value := each.values[index]) is not None and value
        ]
        found.append(": ".join([slot, ", ".join(parts) or "nothing"]))
    return found


def columns_over_time(
    name: str,
    caption: str,
    alt: str,
    series: Sequence[plots.Series],
    slots: Sequence[str],
    below: Sequence[Mark],
    form: plots.Format = text.about,
) -> str:
    """A figure of stacked columns, one for each of ``slots`` (texts); ``below`` are the time marks."""
    axis = plots.linear(plots.stacked_most(series))
    drawing = plots.columns(alt, series, axis, column_hints(slots, series, form))
    return figure(name, plots.frame(drawing, axis, form, below), caption, plots.legend(series))


def _words(label: str) -> str:
    """An escaped label without the element that carries its title."""
    return label.partition(">")[2].removesuffix("</span>") if label.startswith("<span") else label
