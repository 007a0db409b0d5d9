"""Hypothesis strategies for keys, frames, ways to cut a stream, and hostile bytes.

Only this module of the package needs ``hypothesis``.
"""

from __future__ import annotations

from typing import Any, Final

from hypothesis import strategies as st

from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.mux.core import wire

#: One less than the order of the curve: the largest secret key.
LARGEST_SECRET: Final = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364140
#: Coordinates of points are below this prime: no point has a larger x.
FIELD_PRIME: Final = 2**256 - 2**32 - 977
#: By name: 33 bytes each that look like a public key but are not a point of the curve.
BAD_POINTS: Final = {
    "zeros": bytes(33),
    "the prime": b"\x02" + FIELD_PRIME.to_bytes(32, "big"),
    "over the prime": b"\x03" + b"\xff" * 32,
    "off the curve": b"\x02" + (5).to_bytes(32, "big"),
    "uncompressed prefix": b"\x04" + bytes(31) + b"\x01",
}
_KINDS: Final = tuple(int(kind) for kind in wire.FrameType)


def secret_key(number: int) -> SecretKey:
    """The secret key ``number``, the same in every run. Raises ``InvalidKey`` unless it is 1 to :data:`LARGEST_SECRET`."""
    return SecretKey(number.to_bytes(32, "big") if 0 <= number < 2**256 else b"")


def secret_keys() -> st.SearchStrategy[SecretKey]:
    """Secret keys; small ones first, including the ends of the range."""
    numbers = st.integers(1, 64) | st.integers(1, LARGEST_SECRET) | st.just(LARGEST_SECRET)
    return numbers.map(secret_key)


def public_keys() -> st.SearchStrategy[PublicKey]:
    """Public keys with a known secret."""
    return secret_keys().map(lambda key: key.public_key)


def transport_ids() -> st.SearchStrategy[int]:
    """Transport ids of either parity, including the ends of the range."""
    return st.sampled_from((0, 1, 2, 3, 0xFFFE, 0xFFFF)) | st.integers(0, 0xFFFF)


@st.composite
def frame_fields(draw: st.DrawFn, max_data_bytes: int = 200) -> tuple[int, int, bytes]:
    """``(type, transport id, payload)`` of a well-formed frame; FWD carries up to ``max_data_bytes`` of data."""
    kind = draw(st.sampled_from(_KINDS))
    transport_id = 0 if kind == wire.OK else draw(transport_ids())
    payload = b""
    if kind in (wire.REQUEST, wire.ACCEPT):
        payload = bytes(draw(public_keys())) + bytes(draw(public_keys()))
    elif kind == wire.CLOSE:
        payload = draw(st.binary(max_size=1))
    elif kind == wire.ACK:
        payload = draw(st.binary(min_size=wire.SEQUENCE_BYTES, max_size=wire.SEQUENCE_BYTES))
    elif kind == wire.FWD:
        payload = draw(st.binary(min_size=wire.SEQUENCE_BYTES, max_size=wire.SEQUENCE_BYTES + max_data_bytes))
    return kind, transport_id, payload


def frames(max_data_bytes: int = 200) -> st.SearchStrategy[bytes]:
    """The bytes of a well-formed frame."""
    return frame_fields(max_data_bytes).map(lambda fields: wire.encode_frame(*fields))


def cut_at(data: bytes, places: list[int]) -> list[bytes]:
    """``data`` in pieces that begin at 0 and at ``places``; no piece is empty, and together they are ``data``."""
    ends = sorted({place for place in places if 0 < place < len(data)})
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True) if start < end]


def cuts(data: bytes) -> st.SearchStrategy[list[bytes]]:
    """Ways to cut ``data`` into pieces, as a network may: whole, byte by byte, and anything in between."""
    if len(data) < 2:
        return st.just(cut_at(data, []))
    anywhere = st.lists(st.integers(1, len(data) - 1), max_size=20)
    return st.one_of(st.just([]), anywhere, st.just(list(range(1, len(data))))).map(lambda places: cut_at(data, places))


@st.composite
def _spoilt(draw: st.DrawFn, max_size: int) -> bytes:
    """Well-formed frames of which some bytes, the length or the order have been changed."""
    parts = draw(st.lists(frames(40), min_size=1, max_size=6))
    data = bytearray(b"".join(draw(st.permutations(parts))))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(data) - 1))
        data[place] = draw(st.integers(0, 255))
    end = draw(st.integers(0, len(data)))
    return bytes(data[: end or None])[:max_size]


def hostile_bytes(max_size: int = 600) -> st.SearchStrategy[bytes]:
    """At most ``max_size`` bytes from a hostile peer.

    Noise, runs of one byte, headers that announce more data than there is or than is allowed, and frames that are nearly
    right.
    """
    runs: Any = st.tuples(st.sampled_from([b"\0", b"\xff", b"\x01", b"{", b"\n"]), st.integers(0, max_size))
    headers = st.builds(
        lambda kind, transport_id, size, rest: wire.HEADER.pack(kind, transport_id, size) + rest,
        st.sampled_from(_KINDS) | st.integers(0, 255),
        transport_ids(),
        st.sampled_from((0, 1, 65, 67, 65_510, 65_511, 65_535)) | st.integers(0, 65_535),
        st.binary(max_size=max(0, max_size - wire.HEADER_BYTES)),
    )
    return st.one_of(
        st.binary(max_size=max_size),
        runs.map(lambda run: run[0] * run[1]),
        headers.map(lambda data: data[:max_size]),
        _spoilt(max_size),
    )
