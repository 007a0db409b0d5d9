"""Weaknesses that begin in discovery: entries that are hostile or merely unexpected, and a discovery that fails."""

from __future__ import annotations

import contextlib
import json
import random
import time
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site

from dmsg.address import HostPort
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.api import DiscoveryApi, make_site
from dmsg.discovery.client import HttpDiscovery
from dmsg.discovery.entry import DELEGATED_SERVERS_LIMIT, ClientPart, Entry, ServerPart
from dmsg.discovery.errors import WrongSequence
from dmsg.discovery.stores.memory import MemoryStore
from dmsg.errors import DialError
from dmsg.mux.relay.service import DmsgRelay
from dmsg.testing.strategies import FIELD_PRIME

pytestmark = pytest.mark.system
sync = pytest_twisted.ensureDeferred


class Discovery(Resource):
    """A discovery that does what a test says, and remembers what it was asked."""

    isLeaf = True

    def __init__(self, mode: str = "404") -> None:
        super().__init__()
        self.mode = mode
        self.answers: dict[str, bytes] = {}
        self.gets: list[str] = []
        self.posts: list[dict[str, Any]] = []

    def render(self, request: Any) -> Any:
        name = request.path.decode().rpartition("/")[2]
        if request.method == b"POST":
            self.posts.append(json.loads(request.content.read()))
        else:
            self.gets.append(name)
            if name in self.answers:
                return self.answers[name]
        match self.mode:
            case "hangs":
                return NOT_DONE_YET
            case "hangs in its answer":
                request.write(b'{"version":')
                return NOT_DONE_YET
            case "never ends":
                request.notifyFinish().addErrback(lambda _: None)
                request.registerProducer(_Endless(request), False)
                return NOT_DONE_YET
            case "500":
                request.setResponseCode(500)
                return b"<html>out of order</html>"
            case "wrong sequence" if request.method == b"POST":
                request.setResponseCode(422)
                return json.dumps({"message": WrongSequence.text, "code": 422}).encode()
        request.setResponseCode(404)
        return b'{"message":"entry of public key is not found","code":404}'


class _Endless:
    """Writes until the reader goes."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.resumeProducing = lambda: request.write(bytes(65_536))

    def stopProducing(self) -> None:
        self._request.unregisterProducer()


@contextlib.asynccontextmanager
async def serving(reactor: Any, site: Site) -> Any:
    """An ``HttpDiscovery`` of a site on loopback."""
    port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(site)
    url = f"http://127.0.0.1:{port.getHost().port}"
    discovery = HttpDiscovery.connect(url, reactor, timeout_s=0.3)
    try:
        yield discovery
    finally:
        await discovery.close()
        await port.stopListening()


@contextlib.asynccontextmanager
async def relay(w: Any, key: SecretKey, discovery: Any) -> Any:
    """Another server, registered in ``discovery``."""
    endpoint = TCP4ServerEndpoint(w.reactor, 0, interface="127.0.0.1")
    server = DmsgRelay(w.reactor, key, endpoint, public_address=HostPort("127.0.0.1", 9), discovery=discovery)
    server.startService()
    await w.soon(server.listening())
    try:
        yield server
    finally:
        await server.stopService()


def _entry(key: SecretKey, **halves: Any) -> Entry:
    return Entry("0.0.1", 0, time.time_ns(), key.public_key, **halves).sign(key)


# --- keys that are none ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["static", "delegated server", "server list"])
@sync
async def test_w01_an_entry_with_a_bad_key(world, where):
    """An entry with a key that is no point killed the reference's client. Here: the dial fails, and nothing else does."""
    async with world() as w:
        hostile = Discovery()
        async with serving(w.reactor, Site(hostile)) as discovery:
            client = await w.client(discovery=discovery, publish=False, min_servers=2 if where == "server list" else 1,
                                    ready=False)  # fmt: skip
            await w.until(lambda: client.pool.sessions)
            target = SecretKey.generate()
            entry = json.loads(_entry(target, client=ClientPart((w.pinned.public_key,))).to_json())
            for x in (0, 5, FIELD_PRIME, FIELD_PRIME + 1, 2**256 - 1):
                bad = "02" + x.to_bytes(32, "big").hex()
                if where == "static":
                    entry["static"] = bad
                else:
                    entry["client"]["delegated_servers"] = [bad]
                hostile.answers[str(target.public_key)] = json.dumps(entry).encode()
                hostile.answers["available_servers"] = json.dumps([entry]).encode()
                with pytest.raises(DialError):
                    await w.soon(client.dial(target.public_key), 3.0)
            if where == "server list":
                await w.until(lambda: hostile.gets.count("available_servers") >= 3)
            assert client.running
            await client.stopService()


@sync
async def test_w01_an_entry_with_a_null_list(world):
    """What Go writes for no servers at all is a reason for a dial to fail like any other."""
    async with world() as w:
        hostile = Discovery()
        async with serving(w.reactor, Site(hostile)) as discovery:
            client = await w.client(discovery=discovery, publish=False)
            for halves in ({"client": ClientPart(None)}, {"server": ServerPart("127.0.0.1:9", 1)}):
                target = SecretKey.generate()
                hostile.answers[str(target.public_key)] = _entry(target, **halves).to_json()
                with pytest.raises(DialError) as caught:
                    await w.soon(client.dial(target.public_key), 3.0)
                assert caught.value.attempts[0].reason == "no common server"
            await client.stopService()


@sync
async def test_w20_an_entry_that_names_very_many_servers(world):
    """A hostile entry cannot make a dial try server after server without end."""
    async with world() as w:
        hostile = Discovery()
        async with serving(w.reactor, Site(hostile)) as discovery:
            client = await w.client(discovery=discovery, publish=False)
            target = SecretKey.generate()
            servers = tuple(SecretKey.generate().public_key for _ in range(DELEGATED_SERVERS_LIMIT))
            hostile.answers[str(target.public_key)] = _entry(target, client=ClientPart(servers)).to_json()
            with pytest.raises(DialError) as caught:
                await w.soon(client.dial(target.public_key))
            assert len(caught.value.attempts) == client.config.dial.servers
            assert len(hostile.gets) == 1 + client.config.dial.servers
            await client.stopService()


# --- the other kind --------------------------------------------------------------------------------------------------


@sync
async def test_w04_an_entry_of_the_other_kind(world):
    """A server's half under a client's key, or the reverse, crashed the reference at start. Here: both halves stand."""
    async with world() as w:
        store = MemoryStore()
        api = DiscoveryApi(store, clock_ns=time.time_ns, random=random.Random(4))
        key, other = SecretKey.generate(), SecretKey.generate()
        site = make_site(api.resource(), reactor=w.reactor)
        async with serving(w.reactor, site) as discovery:
            await store.put(_entry(key, server=ServerPart("127.0.0.1:9", 7)), time.time_ns())
            await store.put(_entry(other, client=ClientPart((w.pinned.public_key,))), time.time_ns())
            client = await w.client(key=key, discovery=discovery)
            entry = await discovery.get_entry(key.public_key)
            assert entry.server == ServerPart("127.0.0.1:9", 7)
            assert entry.delegated_servers == (w.pinned.public_key,)
            async with relay(w, other, discovery) as server:
                await w.soon(server.registrar.published())
                entry = await discovery.get_entry(other.public_key)
                assert entry.delegated_servers == (w.pinned.public_key,)
                assert entry.server is not None
            # one process that is both
            async with relay(w, key, discovery) as server:
                await w.soon(server.registrar.published())
                entry = await discovery.get_entry(key.public_key)
                assert entry.delegated_servers == (w.pinned.public_key,)
                assert entry.server is not None
                assert entry.server.available_connections == server.available_connections
            await client.stopService()


# --- discovery fails -------------------------------------------------------------------------------------------------


@pytest.mark.time_limit(60)
@pytest.mark.parametrize("mode", ["hangs", "hangs in its answer", "never ends", "500", "wrong sequence"])
@sync
async def test_w20_a_discovery_that_fails(world, resident, mode):
    """Any error led to a POST of sequence 0, retries had no pause and no end, and HTTP no time limit.

    Here: client and server go on, ask less and less often, and post nothing they are not sure of.
    """
    async with world() as w:
        hostile = Discovery(mode)
        peer = await w.echoer()
        memory = resident()
        async with serving(w.reactor, Site(hostile)) as discovery:
            client = await w.client(discovery=discovery, ready=False)
            async with relay(w, SecretKey.generate(), discovery) as server:
                await w.until(lambda: client.pool.sessions)
                keepers = [one.registrar.keepers[0] for one in (client, server)]
                for _ in range(2):  # pinned servers need no discovery
                    recorder = await w.connect(client, peer)
                    recorder.transport.write(b"hello")
                    await w.soon(recorder.got(5))
                    recorder.transport.loseConnection()
                await w.until(lambda: all(one.failures >= 2 for one in keepers), 15.0)
                asked = [name for name in hostile.gets if name != str(peer.public_key)]
                if mode == "wrong sequence":
                    assert len(hostile.posts) <= 5 * sum(one.failures for one in keepers)
                else:
                    assert not hostile.posts
                assert len(asked) <= 5 * sum(one.failures for one in keepers) + 2
                assert server.ready
            await client.stopService()
        assert resident() - memory < 32 << 20
