"""Two ends joined where one cannot end one direction alone: when both end, and what shows as a cut."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import pytest_twisted
from twisted.internet import reactor
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.task import Clock, deferLater
from twisted.python.failure import Failure

from dmsg.cli.splice import QUIET_S, End, join
from tests.tcp import far_socket, reset


class Line:
    """A transport that notes what it is asked for; it is over when its test says so."""

    def __init__(self):
        self.end = End()
        self.stream = SimpleNamespace(dropped=False)
        self.written = b""
        self.producer = None
        self.reading = True
        self.asked = ""
        self.end.makeConnection(self)

    def write(self, data):
        self.written += data

    def registerProducer(self, producer, streaming):
        self.producer = producer

    def unregisterProducer(self):
        self.producer = None

    def pauseProducing(self):
        self.reading = False

    def resumeProducing(self):
        self.reading = True

    def loseConnection(self):
        self.asked = self.asked or "close"

    def abortConnection(self):
        self.asked = "abort"

    def over(self, error):
        self.end.connectionLost(Failure(error))


class Socket(Line):
    """One that can end one direction alone."""

    def loseWriteConnection(self):
        self.asked = "end"


@pytest.fixture
def clock():
    clock = Clock()
    yield clock
    assert not clock.getDelayedCalls()


@pytest.fixture
def joined(clock):
    near, far = Socket(), Line()
    join(near.end, far.end, clock)
    return near, far


def test_both_end_once_the_other_direction_is_quiet(clock, joined):
    near, far = joined
    near.end.readConnectionLost()
    for _ in range(3):
        clock.advance(QUIET_S * 0.9)
        far.end.dataReceived(b"x")
    assert (near.written, near.asked, far.asked) == (b"xxx", "", "")
    clock.advance(QUIET_S)
    clock.advance(QUIET_S)
    assert (near.asked, far.asked) == ("", "close"), "what was written there has to arrive first"
    far.over(ConnectionDone())
    assert near.asked == "close"


def test_a_direction_that_is_held_up_is_not_quiet(clock, joined):
    near, far = joined
    near.end.readConnectionLost()
    near.producer.pauseProducing()
    assert not far.reading
    clock.advance(QUIET_S)
    clock.advance(QUIET_S)
    assert far.asked == ""
    near.producer.resumeProducing()
    assert far.reading
    clock.advance(QUIET_S)
    assert far.asked == "close"


def test_what_comes_after_the_close_shows_as_a_cut(clock, joined):
    near, far = joined
    near.end.readConnectionLost()
    clock.advance(QUIET_S)
    far.stream.dropped = True
    far.over(ConnectionDone())
    assert near.asked == "abort"


@pytest.mark.parametrize(("error", "asked"), [(ConnectionDone(), "close"), (ConnectionAborted(), "abort")])
def test_an_end_of_the_other_one_meanwhile_ends_this_one_at_once(clock, joined, error, asked):
    near, far = joined
    near.end.readConnectionLost()
    far.over(error)
    assert near.asked == asked


def test_a_first_end_that_is_lost_meanwhile_cuts_the_other_one_off(clock, joined):
    near, far = joined
    near.end.readConnectionLost()
    near.over(ConnectionAborted())
    assert far.asked == "abort"


def test_an_end_from_before_they_were_joined_counts(clock):
    near, far = Socket(), Line()
    near.end.readConnectionLost()
    join(near.end, far.end, clock)
    assert far.asked == ""
    clock.advance(QUIET_S)
    assert far.asked == "close"


def test_where_both_can_an_end_is_passed_on_at_once(clock):
    near, far = Socket(), Socket()
    join(near.end, far.end, clock)
    near.end.readConnectionLost()
    assert (near.asked, far.asked) == ("", "end")


@pytest_twisted.ensureDeferred
async def test_a_connection_that_is_reset_while_it_is_written_to_cuts_the_other_one_off(clock):
    """It is found by the write, and the read behind it looks like the end of the stream."""
    end, other, ends = End(), Socket(), []
    other.loseWriteConnection = lambda: ends.append("end")
    async with far_socket(end) as far:
        join(end, other.end, clock)
        reset(far)
        for _ in range(3):
            other.end.dataReceived(b"to a lost peer")
        while not other.asked:
            await deferLater(reactor, 0.01)
    assert (other.asked, ends) == ("abort", [])
