"""Accepts envelopes that other relays post: ``POST /``.

:ref:`spec-rmb-ingest`. By default only relays that this one knows may post. If it is open to all, it checks the signature of
each envelope against its source's account, so that strangers can only hand on what a twin has written to another twin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import Any, Final

from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

from dmsg.errors import DmsgError
from dmsg.eventlog.reasons import Reason
from dmsg.http.server import ask_later, client_host
from dmsg.rmb.core.errors import BadSignature, MalformedEnvelope, RelayProblem
from dmsg.rmb.core.lifetime import remaining
from dmsg.rmb.core.limits import MAX_CONNECTION_BYTES, MAX_ENVELOPE_BYTES
from dmsg.rmb.core.signing import verify_envelope
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope, parse_envelope
from dmsg.rmb.relay.errors import NotTrusted, Refused
from dmsg.rmb.relay.federation import ACCEPTED
from dmsg.rmb.relay.lanes import Room
from dmsg.rmb.relay.lookups import LookUps
from dmsg.rmb.relay.peering import BATCH_BYTES, HEADER, Body, Verifier, join_statuses, split_envelopes
from dmsg.rmb.relay.posting import ONE_TYPE
from dmsg.serving.admission import Origin

#: Most envelopes in a post.
MOST_ENVELOPES: Final = 1024
#: Look-ups of twins for one known relay at a time. A post may have 1,024 envelopes for as many twins. That is more than a
#: registry that asks a chain will queue, and it would refuse the look-ups of others.
LOOK_UPS_PER_RELAY: Final = 32
#: Posts of strangers that wait for look-ups or the store at a time; a network may have as many as it leaves free. So it has more
#: than look-ups, and known relays have places for the bodies of their posts (:mod:`dmsg.rmb.relay.api`).
UNDECIDED_POSTS: Final = 48
#: Bytes of the envelopes' lengths in a post.
_LENGTHS_BYTES: Final = 4 * MOST_ENVELOPES
#: Seconds after which envelopes are refused that the registry and the store have not decided: the other relay gives up after
#: 3 s, and would send all of the post again.
DECIDED_S: Final = 2.0
_GIVEN_UP: Final = Refused(503, RelayProblem.OVERLOADED.text, Reason.TIMEOUT)
_log = Logger()
_TOO_MANY: Final = 429
_HEADER: Final = HEADER.encode()
_TEXT: Final = b"text/plain; charset=utf-8"

#: Hands on an envelope, and its bytes, for a twin of this relay; if the last argument is true, only to a connected session.
#: Returns the HTTP status, now or later: 202 if the envelope was accepted, 404 if the destination is offline.
Accept = Callable[[Envelope, bytes, bool], "int | Deferred[int]"]
_LookUp = Callable[[int], Coroutine[Any, Any, "Twin | None"]]
_Take = Callable[[bytes], Coroutine[Any, Any, int]]


def body_limit(message_bytes: int) -> int:
    """The longest body of a post, if an envelope may have ``message_bytes``."""
    return max(message_bytes, BATCH_BYTES) + _LENGTHS_BYTES


class Ingest(Resource):
    """Answers ``POST /``; :mod:`dmsg.rmb.relay.api` selects these requests.

    ``registry`` is an :class:`~dmsg.rmb.interfaces.ITwinRegistry`, ``domains`` are this relay's names. With
    ``open_to_all`` relays without a good header may post too, one envelope at a time. ``admit(host)`` limits their rate.
    ``flush()`` is called once for all envelopes of a post that are handed on at once, and later for each of the others.
    ``refused(host, why)`` is called for each refusal.
    """

    isLeaf = True

    def __init__(
        self,
        accept: Accept,
        registry: Any,
        verifier: Verifier,
        unix_time: Callable[[], float],
        *,
        domains: Collection[str],
        open_to_all: bool = False,
        clock: IReactorTime,
        admit: Callable[[str], bool] = lambda host: True,
        flush: Callable[[], None] = lambda: None,
        refused: Callable[[str, Reason], None] = lambda host, why: None,
        message_bytes: int = MAX_ENVELOPE_BYTES,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._accept = accept
        self._of_relays = LookUps(registry, LOOK_UPS_PER_RELAY, clock=clock)
        self._of_strangers = LookUps(registry, clock=clock)
        #: The posts of strangers that are not decided, by their networks.
        self._undecided = Room(UNDECIDED_POSTS)
        self._verifier = verifier
        self._unix_time = unix_time
        self._domains = frozenset(domain.lower() for domain in domains)
        self._open = open_to_all
        self._clock = clock
        self._admit = admit
        self._flush = flush
        self._refused = refused
        self._message_bytes = message_bytes

    def render(self, request: Any) -> int:
        """Begin to answer ``request``."""
        request.notifyFinish().addErrback(lambda _: None)  # the envelopes are handed on even if the client goes away
        host = client_host(request)
        content = request.content.getvalue()
        stranger = Origin.of(host).network
        try:
            kind, relay = self._kind(request.getHeader(_HEADER), content, host)
            if not relay and not self._undecided.has(stranger, 1):
                raise Refused(_TOO_MANY, "too many requests", Reason.LIMITS_EXCEEDED)
            envelopes = [content] if kind is Body.ONE else split_envelopes(content, MOST_ENVELOPES)
        except Refused as error:
            self._refused(host, error.why)
            self._respond(request, error.status, str(error).encode())
        except MalformedEnvelope:
            self._refused(host, Reason.ENVELOPE_MALFORMED)
            self._respond(request, 400, b"bad request: malformed")
        else:
            if not relay:
                self._undecided.take(stranger, 1)
            take = partial(
                self._take, look_up=self._look_up_of(relay, stranger), trusted=bool(relay), only=kind is Body.CONNECTED
            )
            outcomes: list[int | Refused] = [_GIVEN_UP] * len(envelopes)
            left, pending = deque(enumerate(envelopes)), []
            while left:  # start another task whenever the one before has to wait
                taking = Deferred.fromCoroutine(self._take_some(left, take, outcomes))
                if not taking.called:
                    pending.append(taking)
            self._flush()
            for taking in pending:  # it may have been handed on now
                taking.addCallback(lambda _: self._flush())
            deadline = self._clock.callLater(DECIDED_S, _cancel, pending) if pending else None
            decided = DeferredList(pending, consumeErrors=True)
            if not relay:
                decided.addCallback(lambda _: self._undecided.give_back(stranger, 1))
            decided.addCallback(lambda _: self._decided(outcomes, request, host, kind, deadline))
            decided.addErrback(lambda failure: _log.failure("a post from another relay failed", failure))
        return NOT_DONE_YET

    def _kind(self, header: bytes | None, content: bytes, host: str) -> tuple[Body, str]:
        """The kind of the body, and the name of the relay that has posted it ("" if unknown); raises ``Refused``."""
        try:
            said = self._verifier.check(header, content, self._unix_time())
            return said.body, said.relay
        except NotTrusted as error:
            # Unknown relays are rate-limited even where they may not post, because refusing takes time too. A 401 is final.
            if error.why is Reason.LIMITS_EXCEEDED or not self._admit(host):
                raise Refused(_TOO_MANY, "too many requests", Reason.LIMITS_EXCEEDED) from None
            if not self._open or error.why is Reason.REPLAYED:
                raise Refused(401, "only relays that know each other may post here", error.why) from None
            return Body.ONE, ""

    def _look_up_of(self, relay: str, stranger: str) -> _LookUp:
        """The function that looks up twins for the sender of a post: a known relay, or the network of a stranger."""
        if relay:
            return partial(self._of_relays.get, network=relay)
        return partial(self._of_strangers.get, network=stranger)

    def _decided(
        self, outcomes: list[int | Refused], request: Any, host: str, kind: Body, deadline: IDelayedCall | None
    ) -> None:
        """Answer when the last envelope has a status."""
        if deadline is not None and deadline.active():
            deadline.cancel()
        statuses, text = [], b""
        for outcome in outcomes:
            if isinstance(outcome, int):
                statuses.append(outcome)
                continue
            self._refused(host, outcome.why)
            statuses.append(outcome.status)
            text = str(outcome).encode()
        if kind is Body.ONE:
            self._respond(request, statuses[0], text)
        elif statuses.count(ACCEPTED) == len(statuses):
            self._respond(request, ACCEPTED, b"")
        else:
            self._respond(request, 200, join_statuses(statuses), ONE_TYPE)

    @staticmethod
    def _respond(request: Any, status: int, body: bytes, content_type: bytes = _TEXT) -> None:
        if request._disconnected:
            return
        if status == _TOO_MANY:
            ask_later(request)
        request.setResponseCode(status)
        if body:
            request.setHeader(b"Content-Type", content_type)
        request.setHeader(b"Content-Length", b"%d" % len(body))
        request.write(body)
        request.finish()

    @staticmethod
    async def _take_some(left: deque[tuple[int, bytes]], take: _Take, outcomes: list[int | Refused]) -> None:
        """Take envelopes until none is left or one has to wait, so that a Deferred is needed only for each that waits."""
        while left:
            at, data = left.popleft()
            try:
                outcomes[at] = await take(data)
            except Refused as error:
                outcomes[at] = error.with_traceback(None)  # the traceback refers to the list
            except CancelledError:
                return
            except Exception:  # a bug costs this one envelope
                _log.failure("a post from another relay failed")

    async def _take(self, data: bytes, look_up: _LookUp, trusted: bool, only: bool) -> int:
        """The status of one envelope; raises :class:`Refused`."""
        if len(data) > self._message_bytes:
            raise Refused(413, RelayProblem.TOO_LARGE.text, Reason.OTHER)
        try:
            envelope = parse_envelope(data)
        except MalformedEnvelope:
            raise Refused(400, "bad request: malformed", Reason.ENVELOPE_MALFORMED) from None
        destination = envelope.destination
        if not destination.twin or len(destination.connection) > MAX_CONNECTION_BYTES:
            raise Refused(400, RelayProblem.NO_DESTINATION.text, Reason.NO_DESTINATION)
        if not envelope.source.twin:
            # Only a relay itself writes as twin 0, to its own sessions: from another relay it would be an unsigned order.
            raise Refused(400, RelayProblem.WRONG_SOURCE.text, Reason.WRONG_SOURCE)
        self._check_time(envelope)
        try:
            twin = await look_up(destination.twin)
            if twin is None or not any(relay.lower() in self._domains for relay in twin.relays):
                raise Refused(404, "not a twin of this relay", Reason.NOT_OUR_TWIN)
            if not trusted:
                await self._check_source(envelope, look_up)
        except Refused:
            raise
        except DmsgError:
            raise Refused(503, RelayProblem.REGISTRY_FAILED.text, Reason.REGISTRY_FAILED) from None
        self._check_time(envelope)  # the registry may have taken long
        outcome = self._accept(envelope, data, only)
        del envelope  # it may take far more memory than the bytes, and the store may be slow
        return outcome if isinstance(outcome, int) else await outcome

    def _check_time(self, envelope: Envelope) -> None:
        if remaining(self._unix_time(), envelope.timestamp, envelope.expiration) is None:
            raise Refused(400, RelayProblem.EXPIRED.text, Reason.MESSAGE_EXPIRED)

    @staticmethod
    async def _check_source(envelope: Envelope, look_up: _LookUp) -> None:
        source = await look_up(envelope.source.twin)
        if source is None:
            raise Refused(400, RelayProblem.WRONG_SOURCE.text, Reason.UNKNOWN_TWIN)
        try:
            verify_envelope(envelope, source.account)
        except BadSignature:
            raise Refused(400, RelayProblem.WRONG_SOURCE.text, Reason.WRONG_SOURCE) from None


def _cancel(pending: list[Deferred[int]]) -> None:
    # Cancel those that wait in line first: otherwise they would get the freed turns, and ask in vain.
    for one in reversed(pending):
        one.cancel()
