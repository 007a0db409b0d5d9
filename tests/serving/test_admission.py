"""Places of a server by group: who goes when there are no more."""

from __future__ import annotations

import random as stdlib_random
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.serving.admission import Admission, Crowd, Origin
from dmsg.serving.limits import ServingLimits

_numbers = count(1)


@dataclass(eq=False)
class One:
    """A connection."""

    origin: Origin
    number: int = field(default_factory=lambda: next(_numbers))


def one(host: str) -> One:
    return One(Origin.of(host))


def seeded(seed: int = 0) -> Admission[One]:
    return Admission(ServingLimits(), random=stdlib_random.Random(seed).randbytes)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 2)), max_size=120), st.randoms())
def test_a_crowd_against_a_list(steps: list[tuple[bool, int, int]], random: stdlib_random.Random) -> None:
    crowd, model = Crowd[One](), list[One]()
    for adds, network, host in steps:
        if adds or not model:
            member = one(f"10.0.{network}.{host}")
            crowd.add(member)
            model.append(member)
        else:
            member = random.choice(model)
            assert crowd.discard(member)
            assert not crowd.discard(member)
            model.remove(member)
        assert len(crowd) == len(model)
        addresses = Counter(each.origin.address for each in model)
        networks = Counter(each.origin.network for each in model)
        assert all(crowd.count(address) == n for address, n in addresses.items())
        assert crowd.networks.most == max(networks.values(), default=0)
        assert crowd._addresses.keys() == networks.keys(), "networks cost nothing once they hold no place"
        if not model:
            with pytest.raises(KeyError):
                crowd.largest()
            continue
        largest = crowd.largest()
        inside = [each for each in model if each.origin.address == largest]
        largest_network = inside[0].origin.network
        assert networks[largest_network] == crowd.networks.most
        assert len(inside) == max(n for a, n in addresses.items() if a.rpartition(".")[0] in largest_network)
        assert largest == crowd.largest(largest_network)
        own = crowd.largest(model[0].origin.network)
        assert addresses[own] == max(
            addresses[e.origin.address] for e in model if e.origin.network == model[0].origin.network
        )
        assert crowd.oldest(largest) is inside[0]
        assert crowd.drawn(largest, random.randbytes) in inside


@pytest.mark.parametrize(
    ("host", "address", "network"),
    [
        ("192.0.2.7", "192.0.2.7", "192.0.2.0/24"),
        ("::ffff:192.0.2.7", "192.0.2.7", "192.0.2.0/24"),
        ("2001:db8:1:2:3:4:5:6", "20010db800010002::/64", "2001:db8:1::/48"),
    ],
)
def test_the_groups_of_an_address(host: str, address: str, network: str) -> None:
    assert Origin.of(host) == Origin(address, network)


def test_at_the_limit_of_all_strangers_the_oldest_of_the_largest_address_of_the_largest_network_goes() -> None:
    """512 strangers: 200 hosts of one /48 with one each, 100 of one /24 with two, and single ones."""
    table = seeded()
    for number in range(200):
        table.arrived(one(f"2001:db8:1:{number:x}::1"))
    pairs = [one(f"10.0.0.{number // 2}") for number in range(200)]
    singles = [one(f"20.{number}.0.1") for number in range(112)]
    for each in [*pairs, *singles]:
        assert table.arrived(each) is None
    victim = table.arrived(one("10.0.0.200"))  # /48 and /24 have 200 each: the one that had them first
    assert victim is not None
    assert victim[0].origin.network == "2001:db8:1::/48"
    assert victim[1] == "half_open"
    victim = table.arrived(one("30.0.0.1"))
    assert victim is not None
    assert victim[0] is pairs[0]
    assert len(table.strangers) == 512


def let_in(table: Admission[One], newcomers: list[One]) -> list[One]:
    """Each of them gets the place of another; gives those."""
    gone = []
    for each in newcomers:
        victim = table.victim(each.origin)
        assert victim is not None
        table.left(victim)
        gone.append(victim)
        table.joined(each)
    return gone


def test_10000_idle_clients_of_few_networks_and_a_stream_of_newcomers() -> None:
    """The table is full of 11 addresses' idle clients. 2,000 honest ones from as many networks come, and stay; so do 100
    honest listeners that were there first."""
    table = seeded()
    listeners = [one(f"20.0.{number}.1") for number in range(100)]
    crowd = [one(f"10.0.0.{number % 11}") for number in range(9_900)]
    for each in [*listeners, *crowd]:
        assert table.victim(each.origin) is None
        table.joined(each)
    assert table.spare == 9_900 - 10_000 // 64
    newcomers = [one(f"30.{number >> 8}.{number & 255}.1") for number in range(2_000)]
    gone = let_in(table, newcomers)
    assert not {*gone} & {*listeners, *newcomers}
    shares = Counter(each.origin.address for each in crowd if each not in {*gone})
    assert max(shares.values()) - min(shares.values()) <= 1


def test_10000_clients_of_few_networks_that_had_a_transport_once_and_a_stream_of_listeners() -> None:
    """A transport to oneself makes a client quiet. 2,000 honest ones that only listen come all the same, and stay."""
    table = seeded()
    listeners = [one(f"20.0.{number}.1") for number in range(100)]
    crowd = [one(f"10.{number % 11}.0.1") for number in range(9_900)]
    for each in [*listeners, *crowd]:
        assert table.victim(each.origin) is None
        table.joined(each)
    for each in crowd:
        table.carries(each)
        table.rests(each)
    assert table.spare == 900 - 10_000 // 64
    newcomers = [one(f"30.{number >> 8}.{number & 255}.1") for number in range(2_000)]
    gone = let_in(table, newcomers)
    assert not {*gone} & {*listeners, *newcomers}


@pytest.mark.parametrize("rest", [True, False])
def test_a_network_with_many_clients_takes_no_places_of_listeners_that_are_alone_in_theirs(rest: bool) -> None:
    """Ten networks that hold 9,900 places, quiet or busy, come again and again from other addresses: they get none, but for
    those of their own that are fresh.
    """
    table = seeded()
    listeners = [one(f"20.0.{number}.1") for number in range(100)]
    crowd = [one(f"10.{number % 10}.0.{number % 20}") for number in range(9_900)]
    for each in [*listeners, *crowd]:
        table.joined(each)
    for each in crowd:
        table.carries(each)
        if rest:
            table.rests(each)
    for number in range(100):
        assert table.victim(Origin.of(f"10.{number % 10}.0.99")) is None
    assert all(each in table.admitted for each in listeners)
    [gone] = let_in(table, [one("30.0.0.1")])
    assert gone in (crowd if rest else listeners)
    table.left(next(each for each in crowd if each in table.admitted))
    fresh = one("10.0.0.98")
    table.joined(fresh)
    assert let_in(table, [one("10.0.0.99")]) == [fresh]


def test_idle_connections_of_few_networks_do_not_push_out_clients_that_have_had_a_transport() -> None:
    """150 clients behind one router, quiet between two transports, and 9,850 of 200 networks that have carried nothing."""
    table = seeded()
    office = [one(f"20.0.0.{number}") for number in range(150)]
    crowd = [one(f"10.{number % 200}.0.1") for number in range(9_850)]
    for each in [*office, *crowd]:
        table.joined(each)
    for each in office:
        table.carries(each)
        table.rests(each)
    gone = let_in(table, [one(f"10.{number % 200}.0.1") for number in range(4_000)])
    assert not {*gone} & {*office}


def test_in_one_group_those_that_were_there_long_are_preferred() -> None:
    """1,000 idle clients behind one address, 300 newcomers: of the older half 95 % stay, of the newcomers half."""
    table = seeded()
    first = [one("10.0.0.1") for _ in range(1_000)]
    for each in first:
        table.joined(each)
    newcomers = [one("10.0.0.1") for _ in range(300)]
    let_in(table, newcomers)
    assert sum(each in table.admitted for each in first[:500]) >= 475
    assert sum(each in table.admitted for each in newcomers) >= 150


def test_who_has_no_idle_client_to_end_turns_the_newcomer_away() -> None:
    table: Admission[One] = Admission(ServingLimits(connections=3, connections_per_address=2))
    a, b, c = one("10.0.0.1"), one("10.0.0.1"), one("10.0.1.1")
    for each in (a, b, c):
        table.joined(each)
        table.carries(each)
    assert table.is_full(a.origin)
    assert table.victim(a.origin) is None
    assert table.victim(Origin.of("10.0.2.1")) is None
    table.rests(a)  # its network has two clients quiet or busy, the newcomer's none
    assert table.victim(Origin.of("10.0.2.1")) is None
    table.rests(b)
    assert table.victim(Origin.of("10.0.2.1")) in (a, b)
    assert table.victim(Origin.of("10.0.1.2")) is None, "that network would have as many"


def test_a_client_that_turned_out_to_be_busy_is_not_given_again_before_it_rests() -> None:
    table: Admission[One] = Admission(ServingLimits(connections=3, connections_per_address=3))
    clients = [one("10.0.0.1") for _ in range(3)]
    for each in clients:
        table.joined(each)
        table.carries(each)
        table.rests(each)
    newcomer, youngest = Origin.of("10.0.2.1"), clients[2]
    table.is_busy(youngest)
    assert youngest not in [table.victim(newcomer) for _ in range(40)]
    table.rests(youngest)
    assert youngest in [table.victim(newcomer) for _ in range(40)]


def test_a_fresh_client_whose_request_failed_is_not_quiet() -> None:
    table: Admission[One] = Admission(ServingLimits(connections=2))
    for each in (clients := [one("10.0.0.1") for _ in range(2)]):
        table.joined(each)
        table.rests(each)
        table.carries(each)
    assert table.victim(Origin.of("10.0.2.1")) is None
    for each in clients:
        table.rests(each)
    assert table.victim(Origin.of("10.0.2.1")) in clients


def test_a_full_address_makes_room_by_itself_however_many_other_networks_hold() -> None:
    table: Admission[One] = Admission(ServingLimits(connections=100, connections_per_address=3))
    crowd = [one("10.0.0.1") for _ in range(97)]
    own = [one("20.0.0.1") for _ in range(3)]
    for each in [*crowd, *own]:
        table.joined(each)
    table.carries(own[0])
    for _ in range(20):
        assert table.victim(own[0].origin) in own[1:]
    assert table.victim(Origin.of("30.0.0.1")) in crowd, "who comes from elsewhere displaces one of the largest"


@pytest.mark.parametrize(("quiet", "goes"), [(4, "fresh"), (5, "quiet")])
def test_four_quiet_clients_count_as_one_fresh_client(quiet: int, goes: str) -> None:
    table: Admission[One] = Admission(ServingLimits(connections=quiet + 1))
    crowd = {"quiet": [one("10.0.0.1") for _ in range(quiet)], "fresh": [one("20.0.0.1")]}
    for each in [*crowd["quiet"], *crowd["fresh"]]:
        table.joined(each)
    for each in crowd["quiet"]:
        table.carries(each)
        table.rests(each)
    for _ in range(20):
        assert table.victim(Origin.of("30.0.0.1")) in crowd[goes]


@pytest.mark.parametrize(("held", "gets"), [(3, True), (4, False)])
def test_a_network_with_four_times_as_many_clients_takes_no_place_of_a_fresh_one(held: int, gets: bool) -> None:
    table: Admission[One] = Admission(ServingLimits(connections=held + 1))
    fresh, own = one("20.0.0.1"), [one(f"10.0.0.{number}") for number in range(held)]
    for each in [fresh, *own]:
        table.joined(each)
    for each in own:
        table.carries(each)  # and they go on: none of them can make room
    assert table.victim(Origin.of("10.0.0.99")) == (fresh if gets else None)


def test_places_that_were_given_back_are_free_again() -> None:
    table: Admission[One] = Admission(ServingLimits(connections=2, connections_per_address=2))
    a, b = one("10.0.0.1"), one("10.0.0.1")
    for each in (a, b):
        assert table.arrived(each) is None
        table.joined(each)
    assert len(table.strangers) == 0 and table.is_full(a.origin)
    table.left(a)
    assert not table.is_full(a.origin) and table.victim(a.origin) is None
    table.left(b)
    for each in (a, b):
        table.carries(each)
        table.rests(each)  # what comes late counts for nothing
    for each in (one("10.0.1.1"), one("10.0.3.1")):
        table.joined(each)
        table.carries(each)
    assert table.victim(Origin.of("10.0.2.1")) is None
