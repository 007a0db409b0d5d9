"""Redis's protocol: whatever comes in whatever pieces, replies or one error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.sansio.errors import RedisViolation
from dmsg.sansio.resp import DEPTH_LIMIT, LINE_LIMIT_BYTES, ReplyError, RespClient

REPLIES = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=50),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


def written(reply: Any) -> bytes:
    """As Redis writes it."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    return b"*%d\r\n" % len(reply) + b"".join(map(written, reply))


def asking(count: int = 1, patience_s: float = 5.0) -> RespClient:
    """A connection with so many commands under way."""
    core = RespClient()
    for _ in range(count):
        core.send(("PING",), patience_s, 0.0)
    assert core.data_to_send() == b"*1\r\n$4\r\nPING\r\n" * count
    return core


def test_commands_are_arrays_of_bulks_and_leave_together() -> None:
    core = RespClient()
    core.send(("LPUSH", "ü", b"\0\xff"), 5.0, 0.0)
    core.send(("SETEX", "key", 60, ""), 5.0, 0.0)
    assert core.data_to_send() == (
        b"*3\r\n$5\r\nLPUSH\r\n$2\r\n\xc3\xbc\r\n$2\r\n\0\xff\r\n*4\r\n$5\r\nSETEX\r\n$3\r\nkey\r\n$2\r\n60\r\n$0\r\n\r\n"
    )
    assert core.data_to_send() == b""
    assert core.waiting == 2


@given(st.lists(REPLIES, max_size=5), st.lists(st.integers(1, 40), max_size=60))
def test_replies_come_in_any_pieces(replies: list[Any], sizes: list[int]) -> None:
    data = b"".join(map(written, replies))
    core, found, at = asking(len(replies)), [], 0
    for size in [*sizes, len(data)]:
        found += core.receive_data(data[at : at + size], 1.0)
        at += size
    assert found == replies
    assert core.waiting == 0


def test_texts_and_errors_are_replies_too() -> None:
    core = asking(3)
    text, error, array = core.receive_data(b"+OK\r\n-WRONGTYPE no \xff\r\n*2\r\n*-1\r\n-ERR x\r\n", 1.0)
    assert text == b"OK"
    assert isinstance(error, ReplyError) and error.text == "WRONGTYPE no \ufffd"
    assert array[0] is None and array[1].text == "ERR x"


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n", b"\r\n", b":\r\n", b":x\r\n", b":1.5\r\n", b":--1\r\n", b":+1\r\n", b":" + b"1" * 21 + b"\r\n", b"$-2\r\n",
        b"$536870913\r\n", b"*-2\r\n", b"*1000001\r\n", b"$1\r\nabc\r\n", b"$3\r\nabc\n\n", b"*1\r\n" * (DEPTH_LIMIT + 1),
        b"+" + b"a" * LINE_LIMIT_BYTES, b"+OK\r\n+unasked\r\n", b"%1\r\n",
    ],
)  # fmt: skip
def test_what_is_no_reply_ends_the_connection(data: bytes) -> None:
    with pytest.raises(RedisViolation) as caught:
        asking().receive_data(data, 1.0)
    assert caught.value.reason == "not a reply"


def test_replies_before_a_fault_are_told() -> None:
    with pytest.raises(RedisViolation) as caught:
        asking(2).receive_data(b":7\r\n?\r\n", 1.0)
    assert caught.value.events == [7]


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    try:
        asking(3).receive_data(data, 1.0)
    except RedisViolation:
        return


def test_each_command_has_its_patience_from_when_it_is_its_turn() -> None:
    core = RespClient()
    assert core.next_timeout() is None
    core.send(("BRPOP", "a", 10), 15.0, 100.0)
    core.send(("PING",), 5.0, 101.0)
    assert core.next_timeout() == 115.0
    assert core.handle_timeout(114.0) == []
    core.receive_data(b"*-1\r\n", 112.0)
    assert core.next_timeout() == 117.0
    with pytest.raises(RedisViolation, match="no reply in time"):
        core.handle_timeout(117.0)
    core.receive_data(b"+PONG\r\n", 118.0)
    assert core.next_timeout() is None and core.handle_timeout(1000.0) == []
    core.send(("PING",), 5.0, 200.0)
    assert core.next_timeout() == 205.0


def test_a_large_reply_is_given_back_whole_and_its_memory_too() -> None:
    core, piece = asking(), bytes(65536)
    core.receive_data(b"$%d\r\n" % (16 * len(piece)), 1.0)
    for _ in range(15):
        assert core.receive_data(piece, 1.0) == []
    [reply] = core.receive_data(piece + b"\r\n", 1.0)
    assert reply == piece * 16
    assert core._data.__sizeof__() < 1000
