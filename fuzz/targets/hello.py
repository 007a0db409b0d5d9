"""What the two sides of a connection tell each other in the payloads of its handshake."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.mux.core.hello import AnnouncedLimits, Capabilities, hello_payload, read_hello
from dmsg.mux.core.tlv import Tlv, encode_tlvs


def one_input(data: bytes) -> None:
    """The input is the payload; nothing may leave, not even a typed error."""
    read = read_hello(data)
    assert read.extended or read == Capabilities()
    if read.extended:
        assert read_hello(hello_payload(read.limits, read.window_bytes, aes=read.aes)) == read


def seeds() -> Iterator[bytes]:
    """Ours, others' and broken ones."""
    yield b""
    yield hello_payload()
    yield hello_payload(AnnouncedLimits(1_024, 200, 65_510))
    yield hello_payload(AnnouncedLimits(1_024, 200, 65_510), 1 << 25, aes=True)
    for version in ("0.1.0", "0.0.1", "1.0", "0.1", "x.y", "1_0.2", "-1.5", "٣.١", "9" * 30 + ".0"):
        yield encode_tlvs({Tlv.VERSION: version.encode(), Tlv.LIMITS: b"\xff" * 12})
