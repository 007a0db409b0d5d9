"""Keys and signatures of twins, and texts that two of them encrypt, from bytes of strangers."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.rmb.core.e2e import NONCE_BYTES, OVERHEAD_BYTES, EncryptionKey
from dmsg.rmb.core.errors import BadSignature, E2eError, InvalidSecret, InvalidTwin
from dmsg.rmb.core.keys import SECRET_BYTES, SIGNATURE_BYTES, KeyType, TwinKey, read_secret, verify
from dmsg.rmb.core.limits import MAX_RELAYS
from dmsg.rmb.core.twin import Twin, check_relay, format_relays, parse_relays
from fuzz.choices import Choices
from fuzz.oracles import as_text, outcome

_KEYS = tuple(TwinKey(b"\x01" * SECRET_BYTES, kind) for kind in KeyType)
_SIGNED = tuple(key.sign(b"text") for key in _KEYS)
_OURS, _THEIRS = EncryptionKey(b"\x01" * 32), EncryptionKey(b"\x02" * 32)
_CIPHER = _THEIRS.encrypt(_OURS.public_key, b"text", bytes(NONCE_BYTES))
DICTIONARY = (b"0x", b"ed", *(key.kind.letter for key in _KEYS), *(key.account for key in _KEYS), *_SIGNED, _CIPHER)


def one_input(data: bytes) -> None:
    """The first byte chooses the kind of the rest. Texts that our keys did not make are refused with typed errors."""
    choices = Choices(data)
    match choices.below(5):
        case 0:
            _signature(choices)
        case 1:
            _cipher(choices)
        case 2:
            _secret(as_text(choices.rest()))
        case 3:
            _relays(as_text(choices.rest()))
        case _:
            _twin(choices)


def _signature(choices: Choices) -> None:
    """A signature over a text of one of our keys, altered in a few places, or any bytes; for its account or any."""
    at = choices.below(len(_KEYS))
    account, signature = _KEYS[at].account, bytearray(_SIGNED[at])
    if choices.flag():
        account = choices.chunk(40)
    while choices.left:
        if choices.flag():
            signature[choices.below(256) % len(signature)] ^= choices.byte()
        else:
            signature[:] = choices.chunk() or b"\0"
    kind, _ = outcome(lambda: verify(account, b"text", bytes(signature)), BadSignature)
    if kind == "value":
        assert len(signature) == SIGNATURE_BYTES
        # The neutral element would pass for every text.
        assert outcome(lambda: verify(account, b"another", bytes(signature)), BadSignature)[0] == "error"
    elif (account, bytes(signature)) == (_KEYS[at].account, _SIGNED[at]):
        raise AssertionError("our own signature was refused")


def _cipher(choices: Choices) -> None:
    cipher, pk = bytearray(_CIPHER), _THEIRS.public_key
    if choices.flag():
        pk = choices.chunk(40)
    while choices.left:
        if choices.flag():
            cipher[choices.below(256) % len(cipher)] ^= choices.byte()
        else:
            cipher[:] = choices.chunk() or b"\0"
    kind, plain = outcome(lambda: _OURS.decrypt(pk, bytes(cipher)), E2eError)
    assert (kind == "value") == (cipher == _CIPHER and pk == _THEIRS.public_key)
    if kind == "value":
        assert plain == b"text" and len(cipher) == len(plain) + OVERHEAD_BYTES


def _secret(text: str) -> None:
    """Seeds and phrases, which are invalid if longer than a line."""
    kind, secret = outcome(lambda: read_secret(text), InvalidSecret)
    if kind == "error":
        return
    assert len(secret) == SECRET_BYTES and read_secret(f"0x{secret.hex()}") == secret
    assert secret.hex() not in repr(TwinKey(secret, KeyType.ED25519))
    kind, key = outcome(lambda: EncryptionKey(secret), E2eError)
    assert kind == "error" or len(key.public_key) == 33


def _relays(text: str) -> None:
    hosts = parse_relays(text)
    assert len(hosts) <= MAX_RELAYS and list(hosts) == sorted(set(hosts))
    assert parse_relays(format_relays(hosts)) == hosts
    kind, _ = outcome(lambda: check_relay(text), InvalidTwin)
    if kind == "value":
        assert parse_relays(text) == (text,) and text.isascii() and text.isprintable() and "_" not in text


def _twin(choices: Choices) -> None:
    number, pk = choices.below(1 << 40) - 1, choices.chunk(140)
    kind, twin = outcome(lambda: Twin(number, choices.chunk(40), (), pk), InvalidTwin)
    if kind == "value":
        assert 0 < twin.id < 1 << 32 and len(twin.account) == 32 and 0 < len(twin.pk) <= 128


def seeds() -> Iterator[bytes]:
    """Ours as they are, altered, cut, of another key; seeds and phrases; relays; twins."""
    for at in range(len(_KEYS)):
        mine = bytes((0, at, 0))
        yield mine
        yield mine + b"\x01\x20\x01"
        yield mine + b"\x01\x00\x1f"
        yield mine + b"\x00" + bytes((65,)) + _SIGNED[1 - at]
        yield mine + b"\x00\x40" + _SIGNED[at][:64]
        yield bytes((0, at, 1, 32)) + bytes(32)
        yield bytes((0, at, 1, 5)) + b"short"
        yield bytes((0, at, 1, 32)) + b"\xff" * 32 + b"\x00\x41" + _SIGNED[at][:1] + b"\xff" * 64
    yield b"\x01\x00"
    yield b"\x01\x00\x01\x0c\x01"
    yield b"\x01\x00\x00\x10" + bytes(16)
    yield b"\x01\x01\x21" + b"\x05" * 33
    phrase = "bottom drive obey lake curtain smoke basket hold race lonely fit walk"
    for secret in (
        "0x" + "01" * 32,
        "0x" + "ff" * 32,
        "0x01",
        "0x" + "zz" * 32,
        phrase,
        phrase + " walk",
        "0X" + "01" * 32,
    ):
        yield b"\x02" + secret.encode()
    many = "_".join(f"r{number}.example:{number}" for number in range(20))
    for hosts in ("a.example_b.example:80", many, "a:99999_-_a..b_192.0.2.1", "a.example", "x" * 300):
        yield b"\x03" + hosts.encode()
    for number in (1, 0, 1 << 32, (1 << 32) + 1):
        yield b"\x04" + number.to_bytes(5, "big") + b"\x21" + b"k" * 33 + b"\x20" + b"a" * 32
    yield b"\x04" + bytes(4) + b"\x05" + b"\x00" + b"\x20" + b"a" * 32
    yield b"\x04" + bytes(4) + b"\x05" + b"\x8b" + b"k" * 139
