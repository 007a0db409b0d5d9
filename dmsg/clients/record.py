"""What the event log has of a client of any protocol."""

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
    """Writes what happens at the client with the key ``client`` to ``events``, if there is a log."""

    def __init__(self, clock: IReactorTime, events: IEventLog | None, client: PublicKey, protocol: str) -> None:
        self._clock = clock
        self._events = events
        self._client = str(client)
        self._protocol = protocol
        self._report = RefusalReport(clock, self._emit)
        #: Relays that there has been a session with, the last :data:`SEEN_LIMIT` of them: peers say on which relays they are.
        self._seen: dict[PublicKey, None] = {}

    def close(self) -> None:
        """Write what is left."""
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
        """A session that was up is down because of ``error``."""
        up_s = self._clock.seconds() - session.ready_at
        reason = Reason.of(getattr(error, "reason", type(error).__name__))
        self._emit(ev.SessionDown(str(session.server), reason, up_s, 0, self._protocol))

    def attempt_failed(self, relay: PublicKey, reason: str, attempt: int) -> None:
        """There is no session with ``relay``, for the ``attempt``-th time in a row."""
        self._emit(ev.SessionDown(str(relay), Reason.of(reason), 0.0, attempt, self._protocol))

    # --- transports ------------------------------------------------------------------------------------------------

    def refused(self, remote: PublicKey, reason: str) -> None:
        """A transport that was asked for in the name of ``remote`` was refused."""
        if self._events is not None:
            self._report.add(0, str(remote), "transport", reason)

    def dialled(
        self, target: PublicKey, relay: str, security: str, reason: str, since: float, attempts: list[Attempt]
    ) -> None:
        """A dial that began at ``since`` has led to a transport over ``relay``, or has failed for ``reason``."""
        if self._events is None:
            return
        elapsed_ms = (self._clock.seconds() - since) * 1000
        self._emit(
            ev.DialFinished(
                str(target),
                relay,
                bool(relay),
                Reason.of(reason),
                elapsed_ms,
                attempts_json(attempts),
                security,
                self._client,
                self._protocol,
            )
        )

    def opened(self, transport: ClientTransport, relay: str, accept_ms: float) -> None:
        """A transport over ``relay`` is open."""
        if self._events is None:
            return
        stream = transport.stream
        ends = self._ends(stream)
        self._emit(ev.TransportOpened(0, stream.id, *ends, relay, accept_ms, transport.security, self._protocol))

    def resumed(self, stream: CarriedStream, relay: str, reason: str, since: float) -> None:
        """A transport goes on over ``relay`` as ``stream``, because of what happened at ``since``."""
        if self._events is None:
            return
        elapsed_ms = (self._clock.seconds() - since) * 1000
        self._emit(ev.TransportResumed(stream.id, *self._ends(stream), relay, Reason.of(reason), elapsed_ms))

    def closed(self, record: TransportRecord[Any], relay: str, reason: str, *, local: bool, code: int) -> None:
        """A transport is over; ``code`` is what stands for ``reason`` on the wire, if anything does."""
        if self._events is None:
            return
        stream = record.transport.stream
        self._emit(
            ev.TransportClosed(
                0,
                stream.id,
                *self._ends(stream),
                relay,
                Reason.of(reason),
                code,
                "local" if local else "peer",
                self._clock.seconds() - record.since_s,
                stream.received_bytes,
                stream.sent_bytes,
                0,
                record.transport.security,
                record.first_id,
                record.first_server,
                self._protocol,
            )
        )

    # --- inside ----------------------------------------------------------------------------------------------------

    def _ends(self, stream: CarriedStream) -> tuple[str, str]:
        """The keys of the side that asked, and of the other one."""
        ends = (self._client, str(stream.remote))
        return ends if stream.initiator else ends[::-1]

    def _emit(self, event: ev.Event) -> None:
        if self._events is not None:
            self._events.emit(event)
