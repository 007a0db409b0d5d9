"""The documentation's chat, which knows nothing of dmsg: over TCP and each protocol, by its endpoint strings alone."""

from __future__ import annotations

import signal

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.protocol import Factory, Protocol

from dmsg.crypto.keys import SecretKey
from dmsg.testing.network import LocalNetwork

pytestmark = pytest.mark.system


async def chat(start, server_string, client_string_for):
    """Three people talk, one leaves, the server is interrupted."""
    server = start("chat_server.py", server_string)
    host = await server.saw("listening at ")
    client_string = client_string_for(host)
    people = {}
    for number, name in enumerate(("Ada", "Bob", "Cyd"), start=1):
        one = people[name] = start("chat_client.py", client_string)
        await one.saw("Your name?")
        one.say(name)
        for other in people.values():
            await other.saw(f"{name} is here, and now we are {number}")
    people["Ada"].say("Hello — is this thing on?")
    for one in people.values():
        await one.saw("<Ada> Hello — is this thing on?")
    people["Bob"].say("/bye")
    await people["Bob"].saw("The end: Connection was closed cleanly.")
    assert await people["Bob"].ended() == 0
    await people["Ada"].saw("Bob has left")
    people["Ada"].transport.closeStdin()
    assert await people["Ada"].ended() == 0
    await people["Cyd"].saw("Ada has left")
    assert people["Cyd"].status is None
    server.kill(signal.SIGINT)
    await server.ended()
    await people["Cyd"].saw("The end: ")
    assert await people["Cyd"].ended() == 0
    for program in (server, *people.values()):
        assert "Traceback" not in program.output, program.output


@pytest_twisted.ensureDeferred
async def test_over_tcp(start):
    await chat(start, "tcp:0:interface=127.0.0.1", lambda host: f"tcp:127.0.0.1:{host.rpartition('port=')[2][:-1]}")


@pytest.mark.parametrize("discovery", ["http", None])
@pytest_twisted.ensureDeferred
async def test_over_dmsg(reactor, start, secret_of, discovery):
    key_file, _ = secret_of()
    async with LocalNetwork(reactor, relays=2, discovery=discovery) as network:
        how = network.endpoint_arguments
        await chat(start, f"dmsg:key={key_file}:{how}", lambda host: f"{host}:{how}")


@pytest.mark.parametrize("discovery", ["http", None])
@pytest_twisted.ensureDeferred
async def test_over_the_messaging_system(reactor, start, secret_of, discovery):
    key_file, _ = secret_of()
    async with LocalNetwork(reactor, relays=0, messaging_relays=2, discovery=discovery) as network:
        how = network.messaging_endpoint_arguments
        await chat(start, f"messaging:key={key_file}:{how}", lambda host: f"{host}:{how}")


class Silent(Protocol):
    """Says nothing; its factory's ``met`` fires with the first connection."""

    def connectionMade(self):
        if not self.factory.met.called:
            self.factory.met.callback(None)


@pytest.mark.parametrize("scheme", ["dmsg", "messaging"])
@pytest_twisted.ensureDeferred
async def test_a_server_that_is_interrupted_while_no_relay_answers_just_ends(reactor, start, secret_of, scheme):
    key_file, _ = secret_of()
    factory = Factory.forProtocol(Silent)
    factory.met = Deferred()
    port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(factory)
    try:
        relay = f"{SecretKey.generate().public_key}@127.0.0.1\\:{port.getHost().port}"
        server = start("chat_server.py", f"{scheme}:key={key_file}:server={relay}")
        await factory.met
        server.kill(signal.SIGINT)
        assert await server.ended() == 0
        assert server.output == ""
    finally:
        await port.stopListening()
