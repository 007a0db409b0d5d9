"""Relays of the simulation: real relays, with stores and a registry that fail on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from random import Random
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred, ensureDeferred, fail
from twisted.internet.task import deferLater
from zope.interface import implementer

from dmsg.crypto.ed25519 import SigningKey
from dmsg.http.client import HttpCaller
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.ranker import Ranker
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.interfaces import ITwinRegistry
from dmsg.rmb.relay.api import make_site
from dmsg.rmb.relay.errors import StoreUnavailable
from dmsg.rmb.relay.federation import Federation
from dmsg.rmb.relay.ingest import Ingest
from dmsg.rmb.relay.limits import RelayLimits, post_rate
from dmsg.rmb.relay.peering import Signer, Verifier
from dmsg.rmb.relay.posting import CONNECT_TIMEOUT_S, CONNECTIONS, POST_TIMEOUT_S, RelayPoster
from dmsg.rmb.relay.service import RmbRelay
from dmsg.rmb.relay.stores.base import QueueLimits, Stored
from dmsg.rmb.relay.stores.sqlite import SqliteQueues
from dmsg.rmb.twins.errors import RegistryError

from .network import Process

if TYPE_CHECKING:
    from .world import World


@implementer(ITwinRegistry)
class Registry:
    """The registry of twins for the program ``process``: it answers sooner or later, or never."""

    def __init__(self, twins: dict[int, Twin], process: Process) -> None:
        self.twins = twins
        self._process = process
        #: Longest time of an answer, and the share of questions that fail.
        self.slow_s = 0.0
        self.failing = 0.0

    async def _think(self) -> None:
        random = self._process.random
        fails = random.random() < self.failing
        if self.slow_s and random.random() < 0.7:
            await deferLater(self._process, random.random() * self.slow_s)  # type: ignore[arg-type]
        if fails:
            raise RegistryError("unavailable")

    async def get(self, twin: int) -> Twin | None:
        await self._think()
        return self.twins.get(twin)

    async def find(self, account: bytes) -> int | None:
        await self._think()
        return next((number for number, twin in self.twins.items() if twin.account == account), None)

    async def update(self, key: Any, relays: Iterable[str], pk: bytes | None) -> None:
        await self._think()
        number = next(number for number, twin in self.twins.items() if twin.account == key.account)
        self.twins[number] = Twin(number, key.account, tuple(sorted(relays)), pk)

    async def close(self) -> None:
        """There is nothing to close."""


class Store:
    """A store of one process: a queue of questions to ``rows``, which outlive the process.

    Questions keep their order. ``slow_s`` is the longest time of a question; with ``hanging`` they wait.
    """

    shared = False
    new_pushes = 4_096.0

    def __init__(self, rows: SqliteQueues, process: Process) -> None:
        self.rows = rows
        self.slow_s = 0.0
        #: The share of questions that fail, and whether they take effect all the same.
        self.failing = 0.0
        self.fails_late = False
        self._hanging = False
        self._process = process
        self._asked: list[tuple[Callable[[], Deferred[Any]], Deferred[Any]]] = []
        self._working = False
        self.closing: Deferred[None] | None = None

    @property
    def hanging(self) -> bool:
        return self._hanging

    @hanging.setter
    def hanging(self, hanging: bool) -> None:
        self._hanging = hanging
        self._next()

    def _ask(self, question: Callable[[], Deferred[Any]]) -> Deferred[Any]:
        if self.closing is not None:
            return fail(StoreUnavailable("closed"))
        if not self._asked and not self.slow_s and not self.failing and not self._hanging:
            return question()
        answer: Deferred[Any] = Deferred()
        self._asked.append((question, answer))
        self._next()
        return answer

    def _next(self) -> None:
        if self._asked and not self._working and not self._hanging:
            self._working = True
            self._process.callLater(self._process.random.random() * self.slow_s, self._work)

    def _work(self) -> None:
        self._working = False
        if self._hanging or not self._asked:
            return
        question, answer = self._asked.pop(0)
        if self._process.random.random() < self.failing:
            if self.fails_late:
                question().addErrback(lambda failure: None)
            if not answer.called:
                answer.errback(StoreUnavailable("unavailable"))
        else:
            question().addBoth(lambda found: None if answer.called else answer.callback(found))
        self._next()
        if not self._asked and self.closing is not None and not self.closing.called:
            self.closing.callback(None)

    def push(
        self, session: SessionAddress, data: bytes, now: float, expires_at: float, source: int = 0
    ) -> Deferred[bool]:
        return self._ask(lambda: self.rows.push(session, data, now, expires_at, source))

    def read(
        self, session: SessionAddress, after: str | None, limit: int, max_bytes: int, now: float
    ) -> Deferred[list[Stored]]:
        return self._ask(lambda: self.rows.read(session, after, limit, max_bytes, now))

    def delete(self, session: SessionAddress, ids: Iterable[str]) -> Deferred[None]:
        taken = list(ids)
        return self._ask(lambda: self.rows.delete(session, taken))

    def attach(self, session: SessionAddress) -> None:
        self.rows.attach(session)

    def detach(self, session: SessionAddress) -> None:
        self.rows.detach(session)

    def connected(self, session: SessionAddress) -> Deferred[bool]:
        return self._ask(lambda: self.rows.connected(session))

    def listen(self, pushed: Any, replaced: Any) -> None:
        """No other process shares it."""

    def close(self) -> Deferred[None]:
        self.closing = Deferred()
        if not self._asked:
            self.closing.callback(None)
        return self.closing


def relay_key(name: str) -> SigningKey:
    return SigningKey(hashlib.sha256(name.encode()).digest())


class Relay:
    """The relay ``name``, which runs from :meth:`start` to :meth:`kill` or :meth:`stop`, any number of times."""

    def __init__(
        self,
        world: World,
        name: str,
        host: str,
        *,
        durable: bool,
        limits: RelayLimits,
        queues: QueueLimits,
        random: Random,
    ) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.url = f"ws://{name}"
        self.durable = durable
        self.limits = limits
        self._queues = queues
        self._random = random
        self.rows: SqliteQueues | None = None
        self._made: list[SqliteQueues] = []
        self.running = False
        self.ahead_s = 0.0

    def __str__(self) -> str:
        return self.name

    def discard(self) -> None:
        """The run is over: let go of all databases that there were."""
        for rows in self._made:
            rows.close()

    def start(self) -> None:
        """Begin to serve."""
        world, name = self.world, self.name
        self.process = process = Process(world.network, self.host, Random(self._random.random()))
        process.ahead_s = self.ahead_s
        if self.rows is None or not self.durable:
            self.rows = SqliteQueues(":memory:", None, limits=self._queues)
            self._made.append(self.rows)
        self.rows._attached.clear()
        self.store = Store(self.rows, process)
        self.registry = Registry(world.twins, process)
        self.relay = relay = RmbRelay(
            process,
            self.registry,
            self.store,
            domains=frozenset({name}),
            limits=self.limits,
            limit=world.limit,
            unix_time=process.now_s,
            events=world.events,
        )
        known = {one.name: relay_key(one.name).public_key for one in world.relays if one.name != name}
        if world.open:
            known = {}
        self.caller = HttpCaller.connect(
            process, timeout_s=POST_TIMEOUT_S, connect_timeout_s=CONNECT_TIMEOUT_S, connections=CONNECTIONS
        )
        random = process.random
        poster = RelayPoster(
            self.caller,
            process.now_s,
            domains=(name,),
            scheme="http",
            signer=Signer(name, relay_key(name), random.randbytes) if known else None,
            known=known,
        )
        self.federation = relay.delivery.federation = Federation(
            poster,
            self.registry,
            Ranker(random),
            process,
            random,
            unix_time=process.now_s,
            domains=(name,),
            failed=relay.delivery.answer,
            emit=world.events.emit,
        )
        rates = post_rate(relay.limits)
        self.ingest = Ingest(
            relay.delivery.accept,
            self.registry,
            Verifier((name,), known),
            process.now_s,
            domains=(name,),
            open_to_all=world.open,
            clock=process,
            admit=lambda host: rates.take(host, process.seconds()),
            flush=relay.flush,
        )
        self.port = process.listenTCP(80, make_site(relay, process, {}, self.ingest))
        relay.startService()
        self.running = True

    def kill(self, *, silently: bool = False) -> None:
        """End at once."""
        self.running = False
        self.world.graves.append((self.process, self.relay, self.federation, self.store, self.caller))
        self.process.kill(silently=silently)

    def stop(self) -> Deferred[None]:
        """Stop cleanly, as the program does."""
        self.running = False
        return ensureDeferred(self._stop())

    async def _stop(self) -> None:
        process = self.process
        await self.port.stopListening()
        await self.federation.stop(self.limits.drain_timeout_s)
        await self.relay.stopService()
        await self.caller.close()
        await self.store.close()
        self.world.ended.append((process, self.name))

    def levels(self) -> dict[str, float]:
        """Levels that must be 0 when nothing is in progress."""
        switch, delivery, federation = self.relay.switch, self.relay.delivery, self.federation
        keeper = delivery.keeper
        return {
            "waiting bytes": switch.waiting_bytes,
            "stalled sessions": len(switch.stalled),
            "incoming": switch.incoming_total_bytes + len(switch.incoming),
            "dirty": len(switch.dirty),
            "pending bytes": delivery.pending.used + len(delivery.pending._taken),
            "waiting behind returns": delivery.waiting.used + len(delivery.waiting._of),
            "tasks": len(delivery.background.tasks),
            "pushing": len(keeper._pushing),
            "lines": len(keeper._lines) + len(keeper._lines._ready),
            "new pushes": keeper._pushes._new.used,
            "asking": len(delivery._asking),
            "returning": keeper._returns.under_way + len(keeper._returns._waiting),
            "returning bytes": switch.returning.used + keeper.pushing_bytes,
            "retries": len(keeper._retries),
            "undeleted": keeper._undeleted_count,
            "look-ups": len(delivery._look_ups),
            "look-ups of relays": len(self.ingest._of_relays) + len(self.ingest._of_strangers),
            "outstanding": len(federation),
            "held": federation._shares.held.used + len(federation._shares.held._of),
            "charged": len(federation._shares.by_relay),
            "full shares": len(federation._shares._full),
            "posting": federation._turns.under_way,
            "busy lanes": sum(lane.busy for lane in federation._lanes.values()),
            "in line": federation._turns.waiting,
            **{
                f"session {session.address}": session.pending
                + session.pending_bytes
                + session.waiting_bytes
                + session.said_bytes
                + session.buffered_bytes
                + len(session.queue)
                + len(session.behind)
                + session.stored
                + session.fetching
                for session in switch.sessions.values()
            },
        }
