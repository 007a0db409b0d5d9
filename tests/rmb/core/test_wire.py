"""The schema, the code made of it, and envelopes as bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dmsg.rmb.core import proto
from dmsg.rmb.core.errors import MalformedEnvelope
from dmsg.rmb.core.wire import Backlog, Envelope, encode_envelope, outline, parse_backlog, parse_envelope

from .conftest import LIVE

ROOT = Path(__file__).parents[3]
SCHEMAS = sorted(Path(proto.__path__[0]).glob("*.proto"))


#: What the public programs wrote.
RECORDED = [
    one["hex"] for one in LIVE["envelopes"] if one.get("hex") and not one["name"].startswith("signed request by")
]


def test_the_code_is_made_of_the_schema(tmp_path):
    names = [str(path.relative_to(ROOT)) for path in SCHEMAS]
    out = ["--python_out", str(tmp_path), "--pyi_out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *out, *names], cwd=ROOT, check=True)
    made = {path.name: path.read_text() for path in tmp_path.rglob("*_pb2.py*")}
    assert made == {path.name: path.read_text() for path in SCHEMAS[0].parent.glob("*_pb2.py*")}


def test_envelopes_go_through_bytes():
    envelope = Envelope(uid="a", plain=b"\0\xff")
    envelope.destination.connection = ""
    again = parse_envelope(envelope.SerializeToString())
    assert again == envelope
    assert again.destination.HasField("connection")


@pytest.mark.parametrize("data", [b"\x0a\x05ab", b"\xff", b"\x0a\x01\xff", b"\x3a\x02\x0a\x01"])
def test_what_is_no_envelope_is_refused(data):
    with pytest.raises(MalformedEnvelope):
        parse_envelope(data)


@pytest.mark.parametrize("data", RECORDED)
def test_recorded_envelopes_are_written_the_same(data):
    envelope = parse_envelope(bytes.fromhex(data))
    assert encode_envelope(envelope).hex() == data
    assert Envelope.FromString(envelope.SerializeToString()) == envelope


@pytest.mark.parametrize("message", ["request", "response", "error", "ping", "pong", None])
@pytest.mark.parametrize("payload", ["plain", "cipher", None])
def test_no_field_is_lost_in_the_order_of_the_public_programs(message, payload):
    envelope = Envelope(uid="u", tags="t", timestamp=1, expiration=2, schema="s", federation="f", relays=["r"])
    envelope.source.twin = 3
    if message:
        getattr(envelope, message).SetInParent()
    if payload:
        setattr(envelope, payload, b"")
    before = envelope.SerializeToString()
    again = parse_envelope(encode_envelope(envelope))
    assert again == envelope and envelope.SerializeToString() == before
    assert (again.WhichOneof("message"), again.WhichOneof("payload")) == (message, payload)


@pytest.mark.parametrize("message", ["request", "response", "error", "ping", "pong", None])
@pytest.mark.parametrize("connection", ["c", "", None])
def test_an_outline_has_what_is_not_payload_and_nothing_that_is_not_known(message, connection):
    envelope = Envelope(uid="u", timestamp=1, expiration=2, tags="t", schema="s")
    for address in (envelope.source, envelope.destination):
        address.twin = 3
        if connection is not None:
            address.connection = connection
    if message is not None:
        getattr(envelope, message).SetInParent()
    if message == "request":
        envelope.request.command = "c"
    elif message == "error":
        envelope.error.code, envelope.error.message = 4, "m"
    more = Envelope(federation="f", relays=["r"] * 100, cipher=b"x" * 100, signature=b"y").SerializeToString()
    unknown = b"\xa2\x06\x64" + bytes(100)
    came = parse_envelope(more + unknown + envelope.SerializeToString() + unknown)
    assert outline(came).SerializeToString() == envelope.SerializeToString()
    assert outline(Envelope()) == Envelope()


def test_backlogs_go_through_bytes():
    backlog = Backlog(uid="u", reply_to="list", ttl=5)
    assert parse_backlog(backlog.SerializeToString()) == backlog
    with pytest.raises(MalformedEnvelope):
        parse_backlog(b"\xff")
