"""Envelopes of one session over several relays: requests that are answered or fail in time, and answers to requests.

:class:`~dmsg.rmb.client.service.RmbClient` and the peer that serves Redis are built on it. It handles envelopes, keys, the
registry and the relays; its owner handles commands.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, Final
from typing import Protocol as TypingProtocol

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.crypto.keys import Random
from dmsg.errors import DmsgError
from dmsg.glue.waiters import Waiters
from dmsg.glue.websocket import connect_websocket
from dmsg.interfaces import IEventLog
from dmsg.rmb.client.answers import Answers
from dmsg.rmb.client.calls import Call, Calls
from dmsg.rmb.client.config import RmbConfig
from dmsg.rmb.client.connection import Connect, RelayConnection
from dmsg.rmb.client.errors import (
    CallRefused,
    CallTimeout,
    EncryptionFailed,
    EnvelopeTooLarge,
    NoEncryptionKey,
    RegistryFailed,
    Stopped,
    TooMuchUnderWay,
    TwinUnknown,
)
from dmsg.rmb.client.intake import Intake
from dmsg.rmb.client.introduction import Introduction
from dmsg.rmb.client.record import SessionRecord
from dmsg.rmb.client.relays import Again, Parcel, Relays
from dmsg.rmb.core import errors as wrong
from dmsg.rmb.core.acceptance import Receiver, check_texts
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.keys import TwinKey
from dmsg.rmb.core.lifetime import remaining
from dmsg.rmb.core.limits import DEFAULT_TTL_S, MAX_ENVELOPE_BYTES
from dmsg.rmb.core.messages import ANSWER_TOO_LARGE
from dmsg.rmb.core.replies import bounded_text, error_reply, response
from dmsg.rmb.core.sender import Sender
from dmsg.rmb.core.token import make_token
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope, outline, parse_envelope
from dmsg.rmb.interfaces import ITwinRegistry
from dmsg.rmb.twins.errors import RegistryError
from dmsg.sansio.jitter import Jitter
from dmsg.sansio.rate import TokenBucket
from dmsg.sansio.websocket import WebSocketConfig

_log = Logger()
#: Errors per second with which refused requests are answered: forged requests cannot make us sign more than this.
_REFUSALS_PER_S: Final = 200.0
_REGISTRY_FAILED: Final = "other: failed to get twin information"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The outline of an envelope that has passed every check. ``payload`` is decrypted; ``twin`` is the sender.

    ``twin`` is ``None`` for an error of a relay, which has no signature. ``relay`` is the URL of the relay over which it came,
    ``sealed`` says whether the payload came encrypted.
    """

    envelope: Envelope
    payload: bytes
    source: SessionAddress
    twin: Twin | None
    relay: str
    remaining_s: int
    sealed: bool = False


class ExchangeOwner(TypingProtocol):
    """Receives the requests, and the answers that no coroutine awaits."""

    def request_received(self, request: Accepted) -> None:
        """A request came. Answer it with :meth:`Exchange.respond`, or with :meth:`Exchange.send`."""

    def is_awaited(self, uid: str, twin: int) -> bool:
        """Whether the owner waits for an answer ``uid`` of ``twin`` to a request that this exchange has not sent.

        ``twin`` is 0 for an error of a relay. Other answers are dropped unread.
        """

    def answer_received(self, answer: Accepted) -> None:
        """An answer came for which :meth:`is_awaited` was true."""

    def answers_have_room(self) -> None:
        """Relays have taken answers: :attr:`Exchange.takes_answers` is true again."""


class Exchange:
    """Sends and receives the envelopes of one session of one twin.

    ``relays`` are one to four URLs (``ws://`` or ``wss://``). ``session`` is the name of the connection; callers that name
    none reach the session ``None``, the default, which one program at a time may have. ``publish`` are the hosts of our
    relays to be put into the registry, with our encryption key. ``True`` keeps the hosts that are there, or publishes those
    of ``relays`` if there are none; ``False`` publishes nothing. ``allow_plain`` sends unencrypted payloads to twins without
    a key, and accepts them from all twins. ``now_s()`` is Unix time.
    """

    def __init__(
        self,
        reactor: Any,
        key: TwinKey,
        registry: ITwinRegistry,
        relays: Sequence[str],
        owner: ExchangeOwner,
        *,
        session: str | None = None,
        publish: bool | Sequence[str] = True,
        allow_plain: bool = False,
        config: RmbConfig | None = None,
        events: IEventLog | None = None,
        random: Random = os.urandom,
        now_s: Callable[[], float] = time.time,
        connect: Connect | None = None,
    ) -> None:
        if isinstance(publish, str):
            raise TypeError(f'publish is a list of hosts, as ["relay.example"], not {publish!r}')
        self.config = config = config or RmbConfig()
        #: Our twin's number and session; the number is 0 until :meth:`find` has found it.
        self.address = SessionAddress(0, session)
        #: Fires whenever a relay is connected or lost.
        self.relays_change: Waiters[None] = Waiters()
        #: What asks the registry for our twin, once it does.
        self.introduction: Introduction | None = None
        self._clock = reactor
        self._key = key
        self._publish = publish
        self._registry = registry
        self._owner = owner
        self._allow_plain = allow_plain
        self._record = SessionRecord(reactor, events)
        self._random = random
        self._now_s = now_s
        self._uniform = Jitter(random).random
        if connect is None:
            limits = WebSocketConfig(max_message_bytes=MAX_ENVELOPE_BYTES)
            connect = partial(
                connect_websocket, reactor, config=limits, timeout_s=config.connect_timeout_s, random=random
            )
        self.relays = Relays(
            reactor, relays, self, connect=connect, token=self._make_token, uniform=self._uniform, config=config
        )
        self._answers = Answers(reactor, self.relays, config.answers, config.answers_bytes, owner.answers_have_room)
        self._calls: Calls[Accepted] = Calls(config.calls, config.calls_bytes)
        self._refusals = TokenBucket(_REFUSALS_PER_S, _REFUSALS_PER_S, reactor.seconds())
        #: The names of our relays in the registry. A relay must have one of them as its own, or envelopes to us go elsewhere.
        self._relay_names: frozenset[str] = frozenset()
        self._is_published = False
        self._publishing: Deferred[None] | None = None
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._intake = Intake(config.lookups, config.lookups_bytes)
        self._found: Waiters[None] = Waiters()
        self._stopped = True

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """:meth:`find` our own twin, and :meth:`connect`."""
        await self.find()
        self.connect()

    async def find(self) -> None:
        """Find our own twin in the registry, and publish our relays and encryption key if ``publish`` says so.

        The registry is asked until it answers. Publishing is awaited only if the registry does not have our key yet, because
        others cannot write to us without it. Requests may be made before; they wait, and fail with what this
        raises: :class:`~dmsg.rmb.client.errors.NoTwin`, or ``InvalidTwin`` for relays that cannot be published.
        """
        self._stopped = False
        try:
            await self._find()
        except DmsgError as error:
            self._found.fail(error)
            raise
        self._found.fire(None)

    async def _find(self) -> None:
        ours = EncryptionKey(self._key.secret)
        hosts = () if isinstance(self._publish, bool) else self._publish
        places = self.relays.places()
        self.introduction = introduction = Introduction(
            self._clock, self._key, self._registry, ours.public_key, hosts=hosts, places=places, uniform=self._uniform
        )
        twin = await introduction.find()
        self.address = self.address._replace(twin=twin.id)
        self._relay_names = frozenset(name.lower() for name in (*twin.relays, *hosts))
        self._is_published = twin.pk == ours.public_key
        if self._publish is not False:
            self._publishing = ensureDeferred(introduction.publish(twin))
            if not self._is_published:
                await self._publishing
                self._is_published = True
            self._publishing.addErrback(_not_published)
        encryption = ours if self._is_published else None
        self._sender = Sender(self.address, self._key, encryption, self._random, allow_plain=self._allow_plain)
        self._receiver = Receiver(self.address, encryption, self._is_awaited_of_relays, allow_plain=self._allow_plain)

    def connect(self) -> None:
        """Begin to connect to the relays, which then send what they have stored for us. Call it after :meth:`find`."""
        if not self._stopped:
            self.relays.start()

    async def stop(self) -> None:
        """End everything: calls fail with :class:`~dmsg.rmb.client.errors.Stopped`, and answers already given are written."""
        self._stopped = True
        self._calls.stop()
        self._found.cancel()
        if self._publishing is not None:
            self._publishing.cancel()
        self._intake.cancel()
        await self.relays.stop()
        self._answers.stop()
        self.relays_change.fire(None)

    def _make_token(self, relay: RelayConnection) -> str:
        """A token for ``relay``. If the registry has the name in its URL, the relay cannot use the token elsewhere."""
        name = next((one for one in (relay.place, relay.host) if one in self._relay_names), None)
        return make_token(self._key, *self.address, int(self._now_s()), audience=name)

    # --- requests ----------------------------------------------------------------------------------------------------

    @property
    def takes_calls(self) -> bool:
        """Whether a request of any size may begin."""
        return self._calls.has_room(MAX_ENVELOPE_BYTES)

    async def request(self, envelope: Envelope, timeout_s: float, *, once: bool = False) -> Accepted:
        """Send a request and return the answer; raises a ``CallError`` when there is none within ``timeout_s``.

        A request whose relay is lost goes over another relay, unless ``once``.

        ``envelope`` has uid, destination, command and ``plain``, and optionally tags, schema, timestamp and expiration; an
        expiration of 0 is replaced by the timeout. This method fills in the other fields. Cancelling forgets the request.
        """
        target = SessionAddress.of(envelope.destination)
        if self._stopped:
            raise Stopped(target)
        call = self._calls.begin(envelope.uid, target, len(envelope.plain))
        call.work = work = ensureDeferred(self._request(envelope, call, timeout_s, once))
        try:
            return await work.addTimeout(timeout_s, self._clock, lambda *_: self._timed_out(call, timeout_s))
        except CancelledError:
            if call.parcel is None and call.answer.called:  # stopped while its twin was looked up
                return await call.answer
            raise
        finally:
            self._calls.end(envelope.uid)
            if call.parcel is not None:
                self.relays.drop(call.parcel)

    async def _request(self, envelope: Envelope, call: Call[Accepted], timeout_s: float, once: bool) -> Accepted:
        ends_at = self._clock.seconds() + timeout_s
        if not envelope.expiration:
            now = self._now_s()
            envelope.timestamp = int(now)
            envelope.expiration = ceil(now + timeout_s) - int(now)
        call.twin = twin = await self._look_up(call.target)
        data = self._seal(envelope, twin, call.target)
        again = Again.NEVER if once else Again.ALWAYS
        call.parcel = Parcel(data, ends_at, again=again, prefer=twin.relays)
        call.parcel.too_long = partial(self._request_too_long, envelope.uid, len(data))
        self.relays.post(call.parcel)
        return await call.answer

    def _timed_out(self, call: Call[Accepted], timeout_s: float) -> Failure:
        unfound = self.introduction.reason if self.introduction is not None and self._sender is None else ""
        return Failure(call.timed_out(timeout_s, self.relays.problems(), unfound))

    def _request_too_long(self, uid: str, size_bytes: int) -> None:
        call = self._calls.get(uid)
        if call is not None:
            call.fail(EnvelopeTooLarge(call.target, size_bytes))

    async def _look_up(self, target: SessionAddress) -> Twin:
        if self._sender is None:
            await self._found.wait()
        try:
            twin = await self._registry.get(target.twin)
        except RegistryError as error:
            raise RegistryFailed(target, error.reason) from error
        if twin is None:
            raise TwinUnknown(target)
        return twin

    # --- answers -----------------------------------------------------------------------------------------------------

    @property
    def takes_answers(self) -> bool:
        """Whether more answers should be made, because relays have taken enough of the earlier ones."""
        return self._answers.has_room

    def respond(self, request: Accepted, data: bytes, schema: str | None = None) -> None:
        """Answer ``request`` with ``data``. Raises the same errors as :meth:`send` for an answer that cannot be sent, and
        ``OverlongText`` for a ``schema`` that no receiver accepts.
        """
        answer = response(request.envelope, data, schema, _lifetime_s(request.envelope))
        check_texts(answer)
        self._answer(request, answer)

    def refuse(self, request: Accepted, code: int, text: str) -> None:
        """Answer ``request`` with an error; relays can read ``text``. Raises the same errors as :meth:`respond`."""
        self._answer(request, error_reply(request.envelope, code, text, _lifetime_s(request.envelope)))

    def _answer(self, request: Accepted, answer: Envelope) -> None:
        assert request.twin is not None
        if self._stopped:  # its handler has waited for that
            raise Stopped(SessionAddress.of(answer.destination))
        self._post_answer(answer, request.twin)

    async def send(self, envelope: Envelope, taken: Callable[[], object] | None = None) -> None:
        """Send an answer that was made elsewhere: uid, destination, response or error, ``plain`` and the rest.

        Returns when the answer is sent or waits for a relay. Raises a ``CallError`` that says why it cannot be sent. ``taken()``
        is called when a relay has taken it, or when it has expired, is replaced or is forgotten before; not if we stop while it
        waits.
        """
        target = SessionAddress.of(envelope.destination)
        if self._stopped:
            raise Stopped(target)
        self._post_answer(envelope, await self._look_up(target), taken)

    def _post_answer(self, answer: Envelope, twin: Twin, taken: Callable[[], object] | None = None) -> None:
        target = SessionAddress.of(answer.destination)
        data = self._seal(answer, twin, target)
        if answer.HasField("response") and not self._answers.fits(len(data)):
            raise TooMuchUnderWay(target)
        ends_at = self._clock.seconds() + answer.expiration
        parcel = Parcel(data, ends_at, again=Again.IF_UNCERTAIN, prefer=twin.relays)
        if answer.HasField("response"):
            parcel.too_long = partial(self._answer_too_long, answer.uid, target, twin)
        self._answers.post(target, answer.uid, parcel, taken)

    def _answer_too_long(self, uid: str, target: SessionAddress, twin: Twin) -> None:
        """No relay takes so long an answer: send an error in its place."""
        refusal = Envelope(uid=uid)
        target.write_to(refusal.destination)
        refusal.error.code, refusal.error.message = ANSWER_TOO_LARGE.code, ANSWER_TOO_LARGE.message
        self._post_answer(refusal, twin)

    def _seal(self, envelope: Envelope, twin: Twin, target: SessionAddress) -> bytes:
        assert self._sender is not None
        try:
            return self._sender.seal(envelope, twin.pk, int(self._now_s()))
        except wrong.NoReceiverKey:
            raise NoEncryptionKey(target, ours=not self._is_published) from None
        except wrong.E2eError as error:
            raise EncryptionFailed(target, error.problem) from None
        except wrong.EnvelopeTooLarge as error:
            raise EnvelopeTooLarge(target, error.size) from None
        except wrong.EnvelopeExpired:
            raise CallTimeout(target, 0.0, (), ("expired before it was sent",)) from None

    # --- what comes --------------------------------------------------------------------------------------------------

    def relay_connected(self, connection: RelayConnection) -> None:
        """See :class:`~dmsg.rmb.client.relays.RelaysOwner`."""
        self._record.opened(self.address, connection)
        self.relays_change.fire(None)

    def relay_lost(self, connection: RelayConnection, *, was_connected: bool) -> None:
        """See :class:`~dmsg.rmb.client.relays.RelaysOwner`."""
        self._record.closed(self.address, connection, was_connected=was_connected)
        self.relays_change.fire(None)

    def received(self, connection: RelayConnection, message: bytes) -> None:
        """See :class:`~dmsg.rmb.client.relays.RelaysOwner`."""
        if self._stopped:
            return
        try:
            envelope = parse_envelope(message)
        except wrong.MalformedEnvelope:
            return
        if envelope.WhichOneof("message") != "request" and not self._is_awaited(envelope):
            return
        self._intake.add(ensureDeferred(self._take(envelope, connection)), connection, len(message))

    def _is_awaited(self, envelope: Envelope) -> bool:
        twin = envelope.source.twin
        call = self._calls.get(envelope.uid)
        if call is not None:
            return twin in (0, call.target.twin)
        return self._owner.is_awaited(envelope.uid, twin)

    def _is_awaited_of_relays(self, uid: str) -> bool:
        return uid in self._calls or self._owner.is_awaited(uid, 0)

    async def _take(self, envelope: Envelope, connection: RelayConnection) -> None:
        receiver = self._receiver
        assert receiver is not None
        twin, payload, now_s = None, b"", self._now_s()
        try:
            number = receiver.admit(envelope, now_s)
            if number is not None:
                twin = await self._sender_of(envelope, number)
                now_s = self._now_s()  # the registry may have taken long
                payload = receiver.open(envelope, twin, now_s)
                if envelope.HasField("request") and not self._allow_plain:
                    self._check_answerable(twin)
        except wrong.Replayed:
            if envelope.HasField("request"):
                source = SessionAddress.of(envelope.source)
                self._answers.repeat(source, envelope.uid, envelope.signature, connection.url)
        except wrong.EnvelopeRefused as refused:
            self._refused(envelope, refused, connection)
        except RegistryError:
            why = wrong.EnvelopeRefused("registry failed", wrong.PeerCode.OTHER, _REGISTRY_FAILED)
            self._refused(envelope, why, connection)
        except CancelledError:
            return
        else:
            left = remaining(now_s, envelope.timestamp, envelope.expiration) or 1
            source = SessionAddress.of(envelope.source)
            sealed, signature = bool(envelope.HasField("cipher")), envelope.signature
            accepted = Accepted(outline(envelope), payload, source, twin, connection.url, left, sealed)
            self._accepted(accepted, signature, connection)

    async def _sender_of(self, envelope: Envelope, number: int) -> Twin | None:
        """The twin ``number``. If the registry fails, the answer to a call uses the twin that the call has looked up."""
        try:
            return await self._registry.get(number)
        except RegistryError:
            call = self._calls.get(envelope.uid)
            if call is None or call.twin is None or call.target.twin != number:
                raise
            return call.twin

    def _check_answerable(self, twin: Twin | None) -> None:
        """Refuse a request if its answer could not be encrypted: it should not be started."""
        if not self._is_published:
            raise wrong.NoKeyHere
        if twin is None or twin.pk is None:
            raise wrong.NoSenderKey

    def _accepted(self, accepted: Accepted, signature: bytes, connection: RelayConnection) -> None:
        envelope = accepted.envelope
        kind = envelope.WhichOneof("message")
        if kind == "request":
            ends_at = self._clock.seconds() + accepted.remaining_s
            self._answers.accepted(accepted.source, envelope.uid, signature, connection.url, ends_at)
            self._owner.request_received(accepted)
            return
        call = self._calls.get(envelope.uid)
        if call is None:
            if self._owner.is_awaited(envelope.uid, accepted.source.twin):
                self._owner.answer_received(accepted)
        elif call.answer.called:
            return
        elif kind == "response":
            call.answer.callback(accepted)
        elif kind == "error":
            error, parcel = envelope.error, call.parcel
            by_relay = accepted.twin is None
            if by_relay and parcel is not None and self.relays.post_elsewhere(parcel, connection, error.message):
                return
            text, at = bounded_text(error.message), envelope.timestamp
            schema = envelope.schema if envelope.HasField("schema") else None
            call.fail(CallRefused(call.target, error.code, text, accepted.source, timestamp=at, schema=schema))

    def _refused(self, envelope: Envelope, refused: wrong.EnvelopeRefused, connection: RelayConnection) -> None:
        """An envelope is refused: answer a request with an error, or note the reason for the call that awaits the answer."""
        if envelope.WhichOneof("message") != "request":
            call = self._calls.get(envelope.uid)
            if call is not None:
                call.note_refused(refused.reason)
        elif refused.code is not None and connection.has_room and self._refusals.take(self._clock.seconds()):
            answer = error_reply(envelope, refused.code, refused.text)
            assert self._sender is not None
            with suppress(wrong.EnvelopeTooLarge):
                connection.send(self._sender.seal(answer, None, int(self._now_s())))


def _not_published(failure: Failure) -> None:
    if not failure.check(CancelledError):
        _log.warn("our relays are not published: {error}", error=failure.value)


def _lifetime_s(request: Envelope) -> int:
    """How long an answer is valid: the whole lifetime of its request, so that it does not depend on the two clocks."""
    return request.expiration or DEFAULT_TTL_S
