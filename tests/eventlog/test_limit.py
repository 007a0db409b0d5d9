"""Strangers cannot push everything else out of the event log, and what was left out is counted to the last one."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import zstandard
from twisted.internet.task import Clock

from dmsg.eventlog import schema as ev
from dmsg.eventlog.encode import Encoder
from dmsg.eventlog.files import LIMIT_BYTES
from dmsg.eventlog.limit import REASONS_LIMIT, TOLD_EVERY_S, LimitedEventLog, LineRate
from dmsg.eventlog.reasons import Reason
from dmsg.ops.metrics import CollectorRegistry, MetricsEventLog
from tests.memory_log import MemoryEventLog

TEN_HOURS_S = 36_000


def failed(reason: str = "timeout", address: str = "192.0.2.1", elapsed_ms: float = 5.0) -> ev.HandshakeFailed:
    return ev.HandshakeFailed(address, "handshake", reason, elapsed_ms)


def flood(log: Any, clock: Clock, seconds: int, dice: random.Random) -> Counter[str]:
    """What strangers with many addresses and keys do for some seconds; how often each thing."""
    done: Counter[str] = Counter()
    for _ in range(seconds):
        for reason in ("timeout", "malformed", "closed by peer", "half_open"):
            for _ in range(25):
                log.emit(failed(reason, f"2001:db8:{dice.randrange(65536):x}::1", dice.random() * 1000))
                done["handshake_failed"] += 1
        for reason in ("rate_limited", "half_open_per_address"):
            for _ in range(10):
                times = dice.randrange(1, 100)
                log.emit(ev.Refused(dice.randrange(10**6), "02" + dice.randbytes(32).hex(), "request", reason, times))
                done["refused"] += times
        for status, reason in ((200, ""), (404, "entry of public key is not found"), (429, "too many requests")):
            for _ in range(25):
                key = "02" + dice.randbytes(32).hex()
                log.emit(ev.DiscoveryRequest("GET", "discovery/entries", status, dice.random(), reason, key))
                done["discovery_request"] += 1
        clock.advance(1)
    return done


def test_ten_hours_of_strangers_take_a_part_of_the_log(clock: Clock) -> None:
    """A minute is written as it would be; ten hours are that, without what may be written at once, 600 times."""
    inner = MemoryEventLog()
    log = LimitedEventLog(inner, clock)
    dice = random.Random(1)
    flood(log, clock, 120, dice)
    inner.events.clear()
    flood(log, clock, 60, dice)
    encoder = Encoder("server", "0" * 16, "0" * 16)
    lines = b"".join(encoder.encode(event, 1.6e9 + at / 40) for at, event in enumerate(inner.events))
    packed = len(zstandard.compress(lines))
    assert packed * TEN_HOURS_S / 60 < LIMIT_BYTES / 4, packed
    log.tell()


def test_counts_stay_exact(clock: Clock) -> None:
    inner, registry = MemoryEventLog(), CollectorRegistry()
    limited = LimitedEventLog(inner, clock)
    log = MetricsEventLog(limited, registry)
    done = flood(log, clock, 60, random.Random(2))
    limited.tell()
    written: Counter[str] = Counter()
    for event in inner.events:
        written[event.NAME] += event.count
    assert written == done
    assert len(inner.events) < sum(done.values()) / 4

    def metric(name: str, **labels: str) -> float:
        return registry.get_sample_value(name, labels) or 0.0

    assert metric("dmsg_handshakes_failed_total", stage="handshake", reason="timeout") == done["handshake_failed"] / 4
    assert metric("dmsg_discovery_requests_total", method="GET", path="discovery/entries", status="404") == (
        done["discovery_request"] / 3
    )
    refusals = [
        metric("dmsg_refusals_total", what="request", reason=one) for one in ("rate_limited", "half_open_per_address")
    ]
    assert sum(refusals) == done["refused"]


def twins_flood(log: Any, clock: Clock, seconds: int, dice: random.Random) -> Counter[str]:
    """What twins and other relays do to a relay for some seconds; how often each thing."""
    done: Counter[str] = Counter()
    for _ in range(seconds):
        for _ in range(20):
            times = dice.randrange(1, 100)
            reason = dice.choice(["destination offline", "unknown twin destination", "message wrong source"])
            log.emit(ev.EnvelopeFailed(dice.randrange(2**32), Reason.of(reason), times))
            log.emit(ev.RateLimited(dice.randrange(2**32), times))
            done["envelope_failed"] += times
            done["rate_limited"] += times
        for _ in range(50):
            relay = f"r{dice.randrange(1000)}.example"
            log.emit(ev.FederationAttempted(relay, False, Reason.TIMEOUT, dice.random() * 3000))
            log.emit(ev.FederationAttempted(relay, True, Reason.NONE, dice.random() * 30))
            log.emit(ev.CallFinished(dice.randrange(2**32), True, Reason.NONE, dice.random()))
            done["federation_attempted"] += 2
            done["call_finished"] += 1
        clock.advance(1)
    return done


def test_twins_and_other_relays_cannot_fill_the_log_either(clock: Clock) -> None:
    inner = MemoryEventLog()
    log = LimitedEventLog(inner, clock)
    dice = random.Random(3)
    written: Counter[str] = Counter()
    done = twins_flood(log, clock, 180, dice)
    log.tell()
    for event in inner.events:
        written[event.NAME] += event.count
    assert written == done
    inner.events.clear()
    twins_flood(log, clock, 60, dice)
    encoder = Encoder("server", "r1.example", "0" * 16)
    lines = b"".join(encoder.encode(event, 1.6e9 + at / 40) for at, event in enumerate(inner.events))
    assert len(zstandard.compress(lines)) * TEN_HOURS_S / 60 < LIMIT_BYTES / 2
    log.tell()


def test_relays_beyond_those_told_apart_share_a_line_for_each_end(clock: Clock) -> None:
    inner = MemoryEventLog()
    log = LimitedEventLog(inner, clock, LineRate(reason_per_s=0.0, reason_burst=0.5, all_per_s=0.0, all_burst=0.5))
    for number in range(REASONS_LIMIT):
        log.emit(ev.FederationAttempted(f"r{number}.example", True, Reason.NONE, 1.0))
    for number in range(50):
        log.emit(ev.FederationAttempted(f"s{number}.example", True, Reason.NONE, 2.0))
        log.emit(ev.FederationAttempted(f"s{number}.example", False, Reason.TIMEOUT, 4.0))
    log.tell()
    assert list(inner.events)[REASONS_LIMIT:] == [
        ev.FederationAttempted("", True, Reason.NONE, 2.0, 50),
        ev.FederationAttempted("", False, Reason.OTHER, 4.0, 50),
    ]


def test_what_is_left_out_is_told_without_addresses_by_reason(clock: Clock) -> None:
    inner = MemoryEventLog()
    log = LimitedEventLog(inner, clock, LineRate(reason_per_s=0.0, reason_burst=1, all_per_s=0.0, all_burst=10))
    for reason in ("timeout", "malformed"):
        for elapsed_ms in (1.0, 2.0, 4.0):
            log.emit(failed(reason, elapsed_ms=elapsed_ms))
    assert [(event.reason, event.count) for event in inner.events] == [("timeout", 1), ("malformed", 1)]
    clock.advance(TOLD_EVERY_S)
    assert list(inner.events)[2:] == [
        ev.HandshakeFailed("", "handshake", "timeout", 3.0, 2),
        ev.HandshakeFailed("", "handshake", "malformed", 3.0, 2),
    ]
    clock.advance(TOLD_EVERY_S)
    assert len(inner.events) == 4
    assert clock.getDelayedCalls() == []


def test_one_reason_leaves_lines_to_the_others(clock: Clock) -> None:
    inner = MemoryEventLog()
    log = LimitedEventLog(inner, clock)
    for _ in range(10_000):
        log.emit(failed("timeout"))
    log.emit(failed("malformed", "192.0.2.9"))
    assert inner.events[-1].address == "192.0.2.9"
    log.tell()
    assert clock.getDelayedCalls() == []


def test_reasons_without_end_share_a_line(clock: Clock) -> None:
    inner = MemoryEventLog()
    log = LimitedEventLog(inner, clock, LineRate(reason_per_s=0.0, reason_burst=1, all_per_s=0.0, all_burst=1))
    for number in range(REASONS_LIMIT + 100):
        log.emit(failed(str(number)))
    log.tell()
    assert len(inner.events) == 1 + REASONS_LIMIT + 1
    assert (inner.events[-1].reason, inner.events[-1].count) == (Reason.OTHER, 99)
    assert sum(event.count for event in inner.events) == REASONS_LIMIT + 100


@pytest.mark.parametrize("event", [ev.ServerStarted("k", "a", "1"), ev.Drained(1.0, 2), ev.EventsDropped(3)])
def test_everything_else_is_written(clock: Clock, event: ev.Event) -> None:
    inner = MemoryEventLog()
    log = LimitedEventLog(inner, clock)
    for _ in range(5_000):
        log.emit(event)
    assert len(inner.events) == 5_000
    assert (log.dropped, log.discarded) == (0, 0)
