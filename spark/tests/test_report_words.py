"""The words, numbers, axes and lines the report is made of."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from report_frames import SINCE
from report_pages import Outline

from dmsg_logs.report import plots, text
from dmsg_logs.report.parts import stacked


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


@given(st.lists(st.floats(min_value=2e-3, max_value=1e15), min_size=1))
def test_a_logarithmic_axis_holds_its_values(values: list[float]) -> None:
    axis = plots.logarithmic(values)

    assert axis.low <= min(values)
    assert max(values) <= axis.high
    assert 1 <= len(axis.ticks) <= 6
    assert all(0 <= axis.place(value) <= 1 + 1e-9 for value in values)


@given(st.lists(st.floats(min_value=1e15)))
@example([1e10])
def test_however_large_values_are_a_logarithmic_axis_has_a_place_for_them(values: list[float]) -> None:
    axis = plots.logarithmic(values)

    assert axis.low < axis.high
    assert 1 <= len(axis.ticks) <= 6
    assert all(0 <= axis.y(value) <= plots.HEIGHT for value in values)


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
