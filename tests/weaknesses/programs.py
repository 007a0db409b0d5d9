"""Programs that tests start in processes of their own, because they are to be killed or starved."""

from __future__ import annotations

import resource
import sys
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.protocol import Factory, Protocol

from dmsg.address import PinnedServer
from dmsg.crypto.keys import SecretKey
from dmsg.mux.client.service import DmsgClient
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.relay.service import DmsgRelay


def say(text: object) -> None:
    print(text, flush=True)


class Echo(Protocol):
    def dataReceived(self, data: bytes) -> None:
        self.transport.write(data)


async def server(descriptors: str) -> None:
    """Serve with at most so many descriptors; says ``pk@host:port``."""
    key = SecretKey.generate()
    relay = DmsgRelay(reactor, key, TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1"))
    relay.startService()
    port = (await relay.listening()).getHost().port
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors), int(descriptors)))
    say(f"{key.public_key}@127.0.0.1:{port}")


async def echo(pinned: str) -> None:
    """Listen through a server and echo; says its key."""
    client = DmsgClient(reactor, SecretKey.generate(), servers=[PinnedServer.parse(pinned)], security=Security.HOP)
    client.listen(Factory.forProtocol(Echo))
    client.startService()
    await client.when_ready()
    say(client.public_key)


def failed(failure: Any) -> None:
    failure.printTraceback()
    reactor.stop()


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    reactor.callWhenRunning(
        lambda: Deferred.fromCoroutine({"server": server, "echo": echo}[role](*arguments)).addErrback(failed)
    )
    reactor.run()
