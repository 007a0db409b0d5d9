"""No envelope does more than it should, whatever is in it and however it is signed."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import ensureDeferred

from dmsg.rmb.client.handlers import Request
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.signing import sign_envelope
from dmsg.rmb.core.wire import Envelope

from .conftest import EPOCH_S, World, key_of

CALLER, SERVICE, STRANGER, KEYLESS = 1, 2, 3, 4
TEXTS = st.one_of(st.text(max_size=8), st.text(min_size=300, max_size=400), st.sampled_from(["echo", "fail-fast"]))
NUMBERS = st.one_of(st.integers(0, 2**64 - 1), st.integers(EPOCH_S - 400, EPOCH_S + 400), st.integers(0, 2000))
TWINS = st.sampled_from([0, CALLER, SERVICE, STRANGER, KEYLESS, 77, 2**32 - 1])
SEALED = EncryptionKey(key_of(STRANGER).secret).encrypt(
    EncryptionKey(key_of(SERVICE).secret).public_key, b"secret", bytes(12)
)


@st.composite
def envelopes(draw: st.DrawFn) -> Envelope:
    """An envelope with any of its fields."""
    one = Envelope(uid=draw(TEXTS), timestamp=draw(NUMBERS), expiration=draw(NUMBERS))
    for address in (one.source, one.destination):
        if draw(st.booleans()):
            SessionAddress(draw(TWINS), draw(st.none() | TEXTS)).write_to(address)
    if draw(st.booleans()):
        SessionAddress(SERVICE).write_to(one.destination)
    kind = draw(st.sampled_from([None, "request", "response", "error", "ping", "pong"]))
    if kind == "request":
        one.request.command = draw(TEXTS)
    elif kind == "error":
        one.error.code = draw(st.integers(0, 2**32 - 1))
        one.error.message = draw(TEXTS)
    elif kind is not None:
        getattr(one, kind).SetInParent()
    for name in ("tags", "schema", "federation"):
        if draw(st.booleans()):
            setattr(one, name, draw(TEXTS))
    payload = draw(st.sampled_from([None, "plain", "cipher"]))
    if payload is not None:
        setattr(one, payload, draw(st.binary(max_size=40) | st.just(SEALED)))
    signer = draw(st.sampled_from([None, STRANGER, KEYLESS, CALLER]))
    if signer is not None:
        sign_envelope(one, key_of(signer))
    elif draw(st.booleans()):
        one.signature = draw(st.binary(max_size=70))
    return one


@given(st.lists(st.one_of(envelopes().map(Envelope.SerializeToString), st.binary(max_size=60)), max_size=12))
@settings(max_examples=150)
def test_any_messages_of_a_relay_leave_the_client_at_work(messages: list[bytes]) -> None:
    world = World()
    relay = world.relay()
    world.registry.add(STRANGER)
    world.registry.add(KEYLESS, with_key=False)
    service = world.client(SERVICE, relay)
    caller = world.client(CALLER, relay)
    served: list[Request] = []

    @service.service("echo")
    async def echo(request: Request) -> bytes:
        served.append(request)
        return request.data

    call: Any = ensureDeferred(caller.call(SERVICE, "echo", b"x", timeout=5))
    for message in messages:
        for twin in (SERVICE, CALLER):
            relay.deliver(message, SessionAddress(twin))
    world.settle()
    assert call.result.data == b"x"
    assert len(relay.tokens) == 2, "no session had to connect again"
    for request in served:
        assert request.source.twin in (CALLER, STRANGER)
        assert request.sealed
    world.stop()
