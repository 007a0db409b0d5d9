"""PNGs of the main plots, for the documentation.

Owns matplotlib and the Pillow it brings; draws off screen and in the same way every time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from dmsg_logs.report import plots, text
from dmsg_logs.report.data import ReportData
from dmsg_logs.report.parts import along, bucket_word, day_marks, marks, stacked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Width and height in inches, and dots an inch: 880 dots wide, a few ten kB.
SIZE: Final = (8.0, 3.4)
DPI: Final = 110
#: Colours of a picture: enough for smooth letters, and a third of the bytes.
PALETTE: Final = 96
#: Series colours in the order of the page's; the last is "everything else".
COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#98a2ad")
_STYLE: Final[Mapping[str, Any]] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#98a2ad",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e8ee",
    "text.color": "#16202b",
    "axes.labelcolor": "#16202b",
    "xtick.color": "#5a6675",
    "ytick.color": "#5a6675",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "text.parse_math": False,
}


def figures(data: ReportData) -> dict[str, bytes]:
    """PNG by name: ``load``, ``failures``, ``latency``, ``forecast``, each if there is data for it."""
    found = {}
    for name, draw in _DRAWN.items():
        image = _png(data, draw)
        if image is not None:
            found[name] = image
    return found


def _png(data: ReportData, draw: Callable[[ReportData, Figure], bool]) -> bytes | None:
    import matplotlib as mpl
    from matplotlib.figure import Figure as NewFigure
    from PIL import Image

    with mpl.rc_context(dict(_STYLE)):  # type: ignore[arg-type]
        figure = NewFigure(figsize=SIZE, dpi=DPI, layout="constrained")
        if not draw(data, figure):
            return None
        out = io.BytesIO()
        figure.savefig(out, format="png", metadata={"Software": None})
    small = io.BytesIO()
    Image.open(out).convert("RGB").quantize(PALETTE).save(small, format="png", optimize=True)
    return small.getvalue()


def _times(axes: Axes, data: ReportData) -> None:
    width = len(data.buckets())
    shown = [(share * width - 0.5, label) for share, label, _ in marks(data)]
    axes.set_xticks([at for at, _ in shown], [label for _, label in shown])
    axes.set_xlim(-0.5, width - 0.5)
    axes.grid(visible=False, axis="x")


def _load(data: ReportData, figure: Figure) -> bool:
    from matplotlib.colors import PowerNorm

    rows, relays = data.rows("load"), data.rows("relays")
    if not rows or not relays:
        return False
    buckets = data.buckets()
    values = [
        [
            float("nan") if value is None else value
            for value in along(buckets, [r for r in rows if r["relay"] == relay["relay"]], "at", "bytes")
        ]
        for relay in relays
    ]
    axes = figure.subplots()
    most = plots.heat_most([text.of(row["bytes"]) for row in rows]) or 1.0
    scale = PowerNorm(0.5, 0.0, most, clip=True)
    image = axes.imshow(values, aspect="auto", cmap="Blues", norm=scale, interpolation="nearest")
    axes.set_yticks(
        range(len(relays)), [text.short_key(relay["relay"]) for relay in relays], family="monospace", size=7
    )
    _times(axes, data)
    axes.grid(visible=False)
    axes.set_title(f"Traffic of each relay for every {bucket_word(data)}")
    figure.colorbar(image, ax=axes, format=lambda value, _: text.size(value), pad=0.01, extend="max")
    return True


def _failures(data: ReportData, figure: Figure) -> bool:
    rows = [
        {**row, "name": f"{row['what']} · {row['reason']}".removeprefix(" · ")}
        for row in data.rows("failures")
        if row["what"] != "refused"
    ]
    if not rows:
        return False
    buckets = data.buckets()
    axes = figure.subplots()
    bottom = [0.0] * len(buckets)
    edges = [index - 0.5 for index in range(len(buckets) + 1)]
    names = {text.shown(row["name"]): text.plain(row["name"], 40) for row in rows}
    for series in stacked(buckets, rows, "at", "name", "count"):
        values = [value or 0.0 for value in series.values]
        label = _literal(names.get(series.label, series.label))
        top = [under + value for under, value in zip(bottom, values, strict=True)]
        axes.stairs(top, edges, baseline=bottom, fill=True, color=COLOURS[series.colour - 1], label=label)
        bottom = top
    _times(axes, data)
    axes.yaxis.set_major_formatter(lambda value, _: text.about(value))
    axes.set_title(f"Failed handshakes, connections and transports for every {bucket_word(data)}, by reason")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    return True


def _literal(label: str) -> str:
    """A foreign text as it can be shown: letters the font has, and no leading underscore, which hides a label."""
    return "".join(each if each <= "\u04ff" or each == "…" else "?" for each in label).lstrip("_")


def _latency(data: ReportData, figure: Figure) -> bool:
    rows = data.rows("latency")
    metrics = [name for name in ("handshake", "accept", "dial") if any(row["metric"] == name for row in rows)]
    if not metrics:
        return False
    buckets = data.buckets()
    each_axes = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, metric in zip(each_axes, metrics, strict=True):
        mine = [row for row in rows if row["metric"] == metric]
        for name, colour, style in (("p50", 0, "-"), ("p95", 1, "--"), ("p99", 4, ":")):
            values = [float("nan") if value is None else value for value in along(buckets, mine, "at", name)]
            axes.plot(range(len(buckets)), values, style, color=COLOURS[colour], label=name, linewidth=1.4)
        _times(axes, data)
        few = [mark for mark in marks(data) if not mark[2]]
        axes.set_xticks([share * len(buckets) - 0.5 for share, _, _ in few], [label for _, label, _ in few])
        axis = plots.logarithmic([text.of(row[name]) for row in mine for name in ("p50", "p95", "p99")])
        axes.set_yscale("log")
        axes.set_ylim(axis.low, axis.high)
        axes.set_yticks(axis.ticks, [text.ms(tick) for tick in axis.ticks])
        axes.set_yticks([], minor=True)
        axes.set_title(f"Latency of {metric}s")
    figure.legend(*each_axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return True


def _forecast(data: ReportData, figure: Figure) -> bool:
    ahead = [row for row in data.rows("forecast") if row["relay"] == "" and row["metric"] == "bytes"]
    past = [row for row in data.rows("history") if row["relay"] == ""]
    if not ahead:
        return False
    days = sorted({str(row["date"]) for row in past} | {str(row["day"]) for row in ahead})
    axes = figure.subplots()
    was = along(days, past, "date", "bytes")
    value, low, high = (
        [float("nan") if each is None else each for each in along(days, ahead, "day", name)]
        for name in ("value", "low", "high")
    )
    axes.bar(range(len(days)), [each or 0.0 for each in was], color=COLOURS[0], width=0.8, label="so far")
    axes.fill_between(range(len(days)), low, high, color=COLOURS[4], alpha=0.22, linewidth=0)
    axes.plot(range(len(days)), value, color=COLOURS[4], label="expected, with interval")
    shown = day_marks(days)
    axes.set_xticks([share * len(days) - 0.5 for share, _, _ in shown], [label for _, label, _ in shown])
    axes.set_ylim(bottom=0)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_formatter(lambda value, _: text.size(value))
    axes.set_title("Traffic of the fleet a day")
    axes.legend(loc="upper left", fontsize=8)
    return True


_DRAWN: Final[Mapping[str, Callable[[ReportData, Figure], bool]]] = {
    "load": _load,
    "failures": _failures,
    "latency": _latency,
    "forecast": _forecast,
}
