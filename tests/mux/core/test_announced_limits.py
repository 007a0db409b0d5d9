"""What a server announces is obeyed, and what it refuses is what the caller's exception says.

:ref:`spec-hello`, :ref:`spec-request-checks`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred, DeferredList, ensureDeferred
from zope.interface import implementer

from dmsg.clients.dial import DialConfig
from dmsg.clients.limits import ListenerLimits
from dmsg.crypto.keys import SecretKey
from dmsg.errors import DialError, StageError
from dmsg.eventlog import schema as ev
from dmsg.interfaces import IEventLog
from dmsg.mux.client.service import ClientConfig
from dmsg.mux.core.e2e_negotiation import Carrier, Security
from dmsg.mux.core.errors import (
    BadTransportId,
    Busy,
    ConnectionRefusedByServer,
    HandshakeTimeout,
    Malformed,
    PeerGone,
    RateLimited,
    ServerDraining,
    SlowConsumer,
    UnknownPeer,
    Unsupported,
)
from dmsg.mux.core.hello import AnnouncedLimits, hello_payload
from dmsg.mux.core.path_window import FIRST_FRAME_BYTES
from dmsg.mux.core.wire import FRAME_PAYLOAD_LIMIT_BYTES, FWD, REQUEST, CloseReason
from dmsg.mux.relay.limits import RelayLimits
from dmsg.relays.errors import ServerLost
from dmsg.relays.pool import PoolConfig
from dmsg.testing.conformance import ConformanceProtocol
from dmsg.testing.hostile import HostileRelay, drop
from tests.worlds import AliceAndBob

sync = pytest_twisted.ensureDeferred
LIMITS = RelayLimits(drain_timeout_s=0.2)
CONFIG = ClientConfig(
    pool=PoolConfig(backoff_first_s=0.1, backoff_limit_s=0.2, poll_s=0.2), dial=DialConfig(timeout_s=60.0)
)


@implementer(IEventLog)
class Log:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)


class Net(AliceAndBob):
    """A relay with given limits; no discovery, so that only the relay decides."""

    def __init__(self, limits: RelayLimits = LIMITS, announced: AnnouncedLimits | None = None) -> None:
        self.log = Log()
        super().__init__(discovery=None, limits=limits, events=self.log, client={"config": CONFIG})
        self._announced = announced

    async def add_relay(self, *arguments: Any, **options: Any) -> HostileRelay:
        relay = await super().add_relay(*arguments, **options)
        if self._announced is not None:
            relay._hello = hello_payload(self._announced)
        return relay

    async def start(self) -> None:
        await super().start()
        self.serve(limits=ListenerLimits(offers=1_000, offers_per_key=1_000))

    @property
    def session(self) -> Any:
        (session,) = self.alice.pool.sessions.values()
        return session

    @property
    def requests(self) -> int:
        return len(self.relay.frames(REQUEST, self.bob.public_key))

    async def failure(self, work: Awaitable[Any] | None = None) -> BaseException:
        """What a dial of Alice's to Bob (or ``work``) fails with."""
        with pytest.raises((DialError, StageError)) as caught:
            await self.wait(work or self.alice.dial(self.bob.public_key))
        error: Any = caught.value
        if isinstance(error, DialError):
            error = error.attempts[-1]
        assert error.error is not None
        found: BaseException = error.error
        return found


# --- obeyed ------------------------------------------------------------------------------------------------------------


@sync
async def test_the_server_announces_what_it_enforces() -> None:
    async with Net(replace(LIMITS, transports_per_connection=7, requests_per_s=3.0)) as net:
        assert net.session.capabilities.extended
        assert net.session.capabilities.limits == AnnouncedLimits(7, 3, FRAME_PAYLOAD_LIMIT_BYTES)


@sync
async def test_one_transport_too_many_is_refused_here() -> None:
    """``Busy`` by ourselves: the server is not even asked."""
    async with Net(announced=AnnouncedLimits(3, 200, FRAME_PAYLOAD_LIMIT_BYTES)) as net:
        transports = [await net.wait(net.alice.dial(net.bob.public_key)) for _ in range(3)]
        error = await net.failure()
        assert isinstance(error, Busy)
        assert error.by == "local"
        assert net.requests == 3
        transports[0].attach(ConformanceProtocol())
        transports[0].abortConnection()
        await net.settle()
        await net.wait(net.alice.dial(net.bob.public_key))


@sync
async def test_requests_are_sent_at_the_rate_announced() -> None:
    """Fifty dials at once where ten a second are allowed: all succeed, none is refused, and it takes the time it takes."""
    async with Net(replace(LIMITS, requests_per_s=10.0, request_burst=10)) as net:
        began = net.reactor.seconds()
        dials = [ensureDeferred(net.alice.dial(net.bob.public_key)) for _ in range(50)]
        outcomes: Any = await net.wait(DeferredList(dials))
        assert all(ok for ok, _ in outcomes)
        assert 3.9 <= net.reactor.seconds() - began <= 6.0
        assert net.requests == 50
        assert not [event for event in net.log.events if isinstance(event, ev.Refused)]


@sync
async def test_a_dial_given_up_while_it_waits_for_its_turn_sends_no_request() -> None:
    async with Net(announced=AnnouncedLimits(100, 1, FRAME_PAYLOAD_LIMIT_BYTES)) as net:
        await net.wait(net.alice.dial(net.bob.public_key))
        waiting = ensureDeferred(net.alice.dial(net.bob.public_key))
        await net.settle()
        assert not waiting.called
        waiting.addErrback(lambda _: None)
        waiting.cancel()
        net.reactor.advance(5.0)
        assert net.requests == 1


@sync
async def test_a_session_lost_while_a_dial_waits_for_its_turn() -> None:
    async with Net(announced=AnnouncedLimits(100, 1, FRAME_PAYLOAD_LIMIT_BYTES)) as net:
        await net.wait(net.alice.dial(net.bob.public_key))
        waiting: Deferred[Any] = net.session.request(net.bob.public_key, Carrier.REQUEST)
        net.session.abort()
        with pytest.raises(StageError) as caught:
            await net.wait(waiting)
        assert caught.value.reason == "server connection lost"


@pytest.mark.parametrize("security", [Security.PREFER, Security.HOP])
@pytest.mark.parametrize(("announced", "longest"), [(5_000, 5_000), (1, 1_024), (0, 1_024), (2**32 - 1, 32_752)])
@sync
async def test_frames_are_as_short_as_announced(announced: int, longest: int, security: Security) -> None:
    """A limit that leaves no room for anything is not obeyed."""
    async with Net(announced=AnnouncedLimits(100, 100, announced)) as net:
        net.bob.services.port("").security = security  # type: ignore[union-attr]
        transport = await net.wait(net.alice.dial(net.bob.public_key, security=security))
        transport.attach(ConformanceProtocol())
        transport.write(bytes(100_000))
        await net.wait(net.built[0].when_received(100_000))
        sizes = [len(frame.payload) for frame in net.relay.frames(FWD, net.bob.public_key)]
        at_first = longest if security is Security.HOP else min(longest, FIRST_FRAME_BYTES)
        assert at_first <= max(sizes) <= longest


# --- refused: every reason a server has --------------------------------------------------------------------------------


async def refused_as_unknown_peer(net: Net) -> BaseException:
    return await net.failure(net.alice.dial(SecretKey.generate().public_key))


async def refused_as_busy(net: Net) -> BaseException:
    (member,) = [one for one in net.relay.switch.members.values() if one.remote == net.alice.public_key]
    member.dials = LIMITS.transports_per_connection
    return await net.failure()


async def refused_as_rate_limited(net: Net) -> BaseException:
    (member,) = [one for one in net.relay.switch.members.values() if one.remote == net.alice.public_key]
    while member.requests.take(net.reactor.seconds()):
        pass
    net.relay.switch.limits = LIMITS
    return await net.failure()


async def refused_as_rate_limited_for_unanswered_requests(net: Net) -> BaseException:
    net.relay.switch.limits = replace(LIMITS, pending_requests=1)
    unanswered = net.relay.rule(drop, kind=REQUEST)
    net.session.request(net.bob.public_key, Carrier.REQUEST).addErrback(lambda _: None)
    await net.settle()
    assert unanswered.hits
    return await net.failure()


async def refused_as_draining(net: Net) -> BaseException:
    net.relay.switch.draining = True
    return await net.failure()


async def refused_as_unsupported(net: Net) -> BaseException:
    """The peer's hop is base; a dial would go on with carrier B."""
    (member,) = [one for one in net.relay.switch.members.values() if one.remote == net.bob.public_key]
    member.extended = False
    return await net.failure(net.session.request(net.bob.public_key, Carrier.REQUEST))


async def refused_as_bad_id(net: Net) -> BaseException:
    net.session.connection._ids.next_id = 1
    return await net.failure()


async def refused_as_malformed(net: Net) -> BaseException:
    net.session.connection._openings._identity = SecretKey.generate().public_key
    return await net.failure(net.session.request(net.bob.public_key))


async def refused_because_the_peer_does_not_answer(net: Net) -> BaseException:
    net.relay.rule(drop, kind=REQUEST, times=None)
    return await net.failure()


async def refused_because_the_peer_goes(net: Net) -> BaseException:
    net.relay.rule(lambda frame: net.relay.cut(net.bob.public_key) or [], kind=REQUEST)
    return await net.failure(net.session.request(net.bob.public_key, Carrier.REQUEST))


REFUSALS: dict[str, tuple[Callable[[Net], Awaitable[BaseException]], type[BaseException]]] = {
    "unknown peer": (refused_as_unknown_peer, UnknownPeer),
    "busy: too many transports": (refused_as_busy, Busy),
    "rate limited": (refused_as_rate_limited, RateLimited),
    "rate limited: too many unanswered": (refused_as_rate_limited_for_unanswered_requests, RateLimited),
    "draining": (refused_as_draining, ServerDraining),
    "unsupported": (refused_as_unsupported, Unsupported),
    "bad id": (refused_as_bad_id, BadTransportId),
    "malformed": (refused_as_malformed, Malformed),
    "the peer does not answer": (refused_because_the_peer_does_not_answer, HandshakeTimeout),
    "the peer goes": (refused_because_the_peer_goes, PeerGone),
}


@pytest.mark.parametrize(("refuse", "error"), REFUSALS.values(), ids=REFUSALS.keys())
@sync
async def test_a_request_refused_by_the_server(refuse: Any, error: type[BaseException]) -> None:
    async with Net() as net:
        found: Any = await refuse(net)
        assert type(found) is error
        assert found.by == "peer"
        net.reactor.advance(1.0)
        refused = [event for event in net.log.events if isinstance(event, ev.Refused) and event.what == "request"]
        closed = [event for event in net.log.events if isinstance(event, ev.TransportClosed)]
        assert [event.reason for event in refused + closed].count(found.name) == 1, "counted once"


@sync
async def test_a_connection_refused_for_want_of_room() -> None:
    """The server's own text reaches the dialling application."""
    async with Net() as net:
        net.relay.switch.limits = replace(LIMITS, connections=2)
        client = net.new_client(config=CONFIG)
        error = await net.failure(client.dial(net.bob.public_key))
        assert isinstance(error, ConnectionRefusedByServer)
        assert error.reason == "too many connections"


@sync
async def test_a_connection_refused_because_its_address_has_too_many() -> None:
    async with Net(replace(LIMITS, connections_per_address=2)) as net:
        await net.wait(net.alice.dial(net.bob.public_key))  # neither is idle, so that none makes room
        client = net.new_client(config=CONFIG)
        error = await net.failure(client.dial(net.bob.public_key))
        assert isinstance(error, ConnectionRefusedByServer)
        assert error.reason == "connections_per_address"


@sync
async def test_a_connection_refused_by_a_server_that_is_going_down() -> None:
    async with Net() as net:
        net.relay.switch.draining = True
        client = net.new_client(config=CONFIG)
        assert isinstance(await net.failure(client.dial(net.bob.public_key)), ServerDraining)
        net.relay.switch.draining = False


@sync
async def test_a_receiver_that_takes_nothing_is_told_as_slow_consumer() -> None:
    """In the clear, so that nothing resumes."""
    async with Net() as net:
        net.bob.services.port("").security = Security.HOP  # type: ignore[union-attr]
        transport = await net.wait(net.alice.dial(net.bob.public_key, security=Security.HOP))
        end = ConformanceProtocol()
        transport.attach(end)
        transport.write(b"x")
        await net.wait(net.built[0].when_received(1))
        net.relay.switch.drop_transports(CloseReason.SLOW_CONSUMER)
        transport.write(b"y")
        await net.wait(end.when_lost())
        assert isinstance(end.lost[0].value.cause, SlowConsumer)  # type: ignore[union-attr]


@sync
async def test_a_client_that_is_dropped_for_abuse() -> None:
    """Frames of no transport, again and again: the connection ends, and its transports with it."""
    async with Net() as net:
        net.bob.services.port("").security = Security.HOP  # type: ignore[union-attr]
        transport = await net.wait(net.alice.dial(net.bob.public_key, security=Security.HOP))
        end = ConformanceProtocol()
        transport.attach(end)
        for number in range(LIMITS.stray_burst + 10):
            net.session.connection.send_control(bytes((FWD,)) + (60_001 + number).to_bytes(2, "big") + b"\0\2\0\0")
        net.session.shell.flush()
        await net.wait(end.when_lost())
        assert isinstance(end.lost[0].value.cause, ServerLost)  # type: ignore[union-attr]
        reasons = [event.reason for event in net.log.events if isinstance(event, ev.ConnectionClosed)]
        assert reasons == ["abuse"]
