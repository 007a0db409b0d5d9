"""A discovery's client whose server answers with anything: entries, lists of servers, ranks, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from dmsg.discovery.client import LIST_LIMIT, HttpDiscovery
from dmsg.discovery.entry import ClientPart, Entry, ServerPart
from dmsg.discovery.errors import DISCOVERY_ERRORS, DiscoveryError
from dmsg.discovery.ranks import KIND, Ranks
from fuzz import words
from fuzz.choices import Choices
from fuzz.memory_http import HostileAgent
from fuzz.oracles import KEYS
from fuzz.signing import ISSUER, NOW_S, signed

DICTIONARY = (*words.HTTP, *words.ENTRY)

_OWNER = KEYS[1]
_CUTS = (1 << 20, 1, 7, 100)


def one_input(data: bytes) -> None:
    """The first byte says what is asked for and how the answer is cut; the rest is what the server sends, head included.

    A call ends within its time with a value that was checked or a ``DiscoveryError``, and leaves no timer behind.
    """
    choices = Choices(data)
    how = choices.byte()
    clock = Clock()
    hostile = HostileAgent(clock)
    discovery = HttpDiscovery(
        "http://discovery.example", hostile.agent, clock, ranks_keys=[ISSUER.public_key], now_s=lambda: NOW_S
    )
    call = (
        lambda: discovery.get_entry(_OWNER.public_key),
        discovery.available_servers,
        discovery.relay_ranks,
    )[how % 3]
    results: list[Any] = []
    running: Deferred[Any] = Deferred.fromCoroutine(call())
    running.addBoth(results.append)
    cut = _CUTS[how // 3 % 4]
    answer = choices.rest()
    if how & 0x80:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer)
    for at in range(0, len(answer), cut):
        protocol, transport = hostile.connections[0]
        if transport.disconnecting:
            break
        protocol.dataReceived(answer[at : at + cut])
    for _ in range(70):  # a list is worked on in slices
        clock.advance(0)
    if how & 0x40:
        hostile.end()
    clock.advance(30)
    assert len(results) == 1
    _check(results[0])
    if not how & 0x40:
        hostile.end()
    assert not clock.getDelayedCalls()


def _check(result: Any) -> None:
    if hasattr(result, "value"):
        if not isinstance(result.value, DiscoveryError):
            result.raiseException()
    elif isinstance(result, Entry):
        assert result.static == _OWNER.public_key
        result.verify()
    elif isinstance(result, list):
        assert len(result) <= LIST_LIMIT
        for entry in result:
            entry.verify()
            assert entry.server is not None
    else:
        assert result is None or (isinstance(result, Ranks) and result.issuer == ISSUER.public_key)


def seeds() -> Iterator[bytes]:
    """Good answers to each call, chunked and encoded ones, refusals, heads without end."""
    key = _OWNER.public_key
    entry = Entry("0.1.0", 0, 1, key, ClientPart((key,)), ServerPart("192.0.2.1:80", 9)).sign(_OWNER).to_json()
    document = {"issued": NOW_S, "lifetime_s": 9, "window_s": 9, "relays": {}, "excluded": {"clients": 0, "events": 0}}
    ranks = signed(KIND, json.dumps(document).encode()) or b""
    for what, body in ((0, entry), (1, b"[" + entry + b"," + entry.replace(b"80", b"81") + b"]"), (2, ranks)):
        yield bytes((0x81 + what,)) + body  # 0x81 is a multiple of 3
        for cut in (0, 3, 6):
            yield bytes((what + cut,)) + b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        chunks = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        yield bytes((what,)) + chunks
        yield bytes((what,)) + b"HTTP/1.1 200 OK\r\n\r\n" + body
    for text in DISCOVERY_ERRORS:
        body = json.dumps({"message": text, "code": 404}).encode()
        yield b"\x00HTTP/1.1 404 Not Found\r\nDmsg-Next-Sequence: 7\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    yield b"\x00HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"
    yield b"\x02HTTP/1.1 304 Not Modified\r\n\r\n"
    yield b"\x40HTTP/1.1 100 Continue\r\n\r\n" * 18
    yield b"\x01HTTP/1.1 302 Found\r\nLocation: http://other.example/\r\n\r\n"
