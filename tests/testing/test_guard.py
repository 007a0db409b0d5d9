"""The rules every test is held to are proven by small test runs that break them."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
HEAD = """
import time
import pytest, pytest_twisted
from hypothesis import given, strategies as st
from twisted.internet import defer, reactor, task
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import Logger
"""


@pytest.fixture
def run(pytester):
    """``run(test source) -> result`` of a pytest process that uses our conftest."""
    pytester.makeconftest(CONFTEST.read_text("utf-8").replace("CANCEL_GRACE_S = 3.0", "CANCEL_GRACE_S = 0.5"))
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\nfilterwarnings = ["error"]\n')

    def execute(source: str):
        pytester.makepyfile(test_inner=HEAD + source)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", "--strict-markers", timeout=60)

    return execute


def test_leftovers_and_unhandled_errors_fail_their_test_only(run):
    result = run("""
def test_leaked_call():
    reactor.callLater(1000, print)

def test_unhandled_error():
    defer.fail(ValueError("without an errback"))

def test_unhandled_error_in_a_cycle():
    d = defer.Deferred()
    d.me = d
    d.errback(KeyError("in a cycle"))

@pytest_twisted.ensureDeferred
async def test_unhandled_error_of_a_coroutine():
    async def work():
        await task.deferLater(reactor, 0)
        raise OSError("in a coroutine")
    defer.Deferred.fromCoroutine(work())
    await task.deferLater(reactor, 0.01)

def test_leaked_port():
    reactor.listenTCP(0, Factory.forProtocol(Protocol), interface="127.0.0.1")

def test_logged_failure():
    try:
        raise RuntimeError("to the log")
    except RuntimeError:
        Logger().failure("it broke")

def test_clean():
    pass

@pytest_twisted.ensureDeferred
async def test_clean_async(clock):
    port = reactor.listenTCP(0, Factory.forProtocol(Protocol), interface="127.0.0.1")
    call = reactor.callLater(1000, print)
    call.cancel()
    port.stopListening()

def test_flushed(logged_errors):
    defer.fail(ValueError("wanted"))
    [failure] = logged_errors.flush(ValueError)
    assert failure.check(ValueError)

def test_flushing_takes_the_named_ones_only(logged_errors):
    defer.fail(ValueError("unwanted value"))
    assert logged_errors.flush(KeyError) == []
""")
    result.assert_outcomes(passed=10, errors=7)
    text = result.stdout.str()
    for expected in (
        "delayed call left behind",
        "without an errback",
        "in a cycle",
        "in a coroutine",
        "open socket or pipe left behind: <<class 'twisted.internet.tcp.Port'>",
        "to the log",
        "unwanted value",
    ):
        assert expected in text
    assert "ERROR at teardown of test_clean" not in text
    assert "ERROR at teardown of test_flushed" not in text


def test_time_limit_ends_every_kind_of_hanging_test(run):
    result = run("""
@pytest.mark.time_limit(0.3)
def test_busy():
    while True:
        pass

@pytest.mark.time_limit(0.3)
@pytest_twisted.ensureDeferred
async def test_waits_for_ever():
    await defer.Deferred()

@pytest.mark.time_limit(0.3)
@pytest_twisted.ensureDeferred
async def test_busy_after_waiting():
    await task.deferLater(reactor, 0.01)
    while True:
        pass

@pytest.mark.time_limit(0.3)
@pytest_twisted.inlineCallbacks
def test_waits_in_inline_callbacks():
    yield defer.Deferred()

@pytest.mark.time_limit(0.3)
@pytest_twisted.ensureDeferred
async def test_swallows_the_cancellation():
    while True:
        try:
            await defer.Deferred()
        except defer.CancelledError:
            pass

@pytest.mark.time_limit(0.3)
@given(st.integers())
def test_busy_property(n):
    while True:
        pass

def spin():
    while True:
        pass

@pytest.mark.time_limit(0.3)
@pytest_twisted.ensureDeferred
async def test_busy_callback(logged_errors):
    reactor.callLater(0.01, spin)
    try:
        await defer.Deferred()
    finally:
        logged_errors.flush()

@pytest_twisted.async_fixture
async def never():
    await defer.Deferred()

@pytest.mark.time_limit(0.3)
def test_fixture_hangs(never):
    pass

def test_next_one_is_fine():
    pass
""")
    text = result.stdout.str()
    outcomes = result.parseoutcomes()
    assert outcomes == {"passed": 1, "failed": 7, "errors": 1}, text
    for name in ("busy", "waits_for_ever", "busy_after_waiting", "swallows_the_cancellation", "busy_property"):
        assert f"test_{name} took longer than 0.3 s" in text


def test_async_tests_run_with_or_without_the_mark(run):
    """An unmarked coroutine would otherwise pass without having run at all."""
    result = run("""
async def test_unmarked():
    await task.deferLater(reactor, 0)
    assert False, "it did run"

@pytest_twisted.ensureDeferred
async def test_marked():
    await task.deferLater(reactor, 0)
    assert False, "it did run"
""")
    result.assert_outcomes(failed=2)
    assert result.stdout.str().count("E       AssertionError: it did run") == 2


def test_missing_redis_is_a_failure_and_not_a_skip(run, monkeypatch):
    monkeypatch.setenv("PATH", "")
    result = run("""
def test_store(redis_url):
    pass
""")
    result.assert_outcomes(errors=1)
    assert "install Redis" in result.stdout.str()


@pytest.mark.system
def test_redis_url_is_a_real_empty_redis(run):
    result = run("""
import socket
from urllib.parse import urlsplit

def ask(url, command):
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=5) as connection:
        connection.sendall(command)
        return connection.recv(100)

def test_first(redis_url):
    assert ask(redis_url, b"SET a 1\\r\\n") == b"+OK\\r\\n"
    assert ask(redis_url, b"GET a\\r\\n") == b"$1\\r\\n1\\r\\n"

def test_second_finds_nothing_of_the_first(redis_url):
    assert ask(redis_url, b"GET a\\r\\n") == b"$-1\\r\\n"
""")
    # redis itself was started without any reactor: nothing is left behind either
    result.assert_outcomes(passed=2)
