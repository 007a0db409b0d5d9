"""The handshake of a connection as a core: chunks, payloads, limits, time (:ref:`spec-handshake`)."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.crypto.keys import SecretKey
from dmsg.crypto.noise import NoiseHandshake
from dmsg.errors import LocalProtocolError, RemoteProtocolError
from dmsg.mux.core.events import HandshakeDone
from dmsg.mux.core.handshake import HANDSHAKE_TIMEOUT_S, MESSAGE_LIMIT_BYTES, Handshake, Role
from dmsg.mux.core.hello import AnnouncedLimits, Capabilities, hello_payload, read_hello
from dmsg.mux.core.tlv import Tlv, encode_tlvs
from dmsg.testing.strategies import cuts

ALICE, SERVER = (SecretKey(hashlib.sha256(name).digest()) for name in (b"alice", b"server"))


def client(payload: bytes = b"", **options: float) -> Handshake:
    return Handshake(Role.CLIENT, ALICE, SERVER.public_key, now=0.0, payload=payload, **options)  # type: ignore[arg-type]


def server(payload: bytes = b"", **options: float) -> Handshake:
    return Handshake(Role.SERVER, SERVER, now=0.0, payload=payload, **options)  # type: ignore[arg-type]


def shake(one: Handshake, other: Handshake) -> tuple[HandshakeDone, HandshakeDone]:
    other.receive_data(one.data_to_send(), 0.0)
    [done] = one.receive_data(other.data_to_send(), 0.0)
    [there] = other.receive_data(one.data_to_send(), 0.0)
    assert isinstance(done, HandshakeDone) and isinstance(there, HandshakeDone)
    return done, there


def packet(message: bytes) -> bytes:
    return len(message).to_bytes(2, "big") + message


limits = st.builds(AnnouncedLimits, *[st.integers(0, 2**32 - 1)] * 3)
payloads = st.one_of(
    st.binary(max_size=1_000), st.builds(hello_payload, limits, st.integers(0, 2**32 - 1), aes=st.booleans())
)


@given(payloads, payloads)
@settings(max_examples=25)
def test_what_messages_2_and_3_say_is_in_the_events(from_server: bytes, from_client: bytes) -> None:
    done, there = shake(client(from_client), server(from_server))
    assert done.peer == read_hello(from_server)
    assert there.peer == read_hello(from_client)
    assert (done.remote, there.remote) == (SERVER.public_key, ALICE.public_key)
    assert there.records.open(done.records.seal(b"up")) == [b"up"]
    assert done.records.open(there.records.seal(b"down")) == [b"down"]


def test_tlv_lists_as_payloads() -> None:
    ours, theirs = {Tlv.VERSION: b"0.1.0"}, {Tlv.VERSION: b"0.1.0", Tlv.LIMITS: bytes(12)}
    done, there = shake(client(encode_tlvs(ours)), server(encode_tlvs(theirs)))
    assert done.peer == Capabilities(True, AnnouncedLimits(0, 0, 0))
    assert there.peer == Capabilities(True)


def test_a_payload_of_message_1_does_not_pass_for_that_of_message_3() -> None:
    noise = NoiseHandshake("XK", initiator=True, static=ALICE, remote_static=SERVER.public_key.raw)
    core = server()
    core.receive_data(packet(noise.write_message(hello_payload())), 0.0)
    noise.read_message(core.data_to_send()[2:])
    [done] = core.receive_data(packet(noise.write_message()), 0.0)
    assert isinstance(done, HandshakeDone)
    assert done.peer == Capabilities()


@given(st.data())
@settings(max_examples=40)
def test_cut_anywhere_is_the_same_as_whole(data: st.DataObject) -> None:
    one, other = client(b"c" * 30), server(b"s" * 40)
    done: list[object] = []
    while len(done) < 2:
        for source, destination in ((one, other), (other, one)):
            stream = source.data_to_send()
            for piece in data.draw(cuts(stream)):
                done += destination.receive_data(piece, 0.0)
    assert all(isinstance(event, HandshakeDone) and event.leftover == b"" for event in done)


def test_byte_at_a_time() -> None:
    one, other = client(), server()
    done = []
    for source, destination in ((one, other), (other, one), (one, other)):
        for byte in source.data_to_send():
            done += destination.receive_data(bytes((byte,)), 0.0)
    assert len(done) == 2


@given(st.binary(max_size=300))
@settings(max_examples=20)
def test_what_follows_the_handshake_is_handed_over(leftover: bytes) -> None:
    one, other = client(), server()
    other.receive_data(one.data_to_send(), 0.0)
    one.receive_data(other.data_to_send(), 0.0)
    [done] = other.receive_data(one.data_to_send() + leftover, 0.0)
    assert isinstance(done, HandshakeDone)
    assert done.leftover == leftover


def stages() -> list[tuple[str, Handshake]]:
    """A core before each message it reads."""
    waiting_client, fresh_server, later_server = client(takes_cookie=False), server(), server()
    waiting_client.data_to_send()
    later_server.receive_data(client().data_to_send(), 0.0)
    later_server.data_to_send()
    return [
        ("server, message 1", fresh_server),
        ("client, message 2", waiting_client),
        ("server, message 3", later_server),
    ]


@given(st.integers(0, 2), st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(packet)))
@settings(max_examples=150)
def test_any_bytes_at_any_stage_raise_nothing_but_a_protocol_error(stage: int, data: bytes) -> None:
    _, core = stages()[stage]
    try:
        assert core.receive_data(data, 0.0) == []
    except RemoteProtocolError as error:
        assert error.stage == "handshake"
    assert core.data_to_send() == b""


@pytest.mark.parametrize("second", [b"", bytes(49), bytes(65)], ids=["empty", "as message 1", "as message 3"])
def test_a_message_that_does_not_wait_for_the_answer_is_a_protocol_error(second: bytes) -> None:
    core = server()
    with pytest.raises(RemoteProtocolError, match="out of turn"):
        core.receive_data(client().data_to_send() + packet(second), 0.0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_which_message_was_bad_is_part_of_the_reason(stage: int) -> None:
    _, core = stages()[stage]
    with pytest.raises(RemoteProtocolError) as caught:
        core.receive_data(packet(bytes(65)), 0.0)
    assert caught.value.reason == f"message {stage + 1} does not open"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_message_over_the_limit_is_refused_at_its_length(stage: int) -> None:
    _, core = stages()[stage]
    assert core.receive_data(MESSAGE_LIMIT_BYTES.to_bytes(2, "big"), 0.0) == []
    _, core = stages()[stage]
    assert core.receive_data(b"\x05", 0.0) == []
    with pytest.raises(RemoteProtocolError, match="over the limit"):
        core.receive_data((MESSAGE_LIMIT_BYTES + 1).to_bytes(2, "big")[1:], 0.0)


def test_the_longest_payload_we_may_send_passes() -> None:
    done, there = shake(client(bytes(1_024)), server(bytes(1_024)))
    assert done.peer == there.peer == Capabilities()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_time_limit_of_the_whole_handshake(stage: int) -> None:
    _, core = stages()[stage]
    assert core.next_timeout() == HANDSHAKE_TIMEOUT_S
    assert core.handle_timeout(HANDSHAKE_TIMEOUT_S - 0.001) == []
    with pytest.raises(RemoteProtocolError, match="timeout"):
        core.handle_timeout(HANDSHAKE_TIMEOUT_S)
    assert core.next_timeout() is None
    assert core.handle_timeout(HANDSHAKE_TIMEOUT_S + 1) == []


def test_no_time_limit_once_it_is_through() -> None:
    one, other = client(timeout_s=3.0), server(timeout_s=4.0)
    assert (one.next_timeout(), other.next_timeout()) == (3.0, 4.0)
    shake(one, other)
    assert one.next_timeout() is None and other.next_timeout() is None
    assert one.handle_timeout(100.0) == [] and other.handle_timeout(100.0) == []


def test_both_roles_need_what_they_need() -> None:
    with pytest.raises(LocalProtocolError):
        Handshake(Role.CLIENT, ALICE, now=0.0)
    with pytest.raises(LocalProtocolError):
        Handshake(Role.SERVER, SERVER, ALICE.public_key, now=0.0)


def test_a_client_key_with_a_bad_point_does_not_come_through() -> None:
    """Message 3 of a correct handshake, but in the name of a key that is none."""
    noise = NoiseHandshake("XK", initiator=True, static=ALICE, remote_static=SERVER.public_key.raw)
    noise._state.s.public_bytes = b"\x02" + b"\xff" * 32
    core = server()
    core.receive_data(packet(noise.write_message()), 0.0)
    noise.read_message(core.data_to_send()[2:])
    with pytest.raises(RemoteProtocolError) as caught:
        core.receive_data(packet(noise.write_message()), 0.0)
    assert caught.value.stage == "handshake"
