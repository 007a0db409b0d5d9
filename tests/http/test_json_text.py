"""Reading JSON of strangers: how deep it nests, and what it costs to look."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dmsg.http import json_text
from dmsg.http.errors import MalformedJson
from dmsg.http.json_text import DEPTH_LIMIT

ROOM = 10**7


def deepest(text: str) -> int:
    """How deep ``text`` nests, character by character."""
    depth = most = 0
    in_string = escaped = False
    for character in text:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            most = max(most, depth)
        elif character in "]}":
            depth -= 1
    return most


def refused(text: str) -> str:
    """Why ``text`` is not read; empty if it is."""
    try:
        json_text.decode(text.encode(), ROOM)
    except MalformedJson as error:
        return str(error)
    return ""


# Text that is written as a string as it is: escapes of every kind, and brackets that are none.
CONTENTS = st.lists(
    st.sampled_from(["[", "]", "{", "}", "\\\\", '\\"', "\\n", "\\u005b", "x", "\u00e9", "\U0001f600", ",", ":"]),
    max_size=8,
).map("".join)
STRINGS = CONTENTS.map('"{}"'.format)
LEAVES = STRINGS | st.sampled_from(["0", "null", "[]", "{}"])


@st.composite
def nested(draw: st.DrawFn) -> str:
    """A JSON text about as deep as the limit, with strings beside what nests and as names."""
    text = draw(LEAVES)
    for number in range(draw(st.integers(0, DEPTH_LIMIT + 2))):
        left, right = (draw(LEAVES) for _ in range(2))
        if draw(st.booleans()):
            text = f"[{left}, {text},{right}]"
        else:
            name = draw(CONTENTS)
            text = f'{{"a{number}{name}":{left},"b{number}{name}": {text} , "c{number}{name}":{right}}}'
    return text


@given(nested())
@example("[" * DEPTH_LIMIT + "]" * DEPTH_LIMIT)
@example("[" * (DEPTH_LIMIT + 1) + "]" * (DEPTH_LIMIT + 1))
@example("[" * DEPTH_LIMIT + r'"\\","[","\\\"[","\\\\"' + "]" * DEPTH_LIMIT)
@example("[" * DEPTH_LIMIT + r'"\\","[","\\\"[","\\\\",[]' + "]" * DEPTH_LIMIT)
def test_json_is_read_if_it_does_not_nest_too_deep(text: str) -> None:
    value = json.loads(text)  # it is JSON
    if deepest(text) > DEPTH_LIMIT:
        assert f"deeper than {DEPTH_LIMIT}" in refused(text)
    else:
        assert json_text.decode(text.encode(), ROOM) == value


@given(nested(), st.integers(0, 400), st.sampled_from(["", '"', "[", "]", "x" * 40]))
@example('["' + "[" * 99, 99, "")
@example('["\\' + "[" * 99, 2, "")
def test_json_that_is_cut_off_is_refused_for_the_same_reason(text: str, end: int, tail: str) -> None:
    try:
        json.loads(broken := text[:end] + tail)
    except ValueError:
        too_deep = deepest(broken) > DEPTH_LIMIT
        reason = refused(broken)
        assert reason
        assert ("deeper than" in reason) == too_deep


@given(st.lists(st.sampled_from(["[", "{", "]", "}", '"', "\\", ",", "1"]), max_size=80).map("".join))
def test_anything_else_is_read_as_json_is_or_refused(text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        assert refused(text)
    else:
        assert bool(refused(text)) == (deepest(text) > DEPTH_LIMIT)
        assert refused(text) or json_text.decode(text.encode(), ROOM) == value


@pytest.mark.parametrize("content", [b"x", b"\\\\", b'\\"', b"\\n", b"[", "é".encode()])
def test_a_long_string_costs_a_few_times_its_length(content: bytes) -> None:
    # In a process of its own: what the machinery of regular expressions takes is seen nowhere but from outside, and the
    # high-water mark that getrusage gives would begin with the one of this process.
    source = f"""
import re
from pathlib import Path
from dmsg.http import json_text

def high_water_bytes():
    return int(re.search(r"VmHWM:\\s*([0-9]+) kB", Path("/proc/self/status").read_text())[1]) * 1024

data = b'["' + {content!r} * {4_000_000 // len(content)} + b'",' + b"[]," * 20 + b"0]"
json_text.decode(b"[]", 2)
before = high_water_bytes()
json_text.decode(data, len(data))
print(high_water_bytes() - before)
"""
    grown_bytes = int(subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, check=True).stdout)
    assert grown_bytes < 100 * 2**20


def elements_of(text: str, limit: int = ROOM) -> list[object]:
    return list(json_text.elements(text.encode(), ROOM, limit))


@given(
    st.lists(nested().filter(lambda text: deepest(text) <= DEPTH_LIMIT), max_size=5),
    st.sampled_from(["", " ", "\n\t\r "]),
)
def test_the_elements_of_a_list_are_those_json_has(texts: list[str], space: str) -> None:
    whole = space + "[" + space + f"{space},{space}".join(texts) + space + "]" + space
    assert elements_of(whole) == json.loads(whole)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "{}", '"x"', "1", "nul", "nullx", "[", "[1", "[1,", "[1,]", "[,1]", "[1 2]", "[1]]", "[1]x", "[]x", '["',
        "[" * 60_000, '[{"a":1,"a":2}]', "[NaN]",
    ],
)  # fmt: skip
def test_what_is_no_list_is_bad_input(text: str) -> None:
    with pytest.raises(MalformedJson):
        elements_of(text)


def test_elements_are_read_only_when_they_are_asked_for() -> None:
    found = json_text.elements(b"[1, 2, [[[ what is this", ROOM, 100)
    assert (next(found), next(found)) == (1, 2)
    with pytest.raises(MalformedJson):
        next(found)
    assert elements_of(" null ") == []


def test_a_list_and_its_elements_have_limits() -> None:
    longest = '"' + "x" * 4998 + '"'
    assert elements_of(f"[{longest}, 1]", 5000) == ["x" * 4998, 1]
    with pytest.raises(MalformedJson):
        elements_of(f"[{longest}, 1]", 4999)
    with pytest.raises(MalformedJson, match="longer than 4 bytes"):
        next(json_text.elements(b"[1,2]", 4, 4))
    with pytest.raises(MalformedJson, match="UnicodeDecodeError"):
        next(json_text.elements(b"[\xff]", 9, 9))
