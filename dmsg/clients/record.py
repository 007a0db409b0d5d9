"""Events of a client of any protocol for the event log."""

from __future__ import annotations

from typing import Any, Final

from twisted.internet.interfaces import IReactorTime

from dmsg.clients.dialer import attempts_json
from dmsg.clients.sessions import ClientSession
from dmsg.clients.streams import CarriedStream
from dmsg.clients.transports import ClientTransport, TransportRecord
from dmsg.crypto.keys import PublicKey
from dmsg.errors import Attempt, DmsgError
from dmsg.eventlog import schema as ev
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.refusals import RefusalReport
from dmsg.interfaces import IEventLog

SEEN_LIMIT: Final = 1_000


class ClientRecord:
    """Reports what happens at the client with the key ``client`` to ``events``, if given."""

    def __init__(self, clock: IReactorTime, events: IEventLog | None, client: PublicKey, protocol: str) -> None:
        self._clock = clock
        self._events = events
        self._client = str(client)
        self._protocol = protocol
        self._report = RefusalReport(clock, self._emit)
        #: The last :data:`SEEN_LIMIT` relays with which there was a session. Limited, because peers name the relays.
        self._seen: dict[PublicKey, None] = {}

    def close(self) -> None:
        """Emit the remaining events."""
        self._report.close()

    # --- sessions --------------------------------------------------------------------------------------------------

    def session_up(self, session: ClientSession) -> None:
        """A session was admitted."""
        reason = Reason.RECONNECT if session.server in self._seen else Reason.FIRST
        self._seen.pop(session.server, None)
        self._seen[session.server] = None
        if len(self._seen) > SEEN_LIMIT:
            del self._seen[next(iter(self._seen))]
        took_s = session.ready_at - session.started_at
        self._emit(ev.SessionUp(str(session.server), reason, took_s, 1, self._protocol))

    def session_lost(self, session: ClientSession, error: DmsgError) -> None:
        """A session was lost because of ``error``."""
        up_s = self._clock.seconds() - session.ready_at
        reason = Reason.of(getattr(error, "reason", type(error).__name__))
        self._emit(ev.SessionDown(str(session.server), reason, up_s, 0, self._protocol))

    def attempt_failed(self, relay: PublicKey, reason: str, attempt: int) -> None:
        """The ``attempt``-th attempt in a row to get a session with ``relay`` has failed."""
        self._emit(ev.SessionDown(str(relay), Reason.of(reason), 0.0, attempt, self._protocol))

    # --- transports ------------------------------------------------------------------------------------------------

    def refused(self, remote: PublicKey, reason: str) -> None:
        """A transport requested in the name of ``remote`` was refused."""
        if self._events is not None:
            self._report.add(0, str(remote), "transport", reason)

    def dialled(
        self,
        target: PublicKey,
        relay: PublicKey | None,
        security: str,
        reason: str,
        since: float,
        attempts: list[Attempt],
    ) -> None:
        """A dial that began at ``since`` has led to a transport over ``relay``, or has failed for ``reason``."""
        if self._events is None:
            return
        elapsed_ms = (self._clock.seconds() - since) * 1000
        self._emit(
            ev.DialFinished(
                str(target),
                str(relay or ""),
                relay is not None,
                Reason.of(reason),
                elapsed_ms,
                attempts_json(attempts),
                security,
                self._client,
                self._protocol,
            )
        )

    def opened(self, transport: ClientTransport, relay: PublicKey, accept_ms: float) -> None:
        """A transport over ``relay`` is open."""
        if self._events is None:
            return
        stream = transport.stream
        ends = self._ends(stream)
        self._emit(ev.TransportOpened(0, stream.id, *ends, str(relay), accept_ms, transport.security, self._protocol))

    def resumed(self, stream: CarriedStream, relay: str, reason: str, since: float) -> None:
        """A transport goes on over ``relay`` as ``stream``; the event that made it move was at ``since``."""
        if self._events is None:
            return
        elapsed_ms = (self._clock.seconds() - since) * 1000
        self._emit(ev.TransportResumed(stream.id, *self._ends(stream), relay, Reason.of(reason), elapsed_ms))

    def closed(self, record: TransportRecord[Any], relay: PublicKey, reason: str, *, local: bool, code: int) -> None:
        """A transport has ended; ``code`` is the code of ``reason`` on the wire, if it has one."""
        if self._events is None:
            return
        stream = record.transport.stream
        self._emit(
            ev.TransportClosed(
                0,
                stream.id,
                *self._ends(stream),
                str(relay),
                Reason.of(reason),
                code,
                "local" if local else "peer",
                self._clock.seconds() - record.since_s,
                stream.received_bytes,
                stream.sent_bytes,
                0,
                record.transport.security,
                record.first_id,
                str(record.first_server),
                self._protocol,
            )
        )

    # --- inside ----------------------------------------------------------------------------------------------------

    def _ends(self, stream: CarriedStream) -> tuple[str, str]:
        """The keys of the initiator and of the other side."""
        ends = (self._client, str(stream.remote))
        return ends if stream.initiator else ends[::-1]

    def _emit(self, event: ev.Event) -> None:
        if self._events is not None:
            self._events.emit(event)
