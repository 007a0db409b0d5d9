"""End-to-end transports outlive their relays (:ref:`spec-resumption`): real relays, killed and told to go."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread

from benchmarks.kills import P50_LIMIT_MS, P99_LIMIT_MS, run_kills
from benchmarks.report import percentile
from benchmarks.sizes import KillsSize
from dmsg.address import HostPort, PinnedServer
from dmsg.crypto.keys import PublicKey, SecretKey, write_key_file
from dmsg.errors import DialError
from dmsg.eventlog.compress import read_lines
from dmsg.eventlog.schema import DialFinished, TransportClosed, TransportOpened, TransportResumed
from dmsg.mux.client.service import ClientConfig
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.relays.errors import ServerLost
from dmsg.testing.network import LocalNetwork
from dmsg.testing.process import free_port

pytestmark = pytest.mark.system

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TWISTD = (sys.executable, "-c", "from twisted.scripts.twistd import run; run()", "--nodaemon", "--pidfile=")
#: A program has this long to start on a busy machine.
PATIENCE_S = 20.0


class Relay:
    """``twistd dmsg-server`` with a key and a port that stay; ``kill`` it and ``start`` it again."""

    def __init__(self, directory, *options):
        self.key = SecretKey.generate()
        key_file = directory / f"{self.key.public_key}.key"
        write_key_file(key_file, self.key)
        self.port = free_port()
        self.pinned = PinnedServer(self.key.public_key, HostPort("127.0.0.1", self.port))
        self._arguments = (
            *TWISTD,
            "dmsg-server",
            *("--key", str(key_file), "--listen", f"tcp:{self.port}:interface=127.0.0.1"),
            *("--drain-timeout", "0.3", *options),
        )
        if options:
            self._arguments += ("--public-address", f"127.0.0.1:{self.port}")
        self._directory = directory
        self._process = None

    async def start(self):
        """Start it; returns when it takes connections."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DMSG_")}
        self._process = subprocess.Popen(
            self._arguments,
            cwd=self._directory,
            env={**clean, "PYTHONPATH": ROOT},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        await deferToThread(self._wait)

    def _wait(self):
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except ConnectionRefusedError:
                time.sleep(0.02)  # in a thread of its own, waiting for a process that tells it nothing
        raise AssertionError("the relay does not start")

    def kill(self):
        """End it at once, without a word to its peers."""
        self._process.kill()
        self._process.wait()

    async def terminate(self):
        """Tell it to go, and wait until it has."""
        self._process.send_signal(signal.SIGTERM)
        await deferToThread(self._process.wait)

    def stop(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def relay(tmp_path):
    """``relay(*options) -> Relay``, not started."""
    relays = []

    def make(*options):
        relays.append(Relay(tmp_path, *options))
        return relays[-1]

    yield make
    for one in relays:
        one.stop()


class Events:
    """An event log that can be asked."""

    def __init__(self):
        self.seen = []

    def emit(self, event):
        self.seen.append(event)

    def of(self, kind):
        return [event for event in self.seen if isinstance(event, kind)]


class Echo(Protocol):
    """Sends back what comes, and remembers how it ended."""

    def __init__(self, over):
        self._over = over

    def dataReceived(self, data):
        self.transport.write(data)

    def connectionLost(self, reason):
        self._over.callback(reason.value)


class Talker(Protocol):
    """Says something and waits until it is back."""

    def __init__(self):
        self.lost = Deferred()
        self.said = self.heard = b""
        self._back = None

    async def say(self, data):
        self.said += data
        self.transport.write(data)
        if self.heard != self.said:
            self._back = Deferred()
            await self._back

    def dataReceived(self, data):
        self.heard += data
        assert self.said.startswith(self.heard)
        if self._back is not None and self.heard == self.said:
            back, self._back = self._back, None
            back.callback(None)

    def connectionLost(self, reason):
        self.lost.callback(reason.value)


class Pair:
    """Two clients and a transport between them, on an existing network."""

    def __init__(self, network, **options):
        self.network = network
        self.events = Events()
        self.echo_over = Deferred()
        self.talker = Talker()
        self.transport = None
        self._options = {"security": Security.E2E, **options}

    async def connect(self):
        factory = Factory.forProtocol(lambda: Echo(self.echo_over))
        factory.noisy = False
        self.answering = await self.network.client(**self._options)
        self.answering.listen(factory)
        self.dialling = await self.network.client(events=self.events, **self._options)
        self.transport = await self.dialling.dial(self.answering.public_key)
        self.transport.attach(self.talker)
        await self.talker.say(b"hello")

    @property
    def server(self):
        """The relay in between, as both ends name it."""
        return self.transport.getHost().server_public_key

    async def close(self):
        self.transport.loseConnection()
        assert isinstance(await self.talker.lost, ConnectionDone)
        assert isinstance(await self.echo_over, ConnectionDone)


async def listed(network, count):
    """Wait until discovery names so many relays."""
    while len(await network.discovery.available_servers()) < count:
        await deferLater(network.reactor, 0.02)


def test_many_transports_outlive_relays_that_are_killed_one_after_another():
    found = run_kills(KillsSize(kills=3, transports=10, kill_every_s=2.5, restart_s=0.5), seed=20)
    assert not found.faults and found.lost_bytes == 0 and found.verified_bytes > 500_000
    assert found.kills == 3
    assert len(found.resumed_ms) >= 10 and len(found.gaps_ms) >= 20
    for pauses in (found.gaps_ms, found.resumed_ms):
        assert percentile(pauses, 0.5) <= P50_LIMIT_MS
        assert percentile(pauses, 0.99) <= P99_LIMIT_MS


@pytest_twisted.ensureDeferred
async def test_the_only_relay_comes_back(relay, reactor):
    only = relay()
    await only.start()
    async with LocalNetwork(reactor, relays=0, discovery=None) as network:
        network.pinned.append(only.pinned)
        pair = Pair(network)
        await pair.connect()
        only.kill()
        answer = Deferred.fromCoroutine(pair.talker.say(os.urandom(200_000)))
        await only.start()
        await answer
        (resumed,) = pair.events.of(TransportResumed)
        assert resumed.server == str(only.key.public_key) == str(pair.server)
        assert len(pair.events.of(DialFinished)) == 1
        assert not pair.talker.lost.called
        await pair.close()


@pytest_twisted.ensureDeferred
async def test_without_another_path_the_transport_is_lost_and_says_what_was_tried(relay, reactor):
    only = relay()
    await only.start()
    async with LocalNetwork(reactor, relays=0, discovery=None) as network:
        network.pinned.append(only.pinned)
        pair = Pair(network, config=ClientConfig(resume_grace_s=1.0))
        await pair.connect()
        only.kill()
        began = reactor.seconds()
        lost = await pair.talker.lost
        assert 0.9 <= reactor.seconds() - began < 5.0
        assert isinstance(lost, ConnectionLost) and isinstance(lost.cause, DialError)
        assert [(one.stage, one.server, one.reason) for one in lost.cause.attempts] == [
            ("connect", str(only.key.public_key), "connection refused")
        ]
        other = await pair.echo_over
        assert isinstance(other, ConnectionLost) and isinstance(other.cause, ServerLost)


@pytest_twisted.ensureDeferred
async def test_a_responder_that_moved_is_found_where_it_went(relay, reactor):
    async with LocalNetwork(reactor, relays=0, discovery="http") as network:
        first, second = (relay("--discovery", network.discovery_url) for _ in range(2))
        await first.start()
        await listed(network, 1)
        pair = Pair(network)
        await pair.connect()
        assert pair.server == first.key.public_key
        await second.start()
        await listed(network, 2)
        first.kill()
        await pair.talker.say(os.urandom(200_000))
        assert pair.server == second.key.public_key
        assert list(pair.answering.pool.sessions) == [second.key.public_key]
        (resumed,) = pair.events.of(TransportResumed)
        assert resumed.elapsed_ms < P99_LIMIT_MS
        await pair.close()
        (dialled,), (opened,), (closed,) = map(pair.events.of, (DialFinished, TransportOpened, TransportClosed))
        assert dialled.initiator == str(pair.dialling.public_key)
        assert (closed.opened_id, closed.opened_server) == (opened.transport_id, opened.server)
        assert (opened.server, closed.server) == (str(first.key.public_key), str(second.key.public_key))


@pytest_twisted.ensureDeferred
async def test_a_relay_that_is_told_to_go_hands_its_transports_over(relay, reactor):
    relays = {one.key.public_key: one for one in (relay(), relay())}
    await DeferredList([Deferred.fromCoroutine(one.start()) for one in relays.values()], fireOnOneErrback=True)
    async with LocalNetwork(reactor, relays=0, discovery=None) as network:
        network.pinned.extend(one.pinned for one in relays.values())
        pair = Pair(network, min_servers=2)
        await pair.connect()
        going = pair.server
        gone = Deferred.fromCoroutine(relays[going].terminate())
        while pair.server == going:
            await pair.talker.say(b"x" * 1000)
            await deferLater(reactor, 0.01)
        (resumed,) = pair.events.of(TransportResumed)
        assert resumed.reason == "server_draining" and resumed.elapsed_ms < 1000
        await pair.talker.say(b"the end")
        await pair.close()
        await gone


@pytest.mark.time_limit(90)
@pytest_twisted.ensureDeferred
async def test_a_large_file_outlives_its_relay_within_one_transport(relay, reactor, tmp_path):
    size = 64 * 1024 * 1024
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    (tmp_path / "inbox").mkdir()
    async with LocalNetwork(reactor, relays=0, discovery="http") as network:
        relays = {str(one.key.public_key): one for one in (relay("--discovery", network.discovery_url) for _ in "ab")}
        await DeferredList([Deferred.fromCoroutine(one.start()) for one in relays.values()], fireOnOneErrback=True)
        await listed(network, 2)
        receiver = _command(tmp_path, network, "receive", "inbox", "--once")
        sender = None
        try:
            ready = json.loads(await deferToThread(receiver.stdout.readline))
            sender = _command(tmp_path, network, "send", ready["public_key"], "file", "--events", "events")
            part = None
            while part is None or part.stat().st_size < size // 16:
                await deferLater(reactor, 0.005)
                part = next(iter((tmp_path / "inbox").glob(".dmsg-parts/*.part")), None)
                assert sender.poll() is None
            entry = await network.discovery.get_entry(PublicKey.parse(ready["public_key"]))
            (between,) = entry.client.delegated_servers
            relays[str(between)].kill()
            out, err = await deferToThread(sender.communicate)
            assert sender.returncode == 0, err
            result = json.loads(out)
            assert (result["transports"], result["security"], result["sent_bytes"]) == (1, "e2e", size)
            assert result["server"] != str(between)
            await deferToThread(receiver.communicate)
            assert receiver.returncode == 0
        finally:
            for one in (receiver, sender):
                if one is not None:
                    one.kill()
                    one.communicate()
    assert (tmp_path / "inbox" / "file").read_bytes() == data
    events = [json.loads(line) for file in (tmp_path / "events").rglob("*.jsonl.zst") for line in read_lines(file)]
    names = [event["event"] for event in events]
    assert names.count("dial_finished") == 1 and names.count("transport_resumed") >= 1


def _command(directory, network, *arguments):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DMSG_")}
    return subprocess.Popen(
        [sys.executable, "-m", "dmsg.cli.main", *arguments, "--json"],
        cwd=directory,
        env={**clean, "PYTHONPATH": ROOT, "DMSG_DISCOVERY": network.discovery_url},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
