"""Links to relays that are not what they should be: each failure says what it was, and costs nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from twisted.internet.protocol import Factory, Protocol

from dmsg.address import HostPort, PinnedServer
from dmsg.crypto.keys import SecretKey
from dmsg.errors import DialError
from dmsg.eventlog import schema as ev
from dmsg.messaging.core.events import LinkRequested
from dmsg.messaging.core.limits import HANDSHAKE_TIMEOUT_S
from dmsg.messaging.core.link import LinkResponder
from dmsg.messaging.core.wire import CHANNEL_OPENED, GO, OPEN_CHANNEL, FrameReader
from dmsg.testing.memory import MemoryNetwork, Path
from dmsg.testing.network import LocalNetwork
from dmsg.testing.probes import ConformanceProtocol
from tests.memory_log import MemoryEventLog

PORT = 9000
RELAY, PEER = SecretKey(bytes(31) + b"\x21"), SecretKey(bytes(31) + b"\x22")


class BadRelay(Protocol):
    """A relay that does what ``behaviour`` says once the link is up; it has the key ``RELAY``."""

    def __init__(self, memory: MemoryNetwork, behaviour: Any, *, accepts: bool) -> None:
        self.memory = memory
        self.behaviour = behaviour
        self.accepts = accepts
        self.core: Any = LinkResponder(RELAY, now=memory.seconds())
        self.reader = FrameReader(GO)

    def dataReceived(self, data: bytes) -> None:
        if self.core is None:
            buffer, frames = self.reader.read(data)
            for kind, channel_id, start, end in frames:
                self.behaviour(self, kind, channel_id, buffer[start:end])
            return
        asked = [
            event for event in self.core.receive_data(data, self.memory.seconds()) if isinstance(event, LinkRequested)
        ]
        if asked and self.accepts:
            self.core.accept(self.memory.seconds())
        elif asked:
            self.core.refuse()
        assert self.transport is not None
        self.transport.write(self.core.data_to_send())
        if asked:
            self.core = None
            if not self.accepts:
                self.transport.loseConnection()


class Linked:
    """A client whose only relay is at ``PORT``, and what listens there."""

    def __init__(self, build: Any, *, path: Path | None = None) -> None:
        self.network = LocalNetwork(MemoryNetwork(), relays=0, discovery=None)
        self.memory: Any = self.network.reactor
        self.memory.set_path("127.0.0.1", PORT, path or Path())
        factory = Factory.forProtocol(lambda: build(self.memory))
        factory.noisy = False
        self.memory.listenTCP(PORT, factory)
        self.log = MemoryEventLog()
        pin = PinnedServer(RELAY.public_key, HostPort("127.0.0.1", PORT))
        self.client = self.network.new_messaging_client(servers=[pin], events=self.log)
        self.client.startService()

    async def failure(self, **options: Any) -> tuple[str, str]:
        """The stage and the reason that a dial fails with."""
        with pytest.raises(DialError) as caught:
            await self.network.wait(self.client.dial(PEER.public_key, **options))
        last = caught.value.attempts[-1]
        return last.stage, last.reason


@pytest_twisted.ensureDeferred
async def test_a_relay_that_says_nothing():
    linked = Linked(lambda memory: Protocol())
    assert await linked.failure() == ("handshake", "timeout")
    linked.memory.advance(HANDSHAKE_TIMEOUT_S)
    assert {one.reason for one in linked.log.of(ev.SessionDown)} == {"timeout"}
    await linked.network.stop()


@pytest_twisted.ensureDeferred
async def test_a_relay_to_which_connecting_takes_longer_than_a_handshake_may():
    linked = Linked(lambda memory: BadRelay(memory, None, accepts=True), path=Path(delay_s=HANDSHAKE_TIMEOUT_S + 1.0))
    linked.memory.advance(HANDSHAKE_TIMEOUT_S)
    linked.memory.set_path("127.0.0.1", PORT, Path())
    linked.memory.advance(1.0)
    assert list(linked.client.pool.sessions) == [RELAY.public_key]
    await linked.network.stop()


@pytest_twisted.ensureDeferred
async def test_a_relay_that_refuses_the_link():
    linked = Linked(lambda memory: BadRelay(memory, None, accepts=False))
    assert await linked.failure() == ("handshake", "refused by server")
    await linked.network.stop()


@pytest_twisted.ensureDeferred
async def test_something_that_is_no_relay():
    class Web(Protocol):
        def dataReceived(self, data: bytes) -> None:
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    linked = Linked(lambda memory: Web())
    assert await linked.failure() == ("handshake", "not JSON")
    await linked.network.stop()


@pytest_twisted.ensureDeferred
async def test_a_relay_with_another_key():
    async with LocalNetwork(MemoryNetwork(), relays=0, messaging_relays=1, discovery=None) as network:
        [pin] = network.messaging_pinned
        stranger = SecretKey.generate().public_key
        client = network.new_messaging_client(servers=[PinnedServer(stranger, pin.address)])
        client.startService()
        with pytest.raises(DialError) as caught:
            await network.wait(client.dial(PEER.public_key))
        assert (caught.value.attempts[-1].stage, caught.value.reason) == ("handshake", "connection lost")


@pytest.mark.parametrize("frame", [b"\0\0", b"\0\1\4"])
@pytest_twisted.ensureDeferred
async def test_a_relay_that_sends_what_is_no_frame_is_left(frame):
    def babble(relay: BadRelay, kind: int, channel_id: int, payload: bytes) -> None:
        relay.transport.write(frame + bytes(5))

    linked = Linked(lambda memory: BadRelay(memory, babble, accepts=True))
    assert await linked.failure() == ("accept", "server connection lost")
    [down] = linked.log.of(ev.SessionDown)
    assert down.reason == "no channel id"
    await linked.network.stop()


@pytest_twisted.ensureDeferred
async def test_a_relay_that_answers_in_the_peers_place_is_not_taken_for_the_peer():
    def impersonate(relay: BadRelay, kind: int, channel_id: int, payload: bytes) -> None:
        if kind == OPEN_CHANNEL:
            message = SecretKey.generate().public_key.raw + bytes(16)
            relay.transport.write(GO.encode(CHANNEL_OPENED, channel_id, message))

    linked = Linked(lambda memory: BadRelay(memory, impersonate, accepts=True))
    assert await linked.failure() == ("accept", "accept check failed")
    await linked.network.stop()


@pytest_twisted.ensureDeferred
async def test_a_relay_that_repeats_an_old_offer_opens_a_channel_on_which_nothing_is_read_or_written():
    """What is known of KK: message 1 can be repeated. Who repeats it has no key for what comes after it."""
    offers: list[bytes] = []

    def record(relay: BadRelay, kind: int, channel_id: int, payload: bytes) -> None:
        if kind == OPEN_CHANNEL:
            offers.append(payload[33:])
        elif kind == CHANNEL_OPENED:
            relay.transport.write(GO.encode(4, channel_id, b"\0\x20" + bytes(32)))

    linked = Linked(lambda memory: BadRelay(memory, record, accepts=True))
    end = ConformanceProtocol()
    caller = LocalNetwork(linked.memory, relays=0, discovery=None).new_messaging_client(
        servers=[PinnedServer(RELAY.public_key, HostPort("127.0.0.1", PORT))]
    )
    caller.startService()
    linked.client.listen(Factory.forProtocol(lambda: end))
    with pytest.raises(DialError):
        await linked.network.wait(caller.dial(linked.client.public_key, timeout_s=1.0))
    session = linked.client.pool.sessions[RELAY.public_key]
    session.shell.dataReceived(GO.encode(OPEN_CHANNEL, 200, caller.public_key.raw + offers[0]))
    assert end.made == 1 and not end.lost
    end.transport.write(b"to the caller alone")
    await linked.network.wait(end.when_lost())
    assert end.received == b""
    assert "integrity" in str(end.lost[0].value)
    await linked.network.wait(caller.stopService())
    await linked.network.stop()
