"""``twistd messaging-server`` as a process: it serves, registers, is killed, comes again, and ends well."""

from __future__ import annotations

import json
import signal
import urllib.request
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.threads import deferToThread

from dmsg.crypto.keys import SecretKey
from dmsg.messaging.core.wire import CHANNEL_OPENED, OPEN_CHANNEL, SEND
from dmsg.testing.process import free_port
from tests.links import MESSAGE, RawLink, Said

pytestmark = pytest.mark.system


def messaging_server(start: Any, key_file: Any, port: int, *options: str) -> Any:
    listen = f"tcp:{port}:interface=127.0.0.1"
    arguments = ("--key", str(key_file), "--listen", listen, "--events", "-", *options)
    return start("twist", "--log-format=text", "messaging-server", *arguments)


async def two_clients(reactor: Any, relay: Any, port: int) -> tuple[RawLink, RawLink]:
    """Two clients with an open channel between them."""
    endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", port)
    alice, bob = [await connectProtocol(endpoint, RawLink(relay, SecretKey.generate())) for _ in range(2)]
    await alice.up
    await bob.up
    alice.ask(bob)
    [offer] = await bob.next()
    assert offer.kind == OPEN_CHANNEL
    bob.say(CHANNEL_OPENED, offer.channel_id, MESSAGE)
    assert await alice.next() == [Said(CHANNEL_OPENED, 0, MESSAGE)]
    alice.say(SEND, 0, b"there")
    bob.say(SEND, offer.channel_id, b"back")
    assert (await bob.next(), await alice.next()) == (
        [Said(SEND, offer.channel_id, b"there")],
        [Said(SEND, 0, b"back")],
    )
    return alice, bob


@pytest_twisted.ensureDeferred
async def test_a_killed_relay_ends_its_links_and_serves_again_when_it_is_back(
    reactor: Any, start: Any, secret_of: Any
) -> None:
    key_file, public_key = secret_of("relay")
    port = free_port()
    program = messaging_server(start, key_file, port)
    await program.saw("links of the messaging system are neither encrypted nor authenticated")
    await program.saw('"event":"server_started"')
    alice, bob = await two_clients(reactor, public_key, port)
    program.kill(signal.SIGKILL)
    assert await program.ended() == -signal.SIGKILL
    await alice.over.addTimeout(5.0, reactor)
    await bob.over.addTimeout(5.0, reactor)
    again = messaging_server(start, key_file, port)
    await again.saw('"event":"server_started"')
    clients = await two_clients(reactor, public_key, port)
    again.kill(signal.SIGTERM)
    assert await again.ended() == 0
    for client in clients:
        await client.over
    assert '"event":"drained"' in again.output and '"event":"server_stopped"' in again.output
    assert '"event":"transport_opened"' in again.output and "Traceback" not in again.output


@pytest_twisted.ensureDeferred
async def test_it_registers_with_what_it_speaks_and_is_proved_and_listed(
    reactor: Any, start: Any, secret_of: Any
) -> None:
    key_file, public_key = secret_of("relay")
    found, port = free_port(), free_port()
    discovery = start(
        "twist", "--log-format=text", "dmsg-discovery", "--listen", f"tcp:{found}:interface=127.0.0.1",
        "--store", "memory:",
    )  # fmt: skip
    await discovery.saw("dmsg-discovery runs, on")
    options = ("--public-address", f"127.0.0.1:{port}", "--discovery", f"http://127.0.0.1:{found}")
    program = messaging_server(start, key_file, port, *options)
    assert '"ok":true' in await program.saw('"event":"entry_published"')

    def listed() -> Any:
        url = f"http://127.0.0.1:{found}/messaging-discovery/available_servers?protocol=messaging"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return json.load(answer)

    [entry] = await deferToThread(listed)
    assert (entry["version"], entry["static"]) == ("0.0.1+messaging", str(public_key))
    assert (entry["server"]["address"], entry["server"]["port"]) == (f"127.0.0.1:{port}", str(port))
    program.kill(signal.SIGTERM)
    assert await program.ended() == 0
    discovery.kill(signal.SIGTERM)
    assert await discovery.ended() == 0


# --- with real clients -------------------------------------------------------------------------------------------------


async def chatter(start: Any, string: str, name: str) -> Any:
    """Someone who has joined the chat, in a process of its own."""
    program = start("chat_client.py", string)
    await program.saw("Your name?")
    program.say(name)
    await program.saw(f"{name} is here")
    return program


@pytest_twisted.ensureDeferred
async def test_a_relay_and_each_client_are_killed_in_turn(start: Any, secret_of: Any) -> None:
    """A relay, a server and its clients, each a process: whichever is killed, the others learn of it and go on."""
    relay_file, relay_key = secret_of("relay")
    chat_file, chat_key = secret_of("chat")
    port = free_port()
    how = f"server={relay_key}@127.0.0.1\\:{port}"
    relay = messaging_server(start, relay_file, port)
    await relay.saw('"event":"server_started"')
    server = start("chat_server.py", f"messaging:key={chat_file}:{how}")
    assert str(chat_key) in await server.saw("listening at ")
    string = f"messaging:{chat_key}:{how}"
    ada, bob = await chatter(start, string, "Ada"), await chatter(start, string, "Bob")
    # a client that dialled
    ada.kill(signal.SIGKILL)
    await bob.saw("Ada has left")
    # the relay: its channels end, and the server links to it again by itself
    relay.kill(signal.SIGKILL)
    assert f"the connection to server {relay_key} was lost" in await bob.saw("The end: ")
    assert await bob.ended() == 0 and server.status is None
    relay = messaging_server(start, relay_file, port)
    await relay.saw('"event":"connection_opened"')
    cyd, dan = await chatter(start, string, "Cyd"), await chatter(start, string, "Dan")
    cyd.say("all of it again")
    await dan.saw("<Cyd> all of it again")
    # the client that listens
    server.kill(signal.SIGKILL)
    for one in (cyd, dan):
        assert "peer_gone" in await one.saw("The end: ")
        assert await one.ended() == 0
    # so that the next one is told that nothing is there
    late = start("chat_client.py", string)
    await late.ended()
    assert "request rejected" in late.output
    for program in (relay, bob, cyd, dan):
        assert "Traceback" not in program.output, program.output
