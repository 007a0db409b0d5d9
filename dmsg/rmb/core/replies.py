"""Envelopes that answer another envelope. Pure.

Answers of a receiver have no source, timestamp and signature yet: :class:`~dmsg.rmb.core.sender.Sender` adds them. Errors
of a relay have no source and no signature, because it has no twin.

"""

from __future__ import annotations

from typing import Final

from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import RelayProblem
from dmsg.rmb.core.limits import DEFAULT_TTL_S, MAX_ERROR_TEXT_BYTES
from dmsg.rmb.core.wire import Envelope

_PONG: Final = b"hello world"


def bounded_text(text: str) -> str:
    """``text`` as an error may carry it: valid Unicode, cut to the limit."""
    return text.encode("utf-8", "replace")[:MAX_ERROR_TEXT_BYTES].decode("utf-8", "ignore")


def relay_error(
    request: Envelope, problem: RelayProblem, now: int, destination: SessionAddress | None = None
) -> Envelope:
    """A relay's answer to a ``request`` that it does not deliver; other kinds of messages get no answer.

    ``destination`` is the session that sent the request, or ``None`` when that is not connected here (the public relay then
    leaves the field out, and receivers accept that). See :ref:`spec-rmb-problems`.
    """
    envelope = Envelope(uid=request.uid, timestamp=now, expiration=DEFAULT_TTL_S)
    if destination is not None:
        destination.write_to(envelope.destination)
    envelope.error.code = problem.code
    envelope.error.message = problem.text
    return envelope


def answer_ping(envelope: Envelope) -> None:
    """Turn a ping into its pong, as a relay answers browsers: addresses swapped, ``hello world`` appended to the payload.

    The signature stays, but is no longer valid.
    """
    ping = Envelope()
    ping.CopyFrom(envelope)
    for name, other in (("source", "destination"), ("destination", "source")):
        envelope.ClearField(name)
        if ping.HasField(other):
            getattr(envelope, name).CopyFrom(getattr(ping, other))
    envelope.pong.SetInParent()
    envelope.plain += _PONG


def error_reply(request: Envelope, code: int, text: str, ttl_s: int = DEFAULT_TTL_S) -> Envelope:
    """The error with which a receiver answers ``request``, for :meth:`~dmsg.rmb.core.sender.Sender.seal`."""
    envelope = _reply(request, ttl_s)
    envelope.error.code = code
    envelope.error.message = bounded_text(text)
    return envelope


def response(request: Envelope, payload: bytes, schema: str | None = None, ttl_s: int = DEFAULT_TTL_S) -> Envelope:
    """The answer to ``request`` that holds ``payload``, for :meth:`~dmsg.rmb.core.sender.Sender.seal`."""
    envelope = _reply(request, ttl_s)
    envelope.response.SetInParent()
    envelope.plain = payload
    if schema is not None:
        envelope.schema = schema
    return envelope


def _reply(request: Envelope, ttl_s: int) -> Envelope:
    envelope = Envelope(uid=request.uid, expiration=ttl_s)
    envelope.destination.CopyFrom(request.source)
    return envelope
