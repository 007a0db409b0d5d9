"""One dial of a client: what it asks of a session, and which security the stream must have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from dmsg.crypto.keys import PublicKey
from dmsg.errors import StageError
from dmsg.mux.client.pending import OpenedPath
from dmsg.mux.client.session import ServerSession
from dmsg.mux.core.e2e_handshake import Resume
from dmsg.mux.core.e2e_negotiation import Carrier, Security
from dmsg.mux.core.errors import Busy, DowngradeRefused, Unsupported


@dataclass(frozen=True, slots=True)
class DialRequest:
    """The aim of a dial: a new transport, or with ``resume`` another path for a transport that has lost its own.

    ``ended_by`` are relays that have ended earlier paths of that transport.
    """

    target: PublicKey
    service: str = ""
    security: Security = Security.PREFER
    resume: Resume | None = None
    ended_by: tuple[PublicKey, ...] = ()

    @property
    def moves(self) -> bool:
        """See :class:`dmsg.clients.dial.Dial`."""
        return self.resume is not None

    @property
    def heeds_promise(self) -> bool:
        """See :class:`dmsg.clients.dial.Dial`."""
        return self.security is Security.PREFER

    def through(self, session: ServerSession, *, promised: bool) -> Deferred[OpenedPath[ServerSession]]:
        """See :class:`dmsg.clients.dial.Dial`."""
        return self._request(session, self._carrier(session, promised))

    def _request(self, session: ServerSession, carrier: Carrier) -> Deferred[OpenedPath[ServerSession]]:
        try:
            asked: Deferred[Any] = session.request(self.target, carrier, service=self.service, resume=self.resume)
        except Busy as error:
            raise StageError("request", error.name, error) from None
        return asked.addErrback(self._failed, session, carrier)

    def _failed(self, failure: Failure, session: ServerSession, carrier: Carrier) -> Any:
        error = failure.value
        if isinstance(error, Busy):  # when its turn to be sent came
            raise StageError("request", error.name, error) from None
        if carrier is Carrier.REQUEST and isinstance(error, StageError) and isinstance(error.error, Unsupported):
            # the peer's connection to this relay is a base one, or the relay says so: use carrier B, but nothing less
            return self._request(session, Carrier.FORWARD)
        return failure

    def _carrier(self, session: ServerSession, promised: bool) -> Carrier:
        if self.security is Security.HOP or (self.security is Security.PREFER and not promised):
            if self.service:
                raise StageError("request", Unsupported.name, Unsupported("base peers know no services", by="local"))
            return Carrier.NONE
        if not promised:
            error = DowngradeRefused("the peer's entry promises no end-to-end security", by="local")
            raise StageError("request", error.name, error)
        return Carrier.REQUEST if session.connection.extended else Carrier.FORWARD
