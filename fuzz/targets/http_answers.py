"""A discovery client whose server answers anything: entries, lists of servers, ranks, refusals."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from dmsg.discovery.client import LIST_LIMIT, RANKS_REFRESH_S, RANKS_RETRY_S, HttpDiscovery
from dmsg.discovery.entry import ClientPart, Entry, ServerPart
from dmsg.discovery.errors import DISCOVERY_ERRORS, DiscoveryError, EntryNotFound, EntryRolledBack, Unauthorized
from dmsg.discovery.ranks import KIND, Ranks
from fuzz import words
from fuzz.choices import Choices
from fuzz.memory_http import HostileAgent
from fuzz.oracles import KEYS
from fuzz.signing import ISSUER, NOW_S, signed

DICTIONARY = (*words.HTTP, *words.ENTRY)

_OWNER = KEYS[1]
_CUTS = (1 << 20, 1, 7, 100)
#: First byte for several calls, whose answers are made of the rest.
_CONVERSATION = 0xFF
_OWNERS = KEYS[1:5]
_PINNED = 2


def one_input(data: bytes) -> None:
    """The first byte chooses the call and how the answer is cut; the rest is what the server sends, head included.

    A call ends within its time with a value that was checked or a ``DiscoveryError``, and leaves no timer behind.
    """
    choices = Choices(data)
    how = choices.byte()
    if how == _CONVERSATION:
        _converse(choices)
        return
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


class _Model:
    """The expected results for good, old, forged and other answers."""

    def __init__(self) -> None:
        #: The newest of the last keys that were asked for, and of all keys that were listed: there are few.
        self.pins: OrderedDict[Any, tuple[int, int]] = OrderedDict()
        self.listed: dict[Any, tuple[int, int]] = {}
        self.ranks: Any = None
        self.tag = b""
        self.due_s = -1.0

    def takes(self, made: _Made, *, is_listed: bool) -> str:
        """The fault of an entry by its signature and age, or ""."""
        if not made.good:
            return "forged"
        key, version = made.owner.public_key, (made.timestamp, made.sequence)
        if version < max(self.pins.get(key, version), self.listed.get(key, version)):
            return "old"
        if is_listed:
            self.listed[key] = version
            return ""
        self.pins[key] = version
        self.pins.move_to_end(key)
        if len(self.pins) > _PINNED:
            self.pins.popitem(last=False)
        return ""


class _Made(NamedTuple):
    """An entry of an answer."""

    owner: Any
    timestamp: int
    sequence: int
    is_server: bool
    protocol: str
    good: bool

    @classmethod
    def of(cls, choices: Choices) -> _Made:
        owner, age, kind = choices.pick(_OWNERS), choices.byte(), choices.byte()
        return cls(owner, age & 3, age >> 2 & 3, not kind & 1, ("", "+messaging")[kind >> 1 & 1], kind & 12 != 12)

    def entry(self) -> Entry:
        """As JSON has it, with its signature."""
        return _entry(self)


@cache
def _entry(made: _Made) -> Entry:
    key = made.owner.public_key
    halves: tuple[Any, Any] = (None, ServerPart("192.0.2.1:80", 9)) if made.is_server else (ClientPart((key,)), None)
    entry = Entry(f"0.1.0{made.protocol if made.is_server else ''}", made.sequence, made.timestamp, key, *halves)
    signed_entry = entry.sign(made.owner)
    return signed_entry if made.good else replace(signed_entry, timestamp=made.timestamp + 9)


def _answer(status: int, body: bytes, *headers: bytes) -> bytes:
    lines = b"".join(line + b"\r\n" for line in headers)
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n%s\r\n%s" % (status, len(body), lines, body)


def _converse(choices: Choices) -> None:
    """Several calls on one client: entries and lists, which it caches, refusals, ranks; checks each result."""
    clock = Clock()
    hostile = HostileAgent(clock)
    discovery = HttpDiscovery(
        "http://discovery.example",
        hostile.agent,
        clock,
        ranks_keys=[ISSUER.public_key],
        now_s=lambda: NOW_S,
        pinned_keys=_PINNED,
    )
    model = _Model()

    def ask(call: Any, answer: bytes) -> tuple[Any, bytes]:
        """The result of a call whose answer comes in pieces, and the request; no request if there was none."""
        results: list[Any] = []
        asked = len(hostile.connections)
        Deferred.fromCoroutine(call).addBoth(results.append)
        request = b""
        if len(hostile.connections) > asked:
            protocol, transport = hostile.connections[-1]
            request = transport.value()
            cut = choices.pick(_CUTS)
            for at in range(0, len(answer), cut):
                protocol.dataReceived(answer[at : at + cut])
            for _ in range(12):
                clock.advance(0)
        assert len(results) == 1
        return getattr(results[0], "value", results[0]), request

    for _ in range(24):
        if not choices.left:
            break
        match choices.below(5):
            case 0 | 1:
                _get(choices, discovery, model, ask)
            case 2:
                made = [_Made.of(choices) for _ in range(choices.below(6))]
                body = b"[%s]" % b",".join(one.entry().to_json() for one in made)
                protocol = ("dmsg", "messaging")[choices.below(2)]
                result, request = ask(discovery.available_servers(protocol), _answer(200, body))
                good = [one for one in made if one.good and one.is_server and not model.takes(one, is_listed=True)]
                assert result == [one.entry() for one in good if one.entry().protocol == protocol]
                assert b"protocol=" + protocol.encode() + b" " in request
            case 3:
                _rank(choices, discovery, model, ask, clock)
            case _:
                clock.advance(choices.byte() * 8)
    hostile.end()
    assert not clock.getDelayedCalls()


def _get(choices: Choices, discovery: HttpDiscovery, model: _Model, ask: Any) -> None:
    key = choices.pick(_OWNERS).public_key
    if choices.below(4) == 3:
        text = choices.pick(sorted(DISCOVERY_ERRORS))
        hint = choices.pick((b"7", b"-1", b"", b"x", b"9" * 30))
        body = json.dumps({"message": text, "code": 404}).encode()
        answer = _answer(choices.pick((404, 500, 401)), body, b"Dmsg-Next-Sequence: " + hint)
        result, _ = ask(discovery.get_entry(key), answer)
        assert type(result) is DISCOVERY_ERRORS[text]
        if isinstance(result, EntryNotFound):
            assert result.next_sequence == {b"7": 7, b"-1": -1}.get(hint) and result.after_timestamp is None
        return
    made = _Made.of(choices)
    result, request = ask(discovery.get_entry(key), _answer(200, made.entry().to_json()))
    assert request.startswith(b"GET /messaging-discovery/entry/%s HTTP/1.1\r\n" % str(key).encode())
    if made.owner.public_key != key:
        assert isinstance(result, Unauthorized)
    elif problem := model.takes(made, is_listed=False):
        assert type(result) is {"forged": Unauthorized, "old": EntryRolledBack}[problem]
    else:
        assert result == made.entry()


def _rank(choices: Choices, discovery: HttpDiscovery, model: _Model, ask: Any, clock: Clock) -> None:
    kind, number = choices.below(4), choices.below(4)
    tag = choices.pick((b'"one"', b'"two"', b"", b"x" * 300))
    body = _ranks(number)
    if kind == 3:
        body = body.replace(b'"signature":"', b'"signature":"00')
    status = (200, 200, 304, 200)[kind]
    result, request = ask(discovery.relay_ranks(), _answer(status, b"" if status == 304 else body, b"ETag: " + tag))
    now = clock.seconds()
    assert bool(request) is (now >= model.due_s)
    if request:
        assert (b"If-None-Match: %s\r\n" % model.tag in request) if model.tag else b"If-None-Match" not in request
        issued = NOW_S - 100 + number
        is_good = kind == 2 or (kind < 2 and (model.ranks is None or issued >= model.ranks.issued))
        model.due_s = now + (RANKS_REFRESH_S if is_good else RANKS_RETRY_S)
        if is_good and kind < 2:
            assert isinstance(result, Ranks) and result.issued == issued
            model.ranks, model.tag = result, tag if len(tag) < 200 else b""
    assert result is model.ranks


@cache
def _ranks(number: int) -> bytes:
    document = {"issued": NOW_S - 100 + number, "lifetime_s": 9_999, "window_s": 9, "relays": {}}
    document["excluded"] = {"clients": 0, "events": 0}
    made = signed(KIND, json.dumps(document).encode())
    assert made is not None
    return made


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
    begin = bytes((_CONVERSATION,))
    good = [b"\x00\x00\x00\x00" + age + b"\x00\x00" for age in (b"\x05", b"\x00", b"\x06", b"\x01", b"\x09", b"\x05")]
    yield begin + b"".join(good)
    yield begin + b"".join(b"\x00" + bytes((at, 0, at, age, 0, 0)) for age in (5, 0) for at in (0, 1, 2, 3, 0))
    yield begin + b"".join(b"\x00\x00\x03" + bytes((text, hint, text, 0)) for text in range(24) for hint in (0, 1, 4))
    yield begin + b"\x00\x00\x00\x01\x05\x00\x00" + b"\x00\x00\x00\x00\x05\x0c\x00" + b"\x00\x00\x00\x00\x05\x00\x03"
    one_list = b"".join(bytes((owner, 5, kind)) for owner, kind in ((0, 0), (1, 1), (2, 2), (3, 12), (1, 0)))
    old_list = b"".join(bytes((owner, age, 0)) for owner, age in ((0, 0), (2, 0), (1, 5), (1, 1), (3, 0)))
    for protocol in (b"\x00", b"\x01"):
        yield begin + (b"\x02\x05" + one_list + protocol + b"\x02" + b"\x02\x05" + old_list + protocol + b"\x00") * 2
    calls = [
        b"\x03" + one for one in (b"\x00\x01\x00\x00", b"\x02\x00\x00\x00", b"\x00\x00\x01\x00", b"\x00\x02\x03\x00")
    ]
    later = b"\x04\xff" * 3
    yield begin + later.join([*calls, *calls, b"\x03\x03\x03\x00\x00", *calls[:2]])
    yield begin + b"\x04\x08".join([b"\x03\x03\x03\x00\x00", *calls] * 4)
    yield b"\x01HTTP/1.1 302 Found\r\nLocation: http://other.example/\r\n\r\n"
