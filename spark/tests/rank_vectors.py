"""The vectors of relay_ranks.json, made without this package, and the key they were signed with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dmsg_logs.ranks.signing import SecretKey

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors" / "relay_ranks.json").read_text())
OPERATOR = SecretKey(bytes.fromhex(VECTORS["secret_key"]))
