"""Frames of a link in both layouts: golden bytes, limits, and taking a stream of bytes apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.errors import LocalProtocolError, RemoteProtocolError
from dmsg.messaging.core import wire
from dmsg.messaging.core.wire import (
    FRAMES,
    GO,
    SEED,
    FrameReader,
    FrameType,
    Layout,
    RelayFrameReader,
    recognise_layout,
)
from dmsg.testing.strategies import cuts

layouts = st.sampled_from((GO, SEED))
fields = st.tuples(st.integers(0, 255), st.integers(0, 255), st.binary(max_size=40))
Fields = tuple[int, int, bytes]

KINDS = {
    "OpenChannel": FrameType.OPEN_CHANNEL,
    "ChannelOpened": FrameType.CHANNEL_OPENED,
    "CloseChannel": FrameType.CLOSE_CHANNEL,
    "ChannelClosed": FrameType.CHANNEL_CLOSED,
    "Send": FrameType.SEND,
    "Send empty": FrameType.SEND,
}


def read(reader: FrameReader, *pieces: bytes) -> list[Fields]:
    found = []
    for piece in pieces:
        data, frames = reader.read(piece)
        found += [(kind, channel_id, data[start:end]) for kind, channel_id, start, end in frames]
    return found


# --- golden bytes ------------------------------------------------------------------------------------------------------


def test_gos_frames(vectors: dict[str, Any]) -> None:
    assert {frame["name"] for frame in vectors["frames"]} == set(KINDS)
    for frame in vectors["frames"]:
        expected = bytes.fromhex(frame["wire"])
        body = bytes.fromhex(frame["read_back"]["body"])
        kind = KINDS[frame["name"]]
        assert GO.encode(kind, frame["channel_id"], body[1:]) == expected
        assert read(FrameReader(GO), expected) == [(kind, frame["channel_id"], body[1:])]
        if len(body) > 3 and kind == FrameType.SEND:
            assert GO.send_header(body[0], len(body) - 3) + body[3:] == expected


def test_frames_in_the_layout_of_the_specification(vectors: dict[str, Any]) -> None:
    for frame in vectors["frames_seed_layout_DERIVED_not_Go"]:
        expected = bytes.fromhex(frame["seed_layout"])
        [(kind, channel_id, payload)] = read(FrameReader(GO), bytes.fromhex(frame["go_wire"]))
        assert kind == KINDS[frame["name"]]
        assert SEED.encode(kind, channel_id, payload) == expected
        assert read(FrameReader(SEED), expected) == [(kind, channel_id, payload)]
        if payload and kind == FrameType.SEND:
            assert SEED.send_header(channel_id, len(payload) - 2) + payload[2:] == expected


@pytest.mark.parametrize("row", FRAMES, ids=lambda row: row.kind.name)
def test_the_frame_table_describes_gos_frames(row: wire.FrameFields, vectors: dict[str, Any]) -> None:
    fixed = sum(size for _, size in row.fields)
    whole = [frame for frame in vectors["frames"] if frame["name"] != "Send empty"]
    sizes = [len(bytes.fromhex(frame["wire"])) - 4 for frame in whole if KINDS[frame["name"]] == row.kind]
    assert sizes
    assert all(size >= fixed if row.kind == FrameType.SEND else size == fixed for size in sizes)


def test_the_frame_table_is_complete() -> None:
    assert [row.kind for row in FRAMES] == list(FrameType)
    plain = (wire.OPEN_CHANNEL, wire.CHANNEL_OPENED, wire.CLOSE_CHANNEL, wire.CHANNEL_CLOSED, wire.SEND)
    assert plain == tuple(FrameType) == (0, 1, 2, 3, 4)
    assert all(type(kind) is int for kind in plain)


# --- limits ------------------------------------------------------------------------------------------------------------


def test_sizes_are_what_go_reads(vectors: dict[str, Any]) -> None:
    for case in vectors["frame_size_limits"]:
        readable = case.get("read_error", "not written") is None
        header = bytes.fromhex(case["size_field"]) + b"\x04" if "size_field" in case else None
        payload = bytes(case["body_len"] - 1)
        if readable:
            assert header is not None
            frame = GO.encode(wire.SEND, 0, payload)
            assert frame[:3] == header
            assert read(FrameReader(GO), frame) == [(wire.SEND, 0, payload)]
        else:
            with pytest.raises(LocalProtocolError):
                GO.encode(wire.SEND, 0, payload)
            if header is not None:
                with pytest.raises(RemoteProtocolError) as caught:
                    FrameReader(GO).read(header)
                assert caught.value.reason == "payload over the limit"


def test_the_specifications_layout_takes_65535_bytes() -> None:
    frame = SEED.encode(wire.SEND, 9, bytes(65_534))
    assert read(FrameReader(SEED), frame) == [(wire.SEND, 9, bytes(65_534))]
    with pytest.raises(LocalProtocolError):
        SEED.encode(wire.SEND, 9, bytes(65_535))


def test_the_longest_ciphertext_just_fits_gos_limit() -> None:
    frame = GO.send_header(1, wire.CIPHERTEXT_LIMIT_BYTES) + bytes(wire.CIPHERTEXT_LIMIT_BYTES)
    assert len(read(FrameReader(GO), frame)[0][2]) == GO.body_limit_bytes - 1
    with pytest.raises(RemoteProtocolError):
        FrameReader(GO).read(GO.send_header(1, wire.CIPHERTEXT_LIMIT_BYTES + 1))


def test_what_go_reads_and_what_kills_it(vectors: dict[str, Any]) -> None:
    """Size 0 ends Go's process; here it and a frame without a channel id end the link."""
    outcomes = {}
    for case in vectors["frame_read_cases"]:
        try:
            outcomes[case["case"]] = read(FrameReader(GO), bytes.fromhex(case["wire"]) + b"\0")
        except RemoteProtocolError as error:
            outcomes[case["case"]] = error.reason
    assert outcomes == {
        "size 0": "no channel id",
        "size 1 (type only)": "no channel id",
        "unknown type 9": [(9, 7, b"")],
        "truncated": [],
        "size > 65518": "payload over the limit",
    }


@pytest.mark.parametrize(("layout", "data"), [(GO, "000000"), (GO, "000104"), (SEED, "040000")])
def test_a_frame_without_a_channel_id_is_refused(layout: Layout, data: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        FrameReader(layout).read(bytes.fromhex(data))
    assert caught.value.reason == "no channel id"


# --- telling the layouts apart -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [GO, SEED], ids=repr)
@pytest.mark.parametrize(
    ("kind", "size"),
    [(0, 82), (1, 49), (1, 50), (2, 0), (3, 0)],
    ids=["open", "opened", "opened v2", "close", "closed"],
)
def test_the_first_frame_tells_the_layout(layout: Layout, kind: int, size: int) -> None:
    first, second = layout.encode(kind, 5, b"\x02" * size), layout.encode(wire.SEND, 5, b"\0\1x")
    reader = FrameReader()
    pieces = [bytes((byte,)) for byte in first + second]
    assert read(reader, *pieces) == [(kind, 5, b"\x02" * size), (wire.SEND, 5, b"\0\1x")]
    assert reader.layout is layout


def test_the_headers_of_a_first_open_channel() -> None:
    assert recognise_layout(bytes.fromhex("005400")) is GO
    assert recognise_layout(bytes.fromhex("000053")) is SEED


@pytest.mark.parametrize("header", ["000000", "005401", "000052", "001b04", "04001a", "474554", "0a0054", "ffffff"])
def test_no_other_frame_is_a_first_one(header: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        FrameReader().read(bytes.fromhex(header))
    assert caught.value.reason == "first frame not recognised"


first_frames = st.sampled_from(
    [(wire.OPEN_CHANNEL, 9, b"\x02" * 82), (wire.CLOSE_CHANNEL, 7, b""), (wire.CHANNEL_CLOSED, 0, b"")]
)
later_frames = st.one_of(first_frames, st.tuples(st.just(wire.SEND), st.integers(0, 255), st.binary(max_size=40)))


@given(st.lists(first_frames, max_size=4), st.lists(later_frames, max_size=4), layouts, st.data())
def test_a_client_reads_what_a_relay_says_before_it_knows_the_layout(
    before: list[Fields], after: list[Fields], layout: Layout, data: st.DataObject
) -> None:
    other = SEED if layout is GO else GO
    stream = b"".join([*(other.encode(*frame) for frame in before), *(layout.encode(*frame) for frame in after)])
    assert read(RelayFrameReader(layout), *data.draw(cuts(stream))) == before + after


# --- any stream --------------------------------------------------------------------------------------------------------


@given(st.lists(fields, max_size=8), layouts, st.data())
def test_frames_come_back_however_the_stream_is_cut(frames: list[Fields], layout: Layout, data: st.DataObject) -> None:
    stream = b"".join(layout.encode(*frame) for frame in frames)
    assert read(FrameReader(layout), *data.draw(cuts(stream))) == frames


@given(st.lists(fields, min_size=1, max_size=3), layouts, st.integers(1, 40))
def test_what_is_cut_off_is_not_read(frames: list[Fields], layout: Layout, cut: int) -> None:
    stream = b"".join(layout.encode(*frame) for frame in frames)
    found = read(FrameReader(layout), stream[:-cut])
    assert found == frames[: len(found)] and len(found) < len(frames)


def outcome(reader: FrameReader, pieces: list[bytes]) -> tuple[list[Fields], str]:
    found: list[Fields] = []
    try:
        for piece in pieces:
            found += read(reader, piece)
    except RemoteProtocolError as error:
        return found, error.reason
    return found, ""


makers: list[Callable[[], FrameReader]] = [
    FrameReader,
    lambda: FrameReader(GO),
    lambda: FrameReader(SEED),
    lambda: RelayFrameReader(GO),
    lambda: RelayFrameReader(SEED),
]


@given(st.binary(max_size=300), st.sampled_from(makers), st.data())
def test_any_bytes_are_frames_or_a_remote_error(
    stream: bytes, make: Callable[[], FrameReader], data: st.DataObject
) -> None:
    _, whole = outcome(make(), [stream])
    _, in_pieces = outcome(make(), data.draw(cuts(stream)))
    assert whole == in_pieces


def test_a_frame_in_single_bytes_is_copied_once() -> None:
    """65 KB in single bytes: with a copy for each byte this would be four gigabytes of copying."""
    frame = GO.encode(wire.SEND, 1, bytes(65_000))
    reader = FrameReader(GO)
    assert read(reader, *(frame[at : at + 1] for at in range(len(frame)))) == [(wire.SEND, 1, bytes(65_000))]
