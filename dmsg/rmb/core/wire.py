"""Envelopes as bytes: the only module that knows protobuf. Pure.

An envelope is a message object of the generated code, :class:`Envelope`; ``envelope.WhichOneof("message")`` is
``request``, ``response``, ``error``, ``ping``, ``pong`` or ``None``, ``envelope.WhichOneof("payload")`` is ``plain``,
``cipher`` or ``None``. See :ref:`spec-rmb-envelope`.
"""

from __future__ import annotations

from dmsg.rmb.core.errors import LibraryMissing, MalformedEnvelope

try:
    from google.protobuf.message import DecodeError

    from dmsg.rmb.core.proto.backlog_pb2 import Backlog
    from dmsg.rmb.core.proto.envelope_pb2 import Address, Envelope
except ImportError as error:
    raise LibraryMissing("protobuf") from error
except Exception as error:  # an error of protobuf's own, when it is older than the generated code
    raise LibraryMissing("protobuf", "is too old") from error

__all__ = ["Address", "Backlog", "Envelope", "encode_envelope", "outline", "parse_backlog", "parse_envelope"]

_ONEOFS = ("message", "payload")
_LEFT_OUT = ("payload", "signature", "federation", "relays")


def parse_envelope(data: bytes) -> Envelope:
    """The envelope in ``data``; raises :class:`MalformedEnvelope`."""
    try:
        return Envelope.FromString(data)
    except (DecodeError, ValueError):
        raise MalformedEnvelope from None


def outline(envelope: Envelope) -> Envelope:
    """A new envelope with the fields that are needed while ``envelope`` waits: all but payload, signature, federation, relays.

    A parsed envelope keeps all that was in the bytes, also unknown fields and earlier values of a oneof, and takes up to 13
    times their size in memory. This function removes the other fields from ``envelope`` itself: drop it afterwards.
    """
    for name in _LEFT_OUT:
        envelope.ClearField(name)
    envelope.DiscardUnknownFields()
    return Envelope.FromString(envelope.SerializeToString())  # copying each field takes twice as long


def parse_backlog(data: bytes) -> Backlog:
    """The backlog entry in ``data``; raises :class:`MalformedEnvelope`."""
    try:
        return Backlog.FromString(data)
    except (DecodeError, ValueError):
        raise MalformedEnvelope from None


def encode_envelope(envelope: Envelope) -> bytes:
    """The envelope as the public programs write it: fields of a oneof come last, the message before the payload.

    Receivers accept any order. ``SerializeToString`` is faster, and is enough where the bytes are not compared.
    """
    head = Envelope()
    head.CopyFrom(envelope)
    parts = []
    for oneof in _ONEOFS:
        name = envelope.WhichOneof(oneof)
        if name is None:
            continue
        head.ClearField(name)
        part = Envelope()
        if oneof == "payload":
            setattr(part, name, getattr(envelope, name))
        else:
            getattr(part, name).CopyFrom(getattr(envelope, name))
            getattr(part, name).SetInParent()
        parts.append(part.SerializeToString())
    return b"".join((head.SerializeToString(), *parts))
