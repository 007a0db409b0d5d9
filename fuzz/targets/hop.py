"""What the two sides of a connection tell each other in the payloads of its handshake."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.mux.core.hello import HopLimits, hop_payload, read_hop
from dmsg.mux.core.tlv import Tlv, encode_tlvs


def one_input(data: bytes) -> None:
    """The input is the payload; nothing may leave, not even a typed error."""
    hop = read_hop(data)
    assert hop.extended or hop.limits is None
    if hop.extended:
        assert read_hop(hop_payload(hop.limits)) == hop


def seeds() -> Iterator[bytes]:
    """Ours, others' and broken ones."""
    yield b""
    yield hop_payload()
    yield hop_payload(HopLimits(1_024, 200, 65_510))
    for version in ("0.1.0", "0.0.1", "1.0", "0.1", "x.y", "1_0.2", "-1.5", "٣.١", "9" * 30 + ".0"):
        yield encode_tlvs({Tlv.VERSION: version.encode(), Tlv.LIMITS: b"\xff" * 12})
