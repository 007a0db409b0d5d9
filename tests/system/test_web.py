"""``twist web``, unmodified, listens on dmsg; twisted.web's own client and treq fetch from it."""

from __future__ import annotations

import hashlib
import signal

import pytest
import pytest_twisted
from treq.client import HTTPClient
from twisted.internet.endpoints import clientFromString
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.task import deferLater
from twisted.web.client import Agent, HTTPConnectionPool
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.client import HttpDiscovery
from dmsg.testing.network import LocalNetwork
from dmsg.testing.process import free_port

pytestmark = pytest.mark.system

MIB = 1024 * 1024
#: Five MiB in which a byte that is missing or moved shows.
PICTURE = b"".join(hashlib.sha256(number.to_bytes(4, "big")).digest() for number in range(5 * MIB // 32))
RUNNERS = {
    "twist": ("twist", "--log-format=text"),
    "twistd": ("twistd", "-n", "--pidfile="),
}


@implementer(IAgentEndpointFactory, IStreamClientEndpoint)
class Hosts:
    """Connects to the public keys behind host names (a key as it is would be too long for one). Counts connections."""

    def __init__(self, reactor, how: str, hosts: dict[bytes, PublicKey]) -> None:
        self.endpoints = {name: clientFromString(reactor, f"dmsg:{key}:{how}") for name, key in hosts.items()}
        self.connections = 0

    def endpointForURI(self, uri):
        self.chosen = self.endpoints[uri.host]
        return self

    def connect(self, factory):
        self.connections += 1
        return self.chosen.connect(factory)


@pytest.fixture
def site(tmp_path):
    """A directory to serve."""
    directory = tmp_path / "site"
    directory.mkdir()
    (directory / "hello.txt").write_bytes(b"Hello, dmsg!\n")
    (directory / "picture.bin").write_bytes(PICTURE)
    return directory


async def fetch_both(reactor, public_key: PublicKey, how: str) -> None:
    """Four requests over one connection: two files, one that is not there, a part of one."""
    endpoints = Hosts(reactor, how, {b"site.dmsg": public_key})
    pool = HTTPConnectionPool(reactor)
    http = HTTPClient(Agent.usingEndpointFactory(reactor, endpoints, pool))
    hello = await http.get("http://site.dmsg/hello.txt", reactor=reactor)
    assert (hello.code, await hello.content()) == (200, b"Hello, dmsg!\n")
    picture = await http.get("http://site.dmsg/picture.bin", reactor=reactor)
    assert picture.code == 200
    assert hashlib.sha256(await picture.content()).digest() == hashlib.sha256(PICTURE).digest()
    nothing = await http.get("http://site.dmsg/nothing", reactor=reactor)
    assert nothing.code == 404
    await nothing.content()
    part = await http.get("http://site.dmsg/picture.bin", headers={"Range": "bytes=1000-1999"}, reactor=reactor)
    assert (part.code, await part.content()) == (206, PICTURE[1000:2000])
    assert endpoints.connections == 1
    await pool.closeCachedConnections()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest_twisted.ensureDeferred
async def test_twist_web(reactor, start, secret_of, site, runner):
    key_file, public_key = secret_of()
    async with LocalNetwork(reactor, relays=1, discovery=None) as network:
        how = network.endpoint_arguments
        web = start(*RUNNERS[runner], "web", "--path", str(site), "--listen", f"dmsg:key={key_file}:{how}")
        await web.saw(f"is reached as dmsg:{public_key}")
        await fetch_both(reactor, public_key, how)
        fetch = start("fetch.py", f"dmsg:{public_key}:{how}", "/hello.txt", "/picture.bin")
        await fetch.saw("/hello.txt 200 13")
        await fetch.saw(f"/picture.bin 200 {5 * MIB}")
        assert await fetch.ended() == 0
        assert "Warning" not in fetch.output
        web.kill(signal.SIGTERM)
        await web.ended()
        assert "Traceback" not in web.output, web.output
        [server] = network.relays
        while server.stats()["connections"]:
            await deferLater(reactor, 0.01)


@pytest_twisted.ensureDeferred
async def test_everything_in_processes_of_its_own(reactor, start, secret_of, site):
    """Discovery, two relays and a web server as an operator starts them; then the web server leaves in good order."""
    ports = [free_port() for _ in range(3)]
    discovery = start(*RUNNERS["twistd"], "dmsg-discovery", "--listen", f"tcp:{ports[0]}:interface=127.0.0.1")
    await discovery.saw(f"starting on {ports[0]}")
    url = f"http://127.0.0.1:{ports[0]}"
    relays = []
    for port in ports[1:]:
        relay_key, _ = secret_of(f"relay{port}")
        listen = f"tcp:{port}:interface=127.0.0.1"
        arguments = ("--key", str(relay_key), "--listen", listen, "--public-address", f"127.0.0.1:{port}")
        relays.append(start(*RUNNERS["twist"], "dmsg-server", *arguments, "--discovery", url, "--events", "-"))
    for relay in relays:
        await relay.saw('"event":"entry_published"')
    key_file, public_key = secret_of()
    how = "discovery=" + url.replace(":", "\\:")
    listen = f"dmsg:key={key_file}:{how}:min-servers=2"
    web = start(*RUNNERS["twist"], "web", "--path", str(site), "--listen", listen)
    await web.saw(f"is reached as dmsg:{public_key}")
    await fetch_both(reactor, public_key, how)
    book = HttpDiscovery.connect(url, reactor)
    assert len((await book.get_entry(public_key)).client.delegated_servers) == 2
    web.kill(signal.SIGTERM)
    await web.ended()
    assert not (await book.get_entry(public_key)).client.delegated_servers
    await book.close()
    for program in (*relays, discovery):
        program.kill(signal.SIGTERM)
        assert await program.ended() == 0
    for program in (web, *relays, discovery):
        assert "Traceback" not in program.output, program.output


@pytest_twisted.ensureDeferred
async def test_a_wrong_string_says_what_is_wrong(start):
    web = start(*RUNNERS["twist"], "web", "--listen", f"dmsg:{SecretKey.generate().public_key}")
    assert await web.ended() != 0
    assert r"a colon inside a value is written \:" in web.output
