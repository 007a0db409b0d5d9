"""A WebSocket of either role that is sent anything, the opening handshake of a client, and a site that takes WebSockets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET
from wsproto.frame_protocol import CloseReason, FrameProtocol, Opcode, ParseFailed

from dmsg.errors import RemoteProtocolError
from dmsg.glue.shell import Shell
from dmsg.glue.websocket import WebSocketShell, accept_websocket, asks_for_websocket
from dmsg.http.limits import HttpLimits
from dmsg.http.server import LimitedSite
from dmsg.sansio.errors import WebSocketRefused, WebSocketViolation
from dmsg.sansio.websocket import Role, WebSocket, WebSocketConfig
from dmsg.sansio.websocket_frames import Closed, apply_mask
from dmsg.sansio.websocket_handshake import HEAD_BYTES, ClientHandshake, accept_value, server_answer
from fuzz import words
from fuzz.choices import Choices, repeatable
from fuzz.memory_http import Complaints, Transport
from fuzz.oracles import built_bytes, check_memory

LIMIT_BYTES = 600
_MASK = b"\x01\x02\x04\x08"
_KEY = b"AAAAAAAAAAAAAAAAAAAAAA=="
DICTIONARY = (
    *words.HTTP,
    *(b"HTTP/1.1 101 \r\n", b"Upgrade: websocket\r\n", b"Connection: Upgrade\r\n"),
    *(b"Sec-WebSocket-Accept: " + accept_value(_KEY) + b"\r\n", b"\x82\xfe", b"\x82\xff", b"\x88\x82", b"\x03\xe8"),
)


def one_input(data: bytes) -> None:
    """The first byte says what reads: a client's handshake, a site from the first request on, or frames as a client or
    server, with or without text.

    A core raises nothing but its own errors, finds the same byte by byte and in one piece, keeps no more than a message
    may be long, and finds what wsproto does.
    """
    choices = Choices(data)
    how = choices.byte()
    if how & 1:
        (_site if how & 2 else _handshake)(choices)
        return
    role = Role.CLIENT if how & 2 else Role.SERVER
    config = WebSocketConfig(max_message_bytes=LIMIT_BYTES, text=bool(how & 4))
    pieces = choices.rest_in_pieces()
    stream = b"".join(pieces)
    whole = _open(role, config)
    found, said = _read(whole, [stream]), _written(whole)
    for other in (pieces, [stream[at : at + 1] for at in range(len(stream))]):
        one = _open(role, config)
        assert _read(one, other) == found
        assert one.state is whole.state and _written(one) == said
    check_memory(found, len(stream))
    assert sum(len(one) for one in found[0] if isinstance(one, bytes)) <= len(stream)
    _as_wsproto(role, stream + bytes(20))


def _open(role: Role, config: WebSocketConfig) -> WebSocket:
    return WebSocket(role, config, now=0.0, random=repeatable(b""))


def _read(one: WebSocket, pieces: list[bytes]) -> tuple[list[Any], str]:
    """All events, and the violation that ended it. What the core holds never exceeds its limit."""
    events: list[Any] = []
    for piece in pieces:
        try:
            events += one.receive_data(piece, 0.0)
        except WebSocketViolation as violation:
            one.give_up(violation.code, violation.reason)
            return [*events, *violation.events], violation.reason
        held = built_bytes([getattr(one, name) for name in ("_fragments", "_frame", "_head")])
        assert held <= 2_000 + 3 * LIMIT_BYTES, held
    return events, ""


def _written(one: WebSocket) -> bytes:
    return b"".join(iter(one.data_to_send, b""))


def _as_wsproto(role: Role, stream: bytes) -> None:
    """Without our limits the two find the same messages, and both a violation or none."""
    judge = FrameProtocol(role is Role.CLIENT, [])
    expected: list[Any] = []
    parts: list[Any] = []
    code: CloseReason | None = None
    judge.receive_bytes(stream)
    try:
        for frame in judge.received_frames():
            if frame.opcode is Opcode.CLOSE:
                expected.append(Closed(*frame.payload))  # type: ignore[misc]
                break
            if not frame.opcode.iscontrol():
                parts.append(frame.payload)
                if frame.message_finished:
                    expected.append(("" if frame.opcode is Opcode.TEXT else b"").join(parts))
                    parts = []
    except ParseFailed as problem:
        code = problem.code
    events, reason = _read_unlimited(role, stream)
    if reason == "too many frames without data":
        return
    if code is CloseReason.INVALID_FRAME_PAYLOAD_DATA:  # found before the text is complete; we wait for its end
        assert [one for one in events if not isinstance(one, Closed)] == expected
    else:
        assert events == expected and bool(reason) == (code is not None), (events, reason, expected, code)


def _read_unlimited(role: Role, stream: bytes) -> tuple[list[Any], str]:
    one = _open(role, WebSocketConfig(max_message_bytes=2**63 - 1, text=True))
    try:
        return list(one.receive_data(stream, 0.0)), ""
    except WebSocketViolation as violation:
        return list(violation.events), violation.reason


def _handshake(choices: Choices) -> None:
    pieces = choices.rest_in_pieces()
    stream = b"".join(pieces)
    whole = _shake([stream])
    assert _shake(pieces) == whole
    assert _shake([stream[at : at + 1] for at in range(len(stream))]) == whole


def _shake(pieces: list[bytes]) -> tuple[str, bytes]:
    """What became of it, and what came behind the answer."""
    one = ClientHandshake("relay", "/", WebSocketConfig(), random=bytes)
    opened = False
    behind = b""
    for piece in pieces:
        if opened:
            behind += piece
            continue
        try:
            opened = bool(one.receive_data(piece, 0.0))
        except RemoteProtocolError as error:
            return f"{error} {getattr(error, 'text', '')}", b""
        assert opened or len(one._received) <= HEAD_BYTES
        behind = one.leftover
    return ("open" if opened else str(one.refused())), behind


class _Echo(Resource):
    """Takes every WebSocket at once, or a turn later, and sends its messages back."""

    isLeaf = True

    def __init__(self, clock: Clock, late: bool) -> None:
        super().__init__()
        self.clock, self.late = clock, late
        self.open = 0
        self.ended: set[Shell] = set()

    def render(self, request: Any) -> bytes | int:
        if not asks_for_websocket(request):
            return b"no WebSocket"
        if self.late:
            self.clock.callLater(0, self._accept, request)
            return NOT_DONE_YET
        return self._accept(request) or NOT_DONE_YET

    def _accept(self, request: Any) -> bytes | None:
        try:
            accept_websocket(request, self, self.clock, WebSocketConfig(max_message_bytes=LIMIT_BYTES))
        except WebSocketRefused as refused:
            request.setResponseCode(refused.status)
            if not self.late:
                return refused.text.encode()
            request.write(refused.text.encode())
            request.finish()
        except ConnectionError:
            assert self.late
        else:
            self.open += 1
        return None

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        assert shell not in self.ended
        for event in events:
            if isinstance(event, bytes):
                cast(WebSocketShell, shell).send(event)
            else:
                assert isinstance(event, Closed)
                self.ended.add(shell)

    def after_read(self, shell: Shell) -> None:
        shell.flush()

    def flushed(self, shell: Shell) -> None:
        assert not shell.lost

    def connection_lost(self, shell: Shell, error: object, reason: object) -> None:
        self.open -= 1


def _site(choices: Choices) -> None:
    """Nothing is logged as an error, and when the connection is over nothing of it is left."""
    late = choices.flag()
    pieces = choices.rest_in_pieces()
    clock = Clock()
    echo = _Echo(clock, late)
    site: Any = LimitedSite(echo, reactor=clock, limits=HttpLimits(body_bytes=100))
    site.startFactory()
    transport = Transport()
    channel = site.buildProtocol(transport.getPeer())
    with Complaints() as complaints:
        channel.makeConnection(transport)
        for piece in pieces:
            if transport.disconnecting:
                break
            channel.dataReceived(piece)
            clock.advance(0)
        answer = transport.value()
        assert not answer or answer.startswith(b"HTTP/1."), answer[:80]
        clock.advance(30)
        channel.connectionLost(Failure(ConnectionDone()))
        clock.advance(0)
        site.stopFactory()
    assert not complaints.found, complaints.found[0]
    assert echo.open == 0 and site.bodies == 0 and site.connections == 0
    assert not [call for call in clock.getDelayedCalls() if call.active()]


def _frame(first: int, payload: bytes, masked: bool) -> bytes:
    size = len(payload)
    bit = 0x80 if masked else 0
    head = bytes((first, bit | size)) if size < 126 else bytes((first, bit | 126)) + size.to_bytes(2, "big")
    return head + (_MASK + apply_mask(payload, _MASK) if masked else payload)


def seeds() -> Iterator[bytes]:
    """Every kind of frame, messages of several, what is one byte too long, and answers to a handshake."""
    for how, masked in ((0, True), (2, False), (4, True), (6, False)):
        for stream in (
            [(0x82, b"one"), (0x82, bytes(125)), (0x82, bytes(126)), (0x82, bytes(LIMIT_BYTES))],
            [(0x02, b"a"), (0x89, b"ping"), (0x00, b""), (0x80, b"b"), (0x8A, b"")],
            [(0x81, "ä".encode()), (0x01, b"\xc3"), (0x80, b"\xa4"), (0x88, b"\x03\xe8bye")],
            [(0x02, bytes(LIMIT_BYTES)), (0x80, b"x")],
            [(0x88, b""), (0x82, b"late")],
            [(0x88, b"\x03\xed")],
            [(0xC2, b"rsv")],
            [(0x83, b"")],
            [(0x09, b"")],
        ):
            frames = b"".join(_frame(first, payload, masked) for first, payload in stream)
            for cut in (0, 3):
                yield bytes((how, cut)) + frames
        bit = 0x80 if masked else 0
        yield bytes((how, 0, 0x82, bit | 127)) + (2**40).to_bytes(8, "big")
        yield bytes((how, 0)) + _frame(0x89, b"", masked) * 120
    agreed = server_answer({b"sec-websocket-key": [_KEY], b"sec-websocket-version": [b"13"]})
    for answer in (
        agreed + b"\x82\x01x",
        b"HTTP/1.1 100 Continue\r\n\r\n" + agreed,
        b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 11\r\n\r\nmissing jwt",
        b"HTTP/1.1 503 Busy\r\n\r\nfull",
        agreed.replace(b"Accept: ", b"Accept: x"),
        b"HTTP/1.1 101 x\r\nno colon\r\n\r\n",
    ):
        yield b"\x01\x00" + answer
        yield b"\x01\x05" + answer
    request = b"GET /?a HTTP/1.1\r\n%s%s%s\r\n" % (
        b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
        b"Sec-WebSocket-Version: 13\r\n",
        b"Sec-WebSocket-Key: %s\r\n" % _KEY,
    )
    messages = b"".join(_frame(first, payload, True) for first, payload in ((0x82, b"a"), (0x02, b"b"), (0x80, b"c")))
    for stream in (
        request + messages + _frame(0x88, b"\x03\xe8", True),
        request + messages + b"\xff\xff",
        request + _frame(0x89, b"", True) * 120,
        b"GET / HTTP/1.1\r\n\r\n" * 2 + request + messages,
        request.replace(b"13", b"12") + b"GET / HTTP/1.1\r\n\r\n",
        request[:-2] + b"Content-Length: 1\r\n\r\nx" + messages,
        request[:-2] + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + messages,
        request + request,
    ):
        for late in (b"\x00", b"\x01"):
            yield b"\x03" + late + b"\x00" + stream
            yield b"\x03" + late + b"\x07" + stream
