"""The vectors of the Reliable Message Bus: those derived from its description, and those its programs were seen to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parents[2] / "vectors"
#: By id.
DERIVED: dict[str, Any] = {one["id"]: one for one in json.loads((_FOLDER / "rmb.json").read_text())["vectors"]}
LIVE: dict[str, Any] = json.loads((_FOLDER / "rmb-live.json").read_text())
