"""The admin site over a real socket."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_twisted
from treq.client import HTTPClient
from twisted.internet.defer import Deferred, succeed
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.logger import globalLogPublisher
from twisted.web.client import Agent

from dmsg.eventlog.log import NullEventLog
from dmsg.eventlog.schema import SessionUp
from dmsg.ops.admin import make_admin_site
from dmsg.ops.metrics import CollectorRegistry, MetricsEventLog


@asynccontextmanager
async def serving(reactor: Any, ready: Any, registry: CollectorRegistry | None = None) -> AsyncIterator[Any]:
    """``get(path) -> (status, type, body)`` of a site that listens."""
    site = make_admin_site(registry or CollectorRegistry(), ready, reactor)
    port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(site)

    async def get(path: str, method: str = "GET") -> tuple[int, str, bytes]:
        url = f"http://127.0.0.1:{port.getHost().port}{path}"
        response = await HTTPClient(Agent(reactor)).request(method, url)
        [content_type] = response.headers.getRawHeaders("content-type", [""])
        return response.code, content_type, await response.content()

    try:
        yield get
    finally:
        await port.stopListening()


@pytest_twisted.ensureDeferred
async def test_metrics_are_text(reactor: Any) -> None:
    log = MetricsEventLog(NullEventLog(), CollectorRegistry())
    log.emit(SessionUp("s", "first", 1.0, 1))
    async with serving(reactor, lambda: "", log.registry) as get:
        status, content_type, body = await get("/metrics")
    assert (status, content_type.startswith("text/plain")) == (200, True)
    assert b'dmsg_sessions_up_total{reason="first"} 1.0' in body


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics", "/nothing"])
@pytest_twisted.ensureDeferred
async def test_who_asks_for_heads_writes_no_lines_into_the_log(reactor: Any, path: str) -> None:
    logged: list[Any] = []
    globalLogPublisher.addObserver(logged.append)
    try:
        async with serving(reactor, lambda: "") as get:
            found = await get(path)
            logged.clear()
            assert await get(path, "HEAD") == (*found[:2], b"")
    finally:
        globalLogPublisher.removeObserver(logged.append)
    assert not [one for one in logged if "HEAD" in one["log_format"]]


@pytest_twisted.ensureDeferred
async def test_live_while_it_answers_and_ready_when_it_says_so(reactor: Any) -> None:
    serves = False
    async with serving(reactor, lambda: "" if serves else "draining") as get:
        assert (await get("/livez"))[0] == 200
        status, content_type, body = await get("/readyz")
        assert (status, content_type) == (503, "application/json")
        assert json.loads(body) == {"status": "not ready", "reason": "draining"}
        serves = True
        status, _, body = await get("/readyz")
        assert (status, json.loads(body)) == (200, {"status": "ready"})
        assert (await get("/readyz", "HEAD"))[0] == 200


@pytest.mark.parametrize("path", ["/", "/nothing", "/metric"])
@pytest_twisted.ensureDeferred
async def test_there_is_nothing_else(reactor: Any, path: str) -> None:
    async with serving(reactor, lambda: "") as get:
        status, _, body = await get(path)
    assert status == 404
    assert b"Traceback" not in body


@pytest_twisted.ensureDeferred
async def test_readiness_may_take_its_time(reactor: Any) -> None:
    async with serving(reactor, lambda: succeed("the store does not answer")) as get:
        status, _, body = await get("/readyz")
    assert (status, json.loads(body)["reason"]) == (503, "the store does not answer")


@pytest_twisted.ensureDeferred
async def test_readiness_that_never_comes_is_not_ready(reactor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmsg.ops.admin.READY_TIMEOUT_S", 0.05)
    asked: list[Deferred[str]] = []

    def ready() -> Deferred[str]:
        asked.append(Deferred())
        return asked[-1]

    async with serving(reactor, ready) as get:
        status, _, body = await get("/readyz")
    assert (status, json.loads(body)["reason"], len(asked)) == (503, "timeout", 1)


@pytest_twisted.ensureDeferred
async def test_readiness_that_fails_is_not_ready(reactor: Any, logged_errors: Any) -> None:
    async with serving(reactor, lambda: 1 / 0) as get:
        status, _, body = await get("/readyz")
    assert (status, json.loads(body)["reason"]) == (503, "ZeroDivisionError")
    assert logged_errors.flush(ZeroDivisionError)


def test_importing_it_installs_no_reactor() -> None:
    code = "import sys, dmsg.ops.admin, dmsg.eventlog.log; sys.exit('twisted.internet.reactor' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
