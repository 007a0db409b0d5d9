"""The transaction that updates a twin, byte for byte."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from dmsg.rmb.core.keys import KeyType, TwinKey, verify
from dmsg.rmb.twins.errors import MalformedAnswer
from dmsg.rmb.twins.extrinsic import Runtime, sign_extrinsic, ss58, update_call
from dmsg.rmb.twins.metadata import read_metadata
from dmsg.rmb.twins.scale import Reader
from tests.rmb.twins.chain_bytes import EXTENSIONS, metadata

VECTORS = {
    one["id"]: one for one in json.loads((Path(__file__).parents[2] / "vectors" / "rmb.json").read_text())["vectors"]
}
GENESIS = bytes(range(32))
RUNTIME = Runtime(GENESIS, 149, 2, read_metadata(metadata()))
PK = b"\2" + bytes(range(32))


@pytest.mark.parametrize("kind", KeyType)
def test_the_recorded_form(kind):
    """The form seen on the running programs: 5902 84 00 account kind signature era nonce tip call."""
    key = TwinKey(bytes(range(32)), kind)
    call = update_call(RUNTIME.metadata, b"localhost", PK)
    made = sign_extrinsic(call, key, 0, RUNTIME)
    signature = made[37:101]
    expected = "5902 84 00".replace(" ", "") + key.account.hex() + ("00" if kind is KeyType.ED25519 else "01")
    assert made[:37].hex() == expected
    assert made[101:].hex() == "00 00 00 19 12 01 24".replace(" ", "") + b"localhost".hex() + "0184" + PK.hex()
    signed = call + b"\0\0\0" + bytes.fromhex("9500000002000000") + GENESIS + GENESIS
    verify(key.account, signed, kind.letter + signature)


def test_the_pallet_has_the_number_of_the_nodes_metadata():
    assert update_call(read_metadata(metadata(index=11)), None, None).hex() == "0b120000"


def test_a_long_payload_is_hashed_before_it_is_signed():
    key = TwinKey(bytes(range(32)), KeyType.ED25519)
    call = update_call(RUNTIME.metadata, b"a" * 300, None)
    made = Reader(sign_extrinsic(call, key, 70_000, RUNTIME)).bytes(1000)
    signed = call + b"\0" + bytes.fromhex("c2450400") + b"\0" + bytes.fromhex("9500000002000000") + GENESIS + GENESIS
    signed = hashlib.blake2b(signed, digest_size=32).digest()
    verify(key.account, signed, b"e" + made[35:99])


def test_a_hash_of_the_metadata_is_not_asked_for():
    key = TwinKey(bytes(range(32)), KeyType.ED25519)
    runtime = replace(RUNTIME, metadata=read_metadata(metadata(extensions=[*EXTENSIONS, "CheckMetadataHash"])))
    call = update_call(runtime.metadata, b"a.example", None)
    made = Reader(sign_extrinsic(call, key, 1, runtime)).bytes(1000)
    assert made[99:] == b"\0\4\0\0" + call
    signed = call + b"\0\4\0\0" + bytes.fromhex("9500000002000000") + GENESIS + GENESIS + b"\0"
    verify(key.account, signed, b"e" + made[35:99])


def test_nothing_is_signed_with_an_extension_that_is_not_known():
    runtime = replace(RUNTIME, metadata=read_metadata(metadata(extensions=[*EXTENSIONS, "CheckSomethingNew"])))
    with pytest.raises(MalformedAnswer):
        sign_extrinsic(b"\x19\x12\0\0", TwinKey(bytes(32), KeyType.ED25519), 0, runtime)


@pytest.mark.parametrize("case", VECTORS["chain/ss58"]["cases"], ids=lambda case: case[0])
def test_the_text_of_an_account(case):
    assert ss58(bytes.fromhex(case[1])) == case[0]
