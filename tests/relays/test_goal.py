"""What the goal of a client's sessions remembers of the relays that it tries."""

from __future__ import annotations

from twisted.internet.defer import Deferred

from dmsg.address import HostPort
from dmsg.crypto.keys import SecretKey
from dmsg.errors import StageError
from dmsg.relays import goal as module
from dmsg.relays.goal import SessionGoal
from dmsg.relays.operator_list import ListedRelay
from dmsg.relays.race import RaceConfig
from dmsg.relays.scores import RelayScores

RELAYS = [SecretKey.generate().public_key for _ in range(4)]


class Pool:
    """Sessions with nobody; ``tried`` has each attempt that goes on: its relay, candidate, and what it asks."""

    def __init__(self):
        self.sessions = self.chosen = ()
        self.pinned = {}
        self.tried = {}

    def get(self, relay, candidate=None, *, wanted_at=None):
        self.tried[relay] = (candidate, wanted_at, Deferred())
        return self.tried[relay][2]

    def give_up(self, relay, *, blame):
        self.tried.pop(relay, None)

    def connecting(self, relay):
        return relay in self.tried

    def rested_at(self, relay):
        return 0.0


class NoDiscovery:
    """Lists no relays."""

    there = asking = False
    relays = ()
    asked_s = None

    def usable_at(self):
        return 0.0

    def stop(self):
        pass


class Operator:
    """Names relays without saying where they are."""

    only = True
    error = None

    def __init__(self, relays):
        self._relays = relays

    def relays(self):
        return [ListedRelay(relay) for relay in self._relays]


def test_a_bounded_number_of_addresses_is_remembered_of_relays_that_were_tried(clock, monkeypatch):
    """A list may name other relays each time that it is read."""
    monkeypatch.setattr(module, "LEARNED_LIMIT", 3)
    pool = Pool()
    goal = SessionGoal(
        clock,
        pool,
        4,
        listed=NoDiscovery(),
        memory=None,
        operator=Operator(RELAYS),
        scores=RelayScores(),
        uniform=lambda: 0.5,
        race=RaceConfig(width=4),
        poll_s=10.0,
        poll_limit_s=60.0,
    )
    goal.start()

    def known_after_finding(*found):
        for number in found:
            assert pool.tried[RELAYS[number]][1](HostPort(f"192.0.2.{number}", 80))
        for _, _, attempt in list(pool.tried.values()):
            attempt.addErrback(lambda failure: failure.trap(StageError))
        tried, pool.tried = pool.tried, {}
        for _, _, attempt in tried.values():
            attempt.errback(StageError("connect", "timed_out"))
        goal.look()
        return {number for number in range(4) if pool.tried[RELAYS[number]][0].address is not None}

    assert known_after_finding(0, 1, 2) == {0, 1, 2}
    assert known_after_finding(3) == {3}
    assert known_after_finding(0) == {0, 3}
    goal.stop()
