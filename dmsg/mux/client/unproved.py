"""Transports that were accepted and whose initiator has not proved itself yet (:ref:`spec-resume-unproved`).

For the initiator such a transport is open once it has the answer, while its proof is still under way. If the path is lost at
this moment, the initiator looks for another one, and has to find the transport.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol as TypingProtocol

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.clients.offers import Offers
from dmsg.crypto.keys import PublicKey
from dmsg.mux.client.listener import DmsgPort
from dmsg.mux.client.session import ServerSession
from dmsg.mux.client.transport import DmsgTransport
from dmsg.mux.core.resumption import ResumeAttempts
from dmsg.mux.core.sealed_stream import SealedStream
from dmsg.mux.core.stream import Stream, StreamFault
from dmsg.mux.core.wire import CloseReason
from dmsg.sansio.rate import TokenBucket


class FirstPath(TypingProtocol):
    """The offer with which the transport began."""

    def overtaken(self) -> None:
        """The initiator has proved itself on another path: end this one."""


class Opened(TypingProtocol):
    """The table of open transports."""

    def get(self, token: bytes, peer: PublicKey) -> DmsgTransport | None:
        """The transport that ``peer`` opened."""


class UnprovedTransport:
    """Stands for a transport until it is open: its first proved path opens it at ``port``, a later one moves it."""

    def __init__(self, table: UnprovedTransports, first: FirstPath, stream: Stream, port: DmsgPort) -> None:
        #: The path it began with.
        self.stream = stream
        #: See :class:`~dmsg.mux.client.transport.DmsgTransport`.
        self.attempts: ResumeAttempts | None = None
        self.move_rate: TokenBucket | None = None
        #: Forgets it when no other path is found.
        self.timer: IDelayedCall | None = None
        self._table = table
        self._first: FirstPath | None = first  # until that has ended
        self._port = port
        self._transport: DmsgTransport | None = None
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether no path can open or move it any more."""
        return self._is_over if self._transport is None else self._transport.is_over

    @property
    def farewell(self) -> CloseReason:
        """See :class:`~dmsg.mux.client.transport.DmsgTransport`."""
        return CloseReason.PEER_GONE if self._transport is None else self._transport.farewell

    @property
    def is_wanted(self) -> bool:
        """Whether its port still listens."""
        return self._port.client.services.port(self._port.service) is self._port

    def open(self, session: ServerSession, stream: Stream) -> None:
        """The initiator has proved itself on ``stream``: give the transport to the application."""
        self.forget()
        self._port.open(session, stream)
        transport = self._transport = self._table.opened.get(stream.token, stream.remote)
        if transport is not None and self.attempts is not None:  # other paths may wait for their proof
            transport.attempts, transport.move_rate = self.attempts, self.move_rate

    def move_to(self, session: ServerSession, path: SealedStream, peer_received_bytes: int, told_bytes: int) -> None:
        """See :class:`~dmsg.mux.client.transport.DmsgTransport`: the initiator has proved itself on ``path``, another one."""
        if self._transport is not None:
            self._transport.move_to(session, path, peer_received_bytes, told_bytes)
            return
        first, self._first = self._first, None
        if first is not None:
            first.overtaken()
        try:
            path.go_on_from(self.stream, peer_received_bytes, told_bytes)
        except StreamFault as fault:
            self.forget()
            session.abort_stream(path, fault.code)
            return
        path.token = self.stream.token  # the token of the first path stays
        session.connection.go_on(path)
        self.open(session, path)
        session.flush_soon()

    def lose_first(self) -> None:
        """The path it began with is gone."""
        self._first = None

    def forget(self) -> None:
        """It is open, or will not be."""
        self._is_over, self._first = True, None
        self._table.remove(self)


class UnprovedTransports:
    """The transports, by peer and token. One without a path is kept for ``grace_s``; of these there are at most ``limit``, and
    ``limit_per_share`` of one key over one relay. ``opened`` has the transports that were opened.
    """

    def __init__(
        self, clock: IReactorTime, opened: Opened, grace_s: float, *, limit: int, limit_per_share: int
    ) -> None:
        self.opened = opened
        self._clock = clock
        self._grace_s = grace_s
        self._by_name: dict[tuple[PublicKey, bytes], UnprovedTransport] = {}
        self._lost: Offers[UnprovedTransport] = Offers(limit, limit_per_share)

    def add(self, first: FirstPath, stream: Stream, port: DmsgPort) -> UnprovedTransport:
        """A transport was accepted over ``stream``, its first path."""
        one = self._by_name[stream.remote, stream.token] = UnprovedTransport(self, first, stream, port)
        return one

    def get(self, token: bytes, peer: PublicKey) -> UnprovedTransport | None:
        """The transport that ``peer`` may go on with under ``token``."""
        return self._by_name.get((peer, token))

    def lost(self, one: UnprovedTransport, share: Hashable) -> None:
        """The first path of ``one``, an offer of ``share``, is gone without a proof: wait for another one."""
        one.lose_first()
        if one.is_over:
            return
        if self._grace_s <= 0 or not one.is_wanted or not self._lost.has_room(share):
            one.forget()
            return
        oldest = self._lost.add(one, share)
        if oldest is not None:
            oldest.forget()
        one.timer = self._clock.callLater(self._grace_s, one.forget)

    def remove(self, one: UnprovedTransport) -> None:
        """Forget ``one``. Does nothing if it is not known."""
        stream = one.stream
        self._by_name.pop((stream.remote, stream.token), None)
        self._lost.remove(one)
        timer, one.timer = one.timer, None
        if timer is not None and timer.active():
            timer.cancel()

    def clear(self) -> None:
        """Forget all."""
        for one in list(self._by_name.values()):
            one.forget()
