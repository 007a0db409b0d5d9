"""Work on a database connection in pool threads, where the system may have no thread to give."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from twisted.internet.defer import Deferred

from dmsg.errors import DmsgError
from dmsg.glue.lane import InThisThread, Lane


class Refused(DmsgError):
    """A job refuses."""


class Unavailable(DmsgError):
    """The database does not work."""


class Pool:
    """Has no room for a thread while ``is_full``."""

    def __init__(self) -> None:
        self.is_full = False
        self.held: list[Any] = []
        self.hold = False

    def callInThread(self, work: Any, *arguments: Any) -> None:
        if self.is_full:
            raise RuntimeError("can't start new thread")
        self.held.append(lambda: work(*arguments))
        if not self.hold:
            self.run()

    def run(self) -> None:
        held, self.held = self.held, []
        for one in held:
            one()


def lane_on(pool: Pool) -> Lane[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    return Lane(connection, InThisThread, pool, transaction=True, refusal=Refused, unavailable=Unavailable)


def outcome(done: Deferred[Any]) -> Any:
    found: list[Any] = []
    done.addCallbacks(found.append, lambda failure: found.append(failure.value))
    return found[0] if found else "waits"


def test_without_a_thread_a_job_fails_and_the_next_one_works_when_there_is_one_again() -> None:
    pool = Pool()
    lane = lane_on(pool)
    pool.is_full = True
    for _ in range(2):
        failed = outcome(lane.submit(lambda connection: 1))
        assert isinstance(failed, Unavailable) and "can't start new thread" in str(failed)
    pool.is_full = False
    assert outcome(lane.submit(lambda connection: 2)) == 2
    assert outcome(lane.close()) is None


def test_the_connection_is_closed_behind_what_waits_and_takes_nothing_more() -> None:
    pool = Pool()
    lane = lane_on(pool)
    connection = outcome(lane.submit(lambda connection: connection))
    pool.hold = True
    last = lane.submit(lambda connection: connection.execute("SELECT 7").fetchall())
    closed = [lane.close(), lane.close()]
    assert isinstance(outcome(lane.submit(lambda connection: 1)), Unavailable)
    assert not any(one.called for one in (last, *closed))
    pool.run()
    assert [outcome(one) for one in (last, *closed)] == [[(7,)], None, None]
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")


def test_what_came_meanwhile_is_answered_too_when_there_is_no_thread_for_it() -> None:
    pool = Pool()
    lane = lane_on(pool)
    pool.hold = True
    first, second = lane.submit(lambda connection: 1), lane.submit(lambda connection: 2)
    closed = lane.close()
    pool.is_full = True
    pool.run()
    assert outcome(first) == 1
    assert isinstance(outcome(second), Unavailable)
    assert outcome(closed) is None
