"""The client as a service: dials and their failures, who may come in, and how channels end."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import CancelledError, Deferred, DeferredList, ensureDeferred
from twisted.internet.error import CannotListenError, ConnectionAborted, ConnectionDone
from twisted.internet.protocol import Factory
from zope.interface import implementer

from dmsg.address import DmsgAddress, HostPort, PinnedServer
from dmsg.clients.access import AllowKeys
from dmsg.clients.errors import ClientStopped
from dmsg.clients.limits import ListenerLimits
from dmsg.crypto.keys import SecretKey
from dmsg.endpoints.stream import ServerEndpoint
from dmsg.errors import DialError
from dmsg.eventlog import schema as ev
from dmsg.eventlog.reasons import Reason
from dmsg.glue.stream_transport import TransportLost
from dmsg.interfaces import IAccessPolicy
from dmsg.messaging.client.config import MessagingConfig
from dmsg.messaging.core.channel import ChannelState
from dmsg.messaging.core.dialect import DIALECTS
from dmsg.messaging.core.errors import (
    ChannelDeadline,
    ChannelRefused,
    NoFreeChannel,
    NoServices,
    NumbersUsedUp,
    OtherDialect,
    PeerGone,
    SlowConsumer,
)
from dmsg.messaging.core.limits import ConnectionConfig
from dmsg.messaging.core.wire import GO, OPEN_CHANNEL
from dmsg.relays.errors import ServerLost
from dmsg.testing.probes import ConformanceProtocol, PushProducer, pattern
from tests.memory_log import MemoryEventLog

sync = pytest_twisted.ensureDeferred


def cause(end: ConformanceProtocol) -> object:
    """Why a transport was lost, as its application learns it."""
    [failure] = end.lost
    assert isinstance(failure.value, TransportLost), failure.value
    return failure.value.cause


# --- dials ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("layout", ["go", "seed"])
@sync
async def test_two_clients_talk_in_each_dialect_and_layout(net, dialect, layout):
    async with net(dialect_name=dialect, layout_name=layout) as world:
        world.serve()
        here, there = await world.pair()
        assert (here.transport.security, there.transport.security) == ("e2e", "e2e")
        data = pattern(200_000)
        here.transport.write(data)
        there.transport.write(data[::-1])
        await world.wait(there.when_received(len(data)))
        await world.wait(here.when_received(len(data)))
        assert (there.received, here.received) == (data, data[::-1])


@sync
async def test_many_dials_are_answered_and_go_on_while_the_others_are_handled(net):
    dials = 32
    async with net() as world:
        world.serve()
        counts: dict[Any, list[int]] = {}
        for client in (world.alice, world.bob):
            (session,) = client.pool.sessions.values()
            counts[client] = []

            def spy(data, client=client, write=session.shell.transport.write):
                counts[client].append(len(world.built) if client is world.bob else opened)
                write(data)

            session.shell.transport.write = spy
        opened = 0

        async def dial_and_close():
            nonlocal opened
            transport = await world.alice.dial(world.bob.public_key)
            opened += 1
            transport.attach(ConformanceProtocol())
            transport.loseConnection()

        await world.wait(DeferredList([ensureDeferred(dial_and_close()) for _ in range(dials)], fireOnOneErrback=True))
        assert opened == len(world.built) == dials
        for client in (world.alice, world.bob):
            while_handling = {count for count in counts[client] if 0 < count < dials}
            assert len(while_handling) >= 2, counts[client]


@sync
async def test_addresses_are_those_of_the_system(net):
    async with net() as world:
        world.serve()
        here, there = await world.pair()
        relay, alice, bob = world.relay.key.public_key, world.alice.public_key, world.bob.public_key
        assert here.transport.getPeer() == there.transport.getHost() == DmsgAddress(bob, "", relay, "messaging")
        assert here.transport.getHost() == there.transport.getPeer() == DmsgAddress(alice, "", relay, "messaging")


@sync
async def test_clients_of_different_dialects_do_not_understand_each_other(net):
    async with net() as world:
        world.serve()
        other = await world.messaging_client(config=MessagingConfig(dialect_name="v2"))
        error = await world.refusal(other)
        assert (error.attempts[-1].stage, len(world.built)) == ("accept", 1)
        assert isinstance(error.attempts[-1].error, OtherDialect)
        await world.settle()
        assert world.built[0].lost, "the callee learns of it"


@sync
async def test_a_peer_that_does_not_listen_refuses(net):
    async with net() as world:
        error = await world.refusal()
        [attempt] = error.attempts
        assert (attempt.stage, attempt.reason) == ("accept", "request rejected")
        assert isinstance(attempt.error, ChannelRefused)
        assert attempt.server == str(world.relay.key.public_key)


@sync
async def test_a_key_that_no_client_has_is_refused(net):
    async with net() as world:
        with pytest.raises(DialError) as caught:
            await world.wait(world.alice.dial(SecretKey.generate().public_key))
        assert caught.value.reason == "request rejected"


@sync
async def test_a_service_by_name_is_not_to_be_had(net):
    async with net() as world:
        world.serve()
        error = await world.refusal(service="web")
        assert error.reason == "unsupported"
        assert isinstance(error.attempts[-1].error, NoServices)
        with pytest.raises(NoServices):  # it would never be asked for
            world.bob.listen(Factory.forProtocol(ConformanceProtocol), "web")


@sync
async def test_one_client_has_one_port(net):
    async with net() as world:
        port = world.serve()
        with pytest.raises(CannotListenError):
            world.serve()
        await world.wait(port.stopListening())
        assert (await world.refusal()).reason == "request rejected"
        world.serve()
        await world.pair()


@sync
async def test_a_link_has_255_ids_and_no_more(net):
    async with net() as world:
        world.serve(policy=Slow())
        session = world.alice.pool.sessions[world.relay.key.public_key]
        for _ in range(255):
            session.connection.open(SecretKey.generate().public_key)
        error = await world.refusal()
        assert error.reason == "busy"
        assert isinstance(error.attempts[-1].error, NoFreeChannel)


@sync
async def test_as_many_dials_at_once_as_a_relay_passes_on_at_once(net):
    async with net() as world:
        world.serve()
        count = world.relay.switch.limits.unanswered_per_target
        dials = [Deferred.fromCoroutine(world.alice.dial(world.bob.public_key)) for _ in range(count)]
        for dial in dials:
            await world.wait(dial)
        assert len(world.built) == count == 48


@sync
async def test_a_factory_without_a_protocol_ends_the_channel(net):
    async with net() as world:

        class Nothing(Factory):
            noisy = False

            def buildProtocol(self, addr: Any) -> None:
                return None

        world.bob.listen(Nothing())
        transport = await world.wait(world.alice.dial(world.bob.public_key))
        end = ConformanceProtocol()
        transport.attach(end)
        await world.wait(end.when_lost())
        assert isinstance(cause(end), PeerGone)
        with pytest.raises(DialError, match="built no protocol"):
            await world.wait(world.alice.connect(Nothing(), world.bob.public_key))


@sync
async def test_a_factory_that_fails_ends_the_channel_that_was_dialled(net):
    async with net() as world:

        class Failing(Factory):
            noisy = False

            def buildProtocol(self, addr: Any) -> Any:
                raise ZeroDivisionError

        world.serve()
        with pytest.raises(ZeroDivisionError):
            await world.wait(world.alice.connect(Failing(), world.bob.public_key))
        await world.settle()
        assert not world.alice.transports and not world.relay.switch.open_transports


# --- dials that are given up -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["v0", "v5"])
@sync
async def test_a_cancelled_dial_leaves_nothing_behind(net, dialect):
    async with net(dialect_name=dialect) as world:
        policy = Slow()
        port = world.serve(policy=policy)
        dialling = Deferred.fromCoroutine(world.alice.dial(world.bob.public_key))
        await world.settle()
        [answer] = policy.answers
        dialling.cancel()
        with pytest.raises(CancelledError):
            await dialling
        await world.settle()
        if dialect == "v0":  # the offer is taken back; with ids of its own nothing names it before the answer
            assert policy.cancelled == 1
        else:
            answer.callback(True)
            await world.settle()
            assert [end.lost[0].check(TransportLost) for end in world.built] == [TransportLost]
        assert len(port.offers) == 0 and not world.relay.switch.open_transports
        for client in (world.alice, world.bob):
            assert not client.pool.sessions[world.relay.key.public_key].connection.channels
            assert not client.transports


@sync
async def test_a_dial_that_takes_too_long_takes_its_question_back(net):
    async with net() as world:
        policy = Slow()
        world.serve(policy=policy)
        [attempt] = (await world.refusal(timeout_s=2.0)).attempts
        assert (attempt.stage, attempt.reason) == ("accept", "timeout")
        await world.settle()
        assert policy.cancelled == 1 and not world.built


@sync
async def test_a_client_that_stops_ends_its_dials_and_connects_to_no_other_relay(net):
    async with net() as world:
        world.serve()
        await world.add_messaging_relay()
        late = world.new_messaging_client(config=world.config, min_servers=0)
        late.startService()
        for pinned in world.messaging_pinned:
            world.reactor.silence(pinned.address.host, pinned.address.port)
        dialling = Deferred.fromCoroutine(late.dial(world.bob.public_key))
        await world.settle()
        for pinned in world.messaging_pinned:
            world.reactor.heal(pinned.address.host, pinned.address.port)
        await world.stop_client(late)
        with pytest.raises(DialError, match="stopped"):
            await world.wait(dialling)
        with pytest.raises(DialError, match="stopped"):
            await world.wait(late.dial(world.bob.public_key))
        await world.settle()
        assert not late.pool.sessions and not late.transports


# --- who may come in -------------------------------------------------------------------------------------------------------


@implementer(IAccessPolicy)
class Slow:
    """Answers when told, and for the key ``admitted`` at once; remembers what it was asked."""

    def __init__(self, admitted: Any = None) -> None:
        self.admitted = admitted
        self.asked: list[tuple[Any, str]] = []
        self.answers: list[Deferred[bool]] = []
        self.cancelled = 0

    def allow(self, remote: Any, service: str) -> Any:
        self.asked.append((remote, service))
        if remote == self.admitted:
            return True
        self.answers.append(Deferred(self._cancel))
        return self.answers[-1]

    def _cancel(self, _: Any) -> None:
        self.cancelled += 1


@sync
async def test_a_listed_key_comes_in_and_another_does_not(net):
    log = MemoryEventLog()
    async with net(events=log) as world:
        carol = await world.messaging_client(config=world.config)
        world.serve(policy=AllowKeys([world.alice.public_key]))
        await world.pair()
        assert (await world.refusal(carol)).reason == "request rejected"
        assert len(world.built) == 1
        world.reactor.advance(1.0)
    refused = [one for one in log.of(ev.Refused) if one.remote == str(carol.public_key)]
    assert [(one.reason, one.count) for one in refused] == [(Reason.ACCESS_DENIED, 1)]


@pytest.mark.parametrize("allowed", [True, False])
@sync
async def test_a_policy_may_take_its_time(net, allowed):
    async with net() as world:
        policy = Slow()
        port = world.serve(policy=policy)
        dialling = Deferred.fromCoroutine(world.alice.dial(world.bob.public_key))
        world.reactor.advance(5.0)
        assert policy.asked == [(world.alice.public_key, "")]
        assert len(port.offers) == 1 and not dialling.called
        policy.answers[0].callback(allowed)
        if allowed:
            await world.wait(dialling)
        else:
            with pytest.raises(DialError):
                await world.wait(dialling)
        await world.settle()
        assert (len(port.offers), len(world.built)) == (0, allowed)


@sync
async def test_an_offer_that_is_taken_back_while_the_policy_answers_is_over(net):
    """The caller gives up right behind a message on which the callee's program lets it in."""
    async with net() as world:
        policy = Slow()
        port = world.serve(policy=policy)
        talking = Deferred.fromCoroutine(world.alice.dial(world.bob.public_key))
        await world.settle()
        policy.answers[0].callback(True)
        transport = await world.wait(talking)
        await world.settle()
        dialling = Deferred.fromCoroutine(world.alice.dial(world.bob.public_key))
        await world.settle()
        world.built[0].on_data = lambda data: policy.answers[1].callback(True)
        transport.write(b"let me in")
        world.alice.pool.sessions[world.relay.key.public_key].shell.flush()
        dialling.cancel()
        with pytest.raises(CancelledError):
            await dialling
        await world.settle()
        assert world.built[0].received == b"let me in"
        assert len(world.built) == 1 and len(port.offers) == 0


@sync
async def test_a_policy_that_fails_admits_no_one(net, logged_errors):
    async with net() as world:
        policy = Slow()
        world.serve(policy=policy)
        dialling = Deferred.fromCoroutine(world.alice.dial(world.bob.public_key))
        await world.settle()
        policy.answers[0].errback(ZeroDivisionError())
        with pytest.raises(DialError):
            await world.wait(dialling)
        assert len(logged_errors.flush(ZeroDivisionError)) == 1


@sync
async def test_a_key_has_its_share_of_the_places_and_others_have_theirs(net):
    async with net() as world:
        carol = await world.messaging_client(config=world.config)
        policy = Slow()
        world.serve(policy=policy, limits=ListenerLimits(offers_per_key=2))
        dials = [Deferred.fromCoroutine(world.alice.dial(world.bob.public_key)) for _ in range(2)]
        await world.settle()
        await world.refusal()
        dials.append(Deferred.fromCoroutine(carol.dial(world.bob.public_key)))
        await world.settle()
        assert policy.asked == [(world.alice.public_key, "")] * 2 + [(carol.public_key, "")]
        for answer in policy.answers:
            answer.callback(True)
        for dial in dials:
            await world.wait(dial)


@sync
async def test_the_offer_that_waits_longest_makes_room_for_a_new_one(net):
    async with net() as world:
        policy = Slow()
        world.serve(policy=policy, limits=ListenerLimits(offers=2, offers_per_key=2))
        carol = await world.messaging_client(config=world.config)
        clients = (world.alice, carol, carol)
        dials = []
        for client in clients:
            dials.append(Deferred.fromCoroutine(client.dial(world.bob.public_key)))
            await world.settle()
        with pytest.raises(DialError):
            await world.wait(dials[0])
        assert policy.cancelled == 1
        for answer in policy.answers[1:]:
            answer.callback(True)
        for dial in dials[1:]:
            await world.wait(dial)


@pytest.mark.parametrize("dialect", DIALECTS)
@sync
async def test_offers_that_wait_for_a_policy_although_they_are_over_keep_nobody_out(net, dialect):
    """Where each side has ids of its own, the relay cannot tell that a caller has given up."""
    async with net(dialect_name=dialect) as world:
        policy = Slow(admitted=world.alice.public_key)
        port = world.serve(policy=policy)
        mallory = await world.messaging_client(config=world.config)
        for _ in range(80):
            dialling = Deferred.fromCoroutine(mallory.dial(world.bob.public_key))
            await world.settle()
            dialling.cancel()
            with pytest.raises(CancelledError):
                await dialling
            world.reactor.advance(0.5)
        assert len(policy.asked) == 80
        own_ids = DIALECTS[dialect].own_ids
        assert len(port.offers) == (64 if own_ids else 0) and policy.cancelled == (16 if own_ids else 80)
        here, there = await world.pair()
        here.transport.write(b"hello")
        await world.wait(there.when_received(5))


@sync
async def test_a_full_listener_is_busy_unless_a_channel_is_unused(net):
    async with net() as world:
        world.serve(limits=ListenerLimits(open_transports=2))
        (first, _), (second, _) = await world.pair(), await world.pair()
        second.transport.write(b"in use")
        await world.settle()
        third, _ = await world.pair()
        await world.wait(first.when_lost())
        third.transport.write(b"in use as well")
        await world.settle()
        assert not second.lost
        await world.refusal()
        assert len(world.built) == 3


@sync
async def test_an_idle_channel_is_ended(net):
    async with net() as world:
        world.serve(limits=ListenerLimits(idle_timeout_s=5.0))
        here, there = await world.pair()
        world.reactor.advance(3.0)
        here.transport.write(b"x")
        world.reactor.advance(4.0)
        assert not there.lost
        world.reactor.advance(5.0)
        assert isinstance(cause(there), ChannelDeadline)
        assert isinstance(cause(here), PeerGone)


@sync
async def test_an_offer_that_a_relay_makes_up_costs_no_place_and_asks_no_policy(net):
    """A relay can name any key; the handshake message must have been made with it."""
    async with net() as world:
        policy = Slow()
        port = world.serve(policy=policy)
        session = world.bob.pool.sessions[world.relay.key.public_key]
        claimed = SecretKey.generate().public_key
        message = SecretKey.generate().public_key.raw + bytes(16)
        session.shell.dataReceived(GO.encode(OPEN_CHANNEL, 200, claimed.raw + message))
        assert policy.asked == [] and len(port.offers) == 0 and not session.connection.channels


# --- what a reader does to its writer ----------------------------------------------------------------------------------------


@sync
async def test_a_paused_reader_holds_up_its_own_writer_only(net):
    async with net(dialect_name="v0") as world:
        world.serve()
        (slow, slow_end), (fast, fast_end) = await world.pair(), await world.pair()
        slow_end.transport.pauseProducing()
        producer = PushProducer(slow.transport, world.reactor, 10_000_000)
        producer.start()
        world.reactor.advance(30.0)
        assert producer.paused and producer.written < 300_000
        fast.transport.write(pattern(1_000_000))
        await world.wait(fast_end.when_received(1_000_000))
        assert slow_end.received == b"" and not slow.lost
        slow_end.transport.resumeProducing()
        await world.wait(slow_end.when_received(10_000_000))
        assert slow_end.received == pattern(10_000_000)


@pytest.mark.parametrize("dialect", ["seed", "v5"])
@sync
async def test_without_acknowledgements_a_reader_that_holds_too_much_is_cut_off_and_no_other(net, dialect):
    limits = ConnectionConfig(receive_limit_bytes=200_000)
    async with net(dialect_name=dialect, connection=limits) as world:
        world.serve()
        (slow, slow_end), (fast, fast_end) = await world.pair(), await world.pair()
        slow_end.transport.pauseProducing()
        slow.transport.write(pattern(100_000))
        await world.settle()
        assert not slow_end.lost
        slow.transport.write(pattern(300_000))
        await world.wait(slow.when_lost())
        assert isinstance(cause(slow), PeerGone)
        slow_end.transport.resumeProducing()
        await world.wait(slow_end.when_lost())
        assert isinstance(cause(slow_end), SlowConsumer)
        fast.transport.write(b"still here")
        await world.wait(fast_end.when_received(10))


@sync
async def test_a_writer_that_does_not_pause_is_cut_off(net):
    async with net(connection=ConnectionConfig(pending_limit_bytes=500_000)) as world:
        world.serve()
        here, there = await world.pair()
        there.transport.pauseProducing()
        here.transport.write(bytes(400_000))
        here.transport.write(bytes(400_000))
        await world.wait(here.when_lost())
        assert "may wait" in str(cause(here))
        there.transport.resumeProducing()
        await world.wait(there.when_lost())
        assert isinstance(cause(there), PeerGone)


# --- ends --------------------------------------------------------------------------------------------------------------------


@sync
async def test_a_channel_whose_numbers_are_used_up_ends_and_no_other(net):
    events = MemoryEventLog()
    async with net(events=events, dialect_name="v5") as world:
        world.serve()
        (here, there), (other, other_there) = await world.pair(), await world.pair()
        for cipher in (here.transport.stream.sealer, there.transport.stream.opener):
            cipher._state.nonce = 2**32 - 2
        for number in (b"last but one ", b"last ", b"none"):
            here.transport.write(number)
            other.transport.write(number)
            await world.settle()
        await world.wait(here.when_lost())
        assert isinstance(cause(here), NumbersUsedUp)
        assert there.received == b"last but one last " and isinstance(cause(there), PeerGone)
        assert other_there.received == b"last but one last none" and not other.lost
        [closed] = [one for one in events.of(ev.TransportClosed) if one.by == "local"]
        assert closed.reason == Reason.NONCE_EXHAUSTED
        again, far = await world.pair()
        again.transport.write(b"hello")
        await world.wait(far.when_received(5))


@sync
async def test_a_lost_relay_ends_its_channels(net):
    async with net() as world:
        world.serve()
        here, there = await world.pair()
        for pipe in list(world.reactor.pipes):
            pipe.a.abortConnection()
        await world.wait(here.when_lost())
        await world.wait(there.when_lost())
        for end in (here, there):
            error = cause(end)
            assert isinstance(error, ServerLost) and error.server == str(world.relay.key.public_key)
        await world.wait(world.bob.when_ready())
        await world.wait(world.alice.when_ready())
        await world.pair()


@sync
async def test_a_relay_that_goes_while_a_dial_waits(net):
    async with net() as world:
        world.serve(policy=Slow())
        dialling = Deferred.fromCoroutine(world.alice.dial(world.bob.public_key))
        await world.settle()
        world.alice.pool.sessions[world.relay.key.public_key].shell.transport.abortConnection()
        with pytest.raises(DialError) as caught:
            await world.wait(dialling)
        assert caught.value.reason == "server connection lost"


@sync
async def test_a_peer_that_is_gone(net):
    async with net() as world:
        world.serve()
        here, _there = await world.pair()
        world.bob.pool.sessions[world.relay.key.public_key].shell.transport.abortConnection()
        await world.wait(here.when_lost())
        assert isinstance(cause(here), PeerGone)


@pytest.mark.parametrize("dialect", ["v0", "v5"])
@sync
async def test_an_abort_is_no_clean_end_for_the_peer(net, dialect):
    async with net(dialect_name=dialect) as world:
        world.serve()
        here, there = await world.pair()
        here.transport.abortConnection()
        await world.wait(there.when_lost())
        await world.wait(here.when_lost())
        assert here.lost[0].check(ConnectionAborted)
        assert isinstance(cause(there), PeerGone)
        assert not world.relay.switch.open_transports


@sync
async def test_a_peer_that_closes_without_taking_what_was_written_ends_no_channel_in_order(net):
    async with net() as world:
        world.serve()
        here, there = await world.pair()
        there.transport.pauseProducing()
        here.transport.write(bytes(300_000))
        await world.settle()
        there.transport.loseConnection()
        await world.wait(here.when_lost())
        assert isinstance(cause(here), PeerGone)
        assert "bytes that were written" in str(cause(here))


@sync
async def test_a_close_in_the_read_in_which_the_peer_has_dropped_the_channel_is_not_clean(net):
    """What was written before did not arrive."""
    async with net() as world:
        world.serve()
        here, there = await world.pair()
        there.transport.pauseProducing()
        here.transport.write(bytes(50_000))
        await world.settle()
        here.on_data = lambda data: here.transport.loseConnection()
        [session] = world.bob.pool.sessions.values()
        there.transport.write(b"bye")
        session.shell.flush()
        there.transport.abortConnection()
        await world.wait(here.when_lost())
        assert here.received == b"bye"
        assert isinstance(cause(here), PeerGone)
        assert not len(world.alice.transports)


async def closed_behind_a_paused_reader(world):
    """Both ends of a channel, on which one end has written 5 bytes and closed while the other reads nothing."""
    world.serve()
    here, there = await world.pair()
    there.transport.pauseProducing()
    here.transport.write(b"hello")
    here.transport.loseConnection()
    return here, there


@pytest.mark.parametrize("resumes", [True, False], ids=["it resumes", "it does not"])
@sync
async def test_a_close_waits_for_a_paused_reader_to_read(net, resumes):
    """An acknowledgement says that the peer's program has the data. The reader gets it all the same."""
    async with net(dialect_name="v0") as world:
        here, there = await closed_behind_a_paused_reader(world)
        world.reactor.advance(59.0)
        assert not here.lost
        if not resumes:
            world.reactor.advance(2.0)
            await world.wait(here.when_lost())
        there.transport.resumeProducing()
        await world.wait(there.when_lost())
        await world.wait(here.when_lost())
        assert there.received == b"hello"
        if resumes:
            assert here.lost[0].check(ConnectionDone) and there.lost[0].check(ConnectionDone)
        else:
            assert isinstance(cause(here), ChannelDeadline)


@sync
async def test_without_acknowledgements_a_close_does_not_wait_for_a_paused_reader(net):
    async with net(dialect_name="v5") as world:
        here, there = await closed_behind_a_paused_reader(world)
        await world.wait(here.when_lost())
        assert here.lost[0].check(ConnectionDone)
        there.transport.resumeProducing()
        await world.wait(there.when_lost())
        assert there.received == b"hello"


@sync
async def test_a_protocol_that_closes_on_what_it_reads_has_taken_it(net):
    async with net() as world:
        world.serve()
        here, there = await world.pair()
        there.on_data = lambda data: there.transport.loseConnection()
        here.transport.write(b"/bye")
        await world.wait(here.when_lost())
        assert here.lost[0].check(ConnectionDone) and here.transport.stream.cut_bytes == 0


@sync
async def test_a_client_that_stops_says_goodbye_and_sends_what_was_written(net):
    async with net() as world:
        world.serve()
        here, there = await world.pair()
        here.transport.write(pattern(300_000))
        await world.stop_client(world.alice)
        await world.wait(there.when_lost())
        assert there.received == pattern(300_000)
        assert there.lost[0].check(ConnectionDone) and here.lost[0].check(ConnectionDone)


@sync
async def test_who_waits_for_a_client_that_stops_or_has_stopped_is_told(net):
    async with net() as world:
        gone = PinnedServer(SecretKey.generate().public_key, HostPort("192.0.2.99", 80))
        late = world.new_messaging_client(min_servers=2, servers=(*world.messaging_pinned, gone))
        late.startService()
        waiting, listening = late.when_ready(), ServerEndpoint(late).listen(Factory())
        await world.stop_client(late)
        with pytest.raises(ClientStopped):
            await waiting
        with pytest.raises(CannotListenError, match="the client has stopped"):
            await listening
        with pytest.raises(CannotListenError, match="the client has stopped"):
            await ServerEndpoint(late).listen(Factory())
        assert not late.services


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit])
@sync
async def test_a_client_stops_although_the_factory_of_its_listener_fails_to(net, logged_errors, kind):
    class Failing(Factory):
        noisy = False

        def stopFactory(self) -> None:
            raise kind

    async with net() as world:
        world.bob.listen(Failing())
        await world.stop_client(world.bob)
        await world.settle()
        assert not world.bob.pool.sessions
        assert len(logged_errors.flush(kind)) == 1


@sync
async def test_a_close_that_the_peer_does_not_answer_ends_after_a_second(net):
    async with net() as world:
        world.serve()
        here, _ = await world.pair()
        stream = here.transport.stream
        for pipe in world.reactor.pipes:
            pipe.loss = 1.0
        here.transport.loseConnection()
        await world.settle()
        assert stream.state is ChannelState.HALF_CLOSED and not here.lost
        world.reactor.advance(1.1)
        assert here.lost[0].check(ConnectionDone) and stream.state is ChannelState.CLOSED


@sync
async def test_a_deadline_ends_both_ends(net):
    async with net() as world:
        world.serve()
        here, there = await world.pair()
        here.transport.set_read_deadline(world.reactor.seconds() + 2.0)
        world.reactor.advance(2.5)
        assert isinstance(cause(here), ChannelDeadline)
        assert isinstance(cause(there), PeerGone)


# --- the event log -------------------------------------------------------------------------------------------------------------


@sync
async def test_what_the_log_says_of_a_channel(net):
    log = MemoryEventLog()
    async with net(events=log) as world:
        world.serve()
        here, there = await world.pair()
        here.transport.write(b"twelve bytes")
        await world.wait(there.when_received(12))
        here.transport.loseConnection()
        await world.wait(there.when_lost())
    alice, bob, relay = (str(one.public_key) for one in (world.alice, world.bob, world.relay.key))
    [dial] = log.of(ev.DialFinished)
    assert (dial.target, dial.server, dial.security, dial.protocol) == (bob, relay, "e2e", "messaging")
    ends = [one for one in log.of(ev.TransportClosed) if one.by in ("local", "peer")]
    assert {(one.initiator, one.responder, one.server) for one in ends} == {(alice, bob, relay)}
    assert {(one.reason, one.by, one.bytes_in, one.bytes_out) for one in ends} == {
        (Reason.NORMAL, "local", 0, 12),
        (Reason.CLOSED_BY_PEER, "peer", 12, 0),
    }
