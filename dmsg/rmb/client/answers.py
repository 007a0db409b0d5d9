"""Recent requests and their answers, for requests that come again and for relays that die before they deliver an answer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.rmb.client.relays import Parcel, Relays
from dmsg.rmb.core.address import SessionAddress
from dmsg.sansio.tally import Tally
from dmsg.sansio.weights import Weights

#: How often one answer is repeated at most: a request comes again once for each relay that its sender has lost.
_REPEATS: Final = 4
#: Seconds between two sweeps of expired answers.
_SWEEP_S: Final = 15.0
#: Limits of answers that no relay has taken, as multiples of the limits of kept answers. From one on, no more requests are
#: begun. Above the first multiple of the bytes, new answers of running handlers are refused; above the second multiple of bytes
#: or number, the oldest answers are forgotten, also errors.
_UNSENT_FITS: Final = 3
_UNSENT: Final = 4

_Key = tuple[SessionAddress, str]


class _Request:
    """An accepted request: its signature, the URL of the relay over which it came last, when it expires, and its answer, once
    there is one.
    """

    __slots__ = ("answer", "expires_at", "relay", "repeats", "shelf", "signature", "size", "taken")

    def __init__(self, signature: bytes, relay: str, expires_at: float, shelf: _Shelf) -> None:
        self.signature = signature
        self.relay = relay
        self.expires_at = expires_at
        self.answer: Parcel | None = None
        #: Called once a relay has taken the answer.
        self.taken: Callable[[], object] | None = None
        #: The bytes of its answer, and the shelf on which they count.
        self.size = 0
        self.shelf = shelf
        self.repeats = 0

    def tell(self) -> None:
        """A relay has taken the answer, or none has to any more."""
        taken, self.taken = self.taken, None
        if taken is not None:
            taken()


class _Shelf:
    """Requests by twin, the oldest first."""

    def __init__(self) -> None:
        self._of_twin: dict[int, OrderedDict[_Key, None]] = {}
        self._tally: Tally[int] = Tally()
        self._bytes: Weights[int] = Weights()
        self.count = 0

    @property
    def used(self) -> int:
        """Bytes of the answers."""
        return self._bytes.total

    def add(self, key: _Key, size: int) -> None:
        twin = key[0].twin
        self._of_twin.setdefault(twin, OrderedDict())[key] = None
        self._tally.add(twin)
        self._bytes.add(twin, size)
        self.count += 1

    def remove(self, key: _Key, size: int) -> None:
        twin = key[0].twin
        del self._of_twin[twin][key]
        if not self._of_twin[twin]:
            del self._of_twin[twin]
        self._tally.remove(twin)
        self._bytes.add(twin, -size)
        self.count -= 1

    def surplus(self, count: int, size: int) -> _Key | None:
        """Above ``count`` requests or ``size`` bytes: the oldest request of the twin with the most; otherwise ``None``."""
        if self.count > count:
            return next(iter(self._of_twin[self._tally.largest()]))
        return next(iter(self._of_twin[self._bytes.largest()])) if self.used > size else None


class Answers:
    """The answers to the last requests, at most ``count`` with ``size_bytes`` in all, each until it expires.

    Above that, the oldest answers of the twin with the most are forgotten, so that a twin that asks endlessly does not evict
    the answers of others.
    A request is handed to its handler once. When it comes again, because its sender lost the relay over which the answer
    was to come, it is answered with the same bytes.

    Answers that no relay has taken yet are counted apart, because forgetting one loses it. While there are ``count`` of
    them, or they have ``size_bytes``, :attr:`has_room` is false, and callers should make no more answers; ``room()`` is called
    when there is room again.
    """

    def __init__(
        self,
        clock: IReactorTime,
        relays: Relays,
        count: int,
        size_bytes: int,
        room: Callable[[], object] = lambda: None,
    ) -> None:
        self._clock = clock
        self._relays = relays
        self._limit = count
        self._limit_bytes = size_bytes
        self._room = room
        self._requests: dict[_Key, _Request] = {}
        self._kept, self._unsent = _Shelf(), _Shelf()
        self._call: IDelayedCall | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of all answers."""
        return self._kept.used + self._unsent.used

    @property
    def has_room(self) -> bool:
        """Whether relays have taken enough of the earlier answers."""
        return self._unsent.used < self._limit_bytes and self._unsent.count < self._limit

    def fits(self, size: int) -> bool:
        """Whether another answer of ``size`` bytes could wait for a relay."""
        return self._unsent.used + size <= max(_UNSENT_FITS * self._limit_bytes, size)

    def accepted(self, source: SessionAddress, uid: str, signature: bytes, relay: str, expires_at: float) -> None:
        """Note the request ``uid`` of ``source``, which came over ``relay``: its answer goes over that relay first."""
        self._forget((source, uid))
        self._add((source, uid), _Request(signature, relay, expires_at, self._kept))
        self._bound()

    def _add(self, key: _Key, request: _Request) -> None:
        self._requests[key] = request
        request.shelf.add(key, request.size)

    def post(
        self, destination: SessionAddress, uid: str, answer: Parcel, taken: Callable[[], object] | None = None
    ) -> None:
        """Send the answer to the request ``uid`` of ``destination``, and keep it. It replaces an earlier one.

        ``taken()`` is called when a relay has taken it, or when it is replaced or forgotten before; not by :meth:`stop`. An
        answer without ``taken`` stands in for the earlier one, whose ``taken()`` is then called for it.
        """
        key = (destination, uid)
        request = self._requests.get(key)
        if request is None:
            request = _Request(b"", "", answer.expires_at, self._kept)
            self._add(key, request)
        elif request.answer is not None:
            self._drop(request)
        if request.relay:
            answer.prefer = (request.relay, *answer.prefer)
        request.answer = answer
        if taken is not None:
            request.tell()
            request.taken = taken
        request.expires_at = answer.expires_at
        self._put(key, request, self._kept, len(answer.data))
        answer.waits = partial(self._waits, key, request)
        self._relays.post(answer)
        if answer.via is not None:
            request.tell()
        self._bound()

    def _waits(self, key: _Key, request: _Request, waits: bool) -> None:
        """Called when an answer begins or ceases to wait for a relay."""
        self._put(key, request, self._unsent if waits else self._kept, request.size)
        if not waits:
            request.tell()
        self._bound()

    def _put(self, key: _Key, request: _Request, shelf: _Shelf, size: int) -> None:
        had_room = self.has_room
        request.shelf.remove(key, request.size)
        request.shelf, request.size = shelf, size
        shelf.add(key, size)
        if not had_room and self.has_room:
            self._room()

    def repeat(self, source: SessionAddress, uid: str, signature: bytes, relay: str) -> None:
        """Repeat the answer to the request ``uid`` of ``source``, which has come again over ``relay``.

        It is the same request if it has the same signature, which then need not be verified again. Its sender may have lost
        the relay over which it came before, even if we have not.
        """
        request = self._requests.get((source, uid))
        if request is None or request.signature != signature or request.repeats >= _REPEATS:
            return
        request.relay = relay
        answer = request.answer
        if answer is not None:
            answer.prefer = (relay, *(one for one in answer.prefer if one != relay))
            if self._relays.post_again(answer):
                request.repeats += 1

    def stop(self) -> None:
        """Forget all."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
        for key, request in list(self._requests.items()):
            request.taken = None
            self._forget(key)

    def _bound(self) -> None:
        for shelf, times in ((self._kept, 1), (self._unsent, _UNSENT)):
            while (key := shelf.surplus(times * self._limit, times * self._limit_bytes)) is not None:
                self._forget(key)
        if self._call is None and self._requests:
            self._call = self._clock.callLater(_SWEEP_S, self._sweep)

    def _forget(self, key: _Key) -> None:
        request = self._requests.pop(key, None)
        if request is not None:
            had_room = self.has_room
            request.shelf.remove(key, request.size)
            self._drop(request)
            request.tell()
            if not had_room and self.has_room:
                self._room()

    def _drop(self, request: _Request) -> None:
        answer, request.answer = request.answer, None
        if answer is not None:
            answer.waits = lambda waits: None
            self._relays.drop(answer)

    def _sweep(self) -> None:
        self._call = None
        now = self._clock.seconds()
        for key in [key for key, request in self._requests.items() if request.expires_at <= now]:
            self._forget(key)
        self._bound()

    def __len__(self) -> int:
        return len(self._requests)
