"""Ending one direction and going on with the other, provably (:ref:`spec-end-of-stream`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol
from zope.interface import implementer

from dmsg.crypto.keys import SecretKey
from dmsg.glue.stream_transport import TransportLost
from dmsg.mux.client.service import ClientConfig
from dmsg.mux.core.e2e_handshake import CONFIRM_TIMEOUT_S
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.errors import DeadlineExceeded, Unsupported
from dmsg.mux.core.wire import ACCEPT, ACK, CLOSE, FWD, REQUEST, CloseReason
from dmsg.testing.hostile import RelayFrame, drop
from dmsg.testing.probes import ConformanceProtocol, PullProducer, PushProducer, pattern
from tests.worlds import AliceAndBob, ended_cleanly

sync = pytest_twisted.ensureDeferred
SIZE = 300_000


@implementer(IHalfCloseableProtocol)
class Half(ConformanceProtocol):
    """Knows of half-closed connections; notes in which order things happen."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []
        self.on_read_end: Any = None

    def readConnectionLost(self) -> None:
        self.heard.append(f"read ended after {len(self.received)}")
        if self.on_read_end is not None:
            self.on_read_end()
        self._check()

    def writeConnectionLost(self) -> None:
        self.heard.append("write ended")
        self._check()

    def connectionLost(self, reason: Any = None) -> None:
        self.heard.append("lost")
        super().connectionLost(reason)


class Sipping(Half):
    """Pauses after each piece of data."""

    def dataReceived(self, data: bytes) -> None:
        super().dataReceived(data)
        self.transport.pauseProducing()


class Net(AliceAndBob):
    def __init__(self, a: Any = Half, b: Any = Half, *, extended: bool = True, **options: Any) -> None:
        super().__init__(extended=extended, client=options)
        self.a: Any = a()
        self.b: Any = b()

    async def start(self) -> None:
        await super().start()
        await self.connect(self.a, self.b)

    def clean(self) -> bool:
        return ended_cleanly(self.a, self.b)


@pytest.mark.parametrize("extended", [True, False], ids=["carrier A", "carrier B"])
@pytest.mark.parametrize("first", ["initiator", "responder"])
@sync
async def test_one_side_ends_and_the_other_goes_on(first: str, extended: bool) -> None:
    async with Net(extended=extended) as net:
        ending, going = (net.a, net.b) if first == "initiator" else (net.b, net.a)
        ending.transport.write(pattern(SIZE))
        ending.transport.loseWriteConnection()
        ending.transport.loseWriteConnection()  # the second time is silent
        ending.transport.write(b"too late")
        await net.wait(going.when(lambda: going.heard))
        assert going.heard == [f"read ended after {SIZE}"]
        assert going.received == pattern(SIZE)
        await net.wait(ending.when(lambda: ending.heard))
        assert ending.heard == ["write ended"]
        for _ in range(5):
            going.transport.write(pattern(SIZE))
            await net.wait(ending.when_received(SIZE))
            assert ending.received == pattern(SIZE)
            ending.received.clear()
        assert not net.a.lost + net.b.lost
        going.transport.loseConnection()
        await net.over(net.a, net.b)
        assert net.clean()
        assert ending.heard == ["write ended", "read ended after 0", "lost"]


@sync
async def test_a_protocol_attached_after_the_end_was_acknowledged_is_told_once() -> None:
    async with AliceAndBob() as net:
        net.serve(end=Half)
        transport = await net.wait(net.alice.dial(net.bob.public_key))
        transport.write(pattern(SIZE))
        transport.loseWriteConnection()
        await net.wait(net.built[0].when(lambda: net.built[0].heard))
        await net.settle()
        late, later = Half(), Half()
        transport.attach(late)
        assert late.heard == ["write ended"]
        transport.attach(later)
        net.built[0].transport.loseConnection()
        await net.wait(later.when(lambda: later.lost))
        assert (late.heard, later.heard) == (["write ended"], ["read ended after 0", "lost"])
        assert ended_cleanly(later)


@sync
async def test_both_sides_end_by_half() -> None:
    """Both directions over: the transport is, too."""
    async with Net() as net:
        net.a.transport.write(pattern(100))
        net.a.transport.loseWriteConnection()
        net.b.on_read_end = lambda: (net.b.transport.write(pattern(200)), net.b.transport.loseWriteConnection())
        await net.over(net.a, net.b)
        assert net.clean()
        assert net.a.received == pattern(200)
        assert net.b.received == pattern(100)
        assert net.a.heard == ["write ended", "read ended after 200", "lost"]
        assert net.b.heard == ["read ended after 100", "write ended", "lost"]


@sync
async def test_both_sides_end_at_the_same_time() -> None:
    async with Net() as net:
        for end in (net.a, net.b):
            end.transport.write(pattern(SIZE))
            end.transport.loseWriteConnection()
        await net.over(net.a, net.b)
        assert net.clean()
        assert net.a.received == net.b.received == pattern(SIZE)
        for end in (net.a, net.b):
            assert sorted(end.heard[:2]) == [f"read ended after {SIZE}", "write ended"]
            assert end.heard[2:] == ["lost"]


@sync
async def test_a_peer_that_knows_no_halves_closes() -> None:
    """As over TCP: its transport is closed once everything was delivered, what it wrote arrives."""
    async with Net(b=ConformanceProtocol) as net:
        net.b.transport.write(pattern(SIZE))
        net.a.transport.write(pattern(100))
        net.a.transport.loseWriteConnection()
        await net.over(net.a, net.b)
        assert net.clean()
        assert net.b.received == pattern(100)
        assert net.a.received == pattern(SIZE)
        assert net.a.heard == ["write ended", f"read ended after {SIZE}", "lost"]


@sync
async def test_the_end_waits_for_a_reader_that_is_paused() -> None:
    async with Net() as net:
        net.b.transport.pauseProducing()
        net.a.transport.write(pattern(1_000))
        net.a.transport.loseWriteConnection()
        await net.settle()
        net.reactor.advance(5.0)
        assert not net.b.heard
        assert not net.b.received
        net.b.transport.resumeProducing()
        await net.wait(net.b.when(lambda: net.b.heard))
        assert net.b.heard == ["read ended after 1000"]
        net.b.transport.loseConnection()
        await net.over(net.a, net.b)
        assert net.clean()


@pytest.mark.parametrize("path_goes", [False, True], ids=["path stays", "path goes"])
@sync
async def test_once_both_ends_are_acknowledged_it_is_over_whatever_the_peer_reads(path_goes: bool) -> None:
    """The peer has ended its half first, and is paused in front of the end of ours. As with TCP, it has all that came."""
    async with Net() as net:
        net.a.transport.loseWriteConnection()
        await net.wait(net.b.when(lambda: net.b.heard))
        net.a.transport.pauseProducing()
        net.b.transport.write(pattern(1_000))
        net.b.transport.loseWriteConnection()
        await net.settle()
        assert net.b.heard == ["read ended after 0", "write ended", "lost"]
        if path_goes:
            net.relay.cut(net.alice.public_key)
            await net.settle()
        assert not net.a.lost
        net.a.transport.resumeProducing()
        await net.over(net.a)
        assert net.clean() and net.a.received == pattern(1_000)
        assert net.a.heard == ["write ended", "read ended after 1000", "lost"]


@pytest.mark.parametrize("ours", ["first", "when told", "later"])
@sync
async def test_when_both_halves_have_ended_a_peer_that_reads_nothing_is_not_waited_for_for_ever(ours: str) -> None:
    """As after a close: within a minute, but not while a slow reader goes on."""
    async with Net(b=Sipping) as net:
        net.b.transport.pauseProducing()

        def end_ours() -> None:
            net.a.transport.write(pattern(10 * SIZE))
            net.a.transport.loseWriteConnection()

        if ours == "first":
            end_ours()
        elif ours == "when told":
            net.a.on_read_end = end_ours
        net.b.transport.loseWriteConnection()
        await net.wait(net.a.when(lambda: net.a.heard))
        if ours == "later":
            end_ours()
        for _ in range(2):
            await net.settle()
            net.reactor.advance(50.0)
            assert not net.a.lost
            acked_bytes = net.a.transport.stream.acked_bytes
            while net.a.transport.stream.acked_bytes == acked_bytes:
                net.b.transport.resumeProducing()
                await net.settle()
        assert net.a.heard == ["read ended after 0"]
        await net.settle()
        net.reactor.advance(120.0)
        await net.wait(net.a.when_lost())
        assert isinstance(net.a.lost[0].value.cause, DeadlineExceeded)


@pytest.mark.parametrize("kind", [PullProducer, PushProducer])
@sync
async def test_a_producer_goes_on_after_the_other_side_has_ended(kind: Any) -> None:
    async with Net() as net:
        net.a.transport.loseWriteConnection()
        await net.wait(net.b.when(lambda: net.b.heard))
        if kind is PullProducer:
            producer: Any = PullProducer(net.b.transport, 300)
            net.b.transport.registerProducer(producer, False)
        else:
            producer = PushProducer(net.b.transport, net.reactor, SIZE)
            producer.on_end = net.b.transport.unregisterProducer
            producer.start()
        net.b.transport.loseConnection()
        await net.over(net.a, net.b)
        assert net.clean()
        assert len(net.a.received) == SIZE


@pytest.mark.parametrize("kind", [PullProducer, PushProducer])
@sync
async def test_a_half_that_is_closed_waits_for_its_producer(kind: Any) -> None:
    """As over TCP: what the producer had still to write must not be missing from what ends in order."""
    async with Net() as net:
        if kind is PullProducer:
            producer: Any = PullProducer(net.b.transport, 300)
            net.b.transport.registerProducer(producer, False)
        else:
            producer = PushProducer(net.b.transport, net.reactor, SIZE)
            producer.on_end = net.b.transport.unregisterProducer
            producer.start()
        net.b.transport.loseWriteConnection()
        net.b.transport.loseWriteConnection()  # the second time is silent
        await net.wait(net.a.when(lambda: net.a.heard))
        assert net.a.heard == [f"read ended after {SIZE}"]
        net.a.transport.write(b"and on")
        await net.wait(net.b.when_received(6))
        net.a.transport.loseConnection()
        await net.over(net.a, net.b)
        assert net.clean()
        assert net.b.heard == ["write ended", "read ended after 6", "lost"]


@sync
async def test_a_producer_that_cannot_finish_is_no_clean_end() -> None:
    """A peer that knows no halves has a producer running when its reading ends: what is missing must not look complete."""
    async with Net(b=ConformanceProtocol) as net:
        producer = PushProducer(net.b.transport, net.reactor, 100_000_000)
        net.a.transport.pauseProducing()
        producer.start()
        await net.settle()
        net.a.transport.loseWriteConnection()
        await net.wait(net.b.when_lost())
        assert producer.stops == 1
        net.a.transport.resumeProducing()
        await net.wait(net.a.when_lost())
        assert isinstance(net.a.lost[0].value, TransportLost)
        assert not [one for one in net.a.heard if one.startswith("read ended")]
        assert len(net.a.received) < 100_000_000


@sync
async def test_an_abort_after_a_half_is_unclean() -> None:
    async with Net() as net:
        net.a.transport.write(pattern(100))
        net.a.transport.loseWriteConnection()
        await net.wait(net.b.when(lambda: net.b.heard))
        net.b.transport.write(pattern(100))
        net.b.transport.abortConnection()
        await net.over(net.a, net.b)
        assert isinstance(net.a.lost[0].value, TransportLost)
        assert not [one for one in net.a.heard if one.startswith("read ended")]


@sync
async def test_a_truncated_stream_never_ends_as_a_whole_one() -> None:
    """The relay keeps the end back and cuts: neither ``readConnectionLost`` nor ``ConnectionDone``."""
    async with Net(config=ClientConfig(resume_grace_s=0)) as net:
        net.a.transport.write(pattern(100))
        await net.wait(net.b.when_received(100))
        net.relay.rule(drop, kind=FWD, to=net.bob.public_key, times=None)
        net.a.transport.loseWriteConnection()
        await net.settle()
        net.relay.cut(net.bob.public_key)
        await net.over(net.a, net.b)
        assert net.b.heard == ["lost"]
        assert net.a.heard == ["lost"], "the end was not acknowledged"
        assert not any(end.lost[0].check(ConnectionDone) for end in (net.a, net.b))


@sync
async def test_a_half_survives_its_path() -> None:
    """The path goes right after the end was sent: it is sent again on the next one, and told once."""
    async with Net() as net:
        net.a.transport.write(pattern(100))
        net.a.transport.loseWriteConnection()
        await net.wait(net.b.when(lambda: net.b.heard))
        net.relay.cut(net.alice.public_key)
        net.b.transport.write(pattern(SIZE))
        await net.wait(net.a.when_received(SIZE))
        assert net.b.heard == ["read ended after 100"]
        net.b.transport.loseConnection()
        await net.over(net.a, net.b)
        assert net.clean()
        assert net.b.heard.count("read ended after 100") == 1
        assert net.a.heard.count("write ended") == 1


@pytest.mark.parametrize("offers", [0, 8])
@sync
async def test_what_comes_on_a_new_path_after_the_grace_is_not_acknowledged(offers: int) -> None:
    """The proof arrives after the responder has given up. The rest of the stream comes with it.

    Eight offers in the same read make the session send between them and what is behind.
    """
    held: list[RelayFrame] = []

    def hold(frame: RelayFrame) -> list[RelayFrame]:
        if frame.kind not in (FWD, ACK):
            return [frame]
        held.append(frame)
        return []

    async with Net(config=ClientConfig(resume_grace_s=CONFIRM_TIMEOUT_S / 2)) as net:
        net.a.transport.write(pattern(100))
        await net.wait(net.b.when_received(100))
        net.relay.rule(hold, to=net.bob.public_key, times=None)
        net.relay.cut(net.alice.public_key)
        net.a.transport.write(pattern(200))
        net.a.transport.loseWriteConnection()
        await net.over(net.b)
        assert held
        assert not net.a.lost, "it has another path"
        net.relay.be_honest()
        to, stranger = net.bob.public_key, SecretKey(b"s" * 32).public_key
        asked = [RelayFrame(to, REQUEST, 1 + 2 * number, stranger.raw + to.raw) for number in range(offers)]
        for frame in [*asked, *held]:
            net.relay.send(frame)
        await net.over(net.a)
        assert len(net.b.received) == 100
        assert net.a.heard == ["lost"]
        assert not ended_cleanly(net.a)


@pytest.mark.parametrize("taken", [True, False], ids=["all is taken", "something is not taken"])
@sync
async def test_a_peer_that_has_ended_in_full_says_so_on_a_path_that_comes_late(taken: bool) -> None:
    """The end of Alice's stream arrives while her proof of another path is on its way; its acknowledgement is lost."""
    held: list[RelayFrame] = []

    def hold(frame: RelayFrame) -> list[RelayFrame]:
        held.append(frame)
        return []

    async with Net() as net:
        net.a.transport.write(pattern(100))
        net.b.transport.write(pattern(100))
        await net.wait(net.b.when_received(100))
        net.b.transport.loseWriteConnection()
        await net.wait(net.a.when(lambda: net.a.heard == ["read ended after 100"]))
        await net.settle()
        if not taken:
            net.b.transport.loseConnection()
        for kind in (FWD, ACK, CLOSE):
            net.relay.rule(hold, kind=kind, to=net.bob.public_key, times=None)
        net.a.transport.write(pattern(50))
        net.a.transport.loseWriteConnection()
        await net.settle()
        accept = net.relay.frames(ACCEPT, net.alice.public_key)[-1]
        net.relay.send(replace(accept, kind=CLOSE, payload=bytes([CloseReason.PEER_GONE])))
        await net.wait(net.relay.next_frame(ACCEPT, net.alice.public_key))
        await net.settle()
        net.relay.be_honest()
        for frame in held:
            net.relay.send(frame)
        await net.over(net.a, net.b)
        assert bytes(net.b.received) == (pattern(100) + pattern(50) if taken else pattern(100))
        assert ended_cleanly(net.a) is taken
        assert len(net.relay.frames(REQUEST, net.bob.public_key)) == 2


@sync
async def test_a_peer_that_went_on_and_then_gave_up_has_not_taken_what_it_never_got() -> None:
    """Bob has closed, and goes on over another path for Alice's sake. What she writes there never comes, so he gives up."""
    async with Net() as net:
        net.a.transport.write(pattern(100))
        await net.wait(net.b.when_received(100))
        net.b.transport.loseConnection()
        await net.over(net.b)
        assert net.a.heard == ["read ended after 0"]
        net.relay.rule(drop, kind=CLOSE, to=net.bob.public_key)
        accept = net.relay.frames(ACCEPT, net.alice.public_key)[-1]
        net.relay.send(replace(accept, kind=CLOSE, payload=bytes([CloseReason.PEER_GONE])))
        await net.wait(net.relay.next_frame(ACCEPT, net.alice.public_key))
        await net.settle()
        for kind in (FWD, ACK):
            net.relay.rule(drop, kind=kind, to=net.bob.public_key, times=None)
        net.reactor.advance(30.0)  # he loses patience before she does
        net.a.transport.write(pattern(50))
        net.a.transport.loseWriteConnection()
        await net.over(net.a)
        assert net.a.heard == ["read ended after 0", "lost"]
        assert "50 bytes to acknowledge" in str(net.a.lost[0].value)


@pytest.mark.parametrize("paths", [1, 2])
@sync
async def test_without_another_path_the_end_is_clean_if_only_the_news_of_that_is_missing(paths: int) -> None:
    """Both sides have ended, and all has arrived. The second path is lost before the peer has said its end again."""
    async with Net(config=ClientConfig(resume_grace_s=CONFIRM_TIMEOUT_S)) as net:
        net.a.transport.write(pattern(100))
        net.b.transport.write(pattern(100))
        net.b.transport.loseWriteConnection()
        await net.wait(net.b.when_received(100))
        await net.wait(net.a.when(lambda: net.a.heard == ["read ended after 100"]))
        for kind in (FWD, ACK):
            net.relay.rule(drop, kind=kind, to=net.alice.public_key, times=None)
        net.a.transport.loseWriteConnection()
        for _ in range(paths - 1):
            path = net.a.transport.stream
            net.relay.cut(net.alice.public_key)
            await net.wait(net.relay.next_frame(FWD, net.bob.public_key))
            assert net.a.transport.stream is not path
        address = net.pinned[0].address
        net.reactor.refuse(address.host, address.port)
        net.relay.cut(net.alice.public_key)
        await net.over(net.a)
        assert ended_cleanly(net.a)


@sync
async def test_there_is_no_half_in_the_clear() -> None:
    async with Net(security=Security.HOP) as net:
        with pytest.raises(Unsupported):
            net.a.transport.loseWriteConnection()
        net.a.transport.write(b"still whole")
        await net.wait(net.b.when_received(11))
