"""Keys, signatures and the handshake XK against the values of Go's programs of spring 2019.

:ref:`spec-diffie-hellman`, :ref:`spec-entry-signature`, :ref:`spec-key-derivation`, :ref:`spec-swapped-keys`.
"""

from __future__ import annotations

from typing import Any

import pytest

from dmsg.crypto.errors import InvalidKey, InvalidSignature
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.crypto.noise import HandshakeResult, NoiseHandshake
from dmsg.messaging.core.channel_cipher import channel_cipher
from dmsg.messaging.core.dialect import V0

#: Sections whose values are compared here; in the other tests of messaging; and in those of discovery.
HERE = {
    "deterministic_keypairs",
    "ecdh",
    "ecdh_errors",
    "keypairs_from_secret",
    "noise_dh_edge_cases",
    "noise_xk",
    "noise_xk_conn_wire",
    "pubkey_edge_cases",
    "seckey_edge_cases",
    "signature_edge_cases",
    "signatures_forced_nonce",
    "signatures_random_nonce",
}
ELSEWHERE = {
    "ack_layer",
    "frame_read_cases",
    "frame_size_limits",
    "frames",
    "frames_seed_layout_DERIVED_not_Go",
    "link_handshake",
    "link_responder_frame1_cases",
    "noise_kk",
    "seed_example_handshake",
    "sessions",
    "variants",
}
IN_DISCOVERY = {"discovery_http", "entries", "entry_body_cases", "entry_iteration_cases"}
#: What Go's programs were seen to do: nothing to compare with.
OBSERVED = {"go_client_behaviour", "go_responder_behaviour", "meta"}

#: Go takes a high s whose first bit is 0, and ends its process when the first bit is 1. Here every high s is refused.
HIGH = {"s = N/2 + 1 (smallest high-s; top bit still 0)", "s = 2^255 - 1 (high-s by BIP62, top bit 0)"}


def test_every_section_of_the_vectors_is_covered_somewhere(vectors: dict[str, Any]) -> None:
    assert set(vectors) == HERE | ELSEWHERE | IN_DISCOVERY | OBSERVED


def secret(text: str) -> SecretKey:
    return SecretKey(bytes.fromhex(text))


def test_public_keys_of_secret_keys(vectors: dict[str, Any]) -> None:
    for pair in vectors["keypairs_from_secret"] + vectors["deterministic_keypairs"]:
        assert str(secret(pair["sk"]).public_key) == pair["pk"]


def test_diffie_hellman(vectors: dict[str, Any]) -> None:
    for case in vectors["ecdh"]:
        assert secret(case["sk"]).ecdh(bytes.fromhex(case["pk"])).hex() == case["ecdh_sha256"]


def test_what_go_multiplies_with_no_point_and_by_zero(vectors: dict[str, Any]) -> None:
    """Go's process ends on ephemeral keys that are no points."""
    assert {case["case"] for case in vectors["ecdh_errors"]} == {"pk all zero", "sk all zero"}
    with pytest.raises(InvalidKey):
        SecretKey(bytes(32))
    for case in vectors["noise_dh_edge_cases"]:
        with pytest.raises(InvalidKey):
            secret(case["sk"]).ecdh(bytes.fromhex(case["pk"]))


@pytest.mark.parametrize(("section", "read"), [("pubkey_edge_cases", PublicKey.parse), ("seckey_edge_cases", secret)])
def test_keys_that_go_takes_and_refuses(section: str, read: Any, vectors: dict[str, Any]) -> None:
    """What Go panics on is refused."""
    for case in vectors[section]:
        if case["outcome"] == "accepted":
            read(case["hex"])
            continue
        with pytest.raises(InvalidKey):
            read(case["hex"])


def test_gos_signatures_verify(vectors: dict[str, Any]) -> None:
    for case in vectors["signatures_forced_nonce"]:
        PublicKey.parse(case["pk"]).verify(bytes.fromhex(case["sig"]), bytes.fromhex(case["payload"]))
    case = vectors["signatures_random_nonce"]
    for signature in case["sigs"]:
        PublicKey.parse(case["pk"]).verify(bytes.fromhex(signature), bytes.fromhex(case["payload"]))


def test_signatures_that_go_takes_and_refuses(vectors: dict[str, Any]) -> None:
    """What ends Go's process is refused."""
    cases = [case for case in vectors["signature_edge_cases"] if case["case"] != "not hex"]
    assert {case["case"] for case in cases} > HIGH
    for case in cases:
        key, signature, payload = (
            PublicKey.parse(case["pk"]),
            bytes.fromhex(case["sig"]),
            bytes.fromhex(case["payload"]),
        )
        if case["outcome"] == "accepted" and case["case"] not in HIGH:
            key.verify(signature, payload)
            continue
        with pytest.raises(InvalidSignature):
            key.verify(signature, payload)


def handshake(made: dict[str, Any], role: str) -> NoiseHandshake:
    ephemeral = bytes.fromhex(made[f"{role}_ephemeral_sk"])
    return NoiseHandshake(
        "XK",
        initiator=role == "initiator",
        static=secret(made[f"{role}_static_sk"]),
        remote_static=bytes.fromhex(made["responder_static_pk"]) if role == "initiator" else None,
        prologue=b"",
        random=lambda size: ephemeral,
    )


def test_gos_handshake_xk_in_both_roles(vectors: dict[str, Any]) -> None:
    made = vectors["noise_xk"]
    caller, callee = handshake(made, "initiator"), handshake(made, "responder")
    for number, (writer, reader) in enumerate([(caller, callee), (callee, caller), (caller, callee)], 1):
        message = writer.write_message()
        assert message.hex() == made[f"message{number}"]
        reader.read_message(message)
    for role, side in (("initiator", caller), ("responder", callee)):
        assert isinstance(side.result, HandshakeResult)
        assert side.result.send_key.hex() == made[f"{role}_send_key"]
        assert side.result.receive_key.hex() == made[f"{role}_recv_key"]
        assert side.result.handshake_hash.hex() == made["handshake_hash"]
    assert callee.result is not None and callee.result.remote_static.hex() == made["responder_learned_static"]


@pytest.mark.parametrize("role", ["initiator", "responder"])
def test_gos_messages_behind_the_handshake_xk(role: str, vectors: dict[str, Any]) -> None:
    other = "responder" if role == "initiator" else "initiator"
    sealer = channel_cipher(bytes.fromhex(vectors["noise_xk"][f"{role}_send_key"]), V0)
    messages = vectors["noise_xk"][f"{role}_to_{other}"]
    assert len(messages) == 25
    for message in messages:
        assert sealer.seal(bytes.fromhex(message["plaintext"])).hex() == message["ciphertext"]


def test_gos_packets_have_their_length_in_front(vectors: dict[str, Any]) -> None:
    """The first three are the handshake; the others open with its keys, one after the other in each direction."""
    made, packets = vectors["noise_xk"], vectors["noise_xk_conn_wire"]["writes"]
    openers = {role: channel_cipher(bytes.fromhex(made[f"{role}_send_key"]), V0) for role in ("initiator", "responder")}
    for number, packet in enumerate(packets, 1):
        data = bytes.fromhex(packet["bytes"])
        assert int.from_bytes(data[:2], "big") == len(data) - 2
        if number <= 3:
            assert data[2:].hex() == made[f"message{number}"]
        else:
            assert len(openers[packet["from"]].open(data[2:])) == len(data) - 2 - 16
