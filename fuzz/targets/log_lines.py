"""Lines of the event log, with any text in their fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dmsg.eventlog.encode import Encoder
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import EVENTS, describe_event
from fuzz.choices import Choices
from fuzz.oracles import as_text

_CLASSES = list(EVENTS.values())


def one_input(data: bytes) -> None:
    """The first bytes choose an event and values for its fields; the rest is the name of the node.

    The result is one line of ASCII with the given values, each column of its declared type and each reason from the list,
    however wrong the values.
    """
    choices = Choices(data)
    cls = _CLASSES[choices.byte() % len(_CLASSES)]
    fields = describe_event(cls).fields
    values: dict[str, Any] = {each.name: _value(choices) for each in fields}
    time = _value(choices)
    node = as_text(choices.rest())
    encoder = Encoder("server", node, "0" * 16)
    line = encoder.encode(cls(**values), time if isinstance(time, (int, float)) and abs(time) < 1e12 else 0.0)
    assert line.isascii() and line.endswith(b"\n") and line.count(b"\n") == 1 and encoder.seq == 1
    read = json.loads(line, parse_constant=_refuse)
    assert list(read)[: len(read) - len(fields)] == ["event", "v", "ts", "role", "node", "boot", "seq"]
    assert read["node"] == node and read["event"] == cls.NAME
    for each in fields:
        found = read[each.name]
        assert type(found) is each.type, (each.name, found)
        assert not isinstance(found, int) or -(2**63) <= found < 2**63
        value = values[each.name]
        if each.is_reason:
            assert found == (Reason.of(value) if isinstance(value, str) else Reason.OTHER)
        elif type(value) is each.type is int:
            assert found == min(max(value, -(2**63)), 2**63 - 1)
        elif type(value) is each.type is float:
            assert found == (value if abs(value) < float("inf") else 0)
        elif type(value) is each.type:
            assert found == value
        elif isinstance(value, _Rude):
            assert found == each.type()


def _refuse(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


class _Rude:
    """An object that cannot be converted to anything."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __int__ = __float__ = __bool__ = __str__


def _value(choices: Choices) -> Any:
    match choices.below(9):
        case 0:
            return choices.chunk().decode("utf-8", "replace")
        case 1:
            return int.from_bytes(choices.chunk(20), "big", signed=True)
        case 2:
            return choices.below(256) / 7
        case 3:
            return choices.flag()
        case 4:
            return float(choices.pick(("nan", "inf", "-inf", "1e308", "-0.0", "5e-324")))
        case 5:
            return None
        case 6:
            return choices.chunk()
        case 7:
            return _Rude()
        case _:
            return "\ud800\x00\u2028\x1b" * (1 + choices.byte())


def seeds() -> Iterator[bytes]:
    """Each event with values of each kind."""
    for number in range(len(_CLASSES)):
        yield (
            bytes((number,)) + b"".join(bytes((kind % 9, 3)) + b"abc" for kind in range(number, number + 12)) + b"node"
        )
        for value in (b"\x00\x03abc", b"\x01\x09\x7f" + bytes(8), b"\x01\x09\x80" + bytes(8), b"\x01\x01\xff"):
            yield bytes((number,)) + value * 16
        for value in (b"\x03\x00", b"\x04\x00", b"\x04\x01", b"\x04\x02", b"\x02\x2a", b"\x05", b"\x07"):
            yield bytes((number,)) + value * 16
