"""What the event log of a relay says of its transports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from twisted.internet.task import Clock

from dmsg.crypto.keys import SecretKey
from dmsg.eventlog.schema import TransportClosed
from dmsg.serving.events import TransportEnded
from dmsg.serving.record import RelayRecord
from dmsg.serving.shell import RelayShell
from tests.memory_log import MemoryEventLog

ASKING, ASKED, RELAY = (SecretKey(bytes((n,)) * 32).public_key for n in (1, 2, 3))


class Shell(RelayShell):
    """A connection that is only named."""

    def __init__(self, number: int) -> None:
        self.number = number


def leg(remote: Any, bytes_: int, peak: int) -> Any:
    member = SimpleNamespace(remote=remote, owner=Shell(7))
    return SimpleNamespace(member=member, id=5, bytes=bytes_, queue_peak_bytes=peak, opened_at=100.0)


@pytest.mark.parametrize("peaks", [(30, 4), (4, 30)])
def test_a_transport_that_is_over_has_what_each_end_sent_and_the_longer_of_its_queues(
    clock: Clock, peaks: tuple[int, int]
) -> None:
    log = MemoryEventLog()
    record = RelayRecord(clock, log, RELAY, "dmsg", lambda code: "normal")
    asking, asked = leg(ASKING, 111, peaks[0]), leg(ASKED, 222, peaks[1])
    asking.other, asked.other = asked, asking
    clock.advance(102.5)
    record.ended(TransportEnded(cast(Any, asking), 0, "initiator", True))
    (event,) = log.of(TransportClosed)
    assert (event.queue_peak_bytes, event.duration_s) == (30, 2.5)
    assert (event.initiator, event.responder) == (str(ASKING), str(ASKED))
    assert (event.bytes_in, event.bytes_out) == (222, 111)
