"""A client's listening port for one service, and the security that it asks of transports."""

from __future__ import annotations

from twisted.internet.interfaces import IProtocolFactory
from twisted.internet.protocol import Factory

from dmsg.clients.limits import ListenerLimits
from dmsg.clients.listener import ListeningPort, PortClient
from dmsg.interfaces import IAccessPolicy
from dmsg.mux.client.transport import DmsgTransport
from dmsg.mux.core.e2e_negotiation import Security


class DmsgPort(ListeningPort[DmsgTransport]):
    """Where transports for one service come in; ``security`` says who may come in the clear."""

    def __init__(
        self,
        client: PortClient[DmsgTransport],
        factory: IProtocolFactory | Factory,
        service: str = "",
        *,
        policy: IAccessPolicy | None = None,
        limits: ListenerLimits | None = None,
        security: Security | str = Security.PREFER,
    ) -> None:
        super().__init__(client, factory, service, policy=policy, limits=limits)
        self.security = Security(security)  # a plain text would equal no member: "e2e" would let in what it must not
