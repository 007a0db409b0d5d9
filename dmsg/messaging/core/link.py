"""The handshake of a link as a core (:ref:`spec-messaging-handshake`): four JSON objects, each with a line feed after it.

The client sends its key, the relay's and a nonce; the relay signs them (``sig1``); the client signs the same and ``sig1``
(``sig2``); the relay says ``accepted``. Nothing is encrypted, now or later: a link tells a relay who its client is, and
no more. No signature covers ``accepted``.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from dmsg.crypto.errors import InvalidKey, InvalidSignature
from dmsg.crypto.keys import SIGNATURE_BYTES, PublicKey, Random, SecretKey
from dmsg.errors import LocalProtocolError, RemoteProtocolError
from dmsg.http.errors import MalformedJson
from dmsg.http.json_text import decode
from dmsg.messaging.core.errors import LinkRefused
from dmsg.messaging.core.events import Event, LinkDone, LinkRequested
from dmsg.messaging.core.limits import FIRST_FRAME_PAUSE_S, HANDSHAKE_OBJECT_LIMIT_BYTES, HANDSHAKE_TIMEOUT_S
from dmsg.sansio.core import Core

VERSION: Final = "0.1"
NONCE_BYTES: Final = 16
_ENTROPY_BYTES: Final = 32
_SPACE: Final = b" \t\r\n"
#: The characters that decide where an object ends: a quote begins or ends a string, braces open and close, a backslash
#: escapes the next character.
_MARKS: Final = re.compile(rb'["\\{}]')
_QUOTE, _BACKSLASH, _OPENS = b'"\\{'
_HEX: Final = re.compile(r"[0-9a-fA-F]*\Z")


def _malformed(what: str) -> RemoteProtocolError:
    return RemoteProtocolError("handshake", what)


def _hex(value: Any, size: int, what: str) -> bytes:
    if not isinstance(value, str) or len(value) != 2 * size or not _HEX.match(value):
        raise _malformed(f"malformed {what}")
    return bytes.fromhex(value)


def _key(value: Any, what: str) -> PublicKey:
    try:
        return PublicKey.parse(value)
    except InvalidKey:
        raise _malformed(f"malformed {what}") from None


def _signature(value: Any, what: str) -> bytes:
    """The signature, or ``b""``: absent, ``null`` and 130 zeros all mean that there is none. Go sends the zeros."""
    if value is None:
        return b""
    signature = _hex(value, SIGNATURE_BYTES, what)
    return signature if any(signature) else b""


@dataclass(frozen=True, slots=True)
class LinkFrame:
    """One object of the handshake. ``sig1`` and ``sig2`` are empty when they are not there."""

    initiator: PublicKey
    responder: PublicKey
    nonce: bytes
    sig1: bytes = b""
    sig2: bytes = b""
    #: ``None`` when it is not there: Go leaves it out for ``false``.
    accepted: bool | None = None

    def payload(self) -> bytes:
        """What the next signature covers: the version as text, both keys, the nonce, and ``sig1`` once it is there."""
        return b"".join((VERSION.encode(), self.initiator.raw, self.responder.raw, self.nonce, self.sig1))

    def encode(self) -> bytes:
        """The object without white space, and a line feed. Go depends on both being written in one piece."""
        parts = [f'{{"version":"{VERSION}","initiator":"{self.initiator}"']
        parts.append(f',"responder":"{self.responder}","nonce":"{self.nonce.hex()}"')
        if self.sig1:
            parts.append(f',"sig1":"{self.sig1.hex()}"')
        if self.sig2:
            parts.append(f',"sig2":"{self.sig2.hex()}"')
        if self.accepted is not None:
            parts.append(f',"accepted":{"true" if self.accepted else "false"}')
        parts.append("}\n")
        return "".join(parts).encode()

    @classmethod
    def decode(cls, data: bytes) -> LinkFrame:
        """Read one object; unknown members are ignored. Raises ``RemoteProtocolError``."""
        try:
            members = decode(data, HANDSHAKE_OBJECT_LIMIT_BYTES)
        except MalformedJson:
            raise _malformed("not JSON") from None
        if not isinstance(members, dict):
            raise _malformed("not JSON")
        if members.get("version") != VERSION:
            raise _malformed("unknown version")
        accepted = members.get("accepted")
        if accepted is not None and not isinstance(accepted, bool):
            raise _malformed("malformed accepted")
        return cls(
            _key(members.get("initiator"), "initiator"),
            _key(members.get("responder"), "responder"),
            _hex(members.get("nonce"), NONCE_BYTES, "nonce"),
            _signature(members.get("sig1"), "sig1"),
            _signature(members.get("sig2"), "sig2"),
            accepted,
        )


class ObjectReader:
    """Cuts a stream of bytes into JSON objects, which may be pretty-printed and have white space between them.

    Each byte is looked at once. Raises ``RemoteProtocolError`` as soon as an object is over
    ``HANDSHAKE_OBJECT_LIMIT_BYTES``, or something other than an object begins.
    """

    __slots__ = ("_depth", "_in_string", "_scanned", "buffer")

    def __init__(self) -> None:
        #: Received bytes that were not taken.
        self.buffer = bytearray()
        self._restart()

    def _restart(self) -> None:
        self._scanned = self._depth = 0
        self._in_string = False

    def take_object(self) -> bytes | None:
        """The next whole object, with the white space before it; ``None`` if it has not come yet."""
        end = self._find_end()
        if (end or len(self.buffer)) > HANDSHAKE_OBJECT_LIMIT_BYTES:
            raise _malformed("message over the limit")
        if end is None:
            return None
        taken = bytes(self.buffer[:end])
        del self.buffer[:end]
        self._restart()
        return taken

    def take_line_feed(self) -> bool:
        """Take the line feed after an object; ``False`` if nothing has come yet. Any other byte is an error."""
        if not self.buffer:
            return False
        if self.buffer[0] != 0x0A:
            raise _malformed("no line feed")
        del self.buffer[:1]
        return True

    def _find_end(self) -> int | None:
        buffer = self.buffer
        limit = min(len(buffer), HANDSHAKE_OBJECT_LIMIT_BYTES)
        if not self._depth:
            text = buffer[self._scanned : limit].lstrip(_SPACE)
            self._scanned = limit - len(text)
            if text and text[0] != _OPENS:
                raise _malformed("not JSON")
        at, depth, in_string = self._scanned, self._depth, self._in_string
        while (mark := _MARKS.search(buffer, at, limit)) is not None:
            at = mark.end()
            byte = buffer[at - 1]
            if byte == _BACKSLASH:
                if at == limit:  # the escaped character has not come yet
                    at -= 1
                    break
                at += 1
            elif byte == _QUOTE:
                in_string = not in_string
            elif not in_string:
                depth += 1 if byte == _OPENS else -1
                if not depth:
                    return at
        else:
            at = limit
        self._scanned, self._depth, self._in_string = at, depth, in_string
        return None


class _Step(Enum):
    """What one side waits for."""

    FRAME_1 = "frame 1"
    FRAME_2 = "frame 2"
    FRAME_3 = "frame 3"
    FRAME_4 = "frame 4"
    LINE_FEED = "the line feed behind the last frame"
    DECISION = "accept or refuse"
    PAUSE = "the first frame may be sent"
    OVER = "nothing"


_READING: Final = frozenset({_Step.FRAME_1, _Step.FRAME_2, _Step.FRAME_3, _Step.FRAME_4})


class _LinkHandshake(Core):
    """The common part of both sides: the reader, the bytes to be sent, and the time limit."""

    __slots__ = ("_deadline", "_frame", "_key", "_out", "_reader", "_step")

    _frame: LinkFrame

    def __init__(self, key: SecretKey, step: _Step, deadline: float) -> None:
        self._key = key
        self._step = step
        self._deadline: float | None = deadline
        self._reader = ObjectReader()
        self._out = b""

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Take bytes from the network; ``RemoteProtocolError`` for anything that is not the handshake."""
        self._reader.buffer += data
        events: list[Event] = []
        while self._step in _READING:
            text = self._reader.take_object()
            if text is None:
                return events
            self._on_frame(LinkFrame.decode(text))
        if self._step is _Step.LINE_FEED and self._reader.take_line_feed():
            events.append(self._on_line_feed())
        return events

    def data_to_send(self) -> bytes:
        """What is to be written now, one object at most."""
        data, self._out = self._out, b""
        return data

    def next_timeout(self) -> float | None:
        """When :meth:`handle_timeout` wants to be called, or ``None``."""
        return self._deadline

    def handle_timeout(self, now: float) -> list[Event]:
        """Raises ``RemoteProtocolError`` when the handshake has taken too long."""
        if self._deadline is None or now < self._deadline:
            return []
        self._deadline = None
        raise _malformed("timeout")

    @abstractmethod
    def _on_frame(self, frame: LinkFrame) -> None:
        """Take the next message of the handshake."""

    @abstractmethod
    def _on_line_feed(self) -> Event:
        """Take the line feed that ends the last message."""

    def _send(self, frame: LinkFrame) -> None:
        self._frame = frame
        self._out = frame.encode()

    def _done(self, remote: PublicKey) -> LinkDone:
        self._step = _Step.OVER
        self._deadline = None
        return LinkDone(remote, bytes(self._reader.buffer))


def _check(key: PublicKey, signature: bytes, payload: bytes, what: str) -> None:
    try:
        key.verify(signature, payload)
    except InvalidSignature:
        raise _malformed(f"{what} does not verify") from None


class LinkInitiator(_LinkHandshake):
    """The client's side: one :class:`LinkDone` once the relay has accepted.

    Raises :class:`~dmsg.messaging.core.errors.LinkRefused` when the relay does not want this client. The shell sends no
    frame before the end of the handshake, because Go's relays would lose it.
    """

    __slots__ = ()

    def __init__(
        self,
        key: SecretKey,
        relay: PublicKey,
        *,
        now: float,
        timeout_s: float = HANDSHAKE_TIMEOUT_S,
        random: Random = os.urandom,
    ) -> None:
        super().__init__(key, _Step.FRAME_2, now + timeout_s)
        self._send(LinkFrame(key.public_key, relay, random(NONCE_BYTES)))

    @property
    def relay_proved(self) -> bool:
        """Whether the relay has signed our nonce: it has the key it was dialled by."""
        return bool(self._frame.sig1)

    def _on_frame(self, frame: LinkFrame) -> None:
        ours = self._frame
        if frame.accepted is False:
            raise LinkRefused
        if self._step is _Step.FRAME_2:
            if replace(frame, sig1=b"", accepted=None) != ours:
                raise _malformed("not an echo")
            _check(ours.responder, frame.sig1, ours.payload(), "sig1")
            signed = replace(ours, sig1=frame.sig1)
            self._send(replace(signed, sig2=self._key.sign(signed.payload())))
            self._step = _Step.FRAME_4
            return
        if replace(frame, accepted=None) != ours:
            raise _malformed("not an echo")
        if not frame.accepted:  # Go leaves out what is false
            raise LinkRefused
        self._step = _Step.LINE_FEED

    def _on_line_feed(self) -> LinkDone:
        return self._done(self._frame.responder)


class LinkResponder(_LinkHandshake):
    """The relay's side. :class:`LinkRequested` says who the client is; then :meth:`accept` or :meth:`refuse` is called.

    :class:`LinkDone` follows ``FIRST_FRAME_PAUSE_S`` after the acceptance, or with the first byte that the client sends
    after it (:ref:`spec-messaging-boundary`). Frames for the client may be queued from the acceptance on, and are sent after
    :class:`LinkDone`.
    """

    __slots__ = ("_random",)

    def __init__(
        self,
        key: SecretKey,
        *,
        now: float,
        timeout_s: float = HANDSHAKE_TIMEOUT_S,
        random: Random = os.urandom,
    ) -> None:
        super().__init__(key, _Step.FRAME_1, now + timeout_s)
        self._random = random

    def accept(self, now: float) -> None:
        """Admit the client: the last object goes out."""
        self._decide(accepted=True)
        self._step = _Step.PAUSE
        self._deadline = now + FIRST_FRAME_PAUSE_S

    def refuse(self) -> None:
        """Turn the client away: it is told so, then the shell closes the connection."""
        self._decide(accepted=False)
        self._step = _Step.OVER
        self._deadline = None

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Take bytes from the network; ``RemoteProtocolError`` for anything that is not the handshake."""
        events = super().receive_data(data, now)
        if self._step is _Step.PAUSE and data:
            events.append(self._done(self._frame.initiator))
        elif self._step is _Step.DECISION and len(self._reader.buffer) > HANDSHAKE_OBJECT_LIMIT_BYTES:
            raise _malformed("message over the limit")
        return events

    def handle_timeout(self, now: float) -> list[Event]:
        """The end of the pause before the first frame, or ``RemoteProtocolError`` when the handshake took too long."""
        if self._step is _Step.PAUSE and self._deadline is not None and now >= self._deadline:
            return [self._done(self._frame.initiator)]
        return super().handle_timeout(now)

    def _decide(self, *, accepted: bool) -> None:
        if self._step is not _Step.DECISION:
            raise LocalProtocolError("no client waits for a decision")
        self._send(replace(self._frame, accepted=accepted))

    def _on_frame(self, frame: LinkFrame) -> None:
        if self._step is _Step.FRAME_1:
            if frame.responder != self._key.public_key:
                raise _malformed("not our key")
            if frame.sig1 or frame.sig2:
                # We would sign bytes that a third party takes for our sig2: it would take its peer for us.
                raise _malformed("signed too early")
            asked = replace(frame, accepted=None)
            # The nonce is the client's, so only sig1 tells this handshake from an earlier one. If sig1 were the same for the
            # same first object, a recorded sig2 could be sent again.
            sig1 = self._key.sign(asked.payload(), self._random(_ENTROPY_BYTES))
            self._send(replace(asked, sig1=sig1))
            self._step = _Step.FRAME_3
            return
        if replace(frame, sig2=b"", accepted=None) != self._frame:
            raise _malformed("not an echo")
        _check(frame.initiator, frame.sig2, self._frame.payload(), "sig2")
        self._frame = replace(frame, accepted=None)
        self._step = _Step.LINE_FEED

    def _on_line_feed(self) -> LinkRequested:
        self._step = _Step.DECISION
        return LinkRequested(self._frame.initiator)
