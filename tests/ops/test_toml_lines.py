"""The lines on which values of a TOML document stand."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.ops.toml_lines import line_of

DOCUMENT = '''# width = 1
[client]
discovery = "http://width = 2"
text = """
width = 3
[client.pool]
"""
race = { width = 4 }  # width = 5
pool.race.width = 6

["ser\\u0076er"]
width = [
  1,
  2,
]
'''


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("client", 2),
        ("client.discovery", 3),
        ("client.text", 4),
        ("client.race.width", 8),
        ("client.pool.race.width", 9),
        ("server.width", 12),
        ("server", 0),  # it is not written like that
        ("client.width", 0),
        ("other", 0),
    ],
)
def test_lines(place: str, line: int) -> None:
    assert line_of(DOCUMENT, place.split(".")) == line


def test_a_document_that_is_long_is_not_searched() -> None:
    assert line_of("a = 1\n", ["a"]) == 1
    assert line_of("a = 1\n" + "#" * 70_000, ["a"]) == 0


NAMES = st.text("abc", min_size=1, max_size=2)


@given(
    st.lists(
        st.tuples(NAMES, st.text('ab\n="é', max_size=8), st.text("abc\n =#", max_size=8)), unique_by=lambda one: one[0]
    )
)
def test_each_value_is_found_on_its_line(values: list[tuple[str, str, str]]) -> None:
    lines: list[str] = ["[table]"]
    expected = {}
    for name, value, comment in values:
        lines += ["# " + part for part in comment.split("\n")]
        expected[name] = len(lines) + 1
        lines.append(f"{name} = {json.dumps(value)}")
    document = "\n".join(lines) + "\n"
    assert {name: line_of(document, ["table", name]) for name in expected} == expected


def test_nesting_that_exhausts_the_stack_here_and_did_not_where_the_document_was_parsed_is_no_error() -> None:
    depth = sys.getrecursionlimit()
    assert line_of(f"a = {'{b=' * depth}1{'}' * depth}\n", ["a"]) == 0
