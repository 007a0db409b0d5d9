"""The JSON between local programs and a peer: two kinds of requests, two of responses. Pure.

A local program gives ``Outgoing`` messages to the peer and gets ``Incoming`` messages from it. Members are in the order of
the public peer, and are ``null`` without a value. See :ref:`spec-rmb-json`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from dmsg.errors import InvalidAddress
from dmsg.http.errors import MalformedJson
from dmsg.http.json_text import decode as decode_json
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import EnvelopeExpired, InvalidMessage, PeerCode
from dmsg.rmb.core.lifetime import remaining, stamp
from dmsg.rmb.core.limits import (
    MAX_COMMAND_BYTES,
    MAX_DESTINATIONS,
    MAX_JSON_BYTES,
    MAX_REFERENCE_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_TAGS_BYTES,
    MAX_TTL_S,
    MAX_TWIN,
    MAX_UID_BYTES,
    READ_JSON_BYTES,
)
from dmsg.rmb.core.replies import bounded_text
from dmsg.rmb.core.wire import Backlog, Envelope

#: The list to which services push their answers.
REPLY_LIST: Final = "msgbus.system.reply"
#: Lifetime that the public peer gives answers of services, in seconds, before it cuts that to MAX_TTL_S.
_RESPONSE_TTL_S: Final = 3600
_VERSION: Final = 1
_LAST_NUMBER: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class JsonError:
    """An error in place of an answer: ``code`` is a number of 32 bits."""

    code: int
    message: str


#: What a caller gets in place of an answer that does not fit into an envelope.
ANSWER_TOO_LARGE: Final = JsonError(PeerCode.OTHER, "other: the answer is too large")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingRequest:
    """A request of a local program to the twins ``destinations``.

    Answers go to the list ``reply_to``, each with ``reference``. The request is valid for ``expiration`` seconds from
    ``timestamp`` on, or from the time it is read if ``timestamp`` is 0.
    """

    reply_member: ClassVar[str] = "ret"

    command: str
    destinations: tuple[int, ...]
    reply_to: str
    expiration: int
    timestamp: int
    payload: bytes = b""
    reference: str | None = None
    tags: str | None = None
    schema: str | None = None

    @classmethod
    def from_json(cls, data: bytes) -> OutgoingRequest:
        """Parse ``data``; raises :class:`~dmsg.rmb.core.errors.InvalidMessage`, which says who to tell if that is known."""
        members = _Members(data, cls.reply_member)
        return cls(
            reply_to=members.text("ret", MAX_REFERENCE_BYTES, empty=False),
            reference=members.optional("ref", MAX_REFERENCE_BYTES),
            command=members.text("cmd", MAX_COMMAND_BYTES, empty=False),
            expiration=members.number("exp"),
            payload=members.payload(),
            tags=members.optional("tag", MAX_TAGS_BYTES),
            destinations=members.twins("dst"),
            schema=members.optional("shm", MAX_SCHEMA_BYTES),
            timestamp=members.number("now"),
        )

    def to_json(self) -> bytes:
        """The text that a peer reads."""
        return _text(
            ver=_VERSION,
            ref=self.reference,
            cmd=self.command,
            exp=self.expiration,
            dat=_base64(self.payload),
            tag=self.tags,
            dst=self.destinations,
            ret=self.reply_to,
            shm=self.schema,
            now=self.timestamp,
        )

    def times(self, now: int) -> tuple[int, int]:
        """The timestamp of its envelopes, and for how many seconds from then on they are valid.

        Raises :class:`~dmsg.rmb.core.errors.EnvelopeExpired` when the request has expired, or was never valid.
        """
        timestamp, expiration = stamp(now, self.timestamp, min(self.expiration, MAX_TTL_S))
        if remaining(now, timestamp, expiration) is None:
            raise EnvelopeExpired
        return timestamp, expiration

    def envelopes(self, uid: str, now: int) -> list[Envelope]:
        """An envelope for each destination, all with the same ``uid``, for :meth:`~dmsg.rmb.core.sender.Sender.seal`.

        Raises :class:`~dmsg.rmb.core.errors.EnvelopeExpired` when the request has expired, or was never valid.
        """
        timestamp, expiration = self.times(now)
        found = []
        for twin in self.destinations:
            envelope = Envelope(uid=uid, timestamp=timestamp, expiration=expiration, plain=self.payload)
            envelope.destination.twin = twin
            envelope.request.command = self.command
            if self.tags is not None:
                envelope.tags = self.tags
            if self.schema is not None:
                envelope.schema = self.schema
            found.append(envelope)
        return found

    def backlog(self, uid: str, now: int) -> Backlog:
        """What a peer keeps until the answers have come: whose they are, and for how many seconds."""
        left = remaining(now, *stamp(now, self.timestamp, min(self.expiration, MAX_TTL_S)))
        return Backlog(uid=uid, reference=self.reference, reply_to=self.reply_to, ttl=left or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingRequest:
    """A request that came for a local service. The answer has to repeat ``uid`` and ``source``."""

    uid: str
    source: SessionAddress
    command: str
    expiration: int
    timestamp: int
    payload: bytes = b""
    tags: str | None = None
    schema: str | None = None

    @classmethod
    def of(cls, envelope: Envelope, payload: bytes) -> IncomingRequest:
        """The request in ``envelope``, whose decrypted payload is ``payload``."""
        return cls(
            uid=envelope.uid,
            source=SessionAddress.of(envelope.source),
            command=envelope.request.command,
            expiration=envelope.expiration,
            payload=payload,
            tags=envelope.tags if envelope.HasField("tags") else None,
            schema=envelope.schema if envelope.HasField("schema") else None,
            timestamp=envelope.timestamp,
        )

    @classmethod
    def from_json(cls, data: bytes) -> IncomingRequest:
        """Read one; raises :class:`~dmsg.rmb.core.errors.InvalidMessage`."""
        members = _Members(data)
        return cls(
            uid=members.text("ref", MAX_UID_BYTES),
            source=members.address("src"),
            command=members.text("cmd", MAX_COMMAND_BYTES),
            expiration=members.number("exp"),
            payload=members.payload(),
            tags=members.optional("tag", MAX_TAGS_BYTES),
            schema=members.optional("shm", MAX_SCHEMA_BYTES),
            timestamp=members.number("now"),
        )

    def to_json(self) -> bytes:
        """The text that a service reads."""
        return _text(
            ver=_VERSION,
            ref=self.uid,
            src=str(self.source),
            cmd=self.command,
            exp=self.expiration,
            dat=_base64(self.payload),
            tag=self.tags,
            ret=REPLY_LIST,
            shm=self.schema,
            now=self.timestamp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingResponse:
    """A local service's answer to the request ``uid`` of ``destination``: a payload, or an error."""

    uid: str
    destination: SessionAddress
    timestamp: int
    payload: bytes = b""
    schema: str | None = None
    error: JsonError | None = None

    @classmethod
    def from_json(cls, data: bytes) -> OutgoingResponse:
        """Parse ``data``; raises :class:`~dmsg.rmb.core.errors.InvalidMessage`. If there is an error, ``dat`` is ignored.

        A message that is too long becomes the error :data:`ANSWER_TOO_LARGE`.
        """
        members = _Members(data, may_be_long=True)
        error = members.error("err")
        if error is None and len(data) > MAX_JSON_BYTES:
            error = ANSWER_TOO_LARGE
        return cls(
            uid=members.optional("ref", MAX_UID_BYTES) or "",
            payload=members.payload() if error is None else b"",
            destination=members.address("dst"),
            schema=members.optional("shm", MAX_SCHEMA_BYTES),
            timestamp=members.number("now"),
            error=error,
        )

    def to_json(self) -> bytes:
        """The text that a peer reads."""
        return _text(
            ver=_VERSION,
            ref=self.uid,
            dat=_base64(self.payload),
            dst=str(self.destination),
            shm=self.schema,
            now=self.timestamp,
            err=_error(self.error),
        )

    def envelope(self) -> Envelope:
        """The answer as an envelope, for :meth:`~dmsg.rmb.core.sender.Sender.seal`."""
        envelope = Envelope(uid=self.uid, timestamp=self.timestamp, expiration=_RESPONSE_TTL_S)
        self.destination.write_to(envelope.destination)
        if self.schema is not None:
            envelope.schema = self.schema
        if self.error is None:
            envelope.response.SetInParent()
            envelope.plain = self.payload
        else:
            envelope.error.code = self.error.code
            envelope.error.message = self.error.message
        return envelope


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingResponse:
    """The answer that a local program gets for its request ``reference``.

    ``source`` is the session that answered. For an error of a relay, or of the local peer, ``source`` is the twin that was
    called; from the public peer it is then ``"0"`` or empty.
    """

    reference: str | None
    source: str
    timestamp: int
    payload: bytes = b""
    schema: str | None = None
    error: JsonError | None = None

    @classmethod
    def of(cls, envelope: Envelope, payload: bytes, reference: str | None) -> IncomingResponse:
        """The answer in ``envelope``, whose decrypted payload is ``payload``, to the request ``reference``."""
        error = envelope.error
        return cls(
            reference=reference,
            payload=payload,
            source=str(SessionAddress.of(envelope.source)),
            schema=envelope.schema if envelope.HasField("schema") else None,
            timestamp=envelope.timestamp,
            error=JsonError(error.code, bounded_text(error.message)) if envelope.HasField("error") else None,
        )

    @classmethod
    def from_json(cls, data: bytes) -> IncomingResponse:
        """Read one; raises :class:`~dmsg.rmb.core.errors.InvalidMessage`."""
        members = _Members(data)
        return cls(
            reference=members.optional("ref", MAX_REFERENCE_BYTES),
            payload=members.payload(),
            source=members.text("src", MAX_REFERENCE_BYTES),
            schema=members.optional("shm", MAX_SCHEMA_BYTES),
            timestamp=members.number("now"),
            error=members.error("err"),
        )

    def to_json(self) -> bytes:
        """The text that a local program reads."""
        return _text(
            ver=_VERSION,
            ref=self.reference,
            dat=_base64(self.payload),
            src=self.source,
            shm=self.schema,
            now=self.timestamp,
            err=_error(self.error),
        )


def _text(**members: Any) -> bytes:
    return json.dumps(members, separators=(",", ":"), ensure_ascii=False).encode()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _error(error: JsonError | None) -> dict[str, Any] | None:
    return None if error is None else {"code": error.code, "message": error.message}


class _Members:
    """The members of a message, each read with its bounds; unknown members are ignored."""

    def __init__(self, data: bytes, reply_member: str = "", *, may_be_long: bool = False) -> None:
        self._values: Mapping[str, Any] = {}
        self._reply_to, self._reference = "", None
        try:
            values = decode_json(data, READ_JSON_BYTES)
        except MalformedJson as error:
            raise self._invalid(str(error)) from None
        if not isinstance(values, dict):
            raise self._invalid("not an object")
        self._values = values
        if reply_member:
            # Read these first, so that the sender can be told about errors in the others. If these are wrong, it is unknown.
            self._reply_to = self.text(reply_member, MAX_REFERENCE_BYTES)
            self._reference = self.optional("ref", MAX_REFERENCE_BYTES)
        if len(data) > MAX_JSON_BYTES and not may_be_long:
            raise self._invalid(f"longer than {MAX_JSON_BYTES} bytes")
        self.number("ver")

    def _invalid(self, problem: str) -> InvalidMessage:
        return InvalidMessage(problem, self._reply_to, self._reference)

    def optional(self, name: str, limit_bytes: int) -> str | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self._invalid(f"{name} is not a string")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise self._invalid(f"{name} is not Unicode") from None
        if size > limit_bytes:
            raise self._invalid(f"{name} is longer than {limit_bytes} bytes")
        return value

    def text(self, name: str, limit_bytes: int, *, empty: bool = True) -> str:
        value = self.optional(name, limit_bytes)
        if value is None or not (value or empty):
            raise self._invalid(f"{name} is missing")
        return value

    def number(self, name: str) -> int:
        value = self._values.get(name)
        if value is None:
            raise self._invalid(f"{name} is missing")
        if type(value) is not int or not 0 <= value <= _LAST_NUMBER:
            raise self._invalid(f"{name} is not a number from 0 to {_LAST_NUMBER}")
        return value

    def payload(self) -> bytes:
        """Base64 with the usual alphabet, with padding or without."""
        text = self.text("dat", MAX_JSON_BYTES)
        padded = text if text.endswith("=") else text + "=" * (-len(text) % 4)
        try:
            return base64.b64decode(padded, validate=True)
        except (binascii.Error, ValueError):
            raise self._invalid("dat is not base64") from None

    def twins(self, name: str) -> tuple[int, ...]:
        values = self._values.get(name)
        if not isinstance(values, list) or not 0 < len(values) <= MAX_DESTINATIONS:
            raise self._invalid(f"{name} is not a list of 1 to {MAX_DESTINATIONS} twins")
        if not all(type(one) is int and 0 < one <= MAX_TWIN for one in values):
            raise self._invalid(f"{name} holds what is no twin")
        return tuple(dict.fromkeys(values))

    def address(self, name: str) -> SessionAddress:
        try:
            return SessionAddress.parse(self.text(name, MAX_REFERENCE_BYTES))
        except InvalidAddress as error:
            raise self._invalid(f"{name}: {error}") from None

    def error(self, name: str) -> JsonError | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._invalid(f"{name} is not an object")
        code, message = value.get("code"), value.get("message")
        if type(code) is not int or not 0 <= code < 2**32:
            raise self._invalid(f"{name} has no code")
        if not isinstance(message, str):
            raise self._invalid(f"{name} has no message")
        return JsonError(code, bounded_text(message))
