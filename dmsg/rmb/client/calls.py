"""Requests that wait for an answer: their limits, and the error with which each fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Generic, TypeVar

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from dmsg.rmb.client.errors import CallError, CallTimeout, NotConnected, RegistryFailed, Stopped, TooMuchUnderWay
from dmsg.rmb.client.relays import Parcel
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.twin import Twin

T = TypeVar("T")

#: Reasons of refused answers that are kept for one call.
_REFUSED_NOTED: Final = 8


class Call(Generic[T]):
    """A request to ``target`` that has no answer yet."""

    __slots__ = ("_refused", "answer", "parcel", "size_bytes", "target", "twin", "work")

    def __init__(self, target: SessionAddress, size_bytes: int) -> None:
        self.target = target
        self.size_bytes = size_bytes
        self.answer: Deferred[T] = Deferred()
        #: The twin that was looked up, and the parcel with the request; both are ``None`` before.
        self.twin: Twin | None = None
        self.parcel: Parcel | None = None
        #: The task that waits for the answer, once it has begun.
        self.work: Deferred[T] | None = None
        self._refused: list[str] = []

    def fail(self, error: CallError) -> None:
        """Fail the call with ``error``, unless there is an answer or another error already."""
        if not self.answer.called:
            self.answer.errback(Failure(error))

    def note_refused(self, reason: str) -> None:
        """Note that an answer was refused for ``reason``."""
        if len(self._refused) < _REFUSED_NOTED:
            self._refused.append(reason)

    def timed_out(self, timeout_s: float, problems: Mapping[str, str], unfound: str) -> CallError:
        """The error for a call without an answer after ``timeout_s``. ``problems`` are those of the relays; ``unfound`` is why
        the registry has not given or taken our own twin, "" if it has, or has not answered.
        """
        if self.parcel is None:
            return RegistryFailed(self.target, unfound or f"no answer within {timeout_s:g} s")
        if not self.parcel.relays:
            return NotConnected(self.target, problems)
        relays = tuple(dict.fromkeys(one.url for one in self.parcel.relays))
        return CallTimeout(self.target, timeout_s, relays, tuple(dict.fromkeys(self._refused)))


class Calls(Generic[T]):
    """The calls under way by their uids: at most ``limit``, with ``limit_bytes`` of payloads."""

    def __init__(self, limit: int, limit_bytes: int) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._calls: dict[str, Call[T]] = {}
        self._bytes = 0

    def __contains__(self, uid: str) -> bool:
        return uid in self._calls

    def get(self, uid: str) -> Call[T] | None:
        """The call ``uid``, if it is under way."""
        return self._calls.get(uid)

    def has_room(self, size_bytes: int) -> bool:
        """Whether another call, of ``size_bytes``, may begin."""
        return len(self._calls) < self._limit and self._bytes + size_bytes <= self._limit_bytes

    def begin(self, uid: str, target: SessionAddress, size_bytes: int) -> Call[T]:
        """A new call. Raises ``TooMuchUnderWay``, or ``ValueError`` for a ``uid`` that is in use."""
        if not self.has_room(size_bytes):
            raise TooMuchUnderWay(target)
        if uid in self._calls:
            raise ValueError(f"a request with the uid {uid!r} is under way")
        call = self._calls[uid] = Call(target, size_bytes)
        self._bytes += size_bytes
        return call

    def end(self, uid: str) -> None:
        """The call ``uid`` is over."""
        self._bytes -= self._calls.pop(uid).size_bytes

    def stop(self) -> None:
        """Fail all of them with ``Stopped``."""
        for uid, call in list(self._calls.items()):
            if uid not in self._calls:  # the end of another call has ended this one
                continue
            call.fail(Stopped(call.target, sent=call.parcel is not None and bool(call.parcel.relays)))
            if call.parcel is None and call.work is not None:
                call.work.cancel()
