"""Pages for the tests of the report, what is in them, and hostile texts that try to break out of them."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from report_frames import ranks_for, report_data

from dmsg_logs.report import ReportData, render
from dmsg_logs.report.data import FRAMES

SECTIONS = (
    *(
        "overview",
        "load",
        "failures",
        "latency",
        "league",
        "dials",
        "resumptions",
        "abuse",
        "talkers",
        "bus",
        "forecast",
    ),
    *("discovery", "quality"),
)
SUMMARY = {"in": 5_048_550, "good": 4_972_100, "dup": 75_945, "corrupt": 505, "seconds": 118.2}
HOSTILE = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)' x='",
    "</title></style><script>alert(2)</script>",
    "\u202eevil\u2066\x00\x1b[2J\u2028&lt;b&gt;",
    "javascript:alert(3)//" + "<b>" * 400,
    "02" + "ab" * 31 + "</code><svg onload=alert(4)>",
)


class Outline(HTMLParser):
    """What a page is made of: elements, ids, attributes, and the texts of headings and sentences."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.sections: dict[str, dict[str, str]] = {}
        self._section = ""
        self._part = ""
        self.feed(page)
        self.close()

    @property
    def ids(self) -> list[str]:
        return [value for name, value in self.attributes if name == "id"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        given = dict(attrs)
        if tag == "section":
            self._section = given["id"] or ""
            self.sections[self._section] = {"h2": "", "reading": "", "text": ""}
        if tag == "h2" or given.get("class") == "reading":
            self._part = "h2" if tag == "h2" else "reading"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("h2", "p"):
            self._part = ""

    def handle_data(self, data: str) -> None:
        if self._section:
            self.sections[self._section]["text"] += data.replace("\u202f", " ")
            if self._part:
                self.sections[self._section][self._part] += data.replace("\u202f", " ")


def full_page(relays: int = 12) -> str:
    """The page of a small fleet with everything in it."""
    data = report_data(relays=relays)
    return render(data, summary=SUMMARY, ranks=ranks_for(data))


def changed(data: ReportData, column_kind: type, values: tuple[Any, ...]) -> ReportData:
    """The data with every column of texts, or of numbers, filled with ``values`` in turn."""
    frames = {}
    for name, frame in data.frames.items():
        new = frame.copy().astype(object)
        for column in FRAMES[name]:
            sample = frame[column].iloc[0]
            is_text = isinstance(sample, str)
            fixed = column in ("at", "metric", "date", "day") or (name == "forecast" and column == "relay")
            if is_text == (column_kind is str) and not fixed:
                new[column] = [values[index % len(values)] for index in range(len(frame))]
        frames[name] = new
    return ReportData(data.since, data.until, data.bucket_s, data.totals, frames)
