"""The end-to-end handshake (:ref:`spec-e2e-handshake`), held against vectors made by a second implementation."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.crypto.keys import Point, SecretKey
from dmsg.crypto.noise import NoiseHandshake
from dmsg.errors import DmsgError, RemoteProtocolError
from dmsg.mux.core.e2e_handshake import (
    LIST_1_BYTES,
    LIST_2_BYTES,
    TOKEN_BYTES,
    UPGRADE_MAGIC,
    Resume,
    SecureInitiator,
    SecureResponder,
    prologue,
)
from dmsg.mux.core.errors import IntegrityError
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.sealed_stream import SealedStream
from dmsg.mux.core.stream import StreamState
from dmsg.mux.core.tlv import Tlv, encode_padded_tlvs, encode_tlvs
from dmsg.mux.core.wire import HEADER_BYTES

VECTORS = Path(__file__).parents[2] / "vectors"
#: A KK message besides its list.
KK_MESSAGE_BYTES = 49
ALICE, BOB, SERVER, MALLORY = (SecretKey(bytes((n,)) * 32) for n in (0x11, 0x22, 0x33, 0x66))


def constant(value: bytes) -> Callable[[int], bytes]:
    return lambda size: value[:size]


@pytest.fixture(scope="module")
def e2e() -> Any:
    return json.loads((VECTORS / "e2e.json").read_text("utf-8"))


def handshake(
    *,
    service: str = "",
    resume: Resume | None = None,
    answer: Resume | None = None,
    fixed: Any = None,
    aes: bool = False,
) -> tuple[SecureInitiator, SecureResponder, bytes, Any, Any]:
    randoms = {} if fixed is None else {name: constant(bytes.fromhex(fixed[name])) for name in fixed}
    first = {"random": randoms["initiator"]} if fixed else {}
    second = {"random": randoms["responder"]} if fixed else {}
    initiator = SecureInitiator(
        ALICE, BOB.public_key, SERVER.public_key, service=service, resume=resume, aes=aes, **first
    )
    responder = SecureResponder(BOB, ALICE.public_key, SERVER.public_key, initiator.message, aes=aes, **second)
    message, theirs = responder.answer(answer)
    ours, _ = initiator.finish(message)
    return initiator, responder, message, ours, theirs


# --- vectors ---------------------------------------------------------------------------------------------------------


def test_the_vectors_are_what_their_generator_makes(e2e: Any) -> None:
    spec = importlib.util.spec_from_file_location("make_e2e", VECTORS / "make_e2e.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.make() == e2e


def check_session(vector: Any, made: tuple[SecureInitiator, SecureResponder, bytes, Any, Any]) -> None:
    initiator, _, message, ours, theirs = made
    assert initiator.message.hex() == vector["kk1"]
    assert message.hex() == vector["kk2"]
    assert ours.send_key.hex() == theirs.receive_key.hex() == vector["initiator_to_responder_key"]
    assert ours.receive_key.hex() == theirs.send_key.hex() == vector["responder_to_initiator_key"]
    assert ours.send_hash.hex() == theirs.receive_hash.hex() == vector["initiator_to_responder_hash_0"]
    assert ours.receive_hash.hex() == theirs.send_hash.hex() == vector["responder_to_initiator_hash_0"]
    assert ours.token.hex() == theirs.token.hex() == vector["token"]


def test_handshake_vectors(e2e: Any) -> None:
    assert prologue(ALICE.public_key, BOB.public_key, SERVER.public_key).hex() == e2e["session"]["prologue"]
    assert e2e["carriers"]["B"]["magic"] == UPGRADE_MAGIC.hex()
    check_session(e2e["session"], handshake(service="web", fixed=e2e["ephemerals"]))
    check_session(e2e["aes_session"], handshake(service="web", fixed=e2e["ephemerals"], aes=True))
    resume, answer = (Resume.decode(bytes.fromhex(e2e["resume"][side])) for side in ("initiator", "responder"))
    assert (resume.received_bytes, answer.received_bytes) == (1_000_000, 2**40)
    check_session(e2e["resumed_session"], handshake(resume=resume, answer=answer, fixed=e2e["ephemerals"]))


@pytest.mark.parametrize(("session", "aes"), [("session", False), ("aes_session", True)])
def test_frame_vectors(e2e: Any, session: str, aes: bool) -> None:
    *_, ours, theirs = handshake(service="web", fixed=e2e["ephemerals"], aes=aes)
    out, back = (
        SealedStream(
            PlainStream(1, BOB.public_key, b"", initiator=True, window_bytes=1, first_sequence=0),
            keys,
            window_bytes=10_000,
            ack_limit_bytes=10_000,
        )
        for keys in (ours, theirs)
    )
    for stream in (out, back):
        stream.state = StreamState.OPEN
    made = {"initiator_ack_nothing_yet": out.take_ack()[HEADER_BYTES:]}
    back.receive_ack(made["initiator_ack_nothing_yet"])
    for name, data in (("fwd_0", b"hello"), ("fwd_1", b"dmsg"), ("end_of_stream", b"")):
        out.pending.append(data)
        if not data:
            out.end()
        made[f"initiator_{name}"] = sealed = out.next_fwd(1_000)[1]
        assert back.receive_fwd(sealed, 0, len(sealed)) == (data, b"")
    made["responder_ack_2"] = back.take_ack()[HEADER_BYTES:]
    out.receive_ack(made["responder_ack_2"])
    assert out.end_acked and back.end_received
    back.pending.append(bytes(range(256)))
    made["responder_fwd_0"] = sealed = back.next_fwd(1_000)[1]
    assert out.receive_fwd(sealed, 0, len(sealed)) == (bytes(range(256)), b"")
    back.ack_due = True
    back.pending.append(b"with an ACK")
    made["responder_ack_2_and_fwd_1"] = sealed = back.next_fwd(1_000)[1]
    assert out.receive_ack(sealed) == b"with an ACK"
    back.drop()
    made["responder_ack_2_not_taken"] = back.take_ack()[HEADER_BYTES:]
    out.receive_ack(made["responder_ack_2_not_taken"])
    assert out.was_cut
    made["responder_rekey"] = back.frames.rekey()[HEADER_BYTES:]
    out.receive_ack(made["responder_rekey"])
    back.pending.append(b"under the next key")
    made["responder_fwd_2"] = sealed = back.next_fwd(1_000)[1]
    assert out.receive_fwd(sealed, 0, len(sealed)) == (b"under the next key", b"")
    made["responder_close_refused"] = back.close_frame(1)[HEADER_BYTES:]
    assert out.proves_close(made["responder_close_refused"])
    assert {name: payload.hex() for name, payload in made.items()} == e2e[session]["frames"]


# --- what the messages say -------------------------------------------------------------------------------------------


def test_what_the_responder_learns() -> None:
    _, responder, *_ = handshake(service="files", resume=Resume(bytes(range(16)), 2**63))
    assert responder.service == "files"
    assert responder.resume == Resume(bytes(range(16)), 2**63)
    _, responder, *_ = handshake()
    assert responder.service == ""
    assert responder.resume is None


def test_what_the_initiator_learns() -> None:
    initiator = SecureInitiator(ALICE, BOB.public_key, SERVER.public_key)
    responder = SecureResponder(BOB, ALICE.public_key, SERVER.public_key, initiator.message)
    answer = Resume(b"t" * TOKEN_BYTES, 5)
    assert initiator.finish(responder.answer(answer)[0])[1] == answer


def test_every_handshake_has_keys_of_its_own() -> None:
    seen = set()
    for _ in range(3):
        *_, ours, theirs = handshake()
        assert ours.send_key == theirs.receive_key and ours.receive_key == theirs.send_key
        seen |= {ours.send_key, ours.receive_key, ours.send_hash, ours.receive_hash, ours.token}
    assert len(seen) == 15


def test_keys_are_not_printed() -> None:
    *_, ours, _ = handshake()
    assert repr(ours) == "<SecureKeys>"


@given(st.binary(max_size=40))
def test_a_resume_is_24_bytes(value: bytes) -> None:
    try:
        resume = Resume.decode(value)
    except RemoteProtocolError:
        assert len(value) != 24
    else:
        assert resume.encode() == value


# --- what is refused -------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_any_altered_bit_of_message_1(data: st.DataObject) -> None:
    message = bytearray(SecureInitiator(ALICE, BOB.public_key, SERVER.public_key).message)
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(IntegrityError):
        SecureResponder(BOB, ALICE.public_key, SERVER.public_key, bytes(message))


@settings(max_examples=60)
@given(st.data())
def test_any_altered_bit_of_message_2(data: st.DataObject) -> None:
    initiator = SecureInitiator(ALICE, BOB.public_key, SERVER.public_key)
    message = bytearray(SecureResponder(BOB, ALICE.public_key, SERVER.public_key, initiator.message).answer()[0])
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(IntegrityError):
        initiator.finish(bytes(message))


@given(st.binary(max_size=120))
def test_any_bytes_are_refused(message: bytes) -> None:
    with pytest.raises(IntegrityError):
        SecureResponder(BOB, ALICE.public_key, SERVER.public_key, message)
    with pytest.raises(IntegrityError):
        SecureInitiator(ALICE, BOB.public_key, SERVER.public_key).finish(message)


@pytest.mark.parametrize(
    "point", [bytes(33), b"\x02" + b"\xff" * 32, b"\x04" + bytes(32)], ids=["zeros", "big", "kind"]
)
def test_an_ephemeral_that_is_no_point(point: bytes) -> None:
    initiator = SecureInitiator(ALICE, BOB.public_key, SERVER.public_key)
    with pytest.raises(IntegrityError):
        SecureResponder(BOB, ALICE.public_key, SERVER.public_key, point + initiator.message[33:])
    answer, _ = SecureResponder(BOB, ALICE.public_key, SERVER.public_key, initiator.message).answer()
    with pytest.raises(IntegrityError):
        initiator.finish(point + answer[33:])


@pytest.mark.parametrize(
    ("static", "initiator", "server"),
    [(MALLORY, ALICE, SERVER), (BOB, MALLORY, SERVER), (BOB, ALICE, MALLORY)],
    ids=["not for this responder", "in another name", "over another relay"],
)
def test_message_1_is_bound_to_both_ends_and_the_relay(
    static: SecretKey, initiator: SecretKey, server: SecretKey
) -> None:
    message = SecureInitiator(ALICE, BOB.public_key, SERVER.public_key).message
    with pytest.raises(IntegrityError) as caught:
        SecureResponder(static, initiator.public_key, server.public_key, message)
    assert caught.value.by == "local"


def test_message_2_must_be_the_responders() -> None:
    initiator = SecureInitiator(ALICE, BOB.public_key, SERVER.public_key)
    noise = NoiseHandshake(
        "KK",
        initiator=False,
        static=MALLORY,
        remote_static=ALICE.public_key.raw,
        prologue=prologue(ALICE.public_key, BOB.public_key, SERVER.public_key),
    )
    with pytest.raises(DmsgError):
        noise.read_message(initiator.message)  # who has not got the responder's key cannot even begin
    other = SecureInitiator(ALICE, BOB.public_key, SERVER.public_key)
    answer, _ = SecureResponder(BOB, ALICE.public_key, SERVER.public_key, other.message).answer()
    with pytest.raises(IntegrityError):
        initiator.finish(answer)  # an honest answer to another question


def from_payload(payload: bytes, *, static: SecretKey = ALICE) -> bytes:
    noise = NoiseHandshake(
        "KK",
        initiator=True,
        static=static,
        remote_static=BOB.public_key.raw,
        prologue=prologue(ALICE.public_key, BOB.public_key, SERVER.public_key),
    )
    return noise.write_message(payload)


@pytest.mark.parametrize("payload", [b"\x01", b"\x01\0\0\x01\0\0", b"\x09\xff\xff", bytes(1_100)])
def test_payloads_that_are_no_tlv_list(payload: bytes) -> None:
    with pytest.raises(IntegrityError):
        SecureResponder(BOB, ALICE.public_key, SERVER.public_key, from_payload(payload))


def test_an_empty_payload_is_fine() -> None:
    message = from_payload(b"")
    assert len(message) == KK_MESSAGE_BYTES
    responder = SecureResponder(BOB, ALICE.public_key, SERVER.public_key, message)
    assert (responder.service, responder.resume) == ("", None)


def test_a_resume_that_is_malformed() -> None:
    message = from_payload(encode_tlvs({Tlv.RESUME: bytes(23)}))
    responder = SecureResponder(BOB, ALICE.public_key, SERVER.public_key, message)
    with pytest.raises(RemoteProtocolError):
        _ = responder.resume


def test_a_malformed_resume_in_the_answer_is_an_integrity_error() -> None:
    initiator = SecureInitiator(ALICE, BOB.public_key, SERVER.public_key)
    noise = NoiseHandshake(
        "KK",
        initiator=False,
        static=BOB,
        remote_static=ALICE.public_key.raw,
        prologue=prologue(ALICE.public_key, BOB.public_key, SERVER.public_key),
    )
    noise.read_message(initiator.message)
    with pytest.raises(IntegrityError):
        initiator.finish(noise.write_message(encode_tlvs({Tlv.RESUME: b"short"})))


def test_a_service_that_is_not_utf8_is_none_that_exists() -> None:
    message = from_payload(encode_tlvs({Tlv.SERVICE: b"\xff\xfe"}))
    assert SecureResponder(BOB, ALICE.public_key, SERVER.public_key, message).service == "\ufffd\ufffd"


# --- KK's own weakness: the responder's key forges message 1 ------------------------------------------------------------


class Thief:
    """An attacker who has the responder's secret key writes message 1 in the initiator's name.

    ``es`` and ``ss`` need one secret of each pair; the responder's own key does for both. What follows needs the
    initiator's.
    """

    def __init__(self) -> None:
        class Impostor(SecretKey):
            """Shows the initiator's public key; computes ``ss`` with the responder's secret."""

            def ecdh(self, public_key: bytes | Point) -> bytes:
                raw = public_key.raw if isinstance(public_key, Point) else public_key
                return BOB.ecdh(ALICE.public_key.raw) if raw == BOB.public_key.raw else super().ecdh(public_key)

        static = Impostor(bytes(MALLORY))
        static.public_key = ALICE.public_key
        self.handshake = SecureInitiator(static, BOB.public_key, SERVER.public_key, service="web")


def test_a_forged_message_1_opens_but_its_maker_never_gets_the_keys() -> None:
    thief = Thief()
    responder = SecureResponder(BOB, ALICE.public_key, SERVER.public_key, thief.handshake.message)
    assert responder.service == "web"  # KK: it opens, which is why nothing is done on message 1 alone
    message, _ = responder.answer()
    with pytest.raises(IntegrityError):
        thief.handshake.finish(message)


def test_a_replayed_message_1_opens_and_gives_new_keys() -> None:
    message = SecureInitiator(ALICE, BOB.public_key, SERVER.public_key).message
    first, second = (SecureResponder(BOB, ALICE.public_key, SERVER.public_key, message).answer() for _ in range(2))
    assert first[0] != second[0]
    assert first[1].send_key != second[1].send_key


# --- what length and stolen keys give away ---------------------------------------------------------------------------

RESUME = Resume(bytes(16), 1 << 63)


@given(service=st.text(max_size=255).filter(lambda text: len(text.encode()) <= 255), resumes=st.booleans())
def test_messages_have_the_same_length_whatever_they_ask_for(service: str, resumes: bool) -> None:
    resume = RESUME if resumes else None
    initiator, _, answer, _, _ = handshake(service=service, resume=resume, answer=resume)
    assert len(initiator.message) == KK_MESSAGE_BYTES + LIST_1_BYTES == 369
    assert len(answer) == KK_MESSAGE_BYTES + LIST_2_BYTES == 113


def test_the_longest_name_and_a_resumption_fit_together() -> None:
    initiator, responder, _, _, _ = handshake(service="x" * 255, resume=RESUME)
    assert (responder.service, responder.resume) == ("x" * 255, RESUME)
    assert len(initiator.message) == 369


def test_a_longer_list_than_the_padding_is_an_error_here() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        encode_padded_tlvs({Tlv.SERVICE: bytes(LIST_1_BYTES)}, LIST_1_BYTES)


def test_the_responders_key_stolen_later_opens_message_1_and_nothing_else() -> None:
    initiator, _, answer, _, theirs = handshake(service="secret-service")
    thief = SecureResponder(BOB, ALICE.public_key, SERVER.public_key, initiator.message)
    assert thief.service == "secret-service"
    # all that the thief can go on with is an ephemeral key of its own, which is not the one of the session
    forged, keys = thief.answer()
    assert forged != answer
    assert not {keys.send_key, keys.receive_key} & {theirs.send_key, theirs.receive_key}


def test_the_initiators_key_stolen_later_does_not_open_message_1() -> None:
    initiator, _, _, _, _ = handshake(service="secret-service")
    ephemeral, sealed = initiator.message[:33], initiator.message[33:]
    for static in (ALICE, MALLORY):  # neither the thief with Alice's key nor one without can take Bob's part
        with pytest.raises(IntegrityError):
            SecureResponder(static, BOB.public_key, SERVER.public_key, ephemeral + sealed)
        with pytest.raises(IntegrityError):
            SecureResponder(static, ALICE.public_key, SERVER.public_key, ephemeral + sealed)
