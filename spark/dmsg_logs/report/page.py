"""The page: one HTML file that needs nothing else and lets nothing in. Pure but for :func:`write_report`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dmsg_logs.report import fleet, keys, outlook, text
from dmsg_logs.report.bus import bus
from dmsg_logs.report.data import ReportData
from dmsg_logs.report.overview import overview
from dmsg_logs.report.style import STYLE

PAGE_NAME: Final = "report.html"
#: Nothing is fetched, run, framed or sent; only the style within the page is allowed.
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render(
    data: ReportData, *, summary: Mapping[str, Any] | None = None, ranks: Mapping[str, Any] | None = None
) -> str:
    """The page for ``data``; the same for the same arguments.

    ``summary`` holds the run's figures (``in``, ``good``, ``dup``, ``corrupt``, ``seconds``), ``ranks`` the document of
    relay ranks; either may be missing. Every text in them and in ``data`` is treated as hostile and escaped.
    """
    others = (
        fleet.load(data),
        fleet.failures(data),
        fleet.latency(data),
        fleet.league(data, ranks),
        keys.dials(data),
        keys.resumptions(data),
        keys.abuse(data),
        keys.talkers(data),
        bus(data),
        outlook.forecast(data),
        outlook.discovery(data),
        outlook.quality(data),
    )
    sections = (overview(data, summary, others), *others)
    links = "".join(f'<li><a href="#{each.id}">{each.id.capitalize()}</a></li>' for each in sections)
    period = "no data yet"
    if data.until:
        period = f"{text.when(data.since)} – {text.when(data.until)} UTC"
    body = "".join(each.html() for each in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>dmsg fleet report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#overview">To the report</a>\n'
        f'<header><p class="mark" aria-hidden="true">dmsg</p><h1>Fleet report</h1><p>{period}</p></header>\n'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n<main>{body}</main>\n'
        "<footer><p>Made from the event logs of relays, clients and discovery. All times are UTC. Keys are abbreviated; "
        "the whole key is shown where the pointer rests.</p></footer>\n</body>\n</html>\n"
    )


def write_report(html: str, figures: Mapping[str, bytes], directory: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` and ``<name>.png`` of each figure into ``directory`` and return the path of the page.

    Each file is replaced at once: a reader sees all of the old one or all of the new one. The page comes last.
    Raises ``OSError`` if the directory cannot be written, ``ValueError`` for a figure's name that is no plain name.
    """
    folder = Path(directory)
    for name in figures:
        if not name.replace("_", "").replace("-", "").isalnum():
            raise ValueError(f"not the name of a figure: {name!r}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in figures.items():
        _replace(folder / f"{name}.png", image)
    page = folder / PAGE_NAME
    _replace(page, html.encode("utf-8", "replace"))
    return page


def _replace(path: Path, content: bytes) -> None:
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
