"""One run: storms of faults, calms in which the promises are checked, and the end of everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from twisted.internet.defer import DeferredList
from twisted.internet.error import ConnectionDone

from dmsg.discovery.entry import MESSAGING
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.testing.pipe import PipeEnd
from tests.simulation import leftovers
from tests.simulation.ends import ANSWER_BYTES, Habits
from tests.simulation.faults import ALL, GENTLE, OF_MOVING, OF_PATHS, Faults
from tests.simulation.programs import Program, Programs
from tests.simulation.world import Stuck, World

#: Seconds after a storm within which every retry delay of a client has passed.
_RECOVERY_S: Final = 180.0
#: Longest time for connecting and the handshake.
_ATTEMPT_S: Final = 20.0
#: Seconds within which a transport with a path and a reading peer makes progress.
_PROGRESS_S: Final = 60.0
#: Longest time for a steady transfer of a few ten kilobytes over the slowest path.
_TRANSFER_S: Final = 60.0
#: Seconds after the end within which every timer that is not periodic comes due.
_AFTERWARDS_S: Final = 600.0


@dataclass(frozen=True)
class Outcome:
    """The result of a run: broken promises, and all events."""

    seed: int
    violations: list[str]
    notes: list[str]


def run(
    seed: int,
    *,
    kinds: tuple[str, ...] = ALL,
    on_note: Callable[[str], object] | None = None,
    moving: bool | None = None,
) -> Outcome:
    """The run of ``seed``; ``moving`` is drawn unless it is given."""
    world = World(seed, moving=moving)
    world.on_note = on_note
    try:
        _Run(world, kinds).run()
    except Stuck:
        pass
    finally:
        world.close()
    return Outcome(seed, world.violations, world.notes)


class _Run:
    def __init__(self, world: World, kinds: tuple[str, ...]) -> None:
        self.world = world
        self.random = world.random("run")
        for _ in range(self.random.choice([1, 1, 2, 3, 3, 3]) if world.moving else self.random.randint(1, 4)):
            world.add_relay(extended=self.random.random() < 0.8)
        self.programs = Programs(world, self.random.randint(2, 2 if world.moving else 4))
        # Only some kinds in each run, so that no kind hides faults that another kind would show.
        share = 0.2 if world.moving else 0.4
        kinds = tuple(kind for kind in kinds if self.random.random() < share) or kinds
        if world.streaming:
            kinds = tuple(kind for kind in kinds if kind in OF_PATHS or kind in OF_MOVING) or kinds
        if world.moving:
            allowed = GENTLE if world.patient else GENTLE | OF_PATHS
            kinds = tuple(kind for kind in ALL if (kind in kinds and kind in allowed) or kind in OF_MOVING)
        world.note(f"faults: {', '.join(kinds)}")
        self.faults = Faults(world, self.programs, kinds)
        patient = all(program.kind.config.resume_grace_s >= 30.0 for program in self.programs.all)
        world.gentle = patient and set(kinds) <= GENTLE

    def run(self) -> None:
        """All of it."""
        random, world = self.random, self.world
        for program in self.programs.all:
            program.start()
        for _ in range(random.randint(1, 1 if world.moving else 2)):
            if world.moving:
                self._advance(5.0)
                self.programs.begin_chaos(random.choice([1.0, 3.0]))
                self.faults.begin(random.choice([0.3, 0.6, 1.2]))
                self._advance(random.uniform(6.0, 18.0))
            else:
                self._advance(random.choice([0.0, 4.0, 10.0]))
                self.programs.begin_chaos(random.choice([0.7, 2.0, 5.0]))
                self.faults.begin(random.choice([0.3, 0.8, 2.0]))
                self._advance(random.uniform(5.0, 40.0))
            self.faults.end()
            if random.random() < 0.5:
                self._go_on()
            self.programs.end_chaos()
            world.note("calm")
            self._recover()
        self._stop()

    def _advance(self, amount_s: float) -> None:
        end = self.world.clock.seconds() + amount_s
        while (left := end - self.world.clock.seconds()) > 0:
            self.world.run_until(lambda: False, min(1.0, left))
            self.world.check_promises()
            self.programs.check_counts()

    def _go_on(self) -> None:
        """Without further faults, every end that waits to write is resumed sooner or later."""
        self.world.note("no more faults")
        self.programs.begin_calm()
        self._advance(1.0)  # for ends that the last faults end
        written = {end: end.fate.written for end in self.programs.open_ends() if end.waits_to_write}

        def moved() -> bool:
            return not any(end.waits_to_write and end.fate.written == before for end, before in written.items())

        if not self.world.run_until(moved, _PROGRESS_S):
            for end, before in written.items():
                if end.waits_to_write and end.fate.written == before:
                    end.violation("waits to write, and is never told to")

    def _recover(self) -> None:
        world, programs = self.world, self.programs
        self._advance(_RECOVERY_S)
        while moving := {end: end.fate.received for end in programs.open_ends()}:
            # With a window of a few kilobytes over a slow link, 2 MB take longer, but never rest.
            self._advance(_PROGRESS_S)
            if all(end.fate.received == before for end, before in moving.items()):
                break
        for end in programs.open_ends():
            end.violation("did not come to its end after the storm")
        programs.check_pairs()
        for program in programs.all:
            if program.client is None or not program.client.pool.sessions:
                world.violation(f"client {program.number} has no session after the storm")
                return
        # An attempt at a relay may be in progress at any time, but not always.
        world.run_until(lambda: not self._held(), _ATTEMPT_S)
        for text in self._held():
            world.violation(text)
        dials = []
        for one in programs.all:
            for other in programs.all:
                if one is not other and (world.protocol == MESSAGING or _may_reach(one, other)):
                    dials.append((one, other, one.dial(other, Habits.steady(40_000))))
        done = DeferredList([dial for _, _, dial in dials])
        ends = []
        done.addCallback(lambda results: ends.extend(end for _, end in results))
        self._advance(_TRANSFER_S)
        for (one, other, _), end in zip(dials, ends, strict=False):
            if end is None:
                world.violation(f"{one.machine} cannot reach {other.machine}")
            elif not end.fate.lost:
                end.violation("a steady transfer is not over")
            elif end.peer is None or end.fate.received != ANSWER_BYTES or not end.fate.lost[0].check(ConnectionDone):
                end.violation("a steady transfer did not end well")

    def _held(self) -> list[str]:
        """Data that relays and clients hold at rest, for people."""
        services: list[tuple[object, dict[str, int]]] = []
        for program in self.programs.all:
            if program.client is not None:
                services.append((program.machine, leftovers.of_client(program.client)))
        for relay in self.world.relays:
            if relay.service is not None:
                services.append((relay.machine, leftovers.of_relay(relay.service)))
        return [f"{machine} rests and holds {held}" for machine, held in services if held]

    def _stop(self) -> None:
        world = self.world
        stops = [program.stop() for program in self.programs.all if program.client is not None]
        world.wait(DeferredList(stops), "stopping the clients", 60.0)
        self._advance(2.0)
        for text in self._held():
            world.violation(text)
        for relay in world.relays:
            if relay.service is not None and relay.service.stats()["connections"]:
                world.violation(f"{relay.machine} has clients, and none is there")
        self.programs.check_pairs()
        world.stop_relays()
        self._advance(_AFTERWARDS_S)
        for machine in world.idle_machines:
            for call in machine.pending():
                world.violation(f"{machine} has stopped, and pending is {call}")
        for pipe in world.network.pipes:
            world.violation(
                f"a connection is left: {_described(pipe.a)} to {_described(pipe.b)}, frozen: {pipe.frozen}"
            )


def _described(end: PipeEnd) -> str:
    """The rest of a connection, for people."""
    state = "gone" if end.disconnected else f"{end._unsent()} bytes to send, {len(end._wire)} to read"
    return f"{end.protocol} at {end.getHost().host}: {state}"


def _may_reach(one: Program, other: Program) -> bool:
    """Whether the two agree on who may read their transports."""
    hop = Security.HOP
    if one.kind.security is Security.E2E:
        return other.kind.security is not hop
    if one.kind.security is hop:
        return other.kind.security is not Security.E2E
    return True
