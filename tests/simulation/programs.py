"""The programs of the simulated network: clients that listen, dial each other, stop, are killed and come back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Any, Final

from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.error import ConnectError, ConnectingCancelledError
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.address import DmsgAddress
from dmsg.clients.errors import ClientStopped
from dmsg.clients.limits import ListenerLimits
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import MESSAGING
from dmsg.discovery.errors import DiscoveryError
from dmsg.endpoints.stream import ClientEndpoint
from dmsg.errors import DialError
from dmsg.interfaces import IAccessPolicy
from dmsg.messaging.client.service import MessagingClient
from dmsg.mux.client.pending import PendingRequest
from dmsg.mux.client.service import ClientConfig, DmsgClient
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.testing.link import Link
from tests.simulation import leftovers
from tests.simulation.ends import End, Habits
from tests.simulation.leftovers import Client
from tests.simulation.machine import Machine
from tests.simulation.world import Wanted, World, start

#: A service besides the default one, which is the only one that base peers know.
SERVICE: Final = "files"
#: A dial has 10 seconds in all; stopping has 2 for written data and 10 for a silent discovery.
DIAL_S: Final = 10.5
STOP_S: Final = 40.0
#: Seconds after the stop of a client within which data that its network does not take is given up.
_LETTING_GO_S: Final = 11.0


@dataclass(frozen=True)
class Kind:
    """The kind of a client, the same in all of its lives."""

    security: Security
    extended: bool
    min_servers: int | None
    link: dict[str, Any] | None
    config: ClientConfig

    @classmethod
    def drawn(cls, random: Random, world: World) -> Kind:
        """A random kind, for a client in ``world``."""
        if world.moving:
            return cls.moving(random, grace_s=30.0 if world.patient else random.choice([30.0, 1.5]))
        security = random.choice([Security.PREFER, Security.PREFER, Security.E2E, Security.HOP])
        config = drawn_config(random)
        if world.streaming:
            connection = replace(
                config.connection,
                secure_window_bytes=random.choice([20_000, 70_000, 500_000]),
                ack_limit_bytes=random.choice([1_000, 20_000]),
                rekey_after_frames=random.choice([3, 50, 1_000_000]),
            )
            config = replace(config, connection=connection, resume_grace_s=30.0)
            security = random.choice([Security.PREFER, Security.E2E])
        rate = random.choice([None, None, 1e6, 4e6, 20e6])
        link = (
            None
            if rate is None
            else {"delay_s": random.choice([0.001, 0.02, 0.1]), "bits_per_s": rate, "buffer_bytes": 65_536}
        )
        return cls(security, random.random() < 0.8, random.choice([None, None, 1, 2, 3]), link, config)

    @classmethod
    def moving(cls, random: Random, *, grace_s: float) -> Kind:
        """A kind whose transports lose their paths with much unsent, unread or unacknowledged data."""
        pause = random.choice([100, 2_000, 20_000])
        window = random.choice([3_000, 20_000, 100_000])
        connection = replace(
            ConnectionConfig(),
            secure_window_bytes=window,
            largest_window_bytes=random.choice([window, 8_000_000]),
            ack_limit_bytes=random.choice([1_000, 10_000]),
            rekey_after_frames=random.choice([3, 1_000_000]),
            sealed_data_bytes=random.choice([400, 5_000]),
            pause_bytes=pause,
            resume_bytes=pause // 2,
        )
        config = ClientConfig(connection=connection, resume_grace_s=grace_s)
        link = {"delay_s": 0.02, "bits_per_s": 2e6, "buffer_bytes": 65_536} if random.random() < 0.2 else None
        return cls(random.choice([Security.PREFER, Security.E2E]), random.random() < 0.8, 3, link, config)


def drawn_config(random: Random) -> ClientConfig:
    """A client's configuration, with some limits low enough to be reached."""
    connection = ConnectionConfig()
    if random.random() < 0.5:
        window = random.choice([5_000, 70_000, 1_000_000])
        pause = random.choice([100, 5_000, 64 * 1024])
        connection = replace(
            connection,
            send_window_bytes=min(window, 256 * 1024),
            secure_window_bytes=window,
            largest_window_bytes=random.choice([window, 8_000_000]),
            shared_buffer_bytes=random.choice([10_000, 1_000_000, 100_000_000]),
            ack_limit_bytes=random.choice([1_000, 20_000, 256 * 1024]),
            rekey_after_frames=random.choice([2, 50, connection.rekey_after_frames]),
            frame_data_bytes=random.choice([50, 32_750]),
            sealed_data_bytes=random.choice([200, connection.sealed_data_bytes]),
            pause_bytes=pause,
            resume_bytes=pause // 2,
            flush_bytes=random.choice([1_000, 128 * 1024]),
        )
    listener = ListenerLimits()
    if random.random() < 0.3:
        idle_s = random.choice([0.0, 0.0, 5.0])
        listener = ListenerLimits(
            random.choice([16, 256]), 16, random.choice([12, 1_024]), random.choice([6, 384]), 3.0, idle_s
        )
    grace_s = random.choice([30.0, 30.0, 30.0, 5.0, 0.0])
    return ClientConfig(connection=connection, listener=listener, resume_grace_s=grace_s)


@implementer(IAccessPolicy)
class SlowPolicy:
    """Admits after a while, or does not; and sometimes fails."""

    def __init__(self, programs: Programs, machine: Machine) -> None:
        self._programs = programs
        self._machine = machine

    async def allow(self, remote: PublicKey, service: str) -> bool:
        """See :class:`~dmsg.interfaces.IAccessPolicy`."""
        random = self._programs.random
        await deferLater(self._machine, random.choice([0.0, random.expovariate(2.0), random.expovariate(0.1)]))
        if random.random() < 0.1:
            raise Wanted("the policy fails")
        return random.random() < 0.8


class Program:
    """One key's program: a client at a time, and the ends of its transports."""

    def __init__(self, world: World, programs: Programs, number: int, kind: Kind) -> None:
        self.world = world
        self.kind = kind
        self.number = number
        self.key = world.key(f"client {number}")
        self.client: Client | None = None
        self.machine: Machine
        self.lives = 0
        self.stopping: Client | None = None
        #: The dials in progress.
        self.asked: list[Deferred[Any]] = []
        self._programs = programs
        self._random = programs.random
        self._mine: list[Deferred[Any]] = []

    # --- its life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a new life."""
        if self.client is not None or self.stopping is not None:
            return
        self.lives += 1
        world, kind, random = self.world, self.kind, self._random
        link = Link(world.clock, **kind.link) if kind.link else None
        self.machine = Machine(world.network, f"client {self.number}.{self.lives}", link=link)
        how: dict[str, Any] = {
            "discovery": world.discovery_of(self.machine),
            "min_servers": kind.min_servers,
            "random": world.random(f"client {self.number} {self.lives}").randbytes,
            "now_ns": world.now_ns,
        }
        aes = random.random() < 0.3
        if world.protocol == MESSAGING:
            self.client = MessagingClient(self.machine, self.key, **how)
        else:
            how |= {"security": kind.security, "config": replace(kind.config, extended=kind.extended, aes=aes)}
            self.client = DmsgClient(self.machine, self.key, **how)
        world.note(f"{self.machine} starts" + (f": {kind}" if self.lives == 1 else ""))
        self._begin()

    def start_again(self, client: Client) -> None:
        """Start a client that has stopped once more."""
        if self.client is not None or self.stopping is not None or self.machine.is_off:
            return
        if client.reactor is not self.machine:  # the client of an earlier life
            return
        self.world.note(f"{self.machine} starts again")
        self.world.idle_machines.remove(self.machine)
        self.client = client
        self.machine.is_stopping = False
        self._begin()

    def _begin(self) -> None:
        client = self.client
        assert client is not None
        client.startService()
        ready = client.when_ready()
        ready.addErrback(self._not_ready)
        client.listen(self._factory())
        if isinstance(client, DmsgClient) and self.kind.security is not Security.HOP:
            slow = SlowPolicy(self._programs, self.machine) if self._random.random() < 0.5 else None
            client.listen(self._factory(), SERVICE, policy=slow)

    def _factory(self) -> Factory:
        factory = Factory.forProtocol(lambda: self._programs.new_end(self.machine))
        factory.noisy = False
        return factory

    def _not_ready(self, failure: Failure) -> None:
        if failure.check(ClientStopped, DiscoveryError) is None:
            self.world.violation(f"when_ready of {self.machine} failed: {failure.value!r}")

    def stop(self) -> Deferred[Any]:
        """Stop the client."""
        client, machine = self.client, self.machine
        assert client is not None
        self.client, self.stopping = None, client
        machine.is_stopping = True
        for end in self._programs.open_ends():
            if end.machine is machine:
                end.fate.stopped = True
        self.world.note(f"{machine} stops")
        done = maybeDeferred(client.stopService)
        self._promise(done, f"{machine}: stopService", STOP_S)
        done.addCallback(self._stopped, client, machine)
        return done

    def _stopped(self, _: object, client: Client, machine: Machine) -> None:
        self.stopping = None
        self.world.note(f"{machine} has stopped")
        self.world.idle_machines.append(machine)
        self._programs.check_stopped(client, machine)
        if self._programs.chaos and self._random.random() < 0.3:
            self.world.clock.callLater(self._random.choice([0.0, 0.0, 0.5]), self.start_again, client)

    def kill(self, *, silently: bool) -> None:
        """Switch the machine off."""
        self.world.note(f"{self.machine} is killed" + (" silently" if silently else ""))
        self.client = self.stopping = None
        for each in self._mine:
            self.world.take_back(each)
        self._mine.clear()
        self.world.forget_later(self.machine.switch_off(silently=silently))

    def _promise(self, deferred: Deferred[Any], what: str, limit_s: float) -> None:
        self.world.promise(deferred, what, limit_s)
        self._mine = [one for one in self._mine if not one.called]
        self._mine.append(deferred)

    # --- dials -------------------------------------------------------------------------------------------------------------

    def dial(self, other: Program, habits: Habits, service: str = "", **how: Any) -> Deferred[End | None]:
        """Dial ``other``; fires with the end here, or ``None``."""
        client = self.client
        assert client is not None
        self.world.note(f"{self.machine} dials {other.number} {service!r}")
        if self._programs.chaos and self._random.random() < 0.2:
            return self._connect(client, other, habits, service, how)
        asked = start(client.dial(other.key.public_key, service, **how))
        self._promise(asked, f"{self.machine}: a dial of client {other.number}", DIAL_S)
        if self._programs.chaos and self._random.random() < 0.05:
            self.machine.callLater(self._random.expovariate(5.0), asked.cancel)
        self.asked = [*(one for one in self.asked if not one.called), asked]
        asked.addCallbacks(self._dialled, self._not_dialled, callbackArgs=(habits, other))
        return asked

    def _connect(
        self, client: Client, other: Program, habits: Habits, service: str, how: dict[str, Any]
    ) -> Deferred[Any]:
        """Dial as programs written for TCP do."""
        factory = Factory.forProtocol(lambda: self._programs.new_end(self.machine, habits))
        factory.noisy = False
        address = DmsgAddress(other.key.public_key, service, None, client.scheme)
        asked = ClientEndpoint(client, address, **how).connect(factory)
        self._promise(asked, f"{self.machine}: a connect to client {other.number}", DIAL_S)
        if self._random.random() < 0.1:
            self.machine.callLater(self._random.expovariate(5.0), asked.cancel)
        asked.addCallbacks(self._connected, self._not_connected)
        return asked

    def _connected(self, end: End) -> None:
        self.world.note(f"{end} connected")
        if not self._programs.chaos:
            end.finish()

    def _not_connected(self, failure: Failure) -> None:
        self.world.note(f"{self.machine}: no connect: {failure.value}")
        if failure.check(ConnectError, ConnectingCancelledError) is None:
            self.world.violation(f"a connect of {self.machine} failed: {failure.value!r}\n{failure.getTraceback()}")

    def _dialled(self, transport: Any, habits: Habits, other: Program) -> End:
        end = self._programs.new_end(self.machine, habits)
        self.world.note(f"{end} opened to client {other.number} ({transport.security})")
        transport.attach(end)
        if not self._programs.chaos and not habits.is_steady:
            end.finish()
        return end

    def _not_dialled(self, failure: Failure) -> None:
        self.world.note(f"{self.machine}: no dial: {failure.value}")
        if failure.check(DialError, CancelledError) is None:
            self.world.violation(f"a dial of {self.machine} failed: {failure.value!r}\n{failure.getTraceback()}")


class Programs:
    """All programs and ends; during ``chaos`` they act at random."""

    def __init__(self, world: World, clients: int) -> None:
        self.world = world
        self.random = world.random("programs")
        self.chaos = False
        self.ends: dict[int, End] = {}
        self._numbers = count(1)
        self.all: list[Program] = []
        for number in range(clients):
            self.all.append(Program(world, self, number, Kind.drawn(self.random, world)))

    def new_end(self, machine: Machine, habits: Habits | None = None) -> End:
        """A new end on ``machine``."""
        drawn = habits or (self._habits() if self.chaos else Habits.answering())
        end = End(self.world, self, machine, drawn, next(self._numbers))
        self.ends[end.number] = end
        return end

    def open_ends(self) -> list[End]:
        """Ends that are alive and have not ended."""
        return [end for end in self.ends.values() if end.made and not end.fate.lost and not end.machine.is_off]

    def end_lost(self, end: End) -> None:
        """``end`` was told that it has ended."""
        if end.habits.dials_when_lost and self.chaos:
            self._dial_from(end.machine)

    def meddle(self, end: End) -> None:
        """A program gives a dial up, or another of its transports, from within a callback of ``end``."""
        for program in self.all:
            if program.machine is end.machine and self.random.random() < 0.5:
                asked = [one for one in program.asked if not one.called]
                if asked:
                    self.random.choice(asked).cancel()
                    return
        others = [one for one in self.open_ends() if one.machine is end.machine and one is not end]
        if others:
            self.random.choice(others).act("abort")

    def begin_calm(self) -> None:
        """Start no more random actions; those in progress continue."""
        self.chaos = False
        for end in self.open_ends():
            end.read_on()

    def stop_client(self, machine: Machine) -> None:
        """A program stops its client, from within a callback."""
        for program in self.all:
            if program.client is not None and program.machine is machine:
                program.stop()
                self.world.clock.callLater(self.random.expovariate(0.1), self._again, program)

    def _again(self, program: Program) -> None:
        if program.stopping is not None:
            self.world.clock.callLater(5.0, self._again, program)
        else:
            program.start()

    def _dial_from(self, machine: Machine) -> None:
        for program in self.all:
            if program.client is not None and program.machine is machine:
                self.dial_some(program)

    def dial_some(self, program: Program, other: Program | None = None) -> None:
        """Dial ``other``, another client or oneself."""
        random = self.random
        others = [one for one in self.all if one is not program]
        other = other or random.choice(others if self.world.moving and random.random() < 0.9 else self.all)
        how: dict[str, Any] = {}
        if self.world.protocol == MESSAGING:
            program.dial(other, self._habits())
            return
        if random.random() < 0.2:
            how["security"] = random.choice(list(Security))
        service = SERVICE if random.random() < 0.3 else ""
        program.dial(other, self._habits(), service, **how)

    def _habits(self) -> Habits:
        return Habits.drawn(self.random, streaming=0.9 if self.world.moving else 0.8 if self.world.streaming else 0.3)

    # --- chaos -------------------------------------------------------------------------------------------------------------

    def begin_chaos(self, dial_every_s: float) -> None:
        """From now on, dial about every ``dial_every_s``."""
        self.chaos = True
        self._dial_every_s = dial_every_s
        for program in self.all:
            self._next_dial(program)

    def _next_dial(self, program: Program) -> None:
        self.world.clock.callLater(self.random.expovariate(1 / self._dial_every_s), self._dial_in_chaos, program)

    def _dial_in_chaos(self, program: Program) -> None:
        if not self.chaos:
            return
        if program.client is not None:
            self.dial_some(program)
        self._next_dial(program)

    def end_chaos(self) -> None:
        """Start no more random actions; start stopped clients, and finish open ends."""
        self.chaos = False
        for program in self.all:
            self._again(program)
        for end in self.open_ends():
            end.finish()

    # --- promises ------------------------------------------------------------------------------------------------------------

    def check_stopped(self, client: Client, machine: Machine) -> None:
        """A client that has stopped has nothing left."""
        self.world.clock.callLater(_LETTING_GO_S, self._check_later, client, machine)
        for end in self.open_ends():
            if end.machine is machine:
                self.world.clock.callLater(0.0, self._check_over, end)

    def _check_later(self, client: Client, machine: Machine) -> None:
        stopping = any(program.stopping is client for program in self.all)
        if client.running or stopping or machine.is_off:
            return  # it was started again
        held = leftovers.of_client(client, reads=not any(end.machine is machine for end in self.open_ends()))
        if held:
            self.world.violation(f"{machine} has stopped and holds {held}")

    @staticmethod
    def _check_over(end: End) -> None:
        if not end.fate.lost and end.reads:  # an end that does not read is told once it reads
            end.violation("is not over, and its client has stopped")

    def check_counts(self) -> None:
        """The counters of open transports are right."""
        for end in self.open_ends():
            end.check_counts()
        for program in self.all:
            if isinstance(program.client, DmsgClient):
                self._check_streams(program.machine, program.client)

    def _check_streams(self, machine: Machine, client: DmsgClient) -> None:
        """No stream is open whose request was given up."""
        for session in client.pool.sessions.values():
            for stream in session.connection.streams.values():
                if isinstance(stream.owner, PendingRequest) and stream.owner.done.called:
                    self.world.violation(f"{machine} has {stream!r}, and no one wants it")

    def check_pairs(self) -> None:
        """The two sides of each transport were told matching ends; all transports have ended."""
        for end in self.ends.values():
            end.check_pair()
        self.ends = {end.number: end for end in self.open_ends()}
