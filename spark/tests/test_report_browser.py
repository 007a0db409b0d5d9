"""The page as a browser shows it: on telephones and screens, in the light and in the dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, browser
from report_frames import ranks_for, report_data
from report_pages import HOSTILE, SECTIONS, changed, full_page

from dmsg_logs.report import ReportData, render, write_report
from dmsg_logs.report.data import TOP_RELAYS


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
