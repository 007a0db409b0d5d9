"""``twistd rmb-relay``: its options, and the command line of the documentation as a process."""

from __future__ import annotations

import os
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ClientFactory, Protocol
from twisted.logger import LogLevel, capturedLogs, formatEvent

from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import FederationAttempted
from dmsg.ops.metrics import LABEL_VALUES
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.keys import KeyType
from dmsg.rmb.core.limiter import Limit
from dmsg.rmb.core.token import make_token
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope, outline
from dmsg.rmb.key_file import make_twin_key
from dmsg.rmb.twins.table import TwinTable
from dmsg.sansio.websocket import Role, WebSocket, WebSocketConfig
from dmsg.sansio.websocket_frames import Closed
from dmsg.taps import rmb_relay
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.process import free_port

from .conftest import PATIENCE_S, Program
from .test_options import parse, refusal

REGISTRY = ("--registry", "file")


# --- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [("--limit", "5,1000"), ("--limit", "5,", "1000"), ("--limit", "5", "1000"), ("--limit=5 1000",)]
)
def test_the_limit_is_taken_as_the_seed_and_as_the_public_relay_write_it(given: tuple[str, ...]) -> None:
    assert parse(rmb_relay, *REGISTRY, *given).limit == Limit(5, 1000)
    assert parse(rmb_relay, *REGISTRY).limit is None


def test_the_flags_of_the_public_relay_are_taken() -> None:
    settings = parse(
        rmb_relay,
        *(
            "-m",
            "a.example",
            "--domain",
            "b.example",
            "-r",
            "redis://localhost:6379",
            "-s",
            "ws://one",
            "-s",
            "ws://two",
        ),
        *("-w", "10", "-u", "5", "-l", "tcp:8080", "-p", "60", "--catchup-threshold", "9", "-dd", "--debug"),
    )
    assert settings.domain == ("a.example", "b.example") and settings.substrate == ("ws://one", "ws://two")
    assert (settings.redis, settings.listen, settings.ranker_period) == ("redis://localhost:6379", "tcp:8080", 60.0)
    assert (settings.workers, settings.user_per_worker, settings.catchup_threshold) == (10, 5, 9)


def test_options_of_the_public_relay_that_have_several_words_may_have_them() -> None:
    """It takes all words up to the next option; so does ours, and an option that is repeated has all of them, too."""
    names = ("-m", "a.example", "b.example", "--domain", "c.example")
    nodes = ("--substrate", "ws://one", "ws://two", "-s", "ws://three")
    settings = parse(rmb_relay, *names, "-d", *nodes, "--limit", "5", "1000")
    assert settings.domain == ("a.example", "b.example", "c.example")
    assert settings.substrate == ("ws://one", "ws://two", "ws://three")
    assert settings.limit == Limit(5, 1000)


@pytest.mark.parametrize(
    "words",
    [
        ("-d", "a.example"),
        ("a.example", "-m", "b.example"),
        ("-p", "60", "70"),
        ("--limit", "5", "a"),
        ("--limit", "5", "6", "7"),
        ("--limit", "5,6", "7"),
    ],
)
def test_words_that_belong_to_no_option_are_refused(words: tuple[str, ...]) -> None:
    assert refusal(rmb_relay, *REGISTRY, *words).startswith("rmb-relay: takes options only, not ")


@pytest.mark.parametrize(
    ("given", "endpoint"),
    [
        ("127.0.0.1:8080", "tcp:8080:interface=127.0.0.1"),
        ("0.0.0.0:80", "tcp:80:interface=0.0.0.0"),
        ("[::]:8080", r"tcp6:8080:interface=\:\:"),
        ("[::1]:8080", r"tcp6:8080:interface=\:\:1"),
        ("tcp:8080", "tcp:8080"),
        ("tcp6:8080", "tcp6:8080"),
        ("unix:80", "unix:80"),
    ],
)
def test_it_listens_on_addresses_as_the_public_relay_takes_them(given: str, endpoint: str) -> None:
    assert parse(rmb_relay, *REGISTRY, "-l", given).listen == endpoint
    assert parse(rmb_relay, *REGISTRY, DMSG_LISTEN=given).listen == endpoint


def test_workers_and_users_make_the_most_sessions() -> None:
    """One that is not given counts as the public relay's default, 500 or 1,000."""

    def most(*arguments: str) -> int:
        service = rmb_relay.RmbRelayService(object(), parse(rmb_relay, *REGISTRY, *arguments))
        return int(service.limits.connections)

    assert most("-w", "10", "-u", "5") == 50
    assert most("-w", "3") == 3_000
    assert most("-u", "3") == 1_500
    assert most() == 10_000


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "registry"),
        ((*REGISTRY, "--limit", "5"), "limit: must be COUNT,BYTES"),
        ((*REGISTRY, "--limit", "0,1000"), "limit: must be at least 1,1: with 0 no envelope could be sent"),
        (
            (*REGISTRY, "--redis", "redis://h", "--store", "sqlite:x"),
            "redis: is another name of store, which is also given",
        ),
        (
            (*REGISTRY, "-r", "localhost:6379"),
            "redis: a Redis URL is redis://host:port/db, rediss://host:port/db (TLS) or redis+unix:///path?db=0",
        ),
        (
            (*REGISTRY, "--redis", "sqlite:x"),
            "redis: a Redis URL is redis://host:port/db, rediss://host:port/db (TLS) or redis+unix:///path?db=0",
        ),
        ((*REGISTRY, "--workers", "0", "--user-per-worker", "1"), "workers: must be more than 0"),
        ((*REGISTRY, "--user-per-worker", "0"), "user_per_worker: must be more than 0"),
        ((*REGISTRY, "--max-message", "0"), "max_message: must be more than 0"),
        ((*REGISTRY, "--relay-key", "missing", "-m", "a.example"), "relay_key: "),
        ((*REGISTRY, "--trust", "a.example=00"), "trust: a relay is trusted as NAME[:PORT]=KEY"),
        ((*REGISTRY, "--trust", f"a.example={'ab' * 32}"), "domain: must be given with relay-key and trust"),
        ((*REGISTRY, "--demand-audience"), "domain: must be given with demand-audience"),
        (
            (*REGISTRY, "-m", "b.example", "--trust", f"a.example={'ab' * 32}", "--trust", f"A.example={'cd' * 32}"),
            "trust: a.example has two keys",
        ),
        (
            (*REGISTRY, "--domain", "wss://a.example"),
            "domain: a relay is a host name, with :port if need be, not 'wss://a.example' (in option --domain)",
        ),
        ((*REGISTRY, "--domain", "a.example:70000"), "domain: a relay is a host name"),
    ],
)
def test_what_cannot_work_is_one_line(arguments: tuple[str, ...], line: str) -> None:
    assert refusal(rmb_relay, *arguments).startswith(f"rmb-relay: {line}")


@pytest.mark.parametrize(("more", "lines"), [((), 1), (("--domain", "localhost"), 0)])
def test_a_relay_without_a_name_says_what_it_refuses(tmp_path: Path, more: tuple[str, ...], lines: int) -> None:
    network = MemoryNetwork()
    arguments = ("--registry", str(tmp_path / "twins"), "--listen", "tcp:80", *more)
    service = rmb_relay.RmbRelayService(network, parse(rmb_relay, *arguments))
    with capturedLogs() as told:
        service.start_role()
    stopping = Deferred.fromCoroutine(service.stop_role())
    network.advance(100)
    assert stopping.called
    warned = [one for one in told if "no --domain is given" in str(formatEvent(one))]
    assert [one["log_level"] for one in warned] == [LogLevel.warn] * lines


def test_the_key_of_a_relay_may_be_given_twice() -> None:
    trust = ("--trust", f"a.example={'ab' * 32}", "--trust", f"A.example={'AB' * 32}")
    rmb_relay.RmbRelayService(object(), parse(rmb_relay, *REGISTRY, "-m", "b.example", *trust))


def test_the_key_of_a_relay_is_of_ed25519(tmp_path: Path) -> None:
    make_twin_key(tmp_path / "key", KeyType.SR25519, os.urandom)
    refused = refusal(rmb_relay, *REGISTRY, "-m", "a.example", "--relay-key", str(tmp_path / "key"))
    assert refused == "rmb-relay: relay_key: must be a key of ed25519"


# --- a process ---------------------------------------------------------------------------------------------------------


class Peer:
    """A twin's program on a blocking socket."""

    def __init__(self, port: int, token: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self.socket.sendall(
            f"GET /?{token} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self.socket.recv(4096)
        assert answer.startswith(b"HTTP/1.1 101 ")
        self.core = WebSocket(Role.CLIENT, WebSocketConfig(), now=0.0, random=os.urandom)
        self.events: list[Any] = []

    def send(self, data: bytes) -> None:
        self.core.send(data)
        self.socket.sendall(self.core.data_to_send())

    def next(self) -> Any:
        while not self.events:
            self.events += self.core.receive_data(self.socket.recv(65536), 0.0)
        return self.events.pop(0)


@pytest.mark.system
@pytest.mark.time_limit(90)
def test_the_documented_command_serves_and_ends_well_on_sigterm(start: Callable[..., Program], tmp_path: Path) -> None:
    keys, table = [], TwinTable(str(tmp_path / "twins"))
    for name in ("alice", "bob"):
        keys.append(make_twin_key(tmp_path / name, KeyType.ED25519, os.urandom))
        table.create(keys[-1], ["localhost"], EncryptionKey(keys[-1].secret).public_key)
    table.close()
    port = free_port()
    listen = f"tcp:{port}:interface=127.0.0.1"
    relay = start(
        "twistd", "-n", "rmb-relay", "--listen", listen, "--registry", str(tmp_path / "twins"), "--domain", "localhost"
    )
    relay.wait_for(f"rmb-relay runs, on {listen}")
    for page in ("livez", "readyz"):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=PATIENCE_S) as answer:
            assert answer.status == 200 and answer.headers["content-type"].startswith("application/json")
    alice, bob = (Peer(port, make_token(key, twin, None, int(time.time()))) for twin, key in enumerate(keys, 1))
    envelope = Envelope(uid="1", timestamp=int(time.time()), expiration=60, plain=b"hello")
    envelope.source.twin, envelope.destination.twin = 1, 2
    alice.send(envelope.SerializeToString())
    assert bob.next() == envelope.SerializeToString()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain; version=")
        lines = set(answer.read().decode().splitlines())
    assert {"relay_worker_connections 2.0", "relay_message_tx 1.0", "dmsg_server_sessions 2.0"} <= lines
    relay.send(15)
    assert alice.next() == Closed(1001, "the relay stops")
    for peer in (alice, bob):
        peer.socket.close()
    assert relay.wait() == 0 and "Traceback" not in relay.text


@pytest.mark.system
@pytest.mark.time_limit(60)
def test_an_address_in_use_is_one_line(start: Callable[..., Program]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"tcp:{taken.getsockname()[1]}:interface=127.0.0.1"
        relay = start("twistd", "-n", "--pidfile=", "rmb-relay", "--listen", listen, "--registry", "twins")
        assert relay.wait() == 1
    assert "rmb-relay: listen: cannot listen on" in relay.text.splitlines()[-1] and "Traceback" not in relay.text


def test_what_is_under_way_to_other_relays_and_to_sessions_has_the_drain_timeout_together(tmp_path: Path) -> None:
    network: Any = MemoryNetwork()
    network.silence("127.0.0.1", 9)
    more = ("--listen", "tcp:80", "--domain", "localhost", "--drain-timeout", "4")
    service = rmb_relay.RmbRelayService(
        network, parse(rmb_relay, "--registry", str(tmp_path / "twins"), "--store", "memory:", *more)
    )
    service.start_role()
    assert service.federation is not None and service.relay is not None
    envelope = Envelope(uid="x")
    twin = Twin(7, bytes(32), ("127.0.0.1:9",))
    service.federation.submit(outline(envelope), envelope.SerializeToString(), twin, time.time() + 60, lambda _: None)
    service.relay.delivery.background.tasks.begin(_hang())
    stopping = Deferred.fromCoroutine(service.stop_role())
    for _ in range(39):
        network.advance(0.1)
    assert len(service.federation) == 1 and not stopping.called
    for _ in range(round(10 * service.limits.close_timeout_s) + 2):
        network.advance(0.1)
    assert stopping.called


async def _hang() -> None:
    await Deferred()


@pytest.mark.parametrize(("more", "status"), [((), 200), (("--private-metrics",), 404)])
def test_metrics_can_be_kept_off_the_public_port(tmp_path: Path, more: tuple[str, ...], status: int) -> None:
    network, answer = MemoryNetwork(), []
    arguments = ("--registry", str(tmp_path / "twins"), "--listen", "tcp:80", *more)
    service = rmb_relay.RmbRelayService(network, parse(rmb_relay, *arguments))
    service.start_role()

    class Get(Protocol):
        def connectionMade(self) -> None:
            self.transport.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")

        def dataReceived(self, data: bytes) -> None:
            answer.append(data)

    network.connectTCP("127.0.0.1", 80, ClientFactory.forProtocol(Get))
    network.advance(0)
    stopping = Deferred.fromCoroutine(service.stop_role())
    network.advance(100)
    assert stopping.called and answer[0].startswith(b"HTTP/1.1 %d " % status)


def test_requests_over_the_rate_of_pages_are_counted(tmp_path: Path) -> None:
    network: Any = MemoryNetwork()
    arguments = ("--registry", str(tmp_path / "twins"), "--listen", "tcp:80", "--limit-get-burst-per-address", "1")
    service = rmb_relay.RmbRelayService(network, parse(rmb_relay, *arguments))
    service.start_role()

    class Get(Protocol):
        def connectionMade(self) -> None:
            self.transport.write(3 * b"GET /other HTTP/1.1\r\nHost: a\r\n\r\n")  # the second one ends the connection

    network.connectTCP("127.0.0.1", 80, ClientFactory.forProtocol(Get))
    network.advance(2)
    why = {"what": "request", "reason": "too many requests"}
    assert service.metrics.get_sample_value("dmsg_refusals_total", why) == 1
    stopping = Deferred.fromCoroutine(service.stop_role())
    network.advance(100)
    assert stopping.called


def test_strangers_who_make_relays_up_do_not_hide_those_that_are_trusted(tmp_path: Path) -> None:
    trust = [word for name in ("R2.example.org", "r3.example.org:8080") for word in ("--trust", f"{name}={'61' * 32}")]
    service = rmb_relay.RmbRelayService(
        MemoryNetwork(), parse(rmb_relay, "--registry", str(tmp_path / "twins"), "--domain", "r1.example.org", *trust)
    )
    for number in range(2 * LABEL_VALUES):
        service.emit(FederationAttempted(f"x{number}.example", False, Reason.HOST_NOT_FOUND, 1.0))
    for name in ("r2.example.org", "r3.example.org:8080", "r4.example.org"):
        service.emit(FederationAttempted(name, False, Reason.CONNECTION_REFUSED, 1.0))
    refused = {
        name: service.metrics.get_sample_value(
            "dmsg_rmb_federation_attempts_total", {"relay": name, "result": "connection refused"}
        )
        for name in ("r2.example.org", "r3.example.org:8080", "other")
    }
    assert refused == {"r2.example.org": 1, "r3.example.org:8080": 1, "other": 1}
