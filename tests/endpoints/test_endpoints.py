"""Endpoints over dmsg, and the strings that make them."""

from __future__ import annotations

import json
import os
import time

import pytest
import pytest_twisted
from twisted.application.internet import StreamServerEndpointService
from twisted.application.service import MultiService, Service
from twisted.internet import error
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.endpoints import TCP4ClientEndpoint, clientFromString, connectProtocol, serverFromString
from twisted.internet.interfaces import IListeningPort, IReactorCore, IStreamClientEndpoint, IStreamServerEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.protocols.wire import Echo
from zope.interface import implementer
from zope.interface.verify import verifyObject

from dmsg.address import DmsgAddress, PinnedServer
from dmsg.clients.access import AllowKeys
from dmsg.crypto.errors import KeyFileError
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.errors import DiscoveryUnavailable
from dmsg.endpoints.sharing import SharedClients, SharedSettings, shared_clients, stop_idle_clients
from dmsg.endpoints.stream import DmsgConnectError
from dmsg.errors import ConfigError, DialError, DmsgError
from dmsg.mux.client.endpoint import DmsgClientEndpoint, DmsgServerEndpoint, parse_client, parse_server
from dmsg.mux.client.service import DmsgClient
from dmsg.mux.client.settings import ClientSettings
from dmsg.relays.choice import RelaysFrom, RelaysMode
from dmsg.relays.operator_list import ListedRelay, sign_relay_list
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork

ABSENT = SecretKey(bytes(31) + b"\x05").public_key
_RELAY = SecretKey(bytes(31) + b"\x06").public_key
PIN = f"{_RELAY}@127.0.0.1:9"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("DMSG_")]:
        monkeypatch.delenv(name)


class Talk(Protocol):
    """Collects what it gets; ``got`` fires at ``expect`` bytes, ``over`` at the end."""

    def __init__(self, expect: int = 5) -> None:
        self.expect = expect
        self.received = b""
        self.got: Deferred[bytes] = Deferred()
        self.over: Deferred[Exception] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.received += data
        if len(self.received) >= self.expect and not self.got.called:
            self.got.callback(self.received)

    def connectionLost(self, reason=None) -> None:
        self.over.callback(reason.value.with_traceback(None))


class CountingFactory(Factory):
    """Counts starts and stops, as :class:`Factory` does with ``numPorts``."""

    noisy = False
    protocol = Echo


async def echo(endpoint, text: bytes = b"hello") -> bytes:
    """One connection: say something, get it back, close."""
    talk = await connectProtocol(endpoint, Talk(len(text)))
    talk.transport.write(text)
    answer = await talk.got
    talk.transport.loseConnection()
    assert isinstance(await talk.over, error.ConnectionDone)
    return answer


async def all_stopped(reactor, network: LocalNetwork) -> None:
    """Wait until no client is connected to the network's servers."""
    while any(server.stats()["connections"] for server in network.relays):
        await deferLater(reactor, 0.005)


# --- endpoints over a client of one's own ----------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_endpoints_over_clients(reactor):
    async with LocalNetwork(reactor, relays=1) as network:
        alice, bob = await network.client(), await network.client()
        server = DmsgServerEndpoint(bob)
        client = DmsgClientEndpoint(alice, bob.public_key)
        assert verifyObject(IStreamServerEndpoint, server)
        assert verifyObject(IStreamClientEndpoint, client)
        factory = CountingFactory()
        port = await server.listen(factory)
        assert verifyObject(IListeningPort, port)
        assert port.getHost() == DmsgAddress(bob.public_key)
        assert await echo(client) == b"hello"
        await port.stopListening()
        await port.stopListening()
        assert factory.numPorts == 0
        # the client belongs to the network: it goes on
        assert bob.running
        again = await server.listen(factory)
        assert await echo(client) == b"hello"
        await again.stopListening()


@pytest_twisted.ensureDeferred
async def test_a_port_listens_again_when_its_client_was_stopped_and_started_again(reactor):
    async with LocalNetwork(reactor, relays=1) as network:
        alice, bob = await network.client(), await network.client()
        factory = CountingFactory()
        port = await DmsgServerEndpoint(bob).listen(factory)
        port.startListening()
        assert factory.numPorts == 1
        await bob.stopService()
        bob.startService()
        port.startListening()
        await bob.when_ready()
        assert await echo(DmsgClientEndpoint(alice, bob.public_key)) == b"hello"
        await port.stopListening()
        with pytest.raises(error.CannotListenError, match=f"on dmsg:{bob.public_key}: a port .* that was stopped"):
            port.startListening()
        assert factory.numPorts == 0


@pytest_twisted.ensureDeferred
async def test_an_application_whose_services_were_stopped_is_started_again(reactor):
    async with LocalNetwork(reactor, relays=1) as network:
        alice, bob = await network.client(), network.new_client()
        application = MultiService()
        bob.setServiceParent(application)
        server = StreamServerEndpointService(DmsgServerEndpoint(bob), CountingFactory())
        server.setServiceParent(application)
        for _ in range(2):
            application.privilegedStartService()
            application.startService()
            await bob.when_ready()
            assert await echo(DmsgClientEndpoint(alice, bob.public_key)) == b"hello"
            await application.stopService()
        assert server.factory.numPorts == 0


@pytest_twisted.ensureDeferred
async def test_what_dials_over_a_client_may_be_started_before_it(reactor):
    """Also when its application was stopped before: a ClientService would wait for its next attempt."""

    class Calling(Service):
        def startService(self) -> None:
            self.answer = ensureDeferred(echo(endpoint))

    async with LocalNetwork(reactor, relays=1) as network:
        alice, bob = network.new_client(), await network.client()
        bob.listen(CountingFactory())
        endpoint = DmsgClientEndpoint(alice, bob.public_key)
        application, calling = MultiService(), Calling()
        calling.setServiceParent(application)
        alice.setServiceParent(application)
        for _ in range(2):
            application.privilegedStartService()
            application.startService()
            assert await calling.answer == b"hello"
            await application.stopService()


@pytest_twisted.ensureDeferred
async def test_a_listening_service_is_taken(reactor):
    async with LocalNetwork(reactor, relays=1) as network:
        endpoint = DmsgServerEndpoint(await network.client())
        port = await endpoint.listen(CountingFactory())
        with pytest.raises(error.CannotListenError):
            await endpoint.listen(CountingFactory())
        await port.stopListening()


@pytest_twisted.ensureDeferred
async def test_a_policy_refuses(reactor):
    async with LocalNetwork(reactor, relays=1) as network:
        alice, bob = await network.client(), await network.client()
        port = await DmsgServerEndpoint(bob, policy=AllowKeys([ABSENT])).listen(CountingFactory())
        with pytest.raises(DmsgConnectError) as caught:
            await connectProtocol(DmsgClientEndpoint(alice, bob.public_key), Talk())
        assert caught.value.reason == "access_denied"
        await port.stopListening()


@pytest_twisted.ensureDeferred
async def test_a_string_with_a_list_of_keys(reactor, key_file):
    """Who is on it gets in, end to end; the environment says nothing about who may."""
    async with LocalNetwork(reactor, relays=1, discovery=None) as network:
        alice, carol, stranger = [await network.client() for _ in range(3)]
        bob = SecretKey.generate()
        allowed = f"{alice.public_key},{carol.public_key}"
        text = f"dmsg:key={key_file(bob)}:{network.endpoint_arguments}:allow={allowed}:idle-timeout=60"
        factory = CountingFactory()
        endpoint = serverFromString(reactor, text)
        assert endpoint.limits.idle_timeout_s == 60
        port = await endpoint.listen(factory)
        for friend in (alice, carol):
            assert await echo(DmsgClientEndpoint(friend, bob.public_key)) == b"hello"
        with pytest.raises(DmsgConnectError) as caught:
            await connectProtocol(DmsgClientEndpoint(stranger, bob.public_key), Talk())
        assert caught.value.reason == "access_denied"
        await port.stopListening()


@pytest_twisted.ensureDeferred
async def test_a_failed_connect_is_both_kinds_of_error(reactor):
    async with LocalNetwork(reactor, relays=1) as network:
        alice = await network.client()
        with pytest.raises(DialError) as caught:
            await connectProtocol(DmsgClientEndpoint(alice, ABSENT), Talk())
        assert isinstance(caught.value, error.ConnectError)
        assert caught.value.target == str(ABSENT)
        assert str(ABSENT) in str(caught.value)
        assert "no entry" in str(caught.value)
        assert repr(caught.value) == f"DmsgConnectError({str(caught.value)!r})"
        assert [one.stage for one in caught.value.attempts] == ["discovery"]


@pytest_twisted.ensureDeferred
async def test_the_factory_of_a_connect_is_started_and_stopped(reactor):
    async with LocalNetwork(reactor, relays=1) as network:
        alice, bob = await network.client(), await network.client()
        bob.listen(CountingFactory())
        talk = Talk()
        factory = Factory.forProtocol(lambda: talk)
        await DmsgClientEndpoint(alice, bob.public_key).connect(factory)
        assert factory.numPorts == 1
        talk.transport.loseConnection()
        await talk.over
        await network.settle()
        assert factory.numPorts == 0
        with pytest.raises(DialError):
            await DmsgClientEndpoint(alice, ABSENT).connect(factory)
        await network.settle()
        assert factory.numPorts == 0


@pytest.mark.parametrize("network", ["dmsg", "tcp"])
@pytest_twisted.ensureDeferred
async def test_a_factory_that_connects_again_as_soon_as_that_has_failed_is_not_stopped_between(reactor, network):
    calls = []

    class Kept(Factory):
        noisy = False

        def startFactory(self) -> None:
            calls.append("start")

        def stopFactory(self) -> None:
            calls.append("stop")

    async def try_twice(endpoint: IStreamClientEndpoint) -> None:
        factory = Kept()
        for _ in range(2):
            with pytest.raises(error.ConnectError):
                await endpoint.connect(factory)
            calls.append("failed")
        await deferLater(reactor, 0)
        assert calls == ["start", "failed", "failed", "stop"]

    if network == "tcp":
        port = reactor.listenTCP(0, Factory(), interface="127.0.0.1")
        number = port.getHost().port
        await port.stopListening()
        await try_twice(TCP4ClientEndpoint(reactor, "127.0.0.1", number))
    else:
        async with LocalNetwork(reactor, relays=1, discovery="http") as local:
            await try_twice(DmsgClientEndpoint(await local.client(), ABSENT))


@pytest.mark.parametrize("problem", ["none", "raises"])
@pytest_twisted.ensureDeferred
async def test_a_factory_without_a_protocol_fails_the_connect(reactor, problem):
    class Unwilling(Factory):
        noisy = False

        def buildProtocol(self, addr):
            if problem == "raises":
                raise ZeroDivisionError

    async with LocalNetwork(reactor, relays=1) as network:
        alice, bob = await network.client(), await network.client()
        built = []

        class Listening(Factory):
            def buildProtocol(self, addr):
                built.append(Echo())
                return built[-1]

        bob.listen(Listening())
        factory = Unwilling()
        with pytest.raises((error.NoProtocol, ZeroDivisionError)):
            await DmsgClientEndpoint(alice, bob.public_key).connect(factory)
        assert await echo(DmsgClientEndpoint(alice, bob.public_key)) == b"hello"
        # what was given up before a word has proved nothing: the listener has only seen the other
        assert len(built) == 1
        assert not list(alice.transports)
        await network.settle()
        assert factory.numPorts == 0


@pytest_twisted.ensureDeferred
async def test_a_cancelled_connect_takes_its_request_back(reactor):
    class Undecided:
        """Never answers."""

        asked = 0

        def allow(self, remote, service):
            self.asked += 1
            asked.callback(None)
            return Deferred()

    asked: Deferred[None] = Deferred()
    async with LocalNetwork(reactor, relays=1) as network:
        alice, bob = await network.client(), await network.client()
        port = await DmsgServerEndpoint(bob, policy=Undecided()).listen(CountingFactory())
        talk = Talk()
        connecting = DmsgClientEndpoint(alice, bob.public_key).connect(Factory.forProtocol(lambda: talk))
        await asked
        connecting.cancel()
        with pytest.raises(error.ConnectingCancelledError):
            await connecting
        [server] = network.relays
        while server.switch.members[alice.public_key.raw].legs:
            await deferLater(reactor, 0.005)
        assert talk.transport is None
        await port.stopListening()


@pytest.mark.parametrize("where", ["buildProtocol", "buildProtocol, which makes none", "connectionMade"])
@pytest_twisted.ensureDeferred
async def test_a_connect_is_cancelled_while_its_protocol_is_made(reactor, where):
    class Undecided(Talk):
        def connectionMade(self):
            super().connectionMade()
            if where == "connectionMade":
                connecting.cancel()

    class Asking(Factory):
        noisy = False

        def buildProtocol(self, addr):
            if where != "connectionMade":
                connecting.cancel()
            return talk if "none" not in where else None

    async with LocalNetwork(reactor, relays=1) as network:
        alice, bob = await network.client(), await network.client()
        bob.listen(CountingFactory())
        talk, factory = Undecided(), Asking()
        connecting = DmsgClientEndpoint(alice, bob.public_key).connect(factory)
        with pytest.raises(error.ConnectingCancelledError):
            await connecting
        await network.settle()
        assert not list(alice.transports)
        assert factory.numPorts == 0
        if where == "connectionMade":
            await talk.over
        else:
            assert talk.transport is None


@pytest_twisted.ensureDeferred
async def test_a_connect_has_a_time_limit():
    class Undecided:
        def allow(self, remote, service):
            return Deferred()

    async with LocalNetwork(MemoryNetwork(), relays=1) as network:
        alice, bob = await network.client(), await network.client()
        await network.wait(DmsgServerEndpoint(bob, policy=Undecided()).listen(CountingFactory()))
        began = network.reactor.seconds()
        with pytest.raises(DmsgConnectError) as caught:
            await network.wait(
                DmsgClientEndpoint(alice, bob.public_key, timeout_s=3.0).connect(Factory.forProtocol(Talk))
            )
        assert caught.value.reason == "timeout"
        assert network.reactor.seconds() - began == pytest.approx(3.0)


# --- strings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discovery", ["http", None])
@pytest_twisted.ensureDeferred
async def test_strings_reach_each_other(reactor, key_file, discovery):
    key = SecretKey.generate()
    async with LocalNetwork(reactor, relays=2, discovery=discovery) as network:
        how = network.endpoint_arguments
        server = serverFromString(reactor, f"dmsg:key={key_file(key)}:{how}")
        port = await server.listen(CountingFactory())
        assert port.getHost() == DmsgAddress(key.public_key)
        assert await echo(clientFromString(reactor, f"dmsg:{key.public_key}:{how}")) == b"hello"
        await port.stopListening()
        await all_stopped(reactor, network)


@pytest_twisted.ensureDeferred
async def test_the_environment_fills_in_what_a_string_does_not_say(reactor, key_file, monkeypatch):
    key = SecretKey.generate()
    async with LocalNetwork(reactor, relays=2, discovery=None) as network:
        monkeypatch.setenv("DMSG_SERVER", " ".join(map(str, network.pinned)))
        monkeypatch.setenv("DMSG_KEY", str(key_file(key)))
        port = await serverFromString(reactor, "dmsg").listen(CountingFactory())
        monkeypatch.delenv("DMSG_KEY")
        assert await echo(clientFromString(reactor, f"dmsg:{key.public_key}")) == b"hello"
        await port.stopListening()
        await all_stopped(reactor, network)


@pytest_twisted.ensureDeferred
async def test_a_discovery_in_the_environment_is_not_for_strings_with_servers(reactor, monkeypatch):
    monkeypatch.setenv("DMSG_DISCOVERY", "not a URL")
    assert parse_client(reactor, str(ABSENT), server=PIN) is not None
    with pytest.raises(ConfigError, match=r"must be http://host:port.*in variable DMSG_DISCOVERY"):
        parse_client(reactor, str(ABSENT))


def test_a_key_file_where_others_may_put_another_is_refused(reactor, key_file, tmp_path):
    (tmp_path / "open").mkdir()
    file = key_file(SecretKey.generate(), "open/alice")
    file.parent.chmod(0o777)
    with pytest.raises(KeyFileError, match="others may write"):
        serverFromString(reactor, f"dmsg:key={file}:discovery=http\\://x")


@pytest_twisted.ensureDeferred
async def test_several_servers(reactor, key_file):
    """Commas and numbers; each server is connected to, and any of them will do."""
    key = SecretKey.generate()
    async with LocalNetwork(reactor, relays=3, discovery=None) as network:
        first, second, third = (str(one).replace(":", "\\:") for one in network.pinned)
        text = f"dmsg:key={key_file(key)}:server={first},{second}:server2={third}:min-servers=3"
        port = await serverFromString(reactor, text).listen(CountingFactory())
        assert [server.stats()["connections"] for server in network.relays] == [1, 1, 1]
        assert await echo(clientFromString(reactor, f"dmsg:{key.public_key}:server={third}")) == b"hello"
        await port.stopListening()
        await all_stopped(reactor, network)


def test_twisted_keeps_the_last_of_two_arguments_with_one_name(reactor):
    """Why numbered names exist: the first of two ``server=`` never gets here."""
    one, two = (f"{SecretKey.generate().public_key}@127.0.0.1\\:{port}" for port in (1, 2))
    endpoint = clientFromString(reactor, f"dmsg:{ABSENT}:server={one}:server={two}")
    assert [str(pin) for pin in endpoint._source.settings.client.servers] == [two.replace("\\", "")]
    endpoint = clientFromString(reactor, f"dmsg:{ABSENT}:server={one}:server2={two}")
    assert [str(pin) for pin in endpoint._source.settings.client.servers] == [
        one.replace("\\", ""),
        two.replace("\\", ""),
    ]


@pytest.mark.parametrize(
    ("text", "option", "says"),
    [
        ("dmsg", "public key", "write dmsg:PUBLIC_KEY"),
        ("dmsg:", "public key", "write dmsg:PUBLIC_KEY"),
        ("dmsg:abc", "public key", "66 hex digits"),
        (f"dmsg:{ABSENT}", "discovery", "discovery=URL or server="),
        (f"dmsg:{ABSENT}:sevice=x:server=x", "sevice=", "unknown argument.*service="),
        (f"dmsg:{ABSENT}:serverx=x", "serverx=", "unknown argument"),
        (f"dmsg:{ABSENT}:server=127.0.0.1\\:80", "server", r"pk@host:port, not '127\.0\.0\.1:80' "),
        (f"dmsg:{ABSENT}:server={PIN}", "'9'", r"a colon inside a value is written \\:"),
        (f"dmsg:{ABSENT}:discovery=http://127.0.0.1:80", "'//127.0.0.1'", r"a colon inside a value is written \\:"),
        (f"dmsg:{ABSENT}:discovery=ftp\\://x", "discovery", r"must be http://host:port.*discovery= of an endpoint"),
        (f"dmsg:{ABSENT}:discovery=http\\://x:timeout=soon", "timeout", "a duration such as"),
        (f"dmsg:{ABSENT}:discovery=http\\://x:timeout=0", "timeout", "more than 0"),
        (f"dmsg:{ABSENT}:discovery=http\\://x:timeout=nan", "timeout", "finite number"),
        (f"dmsg:{ABSENT}:discovery=http\\://x:min-servers=-1", "min_servers", "not be negative"),
        (f"dmsg:{ABSENT}:discovery=http\\://x:service={'x' * 256}", "service", "255 bytes"),
        (f"dmsg:{ABSENT}:discovery=http\\://x:relays=a.json", "relays_key", "whose list"),
        (f"dmsg:{ABSENT}:discovery=http\\://x:relays-key={ABSENT}", "relays_key", "no list"),
        (f"dmsg:{ABSENT}:discovery=http\\://x:relays=a:relays-key=02ab", "relays_key", "66 hex digits"),
        (
            f"dmsg:{ABSENT}:discovery=http\\://x:relays=a:relays-key={ABSENT}:relays-mode=all",
            "relays_mode",
            "one of prefer, only",
        ),
        (f"dmsg:{ABSENT}:discovery=http\\://x:allow={ABSENT}", "allow=", "unknown argument"),
        (f"dmsg:{ABSENT}:discovery=http\\://x:idle-timeout=9", "idle-timeout=", "unknown argument"),
    ],
)
def test_what_is_wrong_with_a_client_string(reactor, text, option, says):
    with pytest.raises(ConfigError, match=says) as caught:
        clientFromString(reactor, text)
    assert caught.value.option == option


@pytest.mark.parametrize(
    ("arguments", "option", "says"),
    [
        ("discovery=http\\://x", "key", "key=FILE"),
        ("key={key}", "discovery", "discovery=URL or server="),
        ("key={key}:discovery=http\\://x:min-servers=0", "min_servers", "at least one"),
        ("key={key}:discovery=http\\://x:port=80", "port=", "unknown argument"),
        ("what:key={key}:discovery=http\\://x", "'what'", "not expected; a colon inside a value is written"),
        ("me.key:discovery=http\\://x", "'me.key'", "a server listens with dmsg:key=FILE, and a colon inside"),
        (f"{ABSENT}:discovery=http\\://x", f"'{ABSENT}'", "a server listens with dmsg:key=FILE"),
        ("key={key}:discovery=http\\://x:allow=", "allow", "empty list"),
        ("key={key}:discovery=http\\://x:allow=none", "allow", "must name a key"),
        ("key={key}:discovery=http\\://x:allow=02ab", "allow", "66 hex digits"),
        ("key={key}:discovery=http\\://x:idle-timeout=0", "idle_timeout", "more than 0"),
    ],
)
def test_what_is_wrong_with_a_server_string(reactor, key_file, arguments, option, says):
    text = "dmsg:" + arguments.format(key=key_file(SecretKey.generate()))
    with pytest.raises(ConfigError, match=says) as caught:
        serverFromString(reactor, text)
    assert caught.value.option == option


def test_two_strings_of_one_client_name_one_list_of_relays(reactor, monkeypatch):
    listed = f"dmsg:{ABSENT}:discovery=http\\://x:relays=a.json:relays-key={ABSENT}"
    first = clientFromString(reactor, listed)
    assert first._source.settings.client.relay_list() == RelaysFrom(
        os.path.abspath("a.json"), (ABSENT,), RelaysMode.PREFER
    )
    assert clientFromString(reactor, listed)._source is first._source
    for other in (f"{listed}:relays-mode=only", f"dmsg:{ABSENT}:discovery=http\\://x"):
        with pytest.raises(ConfigError, match="relays: another endpoint"):
            clientFromString(reactor, other)
    monkeypatch.setenv("DMSG_RELAYS", "b.json")
    monkeypatch.setenv("DMSG_RELAYS_KEY", str(ABSENT))
    monkeypatch.setenv("DMSG_RELAYS_MODE", "only")
    other = clientFromString(reactor, f"dmsg:{ABSENT}:discovery=http\\://y")
    assert other._source.settings.client.relay_list() == RelaysFrom(
        os.path.abspath("b.json"), (ABSENT,), RelaysMode.ONLY
    )
    assert clientFromString(reactor, listed)._source is first._source


@pytest_twisted.ensureDeferred
async def test_a_string_with_a_list_of_relays_uses_no_others(reactor, key_file, tmp_path):
    operator, keys = SecretKey.generate(), [SecretKey.generate() for _ in range(3)]
    async with LocalNetwork(reactor, relays=2, discovery="http") as network:
        for key, chosen in zip(keys, (network.pinned[0], network.pinned[1], network.pinned[0]), strict=True):
            now = int(time.time())
            path = tmp_path / f"{key.public_key}.json"
            path.write_bytes(sign_relay_list([ListedRelay(chosen.public_key)], operator, issued=now, expires=now + 60))
            text = f"dmsg:key={key_file(key, str(key.public_key))}:{network.endpoint_arguments}:state-dir=none"
            text += f":relays={path}:relays-key={operator.public_key}:relays-mode=only"
            port = await serverFromString(reactor, text).listen(CountingFactory())
            entry = await network.discovery.get_entry(key.public_key)
            assert entry.client.delegated_servers == (chosen.public_key,)
            await port.stopListening()
        await all_stopped(reactor, network)


@pytest_twisted.ensureDeferred
async def test_a_file_fills_in_what_neither_a_string_nor_the_environment_says(reactor, key_file, monkeypatch, tmp_path):
    key = SecretKey.generate()
    async with LocalNetwork(reactor, relays=2, discovery=None) as network:
        (tmp_path / "dmsg.toml").write_text(
            f'[client]\nserver = {json.dumps([str(one) for one in network.pinned])}\nstate_dir = "none"\n'
            f'key = "{key_file(key).name}"\nevents = "events"\n[client.dial]\ntimeout_s = "4s"\n'
            "[of-another-protocol]\n"
        )
        named = f"config={tmp_path / 'dmsg.toml'}"
        listening = serverFromString(reactor, f"dmsg:{named}")
        port = await listening.listen(CountingFactory())
        stranger = clientFromString(reactor, f"dmsg:{key.public_key}:{named}:key=none")
        assert stranger._source.settings.client.config.dial.timeout_s == 4.0
        assert await echo(stranger) == b"hello"
        await port.stopListening()
        await all_stopped(reactor, network)
        for endpoint in (listening, stranger):  # which begins when the one before has ended, its log included
            await endpoint._source.acquire()
            await endpoint._source.release()
        assert list((tmp_path / "events").rglob("*.zst"))
        monkeypatch.setenv("DMSG_CONFIG", str(tmp_path / "dmsg.toml"))
        monkeypatch.setenv("DMSG_DIAL_TIMEOUT_S", "5")
        settings = clientFromString(reactor, f"dmsg:{ABSENT}:server={PIN.replace(':', chr(92) + ':')}")._source.settings
        assert [str(one) for one in settings.client.servers] == [PIN]
        assert settings.client.config.dial.timeout_s == 5.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[cleint]", r"cleint: is no table; did you mean \[client\]\?"),
        ("[client]\nsevice = 'x'", r"sevice: is no setting.*\(in \[client\] of .*dmsg.toml:2\)"),
        ("[client]\nmin_servers = -1", r"min_servers: must not be negative, not -1 \(in \[client\] of .*dmsg.toml:2\)"),
    ],
)
def test_what_is_wrong_with_the_file_of_a_string(reactor, tmp_path, text, says):
    (tmp_path / "dmsg.toml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        parse_client(reactor, str(ABSENT), server=PIN, config=str(tmp_path / "dmsg.toml"))


def test_a_key_file_is_read_at_once(reactor, tmp_path):
    with pytest.raises(KeyFileError):
        serverFromString(reactor, f"dmsg:key={tmp_path / 'none'}:server={PIN}".replace(":9", "\\:9"))


def test_arguments_may_be_written_with_underscores(reactor):
    endpoint = parse_client(reactor, str(ABSENT), server=PIN, min_servers="2", service="web", timeout="2.5")
    assert endpoint._source.settings.client.min_servers == 2
    assert (endpoint.address.service, endpoint.timeout_s) == ("web", 2.5)
    assert repr(endpoint) == f"<DmsgClientEndpoint to dmsg:{ABSENT}/web>"


def pinned_to(network):
    return ClientSettings(servers=tuple(network.pinned), state_dir="none")


# --- sharing ---------------------------------------------------------------------------------------------------------


def test_what_strings_share(reactor, key_file):
    file, other_file = key_file(SecretKey.generate()), key_file(SecretKey.generate(), "other")
    other_pin = f"{ABSENT}@127.0.0.1:9"
    base = parse_server(reactor, key=str(file), server=f"{PIN},{other_pin}")
    assert parse_client(reactor, str(ABSENT), key=str(file), server=f"{other_pin},{PIN}")._source is base._source
    assert parse_server(reactor, key=str(file), server=PIN, server1=other_pin, service="x")._source is base._source
    assert parse_server(reactor, key=str(other_file), server=f"{PIN},{other_pin}")._source is not base._source
    assert parse_server(reactor, key=str(file), server=PIN)._source is not base._source
    assert parse_client(reactor, str(ABSENT), server=f"{PIN},{other_pin}")._source is not base._source


@pytest_twisted.ensureDeferred
async def test_one_client_serves_strings_with_one_key(reactor, key_file):
    key, other = SecretKey.generate(), SecretKey.generate()
    file = key_file(key)
    async with LocalNetwork(reactor, relays=1, discovery=None) as network:
        [server] = network.relays
        how = network.endpoint_arguments
        bob = await network.client(key=other)
        bob.listen(CountingFactory())
        port = await serverFromString(reactor, f"dmsg:key={file}:{how}").listen(CountingFactory())
        client = clientFromString(reactor, f"dmsg:{other.public_key}:key={file}:{how}")
        assert await echo(client) == b"hello"
        assert server.stats()["connections"] == 2
        # the port still holds the client
        assert (await bob.dial(key.public_key)).connected
        await port.stopListening()
        await bob.stopService()
        await all_stopped(reactor, network)


@pytest_twisted.ensureDeferred
async def test_a_shared_client_lasts_as_long_as_its_last_transport(reactor, key_file):
    """A port that is closed leaves its connections alone, and their client with them."""
    key = SecretKey.generate()
    async with LocalNetwork(reactor, relays=1, discovery=None) as network:
        [server] = network.relays
        how = network.endpoint_arguments
        port = await serverFromString(reactor, f"dmsg:key={key_file(key)}:{how}").listen(CountingFactory())
        talk = await connectProtocol(clientFromString(reactor, f"dmsg:{key.public_key}:{how}"), Talk())
        talk.transport.write(b"first")
        assert await talk.got == b"first"
        talk.received, talk.got = b"", Deferred()
        await port.stopListening()
        talk.transport.write(b"still")
        assert await talk.got == b"still"
        assert server.stats()["connections"] == 2
        talk.transport.loseConnection()
        await talk.over
        await all_stopped(reactor, network)


@pytest_twisted.ensureDeferred
async def test_a_key_comes_back_after_its_client_has_stopped(reactor, key_file):
    """The old client's withdrawal from discovery does not undo what the new one publishes."""
    key = SecretKey.generate()
    file = key_file(key)
    async with LocalNetwork(reactor, relays=1, discovery="http") as network:
        how = network.endpoint_arguments
        endpoint = serverFromString(reactor, f"dmsg:key={file}:{how}")
        client = clientFromString(reactor, f"dmsg:{key.public_key}:{how}")
        port = await endpoint.listen(CountingFactory())
        old = endpoint._source.client
        stopping = port.stopListening()
        await deferLater(reactor, 0)
        again = await endpoint.listen(CountingFactory())
        assert stopping.called
        assert endpoint._source.client is not old
        entry = await network.discovery.get_entry(key.public_key)
        assert (len(entry.client.delegated_servers), entry.sequence) == (1, 2)
        assert await echo(client) == b"hello"
        await again.stopListening()
        await all_stopped(reactor, network)


@pytest_twisted.ensureDeferred
async def test_a_client_without_a_key_is_not_published(reactor, key_file):
    key = SecretKey.generate()
    async with LocalNetwork(reactor, relays=3, discovery="http") as network:
        how = network.endpoint_arguments
        port = await serverFromString(reactor, f"dmsg:key={key_file(key)}:{how}").listen(CountingFactory())
        endpoint = clientFromString(reactor, f"dmsg:{key.public_key}:{how}")
        talk = await connectProtocol(endpoint, Talk())
        stranger = talk.transport.getHost().public_key
        # one session for the dial, one of the server: nothing more
        assert sum(server.stats()["connections"] for server in network.relays) == 2
        assert endpoint._source.client.registrar is None
        assert stranger != key.public_key
        talk.transport.loseConnection()
        await talk.over
        await port.stopListening()
        await all_stopped(reactor, network)


@pytest_twisted.ensureDeferred
async def test_a_failed_listen_stops_its_client(reactor, key_file):
    key = SecretKey.generate()
    async with LocalNetwork(reactor, relays=1, discovery=None) as network:
        text = f"dmsg:key={key_file(key)}:{network.endpoint_arguments}"
        first = serverFromString(reactor, text)
        port = await first.listen(CountingFactory())
        with pytest.raises(error.CannotListenError):
            await serverFromString(reactor, text).listen(CountingFactory())
        await port.stopListening()
        await all_stopped(reactor, network)
        assert first._source.client is None


@pytest_twisted.ensureDeferred
async def test_a_listen_that_takes_too_long(reactor, key_file):
    """No relay answers on the pinned address: with a time limit that is an error, without one it goes on until cancelled."""
    file = key_file(SecretKey.generate())
    memory = MemoryNetwork()
    memory.silence("127.0.0.1", 9)
    network = LocalNetwork(memory, relays=0)
    endpoint = parse_server(memory, key=str(file), server=PIN, timeout="7")
    with pytest.raises(error.CannotListenError) as caught:
        await network.wait(endpoint.listen(CountingFactory()))
    assert "longer than 7 s" in str(caught.value)
    assert memory.seconds() == pytest.approx(7.0)
    patient = parse_server(memory, key=str(file), server=PIN)
    listening = patient.listen(CountingFactory())
    memory.advance(300.0)
    assert not listening.called
    listening.cancel()
    with pytest.raises(CancelledError):
        await listening
    memory.advance(0.0)
    assert memory.getDelayedCalls() == []


@pytest_twisted.ensureDeferred
async def test_a_listen_that_takes_too_long_says_what_was_in_the_way(reactor):
    """Discovery that cannot be had, or lists no relay, or relays that cannot be reached; and which key is meant."""
    async with LocalNetwork(MemoryNetwork(), relays=1) as network:

        async def refused(**options):
            client = network.new_client(**options)
            client.startService()
            with pytest.raises(error.CannotListenError) as caught:
                await network.wait(DmsgServerEndpoint(client, "web", timeout_s=8.0).listen(CountingFactory()))
            await network.wait(client.stopService())
            text, begins = str(caught.value), f"Couldn't listen on dmsg:{client.public_key}/web: "
            assert text.startswith(begins)
            return text.removeprefix(begins)

        late = "connecting to servers took longer than 8 s"
        network.discovery.failure = DiscoveryUnavailable("down")
        assert await refused() == f"{late} (discovery: down)."
        network.discovery.failure = None
        pin = PinnedServer.parse(PIN)
        gone = f"connect via {str(pin.public_key)[:12]}…: connection refused"
        assert await refused(discovery=None, servers=[pin]) == f"{late} ({gone})."
        await network.stop_relay(network.relays[0])
        assert await refused() == f"{late} (discovery knows no server with room)."


@pytest_twisted.ensureDeferred
async def test_a_cancelled_connect_stops_its_client(reactor):
    memory = MemoryNetwork()
    memory.silence("127.0.0.1", 9)
    connecting = parse_client(memory, str(ABSENT), server=PIN).connect(CountingFactory())
    memory.advance(1.0)
    connecting.cancel()
    with pytest.raises(error.ConnectingCancelledError):
        await connecting
    memory.advance(0.0)
    assert memory.getDelayedCalls() == []


@implementer(IReactorCore)
class _Triggers(MemoryNetwork):
    """A memory network that can be shut down."""

    def __init__(self) -> None:
        super().__init__()
        self.triggers: dict[int, object] = {}

    def addSystemEventTrigger(self, phase, event, function):
        assert (phase, event) == ("before", "shutdown")
        self.triggers[len(self.triggers)] = function
        return len(self.triggers) - 1

    def removeSystemEventTrigger(self, trigger):
        del self.triggers[trigger]

    def shut_down(self):
        [trigger] = self.triggers.values()
        self.triggers.clear()
        return trigger()


@pytest_twisted.ensureDeferred
async def test_the_end_of_the_reactor_stops_shared_clients(key_file):
    memory = _Triggers()
    async with LocalNetwork(memory, relays=1, discovery=None) as network:
        registry = SharedClients(memory, DmsgClient.from_parts, None)
        source = registry.get(SharedSettings(SecretKey.generate(), pinned_to(network)))
        port = await network.wait(DmsgServerEndpoint(source).listen(CountingFactory()))
        bob = await network.client()
        talk = Talk()
        await network.wait(bob.connect(Factory.forProtocol(lambda: talk), port.getHost().public_key))
        await network.wait(memory.shut_down())
        assert isinstance(await network.wait(talk.over), error.ConnectionDone)
        assert [server.stats()["connections"] for server in network.relays] == [1]
        with pytest.raises(DmsgError, match="shutting down"):
            await network.wait(DmsgServerEndpoint(source).listen(CountingFactory()))
        await network.wait(port.stopListening())
        assert memory.triggers == {}


@pytest_twisted.ensureDeferred
async def test_a_listen_that_waits_when_the_reactor_ends_reports_no_error_and_can_be_cancelled():
    memory = _Triggers()
    memory.silence("127.0.0.1", 9)
    settings = ClientSettings(servers=[PinnedServer.parse(PIN)])
    registry = SharedClients(memory, DmsgClient.from_parts, None)
    listening = DmsgServerEndpoint(registry.get(SharedSettings(SecretKey.generate(), settings))).listen(
        CountingFactory()
    )
    over = memory.shut_down()
    while not over.called:
        memory.advance(1.0)
    assert not listening.called
    listening.cancel()
    with pytest.raises(CancelledError):
        await listening
    memory.advance(0.0)
    assert memory.getDelayedCalls() == [] and memory.triggers == {}


@pytest_twisted.ensureDeferred
async def test_the_reactor_does_not_wait_for_ever_for_a_client_whose_timers_were_cancelled():
    """Trial cancels them when a test leaves a client behind that stops."""

    class Stuck:
        def startService(self):
            pass

        def stopService(self):
            return Deferred()

    memory = _Triggers()
    registry = SharedClients(memory, lambda parts, **options: Stuck(), None)
    await registry.get(SharedSettings(None, ClientSettings(servers=[PinnedServer.parse(PIN)]))).acquire()
    over = memory.shut_down()
    memory.advance(59.0)
    assert not over.called
    memory.advance(1.0)
    assert over.called and memory.getDelayedCalls() == []


@pytest_twisted.ensureDeferred
async def test_no_trigger_is_left_in_the_reactor(key_file):
    memory = _Triggers()
    async with LocalNetwork(memory, relays=1, discovery=None) as network:
        registry = SharedClients(memory, DmsgClient.from_parts, None)
        source = registry.get(SharedSettings(SecretKey.generate(), pinned_to(network)))
        port = await network.wait(DmsgServerEndpoint(source).listen(CountingFactory()))
        assert len(memory.triggers) == 1
        await network.wait(port.stopListening())
        assert memory.triggers == {}
        assert registry.get(source.settings) is source


def test_reactors_do_not_share():
    one, two = MemoryNetwork(), MemoryNetwork()
    registry = shared_clients(one, DmsgClient.from_parts)
    assert shared_clients(one, DmsgClient.from_parts) is registry
    assert shared_clients(two, DmsgClient.from_parts) is not registry


@pytest_twisted.ensureDeferred
async def test_a_source_taken_again_in_the_same_moment_goes_on(reactor):
    async with LocalNetwork(reactor, relays=1, discovery=None) as network:
        source = shared_clients(reactor, DmsgClient.from_parts).get(SharedSettings(None, pinned_to(network)))
        client = await source.acquire()
        released = source.release()
        again = await source.acquire()
        await released
        assert again is client
        assert client.running
        await source.release()
        assert not client.running
        fresh = await ensureDeferred(source.acquire())
        assert fresh is not client
        await source.release()


@pytest_twisted.ensureDeferred
async def test_a_program_can_wait_until_the_clients_of_its_strings_have_stopped(reactor, key_file):
    async with LocalNetwork(reactor, relays=1, discovery="http") as network:
        accepted = Talk()
        served = f"dmsg:key={key_file(SecretKey.generate())}:{network.endpoint_arguments}"
        port = await serverFromString(reactor, served).listen(Factory.forProtocol(lambda: accepted))
        running = shared_clients(reactor, DmsgClient.from_parts)._running

        async def talk_once():
            nonlocal accepted
            accepted = Talk()
            dialled = f"dmsg:{port.getHost().public_key}:{network.endpoint_arguments}"
            talk = await clientFromString(reactor, dialled).connect(Factory.forProtocol(Talk))
            talk.transport.loseConnection()
            await talk.over
            await accepted.over

        await talk_once()
        await stop_idle_clients(reactor)
        assert len(running) == 1  # that of the port, which is in use
        await talk_once()
        await port.stopListening()
        await stop_idle_clients(reactor)
        assert len(running) == 0
