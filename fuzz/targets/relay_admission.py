"""The places and handshakes of a relay, among strangers with many addresses and idle or busy clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from dmsg.sansio.rate import FairBucket
from dmsg.serving.admission import Admission, Crowd, Origin
from dmsg.serving.handshake_rates import HandshakeRates
from dmsg.serving.limits import AdmissionLimits
from fuzz.choices import Choices, repeatable

#: Limits small enough for a short input to reach every one of them. Rates and times are such that floats are exact.
_LIMITS = AdmissionLimits(
    half_open=6,
    half_open_per_address=3,
    handshakes_per_s_per_address=0.5,
    handshake_burst_per_address=4,
    handshakes_per_s_per_network=1.0,
    handshake_burst_per_network=6,
    handshakes_per_s=2.0,
    handshake_burst=16,
    connections=10,
    connections_per_address=4,
)
#: More than 64 places, so that there is a fair share.
_WIDE_LIMITS = AdmissionLimits(half_open=6, half_open_per_address=3, connections=130, connections_per_address=40)
_HOSTS = (
    *("192.0.2.1", "192.0.2.2", "192.0.2.3", "198.51.100.1", "203.0.113.1", "::ffff:203.0.113.9"),
    *("2001:db8:1:1::1", "2001:db8:1:1:ffff::2", "2001:db8:1:2::1", "2001:db8:2::1", "None"),
)


@dataclass(eq=False)
class _Connection:
    """A connection as the service sees it. ``busy`` if it has a transport or a request."""

    origin: Origin
    number: int
    busy: bool = False


class _Buckets:
    """Token buckets by name, each as a number that grows with time."""

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self.rate_per_s, self.burst = rate_per_s, burst
        self._spent: dict[str, tuple[float, float]] = {}

    def left(self, name: str, now: float) -> float:
        tokens, at = self._spent.get(name, (self.burst, now))
        return min(self.burst, tokens + (now - at) * self.rate_per_s)

    def take(self, name: str, now: float) -> bool:
        left = self.left(name, now)
        if left >= 1:
            self._spent[name] = (left - 1, now)
        return left >= 1


class _World:
    """A relay's places, and lists of the expected holders."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.limits = _WIDE_LIMITS if choices.below(4) == 3 else _LIMITS
        self.admission: Admission[_Connection] = Admission(self.limits, random=repeatable(b"places"))
        self.now = 0.0
        self.count = 0
        self.strangers: list[_Connection] = []
        self.clients: list[_Connection] = []
        self.fresh: list[_Connection] = []
        self.quiet: list[_Connection] = []
        self.rates = HandshakeRates(self.limits, 0.0)
        limits = self.limits
        self.per_address = _Buckets(limits.handshakes_per_s_per_address, limits.handshake_burst_per_address)
        self.per_network = _Buckets(limits.handshakes_per_s_per_network, limits.handshake_burst_per_network)
        self.of_all: FairBucket[str] = FairBucket(limits.handshakes_per_s, limits.handshake_burst, 0.0)
        self.connects = [_Buckets(4 * one.rate_per_s, 4 * one.burst) for one in (self.per_address, self.per_network)]

    def one_of(self, crowd: list[_Connection]) -> _Connection:
        """One connection, chosen by one byte however many there are."""
        return crowd[self.choices.byte() % len(crowd)]

    # --- what happens ----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """A TCP connection: first the rate, then a place among the strangers."""
        origin = Origin.of(self.choices.pick(_HOSTS))
        refusal = self.rates.connects(origin, self.now)
        expected = ""
        if not self.connects[0].take(origin.address, self.now):
            expected = "connects_per_address"
        elif not self.connects[1].take(origin.network, self.now):
            expected = "connects_per_network"
        assert refusal == expected
        if refusal:
            return
        self.count += 1
        stranger = _Connection(origin, self.count)
        of_address = [one for one in self.strangers if one.origin.address == origin.address]
        victim = self.admission.arrived(stranger)
        if len(of_address) >= self.limits.half_open_per_address:
            assert victim == (of_address[0], "half_open_per_address")
        elif len(self.strangers) >= self.limits.half_open:
            assert victim is not None and victim[1] == "half_open"
            self.is_of_the_largest(victim[0], self.strangers)
            assert victim[0] is next(one for one in self.strangers if one.origin == victim[0].origin)
        else:
            assert victim is None
        if victim is not None:
            self.strangers.remove(victim[0])
        self.strangers.append(stranger)

    def shake_hands(self) -> None:
        """A first message: a token of each bucket, or of none. Networks share that of all."""
        origin = Origin.of(self.choices.pick(_HOSTS))
        kept = 0.5 * self.choices.below(2)
        named = (
            ("handshakes_per_address", self.per_address, origin.address),
            ("handshakes_per_network", self.per_network, origin.network),
        )
        short = [name for name, one, key in named if one.left(key, self.now) < 1 + kept * one.burst]
        if not short and not self.of_all.take(origin.network, self.now, keep=kept * self.of_all.burst):
            short = ["handshakes"]
        assert self.rates.take(origin, self.now, kept=kept) == (short[0] if short else "")
        if not short:
            for _, one, key in named:
                one.take(key, self.now)

    def admit(self) -> None:
        """A stranger becomes a client, in the place of an idle one if it needs that."""
        newcomer = self.one_of(self.strangers)
        origin = newcomer.origin
        for _ in range(2 * len(self.clients) + 1):
            victim = self.admission.victim(origin)
            self.is_right(victim, origin)
            if victim is None:
                break
            if victim.busy:
                self.admission.is_busy(victim)
                for crowd in (self.fresh, self.quiet):
                    if victim in crowd:
                        crowd.remove(victim)
                continue
            self.leave(victim)
            break
        else:
            raise AssertionError("it asks without end")
        of_address = sum(one.origin.address == origin.address for one in self.clients)
        assert self.admission.is_full(origin) is (of_address >= self.limits.connections_per_address)
        if self.admission.is_full(origin) or len(self.clients) >= self.limits.connections:
            self.leave(newcomer)
            return
        self.admission.joined(newcomer)
        self.strangers.remove(newcomer)
        self.clients.append(newcomer)
        self.fresh.append(newcomer)

    def is_right(self, victim: _Connection | None, origin: Origin) -> None:
        """See :meth:`Admission.victim`."""
        of_address = [one for one in self.clients if one.origin.address == origin.address]
        if len(of_address) >= self.limits.connections_per_address:
            idle = [one for one in of_address if one in self.fresh]
            assert victim in idle if idle else victim is None
        elif len(self.clients) < self.limits.connections:
            assert victim is None
        else:
            own = sum(one.origin.network == origin.network for one in self.clients)
            fresh, quiet = self.most(self.fresh), self.most(self.quiet)
            if quiet > 4 * fresh and quiet > own + 1:
                assert victim in self.quiet
                self.is_of_the_largest(victim, self.quiet)
            elif 4 * fresh > own:
                assert victim in self.fresh
                self.is_of_the_largest(victim, self.fresh)
            else:
                neighbours = [one for one in self.fresh if one.origin.network == origin.network]
                assert victim in neighbours if neighbours else victim is None
                if victim is not None:
                    self.is_of_the_largest(victim, neighbours)

    @staticmethod
    def most(crowd: list[_Connection]) -> int:
        """The size of the largest network in ``crowd``."""
        return max(Counter(one.origin.network for one in crowd).values(), default=0)

    def is_of_the_largest(self, victim: _Connection, crowd: list[_Connection]) -> None:
        """``victim`` is of the largest address group in the largest network of ``crowd``."""
        networks = Counter(one.origin.network for one in crowd)
        network = victim.origin.network
        assert networks[network] == max(networks.values())
        addresses = Counter(one.origin.address for one in crowd if one.origin.network == network)
        assert addresses[victim.origin.address] == max(addresses.values())

    def carry(self, client: _Connection) -> None:
        """A client has a transport."""
        client.busy = True
        self.admission.carries(client)
        if client in self.fresh:
            self.fresh.remove(client)

    def rest(self, client: _Connection) -> None:
        """The last transport or request of a client is over."""
        client.busy = False
        self.admission.rests(client)
        if client in self.clients and client not in self.fresh and client not in self.quiet:
            self.quiet.append(client)

    def leave(self, one: _Connection) -> None:
        """A connection ends."""
        self.admission.left(one)
        for crowd in (self.strangers, self.clients, self.fresh, self.quiet):
            if one in crowd:
                crowd.remove(one)

    # --- what must hold --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """All connections are counted correctly, and no limit is exceeded."""
        admission, limits = self.admission, self.limits
        assert len(self.strangers) <= limits.half_open and len(self.clients) <= limits.connections
        _check_counts(admission.strangers, self.strangers, limits.half_open_per_address)
        _check_counts(admission.admitted, self.clients, limits.connections_per_address)
        most = max(self.most(self.fresh), self.most(self.quiet))
        assert admission.spare == max(0, most - limits.connections // 64)

    def end(self) -> None:
        """The crowds are as expected, and nothing is left of them once all have gone."""
        admission = self.admission
        crowds = (
            (admission.strangers, self.strangers),
            (admission.admitted, self.clients),
            (admission._fresh, self.fresh),
            (admission._quiet, self.quiet),
        )
        for crowd, model in crowds:
            _check_counts(crowd, model, self.limits.connections)
            assert all(one in crowd for one in model)
            for address in {one.origin.address for one in model}:
                assert crowd.oldest(address) in model
                assert crowd.oldest(address).number == min(one.number for one in model if one.origin.address == address)
        for one in [*self.strangers, *self.clients]:
            self.leave(one)
        for crowd, model in crowds:
            assert not model and not len(crowd) and not crowd.networks.most
            assert not crowd._addresses and not crowd._holders


def _check_counts(crowd: Crowd[_Connection], model: list[_Connection], most: int) -> None:
    addresses = Counter(one.origin.address for one in model)
    networks = Counter(one.origin.network for one in model)
    assert len(crowd) == len(model)
    assert len(crowd.networks) == len(networks) and crowd.networks.most == max(networks.values(), default=0)
    assert all(crowd.count(address) == number <= most for address, number in addresses.items())


def one_input(data: bytes) -> None:
    """The first byte chooses the relay's size. Then operations: connect, handshake, admit, work, rest, leave; time."""
    choices = Choices(data)
    world = _World(choices)
    for number in range(80):
        if not choices.left:
            break
        match choices.below(8):
            case 0:
                world.connect()
            case 1:
                world.shake_hands()
            case 2 | 3 if world.strangers:
                world.admit()
            case 4 if world.clients:
                client = world.one_of(world.clients)
                if choices.flag():
                    world.carry(client)
                else:
                    client.busy = True  # a request: nobody is told
            case 5 if world.clients:
                world.rest(world.one_of(world.clients))
            case 6:
                world.now += choices.byte() / 8
            case 7 if world.clients or world.strangers:
                world.leave(world.one_of([*world.strangers, *world.clients]))
            case _:
                for _ in range(choices.below(8)):
                    world.connect()
                    if world.strangers:
                        world.admit()
        if number % 16 == 15:
            world.check()
    world.check()
    world.end()


def seeds() -> Iterator[bytes]:
    """Strangers of one host and of many; clients that fill an address and the relay, at work and at rest; rates; time."""
    hosts = range(len(_HOSTS))
    come = [bytes((0, host)) for host in hosts]
    join = [one + b"\x02\x00" for one in come]
    work, rest = b"\x04\x00\x01", b"\x05\x00"
    yield b"\x00" + come[0] * 6 + b"".join(come) + b"\x06\x40" + b"".join(come) * 2
    yield b"\x00" + come[0] * 2 + come[1] + come[3] * 4 + come[9]
    yield b"\x00" + join[0] * 6 + b"\x06\xff" + join[0] * 2 + b"".join(join) + b"".join(join)
    yield b"\x00" + b"".join(join) + b"\x06\xff" + b"".join(bytes((4, at, 1)) for at in range(10)) + b"".join(join[5:])
    busy = b"".join(join[:4] * 4) + b"".join(bytes((4, at, 1)) for at in range(10))
    yield b"\x00\x06\xff" + busy + b"".join(bytes((5, at)) for at in range(10)) + b"".join(join[4:]) * 2
    yield b"\x00" + busy + b"".join(bytes((5, at, 4, at, 0)) for at in range(10)) + b"".join(join[4:]) * 3
    yield b"\x00" + (join[0] + work + rest) * 4 + join[0] + b"\x07\x00" * 5
    for kept in (b"\x00", b"\x01"):
        yield b"\x00" + b"".join(b"\x01" + bytes((host % 3,)) + kept for host in range(12)) + b"\x06\x20" * 2
        yield b"\x00" + b"".join(b"\x01" + bytes((host % 11,)) + kept for host in range(40))
    yield b"\x00" + (come[0] + come[1] + come[2]) * 12 + b"\x06\x08" + come[0] * 8
    yield b"\x03" + (join[0] + join[6] + join[8] + b"\x06\xff") * 20
    yield b"\x03" + b"".join(join) * 12
