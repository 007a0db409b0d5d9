"""What our client says is what the public programs say, and what they were seen to say is taken."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from typing import Any
from uuid import UUID

import pytest
import sr25519
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from twisted.internet.defer import ensureDeferred

from dmsg.rmb.client.errors import CallRefused
from dmsg.rmb.client.handlers import Request
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.keys import KeyType, TwinKey, read_secret
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope, parse_envelope

from ..core.conftest import LIVE
from .conftest import key_of

RECORDED = {one["name"]: one for one in LIVE["envelopes"]}
#: The twin of the independent client that was recorded, and its key.
INDEPENDENT = 100
KEY = TwinKey(read_secret(RECORDED["encrypted request from rmb-peer"]["receiver_seed"]), KeyType.ED25519)


def recorded(name: str) -> Envelope:
    return parse_envelope(bytes.fromhex(RECORDED[name]["hex"]))


@pytest.fixture
def bus(world: Any) -> Any:
    """A world at the time of the recording, with its twins; ``bus.start(uid)`` makes the client of twin 100."""
    world.epoch_s = recorded("encrypted request from rmb-peer").timestamp - 5
    for one in LIVE["twins"]:
        relays = (one["relay"],) if one["relay"] else ()
        pk = bytes.fromhex(one["pk"]) if one["pk"] else None
        world.registry.twins[one["id"]] = Twin(one["id"], bytes.fromhex(one["account"]), relays, pk)
    world.registry.twins[INDEPENDENT] = Twin(INDEPENDENT, KEY.account)
    world.bus_relay = world.relay()

    def start(uid: str = "") -> Any:
        fixed = UUID(uid).bytes if uid else b""
        return world.client(
            INDEPENDENT,
            world.bus_relay,
            key=KEY,
            random=lambda count: fixed if fixed and count == 16 else os.urandom(count),
        )

    world.start = start
    return world


@pytest.mark.parametrize(
    "name", ["encrypted request from rmb-peer", "encrypted request, empty payload", "encrypted request with schema"]
)
def test_a_request_of_the_public_peer_is_served_and_answered(bus: Any, name: str) -> None:
    client, envelope = bus.start(), recorded(name)
    seen: list[Request] = []

    @client.service(envelope.request.command)
    async def serve(request: Request) -> bytes:
        seen.append(request)
        return b"answer"

    bus.bus_relay.deliver(envelope.SerializeToString(), SessionAddress(INDEPENDENT))
    bus.settle()
    [request] = seen
    assert request.data == bytes.fromhex(RECORDED[name]["plain_hex"])
    assert request.schema == RECORDED[name]["json_in"]["shm"]
    assert request.source == SessionAddress(RECORDED[name]["sender_twin"])
    [answer] = bus.bus_relay.seen
    assert (answer.uid, answer.destination.twin) == (envelope.uid, RECORDED[name]["sender_twin"])


@pytest.mark.parametrize(
    "name", ["answer of rmb-peer (svc.echo)", "answer of rmb-peer (svc.empty)", "answer of the plugin rmb.version"]
)
def test_an_answer_of_the_public_peer_answers_a_call(bus: Any, name: str) -> None:
    envelope = recorded(name)
    client = bus.start(envelope.uid)
    call = ensureDeferred(client.call(envelope.source.twin, "svc.echo", timeout=30))
    bus.settle()
    bus.bus_relay.deliver(envelope.SerializeToString(), SessionAddress(INDEPENDENT))
    data = bus.result(call).data
    if "plain_hex" in RECORDED[name]:
        assert data == bytes.fromhex(RECORDED[name]["plain_hex"])
    else:
        assert data.startswith(b'"')


@pytest.mark.parametrize("name", ["answer of rmb-peer (svc.fails)", "answer to a request with another's signature"])
def test_an_error_of_the_public_peer_ends_a_call(bus: Any, name: str) -> None:
    envelope = recorded(name)
    client = bus.start(envelope.uid)
    call = ensureDeferred(client.call(envelope.source.twin, "svc.fails", timeout=30))
    bus.settle()
    bus.bus_relay.deliver(envelope.SerializeToString(), SessionAddress(INDEPENDENT))
    with pytest.raises(CallRefused) as refused:
        bus.result(call)
    assert (refused.value.code, refused.value.text) == (envelope.error.code, envelope.error.message)
    schema = envelope.schema if envelope.HasField("schema") else None
    assert (refused.value.timestamp, refused.value.schema) == (envelope.timestamp, schema) and envelope.timestamp


# --- what we say, checked without our own code -------------------------------------------------------------------------------


def challenge(one: Envelope) -> bytes:
    """As :ref:`spec-rmb-signature` has it, made once more."""

    def address(field: Any) -> str:
        return str(field.twin) + (field.connection if field.HasField("connection") else "")

    kind = one.WhichOneof("message")
    said = {"request": one.request.command, "error": f"{one.error.code}{one.error.message}"}.get(kind or "", "")
    head = f"{one.uid}{one.tags}{one.timestamp}{one.expiration}{address(one.source)}{address(one.destination)}{said}"
    text = head + one.schema + one.federation
    return hashlib.md5(text.encode() + (one.cipher or one.plain), usedforsecurity=False).digest()


def is_signed_by(key: TwinKey, message: bytes, signature: bytes) -> bool:
    if key.kind is KeyType.SR25519:
        return signature[:1] == b"s" and bool(sr25519.verify(signature[1:], message, key.account))
    Ed25519PublicKey.from_public_bytes(key.account).verify(signature[1:], message)
    return signature[:1] == b"e"


@pytest.mark.parametrize("kind", list(KeyType))
def test_what_we_send_is_signed_and_stamped_as_the_public_programs_do(world: Any, kind: KeyType) -> None:
    relay = world.relay()
    keys = {number: key_of(number, kind) for number in (1, 2)}
    for number, key in keys.items():
        world.registry.twins[number] = Twin(number, key.account)
    service = world.client(2, relay, key=keys[2])
    caller = world.client(1, relay, key=keys[1], session="s1")

    @service.service("echo")
    async def echo(request: Request) -> bytes:
        return request.data

    world.result(caller.call(2, "echo", b"x", timeout=5, tags="t", schema="text/plain"))
    with pytest.raises(CallRefused):
        world.result(caller.call(2, "other", timeout=5))
    assert [one.WhichOneof("message") for one in relay.seen] == ["request", "response", "request", "error"]
    for one in relay.seen:
        assert is_signed_by(keys[one.source.twin], challenge(one), one.signature)
        assert abs(one.timestamp - world.now_s()) <= 2
        assert 5 <= one.expiration <= 6
        assert len(one.cipher) >= 28
        assert not one.federation
        assert not one.relays
    assert str(UUID(relay.seen[0].uid)) == relay.seen[0].uid
    assert UUID(relay.seen[0].uid).version == 4
    assert (relay.seen[1].uid, relay.seen[1].destination.connection) == (relay.seen[0].uid, "s1")


def test_our_token_is_one_that_the_public_relay_takes(world: Any) -> None:
    relay = world.relay()
    world.client(1, relay)
    [token] = relay.tokens
    parts: list[bytes] = [base64.urlsafe_b64decode(part + "==") for part in token.split(".")]
    assert parts[0] == b'{"alg":"RS512"}'
    claims = json.loads(parts[1])
    assert list(claims) == ["sub", "sid", "iat", "exp", "aud"]  # it takes what it does not know
    assert (claims["sub"], claims["sid"], claims["aud"]) == (1, None, "127.0.0.1:9000")
    assert 0 < claims["exp"] - claims["iat"] <= 300
    assert is_signed_by(key_of(1), token.rpartition(".")[0].encode(), parts[2])
