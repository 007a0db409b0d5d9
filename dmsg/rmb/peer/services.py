"""Requests of other twins: each goes to the list of its command, from which services take it, and their answers go back."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from twisted.internet.defer import CancelledError
from twisted.internet.task import deferLater
from twisted.logger import Logger

import dmsg
from dmsg.glue.errors import RedisAway, RedisRefused
from dmsg.glue.tasks import Tasks
from dmsg.glue.waiters import Waiters
from dmsg.rmb.client.errors import CallError, EnvelopeTooLarge, RegistryFailed
from dmsg.rmb.client.exchange import Accepted, Exchange
from dmsg.rmb.core.errors import InvalidMessage, PeerCode
from dmsg.rmb.core.limits import MAX_TTL_S
from dmsg.rmb.core.messages import ANSWER_TOO_LARGE, IncomingRequest, OutgoingResponse
from dmsg.rmb.core.wire import Envelope
from dmsg.rmb.peer.commands import KEEP_COMMAND_S, OWN, Commands, list_of
from dmsg.rmb.peer.redis import RedisLists
from dmsg.rmb.peer.retries import Retries
from dmsg.sansio.rate import TokenBucket

_log = Logger()
#: Requests in the list of one command, and their bytes in Redis. Above that, up to twice as much, there is room only for twins
#: that have less in the list than is left; requests of others are answered with an error.
KEPT_REQUESTS: Final = 10_000
KEPT_REQUESTS_BYTES: Final = 64 * 1024 * 1024
#: Bytes of requests on their way to Redis, in all and of one twin. They wait while Redis is away. Above the first limit a twin
#: may have only as many as the third, so that a few twins keep no other out; up to twice the first.
WAITING_REQUESTS_BYTES: Final = 64 * 1024 * 1024
WAITING_REQUESTS_BYTES_OF_A_TWIN: Final = 16 * 1024 * 1024
WAITING_REQUESTS_BYTES_BEYOND: Final = 256 * 1024
#: Bytes of services' answers whose twin is being looked up; above that, no more are taken from their list. The same limit holds
#: for answers whose twin is looked up again because the registry has failed; above that, they are dropped.
LOOKED_UP_BYTES: Final = 16 * 1024 * 1024
#: Bytes of services' answers, as they are in Redis, that are not done: the peer holds each until it is done, to remove it there.
#: The limit matters for long answers that become short errors; for others the exchange's limits are reached first.
UNDONE_BYTES: Final = 64 * 1024 * 1024
#: Seconds to wait for room for more answers before checking whether the peer stops.
ROOM_S: Final = 1.0
#: Seconds until a registry that has failed is asked again for an answer's twin.
LOOK_UP_AGAIN_S: Final = 2.0
#: Bytes that a waiting request or answer counts besides its payload.
_REQUEST_BYTES: Final = 2_048
VERSION: Final = f"dmsg {dmsg.__version__}"
#: Rate limit of log lines about answers that could not be sent: this many at once, and one in ten seconds. A twin with an
#: invalid key may send thousands of requests a second.
_COMPLAINTS: Final = 5
_COMPLAINTS_PER_S: Final = 0.1

_JSON: Final = "application/json"
_UNKNOWN: Final = "unknown command"
_UNCERTAIN: Final = PeerCode.OTHER, "other: the service may not have got the request"


class Services:
    """Hands requests to services and answers to the exchange."""

    def __init__(self, clock: Any, lists: RedisLists, exchange: Exchange) -> None:
        self._clock = clock
        self._lists = lists
        self._exchange = exchange
        self._commands = Commands()
        self._complaints = TokenBucket(_COMPLAINTS_PER_S, _COMPLAINTS, clock.seconds())
        self._waiting_bytes: dict[int, int] = {}
        self._all_waiting_bytes = 0
        self._hands = Tasks()
        self._retries = Retries(clock)
        self._sends = Tasks()
        self._sending_bytes = self._retried_bytes = self._undone_bytes = 0
        self._room: Waiters[None] = Waiters()

    @property
    def waiting(self) -> int:
        """How many requests are on their way to Redis."""
        return len(self._hands)

    # --- requests ----------------------------------------------------------------------------------------------------

    def request_received(self, request: Accepted) -> None:
        """See :class:`~dmsg.rmb.client.exchange.ExchangeOwner`."""
        command = request.envelope.request.command
        if command.startswith(OWN):
            self._answer_ourselves(request, command)
            return
        key = list_of(command)
        if key is None:
            self._refuse(request, PeerCode.UNKNOWN_COMMAND, _UNKNOWN)
            return
        twin, size = request.source.twin, len(request.payload) + _REQUEST_BYTES
        of_twin = self._waiting_bytes.get(twin, 0) + size
        has_room = self._has_room_for(of_twin, self._all_waiting_bytes + size)
        if not has_room or not self._commands.admit(command, twin, size, self._clock.seconds()):
            self._refuse(request, PeerCode.BUSY, "too many requests are waiting")
            return
        self._waiting_bytes[twin] = of_twin
        self._all_waiting_bytes += size

        gone, self._commands.gone = self._commands.gone, []
        if gone:
            self._hands.begin(self._remove(gone))
        self._hands.begin(self._hand(request, command, key, size)).addBoth(self._handed, twin, size)

    @staticmethod
    def _has_room_for(of_twin: int, of_all: int) -> bool:
        """Whether a twin may have ``of_twin`` bytes on their way to Redis, and all together ``of_all``."""
        if of_all <= WAITING_REQUESTS_BYTES:
            return of_twin <= WAITING_REQUESTS_BYTES_OF_A_TWIN
        return of_twin <= WAITING_REQUESTS_BYTES_BEYOND and of_all <= 2 * WAITING_REQUESTS_BYTES

    async def _remove(self, commands: list[str]) -> None:
        """Remove the lists of ``commands``, if Redis is there; otherwise they expire."""
        with suppress(RedisAway, RedisRefused):
            await self._lists.forget([key for key in map(list_of, commands) if key is not None])

    def _handed(self, result: object, twin: int, size: int) -> object:
        self._all_waiting_bytes -= size
        self._waiting_bytes[twin] -= size
        if not self._waiting_bytes[twin]:
            del self._waiting_bytes[twin]
        return result

    async def _hand(self, request: Accepted, command: str, key: str, size: int) -> None:
        try:
            answer = await self._push(request, command, key, size)
        except CancelledError:
            answer = PeerCode.BUSY, "the peer stops"
        if answer is not None:
            self._refuse(request, *answer)

    async def _push(self, request: Accepted, command: str, key: str, size: int) -> tuple[int, str] | None:
        """Push ``request``, retrying until it expires; returns the error to answer if it cannot be pushed."""
        data = IncomingRequest.of(request.envelope, request.payload).to_json()
        twin, held = request.source.twin, max(size, len(data))
        made, contents = self._commands.list_made(command), self._commands.contents(command)
        own, length = contents.of(twin), 0
        contents.push(twin, held)
        ends_at = self._clock.seconds() + request.remaining_s
        try:
            while (left_s := ends_at - self._clock.seconds()) > 0:
                try:
                    length = await self._lists.push_if_room(
                        key,
                        data,
                        most=KEPT_REQUESTS,
                        most_bytes=KEPT_REQUESTS_BYTES,
                        own=own,
                        keep_s=KEEP_COMMAND_S,
                        wait_s=left_s,
                    )
                except RedisAway as away:
                    if away.maybe_done:  # a second push could make the service run it twice
                        return _UNCERTAIN
                except CancelledError:
                    if self._lists.redis.problem:
                        raise
                    return _UNCERTAIN  # while there is a connection, Redis has the command
                except RedisRefused:
                    return PeerCode.OTHER, "other: the service cannot be reached"
                else:
                    if length < 0:
                        contents.found(-length)
                        return PeerCode.BUSY, "too many requests are waiting for the service"
                    self._commands.pushed(command, made, twin, held, length, self._clock.seconds())
                    return None
                await self._retries.turn(ends_at - self._clock.seconds())
            return None
        finally:
            if length > 0:
                contents.pushed(twin, held, length)
            else:
                contents.not_pushed(twin, held)

    def _answer_ourselves(self, request: Accepted, command: str) -> None:
        if command == f"{OWN}version":
            try:
                self._exchange.respond(request, json.dumps(VERSION).encode(), _JSON)
            except CallError as error:
                self._complain("an answer was not sent: {why}", error.own_text)
        else:
            self._refuse(request, PeerCode.UNKNOWN_COMMAND, _UNKNOWN)

    def _refuse(self, request: Accepted, code: int, text: str) -> None:
        try:
            self._exchange.refuse(request, code, text)
        except CallError as error:
            self._complain("an answer was not sent: {why}", error.own_text)

    def _complain(self, text: str, why: str) -> None:
        """Log a problem, a few times a minute at most."""
        if self._complaints.take(self._clock.seconds()):
            _log.info(text, why=why)

    # --- answers -----------------------------------------------------------------------------------------------------

    async def room(self) -> bool:
        """Whether more answers may be taken from their list. Until relays take the earlier ones, they are safe there."""
        if not self._has_room:
            await self._room.wait_at_most(ROOM_S, self._clock)
        return self._has_room

    @property
    def _has_room(self) -> bool:
        mine = self._sending_bytes < LOOKED_UP_BYTES and self._undone_bytes < UNDONE_BYTES
        return mine and self._exchange.takes_answers

    def answers_have_room(self) -> None:
        """See :class:`~dmsg.rmb.client.exchange.ExchangeOwner`."""
        self._room.fire(None)

    def take(self, data: bytes, done: Callable[[], object]) -> None:
        """Send an answer from :data:`~dmsg.rmb.peer.commands.REPLY`; call ``done()`` when a relay has it or it cannot be sent.

        ``done()`` is not called if the peer stops before: then the next process sends the answer.
        """
        try:
            envelope = OutgoingResponse.from_json(data).envelope()
        except InvalidMessage as invalid:
            self._complain("a service's answer is none: {why}", invalid.problem)
            done()
        else:
            size = len(data) + _REQUEST_BYTES
            self._sending_bytes += size
            self._undone_bytes += size

            def over() -> None:
                self._undone_bytes -= size
                self._room.fire(None)
                done()

            self._sends.begin(self._send(envelope, size, over))

    async def _send(self, envelope: Envelope, size: int, done: Callable[[], object]) -> None:
        try:
            try:
                await self._send_in_time(envelope, size, done)
            except EnvelopeTooLarge:
                refusal = Envelope(uid=envelope.uid, destination=envelope.destination)
                refusal.error.code, refusal.error.message = ANSWER_TOO_LARGE.code, ANSWER_TOO_LARGE.message
                await self._exchange.send(refusal, done)
        except CallError as error:
            self._complain("a service's answer was not sent: {why}", error.own_text)
            done()

    async def _send_in_time(self, envelope: Envelope, size: int, done: Callable[[], object]) -> None:
        """Send an answer. While the registry fails, retry until the answer expires."""
        try:
            await self._exchange.send(envelope, done)
            return
        except RegistryFailed:
            if self._retried_bytes + size > LOOKED_UP_BYTES:
                raise
        finally:
            self._sending_bytes -= size
            self._room.fire(None)
        self._retried_bytes += size
        ends_at = self._clock.seconds() + min(envelope.expiration, MAX_TTL_S)
        try:
            while True:
                await deferLater(self._clock, LOOK_UP_AGAIN_S)
                try:
                    await self._exchange.send(envelope, done)
                    return
                except RegistryFailed:
                    if self._clock.seconds() + LOOK_UP_AGAIN_S > ends_at:
                        raise
        finally:
            self._retried_bytes -= size

    async def stop(self, patience_s: float) -> None:
        """Refuse the requests that Redis does not have after ``patience_s``. Call it while the exchange still runs."""
        await self._sends.end(patience_s, self._clock)
        await self._hands.end(patience_s, self._clock)  # last, because requests come until the exchange stops
