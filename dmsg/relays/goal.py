"""Keeps up the sessions a client wants: which relays it tries, when, and which attempts it gives up.

:mod:`dmsg.relays.candidates` has the order of candidates, :mod:`dmsg.relays.race` how many run at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from dmsg.address import HostPort, network_group
from dmsg.crypto.keys import PublicKey
from dmsg.errors import StageError
from dmsg.relays.candidates import REMEMBERED_IN_TURN, Candidate, alternate, spread
from dmsg.relays.choice import RelayChoice
from dmsg.relays.listed import ListedRelays
from dmsg.relays.race import Race, RaceConfig
from dmsg.relays.scores import RelayScores
from dmsg.relays.state import RelayFile
from dmsg.sansio.backoff import SHORTEST_PAUSE_S, Backoff

#: How many sessions a client keeps up by default, each with a relay of another network group, so that the owner of one
#: network cannot cut it off.
DEFAULT_GROUPS: Final = 2
#: A client that has lost its last session asks discovery at once, but not within this many seconds after the last question: a
#: relay that drops its clients again and again makes them ask once a second at most.
ALONE_PAUSE_S: Final = 1.0
#: Addresses of relays that are remembered: as many as an operator's list may name without an address.
LEARNED_LIMIT: Final = 1_000


class Sessions(TypingProtocol):
    """The sessions there are, and how they are made: the pool."""

    @property
    def sessions(self) -> Collection[PublicKey]:
        """The relays there is a session with."""

    @property
    def chosen(self) -> Collection[PublicKey]:
        """Those that the goal or the program wants. Sessions made only for dials do not count: a peer chose their relays."""

    def choose(self, relay: PublicKey) -> None:
        """Let the goal keep the session with ``relay``, which a dial has made."""

    @property
    def pinned(self) -> Mapping[PublicKey, HostPort]:
        """The relays that are always wanted."""

    def get(
        self,
        relay: PublicKey,
        candidate: Candidate | None = None,
        *,
        wanted_at: Callable[[HostPort], bool] | None = None,
    ) -> Deferred[Any]:
        """The session with ``relay``, made if there is none.

        ``wanted_at`` says whether the relay is wanted, once its address is known.
        """

    def give_up(self, relay: PublicKey, *, blame: bool) -> None:
        """End an attempt that nothing waits for; with ``blame`` it counts as a failure."""

    def leave_unlisted(self) -> None:
        """End sessions and attempts with relays that may not be used any more."""

    def connecting(self, relay: PublicKey) -> bool:
        """Whether there is an attempt."""

    def rested_at(self, relay: PublicKey) -> float:
        """When the relay may be tried again, by the clock."""

    def group_of(self, relay: PublicKey) -> str:
        """The network group of a relay with a session; "" for another one."""

    def address_of(self, relay: PublicKey) -> HostPort:
        """The address of a relay with a session."""


class SessionGoal:
    """Pursues ``wanted`` sessions in ``pool``, each with a relay of another network group as far as there are groups.

    ``None`` means :data:`DEFAULT_GROUPS` groups: one where there is only one, and with pinned relays none besides these.
    ``listed`` has the relays that discovery lists, ``memory`` those that worked in earlier runs, ``operator`` the list that an
    operator has signed: while one of its relays can be tried, no other is. Discovery is asked every ``poll_s`` seconds while
    too few sessions are up; with one up and only a second group missing, the pause grows to ``poll_limit_s``.
    """

    def __init__(
        self,
        clock: IReactorTime,
        pool: Sessions,
        wanted: int | None,
        *,
        listed: ListedRelays,
        memory: RelayFile | None,
        operator: RelayChoice | None,
        scores: RelayScores,
        uniform: Callable[[], float],
        race: RaceConfig,
        poll_s: float,
        poll_limit_s: float,
    ) -> None:
        self.wanted = wanted
        self._clock = clock
        self._pool = pool
        self._listed = listed
        listed.changed = self.look
        self._memory = memory
        self._operator = operator
        if operator is not None:
            operator.changed = self._relisted
        #: Addresses found for relays that the operator's list names without an address, and for relays that have moved.
        self._learned: dict[PublicKey, HostPort] = {}
        self._scores = scores
        self._uniform = uniform
        self._race = Race(race)
        self._poll_s = poll_s
        self._idle_backoff = Backoff(poll_s, poll_limit_s)
        self._waiters: dict[PublicKey, Deferred[Any]] = {}
        #: How often in a row discovery was asked with a session up and a second group missing.
        self._idle_looks = 0
        self._look_jitter = 1.0
        self._alone_since: float | None = None  # when the last session was lost
        self._timer: IDelayedCall | None = None
        self._stepping = self._nudged = False
        self._running = False

    def start(self) -> None:
        """Begin."""
        self._running = True
        self.look()

    def stop(self) -> None:
        """Start nothing more."""
        self._running = False
        self._listed.stop()
        self._wake_in(None)
        if self._memory is not None:
            self._memory.holds(self._pool.chosen)
            self._memory.save()

    def lost(self, relay: PublicKey) -> None:
        """The session with ``relay`` is over: another one is wanted soon."""
        if self._memory is not None:
            self._memory.holds([relay])
        self._idle_looks = 0
        if not self._pool.chosen:
            self._alone_since = self._clock.seconds()
        self.look()

    def _relisted(self) -> None:
        """A new list of the operator is in force."""
        self._pool.leave_unlisted()
        self.look()

    def look(self) -> None:
        """Compare the sessions with the goal: something has changed, or it is time to."""
        self._nudged = True
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._nudged and self._running:
                self._nudged = False
                self._wake_in(self._step())
        finally:
            self._stepping = False

    def _wake_in(self, pause_s: float | None) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None if pause_s is None else self._clock.callLater(max(SHORTEST_PAUSE_S, pause_s), self.look)

    def _step(self) -> float | None:
        """Start the attempts that there is room for, and give up those not wanted any more; gives the time to the next look."""
        if self.wanted == 0:
            return None
        wake_at = self._keep_pinned()
        missing = self._missing()
        if missing <= 0:
            self.give_up(self._race.all())
        else:
            self.give_up(self._race.unwanted(self._held_groups()))
            wake_at += self._run_race(missing)
        return min(wake_at) - self._clock.seconds() if wake_at else None

    def _keep_pinned(self) -> list[float]:
        """Connect every pinned relay; gives when to look again."""
        now, wake_at = self._clock.seconds(), []
        for relay in self._pool.pinned:
            if relay in self._pool.sessions or self._pool.connecting(relay):
                continue
            rested_at = self._pool.rested_at(relay)
            if rested_at <= now:
                self._pool.get(relay).addErrback(lambda failure: failure.trap(StageError))
            else:
                wake_at.append(min(rested_at, now + self._poll_s * self._jitter()))
        return wake_at

    def _missing(self) -> int:
        """How many more sessions with relays that are not pinned are wanted."""
        if self.wanted is None:
            return 0 if self._pool.pinned else DEFAULT_GROUPS - len(self._held_groups())
        pinned_under_way = sum(1 for relay in self._pool.pinned if self._pool.connecting(relay))
        return self.wanted - len(self._pool.chosen) - pinned_under_way if len(self._pool.pinned) < self.wanted else 0

    def _held_groups(self) -> set[str]:
        """The groups that the goal does not need any more: one relay of each is enough, unless a number was asked for."""
        return {self._pool.group_of(relay) for relay in self._pool.chosen} if self.wanted is None else set()

    def _run_race(self, missing: int) -> list[float]:
        """Race for ``missing`` sessions; gives when to look again."""
        now, race = self._clock.seconds(), self._race
        wake_at = [self._look_at(now)]
        if wake_at[0] is not None and wake_at[0] <= now:
            self._idle_looks = self._idle_looks + 1 if self._pool.chosen else 0
            self._look_jitter = self._jitter()
            self._listed.ask()
            wake_at = [self._look_at(now)]
        candidates = self._candidates()
        missing -= self._take_made(candidates, missing)
        if missing <= 0:
            self.give_up(race.all())
            return []
        of_a_group = 1 if self.wanted is None else missing
        waits = False
        for one in filter(self._is_wanted, candidates):
            if one.public_key in self._pool.sessions:
                continue  # in a network that is in use
            rested_at = self._pool.rested_at(one.public_key)
            if rested_at > now:
                wake_at.append(rested_at)
            elif race.room(one.group, now, of_a_group=of_a_group, hurried=not self._pool.sessions):
                self._enter(one)
            else:
                waits = True
        usable_at = self._listed.usable_at()  # in the past if discovery was asked and has not answered
        wake_at += [race.next_s(now) if waits else None, usable_at if usable_at > now else None]
        return [at_s for at_s in wake_at if at_s is not None]

    def _take_made(self, candidates: Iterable[Candidate], missing: int) -> int:
        """Adopt up to ``missing`` sessions with ``candidates`` that dials have made; gives how many."""
        taken = 0
        for one in candidates:
            relay = one.public_key
            if taken == missing:
                break
            if relay in self._pool.sessions and self._pool.group_of(relay) not in self._held_groups():
                self._pool.choose(relay)
                self._note_worked(relay)
                taken += 1
        return taken

    def _enter(self, candidate: Candidate) -> None:
        """Let ``candidate`` run in the race; if there are too many, the oldest attempt makes room."""
        relay, oldest = candidate.public_key, self._race.surplus()
        if oldest is not None:
            self.give_up([oldest])
        self._race.start(relay, candidate.group, self._clock.seconds())
        waiter = self._waiters[relay] = self._pool.get(
            relay, candidate, wanted_at=lambda address: self._wanted_at(relay, address)
        )
        waiter.addBoth(self._ran, relay)

    def _ran(self, result: object, relay: PublicKey) -> None:
        self._race.end(relay)
        self._waiters.pop(relay, None)
        if not isinstance(result, Failure):
            self._note_worked(relay)

    def _note_worked(self, relay: PublicKey) -> None:
        if self._memory is not None:
            self._memory.holds(self._pool.chosen)  # the other sessions may have been up for months
            self._memory.worked(relay, self._pool.address_of(relay))
            self._memory.save()

    def give_up(self, relays: Iterable[PublicKey]) -> None:
        """Take attempts out of the race, and end those that nothing else waits for."""
        now = self._clock.seconds()
        for relay in relays:
            overtaken = self._race.overtaken(relay, now)
            self._race.end(relay)
            waiter = self._waiters.pop(relay, None)
            if waiter is not None:
                waiter.cancel()
            self._pool.give_up(relay, blame=overtaken)

    def _look_at(self, now: float) -> float | None:
        """When to ask discovery for relays; ``None`` while it is being asked, or if there is none."""
        if not self._listed.there or self._listed.asking:
            return None
        if self._listed.asked_s is None:
            return now
        pause_s = self._poll_s
        if self.wanted is None and self._pool.chosen:
            pause_s = self._idle_backoff.longest_s(self._idle_looks + 1)
        asked_s, alone_s = self._listed.asked_s, self._alone_since
        if alone_s is not None and asked_s <= alone_s and not self._pool.chosen:
            return max(alone_s, asked_s + ALONE_PAUSE_S)  # the relays listed before may be those that were just lost
        return asked_s + pause_s * self._look_jitter

    def _candidates(self) -> list[Candidate]:
        """Relays that may be tried, the likelier ones first; only remembered ones until discovery has answered."""
        now, listed = self._clock.seconds(), {one.public_key: one for one in self._listed.relays}
        remembered = {one.public_key: one for one in self._remembered()}

        def drawn(relays: Iterable[Candidate]) -> list[Candidate]:
            wanted = [one for one in relays if self._is_wanted(one)]
            scores = self._scores
            return spread(
                wanted, lambda keys: scores.draw(keys, self._uniform, now), lambda keys: scores.best(keys, now)
            )

        named = {one.public_key: one for one in self._named()}
        preferred = drawn(named.values())
        if self._operator is not None:
            ready = any(self._pool.rested_at(one.public_key) <= now for one in preferred)
            running = any(one in named and not self._race.overtaken(one, now) for one in self._race.all())
            if self._operator.only or ready or running:
                return preferred
        if self._listed.usable_at() > now:
            others = drawn(remembered.values())[: max(0, REMEMBERED_IN_TURN - len(self._race))]
            return [*others, *preferred]
        kept = drawn(listed.get(key, one) for key, one in remembered.items())
        others = drawn(one for key, one in listed.items() if key not in remembered)
        taken = {self._pool.group_of(relay) for relay in self._pool.sessions}
        return [*sorted(alternate(kept, others), key=lambda one: one.group in taken), *preferred]

    def _remembered(self) -> list[Candidate]:
        """The relays that worked in earlier runs, each with the address that was found when it was last looked up.

        Otherwise a relay that has moved into a network in use would be looked up again and again.
        """
        remembered = self._memory.relays if self._memory is not None else []
        return [replace(one, address=self._learned.get(one.public_key, one.address)) for one in remembered]

    def _named(self) -> list[Candidate]:
        """The relays of the operator's list."""
        if self._operator is None:
            return []
        known = {**self._learned, **{one.public_key: one.address for one in self._listed.relays}}
        named = self._operator.relays()
        return [Candidate(one.public_key, one.address or known.get(one.public_key)) for one in named]

    def _jitter(self) -> float:
        return 0.75 + self._uniform() / 2

    def _wanted_at(self, relay: PublicKey, address: HostPort) -> bool:
        if len(self._learned) >= LEARNED_LIMIT:
            self._learned.clear()
        self._learned[relay] = address
        return network_group(address.host) not in self._held_groups()

    def _is_wanted(self, one: Candidate) -> bool:
        """Whether the goal has a use for the relay at all."""
        relay = one.public_key
        known = relay in self._pool.chosen or relay in self._race or relay in self._pool.pinned
        return not known and one.group not in self._held_groups()
