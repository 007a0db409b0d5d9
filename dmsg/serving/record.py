"""What a relay of any protocol writes to the event log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IReactorTime

import dmsg
from dmsg.crypto.keys import PublicKey
from dmsg.errors import DmsgError, RemoteProtocolError
from dmsg.eventlog import schema as ev
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.refusals import RefusalReport
from dmsg.interfaces import IEventLog
from dmsg.serving.errors import RelayDraining
from dmsg.serving.events import TransportEnded
from dmsg.serving.member import Leg, Member
from dmsg.serving.shell import RelayShell, shell_of


class RelayRecord:
    """Writes what happens at the relay ``server`` to ``events``, if there is a log.

    ``name_of`` gives the name of the code with which a transport ended.
    """

    def __init__(
        self,
        clock: IReactorTime,
        events: IEventLog | None,
        server: PublicKey,
        protocol: str,
        name_of: Callable[[int], str],
    ) -> None:
        self._clock = clock
        self._events = events
        self._server = str(server)
        self._protocol = protocol
        self._name_of = name_of
        self._report = RefusalReport(clock, self._emit)
        self._started_at = 0.0

    # --- the relay -------------------------------------------------------------------------------------------------

    def starts(self) -> None:
        """The relay begins."""
        self._started_at = self._clock.seconds()

    def listens(self, address: str) -> None:
        """Clients reach the relay at ``address``."""
        self._emit(ev.ServerStarted(self._server, address, dmsg.__version__, self._protocol))

    def stopped(self, since: float, transports: int) -> None:
        """The relay has stopped. The stop began at ``since``; ``transports`` were open when the drain was over."""
        self._report.close()
        now = self._clock.seconds()
        self._emit(ev.Drained((now - since) * 1000, transports))
        self._emit(ev.ServerStopped(Reason.STOPPED, now - self._started_at))

    # --- refusals --------------------------------------------------------------------------------------------------

    def turned_away(self, address: str, why: str) -> None:
        """A connection from ``address``, a group of addresses, was refused before its client had shown a key."""
        self._report.add(0, address, "connection", why)

    def client_refused(self, shell: RelayShell, remote: PublicKey, why: str) -> None:
        """The client with the key ``remote`` was not admitted, or its connection was ended to make room."""
        self._report.add(shell.number, str(remote), "connection", why)

    def request_refused(self, member: Member[Any], why: str) -> None:
        """A request of ``member`` was not passed on."""
        self._report.add(shell_of(member).number, str(member.remote), "request", why)

    # --- connections -----------------------------------------------------------------------------------------------

    def stranger_lost(self, shell: RelayShell, error: DmsgError | None) -> None:
        """A connection has ended before its client was admitted; ``error`` is why the relay ended it, if it did."""
        stage, why = _why(error, "handshake")
        if stage == "accept":
            self.turned_away(shell.origin.address, why)
        self._emit(ev.HandshakeFailed(shell.address, stage, why, self._ms_since(shell.opened_at)))

    def admitted(self, shell: RelayShell, member: Member[Any], *, extended: bool) -> None:
        """A client was admitted."""
        opened = self._ms_since(shell.opened_at)
        self._emit(ev.ConnectionOpened(shell.number, str(member.remote), shell.address, opened, extended))

    def member_lost(self, shell: RelayShell, member: Member[Any], error: DmsgError | None, transports: int) -> None:
        """The connection of a client has ended, on which ``transports`` were open."""
        _, why = _why(error, "connection")
        self._emit(
            ev.ConnectionClosed(
                shell.number,
                str(member.remote),
                why,
                self._clock.seconds() - member.since,
                member.bytes_in,
                member.bytes_out,
                member.frames_in,
                member.frames_out,
                transports,
            )
        )

    # --- transports ------------------------------------------------------------------------------------------------

    def opened(self, asking: Leg[Any]) -> None:
        """The transport that ``asking`` asked for is open."""
        if self._events is None:
            return
        self._emit(
            ev.TransportOpened(
                shell_of(asking.member).number,
                asking.id,
                str(asking.member.remote),
                str(asking.other.member.remote),
                self._server,
                (asking.opened_at - asking.since) * 1000,
                "unknown",
                self._protocol,
            )
        )

    def ended(self, event: TransportEnded) -> None:
        """A transport, or a request for one, is over."""
        if self._events is None:
            return
        leg = event.asking
        self._emit(
            ev.TransportClosed(
                shell_of(leg.member).number,
                leg.id,
                str(leg.member.remote),
                str(leg.other.member.remote),
                self._server,
                Reason.of(self._name_of(event.reason)),
                event.reason,
                event.by,
                self._clock.seconds() - leg.opened_at if event.was_open else 0.0,
                leg.other.bytes,
                leg.bytes,
                max(leg.queue_peak_bytes, leg.other.queue_peak_bytes),
                "unknown",
                leg.id,
                self._server,
                self._protocol,
            )
        )

    # --- inside ----------------------------------------------------------------------------------------------------

    def _ms_since(self, at: float) -> float:
        return (self._clock.seconds() - at) * 1000

    def _emit(self, event: ev.Event) -> None:
        if self._events is not None:
            self._events.emit(event)


def _why(error: DmsgError | None, stage: str) -> tuple[str, Reason]:
    """Stage and reason of an end. Without an error of ours the peer closed the connection."""
    if error is None:
        return stage, Reason.CLOSED_BY_PEER
    if isinstance(error, RemoteProtocolError):
        return error.stage, Reason.of(error.reason)
    if isinstance(error, RelayDraining):
        return stage, Reason.SERVER_DRAINING
    return stage, Reason.of(type(error).__name__)
