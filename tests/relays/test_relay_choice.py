"""An operator's list of relays: they are used only, or first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.error import CannotListenError
from twisted.internet.protocol import Factory, Protocol
from zope.interface import implementer

from dmsg.address import HostPort, PinnedServer
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.entry import ClientPart, Entry, ServerPart
from dmsg.discovery.errors import EntryNotFound
from dmsg.errors import DialError, StageError
from dmsg.interfaces import IDiscovery
from dmsg.mux.client.endpoint import DmsgServerEndpoint
from dmsg.relays.errors import RelayListError
from dmsg.relays.operator_list import ListedRelay
from tests.worlds import ScatteredRelays

KEYS = [SecretKey.generate() for _ in range(8)]
RELAYS = [key.public_key for key in KEYS]


@dataclass
class Choice:
    """A list in force."""

    named: list[ListedRelay]
    only: bool
    changed: Any = field(default=None)
    error: Exception | None = None

    def relays(self):
        return self.named


@implementer(IDiscovery)
class Listing:
    """Lists every relay of the world."""

    def __init__(self):
        self.entries = {}
        self.looked_up = []

    async def available_servers(self, protocol="dmsg"):
        return list(self.entries.values())

    async def get_entry(self, public_key):
        self.looked_up.append(public_key)
        if public_key not in self.entries:
            raise EntryNotFound
        return self.entries[public_key]


class World(ScatteredRelays):
    """Eight relays of networks of their own, unless ``hosts`` says otherwise."""

    def __init__(self, *hosts):
        super().__init__(Listing(), delay_s=0.005)
        self.hosts = hosts or tuple(f"192.0.{number}.1" for number in range(8))
        for number, host in enumerate(self.hosts):
            self.start_relay(KEYS[number], host)
            part = ServerPart(f"{host}:80", 5)
            self.listing.entries[RELAYS[number]] = Entry("0.0.1", 0, 1, RELAYS[number], None, part).sign(KEYS[number])

    def choice(self, *numbers, only=False, addresses=True):
        return Choice(
            [ListedRelay(RELAYS[one], HostPort(self.hosts[one], 80) if addresses else None) for one in numbers], only
        )

    def client(self, choice, **options):
        return self.start_client(relays=choice, **options)

    def held(self, client, after_s=10.0):
        self.memory.advance(after_s)
        return set(client.pool.sessions)


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("addresses", [False, True])
@pytest_twisted.ensureDeferred
async def test_relays_of_the_list_are_used(only, addresses):
    async with World() as world:
        for _ in range(4):
            client = world.client(world.choice(1, 2, only=only, addresses=addresses))
            assert world.held(client) == {RELAYS[1], RELAYS[2]}
            await world.network.stop_client(client)


@pytest.mark.parametrize("only", [False, True])
@pytest_twisted.ensureDeferred
async def test_others_are_used_when_none_of_a_preferred_list_is_to_be_had(only):
    async with World() as world:
        for host in world.hosts[:2]:
            world.memory.silence(host, 80)
        client = world.client(world.choice(0, 1, only=only))
        held = world.held(client)
        assert len(held) == (0 if only else 2)
        world.memory.heal(world.hosts[0], 80)
        world.memory.advance(120)
        assert (RELAYS[0] in client.pool.sessions) == only


@pytest_twisted.ensureDeferred
async def test_a_list_alone_keeps_no_more_than_a_relay_of_each_network():
    """Seven relays of one network, of which the list does not tell where they are: one session."""
    async with World(*(f"192.0.2.{number}" for number in range(1, 8)), "192.0.3.1") as world:
        client = world.client(world.choice(*range(7), only=True, addresses=False))
        assert len(world.held(client, 60.0)) == 1
        assert len(world.memory.pipes) == 1


@pytest_twisted.ensureDeferred
async def test_of_the_relays_that_dials_led_to_as_many_are_chosen_as_are_missing():
    async with World() as world:
        client = world.client(None, min_servers=1)
        [first] = world.held(client)
        others = [relay for relay in RELAYS if relay != first][:3]
        for relay in others:
            await world.network.wait(client.pool.get(relay))
        assert set(client.pool.chosen) == {first}
        await world.network.wait(world.network.relays[RELAYS.index(first)].stopService())
        world.memory.advance(10.0)
        assert len(client.pool.chosen) == 1
        assert set(client.pool.chosen) <= set(others)


@pytest_twisted.ensureDeferred
async def test_with_only_the_list_nothing_else_is_connected_to_not_even_by_a_dial():
    async with World() as world:
        choice = world.choice(1, only=True)
        client = world.client(choice, servers=[PinnedServer(RELAYS[7], HostPort(world.hosts[7], 80))], min_servers=2)
        assert world.held(client) == {RELAYS[1], RELAYS[7]}
        caught = []
        client.pool.get(RELAYS[3]).addErrback(caught.append)
        assert caught[0].check(StageError) and caught[0].value.reason == "not on the relay list"
        choice.named = [*choice.named, *world.choice(3).named]
        await world.network.wait(client.pool.get(RELAYS[3]))


@pytest_twisted.ensureDeferred
async def test_a_dial_says_that_the_peers_relay_is_not_on_the_list():
    async with World() as world:
        peer = SecretKey.generate()
        world.listing.entries[peer.public_key] = Entry(
            "0.0.1", 0, 1, peer.public_key, ClientPart((RELAYS[5],)), None
        ).sign(peer)
        client = world.client(world.choice(1, only=True))
        world.memory.advance(5)
        with pytest.raises(DialError) as caught:
            await world.network.wait(client.dial(peer.public_key))
        assert [one.reason for one in caught.value.attempts] == ["not on the relay list"]


@pytest_twisted.ensureDeferred
async def test_where_only_a_list_counts_and_there_is_none_the_errors_say_why():
    async with World() as world:
        choice = Choice([], only=True, error=RelayListError("unreadable", "No such file or directory"))
        client = world.client(choice)
        with pytest.raises(
            CannotListenError, match="the list of relays is not used: unreadable: No such file or direc"
        ):
            await world.network.wait(DmsgServerEndpoint(client, timeout_s=5.0).listen(Factory.forProtocol(Protocol)))
        peer = SecretKey.generate()
        part = ClientPart((RELAYS[5],))
        world.listing.entries[peer.public_key] = Entry("0.0.1", 0, 1, peer.public_key, part, None).sign(peer)
        with pytest.raises(DialError, match=r"not on the relay list \(unreadable: No such file or directory\) after"):
            await world.network.wait(client.dial(peer.public_key))
        choice.named, choice.only = [], False
        assert "list of relays" not in client.problem


@pytest.mark.parametrize("only", [False, True])
@pytest_twisted.ensureDeferred
async def test_a_list_that_comes_late_is_taken_up_and_one_that_expires_ends_no_session(only):
    async with World() as world:
        choice = Choice([], only)
        client = world.client(choice)
        assert len(world.held(client)) == (0 if only else 2)
        if only:
            choice.named = world.choice(1, 2).named
            choice.changed()
            assert world.held(client, 2.0) == {RELAYS[1], RELAYS[2]}
            choice.named = []
            assert world.held(client, 60.0) == {RELAYS[1], RELAYS[2]}


@pytest.mark.parametrize("only", [False, True])
@pytest_twisted.ensureDeferred
async def test_a_relay_that_a_new_list_names_no_more_is_left_where_no_others_may_be_used(only):
    async with World() as world:
        choice = world.choice(1, 2, only=only)
        client = world.client(choice, servers=[PinnedServer(RELAYS[7], HostPort(world.hosts[7], 80))], min_servers=3)
        assert world.held(client) == {RELAYS[1], RELAYS[2], RELAYS[7]}
        world.memory.silence(world.hosts[3], 80)
        choice.named = world.choice(2, 3, 4).named
        attempt = client.pool.get(RELAYS[3])
        choice.named = world.choice(2, 4).named
        choice.changed()
        if only:
            with pytest.raises(StageError):
                await attempt
            assert world.held(client) == {RELAYS[2], RELAYS[4], RELAYS[7]}
            assert len(world.memory.pipes) == 3
        else:
            attempt.addErrback(lambda failure: failure.trap(StageError))
            assert world.held(client) == {RELAYS[1], RELAYS[2], RELAYS[7]}
