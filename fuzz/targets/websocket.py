"""A WebSocket of either role with arbitrary data, the opening handshake of a client, and a site with WebSockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from dmsg.sansio.websocket import Role, State, WebSocket, WebSocketConfig
from dmsg.sansio.websocket_frames import CONTROL_BYTES, Closed, apply_mask, close_payload, mask_in_place
from dmsg.sansio.websocket_handshake import HEAD_BYTES, ClientHandshake, accept_value, server_answer
from fuzz import words
from fuzz.choices import Choices, repeatable
from fuzz.memory_http import Complaints, Transport
from fuzz.oracles import built_bytes, check_memory

LIMIT_BYTES = 600
_MASK = b"\x01\x02\x04\x08"
#: Lengths of messages at which heads and masks change, and a byte beside.
_SIZES = (0, 1, 125, 126, 767, 768, 769, 771, 16_383, 16_384, 16_387, 65_535, 65_536)
_TEXT = repeatable(b"text")(max(_SIZES))
_KEY = b"AAAAAAAAAAAAAAAAAAAAAA=="
DICTIONARY = (
    *words.HTTP,
    *(b"HTTP/1.1 101 \r\n", b"Upgrade: websocket\r\n", b"Connection: Upgrade\r\n"),
    *(b"Sec-WebSocket-Accept: " + accept_value(_KEY) + b"\r\n", b"\x82\xfe", b"\x82\xff", b"\x88\x82", b"\x03\xe8"),
)


def one_input(data: bytes) -> None:
    """The first byte chooses the reader: a client's handshake, a site from the first request on, or frames as a client or
    server, with or without text.

    A core raises only its own errors, finds the same byte by byte and in one piece, buffers no more than the longest
    message, and agrees with wsproto.
    """
    choices = Choices(data)
    how = choices.byte()
    if how & 1:
        (_site if how & 2 else _handshake)(choices)
        return
    role = Role.CLIENT if how & 2 else Role.SERVER
    config = WebSocketConfig(max_message_bytes=LIMIT_BYTES, text=bool(how & 4), message_timeout_s=10.0)
    pieces = choices.rest_in_pieces()
    stream = b"".join(pieces)
    whole = _open(role, config)
    found, said = _read(whole, [stream]), _written(whole)
    for other in (pieces, [stream[at : at + 1] for at in range(len(stream))]):
        one = _open(role, config)
        assert _read(one, other) == found
        assert one.state is whole.state and _written(one) == said
    check_memory(found, len(stream))
    model = _Model(role, config, stream)
    assert found[0] == model.events
    assert _parsed(role, said) == model.answers(found[1])
    _check_end(role, config, stream, model, whole)
    _as_wsproto(role, stream + bytes(20))
    _check_frames(stream)


def _open(role: Role, config: WebSocketConfig) -> WebSocket:
    return WebSocket(role, config, now=0.0, random=repeatable(b""))


def _read(one: WebSocket, pieces: list[bytes]) -> tuple[list[Any], str]:
    """All events, and the violation that ended it. The core's buffer never exceeds its limit."""
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


class _Model:
    """A simple reader of all frames of a stream at once: events, frames sent, and the place where it ends."""

    def __init__(self, role: Role, config: WebSocketConfig, stream: bytes) -> None:
        self.role, self.config, self.stream = role, config, stream
        self.events: list[bytes | str | Closed] = []
        self.code: int | None = None  # of a violation
        self.at = 0  # bytes that were looked at when it ended
        self.kind = 0  # of a message of several frames
        self.parts: list[bytes] = []
        self.pong: bytes | None = None
        self.close: bytes | None = None
        self.idle = 0
        self.held = 0
        while self.code is None and self.close is None and self._frame():
            pass

    @property
    def waits(self) -> bool:
        """Whether something has begun that is not complete."""
        return self.code is None and self.close is None and bool(self.kind or self.at < len(self.stream))

    def answers(self, reason: str) -> list[tuple[int, bytes]]:
        """The frames that are sent: a close, or the last ping's answer."""
        if self.code is not None:
            return [(0x88, self.code.to_bytes(2, "big") + reason.encode())]
        if self.close is not None:
            return [(0x88, self.close[:2])]
        return [] if self.pong is None else [(0x8A, self.pong)]

    def _frame(self) -> bool:
        """Read a frame, if it is all there. A violation is found at the first byte that shows it."""
        data = self.stream[self.at :]
        self.held = len(b"".join(self.parts))
        if len(data) < 2:
            return False
        final, opcode, masked, short = data[0] >> 7, data[0] & 15, data[1] >> 7, data[1] & 127
        if data[0] & 0x70 or opcode not in (0, 1, 2, 8, 9, 10):
            return self._fail(1002, 2)
        if opcode >= 8 and (not final or short > 125):
            return self._fail(1002, 2)
        if opcode < 8 and (opcode == 0) != bool(self.kind):
            return self._fail(1002, 2)
        if opcode == 1 and not self.config.text:
            return self._fail(1003, 2)
        if masked != (self.role is Role.SERVER):
            return self._fail(1002, 2)
        wide = {126: 2, 127: 8}.get(short, 0)
        if len(data) < 2 + wide:
            return False
        size = int.from_bytes(data[2 : 2 + wide], "big") if wide else short
        if wide and size < (126 if wide == 2 else 1 << 16):
            return self._fail(1002, 2 + wide)
        if opcode < 8 and self.held + size > self.config.max_message_bytes:
            return self._fail(1009, 2 + wide)
        start = 2 + wide + 4 * masked
        if len(data) < start:
            return False
        if len(data) < start + size:
            self.held += len(data) - start
            return False
        payload = data[start : start + size]
        if masked:
            payload = _exclusive_or(payload, data[start - 4 : start])
        self._done(final, opcode, payload, start + size)
        return True

    def _done(self, final: int, opcode: int, payload: bytes, size: int) -> None:
        if opcode == 8:
            self._closed(payload, size)
            return
        if opcode > 8 or (not final and not payload):
            self.idle += 1
            if self.idle > 100:
                self._fail(1008, size)
                return
        if opcode == 9:
            self.pong = payload
        if opcode < 8:
            self.kind = self.kind or opcode
            self.parts.append(payload)
            if final:
                message = b"".join(self.parts)
                try:
                    self.events.append(message if self.kind == 2 else message.decode("utf-8"))
                except UnicodeDecodeError:
                    self._fail(1007, size)
                    return
                self.kind, self.parts = 0, []
        self.at += size

    def _closed(self, payload: bytes, size: int) -> None:
        code = int.from_bytes(payload[:2], "big") if payload else 1005
        known = 3000 <= code <= 4999 or code in (1000, 1001, 1002, 1003, *range(1007, 1014))
        if payload and (len(payload) == 1 or not known):
            self._fail(1002, size)
            return
        try:
            self.events.append(Closed(code, payload[2:].decode("utf-8")))
        except UnicodeDecodeError:
            self._fail(1007, size)
            return
        self.at += size
        self.close, self.pong = payload, None

    def _fail(self, code: int, size: int) -> bool:
        self.code = code
        self.at += size
        return False


def _exclusive_or(data: bytes, mask: bytes) -> bytes:
    return bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))


def _parsed(role: Role, sent: bytes) -> list[tuple[int, bytes]]:
    """The frames that one side has sent, each with its first byte; they are masked exactly if that is a client."""
    found: list[tuple[int, bytes]] = []
    while sent:
        masked, size, at = sent[1] >> 7, sent[1] & 127, 2
        assert masked == (role is Role.CLIENT)
        if size > 125:
            wide = 2 if size == 126 else 8
            size, at = int.from_bytes(sent[2 : 2 + wide], "big"), 2 + wide
            assert size >= (126 if wide == 2 else 1 << 16)
        payload = sent[at + 4 * masked :][:size]
        assert len(payload) == size
        found.append((sent[0], _exclusive_or(payload, sent[at : at + 4]) if masked else payload))
        sent = sent[at + 4 * masked + size :]
    return found


def _check_end(role: Role, config: WebSocketConfig, stream: bytes, model: _Model, whole: WebSocket) -> None:
    """Checks the buffer and the timeouts; a violation is found at its first byte and has the code of its kind."""
    over = model.code is not None or model.close is not None
    assert not over or not (whole._head or whole._frame or whole._fragments)
    assert whole.state is (State.CLOSED if over else State.OPEN)
    assert whole.incoming_bytes == (0 if over else model.held)
    assert whole.queued_bytes == 0 and not whole.pong_waits and not whole.overloaded
    one = _open(role, config)
    if model.code is None:
        _check_our_close(role, config, stream, model)
        if model.idle and not over and not model.waits:
            _check_window(role, config, stream, model)
        assert one.receive_data(stream, 1.0) == model.events
        assert one.pong_waits == (model.pong is not None)
        assert one.next_timeout() == (None if over else 11.0 if model.waits else 20.0)
        if not over:
            one.handle_timeout(10.75)
            assert one.next_timeout() == (11.0 if model.waits else 21.0)
            assert _fails(lambda: one.handle_timeout(11.0)) == (1008 if model.waits else None)
        return
    events = list(one.receive_data(stream[: model.at - 1], 1.0))
    assert events == model.events and one.state is State.OPEN
    assert _fails(lambda: one.receive_data(stream[model.at - 1 : model.at], 1.0)) == model.code
    assert one.incoming_bytes == 0


def _check_window(role: Role, config: WebSocketConfig, stream: bytes, model: _Model) -> None:
    """Frames without data are counted together for 10 seconds. The first one behind them begins a new window."""
    for now, idle in ((9.75, 2 * model.idle), (10.0, model.idle)):
        one = _open(role, config)
        one.receive_data(stream, 0.0)
        assert _fails(lambda one=one, now=now: one.receive_data(stream, now)) == (1008 if idle > 100 else None)  # type: ignore[misc]


def _check_our_close(role: Role, config: WebSocketConfig, stream: bytes, model: _Model) -> None:
    """If we close half way, later frames are dropped except the peer's close, for which there is no event then."""
    one = _open(role, config)
    cut = len(stream) // 2
    events = one.receive_data(stream[:cut], 0.0)
    assert events == model.events[: len(events)]
    closed = one.state is State.CLOSED
    one.close(3_000, "bye")
    assert one.state is (State.CLOSED if closed else State.CLOSING)
    answers = model.answers("") if closed else [(0x88, b"\x0b\xb8bye")]
    for piece in (stream[cut : cut + 3], stream[cut + 3 :]):
        assert not one.receive_data(piece, 0.0)
        assert one.incoming_bytes <= CONTROL_BYTES
    assert (one.state is State.CLOSED) == (model.close is not None)
    assert _parsed(role, _written(one)) == answers


def _fails(call: Callable[[], object]) -> int | None:
    try:
        call()
    except WebSocketViolation as violation:
        return violation.code
    return None


def _check_frames(stream: bytes) -> None:
    """Masks, heads and closes of every critical length: they read the same a byte at a time."""
    size = _SIZES[len(stream) % len(_SIZES)]
    text, mask = _TEXT[:size], (stream[:4] + _MASK)[:4]
    masked = apply_mask(text, mask)
    assert masked[:1024] == _exclusive_or(text[:1024], mask) and masked[-8:] == _last(text, mask)
    assert len(masked) == size and apply_mask(masked, mask) == text
    again = bytearray(text)
    mask_in_place(again, mask)
    assert again == masked
    one = _open(Role.CLIENT, WebSocketConfig())
    one.send(text)
    head = one.data_to_send()
    wide = 0 if size < 126 else 2 if size < 65_536 else 8
    assert len(head) == 6 + wide + size and one.queued_bytes == 0
    assert head[:2] == bytes((0x82, 0x80 | {0: size, 2: 126, 8: 127}[wide]))
    assert not wide or head[2 : 2 + wide] == size.to_bytes(wide, "big")
    server = _open(Role.SERVER, WebSocketConfig())
    code = int.from_bytes(stream[:2], "big")
    reason = stream.decode("utf-8", "replace")
    payload = close_payload(code, reason)
    server.send(reason)
    assert _parsed(Role.SERVER, server.data_to_send()) == [(0x81, reason.encode())]
    if code == 1005:
        assert payload == b""
    else:
        told = payload[2:].decode("utf-8")
        assert payload[:2] == stream[:2].rjust(2, b"\0") and len(payload) <= 125
        assert reason.startswith(told)
        assert told == reason or len((told + reason[len(told)]).encode()) > 123


def _last(text: bytes, mask: bytes) -> bytes:
    at = max(len(text) - 8, 0)
    return bytes(text[one] ^ mask[one % 4] for one in range(at, len(text)))


def _as_wsproto(role: Role, stream: bytes) -> None:
    """Without our limits, both cores find the same messages, and both or neither a violation."""
    judge = FrameProtocol(role is Role.CLIENT, [])
    expected: list[Any] = []
    parts: list[Any] = []
    code: CloseReason | None = None
    judge.receive_bytes(stream)
    try:
        for frame in judge.received_frames():
            if frame.opcode is Opcode.CLOSE:
                expected.append(Closed(*frame.payload))
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
    """The result of a handshake, and the bytes after the answer."""
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
        super().__init__()  # type: ignore[no-untyped-call]
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
    """Nothing is logged as an error, and nothing of a connection is left after its end."""
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
    """Every kind of frame, messages of several frames, lengths one byte too great, and answers to a handshake."""
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
        closes = [code.to_bytes(2, "big") for code in (999, 1000, 1004, 1007, 1013, 1014, 2999, 3000, 4999, 5000)]
        for payload in (*closes, b"\x03", b"\x03\xe8" + b"x" * 123, b"\x03\xe8\xff", b"\x03\xe8" + "ä".encode()):
            yield bytes((how, 0)) + _frame(0x82, b"a", masked) + _frame(0x88, payload, masked)
        for number in (98, 99):  # with a ping and an empty message behind it 100, and 101
            frames = _frame(0x02, b"", masked) + _frame(0x00, b"", masked) * number
            yield bytes((how, 0)) + frames + _frame(0x89, b"p", masked) + _frame(0x80, b"", masked)
        for stream in (
            [(0x82, bytes(LIMIT_BYTES + 1))],
            [(0x02, bytes(LIMIT_BYTES - 1)), (0x00, b"x"), (0x80, b"")],
            [(0x02, bytes(LIMIT_BYTES - 1)), (0x89, b"in between"), (0x00, b"xy")],
            [(0x02, b"a"), (0x82, b"b")],
            [(0x80, b"a")],
            [(0x89, bytes(125)), (0x8A, bytes(125)), (0x82, bytes(300)), (0x88, b"")],
            [(0x89, bytes(126))],
            [(0x01, b"a"), (0x80, b"\xff")],
            [(0x02, bytes(300)), (0x80, bytes(250)), (0x88, b"\x0f\xa0")],
        ):
            yield bytes((how, 0)) + b"".join(_frame(first, payload, masked) for first, payload in stream)
        yield bytes((how, 0)) + _frame(0x02, bytes(590), masked) + _frame(0x88, b"\x03\xe8" + b"x" * 60, masked)
        for number in (50, 51):
            yield bytes((how, 0)) + _frame(0x89, b"", masked) * number
        good = _frame(0x82, bytes(200), masked)
        yield bytes((how, 0)) + good * 3 + good[:-1]
        yield bytes((how, 0)) + good + good[:3]
        yield bytes((how, 0)) + good + _frame(0x82, b"a", not masked)
        yield bytes((how, 0, 0x82, (0x80 if masked else 0) | 126, 0, 125))
        yield bytes((how, 0, 0x82, (0x80 if masked else 0) | 127)) + (0xFFFF).to_bytes(8, "big")
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
    for requests in (
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
            yield b"\x03" + late + b"\x00" + requests
            yield b"\x03" + late + b"\x07" + requests
