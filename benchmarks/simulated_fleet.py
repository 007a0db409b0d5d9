"""A simulated fleet: real clients, servers and discovery rules on a fake clock, over paths that are slow, lossy or break.

:func:`run_fleet` lets the clients of a :class:`FleetPlan` dial each other for a while and gives the results, together with
every event that servers and clients logged. The same plan with the same seed gives the same run, so that two runs differ
only by what was changed: whether clients measure relays, and whether discovery and clients have ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

from twisted.internet.defer import CancelledError, Deferred, DeferredList, ensureDeferred, maybeDeferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from zope.interface import implementer

from benchmarks.heapclock import HeapClock
from dmsg.address import HostPort
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.entry import Entry
from dmsg.discovery.listing import ServerListing
from dmsg.discovery.ranks import Ranks
from dmsg.discovery.stores.memory import MemoryStore
from dmsg.errors import DialError, DmsgError
from dmsg.eventlog.schema import Event
from dmsg.interfaces import IEventLog, IRankedDiscovery
from dmsg.mux.client.service import ClientConfig, DmsgClient
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.service import DmsgRelay
from dmsg.relays.scores import ScoreConfig
from dmsg.testing.memory import MemoryNetwork, Path
from dmsg.testing.pipe import Pipe

__all__ = ["FULL", "FleetPlan", "FleetRun", "LoggedEvent", "Path", "RelayState", "relay_key", "run_fleet"]

_FIRST_PORT: Final = 8000
#: Response time of discovery, in seconds.
_DISCOVERY_S: Final = 0.02
#: Clients arrive one after another within this time; dials begin and end this long after and before the run, in seconds.
_ARRIVAL_S: Final = 10.0
_QUIET_S: Final = 15.0
#: How long an opened transport is kept, in seconds.
_HOLD_S: Final = 2.0
_SHORTEST_LIFE_S: Final = 30.0
_SERVERS_LISTED: Final = 64
#: How long a connection is silent until keep-alives notice, in seconds.
STALL_S: Final = 75.0

#: A relay that grants each connection three transports and then one every 20 s, for the whole run.
FULL: Final = replace(RelayLimits(), requests_per_s=0.05, request_burst=3, drain_timeout_s=0.0)


@dataclass(frozen=True)
class RelayState:
    """The state of a relay for a while.

    ``path`` is the path to it. Each connection to it breaks ``breaks_per_hour`` times an hour, and falls silent
    ``stalls_per_hour`` times an hour; :data:`STALL_S` later it breaks.
    """

    path: Path = field(default_factory=lambda: Path(delay_s=0.02))
    breaks_per_hour: float = 0.0
    stalls_per_hour: float = 0.0


@dataclass(frozen=True)
class FleetPlan:
    """A fleet, and what happens to it.

    ``relays`` has the states of each relay, which divide the run into parts of equal length; ``limits`` are those of
    relays by number, if they are not the usual ones. Every client dials another one every ``dial_every_s`` seconds on
    average and keeps ``min_servers`` sessions up. Every client restarts without any memory after
    ``lifetime_s`` seconds on average. The run begins at Unix time ``starts_at_s`` and lasts ``duration_s``.
    """

    relays: Sequence[Sequence[RelayState]]
    limits: dict[int, RelayLimits] = field(default_factory=dict)
    clients: int = 50
    duration_s: float = 1200.0
    dial_every_s: float = 15.0
    lifetime_s: float = 60.0
    min_servers: int = 1
    seed: int = 1
    starts_at_s: float = 1_790_000_000.0


@dataclass(frozen=True)
class Dial:
    """One dial: its beginning (seconds from the start of the run), whether it got through, and its duration."""

    at_s: float
    ok: bool
    elapsed_ms: float
    reason: str


@dataclass(frozen=True)
class LoggedEvent:
    """An event and its envelope in the log: Unix time, role and the writer's key."""

    ts: float
    role: str
    key: PublicKey
    event: Event


@dataclass
class FleetRun:
    """The results of a run. ``ended_at_s`` is Unix time."""

    dials: list[Dial]
    events: list[LoggedEvent]
    ended_at_s: float

    @property
    def success(self) -> float:
        """The share of dials that got through."""
        return sum(one.ok for one in self.dials) / max(1, len(self.dials))

    def percentile_ms(self, fraction: float) -> float:
        """The time within which that share of all dials got through; a failed dial never does."""
        times = sorted(one.elapsed_ms if one.ok else float("inf") for one in self.dials)
        return times[min(len(times) - 1, int(fraction * len(times)))]

    def successful_ms(self, fraction: float) -> float:
        """The same among successful dials."""
        return FleetRun([one for one in self.dials if one.ok], [], 0.0).percentile_ms(fraction)


def relay_key(plan: FleetPlan, number: int) -> SecretKey:
    """The key of a relay: the same in every run of a seed."""
    return _key(plan.seed, f"relay {number}")


def run_fleet(
    plan: FleetPlan, *, measure: bool = True, ranks: bytes = b"", trusted: Collection[PublicKey] = ()
) -> FleetRun:
    """Run ``plan``. ``measure``: clients go by what they measure. ``ranks``: the document discovery has, whose issuer
    must be among ``trusted``, which are the keys discovery and clients believe.
    """
    fleet = _Fleet(plan, measure=measure, ranks=ranks, trusted=trusted)
    return fleet.run()


def _key(seed: int, name: str) -> SecretKey:
    return SecretKey(hashlib.sha256(f"{seed} {name}".encode()).digest())


def _host(number: int) -> str:
    """The address of a relay: each in a network of its own, because one network gets only a few places in a list."""
    return f"10.0.{number}.1"


@implementer(IEventLog)
class _Log:
    """Notes events of one node."""

    def __init__(self, fleet: _Fleet, role: str, key: PublicKey) -> None:
        self._fleet = fleet
        self._role = role
        self._key = key

    def emit(self, event: Event) -> None:
        self._fleet.events.append(LoggedEvent(self._fleet.clock.seconds(), self._role, self._key, event))


@implementer(IRankedDiscovery)
class _Discovery:
    """Discovery as one of its users sees it: the real rules, over a short path."""

    def __init__(self, fleet: _Fleet) -> None:
        self._fleet = fleet
        self._ranks: Ranks | None = None

    async def get_entry(self, public_key: PublicKey) -> Entry:
        return await self._fleet.store.get(public_key, await self._travel())

    async def post_entry(self, entry: Entry) -> None:
        now_ns = await self._travel()
        entry.validate()
        entry.verify()
        await self._fleet.store.put(entry, now_ns)

    async def available_servers(self, protocol: str = "dmsg") -> list[Entry]:
        return await self._fleet.listing.servers(_SERVERS_LISTED, await self._travel())

    async def relay_ranks(self) -> Ranks | None:
        now_ns = await self._travel()
        document = self._fleet.document
        if document and (self._ranks is None or self._ranks.document != document):
            self._ranks = Ranks.parse(document, self._fleet.trusted, now_ns / 1e9, previous=self._ranks)
        return self._ranks

    async def _travel(self) -> int:
        await deferLater(self._fleet.clock, _DISCOVERY_S)
        return self._fleet.now_ns()


class _Listening(Protocol):
    """Reads everything and writes nothing."""


class _Fleet:
    """One run."""

    def __init__(self, plan: FleetPlan, *, measure: bool, ranks: bytes, trusted: Collection[PublicKey]) -> None:
        self.plan = plan
        self.clock = HeapClock(plan.starts_at_s)
        self.network = MemoryNetwork(self.clock, random=Random(f"{plan.seed} network"))
        self.store = MemoryStore(random=Random(f"{plan.seed} store"))
        self.trusted = frozenset(trusted)
        self.ranks = Ranks.parse(ranks, self.trusted, plan.starts_at_s) if ranks else None
        self.document = self.ranks.document if self.ranks is not None else b""
        self.listing = ServerListing(self.store, Random(f"{plan.seed} listing"), lambda: self.ranks)
        self.events: list[LoggedEvent] = []
        self.dials: list[Dial] = []
        self._measure = measure
        self._random = Random(f"{plan.seed} dials")
        self._faults = Random(f"{plan.seed} faults")
        self._states: list[RelayState] = []
        self._over = False
        self.servers = [self._server(number) for number in range(len(plan.relays))]
        self.clients: dict[int, DmsgClient] = {}
        #: Those that can be dialled.
        self._reachable: list[DmsgClient] = []

    def now_ns(self) -> int:
        """Unix time in nanoseconds."""
        return int(self.clock.seconds() * 1e9)

    # --- who takes part ----------------------------------------------------------------------------------------------

    def _server(self, number: int) -> DmsgRelay:
        key, port = relay_key(self.plan, number), _FIRST_PORT + number
        return DmsgRelay(
            self.network,
            key,
            TCP4ServerEndpoint(self.network, port, interface=_host(number)),
            public_address=HostPort(_host(number), port),
            discovery=_Discovery(self),
            limits=self.plan.limits.get(number, replace(RelayLimits(), drain_timeout_s=0.0)),
            events=_Log(self, "server", key.public_key),
            random=Random(f"{self.plan.seed} server {number}").randbytes,
            now_ns=self.now_ns,
        )

    def _client(self, number: int, life: int) -> DmsgClient:
        key = _key(self.plan.seed, f"client {number}")
        return DmsgClient(
            self.network,
            key,
            discovery=_Discovery(self),
            min_servers=self.plan.min_servers,
            config=ClientConfig(scores=ScoreConfig(measure=self._measure)),
            events=_Log(self, "client", key.public_key),
            random=Random(f"{self.plan.seed} client {number} {life}").randbytes,
            now_ns=self.now_ns,
        )

    # --- what happens ------------------------------------------------------------------------------------------------

    def run(self) -> FleetRun:
        """From the first relay's start to the last one's end."""
        plan, clock = self.plan, self.clock
        self._enter(0)
        for server in self.servers:
            server.startService()
        parts = max(map(len, plan.relays))
        for part in range(1, parts):
            clock.callLater(plan.duration_s * part / parts, self._enter, part)
        for number in range(plan.clients):
            clock.callLater(2.0 + self._random.random() * _ARRIVAL_S, self._live, number, 0)
            clock.callLater(_ARRIVAL_S + _QUIET_S + self._pause_s(), self._next_dial, number)
        clock.callLater(1.0, self._break_things)
        clock.advance(plan.duration_s)
        self._over = True
        self._wait(DeferredList([maybeDeferred(client.stopService) for client in self.clients.values()]))
        self._wait(DeferredList([maybeDeferred(server.stopService) for server in self.servers]))
        return FleetRun(self.dials, self.events, clock.seconds())

    def _wait(self, done: Deferred[Any]) -> None:
        give_up = self.clock.seconds() + 600.0
        while not done.called:
            if not self.clock.step(give_up):
                raise RuntimeError("the fleet does not come to an end")

    def _enter(self, part: int) -> None:
        """Put the relays into the states of a part of the plan."""
        self._states = [states[min(part, len(states) - 1)] for states in self.plan.relays]
        for number, state in enumerate(self._states):
            self.network.set_path(_host(number), _FIRST_PORT + number, state.path)

    def _break_things(self) -> None:
        for number, state in enumerate(self._states):
            if not state.breaks_per_hour and not state.stalls_per_hour:
                continue
            for connection in self.network.pipes_to(_FIRST_PORT + number, _host(number)):
                fate = self._faults.random() * 3600
                if fate < state.breaks_per_hour:
                    connection.cut()
                elif fate < state.breaks_per_hour + state.stalls_per_hour:
                    connection.freeze()
                    self.clock.callLater(STALL_S, self._cut, connection)
        if not self._over:
            self.clock.callLater(1.0, self._break_things)

    @staticmethod
    def _cut(connection: Pipe) -> None:
        connection.thaw()
        connection.cut()

    def _live(self, number: int, life: int) -> None:
        """One life of a client."""
        ensureDeferred(self._life(number, life)).addErrback(lambda failure: failure.trap(CancelledError, DmsgError))

    async def _life(self, number: int, life: int) -> None:
        client = self.clients[number] = self._client(number, life)
        client.startService()
        client.listen(Factory.forProtocol(_Listening))
        age_s = _SHORTEST_LIFE_S + self._random.expovariate(1.0 / self.plan.lifetime_s)
        ended: Deferred[None] = deferLater(self.clock, age_s)
        await client.when_ready()
        self._reachable.append(client)
        await ended
        if self._over:
            return
        self._reachable.remove(client)
        await deferLater(self.clock, _QUIET_S)  # until no client dials it any more
        if not self._over:
            await client.stopService()
            self._live(number, life + 1)

    def _pause_s(self) -> float:
        return self._random.expovariate(1.0 / self.plan.dial_every_s)

    def _next_dial(self, number: int) -> None:
        began_s = self.clock.seconds() - self.plan.starts_at_s
        if began_s > self.plan.duration_s - _QUIET_S:
            return
        self.clock.callLater(self._pause_s(), self._next_dial, number)
        client = self.clients[number]
        targets = [one for one in self._reachable if one is not client]
        if client.running and targets:
            ensureDeferred(self._dial(client, self._random.choice(targets).public_key, began_s))

    async def _dial(self, client: DmsgClient, target: PublicKey, began_s: float) -> None:
        seconds: Callable[[], float] = self.clock.seconds
        start = seconds()
        try:
            transport = await client.dial(target)
        except DialError as error:
            if client.running:
                self.dials.append(Dial(began_s, False, (seconds() - start) * 1000, error.reason))
            return
        self.dials.append(Dial(began_s, True, (seconds() - start) * 1000, ""))
        transport.attach(_Listening())
        self.clock.callLater(_HOLD_S, transport.loseConnection)
