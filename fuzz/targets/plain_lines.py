"""The log pipeline's line scanner: a line that it takes for a plain event becomes a row of the same values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice

import pyarrow as pa

from dmsg_logs.ingest import plain
from dmsg_logs.ingest.lines import EARLIEST_S, LATEST_S, MAX_INT, MAX_LINE_BYTES
from dmsg_logs.schemas import EVENTS
from fuzz import words
from fuzz.choices import Choices

DICTIONARY = words.members("event", "v", "ts", "role", "node", "boot", "seq")

#: Blocks of 1 MiB to check in a file that unpacks to very much.
_BLOCKS = 8


def one_input(data: bytes) -> None:
    """The first byte says how the rest, a file of lines, is compressed: not at all, or as zst or gz of any bytes.

    Raises only ``Unreadable``, no line is lost, and each plain line is one JSON object that Arrow reads as Python does.
    """
    choices = Choices(data)
    suffix = ("jsonl", "jsonl.zst", "jsonl.gz")[choices.byte() % 3]
    content = choices.rest()
    try:
        blocks = islice(plain.line_blocks(pa.py_buffer(content), f"file.{suffix}"), _BLOCKS)
        lines = [line for block in blocks for line in block]
    except plain.Unreadable:
        return
    if suffix == "jsonl":
        assert b"\n".join(lines) == content.removesuffix(b"\n") if content else not lines
    for line in lines[:16]:
        assert len(line) <= MAX_LINE_BYTES + 1
        if plain.is_plain(line):
            _check(line)


def _check(line: bytes) -> None:
    found = json.loads(line)
    name = found["event"]
    event = EVENTS[name]
    assert found["node"] and found["boot"] and 0 <= found["seq"] <= MAX_INT
    assert EARLIEST_S <= found["ts"] < LATEST_S and found["v"] <= event.version
    rows = plain._columns(name, [line])
    for column, values in rows.items():
        (value,) = values.to_pylist()
        expected = found.get(column)
        assert value == expected or (value is None and expected is None), (column, value, expected)


def seeds() -> Iterator[bytes]:
    """Lines of each event, with and without its fields; a field twice; odd ends of lines; a byte order mark."""
    samples = {"str": "x", "int": 7, "float": 1.5, "bool": True}
    lines = []
    for name, event in EVENTS.items():
        envelope = {"event": name, "v": 1, "ts": 1.7e9, "role": "server", "node": "n", "boot": "b", "seq": 3}
        lines.append(json.dumps({**envelope, **{one.name: samples[one.type] for one in event.columns}}).encode())
        lines.append(json.dumps(envelope).encode())
    for line in lines:
        yield b"\x00" + line
    first = lines[0]
    yield b"\x00" + b"\n".join(lines[:4]) + b"\n"
    yield b"\x00" + first.replace(b'"seq": 3', b'"seq": 3, "seq": 4')
    yield b"\x00" + first.replace(b'"seq": 3', b'"seq": -0')
    yield b"\x00" + first.replace(b"1700000000.0", b"1.7E+9")
    yield b"\x00" + first.replace(b'"n"', b'"\\ud83d\\ude00\\u0000"')
    yield b"\x00\xef\xbb\xbf" + first
    yield b"\x00" + first + b"\r\n\n[]\n" + first[:-1]
    yield b"\x01\x28\xb5\x2f\xfd"
    yield b"\x02\x1f\x8b\x08\x00"
