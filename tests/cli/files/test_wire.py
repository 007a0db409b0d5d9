"""The file transfer protocol, byte by byte."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.cli.files.names import NAME_LIMIT_BYTES, check_name
from dmsg.cli.files.wire import (
    BEGUN_LIMIT_BYTES,
    DATA_LIMIT_BYTES,
    HEADER_LIMIT_BYTES,
    REFUSALS,
    Decoder,
    Done,
    End,
    Failed,
    Finish,
    Have,
    MalformedTransfer,
    Offer,
    Ready,
    Start,
    TransferFailed,
    Whole,
    data_prefix,
    decode,
    encode,
    encode_whole,
)
from dmsg.testing.strategies import cuts

sizes = st.integers(0, 2**63 - 1)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
ids = st.binary(min_size=16, max_size=16).map(bytes.hex)
messages = st.one_of(
    st.builds(Offer, st.text(max_size=200), sizes, ids),
    st.builds(Whole, st.text(max_size=200), sizes, digests),
    st.builds(Have, sizes, digests),
    st.builds(Start, sizes, st.booleans()),
    st.builds(Finish, st.one_of(st.just(""), digests)),
    st.builds(Failed, st.sampled_from(sorted(REFUSALS))),
    st.just(Ready()),
    st.just(Done()),
    st.just(End()),
)
units = st.lists(st.one_of(messages, st.binary(min_size=1, max_size=300)), max_size=12)


def encode_all(stream):
    return b"".join(data_prefix(len(one)) + one if isinstance(one, bytes) else encode(one) for one in stream)


def joined(found):
    """Neighbouring pieces of data as one."""
    result = []
    for one in found:
        if isinstance(one, bytes) and result and isinstance(result[-1], bytes):
            result[-1] += one
        else:
            result.append(one)
    return result


@given(units, st.data())
def test_what_goes_in_comes_out_however_it_is_cut(stream, data):
    decoder, found = Decoder(), []
    for piece in data.draw(cuts(encode_all(stream))):
        found += decoder.feed(piece)
    assert joined(found) == joined(stream)


@given(st.binary(max_size=300))
def test_a_small_file_is_a_header_and_its_data(data):
    message = Whole("a", len(data), "ab" * 32)
    assert Decoder().feed(encode_whole(message, data)) == [message, data][: 1 + bool(data)]


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_anything_else_is_malformed_and_nothing_worse(pieces):
    decoder = Decoder()
    try:
        for piece in pieces:
            decoder.feed(piece)
    except MalformedTransfer as error:
        assert error.code == "malformed"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_other_json_is_malformed(value):
    with pytest.raises(MalformedTransfer):
        decode(json.dumps(value).encode())


OFFER = {"type": "offer", "name": "a", "size": 1, "id": "ab" * 16, "version": 1}
WHOLE = {"type": "whole", "name": "a", "size": 1, "sha256": "ab" * 32, "again": False, "version": 1}
START = {"type": "start", "offset": 0, "hashed": True}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": True},
        {"size": -1},
        {"size": 2**63},
        {"size": 1.0},
        {"size": True},
        {"begun": -1},
        {"begun": BEGUN_LIMIT_BYTES + 1},
        {"begun": "1"},
        {"name": 5},
        {"id": "AB" * 16},
        {"id": "ab" * 15},
        {"id": ""},
        {"sha256": "ab" * 32},
        {"more": 1},
        {"type": "hello"},
        {"type": ["offer"]},
    ],
)
def test_a_header_with_a_wrong_member_is_malformed(change):
    assert decode(json.dumps(OFFER).encode()) == Offer("a", 1, "ab" * 16)
    with pytest.raises(MalformedTransfer):
        decode(json.dumps(OFFER | change).encode())


@pytest.mark.parametrize(
    ("header", "change"),
    [
        (WHOLE, {"sha256": "AB" * 32}),
        (WHOLE, {"sha256": "ab" * 31}),
        (WHOLE, {"sha256": ""}),
        (WHOLE, {"again": 1}),
        (START, {"hashed": None}),
        (START, {"hashed": "yes"}),
    ],
)
def test_hashes_and_what_is_said_of_them_are_looked_at(header, change):
    decode(json.dumps(header).encode())
    with pytest.raises(MalformedTransfer):
        decode(json.dumps(header | change).encode())


@pytest.mark.parametrize("missing", ["name", "size", "type", "id"])
def test_a_header_without_a_member_is_malformed(missing):
    with pytest.raises(MalformedTransfer):
        decode(json.dumps({name: value for name, value in OFFER.items() if name != missing}).encode())


@pytest.mark.parametrize(
    "body", [b"[" * 4000, b"\xff", b"", b'{"type":"start","hashed":true,"offset":' + b"1" * 4000 + b"}"]
)
def test_hostile_json_is_malformed(body):
    with pytest.raises(MalformedTransfer):
        decode(body)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00",
        b"\x03",
        struct.pack(">BI", 1, HEADER_LIMIT_BYTES + 1),
        struct.pack(">BI", 1, 0),
        struct.pack(">BI", 2, DATA_LIMIT_BYTES + 1),
        struct.pack(">BI", 2, 0),
    ],
)
def test_limits_are_enforced_at_the_first_byte(raw):
    with pytest.raises(MalformedTransfer):
        Decoder().feed(raw)


def test_the_longest_name_fits_a_header_however_it_is_escaped():
    assert len(encode(Offer("\U0001f600" * (NAME_LIMIT_BYTES // 4), 2**63 - 1, "ab" * 16))) < HEADER_LIMIT_BYTES
    assert len(encode(Whole("é" * (NAME_LIMIT_BYTES // 2), 2**63 - 1, "ab" * 32))) < HEADER_LIMIT_BYTES


@pytest.mark.parametrize("name", ["a", "report 2024.pdf", "café.txt", "日本語", "x" * NAME_LIMIT_BYTES, "a..b", "-rf"])
def test_ordinary_names_are_taken(name):
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "/etc/passwd",
        "a/b",
        "a\\b",
        ".bashrc",
        "~",
        "a\0b",
        "a\nb",
        "\x1b[2Jx",
        "a\u202egnp.exe",
        "a\u2028b",
        "\ud800",
        " a",
        "a ",
        "a.part",
        "A.PART",
        "x" * (NAME_LIMIT_BYTES + 1),
        "é" * (NAME_LIMIT_BYTES // 2 + 1),
    ],
)
def test_other_names_are_refused(name):
    with pytest.raises(TransferFailed) as caught:
        check_name(name)
    assert caught.value.code == "bad_name"
    assert all(one.isprintable() for one in str(caught.value))
