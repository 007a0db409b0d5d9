"""What the tests of messaging share: the values that Go's programs produced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

VECTORS = Path(__file__).parents[1] / "vectors" / "messaging.json"


@pytest.fixture(scope="session")
def vectors() -> Any:
    return json.loads(VECTORS.read_text("utf-8"))
