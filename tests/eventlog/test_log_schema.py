"""The pipeline's copy of the schema is the one the logs are written with: names, versions, columns, types and reasons."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dmsg.eventlog import schema as events
from dmsg.eventlog.reasons import Reason

SPARK = Path(__file__).parents[2] / "spark"
#: The pipeline imports nothing of dmsg, and this process nothing of Spark: what it declares is printed by another one.
_PRINT = """
import json
from dmsg_logs import schemas
print(json.dumps({
    "envelope": [list(each) for each in schemas.ENVELOPE],
    "events": {
        name: {"version": event.version, "columns": [list(each) for each in event.columns]}
        for name, event in schemas.EVENTS.items()
    },
    "structs": {
        name: [[field.name, field.dataType.simpleString(), field.nullable] for field in schemas.event_struct(name)]
        for name in schemas.EVENTS
    },
    "reasons": list(schemas.REASONS),
    "line": [[field.name, field.dataType.simpleString(), field.nullable] for field in schemas.LINE],
}))
"""
SPARK_TYPES = {"str": "string", "int": "bigint", "float": "double", "bool": "boolean"}


@pytest.fixture(scope="module")
def copied() -> Any:
    """What spark/dmsg_logs/schemas.py declares."""
    path = os.pathsep.join([str(SPARK), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", _PRINT], env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=True
    )
    return json.loads(done.stdout)


def columns(fields: tuple[events.FieldDoc, ...]) -> list[list[str]]:
    return [[field.name, field.type.__name__] for field in fields]


def test_the_envelope_is_the_same(copied: Any) -> None:
    assert copied["envelope"] == columns(events.ENVELOPE)


def test_every_event_is_the_same(copied: Any) -> None:
    declared = {event.name: {"version": event.version, "columns": columns(event.fields)} for event in events.describe()}
    assert copied["events"] == declared


def test_the_reasons_are_the_same(copied: Any) -> None:
    assert copied["reasons"] == [reason.value for reason in Reason]


def test_structs_have_these_columns_in_this_order_each_nullable(copied: Any) -> None:
    for event in events.describe():
        expected = [[name, SPARK_TYPES[kind], True] for name, kind in columns((*events.ENVELOPE, *event.fields))]
        assert copied["structs"][event.name] == expected


def test_a_line_has_every_column_of_every_event_once(copied: Any) -> None:
    every = dict(columns(events.ENVELOPE))
    for event in events.describe():
        every.update(columns(event.fields))
    assert copied["line"][: len(events.ENVELOPE)] == [
        [name, SPARK_TYPES[kind], True] for name, kind in columns(events.ENVELOPE)
    ]
    assert sorted(copied["line"]) == sorted([name, SPARK_TYPES[kind], True] for name, kind in every.items())
