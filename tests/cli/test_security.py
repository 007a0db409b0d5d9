"""``--security`` and ``--service``: what commands ask for, what they get, and what they say of it."""

from __future__ import annotations

import io
import json

import pytest
import pytest_twisted
from click.testing import CliRunner
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol
from zope.interface import implementer

from dmsg.address import DmsgAddress
from dmsg.cli import ping as ping_module
from dmsg.cli.channel import TransportBroken
from dmsg.cli.commands import group
from dmsg.cli.exits import Exit, describe, exit_code
from dmsg.cli.files.receive import Rules, run_receive
from dmsg.cli.files.send import run_send
from dmsg.cli.output import Output, tell_opened
from dmsg.cli.ping import run_echo, run_ping
from dmsg.cli.tunnels import run_expose, run_forward
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.errors import DialError
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.errors import DowngradeRefused

HTTP = pytest.mark.parametrize("bench", ["http"], indirect=True)


async def listening(bench, run, *args, **options):
    """Start a command that listens: itself, and its key."""
    command = bench.start(run, *args, **options)
    return command, PublicKey.parse((await command.ready())["public_key"])


@HTTP
@pytest.mark.parametrize(
    ("ours", "theirs", "got"),
    [
        (Security.PREFER, Security.PREFER, "e2e"),
        (Security.E2E, Security.PREFER, "e2e"),
        (Security.E2E, Security.E2E, "e2e"),
        (Security.PREFER, Security.HOP, "hop"),
        (Security.HOP, Security.HOP, "hop"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_ping_and_echo_tell_what_security_was_obtained(bench, ours, theirs, got):
    echo, peer = await listening(bench, run_echo, security=theirs)
    (result,) = await bench.run(run_ping, peer, count=1, size=64, interval_s=0, security=ours)
    assert result["security"] == got
    opened = await echo.stdout.wait_for(event="opened")
    assert opened["security"] == got and opened["server"] == result["server"]


@HTTP
@pytest_twisted.ensureDeferred
async def test_a_peer_that_promises_nothing_is_refused_with_the_reason_when_only_e2e_will_do(bench):
    _, peer = await listening(bench, run_echo, security=Security.HOP)
    with pytest.raises(DialError) as caught:
        await bench.run(run_ping, peer, count=1, size=64, interval_s=0, security=Security.E2E)
    assert exit_code(caught.value) is Exit.UNREACHABLE == 4
    assert isinstance(caught.value.attempts[-1].error, DowngradeRefused)
    assert "promises no end-to-end security" in describe(caught.value)
    stream = io.StringIO()
    Output(io.StringIO(), stream, json_lines=True).failure(caught.value)
    told = json.loads(stream.getvalue())
    assert (told["exit_code"], told["reason"]) == (4, "downgrade")


@HTTP
@pytest_twisted.ensureDeferred
async def test_a_stranger_who_speaks_in_the_clear_gets_nothing_from_a_command_that_will_not(bench):
    echo, peer = await listening(bench, run_echo, security=Security.E2E)
    with pytest.raises(TransportBroken, match="downgrade"):
        await bench.run(run_ping, peer, count=1, size=64, interval_s=0, security=Security.HOP)
    assert not any(line["event"] == "opened" for line in echo.stdout.objects())


@pytest_twisted.ensureDeferred
async def test_files_tell_what_security_they_had_and_go_to_a_service(bench, tmp_path):
    (tmp_path / "inbox").mkdir()
    (tmp_path / "file").write_bytes(b"content")
    rules = Rules(tmp_path / "inbox", 1000)
    receiving, peer = await listening(bench, run_receive, rules, once=True, service="files")
    with pytest.raises(DialError):
        await bench.run(run_send, peer, (str(tmp_path / "file"),), retries=0)
    (sent,) = await bench.run(run_send, peer, (str(tmp_path / "file"),), retries=0, service="files")
    await receiving.ended
    received = receiving.stdout.objects()[-1]
    assert sent["security"] == received["security"] == "e2e"
    assert (tmp_path / "inbox" / "file").read_bytes() == b"content"


@pytest_twisted.ensureDeferred
async def test_each_service_has_its_listener(bench):
    _, peer = await listening(bench, run_echo, service="écho")
    (result,) = await bench.run(run_ping, peer, count=1, size=64, interval_s=0, service="écho")
    assert result["security"] == "e2e"
    for other in ("", "echo"):
        with pytest.raises(DialError) as caught:
            await bench.run(run_ping, peer, count=1, size=64, interval_s=0, service=other)
        assert caught.value.reason == "no_such_service"


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """What ``dmsg ping`` and ``dmsg echo`` are called with; nothing runs."""
    calls = []

    def execute(call, make):
        calls.append(call.settings.security)
        make(None)

    def noted(call, reactor, *args, **options):
        calls.append(options["service"])

    monkeypatch.setattr(ping_module.Invocation, "execute", execute)
    monkeypatch.setattr(ping_module, "run_ping", noted)
    monkeypatch.setattr(ping_module, "run_echo", noted)
    return calls


PEER = str(SecretKey.generate().public_key)


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ((), {}, [None, ""]),
        (("--security", "e2e"), {}, [Security.E2E, ""]),
        ((), {"DMSG_SECURITY": "hop"}, [Security.HOP, ""]),
        (("--security", "e2e"), {"DMSG_SECURITY": "hop"}, [Security.E2E, ""]),
        (("--service", "x" * 255), {}, [None, "x" * 255]),
    ],
)
@pytest.mark.parametrize("command", [("ping", PEER), ("echo",)])
def test_options_win_over_the_environment(asked, command, arguments, environ, expected):
    result = CliRunner().invoke(group, [*command, *arguments], env=environ)
    assert (result.exit_code, asked) == (0, expected), result.output


@pytest.mark.parametrize(
    ("arguments", "environ", "why"),
    [
        (("--security", "none"), {}, "must be one of e2e, prefer, hop, not 'none' (in option --security)"),
        ((), {"DMSG_SECURITY": "E2E please"}, "(in variable DMSG_SECURITY)"),
        (("--service", "é" * 128), {}, "at most 255 bytes"),
        (("--service", "a\udcff"), {}, "a service name is Unicode text, not 'a\\udcff'"),
        (("--service", "x", "--security", "hop"), {}, "needs end-to-end security"),
    ],
)
def test_what_cannot_be_is_a_usage_error(arguments, environ, why):
    result = CliRunner().invoke(group, ["echo", *arguments], env=environ)
    assert result.exit_code == Exit.USAGE and why in result.output


def test_people_are_told_who_came_and_how():
    class Transport:
        security = "e2e"

        def getPeer(self):
            key = SecretKey.generate().public_key
            return DmsgAddress(key, "", key)

    stdout, stderr = io.StringIO(), io.StringIO()
    tell_opened(Output(stdout, stderr), Transport())
    assert stdout.getvalue() == "" and "(e2e)" in stderr.getvalue()


# --- tunnels ---------------------------------------------------------------------------------------------------------


@implementer(IHalfCloseableProtocol)
class Half(Protocol):
    """Collects what comes; each direction may end alone."""

    def __init__(self):
        self.received = b""
        self.made, self.read_ended, self.lost = Deferred(), Deferred(), Deferred()

    def connectionMade(self):
        self.made.callback(self)

    def dataReceived(self, data):
        self.received += data

    def readConnectionLost(self):
        self.read_ended.callback(self.received)

    def writeConnectionLost(self):
        """Our own doing."""

    def connectionLost(self, reason):
        self.lost.callback(reason.value)


async def tunnel(bench, target, **options):
    """A TCP connection through ``forward`` and ``expose`` to ``service``: both commands, and the near end."""
    factory = Factory.forProtocol(lambda: target)
    factory.noisy = False
    port = bench.reactor.listenTCP(0, factory, interface="127.0.0.1")
    endpoint = f"tcp:127.0.0.1:{port.getHost().port}"
    expose, peer = await listening(bench, run_expose, endpoint, **options)
    forward = bench.start(run_forward, peer, "tcp:0:interface=127.0.0.1", **options)
    address = (await forward.ready())["listening"]
    near = await TCP4ClientEndpoint(bench.reactor, *_split(address)).connect(Factory.forProtocol(Half))
    await target.made
    await port.stopListening()
    return expose, forward, near


def _split(address):
    host, _, port = address.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("first", ["client", "service"])
@pytest_twisted.ensureDeferred
async def test_a_tunnel_ends_one_direction_and_goes_on_with_the_other(bench, first):
    service = Half()
    expose, forward, client = await tunnel(bench, service)
    near, far = (client, service) if first == "client" else (service, client)
    question, answer = b"q" * 2_000_000, b"a" * 2_000_000
    near.transport.write(question)
    near.transport.loseWriteConnection()
    assert await far.read_ended == question
    far.transport.write(answer)
    far.transport.loseWriteConnection()
    assert await near.read_ended == answer
    near.transport.loseConnection()
    far.transport.loseConnection()
    for end in (near, far):
        assert isinstance(await end.lost, ConnectionDone)
    for command in (expose, forward):
        assert (await command.stdout.wait_for(event="opened"))["security"] == "e2e"


@pytest.mark.parametrize("first", ["client", "service"])
@pytest.mark.parametrize(("bench", "security"), [("http", Security.HOP), ("messaging", None)], indirect=["bench"])
@pytest_twisted.ensureDeferred
async def test_where_no_direction_can_end_alone_answers_arrive_before_both_end(bench, first, security):
    service = Half()
    expose, _, client = await tunnel(bench, service, security=security)
    near, far = (client, service) if first == "client" else (service, client)
    question, answer = b"q" * 2_000_000, b"a" * 2_000_000
    near.transport.write(question)
    near.transport.loseWriteConnection()
    far.transport.write(answer)
    assert await far.read_ended == question
    assert await near.read_ended == answer
    near.transport.loseConnection()
    far.transport.loseConnection()
    for end in (near, far):
        assert isinstance(await end.lost, ConnectionDone)
    opened = await expose.stdout.wait_for(event="opened")
    assert opened["security"] == ("hop" if security is Security.HOP else "e2e")


@pytest_twisted.ensureDeferred
async def test_tunnels_go_to_a_service(bench):
    service = Half()
    _, _, client = await tunnel(bench, service, service="web")
    client.transport.write(b"hello")
    client.transport.loseConnection()
    assert await service.read_ended == b"hello"
    service.transport.loseConnection()
    await service.lost
    await client.lost
