"""``dmsg echo`` and ``dmsg ping``."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import pytest_twisted
from twisted.internet.defer import succeed
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock, deferLater

from dmsg.address import HostPort, PinnedServer
from dmsg.cli.channel import Channel, TimedOut, TransportBroken
from dmsg.cli.client import _Events, open_client
from dmsg.cli.exits import CommandError, Exit, exit_code
from dmsg.cli.ping import run_echo, run_ping, summarize
from dmsg.crypto.keys import PublicKey
from dmsg.errors import ConfigError, DialError
from dmsg.eventlog.compress import read_lines
from dmsg.eventlog.schema import SessionDown


@pytest.mark.parametrize("size", [1, 64, 1024 * 1024])
@pytest.mark.parametrize("bench", [None, "http", "messaging", "messaging http"], indirect=True)
@pytest_twisted.ensureDeferred
async def test_ping_measures_what_echo_sends_back(bench, size):
    echo = bench.start(run_echo)
    peer = PublicKey.parse((await echo.ready())["public_key"])
    (result,) = await bench.run(run_ping, peer, count=4, size=size, interval_s=0.001)
    assert set(result) == {"peer", "server", "security", "dial_ms", "count", "size_bytes", "rtt_ms"}
    assert (result["peer"], result["count"], result["size_bytes"]) == (str(peer), 4, size)
    assert result["server"] == str(bench.pinned[0].public_key)
    assert result["security"] in ("hop", "e2e")
    rtt = result["rtt_ms"]
    assert 0 < rtt["min"] <= rtt["p50"] <= rtt["p90"] <= rtt["p99"] <= rtt["max"]


@pytest_twisted.ensureDeferred
async def test_a_ping_that_is_over_is_a_normal_end_in_the_log_of_echo(bench, tmp_path):
    echo = bench.start(run_echo, events=str(tmp_path / "events"))
    peer = PublicKey.parse((await echo.ready())["public_key"])
    await bench.run(run_ping, peer, count=2, size=64, interval_s=0)
    await echo.stop()
    lines = [json.loads(line) for path in tmp_path.rglob("*.jsonl.zst") for line in read_lines(path)]
    assert [one["reason"] for one in lines if one["event"] == "transport_closed"] == ["normal"]


@pytest_twisted.ensureDeferred
async def test_events_that_cannot_be_written_are_said_at_once(bench):
    with pytest.raises(ConfigError, match="events: /dev/null/x cannot be used: Not a directory") as caught:
        await bench.run(run_echo, events="/dev/null/x")
    assert exit_code(caught.value) is Exit.USAGE


@pytest.mark.parametrize("bench", [None, "messaging"], indirect=True)
@pytest_twisted.ensureDeferred
async def test_a_peer_that_changes_what_comes_is_found_out(bench):
    class Liar(Protocol):
        def dataReceived(self, data):
            self.transport.write(b"?" * len(data))

    liar = await bench.client()
    liar.listen(Factory.forProtocol(Liar))
    with pytest.raises(CommandError) as caught:
        await bench.run(run_ping, liar.public_key, count=1, size=64, interval_s=0)
    assert exit_code(caught.value) is Exit.UNVERIFIED


@pytest_twisted.ensureDeferred
async def test_a_peer_that_hangs_up_is_an_error_of_its_own(bench):
    class Shy(Protocol):
        def connectionMade(self):
            self.transport.loseConnection()

    shy = await bench.client()
    shy.listen(Factory.forProtocol(Shy))
    with pytest.raises(TransportBroken) as caught:
        await bench.run(run_ping, shy.public_key, count=1, size=64, interval_s=0)
    assert not caught.value.clean, "the ping was not read"


@pytest.mark.parametrize(
    ("bench", "stage"),
    [(None, "accept"), ("http", "discovery"), ("messaging", "accept"), ("messaging http", "discovery")],
    indirect=["bench"],
)
@pytest_twisted.ensureDeferred
async def test_a_peer_that_is_not_there_is_unreachable(bench, stage):
    absent, _ = bench.key("absent")
    with pytest.raises(DialError) as caught:
        await bench.run(run_ping, absent.public_key, count=1, size=64, interval_s=0)
    assert exit_code(caught.value) is Exit.UNREACHABLE
    assert stage in [one.stage for one in caught.value.attempts]


@pytest.mark.parametrize("bench", [None, "messaging"], indirect=True)
@pytest_twisted.ensureDeferred
async def test_a_listener_without_a_server_says_what_it_tried(bench, monkeypatch):
    monkeypatch.setattr("dmsg.cli.client.CONNECT_TIMEOUT_S", 0.2)
    gone = bench.pinned[0]
    await bench.network.stop_relay(bench.relays[0])
    command = bench.start(run_echo)
    assert command.call.settings.servers == ()
    with pytest.raises(CommandError) as caught:
        await command.ended
    assert caught.value.exit is Exit.USAGE  # neither discovery nor a server was given
    settings = replace(command.call.settings, servers=(gone,))
    with pytest.raises(CommandError) as caught:
        async with open_client(settings, bench.reactor, listening=True):
            pytest.fail("it is not connected")
    assert caught.value.exit is Exit.UNREACHABLE
    assert caught.value.data["servers"] == {str(gone.public_key): "connection refused"}


@pytest_twisted.ensureDeferred
async def test_a_listener_with_fewer_servers_than_it_was_told_says_what_it_tried(bench, monkeypatch):
    monkeypatch.setattr("dmsg.cli.client.CONNECT_TIMEOUT_S", 0.5)
    gone = PinnedServer(bench.key("gone")[0].public_key, HostPort("127.0.0.1", 1))
    settings = replace(bench.settings(), servers=(bench.pinned[0], gone), min_servers=2)
    with pytest.raises(CommandError) as caught:
        async with open_client(settings, bench.reactor, listening=True):
            pytest.fail("there is one server of two")
    assert caught.value.exit is Exit.UNREACHABLE
    assert str(caught.value) == f"1 of 2 servers within 0.5 s: {str(gone.public_key)[:12]}… connection refused"


@pytest_twisted.ensureDeferred
async def test_a_listener_that_wants_no_server_is_told_at_once_that_nobody_would_find_it(bench, monkeypatch):
    monkeypatch.setattr("dmsg.cli.client.CONNECT_TIMEOUT_S", 0.5)
    with pytest.raises(CommandError, match="min_servers: needs at least one") as caught:
        async with open_client(replace(bench.settings(), min_servers=0), bench.reactor, listening=True):
            pytest.fail("it is not connected")
    assert caught.value.exit is Exit.USAGE


@pytest_twisted.ensureDeferred
async def test_a_listener_whose_entry_is_not_taken_says_why(bench, monkeypatch):
    monkeypatch.setattr("dmsg.cli.client.CONNECT_TIMEOUT_S", 3.0)
    settings = replace(bench.settings(), servers=(bench.pinned[0],), discovery="http://127.0.0.1:1")
    with pytest.raises(CommandError) as caught:
        async with open_client(settings, bench.reactor, listening=True):
            pytest.fail("it is not published")
    assert caught.value.exit is Exit.NO_DISCOVERY
    assert str(caught.value).startswith("the entry could not be published in discovery: http://127.0.0.1:1: Conn")


@pytest_twisted.ensureDeferred
async def test_a_listener_whose_discovery_has_not_answered_yet_names_no_reason(bench, monkeypatch):
    monkeypatch.setattr("dmsg.cli.client.CONNECT_TIMEOUT_S", 0.5)
    silent = bench.reactor.listenTCP(0, Factory.forProtocol(Protocol), interface="127.0.0.1")
    discovery = f"http://127.0.0.1:{silent.getHost().port}"
    settings = replace(bench.settings(), servers=(bench.pinned[0],), discovery=discovery)
    monkeypatch.setattr("dmsg.cli.client._check_servers", lambda *_: succeed(None))  # it would wait for the answer
    try:
        with pytest.raises(CommandError) as caught:
            async with open_client(settings, bench.reactor, listening=True):
                pytest.fail("it is not published")
    finally:
        await silent.stopListening()
    assert str(caught.value) == "the entry could not be published in discovery"


@pytest_twisted.ensureDeferred
async def test_a_command_that_listens_remembers_nothing_of_relays_that_fail_later(bench, monkeypatch):
    logs = []

    class Noted(_Events):
        def __init__(self, log):
            super().__init__(log)
            self.heard = []
            logs.append(self)

        def emit(self, event):
            self.heard.append(event)
            super().emit(event)

    monkeypatch.setattr("dmsg.cli.client._Events", Noted)
    settings = replace(bench.settings(), servers=tuple(bench.pinned))
    async with open_client(settings, bench.reactor, listening=True) as client:
        await bench.network.stop_relay(bench.relays[0])
        while client.pool.sessions:
            await deferLater(bench.reactor, 0)
        (log,) = logs
        assert any(isinstance(event, SessionDown) for event in log.heard) and not log.reasons


@pytest.mark.parametrize("bench", [None, "messaging"], indirect=True)
@pytest_twisted.ensureDeferred
async def test_a_channel_holds_both_sides_back(bench):
    """A reader that does not read makes the writer wait, and nothing is lost."""
    opened = []
    listener = await bench.client()
    listener.listen(Factory.forProtocol(lambda: Channel(bench.reactor, opened.append)))
    client = await bench.client()
    channel = Channel(bench.reactor)
    (await client.dial(listener.public_key)).attach(channel)
    written = 0
    with pytest.raises(TimedOut):
        while written < 64 * 1024 * 1024:
            await channel.write(b"x" * 65536, timeout_s=0.2)
            written += 65536
    assert written < 16 * 1024 * 1024
    total = written + 65536  # the last one was taken, and then waited for
    read = 0
    while read < total:
        read += len(await opened[0].read(5))
    await channel.write(b"y", 5)
    assert await opened[0].read(5) == b"y"
    await channel.close(5)
    with pytest.raises(TransportBroken):
        await opened[0].read(5)
    with pytest.raises(TransportBroken):
        await channel.write(b"z", 5)


def test_reading_has_a_time_limit():
    from twisted.internet.defer import Deferred

    clock = Clock()
    outcome = Deferred.fromCoroutine(Channel(clock).read(3.0))
    clock.advance(2.9)
    assert not outcome.called
    clock.advance(0.2)
    failures = []
    outcome.addErrback(failures.append)
    assert failures[0].check(TimedOut) and "3 s" in str(failures[0].value)


@pytest.mark.parametrize(
    ("samples", "summary"),
    [
        ([5.0], {"min": 5.0, "p50": 5.0, "p90": 5.0, "p99": 5.0, "max": 5.0}),
        ([float(one) for one in range(100, 0, -1)], {"min": 1.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}),
        ([3.0, 1.0, 2.0], {"min": 1.0, "p50": 2.0, "p90": 3.0, "p99": 3.0, "max": 3.0}),
    ],
)
def test_percentiles_are_nearest_ranks(samples, summary):
    assert summarize(samples) == summary
