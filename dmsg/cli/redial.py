"""Dials that wait for their turn, and try again while the peer or the relay is busy, or the peer is on its way."""

from __future__ import annotations

import os
from typing import Final

from twisted.internet.defer import DeferredSemaphore
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from dmsg.cli.protocols import Client, Transport
from dmsg.crypto.keys import PublicKey, Random
from dmsg.errors import Attempt, DialError
from dmsg.messaging.core.errors import ChannelRefused, NoFreeChannel
from dmsg.mux.core.errors import Busy, RateLimited
from dmsg.sansio.backoff import Backoff
from dmsg.sansio.jitter import Jitter

#: Dials under way at one time: half of the requests that a relay lets one client have unanswered.
DIALS_AT_ONCE: Final = 32
#: The pause before the second dial, and the longest it doubles to, in seconds; each between half and one and a half times
#: as long. A place at the peer is free again after one round trip.
PAUSES: Final = Backoff(0.1, 1.0, least=0.5, spread=1.0)
#: A peer that has lost its relay is found at another one within so many seconds, if it is there at all: it connects, waits for
#: a moment whether more changes, and registers. While discovery does not answer it cannot be found.
MOVE_S: Final = 3.0


def is_busy(error: DialError, *, known: bool = False) -> bool:
    """Whether a dial failed only for now: a relay or the peer had no room for one more transport.

    The messaging system does not say why a channel is refused. From a peer that is ``known`` to accept some it means that.
    """
    reasons = Busy | RateLimited | NoFreeChannel | (ChannelRefused if known else Busy)
    return any(isinstance(attempt.error, reasons) for attempt in error.attempts)


class Redialer:
    """Dials ``service`` of ``peer`` for many that want it at once; ``timeout_s`` is what each may wait in all."""

    def __init__(
        self,
        client: Client,
        peer: PublicKey,
        service: str,
        *,
        timeout_s: float,
        clock: IReactorTime,
        random: Random = os.urandom,
    ) -> None:
        self._client = client
        self._peer = peer
        self._service = service
        self._timeout_s = timeout_s
        self._clock = clock
        self._uniform = Jitter(random).random
        self._turns = DeferredSemaphore(DIALS_AT_ONCE)
        self._was_accepted = False
        #: Whether the peer has not been found for longer than it needs to move, since it was found last.
        self._is_away = False

    async def dial(self) -> Transport:
        """An open transport. Raises the last ``DialError``; cancelling gives up."""
        give_up_at = self._clock.seconds() + self._timeout_s
        lost_at: float | None = None
        failures = 0
        while True:
            try:
                transport = await self._dial_once(give_up_at)
            except DialError as error:
                failures += 1
                wait_s, now = PAUSES.pause_s(failures, self._uniform), self._clock.seconds()
                if error.is_unanswered:
                    lost_at = None  # the peer may have moved long ago: its time begins when discovery answers
                elif lost_at is None and error.may_have_moved:
                    lost_at = now
                if not is_busy(error, known=self._was_accepted) and not self._may_be_found(error, lost_at):
                    raise
                if now + wait_s >= give_up_at:
                    raise
            else:
                self._was_accepted, self._is_away = True, False
                return transport
            await deferLater(self._clock, wait_s)

    def _may_be_found(self, error: DialError, lost_at: float | None) -> bool:
        """Whether a peer that was there before, and has not been found since ``lost_at``, has probably just moved."""
        if not self._was_accepted or not error.may_have_moved:
            return False
        self._is_away |= lost_at is not None and self._clock.seconds() >= lost_at + MOVE_S
        return not self._is_away

    async def _dial_once(self, give_up_at: float) -> Transport:
        turn = self._turns.acquire()
        if not turn.called:
            wait_s = max(0.0, give_up_at - self._clock.seconds())  # the pause before may have ended late
            turn.addTimeout(wait_s, self._clock, lambda _, waited_s: Failure(self._too_late(waited_s)))
        await turn
        try:
            left_s = give_up_at - self._clock.seconds()
            if left_s <= 0:  # the turn came in the last moment
                raise self._too_late(self._timeout_s)
            return await self._client.dial(self._peer, self._service, timeout_s=left_s)
        finally:
            self._turns.release()

    def _too_late(self, waited_s: float) -> DialError:
        error = Busy("the dials before this one took all its time", by="local")
        return DialError(str(self._peer), [Attempt("request", "", waited_s * 1000, error.name, error)])
