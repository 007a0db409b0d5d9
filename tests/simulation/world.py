"""The simulated network: a clock, relays, discovery and clients' machines, and the record of all events."""

from __future__ import annotations

import gc
import hashlib
import traceback
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, Final

from twisted.internet.defer import Deferred, DeferredList, ensureDeferred, maybeDeferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.task import deferLater
from twisted.logger import LogLevel, globalLogPublisher
from zope.interface import implementer

from benchmarks.heapclock import HeapClock
from dmsg.address import HostPort
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.entry import DMSG, MESSAGING, Entry
from dmsg.discovery.errors import DiscoveryUnavailable
from dmsg.discovery.listing import ServerListing
from dmsg.discovery.stores.memory import MemoryStore
from dmsg.errors import DmsgError
from dmsg.interfaces import IDiscovery
from dmsg.messaging.relay.service import MessagingRelay
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.service import DmsgRelay
from dmsg.serving.service import RelayService
from dmsg.testing.memory import MemoryNetwork, Path
from tests.simulation import leftovers
from tests.simulation.holding import HoldingRelay
from tests.simulation.machine import Machine

STARTS_AT_S: Final = 1_790_000_000.0
RELAY_PORT: Final = 80
_SERVERS_LISTED: Final = 64
#: Response time of discovery, and a user's timeout for it, in seconds.
_DISCOVERY_S: Final = 0.02
_SILENCE_S: Final = 10.0
#: More calls than this at one moment mean an endless loop.
_TURNS_LIMIT: Final = 20_000


class WorldClock(HeapClock):
    """A clock that accepts no times in the past, like a reactor."""

    def callLater(self, delay: float, callable: Callable[..., object], *args: object, **kw: object) -> Any:
        """See ``IReactorTime``."""
        assert delay >= 0, f"{delay} s from now"
        return super().callLater(delay, callable, *args, **kw)


@implementer(IDiscovery)
class Discovery:
    """Discovery as the program on one machine sees it: the real rules, over a short path."""

    def __init__(self, world: World, machine: Machine) -> None:
        self._world = world
        self._machine = machine

    async def get_entry(self, public_key: PublicKey) -> Entry:
        """See :class:`~dmsg.interfaces.IDiscovery`."""
        await self._travel()
        return await self._world.store.get(public_key, self._world.now_ns())

    async def post_entry(self, entry: Entry) -> None:
        """See :class:`~dmsg.interfaces.IDiscovery`."""
        await self._travel()
        entry.validate()
        entry.verify()
        await self._world.store.put(entry, self._world.now_ns())

    async def available_servers(self, protocol: str = "dmsg") -> list[Entry]:
        """See :class:`~dmsg.interfaces.IDiscovery`."""
        await self._travel()
        return await self._world.listing.servers(_SERVERS_LISTED, self._world.now_ns())

    async def _travel(self) -> None:
        await deferLater(self._machine, _DISCOVERY_S)
        if self._machine.is_off:
            await Deferred()
        if self._world.discovery_state == "silent":
            await deferLater(self._machine, _SILENCE_S)
            raise DiscoveryUnavailable("no answer")
        if self._world.discovery_state == "refuses":
            raise DiscoveryUnavailable("connection refused")


class Relay:
    """A relay and its machine. It can be stopped, killed and started again, with the same key or as another one."""

    def __init__(self, world: World, number: int, *, extended: bool) -> None:
        self.number = number
        self.host = f"10.0.{number}.1"
        self.extended = extended
        self.lives = 0
        self.service: RelayService | None = None
        self.machine: Machine
        self._world = world
        self._key = world.key(f"relay {number}")
        #: One-way delay while nothing is wrong.
        delays_s = [0.0, 0.02, 0.15, 0.5] if world.moving else [0.0, 0.01, 0.1]
        self.delay_s = world.random(f"relay {number} path").choice(delays_s)

    @property
    def key(self) -> PublicKey:
        """Its key, in this life."""
        return self._key.public_key

    def start(self, *, new_key: bool = False) -> None:
        """Start, unless it runs."""
        if self.service is not None:
            return
        self.lives += 1
        world = self._world
        if new_key:
            self._key = world.key(f"relay {self.number} life {self.lives}")
        self.machine = Machine(world.network, f"relay {self.number}.{self.lives}", listens_at=self.host)
        world.note(f"{self.machine} starts" + (" with a new key" if new_key else ""))
        how: dict[str, Any] = {
            "public_address": HostPort(self.host, RELAY_PORT),
            "discovery": world.discovery_of(self.machine),
            "random": world.random(f"relay {self.number} {self.lives}").randbytes,
            "now_ns": world.now_ns,
        }
        endpoint = TCP4ServerEndpoint(self.machine, RELAY_PORT, interface=self.host)
        if world.protocol == MESSAGING:
            self.service = MessagingRelay(self.machine, self._key, endpoint, **how)
        else:
            how |= {"limits": world.relay_limits, "extended": self.extended, "aes": False}
            kind = HoldingRelay if world.moving else DmsgRelay
            self.service = kind(self.machine, self._key, endpoint, **how)
        self.service.startService()

    @property
    def public_key(self) -> PublicKey:
        """Its key."""
        return self._key.public_key

    def kill(self, *, silently: bool) -> None:
        """Switch the machine off."""
        assert self.service is not None
        self._world.note(f"{self.machine} is killed" + (" silently" if silently else ""))
        self.service = None
        self._world.forget_later(self.machine.switch_off(silently=silently))

    def stop(self) -> Deferred[Any]:
        """Stop the service: it drains."""
        assert self.service is not None
        self._world.note(f"{self.machine} stops")
        service, machine = self.service, self.machine
        done = maybeDeferred(service.stopService)
        self._world.promise(done, f"{machine}: stopService", 60.0)
        done.addCallback(self._stopped, service, machine)
        return done

    def _stopped(self, _: object, service: RelayService, machine: Machine) -> None:
        if self.service is service:
            self.service = None
        self._world.note(f"{machine} has stopped")
        self._world.idle_machines.append(machine)
        held = leftovers.of_relay(service)
        if held:
            self._world.violation(f"{machine} has stopped and holds {held}")


class LoggedErrors:
    """Errors in Twisted's log that should not be there."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, event: Any) -> None:
        failure = event.get("log_failure") or (event.get("failure") if event.get("isError") else None)
        severe = event.get("log_level") in (LogLevel.critical, LogLevel.error)
        if failure is not None and failure.check(Wanted) is not None:
            return
        if failure is not None or (severe and event.get("log_format") != "Unhandled error in Deferred:"):
            text = failure.getTraceback() if failure is not None else str(event.get("log_format"))
            self._world.violation(f"logged: {event.get('log_format')}\n{text}")


class Stuck(Exception):
    """The run makes no progress."""


class Wanted(Exception):
    """Raised by programs on purpose."""


def drawn_limits(random: Random) -> RelayLimits:
    """A relay's limits, some of them low enough to be reached."""
    limits = replace(RelayLimits(), drain_timeout_s=random.choice([0.0, 2.0, 10.0]))
    if random.random() < 0.5:
        limits = replace(
            limits,
            transports_per_connection=random.choice([24, 1_024]),
            pending_requests=random.choice([8, 64]),
            unanswered_per_target=random.choice([8, 256]),
            request_timeout_s=random.choice([5.0, 10.0]),
            slow_consumer_timeout_s=random.choice([1.0, 10.0]),
            control_backlog_bytes=random.choice([3_000, limits.control_backlog_bytes]),
            bytes_per_s=random.choice([0.0, 0.0, 1e6]),
        )
    return limits


class World:
    """Everything in one run of a ``seed``."""

    def __init__(self, seed: int, *, moving: bool | None = None) -> None:
        self.seed = seed
        self.clock = WorldClock(STARTS_AT_S)
        random = self.random("world")
        self.network = MemoryNetwork(
            self.clock,
            random=self.random("network"),
            chunking=random.choice([None, None, "random", 1_400]),
            high_water_bytes=random.choice([20_000, 65_536, 65_536]),
        )
        self.store = MemoryStore(random=self.random("store"))
        #: The system that relays and clients speak.
        self.protocol = random.choice([DMSG, DMSG, DMSG, MESSAGING])
        #: Whether most transports are long, slowly read streams, and most faults cost them their path.
        self.streaming = self.protocol == DMSG and random.random() < 0.35
        #: Whether there are few transports, between two clients, whose paths change in ways that are rare elsewhere.
        self.moving = moving if moving is not None else self.protocol == DMSG and self.random("moving").random() < 0.5
        if self.moving:
            self.protocol, self.streaming = DMSG, True
        #: Whether these transports must not be lost.
        self.patient = self.moving and self.random("patience").random() < 0.7
        self.listing = ServerListing(self.store, self.random("listing"), protocol=self.protocol)
        self.discovery_state = "answers"
        #: Error of the wall clocks, including discovery's.
        self.clock_offset_s = 0.0
        self.relay_limits = drawn_limits(random)
        #: Whether no fault may cost an end-to-end transport.
        self.gentle = False
        self.relays: list[Relay] = []
        #: Machines whose programs have ended in order: nothing may be pending there.
        self.idle_machines: list[Machine] = []
        #: What happened, and which promises were broken.
        self.notes: list[str] = []
        self.violations: list[str] = []
        self.on_note: Callable[[str], object] | None = None
        self._turns, self._turned_at = 0, 0.0
        self._promises: dict[Deferred[Any], tuple[str, float]] = {}
        self._errors = LoggedErrors(self)
        globalLogPublisher.addObserver(self._errors)

    # --- chance, keys and time -----------------------------------------------------------------------------------------

    def random(self, what: str) -> Random:
        """The numbers that decide ``what``: the same in every run of the seed."""
        return Random(f"{self.seed} {what}")

    def key(self, name: str) -> SecretKey:
        """The key of that name."""
        return SecretKey(hashlib.sha256(f"{self.seed} {name}".encode()).digest())

    def now_ns(self) -> int:
        """Unix time in nanoseconds."""
        return int((self.clock.seconds() + self.clock_offset_s) * 1e9)

    @property
    def elapsed_s(self) -> float:
        """Time since the beginning."""
        return self.clock.seconds() - STARTS_AT_S

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Run until ``condition`` holds, for at most ``limit_s``; gives whether it holds."""
        end = self.clock.seconds() + limit_s
        while not condition():
            self._turns = self._turns + 1 if self.clock.seconds() == self._turned_at else 0
            self._turned_at = self.clock.seconds()
            if self._turns > _TURNS_LIMIT:
                self.violation("turns go on and no time passes")
                raise Stuck
            try:
                if not self.clock.step(end):
                    self.clock.rightNow = end
                    return condition()
            except Exception:  # a reactor would log it and continue
                self.violation(f"a call raised\n{traceback.format_exc()}")
        return True

    def wait(self, done: Deferred[Any], what: str, limit_s: float) -> None:
        """Run until ``done`` has fired."""
        fired: list[object] = []
        done.addBoth(fired.append)
        if not self.run_until(lambda: bool(fired), limit_s):
            self.violation(f"{what} took more than {limit_s:g} s")

    # --- what is noted -------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Note something that happened."""
        line = f"{self.elapsed_s:10.3f} {text}"
        self.notes.append(line)
        if self.on_note is not None:
            self.on_note(line)

    def violation(self, text: str) -> None:
        """Note that a promise was broken."""
        self.violations.append(f"{self.elapsed_s:.3f} {text}")
        self.note(f"VIOLATION {text}")

    def promise(self, deferred: Deferred[Any], what: str, limit_s: float) -> None:
        """``deferred`` must fire within ``limit_s``; checked by :meth:`check_promises`."""
        self._promises[deferred] = what, self.clock.seconds() + limit_s

    def take_back(self, deferred: Deferred[Any]) -> None:
        """``deferred`` need not fire: its program was killed."""
        self._promises.pop(deferred, None)

    def check_promises(self) -> None:
        """Note promises that did not fire in time."""
        now = self.clock.seconds()
        for deferred, (what, until) in list(self._promises.items()):
            if deferred.called:
                del self._promises[deferred]
            elif until < now:
                del self._promises[deferred]
                self.violation(f"{what} has not fired in time")

    # --- relays and connections ----------------------------------------------------------------------------------------

    def add_relay(self, *, extended: bool = True) -> Relay:
        """Add a relay, which starts now."""
        relay = Relay(self, len(self.relays), extended=extended)
        self.relays.append(relay)
        self.network.set_path(relay.host, RELAY_PORT, Path(relay.delay_s))
        relay.start()
        return relay

    def discovery_of(self, machine: Machine) -> Any:
        """Discovery as the program on ``machine`` sees it."""
        return Discovery(self, machine)

    def forget_later(self, pipes: list[Any], after_s: float = 75.0) -> None:
        """Let keep-alives notice later that these connections are dead."""
        for pipe in pipes:
            self.clock.callLater(after_s, self._forget, pipe)

    def _forget(self, pipe: Any) -> None:
        if not pipe.closed:
            pipe.thaw()
            pipe.cut()

    def end_silence(self) -> None:
        """Let silent connections be noticed now."""
        for pipe in [pipe for pipe in self.network.pipes if pipe.frozen]:
            self._forget(pipe)

    def stop_relays(self) -> None:
        """Stop all that run."""
        running = [relay for relay in self.relays if relay.service is not None]
        self.wait(DeferredList([relay.stop() for relay in running]), "stopping the relays", 60.0)

    def close(self) -> None:
        """The end: unhandled errors in Deferreds are logged now."""
        gc.collect()
        globalLogPublisher.removeObserver(self._errors)


def is_documented(error: BaseException | None) -> bool:
    """Whether ``error`` is of a type documented in errors.rst."""
    return isinstance(error, DmsgError)


def start(coroutine: Any) -> Deferred[Any]:
    """``coroutine`` as a Deferred."""
    return ensureDeferred(coroutine)
