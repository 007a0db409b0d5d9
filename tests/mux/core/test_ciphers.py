"""Which cipher two sides come to (:ref:`spec-ciphers`): AES-256-GCM if both have it, and no third party has a say."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.crypto.aead import Cipher
from dmsg.crypto.keys import SecretKey
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.ciphers import CIPHERS, offers_aes
from dmsg.mux.core.e2e_handshake import LIST_1_BYTES, LIST_2_BYTES, Resume, SecureInitiator, SecureResponder
from dmsg.mux.core.events import HandshakeDone
from dmsg.mux.core.handshake import Handshake, Role
from dmsg.mux.core.hello import AnnouncedLimits, hello_payload
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.tlv import Tlv, encode_tlvs

ALICE, BOB, SERVER = (SecretKey(hashlib.sha256(name).digest()) for name in (b"alice", b"bob", b"server"))
LIMITS = AnnouncedLimits(1_024, 200, 65_510)
KK_MESSAGE_BYTES = 49
COMBINATIONS = [(True, True), (True, False), (False, True), (False, False)]


def wanted(ours: bool, theirs: bool) -> Cipher:
    return Cipher.AES if ours and theirs else Cipher.CHACHA


# --- hop -------------------------------------------------------------------------------------------------------------


def shake(from_client: bytes, from_server: bytes) -> tuple[HandshakeDone, HandshakeDone]:
    """What client and server have when a handshake with these payloads is done."""
    client = Handshake(Role.CLIENT, ALICE, SERVER.public_key, now=0.0, payload=from_client)
    server = Handshake(Role.SERVER, SERVER, now=0.0, payload=from_server)
    server.receive_data(client.data_to_send(), 0.0)
    [there] = client.receive_data(server.data_to_send(), 0.0)
    [here] = server.receive_data(client.data_to_send(), 0.0)
    assert isinstance(there, HandshakeDone) and isinstance(here, HandshakeDone)
    assert here.records.open(there.records.seal(b"up")) == [b"up"]
    assert there.records.open(here.records.seal(b"down")) == [b"down"]
    return there, here


@pytest.mark.parametrize(("client_aes", "server_aes"), COMBINATIONS)
def test_both_sides_of_a_connection_come_to_the_same(client_aes: bool, server_aes: bool) -> None:
    there, here = shake(hello_payload(aes=client_aes), hello_payload(LIMITS, 1 << 25, aes=server_aes))
    assert there.peer.aes is server_aes and here.peer.aes is client_aes
    assert there.records._cipher is here.records._cipher is wanted(client_aes, server_aes)


def test_a_record_of_one_cipher_does_not_open_with_the_other() -> None:
    keys = bytes(32), bytes(range(32))
    for one, other in ((Cipher.AES, Cipher.CHACHA), (Cipher.CHACHA, Cipher.AES)):
        with pytest.raises(RemoteProtocolError, match="does not open"):
            RecordLayer(*keys[::-1], other).open(RecordLayer(*keys, one).seal(b"data"))


@pytest.mark.parametrize(
    "payload",
    [b"", encode_tlvs({Tlv.CIPHERS: CIPHERS}), encode_tlvs({Tlv.VERSION: b"0.0.9", Tlv.CIPHERS: CIPHERS})],
    ids=["base", "no version", "version before the extension"],
)
def test_base_peers_have_chacha(payload: bytes) -> None:
    for payloads in ((hello_payload(aes=True), payload), (payload, hello_payload(aes=True))):
        assert [one.records._cipher for one in shake(*payloads)] == [Cipher.CHACHA] * 2


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=25)
def test_any_payload_gives_both_sides_the_same(payload: bytes, aes: bool) -> None:
    for payloads in ((hello_payload(aes=aes), payload), (payload, hello_payload(aes=aes))):
        there, here = shake(*payloads)
        assert there.records._cipher is here.records._cipher


@given(st.binary(max_size=20))
def test_ciphers_that_are_not_known_are_skipped(others: bytes) -> None:
    assert offers_aes({Tlv.CIPHERS: others + CIPHERS})
    assert offers_aes({Tlv.CIPHERS: others}) is (1 in others)
    assert not offers_aes({})


# --- end to end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [None, Resume(bytes(16), 7)], ids=["new", "resumed"])
@pytest.mark.parametrize(("dials", "listens"), COMBINATIONS)
def test_both_ends_come_to_the_same(dials: bool, listens: bool, resume: Resume | None) -> None:
    initiator = SecureInitiator(ALICE, BOB.public_key, SERVER.public_key, service="s" * 255, resume=resume, aes=dials)
    responder = SecureResponder(BOB, ALICE.public_key, SERVER.public_key, initiator.message, aes=listens)
    message, theirs = responder.answer(resume)
    ours, answered = initiator.finish(message)
    assert (answered, responder.resume) == (resume, resume)
    assert ours.cipher is theirs.cipher is wanted(dials, listens)
    assert ours.send_key == theirs.receive_key and ours.receive_key == theirs.send_key


def test_the_length_of_the_messages_does_not_tell() -> None:
    """Nor does anything else that a relay sees: the lists are sealed."""
    for aes in (True, False):
        for service in ("", "web"):
            initiator = SecureInitiator(ALICE, BOB.public_key, SERVER.public_key, service=service, aes=aes)
            assert len(initiator.message) == KK_MESSAGE_BYTES + LIST_1_BYTES
            responder = SecureResponder(BOB, ALICE.public_key, SERVER.public_key, initiator.message, aes=aes)
            assert len(responder.answer()[0]) == KK_MESSAGE_BYTES + LIST_2_BYTES
