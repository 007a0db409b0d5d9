"""The commands that a program serves: their handlers, how many run at once, and whose turn is next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.glue.waiters import Waiters
from dmsg.rmb.client.config import RmbConfig
from dmsg.rmb.client.errors import Refusal
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import PeerCode
from dmsg.rmb.core.fair_queue import FairQueue

_log = Logger()
#: Bytes that a waiting request counts besides its own.
_OVERHEAD_BYTES: Final = 2_048


@dataclass(frozen=True, slots=True)
class Request:
    """An accepted request. ``source`` is who asks, proved by a signature; ``data`` is the decrypted payload.

    ``sealed`` says that it came encrypted. ``remaining_s`` is how many seconds of its lifetime were left when it came.
    """

    command: str
    data: bytes
    source: SessionAddress
    uid: str
    schema: str | None
    tags: str
    sealed: bool
    remaining_s: int


@dataclass(frozen=True, slots=True)
class Reply:
    """A handler's answer with a MIME type: ``schema`` is that of ``data``.

    With a ``schema`` of more than 255 bytes, which no receiver accepts, the command counts as failed.
    """

    data: bytes
    schema: str | None = None


#: Returns the answer, or raises :class:`Refusal`.
Handler = Callable[[Request], Awaitable[bytes | Reply]]
H = TypeVar("H", bound=Handler)
#: Sends an answer: a :class:`Reply` or a :class:`Refusal`.
Respond = Callable[[Reply | Refusal], None]

_UNKNOWN: Final = Refusal(PeerCode.UNKNOWN_COMMAND, "unknown command")
_BUSY: Final = Refusal(PeerCode.BUSY, "too many requests are waiting")
_FAILED: Final = Refusal(PeerCode.HANDLER_FAILED, "the command failed")


class Handlers:
    """Handlers by command. At most ``config.handlers`` run at once, at most half of them for one twin.

    Other requests wait in a bounded queue in which twins take turns (:class:`~dmsg.rmb.core.fair_queue.FairQueue`). While
    ``has_room()`` is false, because no relay takes the answers, none is started until :meth:`go_on` is called.
    """

    def __init__(self, clock: IReactorTime, config: RmbConfig, has_room: Callable[[], bool] = lambda: True) -> None:
        self._clock = clock
        self._has_room = has_room
        self._limit = config.handlers
        self._limit_of_a_twin = max(1, config.handlers // 2)
        self._handlers: dict[str, Handler] = {}
        self._waiting: FairQueue[int, tuple[Request, Respond, float]] = FairQueue(
            config.waiting_requests, config.waiting_bytes
        )
        self._working: dict[Deferred[Any], None] = {}
        self._working_for: Counter[int] = Counter()
        self._idle: Waiters[None] = Waiters()
        self._stopped = False

    def add(self, command: str, handler: Handler) -> None:
        """Serve ``command`` with ``handler``; raises ``ValueError`` if it is served already."""
        if command in self._handlers:
            raise ValueError(f"the command {command!r} is served already")
        self._handlers[command] = handler

    def take(self, request: Request, respond: Respond) -> None:
        """Answer ``request`` through ``respond``, once, unless it expires before."""
        if request.command not in self._handlers:
            respond(_UNKNOWN)
            return
        if self._stopped:
            respond(_BUSY)
            return
        ends_at = self._clock.seconds() + request.remaining_s
        # If a place is free, only requests of twins at their own limit wait, so this request overtakes none that could run.
        if len(self._working) < self._limit and self._may(request.source.twin) and self._has_room():
            self._work(request, respond, ends_at)
            return
        size = len(request.data) + _OVERHEAD_BYTES
        for one in self._waiting.put(request.source.twin, (request, respond, ends_at), size):
            self._refuse(*one, _BUSY)
        self.go_on()

    def start(self) -> None:
        """Accept requests again after :meth:`stop`."""
        self._stopped = False

    def go_on(self) -> None:
        """Start waiting requests while there are places."""
        while len(self._working) < self._limit and self._has_room():
            one = self._waiting.take(self._may)
            if one is None:
                return
            if self._is_valid(one[2]):
                self._work(*one)

    async def stop(self, patience_s: float) -> None:
        """Refuse waiting requests, give running handlers ``patience_s`` to end, then cancel them."""
        self._stopped = True
        while (one := self._waiting.take()) is not None:
            self._refuse(*one, _BUSY)
        try:
            if self._working:
                await self._idle.wait_at_most(patience_s, self._clock)
        finally:
            for work in list(self._working):
                work.cancel()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _is_valid(self, ends_at: float) -> bool:
        """Whether the caller of a request that expires at ``ends_at`` still waits."""
        return self._clock.seconds() < ends_at

    def _refuse(self, _: Request, respond: Respond, ends_at: float, refusal: Refusal) -> None:
        if self._is_valid(ends_at):
            respond(refusal)

    def _may(self, twin: int) -> bool:
        return self._working_for[twin] < self._limit_of_a_twin

    def _work(self, request: Request, respond: Respond, ends_at: float) -> None:
        twin = request.source.twin
        self._working_for[twin] += 1
        work = ensureDeferred(self._answer(request, respond, ends_at))
        if work.called:
            self._done(twin)
            return
        self._working[work] = None
        # Its handler may have blocked the reactor for longer than the request is valid.
        work.addTimeout(max(0.0, ends_at - self._clock.seconds()), self._clock)

        def done(result: object) -> None:
            del self._working[work]
            self._done(twin)
            self.go_on()

        work.addBoth(done)

    def _done(self, twin: int) -> None:
        self._working_for[twin] -= 1
        if not self._working_for[twin]:
            del self._working_for[twin]
        if not self._working:
            self._idle.fire(None)

    async def _answer(self, request: Request, respond: Respond, ends_at: float) -> None:
        def tell(answer: Reply | Refusal) -> None:
            # A handler is cancelled when its request expires. Its caller has gone then, so a refusal is not sent.
            if isinstance(answer, Reply) or self._stopped or self._is_valid(ends_at):
                respond(answer)

        try:
            tell(await self._outcome(request))
        except CancelledError:
            tell(_FAILED)
        except GeneratorExit:  # nothing can wake it any more
            raise
        except BaseException:  # a handler of the application may raise anything, and its caller is told
            _log.failure("a handler of the command {command} failed", command=request.command)
            tell(_FAILED)

    async def _outcome(self, request: Request) -> Reply | Refusal:
        try:
            answer: object = await self._handlers[request.command](request)
        except Refusal as refusal:
            return refusal
        # memoryview() accepts only objects that hold bytes: bytes(5) would silently make five zero bytes.
        return answer if isinstance(answer, Reply) else Reply(bytes(memoryview(answer)))  # type: ignore[arg-type]
