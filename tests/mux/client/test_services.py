"""Many named services behind one key: who gets what, and who learns of the name (:ref:`spec-confirmation`)."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import CannotListenError
from twisted.internet.protocol import Factory
from zope.interface import implementer

from dmsg.address import DmsgAddress
from dmsg.clients.access import AllowKeys
from dmsg.clients.limits import ListenerLimits
from dmsg.errors import DialError, InvalidAddress
from dmsg.interfaces import IAccessPolicy
from dmsg.mux.client.service import DmsgClient
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.errors import AccessDenied, Busy, NoSuchService, Refused, Unsupported
from dmsg.testing.conformance import ConformanceProtocol
from tests.worlds import AliceAndBob

sync = pytest_twisted.ensureDeferred
carriers = pytest.mark.parametrize("extended", [True, False], ids=["carrier A", "carrier B"])


class Named(ConformanceProtocol):
    """Says the name of its service first."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def connectionMade(self) -> None:
        self.transport.write(b"this is " + self.name.encode())
        super().connectionMade()


class Net(AliceAndBob):
    def offer(self, name: str, **options: Any) -> Any:
        """Serve ``name`` with ends that say so."""
        return self.serve(name, lambda: Named(name), **options)

    async def greeting(self, service: str = "", client: DmsgClient | None = None) -> bytes:
        transport = await self.wait((client or self.alice).dial(self.bob.public_key, service))
        end = ConformanceProtocol()
        transport.attach(end)
        await self.wait(end.when_received(9 if service else 8))
        await self.settle()
        transport.loseConnection()
        await self.over(end)
        return bytes(end.received)


@carriers
@sync
async def test_each_name_has_its_own_listener(extended: bool) -> None:
    async with Net(extended=extended) as net:
        names = ["", "web", "ssh", "größe", "x" * 255, "web/2"]
        for name in names:
            net.offer(name)
        for name in names:
            assert await net.greeting(name) == b"this is " + name.encode()


@carriers
@sync
async def test_a_name_without_a_listener(extended: bool) -> None:
    async with Net(extended=extended) as net:
        net.offer("")
        net.offer("web")
        error = await net.refusal("wbe")
        assert error.reason == "no_such_service"
        assert isinstance(error.attempts[-1].error, NoSuchService)
        assert "'wbe'" in str(error), "the message says which"
        assert not net.built


@carriers
@sync
async def test_no_default_listener(extended: bool) -> None:
    async with Net(extended=extended) as net:
        net.offer("web")
        assert isinstance((await net.refusal()).attempts[-1].error, NoSuchService)
        assert await net.greeting("web") == b"this is web"


@carriers
@sync
async def test_a_peer_without_any_listener(extended: bool) -> None:
    async with Net(extended=extended) as net:
        error = await net.refusal()
        assert error.reason == "no_such_service"
        assert "(nothing listens there) after" in str(error)
        assert (await net.refusal("web")).reason == "no_such_service"


@carriers
@sync
async def test_the_relay_never_sees_the_name(extended: bool) -> None:
    async with Net(extended=extended) as net:
        net.offer("a very secret service")
        await net.greeting("a very secret service")
        await net.refusal("another secret service")
        carried = b"".join(frame.payload for frame in net.relay.seen)
        assert b"secret" not in carried
        assert len(carried) > 500


@sync
async def test_a_name_is_taken_once() -> None:
    async with Net() as net:
        port = net.offer("web")
        with pytest.raises(CannotListenError):
            net.offer("web")
        await net.wait(port.stopListening())
        assert (await net.refusal("web")).reason == "no_such_service"
        net.offer("web")
        assert await net.greeting("web") == b"this is web"


@sync
async def test_names_that_do_not_fit() -> None:
    async with Net() as net:
        for name in ("x" * 256, "ö" * 128):
            with pytest.raises(InvalidAddress):
                net.offer(name)
            with pytest.raises(InvalidAddress):
                await net.alice.dial(net.bob.public_key, name)


@sync
async def test_a_service_in_the_clear_is_not_to_be_had() -> None:
    """The base protocol has no names."""
    async with Net() as net:
        net.offer("web")
        error = await net.refusal("web", security=Security.HOP)
        assert isinstance(error.attempts[-1].error, Unsupported)


@sync
async def test_addresses_say_which_service() -> None:
    async with Net() as net:
        net.offer("web")
        transport = await net.wait(net.alice.dial(net.bob.public_key, "web"))
        transport.attach(ConformanceProtocol())
        await net.settle()
        server, alice, bob = net.relay.key.public_key, net.alice.public_key, net.bob.public_key
        assert transport.getPeer() == DmsgAddress(bob, "web", server)
        assert transport.getHost() == DmsgAddress(alice, "", server)
        (inner,) = [one.transport for one in net.built]
        assert inner.getPeer() == DmsgAddress(alice, "", server)
        assert inner.getHost() == DmsgAddress(bob, "web", server)
        transport.abortConnection()


# --- access ------------------------------------------------------------------------------------------------------------


@implementer(IAccessPolicy)
class Slow:
    """Answers when told; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, str]] = []
        self.answers: list[Deferred[bool]] = []
        self.cancelled = 0

    def allow(self, remote: Any, service: str) -> Any:
        self.asked.append((remote, service))
        self.answers.append(Deferred(self._cancel))
        return self.answers[-1]

    def _cancel(self, _: Any) -> None:
        self.cancelled += 1


@carriers
@sync
async def test_access_is_decided_for_each_service(extended: bool) -> None:
    async with Net(extended=extended) as net:
        carol = await net.client()
        net.offer("", policy=AllowKeys([carol.public_key]))
        net.offer("web")
        net.offer("ssh", policy=AllowKeys([net.alice.public_key]))
        assert isinstance((await net.refusal()).attempts[-1].error, AccessDenied)
        assert await net.greeting("web") == b"this is web"
        assert await net.greeting("ssh") == b"this is ssh"
        error = await net.refusal("ssh", carol)
        assert error.reason == "access_denied"
        assert await net.greeting("", carol) == b"this is "


@carriers
@pytest.mark.parametrize("allowed", [True, False])
@sync
async def test_a_policy_may_take_its_time(extended: bool, allowed: bool) -> None:
    async with Net(extended=extended) as net:
        policy = Slow()
        port = net.offer("web", policy=policy)
        dialling = Deferred.fromCoroutine(net.alice.dial(net.bob.public_key, "web"))
        net.reactor.advance(5.0)
        assert policy.asked == [(net.alice.public_key, "web")]
        assert len(port.offers) == 1
        assert not dialling.called
        policy.answers[0].callback(allowed)
        if allowed:
            (await net.wait(dialling)).abortConnection()
        else:
            with pytest.raises(DialError) as caught:
                await net.wait(dialling)
            assert isinstance(caught.value.attempts[-1].error, AccessDenied)
        await net.settle()
        assert len(port.offers) == 0
        assert len(net.built) == allowed


@sync
async def test_a_dialler_that_gives_up_takes_its_question_back() -> None:
    async with Net() as net:
        policy = Slow()
        port = net.offer("web", policy=policy)
        (attempt,) = (await net.refusal("web", timeout_s=2.0)).attempts
        assert (attempt.stage, attempt.reason) == ("accept", "timeout")
        assert attempt.server == str(net.relay.key.public_key)
        await net.settle()
        assert policy.cancelled == 1
        assert len(port.offers) == 0
        assert not net.built


@pytest.mark.parametrize("security", ["hop", "e2e"])
@sync
async def test_an_offer_that_is_taken_back_while_the_policy_answers_is_over(security: str) -> None:
    """The caller gives up right behind a message on which the callee's program lets it in."""
    async with Net() as net:
        policy = Slow()
        port = net.serve(policy=policy, security=security)
        talking = Deferred.fromCoroutine(net.alice.dial(net.bob.public_key, security=security))
        await net.settle()
        policy.answers[0].callback(True)
        transport = await net.wait(talking)
        await net.settle()
        dialling = Deferred.fromCoroutine(net.alice.dial(net.bob.public_key, security=security))
        await net.settle()
        refused: list[str] = []
        net.bob.refused = lambda remote, reason: refused.append(reason)  # type: ignore[method-assign]
        net.built[0].on_data = lambda data: policy.answers[1].callback(True)
        [session] = net.alice.pool.sessions.values()
        transport.write(b"let me in")
        session.shell.flush()
        dialling.cancel()
        with pytest.raises(CancelledError):
            await dialling
        await net.settle()
        assert net.built[0].received == b"let me in"
        assert len(net.built) == 1 and len(port.offers) == 0
        assert (refused, policy.answers[1].result) == ([], None)
        transport.abortConnection()


@sync
async def test_more_than_the_places_of_a_key_are_busy() -> None:
    async with Net() as net:
        policy = Slow()
        net.offer("web", policy=policy, limits=ListenerLimits(offers_per_key=2))
        net.offer("ssh")
        dials = [Deferred.fromCoroutine(net.alice.dial(net.bob.public_key, "web")) for _ in range(2)]
        await net.settle()
        assert isinstance((await net.refusal("web")).attempts[-1].error, Busy)
        assert await net.greeting("ssh") == b"this is ssh", "one service's crowd is no other's"
        for answer in policy.answers:
            answer.callback(True)
        for dial in dials:
            (await net.wait(dial)).abortConnection()


@sync
async def test_a_factory_that_returns_no_protocol() -> None:
    async with Net() as net:

        class Closed(Factory):
            noisy = False

            def buildProtocol(self, addr: Any) -> None:
                return None

        net.bob.listen(Closed())
        transport = await net.wait(net.alice.dial(net.bob.public_key))
        end = ConformanceProtocol()
        transport.attach(end)
        await net.wait(end.when_lost())
        assert isinstance(end.lost[0].value.cause, Refused)  # type: ignore[union-attr]


@sync
async def test_a_factory_that_fails_to_start_does_not_listen() -> None:
    async with Net() as net:

        class Failing(Factory):
            noisy = False

            def startFactory(self) -> None:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            net.bob.listen(Failing(), "web")
        net.offer("ssh")
        assert isinstance((await net.refusal("web")).attempts[-1].error, NoSuchService)
        net.offer("web")
        assert await net.greeting("web") == b"this is web"
