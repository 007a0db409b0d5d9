"""What leaves a twin."""

from __future__ import annotations

import json
from itertools import count

import pytest

from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.errors import E2eError, EnvelopeExpired, EnvelopeTooLarge, NoReceiverKey, PeerCode
from dmsg.rmb.core.keys import KeyType, TwinKey, read_secret
from dmsg.rmb.core.limits import MAX_ENVELOPE_BYTES
from dmsg.rmb.core.messages import JsonError, OutgoingRequest, OutgoingResponse
from dmsg.rmb.core.replies import error_reply, response
from dmsg.rmb.core.sender import Sender
from dmsg.rmb.core.signing import verify_envelope
from dmsg.rmb.core.wire import Envelope, parse_envelope

from .conftest import LIVE

SECRET = b"\x01" * 32
THEIRS = EncryptionKey(b"\x02" * 32)
BY_NAME = {one["name"]: one for one in LIVE["envelopes"]}
PKS = {one["id"]: bytes.fromhex(one["pk"]) for one in LIVE["twins"] if one["pk"]}
SEEDS = {one["id"]: read_secret(one["seed"]) for one in LIVE["twins"]}


def sender_of(secret, twin, random, **options):
    key = TwinKey(secret, KeyType.ED25519)
    return Sender(SessionAddress(twin), key, EncryptionKey(secret), random, **options)


def request(payload=b"x", **fields):
    envelope = Envelope(uid="u", plain=payload, **fields)
    envelope.destination.twin = 10
    envelope.request.command = "c"
    return envelope


def resent(envelope, name):
    """What we send in place of a recorded envelope, with the nonce that was drawn for it."""
    recorded = parse_envelope(bytes.fromhex(BY_NAME[name]["hex"]))
    sender = sender_of(SEEDS[recorded.source.twin], recorded.source.twin, lambda size: recorded.cipher[:size])
    return sender.seal(envelope, PKS[recorded.destination.twin], recorded.timestamp).hex()


@pytest.mark.parametrize("one", [one for one in LIVE["envelopes"] if one.get("json_in")], ids=lambda one: one["name"])
def test_recorded_requests(one):
    recorded = parse_envelope(bytes.fromhex(one["hex"]))
    message = OutgoingRequest.from_json(json.dumps(one["json_in"]).encode())
    [envelope] = message.envelopes(recorded.uid, recorded.timestamp)
    assert resent(envelope, one["name"]) == one["hex"]


@pytest.mark.parametrize("service", ["echo", "empty", "fails"])
def test_recorded_answers_of_services(service):
    one = BY_NAME[f"answer of rmb-peer (svc.{service})"]
    asked = BY_NAME[f"JSON that rmb-peer hands to a service (svc.{service})"]["json_out"]
    recorded = parse_envelope(bytes.fromhex(one["hex"]))
    error = JsonError(recorded.error.code, recorded.error.message) if service == "fails" else None
    answer = OutgoingResponse(
        uid=asked["ref"],
        destination=SessionAddress.parse(asked["src"]),
        timestamp=recorded.timestamp,
        payload=bytes.fromhex(one["plain_hex"]),
        error=error,
    )
    assert resent(answer.envelope(), one["name"]) == one["hex"]


def test_the_recorded_answer_of_rmb_version():
    one = BY_NAME["answer of the plugin rmb.version"]
    recorded = parse_envelope(bytes.fromhex(one["hex"]))
    asked = Envelope(uid=recorded.uid)
    asked.source.CopyFrom(recorded.destination)
    receiver = EncryptionKey(read_secret(one["receiver_seed"]))
    version = receiver.decrypt(PKS[recorded.source.twin], recorded.cipher)
    assert isinstance(json.loads(version), str)
    assert resent(response(asked, version, "application/json"), one["name"]) == one["hex"]


def test_the_recorded_answer_to_anothers_signature():
    one = BY_NAME["answer to a request with another's signature"]
    recorded = parse_envelope(bytes.fromhex(one["hex"]))
    asked = Envelope(uid=recorded.uid, expiration=recorded.expiration)
    asked.source.CopyFrom(recorded.destination)
    reply = error_reply(asked, PeerCode.BAD_SIGNATURE, recorded.error.message, asked.expiration)
    assert resent(reply, one["name"]) == one["hex"]


def test_each_message_gets_a_nonce_of_its_own():
    numbers = count(1)
    sender = sender_of(SECRET, 1, lambda size: next(numbers).to_bytes(size, "big"))
    ciphers = [parse_envelope(sender.seal(request(), THEIRS.public_key, 5)).cipher for _ in range(3)]
    assert [int.from_bytes(cipher[:12], "big") for cipher in ciphers] == [1, 2, 3]
    assert [THEIRS.decrypt(EncryptionKey(SECRET).public_key, cipher) for cipher in ciphers] == [b"x"] * 3


def test_an_error_without_a_payload_is_encrypted_too():
    envelope = Envelope(uid="u")
    envelope.error.code = 5
    sealed = parse_envelope(sender_of(SECRET, 1, bytes).seal(envelope, THEIRS.public_key, 5))
    assert len(sealed.cipher) == 28


def test_nothing_goes_in_plain_text_that_may_not():
    sender = sender_of(SECRET, 1, bytes)
    with pytest.raises(NoReceiverKey):
        sender.seal(request(), None, 5)
    assert parse_envelope(sender.seal(request(b""), None, 5)).plain == b""
    allowed = sender_of(SECRET, 1, bytes, allow_plain=True)
    assert parse_envelope(allowed.seal(request(), None, 5)).plain == b"x"
    with pytest.raises(E2eError):
        allowed.seal(request(), bytes(33), 5)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (100, 300)),
        ({"expiration": 60}, (100, 60)),
        ({"expiration": 5000}, (100, 1800)),
        ({"timestamp": 90, "expiration": 60}, (100, 50)),
        ({"timestamp": 200, "expiration": 60}, (100, 60)),
    ],
)
def test_stamps(fields, expected):
    sealed = parse_envelope(sender_of(SECRET, 1, bytes).seal(request(**fields), THEIRS.public_key, 100))
    assert (sealed.timestamp, sealed.expiration) == expected
    verify_envelope(sealed, TwinKey(SECRET, KeyType.ED25519).account)
    assert SessionAddress.of(sealed.source) == (1, None)


@pytest.mark.parametrize("fields", [{"timestamp": 40, "expiration": 60}, {"timestamp": 100}])
def test_what_is_over_is_not_sent(fields):
    with pytest.raises(EnvelopeExpired):
        sender_of(SECRET, 1, bytes).seal(request(**fields), THEIRS.public_key, 100)


def test_what_no_relay_takes_is_not_sent():
    with pytest.raises(EnvelopeTooLarge) as caught:
        sender_of(SECRET, 1, bytes).seal(request(bytes(MAX_ENVELOPE_BYTES)), THEIRS.public_key, 100)
    assert caught.value.size > MAX_ENVELOPE_BYTES
