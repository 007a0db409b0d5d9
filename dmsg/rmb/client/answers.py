"""Answers that were given lately, for requests that come again, and for relays that die with an answer in them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.rmb.client.relays import Parcel, Relays
from dmsg.rmb.core.address import SessionAddress

#: How often one answer is sent again at most: a request comes again once for each relay that its sender lost.
_REPEATS: Final = 4
#: How often answers whose time is over are forgotten, in seconds.
_SWEEP_S: Final = 15.0


class _Answer:
    __slots__ = ("parcel", "repeats")

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel
        self.repeats = 0


class Answers:
    """The last answers, at most ``count`` with ``size_bytes`` in all, each until it expires.

    A request is handed to its handler once. When it comes again, because its sender lost the relay over which the answer
    was to come, it is answered with the same bytes.
    """

    def __init__(self, clock: IReactorTime, relays: Relays, count: int, size_bytes: int) -> None:
        self._clock = clock
        self._relays = relays
        self._limit = count
        self._limit_bytes = size_bytes
        self._answers: OrderedDict[tuple[SessionAddress, str], _Answer] = OrderedDict()
        self._size_bytes = 0
        self._call: IDelayedCall | None = None

    def post(self, destination: SessionAddress, uid: str, parcel: Parcel) -> None:
        """Send the answer to the request ``uid`` of ``destination``, and keep it."""
        self._forget((destination, uid))
        self._answers[destination, uid] = _Answer(parcel)
        self._size_bytes += len(parcel.data)
        self._relays.post(parcel)
        while len(self._answers) > self._limit or self._size_bytes > self._limit_bytes:
            self._forget(next(iter(self._answers)))
        if self._call is None:
            self._call = self._clock.callLater(_SWEEP_S, self._sweep)

    def repeat(self, source: SessionAddress, uid: str) -> None:
        """The request ``uid`` of ``source`` came again: so does its answer, if there is one yet."""
        answer = self._answers.get((source, uid))
        if answer is not None and answer.repeats < _REPEATS and answer.parcel.via is not None:
            answer.repeats += 1
            self._relays.drop(answer.parcel)
            self._relays.post(answer.parcel)

    def stop(self) -> None:
        """Forget all."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
        for key in list(self._answers):
            self._forget(key)

    def _forget(self, key: tuple[SessionAddress, str]) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None:
            self._size_bytes -= len(answer.parcel.data)
            self._relays.drop(answer.parcel)

    def _sweep(self) -> None:
        self._call = None
        now = self._clock.seconds()
        for key in [key for key, answer in self._answers.items() if answer.parcel.expires_at <= now]:
            self._forget(key)
        if self._answers:
            self._call = self._clock.callLater(_SWEEP_S, self._sweep)

    def __len__(self) -> int:
        return len(self._answers)
