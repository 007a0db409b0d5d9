"""A discovery's HTTP server with arbitrary requests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import ClientPart, Entry, ServerPart, is_available
from dmsg.discovery.errors import BadInput, DiscoveryError, EntryNotFound, NoVersion, Unauthorized
from dmsg.discovery.limits import DiscoveryLimits
from fuzz import words
from fuzz.choices import Choices
from fuzz.memory_http import Complaints, Transport
from fuzz.oracles import KEYS

DICTIONARY = (*words.HTTP, *words.ENTRY)

_OWNER = KEYS[1]
_LIMITS = DiscoveryLimits.unlimited_rates()
#: First byte for several requests, which are made of the rest.
_CONVERSATION = 0xFF
_OWNERS = KEYS[1:4]
#: Paths of entries, and which status of an error they answer with.
_FAMILIES = (
    ("discovery/entries", "status"),
    ("messaging-discovery/entry", "reference_status"),
    ("dmsg-discovery/entry", "reference_status"),
)


def one_input(data: bytes) -> None:
    """The first byte says how the rest, the bytes of a client, is cut.

    Nothing is logged as an error, answers begin as HTTP does, a body over the limit is not kept, and nothing of a
    connection is left after its end.
    """
    from dmsg.discovery.api import make_site

    choices = Choices(data)
    how = choices.byte()
    if how == _CONVERSATION:
        _converse(choices)
        return
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
    """A discovery with one entry, made once because its routes take milliseconds. Later posts are the owner's next entries."""
    from dmsg.discovery.api import DiscoveryApi
    from dmsg.discovery.stores.memory import MemoryStore

    store = MemoryStore()
    store.put(_entry(0), 10**18)
    return DiscoveryApi(store, clock_ns=lambda: 10**18, random=random.Random(1), limits=_LIMITS).resource()


def _entry(sequence: int) -> Entry:
    server = ServerPart("192.0.2.1:80", 9)
    return Entry("0.1.0", sequence, 10**18 + sequence, _OWNER.public_key, ClientPart(()), server).sign(_OWNER)


def _converse(choices: Choices) -> None:
    """Requests of one connection, and the answer that a second store, with the same entries, gives to each."""
    from dmsg.discovery.api import DiscoveryApi, make_site
    from dmsg.discovery.stores.memory import MemoryStore

    clock, now_ns = Clock(), 10**18
    model = MemoryStore()
    limits = replace(_LIMITS, pending_writes=1)
    api = DiscoveryApi(MemoryStore(), clock_ns=lambda: now_ns, random=random.Random(1), limits=limits)
    site: Any = make_site(api.resource(), reactor=clock, limits=limits)
    site.startFactory()
    transport = Transport()
    channel = site.buildProtocol(transport.getPeer())
    channel.makeConnection(transport)

    def ask(line: str, body: bytes = b"", *, chunked: bool = False) -> tuple[int, dict[bytes, bytes], bytes]:
        length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
        sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
        transport.clear()
        for piece in choices.pieces(b"%s HTTP/1.1\r\nHost: a\r\n%s\r\n\r\n%s" % (line.encode(), length, sent)):
            if not transport.disconnecting:
                channel.dataReceived(piece)
        clock.advance(0)
        return _answer(transport.value(), line.startswith("HEAD"))

    with Complaints() as complaints:
        for _ in range(24):
            if not choices.left or transport.disconnecting:
                break
            path, status_of = choices.pick(_FAMILIES)
            owner = choices.pick(_OWNERS)
            match choices.below(8):
                case 0 | 1 | 2:
                    entry, wrong = _made(choices, owner)
                    if choices.flag():
                        entry = entry.ljust(_LIMITS.body_bytes)
                    status, _, body = ask(f"POST /{path}/", entry, chunked=choices.flag())
                    if wrong is None:
                        outcome = _outcome(model.put(Entry.parse(entry), now_ns, "192.0.2.1"))
                        wrong = None if isinstance(outcome, bool) else outcome
                        text = ("wrote new entry iteration", "wrote a new entry")[outcome is True]
                    expected = (200, text) if wrong is None else (getattr(wrong, status_of), wrong.text)
                    assert json.loads(body) == {"message": expected[1], "code": expected[0]} and status == expected[0]
                case 3 | 4:
                    status, headers, body = ask(f"GET /{path}/{owner.public_key}")
                    outcome = _outcome(model.get_json(owner.public_key, now_ns))
                    if isinstance(outcome, bytes):
                        assert (status, body) == (200, outcome)
                    else:
                        assert status == getattr(outcome, status_of) and json.loads(body)["message"] == outcome.text
                        hints = (outcome.next_sequence, outcome.after_timestamp)
                        named = (b"dmsg-next-sequence", b"dmsg-after-timestamp")
                        assert [headers.get(name) for name in named] == [hint and b"%d" % hint for hint in hints]
                case 5:
                    now_ns += 10**9 * (1 + choices.byte()) ** 2  # what was asked for is remembered for a second
                    clock.advance(1)
                case 6:
                    _list(ask, path, owner.public_key, model, now_ns)
                case 7 if choices.flag():
                    line = f"GET /{path}/{owner.public_key} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
                    number = 2 + choices.below(3)
                    transport.clear()
                    for piece in choices.pieces(line * number):
                        channel.dataReceived(piece)
                    for _ in range(number):
                        clock.advance(0)
                    answers = transport.value()
                    size = len(answers) // number
                    bodies = {_answer(answers[at : at + size], False)[2] for at in range(0, len(answers), size)}
                    assert bodies == {ask(f"GET /{path}/{owner.public_key}")[2]}
                case _:
                    _ask_badly(choices, ask, path, str(owner.public_key))
        channel.connectionLost(Failure(ConnectionDone()))
        clock.advance(61)
        site.stopFactory()
    assert not complaints.found, complaints.found[0]
    assert site.bodies == 0 and site.connections == 0


def _answer(data: bytes, headless: bool) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of one answer, which is all that was sent."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    assert int(headers[b"content-length"]) == len(body) or (headless and not body), data[:200]
    return int(first.split()[1]), headers, body


def _outcome(done: Any) -> Any:
    """A store's answer, or its error."""
    results: list[Any] = []
    done.addBoth(results.append)
    return getattr(results[0], "value", results[0])


def _made(choices: Choices, owner: Any) -> tuple[bytes, type[DiscoveryError] | None]:
    """The JSON of an entry, and what is wrong with it whatever the store has."""
    version, kind = choices.byte(), choices.byte()
    server = ServerPart(f"192.0.{kind >> 4}.1:80", kind >> 3 & 1) if kind & 4 else None
    timestamp = 10**18 + (version >> 4)
    entry = Entry("0.1.0", version & 15, timestamp, owner.public_key, ClientPart(()), server).sign(owner)
    match choices.below(8):
        case 0:
            return replace(entry, timestamp=timestamp + 1).to_json(), Unauthorized
        case 1:
            return replace(entry, version="").to_json(), NoVersion
        case 2:
            return entry.to_json()[:-1], BadInput
        case 3 if server is not None:
            return replace(entry, server=replace(server, address="192.0.2.1")).sign(owner).to_json(), BadInput
        case _:
            return entry.to_json(), None


def _list(ask: Any, path: str, key: PublicKey, model: Any, now_ns: int) -> None:
    """A list has entries as they are or were a moment ago, all of relays with room."""
    status, _, body = ask(f"GET /{path.partition('/')[0]}/available_servers")
    if status == 404:
        assert json.loads(body)["message"] == EntryNotFound.text and "messaging" not in path
        return
    assert status == 200
    listed = [Entry.from_object(value) for value in json.loads(body)]
    assert len({entry.static for entry in listed}) == len(listed) <= len(_OWNERS)
    for entry in listed:
        entry.verify()
        assert is_available(entry)
    outcome = _outcome(model.get_json(key, now_ns))
    for entry in listed:
        assert entry.static != key or not isinstance(outcome, bytes) or entry.sequence <= Entry.parse(outcome).sequence


def _ask_badly(choices: Choices, ask: Any, path: str, key: str) -> None:
    """Each invalid request gets its kind of error."""
    match choices.below(6):
        case 0:
            assert ask(f"GET /{path}/{key[:-1]}")[0] == 400
        case 1:
            assert ask(f"GET /{path}s/{key}")[0] == 404
        case 2:
            assert ask(f"DELETE /{path}/{key}")[0] == 405
        case 3:
            assert ask(f"HEAD /{path}/{key}")[2] == b""
        case 4:
            assert ask(f"POST /{path}/", bytes(_LIMITS.body_bytes), chunked=choices.flag())[0] == 400
        case _:
            assert ask(f"POST /{path}/", bytes(_LIMITS.body_bytes + 1), chunked=choices.flag())[0] == 413


def seeds() -> Iterator[bytes]:
    """Requests of each path family, several on a connection, bodies of each kind, too long ones, broken ones."""
    key, body = _OWNER.public_key, _entry(1).to_json()
    head = b"POST /dmsg-discovery/entry/ HTTP/1.1\r\nHost: a\r\n"
    for request in (
        f"GET /messaging-discovery/entry/{key} HTTP/1.1\r\nHost: a\r\n\r\n".encode(),
        f"GET /discovery/entries/{key} HTTP/1.0\r\n\r\n".encode(),
        b"GET /dmsg-discovery/available_servers HTTP/1.1\r\nHost: a\r\n\r\n" * 2,
        b'GET /discovery/relay_ranks HTTP/1.1\r\nIf-None-Match: "a"\r\n\r\n',
        head + b"Content-Length: %d\r\n\r\n" % len(body) + body,
        head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
        head + b"Content-Length: 99999\r\n\r\n",
        head + b"Content-Length: -1\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n",
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

    def post(family: int, owner: int, version: int, kind: int, fault: int = 7) -> bytes:
        return bytes((family, owner, 0, version, kind, fault, kind >> 2, 0, 0))

    begin = bytes((_CONVERSATION,))
    gets = b"".join(bytes((family, owner, 3, 0)) for family in range(3) for owner in range(3))
    lists = b"".join(bytes((family, 0, 6, 0)) for family in range(3))
    later, much_later = b"\x00\x00\x05\x02", b"\x00\x00\x05\xff"
    for family in range(3):
        posts = [post(family, 0, version, 0) for version in (0, 0x11, 0x11)]
        yield begin + gets[:12] + gets[:12].join(posts)
        yield begin + post(family, 1, 0, 12) + lists + gets[:12] + later + post(family, 2, 0, 28) + later + gets + lists
        posts = [post(family, 1, version, 12) for version in (0, 0x12, 1)]
        yield begin + b"".join(posts) + much_later + gets + lists
        yield begin + b"".join(post(family, 0, 0, 12, fault) for fault in range(4)) + gets
        for bad in range(6):
            yield begin + bytes((family, 0, 7, 0, bad, 0, 0)) + gets[:8]
            yield begin + bytes((family, 0, 7, 0, bad, 1, 9)) + gets[:8]
        for cut in (0, 70, 15, 1):
            row = bytes((family, 0, 7, 1, 2, cut, cut))
            yield begin + row + later + post(family, 0, 0, 0) + row * 2 + gets[:4]
