"""Links: what is written arrives exactly when the delay and the rate say, and no more waits than the buffer holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet import error
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.task import Clock

from dmsg.testing.link import Link
from dmsg.testing.memory import MemoryNetwork, Path
from dmsg.testing.pipe import Pipe
from dmsg.testing.probes import ConformanceProtocol, OneProtocolFactory, PushProducer, pattern

#: A piece of such a link is 1,448 bytes and takes 1.448 ms.
SLOW_BITS_PER_S = 8_000_000


class Timed(ConformanceProtocol):
    """Remembers when how many bytes came."""

    def __init__(self, clock):
        super().__init__()
        self.times = []
        self.on_data = lambda data: self.times.append((clock.seconds(), len(data)))


def advance(clock, amount_s):
    """Stop at each call that is due, so that each sees the time it was due at."""
    MemoryNetwork(clock).advance(amount_s)


def connected(clock, link, **options):
    a, b = Timed(clock), Timed(clock)
    return Pipe(clock, link=link, **options).connect(a, b), a, b


def test_a_byte_arrives_after_the_delay_each_way(clock):
    _, a, b = connected(clock, Link(clock, delay_s=0.025, bits_per_s=8_000))
    b.on_data = b.transport.write
    a.transport.write(b"x")
    advance(clock, 1.0)
    [(at, size)] = a.times
    assert (at, size) == (pytest.approx(2 * (0.025 + 0.001)), 1)


def test_pieces_arrive_at_the_rate(clock):
    _, a, b = connected(clock, Link(clock, delay_s=0.5, bits_per_s=SLOW_BITS_PER_S))
    a.transport.write(pattern(10_000))
    advance(clock, 2.0)
    assert b.received == pattern(10_000)
    assert [size for _, size in b.times] == [1448] * 6 + [1312]
    assert [at for at, _ in b.times] == pytest.approx([0.5 + 1448e-6 * n for n in range(1, 7)] + [0.51])


def test_connections_share_the_rate_of_a_link_and_each_direction_has_its_own(clock):
    link = Link(clock, bits_per_s=SLOW_BITS_PER_S)
    pairs = [connected(clock, link)[1:] for _ in range(2)]
    for a, b in pairs:
        a.transport.write(bytes(50_000))
        b.transport.write(bytes(50_000))
    advance(clock, 1.0)
    for one, other in zip(*pairs, strict=True):
        ends = [one.times[-1][0], other.times[-1][0]]
        assert max(ends) == pytest.approx(0.1)
        assert min(ends) >= 0.0499
    assert link.out.carried_bytes == link.back.carried_bytes == 100_000


def test_a_full_link_takes_no_more_and_pauses_the_producer(clock):
    link = Link(clock, delay_s=0.1, bits_per_s=SLOW_BITS_PER_S, buffer_bytes=20_000)
    _, a, b = connected(clock, link)
    producer = PushProducer(a.transport, clock, 500_000)
    producer.start()
    advance(clock, 0.0)
    assert producer.pauses == 1
    assert link.out.carried_bytes == 20_000
    advance(clock, 0.3)
    assert len(b.received) == pytest.approx(200_000, abs=1448)
    advance(clock, 1.0)
    assert b.received == pattern(500_000)
    assert b.times[-1][0] == pytest.approx(0.6)
    assert link.out.waiting_peak_bytes == pytest.approx(20_000)
    assert link.out.full_s == pytest.approx(0.48, abs=0.005)
    assert link.back.full_s == 0.0


def test_one_who_does_not_read_stops_only_his_own_connection(clock):
    link = Link(clock, delay_s=0.1, bits_per_s=SLOW_BITS_PER_S, buffer_bytes=20_000)
    (_, a, b), (_, other_a, other_b) = connected(clock, link), connected(clock, link)
    b.transport.pauseProducing()
    a.transport.write(bytes(1_000_000))
    advance(clock, 2.0)
    assert b.received == b""
    assert link.out.carried_bytes == link.out.window_bytes == 120_000
    other_a.transport.write(bytes(100_000))
    advance(clock, 0.2001)
    assert len(other_b.received) == 100_000
    b.transport.resumeProducing()
    advance(clock, 2.0)
    assert len(b.received) == 1_000_000


def test_the_end_comes_behind_the_data(clock):
    _, a, b = connected(clock, Link(clock, delay_s=0.5, bits_per_s=SLOW_BITS_PER_S))
    a.transport.write(bytes(100_000))
    a.transport.loseConnection()
    advance(clock, 0.599)
    assert not b.lost
    advance(clock, 0.002)
    assert len(b.received) == 100_000
    assert b.lost[0].check(error.ConnectionDone)


def test_a_reset_takes_the_delay(clock):
    _, a, b = connected(clock, Link(clock, delay_s=0.5))
    a.transport.abortConnection()
    advance(clock, 0.4)
    assert not b.lost
    advance(clock, 0.1)
    assert b.lost[0].check(error.ConnectionLost)


def test_cuts_come_when_they_are_due_and_lose_what_is_under_way(clock):
    link = Link(clock, delay_s=0.1, bits_per_s=SLOW_BITS_PER_S)
    link.cut_at(0.15, 0.4)
    pairs = [connected(clock, link)[1:] for _ in range(2)]
    pairs[0][0].transport.write(bytes(200_000))
    advance(clock, 0.1499)
    assert not [end.lost for pair in pairs for end in pair if end.lost]
    advance(clock, 0.0001)
    for end in (end for pair in pairs for end in pair):
        assert end.lost[0].check(error.ConnectionLost)
    assert len(pairs[0][1].received) == pytest.approx(50_000, abs=1448)
    assert link.pipes == []
    _, a, b = connected(clock, link)
    a.transport.write(b"again")
    advance(clock, 0.1 + 5e-6)
    assert b.received == b"again"
    advance(clock, 0.2)
    assert a.lost
    assert b.lost


def test_loss_and_other_delays_are_added_to_those_of_the_link(clock):
    made, a, b = connected(clock, Link(clock, delay_s=0.1), delay_s=0.2)
    a.transport.write(b"x")
    advance(clock, 0.3001)
    assert [at for at, _ in b.times] == pytest.approx([0.3])
    made.loss = 1.0
    a.transport.write(b"y")
    advance(clock, 0.31)
    assert b.received == b"x"
    advance(clock, 60.0)
    assert b.received == b"xy"


@given(
    st.lists(st.tuples(st.integers(1, 60_000), st.floats(0, 0.1)), max_size=20),
    st.sampled_from([1e6, 1e8, 1e10]),
    st.sampled_from([(0.0, 1e-10), (1_790_000_000.0, 1e-5)]),  # times of today are exact to 2.4e-7 s, for each piece
)
def test_no_more_waits_than_the_buffer_holds_and_everything_arrives_in_time(writes, rate, start):
    clock = Clock()
    began, inexact_s = start
    clock.advance(began)
    link = Link(clock, delay_s=0.01, bits_per_s=rate, buffer_bytes=30_000)
    _, a, b = connected(clock, link)
    total = 0
    for size, pause_s in writes:
        a.transport.write(pattern(size, total))
        total += size
        advance(clock, pause_s)
    advance(clock, total * 8 / rate + 0.02)
    assert b.received == pattern(total)
    assert link.out.waiting_peak_bytes <= 30_000 + inexact_s * rate / 8
    if writes:
        assert b.times[-1][0] - began >= total * 8 / rate + 0.01 - inexact_s


def test_a_buffer_has_to_hold_a_piece(clock):
    with pytest.raises(ValueError, match="1448"):
        Link(clock, bits_per_s=1e6, buffer_bytes=1447)


@pytest.mark.parametrize("network_delay_s", [0.0, 0.05])
def test_a_program_behind_a_link_connects_in_a_round_trip_and_others_are_not_behind_it(network_delay_s):
    network = MemoryNetwork()
    link = Link(network.clock, delay_s=0.1)
    network.set_path("127.0.0.1", 80, Path(network_delay_s))
    server, near = ConformanceProtocol(), ConformanceProtocol()
    TCP4ServerEndpoint(network, 80).listen(OneProtocolFactory(server))
    TCP4ClientEndpoint(network.through(link), "127.0.0.1", 80).connect(OneProtocolFactory(near))
    network.advance(0.2 + network_delay_s - 0.001)
    assert not near.made
    network.advance(0.001)
    assert near.made == server.made == 1
    assert link.pipes == network.pipes
    direct = ConformanceProtocol()
    TCP4ClientEndpoint(network, "127.0.0.1", 80).connect(OneProtocolFactory(direct))
    network.advance(network_delay_s)
    assert direct.made
    assert len(network.pipes) == 2
    assert len(link.pipes) == 1
    ports = [pipe.a.getHost().port for pipe in network.pipes]
    assert len(set(ports)) == 2
