"""What is simulated far away takes the time that distance and rate ask for, and the same every time."""

from __future__ import annotations

import pytest
from twisted.internet.protocol import Protocol

from dmsg.mux.core.e2e_negotiation import Security
from dmsg.testing.distance import simulate

MBIT = 1e6
#: 100 ms from client to client.
QUARTER_S = 0.025


def test_all_bytes_are_sent_also_if_they_cannot_be_divided():
    assert simulate(total_bytes=10, transports=3).acked_bytes == 10


@pytest.mark.parametrize("security", [Security.HOP, Security.E2E])
def test_pings_alone_take_the_round_trip_of_the_path(security):
    figures = simulate(delay_s=QUARTER_S, bits_per_s=100 * MBIT, pings=20, security=security)
    assert len(figures.round_trips_s) == 20
    assert figures.ping_s(0.0) >= 0.1
    assert figures.ping_s(0.99) <= 0.101
    assert figures.dial_s == pytest.approx(0.1, abs=0.002)
    assert figures.bytes_per_s == figures.acked_bytes == 0


def test_a_sealed_transfer_far_away_is_as_fast_as_its_window_and_the_path_allow():
    figures = simulate(delay_s=QUARTER_S, bits_per_s=100 * MBIT, total_bytes=6_000_000, pings=1)
    assert figures.acked_bytes == 6_000_000
    assert 6e6 <= figures.bytes_per_s <= 12.5e6
    assert figures.ping_s(0.0) >= 0.1
    assert figures.ping_s(0.5) <= 0.15
    assert figures.ping_s(0.99) <= 0.2
    assert figures.near.out.carried_bytes > 6_000_000


def test_what_a_narrow_link_behind_the_relay_cannot_take_waits_there():
    narrow = {"bits_per_s": 10 * MBIT, "buffer_bytes": 32 * 1024}
    figures = simulate(bits_per_s=100 * MBIT, far=narrow, total_bytes=2_000_000, security=Security.HOP, delay_s=0.005)
    assert 0.9 * 1.25e6 <= figures.bytes_per_s <= 1.25e6
    assert figures.relay_queue_peak_bytes > 100_000
    assert figures.far.back.full_s > 0.5 * figures.elapsed_s


def test_several_transports_share_the_path():
    figures = simulate(delay_s=QUARTER_S, bits_per_s=50 * MBIT, total_bytes=4_000_000, transports=4)
    assert figures.acked_bytes == 4_000_000
    assert 0.7 * 6.25e6 <= figures.bytes_per_s <= 6.25e6


def test_a_sealed_transfer_outlives_cuts():
    whole = simulate(delay_s=0.005, bits_per_s=20 * MBIT, total_bytes=2_000_000)
    cut = simulate(delay_s=0.005, bits_per_s=20 * MBIT, total_bytes=2_000_000, cuts_s=(0.2, 0.5))
    assert cut.acked_bytes == 2_000_000
    assert whole.elapsed_s < cut.elapsed_s < whole.elapsed_s + 10


def test_the_same_arguments_give_the_same_figures():
    def run(seed):
        found = simulate(delay_s=0.01, bits_per_s=10 * MBIT, total_bytes=500_000, pings=1, seed=seed)
        return found.elapsed_s, found.round_trips_s, found.near.out.carried_bytes, found.relay_queue_peak_bytes

    assert run(1) == run(1)


def test_what_goes_wrong_is_raised():
    class Deaf(Protocol):
        def connectionMade(self):
            self.transport.pauseProducing()

    with pytest.raises(AssertionError, match="more than"):
        simulate(total_bytes=20_000_000, reader=Deaf)
