"""The opening handshake of WebSockets (RFC 6455, section 4): both sides of it, without HTTP around them.

No extension and no subprotocol is offered or accepted: compression would let a small message become a large one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dmsg.errors import LocalProtocolError, RemoteProtocolError
from dmsg.sansio.core import Core
from dmsg.sansio.errors import WebSocketRefused
from dmsg.sansio.websocket import Role, WebSocket, WebSocketConfig

#: Longest head of an answer, with the 1xx heads before it, in bytes.
HEAD_BYTES: Final = 16 * 1024
#: Bytes that are kept of the body of a refusal, which is a text for people.
REFUSAL_BYTES: Final = 512
_KEY_BYTES: Final = 16
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_STATUS: Final = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9])(?: [^\r\n]*)?")
_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
#: What a client may put into the request line and its headers: printable ASCII.
_SENDABLE: Final = re.compile(r"[!-~][ -~]*")


def accept_value(key: bytes) -> bytes:
    """The ``Sec-WebSocket-Accept`` that belongs to a ``Sec-WebSocket-Key``."""
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())


def wants_websocket(headers: Mapping[bytes, Sequence[bytes]]) -> bool:
    """Whether a request asks for a WebSocket; ``headers`` are the values by name in lower case."""
    return b"upgrade" in _tokens(headers.get(b"connection", ())) and _asks_upgrade(headers)


def _asks_upgrade(headers: Mapping[bytes, Sequence[bytes]]) -> bool:
    return b"websocket" in _tokens(headers.get(b"upgrade", ()))


def _tokens(values: Sequence[bytes]) -> set[bytes]:
    return {token.strip().lower() for value in values for token in value.split(b",")}


def server_answer(headers: Mapping[bytes, Sequence[bytes]]) -> bytes:
    """The head that agrees to a request for a WebSocket. Raises ``WebSocketRefused``.

    For a missing key or version, status and text are those of the public RMB relay.
    """
    keys = headers.get(b"sec-websocket-key", ())
    if not keys:
        raise WebSocketRefused(500, 'No "Sec-WebSocket-Key" header')
    if list(headers.get(b"sec-websocket-version", ())) != [b"13"]:
        raise WebSocketRefused(500, 'No "Sec-WebSocket-Version: 13" header')
    try:
        good = len(keys) == 1 and len(base64.b64decode(keys[0], validate=True)) == _KEY_BYTES
    except binascii.Error:
        good = False
    if not good:
        raise WebSocketRefused(400, 'bad "Sec-WebSocket-Key" header')
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: %s\r\n\r\n"
        % accept_value(keys[0])
    )


class ClientHandshake(Core):
    """A client's side, until the server has agreed. Its only event is the :class:`WebSocket` that takes over;
    ``leftover`` holds bytes that came behind the server's answer.

    ``target`` is path and query, ``host`` the value of the Host header. ``receive_data`` raises ``WebSocketRefused``,
    or ``RemoteProtocolError`` for an answer that is not HTTP or has a head over ``HEAD_BYTES``.
    """

    def __init__(
        self,
        host: str,
        target: str,
        config: WebSocketConfig,
        *,
        random: Callable[[int], bytes],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        for text in (host, target, *(headers or {}), *(headers or {}).values()):
            if not _SENDABLE.fullmatch(text) or (text is target and " " in text):
                raise LocalProtocolError("a WebSocket request is of printable ASCII")
        key = base64.b64encode(random(_KEY_BYTES))
        self._accept = accept_value(key)
        self._config = config
        self._random = random
        lines = [
            f"GET {target} HTTP/1.1",
            f"Host: {host}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {key.decode()}",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        self._request = "\r\n".join([*lines, "", ""]).encode("ascii")
        self._received = bytearray()
        self._searched = 0  # no head ends before this
        self._head_room = HEAD_BYTES
        # After a head that refuses: the status and how much of the body is still to come.
        self._refusal = 0
        self._body_bytes = REFUSAL_BYTES
        self.leftover = b""

    def data_to_send(self) -> bytes:
        """The request."""
        request, self._request = self._request, b""
        return request

    def receive_data(self, data: bytes, now: float) -> Sequence[WebSocket]:
        """Take bytes of the answer."""
        self._received += data
        while not self._refusal:
            end = self._received.find(b"\r\n\r\n", self._searched)
            if (end + 4 if end >= 0 else len(self._received)) > self._head_room:
                raise RemoteProtocolError("websocket", "the answer's head is too long")
            if end < 0:
                self._searched = max(0, len(self._received) - 3)
                return ()
            status, headers = _read_head(bytes(self._received[:end]))
            del self._received[: end + 4]
            self._searched = 0
            self._head_room -= end + 4
            if status == 101:
                self._check(headers)
                self.leftover = bytes(self._received)
                return (WebSocket(Role.CLIENT, self._config, now=now, random=self._random),)
            if status >= 200:
                self._refusal = status
                length = b"".join(headers.get(b"content-length", (b"",)))
                if length.isdigit() and len(length) < 10:
                    self._body_bytes = min(REFUSAL_BYTES, int(length))
        if len(self._received) >= self._body_bytes:
            raise self.refused()
        return ()

    def refused(self) -> RemoteProtocolError:
        """The error of the handshake if the connection ends now."""
        if self._refusal:
            text = bytes(self._received[: self._body_bytes]).decode("utf-8", "replace")
            return WebSocketRefused(self._refusal, text)
        return RemoteProtocolError("websocket", "no answer")

    def _check(self, headers: Mapping[bytes, Sequence[bytes]]) -> None:
        if not wants_websocket(headers) or list(headers.get(b"sec-websocket-accept", ())) != [self._accept]:
            raise WebSocketRefused(101, "the server agreed to something else")
        if b"sec-websocket-extensions" in headers or b"sec-websocket-protocol" in headers:
            raise WebSocketRefused(101, "the server wants an extension or a protocol that was not offered")


def _read_head(head: bytes) -> tuple[int, dict[bytes, list[bytes]]]:
    first, *lines = head.split(b"\r\n")
    status = _STATUS.fullmatch(first)
    headers: dict[bytes, list[bytes]] = {}
    if status is not None:
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon or not _NAME.fullmatch(name):
                break
            headers.setdefault(name.lower(), []).append(value.strip(b" \t"))
        else:
            return int(status[1]), headers
    raise RemoteProtocolError("websocket", "the answer is not HTTP/1.1")
