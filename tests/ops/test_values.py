"""Kinds of values: what is read, what is refused, and that what is printed is read again."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dmsg.address import HostPort, PinnedServer
from dmsg.crypto.keys import SecretKey
from dmsg.ops import values
from dmsg.ops.values import Kind, choice, kind_of, optional, several

ONE, TWO = (SecretKey(bytes([number]) * 32).public_key for number in (1, 2))
KINDS = [found for found in vars(values).values() if isinstance(found, Kind)]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize(
    ("kind", "written", "read"),
    [
        (values.DURATION, "2.5", 2.5),
        (values.DURATION, "500ms", 0.5),
        (values.DURATION, "10s", 10.0),
        (values.DURATION, " 5 min ", 300.0),
        (values.DURATION, "2h", 7200.0),
        (values.DURATION, "1d", 86400.0),
        (values.DURATION, "1e2s", 100.0),
        (values.DURATION, 3, 3.0),
        (values.SIZE, "1000", 1000),
        (values.SIZE, "64MiB", 64 << 20),
        (values.SIZE, "2 G", 2 << 30),
        (values.SIZE, "1kb", 1000),
        (values.SIZE, "64Ki", 64 << 10),
        (values.SIZE, "3 mi", 3 << 20),
        (values.SIZE, "5B", 5),
        (values.SIZE, 7, 7),
        (values.FLAG, "On", True),
        (values.FLAG, "0", False),
        (values.FLAG, True, True),
        (values.COUNT, "12", 12),
        (values.NUMBER, 1, 1.0),
        (values.ADDRESS, "[::1]:80", HostPort("::1", 80)),
        (values.URL, "https://host:1/", "https://host:1"),
        (values.KEY, str(ONE), ONE),
        (values.KEYS, f"{ONE},{TWO} {ONE}", (ONE, TWO)),
        (values.KEYS, [str(ONE), str(TWO)], (ONE, TWO)),
        (values.KEYS, [f"{ONE} {TWO}"], (ONE, TWO)),
        (values.KEYS, "none", ()),
        (values.KEYS, ["none"], ()),
        (values.RELAYS, f"{ONE}@host:1", (PinnedServer(ONE, HostPort("host", 1)),)),
        (choice(Colour), "blue", Colour.BLUE),
        (optional(values.COUNT), "None", None),
        (optional(values.COUNT), "1", 1),
        (several(values.COUNT), [1, "2,3"], (1, 2, 3)),
    ],
)
def test_what_is_written_is_read(kind: Kind[Any], written: Any, read: Any) -> None:
    found = kind.parse(written)
    assert found == read and type(found) is type(read)
    assert kind.parse(kind.text(found)) == read


@pytest.mark.parametrize(
    ("kind", "written", "why"),
    [
        (values.DURATION, "soon", "a duration such as"),
        (values.DURATION, "5x", "a duration such as"),
        (values.DURATION, "infs", "finite"),
        (values.DURATION, "-1s", "negative"),
        (values.DURATION, "1e300d", "too large"),
        (values.SIZE, "1.5M", "a size such as"),
        (values.SIZE, "9" * 15 + "T", "too large"),
        (values.SIZE, True, "a size such as"),
        (values.FLAG, "maybe", "yes or no"),
        (values.URL, "http://me:secret@host", "http://host:port"),
        (values.URL, "http://ho st", "http://host:port"),
        (values.KEYS, "", "empty"),
        (values.KEYS, [], "empty"),
        (values.KEYS, ["none", str(ONE)], "66 hex digits"),
        (values.KEYS, {"a": 1}, "a list"),
        (values.RELAYS, str(ONE), "pk@host:port"),
        (values.SERVICE, "é" * 128, "255 bytes"),
        (choice(Colour), "green", "one of red, blue"),
        (choice(Colour), ["red"], "one of red, blue"),
        (kind_of(Colour | None, "colour"), "none", "one of red, blue"),
    ],
)
def test_what_cannot_be_is_refused(kind: Kind[Any], written: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        kind.parse(written)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.metavar)
@given(written=ANYTHING)
def test_anything_is_read_or_refused_and_printed_so_that_it_is_read_again(kind: Kind[Any], written: Any) -> None:
    try:
        read = kind.parse(written)
    except ValueError:
        return
    assert kind.parse(kind.text(read)) == read


@given(st.integers(0, 2**63 - 1) | st.integers(0, 2**53 - 1).map(lambda number: 1024 * number))
@example(1024 * (2**53 - 1))
def test_sizes_are_printed_exactly(size: int) -> None:
    assert values.SIZE.parse(values.SIZE.text(size)) == size


@given(st.floats(0, 1e15) | st.integers(0, 2**53).map(float))
def test_durations_are_printed_exactly(seconds: float) -> None:
    assert values.DURATION.parse(values.DURATION.text(seconds)) == seconds


@pytest.mark.parametrize(
    ("hint", "name", "metavar"),
    [
        (float, "timeout_s", "SECONDS"),
        (float, "requests_per_s", "NUMBER"),
        (float, "handshakes_per_s_per_address", "NUMBER"),
        (float | None, "get_rate_per_s", "NUMBER"),
        (int, "queue_soft_bytes", "SIZE"),
        (int, "bytes_per_s", "SIZE"),
        (int, "connections", "NUMBER"),
    ],
)
def test_the_unit_in_a_name_tells_the_kind(hint: Any, name: str, metavar: str) -> None:
    assert kind_of(hint, name).metavar == metavar
