"""Back-pressure on clients of a messaging relay, by not reading from them: the protocol itself has none.

A dialect with acknowledgements keeps one message of a channel under way. Without them nothing but the network slows a
client down that sends faster than its peer takes: more would wait for the peer than may (:ref:`spec-queues`), and the
channel would end. All channels of the client stand still meanwhile, so it is not for long.
"""

from __future__ import annotations

from typing import Any, Final

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.serving.member import Member
from dmsg.serving.shell import RelayShell

#: Why a client is not read from.
_QUEUED: Final = "queued"
#: A client is not read from while a channel of it has so many bytes waiting, as a share of the most that may wait; it is
#: read from again below half of that.
_HELD_SHARE: Final = 0.5


class Backpressure:
    """The clients that are not read from. ``limit_bytes`` is what may wait in a queue, ``limit_s`` how long one is held.

    After that its data is queued again, and the channel whose peer does not take it ends.
    """

    def __init__(self, reactor: IReactorTime, limit_bytes: int, limit_s: float) -> None:
        self._reactor = reactor
        self._held_bytes = int(limit_bytes * _HELD_SHARE)
        self._limit_s = limit_s
        self._held: dict[RelayShell, IDelayedCall] = {}
        #: Clients that were held for as long as may be, until little of theirs waits.
        self._spent: set[RelayShell] = set()

    def look_at(self, shell: RelayShell) -> None:
        """The client of ``shell`` was read from: stop that if too much of it waits."""
        member = shell.member
        if member is None or shell in self._held:
            return
        if member.queued_from > self._held_bytes and shell not in self._spent:
            self._held[shell] = self._reactor.callLater(self._limit_s, self._too_long, shell)
            shell.hold(_QUEUED, True)
        elif shell in self._spent and not self._waits(member):
            self._spent.discard(shell)

    def look_again(self) -> None:
        """Something was taken, or dropped: read again from clients of which little waits."""
        for shell in [one for one in self._held if not self._waits(one.member)]:
            self.let_go(shell)

    def let_go(self, shell: RelayShell) -> None:
        """Read from a client again, or forget it; silent when it is read from."""
        self._spent.discard(shell)
        call = self._held.pop(shell, None)
        if call is not None:
            if call.active():
                call.cancel()
            shell.hold(_QUEUED, False)

    def _too_long(self, shell: RelayShell) -> None:
        self.let_go(shell)
        self._spent.add(shell)

    def _waits(self, member: Member[Any] | None) -> bool:
        return member is not None and member.queued_from > self._held_bytes // 2
