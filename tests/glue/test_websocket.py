"""WebSockets between a limited HTTP site and clients, on connections in memory."""

from __future__ import annotations

import ipaddress
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_twisted
from cryptography import x509
from twisted.internet import defer
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.ssl import Certificate, DefaultOpenSSLContextFactory
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

from dmsg.errors import DmsgError, InvalidAddress, StageError
from dmsg.eventlog.reasons import Reason
from dmsg.glue.connecting import tls_problem
from dmsg.glue.shell import Shell
from dmsg.glue.websocket import (
    CLOSE_TIMEOUT_S,
    WebSocketShell,
    WebSocketUrl,
    accept_websocket,
    asks_for_websocket,
    connect_websocket,
)
from dmsg.http.limits import HttpLimits
from dmsg.http.server import LimitedSite
from dmsg.sansio.errors import KeepaliveLost, WebSocketRefused, WebSocketViolation
from dmsg.sansio.websocket import Role, WebSocket, WebSocketConfig
from dmsg.sansio.websocket_frames import Closed
from dmsg.testing.link import Link
from dmsg.testing.memory import MemoryNetwork


class Party:
    """An owner that writes down what it is told."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.closed: Closed | None = None
        self.error: DmsgError | None = None
        self.lost = False

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        for event in events:
            if isinstance(event, Closed):
                assert self.closed is None
                self.closed = event
            else:
                self.messages.append(event)

    def after_read(self, shell: Shell) -> None:
        shell.flush()

    def flushed(self, shell: Shell) -> None:
        """No writer waits."""

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: object) -> None:
        assert not self.lost
        self.lost, self.error = True, error


class Door(Resource):
    """Agrees to every WebSocket, at once or, with ``gate``, when that fires; refuses with status and text."""

    isLeaf = True

    def __init__(self, network: MemoryNetwork, config: WebSocketConfig) -> None:
        super().__init__()
        self.network, self.config = network, config
        self.gate: Deferred[None] | None = None
        self.parties: list[Party] = []
        self.shells: list[WebSocketShell] = []

    def render(self, request: Any) -> bytes | int:
        if not asks_for_websocket(request):
            return b"no WebSocket"
        if self.gate is None:
            return self.accept(request)
        self.gate.addCallback(lambda _: self.accept(request))
        return NOT_DONE_YET

    def accept(self, request: Any) -> bytes | int:
        self.parties.append(Party())
        try:
            self.shells.append(accept_websocket(request, self.parties[-1], self.network, self.config))
        except WebSocketRefused as refused:
            request.setResponseCode(refused.status)
            return refused.text.encode()
        return NOT_DONE_YET


class World:
    """A site at ``relay:80`` whose resource is ``door``."""

    def __init__(self, **config: Any) -> None:
        self.network = MemoryNetwork(hosts={"relay": "192.0.2.1"})
        self.door = Door(self.network, WebSocketConfig(**config))
        self.site: Any = LimitedSite(self.door, reactor=self.network, limits=HttpLimits(body_bytes=100))
        self.port = self.network.listenTCP(80, self.site)

    def dial(self, url: str = "ws://relay/", **options: Any) -> tuple[Party, Deferred[WebSocketShell]]:
        party = Party()
        opened = connect_websocket(self.network, WebSocketUrl.parse(url), party, **options)
        self.network.advance(0)
        return party, opened

    def connected(self, **options: Any) -> tuple[Party, WebSocketShell, Party, WebSocketShell]:
        """The client's side and then the server's."""
        party, opened = self.dial(**options)
        shell = result_of(opened)
        return party, shell, self.door.parties[-1], self.door.shells[-1]

    def is_empty(self) -> bool:
        """Whether nothing is left of what was."""
        self.port.stopListening()
        return not self.network.pipes and not self.network.getDelayedCalls() and self.site.connections == 0


def result_of(deferred: Deferred[Any]) -> Any:
    results: list[Any] = []
    deferred.addCallback(results.append)
    [result] = results
    return result


@pytest.fixture
def world() -> World:
    return World()


def test_messages_go_both_ways_and_a_close_ends_it(world: World) -> None:
    ours, our_shell, theirs, their_shell = world.connected()
    our_shell.send(b"ping")
    our_shell.flush()
    their_shell.send(b"pong")
    their_shell.flush()
    world.network.advance(0)
    assert (ours.messages, theirs.messages) == ([b"pong"], [b"ping"])
    their_shell.close(code=4001, reason="taken over")
    assert not their_shell.open
    world.network.advance(0)
    assert ours.closed == Closed(4001, "taken over") and theirs.closed is None
    assert ours.lost and theirs.lost and ours.error is theirs.error is None
    our_shell.send(b"nobody hears this")
    assert world.is_empty()


# --- a server's connection ---------------------------------------------------------------------------------------------

REQUEST = (
    b"GET /any?jwt HTTP/1.1\r\nHost: relay\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
PLAIN = b"GET / HTTP/1.1\r\nHost: relay\r\n\r\n"


class Raw(Protocol):
    """A client that sends bytes and keeps what it gets."""

    def __init__(self) -> None:
        self.received = b""
        self.gone: Failure | None = None

    def dataReceived(self, data: bytes) -> None:
        self.received += data

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.gone = reason

    def send(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[union-attr]


def raw(world: World) -> Raw:
    client = Raw()
    endpoint = TCP4ClientEndpoint(world.network, "192.0.2.1", 80)
    endpoint.connect(Factory.forProtocol(lambda: client))
    world.network.advance(0)
    return client


def masked(payload: bytes, first: int = 0x82) -> bytes:
    one = WebSocket(Role.CLIENT, WebSocketConfig(), now=0, random=bytes)
    return one._frame_of(first, payload)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("size", [1, 5_000, 200_000])
def test_messages_right_behind_the_request_arrive_in_order(world: World, late: bool, size: int) -> None:
    world.door.gate = Deferred() if late else None
    client = raw(world)
    client.send(REQUEST + masked(b"a" * size) + masked(b"b")[:3])
    world.network.advance(0)
    client.send(masked(b"b")[3:])
    world.network.advance(0)
    if world.door.gate is not None:
        assert not client.received
        world.door.gate.callback(None)
    client.send(masked(b"c"))
    world.network.advance(0)
    assert client.received.startswith(b"HTTP/1.1 101 ")
    assert world.door.parties[0].messages == [b"a" * size, b"b", b"c"]


def test_a_caller_has_its_shell_before_the_first_message(world: World) -> None:
    known: list[int] = []
    world.door.gate = Deferred()
    client = raw(world)
    client.send(REQUEST + masked(b"a"))
    world.network.advance(0)
    world.door.gate.callback(None)
    world.door.parties[0].handle_events = lambda shell, _: known.append(world.door.shells.index(shell))  # type: ignore
    world.network.advance(0)
    assert known == [0]


def test_a_connection_that_answered_before_is_upgraded_too(world: World) -> None:
    client = raw(world)
    client.send(PLAIN * 2 + REQUEST + masked(b"a"))
    world.network.advance(0)
    world.door.shells[0].send(b"b")
    world.door.shells[0].flush()
    world.network.advance(0)
    assert client.received.count(b"no WebSocket") == 2 and client.received.endswith(b"\r\n\r\n\x82\x01b")
    assert world.door.parties[0].messages == [b"a"]


@pytest.mark.parametrize(
    ("request_", "status", "text"),
    [
        (REQUEST.replace(b"Sec-WebSocket-Key", b"X"), b"500", b'No "Sec-WebSocket-Key" header'),
        (REQUEST.replace(b"Version: 13", b"Version: 12"), b"500", b'No "Sec-WebSocket-Version: 13" header'),
        (REQUEST.replace(b"GET", b"PUT"), b"400", b"GET, HTTP/1.1 and no body"),
        (REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"), b"400", b"GET, HTTP/1.1 and no body"),
        (REQUEST[:-2] + b"Content-Length: 1\r\n\r\nx", b"400", b"GET, HTTP/1.1 and no body"),
    ],
)
def test_requests_that_are_refused_are_answered(world: World, request_: bytes, status: bytes, text: bytes) -> None:
    client = raw(world)
    client.send(request_)
    world.network.advance(0)
    assert client.received.split(b" ")[1] == status and text in client.received
    assert world.site.connections == (b"HTTP/1.0" not in request_) and world.site.bodies == 0


@pytest.mark.parametrize("messages", [[b"a"], [b"%d" % number * 100 for number in range(100)]], ids=len)
def test_a_chunked_request_without_a_byte_gives_its_place_back(world: World, messages: list[bytes]) -> None:
    client = raw(world)
    behind = b"".join(map(masked, messages))
    client.send(REQUEST[:-2] + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + behind)
    world.network.advance(0)
    assert world.door.parties[0].messages == messages
    assert world.site.bodies == 0


def test_a_client_that_goes_before_it_is_accepted_has_no_websocket(world: World) -> None:
    world.door.gate = gate = Deferred()
    client = raw(world)
    client.send(REQUEST)
    world.network.advance(0)
    client.transport.loseConnection()  # type: ignore[union-attr]
    world.network.advance(0)
    problems: list[Failure] = []
    gate.addErrback(problems.append)
    gate.callback(None)
    assert problems[0].check(ConnectionError) and world.door.shells == [] and world.is_empty()


def test_an_open_one_holds_no_place_of_the_site_and_is_under_none_of_its_times(world: World) -> None:
    ours, our_shell, _, their_shell = world.connected()
    assert world.site.connections == 0
    for _ in range(100):
        world.network.advance(30)
    assert our_shell.open and their_shell.open
    our_shell.close()
    world.network.advance(0)
    assert ours.lost and world.is_empty()


def test_nothing_of_the_request_is_kept(world: World) -> None:
    made: list[Any] = []
    build = world.site.buildProtocol

    def noted(address: Any) -> Any:
        channel = build(address)
        made.append(weakref.ref(channel))
        return channel

    world.site.buildProtocol = noted
    party, shell, *_ = world.connected()
    assert [one() for one in made] == [None]
    shell.close()
    world.network.advance(0)
    assert party.lost


@pytest.mark.parametrize("begun", [b"", b"GET", REQUEST[:-1]])
def test_a_slow_handshake_is_cut(world: World, begun: bytes) -> None:
    client = raw(world)
    client.send(begun)
    world.network.advance(20)
    assert client.gone is not None and world.is_empty()


# --- violations, floods and slow readers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x82\x01x", 1002),
        (b"\xc2\x80", 1002),
        (masked(b"hello", 0x81), 1003),
        (b"\x82\xff" + (2**40).to_bytes(8, "big"), 1009),
        (masked(bytes(900), 0x02) + masked(bytes(900), 0x00) * 2, 1009),
        (masked(b"", 0x89) * 200, 1008),
    ],
    ids=["unmasked", "reserved bit", "text", "long frame", "long message", "ping flood"],
)
def test_a_violation_is_answered_with_its_code_whatever_else_comes(data: bytes, code: int) -> None:
    world = World(max_message_bytes=2000)
    client = raw(world)
    client.send(REQUEST)
    world.network.advance(0)
    head = len(client.received)
    party = world.door.parties[0]
    client.send(masked(b"before") + data + bytes(300_000))
    world.network.advance(0)
    assert party.messages == [b"before"]
    assert client.received[head:][2:4] == code.to_bytes(2, "big")
    assert not world.door.shells[0].open and world.door.shells[0].queued_bytes == 0
    # It goes on sending, and is cut.
    world.network.advance(CLOSE_TIMEOUT_S)
    assert isinstance(party.error, WebSocketViolation) and party.error.code == code
    assert client.gone is not None and world.is_empty()


def test_a_server_s_violation_is_told_to_our_client(world: World) -> None:
    ours, shell, _, their_shell = world.connected()
    their_shell.core._out.append(b"\x83\x00")
    their_shell.core.queued_bytes += 2
    their_shell.flush()
    world.network.advance(0)
    assert ours.lost and isinstance(ours.error, WebSocketViolation) and not shell.open
    assert world.door.parties[0].closed == Closed(1002, "unknown opcode") and world.is_empty()


def test_a_reader_that_takes_nothing_is_cut_after_a_close(world: World) -> None:
    ours, our_shell, theirs, their_shell = world.connected()
    our_shell.hold("test", True)
    for _ in range(100):
        their_shell.send(bytes(30_000))
    their_shell.flush()
    world.network.advance(0)
    assert their_shell.queued_bytes > 2_000_000 and their_shell.congested
    evicted = StageError("request", "slow")
    their_shell.close(evicted, code=4002, reason="slow")
    world.network.advance(CLOSE_TIMEOUT_S - 0.1)
    assert not theirs.lost
    world.network.advance(0.1)
    assert theirs.error is evicted
    our_shell.hold("test", False)
    world.network.advance(0)
    assert ours.lost and world.is_empty()


def test_a_slow_reader_gets_everything_and_then_the_close(world: World) -> None:
    ours, our_shell, theirs, their_shell = world.connected()
    our_shell.hold("test", True)
    for _ in range(100):
        their_shell.send(bytes(30_000))
    their_shell.close(code=1001)
    world.network.advance(1)
    our_shell.hold("test", False)
    world.network.advance(0)
    assert ours.messages == [bytes(30_000)] * 100 and ours.closed == Closed(1001, "")
    assert ours.lost and theirs.lost and world.is_empty()


def test_who_has_much_to_send_over_a_slow_network_does_not_take_the_other_side_for_dead(world: World) -> None:
    """While more than 256 KiB wait nothing is read: here for 60 seconds, in which the other side sends all the time."""
    slow = world.network.through(Link(world.network, bits_per_s=80_000, buffer_bytes=32 * 1024))
    ours = Party()
    opened = connect_websocket(slow, WebSocketUrl.parse("ws://relay/"), ours)
    world.network.advance(1)
    our_shell, theirs, their_shell = result_of(opened), world.door.parties[0], world.door.shells[0]
    for _ in range(28):
        our_shell.send(bytes(30_000))
    our_shell.flush()
    for _ in range(9):
        world.network.advance(10)
        their_shell.send(b"x")
        their_shell.flush()
    assert not ours.lost and not theirs.lost
    assert theirs.messages == [bytes(30_000)] * 28 and ours.messages == [b"x"] * 8


def test_who_has_much_to_send_and_a_network_that_takes_nothing_gives_up(world: World) -> None:
    ours, our_shell, *_ = world.connected()
    [pipe] = world.network.pipes
    world.network.advance(30)
    pipe.freeze()
    for _ in range(28):
        our_shell.send(bytes(30_000))
    our_shell.flush()
    assert our_shell.core.overloaded
    world.network.advance(45)
    assert isinstance(ours.error, KeepaliveLost)


def test_a_violation_of_one_that_reads_nothing_ends_at_once(world: World) -> None:
    client = raw(world)
    client.send(REQUEST)
    world.network.advance(0)
    client.transport.pauseProducing()  # type: ignore[union-attr]
    shell, party = world.door.shells[0], world.door.parties[0]
    for _ in range(8):
        shell.send(bytes(30_000))
    shell.flush()
    assert shell.congested and not shell.core.overloaded
    client.send(b"\xff\xff")
    world.network.advance(0)
    assert isinstance(party.error, WebSocketViolation) and party.lost


def test_one_that_does_not_answer_a_close_is_cut(world: World) -> None:
    client = raw(world)
    client.send(REQUEST)
    world.network.advance(0)
    world.door.shells[0].close(code=4000)
    world.network.advance(CLOSE_TIMEOUT_S - 0.1)
    assert client.received.endswith(b"\x88\x02\x0f\xa0") and client.gone is None
    client.send(masked(b"dropped"))
    world.network.advance(0.1)
    assert client.gone is not None and world.door.parties[0].messages == [] and world.is_empty()


def test_silence_ends_a_connection_and_says_why(world: World) -> None:
    ours, _, theirs, _ = world.connected()
    [pipe] = world.network.pipes
    pipe.freeze()
    world.network.advance(45)
    assert isinstance(ours.error, KeepaliveLost) and isinstance(theirs.error, KeepaliveLost)


@pytest.mark.parametrize("upwards", [True, False])
@pytest.mark.parametrize("messages", [[bytes(1024 * 1024)], [bytes(30_000)] * 35])
def test_what_a_slow_network_takes_for_long_is_no_silence(world: World, messages: list[bytes], upwards: bool) -> None:
    """1 MiB at 12 KiB/s: for a minute and a half no answer can come, and what waits in many messages stops the reading."""
    world.network.link = Link(world.network, delay_s=0.02, bits_per_s=12 * 1024 * 8, buffer_bytes=64 * 1024)
    ours, opened = world.dial()
    world.network.advance(1)
    sender, receiver = (result_of(opened), world.door.parties[0]) if upwards else (world.door.shells[0], ours)
    for message in messages:
        sender.send(message)
    sender.flush()
    for _ in range(90):
        world.network.advance(1)
    assert receiver.messages == messages
    [pipe] = world.network.pipes
    pipe.freeze()
    for _ in range(80):
        world.network.advance(1)
    assert isinstance(ours.error, KeepaliveLost)


def test_a_client_that_vanishes_without_a_close_is_noticed(world: World) -> None:
    _, our_shell, theirs, _ = world.connected()
    our_shell.cut()
    world.network.advance(0)
    assert theirs.lost and theirs.closed is None and world.is_empty()


# --- a client's --------------------------------------------------------------------------------------------------------


class Script(Protocol):
    """A server that says ``answer`` when it is asked, and then hangs up if ``ends``."""

    answer, ends = b"", False

    def connectionMade(self) -> None:
        self.asked = b""

    def dataReceived(self, data: bytes) -> None:
        self.asked += data
        if self.asked.endswith(b"\r\n\r\n"):
            self.transport.write(self.answer)  # type: ignore[union-attr]
            if self.ends:
                self.transport.loseConnection()  # type: ignore[union-attr]


def scripted(answer: bytes, *, ends: bool = False) -> tuple[MemoryNetwork, Deferred[WebSocketShell]]:
    network = MemoryNetwork(hosts={"relay": "192.0.2.1"})
    factory = Factory.forProtocol(type("One", (Script,), {"answer": answer, "ends": ends}))
    network.listenTCP(80, factory)
    opened = connect_websocket(network, WebSocketUrl.parse("ws://relay/"), Party())
    network.advance(0)
    return network, opened


def failure_of(deferred: Deferred[Any]) -> Any:
    failures: list[Failure] = []
    deferred.addErrback(failures.append)
    [failure] = failures
    return failure.value


def test_a_refusal_has_status_and_text(world: World) -> None:
    network, opened = scripted(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 11\r\n\r\nmissing jwt")
    refused = failure_of(opened)
    assert isinstance(refused, WebSocketRefused) and (refused.status, refused.text) == (401, "missing jwt")
    assert not network.pipes and not network.getDelayedCalls()


def test_a_refusal_without_a_length_ends_with_the_connection() -> None:
    network, opened = scripted(b"HTTP/1.1 503 Busy\r\n\r\nfull", ends=True)
    refused = failure_of(opened)
    assert isinstance(refused, WebSocketRefused) and (refused.status, refused.text) == (503, "full")
    assert not network.pipes and not network.getDelayedCalls()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, "the answer's head is too long"),
        (b"HTTP/1.1 101 " + b"x" * 100_000, "the answer's head is too long"),
        (b"SSH-2.0\r\n\r\n", "the answer is not HTTP/1.1"),
        (b"HTTP/1.1 101 Fine\r\n\r\n", "refused with status 101"),
    ],
)
def test_servers_that_are_no_websockets(answer: bytes, problem: str) -> None:
    network, opened = scripted(answer)
    assert problem in str(failure_of(opened))
    assert not network.pipes and not network.getDelayedCalls()


def test_a_server_that_hangs_up_gives_no_answer() -> None:
    network, opened = scripted(b"HTTP/1.1 101", ends=True)
    assert str(failure_of(opened)) == "websocket: no answer"
    assert not network.pipes and not network.getDelayedCalls()


def test_a_server_that_drips_is_left_in_time() -> None:
    network, opened = scripted(b"HTTP/1.1 101 Switching")
    [pipe] = network.pipes
    for _ in range(9):
        network.advance(1)
        pipe.b.write(b"x")
    network.advance(1)
    timeout = failure_of(opened)
    assert isinstance(timeout, StageError) and (timeout.stage, timeout.reason) == ("connect", "timeout")
    network.advance(0)
    assert not network.pipes and not network.getDelayedCalls()


@pytest.mark.parametrize("connected", [False, True])
def test_cancelling_ends_what_has_begun(world: World, connected: bool) -> None:
    world.door.gate = Deferred()
    if not connected:
        world.network.silence("192.0.2.1")
    _, opened = world.dial()
    opened.cancel()
    assert isinstance(failure_of(opened), CancelledError)
    world.network.advance(0)
    assert world.is_empty()


def test_a_place_where_nobody_listens(world: World) -> None:
    world.network.refuse("192.0.2.1")
    _, opened = world.dial()
    world.network.advance(1)
    refused = failure_of(opened)
    assert isinstance(refused, StageError) and (refused.stage, refused.reason) == ("connect", "connection refused")
    assert world.is_empty()


def test_a_message_in_the_same_read_as_the_answer_comes_after_the_shell(world: World) -> None:
    party, opened = Party(), connect_websocket(world.network, WebSocketUrl.parse("ws://relay/"), Party())
    opened.addCallback(lambda shell: setattr(shell, "owner", party))
    accept = world.door.accept

    def greet(request: Any) -> Any:
        given = accept(request)
        world.door.shells[-1].send(b"welcome")
        world.door.shells[-1].flush()
        return given

    world.door.accept = greet  # type: ignore[method-assign]
    world.network.advance(0)
    assert party.messages == [b"welcome"]


@pytest.mark.parametrize(
    ("text", "secure", "address", "target", "host"),
    [
        ("ws://relay", False, "relay:80", "/", "relay"),
        ("ws://relay:8051/?a.b.c", False, "relay:8051", "/?a.b.c", "relay:8051"),
        ("wss://relay/path", True, "relay:443", "/path", "relay"),
        ("wss://[::1]/", True, "[::1]:443", "/", "[::1]"),
        ("wss://relay:80/", True, "relay:80", "/", "relay:80"),
    ],
)
def test_urls(text: str, secure: bool, address: str, target: str, host: str) -> None:
    url = WebSocketUrl.parse(text)
    assert (url.secure, str(url.address), url.target, url.host_header) == (secure, address, target, host)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "http://relay/",
            "https://relay:443/",
            "relay:80",
            "ws://",
            "ws://relay:0/",
            "ws://relay:65536/",
            "ws://a:b@relay/",
            "ws://@relay/",
        ),
        *("ws://relay/#x", "ws://relay/a b", "ws://relay/\r\nX: y", "ws://r\u00e4/", "ws://[::1/", "ws://relay:x/"),
    ],
)
def test_texts_that_are_no_urls(text: str) -> None:
    with pytest.raises(InvalidAddress):
        WebSocketUrl.parse(text)


# --- real sockets ------------------------------------------------------------------------------------------------------


class Echo(Party):
    """Sends each message back."""

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        for event in events:
            if isinstance(event, bytes):
                cast(WebSocketShell, shell).send(event)


class Collector(Party):
    """Fires ``done`` when ``count`` messages are there, and ``gone`` at the end."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.done: Deferred[None] = Deferred()
        self.gone: Deferred[None] = Deferred()

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        super().handle_events(shell, events)
        if len(self.messages) == self.count:
            self.done.callback(None)

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: object) -> None:
        super().connection_lost(shell, error, reason)
        self.gone.callback(None)


class EchoSite(Resource):
    """Accepts every WebSocket and echoes."""

    isLeaf = True

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self.clock = clock

    def render(self, request: Any) -> bytes | int:
        if not asks_for_websocket(request):
            return b"no WebSocket"
        accept_websocket(request, Echo(), self.clock)
        return NOT_DONE_YET


@pytest.fixture
def listening(reactor: Any) -> Any:
    """``listening(tls=None)``: the port of an echoing site, with a TLS context factory if that is given."""
    ports = []

    def listen(tls: Any = None) -> int:
        factory: Any = LimitedSite(EchoSite(reactor), reactor=reactor, limits=HttpLimits(body_bytes=100))
        if tls is not None:
            factory = TLSMemoryBIOFactory(tls, False, factory)
        ports.append(reactor.listenTCP(0, factory, interface="127.0.0.1"))
        return ports[-1].getHost().port

    yield listen
    for port in ports:
        pytest_twisted.blockon(defer.maybeDeferred(port.stopListening))


MESSAGES = [b"", b"x" * 64, bytes(1024 * 1024), b"y" * 70_000, *[b"z" * 1000] * 500]


async def all_come_back(shell: WebSocketShell, party: Collector) -> None:
    """Send :data:`MESSAGES`, get them back, and close."""
    for message in MESSAGES:
        shell.send(message)
    shell.flush()
    await party.done
    assert party.messages == MESSAGES
    shell.close()
    await party.gone
    assert party.error is None


@pytest_twisted.ensureDeferred
async def test_an_echo_over_tcp(reactor: Any, listening: Any) -> None:
    party = Collector(len(MESSAGES))
    shell = await connect_websocket(reactor, WebSocketUrl.parse(f"ws://127.0.0.1:{listening()}/"), party)
    await all_come_back(shell, party)


@pytest_twisted.ensureDeferred
async def test_an_upgrade_behind_other_requests_keeps_the_order_over_tcp(reactor: Any, listening: Any) -> None:
    client, echoed = Raw(), b"\r\n\r\n\x82\x7f" + (100_000).to_bytes(8, "big") + b"a" * 100_000
    got: Deferred[None] = Deferred()
    done: Deferred[None] = Deferred()

    def read(data: bytes) -> None:
        client.received += data
        if client.received.endswith(echoed):
            got.callback(None)

    client.dataReceived = read  # type: ignore[method-assign]
    client.connectionLost = lambda reason=connectionDone: done.callback(None)  # type: ignore[method-assign]
    await TCP4ClientEndpoint(reactor, "127.0.0.1", listening()).connect(Factory.forProtocol(lambda: client))
    client.send(PLAIN * 20 + REQUEST + masked(b"a" * 100_000))
    await got
    client.send(masked(b"", 0x88))
    await done
    before, _, after = client.received.partition(b"HTTP/1.1 101")
    assert before.count(b"no WebSocket") == 20
    assert after.endswith(echoed + b"\x88\x00")


@pytest.fixture
def tls(self_signed: Any, tmp_path: Path) -> Any:
    """``tls(host)``: a context factory with a new certificate of ``host``, and the certificate."""

    def make(host: str) -> tuple[Any, Certificate]:
        holder = x509.DNSName(host) if "_" in host or "--" in host else x509.IPAddress(ipaddress.ip_address(host))
        pem = self_signed(holder)
        path = tmp_path / "both.pem"
        path.write_bytes(pem)
        return DefaultOpenSSLContextFactory(str(path), str(path)), Certificate.loadPEM(pem)

    return make


@pytest_twisted.ensureDeferred
async def test_an_echo_over_tls(reactor: Any, listening: Any, tls: Any) -> None:
    context, certificate = tls("127.0.0.1")
    party = Collector(len(MESSAGES))
    url = WebSocketUrl.parse(f"wss://127.0.0.1:{listening(context)}/")
    shell = await connect_websocket(reactor, url, party, trust=certificate)
    await all_come_back(shell, party)


@pytest.mark.parametrize("host", ["my_relay_1", "pr--7.relays", "_a--b.relays"])
@pytest.mark.parametrize("is_holder", [True, False])
@pytest_twisted.ensureDeferred
async def test_a_host_whose_name_idna_does_not_allow_is_reached_over_tls(
    reactor: Any, listening: Any, tls: Any, host_names: Any, host: str, is_holder: bool
) -> None:
    host_names(host)
    context, certificate = tls(host if is_holder else "another_host")
    url = WebSocketUrl.parse(f"wss://{host}:{listening(context)}/")
    if is_holder:
        party = Collector(len(MESSAGES))
        await all_come_back(await connect_websocket(reactor, url, party, trust=certificate), party)
        return
    with pytest.raises(StageError) as caught:
        await connect_websocket(reactor, url, Party(), trust=certificate)
    assert tls_problem(caught.value.error) == "the certificate is not of this host"


@pytest.mark.parametrize(("host", "trusted"), [("127.0.0.9", True), ("127.0.0.1", False)])
@pytest_twisted.ensureDeferred
async def test_a_certificate_must_be_trusted_and_of_the_host(
    reactor: Any, listening: Any, tls: Any, host: str, trusted: bool
) -> None:
    context, certificate = tls(host)
    url = WebSocketUrl.parse(f"wss://127.0.0.1:{listening(context)}/")
    with pytest.raises(StageError) as caught:
        await connect_websocket(reactor, url, Party(), trust=certificate if trusted else None)
    assert caught.value.stage == "connect"
    assert caught.value.reason == Reason.TLS_FAILED
    problem = "the certificate is not of this host" if trusted else "certificate verify failed"
    assert tls_problem(caught.value.error) == problem
