"""Envelopes none of whose relays may be tried: they rest until one of their lanes opens, or its relay answers.

:ref:`spec-rmb-federation`. There may be thousands for one relay that is away. Some are tried when its lane opens, and the others
follow when it has answered, so that a relay which stays away costs little.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain, islice, zip_longest
from typing import Final

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.rmb.relay.lanes import Lane, Outgoing
from dmsg.sansio.backoff import SHORTEST_PAUSE_S

#: Envelopes that go on, go another way, or are given up in one turn of the reactor: some 20 ms. Up to 30,000 may be due at once.
AT_ONCE: Final = 256
#: Seconds after which as many more go on while the relay has not answered: those before them may have found another way, or
#: have expired, without asking it.
TRIED_EVERY_S: Final = 1.0
#: Lanes for which one envelope rests: each takes some 90 of the bytes that the envelope counts for.
LANES_EACH: Final = 8


class Resting:
    """The resting envelopes by the lanes that they wait for. ``go_on(outgoing)`` is called for one that rests no more."""

    def __init__(self, clock: IReactorTime, go_on: Callable[[Outgoing], None]) -> None:
        self._clock = clock
        self._go_on = go_on
        self._of: dict[Lane, OrderedDict[Outgoing, None]] = {}
        self._calls: dict[Lane, IDelayedCall] = {}
        self._waking: set[Lane] = set()

    def __contains__(self, lane: Lane) -> bool:
        return lane in self._of

    def add(self, outgoing: Outgoing, lanes: Sequence[Lane]) -> None:
        """``outgoing`` rests until one of ``lanes``, which are closed, opens, or :meth:`wake` is called for it.

        It does not rest only for the one that opens first: that may close again before the turn of ``outgoing`` comes. Of more
        than :data:`LANES_EACH`, those that open first count.
        """
        now = self._clock.seconds()
        outgoing.rests_at = sorted(lanes, key=lambda lane: lane.closed_s(now))[:LANES_EACH]
        for lane in outgoing.rests_at:
            self._of.setdefault(lane, OrderedDict())[outgoing] = None
            self._wake_later(lane)

    def discard(self, outgoing: Outgoing) -> None:
        """``outgoing`` rests no more, if it did, and does not go on."""
        lanes, outgoing.rests_at = outgoing.rests_at, ()
        for lane in lanes:
            resting = self._of[lane]
            del resting[outgoing]
            if not resting:
                del self._of[lane]
                if (call := self._calls.pop(lane, None)) is not None:
                    call.cancel()

    def wake(self, lane: Lane) -> None:
        """If ``lane`` is open, what rests there goes on: some at once, and then the others."""
        if lane not in self._of or lane in self._waking:
            return
        call = self._calls.pop(lane, None)
        if call is not None and call.active():
            call.cancel()
        self._waking.add(lane)  # a post that is answered at once calls this again, which must not recurse
        for outgoing in self._next(lane):
            if lane.closed(self._clock.seconds()):
                break
            if lane in outgoing.rests_at:  # it may have been given up for another one
                self.discard(outgoing)
                self._go_on(outgoing)
        self._waking.remove(lane)
        if lane in self._of:
            self._wake_later(lane)

    def _next(self, lane: Lane) -> list[Outgoing]:
        """Up to :data:`AT_ONCE` that rest at ``lane``. Senders take turns while the relay has not answered."""
        resting = self._of[lane]
        if not lane.failures:  # all go on soon
            return list(islice(resting, AT_ONCE))
        of_senders: dict[int, list[Outgoing]] = {}
        for outgoing in resting:
            of_sender = of_senders.setdefault(outgoing.source, [])
            if len(of_sender) < AT_ONCE:
                of_sender.append(outgoing)
            if len(of_senders) == AT_ONCE:  # one of each
                break
        rounds = chain.from_iterable(zip_longest(*of_senders.values()))
        return list(islice((outgoing for outgoing in rounds if outgoing is not None), AT_ONCE))

    def _wake_later(self, lane: Lane) -> None:
        if lane in self._calls or lane in self._waking:
            return
        pause_s = lane.closed_s(self._clock.seconds())
        if pause_s:
            pause_s = max(SHORTEST_PAUSE_S, pause_s)
        elif lane.failures:
            pause_s = TRIED_EVERY_S
        self._calls[lane] = self._clock.callLater(pause_s, self.wake, lane)
