"""A landing zone for tests: files with the names and lines our writer and shipper make, and with broken ones."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import zstandard

#: 2026-03-01 00:00:00 UTC.
START = 1772323200.0


def event(name: str = "refused", *, v: int = 1, ts: float = START, seq: int = 0, **fields: Any) -> dict[str, Any]:
    """An event as a dict in the order of our writer; ``fields`` are those of the envelope or the event's own."""
    envelope = {"event": name, "v": v, "ts": ts, "role": "server", "node": "n" * 16, "boot": "b" * 16, "seq": seq}
    own = {"conn": 0, "remote": "", "what": "request", "reason": "rate", "count": 1} if name == "refused" else {}
    return {**envelope, **{key: fields.pop(key) for key in envelope if key in fields}, **own, **fields}


def line(name: str = "refused", **fields: Any) -> str:
    """The same as a line of the log, without its end."""
    return json.dumps(event(name, **fields), separators=(",", ":"))


class LandingZone:
    """Writes landing files below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self._numbers: dict[tuple[str, str], int] = {}

    def file(
        self,
        *,
        lines: list[str | dict[str, Any]],
        node: str = "n" * 16,
        boot: str = "b" * 16,
        role: str = "server",
        number: int | None = None,
        recorded: int | None = None,
        started: float = START,
        digest: bool = True,
        frames: int = 1,
        cut_bytes: int = 0,
    ) -> str:
        """A file as the shipper makes it, in whole zstd frames; gives its name relative to the zone.

        ``recorded`` lines stand in its name (default: as many as there are); ``cut_bytes`` are missing at its end.
        """
        texts = [each if isinstance(each, str) else json.dumps(each, separators=(",", ":")) for each in lines]
        chunk = max(1, -(-len(texts) // frames))
        data = b"".join(
            zstandard.ZstdCompressor().compress("".join(f"{text}\n" for text in texts[at : at + chunk]).encode())
            for at in range(0, len(texts), chunk)
        )
        data = data[: len(data) - cut_bytes]
        if number is None:
            number = self._numbers.get((node, boot), 0)
        self._numbers[node, boot] = number + 1
        stem = f"{node}-{boot}-{number:06d}-{len(texts) if recorded is None else recorded}"
        if digest:
            stem += f"-{hashlib.sha256(data).hexdigest()[:16]}"
        day, hour = divmod(int(started), 86400)
        return self.raw(f"role={role}/date={_date(day)}/hour={hour // 3600:02d}/{stem}.jsonl.zst", data)

    def raw(self, name: str, data: bytes | str | list[str]) -> str:
        """A file of any name; text and lines are compressed if its name ends with ``.gz`` or ``.zst``."""
        if isinstance(data, list):
            data = "".join(f"{each}\n" for each in data)
        if isinstance(data, str):
            data = data.encode()
            if name.endswith(".gz"):
                data = gzip.compress(data, mtime=0)
            elif name.endswith(".zst"):
                data = zstandard.ZstdCompressor().compress(data)
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return name


def record_syncs(monkeypatch: pytest.MonkeyPatch, text: Path) -> tuple[set[Path], set[Path]]:
    """What is synced to disk from now on: before ``text`` stands at its place or is replaced, and after that."""
    before, after = set[Path](), set[Path]()
    sync, then = os.fsync, text.stat().st_ino if text.exists() else None

    def synced(descriptor: int) -> None:
        now = text.stat().st_ino if text.exists() else None
        (before if now == then else after).add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    return before, after


def _date(day: int) -> str:
    import datetime

    return (datetime.date(1970, 1, 1) + datetime.timedelta(days=day)).isoformat()
