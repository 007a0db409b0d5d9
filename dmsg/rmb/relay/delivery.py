"""Delivery of envelopes whose session is not connected here, with the registry, other relays and the store.

:ref:`spec-rmb-routing`, :ref:`spec-rmb-queues`. The order of attempts: the session, if it has connected meanwhile; other
relays of the twin; the store, if this is one of the twin's relays. A request that cannot be delivered is answered with an
error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Final, Protocol

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import RelayProblem
from dmsg.rmb.core.lifetime import remaining
from dmsg.rmb.core.replies import relay_error
from dmsg.rmb.core.tags import fails_fast
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope, encode_envelope, outline
from dmsg.rmb.interfaces import ITwinRegistry
from dmsg.rmb.relay.background import Background
from dmsg.rmb.relay.errors import StoreError, StoreFull
from dmsg.rmb.relay.keeper import Keeper
from dmsg.rmb.relay.lanes import PairedRoom, Room, held_bytes
from dmsg.rmb.relay.lookups import LookUps
from dmsg.rmb.relay.session import Session
from dmsg.rmb.relay.stores.base import QueueStore
from dmsg.rmb.relay.switch import Parcel, Switch
from dmsg.rmb.twins.errors import RegistryError

_log = Logger()
#: The reason given to the shell when it stops reading from a session, because too many of its envelopes are pending.
HOLD: Final = "pending"
#: The reason while envelopes of its last read wait for their turn.
_TURNS: Final = "turns"
#: Envelopes whose delivery is begun in one turn of the reactor: some 30 ms. A read of envelopes of 1 KiB has fewer, and between
#: relays these took 13 % more CPU time in turns of 256.
AT_ONCE: Final = 512
#: Bytes that an envelope under way counts besides its own bytes and its outline: 5.6 kB were measured for one that waits for
#: the registry.
_PARCEL_BYTES: Final = 5632
#: In the place of a network: other relays, for what they post or have not taken.
_RELAYS: Final = ""
_ACCEPTED: Final = 202
_REFUSED: Final = 400
_OFFLINE: Final = 404
_UNAVAILABLE: Final = 503

#: Routes an envelope, and returns the problem if that is not possible.
_Work = Coroutine[Deferred[Any], Any, RelayProblem | None]


class Federation(Protocol):
    """The interface of the part that posts to other relays. Times are Unix seconds."""

    def submit(
        self, envelope: Envelope, data: bytes, twin: Twin, expires_at: float, moved_here: Callable[[bool], None]
    ) -> RelayProblem | None:
        """Bring the envelope to a relay of ``twin`` before ``expires_at``; returns the reason if that is not even tried.

        ``moved_here`` is called if the twin has moved to this relay meanwhile, with whether another relay may have taken it.
        """

    def elsewhere(
        self, envelope: Envelope, data: bytes, twin: Twin, expires_at: float, otherwise: Callable[[bool], None]
    ) -> bool:
        """Bring the envelope to the relay that has the session, or call ``otherwise``; ``False`` if there is no relay to ask.

        ``otherwise`` is told whether a relay may have taken the envelope.
        """


class Delivery:
    """Delivers parcels of ``switch``. ``domains`` are the names of this relay in the registry.

    ``flush()`` writes what was queued for sessions, ``unix_time()`` returns seconds.
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
        self._look_ups = LookUps(registry, clock=clock)
        self._store = store
        self._clock = clock
        self._domains = frozenset(domain.lower() for domain in domains)
        self._unix_time = unix_time
        self._flush = flush
        #: Envelopes whose twin is being looked up, in their order, by the sessions they are for.
        self._asking: dict[SessionAddress, dict[int, Parcel]] = {}
        #: Bytes under way, by the networks they come from; and bytes that wait until earlier envelopes for the same sessions are
        #: in the store, by the networks of these sessions.
        self.pending: Room = Room(self._limits.pending_total_bytes)
        self.waiting = PairedRoom(self._limits.pending_total_bytes)
        #: Tasks that bring envelopes to the store, to other relays, or from the store to sessions.
        self.background = Background(clock)
        #: Moves envelopes to the store and back.
        self.keeper = Keeper(switch, store, self.background, clock=clock, unix_time=unix_time, flush=flush)

    # --- from sessions ---------------------------------------------------------------------------------------------

    def take(self, session: Session, parcels: Sequence[Parcel]) -> None:
        """Deliver ``parcels`` of ``session``. The relay stops reading from it while too many are pending.

        One read may have 1,800 short envelopes, some 100 ms of work. The later ones wait for their turns as long as their
        network has room for that.
        """
        if session.later is not None:
            self._put_later(session, session.later, parcels)
            return
        left = deque(parcels)
        self._begin(session, left, len(left) - AT_ONCE)
        if not left:
            return
        network, size = session.origin.network, sum(map(_size, left))
        if self.pending.has(network, size):
            self.background.run(self._take_in_turns(session, left, network, size))
        else:
            self._begin(session, left, 0)

    def _put_later(self, session: Session, later: list[Parcel], parcels: Sequence[Parcel]) -> None:
        """Keep the order: over TLS, what was read comes in pieces, also when the session is not read from any more."""
        network, size = session.origin.network, sum(map(_size, parcels))
        if self.pending.has(network, size):
            self.pending.take(network, size)
            later += parcels
        else:
            for parcel in parcels:
                self._switch.refuse(parcel.envelope, RelayProblem.OVERLOADED, session, self._unix_time())

    async def _take_in_turns(self, session: Session, left: deque[Parcel], network: str, size: int) -> None:
        self.pending.take(network, size)
        session.later = []
        session.owner.hold(_TURNS, True)
        while left:
            await deferLater(self._clock, 0)
            self.pending.give_back(network, sum(map(_size, islice(left, AT_ONCE))))  # they count themselves from now on
            self._begin(session, left, len(left) - AT_ONCE)
            self._flush()
            if not left:
                left, session.later = deque(session.later), []
        session.later = None
        if session.owner is not None:  # it may have ended
            session.owner.hold(_TURNS, False)

    def _begin(self, session: Session, left: deque[Parcel], most_left: int) -> None:
        """Begin to deliver parcels until there are only ``most_left``."""
        limits = self._limits
        while left and len(left) > most_left:  # start another task whenever the one before has to wait
            self.background.run(self._carry_some(left, most_left))
        full = session.pending > limits.pending_per_session or session.pending_bytes > limits.pending_session_bytes
        if full and session.owner is not None:
            session.owner.hold(HOLD, True)

    async def _carry_some(self, parcels: deque[Parcel], most_left: int) -> None:
        """Deliver parcels until there are only ``most_left`` or one has to wait, so that only those that wait need a task."""
        while parcels and len(parcels) > most_left:
            parcel = parcels.popleft()
            session, size = parcel.session, _size(parcel)
            assert session is not None
            if not self.pending.has(session.origin.network, size):
                if self._switch.sessions.get(session.address) is session:
                    self._switch.refuse(parcel.envelope, RelayProblem.OVERLOADED, session, self._unix_time())
                else:  # it has ended: bytes of an answer that it never writes would count for ever
                    self.answer(parcel.envelope, RelayProblem.OVERLOADED, session.origin.network)
                continue
            self.pending.take(session.origin.network, size)
            session.pending += 1
            session.pending_bytes += size
            await self._carry(parcel, session)

    async def _carry(self, parcel: Parcel, session: Session) -> None:
        network = session.origin.network
        problem = await self._attempt(self._try(parcel, network))
        self._release(parcel, network)
        if problem is not None:
            self.answer(parcel.envelope, problem, network)

    def _release(self, parcel: Parcel, network: str) -> None:
        """Count ``parcel``, which came from ``network``, no longer as under way."""
        size = _size(parcel)
        if parcel.receiver is not None:
            self.waiting.give_back(parcel.receiver, network, size)
            parcel.receiver = None
            return
        self.pending.give_back(network, size)
        session, parcel.session = parcel.session, None
        if session is None:  # other relays were asked before
            return
        session.pending -= 1
        session.pending_bytes -= size
        limits, shell = self._limits, session.owner
        if (
            shell is not None  # it may have ended
            and session.pending <= limits.pending_per_session // 2
            and session.pending_bytes <= limits.pending_session_bytes // 2
        ):
            shell.hold(HOLD, False)

    def _may_wait(self, parcel: Parcel, network: str, receiver: str) -> bool:
        """Count ``parcel`` for the network ``receiver`` instead of the session that sent it, if there is room.

        It waits until earlier ones for the same session are in the store. That takes seconds if a stranger wishes, who can
        also cause many such envelopes: by requests from that session.
        """
        if not self.waiting.take(receiver, network, _size(parcel)):
            return False
        self._release(parcel, network)
        parcel.receiver = receiver
        return True

    async def _attempt(self, work: _Work) -> RelayProblem | None:
        """The result of ``work``, or the problem that its failure stands for."""
        try:
            return await work
        except RegistryError as error:
            self.background.complain("a twin cannot be looked up", error)
            return RelayProblem.REGISTRY_FAILED
        except StoreFull as full:
            if full.scope == "disk":  # senders cannot mend that, but the operator can
                self.background.complain("an envelope cannot be stored", full)
            return RelayProblem.NOT_STORED
        except StoreError as error:
            self.background.complain("an envelope cannot be stored", error)
            return RelayProblem.NOT_STORED
        except CancelledError:  # the post it came with took too long, or the relay stops
            return RelayProblem.NOT_STORED
        except Exception:  # a bug loses only this envelope, and the session goes on
            _log.failure("an envelope cannot be routed")
            return RelayProblem.NOT_STORED

    async def _try(self, parcel: Parcel, network: str) -> RelayProblem | None:
        envelope, data, to = parcel.envelope, parcel.data, parcel.to
        if to in self._switch.sessions:
            return await self._keep(parcel, network)
        self._asking.setdefault(to, {})[id(parcel)] = parcel
        twin = None
        try:
            twin = await self._look_ups.get(to.twin, network)
        except RegistryError:
            if not parcel.delivered:
                raise
        finally:
            self._asked(parcel)
        if parcel.delivered:
            return None
        if twin is None:
            return RelayProblem.UNKNOWN_TWIN
        if not twin.relays:
            return RelayProblem.NO_RELAYS
        now_s = self._unix_time()
        left_s = remaining(now_s, envelope.timestamp, envelope.expiration)
        if left_s is None:  # the registry took long
            return RelayProblem.EXPIRED
        if self.keeper.here(to, data):
            return None
        expires_at = int(now_s) + left_s
        federation = self.federation
        if not any(relay.lower() in self._domains for relay in twin.relays):
            if federation is None:
                return RelayProblem.OFFLINE
            problem = federation.submit(
                envelope,
                data,
                twin,
                expires_at,
                lambda in_doubt: self._run_again(self._try, parcel, network, in_doubt),
            )
            if problem is None:
                self._switch.counts.federated += 1
            return problem
        is_beside = False
        away: StoreError | None = None
        try:
            is_beside = self._store.shared and await self._store.connected(to)
        except StoreError as error:  # it cannot say whether another process has the session; another relay may have it
            away = error
        if is_beside:
            return await self._keep(parcel, network)
        if federation is not None and federation.elsewhere(
            envelope,
            data,
            twin,
            expires_at,
            lambda in_doubt: self._run_again(self._park, parcel, network, in_doubt),
        ):
            return None
        if away is not None:
            raise away
        return await self._park(parcel, network)

    def _asked(self, parcel: Parcel) -> None:
        asking = self._asking[parcel.to]
        del asking[id(parcel)]
        if not asking:
            del self._asking[parcel.to]

    def joined(self, session: SessionAddress) -> None:
        """Give a session that has just connected the envelopes whose twin is being looked up, ahead of later ones."""
        for parcel in self._asking.get(session, {}).values():
            envelope = parcel.envelope
            if (
                not parcel.delivered
                and remaining(self._unix_time(), envelope.timestamp, envelope.expiration) is not None
            ):
                parcel.delivered = self._switch.deliver(session, parcel.data)
                if not parcel.delivered:  # nor may shorter ones overtake it
                    break

    async def _park(self, parcel: Parcel, network: str) -> RelayProblem | None:
        """Store an envelope for a session that is connected nowhere."""
        if fails_fast(parcel.envelope.tags) and parcel.to not in self._switch.sessions:
            return RelayProblem.OFFLINE
        return await self._keep(parcel, network)

    def _keep(self, parcel: Parcel, network: str) -> _Work:
        may_wait = partial(self._may_wait, parcel, network)
        return self.keeper.keep(parcel.to, parcel.data, parcel.envelope, network, may_wait)

    def _run_again(self, work: Callable[[Parcel, str], _Work], parcel: Parcel, network: str, in_doubt: bool) -> None:
        """Do ``work`` for an envelope that was offered to other relays. ``in_doubt``: one of them may have taken it."""
        # A parcel of its own: if these relays do not answer, this is called at once, while the other one still counts.
        again = replace(parcel, session=None)
        self.background.run(self._again(work(again, network), again, network, in_doubt))

    async def _again(self, work: _Work, parcel: Parcel, network: str, in_doubt: bool) -> None:
        self.pending.take(network, _size(parcel))  # even without room: the envelope was accepted before
        problem = await self._attempt(work)
        self._release(parcel, network)
        if problem is not None and in_doubt and problem.is_certain(problem.text):
            problem = RelayProblem.NOT_STORED  # after another problem a client may send it again over another relay
        if problem is not None:
            self.answer(parcel.envelope, problem, network)

    # --- from relays, and of our own -------------------------------------------------------------------------------

    def accept(self, envelope: Envelope, data: bytes, connected_only: bool) -> int | Deferred[int]:
        """Accept a checked envelope that another relay has posted for a twin of this relay; returns an HTTP status.

        With ``connected_only`` or the tag ``fail-fast`` it is accepted only for a connected session. The caller flushes.
        """
        to = SessionAddress.of(envelope.destination)
        if self._switch.deliver(to, data):
            self._count(data)
            return _ACCEPTED
        is_asked = connected_only
        if not is_asked:
            self._count(data)
        connected_only = connected_only or fails_fast(envelope.tags)
        if connected_only and not self._store.shared and to not in self._switch.sessions:
            return _OFFLINE
        if self.keeper.pushing_bytes + len(data) > self._limits.queued_total_bytes:
            self._switch.note(envelope.source.twin, RelayProblem.NOT_STORED)
            return _UNAVAILABLE
        return ensureDeferred(self._accept(Parcel(outline(envelope), data, to, None), connected_only, is_asked))

    def _count(self, data: bytes) -> None:
        """Count an envelope that another relay has posted. One that was only for a connected session, which is not here, is not
        counted: the other relay posts it again, to this relay or another."""
        counts = self._switch.counts
        counts.ingested += 1
        counts.bytes += len(data)

    async def _accept(self, parcel: Parcel, connected_only: bool, is_asked: bool) -> int:
        problem = await self._attempt(self._keep_post(parcel, connected_only, is_asked))
        if problem is None:
            return _ACCEPTED
        if problem is RelayProblem.OFFLINE:
            return _OFFLINE
        self._switch.note(parcel.envelope.source.twin, problem)
        return _REFUSED if problem is RelayProblem.EXPIRED else _UNAVAILABLE

    async def _keep_post(self, parcel: Parcel, connected_only: bool, is_asked: bool) -> RelayProblem | None:
        if connected_only and parcel.to not in self._switch.sessions and not await self._store.connected(parcel.to):
            return RelayProblem.OFFLINE
        if is_asked:
            self._count(parcel.data)
        return await self.keeper.keep(parcel.to, parcel.data, parcel.envelope, _RELAYS)

    def answer(self, envelope: Envelope, problem: RelayProblem, network: str = _RELAYS) -> None:
        """Tell the sender of an undeliverable request why, wherever it is connected now. Other envelopes get no answer.

        ``network`` is where the request came from.
        """
        to = SessionAddress.of(envelope.source)
        self._switch.note(to.twin, problem)
        if not envelope.HasField("request"):
            return
        error = encode_envelope(relay_error(envelope, problem, int(self._unix_time()), to))
        session = self._switch.sessions.get(to)
        if session is None:
            self.background.run(self.keeper.answer(to, error, network))
        elif not session.overloaded:
            session.say(error)
            self._flush()


def _size(parcel: Parcel) -> int:
    """Bytes that an envelope under way counts for."""
    return held_bytes(parcel.envelope, parcel.data) + _PARCEL_BYTES
