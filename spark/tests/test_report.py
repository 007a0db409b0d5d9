"""The page and its pictures, from frames that are made up; what is asked of the tables is in test_report_data."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import Page, browser
from hypothesis import given
from hypothesis import strategies as st
from report_frames import SINCE, ranks_for, report_data

from dmsg_logs.report import ReportData, figures, plots, render, text, write_report
from dmsg_logs.report.data import DAY_S, FRAMES, TOP_RELAYS
from dmsg_logs.report.parts import stacked

SECTIONS = (
    *("overview", "load", "failures", "latency", "league", "dials", "resumptions", "abuse", "talkers", "forecast"),
    *("discovery", "quality"),
)
SUMMARY = {"in": 5_048_550, "good": 4_972_100, "dup": 75_945, "corrupt": 505, "seconds": 118.2}
#: What a page may weigh, in bytes.
PAGE_BYTES = 1_500_000
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


# --- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [report_data(), ReportData(), ReportData(SINCE, SINCE + DAY_S)], ids=["full", "none", "no rows"]
)
def test_every_section_has_a_heading_and_a_reading(data: ReportData) -> None:
    outline = Outline(render(data))

    assert tuple(outline.sections) == SECTIONS
    for section in outline.sections.values():
        assert section["h2"]
        assert section["reading"].endswith(".")
    assert len(outline.ids) == len(set(outline.ids))


def test_every_section_of_a_full_page_has_a_plot_with_a_caption_and_a_text_for_who_cannot_see_it() -> None:
    page = full_page()

    for part in page.split("<section ")[1:]:
        assert part.count("<figure") == part.count("<figcaption>") >= 1, part[:40]
        assert part.count('role="img" aria-label="') >= part.count("<figure")


def test_a_page_without_data_says_so_and_draws_nothing() -> None:
    outline = Outline(render(ReportData()))

    assert "There is no data yet" in outline.sections["overview"]["reading"]
    assert all("No data." in outline.sections[name]["text"] for name in SECTIONS[1:])
    assert "svg" not in outline.tags


def test_the_readings_say_what_the_numbers_say() -> None:
    data = report_data()
    sections = Outline(render(data, summary=SUMMARY, ranks=ranks_for(data))).sections
    relays = data.rows("relays")

    assert "12 relays" in sections["overview"]["reading"]
    assert "486 clients" in sections["overview"]["reading"]
    assert "97.5 % of their dials succeeded" in sections["overview"]["reading"]
    assert "This run: lines 5 048 550 in, 4 972 100 good, 75 945 duplicate, 505 corrupt" in sections["overview"]["text"]
    assert relays[0]["relay"][:8] in sections["load"]["reading"]
    assert "2 Mar, " in sections["failures"]["reading"]
    assert "most often handshake · timeout (" in sections["failures"]["reading"]
    assert "refusals, most often rate_limit (" in sections["failures"]["reading"]
    assert "half of all dials took at most 95 ms" in sections["latency"]["reading"]
    assert relays[0]["relay"][:8] in sections["league"]["reading"].partition("leads")[0]
    assert "2 clients were left out" in sections["league"]["reading"]
    assert f"were at {relays[4]['relay'][:8]}…, more than at any other" in sections["dials"]["reading"]
    assert "after connection_lost" in sections["resumptions"]["reading"]
    assert "9 keys stand out; 2 are flagged and have no say in the ranks" in sections["abuse"]["reading"]
    assert data.rows("talkers")[0]["key"][:8] in sections["talkers"]["reading"]
    assert "on 13 Mar" in sections["forecast"]["reading"]
    assert "rests on 14 days of history (by weekday and trend)" in sections["forecast"]["reading"]
    assert "2.5 % were refused" in sections["discovery"]["reading"]
    assert "The accounts balance: 5 048 550 in" in sections["quality"]["reading"]


def test_what_is_worth_a_look_stands_in_the_overview() -> None:
    data = report_data()
    overview = Outline(render(data)).sections["overview"]["text"]

    assert "2 keys are flagged for abuse" in overview
    assert "12 lines that files should hold are missing" in overview
    assert f"Relay {data.rows('relays')[4]['relay'][:8]}… is slow" in overview
    assert "A burst of " in overview
    assert "Nothing stands out" not in overview


def test_a_quiet_fleet_has_nothing_worth_a_look() -> None:
    data = report_data()
    frames = {**data.frames, "abuse": data.frames["abuse"][:0], "quality": data.frames["quality"][:0]}
    frames |= {"failures": data.frames["failures"][:0], "relays": data.frames["relays"].drop(index=4)}
    totals = {**data.totals, "missing": 0, "abuse_flagged": 0, "gaps": 0, "gap_lines": 0, "events_dropped": 0}

    page = render(ReportData(data.since, data.until, data.bucket_s, totals, frames))

    assert "Nothing stands out" in Outline(page).sections["overview"]["text"]


def test_accounts_that_do_not_balance_are_told() -> None:
    data = report_data()
    totals = {**data.totals, "lines_in": data.totals["lines_in"] + 1}

    sections = Outline(render(ReportData(data.since, data.until, data.bucket_s, totals, data.frames))).sections

    assert "The accounts do not balance" in sections["quality"]["reading"]
    assert "do not balance" in sections["overview"]["text"]


def test_the_league_follows_the_scores_or_else_the_success() -> None:
    data = report_data()
    relays = [row["relay"] for row in data.rows("relays")]
    ranks = ranks_for(data)
    for place, relay in enumerate(reversed(relays)):
        ranks["relays"][relay]["score"] = 900 - 10 * place

    scored = Outline(render(data, ranks=ranks)).sections["league"]["reading"]
    unscored = Outline(render(data)).sections["league"]["reading"]

    assert scored.startswith(f"{relays[-1][:8]}… leads with 900, {relays[0][:8]}… comes last")
    assert f"{relays[4][:8]}… comes last" in unscored


def test_keys_are_short_and_whole_in_their_title() -> None:
    data = report_data()
    key = data.rows("talkers")[0]["key"]

    page = render(data)

    assert f'<code title="{key}">{key[:8]}…</code>' in page
    assert f">{key}<" not in page


def test_the_page_needs_nothing_from_outside_and_forbids_it() -> None:
    page = full_page()
    outline = Outline(page)

    assert "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'" in page
    assert not {"script", "link", "img", "iframe", "object", "embed", "form", "base", "image", "use"} & set(
        outline.tags
    )
    assert all(value.startswith("#") for name, value in outline.attributes if name == "href")
    assert not {"src", "srcset", "action", "xlink:href", "data"} & {name for name, _ in outline.attributes}
    assert not any(word in page for word in ("://", "url(", "@import", "//"))


def test_hostile_texts_stay_texts() -> None:
    data = changed(report_data(), str, HOSTILE)
    ranks = ranks_for(data)
    ranks |= {"issuer": HOSTILE[0], "issued": HOSTILE[1], "excluded": HOSTILE[2]}
    ranks["relays"] = {text: {"score": HOSTILE[0], "success": 1} for text in HOSTILE} | {"x": HOSTILE[3]}

    page = render(data, summary={"in": HOSTILE[0], "good": 1, "seconds": HOSTILE[1]}, ranks=ranks)
    clean = Outline(full_page())
    outline = Outline(page)

    assert tuple(outline.sections) == SECTIONS
    assert set(outline.tags) <= set(clean.tags)
    assert {name for name, _ in outline.attributes} <= {name for name, _ in clean.attributes}
    assert "&lt;script&gt;" in page
    assert not {*page} & {*"\u202e\u2066\u2028\x00\x1b"}


@pytest.mark.parametrize("values", [(None,), (math.nan,), (math.inf, -math.inf), (0,), (-5, 3), (1e300, 1e-300)])
def test_numbers_that_are_none_do_no_harm(values: tuple[Any, ...]) -> None:
    data = changed(report_data(), int, values)

    page = render(data, ranks=ranks_for(data))

    assert tuple(Outline(page).sections) == SECTIONS
    assert "nan" not in page.replace("transport", "")
    assert ">inf" not in page
    assert "None" not in page


def test_a_page_of_the_largest_fleet_is_small() -> None:
    page = full_page(relays=TOP_RELAYS)

    assert len(page.encode()) < PAGE_BYTES
    assert page.count('<div class="heatrow">') == TOP_RELAYS


def test_the_same_data_give_the_same_page() -> None:
    assert full_page() == full_page()


# --- pictures and files ----------------------------------------------------------------------------------------------


PICTURES = {"load", "failures", "latency", "forecast"}


def test_pictures_are_small_pngs_and_the_same_for_the_same_data() -> None:
    data = report_data()
    found = figures(data)
    again = figures(ReportData(data.since, data.until, data.bucket_s, {}, {"forecast": data.frames["forecast"]}))

    assert set(found) == PICTURES
    assert set(again) == {"forecast"}
    assert (
        figures(ReportData(data.since, data.until, data.bucket_s, {}, {"forecast": data.frames["forecast"]})) == again
    )
    for image in found.values():
        assert image.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(image) < 60_000


def test_there_are_no_pictures_of_nothing() -> None:
    assert figures(ReportData()) == {}


def test_pictures_of_hostile_texts() -> None:
    assert set(figures(changed(report_data(), str, ("_$x^{", "$\\frac{$", *HOSTILE)))) == PICTURES


def test_the_page_and_its_pictures_are_written_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "report"

    page = write_report("<p>one</p>", {"load": b"1"}, target)
    write_report("<p>two \ud800</p>", {"load": b"2"}, target)

    assert page == target / "report.html"
    assert page.read_text("utf-8") == "<p>two ?</p>"
    assert sorted(each.name for each in target.iterdir()) == ["load.png", "report.html"]
    assert (target / "load.png").read_bytes() == b"2"
    assert page.stat().st_mode & 0o777 == 0o644


def test_a_write_that_fails_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = write_report("old", {}, tmp_path)

    def full_disk(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_report("new", {}, tmp_path)

    assert page.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("name", ["../load", "a/b", "", ".hidden", "a\0"])
def test_a_picture_has_a_plain_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a figure"):
        write_report("page", {name: b""}, tmp_path)
    assert not list(tmp_path.iterdir())


# --- words and axes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (text.size(0), "0 B"),
        (text.size(999.9), "1 kB"),
        (text.size(1_234_567), "1.23 MB"),
        (text.ms(0.1234), "0.123 ms"),
        (text.ms(1500), "1.5 s"),
        (text.ms(600_000), "10 min"),
        (text.seconds(90_000), "25 h"),
        (text.about(9_999), "9 999"),
        (text.about(84_122), "84.1 k"),
        (text.percent(1, 3), "33.3 %"),
        (text.percent(999_999, 1_000_000), "> 99.999 %"),
        (text.percent(1, 1_000_000_000), "< 0.001 %"),
        (text.percent(1, 1), "100 %"),
        (text.percent(1, 0), "–"),
        (text.many(1, "relay"), "1 relay"),
        (text.many(None, "relay"), "no relays"),
        (text.day("2025-03-06"), "6 Mar"),
        (text.when(SINCE), "21 Feb 2025, 00:00"),
        (text.when(1e20), "–"),
        (text.short_key("discovery"), "discovery"),
        (text.key(""), "–"),
    ],
)
def test_words(said: str, expected: str) -> None:
    assert said.replace("\u202f", " ") == expected


_POSITIVE = st.floats(min_value=1e-3, max_value=1e18)


@given(_POSITIVE)
def test_a_linear_axis_is_round_and_not_too_high(most: float) -> None:
    axis = plots.linear(most)

    assert axis.low == 0 <= most <= axis.high * (1 + 1e-9)
    assert axis.high <= 2 * most
    assert 3 <= len(axis.ticks) <= 5
    assert [axis.place(axis.ticks[0]), axis.place(axis.ticks[-1])] == [0, 1]


@given(st.lists(st.floats(min_value=2e-3, max_value=1e8), min_size=1))
def test_a_logarithmic_axis_holds_its_values(values: list[float]) -> None:
    axis = plots.logarithmic(values)

    assert axis.low <= min(values)
    assert max(values) <= axis.high
    assert 1 <= len(axis.ticks) <= 6
    assert all(0 <= axis.place(value) <= 1 + 1e-9 for value in values)


@given(st.floats(), st.floats())
def test_a_level_is_one_of_the_colours(value: float, most: float) -> None:
    number = text.number(value)
    assert plots.level(number, text.of(most)) in {"hx", *(f"h{index}" for index in range(plots.LEVELS + 1))}


@given(st.text())
def test_no_text_leaves_its_place(foreign: str) -> None:
    for said in (text.shown(foreign), text.key(foreign), text.safe(foreign)):
        outline = Outline(f'<section id="x"><p class="reading" title="{text.safe(foreign)}">{said}</p></section>')
        assert set(outline.tags) <= {"section", "p", "span", "code"}
        assert {name for name, _ in outline.attributes} <= {"id", "class", "title"}


def test_a_line_is_broken_where_a_value_is_missing() -> None:
    path = plots.line([1, None, 2, 3], plots.linear(4), "line")

    assert path.count("M") == 2
    assert path.count("L") == 1


def test_what_is_rare_but_comes_all_at_once_has_a_colour_of_its_own() -> None:
    slots = list(range(50))
    rows = [{"at": at, "name": f"usual {kind}", "n": 9 - kind} for at in slots for kind in range(9)]
    rows += [{"at": 7, "name": "burst", "n": 40}]

    series = stacked(slots, rows, "at", "name", "n")

    assert [each.label for each in series] == [*(f"usual {kind}" for kind in range(5)), "burst", "4 others"]
    assert series[5].values[7] == 40
    assert sum(value or 0 for each in series for value in each.values) == 50 * 45 + 40


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One tab of a headless Chromium, for all tests of this module."""
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages as files: a full one, an empty one, and one full of hostile texts."""
    folder = tmp_path_factory.mktemp("pages")
    hostile = changed(report_data(), str, HOSTILE)
    made = {
        "full": full_page(relays=TOP_RELAYS),
        "unranked": render(report_data(relays=1)),
        "empty": render(ReportData()),
        "hostile": render(hostile, ranks=ranks_for(hostile)),
    }
    return {name: write_report(page, {}, folder / name) for name, page in made.items()}


_SIZES = """(() => [...document.querySelectorAll('figure.plot')].map(figure => {
  const drawn = [...figure.querySelectorAll('svg, .bar')].map(each => each.getBoundingClientRect());
  return [figure.id, drawn.length, Math.min(...drawn.map(each => each.width)), Math.min(...drawn.map(each => each.height))];
}))()"""
_SECTIONS = "[...document.querySelectorAll('section')].filter(each => each.offsetHeight > 40).map(each => each.id)"
_OPEN = "document.querySelectorAll('details').forEach(each => { each.open = true })"
_WIDTHS = "[document.documentElement.scrollWidth, document.body.scrollWidth]"


@pytest.mark.browser
@pytest.mark.parametrize("width", [320, 390, 1280])
@pytest.mark.parametrize("name", ["full", "unranked", "empty", "hostile"])
def test_the_page_fits_and_has_all_sections_and_plots(tab: Page, pages: dict[str, Path], name: str, width: int) -> None:
    tab.complaints.clear()
    tab.open(pages[name], width=width, scheme="dark" if width == 390 else "light")
    tab.evaluate(_OPEN)

    assert tuple(tab.evaluate(_SECTIONS)) == SECTIONS
    assert max(tab.evaluate(_WIDTHS)) <= width
    plots_seen = tab.evaluate(_SIZES)
    assert bool(plots_seen) == (name != "empty")
    for figure, drawn, least_width, least_height in plots_seen:
        assert drawn, figure
        assert least_width > 40, figure
        assert least_height > 8, figure
    assert tab.evaluate("document.title") == "dmsg fleet report"
    assert tab.complaints == []


@pytest.mark.browser
def test_the_page_follows_the_scheme(tab: Page, pages: dict[str, Path]) -> None:
    seen = []
    for scheme in ("light", "dark"):
        tab.open(pages["full"], width=390, scheme=scheme)
        seen.append(
            tab.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
        )

    light, dark = ([sum(int(part) for part in colour[4:-1].split(",")) for colour in pair] for pair in seen)
    assert light[0] > 600 and light[1] < 200
    assert dark[0] < 200 and dark[1] > 600


@pytest.mark.browser
def test_letters_keep_their_size_on_a_telephone(tab: Page, pages: dict[str, Path]) -> None:
    smallest = """Math.min(...[...document.querySelectorAll('main *')].filter(each => each.children.length == 0 &&
      each.textContent.trim() && each.offsetHeight).map(each => parseFloat(getComputedStyle(each).fontSize)))"""

    tab.open(pages["full"], width=390)

    assert tab.evaluate(smallest) >= 10.5


@pytest.mark.browser
def test_marks_below_a_plot_do_not_touch(tab: Page, pages: dict[str, Path]) -> None:
    touching = """[...document.querySelectorAll('.xs')].filter(axis => {
      const marks = [...axis.children].filter(each => each.offsetWidth).map(each => each.getBoundingClientRect());
      return marks.some((each, index) => index && each.left < marks[index - 1].right + 2);
    }).length"""
    for width in (320, 390, 800, 1000, 1280):
        tab.open(pages["full"], width=width)
        assert tab.evaluate(touching) == 0, width


@pytest.mark.browser
def test_a_script_that_got_in_would_not_run(tab: Page, pages: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    script = "<script>document.title = 'owned'</script><img src='file:///nothing' onerror='document.title = 1'></main>"
    page.write_text(pages["full"].read_text("utf-8").replace("</main>", script), "utf-8")
    tab.complaints.clear()

    tab.open(page, width=390)

    assert tab.evaluate("document.title") == "dmsg fleet report"
    assert any("Content Security Policy" in each for each in tab.complaints)


def test_where_there_is_no_browser_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(Exception, match="need Chromium"), browser(tmp_path):
        pass
