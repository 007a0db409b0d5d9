"""What a client can do while discovery says nothing, is slow, or cannot be reached: it goes by what was said before."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater
from zope.interface import implementer

from dmsg.clients.dial import DialConfig
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.entry import Entry
from dmsg.discovery.errors import DiscoveryUnavailable, EntryNotFound, Unauthorized
from dmsg.discovery.lookups import SILENCE_S
from dmsg.errors import Attempt, DialError
from dmsg.interfaces import IDiscovery
from dmsg.mux.client.service import DmsgClient
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.relays.listed import WAIT_S
from dmsg.relays.state import RelayFile
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork, MemoryDiscovery
from dmsg.testing.probes import ConformanceProtocol

DIAL = DialConfig()
#: What a dial takes beside the look-up where it has to connect: round trips of 20 ms.
CONNECTING_S = 0.2
sync = pytest_twisted.ensureDeferred


@implementer(IDiscovery)
class SlowDiscovery(MemoryDiscovery):
    """Gives each entry ``delay_s`` seconds late; ``None`` is never, as it is for :attr:`unknown`."""

    delay_s: float | None = 0.0
    #: A key about which it says nothing.
    unknown: PublicKey | None = None

    def __init__(self, reactor: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reactor = reactor
        self.asked: list[PublicKey] = []

    async def get_entry(self, public_key: PublicKey) -> Entry:
        self.asked.append(public_key)
        if self.delay_s is None or public_key == self.unknown:
            await Deferred()
        elif self.delay_s:
            await deferLater(self._reactor, self.delay_s)
        return await super().get_entry(public_key)


class World(LocalNetwork):
    """Relays, Bob on one of them, and Alice, who keeps up no connection and dials him."""

    discovery: SlowDiscovery
    bob: DmsgClient

    def __init__(self) -> None:
        random = Random(1)
        self.memory = MemoryNetwork(delay_s=0.01, random=random)
        super().__init__(self.memory, relays=0, random=random.randbytes)
        self._bobs_key = SecretKey.generate(random.randbytes)

    async def start(self) -> None:
        await super().start()
        self.discovery = SlowDiscovery(self.memory, self.now_ns)
        for _ in range(2):
            await self.add_relay()
        self.alice = self.new_client(min_servers=0, publish=False)
        self.alice.startService()
        await self.bob_on(0)

    async def bob_on(self, relay: int, **options: Any) -> None:
        """Bob listens over that relay, and no longer over another one."""
        self.bob = await self.client(key=self._bobs_key, min_servers=None, servers=[self.pinned[relay]], **options)
        self.bob.listen(Factory.forProtocol(ConformanceProtocol))

    async def dial(self, **options: Any) -> float:
        """Let Alice dial Bob; gives how long it took, in seconds."""
        began_s = self.memory.seconds()
        transport = await self.wait(self.alice.dial(self.bob.public_key, **options))
        took_s = self.memory.seconds() - began_s
        transport.attach(ConformanceProtocol())
        transport.abortConnection()
        self.memory.advance(0.1)
        return took_s

    async def refusal(self, **options: Any) -> list[Attempt]:
        """What was tried in a dial of Alice's to Bob that failed."""
        with pytest.raises(DialError) as caught:
            await self.wait(self.alice.dial(self.bob.public_key, **options))
        return list(caught.value.attempts)

    def pass_s(self, seconds: float) -> None:
        self.memory.advance(seconds)

    async def forget_connections(self) -> None:
        """Alice's connections are cut."""
        for session in list(self.alice.pool.sessions.values()):
            session.shell.transport.abortConnection()
        self.memory.advance(0.1)
        assert not self.alice.pool.sessions


@sync
async def test_a_peer_that_was_dialled_is_dialled_again_although_discovery_is_silent() -> None:
    async with World() as world:
        assert await world.dial() < CONNECTING_S
        world.pass_s(600)
        world.discovery.delay_s = None
        assert DIAL.look_up_s <= await world.dial() < DIAL.look_up_s + CONNECTING_S
        # from now on discovery is known to be silent
        assert DIAL.stagger_s <= await world.dial() < DIAL.stagger_s + CONNECTING_S
        world.pass_s(SILENCE_S)
        assert DIAL.look_up_s <= await world.dial() < DIAL.look_up_s + CONNECTING_S


@sync
async def test_so_it_is_where_the_connection_to_the_relay_is_gone_too() -> None:
    async with World() as world:
        await world.dial()
        await world.forget_connections()
        world.pass_s(600)
        world.discovery.delay_s = None
        assert await world.dial() < 2 * DIAL.look_up_s + CONNECTING_S


@sync
async def test_a_relay_of_an_earlier_run_is_looked_for_where_it_was_then(tmp_path: Path) -> None:
    async with World() as world:
        relay = world.pinned[0]
        file = RelayFile(tmp_path / "relays.json", lambda: world.now_ns() / 1e9)
        file.worked(relay.public_key, relay.address)
        file.save()
        world.alice = world.new_client(min_servers=0, publish=False, relay_file=file.path)
        world.alice.startService()
        world.discovery.unknown = relay.public_key
        assert WAIT_S <= await world.dial() < WAIT_S + CONNECTING_S


@sync
async def test_a_transport_finds_its_peer_by_an_answer_that_takes_longer_than_a_search() -> None:
    """Each search ends as soon as the last known relay has said that the peer is not there; the question goes on."""
    async with World() as world:
        ends = ConformanceProtocol(), ConformanceProtocol()
        bob = await world.client(min_servers=1)
        bob.listen(Factory.forProtocol(lambda: ends[1]))
        alice = world.new_client(min_servers=0, publish=False)
        alice.startService()
        transport = await world.wait(alice.dial(bob.public_key))
        transport.attach(ends[0])
        before = transport.getHost().server_public_key
        world.pass_s(10)
        world.discovery.delay_s = 3.0
        await world.stop_relay(next(one for one in world.relays if one.key.public_key == before))
        transport.write(b"data")
        world.pass_s(12)
        assert ends[1].received == b"data" and not ends[0].lost
        assert transport.getHost().server_public_key != before
        world.discovery.delay_s = 0.0


@sync
@pytest.mark.parametrize("failure", [DiscoveryUnavailable("HTTP status 500"), EntryNotFound(), Unauthorized()])
async def test_a_discovery_that_fails_keeps_nobody_from_a_peer_that_was_dialled(failure: Any) -> None:
    async with World() as world:
        await world.dial()
        world.pass_s(600)
        world.discovery.failure = failure
        assert await world.dial() < CONNECTING_S


@sync
async def test_what_was_said_too_long_ago_is_not_gone_by() -> None:
    async with World() as world:
        await world.dial()
        world.pass_s(DIAL.earlier_entry_lifetime_s + 1)
        world.discovery.delay_s = None
        [attempt] = await world.refusal()
        assert (attempt.stage, attempt.reason) == ("discovery", "timeout")


@sync
async def test_a_peer_that_has_moved_is_found_by_an_answer_that_comes_late() -> None:
    async with World() as world:
        await world.dial()
        await world.stop_client(world.bob)
        await world.bob_on(1)
        world.pass_s(10)
        world.discovery.delay_s = 3.0
        assert 3.0 <= await world.dial() < 3.0 * 2 + CONNECTING_S  # and then where that relay is
        world.discovery.delay_s = 0.0


@sync
async def test_an_answer_that_comes_soon_is_preferred() -> None:
    async with World() as world:
        await world.dial()
        await world.stop_client(world.bob)
        world.discovery.delay_s = 0.9
        await world.bob_on(1, publish=False)
        world.pass_s(10)
        attempts = await world.refusal()
        # its entry says that it is nowhere; nothing else was tried
        assert [(one.stage, one.reason) for one in attempts] == [("discovery", "no common server")]


@sync
async def test_a_dial_that_fails_all_the_same_says_what_was_tried() -> None:
    async with World() as world:
        await world.dial()
        await world.stop_client(world.bob)
        await world.bob_on(1)
        world.pass_s(10)
        world.discovery.delay_s = None
        attempts = await world.refusal()
        assert [(one.stage, one.reason) for one in attempts] == [
            ("discovery", "unavailable"),
            ("accept", "unknown_peer"),
            ("discovery", "timeout"),
        ]
        assert str(attempts[0].error) == "no answer within 1 s"
        world.discovery.delay_s = 0.0
        await world.dial()  # and the next one asks


@sync
async def test_a_dial_that_is_given_up_takes_the_question_with_it() -> None:
    async with World() as world:
        await world.dial()
        await world.stop_client(world.bob)
        world.pass_s(10)
        world.discovery.delay_s = None
        dialling = Deferred.fromCoroutine(world.alice.dial(world.bob.public_key))
        world.pass_s(2)
        dialling.addErrback(lambda _: None).cancel()
        assert not world.alice.dialer._lookups._flights  # type: ignore[union-attr]


@sync
@pytest.mark.parametrize("security", [Security.PREFER, Security.E2E])
async def test_no_peer_is_spoken_to_in_the_clear_by_an_entry_of_before(security: Security) -> None:
    async with World() as world:
        await world.stop_client(world.bob)
        await world.bob_on(0, security=Security.HOP)
        assert await world.dial(security=Security.PREFER) < CONNECTING_S
        world.pass_s(600)
        world.discovery.delay_s = None
        await world.refusal(security=Security.PREFER, timeout_s=5.0)
        # in the clear because that was asked for
        await world.dial(security=Security.HOP)


@sync
async def test_a_base_peer_on_a_pinned_relay_is_spoken_to_as_a_late_answer_says() -> None:
    async with World() as world:
        await world.stop_client(world.bob)
        await world.bob_on(0, security=Security.HOP)
        alice = world.new_client(min_servers=0, publish=False, servers=world.pinned)
        alice.startService()
        world.discovery.delay_s = DIAL.timeout_s / 2 + 0.05
        transport = await world.wait(alice.dial(world.bob.public_key))
        assert transport.security == "hop"
        transport.abortConnection()


# --- what was said a moment ago ---------------------------------------------------------------------------------------


@sync
async def test_a_peer_that_has_just_moved_is_asked_for_once_more_before_a_dial_fails() -> None:
    async with World() as world:
        await world.dial()
        await world.stop_client(world.bob)
        await world.bob_on(1)
        assert len(world.discovery.asked) and await world.dial() < 2 * CONNECTING_S


@sync
async def test_so_is_one_whose_entry_named_no_relay_when_a_transport_looked_for_it() -> None:
    async with World() as world:
        await world.stop_client(world.bob)
        await world.wait(world.alice.dialer._lookups.ask(world.bob.public_key))  # type: ignore[union-attr]
        await world.bob_on(1)
        assert await world.dial() < 2 * CONNECTING_S


@sync
async def test_where_it_has_not_moved_or_discovery_does_not_say_the_dial_fails_soon() -> None:
    async with World() as world:
        await world.dial()
        await world.stop_relay(world.relays[0])
        attempts = await world.refusal()
        assert [(one.stage, one.reason) for one in attempts] == [("connect", "connection refused")]
    async with World() as world:
        await world.dial()
        await world.stop_client(world.bob)
        world.discovery.delay_s = None
        began_s = world.memory.seconds()
        attempts = await world.refusal()
        assert [(one.stage, one.reason) for one in attempts] == [
            ("accept", "unknown_peer"),
            ("discovery", "unavailable"),
        ]
        assert str(attempts[1].error) == "no answer within 1 s"
        assert world.memory.seconds() - began_s < DIAL.look_up_s + CONNECTING_S


@sync
async def test_the_time_is_up_while_it_is_asked_for_once_more() -> None:
    async with World() as world:
        await world.dial()
        await world.stop_client(world.bob)
        world.discovery.delay_s = None
        attempts = await world.refusal(timeout_s=0.5)
        assert [(one.stage, one.reason) for one in attempts] == [("accept", "unknown_peer"), ("discovery", "timeout")]
