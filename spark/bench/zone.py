"""The landing zone the engines read: made once for each size, read once before each engine so that all find it warm."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from dmsg_logs.synthetic import NAME, Truth, generate

SEED: Final = 42
#: What is wrong with the lines, as shares: what a fleet in good order has.
SHARES: Final[dict[str, Any]] = {"corrupt": 0.0001, "duplicates": 0.01, "late": 0.005, "newer": 0.0001}
_CHUNK_BYTES: Final = 1 << 20


def make(directory: Path, lines: int) -> tuple[Path, Truth]:
    """The zone with ``lines`` lines below ``directory``, made unless it is there already."""
    zone = directory / f"zone-{lines}"
    if not (zone / NAME).exists():
        generate(zone, events=lines, seed=SEED, **SHARES)
    return zone, Truth.read(zone)


def warm(zone: Path) -> None:
    """Read every file once."""
    for path in zone.rglob("*.zst"):
        with path.open("rb") as file:
            while file.read(_CHUNK_BYTES):
                pass
