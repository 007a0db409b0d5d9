"""Back-pressure on clients of a messaging relay, by not reading from them: the protocol itself has none.

A dialect with acknowledgements keeps one message of a channel under way. Without acknowledgements only the network slows
down a client that sends faster than its peer takes: the queue for the peer would exceed its limit (:ref:`spec-queues`), and
the channel would end. While a client is not read from, all its channels stand still. So that does not last long, and only
the queue of a single channel causes it, never the sum of many: a stranger may open many.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.serving.member import Leg, Member
from dmsg.serving.shell import RelayShell

#: The reason for not reading from a client.
_QUEUED: Final = "queued"
#: A client is not read from while the queue of one of its channels is above this share of the limit; it is read from again
#: below half of that.
_HELD_SHARE: Final = 0.5

_size = attrgetter("queued_bytes")


class Backpressure:
    """The clients that are not read from. ``limit_bytes`` may wait in a queue, and a client is held for ``limit_s`` at most.

    After that its data is queued again, and the channel whose peer does not take it ends.
    """

    def __init__(self, reactor: IReactorTime, limit_bytes: int, limit_s: float) -> None:
        self._reactor = reactor
        self._held_bytes = int(limit_bytes * _HELD_SHARE)
        self._limit_s = limit_s
        #: Until when each client is held, and for which queue.
        self._held: dict[RelayShell, tuple[IDelayedCall, Leg[Any]]] = {}
        #: The clients that are held for a queue towards each receiver.
        self._held_for: dict[Member[Any], dict[RelayShell, None]] = {}
        #: Clients that were held for the longest time allowed, and their queue. They are removed once little waits in it.
        self._spent: dict[RelayShell, Leg[Any]] = {}

    def look_at(self, shell: RelayShell) -> None:
        """The client of ``shell`` was read from: stop reading if too much of its data waits."""
        member = shell.member
        if member is None or shell in self._held:
            return
        if shell in self._spent:
            if not self._waits(self._spent[shell]):
                del self._spent[shell]
        elif member.queued_from > self._held_bytes:
            longest = max(member.feeding, key=_size)
            if longest.queued_bytes > self._held_bytes:
                self._held[shell] = self._reactor.callLater(self._limit_s, self._too_long, shell), longest
                self._held_for.setdefault(longest.member, {})[shell] = None
                shell.hold(_QUEUED, True)

    def look_again(self, shell: RelayShell) -> None:
        """The client of ``shell`` took data, or data from or for it was dropped: read again from clients with little waiting."""
        if self._held and shell.member is not None:
            for each in (shell, *self._held_for.get(shell.member, ())):
                held = self._held.get(each)
                if held is not None and not self._waits(held[1]):
                    self.let_go(each)

    def let_go(self, shell: RelayShell) -> None:
        """Read from a client again, or forget it. Does nothing if it is being read from."""
        self._spent.pop(shell, None)
        held = self._held.pop(shell, None)
        if held is not None:
            call, queue = held
            if call.active():
                call.cancel()
            others = self._held_for[queue.member]
            del others[shell]
            if not others:
                del self._held_for[queue.member]
            shell.hold(_QUEUED, False)

    def _too_long(self, shell: RelayShell) -> None:
        _, queue = self._held[shell]
        self.let_go(shell)
        self._spent[shell] = queue

    def _waits(self, queue: Leg[Any]) -> bool:
        return queue.queued_bytes > self._held_bytes // 2
