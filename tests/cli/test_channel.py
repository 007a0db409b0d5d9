"""Reads of a channel: in pieces, as many at a time as are wanted, and bounded."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from dmsg.cli.channel import GATHER_S, UNREAD_PAUSE_BYTES, Channel, TransportBroken


class Transport:
    """Notes whether it may read."""

    reading = True

    def registerProducer(self, producer, streaming):
        """Take the channel as the producer."""

    def pauseProducing(self):
        self.reading = False

    def resumeProducing(self):
        self.reading = True


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def channel(clock):
    channel = Channel(clock)
    channel.makeConnection(Transport())
    return channel


def reading(channel, enough_bytes):
    results = []
    Deferred.fromCoroutine(channel.read_pieces(60.0, enough_bytes)).addBoth(results.append)
    return results


def test_a_reader_that_wants_much_is_woken_once(channel):
    results = reading(channel, 100_000)
    pieces = [bytes([number]) * 40_000 for number in range(3)]
    for piece in pieces:
        assert not results
        channel.dataReceived(piece)
    assert results == [pieces]
    assert all(given is taken for given, taken in zip(pieces, results[0], strict=True)), "they are not copied"
    assert channel.unread_bytes == 0


def test_a_reader_that_wants_much_gets_little_when_little_comes(channel, clock):
    results = reading(channel, 100_000)
    clock.advance(30)
    channel.dataReceived(b"slow")
    clock.advance(GATHER_S * 0.9)
    assert not results
    clock.advance(GATHER_S * 0.2)
    assert results == [[b"slow"]]
    assert not clock.getDelayedCalls()


def test_the_end_brings_what_came_before_it(channel):
    results = reading(channel, 100_000)
    channel.dataReceived(b"last")
    channel.connectionLost(Failure(ConnectionDone()))
    assert results == [[b"last"]]
    (failure,) = reading(channel, 1)
    assert failure.check(TransportBroken) and failure.value.clean


def test_a_reader_that_wants_more_than_may_wait_gets_what_may(channel):
    results = reading(channel, 10 * UNREAD_PAUSE_BYTES)
    channel.dataReceived(bytes(UNREAD_PAUSE_BYTES))
    assert results == [[bytes(UNREAD_PAUSE_BYTES)]] and channel.transport.reading


def test_without_a_reader_reading_stops_until_there_is_one(channel):
    for _ in range(UNREAD_PAUSE_BYTES // 65_536):
        assert channel.transport.reading
        channel.dataReceived(bytes(65_536))
    assert not channel.transport.reading
    (pieces,) = reading(channel, 1)
    assert sum(map(len, pieces)) == UNREAD_PAUSE_BYTES and channel.transport.reading


def test_pieces_of_one_byte_cost_little_more_than_their_bytes(channel):
    for _ in range(100_000):
        channel.dataReceived(b"xy")
    held = sum(map(sys.getsizeof, channel._unread)) + sys.getsizeof(channel._unread)
    assert held < 2 * channel.unread_bytes


@given(st.lists(st.binary(min_size=1, max_size=9_000), max_size=20))
def test_nothing_is_lost_and_nothing_changes_its_place(pieces):
    channel = Channel(Clock())
    channel.makeConnection(Transport())
    for piece in pieces:
        channel.dataReceived(piece)
    taken = channel.take_unread()
    assert b"".join(taken) == b"".join(pieces)
    assert all(type(one) is bytes for one in taken)


def test_a_channel_that_is_over_leaves_no_timed_call(channel, clock):
    results = reading(channel, 1)
    channel.dataReceived(b"soon")
    assert results == [[b"soon"]] and clock.getDelayedCalls()  # it limits the waits that follow
    channel.connectionLost(Failure(ConnectionDone()))
    assert not clock.getDelayedCalls()
