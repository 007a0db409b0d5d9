"""A connection to Redis: a server that answers, lies, is silent or away, on a network in memory and in reality."""

from __future__ import annotations

import hashlib
from ipaddress import ip_address
from typing import Any

import pytest
import pytest_twisted
from cryptography import x509
from twisted.internet import ssl
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.protocol import Factory, Protocol

from dmsg.address import HostPort, RedisAddress
from dmsg.glue.errors import RedisAway, RedisRefused
from dmsg.glue.redis import DEMOTED_S, REPLY_TIMEOUT_S, RedisConnection
from dmsg.testing.memory import MemoryNetwork
from tests.pyopenssl import twisted_and_pyopenssl

ADDRESS = RedisAddress(HostPort("192.0.2.1", 6379))


class Server(Protocol):
    """Notes what it is sent. Says PONG to the first command, which is the connection's own."""

    def __init__(self, made: list[Server], welcome: bytes) -> None:
        self.received = b""
        self._made = made
        self._welcome = welcome

    def connectionMade(self) -> None:
        self._made.append(self)

    def dataReceived(self, data: bytes) -> None:
        self.received += data
        if self._welcome:
            self.transport.write(self._welcome)  # type: ignore[union-attr]
            self._welcome = b""


class World:
    """A connection to a server that does what the test says."""

    def __init__(self, address: RedisAddress = ADDRESS, welcome: bytes = b"+PONG\r\n") -> None:
        self.network = MemoryNetwork(hosts={"redis": "192.0.2.1"})
        self.servers: list[Server] = []
        self._welcome = welcome
        self.redis = RedisConnection(address, self.network)

    def listen(self) -> Any:
        return self.network.listenTCP(6379, Factory.forProtocol(lambda: Server(self.servers, self._welcome)))

    def settle(self, seconds: float = 0.0) -> None:
        for _ in range(5):
            self.network.advance(0)
        self.network.advance(seconds)

    def outcome(self, deferred: Deferred[Any]) -> list[Any]:
        found: list[Any] = []
        deferred.addCallbacks(found.append, lambda failure: found.append(failure.value))
        return found

    def close(self) -> None:
        done = self.outcome(Deferred.fromCoroutine(self.redis.close()))
        self.settle()
        assert done == [None]
        assert self.network.getDelayedCalls() == []


@pytest.fixture
def world() -> Any:
    world = World()
    yield world
    world.close()


def test_commands_are_sent_without_waiting_for_replies(world: Any) -> None:
    world.listen()
    found = [world.outcome(world.redis.call("GET", str(number))) for number in range(3)]
    world.settle()
    [server] = world.servers
    assert server.received.count(b"GET") == 3
    server.transport.write(b"$1\r\na\r\n-WRONGTYPE x\r\n:3\r\n")
    world.settle()
    assert (found[0], found[2]) == ([b"a"], [3])
    assert isinstance(found[1][0], RedisRefused) and found[1][0].reason == "WRONGTYPE x"


@pytest.mark.parametrize(
    ("answer", "again"), [(b"-NOSCRIPT no matching script\r\n", True), (b"-ERR in the midst of it\r\n", False)]
)
def test_a_script_is_run_again_only_if_it_was_not_known(world: Any, answer: bytes, again: bool) -> None:
    world.listen()
    found = world.outcome(world.redis.eval("return 7", ["key"], 1))
    world.settle()
    [server] = world.servers
    assert server.received.count(b"EVALSHA\r\n") == 1
    server.transport.write(answer)
    world.settle()
    assert server.received.count(b"EVAL\r\n") == again
    server.transport.write(b":7\r\n" if again else b"")
    world.settle()
    assert found == [7] if again else isinstance(found[0], RedisRefused)


def test_a_server_that_is_away_is_asked_again_and_what_waits_goes_out(world: Any) -> None:
    early = world.outcome(world.redis.call("GET", "a", wait_s=1.0))
    late = world.outcome(world.redis.call("GET", "b", wait_s=60.0))
    world.settle(1.0)
    assert isinstance(early[0], RedisAway) and not early[0].maybe_done
    assert early[0].reason == "connection refused"
    assert late == []
    world.listen()
    world.settle(2.0)
    world.settle(2.0)
    [server] = world.servers
    assert b"b" in server.received and b"$1\r\na" not in server.received
    server.transport.write(b":1\r\n")
    world.settle()
    assert late == [1]


def test_what_is_under_way_when_a_connection_is_lost_may_have_been_done(world: Any) -> None:
    world.listen()
    found = world.outcome(world.redis.call("GET", "a"))
    world.settle()
    world.servers[0].transport.abortConnection()
    world.settle()
    assert isinstance(found[0], RedisAway) and found[0].maybe_done
    again = world.outcome(world.redis.call("GET", "b"))
    world.settle(1.0)
    world.servers[1].transport.write(b":2\r\n")
    world.settle()
    assert again == [2]


def test_a_server_that_is_silent_is_left(world: Any) -> None:
    world.listen()
    found = world.outcome(world.redis.call("GET", "a"))
    patient = world.outcome(world.redis.call("BRPOP", "a", 60, patience_s=65.0))
    world.settle(REPLY_TIMEOUT_S - 0.1)
    assert found == []
    world.settle(0.2)
    world.settle()
    assert isinstance(found[0], RedisAway) and found[0].maybe_done and found[0].reason == "no reply in time"
    assert isinstance(patient[0], RedisAway)
    world.settle(1.0)
    assert len(world.servers) == 2


def test_a_server_that_speaks_something_else_is_left(world: Any) -> None:
    world.listen()
    found = world.outcome(world.redis.call("GET", "a"))
    world.settle()
    world.servers[0].transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    world.settle()
    assert isinstance(found[0], RedisAway) and found[0].reason == "not a reply"


@pytest.mark.parametrize("reply", [b"OOM command not allowed", b"MISCONF Redis is configured to save RDB snapshots"])
def test_not_now_is_no_refusal(world: Any, reply: bytes) -> None:
    world.listen()
    found = world.outcome(world.redis.call("GET", "a"))
    world.settle()
    world.servers[0].transport.write(b"-%b\r\n" % reply)
    world.settle()
    assert isinstance(found[0], RedisAway) and not found[0].maybe_done


@pytest.mark.parametrize(
    "error",
    [
        b"OOM command not allowed when used memory > 'maxmemory'.",
        b"MISCONF Errors writing to the AOF file: No space left on device",
        b"NOREPLICAS Not enough good replicas to write.",
        b"LOADING Redis is loading the dataset in memory",
    ],
)
def test_not_now_is_no_refusal_when_redis_6_says_it_of_a_script(world: Any, error: bytes) -> None:
    world.listen()
    found = world.outcome(world.redis.eval("return redis.call('SET', 'a', 'b')", ()))
    world.settle()
    wrapped = b"-ERR Error running script (call to f_6bcd): @user_script:1: @user_script: 1: -%b\r\n" % error
    world.servers[0].transport.write(wrapped)
    world.settle()
    assert isinstance(found[0], RedisAway) and not found[0].maybe_done and found[0].reason == error.decode()


@pytest.mark.parametrize(
    "reply",
    [
        b"ERR Error running script (call to f_6bcd): @user_script:1: WRONGTYPE Operation against a key -OOM command",
        b"ERR unknown command 'X', with args beginning with: '-MISCONF Redis'",
    ],
)
def test_words_within_an_error_do_not_mean_not_now(world: Any, reply: bytes) -> None:
    world.listen()
    found = world.outcome(world.redis.call("X", "-MISCONF Redis"))
    world.settle()
    world.servers[0].transport.write(b"-%b\r\n" % reply)
    world.settle()
    assert isinstance(found[0], RedisRefused)


@pytest.mark.parametrize(
    "reply",
    [
        b"READONLY You can't write.",
        b"ERR Error running script (call to f_1): @user_script: 1: -READONLY You",
        b"UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
    ],
)
def test_what_has_become_a_replica_is_left_for_what_is_at_its_address_now(world: Any, reply: bytes) -> None:
    world.listen()
    found = [world.outcome(world.redis.call("SET", "a", "b")) for _ in range(2)]
    world.settle()
    world.servers[0].transport.write(b"-" + reply + b"\r\n")
    world.settle(1.0)
    assert isinstance(found[0][0], RedisAway) and not found[0][0].maybe_done
    assert isinstance(found[1][0], RedisAway) and found[1][0].maybe_done
    # Where there is nothing else, it is used for what it can do. At the end the clock is set back.
    for wait_s, connections in ((0.0, 2), (DEMOTED_S, 3), (-3.0, 4)):
        world.network.clock.advance(wait_s)
        again = world.outcome(world.redis.call("SET", "a", "c"))
        world.settle()
        world.servers[-1].transport.write(b"-" + reply + b"\r\n")
        world.settle(1.0)
        assert isinstance(again[0], RedisAway) and len(world.servers) == connections


def test_a_command_that_is_cancelled_leaves_the_others_their_replies(world: Any) -> None:
    world.listen()
    first, second = world.redis.call("GET", "a"), world.redis.call("GET", "b")
    world.settle()
    third = world.redis.call("GET", "c")
    third.cancel()
    last = world.redis.call("GET", "d")
    outcomes = [world.outcome(one) for one in (first, second, third, last)]
    world.settle()
    world.servers[0].transport.write(b":1\r\n:2\r\n:3\r\n:4\r\n")
    world.settle()
    assert [one[0] for one in outcomes[:2]] == [1, 2] and outcomes[3] == [4]
    assert isinstance(outcomes[2][0], CancelledError)


@pytest.mark.parametrize(
    ("welcome", "reason"),
    [(b"-WRONGPASS no\r\n+OK\r\n+PONG\r\n", "WRONGPASS no"), (b"+OK\r\n-ERR DB index\r\n+PONG\r\n", "ERR DB index")],
)
def test_a_connection_that_is_not_welcome_is_not_used(welcome: bytes, reason: str) -> None:
    world = World(RedisAddress(ADDRESS.server, 3, "me", "secret"), welcome)
    world.listen()
    found = world.outcome(world.redis.call("GET", "a", wait_s=3.0))
    world.settle(0.01)
    assert b"AUTH\r\n$2\r\nme\r\n$6\r\nsecret" in world.servers[0].received
    assert b"SELECT\r\n$1\r\n3" in world.servers[0].received
    assert world.redis.problem == reason
    world.settle(3.0)
    assert isinstance(found[0], RedisAway) and found[0].reason == reason and "secret" not in str(found[0])
    assert all(b"GET" not in server.received for server in world.servers)
    world.close()


def test_it_can_be_closed_at_any_moment() -> None:
    for moment in range(4):
        world = World()
        if moment:
            world.listen()
        found = world.outcome(world.redis.call("GET", "a"))
        for _ in range(moment):
            world.network.advance(0)
        world.close()
        assert isinstance(found[0], RedisAway)
        late = world.outcome(world.redis.call("GET", "a"))
        assert isinstance(late[0], RedisAway)


@pytest.fixture(scope="module")
def private_redis(self_signed: Any, start_redis: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``(port, socket path, certificate)`` of a Redis that speaks TLS, for ``127.0.0.1``, and has a UNIX socket."""
    directory = tmp_path_factory.mktemp("private")
    both = self_signed(x509.IPAddress(ip_address("127.0.0.1")))
    (directory / "pem").write_bytes(both)
    files = [word for kind in ("cert", "key", "ca-cert") for word in (f"--tls-{kind}-file", "pem")]
    options = [
        "--port",
        "0",
        "--tls-auth-clients",
        "no",
        *files,
        "--unixsocket",
        "socket",
        "--requirepass",
        "open sesame",
    ]
    return start_redis(directory, "--tls-port", *options), directory / "socket", ssl.Certificate.loadPEM(both)


@twisted_and_pyopenssl
@pytest_twisted.ensureDeferred
async def test_a_redis_is_reached_over_tls(reactor: Any, private_redis: Any) -> None:
    port, _, certificate = private_redis
    address = RedisAddress.parse(f"rediss://:open%20sesame@127.0.0.1:{port}/2")
    redis = RedisConnection(address, reactor, trust=ssl.trustRootFromCertificates([certificate]))
    assert await redis.call("SET", "a", b"x" * 100_000) == b"OK"
    assert await redis.call("GET", "a") == b"x" * 100_000
    await redis.close()


@twisted_and_pyopenssl
@pytest.mark.parametrize(
    ("host", "problem"),
    [("127.0.0.1", "TLS: .*certificate verify failed"), ("localhost", "TLS: the certificate is not of this host")],
)
@pytest_twisted.ensureDeferred
async def test_a_redis_of_another_certificate_is_not_used(
    reactor: Any, private_redis: Any, host: str, problem: str
) -> None:
    port, _, certificate = private_redis
    trust = None if host == "127.0.0.1" else ssl.trustRootFromCertificates([certificate])
    redis = RedisConnection(RedisAddress.parse(f"rediss://:open%20sesame@{host}:{port}"), reactor, trust=trust)
    with pytest.raises(RedisAway, match=problem):
        await redis.call("PING", wait_s=1)
    await redis.close()


@pytest_twisted.ensureDeferred
async def test_a_redis_is_reached_over_its_socket(reactor: Any, private_redis: Any) -> None:
    _, path, _ = private_redis
    redis = RedisConnection(RedisAddress.parse(f"redis+unix://:open%20sesame@{path}?db=2"), reactor)
    assert await redis.call("SET", "a", b"x" * 100_000) == b"OK"
    assert await redis.call("GET", "a") == b"x" * 100_000
    await redis.close()
    away = RedisConnection(RedisAddress.parse(f"redis+unix://{path}-not"), reactor)
    with pytest.raises(RedisAway, match="unreachable"):
        await away.call("PING", wait_s=0.2)
    await away.close()


@pytest_twisted.ensureDeferred
async def test_a_real_redis_answers(reactor: Any, redis_url: str) -> None:
    redis = RedisConnection(RedisAddress.parse(redis_url), reactor)
    data = bytes(range(256)) * 8192
    assert await redis.call("SET", "key", data) == b"OK"
    assert await redis.call("GET", "key") == data
    assert await redis.call("STRLEN", "key") == len(data)
    assert await redis.call("MGET", "key", "none", "none") == [data, None, None]
    assert await redis.call("EVAL", "return {1, {'a', {}}, false}", 0) == [1, [b"a", []], None]
    with pytest.raises(RedisRefused, match="WRONGTYPE"):
        await redis.call("LPUSH", "key", "x")
    await redis.close()


@pytest_twisted.ensureDeferred
async def test_scripts_are_there_before_the_first_command_and_one_that_is_refused_is_no_hindrance(
    reactor: Any, redis_url: str
) -> None:
    script = "return 'loaded'"
    redis = RedisConnection(RedisAddress.parse(redis_url), reactor, scripts=("no Lua", script))
    assert await redis.call("EVALSHA", hashlib.sha1(script.encode()).hexdigest(), 0) == b"loaded"
    await redis.close()
