"""What goes wrong in the simulated network, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dmsg.testing.memory import Path
from dmsg.testing.pipe import Pipe
from tests.simulation.machine import Nothing
from tests.simulation.programs import Programs
from tests.simulation.world import RELAY_PORT, World

ALL: Final = (
    "cut",
    "freeze",
    "path",
    "relay_killed",
    "relay_stopped",
    "discovery",
    "client_killed",
    "client_stopped",
    "clock",
)
#: How much oftener some are than others.
_WEIGHTS: Final = {"cut": 6, "freeze": 2, "path": 2}
#: Those that cost no transport that is end-to-end.
GENTLE: Final = frozenset({"cut", "clock", "discovery"})


class Faults:
    """Makes faults of ``kinds`` while there is a storm."""

    def __init__(self, world: World, programs: Programs, kinds: tuple[str, ...] = ALL) -> None:
        self._world = world
        self._programs = programs
        self._random = world.random("faults")
        self._kinds = kinds
        self._storm = False
        self._every_s = 1.0

    def begin(self, every_s: float) -> None:
        """A fault about every ``every_s`` from now on."""
        self._storm, self._every_s = bool(self._kinds), every_s
        if self._storm:
            self._next()

    def end(self) -> None:
        """No faults from now on, and those that last are over."""
        self._storm = False
        world = self._world
        world.discovery_state = "answers"
        world.clock_offset_s = 0.0
        for relay in world.relays:
            world.network.set_path(relay.host, RELAY_PORT, Path(relay.delay_s))
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

    # --- the kinds -------------------------------------------------------------------------------------------------------

    def _cut(self) -> None:
        """A connection breaks."""
        pipes = [pipe for pipe in self._world.network.pipes if not pipe.closed]
        if pipes:
            pipe = self._random.choice(pipes)
            self._world.note(f"cut: {pipe.a.getHost().port} to {pipe.b.getHost().host}")
            pipe.cut()

    def _freeze(self) -> None:
        """A connection is silent for a while, and then goes on or breaks."""
        pipes = [pipe for pipe in self._world.network.pipes if not pipe.closed and not pipe.frozen]
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
        """The way to a relay is another one for a while."""
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
        if relay.service is not None and not relay.service.switch.draining:
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
        """A client's machine dies, and comes back without knowing anything."""
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
        """The clocks on the wall are set."""
        world = self._world
        world.clock_offset_s = self._random.choice([-400.0, -5.0, -0.01, 0.0, 5.0, 400.0])
        world.note(f"clocks are {world.clock_offset_s:g} s off")

    def _later(self, after_s: float, do: Callable[..., object], **arguments: object) -> None:
        self._world.clock.callLater(min(after_s, 60.0), do, **arguments)
