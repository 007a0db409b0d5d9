"""A discovery's HTTP side that is sent anything."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from dmsg.discovery.entry import ClientPart, Entry, ServerPart
from dmsg.discovery.limits import DiscoveryLimits
from fuzz import words
from fuzz.choices import Choices
from fuzz.memory_http import Complaints, Transport
from fuzz.oracles import KEYS

DICTIONARY = (*words.HTTP, *words.ENTRY)

_OWNER = KEYS[1]
_LIMITS = DiscoveryLimits.unlimited_rates()


def one_input(data: bytes) -> None:
    """The first byte says how the rest, which is what a client sends, is cut.

    Nothing is logged as an error, what is answered begins as HTTP does, a body over the limit is not kept, and when the
    connection is over nothing of it is left.
    """
    from dmsg.discovery.api import make_site

    choices = Choices(data)
    how = choices.byte()
    clock = Clock()
    site: Any = make_site(_resource(), reactor=clock, limits=_LIMITS)
    site.startFactory()
    transport = Transport()
    channel = site.buildProtocol(transport.getPeer())
    with Complaints() as complaints:
        channel.makeConnection(transport)
        stream = choices.rest()
        cut = 1 + how * how if how else len(stream) or 1
        for at in range(0, len(stream), cut):
            if transport.disconnecting:
                break
            channel.dataReceived(stream[at : at + cut])
            assert site.bodies <= 1
        clock.advance(0)
        answer = transport.value()
        assert not answer or answer.startswith(b"HTTP/1."), answer[:80]
        clock.advance(61)
        channel.connectionLost(Failure(ConnectionDone()))
        site.stopFactory()
    assert not complaints.found, complaints.found[0]
    assert site.bodies == 0 and site.connections == 0
    assert not [call for call in clock.getDelayedCalls() if call.active()]


@cache
def _resource() -> Any:
    """A discovery with one entry, made once: its routes take milliseconds. What else is posted are the owner's next entries."""
    from dmsg.discovery.api import DiscoveryApi
    from dmsg.discovery.stores.memory import MemoryStore

    store = MemoryStore()
    store.put(_entry(0), 10**18)
    return DiscoveryApi(store, clock_ns=lambda: 10**18, random=random.Random(1), limits=_LIMITS).resource()


def _entry(sequence: int) -> Entry:
    server = ServerPart("192.0.2.1:80", 9)
    return Entry("0.1.0", sequence, 10**18 + sequence, _OWNER.public_key, ClientPart(()), server).sign(_OWNER)


def seeds() -> Iterator[bytes]:
    """Requests of each path family, several on a connection, bodies of each kind, too long ones, broken ones."""
    key, body = _OWNER.public_key, _entry(1).to_json()
    post = b"POST /dmsg-discovery/entry/ HTTP/1.1\r\nHost: a\r\n"
    for request in (
        f"GET /messaging-discovery/entry/{key} HTTP/1.1\r\nHost: a\r\n\r\n".encode(),
        f"GET /discovery/entries/{key} HTTP/1.0\r\n\r\n".encode(),
        b"GET /dmsg-discovery/available_servers HTTP/1.1\r\nHost: a\r\n\r\n" * 2,
        b'GET /discovery/relay_ranks HTTP/1.1\r\nIf-None-Match: "a"\r\n\r\n',
        post + b"Content-Length: %d\r\n\r\n" % len(body) + body,
        post + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
        post + b"Content-Length: 99999\r\n\r\n",
        post + b"Content-Length: -1\r\n\r\n",
        post + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n",
        b"HEAD / HTTP/1.1\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\n\r\n",
        b"GET /%00%ff/../.. HTTP/1.1\r\nA: b\r\n c\r\n\r\n",
        b"GET http://[::1/ HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"A" * 9_000,
    ):
        yield b"\x00" + request
        yield b"\x02" + request
