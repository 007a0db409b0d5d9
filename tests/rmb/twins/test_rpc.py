"""JSON-RPC without a connection: limits, and what a node may not say."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.rmb.twins.errors import MalformedAnswer
from dmsg.rmb.twins.rpc import (
    NOTICE_BURST,
    SMALL_BYTES,
    Answer,
    Notice,
    Refusal,
    Rpc,
    read_hash,
    read_hex,
    read_number,
    subscription_id,
)


def answer(number, result):
    return json.dumps({"jsonrpc": "2.0", "id": number, "result": result})


def notice(result, name="a"):
    return json.dumps({"jsonrpc": "2.0", "method": "m", "params": {"subscription": name, "result": result}})


def test_a_question_and_its_answer():
    rpc = Rpc(0)
    number, text = rpc.ask("state_getStorage", ("0x00", None))
    assert json.loads(text) == {"jsonrpc": "2.0", "id": number, "method": "state_getStorage", "params": ["0x00", None]}
    assert rpc.receive(answer(number, None), 0) == Answer(number, None)
    with pytest.raises(MalformedAnswer):  # a second time
        rpc.receive(answer(number, None), 0)


def test_errors_and_notices():
    rpc = Rpc(0)
    number, _ = rpc.ask("m", ())
    error = {"jsonrpc": "2.0", "id": number, "error": {"code": 1010, "message": "x" * 5000}}
    assert rpc.receive(json.dumps(error), 0) == Refusal(number, 1010, "x" * 200)
    assert rpc.receive(notice({"number": "0x1"}), 0) == Notice("a", {"number": "0x1"})
    assert rpc.receive(notice(1, 7), 0) == Notice(7, 1)
    number, _ = rpc.ask("m", ())
    assert rpc.receive(json.dumps({"id": number, "error": "no"}), 0) == Refusal(number, 0, "None")


def test_an_answer_is_as_long_as_its_own_question_allows():
    rpc = Rpc(0)
    small, _ = rpc.ask("m", ())
    large, _ = rpc.ask("m", (), limit_bytes=100_000)
    long = "x" * SMALL_BYTES
    assert rpc.receive(answer(large, long), 0) == Answer(large, long)
    with pytest.raises(MalformedAnswer):  # the large one is answered
        rpc.receive(answer(small, long), 0)
    rpc.ask("m", (), limit_bytes=100_000)
    with pytest.raises(MalformedAnswer):
        rpc.receive(answer(small, long), 0)


def test_notices_have_a_rate():
    rpc = Rpc(0)
    for _ in range(NOTICE_BURST):
        rpc.receive(notice(1), 0)
    with pytest.raises(MalformedAnswer, match="malformed"):
        rpc.receive(notice(1), 0)
    assert rpc.receive(notice(2), 10) == Notice("a", 2)


@pytest.mark.parametrize("name", [None, True, 1.5, "x" * 65, [], {}])
def test_what_no_subscription_is_called(name):
    with pytest.raises(MalformedAnswer):
        subscription_id(name)


@pytest.mark.parametrize("value", [None, 7, "", "00", "0x0", "0xzz", "0x0 0 ", "0x00 00", "0x" + "00" * 5, ["0x00"]])
def test_what_is_no_bytes(value):
    with pytest.raises(MalformedAnswer):
        read_hex(value, 4)


@pytest.mark.parametrize(
    "value", [None, True, -1, 11, "0xb", "10", "0x", "0x-1", "0x1_0", "0x1 ", "0x\u0663", "0x" + "0" * 17, 1.0, []]
)
def test_what_is_no_number(value):
    with pytest.raises(MalformedAnswer):
        read_number(value, 10)


def test_bytes_hashes_and_numbers():
    assert (read_hex("0x", 4), read_hex("0x0aFF", 4)) == (b"", b"\x0a\xff")
    assert (read_number(0, 10), read_number("0xa", 10)) == (0, 10)
    assert read_hash("0x" + "0F" * 32) == "0x" + "0F" * 32
    with pytest.raises(MalformedAnswer):
        read_hash("0x" + "00" * 31)


NAMES = st.sampled_from(["id", "result", "error", "method", "params", "subscription", "code"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner),
)


@given(st.one_of(st.text(), VALUES.map(json.dumps)))
def test_no_text_raises_anything_else(text):
    rpc = Rpc(0)
    rpc.ask("m", ())
    try:
        rpc.receive(text, 0)
    except MalformedAnswer:
        return
