"""JSON from strangers."""

from __future__ import annotations

import json
from collections.abc import Iterator

from dmsg.http import json_text
from dmsg.http.errors import MalformedJson
from fuzz import words
from fuzz.oracles import as_text, check_memory, outcome

DICTIONARY = words.JSON

_LIMIT_BYTES = 64 * 1024


def one_input(data: bytes) -> None:
    """The input is the text. Raises only ``MalformedJson``; an accepted text is read as Python's parser reads it."""
    kind, value = outcome(lambda: json_text.decode(data, _LIMIT_BYTES), MalformedJson)
    each, elements = outcome(lambda: list(json_text.elements(data, _LIMIT_BYTES, _LIMIT_BYTES)), MalformedJson)
    if kind == "value":
        text = data.decode("utf-8")
        if not _has_long_number(value):
            assert json.loads(text) == value
        assert (each == "value") == (value is None or isinstance(value, list)) or len(data) > _LIMIT_BYTES
        if each == "value":
            assert not isinstance(value, list) or _has_long_number(value) or elements == value
        check_memory(value, len(data), times=128)
    text = as_text(data)
    quoted = json_text.quote(text)
    assert json.loads(quoted) == text
    assert len(quoted) <= 6 * len(text) + 2


def _has_long_number(value: object) -> bool:
    if isinstance(value, list):
        return any(map(_has_long_number, value))
    if isinstance(value, dict):
        return any(map(_has_long_number, value.values()))
    return isinstance(value, json_text._NotAnInteger)


def seeds() -> Iterator[bytes]:
    """Values of all kinds; nesting at the limit and over it; borderline numbers, names and texts."""
    yield b'{"a":[1,-2,3.5e3,true,false,null,"x\\u00fc\\ud83d\\ude00\\n"],"b":{}}'
    yield b"[" * 16 + b"]" * 16
    yield b"[" * 17 + b"]" * 17
    yield b'["' + b'\\"[' * 17 + b'"]'
    yield b'{"a":1,"a":2}'
    yield b"[NaN,Infinity,-Infinity]"
    yield b"[" + b"9" * 21 + b"," + b"9" * 19 + b",1e400,-0,0.0]"
    yield b' [ {"x":1} , [] ] \n'
    yield b"null"
    yield b"[1,2"
    yield '"<>&\u2028\u2029\x01\\ud800"'.encode()
    yield b"\xed\xa0\x80"
