"""What becomes of envelopes whose session is not connected here: the registry, other relays and the store are asked.

:ref:`spec-rmb-routing`, :ref:`spec-rmb-queues`. Order of what is tried: the session, if it is here after all; other relays
of the twin; the store, if this is one of its relays. What cannot be delivered is answered with an error if it is a request.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred, gatherResults
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from dmsg.glue.tasks import Tasks
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import RelayProblem
from dmsg.rmb.core.lifetime import remaining
from dmsg.rmb.core.replies import relay_error
from dmsg.rmb.core.tags import fails_fast
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope, encode_envelope, outline, parse_envelope
from dmsg.rmb.interfaces import ITwinRegistry
from dmsg.rmb.relay.errors import StoreError, StoreFull
from dmsg.rmb.relay.lanes import Room
from dmsg.rmb.relay.line import Line, Pushes
from dmsg.rmb.relay.lookups import LookUps
from dmsg.rmb.relay.session import Session
from dmsg.rmb.relay.stores.base import QueueStore
from dmsg.rmb.relay.switch import Parcel, Switch
from dmsg.rmb.twins.errors import RegistryError
from dmsg.sansio.rate import TokenBucket

_log = Logger()
#: After a failure of the store a session's envelopes are asked for again.
_RETRY_S: Final = 2.0
#: Envelopes of one session brought back to the store at a time, and sessions: one after the other takes long, and a store in a
#: file takes 4,096 pushes at a time.
_RETURNED_AT_ONCE: Final = 256
_SESSIONS_AT_ONCE: Final = 8
#: A store that has just failed is given so many: each may have to wait a second for it.
_RETURNED_WHILE_AWAY: Final = 4_096
#: Why a session is not read from while too many of its envelopes wait for others.
HOLD: Final = "pending"
#: What an envelope under way counts for beside its bytes: the parsed form, and the bookkeeping.
_PARCEL_BYTES: Final = 2048
#: Lines of the program's log about registry and store: so many at once, and one in ten seconds.
_COMPLAINTS: Final = 5
_COMPLAINTS_PER_S: Final = 0.1
_ACCEPTED: Final = 202
_REFUSED: Final = 400
_OFFLINE: Final = 404
_UNAVAILABLE: Final = 503


class Federation(Protocol):
    """What a relay needs of the part that posts to other relays. Times are Unix seconds."""

    def submit(self, envelope: Envelope, data: bytes, twin: Twin, expires_at: float) -> RelayProblem | None:
        """Bring it to a relay of ``twin`` before ``expires_at``; gives why that is not even tried."""

    def elsewhere(
        self, envelope: Envelope, data: bytes, twin: Twin, expires_at: float, otherwise: Callable[[], None]
    ) -> bool:
        """Bring it to a relay that has the session connected, or call ``otherwise``; ``False`` if there is none to ask."""


class Delivery:
    """Carries parcels of ``switch`` on. ``domains`` are the names of this relay in the registry.

    ``flush()`` writes what sessions got, ``unix_time()`` gives seconds.
    """

    federation: Federation | None = None

    def __init__(
        self,
        switch: Switch,
        registry: ITwinRegistry,
        store: QueueStore,
        *,
        domains: frozenset[str],
        clock: IReactorTime,
        unix_time: Callable[[], float],
        flush: Callable[[], None],
    ) -> None:
        self._switch = switch
        self._limits = switch.limits
        self._look_ups = LookUps(registry)
        self._store = store
        self._pushes = Pushes(store)
        self._domains = frozenset(domain.lower() for domain in domains)
        self._clock = clock
        self._unix_time = unix_time
        self._flush = flush
        #: What is under way, shared by the networks it comes from.
        self.pending: Room = Room(self._limits.pending_total_bytes)
        #: Envelopes on their way to the store, to other relays, or from the store to sessions.
        self.tasks = Tasks()
        #: Sessions of which something is being put into the store; and those for which something is brought back there.
        self._pushing: Counter[SessionAddress] = Counter()
        self._lines: dict[SessionAddress, Line] = {}
        #: All of these together; and until when the store counts as one that is away, on the clock.
        self._returns = Line(_SESSIONS_AT_ONCE)
        self._away_until = float("-inf")
        self._retries: dict[Session, IDelayedCall] = {}
        self._complaints = TokenBucket(_COMPLAINTS_PER_S, _COMPLAINTS, clock.seconds())

    # --- from sessions ---------------------------------------------------------------------------------------------

    def take(self, parcels: Sequence[Parcel]) -> None:
        """Carry ``parcels`` on. The session they are from is not read from while too many wait."""
        limits = self._limits
        left = deque(parcels)
        while left:  # the one before has to wait for something
            self._run(self._carry_some(left))
        for session in {parcel.session for parcel in parcels}:
            assert session is not None
            if session.pending > limits.pending_per_session or session.pending_bytes > limits.pending_session_bytes:
                session.owner.hold(HOLD, True)

    async def _carry_some(self, parcels: deque[Parcel]) -> None:
        """Carry the next ones on, until there are none or one has to wait: a task for each of those, not for each parcel."""
        while parcels:
            parcel = parcels.popleft()
            session, size = parcel.session, len(parcel.data) + _PARCEL_BYTES
            assert session is not None
            if not self.pending.has(session.origin.network, size):
                self._switch.refuse(parcel.envelope, RelayProblem.OVERLOADED, session, self._unix_time())
                continue
            self.pending.take(session.origin.network, size)
            session.pending += 1
            session.pending_bytes += size
            await self._carry(parcel, session)

    async def _carry(self, parcel: Parcel, session: Session) -> None:
        problem = await self._attempt(self._try(parcel, session.origin.network))
        size = len(parcel.data) + _PARCEL_BYTES
        self.pending.give_back(session.origin.network, size)
        session.pending -= 1
        session.pending_bytes -= size
        limits, shell = self._limits, session.owner
        if (
            shell is not None  # it may have ended
            and session.pending <= limits.pending_per_session // 2
            and session.pending_bytes <= limits.pending_session_bytes // 2
        ):
            shell.hold(HOLD, False)
        if problem is not None:
            self.answer(parcel.envelope, problem)

    async def _attempt(self, work: Coroutine[Deferred[Any], Any, RelayProblem | None]) -> RelayProblem | None:
        """What ``work`` gives, or what its failure means."""
        try:
            return await work
        except RegistryError as error:
            self._complain("a twin cannot be looked up", error)
            return RelayProblem.REGISTRY_FAILED
        except StoreFull:
            return RelayProblem.NOT_STORED
        except StoreError as error:
            self._complain("an envelope cannot be stored", error)
            return RelayProblem.NOT_STORED
        except CancelledError:  # the post it came with took too long, or the relay stops
            return RelayProblem.NOT_STORED
        except Exception:  # a bug costs this one envelope, and the session goes on
            _log.failure("an envelope cannot be routed")
            return RelayProblem.NOT_STORED

    async def _try(self, parcel: Parcel, network: str) -> RelayProblem | None:
        envelope, data, to = parcel.envelope, parcel.data, parcel.to
        if to in self._switch.sessions:
            return await self._keep(to, data, envelope)
        twin = await self._look_ups.get(to.twin, network)
        if twin is None:
            return RelayProblem.UNKNOWN_TWIN
        if not twin.relays:
            return RelayProblem.NO_RELAYS
        now_s = self._unix_time()
        left_s = remaining(now_s, envelope.timestamp, envelope.expiration)
        if left_s is None:  # the registry took long
            return RelayProblem.EXPIRED
        if self._here(to, data):
            return None
        expires_at = int(now_s) + left_s
        federation = self.federation
        if not any(relay.lower() in self._domains for relay in twin.relays):
            if federation is None:
                return RelayProblem.OFFLINE
            problem = federation.submit(envelope, data, twin, expires_at)
            if problem is None:
                self._switch.counts.federated += 1
            return problem
        if self._store.shared and await self._store.connected(to):
            return await self._keep(to, data, envelope)
        if federation is not None and federation.elsewhere(
            envelope, data, twin, expires_at, lambda: self._run(self._park_or_answer(parcel, network))
        ):
            return None
        return await self._park(parcel)

    async def _park(self, parcel: Parcel) -> RelayProblem | None:
        """Let an envelope wait for a session that is connected nowhere."""
        if fails_fast(parcel.envelope.tags) and parcel.to not in self._switch.sessions:
            return RelayProblem.OFFLINE
        return await self._keep(parcel.to, parcel.data, parcel.envelope)

    async def _park_or_answer(self, parcel: Parcel, network: str) -> None:
        size = len(parcel.data) + _PARCEL_BYTES
        self.pending.take(network, size)  # whether there is room or not: it was taken before
        problem = await self._attempt(self._park(parcel))
        self.pending.give_back(network, size)
        if problem is not None:
            self.answer(parcel.envelope, problem)

    def _here(self, to: SessionAddress, data: bytes, *, is_new: bool = True) -> bool:
        """Hand it to the session if it has come meanwhile."""
        if not self._switch.deliver(to, data, is_new=is_new):
            return False
        self._flush()
        return True

    # --- from relays, and of our own -------------------------------------------------------------------------------

    def accept(self, envelope: Envelope, data: bytes, connected_only: bool) -> int | Deferred[int]:
        """Take what another relay has posted for a twin of this one, which has been checked; gives an HTTP status.

        With ``connected_only``, or if it shall fail fast, it is taken only if its session is connected. The caller flushes.
        """
        counts = self._switch.counts
        counts.ingested += 1
        counts.bytes += len(data)
        to = SessionAddress.of(envelope.destination)
        if self._switch.deliver(to, data):
            return _ACCEPTED
        connected_only = connected_only or fails_fast(envelope.tags)
        if connected_only and not self._store.shared and to not in self._switch.sessions:
            return _OFFLINE
        if self._pushes.waiting_bytes + len(data) > self._limits.queued_total_bytes:
            self._switch.note(envelope.source.twin, RelayProblem.NOT_STORED)
            return _UNAVAILABLE
        return ensureDeferred(self._accept(Parcel(outline(envelope), data, to, None), connected_only))

    async def _accept(self, parcel: Parcel, connected_only: bool) -> int:
        if connected_only and parcel.to not in self._switch.sessions and not await self._store.connected(parcel.to):
            return _OFFLINE
        problem = await self._attempt(self._keep(parcel.to, parcel.data, parcel.envelope))
        if problem is None:
            return _ACCEPTED
        self._switch.note(parcel.envelope.source.twin, problem)
        return _REFUSED if problem is RelayProblem.EXPIRED else _UNAVAILABLE

    def answer(self, envelope: Envelope, problem: RelayProblem) -> None:
        """Tell the sender of a request why it goes nowhere, wherever it is now; of what is no request it hears nothing."""
        to = SessionAddress.of(envelope.source)
        self._switch.note(to.twin, problem)
        if not envelope.HasField("request"):
            return
        error = encode_envelope(relay_error(envelope, problem, int(self._unix_time()), to))
        session = self._switch.sessions.get(to)
        if session is None:
            self._run(self._store_answer(to, error))
        elif not session.overloaded:
            session.say(error)
            self._flush()

    # --- the store -------------------------------------------------------------------------------------------------

    async def _keep(self, to: SessionAddress, data: bytes, envelope: Envelope) -> RelayProblem | None:
        """Put an envelope into the store, unless its session has room for it."""
        if remaining(self._unix_time(), envelope.timestamp, envelope.expiration) is None:
            return RelayProblem.EXPIRED
        if self._here(to, data):
            return None
        session = self._switch.sessions.get(to)
        if session is not None:
            if self._has_no_room(to, envelope):  # else all that is behind would be tried, or wait, for nothing
                return RelayProblem.NOT_STORED
            session.stored = True
            earlier = [] if self._clock.seconds() < session.full_until else session.take_behind()
            if earlier:
                self._bring_back(session, [], earlier)
        self._pushing[to] += 1
        try:
            line = self._lines.get(to)
            if line is not None:
                await line.turn()
            try:
                now_s = self._unix_time()
                left_s = remaining(now_s, envelope.timestamp, envelope.expiration)
                if left_s is None:
                    return RelayProblem.EXPIRED
                if self._has_no_room(to, envelope):
                    return RelayProblem.NOT_STORED
                until_s = now_s + min(left_s, self._limits.stored_s)
                pushing = self._pushes.push(to, data, now_s, until_s, envelope.source.twin)
            finally:
                if line is not None:
                    self._next(to, line)  # a store keeps the order in which it was asked
            if not await pushing:
                return RelayProblem.EXPIRED
        finally:
            self._pushed(to)
        self._switch.counts.stored += 1
        return None

    def _has_no_room(self, to: SessionAddress, envelope: Envelope) -> bool:
        """Whether the store has just taken nothing of what waits with the session before this one.

        It is away, or has no room for others of the same sender.
        """
        session = self._switch.sessions.get(to)
        if session is None or not session.behind:
            return False
        now = self._clock.seconds()
        return now < self._away_until or (now < session.full_until and envelope.source.twin in session.full_for)

    async def _store_quietly(self, to: SessionAddress, data: bytes) -> StoreError | None:
        """Store an envelope that was counted as delivered, or an answer of ours. Its sender is not told if that fails.

        Gives why it has. What a store that is away has not taken its session gets, if that has come meanwhile; what
        there is no room for is left to the caller.
        """
        envelope = parse_envelope(data)
        source, now_s = envelope.source.twin, self._unix_time()
        left_s = remaining(now_s, envelope.timestamp, envelope.expiration)
        del envelope  # it may take far more memory than the bytes
        if left_s is None:
            self._switch.counts.expired += 1
            return None
        self._pushing[to] += 1
        try:
            await self._pushes.push(to, data, now_s, now_s + min(left_s, self._limits.stored_s), source)
        except StoreFull as full:
            return full
        except StoreError as error:
            if not self._here(to, data, is_new=False):
                self._lose(data, error)
            return error
        finally:
            self._pushed(to)
        return None

    def _lose(self, data: bytes, why: StoreError) -> None:
        self._switch.note(parse_envelope(data).source.twin, RelayProblem.NOT_STORED)
        self._complain("an envelope is lost", why)

    async def _store_answer(self, to: SessionAddress, answer: bytes) -> None:
        error = await self._store_quietly(to, answer)
        if isinstance(error, StoreFull) and not self._here(to, answer):
            self._lose(answer, error)

    def _pushed(self, to: SessionAddress) -> None:
        self._pushing[to] -= 1
        if not self._pushing[to]:
            del self._pushing[to]
        self.stored(to)

    def stored(self, to: SessionAddress) -> None:
        """Something may have come to the store for ``to``, perhaps from another process."""
        session = self._switch.sessions.get(to)
        if session is not None:
            session.stored = True
            session.news += 1
            self.fetch(session)

    def fetch(self, session: Session) -> None:
        """Read on for ``session`` if the store has something, and all that was read before is written."""
        if not session.stored or session.fetching or session.queue:
            return
        if session.address not in self._lines and self._is_current(session):
            session.fetching = True
            self._run(self._fetch(session))

    async def _fetch(self, session: Session) -> None:
        """Read page after page, as long as all of one is written at once; then :meth:`fetch` is called again."""
        address, limits = session.address, self._limits
        try:
            while True:
                await deferLater(self._clock, 0)  # a store in memory answers at once: others have their turn
                if not self._is_current(session):
                    return
                news = session.news
                done = session.written_ids()
                if done:
                    await self._store.delete(address, done)
                    session.deleted(done)
                page = await self._store.read(
                    address, None, limits.page_envelopes, limits.page_bytes, self._unix_time()
                )
                if not self._is_current(session):
                    return
                if page:
                    session.put_page([one.id for one in page], [one.data for one in page])
                    self._switch.counts.fetched += len(page)
                elif address in self._pushing:
                    return  # what is being pushed calls again
                elif session.news == news:
                    session.caught_up()
                self._flush()
                if session.queue or not session.stored:
                    return
        except StoreError as error:
            self._complain("stored envelopes cannot be read", error)
            if self._is_current(session):
                session.caught_up()  # what comes now need not wait for the store
                self._flush()
                if session not in self._retries:
                    self._retries[session] = self._clock.callLater(_RETRY_S, self._retry, session)
        finally:
            session.fetching = False

    def _retry(self, session: Session) -> None:
        del self._retries[session]
        session.stored = True
        self.fetch(session)

    def _is_current(self, session: Session) -> bool:
        return self._switch.sessions.get(session.address) is session

    # --- ends ------------------------------------------------------------------------------------------------------

    def left(self, session: Session) -> None:
        """``session`` has ended: what it has not written goes back to the store."""
        call = self._retries.pop(session, None)
        if call is not None:
            call.cancel()
        done, unwritten = session.written_ids(), session.take_unwritten()
        if done or unwritten:
            self._bring_back(session, done, unwritten)

    def _bring_back(self, session: Session, done: list[str], unwritten: list[bytes]) -> None:
        """Put into the store what a session was not given, before what comes for it later; delete there what it was given."""
        line = self._lines.get(session.address)
        if line is None:
            line = self._lines[session.address] = Line()
        self._run(self._return(session.address, session.origin.network, line, done, unwritten))

    async def _return(
        self, address: SessionAddress, network: str, line: Line, done: list[str], unwritten: list[bytes]
    ) -> None:
        size = sum(map(len, unwritten))
        self._switch.returning.take(network, size)
        await line.turn()
        try:
            at = 0
            while at < len(unwritten):
                await self._returns.turn()
                is_away = self._clock.seconds() < self._away_until
                some = unwritten[at : at + (_RETURNED_WHILE_AWAY if is_away else _RETURNED_AT_ONCE)]
                at += len(some)
                if is_away:
                    self._returns.over()
                try:
                    full = await self._return_some(address, some)
                finally:
                    if not is_away:
                        self._returns.over()
                if full and self._give_back(address, full, unwritten[at:]):
                    break
            if done:
                await self._store.delete(address, done)
        except StoreError as error:
            self._complain("delivered envelopes cannot be deleted", error)
        finally:
            self._switch.returning.give_back(network, size)
            self._next(address, line)
            self.stored(address)

    async def _return_some(self, address: SessionAddress, some: list[bytes]) -> list[tuple[bytes, StoreFull]]:
        """Store ``some``; gives those for which there is no room."""
        storing: list[Deferred[Any]] = [ensureDeferred(self._store_quietly(address, data)) for data in some]
        errors = await gatherResults(storing, consumeErrors=True)
        if any(isinstance(error, StoreError) and not isinstance(error, StoreFull) for error in errors):
            self._away_until = self._clock.seconds() + _RETRY_S
        return [(data, error) for data, error in zip(some, errors, strict=True) if isinstance(error, StoreFull)]

    def _give_back(self, address: SessionAddress, full: list[tuple[bytes, StoreFull]], rest: list[bytes]) -> bool:
        """Have the session keep what the store has no room for, and ``rest``, which is not tried then; gives whether it is here.

        Without a session the first are lost.
        """
        session, lost = self._switch.sessions.get(address), [data for data, _ in full]
        if session is not None:
            session.full_until = self._clock.seconds() + _RETRY_S
            session.full_for = {parse_envelope(data).source.twin for data in lost}
            lost = session.put_back([*lost, *rest])
        for data in lost:
            self._lose(data, full[0][1])
        return session is not None

    def _next(self, address: SessionAddress, line: Line) -> None:
        """A turn is over. The line is left when there is no other."""
        if line.over():
            del self._lines[address]

    def _complain(self, what: str, error: Exception) -> None:
        """Say in the program's log what fails, a few times a minute; the event log counts all of it."""
        if self._complaints.take(self._clock.seconds()):
            _log.warn("{what}: {error}", what=what, error=error)

    def _run(self, work: Coroutine[Deferred[Any], Any, None]) -> None:
        self.tasks.begin(work).addErrback(lambda failure: _log.failure("a delivery failed", failure))
