"""Citations of the specification: code, tests and pages name labels of ``docs/spec``, and each label is there.

A citation is ``:ref:`spec-LABEL```. The weaknesses of the implementation of 2019 have labels of their own, on
``docs/explanation/differences.rst``; they stand in rows of a table, so their citations need a title.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import DOCS, ROOT

TREES = ("dmsg", "demos", "tests", "benchmarks", "fuzz", "proofs", "spark", "twisted", "docs", "newsfragments")
SUFFIXES = {".py", ".rst", ".pml", ".pv"}
DIFFERENCES = DOCS / "explanation" / "differences.rst"
#: Packages of which nothing reads or writes the wire of a protocol.
NO_WIRE = {"glue", "sansio", "eventlog", "serving", "shipping", "ops", "endpoints", "taps", "cli", "testing"}

_NAME = r"(?:spec|weakness)-[a-z0-9-]+"
_LABEL = re.compile(rf"^ *(?:- )?\.\. _({_NAME}):$", re.MULTILINE)
_CITATION = re.compile(rf":ref:`(?:[^`<]*<)?({_NAME})>?`")
#: Sections and numbers of documents that are not here, and files where a label belongs.
_NUMBERED = re.compile(r"[Pp]rotocol notes|(?<!RFC \d{4}, )\b[Ss]ections? \d|\b[DW]\d{1,2}[a-z]?\b|docs/spec/\w+\.rst")
#: Functions that read or write what goes over the wire or is signed.
_WIRE = re.compile(r"(?:encode|decode|seal|sign|verify|canonical|split|receive)(?:_\w+)?")


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
CITED = {path: _CITATION.findall(text) for path, text in TEXTS.items()}


def numbered(text: str) -> list[str]:
    """What ``text`` cites by a number; titles of citations with a label do not count."""
    return _NUMBERED.findall(_CITATION.sub("", text))


def test_labels_are_where_their_names_say_and_unique() -> None:
    for path, labels in LABELS.items():
        kind = "spec" if path.parent == DOCS / "spec" else "weakness" if path == DIFFERENCES else ""
        assert {label.partition("-")[0] for label in labels} == {kind}, path
    assert len(DEFINED) == sum(map(len, LABELS.values()))


def test_each_citation_has_its_label() -> None:
    assert not [(str(path), label) for path, labels in CITED.items() for label in labels if label not in DEFINED]


def test_each_label_is_cited() -> None:
    assert not DEFINED - {label for labels in CITED.values() for label in labels}


def test_nothing_is_cited_by_a_number() -> None:
    found = {str(path): numbered(text) for path, text in TEXTS.items() if path != DIFFERENCES}
    assert not {path: what for path, what in found.items() if what}


def test_a_weakness_is_cited_by_the_number_of_its_row() -> None:
    rows = {label: row for row, label in re.findall(rf"\* - (\w\d+)\n     - \.\. _({_NAME}):", TEXTS[DIFFERENCES])}
    assert set(rows) == set(LABELS[DIFFERENCES])
    for path, text in TEXTS.items():
        for title, label in re.findall(rf":ref:`([^`<]*) <({_NAME})>`", text):
            assert label not in rows or title == rows[label], path


def test_what_reads_or_writes_the_wire_says_where_that_is_specified() -> None:
    silent = []
    for path, labels in CITED.items():
        if path.is_relative_to(ROOT / "dmsg") and path.relative_to(ROOT / "dmsg").parts[0] not in NO_WIRE:
            functions = [node.name for node in ast.walk(ast.parse(TEXTS[path])) if isinstance(node, ast.FunctionDef)]
            if any(_WIRE.fullmatch(name) for name in functions) and not labels:
                silent.append(str(path.relative_to(ROOT)))
    assert not silent


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("see :ref:`spec-records`.", ["spec-records"]),
        (
            "see :ref:`records <spec-records>` and :ref:`W7 <weakness-ids-taken>`",
            ["spec-records", "weakness-ids-taken"],
        ),
        (":ref:`sybil`, spec-records", []),
    ],
)
def test_citations_are_found(text: str, labels: list[str]) -> None:
    assert _CITATION.findall(text) == labels
    assert not numbered(text)


@pytest.mark.parametrize(
    "text",
    [
        "Protocol notes, D32",
        "(extension, section 7)",
        "(section 8)",
        "W20",
        "(D4 to D6, W3b)",
        "docs/spec/server.rst, places",
    ],
)
def test_numbers_are_found(text: str) -> None:
    assert numbered(text)


def test_sections_of_an_rfc_are_no_citations_of_ours() -> None:
    assert not numbered("RFC 8439, section 2.8.2")
