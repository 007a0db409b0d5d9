"""Refusals are counted, and written once a second for each who is refused and why."""

from __future__ import annotations

from twisted.internet.task import Clock

from dmsg.eventlog import schema as ev
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.refusals import RefusalReport, TwinReport
from tests.memory_log import MemoryEventLog


def test_refusals_of_a_second_are_one_line_for_each_client_and_reason(clock: Clock) -> None:
    log = MemoryEventLog()
    report = RefusalReport(clock, log.emit)
    for _ in range(3):
        report.add(1, "02ab", "request", "busy")
    report.add(1, "02ab", "request", "half_open")
    report.add(2, "02cd", "request", "the moon is full")
    assert list(log.events) == []
    clock.advance(1)
    assert list(log.events) == [
        ev.Refused(1, "02ab", "request", Reason.BUSY, 3),
        ev.Refused(1, "02ab", "request", Reason.HALF_OPEN, 1),
        ev.Refused(2, "02cd", "request", Reason.OTHER, 1),
    ]
    assert clock.getDelayedCalls() == []


def test_envelopes_of_a_second_are_one_line_for_each_twin_and_reason(clock: Clock) -> None:
    log = MemoryEventLog()
    report = TwinReport(clock, log.emit)
    for _ in range(2):
        report.failed(7, "destination offline")
        report.rate_limited(7)
    report.failed(8, "message wrong source")
    report.close()
    assert list(log.events) == [
        ev.EnvelopeFailed(7, Reason.DESTINATION_OFFLINE, 2),
        ev.RateLimited(7, 2),
        ev.EnvelopeFailed(8, Reason.WRONG_SOURCE, 1),
    ]
    assert clock.getDelayedCalls() == []


def test_a_crowd_of_twins_shares_a_line(clock: Clock) -> None:
    log = MemoryEventLog()
    report = TwinReport(clock, log.emit)
    for twin in range(10_000):
        report.rate_limited(twin + 1)
    clock.advance(1)
    assert len(log.events) < 5_000
    assert log.of(ev.RateLimited)[-1].twin == 0
    assert sum(event.count for event in log.of(ev.RateLimited)) == 10_000
