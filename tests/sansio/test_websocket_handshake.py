"""The opening handshake, ours against ours and against wsproto's, and servers that mean harm."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, Request

from dmsg.errors import LocalProtocolError, RemoteProtocolError
from dmsg.sansio.errors import WebSocketRefused
from dmsg.sansio.websocket import WebSocket, WebSocketConfig
from dmsg.sansio.websocket_handshake import (
    HEAD_BYTES,
    REFUSAL_BYTES,
    ClientHandshake,
    accept_value,
    server_answer,
    wants_websocket,
)
from dmsg.testing.strategies import cut_at

KEY = base64.b64encode(bytes(16))
HEADERS = {
    b"connection": [b"keep-alive, Upgrade"],
    b"upgrade": [b"WebSocket"],
    b"sec-websocket-version": [b"13"],
    b"sec-websocket-key": [KEY],
}


def handshake(target: str = "/?jwt", **options: Any) -> ClientHandshake:
    return ClientHandshake("relay", target, WebSocketConfig(), random=bytes, **options)


def headers_of(request: bytes) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for line in request.split(b"\r\n")[1:-2]:
        name, _, value = line.partition(b": ")
        found.setdefault(name.lower(), []).append(value)
    return found


def with_headers(**changes: Any) -> dict[bytes, list[bytes]]:
    changed = dict(HEADERS)
    for name, values in changes.items():
        changed[name.replace("_", "-").encode()] = values
    return {name: values for name, values in changed.items() if values}


AGREED = server_answer(HEADERS)


def test_the_accept_value_of_the_rfc() -> None:
    assert accept_value(b"dGhlIHNhbXBsZSBub25jZQ==") == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


def test_ours_agree_with_each_other() -> None:
    ours = handshake(headers={"User-Agent": "dmsg"})
    request = ours.data_to_send()
    assert request.startswith(b"GET /?jwt HTTP/1.1\r\nHost: relay\r\n") and b"\r\nUser-Agent: dmsg\r\n" in request
    assert ours.data_to_send() == b""
    headers = headers_of(request)
    assert wants_websocket(headers)
    [opened] = ours.receive_data(server_answer(headers) + b"\x82\x01x", 5.0)
    assert ours.leftover == b"\x82\x01x"
    assert opened.receive_data(ours.leftover, 5.0) == [b"x"]
    assert opened.next_timeout() == 25.0


def test_wsproto_agrees_with_our_client() -> None:
    ours, theirs = handshake(), WSConnection(ConnectionType.SERVER)
    theirs.receive_data(ours.data_to_send())
    [request] = theirs.events()
    assert isinstance(request, Request) and (request.host, request.target) == ("relay", "/?jwt")
    [opened] = ours.receive_data(theirs.send(AcceptConnection()), 0.0)
    assert opened.receive_data(theirs.send(BytesMessage(data=b"x")), 0.0) == [b"x"]


def test_wsproto_agrees_with_our_server() -> None:
    theirs = WSConnection(ConnectionType.CLIENT)
    theirs.receive_data(server_answer(headers_of(theirs.send(Request(host="relay", target="/")))))
    assert [type(event) for event in theirs.events()] == [AcceptConnection]


# --- what a server refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status", "text"),
    [
        (with_headers(sec_websocket_key=[]), 500, 'No "Sec-WebSocket-Key" header'),
        (with_headers(sec_websocket_version=[]), 500, 'No "Sec-WebSocket-Version: 13" header'),
        (with_headers(sec_websocket_version=[b"8"]), 500, 'No "Sec-WebSocket-Version: 13" header'),
        (with_headers(sec_websocket_version=[b"13", b"13"]), 500, 'No "Sec-WebSocket-Version: 13" header'),
        (with_headers(sec_websocket_key=[b"x"]), 400, 'bad "Sec-WebSocket-Key" header'),
        (with_headers(sec_websocket_key=[KEY + b"="]), 400, 'bad "Sec-WebSocket-Key" header'),
        (with_headers(sec_websocket_key=[b"\xff" * 24]), 400, 'bad "Sec-WebSocket-Key" header'),
        (with_headers(sec_websocket_key=[base64.b64encode(bytes(17))]), 400, 'bad "Sec-WebSocket-Key" header'),
        (with_headers(sec_websocket_key=[KEY, KEY]), 400, 'bad "Sec-WebSocket-Key" header'),
    ],
)
def test_requests_that_are_refused(headers: dict[bytes, list[bytes]], status: int, text: str) -> None:
    with pytest.raises(WebSocketRefused) as caught:
        server_answer(headers)
    assert (caught.value.status, caught.value.text) == (status, text)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        with_headers(upgrade=[]),
        with_headers(upgrade=[b"h2c"]),
        with_headers(connection=[]),
        with_headers(connection=[b"close"]),
        with_headers(connection=[b"upgraded"]),
    ],
)
def test_requests_for_something_else(headers: dict[bytes, list[bytes]]) -> None:
    assert not wants_websocket(headers)


# --- what a client refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "target", "headers"),
    [
        ("relay", "/ HTTP/1.1\r\nX: y", {}),
        ("relay", "/a b", {}),
        ("relay", "", {}),
        ("relay\r\n", "/", {}),
        ("relay", "/\xe4", {}),
        ("relay", "/", {"X": "y\r\nZ: a"}),
        ("relay", "/", {"X\n": "y"}),
    ],
)
def test_a_request_cannot_be_split(host: str, target: str, headers: dict[str, str]) -> None:
    with pytest.raises(LocalProtocolError):
        ClientHandshake(host, target, WebSocketConfig(), random=bytes, headers=headers)


@given(st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n"]), st.data())
def test_the_answer_may_come_in_any_pieces(before: bytes, data: st.DataObject) -> None:
    answer = before + AGREED + b"\x82\x01x"
    places = data.draw(st.lists(st.integers(0, len(answer)), max_size=9))
    ours, opened, behind = handshake(), [], b""
    for piece in cut_at(answer, places):
        if opened:
            behind += piece
        else:
            opened = list(ours.receive_data(piece, 0.0))
    [one] = opened
    assert isinstance(one, WebSocket) and ours.leftover + behind == b"\x82\x01x"


@pytest.mark.parametrize(
    "answer",
    [
        AGREED.replace(b"Upgrade: websocket\r\n", b""),
        AGREED.replace(b"Connection: Upgrade\r\n", b""),
        AGREED.replace(b"Accept: ", b"Accept: x"),
        AGREED.replace(b"Sec-WebSocket-Accept", b"X"),
        AGREED.replace(b"\r\n\r\n", b"\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n"),
        AGREED.replace(b"\r\n\r\n", b"\r\nSec-WebSocket-Protocol: rmb\r\n\r\n"),
    ],
)
def test_a_server_that_agrees_to_something_else_is_left(answer: bytes) -> None:
    with pytest.raises(WebSocketRefused) as caught:
        handshake().receive_data(answer, 0.0)
    assert caught.value.status == 101


@pytest.mark.parametrize(
    "answer",
    [
        b"\r\n\r\n",
        b"HTTP/1.0 101 x\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 601 x\r\n\r\n",
        b"HTTP/1.1 101 x\r\nno colon\r\n\r\n",
        b"HTTP/1.1 101 x\r\nbad name: 1\r\n\r\n",
        b"HTTP/1.1 101 x\r\n folded: 1\r\n\r\n",
        b"\x82\x01x\r\n\r\n",
    ],
)
def test_what_is_not_http_ends_it(answer: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=r"not HTTP/1\.1"):
        handshake().receive_data(answer, 0.0)


@pytest.mark.parametrize("line", [b"HTTP/1.1 100 Continue\r\n\r\n", b"A: b\r\n", b"x"])
def test_a_head_without_an_end_is_cut_at_the_first_byte_over_the_limit(line: bytes) -> None:
    ours = handshake()
    flood = b"HTTP/1.1 101 x\r\n" if line == b"A: b\r\n" else b""
    flood += line * (HEAD_BYTES + 1)
    assert ours.receive_data(flood[:HEAD_BYTES], 0.0) == ()
    with pytest.raises(RemoteProtocolError, match="head is too long"):
        ours.receive_data(flood[HEAD_BYTES : HEAD_BYTES + 1], 0.0)


def test_a_refusal_tells_status_and_text() -> None:
    with pytest.raises(WebSocketRefused) as caught:
        handshake().receive_data(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 5\r\n\r\nno 1\xffmore", 0.0)
    assert (caught.value.status, caught.value.text) == (401, "no 1\ufffd")
    assert str(caught.value) == "websocket: refused with status 401"


def test_a_refusal_s_text_is_cut_and_ends_with_the_connection() -> None:
    ours = handshake()
    assert ours.receive_data(b"HTTP/1.1 503 x\r\n\r\n" + b"t" * (REFUSAL_BYTES - 1), 0.0) == ()
    unfinished = ours.refused()
    assert isinstance(unfinished, WebSocketRefused) and unfinished.text == "t" * (REFUSAL_BYTES - 1)
    with pytest.raises(WebSocketRefused) as caught:
        ours.receive_data(b"tt", 0.0)
    assert caught.value.text == "t" * REFUSAL_BYTES
    assert str(handshake().refused()) == "websocket: no answer"
