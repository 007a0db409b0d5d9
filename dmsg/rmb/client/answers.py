"""Requests that came lately and their answers, for requests that come again and for relays that die with an answer in them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.rmb.client.relays import Parcel, Relays
from dmsg.rmb.core.address import SessionAddress
from dmsg.sansio.tally import Tally
from dmsg.sansio.weights import Weights

#: How often one answer is sent again at most: a request comes again once for each relay that its sender lost.
_REPEATS: Final = 4
#: How often answers whose time is over are forgotten, in seconds.
_SWEEP_S: Final = 15.0


class _Request:
    """A request that was accepted: its signature, when it is over, and its answer, once there is one."""

    __slots__ = ("answer", "expires_at", "repeats", "signature")

    def __init__(self, signature: bytes, expires_at: float) -> None:
        self.signature = signature
        self.expires_at = expires_at
        self.answer: Parcel | None = None
        self.repeats = 0


class Answers:
    """The answers to the last requests, at most ``count`` with ``size_bytes`` in all, each until it expires.

    Above, the oldest of the twin with the most are forgotten: a twin that asks without end does not lose others their answers.
    A request is handed to its handler once. When it comes again, because its sender lost the relay over which the answer
    was to come, it is answered with the same bytes.
    """

    def __init__(self, clock: IReactorTime, relays: Relays, count: int, size_bytes: int) -> None:
        self._clock = clock
        self._relays = relays
        self._limit = count
        self._limit_bytes = size_bytes
        self._requests: dict[tuple[SessionAddress, str], _Request] = {}
        self._of_twin: dict[int, OrderedDict[tuple[SessionAddress, str], None]] = {}
        self._tally: Tally[int] = Tally()
        self._bytes_of_twin: Weights[int] = Weights()
        self._call: IDelayedCall | None = None

    def accepted(self, source: SessionAddress, uid: str, signature: bytes, expires_at: float) -> None:
        """Note the request ``uid`` of ``source``."""
        self._forget((source, uid))
        self._add((source, uid), _Request(signature, expires_at))
        self._bound()

    def _add(self, key: tuple[SessionAddress, str], request: _Request) -> None:
        self._requests[key] = request
        twin = key[0].twin
        self._of_twin.setdefault(twin, OrderedDict())[key] = None
        self._tally.add(twin)

    def post(self, destination: SessionAddress, uid: str, answer: Parcel) -> None:
        """Send the answer to the request ``uid`` of ``destination``, and keep it."""
        request = self._requests.get((destination, uid))
        if request is None:
            request = _Request(b"", answer.expires_at)
            self._add((destination, uid), request)
        elif request.answer is not None:
            self._drop(request, destination.twin)
        request.answer = answer
        request.expires_at = answer.expires_at
        self._bytes_of_twin.add(destination.twin, len(answer.data))
        self._relays.post(answer)
        self._bound()

    def repeat(self, source: SessionAddress, uid: str, signature: bytes) -> None:
        """A request has come that is called ``uid`` as one of ``source`` was: if it is the same, so is its answer.

        It is the same if it has the same signature, which then need not be checked once more.
        """
        request = self._requests.get((source, uid))
        if request is None or request.answer is None or request.signature != signature:
            return
        if request.repeats < _REPEATS and self._relays.post_again(request.answer):
            request.repeats += 1

    def stop(self) -> None:
        """Forget all."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
        for key in list(self._requests):
            self._forget(key)

    def _bound(self) -> None:
        while len(self._requests) > self._limit:
            self._forget(next(iter(self._of_twin[self._tally.largest()])))
        while self._bytes_of_twin.total > self._limit_bytes:
            self._forget(next(iter(self._of_twin[self._bytes_of_twin.largest()])))
        if self._call is None and self._requests:
            self._call = self._clock.callLater(_SWEEP_S, self._sweep)

    def _forget(self, key: tuple[SessionAddress, str]) -> None:
        request = self._requests.pop(key, None)
        if request is None:
            return
        twin = key[0].twin
        self._drop(request, twin)
        self._tally.remove(twin)
        del self._of_twin[twin][key]
        if not self._of_twin[twin]:
            del self._of_twin[twin]

    def _drop(self, request: _Request, twin: int) -> None:
        if request.answer is not None:
            self._bytes_of_twin.add(twin, -len(request.answer.data))
            self._relays.drop(request.answer)
            request.answer = None

    def _sweep(self) -> None:
        self._call = None
        now = self._clock.seconds()
        for key in [key for key, request in self._requests.items() if request.expires_at <= now]:
            self._forget(key)
        self._bound()

    def __len__(self) -> int:
        return len(self._requests)
