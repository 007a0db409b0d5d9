"""What discovery answers has one class for each text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dmsg.discovery.errors import DISCOVERY_ERRORS, BadInput, DiscoveryError, EntryNotFound, EntryRolledBack, WrongTime


@pytest.mark.parametrize(
    ("error", "text", "attributes"),
    [
        (BadInput(), "error bad input", {"detail": "", "status": 400}),
        (BadInput("no key"), "error bad input: no key", {"detail": "no key"}),
        (
            EntryNotFound(next_sequence=4, after_timestamp=9),
            "entry of public key is not found",
            {"next_sequence": 4, "after_timestamp": 9, "status": 404},
        ),
        (EntryRolledBack("older", entry=5), "entry is older than one seen before: older", {"entry": 5}),
    ],
)
def test_data_is_in_attributes(error: DiscoveryError, text: str, attributes: dict[str, Any]) -> None:
    assert str(error) == text
    assert {name: getattr(error, name) for name in attributes} == attributes


def test_texts_of_discovery_have_one_class_each(vectors: Any) -> None:
    assert len(DISCOVERY_ERRORS) == 13
    for text, error in DISCOVERY_ERRORS.items():
        assert error.text == text
    assert json.dumps(vectors["discovery_messages"]).count("entry validation error") >= 6
    assert str(WrongTime()).startswith("entry validation error: previous entry timestamp")
