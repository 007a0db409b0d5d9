"""A network of relays and programs, its events, and its promises: everything follows from one number."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, Final

from twisted.internet import task
from twisted.internet.defer import Deferred
from twisted.logger import LogLevel, globalLogPublisher
from zope.interface import implementer

from dmsg.interfaces import IEventLog
from dmsg.rmb.client.config import RmbConfig
from dmsg.rmb.client.service import Answer
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.limiter import Limit
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.relay.limits import RelayLimits
from dmsg.rmb.relay.stores.base import QueueLimits

from .checks import Checks
from .network import BLACK_HOLE, HeapClock, Network, cooperator, cut, ends_of
from .peers import Ask, Peer
from .profiles import Profile, profile_of
from .relays import Relay
from .sessions import Call, Client, Raw, Sent, key_of

#: Duration of faults, of the pause without requests after them, and of the requests after that.
FAULTS_S = 90.0
RECOVERY_S = 200.0
FINAL_S = 20.0
#: Longest lifetime of envelopes.
LONGEST_S = 1800


@implementer(IEventLog)
class Events:
    """Takes events, and keeps none."""

    def emit(self, event: object) -> None:
        """Only check that it is an event."""
        repr(event)


#: Twisted's error for a call to a coroutine that was ended as garbage.
_COLLECTED: Final = "cannot reuse already awaited coroutine"


class World(Checks):
    """One run. ``run()`` gives the broken promises."""

    def __init__(self, seed: int, *, faults: tuple[str, ...] | None = None, verbose: bool = False) -> None:
        self.seed = seed
        self.random = random = Random(seed)
        self.profile: Profile = profile_of(random, faults)
        self.verbose = verbose
        self.trace: list[str] = []
        self.failures: list[str] = []
        self.graves: list[Any] = []
        self.ended: list[tuple[Any, str]] = []
        self.calls: list[Call] = []
        self.asks: list[Ask] = []
        self.sent: dict[str, Sent] = {}
        #: Times of events that may lose data in flight to a session, or to any (``None``).
        self.lossy_at: dict[SessionAddress | None, list[float]] = defaultdict(list)
        self.twins: dict[int, Twin] = {}
        self.events = Events()
        count = random.choice([1, 2, 2, 3])
        hosts = {f"r{number}.example": f"10.0.{number}.1" for number in range(count)}
        self.network = Network(
            HeapClock(),
            delay_s=(delay_s := random.choice([0.0, 0.001, 0.02, 0.2])),
            chunking=random.choice([None, None, "random"]),
            high_water_bytes=random.choice([4096, 65536]) if delay_s < 0.02 else 1 << 20,
            random=Random(random.random()),
            hosts=hosts,
        )
        self.network.silence(BLACK_HOLE)
        tight = self.profile.tight
        limits = RelayLimits(
            queue_bytes=200_000 if tight else 8 << 20,
            page_envelopes=random.choice([1, 3, 100]) if tight else 100,
            page_bytes=random.choice([1, 20_000, 256 << 10]) if tight else 256 << 10,
            pending_per_session=random.choice([1, 8, 256]) if tight else 256,
            drain_timeout_s=random.choice([0.0, 1.0, 10.0]),
            queued_total_bytes=random.choice([400_000, 256 << 20]) if tight else 256 << 20,
            sessions_per_twin=random.choice([1, 2]) if self.profile.crowded else 256,
            slow_consumer_timeout_s=random.choice([5.0, 60.0]),
        )
        #: Whether relays accept posts of unknown relays.
        self.open = random.random() < 0.15
        self.limit = Limit(random.choice([5, 50]), 1_000_000) if self.profile.limited else None
        few = random.choice([1, 3])
        self.client_config = (
            RmbConfig(
                calls=random.choice([2, 10_000]),
                calls_bytes=random.choice([75_000, 1 << 20]),
                answers=few,
                answers_bytes=random.choice([50_000, 1 << 20]),
                relay_queue_bytes=random.choice([1, 20_000, 1 << 20]),
                handlers=few,
                waiting_requests=random.choice([1, 3]),
                waiting_bytes=random.choice([75_000, 1 << 20]),
                lookups=random.choice([1, 3, 512]),
                lookups_bytes=random.choice([50_000, 1 << 20]),
            )
            if self.profile.busy
            else RmbConfig()
        )
        queues = QueueLimits(
            queue_envelopes=random.choice([5, 50]) if self.profile.full else 10_000,
            queue_bytes=300_000 if self.profile.full else 64 << 20,
        )
        self.relays: list[Relay] = []
        for name, host in hosts.items():
            self.relays.append(
                Relay(
                    self,
                    name,
                    host,
                    durable=random.random() < 0.6,
                    limits=limits,
                    queues=queues,
                    random=Random(random.random()),
                )
            )
        self.clients: list[Client] = []
        self.raws: list[Raw] = []
        numbers = iter(range(1, 100))
        for _ in range(random.choice([2, 3, 3])):
            twin = next(numbers)
            own = random.sample(self.relays, random.randint(1, len(self.relays)))
            self.add_twin(twin, own)
            for session in random.sample([None, "", "a", "b"], random.choice([1, 1, 2])):
                # A program that does not use one of its twin's relays does not get envelopes that wait there.
                self.clients.append(Client(self, twin, session, f"10.1.{len(self.clients)}.1", own))
        for _ in range(random.choice([2, 3])):
            twin = next(numbers)
            home = random.choice(self.relays)
            self.add_twin(twin, [home])
            for session in random.sample([None, "", "s"], random.choice([1, 1, 2])):
                self.raws.append(Raw(self, twin, session, f"10.2.{len(self.raws)}.1", home))

        #: Other programs with sessions of ``clients``.
        self.rivals: list[Client] = []
        self.peers: list[Peer] = []
        if self.profile.peers:
            for _ in range(random.choice([1, 2])):
                twin = next(numbers)
                own = random.sample(self.relays, random.randint(1, len(self.relays)))
                self.add_twin(twin, own)
                number = len(self.peers)
                self.peers.append(Peer(self, twin, f"10.3.{number}.1", f"10.4.{number}.1", own))

    def add_twin(self, number: int, relays: list[Relay]) -> None:
        """Put a twin into the registry, or change its relays."""
        key = key_of(number)
        names = tuple(relay.name for relay in relays)
        self.twins[number] = Twin(number, key.account, names, EncryptionKey(key.secret).public_key)

    # --- what is told --------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Record an event."""
        line = f"{self.network.seconds():10.4f} {text}"
        self.trace.append(line)
        if self.verbose:
            print(line)

    def fail(self, text: str) -> None:
        """Record a broken promise."""
        self.failures.append(f"{self.network.seconds():.4f}: {text}")
        self.note(f"WRONG {text}")

    def lossy(self, address: SessionAddress | None = None, later_s: float = 0.0) -> None:
        """Data in flight to ``address`` (``None``: to all) may be lost now, or until ``later_s`` from now."""
        self.lossy_at[address].append(self.network.seconds() + later_s)

    def of(self, data: bytes) -> Call | Ask:
        """The call or request of a payload."""
        word = data.partition(b"|")[0]
        return self.asks[int(word[1:])] if word.startswith(b"a") else self.calls[int(word)]

    def served(self, peer: Peer, request: dict[str, Any], payload: bytes) -> tuple[str, bytes]:
        """A service at ``peer`` has taken ``request``: gives its behaviour and its answer."""
        what = self.of(payload)
        twin, colon, session = request["src"].partition(":")
        self.handled(what, peer, peer.incarnation, SessionAddress(int(twin), session if colon else None))
        return what.how, payload.partition(b"|")[0] + b"|" + (bytes(100_000) if what.how == "large" else b"")

    # --- a run ---------------------------------------------------------------------------------------------------------

    def run(self) -> list[str]:
        """Do the whole run; gives the broken promises."""
        with self.observed():
            self._run()
        return self.failures

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Direct logged errors, and Twisted's own activity, into this world."""
        globalLogPublisher.addObserver(self._logged)
        before, task._theCooperator = task._theCooperator, cooperator(self.network)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            task._theCooperator = before  # type: ignore[attr-defined]
            globalLogPublisher.removeObserver(self._logged)
            for relay in self.relays:
                relay.discard()

    def start(self) -> None:
        """Begin with all programs."""
        for one in [*self.relays, *self.clients, *self.raws, *self.peers]:
            one.start()

    def _logged(self, event: Any) -> None:
        failure = event.get("log_failure")
        if failure is not None and str(failure.value) == _COLLECTED:
            return  # from a killed process, perhaps of the run before: waiting coroutines end as garbage
        if failure is not None:
            self.fail(f"logged: {event.get('log_format')} {failure.getTraceback()}")
        elif event.get("log_level") in (LogLevel.critical, LogLevel.error):
            self.fail(f"logged: {event.get('log_format')}")

    def _run(self) -> None:
        network, random = self.network, self.random
        self.note(f"seed {self.seed}: {self.profile}")
        for relay in self.relays:
            relay.start()
            self.note(f"{relay.name}: durable={relay.durable}, {relay.limits.drain_timeout_s}")
        for one in [*self.clients, *self.raws, *self.peers]:
            self.note(f"{one} at {(getattr(one, 'relays', None) and [r.name for r in one.relays]) or one.relay.name}")
            one.start()
        for twin in self.twins.values():
            self.note(f"twin {twin.id} at {twin.relays}")
        network.advance(1)
        ends_at = network.seconds() + FAULTS_S
        while network.seconds() < ends_at:
            network.advance(min(random.expovariate(self.profile.rate), ends_at - network.seconds()))
            self.profile.act(self)
            if len(self.failures) > 20:
                return
        self.note("faults cease")
        self._heal()
        network.advance(RECOVERY_S)
        self._final()
        self._check_calls()
        self._check_asks()
        self._check_envelopes()
        self._stop()

    def _heal(self) -> None:
        for pipe in list(self.network.pipes):
            if pipe.frozen:
                hosts = ends_of(pipe)
                cut(pipe)
                self.note(f"cut {hosts}")
        for one in [*self.relays, *self.clients, *self.peers]:
            one.process.unreachable.clear()
            one.registry.slow_s = one.registry.failing = 0.0
            if isinstance(one, Relay):
                one.store.slow_s, one.store.failing, one.store.hanging = 0.0, 0.0, False
            if not one.running:
                self.when_gone(one, one.start)
        for rival in self.rivals:
            if rival.running:
                self.note(f"the rival of {rival.address} ends")
                rival.kill()
        for peer in self.peers:
            peer.redis.slow_s = 0.0
            if not peer.redis.running:
                peer.redis.start()
        for raw in self.raws:
            raw.hold(False)
        for _ in range(12):
            for raw in self.raws:
                raw.start()
            self.network.advance(10)

    def when_gone(self, one: Any, then: Callable[[], object]) -> None:
        """Call ``then`` once the process of ``one``, which stops or was killed, is gone."""
        process = one.process
        if not process.alive or any(process is ended for ended, _ in self.ended):
            if not one.running:
                then()
        else:
            self.network.callLater(0.5, self.when_gone, one, then)

    def _final(self) -> None:
        """Without faults everything works."""
        network = self.network
        for one in [*self.relays, *self.clients, *self.raws, *self.peers]:
            if not one.running and not self.profile.crowded:
                self.fail(f"{one} does not run at the end")
        if (
            not self.open
        ):  # relays that know each other find a session at the one of several relays that it is connected to
            for number, raw in enumerate(self.raws):
                others = [relay for relay in self.relays if relay is not raw.relay]
                self.add_twin(
                    raw.address.twin, [raw.relay, *others[number % len(others) :][:1]] if others else [raw.relay]
                )
        calls = [
            client.call(other.address, size=100, timeout_s=FINAL_S, once=False, fail_fast=False, how="quick")
            for client in self.clients
            for other in [*self.clients, *self.peers]
            if other.address != client.address
        ]
        asks = [
            peer.ask((other.address.twin,), size=10, life_s=int(FINAL_S), how="quick")
            for peer in self.peers
            for other in [*self.clients, *self.peers]
            if other.address.connection is None and other is not peer
        ]
        envelopes = [
            [raw.send(other.address, 1000, 60, fail_fast=False) for _ in range(5)]
            for raw in self.raws
            if raw.running
            for other in self.raws
            if other.running and other is not raw
        ]
        network.advance(FINAL_S + 1)
        for call in calls:
            if not isinstance(call.outcome, Answer) and not (self.limit or self.profile.busy or self.profile.crowded):
                self.fail(f"without faults: {call}")
        for ask in asks:
            good = [one for _, one in ask.answers if not one["err"]]
            if len(good) != 1 and not (self.limit or self.profile.busy or self.profile.crowded):
                self.fail(f"without faults: {ask}")
        for row in envelopes:
            for sent in row:
                if (len(sent.arrived) != 1 or sent.errors) and not (self.limit or self.profile.crowded):
                    self.fail(f"without faults: {sent}")
        # Answers kept for repeated requests are forgotten once the requests have expired.
        network.advance(LONGEST_S + 60)
        for one in [*self.relays, *self.clients, *self.peers]:
            left = {name: level for name, level in one.levels().items() if level}
            if left:
                self.fail(f"{getattr(one, 'name', one)} has left: {left}")
        for relay in self.relays:
            for address in relay.relay.switch.sessions:
                if relay.rows.read(SessionAddress(*address), None, 1, 1, relay.process.now_s()).result:
                    self.fail(f"{relay.name} has something in its store for {address}, which is connected")

    def _stop(self) -> None:
        stopping: list[tuple[str, Deferred[Any], list[Any]]] = []
        for one in [*self.clients, *self.peers, *self.relays]:
            if one.running:
                outcome: list[Any] = []
                stopping.append((str(getattr(one, "name", one)), one.stop().addBoth(outcome.append), outcome))
        for raw in self.raws:
            raw.leave()
        self.network.advance(60)
        for peer in self.peers:
            peer.redis.stop()
        for name, _, outcome in stopping:
            if outcome != [None]:
                self.fail(f"{name} has not stopped: {outcome}")
        self.network.advance(1)
        for process, name in self.ended:
            if process.alive:
                self.check_ended(process, name)
                process.kill()
        self.network.advance(1)
        if self.network.pipes:
            self.fail(f"connections are left: {[ends_of(pipe) for pipe in self.network.pipes]}")
        for call in self.calls:
            if call.ended_at is None and not call.was_killed:
                self.fail(f"never ended: {call}")
        gc.collect()  # reports unhandled errors in Deferreds

    def check_ended(self, process: Any, name: str) -> None:
        """Nothing is left of a stopped program."""
        # Posts of others are accepted while they keep their connections, and posts that were given up continue.
        known = ("LimitedChannel", "HttpCaller", "HostnameEndpoint")
        if name.startswith("r"):
            known += ("_cancel", "Deferred.callback", "TwinReport")
        left = [call for call in process.getDelayedCalls() if not any(one in repr(call.of) for one in known)]
        if left:
            self.fail(f"{name} has left calls: {[(call.getTime(), call.of) for call in left]}")
