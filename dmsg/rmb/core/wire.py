"""Envelopes as bytes: the only module that knows protobuf. Pure.

An envelope is a message object of the generated code, :class:`Envelope`; ``envelope.WhichOneof("message")`` is
``request``, ``response``, ``error``, ``ping``, ``pong`` or ``None``, ``envelope.WhichOneof("payload")`` is ``plain``,
``cipher`` or ``None``.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from dmsg.rmb.core.errors import MalformedEnvelope
from dmsg.rmb.core.proto.backlog_pb2 import Backlog
from dmsg.rmb.core.proto.envelope_pb2 import Address, Envelope

__all__ = ["Address", "Backlog", "Envelope", "parse_envelope"]


def parse_envelope(data: bytes) -> Envelope:
    """The envelope in ``data``; :class:`MalformedEnvelope` if there is none."""
    try:
        return Envelope.FromString(data)
    except (DecodeError, ValueError):
        raise MalformedEnvelope from None
