"""Plots as small pieces of HTML and SVG that stretch to the width they are given. Pure.

The shapes are an SVG that is stretched without keeping its proportions, while lines keep their width; the texts around it
are HTML. So letters are as large on a telephone as on a desktop, and colours follow the page's light or dark scheme.
Only the figure carries an id, so ids of two plots cannot clash. Labels come in escaped, everything else is a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from dmsg_logs.report import text

#: Width and height of the coordinates of every SVG.
WIDTH: Final = 1000
HEIGHT: Final = 400
#: Steps of the colours of a heat map, from nothing to the most.
LEVELS: Final = 8
#: Colours of series; the last is that of "everything else".
COLOURS: Final = 7
Format = Callable[[float], str]
Points = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to heights from 0 (bottom) to 1 (top), and holds the ticks written beside the plot."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Share of the height at which a value stands."""
        if self.logarithmic:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def y(self, value: float) -> float:
        """The same in the coordinates of the SVG."""
        return HEIGHT * (1 - min(max(self.place(value), 0.0), 1.0))


def linear(most: float) -> Axis:
    """From 0 to a round number not below ``most``, with three or four round steps."""
    most = most if most > 0 else 1.0
    step = 10.0 ** math.floor(math.log10(most / 3))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if most / (step * factor) <= 4)
    steps = math.ceil(most / step - 1e-9)
    return Axis(0.0, step * steps, tuple(step * index for index in range(steps + 1)))


def logarithmic(values: Sequence[float]) -> Axis:
    """From the 1, 2 or 5 below the least positive value to the 1, 2 or 5 above the greatest. The axis is bounded: larger
    values in a log are drawn at the edge."""
    positive = [value for value in values if value > 0] or [1.0]
    steps = sorted(factor * 10.0**power for power in range(-3, 16) for factor in (1, 2, 5))
    low = max((step for step in steps[:-1] if step <= min(positive)), default=steps[0])  # below it is room for ``high``
    high = min((step for step in steps if step >= max(positive) and step > low), default=steps[-1])
    within = [step for step in steps if low <= step <= high]
    while len(within) > 6:
        within = within[::2] if len(within) % 2 else within[1::2]
    return Axis(low, high, tuple(within), True)


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one colour of columns: its escaped label, its values and the number of its colour (from 1)."""

    label: str
    values: Points
    colour: int
    dash: int = 0


def legend(series: Sequence[Series], *, lines: bool = False) -> str:
    """What the colours mean."""
    kind = "line" if lines else "box"
    items = "".join(f'<li><span class="{kind} c{each.colour} d{each.dash}"></span>{each.label}</li>' for each in series)
    return f'<ul class="legend">{items}</ul>'


def _n(value: float) -> str:
    """A coordinate, as short as it can be."""
    return f"{value:.1f}".removesuffix(".0")


def svg(alt: str, body: str, *, height: int = HEIGHT) -> str:
    """An SVG that fills its box; ``alt`` (escaped) describes it."""
    return f'<svg role="img" aria-label="{alt}" viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none">{body}</svg>'


def frame(drawing: str, axis: Axis | None, form: Format, below: Sequence[tuple[float, str, bool]]) -> str:
    """A drawing with the texts left of it and below it. ``below``: share of the width, text, whether it is minor."""
    left = ""
    if axis is not None:
        left = "".join(f'<span style="bottom:{_n(100 * axis.place(tick))}%">{form(tick)}</span>' for tick in axis.ticks)
        left = f'<div class="ys" aria-hidden="true">{left}</div>'
    under = "".join(
        f'<span style="left:{_n(100 * share)}%"{" class=minor" if minor else ""}>{label}</span>'
        for share, label, minor in below
    )
    return (
        f'<div class="chart">{left}<div class="area">{drawing}</div>'
        f'<div class="xs" aria-hidden="true">{under}</div></div>'
    )


def grid(axis: Axis) -> str:
    """A line across the plot at every tick."""
    return "".join(f'<path class="grid" d="M0 {_n(axis.y(tick))}H{WIDTH}"/>' for tick in axis.ticks)


def hints(labels: Sequence[str]) -> str:
    """A hint (escaped) for each column of equal width, shown where the pointer rests."""
    width = WIDTH / max(len(labels), 1)
    return "".join(
        f'<rect class="hint" x="{_n(index * width)}" width="{_n(width)}" height="{HEIGHT}"><title>{label}</title></rect>'
        for index, label in enumerate(labels)
        if label
    )


def line(values: Points, axis: Axis, css: str) -> str:
    """A line through the middles of the columns; it is broken where a value is missing."""
    width = WIDTH / max(len(values), 1)
    path, pen = [], False
    for index, value in enumerate(values):
        if value is None:
            pen = False
            continue
        alone = not pen and (index + 1 == len(values) or values[index + 1] is None)
        place = f"{_n((index + 0.5) * width)} {_n(axis.y(value))}"
        path.append(("L" if pen else "M") + place + ("h0.1" if alone else ""))
        pen = True
    return f'<path class="{css}" d="{"".join(path)}"/>' if path else ""


def band(low: Points, high: Points, axis: Axis, css: str) -> str:
    """The area between two lines, wherever both are known."""
    width = WIDTH / max(len(low), 1)
    ends = [(i, a, b) for i, (a, b) in enumerate(zip(low, high, strict=True)) if a is not None and b is not None]
    if not ends:
        return ""
    if len(ends) == 1:
        index, bottom, top = ends[0]
        ends = [(index - 0.2, bottom, top), (index + 0.2, bottom, top)]  # type: ignore[list-item]
    upper = "L".join(f"{_n((index + 0.5) * width)} {_n(axis.y(top))}" for index, _, top in ends)
    lower = "L".join(f"{_n((index + 0.5) * width)} {_n(axis.y(bottom))}" for index, bottom, _ in reversed(ends))
    return f'<path class="{css}" d="M{upper}L{lower}Z"/>'


def lines(alt: str, series: Sequence[Series], axis: Axis, labels: Sequence[str]) -> str:
    """Several lines over one axis."""
    drawn = "".join(line(each.values, axis, f"line s{each.colour} d{each.dash}") for each in series)
    return svg(alt, grid(axis) + drawn + hints(labels))


def stack(series: Sequence[Series], axis: Axis, slots: int) -> str:
    """Columns, one colour on top of the other, the first at the bottom; one path a colour."""
    width = WIDTH / max(slots, 1)
    gap = width * (0.12 if slots <= 60 else 0.04)
    bottoms = [0.0] * slots
    drawn = []
    for each in series:
        path = []
        for index, value in enumerate(each.values):
            if value:
                top = bottoms[index] + value
                high = axis.y(bottoms[index]) - axis.y(top)
                x = index * width + gap / 2
                path.append(f"M{_n(x)} {_n(axis.y(top))}h{_n(width - gap)}v{_n(high)}h-{_n(width - gap)}z")
                bottoms[index] = top
        if path:
            drawn.append(f'<path class="fill c{each.colour}" d="{"".join(path)}"/>')
    return "".join(drawn)


def columns(alt: str, series: Sequence[Series], axis: Axis, labels: Sequence[str]) -> str:
    """Stacked columns, one for each of ``labels``."""
    return svg(alt, grid(axis) + stack(series, axis, len(labels)) + hints(labels))


def stacked_most(series: Sequence[Series]) -> float:
    """The height of the highest column."""
    return max((sum(value or 0 for value in slot) for slot in zip(*(s.values for s in series), strict=True)), default=0)


# --- heat maps -------------------------------------------------------------------------------------------------------


def level(value: float | None, most: float) -> str:
    """The class of a value's colour. Steps grow with the square, so that small loads differ and large ones do, too."""
    if value is None:
        return "hx"
    if value <= 0 or most <= 0:
        return "h0"
    return f"h{min(LEVELS, 1 + int(math.sqrt(min(value / most, 1.0)) * LEVELS * 0.9999))}"


def heat_rows(
    alt: str, rows: Sequence[tuple[str, Points]], most: float, hint: Callable[[int, int], str], below: str
) -> str:
    """A heat map: a row for each (escaped label, values); ``hint`` gives the text of row and column."""
    drawn = []
    for r, (label, values) in enumerate(rows):
        width = WIDTH / max(len(values), 1)
        cells = "".join(
            f'<rect class="{level(value, most)}" x="{_n(c * width)}" width="{_n(width + 0.3)}" height="20">'
            f"<title>{hint(r, c)}</title></rect>"
            for c, value in enumerate(values)
            if value is not None
        )
        drawn.append(
            f'<div class="heatrow"><span class="who">{label}</span>'
            f'<svg aria-hidden="true" viewBox="0 0 {WIDTH} 20" preserveAspectRatio="none">{cells}</svg></div>'
        )
    return f'<div class="heat" role="img" aria-label="{alt}">{"".join(drawn)}{below}</div>'


def heat_most(values: Sequence[float]) -> float:
    """The value with the strongest colour: one in a hundred may exceed it, so that a few values do not make all others pale."""
    ranked = sorted(values)
    return ranked[math.ceil(0.99 * len(ranked)) - 1] if ranked else 0.0


def heat_scale(most: float, form: Format, *, more: bool = False) -> str:
    """What the colours of a heat map mean; ``more`` says that there are values above ``most``."""
    steps = "".join(
        f'<span class="b{index}" title="up to {form(most * (index / LEVELS) ** 2)}"></span>'
        for index in range(1, LEVELS + 1)
    )
    end = form(most) + (" or more" if more else "")
    return (
        f'<p class="scale"><span class="end">0</span><span class="ramp"><span class="b0"></span>{steps}</span>'
        f'<span class="end">{end}</span><span class="end none"><span class="bx"></span>no data</span></p>'
    )


# --- bars and sparks -------------------------------------------------------------------------------------------------


def bars(alt: str, rows: Sequence[tuple[str, Sequence[tuple[float, int]], str]], most: float) -> str:
    """Horizontal bars: each row has an escaped label, consecutive (value, colour) pairs, and an escaped text at its end."""
    drawn = []
    for label, parts, end in rows:
        stretches = "".join(
            f'<i class="c{colour}" style="width:{_n(100 * max(value, 0) / most) if most > 0 else 0}%"></i>'
            for value, colour in parts
            if value > 0
        )
        drawn.append(
            f'<div class="barrow"><span class="who">{label}</span><span class="bar">{stretches}</span>'
            f'<span class="end">{end}</span></div>'
        )
    return f'<div class="bars" role="img" aria-label="{alt}">{"".join(drawn)}</div>'


def spark(values: Points, alt: str) -> str:
    """A line without axes, as large as a word."""
    known = [value for value in values if value is not None]
    if not known:
        return text.NOTHING
    axis = Axis(0.0, max([*known, 1e-9]) * 1.05, ())
    path = line(values, axis, "line s1 d0")
    return f'<span class="spark">{svg(alt, path)}</span>'
