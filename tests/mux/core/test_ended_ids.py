"""What a relay holds of transports that ended, so that frames that come late are no offence."""

from __future__ import annotations

import tracemalloc

from dmsg.mux.core.wire import CLOSE, FWD, REQUEST, encode_frame
from dmsg.sansio.rate import RecentIds


def end_all(stranger, other, ids):
    """Open a transport with each of ``ids``, and close it; 100 in one read."""
    request = stranger.key.raw + other.key.raw
    for at in range(0, len(ids), 100):
        frames = [
            encode_frame(REQUEST, each, request) + encode_frame(CLOSE, each, b"\0") for each in ids[at : at + 100]
        ]
        stranger.relay.now += 1.0
        stranger.member.receive_data(b"".join(frames), stranger.relay.now)
        for member in (stranger, other):
            member.read()
            member.requests.clear()
            member.closed.clear()


def test_keys_that_open_and_close_transports_do_not_fill_a_relay(relay):
    """10,000 connections whose transports ended, with ids chosen to take most memory: less than may be queued in all."""
    net = relay(
        requests_per_s=1e6,
        request_burst=1e6,
        pair_requests_per_s=1e6,
        pair_request_burst=1e6,
        stranger_requests_per_s=1e6,
    )
    stranger, other = net.join("stranger"), net.join("other")
    ids = [step * 16 + first for first in (0, 2) for step in range(RecentIds.CAPACITY)]
    end_all(stranger, other, ids[:100])
    tracemalloc.start()
    try:
        end_all(stranger, other, ids[100 : RecentIds.CAPACITY + 100])
        held_bytes = tracemalloc.get_traced_memory()[0]  # of both ends
    finally:
        tracemalloc.stop()
    assert held_bytes / 2 * net.limits.connections < net.limits.queued_total_bytes
    for _ in range(10):
        for late in ids[100 : RecentIds.CAPACITY + 100]:
            stranger.say(FWD, late, b"\0\0late")
    stranger.read()
    assert not stranger.closed, "what comes late is no offence, and is not answered"


def test_a_client_whose_transports_end_in_order_takes_little(relay):
    net = relay()
    here, there = net.join("here"), net.join("there")
    end_all(here, there, range(0, 100, 2))
    tracemalloc.start()
    try:
        end_all(here, there, range(100, 200, 2))
        assert tracemalloc.get_traced_memory()[0] < 10_000
    finally:
        tracemalloc.stop()
