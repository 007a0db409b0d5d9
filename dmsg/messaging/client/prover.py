"""Proves relays of the messaging system."""

from __future__ import annotations

from collections.abc import Sequence

from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.proofs.handshake import TIMEOUT_S, HandshakeProver
from dmsg.messaging.core.link import LinkInitiator
from dmsg.sansio.core import Core


class LinkProver(HandshakeProver):
    """The proof is ``sig1``, the relay's signature of a nonce. We do not send our signature, so the relay gets no client."""

    def make_core(self, key: SecretKey, relay: PublicKey, now: float) -> LinkInitiator:
        """See :class:`~dmsg.discovery.proofs.handshake.HandshakeProver`."""
        return LinkInitiator(key, relay, now=now, timeout_s=TIMEOUT_S, random=self._random)

    def is_proof(self, core: Core, events: Sequence[object]) -> bool:
        """See :class:`~dmsg.discovery.proofs.handshake.HandshakeProver`."""
        return isinstance(core, LinkInitiator) and core.relay_proved
