"""Proves relays of the dmsg protocol."""

from __future__ import annotations

from collections.abc import Sequence

from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.proofs.handshake import TIMEOUT_S, HandshakeProver
from dmsg.mux.core.events import HandshakeDone
from dmsg.mux.core.handshake import Handshake, Role
from dmsg.sansio.core import Core


class XkProver(HandshakeProver):
    """The proof is the second message of XK: only the secret key that belongs to the relay's entry can make it.

    The relay counts the connection as a handshake that was given up.
    """

    def make_core(self, key: SecretKey, relay: PublicKey, now: float) -> Handshake:
        """See :class:`~dmsg.discovery.proofs.handshake.HandshakeProver`."""
        return Handshake(Role.CLIENT, key, relay, now=now, timeout_s=TIMEOUT_S, random=self._random)

    def is_proof(self, core: Core, events: Sequence[object]) -> bool:
        """See :class:`~dmsg.discovery.proofs.handshake.HandshakeProver`."""
        return any(isinstance(event, HandshakeDone) for event in events)
