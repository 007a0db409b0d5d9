"""What the two sides of a connection tell each other inside its handshake (:ref:`spec-hello`). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.discovery.entry import SECURE_VERSION, promises_security
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.ciphers import CIPHERS, offers_aes
from dmsg.mux.core.tlv import Tlv, decode_tlvs, encode_tlvs


@dataclass(frozen=True, slots=True)
class AnnouncedLimits:
    """The limits that a server announces and its clients obey: open transports, requests a second, bytes of a frame."""

    transports: int
    requests_per_s: int
    frame_payload_bytes: int

    def encode(self) -> bytes:
        """Three u32."""
        numbers = (self.transports, self.requests_per_s, self.frame_payload_bytes)
        return b"".join(min(number, 0xFFFFFFFF).to_bytes(4, "big") for number in numbers)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What is known of the other side of a connection. A base peer is ``Capabilities()``."""

    extended: bool = False
    limits: AnnouncedLimits | None = None
    #: How far the window of a transport may grow (:ref:`spec-windows`); 0 if the server does not say.
    window_bytes: int = 0
    #: Whether it can do AES-256-GCM (:ref:`spec-ciphers`).
    aes: bool = False


def hello_payload(limits: AnnouncedLimits | None = None, window_bytes: int = 0, *, aes: bool = False) -> bytes:
    """The payload of handshake message 2 (server, with its limits and the largest window it bears) or 3 (client).

    With ``aes`` the sender offers AES-256-GCM. Both sides use it if both offer it.
    """
    values = {Tlv.VERSION: SECURE_VERSION.encode()}
    if limits is not None:
        values[Tlv.LIMITS] = limits.encode()
    if window_bytes:
        values[Tlv.WINDOW] = window_bytes.to_bytes(4, "big")
    if aes:
        values[Tlv.CIPHERS] = CIPHERS
    return encode_tlvs(values)


def read_refusal(payload: bytes) -> str | None:
    """Why the server refuses the connection, from the payload of its OK; ``None`` when it admits it.

    Base peers do not look at that payload, whatever it is.
    """
    try:
        reason = decode_tlvs(payload).get(Tlv.REASON)
    except RemoteProtocolError:
        return None
    return None if reason is None else reason.decode("utf-8", "replace")[:200]


def read_hello(payload: bytes) -> Capabilities:
    """What the peer's payload says. Base peers send none; a payload that is not of the extension counts as none."""
    if not payload:
        return Capabilities()
    try:
        values = decode_tlvs(payload, "handshake")
    except RemoteProtocolError:
        return Capabilities()
    if not promises_security(values.get(Tlv.VERSION, b"").decode("utf-8", "replace")):
        return Capabilities()
    raw = values.get(Tlv.LIMITS, b"")
    limits = AnnouncedLimits(*(int.from_bytes(raw[at : at + 4], "big") for at in (0, 4, 8))) if len(raw) == 12 else None
    window = values.get(Tlv.WINDOW, b"")
    window_bytes = int.from_bytes(window, "big") if len(window) == 4 else 0
    return Capabilities(True, limits, window_bytes, offers_aes(values))
