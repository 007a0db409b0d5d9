"""The peer: it connects one twin's exchange with the lists of a Redis."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

from twisted.internet.defer import CancelledError, Deferred, DeferredList, ensureDeferred
from twisted.internet.task import deferLater
from twisted.logger import Logger

from dmsg.address import RedisAddress
from dmsg.crypto.keys import Random
from dmsg.glue.errors import RedisAway, RedisRefused
from dmsg.glue.redis import TAKE_S, Taker
from dmsg.glue.tasks import Tasks
from dmsg.interfaces import IEventLog
from dmsg.rmb.client.exchange import Accepted, Exchange, ExchangeOwner
from dmsg.rmb.peer.commands import LOCAL, LOCAL_TAKEN, REPLY, REPLY_TAKEN
from dmsg.rmb.peer.redis import RedisLists
from dmsg.rmb.peer.requests import Requests
from dmsg.rmb.peer.retries import Retries
from dmsg.rmb.peer.services import Services
from dmsg.sansio.backoff import Backoff
from dmsg.sansio.jitter import Jitter

_log = Logger()
#: The pauses after failures of Redis, in seconds.
_REDIS_PAUSES: Final = Backoff(0.1, 2.0)
#: Seconds after which the end of an answer is written again, even if Redis has not taken one of those before it.
_TURN_S: Final = 60.0
#: Seconds that messages on their way to Redis have to arrive when the peer stops.
STOP_TIMEOUT_S: Final = 2.0


class Gateway:
    """Lets local programs call other twins, and serve commands, through lists in the Redis at ``address``.

    ``make_exchange(owner)`` makes the exchange. Its session should be the one without a name, so that one peer at a time runs
    for a twin.
    """

    def __init__(
        self,
        reactor: Any,
        address: RedisAddress,
        make_exchange: Callable[[ExchangeOwner], Exchange],
        *,
        events: IEventLog | None = None,
        random: Random = os.urandom,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.exchange = make_exchange(self)
        self._reactor = reactor
        self._uniform = Jitter(random).random
        self._lists = RedisLists(address, reactor)
        self._local = Taker(address, LOCAL, reactor, taken=LOCAL_TAKEN)
        self._reply = Taker(address, REPLY, reactor, taken=REPLY_TAKEN)
        self.requests = Requests(
            reactor,
            self._lists,
            self.exchange,
            events=events,
            now_s=now_s,
            new_uid=lambda: str(UUID(bytes=random(16), version=4)),
        )
        self.services = Services(reactor, self._lists, self.exchange)
        #: The problems with Redis by the list they concern, or "" at the start. One list may fail for days.
        self._redis_problems: dict[str, str] = {"": "not asked yet"}
        self._finding: Deferred[None] | None = None
        self._work: Deferred[None] | None = None
        self._finishing = Tasks()
        self._retries = Retries(reactor)
        #: How often answers that were taken have been given back to their list.
        self._replies_given_back = 0
        self._pauses: list[Deferred[None]] = []
        self._stopping = False

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find our own twin and begin; raises :class:`~dmsg.rmb.client.errors.NoTwin` if the registry has none.

        Returns without having begun when :meth:`stop` is called before.
        """
        self._finding = ensureDeferred(self.exchange.find())
        try:
            await self._finding
        except CancelledError:
            if not self._stopping:
                raise
        if self._stopping:
            return
        self._work = ensureDeferred(self._keep_serving())

    async def stop(self) -> None:
        """Take no more messages, let those on their way to Redis arrive, and end all connections."""
        self._stopping = True
        if self._finding is not None:  # the registry may be away for days
            self._finding.cancel()
        self.requests.take_no_more()
        for pause in list(self._pauses):
            pause.cancel()
        for taker in (self._local, self._reply):
            if taker.is_away:  # a connected taker may still be given a message, so it is awaited
                await taker.close()
        if self._work is not None:
            await self._work
        await self.services.stop(STOP_TIMEOUT_S)
        await self.exchange.stop()
        ends_at = self._reactor.seconds() + STOP_TIMEOUT_S  # from now on: stopping the exchange puts requests back
        await self.requests.stop(ends_at - self._reactor.seconds())
        await self._finishing.end(ends_at - self._reactor.seconds(), self._reactor)
        for one in (self._local, self._reply, self._lists):
            await one.close()

    async def _rest(self, pause_s: float) -> None:
        """Pause, unless the peer stops."""
        if self._stopping:
            return
        pause: Deferred[None] = deferLater(self._reactor, pause_s)
        self._pauses.append(pause)
        try:
            await pause
        except CancelledError:
            pass
        finally:
            self._pauses.remove(pause)

    async def _keep_serving(self) -> None:
        """Read the notes before relays send stored answers, because an answer without a note is dropped."""
        await self._try_until_done(self._restore)
        if not self._stopping:
            self.exchange.connect()
        # Each list has a connection of its own, so that neither has to wait for the other.
        await DeferredList(
            [
                ensureDeferred(self._keep_taking(self._local, self.requests.take, self.requests)),
                ensureDeferred(self._keep_taking(self._reply, self._take_reply, None)),
            ]
        )

    async def _restore(self) -> bool:
        """Continue where the previous process ended."""
        await self.requests.restore()
        for taker in (self._local, self._reply):
            await self._lists.give_back(taker.taken, taker.key)
        return True

    def _take_reply(self, data: bytes) -> None:
        given_back = self._replies_given_back

        def done() -> None:
            if given_back == self._replies_given_back:  # else ``data`` is taken again, and done when that is
                self._finishing.begin(self._finish(data))

        self.services.take(data, done)

    async def _finish(self, data: bytes) -> None:
        """Make sure that the next process does not take ``data`` again."""
        while True:
            with suppress(RedisAway):
                with suppress(RedisRefused):
                    await self._lists.done(REPLY_TAKEN, data)
                return
            await self._retries.turn(_TURN_S)  # there may be thousands: relays take all at once that waited for them

    async def _try_until_done(self, step: Callable[[], Awaitable[bool]], key: str = "") -> None:
        """Retry ``step``, which returns whether Redis was asked, until it does not fail."""
        failures = 0
        while not self._stopping:
            try:
                if await step():
                    self._redis_works(key)
                return
            except (RedisAway, RedisRefused) as error:
                failures += 1
                self._redis_failed(key, error)
            except CancelledError:
                raise
            except Exception:  # a bug with one message must not keep the next from being taken
                failures += 1
                _log.failure("A step between Redis and the relays failed")
            await self._rest(_REDIS_PAUSES.pause_s(failures, self._uniform))

    async def _keep_taking(self, taker: Taker, take: Callable[[bytes], None], requests: Requests | None) -> None:
        """Take the messages of ``taker``. Only ``requests`` must not be taken twice: twins recognise repeated answers."""
        # Start as after a loss: Redis may not know yet that the previous process's connection is gone, and give it a message.
        lost_at: float | None = self._reactor.seconds()
        was_given_back = True

        async def one() -> bool:
            nonlocal lost_at, was_given_back
            if requests is not None:
                await requests.room()
                if self._stopping:
                    return False
            if lost_at is not None:
                # Give back at once, and again when the loss is over. Answers that are being sent are then taken again, first.
                is_over = self._reactor.seconds() - lost_at > 2 * TAKE_S
                if is_over or not was_given_back:
                    if requests is not None and not await requests.noted(TAKE_S):
                        return False
                    self._replies_given_back += requests is None
                    await self._lists.give_back(taker.taken, taker.key)
                    was_given_back = True
                if is_over:
                    lost_at = None
            try:
                data = await taker.take()
            except RedisAway as away:
                # Redis may have given a message to the lost connection, or may do so for TAKE_S more.
                if away.maybe_done:
                    lost_at, was_given_back = self._reactor.seconds(), False
                raise
            if data is not None:  # even if the peer stops: a message that no relay has is put back then
                take(data)
            return True

        while not self._stopping:
            # Without room Redis is not asked, so its problem stays as it is.
            if requests is not None or await self.services.room():
                await self._try_until_done(one, taker.key)

    # --- what is known of Redis --------------------------------------------------------------------------------------

    @property
    def redis_problem(self) -> str:
        """Why Redis cannot be used; "" while it can."""
        return next(iter(self._redis_problems.values()), "")

    def _redis_works(self, key: str) -> None:
        if self._redis_problems.pop(key, "") and not self._redis_problems:
            _log.info("Redis is there")

    def _redis_failed(self, key: str, error: RedisAway | RedisRefused) -> None:
        if error.reason not in self._redis_problems.values():
            _log.warn("{problem}", problem=str(error))
        self._redis_problems[key] = error.reason

    def stats(self) -> dict[str, float]:
        """Levels for metrics."""
        return {"requests": self.requests.under_way, "waiting_for_redis": self.requests.waiting + self.services.waiting}

    # --- from the exchange -------------------------------------------------------------------------------------------

    def request_received(self, request: Accepted) -> None:
        """See :class:`~dmsg.rmb.client.exchange.ExchangeOwner`."""
        self.services.request_received(request)

    def is_awaited(self, uid: str, twin: int) -> bool:
        """See :class:`~dmsg.rmb.client.exchange.ExchangeOwner`."""
        return self.requests.is_awaited(uid, twin)

    def answer_received(self, answer: Accepted) -> None:
        """See :class:`~dmsg.rmb.client.exchange.ExchangeOwner`."""
        self.requests.answer_received(answer)

    def answers_have_room(self) -> None:
        """See :class:`~dmsg.rmb.client.exchange.ExchangeOwner`."""
        self.services.answers_have_room()
