"""The inputs that fuzzing the line scanner has found worth keeping; the fuzzer and its targets belong to the core."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_line_scanner_keeps_its_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    target, corpus = importlib.import_module("fuzz.targets.plain_lines"), importlib.import_module("fuzz.corpus")
    inputs = list(corpus.inputs("plain_lines"))
    assert len(inputs) > 20
    for origin, data in inputs:
        try:
            target.one_input(data)
        except Exception as error:
            raise AssertionError(f"{origin}: {data[:100]!r}") from error
