"""The transaction with which a twin changes its relays and its key, for any answers of a node."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from dmsg.rmb.core.keys import KeyType, TwinKey, verify
from dmsg.rmb.twins.errors import MalformedAnswer
from dmsg.rmb.twins.extrinsic import Runtime, sign_extrinsic, ss58, update_call
from dmsg.rmb.twins.metadata import Metadata
from dmsg.rmb.twins.scale import Reader, compact
from fuzz.choices import Choices
from fuzz.oracles import outcome

_KEYS = (TwinKey(b"\x01" * 32, KeyType.ED25519), TwinKey(b"\x01" * 32, KeyType.SR25519))
_DIGITS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
#: An extension's part of the transaction: nothing, a zero, or the nonce.
_EXTRA = {
    "CheckNonZeroSender": "",
    "CheckSpecVersion": "",
    "CheckTxVersion": "",
    "CheckGenesis": "",
    "CheckMortality": "zero",
    "CheckEra": "zero",
    "CheckNonce": "nonce",
    "CheckWeight": "",
    "ChargeTransactionPayment": "zero",
    "CheckMetadataHash": "zero",
}
_NAMES = (*_EXTRA, "CheckSomethingNew")


def one_input(data: bytes) -> None:
    """The transaction says what was wanted and its signature covers all it is bound to; an unknown extension prevents it."""
    choices = Choices(data)
    key = _KEYS[choices.byte() > 250]  # slow, and drawn anew each time
    nonce = choices.below(1 << 8 * (1 + choices.byte() % 8))
    _check_compact(nonce)
    extensions = tuple(choices.pick(_NAMES) for _ in range(choices.byte() % 16))
    relays, pk = (choices.chunk(1024) if choices.flag() else None for _ in range(2))
    spec, transaction = choices.below(1 << 32), choices.below(1 << 32)
    metadata = Metadata(bytes((choices.byte(), choices.byte())), (b"", b""), extensions)
    genesis = hashlib.sha256(choices.rest()).digest()
    call = update_call(metadata, relays, pk)
    runtime = Runtime(genesis, spec, transaction, metadata)
    kind, extrinsic = outcome(lambda: sign_extrinsic(call, key, nonce, runtime), MalformedAnswer)
    assert (kind == "value") == (set(extensions) <= set(_EXTRA))
    if kind == "value":
        signed = _check_sent(extrinsic, key, nonce, runtime, (relays, pk))
        _check_signed(extrinsic, key, signed)
    _check_account(genesis)


def _check_sent(
    extrinsic: bytes, key: TwinKey, nonce: int, runtime: Runtime, wanted: tuple[bytes | None, bytes | None]
) -> bytes:
    """Read it as the chain does; gives the bytes to sign."""
    outer = Reader(extrinsic)
    reader = Reader(outer.bytes(len(extrinsic)))
    assert outer.at == len(extrinsic)
    assert reader.take(2) == b"\x84\x00" and reader.take(32) == key.account
    assert reader.u8() == (0 if key.kind is KeyType.ED25519 else 1)
    reader.skip(64)
    start = reader.at
    for name in runtime.metadata.extensions:
        if _EXTRA[name] == "zero":
            assert reader.u8() == 0
        elif _EXTRA[name] == "nonce":
            assert reader.compact() == nonce
    call_at = reader.at
    assert reader.take(2) == runtime.metadata.update_twin
    assert tuple(reader.bytes(1024) if reader.option() else None for _ in range(2)) == wanted
    assert reader.at == len(reader.data)
    additional = b""
    for name in runtime.metadata.extensions:
        match name:
            case "CheckSpecVersion":
                additional += runtime.spec_version.to_bytes(4, "little")
            case "CheckTxVersion":
                additional += runtime.transaction_version.to_bytes(4, "little")
            case "CheckGenesis" | "CheckMortality" | "CheckEra":
                additional += runtime.genesis
            case "CheckMetadataHash":
                additional += b"\x00"
    return reader.data[call_at:] + reader.data[start:call_at] + additional


def _check_signed(extrinsic: bytes, key: TwinKey, signed: bytes) -> None:
    if len(signed) > 256:
        signed = hashlib.blake2b(signed, digest_size=32).digest()
    outer = Reader(extrinsic)
    signature = key.kind.letter + outer.bytes(len(extrinsic))[35:99]
    if key.kind is KeyType.ED25519:
        assert signature == key.sign(signed)
    else:
        verify(key.account, signed, signature)


def _check_compact(number: int) -> None:
    """The number reads the same, and has the shortest form."""
    written = compact(number)
    assert Reader(written).compact() == number
    assert len(written) == next(
        (size for size, bits in ((1, 6), (2, 14), (4, 30)) if number < 1 << bits),
        1 + max(4, (number.bit_length() + 7) // 8),
    )


def _check_account(account: bytes) -> None:
    """The text of an account has the account, and two bytes that go with it."""
    text, number = ss58(account), 0
    for digit in text:
        number = number * 58 + _DIGITS.index(digit)
    named = number.to_bytes(35, "big")
    assert named[:33] == b"\x2a" + account
    assert named[33:] == hashlib.blake2b(b"SS58PRE" + named[:33]).digest()[:2]


def seeds() -> Iterator[bytes]:
    """Every extension, in and out of order, twice; one that is unknown; both keys; with and without values; a long one."""
    order = bytes(range(10))
    for key in (0, 255):
        for nonce in (
            b"\x00\x3f",
            b"\x01\x3f\xff",
            b"\x03\x3f\xff\xff\xff",
            b"\x03\x40\x00\x00\x00",
            b"\x07" + b"\xff" * 8,
        ):
            yield (
                bytes((key,))
                + nonce
                + b"\x0a"
                + order
                + b"\x01\x00\x01a\x01\x00\x02pk"
                + b"\x00\x00\x00\x95\x00\x00\x00\x02\x19\x12g"
            )
    yield b"\x00\x00\x05\x0f" + order[::-1] + b"\x06\x06\x04\x04\x09" + b"\x00\x00" + bytes(8) + b"\x0b\x12"
    yield b"\x00\x00\x05\x02\x00\x0a\x00\x00"
    yield b"\x00\x00\x05\x00" + b"\x01\x01\x2c" + bytes(300) + b"\x00" + bytes(8) + b"\x19\x12"
    for size in (228, 248, 249, 250, 251, 252):
        yield b"\x00\x00\x05\x00" + b"\x01\x00" + bytes((size,)) + bytes(size) + b"\x00" + bytes(8) + b"\x19\x12"
