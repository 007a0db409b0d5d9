"""The in-memory pipe behaves like TCP: it passes the kit on the real reactor and on a fake clock, however it is cut."""

from __future__ import annotations

from typing import ClassVar

import pytest
from twisted.internet.endpoints import HostnameEndpoint, TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.python.failure import Failure

from dmsg.testing.conformance import TransportConformance
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.pipe import Pipe, PipeEnd

MIB = 1024 * 1024


class _Flushing(TransportConformance):
    # the buffer of the pipe and of the sender, and the write that crossed the mark
    in_flight_limit_bytes = 256 * 1024

    @pytest.fixture(autouse=True)
    def _flush(self, logged_errors):
        self.flush_logged_errors = logged_errors.flush


class TestPipeOnTheRealReactor(_Flushing):
    refuses_connections = False

    async def make_pair(self, client, server):
        Pipe(self.reactor).connect(client, server)
        return client, server


class TestMemoryNetwork(_Flushing):
    """On a fake clock: a wait moves it on until the Deferred fires."""

    options: ClassVar[dict] = {}

    @pytest.fixture(autouse=True)
    def _network(self):
        self.network = MemoryNetwork(hosts={"relay.test": "10.0.0.1"}, **self.options)

    @property
    def reactor(self):
        return self.network

    async def wait(self, deferred):
        while not deferred.called or deferred.paused:
            due = min((call.getTime() for call in self.network.getDelayedCalls()), default=None)
            assert due is not None, "nothing is left that could happen"
            assert due < 3600.0, "it took an hour"
            self.network.advance(max(0.0, due - self.network.seconds()))
        return await deferred

    async def settle(self):
        self.network.advance(1.0)

    def make_endpoints(self):
        server = TCP4ServerEndpoint(self.network, 0)
        return server, lambda port: TCP4ClientEndpoint(self.network, "10.0.0.1", port.getHost().port)


class TestMemoryNetworkByName(TestMemoryNetwork):
    big_bytes = MIB
    options: ClassVar[dict] = {"delay_s": 0.02, "chunking": "random"}

    def make_endpoints(self):
        server = TCP4ServerEndpoint(self.network, 0, interface="10.0.0.1")
        return server, lambda port: HostnameEndpoint(self.network, "relay.test", port.getHost().port)


class TestMemoryNetworkByteAtATime(TestMemoryNetwork):
    big_bytes = stream_bytes = 100_000
    in_flight_limit_bytes = 32 * 1024
    options: ClassVar[dict] = {"chunking": "bytes", "high_water_bytes": 3000}


class _OnTheFakeClock(TestMemoryNetwork):
    """A pair whose pipe has been spoilt by ``defect`` before it is used."""

    __test__ = False
    stream_bytes = big_bytes = 200_000

    def __init__(self, defect):
        self.network = MemoryNetwork()
        self.defect = defect

    async def make_pair(self, client, server):
        made = Pipe(self.network.clock)
        self.defect(made)
        made.connect(client, server)
        return client, server


def _nothing(*args):
    pass


def _tells_again(end):
    # the protocol is not there yet
    def tell(reason):
        end.protocol.connectionLost(reason)

    return tell


def _each_end(**changes):
    def spoil(made):
        for end in (made.a, made.b):
            for name, value in changes.items():
                setattr(end, name, value(end))

    return spoil


def _without_last_byte(end):
    def write(data):
        sent = PipeEnd.writeSomeData(end, data[:-1])
        return sent + 1 if sent == len(data) - 1 else sent

    return write


def _doubled(end):
    def write(data):
        PipeEnd.writeSomeData(end, data[:1])
        return PipeEnd.writeSomeData(end, data)

    return write


DEFECTS = {
    "a byte is lost": (_each_end(writeSomeData=_without_last_byte), ["big_write", "bytes_arrive_in_order"]),
    "bytes are doubled": (_each_end(writeSomeData=_doubled), ["bytes_arrive_in_order"]),
    "closing does not flush": (
        _each_end(loseConnection=lambda end: end.abortConnection),
        ["lose_connection_flushes", "server_closes", "stop_producing_closes"],
    ),
    "closing does nothing": (_each_end(loseConnection=lambda end: _nothing), ["server_closes"]),
    "the end is told twice": (
        _each_end(on_lost=_tells_again),
        ["server_closes", "abort", "closing_again_is_silent"],
    ),
    "pausing does nothing": (
        _each_end(pauseProducing=lambda end: _nothing),
        ["pause_and_resume", "pause_in_data_received", "data_and_close_while_paused", "backpressure"],
    ),
    "resuming does nothing": (_each_end(resumeProducing=lambda end: _nothing), ["pause_and_resume", "backpressure"]),
    "producers are never paused": (_each_end(bufferSize=lambda end: 1 << 40), ["backpressure"]),
    "abort looks like a clean end": (
        _each_end(abortConnection=lambda end: end.loseConnection),
        ["abort", "abort_in_data_received"],
    ),
    "producers are not taken": (
        _each_end(registerProducer=lambda end: _nothing),
        ["pull_producer", "second_producer_is_refused", "producer_of_a_lost_transport_is_stopped"],
    ),
    "no address": (_each_end(getPeer=lambda end: _nothing), ["interfaces"]),
}


@pytest.mark.parametrize(
    ("defect", "case"),
    [
        pytest.param(spoil, f"test_{case}", id=f"{name}-{case}")
        for name, (spoil, cases) in DEFECTS.items()
        for case in cases
    ],
)
def test_the_kit_finds_defects(defect, case):
    outcome = []
    kit = _OnTheFakeClock(defect)
    getattr(kit, case)().addBoth(outcome.append)
    kit.network.advance(100.0)
    assert len(outcome) == 1, "a case comes to an end with every transport"
    assert isinstance(outcome[0], Failure), "the kit let this pass"


def test_the_kit_finds_no_defects_where_there_are_none():
    for case in sorted({case for _, cases in DEFECTS.values() for case in cases}):
        outcome = []
        getattr(_OnTheFakeClock(_nothing), f"test_{case}")().addBoth(outcome.append)
        assert outcome == [None], case
