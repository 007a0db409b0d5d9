"""What a listener holds for its peers: offers that wait, transports that are open, and what it asks its policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory
from zope.interface import directlyProvides, implementer

from dmsg.clients.access import AllowKeys
from dmsg.clients.limits import ListenerLimits
from dmsg.errors import DialError
from dmsg.interfaces import IAccessPolicy, IKeyPolicy
from dmsg.mux.core.e2e_handshake import Resume
from dmsg.mux.core.e2e_negotiation import Carrier, Security
from dmsg.mux.core.errors import AccessDenied, Busy, DeadlineExceeded, NoSuchService
from dmsg.mux.core.wire import CLOSE, REQUEST
from dmsg.testing.conformance import ConformanceProtocol
from dmsg.testing.hostile import HostileRelay, drop
from tests.worlds import AliceAndBob

sync = pytest_twisted.ensureDeferred
UNKNOWN = Resume(b"no such token...", 0)


class Net(AliceAndBob):
    """With Carol; ``built`` are the ends at Bob's listener."""

    async def start(self) -> None:
        await super().start()
        self.relays = [self.relay]
        self.carol = await self.client()

    async def open(self, client: Any, *, data: bytes = b"") -> ConformanceProtocol:
        end = ConformanceProtocol()
        transport = await self.wait(client.dial(self.bob.public_key))
        transport.attach(end)
        if data:
            transport.write(data)
        await self.settle()
        return end

    async def error(self, client: Any, service: str = "") -> Any:
        return (await self.refusal(service, client)).attempts[-1].error

    def resume(self, client: Any) -> Deferred[Any]:
        """Ask Bob to go on with a transport he does not know."""
        (session,) = client.pool.sessions.values()
        return session.request(self.bob.public_key, Carrier.REQUEST, resume=UNKNOWN)


@implementer(IAccessPolicy)
class Slow:
    """Answers when told."""

    def __init__(self) -> None:
        self.answers: list[Deferred[bool]] = []
        self.cancelled = 0

    def allow(self, remote: Any, service: str) -> Any:
        self.answers.append(Deferred(self._cancel))
        return self.answers[-1]

    def _cancel(self, _: Any) -> None:
        self.cancelled += 1


@implementer(IKeyPolicy)
class SlowList(Slow):
    """The same for the keys that are on a list."""

    def __init__(self, *keys: Any) -> None:
        super().__init__()
        self.keys = keys

    def admits_key(self, remote: Any) -> bool:
        return remote in self.keys


class Greeting(ConformanceProtocol):
    """Says hello and closes."""

    def connectionMade(self) -> None:
        super().connectionMade()
        self.greet()

    def greet(self) -> None:
        self.transport.write(b"hello")  # type: ignore[union-attr]
        self.transport.loseConnection()  # type: ignore[union-attr]


class Answering(Greeting):
    """Does so once it was spoken to."""

    def connectionMade(self) -> None:
        self.on_data = lambda data: self.greet()
        ConformanceProtocol.connectionMade(self)


# --- open transports ---------------------------------------------------------------------------------------------------


@sync
async def test_an_idle_transport_is_closed() -> None:
    async with Net() as net:
        net.serve(limits=ListenerLimits(idle_timeout_s=60.0))
        idle = await net.open(net.alice, data=b"hello")
        busy = await net.open(net.alice)
        for _ in range(7):
            net.reactor.advance(10.0)
            busy.transport.write(b"still here")
        await net.settle()
        assert isinstance(idle.lost[0].value.cause, DeadlineExceeded)  # type: ignore[union-attr]
        assert isinstance(net.built[0].lost[0].value.cause, DeadlineExceeded)  # type: ignore[union-attr]
        assert not busy.lost
        busy.transport.loseConnection()
        await net.wait(busy.when_lost())


@sync
async def test_the_idle_limit_goes_on_after_the_listener_has_stopped() -> None:
    async with Net() as net:
        port = net.serve(limits=ListenerLimits(idle_timeout_s=60.0))
        idle = await net.open(net.alice)
        await net.wait(port.stopListening())
        net.reactor.advance(62.0)
        await net.settle()
        assert idle.lost


@sync
async def test_a_full_listener_closes_what_is_unused_for_a_newcomer() -> None:
    async with Net() as net:
        net.serve(limits=ListenerLimits(open_transports=3))
        used = await net.open(net.alice, data=b"hello")
        unused = [await net.open(net.carol) for _ in range(2)]
        assert not unused[0].lost
        await net.open(net.alice, data=b"hello")
        await net.settle()
        assert unused[0].lost and not unused[1].lost and not used.lost
        await net.open(net.alice, data=b"hello")
        await net.settle()
        assert unused[1].lost
        assert isinstance(await net.error(net.alice), Busy), "all are used"
        used.transport.loseConnection()
        await net.wait(used.when_lost())
        await net.settle()
        await net.open(net.carol)


@pytest.mark.parametrize("kind", [Greeting, Answering])
@sync
async def test_what_the_application_has_closed_and_its_peer_keeps_open_gives_way_as_well(
    kind: type[Greeting],
) -> None:
    """The listener greets each peer and closes. It is told of the end at once, but the transport is there for a while."""
    async with Net() as net:
        net.serve(limits=ListenerLimits(open_transports=1), end=kind)
        stays = ConformanceProtocol()
        directlyProvides(stays, IHalfCloseableProtocol)
        stays.readConnectionLost = lambda: None  # type: ignore[attr-defined]
        transport = await net.wait(net.carol.dial(net.bob.public_key))
        transport.attach(stays)
        if kind is Answering:
            transport.write(b"good day")
        await net.settle()
        assert (stays.received, stays.lost, len(net.built[0].lost)) == (b"hello", [], 1)
        guest = await net.open(net.alice, data=b"good day" if kind is Answering else b"")
        assert guest.received == b"hello"
        [lost] = stays.lost
        assert isinstance(lost.value.cause, DeadlineExceeded)  # type: ignore[union-attr]


@sync
async def test_more_that_prove_themselves_at_once_than_may_be_open() -> None:
    async with Net() as net:
        net.serve(limits=ListenerLimits(open_transports=3))
        ends = []
        dials = [Deferred.fromCoroutine(net.alice.dial(net.bob.public_key)) for _ in range(5)]
        for dial in dials:
            transport = await net.wait(dial)
            ends.append(ConformanceProtocol())
            transport.attach(ends[-1])
        await net.settle()
        assert [bool(end.lost) for end in ends] == [False] * 3 + [True] * 2
        assert isinstance(ends[-1].lost[0].value.cause, Busy)  # type: ignore[union-attr]


# --- offers that wait ----------------------------------------------------------------------------------------------------


@sync
async def test_the_offer_that_has_waited_longest_gives_way() -> None:
    async with Net() as net:
        policy = Slow()
        port = net.serve(policy=policy, limits=ListenerLimits(offers=2))
        dials = [Deferred.fromCoroutine(one.dial(net.bob.public_key)) for one in (net.alice, net.carol)]
        await net.settle()
        third = Deferred.fromCoroutine(net.alice.dial(net.bob.public_key))
        await net.settle()
        with pytest.raises(DialError) as caught:
            await net.wait(dials[0])
        assert isinstance(caught.value.attempts[-1].error, Busy)
        assert policy.cancelled == 1 and len(port.offers) == 2
        for answer in policy.answers[1:]:
            answer.callback(True)
        for dial in (dials[1], third):
            (await net.wait(dial)).abortConnection()
        assert len(port.offers) == 0


@sync
async def test_a_share_is_that_of_a_key_over_one_relay() -> None:
    """So a relay that repeats Alice's requests keeps her from Bob over itself, and not over another one."""
    async with Net() as net:
        await net.add_relay()
        net.bob, net.alice = [await net.client(min_servers=2) for _ in range(2)]
        port = net.serve(limits=ListenerLimits(offers_per_key=3))
        first, second = net.relays
        sessions = net.alice.pool.sessions

        async def visit(relay: HostileRelay) -> None:
            opened = await net.wait(sessions[relay.key.public_key].request(net.bob.public_key, Carrier.REQUEST))
            opened.session.abort_stream(opened.stream)
            await net.settle()

        await visit(first)
        (recorded,) = first.frames(REQUEST, net.bob.public_key)
        first.rule(drop, kind=CLOSE, to=net.bob.public_key, times=None)
        for number in range(1, 9):
            first.send(replace(recorded, transport_id=recorded.transport_id ^ (number << 8)))
        await net.settle()
        assert len(port.offers) == 3
        await visit(second)
        assert len(port.offers) == 3 and len(net.built) == 2


# --- policies ------------------------------------------------------------------------------------------------------------


@sync
async def test_a_policy_that_knows_the_key_is_not_asked_in_full() -> None:
    async with Net() as net:
        policy = SlowList(net.alice.public_key)
        port = net.serve(policy=policy)
        assert isinstance(await net.error(net.carol), AccessDenied)
        assert not policy.answers
        dialling = Deferred.fromCoroutine(net.alice.dial(net.bob.public_key))
        await net.settle()
        assert len(port.offers) == 1
        policy.answers[0].callback(True)
        (await net.wait(dialling)).abortConnection()


@sync
async def test_a_key_policy_that_raises_denies(logged_errors: Any) -> None:
    @implementer(IKeyPolicy)
    class Broken:
        def admits_key(self, remote: Any) -> bool:
            raise ZeroDivisionError

        def allow(self, remote: Any, service: str) -> bool:
            return True

    async with Net() as net:
        net.serve(policy=Broken())
        assert isinstance(await net.error(net.alice), AccessDenied)
    assert logged_errors.flush(ZeroDivisionError)


@pytest.mark.parametrize("allowed", [True, False])
@sync
async def test_an_unknown_token_waits_for_the_policy_as_any_offer(allowed: bool) -> None:
    async with Net() as net:
        policy = Slow()
        net.serve(policy=policy)
        net.serve("ssh", policy=AllowKeys([net.carol.public_key]))
        asking = net.resume(net.alice)
        await net.settle()
        assert len(net.bob.services.arrivals) == 1 and not asking.called
        policy.answers[0].callback(allowed)
        if allowed:
            opened = await net.wait(asking)
            assert opened.resume is None, "the sealed refusal to resume"
        else:
            with pytest.raises(Exception, match="access_denied"):
                await net.wait(asking)
        await net.settle()
        assert len(net.bob.services.arrivals) == 0
        assert not net.built


@sync
async def test_an_unknown_token_is_of_use_where_any_listener_admits_its_key() -> None:
    async with Net() as net:
        net.serve(policy=AllowKeys([net.alice.public_key]))
        net.serve("ssh", policy=AllowKeys([net.carol.public_key]))
        assert (await net.wait(net.resume(net.carol))).resume is None


@sync
async def test_an_unknown_token_without_any_listener() -> None:
    async with Net() as net:
        with pytest.raises(Exception, match=NoSuchService.name):
            await net.wait(net.resume(net.alice))


@sync
async def test_a_friend_taken_off_the_list_goes_on_with_what_it_has() -> None:
    """Its transport is resumed over another connection, and no new one is opened."""
    async with Net() as net:
        port = net.serve(policy=AllowKeys([net.alice.public_key]))
        end = await net.open(net.alice, data=b"before ")
        await net.wait(port.stopListening())
        net.serve(policy=AllowKeys([net.carol.public_key]))
        net.relays[0].cut(net.alice.public_key)
        net.reactor.advance(5.0)
        end.transport.write(b"and after")
        await net.wait(net.built[0].when_received(16))
        assert net.built[0].received == b"before and after"
        assert isinstance(await net.error(net.alice), AccessDenied)
        end.transport.abortConnection()


@sync
async def test_what_is_no_policy_is_told_where_it_is_given() -> None:
    """Not to the log when a peer comes. The text of a key is in no list of keys: who has the key would be refused."""
    async with Net() as net:
        alice: Any = net.alice.public_key
        for keys in ([str(alice)], str(alice), [alice, bytes(alice)]):
            with pytest.raises(TypeError, match="a key is a PublicKey"):
                AllowKeys(keys)
        for policy in ([alice], alice, lambda remote, service: True):
            with pytest.raises(TypeError, match="IAccessPolicy"):
                net.serve(policy=policy)
        net.serve(policy=AllowKeys([alice]))
        await net.open(net.alice)


# --- who may speak in the clear -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_client", "given", "listed", "expected"),
    [
        (Security.PREFER, None, False, Security.PREFER),
        (Security.PREFER, None, True, Security.E2E),
        (Security.PREFER, Security.PREFER, True, Security.PREFER),
        (Security.PREFER, Security.HOP, True, Security.HOP),
        (Security.HOP, None, True, Security.HOP),
        (Security.E2E, None, False, Security.E2E),
        (Security.E2E, Security.PREFER, False, Security.PREFER),
    ],
)
@sync
async def test_a_list_means_end_to_end_unless_something_else_is_said(
    of_client: Security, given: Security | None, listed: bool, expected: Security
) -> None:
    async with Net() as net:
        bob = net.new_client(security=of_client)
        policy = AllowKeys([net.alice.public_key]) if listed else None
        assert bob.listen(Factory(), policy=policy, security=given).security is expected


@sync
async def test_security_may_be_given_as_its_text_and_as_no_other() -> None:
    """A listener that is asked for "e2e" lets nothing in that is in the clear."""
    async with Net() as net:
        port = net.serve(security="e2e")
        assert port.security is Security.E2E
        old = await net.client(security="hop")
        assert old.security is Security.HOP
        await net.open(old)
        await net.open(net.alice, data=b"x")
        assert [end.transport.security for end in net.built] == ["e2e"]
        transport = await net.wait(net.alice.dial(net.bob.public_key, security="hop"))
        assert transport.security == "hop"
        for use in (net.alice.listen, lambda factory, security: net.new_client(security=security)):
            with pytest.raises(ValueError, match="E2E"):
                use(Factory(), security="E2E")
        with pytest.raises(ValueError, match="E2E"):
            await net.alice.dial(net.bob.public_key, security="E2E")
