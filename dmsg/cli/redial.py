"""Dials that wait for their turn, and retry while the peer or the relay is busy, or the peer changes its relay."""

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
from dmsg.sansio.backoff import SHORTEST_PAUSE_S, Backoff
from dmsg.sansio.jitter import Jitter

#: Dials under way at a time: half of the unanswered requests that a relay allows a client.
DIALS_AT_ONCE: Final = 32
#: The pause before the second dial, in seconds; it doubles up to the longest, and each is between half and one and a half
#: times as long. A place at the peer is free again after one round trip.
PAUSES: Final = Backoff(0.1, 1.0, least=0.5, spread=1.0)
#: A peer that has lost its relay is found at another one within so many seconds, if it runs at all: it connects, waits a moment
#: for further changes, and registers. While discovery does not answer it cannot be found.
MOVE_S: Final = 3.0


def is_busy(error: DialError, *, known: bool = False) -> bool:
    """Whether a dial failed only for now: a relay or the peer had no room for one more transport.

    The messaging system does not say why a channel is refused. A refusal counts as busy if the peer is ``known`` to accept
    channels.
    """
    reasons = Busy | RateLimited | NoFreeChannel | (ChannelRefused if known else Busy)
    return any(isinstance(attempt.error, reasons) for attempt in error.attempts)


class Redialer:
    """Dials ``service`` of ``peer`` for many callers at once; each waits for ``timeout_s`` in all."""

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
        #: Whether the peer has been missing for longer than a move takes, since it was found last.
        self._is_away = False

    async def dial(self) -> Transport:
        """An open transport. Cancelling gives up.

        Raises the last ``DialError``. If that dial began late, and was cut short because the time was over, it says only that:
        then it raises the one before.
        """
        give_up_at = self._clock.seconds() + self._timeout_s
        lost_at: float | None = None
        before: DialError | None = None
        failures = 0
        while True:
            left_s = give_up_at - self._clock.seconds()
            try:
                transport = await self._dial_once(give_up_at)
            except DialError as error:
                failures += 1
                wait_s, now = PAUSES.pause_s(failures, self._uniform), self._clock.seconds()
                if before is not None and left_s < self._timeout_s / 2 and now + SHORTEST_PAUSE_S >= give_up_at:
                    raise before from None
                before = error
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
        """Whether a peer that was there before, and is missing since ``lost_at``, has probably just moved."""
        if not self._was_accepted or not error.may_have_moved:
            return False
        self._is_away |= lost_at is not None and self._clock.seconds() >= lost_at + MOVE_S
        return not self._is_away

    async def _dial_once(self, give_up_at: float) -> Transport:
        turn = self._turns.acquire()
        if not turn.called:
            wait_s = max(0.0, give_up_at - self._clock.seconds())  # the pause before this may have ended late
            turn.addTimeout(wait_s, self._clock, lambda _, waited_s: Failure(self._too_late(waited_s)))
        await turn
        try:
            left_s = give_up_at - self._clock.seconds()
            if left_s <= 0:  # the turn came at the last moment
                raise self._too_late(self._timeout_s)
            return await self._client.dial(self._peer, self._service, timeout_s=left_s)
        finally:
            self._turns.release()

    def _too_late(self, waited_s: float) -> DialError:
        error = Busy("the dials before this one took all its time", by="local")
        return DialError(str(self._peer), [Attempt("request", "", waited_s * 1000, error.name, error)])
