"""The faults of the simulated network, and their times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from twisted.internet.error import ConnectionLost
from twisted.python.failure import Failure

from dmsg.crypto.keys import PublicKey
from dmsg.testing.memory import Path
from dmsg.testing.pipe import Pipe
from tests.simulation.ends import End
from tests.simulation.holding import HoldingRelay
from tests.simulation.machine import Machine, Nothing
from tests.simulation.programs import Programs
from tests.simulation.world import RELAY_PORT, World

ALL: Final = (
    "cut",
    "half_cut",
    "late_cut",
    "cuts",
    "race",
    "freeze",
    "path",
    "relay_killed",
    "relay_stopped",
    "discovery",
    "client_killed",
    "client_stopped",
    "clock",
    "both_cut",
    "leave",
    "hold",
    "burst",
)
#: Faults of networks in which transports move.
OF_MOVING: Final = frozenset({"both_cut", "leave", "hold", "burst"})
#: Weights of faults that are more frequent than others.
_WEIGHTS: Final = {"cut": 4, "half_cut": 3, "late_cut": 3, "cuts": 2, "race": 4, "freeze": 2, "path": 2} | {
    "both_cut": 3,
    "leave": 8,
    "hold": 8,
    "burst": 3,
}
#: Duration of many cuts, for which no transport may be lost.
_CUTS_S: Final = 6.0
#: Longest time by which one end of a connection learns of a cut later than the other.
_LATER_S: Final = 6.0
_LITTLE_LATER_S: Final = 0.5  # when no transport may be lost for it
#: Greatest delay to a relay while nothing goes wrong.
_CALM_DELAY_S: Final = 0.15
#: Faults that cost no end-to-end transport.
GENTLE: Final = frozenset({"cut", "half_cut", "late_cut", "cuts", "race", "clock", "discovery"}) | OF_MOVING
#: Faults that cost no more than a path.
OF_PATHS: Final = frozenset({"cut", "half_cut", "late_cut", "cuts", "race", "freeze", "path"})


class Faults:
    """Makes faults of ``kinds`` during a storm."""

    def __init__(self, world: World, programs: Programs, kinds: tuple[str, ...] = ALL) -> None:
        self._world = world
        self._programs = programs
        self._random = world.random("faults")
        self._kinds = kinds
        self._storm = False
        self._every_s = 1.0
        self._cuts_until = 0.0
        self._leaving: set[End] = set()

    def begin(self, every_s: float) -> None:
        """Make a fault about every ``every_s`` from now on."""
        self._storm, self._every_s = bool(self._kinds), every_s
        if self._storm:
            self._next()

    def end(self) -> None:
        """Make no more faults, and end those that last."""
        self._storm = False
        world = self._world
        world.discovery_state = "answers"
        world.clock_offset_s = 0.0
        for relay in world.relays:
            # Over the longest path, a handshake behind a transfer would exceed its timeout.
            world.network.set_path(relay.host, RELAY_PORT, Path(min(relay.delay_s, _CALM_DELAY_S)))
            relay.start()
        world.end_silence()

    def _next(self) -> None:
        self._world.clock.callLater(self._random.expovariate(1 / self._every_s), self._fault)

    def _fault(self) -> None:
        if not self._storm:
            return
        kind = self._random.choices(self._kinds, [_WEIGHTS.get(kind, 1) for kind in self._kinds])[0]
        make: Callable[[], None] = getattr(self, f"_{kind}")
        make()
        self._next()

    # --- of networks in which transports move ----------------------------------------------------------------------------

    def _moving_end(self) -> End | None:
        """An end whose transport may move: the side that looks for other paths."""
        ends = [end for end in self._programs.open_ends() if end.sealed and not end.machine.is_stopping]
        ends = [end for end in ends if end.peer is not None and end.transport.stream.initiator]
        return self._random.choice(ends) if ends else None

    def _pipes_of(self, end: End) -> list[Pipe]:
        """The connections of the transport of ``end``, on this side."""
        server = end.transport.getHost().server_public_key
        hosts = {relay.host for relay in self._world.relays if relay.service is not None and relay.key == server}
        return [pipe for pipe in end.machine.open_pipes() if pipe.b.getHost().host in hosts and not pipe.frozen]

    def _both_cut(self) -> None:
        """Both ends of a transport lose their relays at the same moment."""
        end = self._moving_end()
        if end is not None and end.peer is not None:
            self._cut_machine(end.machine)
            self._cut_machine(end.peer.machine)

    def _leave(self) -> None:
        """A transport moves twice. Data sent on its first or second path still arrives, perhaps later than data sent on the
        following path.
        """
        end, random = self._moving_end(), self._random
        if end is None or end.peer is None or end in self._leaving:
            return
        self._leaving.add(end)
        first = self._pipes_of(end)
        others = [pipe for pipe in end.machine.open_pipes() if not pipe.frozen and pipe not in first]
        random.shuffle(others)
        self._world.note(f"{end} moves, and again")
        for pipe in [*first, *others[:1]]:
            pipe.delay_s = random.choice([0.0, 0.3, 0.8, 1.2])
        frozen = others[1:] if random.random() < 0.8 else []
        for pipe in frozen:
            pipe.freeze()
        path, pause_s = end.transport.stream, random.choice([0.0, 0.0, 0.05, 0.4])
        if random.random() < 0.4:
            self._hold_back(end.transport.getHost().server_public_key, end.peer, None)
        self._later(random.choice([0.0, 0.1, 0.5]), self._leave_now, end=end)
        self._leave_again(end, path, frozen, pause_s, 500)

    def _leave_now(self, end: End) -> None:
        """Break the connection of ``end`` on its side; sent data still arrives, and then the loss."""
        if self._storm and not end.machine.is_off:
            for pipe in self._pipes_of(end):
                pipe.a.connectionLost(Failure(ConnectionLost()))

    def _leave_again(self, end: End, path: object, frozen: list[Pipe], pause_s: float, looks: int) -> None:
        over = end.fate.lost or end.machine.is_off or not looks
        if not over and (end.transport.stream is path or end.transport.detached):
            wait = {"end": end, "path": path, "frozen": frozen, "pause_s": pause_s, "looks": looks - 1}
            self._later(0.01, self._leave_again, **wait)
            return
        self._leaving.discard(end)
        for pipe in frozen:
            self._melt(pipe, breaks=False)
        if not over:
            if end.peer is not None and self._random.random() < 0.6:
                self._hold_back(end.transport.getHost().server_public_key, end.peer, None)
            self._later(pause_s, self._leave_now, end=end)

    def _hold(self) -> None:
        """A relay holds back the data for one end, and the other end moves: data of both paths arrives in one read."""
        end, random = self._moving_end(), self._random
        if end is None or end.peer is None:
            return
        server, whole = end.transport.getHost().server_public_key, random.random() < 0.3
        to = end if whole and random.random() < 0.5 else end.peer
        self._hold_back(server, to, None if whole else random.random() < 0.5)
        if random.random() < 0.8:
            self._later(random.choice([0.0, 0.1, 0.3]), self._leave_now, end=end)

    def _hold_back(self, server: PublicKey, to: End, before: bool | None) -> None:
        """Let the relay ``server`` hold back data for ``to``: all, or data to arrive ``before`` or after that of new paths."""
        client = to.transport.getHost().public_key
        for relay in self._world.relays:
            service = relay.service
            if isinstance(service, HoldingRelay) and relay.key == server:
                hold = service.hold(client, everything=before is None, before=bool(before))
                if hold is not None:
                    self._world.note(f"{relay.machine} holds back what goes to {to}")
                    lasts_s = self._random.choice([0.2, 1.0, 2.0]) if before is None else 4.0
                    self._later(lasts_s, service.release, client=client, hold=hold)

    def _burst(self) -> None:
        """A program dials many times at one moment."""
        program, other = self._random.choices(self._programs.all, k=2)
        if program.client is not None:
            for _ in range(self._random.choice([3, 12])):
                self._programs.dial_some(program, other)

    # --- the kinds -------------------------------------------------------------------------------------------------------

    def _cut(self) -> None:
        """A connection breaks, or all of a machine do at once."""
        pipes = self._pipes()
        if not pipes:
            return
        pipe, random = self._random.choice(pipes), self._random
        host = pipe.b.getHost().host
        for one in [pipe] if random.random() < 0.8 else pipes:
            if one.b.getHost().host == host and not one.closed:
                self._cut_now(one)

    def _cut_now(self, pipe: Pipe) -> None:
        if not pipe.closed:
            self._world.note(f"cut: {pipe.a.getHost().port} to {pipe.b.getHost().host}")
            pipe.cut()

    def _half_cut(self) -> None:
        """One end of a connection learns that it broke; the other end gets nothing any more, and learns it a little later."""
        pipes, random = self._pipes(), self._random
        if not pipes:
            return
        pipe = random.choice(pipes)
        later_s = random.choice([0.0, 0.05, random.uniform(0.0, _LITTLE_LATER_S if self._world.gentle else _LATER_S)])
        end = random.choice([pipe.a, pipe.b])
        self._world.note(f"cut, at the other end {later_s:.2f} s later: {end.getHost().port} of {end.getHost().host}")
        pipe.freeze()
        end.connectionLost(Failure(ConnectionLost()))
        self._later(later_s, self._cut_later, pipe=pipe)

    def _late_cut(self) -> None:
        """A connection breaks as soon as data has arrived, before any answer leaves."""
        pipes, random = self._pipes(), self._random
        if not pipes:
            return
        pipe, least = random.choice(pipes), random.choice([1, 500, 5_000])
        again = pipe.cut_size

        def cut_size(available: int) -> int:
            if available >= least and self._storm:
                pipe.cut_size = again
                self._world.clock.callLater(0.0, self._cut_now, pipe)
            return again(available)

        pipe.cut_size = cut_size

    def _cuts(self) -> None:
        """For a while, every connection of one client breaks soon. Two such clients would never find each other."""
        random, now = self._random, self._world.clock.seconds()
        if now < self._cuts_until:
            return
        program = random.choice(self._programs.all)
        every_s = random.choice([0.1, 0.3, 1.0])
        until = now + random.uniform(0.0, _CUTS_S)
        self._cuts_until = until + _CUTS_S
        self._world.note(f"cuts at client {program.number} about every {every_s} s")

        def next_cut() -> None:
            if self._storm and self._world.clock.seconds() < until and program.client is not None:
                for pipe in program.machine.open_pipes():
                    if not pipe.frozen and random.random() < 0.7:
                        self._cut_now(pipe)
                self._world.clock.callLater(random.expovariate(1 / every_s), next_cut)

        next_cut()

    def _race(self) -> None:
        """The connection of a sealed transport breaks, and then an end acts or the next connection breaks."""
        random, programs = self._random, self._programs
        ends = [end for end in programs.open_ends() if end.sealed and not end.machine.is_stopping]
        if not ends:
            return
        end = random.choice(ends)
        for pipe in end.machine.open_pipes():
            if not pipe.frozen:
                self._cut_now(pipe)
        who = end if end.peer is None or random.random() < 0.5 else end.peer
        for _ in range(random.randint(1, 2)):
            after_s = random.choice([0.0, 0.0, 0.1, 0.5, random.expovariate(1.0)])
            what = random.choice(["act", "act", "cut", "cut", "kill"])
            if what == "act":
                self._later(after_s, who.act, how=random.choice(["lose", "half", "abort", "deadline"]))
            elif what == "cut" or self._world.gentle:
                self._later(after_s, self._cut_machine, machine=who.machine)
            else:
                self._later(after_s, self._relay_killed)

    def _cut_machine(self, machine: Machine) -> None:
        for pipe in machine.open_pipes():
            if not pipe.frozen and self._storm:
                self._cut_now(pipe)

    def _cut_later(self, pipe: Pipe) -> None:
        if not pipe.closed and not any(isinstance(end.protocol, Nothing) for end in (pipe.a, pipe.b)):
            pipe.thaw()
            pipe.cut()

    def _pipes(self) -> list[Pipe]:
        """The connections that are open and not silent."""
        return [pipe for pipe in self._world.network.pipes if not pipe.closed and not pipe.frozen]

    def _freeze(self) -> None:
        """A connection is silent for a while, and then resumes or breaks."""
        pipes = self._pipes()
        if not pipes:
            return
        pipe, random = self._random.choice(pipes), self._random
        lasts_s = random.choice([random.expovariate(1.0), random.uniform(1.0, 75.0)])
        self._world.note(f"freeze for {lasts_s:.1f} s: {pipe.a.getHost().port} to {pipe.b.getHost().host}")
        pipe.freeze()
        self._world.clock.callLater(lasts_s, self._melt, pipe, random.random() < 0.5)

    @staticmethod
    def _melt(pipe: Pipe, breaks: bool) -> None:
        if (
            pipe.closed
            or not pipe.frozen
            or isinstance(pipe.a.protocol, Nothing)
            or isinstance(pipe.b.protocol, Nothing)
        ):
            return  # a program that was killed answers nothing
        pipe.thaw()
        if breaks:
            pipe.cut()

    def _path(self) -> None:
        """The path to a relay changes for a while."""
        world, random = self._world, self._random
        relay = random.choice(world.relays)
        path = Path(
            random.choice([0.0, 0.01, 0.2, 1.0]), random.choice([0.0, 0.01, 0.2]), random.choice([0.0, 0.5, 1.0])
        )
        world.note(f"the way to {relay.machine} is {path}")
        world.network.set_path(relay.host, RELAY_PORT, path)

    def _relay_killed(self) -> None:
        """A relay dies, and comes back."""
        random = self._random
        relay = random.choice(self._world.relays)
        if self._storm and relay.service is not None and not relay.service.switch.draining:
            relay.kill(silently=random.random() < 0.5)
            self._later(random.expovariate(0.2), relay.start, new_key=random.random() < 0.3)

    def _relay_stopped(self) -> None:
        """A relay stops in order, and comes back."""
        relay = self._random.choice(self._world.relays)
        if relay.service is not None and not relay.service.switch.draining:
            relay.stop().addCallback(lambda _: self._later(self._random.expovariate(0.5), relay.start))

    def _discovery(self) -> None:
        """Discovery does not answer for a while, or refuses."""
        world = self._world
        world.discovery_state = self._random.choice(["silent", "refuses"])
        world.note(f"discovery {world.discovery_state}")
        self._later(self._random.expovariate(0.5), self._answer)

    def _answer(self) -> None:
        self._world.discovery_state = "answers"
        self._world.note("discovery answers")

    def _client_killed(self) -> None:
        """A client's machine dies, and comes back without any memory."""
        program = self._random.choice(self._programs.all)
        if program.client is not None:
            program.kill(silently=self._random.random() < 0.5)
            self._later(self._random.expovariate(0.3), program.start)

    def _client_stopped(self) -> None:
        """A client stops in order, and comes back."""
        program = self._random.choice(self._programs.all)
        if program.client is not None:
            self._programs.stop_client(program.machine)

    def _clock(self) -> None:
        """The wall clocks are set."""
        world = self._world
        world.clock_offset_s = self._random.choice([-400.0, -5.0, -0.01, 0.0, 5.0, 400.0])
        world.note(f"clocks are {world.clock_offset_s:g} s off")

    def _later(self, after_s: float, do: Callable[..., object], **arguments: object) -> None:
        self._world.clock.callLater(min(after_s, 60.0), do, **arguments)
