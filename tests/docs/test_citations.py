"""Citations of the specification: code, tests and pages name labels of ``docs/spec``, and each label is there.

A citation is ``:ref:`spec-LABEL```. What the implementation of 2019 does differently, or wrong, has labels of its own on
``docs/explanation/differences.rst``; they stand in rows of tables, so their citations have a title.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import DOCS, ROOT

TREES = ("dmsg", "tests", "benchmarks", "fuzz", "proofs", "spark", "twisted", "docs", "newsfragments")
SUFFIXES = {".py", ".rst", ".pml", ".pv"}
DIFFERENCES = DOCS / "explanation" / "differences.rst"

_NAME = r"(?:spec|difference|weakness)-[a-z0-9-]+"
_LABEL = re.compile(rf"^ *(?:- )?\.\. _({_NAME}):$", re.MULTILINE)
_CITED = re.compile(rf":ref:`(?:[^`<]*<)?({_NAME})>?`")


def files() -> Iterator[Path]:
    """The texts that may cite: everything but this file and what is made by a build."""
    yield from ROOT.glob("*.rst")
    for tree in TREES:
        for path in sorted((ROOT / tree).rglob("*")):
            if path.suffix in SUFFIXES and "_build" not in path.parts and path != Path(__file__):
                yield path


TEXTS = {path: path.read_text("utf-8") for path in files()}
LABELS = {path: _LABEL.findall(text) for path, text in TEXTS.items() if _LABEL.search(text)}
DEFINED = {label for labels in LABELS.values() for label in labels}


def test_labels_are_where_their_names_say_and_unique() -> None:
    for path, labels in LABELS.items():
        kinds = {label.partition("-")[0] for label in labels}
        assert kinds == {"spec"} if path.parent == DOCS / "spec" else path == DIFFERENCES and "spec" not in kinds
    assert len(DEFINED) == sum(map(len, LABELS.values()))


def test_each_citation_has_its_label() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {label}"
        for path, text in TEXTS.items()
        for label in _CITED.findall(text)
        if label not in DEFINED
    ]
    assert not missing


def test_a_weakness_is_cited_by_its_own_number() -> None:
    """Where the title of a citation is a number, it is that of the row."""
    rows = {label: row for row, label in re.findall(rf"\* - (\w\d+)\n     - \.\. _({_NAME}):", TEXTS[DIFFERENCES])}
    assert set(rows) == set(LABELS[DIFFERENCES])
    for path, text in TEXTS.items():
        for title, label in re.findall(rf":ref:`([DW]\d+) <({_NAME})>`", text):
            assert rows[label] == title, path


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("see :ref:`spec-records`.", ["spec-records"]),
        (
            "see :ref:`the records <spec-records>`, and :ref:`W7 <weakness-ids-taken>`",
            ["spec-records", "weakness-ids-taken"],
        ),
        (":ref:`sybil` and spec-records", []),
    ],
)
def test_citations_are_found(text: str, labels: list[str]) -> None:
    assert _CITED.findall(text) == labels
