"""How a transport becomes secure: which carrier moves the end-to-end handshake, and when the clear is refused.

Pure. :ref:`spec-downgrade-rule`, :ref:`spec-carriers`. One object for each stream that is being opened; it is fed the
connection's events and says what came of them. Errors are the typed reasons of CLOSE frames.
"""

from __future__ import annotations

import os
from enum import Enum

from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.e2e import Resume, SecureInitiator, SecureKeys, SecureResponder
from dmsg.mux.core.errors import IntegrityError
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.sealed_stream import SealedStream
from dmsg.mux.core.stream import Stream, StreamState
from dmsg.mux.core.wire import REQUEST_BYTES


class Security(Enum):
    """What a dialer or listener asks for (:ref:`spec-downgrade-rule`)."""

    E2E = "e2e"  # never in the clear
    PREFER = "prefer"  # in the clear only with peers whose signed entry promises nothing better
    HOP = "hop"  # never asks for end-to-end security


class Carrier(Enum):
    """What moves the handshake messages."""

    NONE = "none"
    REQUEST = "A"  # inside REQUEST and ACCEPT
    FORWARD = "B"  # inside the first FWD of each direction


class Outbound:
    """The dialling side of one stream."""

    def __init__(
        self,
        connection: Connection,
        key: SecretKey,
        server: PublicKey,
        target: PublicKey,
        carrier: Carrier,
        *,
        service: str = "",
        resume: Resume | None = None,
        random: Random = os.urandom,
    ) -> None:
        self.carrier = carrier
        self.service = service
        self.resume: Resume | None = None  # the peer's, once it has answered
        self._connection = connection
        self._handshake: SecureInitiator | None = None
        if carrier is not Carrier.NONE:
            self._handshake = SecureInitiator(key, target, server, service=service, resume=resume, random=random)
        message = self._handshake.message if self._handshake and carrier is Carrier.REQUEST else b""
        self._plain = connection.open(target, message)
        self.stream: Stream = self._plain

    def accepted(self, message: bytes) -> Stream | None:
        """The peer accepted: the stream to use, or ``None`` while its handshake message is still to come."""
        if self._handshake is None:
            return self.stream
        if self.carrier is Carrier.REQUEST:
            return self._finish(message)
        self._plain.move(StreamState.UPGRADING)
        self._connection.send_control(self._plain.upgrade_frame(self._handshake.message))
        return None

    def upgraded(self, message: bytes) -> Stream:
        """The peer's handshake message came in a FWD."""
        return self._finish(message)

    def _finish(self, message: bytes) -> Stream:
        assert self._handshake is not None
        keys, self.resume = self._handshake.finish(message)
        self.stream = _secure(self._connection, self._plain, keys, confirmed=True)
        return self.stream


class Inbound:
    """The dialled side of one stream: what the peer wants is known before anything is decided."""

    def __init__(
        self,
        connection: Connection,
        key: SecretKey,
        server: PublicKey,
        stream: PlainStream,
        *,
        random: Random = os.urandom,
    ) -> None:
        self.stream = stream
        self._connection = connection
        self._key = key
        self._server = server
        self._random = random
        self._handshake: SecureResponder | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the REQUEST carried no handshake."""
        return len(self.stream.request) == REQUEST_BYTES

    @property
    def is_sealed(self) -> bool:
        """Whether the peer's handshake message has been read."""
        return self._handshake is not None

    def read(self, message: bytes | None = None) -> tuple[str, Resume | None]:
        """Take handshake message 1: the service wanted, and what is to be resumed. Raises ``IntegrityError``."""
        if message is None:
            message = self.stream.request[REQUEST_BYTES:]
        self._handshake = SecureResponder(self._key, self.stream.remote, self._server, message, random=self._random)
        try:
            return self._handshake.service, self._handshake.resume
        except RemoteProtocolError as error:
            raise IntegrityError(str(error), by="local") from None

    def accept(self, resume: Resume | None = None) -> SealedStream:
        """Accept, sealed; the stream is open once its initiator has proved itself."""
        message, keys = self._answer(resume)
        self._connection.accept(self.stream, message)
        return _secure(self._connection, self.stream, keys, confirmed=False)

    def accept_upgrade(self, resume: Resume | None = None) -> SealedStream:
        """The same for a stream accepted in the clear whose handshake came in its first FWD."""
        message, keys = self._answer(resume)
        self._connection.send_control(self.stream.upgrade_frame(message))
        return _secure(self._connection, self.stream, keys, confirmed=False)

    def _answer(self, resume: Resume | None) -> tuple[bytes, SecureKeys]:
        assert self._handshake is not None
        return self._handshake.answer(resume)


def _secure(connection: Connection, stream: PlainStream, keys: SecureKeys, *, confirmed: bool) -> SealedStream:
    """Go on sealed. Without ``confirmed``, data waits for the confirmation (:ref:`spec-confirmation`)."""
    config = connection.config
    secured = SealedStream(
        stream,
        keys,
        window_bytes=config.secure_window_bytes,
        ack_limit_bytes=config.ack_limit_bytes,
        rekey_after_frames=config.rekey_after_frames,
        state=StreamState.OPEN if confirmed else StreamState.CONFIRMING,
    )
    connection.replace(stream, secured)
    if confirmed:
        connection.send_control(secured.take_ack())
    return secured
