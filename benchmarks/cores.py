"""Two relays of one host, each with a core and a key of its own, compared with one relay.

The load runs on the same two cores, so two relays at once do not have a core each, and their rate says nothing about
clients elsewhere. The bench measures the CPU time of a relay for a megabyte, alone and beside an equally busy relay. As far
as the processor is concerned, two relays carry 2 × (time alone) / (time beside the other) times as much as one. Senders
keep a pace that leaves each core idle for a good part of the time: a lagging relay reads more at a time, which is cheaper,
so two lagging relays would look better than one that keeps up.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from benchmarks.processes import Cast, Child
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes

NAME: Final = "cores"
_SIZE: Final = 16_384
_TIMES_TARGET: Final = 1.7
_BYTES_PER_S: Final = 60e6
_LIMIT_S: Final = 120.0
#: Senders here ignore windows, so the relay queues data that a receiver does not take in time.
_LIMITS: Final = dict.fromkeys(
    ("queue_soft_bytes", "queue_hard_bytes", "queued_per_connection_bytes", "queued_total_bytes"), 1 << 30
)


class _Relay(NamedTuple):
    """A relay, and the sender and receiver that use it."""

    server: Child
    sender: Child
    receiver: Child


def run(sizes: Sizes) -> list[Row]:
    """Rows of one relay, and of two; none on a machine with one core."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise RuntimeError("there is one core only")
    count = sizes.transfer_bytes // _SIZE
    alone: list[float] = []
    beside: list[float] = []
    with Cast() as cast:
        relays = [_start(cast, core) for core in cores]
        for _ in range(sizes.repeats):
            alone.append(sum(_cost_ms([relay], count) for relay in relays) / len(relays))
            beside.append(_cost_ms(relays, count))
    times = [2 * one / two for one, two in zip(alone, beside, strict=True)]
    name = f"{_SIZE} B at {_BYTES_PER_S / 1e6:g} MB/s"
    return [
        row(NAME, f"{name}, one relay", alone, "ms CPU/MB"),
        row(NAME, f"{name}, two relays at once, each", beside, "ms CPU/MB"),
        row(NAME, f"{name}, what two carry, times one, by CPU", times, "x", at_least=_TIMES_TARGET),
    ]


def _start(cast: Cast, core: int) -> _Relay:
    server = cast.start("server", [core], limits=_LIMITS)
    receiver = cast.start("raw_receiver", server=server.facts)
    sender = cast.start("raw_sender", server=server.facts)
    receiver.send("accept")
    sender.ask("dial", target=receiver.facts["key"])
    receiver.answer()
    return _Relay(server, sender, receiver)


def _cost_ms(relays: list[_Relay], count: int) -> float:
    """CPU milliseconds of a relay for a MB: the mean of ``relays``, which carry equal loads at the same time."""
    total = count * _SIZE
    for relay in relays:
        relay.sender.ask("prepare", size=_SIZE, count=count)
        relay.receiver.send("drain", least_bytes=total, limit_s=_LIMIT_S)
    before = [relay.server.cpu_s() for relay in relays]
    for relay in relays:
        relay.sender.send("send", bytes_per_s=_BYTES_PER_S)
    for relay in relays:
        relay.receiver.answer(_LIMIT_S)
    spent = [relay.server.cpu_s() - start for relay, start in zip(relays, before, strict=True)]
    for relay in relays:
        relay.sender.answer(_LIMIT_S)
    return sum(spent) / len(spent) / total * 1e9
