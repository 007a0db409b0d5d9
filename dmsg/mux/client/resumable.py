"""The transports of a client that its peers may resume after they have lost their path."""

from __future__ import annotations

from dmsg.crypto.keys import PublicKey
from dmsg.mux.client.transport import DmsgTransport


class ResumableTransports:
    """Open transports that a peer opened and may resume, by its key and their token."""

    def __init__(self) -> None:
        self._by_peer: dict[PublicKey, dict[bytes, DmsgTransport]] = {}

    def add(self, transport: DmsgTransport) -> None:
        """``transport`` has been opened; it counts if its peer may resume it."""
        stream = transport.stream
        if stream.resumable and not stream.initiator:
            self._by_peer.setdefault(stream.remote, {})[transport.token] = transport

    def remove(self, transport: DmsgTransport) -> None:
        """``transport`` is over. Does nothing if it is not known."""
        of_peer = self._by_peer.get(transport.stream.remote, {})
        if of_peer.pop(transport.token, None) is not None and not of_peer:
            del self._by_peer[transport.stream.remote]

    def get(self, token: bytes, peer: PublicKey) -> DmsgTransport | None:
        """The transport that ``peer`` opened and may go on with under ``token``."""
        return self._by_peer.get(peer, {}).get(token)

    def may_resume(self, peer: PublicKey) -> bool:
        """Whether ``peer`` opened any transport that it may go on with."""
        return peer in self._by_peer
