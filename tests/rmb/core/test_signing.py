"""What is signed, and whether it was."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.rmb.core.errors import BadSignature
from dmsg.rmb.core.keys import KeyType, TwinKey, read_secret
from dmsg.rmb.core.signing import challenge, sign_envelope, verify_envelope
from dmsg.rmb.core.wire import Envelope, parse_envelope

from .conftest import DERIVED, LIVE

CHALLENGES = [one for name, one in DERIVED.items() if name.startswith("challenge/") and "envelope_signed_pb_hex" in one]
#: Twins whose signatures were recorded, by number.
ACCOUNTS = {one["id"]: bytes.fromhex(one["account"]) for one in LIVE["twins"]}
RECORDED = {
    f"{one['name']} ({field})": bytes.fromhex(one[field])
    for one in LIVE["envelopes"]
    for field in ("hex", "request_hex")
    if one.get(field)
}


def built(fields):
    envelope = Envelope(
        **{name: fields[name] for name in ("uid", "tags", "timestamp", "expiration", "schema") if name in fields}
    )
    if "federation" in fields:
        envelope.federation = fields["federation"]
    envelope.relays.extend(fields.get("relays", ()))
    for name in ("source", "destination"):
        if name in fields:
            twin, *connection = fields[name]
            address = getattr(envelope, name)
            address.twin = twin
            if connection:
                address.connection = connection[0]
    if "request" in fields:
        envelope.request.command = fields["request"]
    if "response" in fields:
        envelope.response.SetInParent()
    if "error" in fields:
        envelope.error.code, envelope.error.message = fields["error"]
    if "plain" in fields:
        envelope.plain = bytes.fromhex(fields["plain"])
    return envelope


@pytest.mark.parametrize("one", CHALLENGES, ids=lambda one: one["id"])
def test_derived_signatures(one):
    envelope = parse_envelope(bytes.fromhex(one["envelope_unsigned_pb_hex"]))
    assert envelope == built(one["fields"])
    assert challenge(envelope).hex() == one["md5_hex"]
    assert hashlib.md5(bytes.fromhex(one["preimage_hex"])).hexdigest() == one["md5_hex"]
    key = TwinKey(bytes.fromhex(one["ed25519_seed_hex"]), KeyType.ED25519)
    assert key.account.hex() == one["account_public_hex"]
    sign_envelope(envelope, key)
    assert envelope.signature.hex() == one["signature_hex"]
    assert envelope.SerializeToString().hex() == one["envelope_signed_pb_hex"]
    verify_envelope(parse_envelope(bytes.fromhex(one["envelope_signed_pb_hex"])), key.account)


def test_different_envelopes_can_have_one_challenge():
    one = DERIVED["challenge/collision"]
    envelopes = [parse_envelope(bytes.fromhex(data)) for data in one["envelopes_pb_hex"]]
    assert {challenge(envelope).hex() for envelope in envelopes} == {one["md5_hex"]}
    assert len({envelope.SerializeToString() for envelope in envelopes}) == 3


@pytest.mark.parametrize("case", DERIVED["signature/negative"]["cases"], ids=lambda case: case["error"])
def test_what_is_no_signature(case):
    envelope = Envelope()
    if "signature_hex" in case:
        envelope.signature = bytes.fromhex(case["signature_hex"])
    with pytest.raises(BadSignature) as caught:
        verify_envelope(envelope, TwinKey(bytes(32)).account)
    assert caught.value.problem == case["error"]
    assert caught.value.text == f"invalid envelope signature: {case['error']}"


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_envelopes(name):
    envelope = parse_envelope(RECORDED[name])
    if envelope.source.twin and envelope.HasField("signature"):
        verify_envelope(envelope, ACCOUNTS[envelope.source.twin])
    else:
        assert name.startswith("relay: ")
        with pytest.raises(BadSignature):
            verify_envelope(envelope, ACCOUNTS[100])


@pytest.mark.parametrize("one", [one for one in LIVE["envelopes"] if one.get("sender_seed") and one.get("hex")])
def test_recorded_envelopes_get_the_same_signature_from_us(one):
    recorded = parse_envelope(bytes.fromhex(one["hex"]))
    envelope = Envelope()
    envelope.CopyFrom(recorded)
    envelope.ClearField("signature")
    sign_envelope(envelope, TwinKey(read_secret(one["sender_seed"]), KeyType.ED25519))
    assert envelope == recorded


@given(st.binary(max_size=50), st.text(max_size=20), st.sampled_from(list(KeyType)))
def test_what_is_signed_is_verified_and_what_is_changed_is_not(payload, command, kind):
    key = TwinKey(b"\x01" * 32, kind)
    envelope = Envelope(uid="u", plain=payload, timestamp=5, expiration=6)
    envelope.request.command = command
    sign_envelope(envelope, key)
    verify_envelope(parse_envelope(envelope.SerializeToString()), key.account)
    envelope.plain += b"x"
    with pytest.raises(BadSignature):
        verify_envelope(envelope, key.account)
