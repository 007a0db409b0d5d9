"""Moves envelopes between sessions and the store: those that sessions have no room for, or were not given, and back.

:ref:`spec-rmb-queues`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from twisted.internet.defer import Deferred, ensureDeferred, gatherResults
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater

from dmsg.glue.fair_line import FairLine
from dmsg.glue.in_turns import in_turns
from dmsg.glue.per_turn import PerTurn
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import RelayProblem
from dmsg.rmb.core.lifetime import remaining
from dmsg.rmb.core.wire import Envelope, parse_envelope
from dmsg.rmb.relay.background import Background
from dmsg.rmb.relay.errors import StoreError, StoreFull
from dmsg.rmb.relay.pushes import Pushes
from dmsg.rmb.relay.session import Session
from dmsg.rmb.relay.store_lines import StoreLine, StoreLines
from dmsg.rmb.relay.stores.base import QueueStore
from dmsg.rmb.relay.switch import Switch

#: Seconds after a failure of the store until it is asked again.
_RETRY_S: Final = 2.0
#: Envelopes of one session that are brought back to the store at a time, and sessions at a time: one by one would take long,
#: and a store in a file has room for so many besides new envelopes, reads and deletions.
_RETURNED_AT_ONCE: Final = 256
_SESSIONS_AT_ONCE: Final = 8
#: Envelopes of one session in one turn of the reactor where the store answers at once: some 30 ms for all sessions.
_RETURNED_IN_A_TURN: Final = 64
#: Sessions that delete what they were given, or read a page, in one turn of the reactor: some 30 ms where the store answers at
#: once.
_PAGES_IN_A_TURN: Final = 8
#: Envelopes that are deleted in one operation: some 30 ms of a store in a file, in which no other operation goes on. A session
#: may have thousands after the store could not delete for a while.
_DELETED_AT_ONCE: Final = 1_000
#: How often the store is asked for an ended session before its envelopes are lost, and seconds between: a Redis that is started
#: again is back by then. The time is less than that for which the store counts as away.
_RETURN_TRIES: Final = 10
_RETURN_RETRY_S: Final = 1.0
#: Remembered ids of envelopes that ended sessions were given but that could not be deleted: some 100 bytes each.
_UNDELETED: Final = 65_536


#: Twins of which a full queue in the store has just refused an envelope that an ended session was not given: how long that was,
#: and the error. A refusal takes twice as long as storing one, and there may be 300,000 in one session's queue, of which the
#: store takes 10,000.
_Refused = dict[int, tuple[int, StoreFull]]


class Keeper:
    """Stores envelopes for the sessions of ``switch`` in ``store``, and gives them to the sessions from there, in order.

    ``flush()`` writes what was queued for sessions, ``unix_time()`` returns seconds.
    """

    def __init__(
        self,
        switch: Switch,
        store: QueueStore,
        background: Background,
        *,
        clock: IReactorTime,
        unix_time: Callable[[], float],
        flush: Callable[[], None],
    ) -> None:
        self._switch = switch
        self._limits = switch.limits
        self._store = store
        self._pushes = Pushes(store)
        self._background = background
        self._clock = clock
        self._unix_time = unix_time
        self._flush = flush
        #: Pushes under way for each session; and the turns of tasks that bring a session's envelopes back to the store.
        self._pushing: Counter[SessionAddress] = Counter()
        self._lines = StoreLines(background, clock, self.stored)
        #: Limits how many sessions are brought back at a time, where networks take turns; the time on the clock until which the
        #: store counts as away; and the last time at which it did not take the one envelope that it is given meanwhile, and why.
        self._returns: FairLine[str] = FairLine(_SESSIONS_AT_ONCE)
        self._away_until = self._missed_at = float("-inf")
        self._missed = StoreError()
        self._pages = PerTurn(_PAGES_IN_A_TURN, clock)
        self._retries: dict[Session, IDelayedCall] = {}
        #: Ids of envelopes that ended sessions were given but that are still in the store, and their number.
        self._undeleted: OrderedDict[SessionAddress, list[str]] = OrderedDict()
        self._undeleted_count = 0
        #: Time on the clock until which nothing is deleted, because that has just failed; and the call that deletes these ids.
        self._keeps_until = float("-inf")
        self._deleting: IDelayedCall | None = None
        self._is_deleting = self._stopped = False

    @property
    def pushing_bytes(self) -> int:
        """Bytes of envelopes that were given to the store but that it has not acknowledged."""
        return self._pushes.waiting_bytes

    # --- into the store --------------------------------------------------------------------------------------------

    def here(self, to: SessionAddress, data: bytes, *, is_new: bool = True) -> bool:
        """Hand ``data`` to its session, if that is connected by now and has room."""
        if not self._switch.deliver(to, data, is_new=is_new):
            return False
        self._flush()
        return True

    async def keep(
        self,
        to: SessionAddress,
        data: bytes,
        envelope: Envelope,
        network: str,
        may_wait: Callable[[str], bool] | None = None,
    ) -> RelayProblem | None:
        """Put an envelope from ``network`` into the store, unless its session has room for it.

        ``may_wait`` is asked before it waits for earlier ones that are on their way to the store, with the network of their
        session. From then on it counts for that network.
        """
        if remaining(self._unix_time(), envelope.timestamp, envelope.expiration) is None:
            return RelayProblem.EXPIRED
        if self.here(to, data):
            return None
        session = self._switch.sessions.get(to)
        if session is not None:
            if self._has_no_room(to, envelope):  # otherwise all envelopes behind it would be tried in vain
                return RelayProblem.NOT_STORED
            session.stored = True
            earlier = [] if self._clock.seconds() < session.full_until else session.take_behind()
            if earlier:
                self._bring_back(session, [], earlier)
        line = self._lines.get(to)
        if line is not None and may_wait is not None:
            if not may_wait(line.network):
                return RelayProblem.OVERLOADED
            network = line.network
        self._pushing[to] += 1
        try:
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
                pushing = self._pushes.push(to, data, now_s, until_s, envelope.source.twin, new_from=network)
            finally:  # not when it is pushed: a store keeps the order of the calls
                if line is not None:
                    self._lines.next(to, line)
            if not await pushing:
                return RelayProblem.EXPIRED
        finally:
            self._pushed(to)
        self._switch.counts.stored += 1
        self._switch.taken_bytes += len(data)
        return None

    def _has_no_room(self, to: SessionAddress, envelope: Envelope) -> bool:
        """Whether the store would refuse this envelope, as it has just refused earlier ones that now wait with the session.

        The store is away, or has no room for envelopes of the same sender.
        """
        session = self._switch.sessions.get(to)
        if session is None or not session.behind:
            return False
        now = self._clock.seconds()
        return now < self._away_until or (now < session.full_until and envelope.source.twin in session.full_for)

    async def _store_quietly(
        self, to: SessionAddress, data: bytes, new_from: str | None = None, refused: _Refused | None = None
    ) -> StoreError | None:
        """Store an envelope that was counted as delivered, or an answer of ours. Its sender is not told about a failure.

        Returns the error. If the store is away, the session gets the envelope, or it is lost; if the store is full, the
        caller decides. In ``refused`` it is noted what a full queue does not take, and nothing is tried that it would not
        take either.
        """
        envelope = parse_envelope(data)
        source, now_s = envelope.source.twin, self._unix_time()
        left_s = remaining(now_s, envelope.timestamp, envelope.expiration)
        del envelope  # it may take far more memory than the bytes
        if left_s is None:
            self._switch.counts.expired += 1
            return None
        if refused and source in refused and len(data) >= refused[source][0]:
            return refused[source][1]
        self._pushing[to] += 1
        try:
            until_s = now_s + min(left_s, self._limits.stored_s)
            await self._pushes.push(to, data, now_s, until_s, source, new_from=new_from)
            self._away_until = self._missed_at = float("-inf")  # it is back
        except StoreFull as full:
            if refused is not None and full.scope == "queue":
                refused[source] = len(data), full.with_traceback(None)  # that takes 4 kB, and refers to ``refused``
            return full
        except StoreError as error:
            if not self.here(to, data, is_new=False):
                self._lose(data, error)
            return error
        finally:
            self._pushed(to)
        return None

    def _lose(self, data: bytes, why: StoreError) -> None:
        self._switch.note(parse_envelope(data).source.twin, RelayProblem.NOT_STORED)
        self._background.complain("an envelope is lost", why)

    async def answer(self, to: SessionAddress, answer: bytes, network: str) -> None:
        """Keep an answer of the relay's own, to an envelope from ``network``, for a session that is not here."""
        error = await self._store_quietly(to, answer, network)
        if isinstance(error, StoreFull) and not self.here(to, answer):
            self._lose(answer, error)

    def _pushed(self, to: SessionAddress) -> None:
        self._pushing[to] -= 1
        if not self._pushing[to]:
            del self._pushing[to]
        self.stored(to)

    # --- to sessions -----------------------------------------------------------------------------------------------

    def stored(self, to: SessionAddress) -> None:
        """Something may have come to the store for ``to``, perhaps from another process."""
        session = self._switch.sessions.get(to)
        if session is not None:
            session.stored = True
            session.news += 1
            self.fetch(session)

    def fetch(self, session: Session) -> None:
        """Read more for ``session`` if the store may have something, and all that was read before is written."""
        if not session.stored or session.fetching or session.queue:
            return
        if self._lines.get(session.address) is None and self._is_current(session):
            session.fetching = True
            self._background.run(self._fetch(session))

    async def _fetch(self, session: Session) -> None:
        """Read pages as long as each is written at once. After a page that is not, :meth:`fetch` is called again later."""
        address, limits = session.address, self._limits
        try:
            while True:
                await self._pages.wait()  # a store in memory answers at once, and thousands may ask
                if not self._is_current(session):
                    return
                news = session.news
                after = await self._delete_written(session)
                page = await self._store.read(
                    address, after, limits.page_envelopes, limits.page_bytes, self._unix_time()
                )
                if not self._is_current(session):
                    return
                if page:
                    session.put_page([one.id for one in page], [one.data for one in page])
                    self._switch.counts.fetched += len(page)
                elif address in self._pushing:
                    return  # a push is under way, and calls fetch() at its end
                elif session.news == news:
                    session.caught_up()
                    if after is not None:
                        self._ask_again(session)
                self._flush()
                if session.queue or not session.stored:
                    return
        except StoreError as error:
            self._background.complain("stored envelopes cannot be read", error)
            if self._is_current(session):
                session.caught_up()  # new envelopes need not wait for the store
                self._flush()
                self._ask_again(session)
        finally:
            session.fetching = False

    async def _delete_written(self, session: Session) -> str | None:
        """Delete what ``session`` was given. If that fails, return the last id of it, after which reading has to go on."""
        before = self._undeleted.pop(session.address, [])
        self._undeleted_count -= len(before)
        session.done[:0] = before
        done = session.written_ids()
        if not done:
            return None
        if not await self._delete(session.address, done):  # for example on a full disk, where reading still works
            return str(done[-1])
        session.deleted(done)
        return None

    async def _delete(self, address: SessionAddress, done: list[str]) -> bool:
        """Delete ``done``, and return whether that has worked.

        After a failure nothing is tried for a while, because a store that rolls a transaction back has to recount all its rows.
        """
        if self._clock.seconds() < self._keeps_until:
            return False
        try:
            for at in range(0, len(done), _DELETED_AT_ONCE):
                await self._store.delete(address, done[at : at + _DELETED_AT_ONCE])
        except StoreError as error:
            self._keeps_until = self._clock.seconds() + _RETRY_S
            self._background.complain("delivered envelopes cannot be deleted", error)
            return False
        return True

    def _ask_again(self, session: Session) -> None:
        if session not in self._retries:
            self._retries[session] = self._clock.callLater(_RETRY_S, self._retry, session)

    def _retry(self, session: Session) -> None:
        del self._retries[session]
        session.stored = True
        self.fetch(session)

    def _is_current(self, session: Session) -> bool:
        return self._switch.sessions.get(session.address) is session

    # --- ends ------------------------------------------------------------------------------------------------------

    def left(self, session: Session) -> None:
        """``session`` has ended: envelopes that it has not written go back to the store."""
        call = self._retries.pop(session, None)
        if call is not None:
            call.cancel()
        done, unwritten = session.written_ids(), session.take_unwritten()
        if done or unwritten:
            self._bring_back(session, done, unwritten)

    def _bring_back(self, session: Session, done: list[str], unwritten: list[bytes]) -> None:
        """Store what a session was not given, ahead of later envelopes for it, and delete what it was given."""
        line = self._lines.begin(session.address, session.origin.network)
        self._background.run(self._return(session.address, session.origin.network, line, done, unwritten))

    async def _return(
        self, address: SessionAddress, network: str, line: StoreLine, done: list[str], unwritten: list[bytes]
    ) -> None:
        size = sum(map(len, unwritten))
        self._switch.returning.take(network, size)
        await line.turn()
        try:
            at = tries = 0
            refused, forget_at = _Refused(), 0.0
            while at < len(unwritten):
                began = self._clock.seconds()
                await self._returns.turn(network)
                now = self._clock.seconds()  # it may have waited for thousands of other sessions
                if now >= forget_at:
                    refused, forget_at = _Refused(), now + _RETRY_S
                misses = self._missed_at > began  # the store has not even taken one while this waited for its turn
                try:
                    if not misses:
                        tried, full, misses = await self._return_some(
                            address, unwritten[at : at + _RETURNED_AT_ONCE], refused
                        )
                        at += tried
                        if full and await self._give_back(address, full, unwritten, at):
                            break
                        if at < len(unwritten):
                            await deferLater(self._clock, 0)  # give others a turn: a store in memory answers at once
                finally:  # in another turn: of thousands of sessions each may have few envelopes
                    self._background.run(self._over_soon())
                if misses:
                    tries += 1
                    if tries == _RETURN_TRIES or self._stopped or address in self._switch.sessions:
                        await self._do_without(address, unwritten[at:])
                        break
                    await deferLater(self._clock, _RETURN_RETRY_S)
            if done:
                await self._pages.wait()
                if not await self._delete(address, done):
                    self._remember(address, done)
        finally:
            self._switch.returning.give_back(network, size)
            self._lines.next(address, line)

    def _remember(self, address: SessionAddress, done: list[str]) -> None:
        """Remember what the next session of this name must not be given again."""
        self._undeleted.setdefault(address, []).extend(done)
        self._undeleted.move_to_end(address)
        self._undeleted_count += len(done)
        while self._undeleted_count > _UNDELETED:
            self._undeleted_count -= len(self._undeleted.popitem(last=False)[1])
        self._delete_later()

    def _delete_later(self) -> None:
        """Try again later to delete what is remembered: its sessions may connect to another process, or after a restart."""
        if self._undeleted and self._deleting is None and not self._is_deleting and not self._stopped:
            self._deleting = self._clock.callLater(_RETRY_S, self._delete_now)

    def _delete_now(self) -> None:
        self._deleting = None
        self._background.run(self._delete_remembered())

    async def _delete_remembered(self) -> None:
        """Delete what is remembered, session by session, until a deletion fails."""
        self._is_deleting = True
        try:
            for address in list(self._undeleted):
                ids = self._undeleted.get(address)
                if ids is None:  # its session has come meanwhile
                    continue
                count = len(ids)
                is_deleted = await self._delete(address, ids[:count])
                if self._undeleted.get(address) is not ids:
                    continue
                if not is_deleted:
                    self._undeleted.move_to_end(address)  # the others need not wait if only this one fails
                    break
                del ids[:count]
                self._undeleted_count -= count
                if not ids:
                    del self._undeleted[address]
        finally:
            self._is_deleting = False
        self._delete_later()

    def start(self) -> None:
        """Delete again what is remembered, after :meth:`stop`."""
        self._stopped = False
        self._delete_later()

    def stop(self) -> None:
        """Try to delete for the last time; the sessions are gone."""
        self._stopped = True
        if self._deleting is not None:
            self._deleting.cancel()
            self._deleting = None
        self._keeps_until = float("-inf")
        if self._undeleted and not self._is_deleting:
            self._delete_now()

    async def _return_some(
        self, address: SessionAddress, some: list[bytes], refused: _Refused
    ) -> tuple[int, list[tuple[bytes, StoreFull]], bool]:
        """Store ``some``, or only the first where the store answers at once.

        A store that has just failed is given one, because thousands might have to wait a second for it. Returns how many were
        given to the store, those it has no room for, and whether it has not taken that one.
        """
        was_away = self._clock.seconds() < self._away_until
        storing: list[Deferred[Any]] = []
        for data in some[:1] if was_away else some:
            storing.append(ensureDeferred(self._store_quietly(address, data, refused=refused)))
            if len(storing) == _RETURNED_IN_A_TURN and storing[-1].called:
                break
        errors = await gatherResults(storing, consumeErrors=True)
        why = next((one for one in errors if isinstance(one, StoreError) and not isinstance(one, StoreFull)), None)
        if why is not None:
            now = self._clock.seconds()
            self._away_until = now + _RETRY_S
            if was_away:
                self._missed_at, self._missed = now, why
        full = [(data, error) for data, error in zip(some, errors, strict=False) if isinstance(error, StoreFull)]
        return len(storing), full, was_away and why is not None

    async def _do_without(self, address: SessionAddress, left: list[bytes]) -> None:
        """Give ``left``, for which the store was away, to the session if it is connected by now. Otherwise it is lost."""
        for at in range(0, len(left), _RETURNED_IN_A_TURN):
            await self._pages.wait()
            for data in left[at : at + _RETURNED_IN_A_TURN]:
                if not self._switch.deliver(address, data, is_new=False):
                    self._lose(data, self._missed)
            self._flush()

    async def _give_back(
        self, address: SessionAddress, full: list[tuple[bytes, StoreFull]], unwritten: list[bytes], at: int
    ) -> bool:
        """Let the session keep ``full``, for which the store has no room, and ``unwritten`` from ``at`` on, which is not tried.

        Returns whether the session is connected. If it is not, ``full`` is lost.
        """
        session, lost = self._switch.sessions.get(address), [data for data, _ in full]
        if session is not None:
            session.full_until = self._clock.seconds() + _RETRY_S
            session.full_for = {parse_envelope(data).source.twin for data in lost}
            lost = session.put_back([*lost, *unwritten[at:]])
        await in_turns(lost, partial(self._lose, why=full[0][1]), self._clock)
        return session is not None

    async def _over_soon(self) -> None:
        """Let another session be brought back in the next turn of the reactor. A relay that stops waits for it."""
        try:
            await deferLater(self._clock, 0)
        finally:
            self._returns.over()
