"""Sealed transports over distance, in virtual time: they fill the path, and leave short messages their round trip.

:ref:`flow-path-window`. Everything but the links and the clock is real (:mod:`dmsg.testing.distance`).
"""

from __future__ import annotations

import pytest

from dmsg.testing.distance import simulate

MBIT = 1e6
MIB = 1 << 20
SECONDS = 4


@pytest.mark.parametrize("transports", [1, 8])
@pytest.mark.parametrize("mbit_per_s", [10, 100])
@pytest.mark.parametrize("round_trip_ms", [10, 50, 100, 200])
def test_a_path_is_filled_and_a_message_beside_it_is_hardly_late(round_trip_ms, mbit_per_s, transports):
    figures = simulate(
        delay_s=round_trip_ms / 4000,
        bits_per_s=mbit_per_s * MBIT,
        total_bytes=int(mbit_per_s * MBIT / 8 * (SECONDS if round_trip_ms > 10 else SECONDS / 2)),
        transports=transports,
        pings=1,
    )
    assert figures.bytes_per_s >= 0.8 * mbit_per_s * MBIT / 8
    assert figures.ping_s(0.5) <= 1.5 * round_trip_ms / 1000
    assert figures.relay_queue_peak_bytes <= MIB


def test_a_fast_path_is_filled():
    figures = simulate(delay_s=0.0125, bits_per_s=1000 * MBIT, total_bytes=125_000_000, pings=1)
    assert figures.bytes_per_s >= 0.8 * 125e6
    assert figures.ping_s(0.5) <= 1.5 * 0.05


@pytest.mark.parametrize("mbit_per_s", [(1000, 100), (100, 10), (100, 1)])
def test_little_waits_at_a_relay_whose_other_side_is_slower(mbit_per_s):
    near, far = mbit_per_s
    figures = simulate(
        delay_s=0.025,
        bits_per_s=near * MBIT,
        far={"bits_per_s": far * MBIT},
        total_bytes=int(far * MBIT / 8 * SECONDS),
        pings=1,
    )
    assert figures.bytes_per_s >= 0.7 * far * MBIT / 8
    assert figures.ping_s(0.5) <= 0.15 or far == 1
    assert figures.relay_queue_peak_bytes <= 2 * MIB
