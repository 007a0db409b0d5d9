"""Runs with dishonest parties: a relay or two, peers, and discovery. Checks the promises to the honest ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

from twisted.internet.defer import DeferredList
from twisted.internet.error import ConnectionDone

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import DMSG
from dmsg.discovery.listing import ServerListing
from dmsg.mux.client.service import DmsgClient
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.errors import IntegrityError, Refused
from dmsg.mux.core.events import StreamOpened
from dmsg.mux.core.openings import Openings
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.testing.memory import Path
from tests.simulation import run as honest
from tests.simulation import tables
from tests.simulation.bad_discovery import Liar, discovery
from tests.simulation.bad_peer import BadPeer
from tests.simulation.bad_relay import BadRelay
from tests.simulation.ends import ANSWER_BYTES, End, Habits, content
from tests.simulation.faults import OF_PATHS, Faults
from tests.simulation.machine import Machine
from tests.simulation.programs import SERVICE, Program, Programs
from tests.simulation.run import Outcome
from tests.simulation.world import RELAY_PORT, Stuck, World

#: Bytes by which one read may exceed a limit.
_READ_BYTES: Final = 256 * 1024
#: Seconds within which a client looks again after discovery lied about a post.
_LOOKS_AGAIN_S: Final = 330.0
#: Seconds within which an honest client gets a session with an honest relay among others: it pauses for up to a minute.
_SESSION_S: Final = 75.0
#: Longer than a transport waits for another path.
_GRACE_S: Final = 45.0
#: Seconds after which an abandoned offer has ended.
_REST_S: Final = 20.0
#: Most bytes that an end writes.
_MOST_WRITTEN: Final = 60_000
#: Most entries in a table of an honest party: what it remembers of others is limited.
_TABLE_LIMIT: Final = 8_192


class DishonestWorld(World):
    """A world with dishonest parties beside the honest ones."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.protocol = DMSG
        self.listing = ServerListing(self.store, self.random("listing"), protocol=DMSG)
        self.liar = Liar(self)
        self.bad_relays: list[BadRelay] = []
        self.bad_peers: list[BadPeer] = []

    def discovery_of(self, machine: Machine) -> Any:
        """See :class:`World`."""
        return discovery(self.liar, machine)

    def add_bad_relay(self, *, extended: bool) -> None:
        """Add a relay that an intruder owns."""
        relay = BadRelay(self, 100 + len(self.bad_relays), extended=extended)
        self.bad_relays.append(relay)
        self.network.set_path(relay.host, RELAY_PORT, Path(relay.delay_s))


class HonestEnd(End):
    """An end of an honest program. Its data is checked if it is sealed and the peer is honest, too."""

    owner: HonestPrograms
    #: Whether nobody in between can have changed data.
    trusts = False
    token = b""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: The relays it is known to have used.
        self.relays: set[PublicKey] = set()

    def connectionMade(self) -> None:
        """See ``IProtocol``."""
        transport: Any = self.transport
        self.remote: PublicKey = transport.getPeer().public_key
        self.trusts = transport.security == "e2e" and self.remote in self.owner.honest
        if self.remote in self.owner.honest and not self.trusts:
            self.violation("in the clear with a client that promises end-to-end security, or in its name")
        if self.trusts:
            self.token = transport.token
            if self.token not in self.owner.asked:
                self.violation("in the name of an honest client that has not asked for it")
            self.relays.add(self.through)
            self.owner.by_token.setdefault(self.token, []).append(self)
        super().connectionMade()

    @property
    def through(self) -> PublicKey:
        """The relay."""
        key: PublicKey = self.transport.getHost().server_public_key  # type: ignore[union-attr]
        return key

    def dataReceived(self, data: bytes) -> None:
        """See ``IProtocol``."""
        if self.trusts:
            self.relays.add(self.through)
            self._find_peer()
            peer, start = self.peer, self.fate.received
            if peer is None:
                self.violation("data came in the name of an honest client that has no such transport")
            elif data != content((self if peer.habits.echoes else peer).number, start, len(data)):
                self.violation(f"other bytes came than were written, from {start} on")
        super().dataReceived(data)

    def _meet(self, number: int) -> None:
        if self.trusts:
            super()._meet(number)

    def _find_peer(self) -> None:
        """Find the peer by the token, which both ends know even if no data came."""
        if self.peer is None and self.trusts:
            others = [one for one in self.owner.by_token[self.token] if one is not self]
            if len(others) == 1 and others[0].machine.name.startswith(
                f"client {self.owner.honest[self.remote].number}."
            ):
                self.peer, others[0].peer = others[0], self
            elif others:
                self.violation(f"{others} have the same transport")

    def _check_clean(self) -> None:
        self._find_peer()
        self.relays.add(self.through)
        super()._check_clean()
        fate, peer, cause = self.fate, self.peer, getattr(self.fate.lost[0].value, "cause", None)
        if self.trusts and isinstance(cause, IntegrityError) and not self.relays & self.owner.bad_relays:
            self.violation("a fault of integrity through honest relays")
        # An end that does not read learns later that its transport has ended.
        stays = peer is not None and not (peer.left or peer.fate.ended or peer.fate.lost or peer.transport.is_over)
        if stays and isinstance(cause, Refused) and not (fate.ended or fate.closed):
            self.violation(f"told that the peer has ended it, which it has not; {peer}")

    def check_pair(self) -> None:
        """See :class:`End`."""
        self._find_peer()
        super().check_pair()
        fate, peer = self.fate, self.peer
        if not fate.lost or peer is None or fate.aborted or not fate.lost[0].check(ConnectionDone):
            return
        if peer.left:
            return  # as with TCP: what it has may be acknowledged before it gives up, and a relay can keep that news back
        ended_by_peer = (self.habits.producer or self.habits.echoes) and not self.habits.half_closeable
        # Data that waits for its reader counts as taken.
        if peer.fate.received != fate.written and peer.reads_always and not ended_by_peer:
            self.violation(f"told a clean end, and the peer has not read all; {peer.told()}")

    def check_counts(self) -> None:
        """See :class:`End`; waiting data is limited, whoever the peer is."""
        super().check_counts()
        stream, waits = self.transport.stream, self.transport.unread_bytes  # type: ignore[union-attr]
        config = self.owner.configs[self.machine.name.partition(".")[0]]
        given = getattr(stream, "_window", None)
        most = max(config.receive_limit_bytes, 0 if given is None else given.most_given_bytes + config.ack_limit_bytes)
        if waits > most + _READ_BYTES:
            self.violation(f"{waits} bytes wait to be read, and {most} may")


class HonestPrograms(Programs):
    """The honest programs, which dial dishonest ones, too."""

    def __init__(self, world: DishonestWorld, clients: int) -> None:
        super().__init__(world, clients)
        self.bad: list[BadPeer] = []
        #: Share of transports that are long streams.
        self.streaming = self.random.choice([0.1, 0.7])
        self.by_token: dict[bytes, list[HonestEnd]] = {}
        self.bad_relays: set[PublicKey] = {relay.public_key for relay in world.bad_relays}
        #: The tokens of transports that were requested and whose answers opened.
        self.asked: set[bytes] = set()
        random = self.random
        for program in self.all:
            # With fewer relays a client might have no honest one.
            needed = random.choice([None, 2, 3]) if len(world.bad_relays) < 2 else 3
            security = random.choice([Security.PREFER, Security.E2E])
            program.kind = replace(program.kind, min_servers=needed, security=security)
        self.honest: dict[PublicKey, Program] = {program.key.public_key: program for program in self.all}
        self.configs = {f"client {program.number}": program.kind.config.connection for program in self.all}

    def new_end(self, machine: Machine, habits: Habits | None = None) -> End:
        """See :class:`Programs`."""
        drawn = habits or (self._habits() if self.chaos else Habits.answering())
        end = HonestEnd(self.world, self, machine, drawn, next(self._numbers))
        self.ends[end.number] = end
        return end

    def _habits(self) -> Habits:
        # A few bytes show dishonesty as well as many.
        drawn = Habits.drawn(self.random, streaming=self.streaming)
        if self.random.random() < 0.2:
            drawn = replace(drawn, pauses_at=0, pauses_for_s=10.0)
        return replace(drawn, total=min(drawn.total, _MOST_WRITTEN))

    def dial_some(self, program: Program) -> None:
        """See :class:`Programs`."""
        random, how = self.random, {}
        if random.random() < 0.2:
            how["security"] = random.choice([Security.PREFER, Security.E2E])
        others: list[Any] = self.bad if self.bad and random.random() < 0.3 else self.all
        program.dial(random.choice(others), self._habits(), SERVICE if random.random() < 0.3 else "", **how)

    def check_counts(self) -> None:
        """See :class:`Programs`; tables that strangers can fill are limited."""
        super().check_counts()
        for program in self.all:
            client = program.client
            if isinstance(client, DmsgClient):
                for text in over_limits(client):
                    self.world.violation(f"{program.machine}: {text}")


def over_limits(client: DmsgClient) -> list[str]:
    """The limits that ``client`` exceeds."""
    config, texts = client.config.connection, []
    for session in client.pool.sessions.values():
        connection = session.connection
        if isinstance(connection, Connection):
            control, offered = connection._out.control_bytes, connection._openings.offered
            if control > config.control_limit_bytes + _READ_BYTES:
                texts.append(f"{control} bytes of answers wait")
            if not 0 <= offered <= config.offered_limit:
                texts.append(f"{offered} offers")
            if len(connection.streams) > 4 * config.offered_limit:
                texts.append(f"{len(connection.streams)} streams")
    for port in client.services.ports():
        if len(port.offers) > port.limits.offers or len(port._opened) > port.limits.open_transports:
            texts.append(f"{len(port.offers)} offers and {len(port._opened)} transports at {port.getHost()}")
    if client._buffers.used_bytes > config.shared_buffer_bytes + _READ_BYTES * (1 + len(client.transports)) * 4:
        texts.append(f"{client._buffers.used_bytes} bytes in buffers")
    return texts


class _Run(honest._Run):
    """One run."""

    world: DishonestWorld

    def __init__(self, world: DishonestWorld) -> None:
        self.world = world
        self.random = random = world.random("run")
        for _ in range(random.randint(1, 3)):
            world.add_relay(extended=random.random() < 0.8)
        for _ in range(random.choice([0, 1, 1, 1, 2])):
            world.add_bad_relay(extended=random.random() < 0.8)
        self.programs: HonestPrograms = HonestPrograms(world, random.randint(2, 3))
        victims = list(self.programs.honest)
        if random.random() < 0.4 or not world.bad_relays:
            for number in range(random.randint(1, 2)):
                double = world.bad_peers[0] if number and random.random() < 0.5 else None
                friend = random.random() < 0.4
                world.bad_peers.append(BadPeer(world, number, victims, friend=friend, double=double))
                world.bad_peers[-1].stolen = self.programs.by_token
        self.programs.bad = world.bad_peers
        kinds = tuple(kind for kind in sorted(OF_PATHS) if random.random() < 0.4) if random.random() < 0.4 else ()
        self.faults = Faults(world, self.programs, kinds)
        self.lying = random.random() < 0.5
        world.liar.real_relays = lambda: [relay.public_key for relay in (*world.relays, *world.bad_relays)]
        world.note(f"faults: {', '.join(kinds)}; discovery lies: {self.lying}")

    def run(self) -> None:
        """All of it."""
        random, world = self.random, self.world
        for program in self.programs.all:
            program.start()
        for _ in range(random.choice([1, 1, 2])):
            for party in (*world.bad_relays, *world.bad_peers):
                party.start()
            alone = bool(world.bad_relays) and random.random() < 0.5
            if alone:
                world.note("no honest relay is there")
                for relay in world.relays:
                    relay.kill(silently=False)
            self._advance(random.choice([0.0, 4.0, 10.0]))
            world.liar.active = self.lying
            self.programs.begin_chaos(random.choice([0.7, 2.0, 5.0]))
            self.faults.begin(random.choice([0.8, 2.0]))
            self._advance(random.uniform(5.0, 15.0))
            if alone and random.random() < 0.5:
                for relay in world.bad_relays:
                    relay.intruder.end_all()
                self._advance(_GRACE_S)
            self.faults.end()  # and the honest relays are back
            if alone:
                self._advance(random.choice([1.0, 10.0]))
            world.liar.active = False
            self.programs.end_chaos()
            self._check_tables()
            if not self.lying:
                self._stand_beside()
            self._part()
            if self.lying:
                self._advance(_LOOKS_AGAIN_S)
            self._recover()
        self._stop()

    def _stand_beside(self) -> None:
        """The dishonest go on; the honest still reach each other, and data through an honest relay arrives."""
        world, programs = self.world, self.programs
        bad = programs.bad_relays
        self._advance(_SESSION_S)
        for program in programs.all:
            if program.client is None or not set(program.client.pool.sessions) - bad:
                world.violation(f"client {program.number} has no session with an honest relay")
                return
        dials = [
            (one, other, one.dial(other, Habits.steady(40_000)))
            for one in programs.all
            for other in programs.all
            if one is not other
        ]
        ends: list[HonestEnd | None] = []
        through: list[PublicKey | None] = []

        def opened(results: Any) -> None:
            for _, end in results:
                ends.append(end)
                through.append(end.through if end is not None and end.transport is not None else None)

        DeferredList([dial for _, _, dial in dials]).addCallback(opened)
        self._advance(honest._TRANSFER_S)
        for (one, other, _), end, relay in zip(dials, ends, through, strict=False):
            if end is None:
                world.violation(f"{one.machine} cannot reach {other.machine} beside the dishonest")
            elif relay is None or relay in bad:
                continue
            elif not end.fate.lost:
                end.violation("a steady transfer through an honest relay is not over")
            elif end.fate.received != ANSWER_BYTES or not end.fate.lost[0].check(ConnectionDone):
                end.violation("a steady transfer through an honest relay did not end well")
        self._check_tables()

    def _check_tables(self) -> None:
        for program in self.programs.all:
            if program.client is not None:
                self._check_sizes(program.machine, program.client)
        for relay in self.world.relays:
            if relay.service is not None:
                self._check_sizes(relay.machine, relay.service)

    def _check_sizes(self, machine: Machine, service: object) -> None:
        for name, size in tables.held(service, {}).items():
            if size > _TABLE_LIMIT and not tables.is_count(name.partition(".")[2]):
                self.world.violation(f"{machine} holds {size} of {name}")

    def _part(self) -> None:
        """The dishonest stop acting, and then disappear."""
        self.world.note("the dishonest rest")
        for peer in self.world.bad_peers:
            peer.rest()
        for relay in self.world.bad_relays:
            relay.intruder.active = False
        self._advance(_REST_S)
        for program in self.programs.all:
            # Transports that lost their path ask for another one, those of dishonest peers too, but not longer than the grace.
            if not self.world.run_until(lambda one=program: not _offers(one), _GRACE_S):  # type: ignore[misc]
                self.world.violation(f"{_offers(program)} offers still wait at {program.machine}")
        self.world.note("the dishonest are gone")
        for peer in self.world.bad_peers:
            peer.end()
        for relay in self.world.bad_relays:
            relay.kill(silently=False)


def _offers(program: Program) -> int:
    """How many offers wait at ``program`` for a decision or a proof."""
    if not isinstance(program.client, DmsgClient):
        return 0
    services = program.client.services
    port = services.port("")
    return len(services.arrivals) + (len(port.offers) if port is not None else 0)


def _noting(asked: set[bytes]) -> Callable[..., StreamOpened | None]:
    """:meth:`Openings.finish`, which adds the tokens to ``asked``."""
    finish = Openings.finish

    def noted(openings: Openings, stream: PlainStream, message: bytes | None) -> StreamOpened | None:
        opened = finish(openings, stream, message)
        if opened is not None:
            asked.add(opened.stream.token)
        return opened

    return noted


def run(seed: int, *, on_note: Callable[[str], object] | None = None) -> Outcome:
    """The run of ``seed``."""
    world = DishonestWorld(seed)
    world.on_note = on_note
    try:
        one = _Run(world)
        with patch.object(Openings, "finish", _noting(one.programs.asked)):
            one.run()
    except Stuck:
        pass
    finally:
        world.close()
    return Outcome(seed, world.violations, world.notes)
