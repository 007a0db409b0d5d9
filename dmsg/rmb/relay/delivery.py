"""What becomes of envelopes whose session is not connected here: the registry, other relays and the store are asked.

:ref:`spec-rmb-routing`, :ref:`spec-rmb-queues`. Order of what is tried: the session, if it is here after all; other relays
of the twin; the store, if this is one of its relays. What cannot be delivered is answered with an error if it is a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.interfaces import IReactorTime
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
from dmsg.rmb.relay.lanes import Room, held_bytes
from dmsg.rmb.relay.lookups import LookUps
from dmsg.rmb.relay.session import Session
from dmsg.rmb.relay.stores.base import QueueStore
from dmsg.rmb.relay.switch import Parcel, Switch
from dmsg.rmb.twins.errors import RegistryError

_log = Logger()
#: Why a session is not read from while too many of its envelopes wait for others.
HOLD: Final = "pending"
#: What an envelope under way counts for beside its bytes and the texts of its outline: 5.6 kB were measured of one that waits
#: for the registry.
_PARCEL_BYTES: Final = 5632
_ACCEPTED: Final = 202
_REFUSED: Final = 400
_OFFLINE: Final = 404
_UNAVAILABLE: Final = 503

#: Routes an envelope, and gives why that is not possible.
_Work = Coroutine[Deferred[Any], Any, RelayProblem | None]


class Federation(Protocol):
    """What a relay needs of the part that posts to other relays. Times are Unix seconds."""

    def submit(
        self, envelope: Envelope, data: bytes, twin: Twin, expires_at: float, moved_here: Callable[[bool], None]
    ) -> RelayProblem | None:
        """Bring it to a relay of ``twin`` before ``expires_at``; gives why that is not even tried.

        ``moved_here`` is called if the twin has this relay meanwhile, with whether another one may have taken it.
        """

    def elsewhere(
        self, envelope: Envelope, data: bytes, twin: Twin, expires_at: float, otherwise: Callable[[bool], None]
    ) -> bool:
        """Bring it to a relay that has the session connected, or call ``otherwise``; ``False`` if there is none to ask.

        ``otherwise`` is given whether one may have taken it.
        """


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
        self._domains = frozenset(domain.lower() for domain in domains)
        self._unix_time = unix_time
        self._flush = flush
        #: What is under way, shared by the networks it comes from.
        self.pending: Room = Room(self._limits.pending_total_bytes)
        #: Envelopes on their way to the store, to other relays, or from the store to sessions.
        self.background = Background(clock)
        #: What is in the store, or on its way there.
        self.keeper = Keeper(switch, store, self.background, clock=clock, unix_time=unix_time, flush=flush)

    # --- from sessions ---------------------------------------------------------------------------------------------

    def take(self, parcels: Sequence[Parcel]) -> None:
        """Carry ``parcels`` on. The session they are from is not read from while too many wait."""
        limits = self._limits
        left = deque(parcels)
        while left:  # the one before has to wait for something
            self.background.run(self._carry_some(left))
        for session in {parcel.session for parcel in parcels}:
            assert session is not None
            if session.pending > limits.pending_per_session or session.pending_bytes > limits.pending_session_bytes:
                session.owner.hold(HOLD, True)

    async def _carry_some(self, parcels: deque[Parcel]) -> None:
        """Carry the next ones on, until there are none or one has to wait: a task for each of those, not for each parcel."""
        while parcels:
            parcel = parcels.popleft()
            session, size = parcel.session, _size(parcel)
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
        size = _size(parcel)
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

    async def _attempt(self, work: _Work) -> RelayProblem | None:
        """What ``work`` gives, or what its failure means."""
        try:
            return await work
        except RegistryError as error:
            self.background.complain("a twin cannot be looked up", error)
            return RelayProblem.REGISTRY_FAILED
        except StoreFull as full:
            if full.scope == "disk":  # which is not for senders to mend, but for who runs the relay
                self.background.complain("an envelope cannot be stored", full)
            return RelayProblem.NOT_STORED
        except StoreError as error:
            self.background.complain("an envelope cannot be stored", error)
            return RelayProblem.NOT_STORED
        except CancelledError:  # the post it came with took too long, or the relay stops
            return RelayProblem.NOT_STORED
        except Exception:  # a bug costs this one envelope, and the session goes on
            _log.failure("an envelope cannot be routed")
            return RelayProblem.NOT_STORED

    async def _try(self, parcel: Parcel, network: str) -> RelayProblem | None:
        envelope, data, to = parcel.envelope, parcel.data, parcel.to
        if to in self._switch.sessions:
            return await self.keeper.keep(to, data, envelope)
        twin = await self._look_ups.get(to.twin, network)
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
                lambda in_doubt: self._run_again(self._try(parcel, network), parcel, network, in_doubt),
            )
            if problem is None:
                self._switch.counts.federated += 1
            return problem
        if self._store.shared and await self._store.connected(to):
            return await self.keeper.keep(to, data, envelope)
        if federation is not None and federation.elsewhere(
            envelope,
            data,
            twin,
            expires_at,
            lambda in_doubt: self._run_again(self._park(parcel), parcel, network, in_doubt),
        ):
            return None
        return await self._park(parcel)

    async def _park(self, parcel: Parcel) -> RelayProblem | None:
        """Let an envelope wait for a session that is connected nowhere."""
        if fails_fast(parcel.envelope.tags) and parcel.to not in self._switch.sessions:
            return RelayProblem.OFFLINE
        return await self.keeper.keep(parcel.to, parcel.data, parcel.envelope)

    def _run_again(self, work: _Work, parcel: Parcel, network: str, in_doubt: bool) -> None:
        """Do ``work`` for an envelope that other relays were asked to take. One may have taken it if that is ``in_doubt``."""
        self.background.run(self._again(work, parcel, network, in_doubt))

    async def _again(self, work: _Work, parcel: Parcel, network: str, in_doubt: bool) -> None:
        size = _size(parcel)
        self.pending.take(network, size)  # whether there is room or not: it was taken before
        problem = await self._attempt(work)
        self.pending.give_back(network, size)
        if problem is not None and in_doubt and problem.is_certain(problem.text):
            problem = RelayProblem.NOT_STORED  # a client may do it over another relay otherwise
        if problem is not None:
            self.answer(parcel.envelope, problem)

    # --- from relays, and of our own -------------------------------------------------------------------------------

    def accept(self, envelope: Envelope, data: bytes, connected_only: bool) -> int | Deferred[int]:
        """Take what another relay has posted for a twin of this one, which has been checked; gives an HTTP status.

        With ``connected_only``, or if it shall fail fast, it is taken only if its session is connected. The caller flushes.
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
        """Count what another relay has posted, but not what it only asks about a session that is not here: it posts that
        again, to this relay or to another one."""
        counts = self._switch.counts
        counts.ingested += 1
        counts.bytes += len(data)

    async def _accept(self, parcel: Parcel, connected_only: bool, is_asked: bool) -> int:
        if connected_only and parcel.to not in self._switch.sessions and not await self._store.connected(parcel.to):
            return _OFFLINE
        if is_asked:
            self._count(parcel.data)
        problem = await self._attempt(self.keeper.keep(parcel.to, parcel.data, parcel.envelope))
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
            self.background.run(self.keeper.answer(to, error))
        elif not session.overloaded:
            session.say(error)
            self._flush()


def _size(parcel: Parcel) -> int:
    """What an envelope under way counts for."""
    return held_bytes(parcel.envelope, parcel.data) + _PARCEL_BYTES
