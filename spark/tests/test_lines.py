"""Every line is one row, also lines that are no events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from landing_files import event, line
from pyspark.sql import Row, SparkSession

from dmsg_logs.ingest import lines as lines_module
from dmsg_logs.ingest.lines import KEPT_CHARS, parse, read_lines
from dmsg_logs.schemas import LINE


def without(*names: str) -> str:
    return json.dumps({key: value for key, value in event().items() if key not in names}, separators=(",", ":"))


_MANY = '\\"' * 150_000
#: A line and its fault; None: an event.
CASES: list[tuple[str, str | None]] = [
    (line(), None),
    (line() + " ", None),
    (line() + "\r", None),
    (json.dumps(event()), None),
    (line(what='{"a":1},"b"}'), None),
    (line(what="ü\u2028\\}{"), None),
    (line(reason="a,"), None),
    (line(count=None), None),
    (line(node=5), None),
    (without("v"), None),
    (line().replace('"request"', f'"{_MANY}"'), None),
    ("", "blank"),
    (" \t\r", "blank"),
    ("null", "not_an_object"),
    ("12", "not_an_object"),
    ("true", "not_an_object"),
    ('"text"', "not_an_object"),
    ("[]", "not_an_object"),
    (f"[{line()}]", "not_an_object"),
    (f"[{line()},{line()}]", "not_an_object"),
    ("[" * 100_000, "not_an_object"),
    ("\x00\x00", "not_an_object"),
    ("{", "torn"),
    (line()[:60], "torn"),
    (line()[:-1], "torn"),
    (line()[40:], "not_an_object"),
    (line() + line(), "torn"),
    (line()[:90] + line(), "torn"),
    (line() + "{}", "torn"),
    (line() + "}", "torn"),
    (line() + " x", "torn"),
    (line() + "\x00", "torn"),
    (line().replace('"count":1', '"count":NaN'), "torn"),
    (line(deep=1).replace('"deep":1', '"deep":' + "[" * 5000 + "]" * 5000), "torn"),
    (line(ts="12"), "wrong_type"),
    (line(count="many"), "wrong_type"),
    (line(seq="1"), "wrong_type"),
    (line(seq=1.5), "wrong_type"),
    (line(seq=2**63), "wrong_type"),
    (line(seq=2**53 - 1), None),
    (line(seq=2**53), "out_of_range"),
    (line(seq=-1), "out_of_range"),
    (line(count=1 - 2**53), None),
    (line(count=-(2**53)), "out_of_range"),
    (line(count=2**63 - 1), "out_of_range"),
    (line(v=2**53), "out_of_range"),
    (line("dial_finished", elapsed_ms=1e12), None),
    (line("dial_finished", elapsed_ms=-1.1e12), "out_of_range"),
    (line("dial_finished", elapsed_ms=1.5).replace("1.5", "1e400"), "out_of_range"),
    ("{}", "no_key"),
    (without("node"), "no_key"),
    (without("boot"), "no_key"),
    (without("seq"), "no_key"),
    (line(node=""), "no_key"),
    (without("event"), "no_event"),
    (without("ts"), "bad_time"),
    (line(ts=0), "bad_time"),
    (line(ts=-1.0), "bad_time"),
    (line(ts=1772323200500), "bad_time"),
    (line(remote="x" * 10_000_000), "too_long"),
    ("x" * 10_000_000, "too_long"),
]
#: A line that is an event, and whether it holds more than the columns do.
UNKNOWN: list[tuple[str, bool]] = [
    (line(), False),
    (json.dumps(event()), False),
    (line(seq=7).replace('"count"', '"seq":7,"count"'), False),
    (line(new=1), True),
    (line(new={"a": [1, {"b": None}]}), True),
    (json.dumps({"new": None, **event()}), True),
    (line().replace('"what"', '"new":1,"what"'), True),
    (line(v=2), True),
    (line(v=2, new=1), True),
    (line("brand_new"), True),
    (line("brand_new", size=3), True),
]


def rows(spark: SparkSession, path: Path, lines: list[bytes]) -> list[Row]:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return parse(read_lines(spark, [str(path)], tolerant=False)).collect()


@pytest.fixture(scope="module")
def parsed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    path = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    texts = [text for text, _ in CASES] + [text for text, _ in UNKNOWN]
    return rows(spark, path, [text.encode() for text in texts] + [line(what="QQ").encode().replace(b"QQ", b"\xff\xfe")])


def test_each_line_has_its_fault_and_its_text(parsed: list[Row]) -> None:
    assert len(parsed) == len(CASES) + len(UNKNOWN) + 1
    for (text, fault), row in zip(CASES, parsed, strict=False):
        assert row.fault == fault, (text[:80], text[-40:])
        kept = text[:KEPT_CHARS] if fault == "too_long" else text
        assert row.line == (None if fault is None else kept)
    assert parsed[-1].fault == "not_utf8"
    assert parsed[-1].line == line(what="QQ").replace("QQ", "\ufffd\ufffd")


def test_a_line_that_holds_more_than_we_know_is_kept_whole(parsed: list[Row]) -> None:
    for (text, more), row in zip(UNKNOWN, parsed[len(CASES) :], strict=False):
        assert row.fault is None, text
        assert row.raw == (text if more else None), text


def test_columns_of_an_event(parsed: list[Row]) -> None:
    expected: dict[str, Any] = {**dict.fromkeys(LINE.names), **event()}
    assert {name: parsed[0][name] for name in LINE.names} == expected


def test_what_is_longer_than_memory_may_bear_is_passed_over(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "MAX_READ_BYTES", 1000)
    found = rows(spark, tmp_path / "lines.jsonl", [line(seq=1).encode(), b"x" * 5000, line(seq=2).encode()])
    assert [row.seq for row in found] == [1, 2]
