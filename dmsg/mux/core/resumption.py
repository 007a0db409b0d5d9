"""A peer's attempts to resume one transport, at the end that does not search: which may begin, and which one counts.

Pure. :ref:`spec-resume-attempts`.
"""

from __future__ import annotations

from dmsg.crypto.keys import PublicKey
from dmsg.mux.core.stream import Stream
from dmsg.sansio.rate import TokenBucket


class ResumeAttempts:
    """The attempts to move one transport to another path, each of which takes a token of ``rate``.

    The token is taken for a proved attempt, not for its REQUEST: a relay can replay a REQUEST, and must not use up the tokens
    that the transport needs to move to an honest relay. An attempt may begin only while there is a token for it and for each
    attempt that waits for its proof. At most one attempt waits for each relay.
    """

    __slots__ = ("_before", "_began", "_current", "_rate", "_taken", "_told_bytes", "_waiting")

    def __init__(self, current: Stream, rate: TokenBucket) -> None:
        self._current = current
        self._rate = rate
        self._began = 0
        self._taken = 0  # number of the latest attempt that was proved
        # the same two before an attempt that was proved but that the transport has not moved to yet
        self._before: tuple[Stream, int] | None = None
        self._told_bytes = 0
        self._waiting: dict[PublicKey, Stream] = {}

    def may_begin(self, server: PublicKey, now: float) -> bool:
        """Whether an attempt through ``server`` is to be answered at the time ``now``."""
        others = len(self._waiting) - (server in self._waiting)
        return self._rate.wait_s(now, 1 + others) == 0

    def tell_bytes(self) -> int:
        """How many bytes to tell the peer that we have: never fewer than in an earlier attempt.

        The peer counts what it was told as acknowledged, even if its answer to that attempt was lost on the way.
        """
        self._told_bytes = max(self._told_bytes, self._current.resume_bytes)
        return self._told_bytes

    def begin(self, server: PublicKey, stream: Stream) -> tuple[int, Stream | None]:
        """Let ``stream`` wait for its proof. Gives its number, and an older stream over the same relay, to be closed."""
        displaced = self._waiting.pop(server, None)
        self._began += 1
        self._waiting[server] = stream
        return self._began, displaced

    def proved(self, stream: Stream, number: int) -> Stream | None:
        """Attempt ``number`` is proved: gives the path it takes over from, or ``None`` if a later one has done so."""
        self._forget(stream)
        if number < self._taken:
            return None
        earlier = self._current
        self._before = earlier, self._taken
        self._current, self._taken = stream, number
        return earlier

    def moved(self, now: float) -> None:
        """The transport has moved: take a token."""
        self._before = None
        self._rate.take(now)

    def failed(self, stream: Stream) -> None:
        """``stream`` ended without a proof, or with one in a frame that was malformed: the path in use stays the current one."""
        self._forget(stream)
        if stream is self._current and self._before is not None:
            self._current, self._taken = self._before
            self._before = None

    def _forget(self, stream: Stream) -> None:
        for server, waiting in self._waiting.items():
            if waiting is stream:
                del self._waiting[server]
                return
