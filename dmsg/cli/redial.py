"""Dialling again while the peer or the relay is busy."""

from __future__ import annotations

import os
from typing import Final

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from dmsg.crypto.keys import PublicKey, Random
from dmsg.errors import Busy, DialError, RateLimited
from dmsg.mux.client import DmsgClient
from dmsg.mux.transport import DmsgTransport
from dmsg.sansio.jitter import Jitter

#: The pause before the second dial, and the longest it doubles to, in seconds; each between half and one and a half times
#: as long. A place is free again after one round trip, and a burst of 500 is through after 2.5 s at 200 requests a second.
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 1.0


def is_busy(error: DialError) -> bool:
    """Whether a dial failed only for now: a relay or the peer had no room for one more transport."""
    return any(isinstance(attempt.error, Busy | RateLimited) for attempt in error.attempts)


async def dial_patiently(
    client: DmsgClient,
    peer: PublicKey,
    service: str,
    *,
    timeout_s: float,
    clock: IReactorTime,
    random: Random = os.urandom,
) -> DmsgTransport:
    """Dial, and dial again while it is busy there, for at most ``timeout_s`` in all. Raises the last ``DialError``."""
    give_up_at = clock.seconds() + timeout_s
    jitter = Jitter(random)
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await client.dial(peer, service, timeout_s=give_up_at - clock.seconds())
        except DialError as error:
            wait_s = pause_s * (0.5 + jitter.random())
            if not is_busy(error) or clock.seconds() + wait_s >= give_up_at:
                raise
        await deferLater(clock, wait_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
