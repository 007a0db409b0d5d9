"""The schema, the code made of it, and envelopes as bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dmsg.rmb.core import proto
from dmsg.rmb.core.errors import MalformedEnvelope
from dmsg.rmb.core.wire import Envelope, parse_envelope

ROOT = Path(__file__).parents[3]
SCHEMAS = sorted(Path(proto.__path__[0]).glob("*.proto"))


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
