"""The switch of a relay: which sessions are connected, and where each envelope goes. Pure.

:ref:`spec-rmb-routing`. An envelope is parsed once, and its bytes are forwarded unchanged. :meth:`Switch.route` queues
envelopes for connected sessions that have room, and returns all others as :class:`Parcel`: for these, the caller has to ask
the registry, the store and federation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import MalformedEnvelope, RelayProblem
from dmsg.rmb.core.limiter import FixedWindow, Limit
from dmsg.rmb.core.limits import MAX_AHEAD_S, MAX_CONNECTION_BYTES, MAX_TTL_S
from dmsg.rmb.core.replies import answer_ping, relay_error
from dmsg.rmb.core.wire import Envelope, encode_envelope, outline, parse_envelope
from dmsg.rmb.relay.limits import RelayLimits
from dmsg.rmb.relay.session import Session, Traffic
from dmsg.serving.loads import enough, largest_first, to_free

#: How many rate limits are looked at to find one to forget. Those of twins with sessions stay, so there may be more than
#: ``limited_twins``, by a seventh of the twins that have sessions.
_LOOKED_AT: Final = 8


@dataclass(slots=True)
class Parcel:
    """An envelope's outline and its bytes, for a session that is not connected here or has no room now.

    ``session`` is the session that sent the envelope, as long as it counts for that as under way.
    """

    envelope: Envelope
    data: bytes
    to: SessionAddress
    session: Session | None
    #: Whether the session that it is for has connected meanwhile, and has it.
    delivered: bool = False
    #: Once it counts for that: the network of the session it is for, whose earlier envelopes are on their way to the store.
    receiver: str | None = None


@dataclass(slots=True)
class Counts:
    """What happened to envelopes since the relay started; the fields are :class:`~dmsg.eventlog.schema.EnvelopesRouted`'s."""

    received: int = 0
    ingested: int = 0
    local: int = 0
    stored: int = 0
    fetched: int = 0
    federated: int = 0
    expired: int = 0
    refused: int = 0
    bytes: int = 0


class Switch(Traffic):
    """The sessions of a relay. Times are on the clock of the shells, ``unix_s`` is Unix time; both in seconds."""

    def __init__(self, limits: RelayLimits | None = None, *, limit: Limit | None = None) -> None:
        super().__init__(limits or RelayLimits())
        #: Sessions by address. The keys are plain tuples, which equal a ``SessionAddress`` and are faster to make.
        self.sessions: dict[tuple[int, str | None], Session] = {}
        self.counts = Counts()
        #: Bytes of the envelopes that were taken for sessions, connected or not.
        self.taken_bytes = 0
        #: Refused envelopes: the sending twin, and the reason. The service reports them to the event log and empties the list.
        self.problems: list[tuple[int, RelayProblem]] = []
        self._of_twin: dict[int, dict[Session, None]] = {}
        self._limit = limit
        self._limiters: OrderedDict[int, FixedWindow] = OrderedDict()

    # --- sessions --------------------------------------------------------------------------------------------------

    def join(self, session: Session) -> Session | None:
        """Make ``session`` reachable. Returns the older session of the same twin and name, which the caller must close.

        From now on, envelopes for this address wait for the newer session.
        """
        address = session.address
        older = self.sessions.get(address)
        self.sessions[address] = session
        if older is not None:
            self._forget(older)
        self._of_twin.setdefault(address.twin, {})[session] = None
        if self._limit is not None:
            session.limiter = self._limiter_of(address.twin, self._limit)
        return older

    def leave(self, session: Session) -> bool:
        """Forget ``session``; returns ``False`` if it was not reachable, as when a newer session has taken its address."""
        session.resume()
        session.count_incoming(0)
        session.count_said(0)
        if self.sessions.get(session.address) is not session:
            return False
        del self.sessions[session.address]
        self._forget(session)
        return True

    def _forget(self, session: Session) -> None:
        others = self._of_twin[session.address.twin]
        del others[session]
        if not others:
            del self._of_twin[session.address.twin]

    def surplus(self, address: SessionAddress) -> Session | None:
        """The least recently used session of this twin, if it has to end before ``address`` may join; otherwise ``None``."""
        sessions = self._of_twin.get(address.twin, {})
        if address in self.sessions or len(sessions) < self.limits.sessions_per_twin:
            return None
        return min(sessions, key=lambda session: session.used_at)

    def _limiter_of(self, twin: int, limit: Limit) -> FixedWindow:
        """The rate limit of a twin, which all its sessions share and which outlives them."""
        limiter = self._limiters.pop(twin, None) or FixedWindow(limit)
        self._limiters[twin] = limiter
        if len(self._limiters) > self.limits.limited_twins:
            for one in list(islice(self._limiters, _LOOKED_AT)):
                if one not in self._of_twin:
                    del self._limiters[one]
                    break
                self._limiters.move_to_end(one)  # it has sessions: look at it again when all others had their turn
        return limiter

    # --- envelopes -------------------------------------------------------------------------------------------------

    def route(self, session: Session, messages: Sequence[bytes], now: float, unix_s: float) -> list[Parcel]:
        """Route messages that ``session`` has sent. Sessions that have to write because of them are in :attr:`dirty`.

        Raises :class:`~dmsg.rmb.core.errors.MalformedEnvelope`, with the parcels of the messages before it as ``events``.
        """
        self.now = session.used_at = now
        sessions, limiter, source, dirty = self.sessions, session.limiter, session.source, self.dirty
        # While earlier ones wait for their turns, all become parcels and wait behind these.
        queue_bytes = self.limits.queue_bytes if session.later is None else -1
        is_returning = self.returning.used
        now_s, latest = int(unix_s), unix_s + MAX_AHEAD_S  # as in :func:`~dmsg.rmb.core.lifetime.remaining`
        parcels: list[Parcel] = []
        full: set[Session] = set()  # all that follows for these becomes a parcel too: short ones must not overtake
        received = queued = local = 0
        try:
            for data in messages:
                size = len(data)
                received += size
                envelope = parse_envelope(data)
                destination = envelope.destination
                stamped, good_s = envelope.timestamp, envelope.expiration
                if limiter is not None and not limiter.admit(size, unix_s):
                    self.refuse(envelope, RelayProblem.RATE_LIMITED, session, unix_s)
                elif envelope.source != source:
                    self.refuse(envelope, RelayProblem.WRONG_SOURCE, session, unix_s)
                elif envelope.HasField("ping"):
                    answer_ping(envelope)
                    session.say(encode_envelope(envelope))
                elif not destination.twin:
                    self.refuse(envelope, RelayProblem.NO_DESTINATION, session, unix_s)
                elif stamped > latest or stamped + (good_s if good_s < MAX_TTL_S else MAX_TTL_S) <= now_s:
                    self.refuse(envelope, RelayProblem.EXPIRED, session, unix_s)
                else:
                    to = (destination.twin, destination.connection if destination.HasField("connection") else None)
                    target = sessions.get(to)
                    if (
                        target is None
                        or target.waiting_bytes + size > queue_bytes
                        or (is_returning and not target.has_room(size))
                        or (full and target in full)
                    ):
                        if len(destination.connection) > MAX_CONNECTION_BYTES:  # no session can have such a name
                            self.refuse(envelope, RelayProblem.NO_DESTINATION, session, unix_s)
                        else:
                            if target is not None:
                                full.add(target)
                            parcels.append(Parcel(outline(envelope), data, SessionAddress(*to), session))
                        continue
                    (target.behind if target.stored else target.queue).append(data)
                    target.waiting_bytes += size
                    queued += size
                    local += 1
                    if not target.dirty:
                        target.dirty = True
                        dirty.append(target)
        except MalformedEnvelope as error:
            error.events = parcels
            raise
        finally:
            session.envelopes_in += len(messages)
            session.bytes_in += received
            self.waiting_bytes += queued
            self.taken_bytes += queued
            counts = self.counts
            counts.received += len(messages)
            counts.bytes += received
            counts.local += local
        return parcels

    def deliver(self, to: SessionAddress, data: bytes, *, is_new: bool = True) -> bool:
        """Queue ``data`` for the session ``to`` if it is connected and has room; see :meth:`Session.put`."""
        target = self.sessions.get(to)
        if target is None or not target.put(data, is_new=is_new):
            return False
        self.counts.local += 1
        self.taken_bytes += len(data)
        return True

    def refuse(self, envelope: Envelope, problem: RelayProblem, session: Session, unix_s: float) -> None:
        """Refuse an envelope that ``session`` has sent. Only a request is answered with the reason."""
        self.note(session.address.twin, problem)
        if envelope.HasField("request"):
            session.say(encode_envelope(relay_error(envelope, problem, int(unix_s), session.address)))

    def note(self, twin: int, problem: RelayProblem) -> None:
        """Count a refused envelope of ``twin``."""
        self.counts.refused += 1
        if problem is RelayProblem.EXPIRED:
            self.counts.expired += 1
        self.problems.append((twin, problem))

    def overfull(self) -> list[Session]:
        """The sessions to close because a limit of memory is exceeded, mostly none: until 1/64 of the limit is free.

        The next one is always the largest of the network that has the most left.
        """
        limits, loads = self.limits, self.incoming
        if self.waiting_bytes > limits.queued_total_bytes:
            # Not only those whose network takes nothing: much may wait behind envelopes in a store that is slow. And some of
            # those have left, and take the last bytes.
            sessions = {**dict.fromkeys(self.sessions.values()), **self.stalled}
            loads = {session: held for session in sessions if (held := session.held_bytes)}
            least = to_free(self.waiting_bytes, limits.queued_total_bytes)
        elif self.incoming_total_bytes > limits.incoming_total_bytes:
            least = to_free(self.incoming_total_bytes, limits.incoming_total_bytes)
        else:
            return []
        return enough(largest_first(loads), loads.__getitem__, least)
