"""Envelopes that answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import PeerCode, RelayProblem
from dmsg.rmb.core.limits import MAX_ERROR_TEXT_BYTES
from dmsg.rmb.core.replies import answer_ping, bounded_text, error_reply, relay_error, response
from dmsg.rmb.core.wire import Envelope, encode_envelope, parse_envelope

from .conftest import DERIVED, LIVE

PROBLEMS = {problem.text: problem for problem in RelayProblem}
RELAYED = {one["name"]: one for one in LIVE["envelopes"] if one["name"].startswith("relay: ")}


@pytest.mark.parametrize(
    "one", [one for name, one in RELAYED.items() if "pong" not in name], ids=lambda one: one["name"]
)
def test_recorded_errors_of_relays(one):
    """Ours have a code, and are the same otherwise."""
    recorded = parse_envelope(bytes.fromhex(one["hex"]))
    request = parse_envelope(bytes.fromhex(one["request_hex"]))
    source = SessionAddress.of(request.source)
    problem = PROBLEMS[recorded.error.message]
    ours = relay_error(request, problem, recorded.timestamp, source)
    assert ours.error.code == problem.code
    ours.error.ClearField("code")
    assert encode_envelope(ours).hex() == one["hex"]


@pytest.mark.parametrize("where", ["ws", "federation"])
def test_derived_errors_of_relays(where):
    recorded = parse_envelope(bytes.fromhex(DERIVED[f"relay/error-envelope-{where}"]["pb_hex"]))
    destination = SessionAddress.of(recorded.destination) if where == "ws" else None
    request = Envelope(uid=recorded.uid, tags="t", signature=b"s")
    ours = relay_error(request, PROBLEMS[recorded.error.message], recorded.timestamp, destination)
    ours.error.ClearField("code")
    assert ours == recorded


def test_pongs():
    one = RELAYED["relay: pong"]
    envelope = parse_envelope(bytes.fromhex(one["request_hex"]))
    answer_ping(envelope)
    assert encode_envelope(envelope).hex() == one["hex"]
    derived = DERIVED["relay/ping-pong"]
    envelope = parse_envelope(bytes.fromhex(derived["ping_pb_hex"]))
    answer_ping(envelope)
    assert envelope.SerializeToString().hex() == derived["pong_pb_hex"]


def test_an_encrypted_ping_gets_a_plain_pong():
    envelope = Envelope(cipher=b"x")
    envelope.ping.SetInParent()
    answer_ping(envelope)
    assert envelope.WhichOneof("message") == "pong" and envelope.plain == b"hello world"
    assert not envelope.HasField("source") and not envelope.HasField("destination")


def test_codes_are_different():
    """Also from those of receivers: only one problem has each text and each code."""
    codes = [problem.code for problem in RelayProblem] + [int(code) for code in PeerCode]
    assert len(set(codes)) == len(codes) and 0 not in codes
    assert len(PROBLEMS) == len(RelayProblem)


def test_answers_go_back_to_the_session_that_asked():
    request = Envelope(uid="u", tags="t", expiration=7)
    SessionAddress(5, "").write_to(request.source)
    answer = response(request, b"yes", "text/plain")
    assert (answer.uid, answer.plain, answer.schema) == ("u", b"yes", "text/plain")
    assert SessionAddress.of(answer.destination) == (5, "")
    assert answer.HasField("response") and not answer.HasField("source")
    error = error_reply(request, PeerCode.BAD_SIGNATURE, "text", 7)
    assert (error.error.code, error.error.message, error.expiration) == (104, "text", 7)
    assert SessionAddress.of(error.destination) == (5, "")


@given(st.text() | st.just("é" * MAX_ERROR_TEXT_BYTES) | st.just("\ud800"))
def test_texts_of_errors_are_bounded(text):
    bounded = bounded_text(text)
    assert len(bounded.encode()) <= MAX_ERROR_TEXT_BYTES
    assert bounded == text or len(text.encode(errors="replace")) > MAX_ERROR_TEXT_BYTES or max(text) >= "\ud800"
