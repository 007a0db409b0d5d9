"""One dial of a client: what it asks of a session, and how well the stream has to be protected."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.crypto.keys import PublicKey
from dmsg.errors import StageError
from dmsg.mux.client.pending import OpenedPath
from dmsg.mux.client.session import ServerSession
from dmsg.mux.core.e2e_handshake import Resume
from dmsg.mux.core.e2e_negotiation import Carrier, Security
from dmsg.mux.core.errors import Busy, DowngradeRefused, Unsupported


@dataclass(frozen=True, slots=True)
class DialRequest:
    """What a dial is for: a new transport, or with ``resume`` another path of one that has lost its own."""

    target: PublicKey
    service: str = ""
    security: Security = Security.PREFER
    resume: Resume | None = None

    @property
    def moves(self) -> bool:
        """See :class:`dmsg.clients.dialer.Dial`."""
        return self.resume is not None

    async def through(self, session: ServerSession, *, promised: bool) -> OpenedPath[ServerSession]:
        """See :class:`dmsg.clients.dialer.Dial`."""
        carrier = self._carrier(session, promised)
        try:
            try:
                return await self._request(session, carrier)
            except StageError as error:
                if carrier is not Carrier.REQUEST or not isinstance(error.error, Unsupported):
                    raise
            # the peer's own connection to this relay is a base one, or is said to be one: never less than carrier B
            return await self._request(session, Carrier.FORWARD)
        except Busy as error:
            raise StageError("request", error.name, error) from None

    async def _request(self, session: ServerSession, carrier: Carrier) -> OpenedPath[ServerSession]:
        return await session.request(self.target, carrier, service=self.service, resume=self.resume)

    def _carrier(self, session: ServerSession, promised: bool) -> Carrier:
        if self.security is Security.HOP or (self.security is Security.PREFER and not promised):
            if self.service:
                raise StageError("request", Unsupported.name, Unsupported("base peers know no services", by="local"))
            return Carrier.NONE
        if not promised:
            error = DowngradeRefused("the peer's entry promises no end-to-end security", by="local")
            raise StageError("request", error.name, error)
        return Carrier.REQUEST if session.connection.extended else Carrier.FORWARD
