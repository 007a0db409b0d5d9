"""The payloads of a connection's handshake, in which both sides announce themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.hello import AnnouncedLimits, Capabilities, hello_payload, read_hello, read_refusal
from dmsg.mux.core.tlv import Tlv, decode_tlvs, encode_tlvs
from fuzz.oracles import outcome

#: Lengths that have a meaning in a later generation of the reference.
_TAKEN = (1_184, 1_088)
_U32_MOST = (1 << 32) - 1
_PLAIN = re.compile(r"[0-9]+\Z", re.ASCII)


def one_input(data: bytes) -> None:
    """The input is the payload, which must raise nothing, not even a typed error; then numbers to announce."""
    read = read_hello(data)
    kind, values = outcome(lambda: decode_tlvs(data), RemoteProtocolError)
    promised = _promised(values.get(Tlv.VERSION)) if kind == "value" else False
    assert read.extended == promised
    if not read.extended:
        assert read == Capabilities() and not read.aes and read.limits is None and not read.window_bytes
    else:
        limits, window = values.get(Tlv.LIMITS, b""), values.get(Tlv.WINDOW, b"")
        assert _numbers(read.limits) == (_u32s(limits) if len(limits) == 12 else None)
        assert read.window_bytes == (_u32s(window)[0] if len(window) == 4 else 0)
        assert read.aes == (1 in values.get(Tlv.CIPHERS, b""))
        assert read_hello(hello_payload(read.limits, read.window_bytes, aes=read.aes)) == read
    _check_refusal(data, values.get(Tlv.REASON) if kind == "value" else None)
    if kind == "value" or len(data) % 16 == 0:
        _check_announced(data)


def _promised(version: bytes | None) -> bool:
    """Whether a version is at least 0.1."""
    parts = (version or b"").decode("utf-8", "replace").partition("+")[0].split(".")[:2]
    if len(parts) == 2 and all(_PLAIN.match(part) for part in parts):
        return any(part.strip("0") for part in parts)
    return False


def _u32s(data: bytes) -> tuple[int, ...]:
    return tuple(
        data[at] << 24 | data[at + 1] << 16 | data[at + 2] << 8 | data[at + 3] for at in range(0, len(data), 4)
    )


def _numbers(limits: AnnouncedLimits | None) -> tuple[int, int, int] | None:
    if limits is None:
        return None
    return limits.transports, limits.requests_per_s, limits.frame_payload_bytes


def _check_refusal(data: bytes, reason: bytes | None) -> None:
    """A payload of OK refuses exactly if it is a list with a reason, of which 200 characters are shown."""
    told = read_refusal(data)
    if reason is None:
        assert told is None
    else:
        assert told is not None
        text = reason.decode("utf-8", "replace")
        assert text.startswith(told) and len(told) == min(len(text), 200)


def _check_announced(data: bytes) -> None:
    """A server's numbers arrive unless they exceed 32 bits; a client announces nothing."""
    numbers = [int.from_bytes(data[at : at + 5], "big") for at in (0, 5, 10)]
    window, aes = int.from_bytes(data[15:19], "big"), len(data) % 2 == 1
    payload = hello_payload(AnnouncedLimits(*numbers), window, aes=aes)
    read = read_hello(payload)
    assert read.extended and read.window_bytes == window and read.aes == aes
    assert _numbers(read.limits) == tuple(min(number, _U32_MOST) for number in numbers)
    bare = hello_payload(aes=aes)
    assert read_hello(bare) == Capabilities(True, None, 0, aes)
    assert len(payload) not in _TAKEN and len(bare) not in _TAKEN


def seeds() -> Iterator[bytes]:
    """Payloads of ours, of others and broken ones; refusals."""
    yield b""
    yield hello_payload()
    yield hello_payload(AnnouncedLimits(1_024, 200, 65_510))
    yield hello_payload(AnnouncedLimits(1_024, 200, 65_510), 1 << 25, aes=True)
    for version in ("0.1.0", "0.0.1", "1.0", "0.1", "x.y", "1_0.2", "-1.5", "٣.١", "9" * 30 + ".0"):
        yield encode_tlvs({Tlv.VERSION: version.encode(), Tlv.LIMITS: b"\xff" * 12})
    for version in ("1", "0+.1", "0.1+messaging", "00.00.9", "0.1.x", ".1"):
        yield encode_tlvs({Tlv.VERSION: version.encode()})
    for size in (3, 4, 5, 11, 13):
        yield encode_tlvs({Tlv.VERSION: b"0.1.0", Tlv.LIMITS: b"\1" * size, Tlv.WINDOW: b"\2" * size})
    yield encode_tlvs({Tlv.VERSION: b"0.1.0", Tlv.CIPHERS: b"\x02\x01"})
    yield encode_tlvs({Tlv.VERSION: b"0.1.0", Tlv.CIPHERS: b"\x02"})
    for reason in (b"", b"full", b"\xff" * 200, "ä".encode() * 201):
        yield encode_tlvs({Tlv.REASON: reason})
    yield encode_tlvs({Tlv.REASON: b"full"}) + b"\x01"
