"""Where a discovery has its ranks from: files and URLs, good and bad, now and later."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import formatEvent, globalLogPublisher
from twisted.web.resource import Resource
from twisted.web.server import Site

from dmsg.discovery.ranks import DOCUMENT_LIMIT_BYTES
from dmsg.discovery.ranks_source import REFRESH_S, RanksSource
from dmsg.eventlog.schema import RanksLoaded
from tests.memory_log import MemoryEventLog

from .test_ranks import NOW_S, OPERATOR, RELAYS, STRANGER, TRUSTED, signed


class Harness:
    def __init__(self, clock: Clock, path: Path) -> None:
        self.clock = clock
        self.path = path
        self.log = MemoryEventLog()
        self.source = RanksSource(str(path), TRUSTED, clock, now_s=lambda: NOW_S, events=self.log)

    def write(self, data: bytes) -> None:
        self.path.write_bytes(data)

    def look(self) -> float:
        """Let it look once more; the score of the first relay, 500 if nothing is known."""
        if self.source._timer is None:
            self.source.start()
        else:
            self.clock.advance(REFRESH_S)
        ranks = self.source.ranks
        return 500.0 if ranks is None else ranks.effective(RELAYS[0].raw, NOW_S)

    @property
    def told(self) -> list[tuple[bool, str]]:
        return [(event.ok, event.reason) for event in self.log.of(RanksLoaded)]


@pytest.fixture
def harness(clock: Clock, tmp_path: Path) -> Any:
    one = Harness(clock, tmp_path / "ranks.json")
    yield one
    pytest_twisted.blockon(Deferred.fromCoroutine(one.source.stop()))
    assert clock.getDelayedCalls() == []


def test_a_file_is_read_and_read_again(harness: Harness) -> None:
    harness.write(signed(900, issued=NOW_S - 10))
    assert harness.look() == 900
    harness.write(signed(800, issued=NOW_S - 5))
    assert harness.look() == 800
    assert harness.look() == 800
    assert harness.told == [(True, ""), (True, "")]
    [first, _] = harness.log.of(RanksLoaded)
    assert (first.issuer, first.issued, first.relays) == (str(OPERATOR.public_key), NOW_S - 10, 1)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not_json"),
        (b"{", "not_json"),
        (b"null", "wrong_format"),
        (signed(100, key=STRANGER), "untrusted"),
        (signed(100, issued=NOW_S - 20), "rolled_back"),
        (signed(100, issued=NOW_S + 999), "from_the_future"),
        (signed(100).replace(b"100", b"101"), "bad_signature"),
        (signed(1001), "bad_field"),
        (b" " * (DOCUMENT_LIMIT_BYTES + 1), "too_long"),
    ],
)
def test_a_bad_document_never_takes_the_place_of_a_good_one(harness: Harness, data: bytes, reason: str) -> None:
    harness.write(signed(900, issued=NOW_S - 10))
    assert harness.look() == 900
    harness.write(data)
    for _ in range(3):  # told of once, not every minute
        assert harness.look() == 900
        assert harness.source.problem == reason
    harness.write(signed(800, issued=NOW_S - 5))
    assert harness.look() == 800
    assert harness.source.problem == ""
    assert harness.told == [(True, ""), (False, reason), (True, "")]


@pytest_twisted.ensureDeferred
async def test_a_source_that_is_started_again_reads_regularly_again(harness: Harness) -> None:
    harness.write(signed(900, issued=NOW_S - 10))
    assert harness.look() == 900
    await harness.source.stop()
    harness.clock.advance(2 * REFRESH_S)
    assert harness.clock.getDelayedCalls() == []
    harness.source.start()
    harness.write(signed(800, issued=NOW_S - 5))
    assert harness.look() == 800


def test_a_source_that_is_started_twice_is_stopped_once(harness: Harness) -> None:
    harness.source.start()
    harness.source.start()
    assert len(harness.clock.getDelayedCalls()) == 1


def test_a_discovery_starts_without_its_file(harness: Harness) -> None:
    assert harness.look() == 500
    assert harness.source.problem == "unreadable"
    harness.write(signed(900))
    assert harness.look() == 900


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_plain_file_is_not_read(harness: Harness, make: Any) -> None:
    make(harness.path)
    assert harness.look() == 500
    assert harness.source.problem == "unreadable"


# --- URLs ------------------------------------------------------------------------------------------------------------


class Page(Resource):
    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.body, self.status = b"", 200

    def render_GET(self, request: Any) -> bytes:
        request.setResponseCode(self.status)
        return self.body


@pytest_twisted.ensureDeferred
async def test_a_url_is_read_on_a_reactor_with_threads(reactor: Any, served: Any) -> None:
    page = Page()
    port = served(Site(page, reactor=reactor))
    source = RanksSource(f"http://127.0.0.1:{port}/ranks", TRUSTED, reactor, now_s=lambda: NOW_S)
    try:
        for status, body, problem, score in [
            (404, b"", "unreadable", None),
            (200, signed(900, issued=NOW_S - 9), "", 900),
            (500, b"", "unreadable", 900),
            (302, b"", "unreadable", 900),
            (200, b"[]", "wrong_format", 900),
            (200, b" " * (DOCUMENT_LIMIT_BYTES + 1), "unreadable", 900),
            (200, json.dumps(json.loads(signed(700)), indent=2).encode(), "", 700),
        ]:
            page.status, page.body = status, body
            await source.refresh()
            assert source.problem == problem
            assert (source.ranks and source.ranks.scores[RELAYS[0].raw]) == score
    finally:
        await source.stop()


@pytest_twisted.ensureDeferred
async def test_a_url_without_a_server_is_no_harm(reactor: Any, served: Any) -> None:
    port = served(Site(Page(), reactor=reactor))
    source = RanksSource(f"http://127.0.0.1:{port}x/ranks", TRUSTED, reactor, now_s=lambda: NOW_S)
    await source.refresh()
    assert (source.problem, source.ranks) == ("unreadable", None)
    await source.stop()


@pytest_twisted.ensureDeferred
async def test_what_a_url_is_signed_with_is_not_logged(reactor: Any) -> None:
    said: list[Any] = []
    globalLogPublisher.addObserver(said.append)
    source = RanksSource("http://127.0.0.1:1/ranks?sig=TOPSECRET", TRUSTED, reactor, now_s=lambda: NOW_S)
    try:
        await source.refresh()
    finally:
        globalLogPublisher.removeObserver(said.append)
        await source.stop()
    texts = [formatEvent(event) for event in said]
    assert any("http://127.0.0.1:1/ranks?…" in text for text in texts)
    assert "TOPSECRET" not in repr(texts)


@pytest_twisted.ensureDeferred
async def test_it_can_be_stopped_in_the_middle(reactor: Any, tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    path.write_bytes(signed(*[random.Random(1).randrange(1000)] * 5))
    source = RanksSource(str(path), TRUSTED, reactor, now_s=lambda: NOW_S, refresh_s=3600)
    source.start()
    await source.stop()
    source = RanksSource(str(path), TRUSTED, reactor, now_s=lambda: NOW_S, refresh_s=3600)
    await source.refresh()
    assert source.ranks is not None
    await source.stop()
