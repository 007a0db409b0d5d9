"""The strategies give what they promise, and reach the corners they are for."""

from __future__ import annotations

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core import wire
from dmsg.testing import strategies


@given(st.integers(1, 2**64))
def test_secret_keys_are_numbers(number):
    assert int.from_bytes(bytes(strategies.secret_key(number)), "big") == number


@pytest.mark.parametrize("number", [-1, 0, strategies.LARGEST_SECRET + 1, 2**256])
def test_numbers_that_are_no_keys(number):
    with pytest.raises(InvalidKey):
        strategies.secret_key(number)


@given(st.data())
def test_public_keys_have_a_secret(data):
    key = data.draw(strategies.secret_keys())
    assert data.draw(strategies.public_keys()) is not None
    key.public_key.verify(key.sign(b"x"), b"x")


@pytest.mark.parametrize("name", strategies.BAD_POINTS)
def test_bad_points_are_no_keys(name):
    assert len(strategies.BAD_POINTS[name]) == 33
    with pytest.raises(InvalidKey):
        PublicKey(strategies.BAD_POINTS[name])


@given(strategies.frame_fields(50))
def test_frames_are_well_formed(fields):
    kind, transport_id, payload = fields
    data = wire.encode_frame(kind, transport_id, payload)
    assert wire.split_frames(data) == ([(kind, transport_id, 5, len(data))], len(data))
    assert len(payload) <= 132


@given(st.data())
def test_cuts_put_together_are_the_whole(data):
    whole = data.draw(st.binary(max_size=60))
    pieces = data.draw(strategies.cuts(whole))
    assert b"".join(pieces) == whole
    assert all(pieces)


def test_cuts_reach_from_one_piece_to_single_bytes():
    data = bytes(range(9))
    assert find(strategies.cuts(data), lambda pieces: len(pieces) == 1) == [data]
    assert find(strategies.cuts(data), lambda pieces: len(pieces) == 9) == [bytes([b]) for b in data]
    assert 1 < len(find(strategies.cuts(data), lambda pieces: 1 < len(pieces) < 9)) < 9


@given(strategies.hostile_bytes(100))
def test_hostile_bytes_keep_to_their_size(data):
    assert isinstance(data, bytes)
    assert len(data) <= 100


def refused(data):
    try:
        wire.split_frames(data)
    except RemoteProtocolError:
        return True
    return False


def incomplete(data):
    return not refused(data) and wire.split_frames(data)[1] < len(data)


def unknown(data):
    return not refused(data) and any(kind not in list(wire.FrameType) for kind, *_ in wire.split_frames(data)[0])


@pytest.mark.parametrize("corner", [refused, incomplete, unknown, lambda data: data == b""])
def test_hostile_bytes_reach_the_corners(corner):
    found = find(strategies.hostile_bytes(), corner, settings=settings(max_examples=2000, database=None, deadline=None))
    assert corner(found)


@given(strategies.frames())
def test_frames_strategy_gives_bytes(data):
    assert len(wire.split_frames(data)[0]) == 1
