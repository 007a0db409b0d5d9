"""The end-to-end handshake: a responder that gets any message 1, an initiator that gets any message 2."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.crypto.aead import Cipher
from dmsg.crypto.noise import NoiseHandshake
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.e2e_handshake import Resume, SecureInitiator, SecureResponder, prologue
from dmsg.mux.core.errors import IntegrityError
from dmsg.mux.core.tlv import Tlv, encode_tlvs
from fuzz.choices import Choices, repeatable
from fuzz.oracles import KEYS, check_memory

_INITIATOR, _RESPONDER, _RELAY = KEYS[:3]
_PROLOGUE = prologue(_INITIATOR.public_key, _RESPONDER.public_key, _RELAY.public_key)


def one_input(data: bytes) -> None:
    """The first byte chooses the receiver and whether it has AES, and whether the rest is a message or the payload of a
    correctly sealed message.

    A message that is not the peer's own is refused. In the peer's own message everything but the seal may be hostile.
    """
    choices = Choices(data)
    how = choices.byte()
    if how & 1:
        _feed_initiator(choices.rest(), sealed=bool(how & 2), aes=bool(how & 4))
    else:
        _feed_responder(choices.rest(), sealed=bool(how & 2), aes=bool(how & 4))


def _feed_responder(data: bytes, *, sealed: bool, aes: bool) -> None:
    if sealed:
        noise = NoiseHandshake(
            "KK",
            initiator=True,
            static=_INITIATOR,
            remote_static=_RESPONDER.public_key.raw,
            prologue=_PROLOGUE,
            random=repeatable(b"i"),
        )
        message = noise.write_message(data)
    else:
        message = data
    try:
        responder = SecureResponder(
            _RESPONDER, _INITIATOR.public_key, _RELAY.public_key, message, aes=aes, random=repeatable(b"r")
        )
    except IntegrityError:
        return
    assert sealed, "a message was taken that the initiator did not make"
    assert len(responder.service.encode()) <= 3 * len(data)
    try:
        resume = responder.resume
    except RemoteProtocolError:
        resume = None
    answer, keys = responder.answer(resume)
    assert aes or keys.cipher is Cipher.CHACHA
    noise.read_message(answer)
    assert noise.result is not None
    assert (keys.send_key, keys.receive_key) == (noise.result.receive_key, noise.result.send_key)
    check_memory([responder.service, resume], len(data))


def _feed_initiator(data: bytes, *, sealed: bool, aes: bool) -> None:
    initiator = SecureInitiator(
        _INITIATOR,
        _RESPONDER.public_key,
        _RELAY.public_key,
        service="chat",
        resume=Resume(bytes(16), 7),
        aes=aes,
        random=repeatable(b"i"),
    )
    message = data
    if sealed:
        noise = NoiseHandshake(
            "KK",
            initiator=False,
            static=_RESPONDER,
            remote_static=_INITIATOR.public_key.raw,
            prologue=_PROLOGUE,
            random=repeatable(b"r"),
        )
        noise.read_message(initiator.message)
        message = noise.write_message(data)
    try:
        keys, _ = initiator.finish(message)
    except IntegrityError:
        return
    assert sealed, "a message was taken that the responder did not make"
    assert aes or keys.cipher is Cipher.CHACHA
    assert noise.result is not None
    assert (keys.send_key, keys.receive_key) == (noise.result.receive_key, noise.result.send_key)


def seeds() -> Iterator[bytes]:
    """Genuine messages of both sides, and payloads with every kind of entry, right and wrong."""
    random = repeatable(b"seeds")
    initiator = SecureInitiator(_INITIATOR, _RESPONDER.public_key, _RELAY.public_key, service="chat", random=random)
    yield b"\x00" + initiator.message[:-1]
    yield b"\x01" + initiator.message
    values = {Tlv.VERSION: b"0.1.0", Tlv.SERVICE: b"chat\xff", Tlv.RESUME: Resume(bytes(16), 1 << 40).encode()}
    for how in (b"\x02", b"\x03", b"\x06", b"\x07"):
        yield how
        yield how + encode_tlvs(values)
        yield how + encode_tlvs({Tlv.RESUME: bytes(23)})
        yield how + encode_tlvs({Tlv.SERVICE: "ü".encode() * 127})
        yield how + encode_tlvs(values)[:-1]
        yield how + encode_tlvs(values) * 2
        yield how + encode_tlvs({**values, Tlv.CIPHERS: b"\x02\x01"})
