"""The figures of the campaigns, and the table of the documentation that is made of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("fuzz.figures")


def test_the_table_has_a_row_for_each_target(figures: Any) -> None:
    table = figures.as_table(
        {"hello": figures.Figures(), "frames": figures.Figures(3_600.4, 60.2, 123_456, 34, 5, 6, 1)}
    )
    header, line, first, second = (row.split() for row in table.splitlines())
    assert " ".join(header) == "target CPU seconds last new after executions edges features inputs failures"
    assert set("".join(line)) == {"-"}
    assert first == ["frames", "3,600", "60", "123,456", "34", "5", "6", "1"]
    assert second == ["hello", *"0000000"]


def test_what_was_saved_is_loaded_and_sorted(figures: Any, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert figures.load(path) == {}
    known = {"b": figures.Figures(1.5, 0.5, 2, 3, 4, 5, 6), "a": figures.Figures()}
    figures.save(path, known)
    assert figures.load(path) == known and list(figures.load(path)) == ["a", "b"]
    assert len(path.read_text().splitlines()) == 2 + len(known)
    assert list(tmp_path.iterdir()) == [path]


def test_the_documentation_shows_the_figures(figures: Any) -> None:
    known = figures.load(figures.FILE)
    assert (ROOT / "docs" / "explanation" / "fuzzing.txt").read_text("utf-8") == figures.as_table(known)
    assert set(known) <= set(importlib.import_module("fuzz.targets").names())
