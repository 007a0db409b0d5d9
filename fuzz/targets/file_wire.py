"""The protocol between ``dmsg send`` and ``dmsg receive``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from dmsg.cli.files import wire as filewire
from dmsg.cli.files.wire import Decoder, Message, Offer, TransferFailed
from fuzz import words
from fuzz.choices import Choices
from fuzz.oracles import check_memory

DICTIONARY = words.members(
    *(
        "type",
        "name",
        "size",
        "sha256",
        "version",
        "offset",
        "code",
        "ready",
        "offer",
        "whole",
        "again",
        "id",
        "hashed",
        "have",
        "start",
        "finish",
        "done",
        "failed",
        "end",
    )
)

_UNIT_LIMIT_BYTES = filewire.PREFIX.size + filewire.HEADER_LIMIT_BYTES
_HEX = frozenset("0123456789abcdef")


def _is_number(limit: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


def _is_hex(size: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and len(value) == size and _HEX.issuperset(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_version(value: Any) -> bool:
    return repr(value) == "1"


def _is_flag(value: Any) -> bool:
    return value is True or value is False


def _is_code(value: Any) -> bool:
    return isinstance(value, str) and value in filewire.REFUSALS


_SIZE, _BEGUN, _HASH, _ID = _is_number(2**63 - 1), _is_number(256 * 1024), _is_hex(64), _is_hex(32)
#: The required and the optional members of each header.
_HEADERS: dict[str, tuple[dict[str, Callable[[Any], bool]], dict[str, Callable[[Any], bool]]]] = {
    "ready": ({}, {}),
    "offer": ({"name": _is_text, "size": _SIZE, "id": _ID}, {"begun": _BEGUN, "version": _is_version}),
    "whole": ({"name": _is_text, "size": _SIZE, "sha256": _HASH}, {"again": _is_flag, "version": _is_version}),
    "have": ({"offset": _SIZE, "sha256": _HASH}, {}),
    "start": ({"offset": _SIZE, "hashed": _is_flag}, {}),
    "finish": ({}, {"sha256": lambda value: value == "" or _HASH(value)}),
    "done": ({}, {}),
    "failed": ({"code": _is_code}, {}),
    "end": ({}, {}),
}


def one_input(data: bytes) -> None:
    """The first byte says how the rest is cut. Raises only ``TransferFailed``, and only if a second reader refuses, too.

    The cut changes no header and no data, a unit is complete with its last byte, and an error is raised at the byte that
    shows it. A unit that was read is written the same.
    """
    choices = Choices(data)
    cut = 1 + choices.byte()
    stream = choices.rest()
    expected, at, fails = _second_reading(stream)
    whole, failed = _units([stream])
    assert failed == fails and (fails or whole == expected)
    pieces, failed = _units([stream[at : at + cut] for at in range(0, len(stream), cut)])
    assert failed == fails
    if fails:
        before, failed = _units([stream[: at - 1]])
        assert not failed and before == expected
        known = [unit for unit in pieces if isinstance(unit, Message)]
        assert known == [unit for unit in expected if isinstance(unit, Message)][: len(known)]
        assert cut > 1 or pieces == expected
    else:
        assert pieces == expected
    for number, unit in enumerate(expected):
        if isinstance(unit, Message):
            check_memory(unit, len(stream))
            _check_written(unit, expected[number + 1] if number + 1 < len(expected) else b"")


def _second_reading(stream: bytes) -> tuple[list[Message | bytes], int, bool]:
    """The units of a stream with their data joined, how far it was read, and whether that byte makes it malformed."""
    found: list[Message | bytes] = []
    at = 0
    while at < len(stream):
        kind, length = stream[at], stream[at + 1 : at + 5]
        if kind not in (1, 2):
            return found, at + 1, True
        if len(length) < 4:
            break
        size = int.from_bytes(length, "big")
        at += 5
        if not 1 <= size <= (4096 if kind == 1 else 1 << 20):
            return found, at, True
        body = stream[at : at + size]
        at += size
        if kind == 2:
            if body:
                found[-1:] = [found[-1] + body] if found and isinstance(found[-1], bytes) else [*found[-1:], body]
        elif len(body) == size:
            header = _header(body)
            if header is None:
                return found, at, True
            found.append(header)
    return found, at, False


def _header(body: bytes) -> Message | None:
    try:
        found = json.loads(str(body, "utf-8"))
    except (ValueError, RecursionError):
        return None
    kind = found.pop("type", None) if type(found) is dict else None
    if not isinstance(kind, str) or kind not in _HEADERS:
        return None
    must, may = _HEADERS[kind]
    if not all(name in found for name in must):
        return None
    for name, value in found.items():
        check = must.get(name) or may.get(name)
        if check is None or not check(value):
            return None
    return _CLASSES[kind](**found)


_CLASSES: dict[str, type[Message]] = {
    "ready": filewire.Ready,
    "offer": Offer,
    "whole": filewire.Whole,
    "have": filewire.Have,
    "start": filewire.Start,
    "finish": filewire.Finish,
    "done": filewire.Done,
    "failed": filewire.Failed,
    "end": filewire.End,
}


def _check_written(unit: Message, after: Message | bytes) -> None:
    """A written unit reads the same, and members with default values may be left out."""
    name = getattr(unit, "name", "")
    if len(name) > 255:
        return
    written = filewire.encode(unit)
    prefix, body = written[: filewire.PREFIX.size], written[filewire.PREFIX.size :]
    assert prefix == b"\x01" + len(body).to_bytes(4, "big") and body.isascii()
    members = json.loads(body)
    assert body.decode("ascii") == json.dumps(members, separators=(",", ":"))
    assert members.pop("type") == unit.KIND and members == {each: getattr(unit, each) for each in members}
    assert _header(body) == unit and _units([written]) == ([unit], False)
    data = after if isinstance(after, bytes) else b""
    if isinstance(unit, Offer):
        written = filewire.encode_offer(unit, data)
    elif isinstance(unit, filewire.Whole):
        written = filewire.encode_whole(unit, data)
    else:
        if isinstance(unit, filewire.Failed):
            _check_refusal(unit.code)
        return
    assert _units([written]) == ([unit, data] if data else [unit], False)
    assert len(written) == len(prefix) + len(body) + (len(prefix) + len(data) if data else 0)


def _check_refusal(code: str) -> None:
    """A refusal names the file that it was first said to be about."""
    text, exit_code = filewire.REFUSALS[code]
    error = TransferFailed(code, problem="that")
    assert (error.args, error.exit, error.data) == ((f"{text} (that)",), exit_code, {"code": code, "file": ""})
    assert error.about("") is error and error.data["file"] == "" and error.code == code
    for name in ("one", "", "two"):
        error.about(name)
        assert error.args == (f"one: {text} (that)",) and error.data == {"code": code, "file": "one"}
    assert TransferFailed(code, "one").args == (f"one: {text}",)


def _units(pieces: list[bytes]) -> tuple[list[Message | bytes], bool]:
    """Headers, and the data between them joined."""
    decoder = Decoder()
    found: list[Message | bytes] = []
    for piece in pieces:
        try:
            units = decoder.feed(piece)
        except TransferFailed as error:
            assert error.code == "malformed"
            return found, True
        assert len(decoder._begun) < _UNIT_LIMIT_BYTES
        for unit in units:
            assert unit != b""
            if isinstance(unit, bytes) and found and isinstance(found[-1], bytes):
                found[-1] += unit
            else:
                found.append(unit)
    return found, False


def seeds() -> Iterator[bytes]:
    """A whole conversation, names of all kinds, headers that are nearly right."""
    digest = "0" * 64
    messages = [
        filewire.Ready(),
        Offer("notes.txt", 5, digest[:32], 3),
        filewire.Whole("notes.txt", 5, digest),
        filewire.Have(0, digest),
        filewire.Start(0, hashed=True),
        filewire.Finish(digest),
        filewire.Done(),
        filewire.Failed("busy"),
        filewire.End(),
    ]
    talk = (
        b"".join(map(filewire.encode, messages)) + filewire.data_prefix(5) + b"hello" + filewire.encode(filewire.Done())
    )
    yield b"\x00" + talk
    yield b"\xff" + talk
    for name in (
        "-rf",
        "--checkpoint-action=exec=sh",
        "*",
        "$(id)",
        "..",
        "a/b",
        ".hidden",
        "a\u0301" * 9,
        "x.part",
        "\u202e",
    ):
        yield b"\xff" + filewire.encode(Offer(name, 1, digest[:32]))
    for body in (b"[]", b'{"type":"offer"}', b'{"type":"done","x":1}', b'{"type":"start","offset":1e9}', b"[" * 4_000):
        yield b"\xff" + filewire.PREFIX.pack(filewire.HEADER, len(body)) + body
    yield b"\xff" + filewire.PREFIX.pack(2, 0)
    yield b"\xff" + filewire.data_prefix(filewire.DATA_LIMIT_BYTES) + b"and more"
    for kind, length in ((1, 4_097), (2, 2**20 + 1), (0, 1), (3, 1)):
        yield b"\x00" + filewire.data_prefix(2) + b"ok" + filewire.PREFIX.pack(kind, length) + b"more"
    for sort in ("offer", "whole"):
        hashed = "id" if sort == "offer" else "sha256"
        good: dict[str, Any] = {"type": sort, "name": "a", "size": 3, hashed: digest[: 32 if sort == "offer" else 64]}
        changes: list[dict[str, Any]] = [
            *({"size": value} for value in (-1, 0, 2**63 - 1, 2**63, True, 1.0, "1")),
            *({"begun": value} for value in (-1, 0, 2**18, 2**18 + 1, True, None)),
            *({"again": value} for value in (True, False, 0, 1)),
            *({"version": value} for value in (1, True, 1.0, 2)),
            *({hashed: value} for value in (digest + "\n", digest[:32] + "\n", digest[:31] + "A", digest[:63], 0)),
            {"name": 1},
            {"name": "\x01" * 255},
        ]
        for change in changes:
            body = json.dumps(good | change).encode()
            yield b"\x07" + filewire.PREFIX.pack(filewire.HEADER, len(body)) + body + filewire.data_prefix(3) + b"abc"
    for code in (*filewire.REFUSALS, "other"):
        yield b"\x02" + filewire.encode(filewire.Failed(code))
    for text in (
        '"finish"',
        '"finish","sha256":""',
        '"finish","sha256":"0"',
        '"have","sha256":""',
        '"have","offset":0',
    ):
        yield b"\x00" + filewire.PREFIX.pack(filewire.HEADER, len(text) + 9) + b'{"type":' + text.encode() + b"}"
    for offset, hashed_too in ((0, "true"), (0, "false"), (-1, "true"), (2**63, "true"), (0, "0"), (0, "null")):
        text = f'{{"type":"start","offset":{offset},"hashed":{hashed_too}}}'
        yield b"\x00" + filewire.PREFIX.pack(filewire.HEADER, len(text)) + text.encode()
    yield b"\xff" + filewire.PREFIX.pack(1, 5_000)
