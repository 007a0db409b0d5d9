"""How a transport becomes secure: which carrier moves the end-to-end handshake, and when the clear is refused.

Pure. :ref:`spec-downgrade-rule`, :ref:`spec-carriers`. The connection carries the handshakes out.
"""

from __future__ import annotations

import os
from enum import Enum
from functools import lru_cache, partial
from typing import Final

from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.crypto.noise import KnownPeer
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


#: Peers of one connection whose keys are kept prepared for the next handshake, some 600 bytes each.
KNOWN_PEERS: Final = 256


class EndToEnd:
    """What the end-to-end handshakes of one connection have in common: our key, whether we have AES, the relay, the
    randomness, the known peers.

    Each connection has its own cache of peers. So the time that an answer takes tells a relay nothing about dials over other
    relays, and values calculated from our key (:class:`~dmsg.crypto.noise.KnownPeer`) are dropped with the connection.
    """

    __slots__ = ("_aes", "_key", "_known", "_random", "server")

    def __init__(self, key: SecretKey, server: PublicKey, *, aes: bool = False, random: Random = os.urandom) -> None:
        self.server = server
        self._aes = aes
        self._key = key
        self._random = random
        self._known = lru_cache(maxsize=KNOWN_PEERS)(partial(KnownPeer, key))

    def initiate(self, target: PublicKey, service: str, resume: Resume | None) -> SecureInitiator:
        """Begin a handshake with ``target``."""
        known = self._known(target.raw)
        return SecureInitiator(
            self._key,
            target,
            self.server,
            service=service,
            resume=resume,
            aes=self._aes,
            random=self._random,
            known=known,
        )

    def respond(self, remote: PublicKey, message: bytes) -> SecureResponder:
        """Take message 1 of ``remote``. Raises ``IntegrityError``."""
        known = self._known(remote.raw)
        return SecureResponder(self._key, remote, self.server, message, aes=self._aes, random=self._random, known=known)
