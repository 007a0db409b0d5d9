"""Places of an HTTP server that strangers fill, and the victim when a newcomer wants one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dmsg.http.places import Places, Standing
from fuzz.choices import Choices

_NETWORKS = ("a", "b", "c")
_PLACES = 24


class _Server:
    """Places of a server, and a list of their holders: number, network and standing, in the order in which that began."""

    def __init__(self) -> None:
        self.places: Places[int] = Places()
        self.holders: list[tuple[int, str, Standing]] = []
        self.number = 0

    def arrive(self, network: str) -> None:
        """A newcomer gets a free place or that of a victim, or is refused."""
        if len(self.holders) == _PLACES:
            victim = self.places.victim(network)
            self._check_victim(victim, network)
            self._check_new(self.places.oldest_new())
            if victim is None:
                return
            self.leave(victim)
        self.number += 1
        self.places.add(self.number, network)
        self.holders.append((self.number, network, Standing.NEW))

    def _check_victim(self, victim: int | None, newcomer: str) -> None:
        """The victim is the oldest of the network with most holders in the largest standing; idle ones count four times."""
        counts = Counter((standing, network) for _, network, standing in self.holders)
        weights = {one: max(counts[one, network] for network in _NETWORKS) for one in Standing}
        weights[Standing.IDLE] *= 4
        heaviest = max(weights.values())
        standing = next(one for one in Standing if weights[one] == heaviest)
        most = max(counts[standing, network] for network in _NETWORKS)
        if standing is Standing.ANSWERING and most <= sum(network == newcomer for _, network, _ in self.holders):
            assert victim is None
            return
        loser = next(network for number, network, _ in self.holders if number == victim)
        assert counts[standing, loser] == most
        assert victim == next(number for number, network, what in self.holders if (network, what) == (loser, standing))

    def _check_new(self, first: int | None) -> None:
        """The first of the new ones, of the network that has the most of them."""
        new = [(number, network) for number, network, what in self.holders if what is Standing.NEW]
        counts = Counter(network for _, network in new)
        most = [network for network in counts if counts[network] == max(counts.values())]
        firsts = [next(number for number, network in new if network == one) for one in most]
        assert first in firsts if firsts else first is None

    def move(self, number: int, standing: Standing) -> None:
        """A holder changes its standing; for one that has lost its place nothing happens."""
        self.places.move(number, standing)
        for one in self.holders:
            if one[0] == number and one[2] is not standing:
                self.holders.remove(one)
                self.holders.append((number, one[1], standing))
                return

    def leave(self, number: int) -> None:
        """A holder leaves, or leaves again."""
        self.places.discard(number)
        self.holders = [one for one in self.holders if one[0] != number]


def one_input(data: bytes) -> None:
    """Each byte is a newcomer of a network, a holder that changes its standing, or one that leaves."""
    choices, server = Choices(data), _Server()
    for _ in range(200):
        if not choices.left:
            break
        number = max(1, server.number - choices.below(_PLACES + 2))
        match choices.below(4):
            case 0:
                server.arrive(choices.pick(_NETWORKS))
            case 1:
                server.leave(number)
            case _:
                server.move(number, choices.pick(tuple(Standing)))
        assert len(server.places) == len(server.holders) <= _PLACES
        assert all(server.places.standing(one) is standing for one, _, standing in server.holders)
    for one, _, _ in list(server.holders):
        server.leave(one)
    assert not any(vars(server.places)[name] for name in ("_held", "_networks"))
    assert not any(queue._items or queue.largest for queue in server.places._queues.values())


def seeds() -> Iterator[bytes]:
    """Floods of one network and of three, with and without requests; holders that go, and go again."""
    arrive = [bytes((0, 0, network)) for network in range(3)]
    answering = [bytes((back, 3, 3)) for back in range(_PLACES)]
    yield arrive[0] * 8
    yield b"".join(arrive) * 3 + arrive[1] * 3
    yield arrive[0] * 4 + arrive[1] * 2 + b"".join(answering) + arrive[2] * 2 + arrive[0]
    yield b"".join(arrive) * 2 + b"".join(answering) + b"".join(arrive)
    yield arrive[0] * 6 + b"\x01\x02\x01" + b"\x02\x01\x01\x02" + arrive[1] * 2 + b"\x00\x02\x00" * 2
