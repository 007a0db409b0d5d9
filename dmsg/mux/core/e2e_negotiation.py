"""How a transport becomes secure: which carrier moves the end-to-end handshake, and when the clear is refused.

Pure. :ref:`spec-downgrade-rule`, :ref:`spec-carriers`. The connection carries the handshakes out.
"""

from __future__ import annotations

import os
from enum import Enum

from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.mux.core.e2e_handshake import Resume, SecureInitiator, SecureResponder


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


class EndToEnd:
    """What the end-to-end handshakes of one connection have in common: our key, the relay, the dice."""

    __slots__ = ("_key", "_random", "server")

    def __init__(self, key: SecretKey, server: PublicKey, *, random: Random = os.urandom) -> None:
        self.server = server
        self._key = key
        self._random = random

    def initiate(self, target: PublicKey, service: str, resume: Resume | None) -> SecureInitiator:
        """Begin a handshake with ``target``."""
        return SecureInitiator(self._key, target, self.server, service=service, resume=resume, random=self._random)

    def respond(self, remote: PublicKey, message: bytes) -> SecureResponder:
        """Take message 1 of ``remote``. Raises ``IntegrityError``."""
        return SecureResponder(self._key, remote, self.server, message, random=self._random)
