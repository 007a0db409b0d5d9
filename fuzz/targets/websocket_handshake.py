"""The opening handshake of WebSockets: requests a server agrees to or refuses, answers a client takes, and both together."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator

from dmsg.errors import LocalProtocolError, RemoteProtocolError
from dmsg.sansio.errors import WebSocketRefused
from dmsg.sansio.websocket import Role, WebSocketConfig
from dmsg.sansio.websocket_handshake import HEAD_BYTES, REFUSAL_BYTES, ClientHandshake, server_answer, wants_websocket
from fuzz.choices import Choices

_KEY = base64.b64encode(bytes(16))
_ACCEPT = base64.b64encode(hashlib.sha1(_KEY + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
_NO_ANSWER = "websocket: no answer"
_TEXTS = ("relay.example", "/", "/?token=abc", "a b", "", "\r\nX: y", "ä", " x", "[2001:db8::1]:80", "~" * 200)
_VALUES = (b"Upgrade", b"websocket", b"keep-alive, UPGRADE", b"WebSocket ,h2c", b"13", b"8", _KEY, _KEY[:-1], b"", b"=")
_NAMES = (b"connection", b"upgrade", b"sec-websocket-version", b"sec-websocket-key", b"host")
_STARTS = (
    b"HTTP/1.1 101 Switching",
    b"HTTP/1.1 100",
    b"HTTP/1.1 401 No",
    b"HTTP/1.1 503 ",
    b"HTTP/1.0 101 x",
    b"HTTP/1.1 99",
)
_LINES = (
    b"Connection: Upgrade",
    b"Upgrade: websocket",
    b"Sec-WebSocket-Accept: " + _ACCEPT,
    b"sec-websocket-accept:" + _ACCEPT + b"\t",
    b"Sec-WebSocket-Accept: " + _ACCEPT[1:],
    b"Sec-WebSocket-Extensions: permessage-deflate",
    b"Sec-WebSocket-Protocol: chat",
    b"Content-Length: 3",
    b"Content-Length: 9999999999",
    b"Content-Length: 0",
    b"Content-Length: -1",
    b"no colon",
    b"na me: x",
    b": x",
    b"X: " + b"x" * 6_000,
    b"X: y\nz",
)
DICTIONARY = (b"\r\n\r\n", b"HTTP/1.1 ", b"Content-Length: ", *_LINES[:5])

_Headers = dict[bytes, list[bytes]]


def one_input(data: bytes) -> None:
    """The first byte says which side is read, or that both talk to each other.

    A side decides by simple rules, however the bytes are cut, and raises only its own errors. A client's request, if it can
    be sent, is accepted, and the client finds the bytes after the answer.
    """
    choices = Choices(data)
    (_request, _answer, _both)[choices.byte() % 3](choices)


# --- a server ------------------------------------------------------------------------------------------------------


def _request(choices: Choices) -> None:
    headers: _Headers = {}
    if choices.flag():
        headers = {b"connection": [b"Upgrade"], b"upgrade": [b"websocket"]}
        headers |= {b"sec-websocket-key": [_KEY], b"sec-websocket-version": [b"13"]}
    for _ in range(choices.byte() % 8):
        name = choices.pick(_NAMES)
        match choices.below(4):
            case 0:
                headers.pop(name, None)
            case 1:
                headers[name] = [choices.chunk(40)]
            case 2:
                headers[name] = [choices.pick(_VALUES)]
            case _:
                headers.setdefault(name, []).append(choices.pick(_VALUES))
    words = {
        name: [word.strip().lower() for value in headers.get(name, []) for word in value.split(b",")]
        for name in (b"connection", b"upgrade")
    }
    assert wants_websocket(headers) == (b"upgrade" in words[b"connection"] and b"websocket" in words[b"upgrade"])
    keys = headers.get(b"sec-websocket-key", [])
    expected = 101
    if not keys or headers.get(b"sec-websocket-version") != [b"13"]:
        expected = 500
    elif len(keys) != 1 or not re.fullmatch(rb"[A-Za-z0-9+/]{22}==", keys[0]):
        expected = 400
    try:
        answer = server_answer(headers)
    except WebSocketRefused as refused:
        assert refused.status == expected and refused.text.isprintable()
        return
    assert expected == 101 and answer.endswith(b"\r\n\r\n") and b"Sec-WebSocket-Accept: " in answer


# --- a client ------------------------------------------------------------------------------------------------------


def _answer(choices: Choices) -> None:
    pieces = choices.byte()
    stream = b""
    for _ in range(choices.byte() % 4):
        lines = [choices.pick(_STARTS)]
        if choices.flag():
            lines += _LINES[:3]
        lines += [choices.chunk(60) if choices.flag() else choices.pick(_LINES) for _ in range(choices.byte() % 5)]
        stream += b"\r\n".join([*lines, b"", b""])
    stream += choices.rest()
    expected = _expected(stream)
    sizes = {len(stream) or 1, 1 + pieces} if len(stream) > 2_000 else {len(stream) or 1, 1 + pieces, 1}
    for size in sizes:
        assert _read([stream[at : at + size] for at in range(0, len(stream), size)]) == expected


def _read(pieces: list[bytes]) -> tuple[str, bytes]:
    """The result of an answer: ``open`` and the bytes after it, or the failure."""
    client = ClientHandshake("relay", "/", WebSocketConfig(), random=bytes)
    for number, piece in enumerate(pieces):
        try:
            opened = client.receive_data(piece, 0.0)
        except RemoteProtocolError as error:
            return _named(error)
        if opened:
            (socket,) = opened
            assert socket.role is Role.CLIENT
            return "open", client.leftover + b"".join(pieces[number + 1 :])
        assert not client.leftover and len(client._received) <= HEAD_BYTES
    return _named(client.refused())


def _named(error: RemoteProtocolError) -> tuple[str, bytes]:
    return (str(error), error.text.encode() if isinstance(error, WebSocketRefused) else b"")


def _expected(stream: bytes) -> tuple[str, bytes]:
    """The same of the whole stream, read by the simplest rules."""
    room = HEAD_BYTES
    while True:
        head, end, stream = stream.partition(b"\r\n\r\n")
        size = len(head + end)
        if size > room:
            return "websocket: the answer's head is too long", b""
        if not end:
            return _NO_ANSWER, b""
        room -= size
        first, *lines = head.split(b"\r\n")
        words = re.fullmatch(rb"HTTP/1\.1 ([1-5]\d\d)( .*)?", first)
        fields = [re.fullmatch(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*", line, re.DOTALL) for line in lines]
        if words is None or not all(fields) or b"\n" in first or b"\r" in first:
            return "websocket: the answer is not HTTP/1.1", b""
        found: _Headers = {}
        for field in fields:
            assert field is not None
            found.setdefault(field[1].lower(), []).append(field[2])
        status = int(words[1])
        if status == 101:
            return _agreed(found, stream)
        if status >= 200:
            length = b"".join(found.get(b"content-length", []))
            size = int(length) if re.fullmatch(rb"\d{1,9}", length) else REFUSAL_BYTES
            text = stream[: min(size, REFUSAL_BYTES)].decode("utf-8", "replace")
            return f"websocket: refused with status {status}", text.encode()


def _agreed(found: _Headers, behind: bytes) -> tuple[str, bytes]:
    refused = "websocket: refused with status 101"
    words = {
        name: [word.strip().lower() for value in found.get(name, []) for word in value.split(b",")]
        for name in (b"connection", b"upgrade")
    }
    wanted = b"upgrade" in words[b"connection"] and b"websocket" in words[b"upgrade"]
    if not wanted or found.get(b"sec-websocket-accept") != [_ACCEPT]:
        return refused, b"the server agreed to something else"
    if b"sec-websocket-extensions" in found or b"sec-websocket-protocol" in found:
        return refused, b"the server wants an extension or a protocol that was not offered"
    return "open", behind


# --- both ----------------------------------------------------------------------------------------------------------


def _both(choices: Choices) -> None:
    host, target = (_text(choices) for _ in range(2))
    more = {_text(choices): _text(choices) for _ in range(choices.byte() % 3)}
    random = choices.chunk(16).ljust(16, b"k")
    texts = [host, target, *more, *more.values()]
    sendable = all(text and text.isascii() and text.isprintable() and text[0] != " " for text in texts)
    try:
        client = ClientHandshake(host, target, WebSocketConfig(), random=lambda size: random[:size], headers=more)
    except LocalProtocolError:
        assert not sendable or " " in target
        return
    assert sendable and " " not in target
    request = client.data_to_send()
    assert not client.data_to_send()
    head, end, behind = request.decode("ascii").partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    assert end and not behind and first == f"GET {target} HTTP/1.1" and len(lines) == 5 + len(more)
    headers: _Headers = {}
    for line in lines:
        name, _, value = line.partition(": ")
        headers.setdefault(name.lower().encode(), []).append(value.encode())
    if any(
        name.lower() in ("connection", "upgrade") or name.lower().startswith("sec-") or ":" in name for name in more
    ):
        return  # the program says it twice
    assert headers[b"host"][0] == host.encode() and wants_websocket(headers)
    answer, leftover = server_answer(headers), choices.rest()
    (socket,) = client.receive_data(answer + leftover, 0.0)
    assert socket.role is Role.CLIENT and client.leftover == leftover


def _text(choices: Choices) -> str:
    return choices.pick(_TEXTS) if choices.flag() else choices.chunk(12).decode("latin-1")


def seeds() -> Iterator[bytes]:
    """Requests that want a WebSocket and what each lacks; answers that agree, refuse and are none; both together."""
    yield b"\x00\x01\x00"
    for name in range(len(_NAMES)):
        yield bytes((0, 1, 1, name, 0))
        yield bytes((0, 0, 1, name, 2, 6))
        for value in range(len(_VALUES)):
            yield bytes((0, 1, 1, name, 2, value))
            yield bytes((0, 1, 1, name, 3, value))
    for cut in (b"\xff", b"\x06"):
        yield b"\x01" + cut + b"\x01\x00\x01\x00" + b"\x82\x01x"
        yield b"\x01" + cut + b"\x02\x01\x00\x00" + b"\x00\x01\x00" + b"\x82\x01x"
        yield b"\x01" + cut + b"\x02" + b"\x01\x00\x02\x00\x0e\x00\x0e" * 2
        yield b"\x01" + cut + b"\x00" + b"HTTP/1.1 200\r\n"
        yield b"\x01" + cut + b"\x01\x02\x01\x03" + b"\x00\x0e" * 3 + b"text"
        yield b"\x01" + cut + b"\x00" + b"HTTP/1.1 200 " + b"x" * HEAD_BYTES
        for start in range(len(_STARTS)):
            yield b"\x01" + cut + bytes((1, start, 0, 0)) + b"text"
        for line in range(len(_LINES)):
            yield b"\x01" + cut + bytes((1, 0, 1, 1, 0, line)) + b"\x82\x01x"
            yield b"\x01" + cut + bytes((1, 2, 0, 1, 0, line)) + b"t\xe4xt" * 200
    for target in range(len(_TEXTS)):
        yield b"\x02\x01\x00\x01" + bytes((target,)) + b"\x00" + b"\x10abcdefghijklmnop" + b"\x82\x01x"
        yield b"\x02\x01\x00\x01\x01\x01\x00\x01y\x01" + bytes((target,)) + b"\x00"
