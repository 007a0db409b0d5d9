"""The faults of a run, and their rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from dmsg.rmb.core.address import SessionAddress

from .network import cut, ends_of

if TYPE_CHECKING:
    from .peers import Peer
    from .sessions import Client
    from .world import World

Action = Callable[["World"], None]


@dataclass
class Profile:
    """The faults of a run by name, with their possible effects."""

    faults: tuple[str, ...]
    #: Actions in a second.
    rate: float
    #: Whether the limits of relays, or of their stores, are small enough to be reached.
    tight: bool
    full: bool
    #: Whether twins have more sessions than allowed and may send little, and clients buffer little.
    crowded: bool
    limited: bool
    busy: bool
    skew_s: float
    #: Whether there are peers.
    peers: bool
    weights: dict[str, float] = field(default_factory=dict)

    @property
    def may_double(self) -> bool:
        """Whether an envelope may arrive twice: after a crash, or if the answer to a post is lost."""
        return self.has("kill relay", "part", "store", "cut", "freeze", "stop relay")

    def has(self, *faults: str) -> bool:
        """Whether any of ``faults`` happens."""
        return any(one in self.faults for one in faults)

    @property
    def is_quiet(self) -> bool:
        """Whether every request must succeed."""
        return not (self.faults or self.tight or self.full or self.crowded or self.limited or self.busy)

    @property
    def may_be_late(self) -> bool:
        """Whether sessions read slowly, or a store answers late."""
        return self.has("hold", "freeze", "part", "store")

    @property
    def refuses(self) -> bool:
        """Whether an envelope that is no request may be refused, of which its sender is not told."""
        return (
            self.has("registry", "store", "part", "kill relay", "stop relay", "cut", "freeze")
            or self.full
            or self.tight
            or self.limited
        )

    @property
    def keeps_order(self) -> bool:
        """Whether envelopes between two sessions at the same relay arrive in order."""
        return set(self.faults) <= {"hold", "leave", "clock", "kill client", "stop client", "rival"}

    def act(self, world: World) -> None:
        """Make a random action happen."""
        name = world.random.choices(list(self.weights), list(self.weights.values()))[0]
        ACTIONS[name](world)


def profile_of(random: Random, chosen: tuple[str, ...] | None = None) -> Profile:
    """Random faults, perhaps none, unless they are ``chosen``."""
    most = list(FAULTS)
    faults = (
        list(chosen) if chosen is not None else random.sample(most, random.choice([0, 1, 1, 2, 2, 3, 4, len(most)]))
    )
    weights = {"call": 6.0, "send": 6.0, "burst": 1.0, "cancel": 0.5}
    for one in faults:
        for action, weight in FAULTS[one].items():
            weights[action] = weight * random.choice([0.5, 1, 2])
    peers = bool({"peer", "redis"} & set(faults)) or random.random() < 0.3
    if peers:
        weights["ask"] = 5.0
    return Profile(
        faults=tuple(faults),
        peers=peers,
        rate=random.choice([1.0, 3.0, 3.0, 6.0]),
        tight=random.random() < 0.3,
        full=random.random() < 0.15,
        crowded=random.random() < 0.1,
        limited=random.random() < 0.1,
        busy=random.random() < 0.2,
        skew_s=random.choice([2.0, 8.0]) if "clock" in faults else 0.0,
        weights=weights,
    )


# --- what programs do ----------------------------------------------------------------------------------------------


def call(world: World) -> None:
    random = world.random
    callers = [client for client in world.clients if client.running]
    if not callers:
        return
    caller = random.choice(callers)
    targets = [one.address for one in [*world.clients, *world.peers] if one.address != caller.address]
    if not targets:
        return
    target = random.choice(targets)
    if random.random() < 0.05:
        target = SessionAddress(random.choice([target.twin, 99]), random.choice([None, "nowhere"]))
    made = caller.call(
        target,
        size=random.choice([10, 100, 100, 5_000, 5_000, 70_000, 1 << 20 if random.random() < 0.2 else 100]),
        timeout_s=random.choice([0.2, 1.0, 5.0, 20.0, 60.0, 200.0]) * random.uniform(0.8, 1.2),
        once=random.random() < 0.2,
        fail_fast=random.random() < 0.15,
        how=random.choice(["quick", "quick", "quick", "slow", "slow", "never", "refuse", "large"]),
    )
    world.note(f"{made}")


def cancel(world: World) -> None:
    under_way = [one for one in world.calls if one.ended_at is None and not one.was_killed]
    if under_way:
        one = world.random.choice(under_way)
        one.cancelled = True
        world.note(f"cancel call {one.number}")
        one.work.cancel()


def send(world: World, count: int = 1) -> None:
    random = world.random
    senders = [raw for raw in world.raws if raw.running]
    if not senders:
        return
    sender = random.choice(senders)
    to = random.choice([raw for raw in world.raws if raw is not sender]).address
    size = random.choice([10, 1000, 1000, 20_000, 60_000])
    for _ in range(count):
        sent = sender.send(
            to,
            size,
            random.choice([1, 5, 30, 300, 1800]),
            request=random.random() < 0.7,
            fail_fast=random.random() < 0.05,
        )
        world.note(f"{sent}")


def burst(world: World) -> None:
    send(world, world.random.choice([5, 30]))


def ask(world: World) -> None:
    random = world.random
    if not world.peers:
        return
    peer = random.choice(world.peers)
    twins = list({one.address.twin for one in [*world.clients, *world.peers]} - {peer.address.twin})
    asked = peer.ask(
        tuple(random.sample(sorted(twins), min(len(twins), random.choice([1, 1, 1, 2, 3])))),
        size=random.choice([10, 5_000, 70_000]),
        life_s=random.choice([1, 5, 20, 60, 300]),
        how=random.choice(["quick", "quick", "slow", "never", "refuse", "large"]),
    )
    world.note(f"{asked}")


# --- what goes wrong -----------------------------------------------------------------------------------------------


def cut_one(world: World) -> None:
    if world.network.pipes:
        pipe = world.random.choice(world.network.pipes)
        world.note(f"cut {ends_of(pipe)}")
        lossy_pipe(world, pipe)
        cut(pipe)


def lossy_pipe(world: World, pipe: Any, later_s: float = 0.0) -> None:
    """Data in flight over ``pipe`` may be lost."""
    hosts = ends_of(pipe)
    for raw in world.raws:
        if raw.host in hosts:
            world.lossy(raw.address, later_s)


def freeze(world: World) -> None:
    """A connection goes silent for a while, or until it is given up."""
    if world.network.pipes:
        pipe = world.random.choice(world.network.pipes)
        world.note(f"freeze {ends_of(pipe)}")
        pipe.freeze()
        lossy_pipe(world, pipe, 65.0)  # the relay takes it for alive that long
        pause_s = world.random.choice([1.0, 4.0, 10.0, 70.0])

        def go_on() -> None:
            if pipe.frozen and pipe in world.network.pipes:
                world.note(f"thaw {ends_of(pipe)}")
                lossy_pipe(world, pipe)
                if pipe.a.disconnected or pipe.b.disconnected or world.random.random() < 0.3:
                    cut(pipe)
                else:
                    pipe.thaw()

        world.network.callLater(pause_s, go_on)


def hold(world: World) -> None:
    raw = world.random.choice(world.raws)
    raw.hold(not raw.holding)
    world.note(f"{raw} reads: {not raw.holding}")


def leave(world: World) -> None:
    raw = world.random.choice(world.raws)
    world.note(f"{raw} leaves")
    raw.leave()


def come(world: World) -> None:
    raw = world.random.choice(world.raws)
    if not raw.running:
        world.note(f"{raw} comes")
        raw.start()


def kill_relay(world: World) -> None:
    relay = world.random.choice(world.relays)
    if relay.running:
        silently = world.random.random() < 0.3
        world.note(f"kill {relay.name}, silently={silently}")
        world.lossy()
        relay.kill(silently=silently)
        world.network.callLater(world.random.choice([0.1, 3.0, 20.0]), start_again, world, relay)


def start_again(world: World, one: Any) -> None:
    def start() -> None:
        world.note(f"start {getattr(one, 'name', one)}")
        one.start()

    if not one.running:
        world.when_gone(one, start)


def stop_relay(world: World) -> None:
    relay = world.random.choice(world.relays)
    if relay.running:
        world.note(f"stop {relay.name}")
        if not relay.durable:
            world.lossy()
        process = relay.process

        def stopped(outcome: Any) -> None:
            world.note(f"{relay.name} has stopped: {outcome}")
            if not relay.durable:
                world.lossy()
            if outcome is not None:
                world.fail(f"{relay.name} could not stop: {outcome}")
            world.check_ended(process, relay.name)
            process.kill()
            world.network.callLater(world.random.choice([0.1, 5.0]), start_again, world, relay)

        relay.stop().addBoth(stopped)


def kill_client(world: World) -> None:
    client = world.random.choice(world.clients)
    if client.running:
        world.note(f"kill {client}")
        client.kill(silently=world.random.random() < 0.3)
        world.network.callLater(world.random.choice([0.1, 3.0, 20.0]), start_again, world, client)


def rival(world: World) -> None:
    """Another program takes the session of a client, for a while."""
    first = world.random.choice(world.clients)
    number = len(world.rivals)
    made = type(first)(world, *first.address, f"10.5.{number}.1", first.relays)
    world.rivals.append(made)
    world.note(f"a rival of {first} begins")
    made.start()

    def end() -> None:
        if made.running:
            world.note(f"the rival of {first} ends")
            made.kill()

    world.network.callLater(world.random.choice([0.5, 5.0, 30.0]), end)


def stop_client(world: World, client: Client | None = None) -> None:
    _stop(world, client or world.random.choice(world.clients))


def _stop(world: World, program: Client | Peer) -> None:
    if program.running:
        world.note(f"stop {program}")
        process = program.process

        def stopped(outcome: Any) -> None:
            world.note(f"{program} has stopped")
            world.check_ended(process, str(program))
            process.kill()
            world.network.callLater(world.random.choice([0.1, 5.0]), start_again, world, program)

        program.stop().addBoth(stopped)


def move(world: World) -> None:
    """The programs of a twin move to other relays."""
    twin = world.random.choice(world.clients).address.twin
    relays = world.random.sample(world.relays, world.random.randint(1, len(world.relays)))
    world.note(f"twin {twin} moves to {[relay.name for relay in relays]}")
    for client in world.clients:
        if client.address.twin == twin:
            client.relays = relays
            stop_client(world, client)
    world.add_twin(twin, relays)


def store(world: World) -> None:
    relay = world.random.choice(world.relays)
    if not relay.running:
        return
    what, it = world.random.choice(["slow", "failing", "hanging", "well"]), relay.store
    world.note(f"the store of {relay.name} is {what}")
    it.slow_s = world.random.choice([0.01, 0.5, 3.0]) if what == "slow" else 0.0
    it.failing = world.random.choice([0.3, 1.0]) if what == "failing" else 0.0
    it.fails_late = world.random.random() < 0.3
    it.hanging = what == "hanging"
    world.lossy()


def registry(world: World) -> None:
    one: Any = world.random.choice([*world.relays, *world.clients])
    if one.running:
        what, it = world.random.choice(["slow", "failing", "well"]), one.registry
        world.note(f"the registry of {getattr(one, 'name', one)} is {what}")
        it.slow_s = world.random.choice([0.01, 0.5, 5.0]) if what == "slow" else 0.0
        it.failing = world.random.choice([0.2, 1.0]) if what == "failing" else 0.0


def kill_peer(world: World) -> None:
    peer = world.random.choice(world.peers)
    if peer.running:
        world.note(f"kill {peer}")
        peer.kill(silently=world.random.random() < 0.3)
        world.network.callLater(world.random.choice([0.1, 3.0, 20.0]), start_again, world, peer)


def stop_peer(world: World) -> None:
    _stop(world, world.random.choice(world.peers))


def redis(world: World) -> None:
    """A Redis goes away and comes back, is slow, or loses a connection."""
    peer = world.random.choice(world.peers)
    it, what = peer.redis, world.random.choice(["slow", "well", "restart", "cut", "freeze"])
    world.note(f"the Redis of {peer}: {what}")
    it.slow_s = world.random.choice([0.05, 2.0, 8.0]) if what == "slow" else 0.0
    if what == "restart" and it.running:
        it.stop()
        world.network.callLater(world.random.choice([0.1, 3.0, 20.0]), lambda: it.running or it.start())
    elif what in ("cut", "freeze") and it.process.pipes():
        pipe = world.random.choice(it.process.pipes())
        if what == "cut":
            cut(pipe)
        else:
            pipe.freeze()


def part(world: World) -> None:
    """A relay or a client loses its route to a relay, or gets it back."""
    one: Any = world.random.choice([*world.relays, *world.relays, *world.clients])
    other = world.random.choice(world.relays)
    if not one.running or one is other:
        return
    unreachable = one.process.unreachable
    if other.host in unreachable:
        unreachable.discard(other.host)
        world.note(f"{one.host} reaches {other.name} again")
        return
    unreachable.add(other.host)
    world.note(f"{one.host} does not reach {other.name}")
    for pipe in list(world.network.pipes):
        if ends_of(pipe) == (one.host, other.host):
            pipe.freeze()


def clock(world: World) -> None:
    one: Any = world.random.choice([*world.relays, *world.clients, *world.raws])
    one.ahead_s = world.random.uniform(-1, 1) * world.profile.skew_s
    one.process.ahead_s = one.ahead_s
    world.note(f"the clock of {one.host} is {one.ahead_s} s ahead")


#: Everything that can happen.
ACTIONS: dict[str, Action] = {
    one.__name__: one  # type: ignore[attr-defined]
    for one in (
        call,
        cancel,
        send,
        burst,
        cut_one,
        freeze,
        hold,
        leave,
        come,
        kill_relay,
        stop_relay,
        kill_client,
        stop_client,
        rival,
        move,
        store,
        registry,
        ask,
        kill_peer,
        stop_peer,
        redis,
        part,
        clock,
    )
}
#: The actions of a fault, and their rates.
FAULTS: dict[str, dict[str, float]] = {
    "cut": {"cut_one": 0.6, "come": 1.0},
    "freeze": {"freeze": 0.6, "come": 1.0},
    "hold": {"hold": 1.0},
    "leave": {"leave": 0.5, "come": 1.0},
    "kill relay": {"kill_relay": 0.2, "come": 1.0},
    "stop relay": {"stop_relay": 0.2, "come": 1.0},
    "kill client": {"kill_client": 0.4},
    "stop client": {"stop_client": 0.4, "move": 0.3},
    "rival": {"rival": 0.2},
    "store": {"store": 0.7, "leave": 0.4, "come": 0.6},
    "registry": {"registry": 0.8},
    "part": {"part": 0.6},
    "peer": {"kill_peer": 0.3, "stop_peer": 0.3},
    "redis": {"redis": 0.6},
    "clock": {"clock": 0.5},
}
__all__ = ["ACTIONS", "FAULTS", "Profile", "SessionAddress", "profile_of"]
