"""Where a client has its operator's list from: files and URLs, good and bad, now and later."""

from __future__ import annotations

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.web.resource import Resource
from twisted.web.server import Site

from dmsg.crypto.keys import SecretKey
from dmsg.relays.operator_list import DOCUMENT_LIMIT_BYTES, ListedRelay, sign_relay_list
from dmsg.relays.operator_list_source import REFRESH_S, RETRY_S, RelayListSource

OPERATOR = SecretKey.generate()
RELAYS = [ListedRelay(SecretKey.generate().public_key) for _ in range(3)]
LIFETIME_S = 10 * REFRESH_S


def signed(relays, issued, key=OPERATOR):
    return sign_relay_list(relays, key, issued=int(issued), expires=int(issued + LIFETIME_S))


@pytest.fixture
def source(clock, tmp_path):
    clock.rightNow = 1_700_000_000.0
    trusted = [OPERATOR.public_key]
    made = RelayListSource(str(tmp_path / "list.json"), trusted, clock, only=True, now_s=clock.seconds)
    made.told = 0

    def changed():
        made.told += 1

    made.changed = changed
    yield made
    pytest_twisted.blockon(Deferred.fromCoroutine(made.stop()))
    assert clock.getDelayedCalls() == []


def test_a_list_is_read_again_and_a_bad_one_leaves_it_until_it_expires(source, clock, tmp_path):
    path = tmp_path / "list.json"
    source.start()
    assert source.problem == "unreadable" and source.relays() == () and source.told == 0
    path.write_bytes(signed(RELAYS[:1], clock.seconds()))
    clock.advance(RETRY_S)
    assert list(source.relays()) == RELAYS[:1] and source.told == 1
    path.write_bytes(signed(RELAYS[:2], clock.seconds()))
    clock.advance(REFRESH_S)
    assert set(source.relays()) == set(RELAYS[:2]) and source.told == 2
    for bad, problem in [
        (signed(RELAYS, clock.seconds(), SecretKey.generate()), "untrusted"),
        (b"{}", "wrong_format"),
        (signed(RELAYS, clock.seconds() - 2 * REFRESH_S), "rolled_back"),
    ]:
        path.write_bytes(bad)
        clock.advance(REFRESH_S)
        assert source.problem == problem
        assert set(source.relays()) == set(RELAYS[:2]) and source.told == 2
    clock.advance(LIFETIME_S)
    assert source.relays() == ()


class Page(Resource):
    isLeaf = True
    body = b""

    def render_GET(self, request):
        return self.body


@pytest_twisted.ensureDeferred
async def test_a_url_is_read_within_limits(reactor, served):
    page = Page()
    port = served(Site(page, reactor=reactor))
    source = RelayListSource(
        f"http://127.0.0.1:{port}/list", [OPERATOR.public_key], reactor, only=False, now_s=lambda: 1_700_000_000
    )
    try:
        for body, problem in [
            (signed(RELAYS, 1_700_000_000), ""),
            (b" " * (DOCUMENT_LIMIT_BYTES + 1), "unreadable"),
            (b"[]", "wrong_format"),
        ]:
            page.body = body
            await source.refresh()
            assert source.problem == problem
            assert set(source.relays()) == set(RELAYS)
    finally:
        await source.stop()
