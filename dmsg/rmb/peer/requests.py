"""Requests of local programs: from their list to other twins, and each answer to the list on which its program waits.

Every request that names a list for its answer is answered there once, in time: with the answer, or with an error that says
why there is none. A note in Redis outlives this process, so that the next process can keep this promise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import deferLater
from twisted.logger import Logger

from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import CallFinished
from dmsg.glue.errors import RedisAway, RedisRefused
from dmsg.glue.tasks import Tasks
from dmsg.glue.waiters import Waiters
from dmsg.interfaces import IEventLog
from dmsg.rmb.client.errors import CallError, CallRefused, CallTimeout, Stopped
from dmsg.rmb.client.exchange import Accepted, Exchange
from dmsg.rmb.core.errors import EnvelopeExpired, InvalidMessage, MalformedEnvelope, PeerCode
from dmsg.rmb.core.limits import MAX_TTL_S
from dmsg.rmb.core.messages import IncomingResponse, JsonError, OutgoingRequest
from dmsg.rmb.core.wire import Envelope, parse_backlog
from dmsg.rmb.peer.commands import BACKLOG, LOCAL, LOCAL_TAKEN, PUSHED
from dmsg.rmb.peer.redis import RedisLists
from dmsg.rmb.peer.retries import RETRY_S, Retries

_log = Logger()
#: Answers kept in one list, and seconds for which a list is kept after the last one: a program that has not fetched an answer
#: in an hour is gone.
KEPT_ANSWERS: Final = 10_000
KEEP_ANSWERS_S: Final = 3600
#: Seconds for which a note is kept after its request has ended: the error is pushed at the end, and a Redis that was away has
#: to come back first. For as long the peer remembers that a request of the previous process was answered, because what that
#: process sent may be on its way for minutes.
NOTE_GRACE_S: Final = 300
#: Bytes of answers that wait for a Redis that is away. Above that, answers are replaced by errors.
WAITING_ANSWERS_BYTES: Final = 64 * 1024 * 1024
#: Seconds before the end of a request at which an error is pushed, so that it is in the list in time.
EARLY_S: Final = 0.1
#: Requests under way above which the peer takes no more while answers come, as it does at the exchange's limit of bytes; and
#: the seconds for which the last answer, or the last time with room, counts as recent.
UNDER_WAY: Final = 4_096
_STALLED_S: Final = 1.0
#: Requests under way to one twin.
UNDER_WAY_TO_A_TWIN: Final = 7_500
#: Most notes of the previous process that are read.
RESTORED: Final = 100_000

_NO_ANSWER: Final = "no answer in time"


class _Awaited:
    """An answer that a local program waits for."""

    __slots__ = ("answered", "ends_at", "note", "noted", "reference", "reply_to", "restored", "timer", "twin")

    def __init__(self, note: str, reply_to: str, reference: str | None, twin: int, ends_at: float) -> None:
        self.note = note
        #: Whether the note is known to be in Redis, and whether it is from the previous process.
        self.noted = self.restored = False
        #: Whether its answer is in Redis or on its way there.
        self.answered = False
        self.reply_to = reply_to
        self.reference = reference
        self.twin = twin
        #: Unix time.
        self.ends_at = ends_at
        self.timer: IDelayedCall | None = None


class Requests:
    """The requests under way. ``now_s()`` is Unix time, ``new_uid()`` returns a text that no other request has."""

    def __init__(
        self,
        clock: Any,
        lists: RedisLists,
        exchange: Exchange,
        *,
        events: IEventLog | None,
        now_s: Callable[[], float],
        new_uid: Callable[[], str],
    ) -> None:
        self._clock = clock
        self._lists = lists
        self._exchange = exchange
        self._events = events
        self._now_s = now_s
        self._new_uid = new_uid
        self._calls = Tasks()
        self._deliveries = Tasks()
        self._noting = Tasks()
        #: Only for answers: a full Redis takes these, but not the requests that wait for services.
        self._retries = Retries(clock)
        self._to_twin: dict[int, int] = {}
        self._restored: dict[str, _Awaited] = {}
        self._answered: Waiters[None] = Waiters()
        self._answered_at = self._had_room_at = 0.0
        self._waiting_bytes = 0
        self._stopping = False

    @property
    def under_way(self) -> int:
        """How many have no answer yet."""
        return len(self._calls) + len(self._restored)

    @property
    def waiting(self) -> int:
        """How many answers are on their way to Redis."""
        return len(self._deliveries)

    # --- from the list -----------------------------------------------------------------------------------------------

    async def room(self) -> None:
        """Wait while much is under way and answers come. When no answers come, return: the next request is then refused."""
        while not self._stopping and (len(self._calls) >= UNDER_WAY or not self._exchange.takes_calls):
            left_s = max(self._answered_at, self._had_room_at) + _STALLED_S - self._clock.seconds()
            if left_s <= 0:
                return
            await self._answered.wait_at_most(left_s, self._clock)
        self._had_room_at = self._clock.seconds()

    def take_no_more(self) -> None:
        """The peer stops: :meth:`room` returns, however much is under way."""
        self._stopping = True
        self._answered.fire(None)

    async def noted(self, limit_s: float) -> bool:
        """Wait up to ``limit_s`` until all taken messages have been replaced by notes; returns whether they have."""
        await self._noting.when_idle(limit_s, self._clock)
        return not self._noting

    def take(self, data: bytes) -> None:
        """Send a message from :data:`~dmsg.rmb.peer.commands.LOCAL`: each of its destinations gets an envelope of its own.

        Notes replace the message in Redis, and then it is not taken again if this process is killed.
        """
        now = int(self._now_s())
        try:
            request = OutgoingRequest.from_json(data)
        except InvalidMessage as invalid:
            text = f"invalid message payload data: {invalid.problem}"
            self._refuse(invalid.reply_to, invalid.reference, "", PeerCode.WRONG_PAYLOAD, text)
            self._noting.begin(self._note(data, []))
            return
        begun: list[tuple[OutgoingRequest, str, _Awaited]] = []
        for twin in request.destinations:
            # Each has a uid of its own, because a relay's error identifies its envelope only by the uid.
            uid = self._new_uid()
            try:
                timestamp, expiration = request.times(now)
            except EnvelopeExpired as expired:
                self._refuse(request.reply_to, request.reference, str(twin), PeerCode.INVALID, expired.text)
                continue
            if self._to_twin.get(twin, 0) >= UNDER_WAY_TO_A_TWIN:
                text = "too many requests to this twin are under way"
                self._refuse(request.reply_to, request.reference, str(twin), PeerCode.BUSY, text)
                continue
            awaited = _Awaited(BACKLOG + uid, request.reply_to, request.reference, twin, float(timestamp + expiration))
            one = replace(request, destinations=(twin,), timestamp=timestamp, expiration=expiration)
            begun.append((one, uid, awaited))
        self._noting.begin(self._note(data, begun))
        for one, uid, awaited in begun:
            # Made one by one, because each holds the payload, and the exchange may have no room for all of them.
            [envelope] = one.envelopes(uid, now)
            self._begin(one, envelope, awaited)

    def _begin(self, request: OutgoingRequest, envelope: Envelope, awaited: _Awaited) -> None:
        twin = awaited.twin
        self._to_twin[twin] = self._to_twin.get(twin, 0) + 1

        def over(result: object) -> object:
            self._to_twin[twin] -= 1
            if not self._to_twin[twin]:
                del self._to_twin[twin]
            self._answered_at = self._clock.seconds()
            self._answered.fire(None)
            return result

        self._calls.begin(self._call(request, envelope, awaited)).addBoth(over)

    async def _call(self, request: OutgoingRequest, envelope: Envelope, awaited: _Awaited) -> None:
        left_s = awaited.ends_at - self._now_s()
        started_s, reason = self._clock.seconds(), Reason.NONE
        try:
            answer = await self._exchange.request(envelope, max(left_s - EARLY_S, left_s / 2))
        except Stopped as stopped:
            # The next process reads the note and awaits the answer, or takes the request again.
            if not stopped.sent:
                self._deliveries.begin(self._put_back(request, awaited))
            return
        except CallError as error:
            reason = Reason.of(error.reason)
            text = _NO_ANSWER if isinstance(error, CallTimeout) else error.message
            # An error of a relay, or our own, names the twin that was called as its source.
            told = _error(awaited.reference, str(awaited.twin), error.code, text)
            if isinstance(error, CallRefused):
                told = replace(told, timestamp=error.timestamp, schema=error.schema)
                if error.source.twin:
                    told = replace(told, source=str(error.source))
            self._answer(awaited, told)
        else:
            self._answer(awaited, IncomingResponse.of(answer.envelope, answer.payload, awaited.reference))
        if self._events is not None:
            elapsed_ms = (self._clock.seconds() - started_s) * 1000
            self._events.emit(CallFinished(awaited.twin, reason is Reason.NONE, reason, elapsed_ms))

    # --- from the process before -------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Wait for the answers for which the previous process waited."""
        now = self._now_s()
        for name, data in await self._lists.notes(BACKLOG, RESTORED):
            try:
                note = parse_backlog(data)
            except MalformedEnvelope:
                continue
            if (
                not note.reply_to or note.module or note.uid in self._restored
            ):  # the uid is known if an earlier restore() failed halfway
                continue
            reference = note.reference if note.HasField("reference") else None
            ends_at = float(note.expires or int(now) + min(note.ttl, MAX_TTL_S))
            awaited = _Awaited(name, note.reply_to, reference, note.destination, ends_at)
            awaited.noted = awaited.restored = True
            self._restored[note.uid] = awaited
            awaited.timer = self._clock.callLater(max(0.0, ends_at - now - EARLY_S), self._over, note.uid)

    def _over(self, uid: str) -> None:
        awaited = self._restored.pop(uid)
        self._answer(awaited, _error(awaited.reference, str(awaited.twin or ""), PeerCode.INVALID, _NO_ANSWER))

    def is_awaited(self, uid: str, twin: int) -> bool:
        """See :class:`~dmsg.rmb.client.exchange.ExchangeOwner`."""
        awaited = self._restored.get(uid)
        return awaited is not None and (not twin or not awaited.twin or twin == awaited.twin)

    def answer_received(self, answer: Accepted) -> None:
        """See :class:`~dmsg.rmb.client.exchange.ExchangeOwner`."""
        awaited = self._restored.pop(answer.envelope.uid)
        assert awaited.timer is not None
        awaited.timer.cancel()
        response = IncomingResponse.of(answer.envelope, answer.payload, awaited.reference)
        self._answer(awaited, response if answer.source.twin else replace(response, source=str(awaited.twin)))

    # --- to the lists ------------------------------------------------------------------------------------------------

    async def _note(self, data: bytes, begun: list[tuple[OutgoingRequest, str, _Awaited]]) -> None:
        """Replace the taken message by notes.

        Nobody has to wait for this: the answer comes later, is pushed over the same connection, and removes its note.
        """
        with suppress(RedisRefused):
            while True:
                open_ones = [one for one in begun if not one[2].answered]
                try:
                    await self._lists.done(LOCAL_TAKEN, data, [_note_of(*one) for one in open_ones])
                except RedisAway:
                    await deferLater(self._clock, RETRY_S)
                    continue
                for _, _, awaited in open_ones:
                    awaited.noted = True
                return

    def _refuse(self, reply_to: str, reference: str | None, source: str, code: int, text: str) -> None:
        self._answer(_Awaited("", reply_to, reference, 0, 0.0), _error(reference, source, code, text))

    def _answer(self, awaited: _Awaited, answer: IncomingResponse) -> None:
        awaited.answered = True
        if awaited.reply_to:
            data = answer.to_json()
            if self._waiting_bytes + len(data) > WAITING_ANSWERS_BYTES:
                text = "the answer was dropped: too much waits for Redis"
                data = _error(answer.reference, answer.source, PeerCode.BUSY, text).to_json()
            self._deliveries.begin(self._deliver(awaited, data))

    async def _deliver(self, awaited: _Awaited, data: bytes) -> None:
        """Push ``data`` once, retrying for as long as its note is kept."""
        noted, note_tells = awaited.noted, False
        mark = PUSHED + (awaited.note.removeprefix(BACKLOG) or self._new_uid())
        self._waiting_bytes += len(data)
        give_up_at = max(awaited.ends_at, self._now_s()) + NOTE_GRACE_S
        try:
            while (left_s := give_up_at - self._now_s()) > 0:
                try:
                    await self._lists.push_once(
                        awaited.note,
                        awaited.reply_to,
                        data,
                        most=KEPT_ANSWERS,
                        keep_s=KEEP_ANSWERS_S,
                        note_tells=note_tells,
                        mark=mark,
                        mark_s=NOTE_GRACE_S if awaited.restored else 0 if noted else int(left_s) + 1,
                        wait_s=left_s,
                    )
                    break
                except RedisAway as away:
                    note_tells = note_tells or (away.maybe_done and noted)
                await self._retries.turn(give_up_at - self._now_s())
        except RedisRefused as refused:
            _log.info("an answer was dropped: {reason}", reason=refused.reason)
        finally:
            self._waiting_bytes -= len(data)
        if not noted:
            with suppress(RedisAway, RedisRefused):
                await self._lists.forget([mark])

    async def _put_back(self, request: OutgoingRequest, awaited: _Awaited) -> None:
        """Let the next process take a request that no relay has. A request without a note it takes anyway."""
        while not await self.noted(RETRY_S):
            pass
        with suppress(RedisAway, RedisRefused):
            await self._lists.put_back_noted(awaited.note, LOCAL, request.to_json())

    async def stop(self, patience_s: float) -> None:
        """Give answers on their way to Redis ``patience_s`` to arrive. Call it when the exchange has stopped."""
        for awaited in self._restored.values():
            assert awaited.timer is not None
            awaited.timer.cancel()
        self._restored.clear()
        ends_at = self._clock.seconds() + patience_s
        await self._deliveries.end(patience_s, self._clock)
        await self._noting.end(ends_at - self._clock.seconds(), self._clock)


def _note_of(request: OutgoingRequest, uid: str, awaited: _Awaited) -> tuple[str, int, bytes]:
    note = request.backlog(uid, request.timestamp)
    note.destination, note.expires = awaited.twin, int(awaited.ends_at)
    return awaited.note, note.ttl + NOTE_GRACE_S, note.SerializeToString()


def _error(reference: str | None, source: str, code: int, text: str) -> IncomingResponse:
    return IncomingResponse(reference=reference, source=source, timestamp=0, error=JsonError(code, text))
