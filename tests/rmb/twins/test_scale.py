"""SCALE against the vectors, against an independent library, and against bytes that no honest node sends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scalecodec.base import RuntimeConfigurationObject, ScaleBytes

from dmsg.rmb.core.twin import Twin
from dmsg.rmb.twins.errors import MalformedAnswer
from dmsg.rmb.twins.scale import (
    EVENTS_KEY,
    Reader,
    account_key,
    compact,
    decode_number,
    decode_twin,
    optional,
    twin_key,
    with_length,
)

VECTORS = {
    one["id"]: one for one in json.loads((Path(__file__).parents[2] / "vectors" / "rmb.json").read_text())["vectors"]
}
KEYS = VECTORS["chain/storage-keys"]
TWINS = VECTORS["chain/twin-scale"]["cases"]
ALICE = bytes.fromhex(VECTORS["keys/alice"]["sr25519_public_hex"])

ENTITY = [["entity_id", "u32"], ["signature", "HexBytes"]]
TWIN = [
    ["id", "u32"],
    ["account_id", "[u8; 32]"],
    ["relay", "Option<HexBytes>"],
    ["entities", "Vec<Entity>"],
    ["pk", "Option<HexBytes>"],
]
LIBRARY = RuntimeConfigurationObject()
LIBRARY.update_type_registry(
    {"types": {"Entity": {"type": "struct", "type_mapping": ENTITY}, "Twin": {"type": "struct", "type_mapping": TWIN}}}
)


def test_storage_keys():
    assert twin_key(1).hex() == KEYS["twins_1_key_hex"]
    assert twin_key(55).hex() == KEYS["twins_55_key_hex"]
    assert account_key(ALICE).hex() == KEYS["twin_id_by_account_alice_sr_key_hex"]
    assert EVENTS_KEY.hex() == KEYS["system_events_key_hex"]


@pytest.mark.parametrize("case", TWINS, ids=lambda case: case["id"])
def test_twins(case):
    found = decode_twin(bytes.fromhex(case["scale_hex"]))
    relays = tuple(sorted(case["relay"].split("_"))) if case["relay"] else ()
    pk = bytes.fromhex(case["pk_hex"]) if case["pk_hex"] else None
    assert found == Twin(case["id"], bytes.fromhex(case["account_hex"]), relays, pk)


@pytest.mark.parametrize("case", TWINS, ids=lambda case: case["id"])
def test_a_twin_that_is_cut_anywhere_is_malformed(case):
    data = bytes.fromhex(case["scale_hex"])
    for length in range(len(data)):
        with pytest.raises(MalformedAnswer):
            decode_twin(data[:length])


def test_what_a_later_chain_adds_to_a_twin_does_no_harm():
    data = bytes.fromhex(TWINS[0]["scale_hex"])
    assert decode_twin(data + b"more") == decode_twin(data)


HEAD = b"\1\0\0\0" + bytes(32)


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\0" + bytes(32) + b"\0\0\0",  # number 0
        HEAD + b"\2\0\0",  # an option of 2
        HEAD + optional(bytes(1025)) + b"\0\0",  # relays longer than the chain keeps
        HEAD + b"\0\0" + optional(bytes(129)),  # a key longer than the chain keeps
        HEAD + b"\0" + compact(2**32) + b"\0",  # more entities than there are bytes
        HEAD + b"\0" + compact(1) + bytes(4) + with_length(bytes(2000)) + b"\0",  # an entity with a long signature
        HEAD + b"\1\xff" + b"\xff" * 70,  # a length of 67 bytes
    ],
)
def test_what_cannot_be_a_twin_is_malformed(data):
    with pytest.raises(MalformedAnswer):
        decode_twin(data)


def test_relays_that_are_no_host_names_are_left_out():
    relays = b"ok.example_\xff\xfe_bad host_[::1]_"
    assert decode_twin(HEAD + optional(relays) + b"\0\0").relays == ("ok.example",)


def test_an_empty_encryption_key_is_none():
    assert decode_twin(HEAD + b"\0\0" + optional(b"")).pk is None


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data):
    for decode in (decode_twin, decode_number, lambda data: Reader(data).compact(), lambda data: Reader(data).bytes(9)):
        try:
            decode(data)
        except MalformedAnswer:
            continue


@given(st.integers(0, 2**64 - 1))
def test_numbers_are_written_as_the_library_does(number):
    assert bytes(LIBRARY.create_scale_object("Compact<u64>").encode(number).data) == compact(number)
    assert Reader(compact(number)).compact() == number


@given(
    st.integers(1, 2**32 - 1),
    st.binary(min_size=32, max_size=32),
    st.none() | st.binary(min_size=1, max_size=128),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=100)), max_size=5),
)
def test_twins_are_read_as_the_library_writes_them(number, account, pk, entities):
    value = {
        "id": number,
        "account_id": "0x" + account.hex(),
        "relay": "0x" + b"b.example_a.example".hex(),
        "entities": [{"entity_id": one, "signature": "0x" + signature.hex()} for one, signature in entities],
        "pk": None if pk is None else "0x" + pk.hex(),
    }
    data = bytes(LIBRARY.create_scale_object("Twin").encode(value).data)
    assert LIBRARY.create_scale_object("Twin", ScaleBytes(data)).decode() == value
    assert decode_twin(data) == Twin(number, account, ("a.example", "b.example"), pk)
