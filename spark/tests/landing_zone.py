"""Reads a landing zone with nothing but ``json``: what every other reader is held against."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from dmsg_logs.schemas import EVENTS, KEY
from dmsg_logs.synthetic import Truth

NAME = re.compile(
    r"^(?P<node>.+)-(?P<boot>[0-9a-f]{8,32})-(?P<n>\d{6,9})-(?P<lines>\d{1,12})-(?P<digest>[0-9a-f]{16})\.jsonl\.zst$"
)
_TYPES = {"str": str, "int": int, "float": float, "bool": bool}
_BOUND_TS = 1e12


@dataclass
class Zone:
    """A landing zone as a careful reader finds it."""

    truth: Truth
    out: Path
    lines: dict[str, list[bytes]] = field(default_factory=dict)
    good: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)
    raw: dict[tuple[str, str, int], bytes] = field(default_factory=dict)
    files: dict[tuple[str, str, int], list[str]] = field(default_factory=dict)
    dup: int = 0
    corrupt: int = 0

    def is_newer(self, value: dict[str, Any]) -> bool:
        """Whether a line has undeclared fields."""
        return "shard" in value

    def read(self) -> Zone:
        """Read every file."""
        for path in sorted(self.out.rglob("*.jsonl.zst")):
            name = str(path.relative_to(self.out))
            self.lines[name] = lines_of(path)
            for line in self.lines[name]:
                self._judge(name, line)
        return self

    def _judge(self, name: str, line: bytes) -> None:
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not is_line(value):
            self.corrupt += 1
            return
        key = (value["node"], value["boot"], value["seq"])
        if key in self.good:
            self.dup += 1
            assert self.raw[key] == line
        self.good[key], self.raw[key] = value, line
        self.files.setdefault(key, []).append(name)


def lines_of(path: Path) -> list[bytes]:
    packed = path.read_bytes()
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed), read_across_frames=True) as reader:
        return reader.read().splitlines(keepends=True)


def is_line(value: object) -> bool:
    """Whether it is what the schema promises: every declared field of its event that is there has its type."""
    if not isinstance(value, dict) or any(value.get(name) is None for name in (*KEY, "ts", "event")):
        return False
    if not isinstance(value["ts"], float) or value["ts"] > _BOUND_TS:
        return False
    columns = {column.name: _TYPES[column.type] for column in EVENTS[value["event"]].columns}
    columns |= {"seq": int, "v": int, "node": str, "boot": str, "role": str}
    return all(type(value[name]) is kind for name, kind in columns.items() if name in value)
