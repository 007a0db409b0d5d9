"""Where relays are looked for while discovery does not answer: where they were found last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.task import Clock
from zope.interface import implementer

from dmsg.address import HostPort
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.entry import DMSG, Entry, ServerPart
from dmsg.discovery.errors import DiscoveryUnavailable, EntryNotFound
from dmsg.errors import StageError
from dmsg.interfaces import IDiscovery
from dmsg.relays import whereabouts as module
from dmsg.relays.candidates import Candidate
from dmsg.relays.whereabouts import Whereabouts

KEYS = [SecretKey.generate().public_key for _ in range(4)]
sync = pytest_twisted.ensureDeferred


def place(number: int) -> HostPort:
    return HostPort(f"192.0.2.{number}", 80)


@implementer(IDiscovery)
class Discovery:
    """Has the entries of all relays, or fails with ``failure``."""

    failure: Exception | None = None

    async def get_entry(self, relay: PublicKey) -> Entry:
        if self.failure is not None:
            raise self.failure
        server = ServerPart(str(place(KEYS.index(relay))), 1)
        return Entry("0.1.0", 0, 1, relay, None, server)


@pytest.fixture
def discovery() -> Discovery:
    return Discovery()


@pytest.fixture
def find(discovery: Discovery) -> Callable[[int], Any]:
    whereabouts = Whereabouts(Clock(), discovery, {}, None, DMSG)
    return lambda number: whereabouts.find(Candidate(KEYS[number]))


@sync
async def test_a_relay_is_where_it_was_found_last(discovery: Discovery, find: Any) -> None:
    await find(0)
    discovery.failure = DiscoveryUnavailable("no answer")
    assert await find(0) == place(0)
    with pytest.raises(StageError, match="unavailable"):
        await find(1)


@sync
async def test_one_that_discovery_does_not_know_any_more_is_nowhere(discovery: Discovery, find: Any) -> None:
    await find(0)
    for failure in (EntryNotFound(), DiscoveryUnavailable("no answer")):
        discovery.failure = failure
        with pytest.raises(StageError):
            await find(0)


@sync
async def test_the_one_that_was_looked_up_longest_ago_is_forgotten_for_a_new_one(
    discovery: Discovery, find: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FOUND_LIMIT", 2)
    for number in (0, 1, 0, 2):
        await find(number)
    discovery.failure = DiscoveryUnavailable("no answer")
    assert [await find(0), await find(2)] == [place(0), place(2)]
    with pytest.raises(StageError, match="unavailable"):
        await find(1)
