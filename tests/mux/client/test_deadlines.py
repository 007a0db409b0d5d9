"""Deadlines after Go's net.Conn: an absolute time on the client's clock."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol
from zope.interface import directlyProvides

from dmsg.eventlog import schema as ev
from dmsg.glue.deadlines import LINGER_S
from dmsg.mux.client.service import ClientConfig
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.errors import DeadlineExceeded
from dmsg.mux.core.wire import ACK
from dmsg.testing.conformance import ConformanceProtocol
from dmsg.testing.hostile import drop
from tests.worlds import AliceAndBob

sync = pytest_twisted.ensureDeferred
both = pytest.mark.parametrize("security", [Security.PREFER, Security.HOP], ids=["e2e", "hop"])


class Net(AliceAndBob):
    def __init__(self, security: Security = Security.PREFER, **options: Any) -> None:
        super().__init__(client={"security": security, "config": ClientConfig(**options)})

    async def start(self) -> None:
        await super().start()
        self.a, self.b = ConformanceProtocol(), ConformanceProtocol()
        self.t = await self.connect(self.a, self.b)

    def pass_s(self, seconds: float) -> None:
        self.reactor.advance(seconds)

    def after(self, seconds: float) -> float:
        """An absolute time."""
        return float(self.reactor.seconds()) + seconds

    def exceeded(self) -> bool:
        (failure,) = self.a.lost
        reason: Any = failure.value
        return type(reason.cause) is DeadlineExceeded and reason.cause.by == "local"

    def hold_back(self) -> None:
        """From now on nothing is acknowledged."""
        self.b.transport.pauseProducing()
        self.relay.rule(drop, kind=ACK, to=self.alice.public_key, times=None)


@both
@sync
async def test_a_read_deadline_passes(security: Security) -> None:
    async with Net(security) as net:
        net.t.set_read_deadline(net.after(2.0))
        net.pass_s(1.9)
        assert not net.a.lost
        net.pass_s(0.2)
        assert net.exceeded()
        await net.wait(net.b.when_lost())
        assert not net.b.lost[0].check(ConnectionDone)


@both
@sync
async def test_a_read_deadline_is_absolute(security: Security) -> None:
    """Arriving data does not move it; the application does, as with Go's net.Conn."""
    async with Net(security) as net:
        net.t.set_read_deadline(net.after(2.0))
        net.pass_s(1.0)
        net.b.transport.write(b"data")
        net.pass_s(0.5)
        assert net.a.received == b"data"
        net.pass_s(0.6)
        assert net.exceeded()


@both
@sync
async def test_a_deadline_moved_and_taken_back(security: Security) -> None:
    async with Net(security) as net:
        net.t.set_deadline(net.after(1.0))
        net.pass_s(0.9)
        net.t.set_read_deadline(net.after(1.0))
        net.pass_s(0.9)
        assert not net.a.lost
        net.t.set_deadline(None)
        net.pass_s(100.0)
        assert not net.a.lost
        net.t.write(b"still here")
        await net.wait(net.b.when_received(10))


@both
@pytest.mark.parametrize("which", ["set_read_deadline", "set_deadline"])
@sync
async def test_a_deadline_in_the_past(security: Security, which: str) -> None:
    async with Net(security) as net:
        net.pass_s(10.0)
        getattr(net.t, which)(net.after(-5.0))
        await net.settle()
        assert net.exceeded()


@both
@sync
async def test_a_write_deadline_with_nothing_to_write(security: Security) -> None:
    """There is no operation that could fail."""
    async with Net(security) as net:
        net.t.write(b"hello")
        await net.wait(net.b.when_received(5))
        await net.settle()
        net.t.set_write_deadline(net.after(1.0))
        net.pass_s(10.0)
        assert not net.a.lost


@both
@sync
async def test_a_write_deadline_without_progress(security: Security) -> None:
    async with Net(security) as net:
        net.hold_back()
        net.t.write(b"data")
        net.t.set_write_deadline(net.after(2.0))
        net.pass_s(1.9)
        assert not net.a.lost
        net.pass_s(0.2)
        assert net.exceeded()


@both
@sync
async def test_a_slow_transfer_that_moves_never_trips_a_write_deadline(security: Security) -> None:
    """Three megabytes at a reader that takes a quarter of one each second, with a deadline of five seconds.

    Sealed, nothing is acknowledged before a slow reader has taken what is beyond its limit of unread bytes: three seconds.
    """
    async with Net(security) as net:
        size = 3_000_000
        net.b.transport.pauseProducing()
        net.t.write(bytes(size))
        net.t.set_write_deadline(net.after(5.0))
        seconds = 0
        while len(net.b.received) < size:
            # one burst, then nothing for a while
            net.b.on_data = lambda _: net.b.transport.pauseProducing()
            for _ in range(8):
                net.b.transport.resumeProducing()
                await net.settle()
            net.pass_s(1.0)
            seconds += 1
            assert not net.a.lost, seconds
        assert seconds > 8
        net.t.set_write_deadline(None)


@both
@sync
async def test_a_transfer_that_stops_moving_trips_it(security: Security) -> None:
    async with Net(security) as net:
        net.t.set_write_deadline(net.after(2.0))
        net.t.write(bytes(1_000))
        await net.settle()
        net.pass_s(1.0)
        net.hold_back()
        net.t.write(bytes(1_000))
        net.pass_s(1.5)  # the first thousand arrived: as long again
        assert not net.a.lost
        net.pass_s(2.0)
        assert net.exceeded()


@sync
async def test_deadlines_hold_while_there_is_no_path() -> None:
    """Resumption would take thirty seconds; the deadline has said five."""
    async with Net(resume_grace_s=30.0) as net:
        net.t.set_read_deadline(net.after(5.0))
        address = net.pinned[0].address
        net.reactor.refuse(address.host, address.port)
        net.relay.cut(net.alice.public_key)
        net.pass_s(4.9)
        assert not net.a.lost
        net.pass_s(0.2)
        assert net.exceeded()
        net.reactor.heal(address.host, address.port)


@sync
async def test_an_exceeded_deadline_is_logged() -> None:
    async with Net() as net:
        log: list[Any] = []
        net.alice._record._events = type("Log", (), {"emit": staticmethod(log.append)})()
        net.t.set_read_deadline(net.after(1.0))
        net.pass_s(1.1)
        (event,) = [one for one in log if isinstance(one, ev.TransportClosed)]
        assert (event.reason, event.by) == ("deadline", "local")


@both
@sync
async def test_deadlines_of_a_transport_that_is_over(security: Security) -> None:
    """They neither fail nor leave anything behind."""
    async with Net(security) as net:
        net.t.set_deadline(net.after(50.0))
        net.t.loseConnection()
        await net.wait(net.a.when_lost())
        await net.settle()
        before = len(net.reactor.getDelayedCalls())
        net.t.set_deadline(net.after(1.0))
        assert len(net.reactor.getDelayedCalls()) <= before
        net.pass_s(100.0)
        assert len(net.a.lost) == 1
        assert net.a.lost[0].check(ConnectionDone)


@sync
async def test_deadlines_end_with_the_transport_even_if_the_peer_keeps_its_half_open() -> None:
    async with Net() as net:
        directlyProvides(net.b, IHalfCloseableProtocol)
        net.b.readConnectionLost = lambda: None  # type: ignore[attr-defined]
        net.t.set_deadline(net.after(20.0))
        net.t.loseConnection()
        net.pass_s(1.0)
        assert net.a.lost[0].type is ConnectionDone
        net.pass_s(20.0)
        assert not net.b.lost
        net.pass_s(2 * LINGER_S)
        assert net.b.lost
