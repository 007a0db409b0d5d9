"""The relays that discovery lists, and what is said while it lists none."""

from __future__ import annotations

import pytest
from twisted.logger import globalLogPublisher
from zope.interface import implementer

from dmsg.discovery.errors import DiscoveryUnavailable
from dmsg.interfaces import IDiscovery
from dmsg.relays.listed import ListedRelays
from dmsg.relays.rankwatch import RankWatch
from dmsg.relays.scores import RelayScores


@implementer(IDiscovery)
class Away:
    """A discovery that fails with ``why``, or lists nothing."""

    def __init__(self):
        self.why = "no answer"

    async def available_servers(self, protocol="dmsg"):
        if self.why:
            raise DiscoveryUnavailable(self.why)
        return []


@pytest.fixture
def warnings():
    said = []

    def observe(event):
        if "gave no servers" in (event.get("log_format") or ""):
            said.append(str(event["error"]))

    globalLogPublisher.addObserver(observe)
    yield said
    globalLogPublisher.removeObserver(observe)


def test_a_discovery_that_is_away_for_long_is_told_of_once(clock, warnings):
    discovery, scores = Away(), RelayScores()
    listed = ListedRelays(clock, discovery, RankWatch(clock, discovery, scores, clock.seconds), scores, "dmsg")

    def ask(times):
        for _ in range(times):
            listed.ask()
            assert not listed.asking
            clock.advance(5)

    ask(1000)
    assert [text.count("no answer") for text in warnings] == [1]
    discovery.why = "HTTP status 502"
    ask(1000)
    assert len(warnings) == 2 and "502" in warnings[1] and "502" in listed.problem
    discovery.why = ""
    ask(2)
    assert listed.problem == "discovery knows no server with room"
    discovery.why = "HTTP status 502"
    ask(2)
    assert len(warnings) == 3
