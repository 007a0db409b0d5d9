"""WebSocket frames, messages, closes and times, without a socket; wsproto is the judge of what is a violation."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wsproto.frame_protocol import CloseReason, FrameProtocol, Opcode, ParseFailed

from dmsg.errors import LocalProtocolError
from dmsg.sansio.errors import KeepaliveLost, WebSocketViolation
from dmsg.sansio.websocket import IDLE_FRAMES, IDLE_WINDOW_S, WRITE_BYTES, Role, State, WebSocket, WebSocketConfig
from dmsg.sansio.websocket_frames import CloseCode, Closed, apply_mask, close_payload
from dmsg.testing.strategies import cut_at

MASK = b"\x37\xfa\x21\x3d"
MIB = 1024 * 1024


def fixed(size: int) -> bytes:
    return (MASK * size)[:size]


def server(**config: Any) -> WebSocket:
    return WebSocket(Role.SERVER, WebSocketConfig(**config), now=0.0)


def client(**config: Any) -> WebSocket:
    return WebSocket(Role.CLIENT, WebSocketConfig(**config), now=0.0, random=fixed)


def frame(first: int, payload: bytes = b"", *, masked: bool = True, declared: int | None = None) -> bytes:
    """A frame as it stands on the wire; ``declared`` is a length it claims in place of its own."""
    size = len(payload) if declared is None else declared
    bit = 0x80 if masked else 0
    if size < 126:
        head = bytes((first, bit | size))
    elif size < 65_536:
        head = struct.pack("!BBH", first, bit | 126, size)
    else:
        head = struct.pack("!BBQ", first, bit | 127, size)
    return head + (MASK + apply_mask(payload, MASK) if masked else payload)


def read(one: WebSocket, pieces: list[bytes]) -> tuple[list[Any], str]:
    """All events, and what the violation is called, if there was one."""
    events: list[Any] = []
    for piece in pieces:
        try:
            events += one.receive_data(piece, 0.0)
        except WebSocketViolation as violation:
            return [*events, *violation.events], violation.reason
    return events, ""


def violation(one: WebSocket, data: bytes, now: float = 0.0) -> tuple[str, int]:
    with pytest.raises(WebSocketViolation) as caught:
        one.receive_data(data, now)
    return caught.value.reason, caught.value.code


# --- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sender", "receiver"), [(client, server), (server, client)])
@pytest.mark.parametrize("size", [0, 1, 125, 126, 2_047, 2_048, 2_049, 16_387, 65_535, 65_536, MIB])
def test_a_message_of_any_length_arrives(
    sender: Callable[[], WebSocket], receiver: Callable[[], WebSocket], size: int
) -> None:
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    one = sender()
    one.send(message)
    assert receiver().receive_data(one.data_to_send(), 0.0) == [message]


def test_the_frames_of_the_rfc() -> None:
    """RFC 6455, section 5.7."""
    assert client(text=True).receive_data(bytes.fromhex("810548656c6c6f"), 0) == ["Hello"]
    assert server(text=True).receive_data(bytes.fromhex("818537fa213d7f9f4d5158"), 0) == ["Hello"]
    assert client(text=True).receive_data(bytes.fromhex("010348656c80026c6f"), 0) == ["Hello"]
    ours, theirs = server(), client()
    ours.send("Hello")
    theirs.send("Hello")
    assert ours.data_to_send().hex() == "810548656c6c6f"
    assert theirs.data_to_send().hex() == "818537fa213d7f9f4d5158"
    ours.receive_data(bytes.fromhex("898537fa213d7f9f4d5158"), 0)
    assert ours.data_to_send().hex() == "8a0548656c6c6f"
    ours.send(bytes(256))
    assert ours.data_to_send() == bytes.fromhex("827e0100") + bytes(256)
    ours.send(bytes(65_536))
    assert ours.data_to_send() == bytes.fromhex("827f0000000000010000") + bytes(65_536)


def test_the_head_of_the_handshake_is_sent_before_the_first_frame() -> None:
    ours = WebSocket(Role.SERVER, WebSocketConfig(), now=0.0, head=b"HTTP/1.1 101\r\n\r\n")
    ours.send(b"x")
    assert ours.queued_bytes == 19
    ours.receive_data(frame(0x89), 0.0)
    assert b"".join(iter(ours.data_to_send, b"")) == b"HTTP/1.1 101\r\n\r\n\x8a\x00\x82\x01x"
    assert ours.queued_bytes == 0


def test_each_frame_of_a_client_has_a_mask_of_its_own() -> None:
    drawn = [bytes((number,)) * 4 for number in range(256)]
    theirs = WebSocket(Role.CLIENT, WebSocketConfig(), now=0.0, random=lambda size: b"".join(drawn)[:size])
    masks = set()
    for _ in range(256):
        theirs.send(b"")
        masks.add(theirs.data_to_send()[2:])
    assert masks == set(drawn)
    with pytest.raises(LocalProtocolError):
        WebSocket(Role.CLIENT, WebSocketConfig(), now=0.0)


# --- in any pieces, and as wsproto reads it ------------------------------------------------------------------------------

FIRST_BYTES = st.sampled_from([0x82, 0x81, 0x02, 0x01, 0x00, 0x80, 0x89, 0x8A]) | st.sampled_from(
    [0x88, 0x08, 0x83, 0xC2, 0xA2, 0x92, 0x8B, 0x09]
)
PAYLOADS = st.binary(max_size=8) | st.sampled_from(
    [bytes(125), bytes(126), bytes(800), b"\x03\xe8", b"\x03\xed", b"\x0f\xa0ok", b"\xff", "ä".encode()]
)
FRAMES = st.builds(
    lambda first, payload, flip: (
        frame(first, payload, masked=True) if not flip else frame(first, payload, masked=False)
    ),
    FIRST_BYTES,
    PAYLOADS,
    st.integers(0, 9).map(lambda number: number == 0),
)
STREAMS = st.lists(FRAMES | st.binary(max_size=3), max_size=8).map(b"".join)


@given(STREAMS, st.sampled_from([server, client]), st.booleans(), st.lists(st.integers(0, 900), max_size=12))
def test_in_any_pieces_the_same_is_read(
    stream: bytes, side: Callable[..., WebSocket], text: bool, places: list[int]
) -> None:
    whole, single, cut = (side(text=text, max_message_bytes=900) for _ in range(3))
    expected = read(whole, [stream])
    assert read(single, [stream[at : at + 1] for at in range(len(stream))]) == expected
    assert read(cut, cut_at(stream, places)) == expected
    assert whole.data_to_send() == single.data_to_send() == cut.data_to_send()


def as_wsproto_reads(stream: bytes, *, is_client: bool) -> tuple[list[Any], CloseReason | None]:
    """Messages and the close, and the code of the violation that ended it."""
    judge = FrameProtocol(is_client, [])
    events: list[Any] = []
    parts: list[Any] = []
    judge.receive_bytes(stream)
    try:
        for one in judge.received_frames():
            if one.opcode is Opcode.CLOSE:
                return [*events, Closed(*one.payload)], None
            if not one.opcode.iscontrol():
                parts.append(one.payload)
                if one.message_finished:
                    events.append("".join(parts) if one.opcode is Opcode.TEXT else b"".join(parts))
                    parts = []
    except ParseFailed as problem:
        return events, problem.code
    return events, None


@given(STREAMS, st.booleans())
def test_wsproto_reads_the_same(stream: bytes, is_client: bool) -> None:
    # It looks at a frame when its head is complete, we at the first byte: so some bytes follow.
    stream += bytes(20)
    expected, code = as_wsproto_reads(stream, is_client=is_client)
    ours = client if is_client else server
    events, reason = read(ours(text=True, max_message_bytes=2**63 - 1), [stream])
    if code is CloseReason.INVALID_FRAME_PAYLOAD_DATA:
        # It decodes text while it comes, and we when it is complete, or not at all if a close comes before that.
        events = [event for event in events if not isinstance(event, Closed)]
        assert events == expected
    else:
        assert (events, bool(reason)) == (expected, code is not None)


@given(st.lists(st.binary(max_size=300) | st.sampled_from([bytes(70_000)]), max_size=4), st.booleans())
def test_wsproto_reads_what_we_write(messages: list[bytes], is_client: bool) -> None:
    ours = (client if is_client else server)()
    for message in messages:
        ours.send(message)
    ours.close(4000, "done")
    written = b"".join(iter(ours.data_to_send, b""))
    assert as_wsproto_reads(written, is_client=not is_client) == ([*messages, Closed(4000, "done")], None)


# --- limits ------------------------------------------------------------------------------------------------------------


def test_an_endless_message_is_cut_at_the_first_byte_over_the_limit() -> None:
    ours = server(max_message_bytes=1000)
    assert ours.receive_data(frame(0x02) + frame(0x00, bytes(900)) + frame(0x00, bytes(100)), 0.0) == []
    # The next fragment is refused by its head, before its mask and its byte.
    assert violation(ours, b"\x00\x81") == ("message too long", 1009)


@pytest.mark.parametrize("size", [1001, 65_535, 65_536, 2**63, 2**64 - 1])
def test_a_frame_that_declares_too_much_is_refused_before_its_payload(size: int) -> None:
    head = frame(0x82, b"", declared=size)[: 4 if size < 65_536 else 10]
    ours = server(max_message_bytes=1000)
    assert ours.receive_data(head[:-1], 0.0) == []
    assert violation(ours, head[-1:]) == ("message too long", 1009)


def test_the_limit_is_one_message_s() -> None:
    ours = server(max_message_bytes=1000)
    full = frame(0x02, bytes(400)) + frame(0x00, bytes(600)) + frame(0x80)
    assert ours.receive_data(full + full + frame(0x82, bytes(1000)), 0.0) == [bytes(1000)] * 3


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (frame(0x82, b"x", masked=False), "not masked"),
        (frame(0x82, bytes(126), masked=False)[:2], "not masked"),
        (frame(0x89, b"x", masked=False), "not masked"),
        (b"\xc2\x80", "reserved bit"),
        (b"\xa2\x80", "reserved bit"),
        (b"\x92\x80", "reserved bit"),
        (b"\x83\x80", "unknown opcode"),
        (b"\x8b\x80", "unknown opcode"),
        (b"\x09\x80", "fragmented control frame"),
        (b"\x89\xfe", "long control frame"),
        (b"\x88\xff", "long control frame"),
        (b"\x80\x80", "continuation of nothing"),
        (frame(0x02) + b"\x82\x80", "message within a message"),
        (frame(0x02) + b"\x02\x80", "message within a message"),
        (b"\x82\xfe\x00\x7d", "length in too many bytes"),
        (b"\x82\xff" + (65_535).to_bytes(8, "big"), "length in too many bytes"),
        (frame(0x88, b"\x03"), "close code"),
        (frame(0x88, b"\x03\xe7"), "close code"),
        (frame(0x88, b"\x03\xed"), "close code"),
        (frame(0x88, b"\x03\xee"), "close code"),
        (frame(0x88, b"\x07\xd0"), "close code"),
        (frame(0x88, b"\x13\x88"), "close code"),
    ],
)
def test_violations_are_seen_at_once_and_what_came_before_is_kept(data: bytes, reason: str) -> None:
    ours = server()
    with pytest.raises(WebSocketViolation) as caught:
        ours.receive_data(frame(0x82, b"before") + data, 0.0)
    assert (caught.value.reason, caught.value.code) == (reason, CloseCode.PROTOCOL_ERROR)
    assert caught.value.events == [b"before"]


@pytest.mark.parametrize("size", [1, 126])
def test_a_client_takes_no_masked_frame(size: int) -> None:
    assert violation(client(), frame(0x82, bytes(size))[:2]) == ("masked", 1002)


def test_text_is_for_those_who_want_it_and_has_to_be_text() -> None:
    assert violation(server(), b"\x81\x80") == ("text message", 1003)
    assert violation(server(text=True), frame(0x81, b"\xc3")) == ("not UTF-8", 1007)
    split = frame(0x01, b"\xc3") + frame(0x80, b"\xa4")
    assert server(text=True).receive_data(split, 0.0) == ["ä"]
    assert violation(server(), frame(0x88, b"\x03\xe8\xff")) == ("not UTF-8", 1007)


@pytest.mark.parametrize(
    "idle", [frame(0x89, b"x"), frame(0x8A), frame(0x00)], ids=["ping", "pong", "fragment without a byte"]
)
def test_a_flood_of_frames_without_data_is_cut(idle: bytes) -> None:
    ours = server()
    ours.receive_data(frame(0x02, b"a"), 0.0)
    for window in range(3):
        ours.receive_data(idle * IDLE_FRAMES, window * IDLE_WINDOW_S)
    assert violation(ours, idle, 2 * IDLE_WINDOW_S) == ("too many frames without data", 1008)


def test_of_many_pings_the_last_is_answered() -> None:
    ours = server()
    ours.receive_data(b"".join(frame(0x89, bytes((number,))) for number in range(50)), 0.0)
    assert ours.data_to_send() == b"\x8a\x01\x31"
    assert ours.data_to_send() == b""


def test_a_large_message_s_memory_is_given_back() -> None:
    ours = server(max_message_bytes=8 * MIB)
    pieces = [frame(0x02, bytes(MIB)), *[frame(0x00, bytes(1000))] * 3000, *[frame(0x00, b"x")] * 3000, frame(0x80)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        sizes = [len(message) for piece in pieces for message in ours.receive_data(piece, 0.0)]
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sizes == [MIB + 3_003_000]
    # The fragments are one buffer, and a copy of it is the message: however many fragments there were.
    assert peak - before < 3 * sizes[0]
    assert now - before < 20_000


def test_a_violation_gives_the_memory_of_what_was_begun_back() -> None:
    ours = server()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        ours.receive_data(frame(0x02, bytes(MIB - 1)), 0.0)
        assert violation(ours, b"\x00\x82")[1] == 1009
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("begun", [frame(0x82, bytes(50_000))[:40_008], frame(0x02, bytes(40_000))])
def test_after_our_close_nothing_is_kept_of_messages_and_their_close_is_found(begun: bytes) -> None:
    ours = server()
    ours.receive_data(begun, 0.0)
    assert ours.incoming_bytes >= 40_000
    ours.close()
    assert ours.incoming_bytes < 100
    rest = bytes(10_000) if begun[0] == 0x82 else frame(0x80, bytes(10_000))
    stream = rest + frame(0x02, bytes(30_000)) + frame(0x00, bytes(60_000)) + frame(0x80) + frame(0x88, b"\x03\xe8")
    for at in range(0, len(stream), 1_000):
        assert ours.receive_data(stream[at : at + 1_000], 0.0) == [] and ours.incoming_bytes < 100
    assert ours.state is State.CLOSED


# --- writing -----------------------------------------------------------------------------------------------------------


def test_whole_frames_are_given_in_bounded_pieces() -> None:
    ours, theirs = server(), client()
    messages = [bytes((number,)) * 30_000 for number in range(10)]
    for message in messages:
        ours.send(message)
    assert ours.queued_bytes == 300_040 and ours.overloaded
    received = []
    while data := ours.data_to_send():
        assert len(data) <= WRITE_BYTES
        received += theirs.receive_data(data, 0.0)
        assert not theirs._head and theirs._frame is None
    assert received == messages and ours.queued_bytes == 0 and not ours.overloaded
    ours.send(bytes(MIB))
    ours.send(b"next")
    assert len(ours.data_to_send()) == MIB + 10
    assert ours.queued_bytes == 6


def test_a_pong_goes_past_what_is_queued() -> None:
    ours = server()
    for _ in range(10):
        ours.send(bytes(30_000))
    ours.receive_data(frame(0x89, b"now"), 0.0)
    assert ours.data_to_send().startswith(b"\x8a\x03now")


# --- closing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sides", [(server, client), (client, server)])
def test_a_close_is_told_and_answered(sides: tuple[Callable[[], WebSocket], Callable[[], WebSocket]]) -> None:
    ours, theirs = (side() for side in sides)
    ours.send(b"last")
    ours.close(4001, "taken over")
    ours.close(4002)
    assert theirs.receive_data(ours.data_to_send(), 0.0) == [b"last", Closed(4001, "taken over")]
    answer = theirs.data_to_send()
    assert ours.receive_data(answer + b"\xff\xff\xff", 0.0) == []
    assert ours.state is theirs.state is State.CLOSED
    assert ours.data_to_send() == theirs.data_to_send() == b""
    assert ours.next_timeout() is theirs.next_timeout() is None


def test_what_comes_after_our_close_is_dropped_and_their_close_ends_it() -> None:
    ours = server()
    ours.close()
    assert ours.receive_data(frame(0x82, b"late") + frame(0x89, b"ping"), 0.0) == []
    assert ours.data_to_send() == b"\x88\x02\x03\xe8"
    assert ours.state is State.CLOSING
    assert ours.receive_data(frame(0x88, b"\x03\xe8"), 0.0) == [] and ours.state is State.CLOSED


@pytest.mark.parametrize(
    ("payload", "closed"),
    [
        (b"", Closed(1005, "")),
        (b"\x03\xe8", Closed(1000, "")),
        (b"\x03\xf3try", Closed(1011, "try")),
        (b"\x0b\xb8", Closed(3000, "")),
        (b"\x13\x87" + b"x" * 123, Closed(4999, "x" * 123)),
    ],
)
def test_their_close_is_told_once_and_answered_with_its_code(payload: bytes, closed: Closed) -> None:
    ours = server()
    assert ours.receive_data(frame(0x88, payload) * 2, 0.0) == [closed]
    assert ours.data_to_send() == frame(0x88, payload[:2], masked=False)
    with pytest.raises(LocalProtocolError):
        ours.send(b"too late")
    ours.ping()
    assert ours.data_to_send() == b""


def test_a_long_reason_is_cut_between_characters() -> None:
    assert close_payload(1000, "x" + "ä" * 100) == b"\x03\xe8" + ("x" + "ä" * 61).encode()
    assert close_payload(CloseCode.NO_STATUS, "never said") == b""


def test_after_a_violation_our_code_is_the_last_word() -> None:
    ours = server()
    ours.send(b"before")
    violation(ours, b"\xc2\x80")
    ours.give_up(1002, "reserved bit")
    assert client().receive_data(ours.data_to_send(), 0.0) == [b"before", Closed(1002, "reserved bit")]
    assert ours.receive_data(frame(0x82, b"x"), 0.0) == [] and ours.data_to_send() == b""


def test_a_closed_one_does_not_open_again() -> None:
    ours = server()
    ours.give_up(1002, "")
    with pytest.raises(LocalProtocolError):
        ours.move(State.CLOSING)


# --- times -------------------------------------------------------------------------------------------------------------


def pass_until(one: WebSocket, end: float) -> float:
    """Let time pass as a shell does, up to ``end``; when the core next wants to be called."""
    while (due := one.next_timeout()) is not None and due <= end:
        one.handle_timeout(due)
    assert due is not None
    return due


def test_silence_is_pinged_once_and_then_given_up() -> None:
    ours = server(ping_after_s=20.0, dead_after_s=40.0)
    assert pass_until(ours, 19.9) == 20.0 and not ours.data_to_send()
    pass_until(ours, 39.9)
    assert ours.data_to_send() == b"\x89\x00"
    with pytest.raises(KeepaliveLost) as caught:
        pass_until(ours, 40.0)
    assert caught.value.silent_s == 40.0


@given(
    st.lists(st.floats(0.0, 100.0), max_size=5),
    st.floats(0.001, 50.0),
    st.floats(0.001, 50.0),
    st.floats(0.001, 50.0),
    st.sampled_from([0.0, 1.7e9, 12345.678]),
)
def test_time_goes_on_however_it_is_rounded(
    waits: list[float], ping_s: float, more_s: float, message_s: float, start: float
) -> None:
    config = WebSocketConfig(ping_after_s=ping_s, dead_after_s=ping_s + more_s, message_timeout_s=message_s)
    ours, now = WebSocket(Role.SERVER, config, now=start), start
    try:
        for wait in waits:
            now += wait
            for _ in range(1000):
                due = ours.next_timeout()
                assert due is not None
                if due > now:
                    break
                ours.handle_timeout(due)
            else:
                raise AssertionError(f"called a thousand times before {now}")
            ours.receive_data(frame(0x89) if wait > 50 else b"\x82", now)
    except (KeepaliveLost, WebSocketViolation):
        pass


def test_any_byte_is_a_sign_of_life() -> None:
    ours = server(ping_after_s=20.0, dead_after_s=40.0, message_timeout_s=1000.0)
    for byte_at, byte in enumerate(frame(0x82, b"slowly")):
        pass_until(ours, 39.0 * (byte_at + 1))
        ours.receive_data(bytes((byte,)), 39.0 * (byte_at + 1))
        assert ours.data_to_send() == b"\x89\x00"


def test_while_we_do_not_read_silence_is_not_theirs() -> None:
    ours = server(message_timeout_s=30.0)
    ours.receive_data(frame(0x82, b"begun")[:5], 0.0)
    ours.listening = False
    pass_until(ours, 1000.0)
    assert not ours.data_to_send()
    ours.listen(1000.0)
    assert ours.receive_data(frame(0x82, b"begun")[5:], 1001.0) == [b"begun"]
    with pytest.raises(KeepaliveLost):
        pass_until(ours, 1041.0)


def test_silence_begins_anew_when_we_read_on_between_two_looks() -> None:
    """Pinged after 20 s, and then not read: their pong may lie there when the connection would be given up, and does."""
    ours = server(ping_after_s=20.0, dead_after_s=40.0, message_timeout_s=30.0)
    ours.receive_data(frame(0x82, b"begun")[:5], 0.0)
    pass_until(ours, 20.0)
    assert ours.data_to_send() == b"\x89\x00"
    ours.listening = False
    ours.listen(39.9)
    pass_until(ours, 45.0)
    assert ours.receive_data(frame(0x82, b"begun")[5:], 45.0) == [b"begun"]


def test_a_long_message_has_its_time_before_the_other_side_is_given_up() -> None:
    """1 MiB is written in one go, and what answers our ping waits behind it."""
    ours = server(message_timeout_s=120.0)
    ours.send(bytes(1024 * 1024))
    assert len(ours.data_to_send()) > 1024 * 1024
    ours.pause()
    pass_until(ours, 150.0)
    ours.resume()
    ours.progressed(150.0)
    pass_until(ours, 189.0)
    with pytest.raises(KeepaliveLost):
        pass_until(ours, 190.0)


@pytest.mark.parametrize("written", [0, 1000, 60_000])
def test_a_network_that_takes_nothing_has_no_more_time_for_what_is_short(written: int) -> None:
    ours = server()
    ours.send(bytes(written))
    ours.data_to_send()
    ours.pause()
    pass_until(ours, 39.0)
    with pytest.raises(KeepaliveLost):
        pass_until(ours, 40.0)


def test_while_nothing_is_read_because_too_much_waits_silence_is_not_theirs() -> None:
    ours = server(message_timeout_s=30.0)
    ours.receive_data(frame(0x82, b"begun")[:5], 0.0)
    for now in range(20, 200, 20):
        ours.progressed(now, read=False)
        pass_until(ours, now + 19)
    assert ours.receive_data(frame(0x82, b"begun")[5:], 200.0) == [b"begun"]


@pytest.mark.parametrize("begun", [b"\x82", frame(0x82, b"ab")[:7], frame(0x02, b"a")])
def test_a_message_has_its_time(begun: bytes) -> None:
    ours = server(message_timeout_s=30.0)
    ours.receive_data(begun, 1.0)
    for now in range(10, 31, 10):
        pass_until(ours, now)
        ours.receive_data(frame(0x89) if begun[0] == 0x02 else b"", now)
    with pytest.raises(WebSocketViolation, match="too slow") as caught:
        pass_until(ours, 31.0)
    assert caught.value.code == CloseCode.POLICY


def test_messages_that_follow_each_other_have_each_their_own_time() -> None:
    ours = server(message_timeout_s=30.0)
    message = frame(0x82, b"ab")
    ours.receive_data(message[:5], 0.0)
    for now in range(10, 200, 10):
        assert ours.receive_data(message[5:] + message[:5], now) == [b"ab"]
        pass_until(ours, now)
