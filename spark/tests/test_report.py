"""The page and its pictures, from frames that are made up; what is asked of the tables is in test_report_data."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from report_frames import SINCE, ranks_for, report_data
from report_pages import HOSTILE, SECTIONS, SUMMARY, Outline, changed, full_page

from dmsg_logs.report import ReportData, figures, render, write_report
from dmsg_logs.report.data import DAY_S, TOP_RELAYS

#: What a page may weigh, in bytes.
PAGE_BYTES = 1_500_000


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
    assert (
        "9 keys stand out; 2 are flagged (which leaves a key out of that day's ranks, unless one"
        in sections["abuse"]["reading"]
    )
    assert data.rows("talkers")[0]["key"][:8] in sections["talkers"]["reading"]
    assert "on 13 Mar" in sections["forecast"]["reading"]
    assert "rests on 14 days of history (by weekday and trend)" in sections["forecast"]["reading"]
    assert "2.5 % were not found or refused" in sections["discovery"]["reading"]
    assert "Of all 5.05 M lines ever taken in, from " in sections["quality"]["reading"]
    assert "The accounts balance: 5 048 550 in" in sections["quality"]["reading"]


def test_millions_stay_millions_at_the_beginning_of_a_sentence() -> None:
    data = report_data()
    totals = {**data.totals, "missing": 1_200_000, "abuse_keys": 3_400_000}

    sections = Outline(render(ReportData(data.since, data.until, data.bucket_s, totals, data.frames))).sections

    assert "1.2 M lines that files should hold are missing" in sections["quality"]["reading"]
    assert sections["abuse"]["reading"].startswith("3.4 M keys stand out")


def test_what_is_worth_a_look_stands_in_the_overview() -> None:
    data = report_data()
    overview = Outline(render(data)).sections["overview"]["text"]

    assert "2 keys are flagged for abuse" in overview
    assert "12 lines that files should hold are missing" in overview
    assert f"Relay {data.rows('relays')[4]['relay'][:8]}… is slow" in overview
    assert "A burst of " in overview
    assert "Nothing stands out" not in overview


def test_the_bus_says_where_envelopes_went_and_which_relay_takes_few() -> None:
    data = report_data()
    outline = Outline(render(data))
    bus, overview = outline.sections["bus"], outline.sections["overview"]

    assert "2 relays of it took" in bus["reading"] and "for 31 twins" in bus["reading"]
    assert "96 % of 100 k calls were answered" in bus["reading"]
    assert "destination offline" in bus["text"] and "several" in bus["text"]
    assert "r9.example did not take 45.6 % of the envelopes that r1.example posted to it" in overview["text"]
    assert "r2.example did not take" not in overview["text"]


def test_relays_are_listed_with_what_they_speak_and_compared_with_their_like() -> None:
    data = report_data()
    relays = data.frames["relays"].copy()
    relays["protocol"] = ["messaging" if index in (2, 4) else "dmsg" for index in range(len(relays))]  # 4 is slow
    data = ReportData(data.since, data.until, data.bucket_s, data.totals, {**data.frames, "relays": relays})

    sections = Outline(render(data, ranks=ranks_for(data))).sections

    assert all(sections[name]["text"].count("messaging") >= 1 for name in ("league", "dials", "forecast"))
    assert "is slow" not in sections["overview"]["text"], "there are too few of its protocol to say so"


def test_a_quiet_fleet_has_nothing_worth_a_look() -> None:
    data = report_data()
    frames = {**data.frames, "abuse": data.frames["abuse"][:0], "quality": data.frames["quality"][:0]}
    frames |= {"federation": data.frames["federation"][:1]}
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
