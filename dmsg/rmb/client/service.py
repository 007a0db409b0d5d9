"""A client of the Reliable Message Bus.

It calls commands of other twins, and serves its own. ::

    client = RmbClient(reactor, key, registry, ["wss://relay.example"])

    @client.service("greet")
    async def greet(request):
        return b"hello, " + request.data

    client.startService()
    answer = await client.call(7, "calculator.add", b"[1, 2]", timeout=10)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import UUID

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.clients.errors import ClientStopped
from dmsg.crypto.keys import Random
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import CallFinished
from dmsg.glue.tasks import to_the_end
from dmsg.glue.waiters import Waiters
from dmsg.interfaces import IEventLog
from dmsg.rmb.client.config import RmbConfig
from dmsg.rmb.client.connection import Connect
from dmsg.rmb.client.errors import CallError, EnvelopeTooLarge, Refusal
from dmsg.rmb.client.exchange import Accepted, Exchange
from dmsg.rmb.client.handlers import H, Handlers, Reply, Request
from dmsg.rmb.core.acceptance import check_texts
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import OverlongText, PeerCode
from dmsg.rmb.core.keys import TwinKey
from dmsg.rmb.core.limits import MAX_CONNECTION_BYTES, MAX_TTL_S
from dmsg.rmb.core.wire import Envelope
from dmsg.rmb.interfaces import ITwinRegistry

_log = Logger()


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a call. ``source`` is the session of the called twin that answered, proved by its signature."""

    data: bytes
    schema: str | None
    source: SessionAddress


class RmbClient(Service):
    """Calls commands of other twins, and serves its own, over one to four relays, as a Twisted service.

    ``session`` is the name of this connection. Callers that name none reach the session ``None``, the default, which one
    program of a twin at a time may have; a program that only calls should take a name of its own. ``publish`` are the hosts
    of our relays to be put into the registry, with our encryption key. ``True`` keeps the hosts that are there, or publishes
    those of ``relays`` if there are none; ``False`` publishes nothing. ``allow_plain`` sends unencrypted payloads to twins
    without a key, and accepts them from all twins. The caller opens and closes the registry. ``connect`` opens WebSockets; set
    it for relays with a private certificate, otherwise it is :func:`~dmsg.glue.websocket.connect_websocket`. Raises
    ``ConfigError`` for another number of relays, ``InvalidAddress`` for what is no URL of one, and ``TypeError`` for ``relays``
    or a ``publish`` that is text.
    """

    def __init__(
        self,
        reactor: Any,
        key: TwinKey,
        registry: ITwinRegistry,
        relays: Sequence[str],
        *,
        session: str | None = None,
        allow_plain: bool = False,
        publish: bool | Sequence[str] = True,
        config: RmbConfig | None = None,
        events: IEventLog | None = None,
        random: Random = os.urandom,
        now_s: Callable[[], float] = time.time,
        connect: Connect | None = None,
    ) -> None:
        self.reactor = reactor
        self.config = config = config or RmbConfig()
        self.exchange = Exchange(
            reactor,
            key,
            registry,
            relays,
            self,
            session=session,
            publish=publish,
            allow_plain=allow_plain,
            config=config,
            events=events,
            random=random,
            now_s=now_s,
            connect=connect,
        )
        self._events = events
        self._random = random
        self._handlers = Handlers(reactor, config, lambda: self.exchange.takes_answers)
        self._ready: Waiters[None] = Waiters()
        self._is_ready = False
        self._stopping = False
        self._stops = 0  # calls of stopService that are under way
        self._failure: Failure | None = None
        self._work: Deferred[None] | None = None

    # --- service -----------------------------------------------------------------------------------------------------

    def startService(self) -> None:
        """Begin to connect; nothing happens if the client runs already.

        A client that is still stopping, because the wait for that was cancelled, begins once it has stopped.
        """
        if self.running and self._failure is None:
            return
        super().startService()  # type: ignore[no-untyped-call]
        self._is_ready, self._failure = False, None
        if not self._stops:
            self._begin()

    def _begin(self) -> None:
        self._stopping = False
        self._handlers.start()
        self._work = ensureDeferred(self._start())

    def stopService(self) -> Deferred[None]:
        """Give handlers a moment to end, fail calls without an answer, and disconnect.

        A handler that waits for it gets the moment too, ``RmbConfig.stop_timeout_s``, and its answer is not sent: there, call it
        in a later turn of the reactor and return. Cancelling the Deferred, or a timeout of it, ends only the wait: the client
        goes on stopping, and its handlers are cancelled.
        """
        super().stopService()  # type: ignore[no-untyped-call]
        return ensureDeferred(self._stop())

    async def _start(self) -> None:
        try:
            await self.exchange.start()
            self._is_ready = True
            self._ready.fire(None)
        except CancelledError:
            return
        except Exception:  # the program decides: when_ready() raises it to each that waits
            self._failure = Failure()
            _log.error("the client cannot work: {error}", error=self._failure.getErrorMessage())
            self._ready.fire(self._failure)

    async def _stop(self) -> None:
        self._stopping = True
        self._stops += 1
        if self._work is not None:
            self._work.cancel()
        try:
            await self._handlers.stop(self.config.stop_timeout_s)
        finally:
            ended = to_the_end(self._end())  # also after a cancel
        await ended

    async def _end(self) -> None:
        try:
            await self.exchange.stop()
        finally:
            self._stops -= 1
            if not self.running:
                self._ready.fail(ClientStopped())
            elif not self._stops:
                self._begin()  # it was started again meanwhile

    def when_ready(self) -> Deferred[None]:
        """Fires once our twin is known, its key is published and a relay is connected.

        Fails with :class:`~dmsg.rmb.client.errors.NoTwin` when there is no twin with our key, with ``InvalidTwin`` for hosts
        that the registry cannot hold, and with ``ClientStopped`` when the client stops before, or has stopped.
        """
        return ensureDeferred(self._when_ready())

    async def _when_ready(self) -> None:
        while True:
            if self._failure is not None:
                self._failure.raiseException()
            if self._stopping and not self.running:
                raise ClientStopped
            if not self._is_ready:
                await self._ready.wait()
            elif self.exchange.relays.is_connected:
                return
            else:
                await self.exchange.relays_change.wait()

    def problems(self) -> dict[str, str]:
        """Why :meth:`when_ready` still waits, for people: the problem of each relay by its URL, that of the registry under "".

        No relay is tried before the registry has our twin and our key.
        """
        introduction = self.exchange.introduction
        registry = introduction.problem if introduction is not None else ""
        if not self._is_ready:
            return {"": registry or "the registry of twins: no answer yet"}
        return self.exchange.relays.problems() | ({"": registry} if registry else {})

    @property
    def twin(self) -> int:
        """The number of our twin; 0 until it is known."""
        return self.exchange.address.twin

    # --- calls -------------------------------------------------------------------------------------------------------

    async def call(
        self,
        twin: int,
        command: str,
        data: bytes = b"",
        *,
        timeout: float | None = None,
        session: str | None = None,
        schema: str | None = None,
        tags: str | None = None,
        once: bool = False,
    ) -> Answer:
        """Call ``command`` of ``twin`` with ``data``, and return its answer. May be called before a relay is connected.

        ``timeout`` is in seconds, from now on. ``session`` names one connection of the twin, ``schema`` the MIME type of
        ``data``. With the tag ``fail-fast`` a relay answers at once when the twin is offline; otherwise the request waits for
        the twin. A request whose relay dies before the answer comes, or fails and may have passed the request on, is sent over
        another relay; programs of this project recognise the duplicate and run ``command`` once. ``once`` prevents the second
        request, for public programs that must not run ``command`` twice.

        It always ends in time: with an answer, or with a :class:`~dmsg.rmb.client.errors.CallError` that says why. In a client
        that cannot work it ends with the error of :meth:`when_ready`. Raises ``ValueError`` for a number, ``timeout`` or text
        that no call can have, such as a text that is too long, and ``TypeError`` for ``data`` that is not ``bytes``.

        Cancelling forgets the call, and takes back a request that no relay has yet.
        """
        timeout_s = self.config.call_timeout_s if timeout is None else timeout
        if not 0 < timeout_s < MAX_TTL_S:
            raise ValueError(f"a call takes more than 0 and less than {MAX_TTL_S} s")
        uid = str(UUID(bytes=self._random(16), version=4))
        envelope = Envelope(uid=uid, plain=data)
        envelope.request.command = command
        SessionAddress(twin, session).write_to(envelope.destination)
        if schema is not None:
            envelope.schema = schema
        if tags is not None:
            envelope.tags = tags
        try:
            check_texts(envelope)
            if len(envelope.destination.connection.encode()) > MAX_CONNECTION_BYTES:
                raise OverlongText("session")
        except OverlongText as error:
            raise ValueError(f"the {error.field} is too long") from None
        if self._failure is not None:
            self._failure.raiseException()
        started_s = self.reactor.seconds()
        reason = Reason.OTHER
        try:
            answer = await self.exchange.request(envelope, timeout_s, once=once)
            reason = Reason.NONE
        except CallError as error:
            reason = Reason.of(error.reason)
            raise
        except CancelledError:
            reason = Reason.CANCELLED
            raise
        finally:
            if self._events is not None:
                elapsed_ms = (self.reactor.seconds() - started_s) * 1000
                self._events.emit(CallFinished(twin, reason is Reason.NONE, reason, elapsed_ms))
        envelope = answer.envelope
        return Answer(answer.payload, envelope.schema if envelope.HasField("schema") else None, answer.source)

    # --- commands ----------------------------------------------------------------------------------------------------

    def service(self, command: str) -> Callable[[H], H]:
        """Decorates an ``async`` function that serves ``command``: it gets a :class:`~dmsg.rmb.client.handlers.Request`, and
        returns ``bytes`` or a :class:`~dmsg.rmb.client.handlers.Reply`.

        To answer with an error it raises :class:`~dmsg.rmb.client.errors.Refusal`. Other exceptions are logged, and the caller
        is told only that the command failed. The function is cancelled when the request expires.

        Raises ``ValueError`` if ``command`` is served already, and ``TypeError`` for what cannot be called.

        It gets each request once; a program that was started again may get one once more that it had before, with the same
        ``uid``, if the caller has lost a relay.
        """

        if not isinstance(command, str):  # the function itself, under @client.service without a command
            raise TypeError(f'a command is text, as in @client.service("greet"), not {command!r}')

        def add(handler: H) -> H:
            if not callable(handler):
                raise TypeError(f"a handler is a function, not {handler!r}")
            self._handlers.add(command, handler)
            return handler

        return add

    def request_received(self, request: Accepted) -> None:
        """See :class:`~dmsg.rmb.client.exchange.ExchangeOwner`."""
        envelope = request.envelope
        self._handlers.take(
            Request(
                envelope.request.command,
                request.payload,
                request.source,
                envelope.uid,
                envelope.schema if envelope.HasField("schema") else None,
                envelope.tags,
                request.sealed,
                request.remaining_s,
            ),
            partial(self._respond, request),
        )

    def _respond(self, request: Accepted, answer: Reply | Refusal) -> None:
        if isinstance(answer, Reply):
            try:
                self.exchange.respond(request, answer.data, answer.schema)
                return
            except EnvelopeTooLarge:
                answer = _TOO_LARGE
            except CallError as error:
                answer = Refusal(error.code, error.message)
        with suppress(CallError):
            self.exchange.refuse(request, answer.code, answer.text)

    def is_awaited(self, uid: str, twin: int) -> bool:
        """See :class:`~dmsg.rmb.client.exchange.ExchangeOwner`: only answers to calls are awaited."""
        return False

    def answer_received(self, answer: Accepted) -> None:
        """See :class:`~dmsg.rmb.client.exchange.ExchangeOwner`."""

    def answers_have_room(self) -> None:
        """See :class:`~dmsg.rmb.client.exchange.ExchangeOwner`."""
        self._handlers.go_on()


_TOO_LARGE: Final = Refusal(PeerCode.HANDLER_FAILED, "the answer is too large")
